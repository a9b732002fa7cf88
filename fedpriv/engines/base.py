"""What every engine does: run cells, tell an observer how it goes, hand back outcomes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedpriv.running.outcome import Finished
from fedpriv.scenario import Cell


@dataclass(frozen=True)
class Outcome:
    """A finished cell and its place in the list the engine was given."""

    index: int
    finished: Finished


class Observer(Protocol):
    """Hears of progress; called in the engine's own process and thread."""

    def evaluated(self, index: int, t: int, metrics: Mapping[str, float]) -> None:
        """Cell `index` was evaluated on the test set after round t; see `Finished.metrics`."""
        ...

    def advanced(self, client_rounds: int) -> None:
        """So many more rounds (summed over cells) are done."""
        ...


class Engine(Protocol):
    """Runs cells one after another or many at once, and yields each as soon as it is finished."""

    def __call__(self, cells: Sequence[Cell], observer: Observer) -> Iterator[Outcome]: ...
