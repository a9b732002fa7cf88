"""A mechanism on integers: a lattice, a streaming C with int64 state, and its sensitivity.

    y_t = (C s)_t + z_t,   z_t from D(scale_t σ)^d

is all that may ever leave; everything after it, B included, is a function of y.  Where C has coefficients other
than 0 and 1 its products are rounded to integers, and neighbours may round apart: `Group.difference` bounds that.

`Mechanism.integer` gives a `Factored`; the `IntegerStrategy` of every mechanism is in the mechanism's own file.
A strategy's state as bytes: a header of three numbers, then the vectors, little-endian.

The claim of an exact release: from a sensitivity in integers to σ in units, and to the μ that is on record.

Let v_t be the difference of (C s)_t between neighbours, Σ ‖v_t / scale_t‖² ≤ Δ² on every transcript, and z_t from
D(scale_t σ)^d.  For h = 16, ε_h = 2 Σ_{j≥1} exp(-2π² h² j²) < 10^-2190:

1.  The Gaussian of variance σ² - h², rounded at random to an integer by D(h) around it, has the law D(σ) within
    factors exp(±2 ε_h) (Peikert 2010, Theorem 3.1); and for *integer* v the same rounding of x + v has the law of
    v + D(σ).  So a released value is post-processing of N(v, σ² - h²), within those factors.
2.  Gaussian releases with adaptive shifts of total squared norm Δ² are Δ / √(σ² - h²)-GDP (Denisov et al. 2022,
    Smith & Thakurta 2022).
3.  So the run is μ-GDP with μ = Δ / √(σ² - h²), up to e^η with η = 2 N ε_h (nothing, in floats) and up to τ, the
    total variation between the noise that is drawn and D(σ):  δ(ε) ≤ δ_μ(ε) + (1 + e^ε) τ.

With noise of several sizes h² is 256 / min scale², so that every value keeps 16 units.  M shares D(σ₁) add up to
D(σ₁ √M) within exp(±2 Σ_{m=2}^M ε_{σ₁ √((m-1)/m)}), nothing for σ₁ ≥ 24.

`sqrt_above` rounds square roots of rationals to the safe side, proven by comparing squares in integers.
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
"""The largest clip is 2^36 to 2^37 units, unless sums, noise or words need it to be less."""
_MIN_CLIP, _MAX_CLIP = 2.0**-40, 2.0**40


@dataclass(frozen=True)
class Lattice:
    """Multiples of 2^`exponent`."""

    exponent: int

    @property
    def unit(self) -> float:
        """u."""
        return math.ldexp(1.0, self.exponent)

    def norm(self, clip: float) -> int:
        """K = ⌊clip / u⌋, exactly."""
        return math.floor(math.ldexp(clip, -self.exponent))

    def factor(self, batches: int = 1) -> float:
        """Units per unit of an increment, in a round that reads so many batches and whose sum is divided by them.

        The clip that K belongs to has the same divisor in it.
        """
        return math.ldexp(1.0 / batches, -self.exponent)


def choose_lattice(clips: Sequence[float], kappa: int) -> Lattice:
    """u = 2^(⌊log2 of the largest clip⌋ - `kappa`); InputError for clips outside of 2^-40 … 2^40."""
    low, high = min(clips), max(clips)
    if not _MIN_CLIP <= low <= high <= _MAX_CLIP:
        raise InputError(f"clips from {low:g} to {high:g}: integers need them to lie between 2^-40 and 2^40")
    return Lattice(math.frexp(high)[1] - 1 - kappa)


IntState = tuple[Ints, ...]
"""Vectors shaped like a round's sums, their number a function of the round."""

LoadBounds = tuple[int, ...]
"""A bound on every coordinate of the sums of one round, one number for each vector that it takes."""


class NoiseGroup(NamedTuple):
    """Fresh vectors of one size of noise."""

    vector_count: int
    """Number of them in the run."""
    scale: float
    """Their noise in multiples of σ."""
    rounding_difference: Fraction
    """e: by how much one coordinate of (C s)_t can differ between neighbours beyond what C says, from rounding."""


class IntegerBounds(NamedTuple):
    """Bounds over the whole run, in units of the lattice."""

    max_output: int
    """R: of every coordinate of (C s)_t."""
    max_intermediate: int
    """Of every integer that is computed on the way, which has to stay below 2^61."""


class IntegerStrategy(Protocol):
    """A streaming C on integers; t counts from 1, rounds come in order, a missed round's sums are zeros.

    Guarantee: for neighbouring streams of sums, with rows of C as exact multiples of 2^-31, the difference of what
    `step` gives is C times the difference of the sums, ± at most `Group.difference` in every coordinate.
    """

    def draws(self, t: int) -> int | None:
        """Number of vectors that a round takes and gives, stacked; None for one that is not, as in `Mechanism`."""
        return None

    def noise_scales(self, t: int) -> tuple[float, ...]:
        """Of the noise of each vector of round t, in multiples of σ: what y_t is divided by on its way into B."""
        return (1.0,)

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        """All fresh vectors of a run in which a record takes part in at most so many rounds."""
        ...

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        """Bounds for a run with these loads, computed in Python integers."""
        ...

    def initial_state(self) -> IntState:
        """The state before round 1."""
        return ()

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """(C s)_t, shaped like `sums`: (..., d), or (draws, ..., d); and the next state.

        `sums` are round t's, bounded by its load.  They may become part of the state, and so may what comes back:
        do not write into either.
        """
        ...


def run_missed_rounds(
    strategy: IntegerStrategy, state: IntState, first: int, last: int, size: int
) -> tuple[list[Ints], IntState]:
    """(C s)_t of the missed rounds first … last (none if first > last), where s = 0, and the state after."""
    outputs = []
    for t in range(first, last + 1):
        count = strategy.draws(t)
        output, state = strategy.step(state, t, np.zeros(size if count is None else (count, size), np.int64))
        outputs.append(output)
    return outputs, state


def check_decay(decay: int) -> None:
    """InputError for a decay, counted in 2^-31, that is none."""
    if not 0 <= decay <= COEFFICIENT_ONE:
        raise InputError(f"decay = {decay} / 2^31: sums decay by a factor from 0 to 1")


def accumulated_rounding(decay: int, rounds: int) -> Fraction:
    """min(rounds, 1 / (1 - decay)): what roundings of at most 1 a round add up to; 0 where nothing is rounded."""
    return (
        Fraction(0)
        if decay in (0, COEFFICIENT_ONE)
        else min(Fraction(rounds), Fraction(COEFFICIENT_ONE, COEFFICIENT_ONE - decay))
    )


def participations_per_record(workload: Workload) -> int:
    """In how many rounds of the workload a record takes part at most."""
    schedule = workload.schedule
    if schedule.single_pass:
        return 1
    return (
        schedule.max_rounds_per_record
        if isinstance(schedule, MinSeparation)
        else -(-schedule.rounds // schedule.rounds_per_epoch)
    )


_HEADER = struct.Struct("<4sQQ")
_STATE_TAG = b"int1"
_LITTLE = np.dtype("<i8")


def pack_state(state: IntState) -> bytes:
    """Vectors of one shape (d,), any number of them."""
    size = state[0].size if state else 0
    return b"".join((_HEADER.pack(_STATE_TAG, len(state), size), *(v.astype(_LITTLE).tobytes() for v in state)))


def unpack_state(packed: bytes) -> IntState:
    """Read the state over the packed bytes, without copies: do not write into it.  RunError for other bytes."""
    if len(packed) < _HEADER.size:
        raise RunError("the strategy's state is cut off")
    mark, count, size = _HEADER.unpack_from(packed)
    if mark != _STATE_TAG or len(packed) != _HEADER.size + math.prod((count, size, _LITTLE.itemsize)):
        raise RunError("the strategy's state is cut off, or is something else")
    values: Ints = np.frombuffer(packed, _LITTLE, offset=_HEADER.size).astype(np.int64, copy=False)
    return tuple(values.reshape(count, size)) if count else ()


def sqrt_above(value: Fraction) -> float:
    """The smallest float whose square is at least `value` ≥ 0, which may be anything with a float as its root."""
    root = _approximate_root(value)
    while Fraction(root) ** 2 < value:
        root = math.nextafter(root, math.inf)
    while root > 0.0 and Fraction(lower := math.nextafter(root, 0.0)) ** 2 >= value:
        root = lower
    return root


def round_up_to_float(value: Fraction) -> float:
    """The smallest float that is not below `value`."""
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)


def _approximate_root(value: Fraction) -> float:
    """Within a few units in the last place; no overflow for numbers whose root is a float."""
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(float(value / Fraction(4) ** shift)), shift)


MIN_SIGMA, MAX_SIGMA = 2.0**16, 2.0**48
"""Of every fresh vector of every owner, in units."""
_DEDUCTED_VARIANCE = Fraction(256)
_FLOAT_FACTOR = 1 + Fraction(1, 2**40)  # more than `certified` and a last rounding can be wrong by
_VALUE_SLACK = Fraction(1, 2**120)
_KEY_SLACK = Fraction(1, 2**125)


@dataclass(frozen=True)
class ExactClaim:
    """`mu`-GDP up to `slack` in total variation, if AES-256 and HMAC-SHA-256 are pseudorandom."""

    distance: float
    """Δ: by how much one record can move C s, all rounds together, in units and relative to the noises' scales."""
    sigma: float
    """Of one owner's noise of scale 1, in units: a share of the whole where there are several owners."""
    party_count: int
    mu: float
    """On the safe side of Δ / √(σ² - h²): recomputed from the σ that is used."""
    slack: float
    """τ."""

    def sigma_of(self, scale: float) -> float:
        """σ_t of one owner's fresh vector: not below scale · σ."""
        return round_up_to_float(Fraction(scale) * Fraction(self.sigma))

    def delta_of(self, epsilon: float) -> float:
        """δ(ε) of the whole run, slack included."""
        slack = (1.0 + math.exp(epsilon)) * self.slack if epsilon < 700.0 else math.inf
        return min(1.0, math.nextafter(gdp.delta_of(self.mu, epsilon) + slack, math.inf))


def integer_distance(
    certified: float,
    relation: Relation,
    groups: Sequence[NoiseGroup],
    dimension: int,
    spread: Fraction = Fraction(1),
    apart: float = APART,
) -> float:
    """Δ = factor · certified · (1 + 2^-40) · spread + √(Σ (e / scale)²), rounded up.

    `certified` is the sensitivity of C for integers of norm K_t under zero-out, noise scales counted in.  The sum
    goes over all released values: e bounds the *difference* of two roundings, so replace-one does not double it.
    """
    rounding = Fraction(0)
    for vectors, scale, difference in groups:
        rounding += dimension * vectors * (difference / Fraction(scale)) ** 2 if difference else 0
    linear = Fraction(factor_of(relation, apart)) * Fraction(certified) * _FLOAT_FACTOR * spread
    return round_up_to_float(linear + Fraction(sqrt_above(rounding)))


def claim_for_mu(
    distance: float,
    mu: float,
    groups: Sequence[NoiseGroup],
    dimension: int,
    draws: Sequence[int],
    party_count: int = 1,
) -> ExactClaim:
    """The smallest noise that gives `mu`, for `owners` equal shares of it.

    `draws` are the fresh vectors of every round.  InputError where a group's σ is outside of 2^16 … 2^48.

    Guarantee: with noise D(sigma_of(scale)) of every owner, (C s)_t + z_t of all rounds is `Claim.mu`-GDP up to
    `Claim.slack`, and so is everything computed from it; `Claim.mu` ≤ `mu` (1 + 2^-39).
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
    owners: int = 1,
) -> ExactClaim:
    """Claim for noise of `sigma` > 16 of every owner; InputError and guarantee as for `claim_of`."""
    left = owners * Fraction(sigma) ** 2 - _deducted_variance(groups)
    if not left > 0:
        raise InputError(f"noise of {sigma:.4g} units: exact releases draw from 2^16 to 2^48 units")
    recorded = round_up_to_float(Fraction(sqrt_above(Fraction(distance) ** 2 / left)) * _FLOAT_FACTOR)
    claim = ExactClaim(distance, sigma, owners, recorded, _slack(dimension, draws, owners))
    for _, scale, _ in groups:
        if not MIN_SIGMA <= claim.sigma_of(scale) < MAX_SIGMA:
            raise InputError(
                f"noise of {claim.sigma_of(scale):.4g} units: exact releases draw from 2^16 to 2^48 units; choose "
                "a smaller mu, fewer owners of noise, or groups whose noises are closer to each other"
            )
    return claim


def total_variance(distance: float, mu: float, groups: Sequence[NoiseGroup]) -> Fraction:
    """(Δ / μ)² + h²: of all owners' noise of scale 1 together, in squared units."""
    return (Fraction(distance) / Fraction(mu)) ** 2 + _deducted_variance(groups)


def _deducted_variance(groups: Sequence[NoiseGroup]) -> Fraction:
    """h² in multiples of the noise of scale 1."""
    scales = [Fraction(scale) for _, scale, _ in groups]
    if not min(scales) > 0:
        raise InputError("a released group of nodes has no noise")
    return _DEDUCTED_VARIANCE / min(scales) ** 2


def _slack(dimension: int, draws: Sequence[int], owners: int) -> float:
    """τ: 2^-120 a value; and of AES being a permutation, E[blocks²] / 2^129 a key, at most 16 values² / 2^129.

    A key serves one owner and round.  A value takes 2 blocks an attempt, and an attempt succeeds with 0.97 or
    more.
    """
    values = [dimension * count for count in draws]
    return round_up_to_float(
        owners * (sum(values) * _VALUE_SLACK + sum(count**2 for count in values) * _KEY_SLACK)
    )
