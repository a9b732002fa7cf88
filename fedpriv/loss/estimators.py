"""Gradient estimators: a record's increment in round t, and its sums, as public functions of t.

An increment is what a record z adds to a round's sum: a combination of its gradients at the model x_t of round t
(the query) and at earlier ones, clipped.  f is the loss, and d the number of parameters.  A silo is a party that
holds records.  It keeps the running sum of its mean increments, which is multiplied by a decay in every round.

Symbols of `RecursiveGradient` in its two papers:

| here | paper | shape |
|---|---|---|
| `weights.weight(t)` | α_t (Reshef & Levy), η_{t-1} (Choquette-Choo et al., counted from 0) | scalar |
| increment | s_t = α_t ∇f(x_t; z) - α_{t-1} ∇f(x_{t-1}; z) | (d,) |
| running sum | q_t = q_{t-1} + s_t | (d,) |

Coefficients, decay and clip of each round are known before round 1 (`Round`).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.replicates import SHARED, Scalar
from fedpriv.participation.orders import Participation


class SplitClipping(NamedTuple):
    """Clips of the second and third part of an increment whose three parts are clipped separately.

    The first part is a gradient at the query with which the epoch starts, and its clip is `Round.clip`.  The
    others are differences of gradients (`SplitGradient`).
    """

    rounds_per_epoch: int
    """Number of rounds of an epoch."""
    mixing: Scalar
    """γ: weight of fresh gradients at the epoch's first query, from the second epoch on.

    The sum of one epoch before, plus the change since, has the weight 1 - γ.
    """
    difference_clip: Scalar
    """Norm bound on the change of a gradient between epochs, coefficient included."""
    residual_clip: Scalar
    """Norm bound on the change of a gradient since the start of the epoch, coefficient included."""


class LocalRound(NamedTuple):
    """Local steps: a round in which each silo continues from the point to which its own releases have led."""

    step: Scalar
    """Length of a step."""
    restarts: bool
    """Whether silos start again from the query, which is the average of their points, or x_1 in round 1."""


class Round(NamedTuple):
    """Public record of round t.

    A silo averages its records' increments, each clipped to norm `clip`.  An increment is the sum over k of
    `coefficients[k]` times the gradient at the query of round t - k.  For a silo that missed the rounds before,
    past queries and their coefficients are those of the first round that it missed.  The silo keeps the running
    sum q_t = decay * q_{t-1} + mean increment, and releases it with noise.  An optimizer that needs an estimate of
    the gradient divides the release by `scale`.

    With `split`, increments and the running sum are those of `SplitGradient`.  With `local`, the gradient is at
    the silo's own point.
    """

    t: int
    """Number of the round, from 1."""
    coefficients: tuple[float, ...]
    """Coefficients of the gradients at this round's query, at the query of the round before, …."""
    decay: float
    """Factor of q_{t-1} in the running sum.

    The factor is 1 for a prefix sum, 1 - α for momentum, and 0 for a restart or if there is no running sum.
    """
    clip: Scalar
    """Norm bound on one record's increment, or on its first part with `split`."""
    scale: float
    """Factor of the gradient in the release, above 0, such as α_t for `RecursiveGradient`."""
    split: SplitClipping | None = None
    """Clipping of an increment in parts, or None if it is clipped as a whole."""
    local: LocalRound | None = None
    """Local steps of the silos, or None for an algorithm without them."""
    next_share: float | None = None
    """α_{t+1} / α_{1:t+1}, the next iterate's weight in an average of iterates, or None without weights."""

    @property
    def gradient_count(self) -> int:
        """Number of gradients of one record that are computed in this round.

        In parts, these are one for the gradient at the epoch's first query, two for its change between epochs,
        from the second epoch on, and two for the change since the epoch's start, except in the epoch's first
        round.
        """
        if self.split is None:
            return len(self.coefficients)
        epoch, round_in_epoch = divmod(self.t - 1, self.split.rounds_per_epoch)
        return 1 + (2 if epoch else 0) + (2 if round_in_epoch else 0)

    @property
    def clips(self) -> tuple[float, ...]:
        """Norm bounds of an increment's parts, or the bound of the whole increment as the only entry."""
        return (
            (float(self.clip),)
            if self.split is None
            else (float(self.clip), float(self.split.difference_clip), float(self.split.residual_clip))
        )

    @property
    def max_contribution(self) -> float:
        """Upper bound on the norm that records of total weight 1 add to the running sum in this round.

        The bound holds for any queries.  In parts, the change between epochs may have been added once for every
        epoch before.
        """
        if self.split is None:
            return float(self.clip)
        epochs = (self.t - 1) // self.split.rounds_per_epoch
        return float(self.clip + epochs * self.split.difference_clip + self.split.residual_clip)


class Weights(Protocol):
    """Positive weights of the rounds t = 1, 2, …, where `weight(0)` is 0."""

    def weight(self, t: int) -> float:
        """Return α_t."""
        ...

    def total(self, t: int) -> float:
        """Return α_{1:t} = α_1 + … + α_t."""
        ...


@dataclass(frozen=True)
class LinearWeights:
    """Weights α_t = t with α_{1:t} = t(t+1)/2 (Reshef & Levy 2024, section 4)."""

    def weight(self, t: int) -> float:
        return float(t)

    def total(self, t: int) -> float:
        return t * (t + 1) / 2


@dataclass(frozen=True)
class PowerWeights:
    """Weights α_t = t^power (Zhang, Tran & Cutkosky 2022, there t^k)."""

    power: int
    """Power of t, 0 or more."""

    def weight(self, t: int) -> float:
        return float(t**self.power) if t else 0.0

    def total(self, t: int) -> float:
        return float(_power_totals(self.power, t.bit_length())[t])


@lru_cache(maxsize=64)
def _power_totals(power: int, bits: int) -> NDArray[np.float64]:
    """Sums α_{1:t} for t = 0, 1, …, 2^bits - 1, (2^bits,)."""
    return np.concatenate([[0.0], np.cumsum(np.arange(1.0, 2.0**bits) ** power)])


class Estimator(Protocol):
    """Coefficients, decay, clip and scale of every round, which are public and fixed before round 1."""

    @property
    def decay(self) -> float:
        """Decay of the running sum: 1 for a prefix sum, 0 for no sum, 1 - α for momentum.

        In rounds that restart the sum (`period`), the decay of `round(t)` has to be 0 instead.
        """
        ...

    @property
    def period(self) -> int | None:
        """Rounds after which the sums restart from 0, or None if the sums never restart.

        Restarts are in rounds 1, 1 + period, 1 + 2 period, ….
        """
        ...

    @property
    def memory(self) -> int:
        """Number of queries that a silo must remember, including this round's.

        With increments in parts, silos remember the epochs' first queries besides.
        """
        ...

    def round(self, t: int) -> Round:
        """Return the public record of round t, from 1."""
        ...

    def __hash__(self) -> int: ...


@lru_cache(maxsize=4)
def make_rounds(estimator: Estimator, rounds: int) -> tuple[Round, ...]:
    """Make the records of rounds 1 … `rounds`, and cache them.

    Guarantee: the record of round t has the number t, by which noise and records are drawn, whatever number a
    user's estimator gives it, and its clips are those of `Round`.
    """
    return tuple(Round(*estimator.round(t))._replace(t=t) for t in range(1, rounds + 1))


@lru_cache(maxsize=4)
def max_running_sum(schedule: Participation, estimator: Estimator) -> float:
    """Bound the norm of the silos' mean running sum in every round, whatever the records are.

    The bound is the largest n_t, where n_0 = 0 and

        n_t = decay_t · n_{t-1} + (most batches / expected batches) · (a record's largest contribution in round t).

    Batches are those of one silo in round t, and expected batches count as 1 at least.

    Args:
        schedule: Participation: which records take part in which round.
        estimator: Estimator: decays, and contributions of a record.

    Returns:
        The bound in the unit of the clip, or 0 without rounds.
    """
    max_norm = norm = 0.0
    for round_record in make_rounds(estimator, schedule.rounds):
        # A round divides by the expected number of batches.
        batch_ratio = schedule.max_batches(round_record.t) / max(1, schedule.expected_batches(round_record.t))
        norm = float(round_record.decay) * norm + batch_ratio * round_record.max_contribution
        max_norm = max(max_norm, norm)
    return max_norm


@dataclass(frozen=True)
class RecursiveGradient:
    """Corrected momentum of DP-μ²-FL, and recursive gradient of Accelerated-DP-SRGD.

    s_t = α_t ∇f(x_t; z) - α_{t-1} ∇f(x_{t-1}; z) from two gradients of one record z, and q_t = q_{t-1} + s_t, so
    that q_t is an estimate of α_t ∇f(x_t).  Reshef & Levy 2024, Algorithm 1 and equation for q_{t,i}.

    Guarantee: the increment of round t is clipped to norm `round(t).clip`.  Replacing a record of weight 1 that
    takes part in round t only moves q_t, and every later sum of a silo, by at most 2 · `round(t).clip`, whatever
    the loss and the queries are.
    """

    clip: Scalar
    """Norm bound on increments, before `clip_growth` and `drift_clip`."""
    first_clip: Scalar | None = None
    """Clip of round 1, whose increment is a plain gradient, or None for `clip`."""
    weights: Weights = field(default_factory=LinearWeights)
    """Weights α_t of the rounds."""
    drift_clip: Scalar = 0.0
    """Bound 2LD on the drift, 0 for none: the clip of round t is larger by (t-1)/(t+1) times this bound.

    The drift is (t - 1) times the change of a gradient from x_{t-1} to x_t.  Its norm is at most 2LD (t-1)/(t+1)
    for an L-smooth loss if x_t is the average, with weights α_t = t, of iterates in a ball of diameter D.
    """
    clip_growth: int = 0
    """Power g in the clip of round t, `clip` · t^g.

    With weights t^k, increments grow like t^(k-1).
    """
    decay: float = 1.0
    period: int | None = None
    memory: int = 2

    def round(self, t: int) -> Round:
        weight, previous_weight = self.weights.weight(t), self.weights.weight(t - 1)
        coefficients = (weight, -previous_weight) if previous_weight else (weight,)
        return Round(
            t,
            coefficients,
            self.decay,
            self.round_clip(t),
            scale=weight,
            next_share=self.weights.weight(t + 1) / self.weights.total(t + 1),
        )

    def round_clip(self, t: int) -> Scalar:
        """Return the norm bound of round t's increments, which is public and fixed before round 1."""
        return (
            self.first_clip
            if t == 1 and self.first_clip is not None
            else self.clip * float(t**self.clip_growth) + self.drift_clip * ((t - 1.0) / (t + 1.0))
        )


@dataclass(frozen=True)
class RaisedClips:
    """Estimator `base` with `clip` of round t multiplied by `factors[t - 1]`.

    Guarantee: increments of round t are clipped to norm `round(t).clip`, factor included, unless `base` clips them
    in parts.  Then the factor is in the clip of the first part only.
    """

    base: Estimator
    """Estimator whose clips are multiplied."""
    factors: tuple[float, ...] = field(metadata=SHARED)
    """Factor of every round's clip, (T,)."""

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
    """One gradient of a record: s_t = coefficient · g_t, and q_t = decay · q_{t-1} + s_t.

    decay = 0 is the batch gradient of SGD, and decay = 1 the sum of all gradients (DP-FTRL).  coefficient = α with
    decay = 1 - α is momentum.

    Guarantee: each increment, coefficient included, is clipped to norm `clip`.
    """

    clip: Scalar
    """Norm bound on increments."""
    coefficient: float = field(default=1.0, metadata=SHARED)
    """Factor of the gradient in an increment."""
    decay: float = field(default=0.0, metadata=SHARED)
    period: int | None = None
    memory: int = 1

    def round(self, t: int) -> Round:
        return Round(t, (self.coefficient,), self.decay, self.clip, scale=1.0)


@dataclass(frozen=True)
class LocalGradient:
    """One gradient of a record at the silo's own point, for local steps between two averages.

    Guarantee: each increment is clipped to norm `clip`; every step is a release of its own.
    """

    clip: Scalar
    """Norm bound on increments."""
    step: Scalar
    """Length of a step."""
    every: int
    """Number of steps from an average to the next."""
    decay: float = field(default=0.0, metadata=SHARED)
    period: int | None = None
    memory: int = 1

    def round(self, t: int) -> Round:
        return Round(
            t, (1.0,), self.decay, self.clip, scale=1.0, local=LocalRound(self.step, (t - 1) % self.every == 0)
        )


@dataclass(frozen=True)
class VarianceReducedGradient:
    """SPIDER's estimate of ∇f(z_t): a gradient at an anchor, plus differences of gradients.

    * In the first round of every period s_t = ∇f(z_t), and the sum restarts.
    * In the others s_t = ∇f(z_t) - ∇f(z_{t-1}), two gradients of one record, and q_t = q_{t-1} + s_t.

    Source: Kornowski, Liu & Talwar, Algorithms 3, 4 and 5, with corrected indices.  A round is an anchor if t - 1
    is a multiple of the period, so that with a period of 1 every round is an anchor.

    Guarantee: an anchor's increments are clipped to norm `anchor_clip`, the others to `clip`, whatever the loss,
    its smoothing and the queries are.  Which rounds are anchors is public and follows from t and `period` alone.
    """

    anchor_clip: Scalar
    """Norm bound on the increments of anchors, which are gradients."""
    clip: Scalar
    """Norm bound on the increments of other rounds, which are differences of gradients."""
    period: int
    """Number of rounds from an anchor to the next."""
    decay: float = field(default=1.0, metadata=SHARED)
    """Decay of the running sum q_t but in anchors, which restart it."""
    memory: int = 2

    def round(self, t: int) -> Round:
        return (
            Round(t, (1.0,), 0.0, self.anchor_clip, scale=1.0)
            if (t - 1) % self.period == 0
            else Round(t, (1.0, -1.0), self.decay, self.clip, scale=1.0)
        )


@dataclass(frozen=True)
class SplitGradient:
    """Momentum of gradients that are split into parts at the start of every epoch.

    With g a record's gradient, v_q the query at which epoch q starts and x_t this round's query, three vectors are
    clipped separately: α g(v_q), α g(v_q) - α g(v_{q-1}) and α g(x_t) - α g(v_q).  The first has weight γ in a
    mixture, and the sum of the second and the mixture of one epoch before has weight 1 - γ.  In the first epoch
    the mixture is the first vector alone.  The mixture and the third vector are added to a running sum (`decay`).

    Guarantee: gradients, their changes between epochs and since the epoch's start are clipped to norms `clip`,
    `difference_clip` and `residual_clip`, coefficient included.
    """

    clip: Scalar
    """Norm bound on α times a gradient."""
    difference_clip: Scalar
    """Norm bound on α times the change of a gradient between epochs."""
    residual_clip: Scalar
    """Norm bound on α times the change of a gradient since the start of the epoch."""
    mixing: Scalar
    """γ: weight of fresh gradients at the epoch's first query, in [0, 1]."""
    rounds_per_epoch: int
    """Number of rounds of an epoch."""
    coefficient: float = field(default=1.0, metadata=SHARED)
    """α: factor of gradients."""
    decay: float = field(default=0.0, metadata=SHARED)
    period: int | None = None
    memory: int = 1
    """Number of queries that a silo remembers, this round's included, besides v_q and v_{q-1}."""

    def round(self, t: int) -> Round:
        split = SplitClipping(self.rounds_per_epoch, self.mixing, self.difference_clip, self.residual_clip)
        return Round(t, (self.coefficient,), self.decay, self.clip, scale=1.0, split=split)
