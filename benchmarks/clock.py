"""Rounds per second of a cell on an engine, start-up not counted."""

import resource
import time

from fedpriv.claims.outcome import RunObserver
from fedpriv.engines.table import make_engine
from fedpriv.plan.task import load_task
from fedpriv.scenario.schema import Cell


class Clock(RunObserver):
    """An observer that times the rounds alone, from the first progress report to the last.

    The first report of an engine is of round 1, whose noise is drawn alone; so all draws of the rounds that are
    timed are in the time.
    """

    def __init__(self) -> None:
        self._first = self._last = (0.0, 0.0)
        self._rounds = 0

    def advanced(self, rounds: int) -> None:
        if not rounds:
            return
        now = time.perf_counter(), processor_seconds()
        if not self._first[0]:
            self._first = now
        else:
            self._rounds += rounds
        self._last = now

    @property
    def rounds_per_second(self) -> float:
        """ZeroDivisionError if there was one report only: the run was too short to be timed."""
        return self._rounds / (self._last[0] - self._first[0])

    @property
    def processor_per_round(self) -> float:
        """Seconds of this process on all cores, which say what an idle machine needs; as `rounds_per_second`."""
        return (self._last[1] - self._first[1]) / self._rounds


def processor_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """That this process has used."""
    use = resource.getrusage(who)
    return use.ru_utime + use.ru_stime


def timed(engine: str, cell: Cell) -> Clock:
    """`cell` on `engine`; loading its data is not the engine's time."""
    load_task(cell)
    clock = Clock()
    for _ in make_engine(engine)([cell], clock):
        pass
    return clock


def rounds_per_second(engine: str, cell: Cell) -> float:
    """Of `timed`."""
    return timed(engine, cell).rounds_per_second
