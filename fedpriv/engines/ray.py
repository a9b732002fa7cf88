"""Flower's own simulation engine: the same apps, every client message through a Ray actor."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedpriv.engines.base import Outcome
from fedpriv.engines.follow import follow
from fedpriv.engines.inprocess import refuse_vectorized_options
from fedpriv.engines.processes import refuse_root
from fedpriv.engines.superlink import SuperLink, simulating_superlink
from fedpriv.errors import InputError
from fedpriv.protocol.cell_folder import FolderReader
from fedpriv.protocol.run_config import run_config_of
from fedpriv.running.observer import RunObserver
from fedpriv.running.outcome import Finished
from fedpriv.scenario import Cell


def run_ray(cells: Sequence[Cell], observer: RunObserver) -> Iterator[Outcome]:
    """Run cells one after another on one SuperLink in simulation mode; see `Engine`."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("--engine ray: Ray is not installed here; pip install 'fedpriv[ray]'")
    refuse_root("--engine ray")
    with (
        tempfile.TemporaryDirectory(prefix="fedpriv-ray-") as folder,
        simulating_superlink(Path(folder)) as link,
    ):
        for index, cell in enumerate(cells):
            refuse_vectorized_options(cell, "ray")
            yield Outcome(index, _run_cell(link, index, cell, observer))


def _run_cell(link: SuperLink, index: int, cell: Cell, observer: RunObserver) -> Finished:
    assert link.home is not None
    out = link.home / f"cell-{index}"
    out.mkdir()
    simulation = {
        "num_supernodes": cell.federation.silos,
        "client_resources_num_cpus": 1,
        "init_args_num_cpus": os.cpu_count() or 1,
    }
    run = link.submit(run_config_of(cell, out), simulation)
    finished = follow(run, FolderReader(out), index, cell.schedule.rounds, observer)
    run.wait()  # Ray's own processes outlive a simulation that is cut off
    return finished
