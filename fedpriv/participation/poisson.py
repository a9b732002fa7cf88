"""Every record by a coin of its own in every round."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.poisson import PoissonGaussian, calibrated
from fedpriv.accounting.relation import Relation
from fedpriv.participation.secret_order import SecretOrder
from fedpriv.randomness import KeyedCoins


@dataclass(frozen=True)
class Poisson(SecretOrder):
    """Poisson sampling: in every round of its group each record takes part with probability `rate`.

    A silo's sum is divided by its public expected batch, never by the number drawn.

    Guarantee: every record of every round has a coin of its own, which only the silo that holds it sees.
    """

    name: ClassVar[str] = "poisson"
    title: ClassVar[str] = "Poisson sampling"

    @property
    def rate(self) -> float:
        """q: the probability with which a record takes part in a round of its group."""
        return 1.0 / self.bins

    def first(self, rounds: int) -> Self:
        """What a run that stopped after so many rounds has drawn."""
        return type(self)(rounds, self.rounds_per_epoch, self.groups)

    def rows(self, t: int, batch: int, silo: int, coins: Callable[[], KeyedCoins]) -> NDArray[np.int64]:
        drawn = np.flatnonzero(coins().heads(self.batches_held * batch, self.rate, silo, t))
        first = self.group(t).start
        return drawn if self.groups == 1 else drawn[drawn % self.groups == first]

    def calibrated(self, epsilon: float, delta: float, relation: Relation) -> PoissonGaussian:
        return calibrated(epsilon, delta, self.rate, self._coins, relation)

    def promise(self, multiplier: float, relation: Relation) -> PoissonGaussian:
        return PoissonGaussian(multiplier, self.rate, self._coins, relation)

    @property
    def _coins(self) -> int:
        """In how many rounds a coin is thrown for a record of the first group, which has the most."""
        return -(-self.rounds // self.groups)

    @property
    def words(self) -> str:
        among = "" if self.groups == 1 else f" of its group ({self.groups} groups)"
        return f"takes part in each{among} with probability {self.rate:.5g}, and in which ones stays secret"
