"""Who hears how a run goes: one small protocol for results, progress, TensorBoard, MLflow and your own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedpriv.running.fitted import Fitted
from fedpriv.running.outcome import Finished
from fedpriv.scenario import Scenario


class RunObserver:
    """Hears how a run goes; override what you need.  All calls come from one process and thread.

    `place` is a cell's number in `Scenario.points`: 0 … len(points) - 1.
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

    def ended(self) -> None:
        """The run is over: every cell is finished, or it was stopped, or it failed."""


class Fanout:
    """An engine's observer: passes on what it hears, with a cell's place in the scenario for its index."""

    def __init__(self, places: Sequence[int], observers: Sequence[RunObserver]) -> None:
        self._places, self._observers = places, observers

    def advanced(self, client_rounds: int) -> None:
        for observer in self._observers:
            observer.advanced(client_rounds)

    def evaluated(self, index: int, t: int, metrics: Mapping[str, float]) -> None:
        for observer in self._observers:
            observer.evaluated(self._places[index], t, metrics)
