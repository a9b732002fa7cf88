"""What participations have in common whose rounds only the silo knows that holds a record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedpriv.accounting.capacity import Capacity, capacity
from fedpriv.accounting.gdp import epsilon_of
from fedpriv.accounting.guarantees import Sampled
from fedpriv.accounting.relation import RELATION_FACTOR, Relation
from fedpriv.errors import InputError
from fedpriv.participation.asked import Asked
from fedpriv.participation.base import Sums
from fedpriv.participation.fixed_order import Schedule

if TYPE_CHECKING:
    from fedpriv.participation.base import Participation


@dataclass(frozen=True)
class SecretOrder:
    """Every record takes part in rounds of its own, which a silo draws with its key and tells nobody.

    Records are in public *groups*: those of group j, the rows j, j + groups, … of a silo's order, take part in
    rounds t with t ≡ j + 1 (mod groups) only.  So two rounds of one record lie `groups` or more apart, and
    correlated noise whose C has no more bands than that is amplified as if it were independent.

    Guarantee: the curve of (ε, δ) holds against everyone who sees all that is released and does not learn who
    takes part when.  A silo that releases its own sums is protected against the server, too.
    """

    name: ClassVar[str]
    secret: ClassVar[bool] = True
    of_clients: ClassVar[bool] = False

    rounds: int
    rounds_per_epoch: int
    """Rounds of one pass, expected if sampled."""
    groups: int = 1

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.rounds_per_epoch < 1:
            raise InputError(
                f"rounds = {self.rounds}, rounds of an epoch = {self.rounds_per_epoch}: both are 1 or more"
            )
        if self.groups < 1 or self.rounds_per_epoch % self.groups:
            raise InputError(
                f"federation.groups = {self.groups}: groups share out the {self.rounds_per_epoch} rounds of an "
                "epoch, so it is a number that divides them"
            )

    @classmethod
    def instead_of(cls, order: "Participation", asked: Asked) -> Self:
        asked.without_timers(cls.name)
        return cls(order.rounds, order.rounds_per_epoch, asked.groups)

    @property
    def batches_held(self) -> int:
        """How many expected batches a silo holds."""
        return self.rounds_per_epoch

    @property
    def bins(self) -> int:
        """The rounds of an epoch in which a record of one group can take part."""
        return self.rounds_per_epoch // self.groups

    @property
    def single_pass(self) -> bool:
        """Never: in which round a record takes part is not known to whoever asks."""
        return False

    def expected_batches(self, t: int) -> int:
        return 1

    def most_batches(self, t: int) -> int:
        """All records of a group can meet in one round."""
        return self.bins

    def capacity(self, batch: int) -> Capacity:
        """How many records a round of a silo with this expected `batch` is made to hold: nearly always enough."""
        return capacity(self.bins * batch, 1.0 / self.bins)

    def group(self, t: int) -> slice:
        """The rows of the records that can take part in round t (from 1)."""
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        return slice((t - 1) % self.groups, None, self.groups)

    def calibrated(self, epsilon: float, delta: float, relation: Relation) -> Sampled:
        """What has about the least noise among all that is (ε, δ)-DP."""
        raise NotImplementedError

    def promise(self, multiplier: float, relation: Relation) -> Sampled:
        """What noise of standard deviation `multiplier` clips gives."""
        raise NotImplementedError

    def guarantee(self, sums: Sums, std: float) -> Sampled:
        return self.promise(std / sums.moved(self.distance(sums)), sums.relation)

    @property
    def known(self) -> Schedule:
        """Of one of its rounds: those of a record move disjoint blocks of what is released."""
        return Schedule(self.rounds, self.rounds)

    def promised(self, mu: float, relation: Relation) -> Sampled:
        """`mu` is what a record pays that is known to take part, under replace-one twice what its clip costs."""
        return self.promise((1.0 - 1e-12) * RELATION_FACTOR[relation] / mu, relation)

    def distance(self, sums: Sums) -> float:
        """`sums.moved` of it is the clip of one record: the 2 of replace-one is in the accounting already."""
        return sums.clip_apart(self.groups) / RELATION_FACTOR[sums.relation]

    def charged(self, relation: Relation, mu: float, delta: float) -> float:
        """For a record that is known to take part; a rounding to the safe side is in it."""
        return (1.0 - 1e-12) / self.calibrated(epsilon_of(mu, delta), delta, relation).noise_multiplier

    def as_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rounds": self.rounds,
            "rounds_per_epoch": self.rounds_per_epoch,
            "groups": self.groups,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["rounds"], data["rounds_per_epoch"], data.get("groups", 1))
