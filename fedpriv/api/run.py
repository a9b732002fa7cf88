"""`fedpriv.run` and `fedpriv.load`."""

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedpriv.api.own import ENGINES, Given, with_own
from fedpriv.api.results import RunResults, results_of
from fedpriv.cli.progress import Progress
from fedpriv.engines.workers import Workers
from fedpriv.errors import InputError
from fedpriv.reports.table import write_table
from fedpriv.running.observer import RunObserver
from fedpriv.scenario.load import load_scenario, read_toml, scenario_of
from fedpriv.shipped import scenario_file
from fedpriv.sweep.runner import rerun_command, run_sweep


def run(
    scenario: str | Path | Mapping[str, Any],
    *,
    train: Given | None = None,
    test: Given | None = None,
    model: nn.Module | None = None,
    classes: int | None = None,
    loss: str = "squared",
    set: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the command's option
    engine: str = "vectorized",
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[RunObserver] = (),
    progress: bool | None = None,
    workers: int | None = None,
    ray: str | None = None,
) -> RunResults:
    """Run every cell of a scenario, as `fedpriv run` does, and return what it gave.

    Args:
        scenario: the name of a shipped scenario, a file, or the same as nested dictionaries.
        train: records of your own in place of the scenario's: (records, labels) as arrays or tensors, or a torch
            Dataset of such pairs.  Records are (n, …), bytes or numbers; labels (n,) are whole numbers, or numbers
            for a regression.
        test: the same, to evaluate on.
        model: a torch module in place of the scenario's model; x_1 are the parameters that it has.  It maps
            (n, …) to (n, classes), or to (n, 1) for a regression.  The module itself is not changed.
        classes: how many classes there are, 0 for a regression; by default one more than the largest label.
        loss: of a module's regression, "squared" or "absolute".
        set: values for dotted keys; a swept key is narrowed.
        engine: "vectorized", "inprocess", "ray" or "deployment"; your own records and modules need the first two.
        out: where results are written as the run goes; runs/NAME by default.
        resume: keep what is in `out`, and run what is missing, seeds that are new in the scenario among it.
        observers: hear how the run goes.
        progress: show a bar; by default in a notebook and in an interactive session.
        workers: so many processes of this machine run groups of cells; results are the same.
        ray: the address of a Ray cluster whose processes do.

    Raises:
        InputError: names the key that cannot be used, or what is wrong with records or module.
        RunError: says why a run could not be finished.
    """
    overrides = [_assignment(key, value) for key, value in (set or {}).items()]
    rerun = None
    own = train is not None or test is not None or model is not None
    if own and engine not in ENGINES:
        raise InputError(
            f"engine = {engine!r}: its processes have no arrays and modules of this program; use "
            f"{' or '.join(map(repr, ENGINES))}, or fedpriv.add_data and add_model in a file that is imported"
        )
    chosen = None if workers is None and ray is None else Workers(workers, ray)
    if own and chosen is not None:
        raise InputError(
            "workers, ray: other processes have no arrays and modules of this program; use fedpriv.add_data and "
            "add_model in a file that is imported"
        )
    if own or isinstance(scenario, Mapping):
        given = scenario if isinstance(scenario, Mapping) else read_toml(scenario_file(Path(scenario)))
        source = "scenario" if isinstance(scenario, Mapping) else str(scenario)
        loaded = scenario_of(with_own(given, train, test, model, classes, loss), source, overrides)
    else:
        loaded = load_scenario(Path(scenario), overrides)
        rerun = rerun_command(str(scenario), engine, overrides)
    heard = list(observers)
    if _interactive() if progress is None else progress:
        heard.append(Progress(quiet=False))
    target = None if out is None else Path(out)
    folder = run_sweep(loaded, engine, target, resume=resume, rerun=rerun, observers=heard, workers=chosen)
    write_table(folder)
    return results_of(folder, None if model is None else copy.deepcopy(model))


def load(folder: str | Path) -> RunResults:
    """Read what a run left in its folder; InputError if there is none."""
    return results_of(Path(folder))


def _interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _assignment(key: str, value: Any) -> str:
    """KEY=VALUE as `--set` takes it: JSON of numbers, texts, truth values and lists is TOML."""
    try:
        if isinstance(value, Mapping):
            raise TypeError("a table of keys is no single value")
        return f"{key}={json.dumps(value, ensure_ascii=False, allow_nan=False)}"
    except (TypeError, ValueError):
        raise InputError(f"set: {key} = {value!r}: expected a number, a text, true or false, or a list") from None
