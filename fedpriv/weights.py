"""Importance weights α_t of rounds, shared by the estimator that scales increments and the averaging server."""

from dataclasses import dataclass
from typing import Protocol


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
