"""Importance weights α_t of rounds, shared by the estimator that scales increments and the averaging server."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Weights(Protocol):
    """Positive weights of the rounds t = 1, 2, …; `at(0)` is 0."""

    def at(self, t: int) -> float:
        """α_t."""
        ...

    def total(self, t: int) -> float:
        """α_{1:t} = α_1 + … + α_t."""
        ...


@dataclass(frozen=True)
class LinearWeights:
    """α_t = t, α_{1:t} = t(t+1)/2 (Reshef & Levy 2024, section 4; η_t of Choquette-Choo et al. counted from 1)."""

    def at(self, t: int) -> float:
        return float(t)

    def total(self, t: int) -> float:
        return t * (t + 1) / 2


@dataclass(frozen=True)
class PowerWeights:
    """α_t = t^power (Zhang, Tran & Cutkosky 2022, there t^k)."""

    power: int

    def at(self, t: int) -> float:
        return float(t**self.power) if t else 0.0

    def total(self, t: int) -> float:
        return float(_power_totals(self.power, t.bit_length())[t])


@lru_cache(maxsize=64)
def _power_totals(power: int, bits: int) -> NDArray[np.float64]:
    """α_{1:t} of all t of at most `bits` bits."""
    return np.concatenate([[0.0], np.cumsum(np.arange(1.0, 2.0**bits) ** power)])
