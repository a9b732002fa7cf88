"""What participations have in common of which everyone may know who takes part when."""

from typing import ClassVar, Self

from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.relation import Relation
from fedpriv.participation.base import Sums


class KnownRounds:
    """Rounds that are no secret.

    Guarantee: all that is released is exactly μ-GDP for every record, by how far one can move the whole stream.
    """

    secret: ClassVar[bool] = False
    of_clients: ClassVar[bool] = False

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
