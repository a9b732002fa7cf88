"""What a record contributes in round t, and how contributions are summed and weighed: public, pure in t.

| here | paper | shape |
|---|---|---|
| `weights.at(t)` | α_t (Reshef & Levy), η_{t-1} (Choquette-Choo et al., counted from 0) | scalar |
| increment | s_t = α_t ∇f(x_t; z) - α_{t-1} ∇f(x_{t-1}; z) | (d,) |
| running sum | q_t = q_{t-1} + s_t | (d,) |

A `Round` is known before the first one: its coefficients, its decay and its clip.  The weights α_t are shared by
the estimator that scales increments and the averaging server.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.replicates import SHARED, Scalar


class SplitClipping(NamedTuple):
    """How increments are taken apart at the queries that epochs start with; see rounds/floats.py."""

    rounds_per_epoch: int
    mixing: Scalar
    difference_clip: Scalar
    residual_clip: Scalar


class LocalRound(NamedTuple):
    """A round in which silos go on from where their own releases brought them; see rounds/round.py."""

    step: Scalar
    restarts: bool
    """Whether they start again from the query, which is their average."""


class Round(NamedTuple):
    """The public record of round t, read alike by silo, server and accountant.

    A silo sums its records' increments, `coefficients[k]` times the gradient at the k-th last query (0 is this
    round's), each clipped to norm `clip`, and keeps the running sum q_t = decay * q_{t-1} + mean increment.
    What is released estimates `scale` times the gradient at the query, so an optimizer that wants the gradient
    divides by `scale`.
    """

    t: int
    coefficients: tuple[float, ...]
    decay: float
    clip: Scalar
    scale: float
    split: SplitClipping | None = None
    local: LocalRound | None = None
    next_share: float | None = None
    """α_{t+1} / α_{1:t+1}, the next iterate's weight in the average that is the next query, or None."""

    @property
    def gradient_count(self) -> int:
        """Gradients of one record that are taken in this round."""
        if self.split is None:
            return len(self.coefficients)
        epoch, place = divmod(self.t - 1, self.split.rounds_per_epoch)
        return 1 + (2 if epoch else 0) + (2 if place else 0)

    @property
    def clips(self) -> tuple[float, ...]:
        """The norm bounds of this round's parts, one where it is taken as a whole."""
        return (
            (float(self.clip),)
            if self.split is None
            else (float(self.clip), float(self.split.difference_clip), float(self.split.residual_clip))
        )

    @property
    def max_contribution(self) -> float:
        """A bound on the norm of what one record of weight 1 adds to the running sum, whatever the queries are.

        Parts build up: every epoch so far may have added its difference.
        """
        if self.split is None:
            return float(self.clip)
        epochs = (self.t - 1) // self.split.rounds_per_epoch
        return float(self.clip + epochs * self.split.difference_clip + self.split.residual_clip)


class Weights(Protocol):
    """Positive weights of the rounds t = 1, 2, …; `at(0)` is 0."""

    def weight(self, t: int) -> float:
        """α_t."""
        ...

    def total(self, t: int) -> float:
        """α_{1:t} = α_1 + … + α_t."""
        ...


@dataclass(frozen=True)
class LinearWeights:
    """α_t = t, α_{1:t} = t(t+1)/2 (Reshef & Levy 2024, section 4; η_t of Choquette-Choo et al. counted from 1)."""

    def weight(self, t: int) -> float:
        return float(t)

    def total(self, t: int) -> float:
        return t * (t + 1) / 2


@dataclass(frozen=True)
class PowerWeights:
    """α_t = t^power (Zhang, Tran & Cutkosky 2022, there t^k)."""

    power: int

    def weight(self, t: int) -> float:
        return float(t**self.power) if t else 0.0

    def total(self, t: int) -> float:
        return float(_power_totals(self.power, t.bit_length())[t])


@lru_cache(maxsize=64)
def _power_totals(power: int, bits: int) -> NDArray[np.float64]:
    """α_{1:t} of all t of at most `bits` bits."""
    return np.concatenate([[0.0], np.cumsum(np.arange(1.0, 2.0**bits) ** power)])


class Estimator(Protocol):
    """Coefficients, decay, clip and scale of every round, all public and fixed before the first."""

    @property
    def decay(self) -> float:
        """The decay of the running sum: 1 a prefix sum, 0 none, 1 - α momentum."""
        ...

    @property
    def period(self) -> int | None:
        """The sums restart from 0 in rounds 1, 1 + period, 1 + 2 period, …; None if they never do."""
        ...

    @property
    def memory(self) -> int:
        """How many queries, this round's included, a silo must remember."""
        ...

    def round(self, t: int) -> Round: ...

    def __hash__(self) -> int: ...


@lru_cache(maxsize=4)
def make_rounds(estimator: Estimator, rounds: int) -> tuple[Round, ...]:
    """Rounds 1 … `rounds`, made once: a plan reads each of them half a dozen times."""
    return tuple(map(estimator.round, range(1, rounds + 1)))


@dataclass(frozen=True)
class RecursiveGradient:
    """The corrected momentum of DP-μ²-FL and the recursive gradient of Accelerated-DP-SRGD.

    s_t = α_t g_t - α_{t-1} g~_{t-1}, two gradients of one record, and q_t = q_{t-1} + s_t, so that q_t is an
    estimate of α_t ∇f(x_t).  Reshef & Levy 2024, Algorithm 1 and equation for q_{t,i}.

    Guarantee: the increment of round t is clipped to norm `round(t).clip`; with equal clips, replacing one record
    moves every later prefix sum of a silo's sums by at most 2·clip, whatever the loss and the queries are.
    """

    clip: Scalar
    first_clip: Scalar | None = None
    """Of round 1, whose increment is a plain gradient; `clip` if left out."""
    weights: Weights = field(default_factory=LinearWeights)
    drift_clip: Scalar = 0.0
    """2LD, which the clip of round t has (t-1)/(t+1) of in addition: as far as the change of a gradient, weighted
    by t - 1, can go where x_t is the anytime average of iterates in a ball of diameter D."""
    clip_growth: int = 0
    """The clip of round t is `clip` · t^growth: increments of the weights t^k grow like t^(k-1)."""
    decay: float = 1.0
    period: int | None = None
    memory: int = 2

    def round(self, t: int) -> Round:
        now, before = self.weights.weight(t), self.weights.weight(t - 1)
        coefficients = (now, -before) if before else (now,)
        return Round(
            t,
            coefficients,
            self.decay,
            self.round_clip(t),
            scale=now,
            next_share=self.weights.weight(t + 1) / self.weights.total(t + 1),
        )

    def round_clip(self, t: int) -> Scalar:
        """The norm bound of round t's increments, public and fixed before round 1."""
        return (
            self.first_clip
            if t == 1 and self.first_clip is not None
            else self.clip * float(t**self.clip_growth) + self.drift_clip * ((t - 1.0) / (t + 1.0))
        )


@dataclass(frozen=True)
class RaisedClips:
    """Another estimator, with the clip of round t multiplied by `factors[t - 1]`.

    Guarantee: increments of round t are clipped to norm `round(t).clip`, factor included.
    """

    base: Estimator
    factors: tuple[float, ...] = field(metadata=SHARED)

    @property
    def decay(self) -> float:
        return self.base.decay

    @property
    def period(self) -> int | None:
        return self.base.period

    @property
    def memory(self) -> int:
        return self.base.memory

    def round(self, t: int) -> Round:
        plain = self.base.round(t)
        return plain._replace(clip=plain.clip * self.factors[t - 1])


@dataclass(frozen=True)
class PlainGradient:
    """One gradient a record: s_t = coefficient · g_t, and q_t = decay · q_{t-1} + s_t.

    decay = 0 is SGD's batch gradient, decay = 1 the sum of all gradients (DP-FTRL), and coefficient = α with
    decay = 1 - α momentum.

    Guarantee: each increment, coefficient included, is clipped to norm `clip`.
    """

    clip: Scalar
    coefficient: float = field(default=1.0, metadata=SHARED)
    decay: float = field(default=0.0, metadata=SHARED)
    period: int | None = None
    memory: int = 1

    def round(self, t: int) -> Round:
        return Round(t, (self.coefficient,), self.decay, self.clip, scale=1.0)


@dataclass(frozen=True)
class LocalGradient:
    """One gradient a record, at a point of the silo's own: `every` steps of length `step` between two averages.

    Guarantee: each increment is clipped to norm `clip`; every step is a release of its own.
    """

    clip: Scalar
    step: Scalar
    every: int
    decay: float = field(default=0.0, metadata=SHARED)
    period: int | None = None
    memory: int = 1

    def round(self, t: int) -> Round:
        return Round(
            t, (1.0,), self.decay, self.clip, scale=1.0, local=LocalRound(self.step, (t - 1) % self.every == 0)
        )


@dataclass(frozen=True)
class VarianceReducedGradient:
    """A gradient at an anchor, and from then on differences of gradients, summed: SPIDER's estimate of ∇f(z_t).

    In the first round of every period s_t = ∇f(z_t) and the sum starts anew; in the others
    s_t = ∇f(z_t) - ∇f(z_{t-1}), two gradients of one record, and q_t = q_{t-1} + s_t.
    Kornowski, Liu & Talwar, Algorithms 3, 4 and 5, with their indices repaired: an anchor is where t - 1 is a
    multiple of the period, so that a period of 1 has anchors only.

    Guarantee: an anchor's increments are clipped to norm `anchor_clip`, the others to `clip`, whatever the loss,
    its smoothing and the queries are; which rounds are anchors is public and follows from t alone.
    """

    anchor_clip: Scalar
    clip: Scalar
    period: int
    decay: float = field(default=1.0, metadata=SHARED)
    memory: int = 2

    def round(self, t: int) -> Round:
        return (
            Round(t, (1.0,), 0.0, self.anchor_clip, scale=1.0)
            if (t - 1) % self.period == 0
            else Round(t, (1.0, -1.0), self.decay, self.clip, scale=1.0)
        )


@dataclass(frozen=True)
class SplitGradient:
    """Momentum of gradients that are taken apart at the start of every epoch of `rounds_per_epoch` rounds; see
    rounds/floats.py.

    `mixing` is γ, `coefficient` α with decay = 1 - α.

    Guarantee: gradients, their changes between epochs and since the epoch's start are clipped to norms `clip`,
    `difference_clip` and `residual_clip`, coefficient included.
    """

    clip: Scalar
    difference_clip: Scalar
    residual_clip: Scalar
    mixing: Scalar
    rounds_per_epoch: int
    coefficient: float = field(default=1.0, metadata=SHARED)
    decay: float = field(default=0.0, metadata=SHARED)
    period: int | None = None
    memory: int = 1

    def round(self, t: int) -> Round:
        split = SplitClipping(self.rounds_per_epoch, self.mixing, self.difference_clip, self.residual_clip)
        return Round(t, (self.coefficient,), self.decay, self.clip, scale=1.0, split=split)
