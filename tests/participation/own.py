"""A participation that fedpriv does not ship: every record in k of T rounds, drawn without replacement."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

import fedpriv
from fedpriv.core.random import SamplingRandomness
from fedpriv.participation.registry import DrawnOrder


@dataclass(frozen=True)
class WithoutReplacement(DrawnOrder):
    """k = `max_participations` of T rounds, by Floyd's algorithm: one number of each record a participation."""

    name: ClassVar[str] = "without-replacement"
    title: ClassVar[str] = "rounds drawn without replacement"

    def rounds_of(self, count: int, silo: int, coins: SamplingRandomness) -> NDArray[np.int64]:
        rounds = np.zeros((count, self.max_rounds_per_record), np.int64)
        for place in range(self.max_rounds_per_record):
            last = self.rounds - self.max_rounds_per_record + place + 1
            numbers = coins.numbers(count, last, silo, place) + 1
            repeated = np.any(rounds == numbers[:, None], axis=1)
            rounds[:, place] = np.where(repeated, last, numbers)
        return rounds


fedpriv.add_participation(WithoutReplacement)
