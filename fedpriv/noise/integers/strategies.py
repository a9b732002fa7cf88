"""Integer strategies: a lattice, a streaming C on integers, and the claim of an exact release.

    y_t = (C s)_t + z_t,   z_t from D(scale_t σ)^d

is what the rounds of a run release.  s_t are the sums of increments, the clipped contributions of a round's
records, as integers in units of the lattice, and D is discrete Gaussian noise.  Vectors with the same scale form a
group.  Where C has coefficients other than 0 and 1 its products are rounded to integers, and neighbours may round
differently.  `NoiseGroup.rounding_difference` bounds the difference.

An `ExactClaim` leads from a sensitivity in integers to σ in units, and to μ.  Let v_t be the difference of (C s)_t
between neighbours, with Σ ‖v_t / scale_t‖² ≤ Δ².  For h = 16 the run is μ-GDP with

    μ = Δ / √(σ² - h²),   δ(ε) ≤ δ_μ(ε) + (1 + e^ε) τ

up to a factor so close to 1 that floats round it to 1.  τ is the total variation between the noise that is drawn
and D(σ).  With scales other than 1 h² is 256 / min scale², so that every value keeps 16 units.  M shares D(σ₁) add
up to D(σ₁ √M), up to such a factor for σ₁ ≥ 24.  Proof, after Peikert 2010 (Theorem 3.1), Denisov et al. 2022 and
Smith & Thakurta 2022: docs/proofs/integer-releases.md.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.gaussian import APART, Relation, check_positive, factor_of
from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.integers.fixed_point import COEFFICIENT_ONE, Ints
from fedpriv.noise.series import Workload
from fedpriv.participation.orders import MinSeparation

MAX_KAPPA = 36
"""κ of the finest lattice, with 2^36 to 2^37 units in the largest clip.

Sums, noise or words may require a smaller κ.
"""
_MIN_CLIP, _MAX_CLIP = 2.0**-40, 2.0**40


@dataclass(frozen=True)
class Lattice:
    """Lattice of the multiples of the unit u = 2^`exponent`, on which real numbers become integers."""

    exponent: int
    """Binary logarithm of the unit."""

    @property
    def unit(self) -> float:
        """Unit u of the lattice."""
        return math.ldexp(1.0, self.exponent)

    def norm(self, clip: float) -> int:
        """Compute K = ⌊clip / u⌋ exactly."""
        return math.floor(math.ldexp(clip, -self.exponent))

    def factor(self, batches: int = 1) -> float:
        """Units per unit of an increment, in a round whose sum is divided by this many batches."""
        return math.ldexp(1.0 / batches, -self.exponent)


def choose_lattice(clips: Sequence[float], kappa: int) -> Lattice:
    """Return the lattice of unit u = 2^(⌊log2 of the largest clip⌋ - κ).

    Args:
        clips: All clips of the run.
        kappa: κ.

    Raises:
        InputError: A clip is outside of 2^-40 … 2^40.
    """
    min_clip, max_clip = min(clips), max(clips)
    if not _MIN_CLIP <= min_clip <= max_clip <= _MAX_CLIP:
        raise InputError(
            f"clips from {min_clip:g} to {max_clip:g}: integers need them to lie between 2^-40 and 2^40"
        )
    return Lattice(math.frexp(max_clip)[1] - 1 - kappa)


IntState = tuple[Ints, ...]
"""Vectors, each shaped like one vector of a round's sums."""

LoadBounds = tuple[int, ...]
"""Bound of |s_t| in every coordinate for one round, a number for each vector that the round takes."""


class NoiseGroup(NamedTuple):
    """Fresh vectors with the same size of noise."""

    vector_count: int
    """Number of these vectors in the run."""
    scale: float
    """Noise of these vectors in multiples of σ."""
    rounding_difference: Fraction
    """Bound e on the difference between neighbours that rounding adds to one coordinate of (C s)_t."""


class IntegerBounds(NamedTuple):
    """Bounds over the whole run, in units of the lattice."""

    max_output: int
    """R, the bound of the absolute value of every coordinate of (C s)_t."""
    max_intermediate: int
    """Bound of the absolute value of every integer on the way, which has to stay below 2^61."""


class IntegerStrategy(Protocol):
    """Streaming C on integers.

    t counts from 1, rounds come in order, and a missed round's sums are zeros.

    Guarantee: for neighbouring streams of sums, and the C whose decays and weights are the strategy's multiples of
    2^-31, the difference of the output of `step` is C times the difference of the sums, ± at most
    `NoiseGroup.rounding_difference` in every coordinate.
    """

    def draws(self, t: int) -> int | None:
        """Number of vectors that a round takes and returns, or None for a single one that is not stacked."""
        return None

    def noise_scales(self, t: int) -> tuple[float, ...]:
        """Noise of each vector of round t in multiples of σ, by which y_t is divided before B."""
        return (1.0,)

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        """Return all fresh vectors of a run, in groups of equal noise.

        Args:
            rounds: T.
            participations: Most rounds in which a record takes part.
        """
        ...

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        """Bound the integers of a run with these loads, computed in Python integers."""
        ...

    def initial_state(self) -> IntState:
        """Return the state before round 1."""
        return ()

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """Compute (C s)_t and the next state.

        Callers must not write into the sums or the output, which may become part of the state.

        Args:
            state: State before round t.
            t: Round.
            sums: Round t's sums, bounded by its load: (..., d), or (draws, ..., d).

        Returns:
            (C s)_t, shaped like `sums`, and the state.
        """
        ...


def check_decay(decay: int) -> None:
    """Check that a decay, in multiples of 2^-31, is from 0 to 1.

    Raises:
        InputError: The decay is not in this range.
    """
    if not 0 <= decay <= COEFFICIENT_ONE:
        raise InputError(f"decay = {decay} / 2^31: sums decay by a factor from 0 to 1")


def accumulated_rounding(decay: int, rounds: int) -> Fraction:
    """Bound the sum of roundings of at most 1 a round under decay: min(rounds, 1 / (1 - decay)).

    The bound is 0 for decays of 0 and 1, with which nothing is rounded.

    Args:
        decay: Decay in multiples of 2^-31.
        rounds: Number of rounds.

    Example:
        >>> accumulated_rounding(COEFFICIENT_ONE // 2, 10)
        Fraction(2, 1)
    """
    return (
        Fraction(0)
        if decay in (0, COEFFICIENT_ONE)
        else min(Fraction(rounds), Fraction(COEFFICIENT_ONE, COEFFICIENT_ONE - decay))
    )


def participations_per_record(workload: Workload) -> int:
    """Most rounds in which a record takes part, for a workload with public participation."""
    schedule = workload.schedule
    if schedule.single_pass:
        return 1
    return (
        schedule.max_rounds_per_record
        if isinstance(schedule, MinSeparation)
        else -(-schedule.rounds // schedule.rounds_per_epoch)
    )


_HEADER = struct.Struct("<4sQQ")
"""Header of a state: tag, number of vectors, values of a vector.  The vectors follow, little-endian."""
_STATE_TAG = b"int1"
_LITTLE = np.dtype("<i8")


def pack_state(state: IntState) -> bytes:
    """Convert a state to bytes: any number of vectors of one shape (d,)."""
    size = state[0].size if state else 0
    return b"".join(
        (_HEADER.pack(_STATE_TAG, len(state), size), *(vector.astype(_LITTLE).tobytes() for vector in state))
    )


def unpack_state(packed: bytes) -> IntState:
    """Read a state, vectors (d,) that must not be written into, from the output of `pack_state`.

    Raises:
        RunError: The bytes do not begin with the tag of a state, or have another length than their header says.
    """
    if len(packed) < _HEADER.size:
        raise RunError("the strategy's state is cut off")
    tag, count, size = _HEADER.unpack_from(packed)
    if tag != _STATE_TAG or len(packed) != _HEADER.size + math.prod((count, size, _LITTLE.itemsize)):
        raise RunError("the strategy's state is cut off, or is something else")
    values: Ints = np.frombuffer(packed, _LITTLE, offset=_HEADER.size).astype(np.int64, copy=False)
    return tuple(values.reshape(count, size)) if count else ()


def sqrt_above(value: Fraction) -> float:
    """Compute the smallest float ≥ 0 whose square is at least `value` ≥ 0, a root rounded up.

    Args:
        value: Any rational ≥ 0 whose root is within the range of floats.
    """
    # Exact squares show when the result is right.
    root = _approximate_root(value)
    while Fraction(root) ** 2 < value:
        root = math.nextafter(root, math.inf)
    while root > 0.0 and Fraction(next_root := math.nextafter(root, 0.0)) ** 2 >= value:
        root = next_root
    return root


def round_up_to_float(value: Fraction) -> float:
    """Compute the smallest float that is not below `value`."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def _approximate_root(value: Fraction) -> float:
    """Compute a root that is a float within a few units in the last place, without overflow."""
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(float(value / Fraction(4) ** shift)), shift)


MIN_SIGMA, MAX_SIGMA = 2.0**16, 2.0**48
"""Range of σ of every fresh vector of every party, in units, without its upper end."""
_DEDUCTED_VARIANCE = Fraction(256)
"""h² for noise of scale 1."""
_FLOAT_FACTOR = 1 + Fraction(1, 2**40)
"""Factor above the rounding errors of a certified sensitivity and of one last rounding."""
_VALUE_SLACK = Fraction(1, 2**120)
"""Bound of the total variation between a drawn value and D(σ), for random words."""
_KEY_SLACK = Fraction(1, 2**125)
"""Bound of the total variation of a key's blocks and random words, per squared number of values."""


@dataclass(frozen=True)
class ExactClaim:
    """Claim of `mu`-GDP up to `slack` in total variation, if AES-256 and HMAC-SHA-256 are pseudorandom."""

    distance: float
    """Δ, by which one record can move C s over all rounds, in units and relative to the scales of noise."""
    sigma: float
    """σ of one party's noise of scale 1, in units."""
    party_count: int
    """Number of parties that each add noise of `sigma`."""
    mu: float
    """Upper bound of Δ / √(M σ² - h²), computed from the `sigma` σ that is used and M = `party_count`."""
    slack: float
    """τ, a bound of the total variation between the noise that is drawn and D(σ)."""

    def sigma_of(self, scale: float) -> float:
        """Compute σ_t of one party's fresh vector, not below scale · σ."""
        return round_up_to_float(Fraction(scale) * Fraction(self.sigma))

    def delta_of(self, epsilon: float) -> float:
        """Compute δ(ε) of the whole run, slack included."""
        slack = (1.0 + math.exp(epsilon)) * self.slack if epsilon < 700.0 else math.inf
        return min(1.0, math.nextafter(gdp.delta_of(self.mu, epsilon) + slack, math.inf))


def integer_distance(
    sensitivity: float,
    relation: Relation,
    groups: Sequence[NoiseGroup],
    dimension: int,
    rounding_factor: Fraction = Fraction(1),
    increment_diameter: float = APART,
) -> float:
    """Compute Δ, the distance by which one record can move all of C s, rounded up.

    Δ = a · sensitivity · (1 + 2^-40) · `rounding_factor` + √(Σ (e / scale)²), in units of the lattice and relative
    to the scales of noise.  a is 1 under zero-out, and `increment_diameter`, at most 2, under replace-one.  The
    sum is over all released values, with e the bound of the difference of two roundings (`rounding_difference`).

    Args:
        sensitivity: Sensitivity of C for integers of norm K_t under zero-out, relative to the scales of noise.
        relation: Neighbouring relation.
        groups: Groups of fresh vectors.
        dimension: d, values of a vector.
        rounding_factor: Factor of the sensitivity for rounded coefficients.
        increment_diameter: Largest distance of two records' integers, in clips.
    """
    rounding = Fraction(0)
    for vector_count, scale, difference in groups:
        rounding += dimension * vector_count * (difference / Fraction(scale)) ** 2 if difference else 0
    linear = (
        Fraction(factor_of(relation, increment_diameter)) * Fraction(sensitivity) * _FLOAT_FACTOR * rounding_factor
    )
    return round_up_to_float(linear + Fraction(sqrt_above(rounding)))


def claim_for_mu(
    distance: float,
    mu: float,
    groups: Sequence[NoiseGroup],
    dimension: int,
    draws: Sequence[int],
    party_count: int = 1,
) -> ExactClaim:
    """Claim of the smallest noise that gives μ, in equal shares of all parties.

    Guarantee: with noise D(sigma_of(scale)) of every party, (C s)_t + z_t of all rounds is `ExactClaim.mu`-GDP up
    to `ExactClaim.slack`, and so is everything computed from it; `ExactClaim.mu` ≤ `mu` (1 + 2^-39).

    Args:
        distance: Δ.
        mu: μ.
        groups: Groups of fresh vectors.
        dimension: d.
        draws: Number of fresh vectors of every round.
        party_count: Number of parties that add noise.

    Raises:
        InputError: μ is not finite or not above 0, a group has no noise, or a group's σ is outside of 2^16 … 2^48.
    """
    check_positive("mu", mu)
    sigma = sqrt_above(total_variance(distance, mu, groups) / party_count)
    return claim_for_sigma(distance, sigma, groups, dimension, draws, party_count)


def claim_for_sigma(
    distance: float,
    sigma: float,
    groups: Sequence[NoiseGroup],
    dimension: int,
    draws: Sequence[int],
    party_count: int = 1,
) -> ExactClaim:
    """Return the claim of M parties with noise of `sigma` units each: μ = Δ / √(M σ² - h²), rounded up.

    h², 256 for noise of scale 1, is deducted because the noise is discrete.

    Guarantee: with this noise of every party, (C s)_t + z_t of all rounds is μ-GDP up to `ExactClaim.slack`, and
    so is everything computed from it.

    Args:
        distance: Δ, by which one record can move C s, from `integer_distance`.
        sigma: σ of one party's noise of scale 1, in units.
        groups: Noise vectors of the run, grouped by their scale.
        dimension: d.
        draws: Number of noise vectors of each round, (T,).
        party_count: M, number of parties that add noise.

    Raises:
        InputError: `sigma` is not finite or not above 0, M σ² is not above h², a group has no noise, or a group's
            σ is below 2^16, or 2^48 or more.
    """
    variance = party_count * Fraction(check_positive("sigma", sigma)) ** 2 - _deducted_variance(groups)
    if not variance > 0:
        raise InputError(f"noise of {sigma:.4g} units: exact releases draw from 2^16 to 2^48 units")
    mu = round_up_to_float(Fraction(sqrt_above(Fraction(distance) ** 2 / variance)) * _FLOAT_FACTOR)
    claim = ExactClaim(distance, sigma, party_count, mu, _slack(dimension, draws, party_count))
    for _, scale, _ in groups:
        if not MIN_SIGMA <= claim.sigma_of(scale) < MAX_SIGMA:
            raise InputError(
                f"noise of {claim.sigma_of(scale):.4g} units: exact releases draw from 2^16 to 2^48 units; choose "
                "another mu, fewer parties that add noise, or groups whose noises are closer to each other"
            )
    return claim


def total_variance(distance: float, mu: float, groups: Sequence[NoiseGroup]) -> Fraction:
    """Compute (Δ / μ)² + h², the variance of all parties' noise of scale 1 together, in squared units.

    Args:
        distance: Δ, in units.
        mu: μ > 0.
        groups: Groups of fresh vectors.

    Raises:
        InputError: A group has no noise.
    """
    return (Fraction(distance) / Fraction(mu)) ** 2 + _deducted_variance(groups)


def _deducted_variance(groups: Sequence[NoiseGroup]) -> Fraction:
    """Compute h² in squared units for noise of scale 1, 256 over the square of the smallest scale.

    Raises:
        InputError: A group has no noise.
    """
    scales = [Fraction(scale) for _, scale, _ in groups]
    if not min(scales) > 0:
        raise InputError("a released group of nodes has no noise")
    return _DEDUCTED_VARIANCE / min(scales) ** 2


def _slack(dimension: int, draws: Sequence[int], party_count: int) -> float:
    """Compute τ: 2^-120 for each value, and E[blocks²] / 2^129 for each key, since AES is a permutation.

    The second term is at most 16 values² / 2^129.  A key serves one party and round.  A value takes 2 blocks an
    attempt, and an attempt succeeds with probability 0.97 or more.
    """
    values = [dimension * count for count in draws]
    return round_up_to_float(
        party_count * (sum(values) * _VALUE_SLACK + sum(count**2 for count in values) * _KEY_SLACK)
    )
