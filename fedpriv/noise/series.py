"""Lower-triangular Toeplitz matrices as power series: products are products of series.

The workload with decay λ is a(x) = 1/(1 - λx); its square root (1 - λx)^(-1/2) has the coefficients
λ^j binom(2j, j)/4^j: positive, and falling.  Sources: Fichtenberger, Henzinger & Upadhyay 2023 (λ = 1); Kalinin &
Lampert 2024, "Banded square root matrix factorization for differentially private model training".

Series of interlacing roots are those of buffered mechanisms:

    C(x) = Π (1 - φ_i x) / Π (1 - θ_i x),    θ_1 > φ_1 > θ_2 > φ_2 > … > θ_m > φ_m ≥ 0

In partial fractions c_0 = 1 and c_j = Σ ω_i θ_i^(j-1) with every ω_i > 0, because the roots interlace, and c_1 =
Σ θ - Σ φ ≤ θ_1 ≤ 1: the coefficients are never negative and never increase.  Likewise 1/C(x) has the coefficients
1, Σ ω̂_i φ_i^(j-1) with every ω̂_i < 0.  Sources: McMahan, Xiao, Pillutla 2024 and Dvijotham, McMahan, Pillutla,
Steinke, Thakurta 2024 (buffered linear Toeplitz).

The workload: which running sums are released, and in which rounds one record takes part in them.

    A[t, i] = decay^(t-i) for i ≤ t in the same period, else 0

decay is 1 for prefix sums, 0 for none, 1 - α for momentum.  Everything in this file and in the algebra modules is
NumPy: accounting needs no torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.participation.orders import MinSeparation, Participation, PublicOrder

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """A over `schedule.rounds` rounds, with increments clipped to `clips[t-1]` in round t.

    `schedule` declares the participation: fixed order every epoch (a `Schedule`, of which the single pass is the
    case rounds_per_epoch = rounds), the single pass with empty rounds of `Phases`, or any pattern of a
    `Separated`.  With a `period` the sums restart from 0 in rounds 1, 1 + period, 1 + 2 period, ….
    """

    schedule: Participation | MinSeparation
    decay: float
    clips: Floats
    period: int | None = None

    def __post_init__(self) -> None:
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
        """The participation, which certificates have to know; InputError if it is secret."""
        if isinstance(self.schedule, PublicOrder | MinSeparation):
            return self.schedule
        raise InputError("a certificate needs to know in which rounds a record takes part: that is secret")

    @property
    def equal_clips(self) -> bool:
        return bool(np.all(self.clips == self.clips[0]))

    @property
    def rounds_per_period(self) -> int:
        """Rounds between two restarts of the sums."""
        return self.rounds if self.period is None else min(self.period, self.rounds)


def is_restart(t: int, period: int | None) -> bool:
    """Whether the sums start anew in round t."""
    return t == 1 or (period is not None and (t - 1) % period == 0)


def tile_periods(workload: Workload, values: Callable[[int], Floats]) -> Floats:
    """`values(rounds)` of one period after the other, (T,): full periods are alike, the last may be shorter."""
    full, rest = divmod(workload.rounds, workload.rounds_per_period)
    return np.concatenate([np.tile(values(workload.rounds_per_period), full), *([values(rest)] if rest else [])])


def geometric_sums(ratio: float, counts: Floats) -> Floats:
    """Σ_{j < n} ratio^j for every n of `counts`, 0 ≤ ratio ≤ 1."""
    if ratio == 1.0:
        return counts
    if ratio == 0.0:
        return np.minimum(counts, 1.0)
    return np.asarray(np.expm1(counts * math.log(ratio)) / (ratio - 1.0))


def powers(base: float, count: int) -> Floats:
    """base^0 … base^(count-1), with 0^0 = 1; by doubling, faster than one power an entry."""
    powers = np.ones(1)
    while len(powers) < count:
        powers = np.concatenate([powers, powers * base ** len(powers)])
    return powers[:count]


_BLOCK_SIZE = 1024
_SETTLED_CHANGE = 16.0 * np.finfo(np.float64).eps


def square_root(decay: float, count: int) -> Floats:
    """The first `count` ≥ 1 coefficients of (1 - decay·x)^(-1/2)."""
    lags = np.arange(1, count, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod(decay * (lags - 0.5) / lags)])


def inverse(series: Floats, count: int) -> Floats:
    """The first `count` coefficients of 1/series, for a series that starts with 1.

    The recursion w_t = -Σ_j c_j w_{t-j} runs in blocks of rounds, each one matrix product.
    """
    memory = len(series) - 1
    result = np.zeros(memory + count)  # the zero history comes first
    head = min(count, _BLOCK_SIZE)
    result[memory] = 1.0
    for t in range(memory + 1, memory + head):
        result[t] = -np.dot(series[:0:-1], result[t - memory : t])
    response = history_response(series, result[memory : memory + head])
    window = max(memory, head)
    for start in range(memory + head, memory + count, head):
        if np.ptp(result[start - window : start]) <= _SETTLED_CHANGE * abs(result[start - 1]):
            result[start:] = result[start - 1]  # from here on only rounding would move it
            break
        block = response @ result[start - memory : start][::-1]
        result[start : start + head] = block[: memory + count - start]
    return result[memory:]


def history_response(series: Floats, inverted: Floats) -> Floats:
    """Response to the past in c ∗ w = z: (w_t, …, w_{t+n-1}) = H (w_{t-1}, …, w_{t-b+1}) + what z alone gives.

    `series` holds the b coefficients of c, `inverted` the first n of 1/c; H has shape (n, b - 1).
    """
    memory = len(series) - 1
    lags = np.add.outer(np.arange(len(inverted)), np.arange(memory)) + 1
    return -lower_toeplitz(inverted) @ np.where(lags <= memory, series[np.minimum(lags, memory)], 0.0)


def lower_toeplitz(series: Floats) -> Floats:
    """The (n, n) matrix with series[t - i] in row t and column i ≤ t."""
    lag = np.subtract.outer(np.arange(len(series)), np.arange(len(series)))
    return np.where(lag >= 0, series[np.maximum(lag, 0)], 0.0)


def column_squared_norms(series: Floats, rounds: int) -> Floats:
    """Squared norms of the columns of the (T, T) Toeplitz matrix of `series` (zero beyond its end)."""
    return _reversed_sums(series**2, rounds)


def record_squared_norms(series: Floats, clips: Floats, rounds_per_epoch: int) -> Floats:
    """Squared norms of the records of a fixed order under a Toeplitz C ≥ 0: shape (min(rounds_per_epoch, T),).

    Columns i and i + s have inner product Σ_{j < T-i-s} c_j c_{j+s}: one cumulative sum for every lag s that is
    a multiple of `rounds_per_epoch`, O(T² / rounds_per_epoch) in all, less for a banded series.
    """
    rounds = len(clips)
    squared_norms = np.zeros(rounds)
    for lag in range(0, min(len(series), rounds), rounds_per_epoch):
        products = _reversed_sums(series[: len(series) - lag] * series[lag:], rounds - lag)
        pairs = clips[: rounds - lag] * clips[lag:] * products
        squared_norms[: rounds - lag] += pairs if lag == 0 else 2.0 * pairs
    count = min(rounds_per_epoch, rounds)
    return np.asarray(np.bincount(np.arange(rounds) % rounds_per_epoch, squared_norms, count), np.float64)


def _reversed_sums(terms: Floats, rounds: int) -> Floats:
    """Σ_{j < rounds - i} terms_j for i = 0 … rounds - 1."""
    sums = np.cumsum(terms[:rounds])
    return np.concatenate([np.full(rounds - len(sums), sums[-1]), sums[::-1]])


Roots = tuple[float, ...]


class Mode(NamedTuple):
    """A vector M that streaming keeps: the row gets gain · M, and then M = pole · M + z."""

    pole: float
    gain: float


def check_roots(theta: Roots, phi: Roots, decay: float) -> None:
    """InputError unless the roots interlace, and lie in [0, decay], or in [0, 1] for decay = 0.

    Guarantee: what passes has a C with coefficients ≥ 0 that never increase, whoever chose the numbers.
    """
    if len(theta) != len(phi):
        raise InputError(f"theta has {len(theta)} roots and phi {len(phi)}: both need the same number")
    largest = decay if decay > 0.0 else 1.0
    falling = tuple(root for pair in zip(theta, phi, strict=True) for root in pair)
    inside = all(0.0 <= root <= largest for root in falling)  # not so for nan
    if not inside or any(not after < before for before, after in pairwise(falling)):
        raise InputError(
            f"theta = {list(theta)}, phi = {list(phi)}: needed is {largest:g} ≥ θ_1 > φ_1 > θ_2 > φ_2 > … ≥ 0"
        )


def residues(over: Roots, under: Roots) -> Floats:
    """ω of Π (1 - under_j x) / Π (1 - over_i x) = 1 + Σ ω_i x / (1 - over_i x); as many of both."""
    poles, zeros = np.array(over), np.array(under)
    distance = np.subtract.outer(poles, poles)
    np.fill_diagonal(distance, 1.0)
    # ratios in order: neighbours are close, and products of small numbers alone could underflow
    return np.asarray(np.prod(np.subtract.outer(poles, zeros) / distance, axis=1), np.float64)


def series_from_roots(over: Roots, under: Roots, count: int) -> Floats:
    """The first `count` ≥ 1 coefficients of Π (1 - under_j x) / Π (1 - over_i x).

    C is `of_roots(theta, phi, T)`, its inverse `of_roots(phi, theta, T)`.
    """
    series: Floats = np.eye(1, count)[0]
    for root, weight in zip(over, residues(over, under), strict=True):
        series[1:] += weight * powers(root, count - 1)
    return series


def noise_modes(decay: float, theta: Roots, phi: Roots) -> tuple[Mode, ...]:
    """The modes of B = A C^-1: row t is z_t + Σ gain · M_{t-1}.

    B(x) = Π (1 - θ_i x) / ((1 - decay x) Π (1 - φ_i x)) has a mode for each pole p > 0, with gain r_p p.  A pole
    that a zero cancels (θ_1 = decay) has none.  With decay = φ_m = 0 the pole at 0 is double, and one more mode,
    which is the last fresh vector, makes up for what b_1 lacks.
    """
    poles = (decay, *phi)
    modes = []
    for place, pole in enumerate(poles):
        if pole == 0.0:
            continue
        others = [pole - other for number, other in enumerate(poles) if number != place]
        gain = pole
        for above, below in zip([pole - root for root in theta], others, strict=True):
            gain *= above / below
        if gain != 0.0:
            modes.append(Mode(pole, gain))
    if poles.count(0.0) == 2:
        modes.append(Mode(0.0, sum(phi) - sum(theta) - sum(mode.gain for mode in modes)))
    return tuple(modes)
