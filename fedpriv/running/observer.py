"""Who hears how a run goes: one protocol for servers, engines, results, progress, trackers and your own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedpriv.errors import FedprivError
from fedpriv.running.fitted import Fitted
from fedpriv.running.outcome import Finished
from fedpriv.scenario import Scenario


class RunObserver:
    """Hears how a run goes; override what you need.  All calls come from one process and thread.

    `place` is a cell's number: in `Scenario.points` for observers of a run, in the list of cells for the observer
    of an engine, and 0 for that of a server, which runs one cell.
    """

    def fitted(self, fit: Fitted) -> None:
        """Noise was fitted to what some cells publish; called before `started`, once for each such fit."""

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        """The cells at `places` are about to be run, with results in `folder`; finished ones are left out."""

    def advanced(self, rounds: int) -> None:
        """So many more rounds, summed over cells, are done."""

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        """A cell was evaluated on the test set after round t: test_loss, test_accuracy (a share), … by name."""

    def finished(self, place: int, finished: Finished) -> None:
        """A cell is finished."""

    def lost(self, worker: str, places: Sequence[int]) -> None:
        """A worker died; the cells it had are run again."""

    def noted(self, line: str) -> None:
        """Something that a person should know of, in one line; nothing failed."""

    def failed(self, error: FedprivError) -> None:
        """The run failed; the error is also raised to whoever started it."""

    def ended(self) -> None:
        """The run is over: every cell is finished, or it was stopped, or it failed."""


class Observers(RunObserver):
    """Several as one; whoever speaks numbers the cells by their place in `places`, the observers hear those."""

    def __init__(self, places: Sequence[int], observers: Sequence[RunObserver]) -> None:
        self._places, self._observers = places, observers

    def fitted(self, fit: Fitted) -> None:
        for observer in self._observers:
            observer.fitted(fit)

    def advanced(self, rounds: int) -> None:
        for observer in self._observers:
            observer.advanced(rounds)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        for observer in self._observers:
            observer.evaluated(self._places[place], t, metrics)

    def finished(self, place: int, finished: Finished) -> None:
        for observer in self._observers:
            observer.finished(self._places[place], finished)

    def lost(self, worker: str, places: Sequence[int]) -> None:
        for observer in self._observers:
            observer.lost(worker, [self._places[place] for place in places])

    def noted(self, line: str) -> None:
        for observer in self._observers:
            observer.noted(line)

    def failed(self, error: FedprivError) -> None:
        for observer in self._observers:
            observer.failed(error)
