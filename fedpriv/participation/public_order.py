"""What participations have in common whose rounds everyone may know."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from fedpriv.participation.asked import Asked
from fedpriv.participation.known_rounds import KnownRounds
from fedpriv.randomness import KeyedCoins

if TYPE_CHECKING:
    from fedpriv.participation.base import Participation


class PublicOrder(KnownRounds):
    """Round t reads `batches(t)` of a silo's order, whoever asks."""

    if TYPE_CHECKING:  # fields of dataclasses, or properties: a dataclass would take these for defaults

        @property
        def rounds(self) -> int: ...

        @property
        def rounds_per_epoch(self) -> int: ...

        @property
        def batches_held(self) -> int: ...

        @property
        def single_pass(self) -> bool: ...

    title: ClassVar[str] = "fixed order"

    @classmethod
    def instead_of(cls, order: "Participation", asked: Asked) -> "Participation":
        asked.without_groups("fixed")
        asked.without_timers("fixed")
        return order

    def batches(self, t: int) -> range:
        """Which batches of the silo's order, counted from 0, round t (from 1) uses; they follow one another."""
        raise NotImplementedError

    def expected_batches(self, t: int) -> int:
        return len(self.batches(t))

    def most_batches(self, t: int) -> int:
        return len(self.batches(t))

    def rows(self, t: int, batch: int, silo: int, coins: Callable[[], KeyedCoins]) -> slice:
        batches = self.batches(t)
        return slice(batches.start * batch, batches.stop * batch)

    @property
    def words(self) -> str:
        times, cut = divmod(self.rounds, self.rounds_per_epoch)
        if self.single_pass:
            return "is read once"
        return f"is read {times} times, or once more" if cut else f"is read {times} times"
