"""DP-SGD with Poisson sampling under either relation, replace-one too.

Sources: Abadi et al. 2016, Algorithm 1, for the mechanism; dp-accounting for the hockey stick of one round;
Doroshenko et al. 2022 ("connect the dots") for the law of its loss, which is pessimistic.

Every round each unit takes part independently with probability q = `sampling_rate`; the sum of the clipped
increments of those that do, each of norm C at most, is released with Gaussian noise of standard deviation z · C
per coordinate, z = `noise_multiplier`.  The sum is divided by a public number, never by the number of units
drawn.  One round is dominated by these pairs, both orders for zero-out; the third is its own mirror image:

    zero-out      (1 - q) N(0, z²) + q N(1, z²)   and   N(0, z²)
    replace-one   (1 - q) N(0, z²) + q N(1, z²)   and   (1 - q) N(0, z²) + q N(-1, z²)

The 2C of replace-one is in its pair: z is σ/C under both relations, never σ/(2C).  That the pair dominates any
two increments of norm C at most: turning one away from the other only raises the hockey stick, up to opposite
directions. Rényi accounting is no check here: dp-accounting's leaves the 2C out (google/differential-privacy,
issue 378).

Of k units together each joins by a coin of its own, and one round is dominated by these pairs:

    zero-out      N(Bin(k, q), z²)   and   N(0, z²), in both orders
    replace-one   N(Bin(k, q), z²)   and   N(-Bin(k, q), z²)

**That they dominate.** Given the past and what all others add, a set S of the units joins with probability p_S,
under P and Q alike, and moves the release by u_S or by v_S, of norm |S| at most in clips (v_S = 0 under zero-out).
Let A be any event, of probability a under N(0, z² I).  Of all events of this probability the half-line H =
{x > t} has the most under a shift by ‖u_S‖ and the least under one by -‖v_S‖ (Neyman & Pearson); the one rises and
the other falls with the norm.  t follows from a alone, so that one H serves all S at once:

    P(A) - γ Q(A) ≤ Σ_S p_S (N(|S|, z²)(H) - γ N(-|S|, z²)(H)),   γ ≥ 0.

Hockey sticks are jointly convex, so this holds averaged over the coins of others.  ∎  A round of one class and a
round of another, in which i and j units join, are one release with ‖u_S‖ ≤ √(i² + j²) ≤ i + j: units in different
classes of rounds are no worse than as many in one.  Choquette-Choo et al. 2023, Corollary 4.7, has the case v_S =
0; Ganesh 2024 has groups.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from scipy.special import gammaln, ndtr

from fedpriv.accounting.curves import (
    MAX_EPSILON,
    Curve,
    Floats,
    as_floats,
    check_group_size,
    gaussian_curve,
    highest_curve,
    lowest_curve,
)
from fedpriv.accounting.gaussian import Relation, check_positive, relation_named
from fedpriv.accounting.guarantees import (
    ADD_OR_REMOVE,
    REPLACE,
    Event,
    Sampled,
    gaussian_event,
    least_noise,
    repeated_event,
)
from fedpriv.accounting.losses import GridLossDistribution, PrivacyLossDistribution
from fedpriv.core.errors import InputError

_MAX_ROUNDS = 100_000
_MAX_STEP, _MIN_STEP = 4e-4, 1e-5  # steps of the lattice of losses
_STEP_BUDGET = 6e-3  # the step times √rounds: what it adds to ε grows with the square of this
_COARSE_FACTOR = 10.0  # than the fine step, in a search
_MAX_GRID_SIZE, _PREVIEW_GRID_SIZE = 2**22, 2**12  # of the lattice, and of one by which it is refused
_GROUP_STEP_FACTOR = 4.0  # times the fine step, on the lattice of several units' losses
_USELESS_EPSILON, _USELESS_DELTA = 600.0, 1e-3  # so much less than `MOST_EPSILON` as few places may be wrong by
_MAX_GROUP_GRID_SIZE = 2**18  # places of it, on which the step is longer if need be
_MAX_VALUES = 2**22  # computed at a time
_TABLE_SIZE = 2**14  # places of a table of losses
_RANGE_STDS = 10.5  # standard deviations: beyond lies less than 1e-25
_MAX_NEWTON_STEPS, _NEWTON_TOLERANCE = (
    60,
    1e-9,
)  # steps at most, and how short the last one is in standard deviations


@dataclass(frozen=True)
class PoissonGaussian(Sampled):
    """Guarantee of `rounds` releases of the Poisson-sampled Gaussian mechanism together.

    Guarantee: under zero-out neighbours differ by one unit whose increments are 0 in one of them; under
    replace-one by a unit that is another one, drawn by the same coins.  Increments may depend on all earlier
    releases. Everybody may see every release; who was drawn stays secret from them.
    """

    sampling_rate: float
    """The probability, above 0 and at most 1, with which a unit takes part in a round (of its class)."""
    rounds: int
    """Rounds (of a unit's class) in which a coin is thrown for it."""
    relation: Relation = "zero-out"

    kind: ClassVar[str] = "poisson-gaussian"
    title: ClassVar[str] = "Poisson sampling"

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        relation_named(self.relation)
        if not 0.0 < self.sampling_rate <= 1.0:
            raise InputError(f"sampling_rate = {self.sampling_rate}: a probability above 0 and at most 1")
        if not 1 <= self.rounds <= _MAX_ROUNDS:
            raise InputError(f"rounds = {self.rounds}: there are 1 to {_MAX_ROUNDS:,}")

    @property
    def curve(self) -> Curve:
        """An upper bound of δ for every ε ≥ 0."""
        return _cached_curve(self)

    @property
    def times(self) -> int:
        """In how many rounds a unit takes part whose coins all come up heads."""
        return self.rounds

    def group_curve(self, size: int) -> Curve:
        """The curve of `size` units together, from the law of how many of them join.

        Guarantee: each of them joins by a coin of its own, in rounds of one class or of several.
        """
        return _cached_group_curve(self, check_group_size(size))

    def event(self) -> tuple[str, Event]:
        sampled = {
            "class": "PoissonSampledDpEvent",
            "sampling_probability": self.sampling_rate,
            "event": gaussian_event(self.noise_multiplier),
        }
        return REPLACE if self.relation == "replace-one" else ADD_OR_REMOVE, repeated_event(sampled, self.rounds)


def _grid_step(rounds: int) -> float:
    return max(_MIN_STEP, min(_MAX_STEP, _STEP_BUDGET / math.sqrt(rounds)))


@lru_cache(maxsize=4)  # up to tens of megabytes each
def _cached_curve(mechanism: PoissonGaussian) -> Curve:
    """InputError where ε is beyond what is a float, before a long grid is built."""
    one = _RoundHockeyStick.from_mechanism(
        mechanism, "REPLACE" if mechanism.relation == "replace-one" else "REMOVE"
    )
    if one.is_useless(mechanism.rounds):
        raise InputError(
            f"noise_multiplier = {mechanism.noise_multiplier:.3g}: ε of {mechanism.rounds:,} rounds is above "
            f"{_USELESS_EPSILON:g} at delta = {_USELESS_DELTA:g}, which protects nobody; take more noise"
        )
    return _curve(mechanism, _grid_step(mechanism.rounds))


def _curve(mechanism: PoissonGaussian, step: float) -> Curve:
    """The smaller of two bounds: the pair's, and that of coins that everybody sees come up heads."""
    known = gaussian_curve(mechanism.known_mu)
    if mechanism.relation == "replace-one":
        return lowest_curve([known, _run_loss_distribution(mechanism, "REPLACE", step).deltas])
    return lowest_curve([known, highest_curve(removal_and_addition_curves(mechanism, step))])


def removal_and_addition_curves(mechanism: PoissonGaussian, step: float | None = None) -> tuple[Curve, Curve]:
    """The curves of a unit that is removed (P against Q) and of one that is added (Q against P), all rounds.

    Guarantee: each bounds its direction under zero-out, whatever `mechanism.relation` says.
    """
    step = _grid_step(mechanism.rounds) if step is None else step
    return _run_loss_distribution(mechanism, "REMOVE", step).deltas, _run_loss_distribution(
        mechanism, "ADD", step
    ).deltas


@dataclass(frozen=True)
class _RoundHockeyStick:
    """The hockey stick of one round, and the losses between which it lies."""

    deltas: Curve
    low: float
    high: float

    @staticmethod
    def from_mechanism(mechanism: PoissonGaussian, order: str) -> "_RoundHockeyStick":
        """dp-accounting's, in one of its orders."""
        from dp_accounting.pld import privacy_loss_mechanism as theirs  # slow to import: for who samples alone

        pair = theirs.GaussianPrivacyLoss(
            mechanism.noise_multiplier,
            sampling_prob=mechanism.sampling_rate,
            adjacency_type=theirs.AdjacencyType[order],
        )
        bounds = pair.connect_dots_bounds()
        return _RoundHockeyStick(pair.get_delta_for_epsilon, bounds.epsilon_lower, bounds.epsilon_upper)

    def to_grid(self, step: float) -> GridLossDistribution:
        """The law that is above it, on the multiples of `step`."""
        first, last = math.floor(self.low / step), math.ceil(self.high / step)
        return connect_dots(step, first, as_floats(self.deltas(as_floats(step * np.arange(first, last + 1)))))

    def is_useless(self, rounds: int) -> bool:
        """Whether ε of so many rounds is above 600 at δ = 1e-3, which protects nobody: by a few points."""
        few = self.to_grid((self.high - self.low) / _PREVIEW_GRID_SIZE)
        return float(few.self_compose(rounds).deltas(MAX_EPSILON)) > _USELESS_DELTA


_TRIVIAL_DISTRIBUTION = PrivacyLossDistribution(np.zeros(1), np.zeros(1), 1.0)


def _run_loss_distribution(mechanism: PoissonGaussian, order: str, step: float) -> PrivacyLossDistribution:
    """The law of the loss of all rounds; one that says nothing where they are hopeless."""
    one = _RoundHockeyStick.from_mechanism(mechanism, order)
    if one.is_useless(mechanism.rounds):
        return _TRIVIAL_DISTRIBUTION
    if one.high - one.low > _MAX_GRID_SIZE * step:
        raise InputError(
            f"noise_multiplier = {mechanism.noise_multiplier}: too small for a privacy loss distribution, whose "
            f"losses would reach {one.high:.3g}"
        )
    return one.to_grid(step).self_compose(mechanism.rounds)


@lru_cache(maxsize=4)
def _cached_group_curve(mechanism: PoissonGaussian, size: int) -> Curve:
    orders: tuple[GroupDirection, ...] = (
        ("replaced",) if mechanism.relation == "replace-one" else ("removed", "added")
    )
    curves = []
    for order in orders:
        pair = SampledGroupRound(mechanism.noise_multiplier, mechanism.sampling_rate, size, order)
        one = _RoundHockeyStick(
            pair.deltas, *(min(MAX_EPSILON, max(-MAX_EPSILON, end)) for end in pair.loss_range)
        )
        step = max(_GROUP_STEP_FACTOR * _grid_step(mechanism.rounds), (one.high - one.low) / _MAX_GROUP_GRID_SIZE)
        law = (
            _TRIVIAL_DISTRIBUTION
            if one.is_useless(mechanism.rounds)
            else one.to_grid(step).self_compose(mechanism.rounds)
        )
        curves.append(law.deltas)
    return highest_curve(curves)


GroupDirection = Literal["removed", "added", "replaced"]
"""What P has more than Q: the units, nothing (Q has them), or the units while Q has others."""


@dataclass(frozen=True)
class SampledGroupRound:
    """One round of `size` units that each join with probability `rate`, in one order.

    P is N(Bin(size, rate), z²) if units are removed or replaced, Q is N(-Bin(size, rate), z²) if they are added or
    replaced; otherwise they are N(0, z²).  With l(x) = ln Σ_j p_j e^(jx/z² - j²/2z²) the loss is l(x), -l(-x), or
    l(x) - l(-x).  Each rises with x, so that the best test for every ε is a threshold.
    """

    multiplier: float
    """z."""
    rate: float
    size: int
    direction: GroupDirection

    @property
    def loss_range(self) -> tuple[float, float]:
        """The losses between which all but 1e-25 of the mass of P lies."""
        low, high = self.loss_at(self._output_range)
        return float(low), float(high)

    def loss_at(self, at: Floats) -> Floats:
        """The loss at x."""
        return self._p_mean * self._log_ratio(at)[0] - self._q_mean * self._log_ratio(-at)[0]

    def deltas(self, epsilons: Floats) -> Floats:
        """The hockey stick of P against Q at every ε, (n,)."""
        rows = max(1, _MAX_VALUES // (self.size + 1))
        parts = [self._deltas(epsilons[start : start + rows]) for start in range(0, len(epsilons), rows)]
        return np.concatenate(parts)

    def _deltas(self, epsilons: Floats) -> Floats:
        at, z = self._thresholds(epsilons)[:, None], self.multiplier
        probabilities = np.exp(self._log_probabilities)
        of_p = ndtr((self._p_mean * self._participant_counts - at) / z) @ probabilities
        of_q = ndtr((-self._q_mean * self._participant_counts - at) / z) @ probabilities
        return as_floats(np.clip(of_p - np.exp(epsilons) * of_q, 0.0, 1.0))

    def _thresholds(self, epsilons: Floats) -> Floats:
        """x where the loss is ε, or the end of the range that is nearest: beyond both lies less than 1e-25 of P.

        δ is flat there, so that an error e in x costs e² only.  Newton's steps start between two places of a table
        and stay there; every fourth one halves what is left instead.
        """
        start, end = self._output_range.tolist()
        places = np.linspace(start, end, _TABLE_SIZE)
        table = np.maximum.accumulate(self.loss_at(places))
        after = np.searchsorted(table, epsilons)
        low, high = places[np.maximum(after - 1, 0)], places[np.minimum(after, _TABLE_SIZE - 1)]
        at = np.clip(np.interp(epsilons, table, places), low, high)
        for step in range(1, _MAX_NEWTON_STEPS):
            (own, own_slope), (other, other_slope) = self._log_ratio(at), self._log_ratio(-at)
            excess = self._p_mean * own - self._q_mean * other - epsilons
            low, high = np.where(excess < 0.0, at, low), np.where(excess < 0.0, high, at)
            with np.errstate(divide="ignore", invalid="ignore"):
                away = -excess / (self._p_mean * own_slope + self._q_mean * other_slope)
            far = np.abs(away) > _NEWTON_TOLERANCE * self.multiplier
            halved = ~((low <= at + away) & (at + away <= high)) | (far & (step % 4 == 0))
            moved = np.where(halved, 0.5 * (low + high) - at, away)
            at = at + moved
            if float(np.max(np.abs(moved))) <= _NEWTON_TOLERANCE * self.multiplier:
                break
        return as_floats(at)

    def _log_ratio(self, at: Floats) -> tuple[Floats, Floats]:
        """l and its derivative at x, each (n,)."""
        logs = (
            self._log_probabilities
            + (np.multiply.outer(at, self._participant_counts) - 0.5 * self._participant_counts**2)
            / self.multiplier**2
        )
        largest = logs.max(axis=-1, keepdims=True)
        parts = np.exp(logs - largest)
        total = parts.sum(axis=-1)
        return np.log(total) + largest[..., 0], parts @ self._participant_counts / (total * self.multiplier**2)

    @property
    def _output_range(self) -> Floats:
        far = _RANGE_STDS * self.multiplier
        return np.array([-far, far + self._p_mean * self.size])

    @property
    def _p_mean(self) -> float:
        return 0.0 if self.direction == "added" else 1.0

    @property
    def _q_mean(self) -> float:
        return 0.0 if self.direction == "removed" else 1.0

    @property
    def _participant_counts(self) -> Floats:
        return np.arange(self.size + 1, dtype=np.float64)

    @property
    def _log_probabilities(self) -> Floats:
        """ln P[Bin(size, rate) = j]."""
        joined, size = self._participant_counts, float(self.size)
        with np.errstate(divide="ignore"):
            heads, tails = np.log(self.rate), np.log1p(-self.rate)
        counts = gammaln(size + 1.0) - gammaln(joined + 1.0) - gammaln(size - joined + 1.0)
        several = np.where(joined == size, 0.0, size - joined) * (tails if self.rate < 1.0 else -1e300)
        return np.asarray(counts + joined * heads + several, np.float64)


def connect_dots(step: float, low: int, deltas: Floats) -> GridLossDistribution:
    """The law on the multiples of `step` from `low` on whose hockey stick has the given values there.

    Between two points it is the chord in e^ε, which lies above the true, convex one.  Guarantee: its δ is at least
    that of any pair with these values, for one release or in a composition.
    """
    falling = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    falls = -np.diff(falling)
    masses = np.empty_like(falling)
    masses[0] = 1.0 - falling[0] - falls[0] / math.expm1(step)
    masses[1:-1] = (math.exp(step) * falls[:-1] - falls[1:]) / math.expm1(step)
    masses[-1] = falls[-1] / -math.expm1(-step)
    return GridLossDistribution(step, low, np.maximum(masses, 0.0), float(falling[-1]))


@lru_cache(maxsize=256)
def calibrate(
    epsilon: float, delta: float, sampling_rate: float, rounds: int, relation: Relation = "zero-out"
) -> PoissonGaussian:
    """The mechanism with about the smallest noise multiplier that is (`epsilon`, `delta`)-DP.

    Guarantee: the one returned is (`epsilon`, `delta`)-DP by its own `epsilon_of`.  InputError where no multiplier
    up to a million is, and for a δ below 1e-10.
    """

    def mechanism(multiplier: float) -> PoissonGaussian:
        return PoissonGaussian(multiplier, sampling_rate, rounds, relation)

    step = _grid_step(rounds)
    coarse, fine = (lambda z: _curve(mechanism(z), _COARSE_FACTOR * step)), (lambda z: _curve(mechanism(z), step))
    return mechanism(least_noise(epsilon, delta, coarse, fine))
