"""Lower-triangular Toeplitz matrices as power series, and the workload of running sums.

The workload A, (T, T), says which running sums are released:

    A[t, i] = decay^(t-i) for i ≤ t in the same period, else 0

decay is 1 for prefix sums, 0 for no sums over rounds, and 1 - α for momentum in which a new gradient has the
weight α.  Most mechanisms factor A = B C.  B z is the noise of the releases for fresh vectors z, and a record is
charged the distance by which it can move C s, for the sums s of the rounds' increments (clipped contributions).

A lower-triangular Toeplitz matrix with series[t-i] in row t and column i ≤ t is the power series Σ series[j] x^j.
A product of such matrices is a product of power series.  Running sums that never restart are 1/(1 - decay·x).
Their square root has the coefficients decay^j binom(2j, j)/4^j, which are ≥ 0 and never increase.  Sources:
Fichtenberger, Henzinger & Upadhyay 2023 (decay 1); Kalinin & Lampert 2024, "Banded square root matrix
factorization for differentially private model training".

Buffered mechanisms have series whose numerator and denominator, polynomials in 1/x, have interlacing roots:

    C(x) = Π (1 - φ_i x) / Π (1 - θ_i x),    1 ≥ θ_1 > φ_1 > θ_2 > φ_2 > … > θ_m > φ_m ≥ 0

In partial fractions c_0 = 1 and c_j = Σ ω_i θ_i^(j-1) with every ω_i > 0, because the roots interlace, and c_1 = Σ
θ - Σ φ ≤ θ_1 ≤ 1.  So the coefficients are never negative and never increase.  Sources: McMahan, Xiao, Pillutla
2024 and Dvijotham, McMahan, Pillutla, Steinke, Thakurta 2024 (buffered linear Toeplitz).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.participation.orders import FreshOrder, MinSeparation, Participation, PublicOrder

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """Running sums A over `schedule.rounds` rounds, with increments clipped to `clips[t-1]` in round t.

    | field | meaning |
    |---|---|
    | `schedule` | participation of records, public or secret |
    | `decay` | decay of the sums per round |
    | `clips` | clip norm of each round, (T,) |
    | `period` | rounds after which the sums restart from 0, in rounds 1, 1 + period, …, or None |

    Example:
        >>> from fedpriv.participation.orders import FixedOrder
        >>> workload = Workload(FixedOrder(rounds=6, rounds_per_epoch=3), decay=1.0, clips=np.ones(6))
        >>> workload.rounds, workload.rounds_per_period, workload.equal_clips
        (6, 6, True)
    """

    schedule: Participation | MinSeparation
    decay: float
    clips: Floats
    period: int | None = None

    def __post_init__(self) -> None:
        """Check that rounds, decay, clips and period are in their ranges.

        Raises:
            InputError: A number is out of its range, or clips are not one for each round.
        """
        if self.rounds < 1:
            raise InputError(f"rounds = {self.rounds}: a workload has at least one round")
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay = {self.decay}: the decay of a running sum lies between 0 and 1")
        if self.clips.shape != (self.rounds,) or not np.all(np.isfinite(self.clips) & (self.clips > 0.0)):
            raise InputError(f"clips: a finite number above 0 is needed for each of the {self.rounds} rounds")
        if self.period is not None and self.period < 1:
            raise InputError(f"period = {self.period}: it is 1 or more rounds, or None")

    @property
    def rounds(self) -> int:
        return self.schedule.rounds

    @property
    def public_order(self) -> PublicOrder | MinSeparation:
        """Participation, in which the rounds of a record are public and not in fresh permutations.

        Raises:
            InputError: The participation is secret, or has fresh permutations.
        """
        if isinstance(self.schedule, FreshOrder):
            raise InputError(
                'fresh permutations are counted for a binary tree alone: use algorithm.mechanism = "tree", with '
                'late_clip = "same", or algorithm.order = "fixed"'
            )
        if isinstance(self.schedule, PublicOrder | MinSeparation):
            return self.schedule
        raise InputError("a certificate needs to know in which rounds a record takes part: that is secret")

    @property
    def equal_clips(self) -> bool:
        return bool(np.all(self.clips == self.clips[0]))

    @property
    def rounds_per_period(self) -> int:
        """Number of rounds of a full period, or all rounds if the sums never restart or the run is shorter."""
        return self.rounds if self.period is None else min(self.period, self.rounds)


def is_restart(t: int, period: int | None) -> bool:
    """Whether the sums restart in round t, as they do in round 1.

    Args:
        t: Round, from 1.
        period: Rounds between two restarts, or None without restarts.

    Example:
        >>> [t for t in range(1, 8) if is_restart(t, period=3)]
        [1, 4, 7]
    """
    return t == 1 or (period is not None and (t - 1) % period == 0)


def tile_periods(workload: Workload, values: Callable[[int], Floats]) -> Floats:
    """Concatenate the values of all periods, (T,).  The last period may be shorter.

    Args:
        workload: Workload with the number of rounds and the period.
        values: Function from a number n of rounds to the values of a period's rounds, (n,).
    """
    period_count, last_rounds = divmod(workload.rounds, workload.rounds_per_period)
    return np.concatenate(
        [
            np.tile(values(workload.rounds_per_period), period_count),
            *([values(last_rounds)] if last_rounds else []),
        ]
    )


def geometric_sums(ratio: float, counts: Floats) -> Floats:
    """Compute Σ_{j < n} ratio^j for every n of `counts`, 0 ≤ ratio ≤ 1.

    Args:
        ratio: Ratio in [0, 1].
        counts: Numbers n ≥ 0 of terms, an array of any shape.

    Returns:
        A sum for each number, in the shape of `counts`, or `counts` itself for ratio 1.

    Example:
        >>> geometric_sums(0.5, np.array([0.0, 1.0, 2.0])).round(6).tolist()
        [0.0, 1.0, 1.5]
    """
    if ratio == 1.0:
        return counts
    if ratio == 0.0:
        return np.minimum(counts, 1.0)
    return np.asarray(np.expm1(counts * math.log(ratio)) / (ratio - 1.0))


def powers(base: float, count: int) -> Floats:
    """Compute base^0 … base^(count-1), with 0^0 = 1, by doubling.

    Args:
        base: Base of the powers.
        count: Number of powers, 0 or more.

    Returns:
        (count,).

    Example:
        >>> powers(0.5, 4).tolist()
        [1.0, 0.5, 0.25, 0.125]
    """
    powers = np.ones(1)
    while len(powers) < count:
        powers = np.concatenate([powers, powers * base ** len(powers)])
    return powers[:count]


_BLOCK_SIZE = 1024
"""Rounds of a block in `inverse`."""
_SETTLED_CHANGE = 16.0 * np.finfo(np.float64).eps
"""Relative spread of the last coefficients up to which `inverse` takes them to be constant."""


def square_root(decay: float, count: int) -> Floats:
    """Compute the first `count` ≥ 1 coefficients of (1 - decay·x)^(-1/2), the square root of the sums.

    Args:
        decay: Decay in [0, 1].
        count: Number of coefficients, 1 or more.

    Returns:
        (count,).

    Example:
        >>> square_root(1.0, 4).tolist()
        [1.0, 0.5, 0.375, 0.3125]
    """
    lags = np.arange(1, count, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod(decay * (lags - 0.5) / lags)])


def inverse(series: Floats, count: int) -> Floats:
    """Compute the first `count` coefficients w of 1/c, for a series c that starts with 1.

    The recursion is w_0 = 1, w_t = -Σ_{j ≥ 1} c_j w_{t-j}.  Once the last coefficients are constant but for
    rounding, the rest is taken to be that constant.

    Args:
        series: Coefficients c, of which the first is 1, (b,), zero beyond their end.
        count: Number of coefficients of the result, 1 or more.

    Returns:
        (count,).

    Example:
        >>> inverse(np.array([1.0, -0.5]), 4).tolist()
        [1.0, 0.5, 0.25, 0.125]
    """
    memory = len(series) - 1
    result = np.zeros(memory + count)  # the zero history comes first
    block_size = min(count, _BLOCK_SIZE)
    result[memory] = 1.0
    for t in range(memory + 1, memory + block_size):
        result[t] = -np.dot(series[:0:-1], result[t - memory : t])
    # From here on in blocks, each of one matrix product.
    response = history_response(series, result[memory : memory + block_size])
    window = max(memory + 1, block_size)  # the last of these follows from the others alone
    for start in range(memory + block_size, memory + count, block_size):
        if np.ptp(result[start - window : start]) <= _SETTLED_CHANGE * abs(result[start - 1]):
            result[start:] = result[start - 1]  # further changes would be rounding only
            break
        block = response @ result[start - memory : start][::-1]
        result[start : start + block_size] = block[: memory + count - start]
    return result[memory:]


def history_response(series: Floats, inverted: Floats) -> Floats:
    """Compute the response H to the past in c ∗ w = z.

    (w_t, …, w_{t+n-1}) = H (w_{t-1}, …, w_{t-b+1}) + the response to z alone.

    Args:
        series: The b coefficients of c.
        inverted: The first n coefficients of 1/c.

    Returns:
        H, (n, b - 1).
    """
    memory = len(series) - 1
    lags = np.add.outer(np.arange(len(inverted)), np.arange(memory)) + 1
    return -lower_toeplitz(inverted) @ np.where(lags <= memory, series[np.minimum(lags, memory)], 0.0)


def lower_toeplitz(series: Floats) -> Floats:
    """Return the (n, n) matrix with series[t - i] in row t and column i ≤ t, and 0 elsewhere.

    Example:
        >>> lower_toeplitz(np.array([1.0, 0.5])).tolist()
        [[1.0, 0.0], [0.5, 1.0]]
    """
    lag = np.subtract.outer(np.arange(len(series)), np.arange(len(series)))
    return np.where(lag >= 0, series[np.maximum(lag, 0)], 0.0)


def column_squared_norms(series: Floats, rounds: int) -> Floats:
    """Compute the squared norms of the columns of the lower-triangular Toeplitz matrix of a series, (T,).

    Args:
        series: First coefficients of the matrix, (n,), with n ≥ 1, zero beyond their end.
        rounds: T.

    Example:
        >>> column_squared_norms(np.array([1.0, 2.0]), 3).tolist()
        [5.0, 5.0, 1.0]
    """
    return _reversed_sums(series**2, rounds)


def record_squared_norms(series: Floats, clips: Floats, rounds_per_epoch: int) -> Floats:
    """Compute the squared norms of the records of a fixed order under a Toeplitz C ≥ 0.

    The squared norm is the square of the distance by which the record can move C s: Σ_{i,j} clip_i clip_j ⟨C_i,
    C_j⟩ over its rounds i, j.  Columns i and i + lag, with i from 0, have the inner product Σ_{j < T-i-lag} c_j
    c_{j+lag}, a partial sum for the lag.

    Args:
        series: Coefficients of C, zero beyond their end.
        clips: Clip norm of each round, (T,).
        rounds_per_epoch: Rounds between two participations of a record.

    Returns:
        A squared norm for each position of an epoch, (min(rounds_per_epoch, T),).
    """
    rounds = len(clips)
    squared_norms = np.zeros(rounds)  # by the first round of a pair; the rounds of a record are added at the end
    for lag in range(0, min(len(series), rounds), rounds_per_epoch):
        products = _reversed_sums(series[: len(series) - lag] * series[lag:], rounds - lag)
        pairs = clips[: rounds - lag] * clips[lag:] * products
        squared_norms[: rounds - lag] += pairs if lag == 0 else 2.0 * pairs
    count = min(rounds_per_epoch, rounds)
    return np.asarray(np.bincount(np.arange(rounds) % rounds_per_epoch, squared_norms, count), np.float64)


def _reversed_sums(terms: Floats, rounds: int) -> Floats:
    """Compute Σ_{j < rounds - i} terms_j for i = 0 … rounds - 1, (rounds,).

    Terms are 0 beyond their end.
    """
    sums = np.cumsum(terms[:rounds])
    return np.concatenate([np.full(rounds - len(sums), sums[-1]), sums[::-1]])


Roots = tuple[float, ...]


class Mode(NamedTuple):
    """Vector M in the state of a stream: a row of B z gets gain · M, and then M becomes pole · M + z."""

    pole: float
    """Factor by which M decays in a round."""
    gain: float
    """Weight of M in a row of B z."""


def check_roots(theta: Roots, phi: Roots, decay: float) -> None:
    """Check that the roots interlace, θ_1 > φ_1 > θ_2 > …, and lie in [0, decay].

    For decay = 0 the range is [0, 1].

    Guarantee: for a decay from 0 to 1, roots that pass have a C with coefficients ≥ 0 that never increase, whoever
    chose the numbers.

    Args:
        theta: Poles θ of C.
        phi: Zeros φ of C, as many as poles.
        decay: Decay of the running sums, from 0 to 1.

    Raises:
        InputError: The roots do not interlace, one is out of range, or there are not as many zeros as poles.
    """
    if len(theta) != len(phi):
        raise InputError(f"theta has {len(theta)} roots and phi {len(phi)}: both need the same number")
    max_root = decay if decay > 0.0 else 1.0
    roots = tuple(root for pair in zip(theta, phi, strict=True) for root in pair)
    in_range = all(0.0 <= root <= max_root for root in roots)  # False for nan
    if not in_range or any(not next_root < root_before for root_before, next_root in pairwise(roots)):
        raise InputError(
            f"theta = {list(theta)}, phi = {list(phi)}: needed is {max_root:g} ≥ θ_1 > φ_1 > θ_2 > φ_2 > … ≥ 0"
        )


def residues(denominator_roots: Roots, numerator_roots: Roots) -> Floats:
    """Compute ω of Π (1 - numerator_j x) / Π (1 - denominator_i x) = 1 + Σ ω_i x / (1 - denominator_i x).

    Args:
        denominator_roots: Roots of the denominator, (m,), all different.
        numerator_roots: As many roots of the numerator.

    Returns:
        ω, (m,).
    """
    poles, zeros = np.array(denominator_roots), np.array(numerator_roots)
    differences = np.subtract.outer(poles, poles)
    np.fill_diagonal(differences, 1.0)
    # Ratios are multiplied, since products of small numbers alone could underflow.
    return np.asarray(np.prod(np.subtract.outer(poles, zeros) / differences, axis=1), np.float64)


def series_from_roots(denominator_roots: Roots, numerator_roots: Roots, count: int) -> Floats:
    """Compute the first `count` ≥ 1 coefficients of Π (1 - numerator_j x) / Π (1 - denominator_i x).

    C is `series_from_roots(theta, phi, T)`, its inverse `series_from_roots(phi, theta, T)`.

    Args:
        denominator_roots: Roots of the denominator, all different.
        numerator_roots: As many roots of the numerator.
        count: Number of coefficients, 1 or more.

    Returns:
        (count,).

    Example:
        >>> series_from_roots((0.5,), (0.0,), 4).tolist()
        [1.0, 0.5, 0.25, 0.125]
    """
    series: Floats = np.eye(1, count)[0]
    for root, weight in zip(denominator_roots, residues(denominator_roots, numerator_roots), strict=True):
        series[1:] += weight * powers(root, count - 1)
    return series


def noise_modes(decay: float, theta: Roots, phi: Roots) -> tuple[Mode, ...]:
    """Return the modes of B = A C^-1, which stream the noise: row t of B z is z_t + Σ gain · M_{t-1}.

    A mode is a decayed sum of fresh vectors, M_t = pole · M_{t-1} + z_t.  The modes are the partial fractions of
    B(x) = Π (1 - θ_i x) / ((1 - decay x) Π (1 - φ_i x)), whose poles are the decay and the φ.  A pole at 0 has a
    mode only if it is double, and a pole that a zero cancels (θ_1 = decay) has none.

    Args:
        decay: Decay of the running sums.
        theta: Poles θ of C, accepted with φ by `check_roots`.
        phi: Zeros φ of C, as many as poles.

    Example:
        >>> noise_modes(1.0, (0.5,), (0.0,))
        (Mode(pole=1.0, gain=0.5),)
    """
    poles = (decay, *phi)
    modes = []
    for index, pole in enumerate(poles):
        if pole == 0.0:
            continue
        pole_gaps = [pole - other for other_index, other in enumerate(poles) if other_index != index]
        gain = pole
        # Ratios are multiplied, since products of small numbers alone could underflow.
        for zero_gap, pole_gap in zip([pole - root for root in theta], pole_gaps, strict=True):
            gain *= zero_gap / pole_gap
        if gain != 0.0:
            modes.append(Mode(pole, gain))
    # All gains add up to B's coefficient of x, which is Σ φ - Σ θ for decay 0.
    if poles.count(0.0) == 2:
        modes.append(Mode(0.0, sum(phi) - sum(theta) - sum(mode.gain for mode in modes)))
    return tuple(modes)
