"""What a record contributes in round t, and how contributions are summed: a pure function of t.

| here | paper | shape |
|---|---|---|
| `weights.at(t)` | α_t (Reshef & Levy), η_{t-1} (Choquette-Choo et al., counted from 0) | scalar |
| increment | s_t = α_t ∇f(x_t; z) - α_{t-1} ∇f(x_{t-1}; z) | (d,) |
| running sum | q_t = q_{t-1} + s_t | (d,) |
"""

from dataclasses import dataclass, field
from typing import Protocol

from fedpriv.rounds import Round, Scalar
from fedpriv.weights import LinearWeights, Weights


class Estimator(Protocol):
    """Coefficients, decay, clip and scale of every round, all public and fixed before the first."""

    @property
    def keep(self) -> float:
        """The decay of the running sum: 1 a prefix sum, 0 none, 1 - α momentum."""
        ...

    @property
    def memory(self) -> int:
        """How many queries, this round's included, a silo must remember."""
        ...

    def round(self, t: int) -> Round: ...


@dataclass(frozen=True)
class RecursiveGradient:
    """The corrected momentum of DP-μ²-FL and the recursive gradient of Accelerated-DP-SRGD.

    s_t = α_t g_t - α_{t-1} g~_{t-1}, two gradients of one record, and q_t = q_{t-1} + s_t, so that q_t is an
    estimate of α_t ∇f(x_t).  Reshef & Levy 2024, Algorithm 1 and equation for q_{t,i}.

    Guarantee: each increment is clipped to norm `clip`, so replacing one record moves every later prefix sum
    of a silo's sums by at most 2·clip, whatever the loss and the queries are.
    """

    clip: Scalar
    weights: Weights = field(default_factory=LinearWeights)
    keep: float = 1.0
    memory: int = 2

    def round(self, t: int) -> Round:
        now, before = self.weights.at(t), self.weights.at(t - 1)
        coefficients = (now, -before) if before else (now,)
        return Round(t, coefficients, self.keep, self.clip, scale=now)
