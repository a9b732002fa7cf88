"""DP-SGD with Poisson sampling under either relation, zero-out and replace-one.

A unit is what neighbours differ in, such as a record, and its increment is its contribution to a round, clipped to
norm C.  Every round each unit takes part independently with probability q = `sampling_rate`.  The sum of the
increments of the units that take part is released with Gaussian noise of standard deviation z · C per coordinate,
z = `noise_multiplier`.  It may be divided by a public number, never by the number of units drawn.  With public
classes of rounds, which take turns, a unit may be drawn in the rounds of its class only.  One round is dominated
by these pairs, in both orders for zero-out.

    zero-out      (1 - q) N(0, z²) + q N(1, z²)   and   N(0, z²)
    replace-one   (1 - q) N(0, z²) + q N(1, z²)   and   (1 - q) N(0, z²) + q N(-1, z²)

The second pair is its own mirror image.  The distance 2C of replace-one is in this pair: z is σ/C under both
relations.  The hockey stick H_ε(P‖Q), the largest P(A) - e^ε Q(A) of any event A, is the smallest δ at ε in this
order of the pair.

Of k units together each is drawn independently, and one round is dominated by these pairs:

    zero-out      N(Bin(k, q), z²)   and   N(0, z²), in both orders
    replace-one   N(Bin(k, q), z²)   and   N(-Bin(k, q), z²)

Proof, for increments that are any functions of the past: docs/proofs/poisson.md.

Sources: Abadi et al. 2016, Algorithm 1, for the mechanism; dp-accounting for the hockey stick of one unit in one
round; Doroshenko et al. 2022 ("connect the dots") for its loss distribution; Choquette-Choo et al. 2023, Corollary
4.7, and Ganesh 2024 for groups.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from scipy.special import gammaln, log_ndtr, ndtr, ndtri

from fedpriv.accounting.curves import (
    MAX_EPSILON,
    Curve,
    Floats,
    as_floats,
    check_group_size,
    gaussian_curve,
    group_mu,
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
_MAX_STEP, _MIN_STEP = 4e-4, 1e-5  # range of the step of the grid of losses
_STEP_BUDGET = 6e-3  # step times √rounds; the error in ε grows with the square of this product
_COARSE_FACTOR = 10.0  # ratio of the coarse to the fine step, in a search
_MAX_GRID_SIZE, _PREVIEW_GRID_SIZE = 2**22, 2**12  # points of the full grid, and of the preview that may refuse it
_GROUP_STEP_FACTOR = 4.0  # ratio of the step for several units' losses to the fine step
_USELESS_EPSILON, _USELESS_DELTA = 600.0, 1e-3  # as far below `MAX_EPSILON` as a preview's error may reach
_MAX_GROUP_GRID_SIZE = 2**18  # points of the grid of several units' losses, whose step is raised if need be
# Values computed at a time for a hockey stick, and points of a table of losses.
_MAX_VALUES, _TABLE_SIZE = 2**22, 2**14
_MAX_GROUP_SIZE = 1_000  # a curve of more units would take longer than a quarter of an hour
_RANGE_STDS = 10.5  # standard deviations, beyond which lies less than 1e-25
_MAX_NEWTON_STEPS, _NEWTON_TOLERANCE = 60, 1e-9  # the tolerance of a step is in standard deviations


@dataclass(frozen=True)
class PoissonGaussian(Sampled):
    """Guarantee of `rounds` releases of the Poisson-sampled Gaussian mechanism together.

    Guarantee: under zero-out neighbours differ by one unit whose increments are 0 in one of them.  Under
    replace-one they differ by a unit that is exchanged for another one, drawn in the same rounds.  Increments may
    depend on all earlier releases.  Everybody may see every release, but not which units are drawn.

    Raises:
        InputError: A number or the relation is out of its range.

    Example:
        >>> guarantee = PoissonGaussian(noise_multiplier=2.0, sampling_rate=0.1, rounds=10)
        >>> round(guarantee.epsilon_of(1e-5), 3)
        0.798
    """

    sampling_rate: float
    """Probability, above 0 and at most 1, with which a unit takes part in a round (of its class)."""
    rounds: int
    """Number of rounds (of a unit's class) in which the unit may be drawn."""
    relation: Relation = "zero-out"
    """Neighbouring relation."""

    kind: ClassVar[str] = "poisson-gaussian"
    title: ClassVar[str] = "Poisson sampling"

    def __post_init__(self) -> None:
        if not 1e-3 <= check_positive("noise_multiplier", self.noise_multiplier) <= 1e100:
            raise InputError(f"noise_multiplier = {self.noise_multiplier}: it is a number from 0.001 to 1e100")
        relation_named(self.relation)
        if not 0.0 < self.sampling_rate <= 1.0:
            raise InputError(f"sampling_rate = {self.sampling_rate}: a probability above 0 and at most 1")
        if not 1 <= self.rounds <= _MAX_ROUNDS:
            raise InputError(f"rounds = {self.rounds}: there are 1 to {_MAX_ROUNDS:,}")

    @property
    def curve(self) -> Curve:
        """Upper bound of δ for every ε ≥ 0.

        Raises:
            InputError: ε is above 600 at δ = 1e-3, or the noise is too small for a grid of losses.
        """
        return _cached_curve(self)

    @property
    def times(self) -> int:
        """Largest number of rounds in which a unit takes part, as if it were drawn in all of them."""
        return self.rounds

    def group_curve(self, size: int) -> Curve:
        """Return the curve of `size` units together, from the distribution of the number that take part.

        For more than 1,000 units, for which this takes too long, the rounds count as known.

        Guarantee: the curve holds for units that are drawn independently, in rounds of one class or of several.
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
    """Return `PoissonGaussian.curve`, cached, after refusing useless noise before a long grid is made."""
    round_stick = _RoundHockeyStick.from_mechanism(
        mechanism, "REPLACE" if mechanism.relation == "replace-one" else "REMOVE"
    )
    if round_stick.is_useless(mechanism.rounds):
        raise InputError(
            f"noise_multiplier = {mechanism.noise_multiplier:.3g}: ε of {mechanism.rounds:,} rounds is above "
            f"{_USELESS_EPSILON:g} at delta = {_USELESS_DELTA:g}, which protects nobody; take more noise"
        )
    return _curve(mechanism, _grid_step(mechanism.rounds))


def _curve(mechanism: PoissonGaussian, step: float) -> Curve:
    """Return the smaller of two bounds: that of the pair, and that of known participation in all rounds."""
    known_curve = gaussian_curve(mechanism.known_mu)
    if mechanism.relation == "replace-one":
        return lowest_curve([known_curve, _run_loss_distribution(mechanism, "REPLACE", step).deltas])
    return lowest_curve([known_curve, highest_curve(removal_and_addition_curves(mechanism, step))])


def removal_and_addition_curves(mechanism: PoissonGaussian, step: float | None = None) -> tuple[Curve, Curve]:
    """Return the curves of removal (P against Q) and of addition (Q against P) of a unit, over all rounds.

    Guarantee: each curve bounds its direction under zero-out, whatever `mechanism.relation` is.

    Args:
        mechanism: Mechanism of the run.
        step: Step of the grid of losses, or None for the default of this number of rounds.

    Raises:
        InputError: The noise is too small for a grid of losses.
    """
    step = _grid_step(mechanism.rounds) if step is None else step
    return _run_loss_distribution(mechanism, "REMOVE", step).deltas, _run_loss_distribution(
        mechanism, "ADD", step
    ).deltas


def _round_loss(output: float, q: float, z: float, order: str) -> float:
    """Compute the privacy loss of one round at an output, which falls as the output rises.

    Args:
        output: Output of the round.
        q: Sampling rate.
        z: Noise multiplier.
        order: "REMOVE", "ADD" or "REPLACE", for a unit that is removed, added or exchanged.
    """
    with np.errstate(divide="ignore", over="ignore"):
        # Logarithms of the ratios N(∓1, z²) : N(0, z²) at the output, and below those of the mixtures with rate q.
        unsampled = (0.5 + np.array([output, -output])) / -(z**2)
        large, small = np.logaddexp(np.log(q) + unsampled, np.log1p(-q)), np.log1p(q * np.expm1(unsampled))
        removal, addition = np.where((unsampled < 1.0) & (q < 0.5), small, large).tolist()
    return float({"REMOVE": removal, "ADD": -addition, "REPLACE": removal - addition}[order])


def _round_deltas(epsilons: Floats, q: float, z: float, order: str) -> Floats:
    """Compute the hockey stick H_ε(P‖Q) of one round at `epsilons` of either sign, (n,), for a pair P, Q.

    The pairs are those of the module's docstring, with sampling rate q and noise multiplier z, mirrored for REMOVE
    and REPLACE so that the loss falls as the output rises.

    | order | P | Q |
    |---|---|---|
    | REMOVE | (1 - q) N(0, z²) + q N(-1, z²) | N(0, z²) |
    | ADD | N(0, z²) | (1 - q) N(0, z²) + q N(1, z²) |
    | REPLACE | (1 - q) N(0, z²) + q N(-1, z²) | (1 - q) N(0, z²) + q N(1, z²) |

    H_ε is P(X) - e^ε Q(X) for the outputs X below the one at which the loss is ε.  This output is

    * -1/2 - z² log(1 + (e^ε - 1)/q) for REMOVE, and 1/2 + z² log(1 + (e^-ε - 1)/q) for ADD,
    * -z² (ε/2 + asinh(a sinh(ε/2))) with a = e^(1/(2z²)) (1 - q)/q for REPLACE.

    An error in the output changes H_ε by its square only, since the derivative is 0 there.

    Source: dp-accounting 0.6.0, `GaussianPrivacyLoss`, whose values these are up to rounding.
    """
    side = -1.0 if order == "ADD" else 1.0
    with np.errstate(all="ignore"):
        if order == "REPLACE":
            half = np.abs(epsilons) / 2.0
            # asinh(w) = log(w + √(1 + w²)), with log w = log_sinh, since w = a sinh(|ε|/2) may overflow.
            log_sinh = 0.5 / z**2 + np.log1p(-q) - np.log(q) + half + np.log(-np.expm1(-2.0 * half)) - np.log(2.0)
            outputs = (
                -np.sign(epsilons)
                * z**2
                * (np.logaddexp(log_sinh, 0.5 * np.logaddexp(0.0, 2.0 * log_sinh)) + half)
            )
            # The loss is odd in the output, so that ε = 0 is at 0.
            outputs = np.where(epsilons == 0.0, 0.0, outputs)
        else:
            # log(1 + (e^±ε - 1)/q), by a form for small and one for large values.
            signed = side * epsilons
            small, large = (
                np.log1p(np.expm1(signed) / q),
                signed - np.log(q) + np.log1p((q - 1.0) * np.exp(-signed)),
            )
            unsampled = signed if q == 1.0 else np.where(signed < 1.0, small, large)
            outputs = -side * (0.5 + z**2 * unsampled)
        first = (
            ndtr(outputs / z) if order == "ADD" else (1.0 - q) * ndtr(outputs / z) + q * ndtr((outputs + 1.0) / z)
        )
        log_second = log_ndtr(outputs / z)
        if order != "REMOVE":
            log_second = np.logaddexp(np.log1p(-q) + log_second, np.log(q) + log_ndtr((outputs - 1.0) / z))
        deltas = np.clip(np.nan_to_num(first - np.exp(epsilons + log_second), nan=1.0), 0.0, 1.0)
        if order == "REPLACE":
            return as_floats(deltas)
        # Where no output has a loss of ε, X is all outputs (REMOVE) or none (ADD).
        return as_floats(
            np.where(side * epsilons > np.log1p(-q), deltas, 0.0 if side < 0 else -np.expm1(epsilons))
        )


@dataclass(frozen=True)
class _RoundHockeyStick:
    """Hockey stick of one round, and the range of its losses."""

    deltas: Curve
    """Function ε -> H_ε(P‖Q), for ε of either sign."""
    low: float
    """Smallest loss that a grid has to reach."""
    high: float
    """Largest loss that a grid has to reach."""

    @staticmethod
    def from_mechanism(mechanism: PoissonGaussian, order: str) -> "_RoundHockeyStick":
        """Return the hockey stick of one round, for a unit that is removed, added or exchanged.

        Args:
            mechanism: Mechanism of the run.
            order: "REMOVE", "ADD" or "REPLACE".
        """
        q, z = mechanism.sampling_rate, mechanism.noise_multiplier
        # Outputs beyond either end have probability e^-50 / 2 at most under the first distribution of the pair.
        low_output = z * float(ndtri(0.5 * math.exp(-50.0)))
        low, high = low_output - (order != "ADD"), (order == "ADD") - low_output
        return _RoundHockeyStick(
            lambda epsilons: _round_deltas(as_floats(epsilons), q, z, order),
            _round_loss(high, q, z, order),
            _round_loss(low, q, z, order),
        )

    def to_grid(self, step: float) -> GridLossDistribution:
        """Return a loss distribution on the multiples of `step` whose hockey stick is at least this one."""
        first, last = math.floor(self.low / step), math.floor(self.high / step) + 1
        return connect_dots(step, first, as_floats(self.deltas(as_floats(step * np.arange(first, last + 1)))))

    def is_useless(self, rounds: int) -> bool:
        """Whether a bound of δ of `rounds` rounds at ε = 700, on a coarse grid, is above 1e-3.

        If so in removal or replacement, ε is above 600 at δ = 1e-3, which protects nobody.
        """
        # All outputs may have one loss, up to rounding.
        preview = self.to_grid(max(self.high - self.low, 2.0**-10) / _PREVIEW_GRID_SIZE)
        return float(preview.self_compose(rounds).deltas(MAX_EPSILON)) > _USELESS_DELTA


_TRIVIAL_DISTRIBUTION = PrivacyLossDistribution(np.zeros(1), np.zeros(1), 1.0)


def _run_loss_distribution(mechanism: PoissonGaussian, order: str, step: float) -> PrivacyLossDistribution:
    """Return the privacy loss distribution of all rounds of the run.

    All mass is at infinity if a coarse grid resolves no useful bound (`_RoundHockeyStick.is_useless`).

    Args:
        mechanism: Mechanism of the run.
        order: "REMOVE", "ADD" or "REPLACE", for a unit that is removed, added or exchanged.
        step: Step of the grid of losses.

    Raises:
        InputError: The grid of one round would be too long, because the noise is too small.
    """
    round_stick = _RoundHockeyStick.from_mechanism(mechanism, order)
    if round_stick.is_useless(mechanism.rounds):
        return _TRIVIAL_DISTRIBUTION
    if round_stick.high - round_stick.low > _MAX_GRID_SIZE * step:
        raise InputError(
            f"noise_multiplier = {mechanism.noise_multiplier}: too small for a privacy loss distribution, whose "
            f"losses would reach {round_stick.high:.3g}"
        )
    return round_stick.to_grid(step).self_compose(mechanism.rounds)


@lru_cache(maxsize=4)
def _cached_group_curve(mechanism: PoissonGaussian, size: int) -> Curve:
    """Return the curve of δ of `size` units, the highest over the directions of the relation, cached.

    Under zero-out the units are removed or added, and under replace-one they are replaced.  For each direction the
    privacy losses of one round become a distribution on a grid, which is composed with itself over all rounds.
    The grid ends at most one step beyond ±`MAX_EPSILON`.  A direction that a coarse grid shows to be useless
    (`_RoundHockeyStick.is_useless`) has the curve 1.  For more than 1,000 units the curve is that of known rounds.
    """
    directions: tuple[GroupDirection, ...] = (
        ("replaced",) if mechanism.relation == "replace-one" else ("removed", "added")
    )
    curves = []
    for direction in directions if size <= _MAX_GROUP_SIZE else ():
        pair = SampledGroupRound(mechanism.noise_multiplier, mechanism.sampling_rate, size, direction)
        round_stick = _RoundHockeyStick(
            pair.deltas, *(min(MAX_EPSILON, max(-MAX_EPSILON, end)) for end in pair.loss_range)
        )
        step = max(
            _GROUP_STEP_FACTOR * _grid_step(mechanism.rounds),
            (round_stick.high - round_stick.low) / _MAX_GROUP_GRID_SIZE,
        )
        distribution = (
            _TRIVIAL_DISTRIBUTION
            if round_stick.is_useless(mechanism.rounds)
            else round_stick.to_grid(step).self_compose(mechanism.rounds)
        )
        curves.append(distribution.deltas)
    return highest_curve(curves) if curves else gaussian_curve(group_mu(mechanism.known_mu, size))


GroupDirection = Literal["removed", "added", "replaced"]
"""Meaning of P and Q: units that only P has, units that only Q has, or P's units exchanged for Q's."""


@dataclass(frozen=True)
class SampledGroupRound:
    """One round of `size` units that each take part with probability `rate`, in one direction.

    P is N(Bin(size, rate), z²) if units are removed or replaced, else N(0, z²).  Q is N(-Bin(size, rate), z²) if
    they are added or replaced, else N(0, z²).  With p_j = P[Bin(size, rate) = j] and l(x) = ln Σ_j p_j e^(jx/z² -
    j²/2z²) the loss at an output x is l(x) if units are removed, -l(-x) if they are added, and l(x) - l(-x) if
    they are replaced.  Each rises with x, so that the best test for every ε is a threshold.
    """

    multiplier: float
    """Noise multiplier z."""
    rate: float
    """Probability q with which each unit takes part."""
    size: int
    """Number k of units."""
    direction: GroupDirection

    @property
    def loss_range(self) -> tuple[float, float]:
        """Losses between which all but 1e-25 of the mass of P lies."""
        low, high = self.loss_at(self._output_range)
        return float(low), float(high)

    def loss_at(self, outputs: Floats) -> Floats:
        """Return the loss at each output x, (n,)."""
        return self._p_mean * self._log_ratio(outputs)[0] - self._q_mean * self._log_ratio(-outputs)[0]

    def deltas(self, epsilons: Floats) -> Floats:
        """Return the hockey stick of P against Q at every ε, (n,)."""
        rows = max(1, _MAX_VALUES // (self.size + 1))
        return np.concatenate(
            [self._deltas(epsilons[start : start + rows]) for start in range(0, len(epsilons), rows)]
        )

    def _deltas(self, epsilons: Floats) -> Floats:
        thresholds, z = self._thresholds(epsilons)[:, None], self.multiplier
        probabilities = np.exp(self._log_probabilities)
        p_tails = ndtr((self._p_mean * self._participant_counts - thresholds) / z) @ probabilities
        q_tails = ndtr((-self._q_mean * self._participant_counts - thresholds) / z) @ probabilities
        return as_floats(np.clip(p_tails - np.exp(epsilons) * q_tails, 0.0, 1.0))

    def _thresholds(self, epsilons: Floats) -> Floats:
        """Return the output x at which the loss is ε, clipped to a range, for each of `epsilons`, (n,).

        The range leaves out less than 1e-25 of P.  A table of losses gives an interval for each x, in which
        Newton's steps start.  A step that would leave the interval halves it instead, and so does every fourth
        step, unless it is tiny.
        """
        start, end = self._output_range.tolist()
        grid = np.linspace(start, end, _TABLE_SIZE)
        table = np.maximum.accumulate(self.loss_at(grid))  # rises in spite of rounding
        upper_indices = np.searchsorted(table, epsilons)
        low, high = grid[np.maximum(upper_indices - 1, 0)], grid[np.minimum(upper_indices, _TABLE_SIZE - 1)]
        outputs = np.clip(np.interp(epsilons, table, grid), low, high)
        for step in range(1, _MAX_NEWTON_STEPS):
            (p_log_ratio, p_slope), (q_log_ratio, q_slope) = self._log_ratio(outputs), self._log_ratio(-outputs)
            # Loss minus ε, where the factors are 0 for a side without the units and 1 with them.
            excess = self._p_mean * p_log_ratio - self._q_mean * q_log_ratio - epsilons
            # The loss rises with x, so that x becomes the lower or the upper end of its interval.
            low, high = np.where(excess < 0.0, outputs, low), np.where(excess < 0.0, high, outputs)
            with np.errstate(divide="ignore", invalid="ignore"):
                newton_steps = -excess / (self._p_mean * p_slope + self._q_mean * q_slope)
            is_far = np.abs(newton_steps) > _NEWTON_TOLERANCE * self.multiplier
            is_halved = ~((low <= outputs + newton_steps) & (outputs + newton_steps <= high)) | (
                is_far & (step % 4 == 0)
            )
            moves = np.where(is_halved, 0.5 * (low + high) - outputs, newton_steps)
            outputs = outputs + moves
            if float(np.max(np.abs(moves))) <= _NEWTON_TOLERANCE * self.multiplier:
                break
        return as_floats(outputs)

    def _log_ratio(self, outputs: Floats) -> tuple[Floats, Floats]:
        """Return l of the class docstring and its derivative at each output x, each (n,)."""
        logs = (
            self._log_probabilities
            + (np.multiply.outer(outputs, self._participant_counts) - 0.5 * self._participant_counts**2)
            / self.multiplier**2
        )
        largest = logs.max(axis=-1, keepdims=True)
        terms = np.exp(logs - largest)
        total = terms.sum(axis=-1)
        return np.log(total) + largest[..., 0], terms @ self._participant_counts / (total * self.multiplier**2)

    @property
    def _output_range(self) -> Floats:
        tail_length = _RANGE_STDS * self.multiplier
        return np.array([-tail_length, tail_length + self._p_mean * self.size])

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
        """Logarithms of P[Bin(size, rate) = j] for j = 0 … size, (size + 1,).

        For rate 1 the logarithm of a probability 0 is a very negative finite number in place of -infinity.
        """
        participant_counts, size = self._participant_counts, float(self.size)
        with np.errstate(divide="ignore"):
            log_rate, log_absence = np.log(self.rate), np.log1p(-self.rate)
        log_choices = (
            gammaln(size + 1.0) - gammaln(participant_counts + 1.0) - gammaln(size - participant_counts + 1.0)
        )
        log_absences = np.where(participant_counts == size, 0.0, size - participant_counts) * (
            log_absence if self.rate < 1.0 else -1e300
        )
        return np.asarray(log_choices + participant_counts * log_rate + log_absences, np.float64)


def connect_dots(step: float, low: int, deltas: Floats) -> GridLossDistribution:
    """Return the loss distribution on multiples of `step` whose hockey stick has the given values there.

    Values are clipped to [0, 1], and lowered to earlier ones that are smaller.  Between two points the hockey
    stick is the chord in e^ε, which lies above the true, convex one.  With step h and the falls f_i = δ_(i-1) -
    δ_i of the values, the mass at an inner point i is (e^h f_i - f_(i+1)) / (e^h - 1), or 0 if that is negative.
    The last value is the mass at infinity.

    Guarantee: its δ is at least that of any pair with these values, for one release or in a composition.

    Args:
        step: Step of the grid.
        low: Index of the first point, ε = `low` · `step`.
        deltas: Hockey stick at the points, (n,), n ≥ 2.
    """
    stick = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    differences = -np.diff(stick)
    masses = np.empty_like(stick)
    masses[0] = 1.0 - stick[0] - differences[0] / math.expm1(step)
    masses[1:-1] = (math.exp(step) * differences[:-1] - differences[1:]) / math.expm1(step)
    masses[-1] = differences[-1] / -math.expm1(-step)
    return GridLossDistribution(step, low, np.maximum(masses, 0.0), float(stick[-1]))


@lru_cache(maxsize=256)
def calibrate(
    epsilon: float, delta: float, sampling_rate: float, rounds: int, relation: Relation = "zero-out"
) -> PoissonGaussian:
    """Return the mechanism with about the smallest noise multiplier that is (`epsilon`, `delta`)-DP.

    The multiplier is 0.1 or more, even if less noise were enough.

    Guarantee: the mechanism is (ε, δ)-DP.  For ε up to 600 and δ up to 1e-3, its `epsilon_of` at δ is at most
    ε (1 + 1e-12).  For a larger ε or δ, `epsilon_of` may refuse or be infinite.

    Args:
        epsilon: Target ε, above 0.
        delta: Target δ, from 1e-10 to below 1.
        sampling_rate: Probability with which a unit takes part in a round (of its class).
        rounds: Number of rounds (of a unit's class) in which the unit may be drawn.
        relation: Neighbouring relation.

    Raises:
        InputError: The search finds no multiplier up to a million, or tries one too small for a grid of losses, or
            an argument is out of its range.
    """

    def mechanism(multiplier: float) -> PoissonGaussian:
        return PoissonGaussian(multiplier, sampling_rate, rounds, relation)

    step = _grid_step(rounds)
    coarse, fine = (lambda z: _curve(mechanism(z), _COARSE_FACTOR * step)), (lambda z: _curve(mechanism(z), step))
    return mechanism(least_noise(epsilon, delta, coarse, fine))
