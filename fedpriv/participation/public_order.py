"""What participations have in common whose rounds everyone may know."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Self

from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.relation import Relation
from fedpriv.errors import InputError
from fedpriv.participation.base import Sums
from fedpriv.randomness import KeyedCoins

if TYPE_CHECKING:
    from fedpriv.participation.base import Participation


class PublicOrder:
    """Round t reads `batches(t)` of a silo's order, whoever asks.

    Guarantee: all that is released is exactly μ-GDP for every record, by how far one can move the whole stream.
    """

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
    secret: ClassVar[bool] = False

    @classmethod
    def instead_of(cls, order: "Participation", groups: int) -> "Participation":
        if groups != 1:
            raise InputError(
                f"federation.groups = {groups}: groups are for records that take part in secret; with sampling = "
                '"fixed" leave them out'
            )
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

    def guarantee(self, sums: Sums, std: float) -> GaussianDP:
        return GaussianDP(sums.moved(self.distance(sums)) / std)

    def distance(self, sums: Sums) -> float:
        return sums.sensitivity()

    @property
    def known(self) -> Self:
        return self

    def promised(self, mu: float, relation: Relation) -> GaussianDP:
        return GaussianDP(mu)

    def charged(self, relation: Relation, mu: float, delta: float) -> float:
        return mu

    @property
    def words(self) -> str:
        times, cut = divmod(self.rounds, self.rounds_per_epoch)
        if self.single_pass:
            return "is read once"
        return f"is read {times} times, or once more" if cut else f"is read {times} times"
