"""The real ServerApp, strategy and ClientApp in one process: what is deployed, at speed."""

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedpriv.clients.app import app as client_app
from fedpriv.engines.base import Outcome
from fedpriv.engines.inprocess_grid import InProcessGrid
from fedpriv.engines.pages import kept_pages
from fedpriv.errors import InputError
from fedpriv.protocol.run_config import run_config_of
from fedpriv.running.observer import RunObserver
from fedpriv.running.outcome import Finished
from fedpriv.scenario import Cell
from fedpriv.server.app import server_app


class _OneCell(RunObserver):
    """What a server says of its one cell, passed on as of cell `index`; the result is kept to be handed back."""

    def __init__(self, index: int, observer: RunObserver) -> None:
        self.result: Finished | None = None
        self._index, self._observer = index, observer

    def advanced(self, rounds: int) -> None:
        self._observer.advanced(rounds)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self._observer.evaluated(self._index, t, metrics)

    def finished(self, place: int, finished: Finished) -> None:
        self.result = finished


def run_inprocess(cells: Sequence[Cell], observer: RunObserver) -> Iterator[Outcome]:
    """Run cells one after another over an in-process grid; see `Engine`."""
    for index, cell in enumerate(cells):
        refuse_vectorized_options(cell, "inprocess")
        one = _OneCell(index, observer)

        def observer_of(_: Mapping[str, Any], one: RunObserver = one) -> RunObserver:
            return one

        run_config = run_config_of(cell, Path())
        grid = InProcessGrid(client_app, cell.federation.silos, run_config)
        with flower_quiet(), _rare_garbage_collection(), kept_pages():
            server_app(observer_of)(grid, grid.server_context(run_config))
        assert one.result is not None
        yield Outcome(index, one.result)


@contextmanager
def flower_quiet() -> Iterator[None]:
    """Flower's loggers write to the terminal that shows our progress."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Messages make many containers and no cycles; looking for cycles after every 700 costs a tenth of a run."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def refuse_vectorized_options(cell: Cell, engine: str) -> None:
    """InputError for settings that only the vectorized engine can honour."""
    if cell.run.noise == "aggregate":
        raise InputError(f'run.noise = "aggregate": engine {engine} draws noise where it is added; use "per-silo"')
    if cell.run.device != "cpu":
        raise InputError(f'run.device = {cell.run.device!r}: engine {engine} computes on the CPU; use "cpu"')
