"""ServerApp of `flwr run .`, which writes the results folder itself.

A cell is one run of a scenario: a sweep point and a seed.
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
    """Make a results folder for the one cell that a user's run configuration names.

    Args:
        run_config: Flower's run configuration.  The keys `scenario` (file or name), `set` (overrides) and `cell`
            (its number over all sweep points and seeds, from 0) name the cell.  The key `out` names the folder, a
            new one in runs/ if it is empty.  A `run-token` that is not empty marks a deployment.

    Returns:
        Observer of the run, which writes its results into the folder.

    Raises:
        InputError: The scenario cannot be used or has no such cell, no noise can be fitted to the cell, or the
            folder holds results or cannot be read.
        OSError: The folder cannot be written.
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
