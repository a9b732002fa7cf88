"""What a participation is: which of a silo's records take part in which round, and who may know it."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.guarantees import Guarantee
from fedpriv.accounting.relation import Relation
from fedpriv.participation.asked import Asked
from fedpriv.randomness import KeyedCoins

Rows = slice | NDArray[np.int64]
"""Which rows of a silo's order; a slice reads without a copy."""


class Sums(Protocol):
    """The running sums that are released with noise, as accounting asks about them."""

    def sensitivity(self) -> float:
        """How far one record can move all that is released, where it is public in which rounds it takes part."""
        ...

    def clip_apart(self, groups: int) -> float:
        """How far one record, where it is there or not, can move what is released of any one of its rounds.

        Its rounds lie `groups` or more apart.  InputError where what they move would overlap.
        """
        ...

    def moved(self, distance: float) -> float:
        """Such a distance with the record's weight and the neighbouring relation in it."""
        ...

    @property
    def relation(self) -> Relation: ...


class Participation(Protocol):
    """A frozen dataclass, of which `registry` has a line."""

    name: ClassVar[str]
    """In scenarios and ledgers."""
    title: ClassVar[str]
    """What a report calls it."""
    secret: ClassVar[bool]
    """Whether only the silo that holds a record may know in which rounds it takes part."""
    of_clients: ClassVar[bool]
    """Whether those who take part decide when: clients of a pool, and no records of a silo."""

    @classmethod
    def instead_of(cls, order: "Participation", asked: Asked) -> "Participation":
        """What a scenario that names this sampling gets in place of the public `order` that it declares.

        InputError for what is `asked` and it cannot have.
        """
        ...

    @property
    def rounds(self) -> int: ...

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds of one pass, expected if sampled."""
        ...

    @property
    def batches_held(self) -> int:
        """How many batches a silo holds."""
        ...

    @property
    def single_pass(self) -> bool:
        """Whether no record takes part twice."""
        ...

    def first(self, rounds: int) -> Self:
        """What a run that stopped after so many rounds has done, for its accountant."""
        ...

    def expected_batches(self, t: int) -> int:
        """How many batches of a silo round t reads, expected if sampled; 0 in a round without records."""
        ...

    def most_batches(self, t: int) -> int:
        """How many it can read at most."""
        ...

    def rows(self, t: int, batch: int, silo: int, coins: Callable[[], KeyedCoins]) -> Rows:
        """The rows that round t reads of a silo's order, with `batch` records a batch; the silo's own `coins`."""
        ...

    def guarantee(self, sums: Sums, std: float) -> Guarantee:
        """What `sums` with noise of standard deviation `std` > 0 on their fresh vectors promise to every record.

        InputError for sums that cannot be accounted for.
        """
        ...

    def distance(self, sums: Sums) -> float:
        """What `sums.moved` makes the distance that noise is measured by; InputError if there is no such thing."""
        ...

    @property
    def known(self) -> "Participation":
        """The public order in which a record moves as much as somebody sees of it who knows its rounds."""
        ...

    def promised(self, mu: float, relation: Relation) -> Guarantee:
        """What every record is promised where one in the order `known` is promised `mu` > 0."""
        ...

    def charged(self, relation: Relation, mu: float, delta: float) -> float:
        """μ' so that noise of `sums.moved(distance)` / μ' gives what μ-GDP gives at δ."""
        ...

    @property
    def words(self) -> str:
        """What a record does, as a report says it."""
        ...

    def as_data(self) -> dict[str, Any]:
        """Plain data, from which `registry.participation_from` makes it again."""
        ...

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_data`, whose name is left out."""
        ...
