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
        found = np.zeros((count, self.max_rounds_per_record), np.int64)
        for place in range(self.max_rounds_per_record):
            last = self.rounds - self.max_rounds_per_record + place + 1
            drawn = coins.numbers(count, last, silo, place) + 1
            again = np.any(found == drawn[:, None], axis=1)
            found[:, place] = np.where(again, last, drawn)
        return found


fedpriv.add_participation(WithoutReplacement)
