"""Every record by a coin of its own in every round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.gdp import epsilon_of
from fedpriv.accounting.subsampled import SubsampledGaussian, calibrated
from fedpriv.participation.base import Participation, Sums
from fedpriv.randomness import KeyedCoins


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: in every round each record takes part with probability 1/`rounds_per_epoch`, whatever
    else happens.

    A silo's sum is divided by its public expected batch, never by the number drawn.

    Guarantee: every record of every round has a coin of its own, which only the silo that holds it sees.
    """

    name: ClassVar[str] = "poisson"
    secret: ClassVar[bool] = True

    rounds: int
    rounds_per_epoch: int
    """Rounds of one expected pass."""

    @classmethod
    def instead_of(cls, order: Participation) -> Self:
        return cls(order.rounds, order.rounds_per_epoch)

    @property
    def batches_held(self) -> int:
        """How many expected batches a silo holds."""
        return self.rounds_per_epoch

    @property
    def rate(self) -> float:
        """q: the probability with which a record takes part in a round."""
        return 1.0 / self.rounds_per_epoch

    @property
    def single_pass(self) -> bool:
        """Never: a record may take part in any number of rounds."""
        return False

    def first(self, rounds: int) -> "Poisson":
        """What a run that stopped after so many rounds has drawn."""
        return Poisson(rounds, self.rounds_per_epoch)

    def expected_batches(self, t: int) -> int:
        return 1

    def most_batches(self, t: int) -> int:
        return self.batches_held

    def rows(self, t: int, batch: int, silo: int, coins: Callable[[], KeyedCoins]) -> NDArray[np.int64]:
        return np.flatnonzero(coins().heads(self.batches_held * batch, self.rate, silo, t))

    def guarantee(self, sums: Sums, std: float) -> SubsampledGaussian:
        return SubsampledGaussian(std / sums.moved(sums.clip_once()), self.rate, self.rounds)

    def charged(self, sums: Sums, mu: float, delta: float) -> tuple[float, float]:
        """Of one round, for a record that is known to take part; a rounding to the safe side is in it."""
        clip, sampled = sums.clip_once(), calibrated(epsilon_of(mu, delta), delta, self.rate, self.rounds)
        return clip, (1.0 - 1e-12) / sampled.noise_multiplier

    @property
    def words(self) -> str:
        return f"takes part in each with probability {self.rate:.5g}, and in which ones stays secret"

    def as_data(self) -> dict[str, Any]:
        return {"name": self.name, "rounds": self.rounds, "rounds_per_epoch": self.rounds_per_epoch}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["rounds"], data["rounds_per_epoch"])
