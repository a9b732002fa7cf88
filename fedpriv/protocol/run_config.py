"""The run configuration of `flwr run`: which cell of which scenario, as Flower's flat keys."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.running.fitted import fitted
from fedpriv.scenario import Cell, Scenario, load_scenario, resolve_cell


def run_config_of(cell: Cell, out: Path, run_token: str = "") -> dict[str, str | int]:
    """The keys an engine submits: the resolved cell itself, and the folder for what the server writes.

    A deployment's `run_token` is the run's identity in the ledgers of silos and server, resumed or not; a
    simulation has none.
    """
    return {
        "scenario": "",
        "set": "",
        "cell": 0,
        "cell-json": json.dumps(cell.canonical()),
        "out": str(out),
        "run-token": run_token,
    }


def cell_of(run_config: Mapping[str, Any]) -> Cell:
    """The cell that a run configuration names.

    `cell-json` holds a resolved cell; otherwise it is that of `scenario_of_run`.  Noise that is to be fitted is
    fitted here then, by server and clients alike.
    """
    if run_config["cell-json"]:
        return resolve_cell(json.loads(str(run_config["cell-json"])), "cell-json")
    return fitted(scenario_of_run(run_config).points[0].cell)


def scenario_of_run(run_config: Mapping[str, Any]) -> Scenario:
    """The scenario with one point that a person's run configuration names; InputError if there is no such.

    `scenario` is a path or the name of a shipped scenario, `set` overrides separated by spaces, `cell` the number
    of the sweep point, from 0.
    """
    path = Path(str(run_config["scenario"]))
    scenario = load_scenario(path, str(run_config["set"]).split())
    chosen = int(run_config["cell"])
    if not 0 <= chosen < len(scenario.points):
        raise InputError(f"cell = {chosen}: {path} has cells 0 … {len(scenario.points) - 1}")
    return scenario.alone(chosen)
