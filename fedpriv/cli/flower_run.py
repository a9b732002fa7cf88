"""The ServerApp of `flwr run .`, which writes the results folder itself, since no engine follows it.

Engines submit `fedpriv.server.app:app`, with the same rounds.  A file of its own, because it imports Flower.
"""

import json
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpriv.claims.outcome import RunObserver
from fedpriv.plan.calibration import fit_scenario_noise
from fedpriv.protocol.cell_folder import scenario_from_run_config
from fedpriv.server.app import make_server_app
from fedpriv.study.results import RunFolder
from fedpriv.study.sweep import find_free_folder


def open_run_folder(run_config: Mapping[str, Any]) -> RunObserver:
    """Make a RUN_DIR for the one cell that a person's run configuration names.

    `out` is the folder; empty, it is runs/NAME or the next that is free.  InputError for a configuration that
    names no cell, and for a folder that holds results.
    """
    scenario, fits = fit_scenario_noise(scenario_from_run_config(run_config), {})
    path = Path(str(run_config["out"])) if run_config["out"] else find_free_folder(scenario.name)
    engine = "deployment" if run_config["run-token"] else "flwr run"
    keys = " ".join(f"{key}={json.dumps(run_config[key])}" for key in ("scenario", "set", "cell"))
    rerun = shlex.join(["flwr", "run", ".", "--run-config", keys])
    folder = RunFolder(path, scenario, engine, resume=False, rerun=rerun, fits=fits)
    logging.getLogger("flwr").info("fedpriv: results in %s", path.resolve())
    return folder


app = make_server_app(open_run_folder)
