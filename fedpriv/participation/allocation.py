"""Every record in one secret round of every epoch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.allocation import AllocatedGaussian, calibrated
from fedpriv.accounting.relation import Relation
from fedpriv.participation.secret_order import SecretOrder
from fedpriv.randomness import KeyedCoins


@dataclass(frozen=True)
class Allocation(SecretOrder):
    """Random allocation: in every epoch each record takes part in one round, drawn uniformly and kept secret.

    A silo's sum is divided by its public expected batch, never by the number drawn.

    Guarantee: records choose among the rounds of their group independently of each other, and anew in every
    epoch; only the silo that holds a record knows its round.  (Equal batches of a shuffled order are something
    else: who knows all other records' rounds knows the last one's.)
    """

    name: ClassVar[str] = "allocation"
    title: ClassVar[str] = "random allocation"

    def first(self, rounds: int) -> Self:
        """The whole schedule: a record's round may come before or after the one in which a run stopped."""
        if not 0 <= rounds <= self.rounds:
            raise ValueError(f"{rounds} rounds of {self.rounds}")
        return self

    def rows(self, t: int, batch: int, silo: int, coins: Callable[[], KeyedCoins]) -> NDArray[np.int64]:
        epoch, place = divmod(t - 1, self.rounds_per_epoch)
        count = self.batches_held * batch
        bins = coins().numbers(count, self.bins, silo, epoch)
        rows = np.arange(count)[self.group(t)]
        here: NDArray[np.int64] = rows[bins[rows] == place // self.groups]
        return here

    def calibrated(self, epsilon: float, delta: float, relation: Relation) -> AllocatedGaussian:
        return calibrated(epsilon, delta, self.bins, self.epochs, relation)

    def promise(self, multiplier: float, relation: Relation) -> AllocatedGaussian:
        return AllocatedGaussian(multiplier, self.bins, self.epochs, relation)

    @property
    def epochs(self) -> int:
        """Epochs begun; one that ends early counts as whole."""
        return -(-self.rounds // self.rounds_per_epoch)

    @property
    def words(self) -> str:
        among = f"{self.bins} rounds" if self.groups == 1 else f"the {self.bins} rounds of its group"
        every = "" if self.epochs == 1 else f" in each of {self.epochs} epochs"
        return f"takes part in one of {among}{every}, drawn at random, and in which one stays secret"
