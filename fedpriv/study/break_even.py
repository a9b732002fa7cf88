"""Where joining begins to pay: standard errors over splits, the line of gains against ε, and its crossing of zero.

| symbol | meaning |
|---|---|
| n, K | splits of the records, and noise seeds in each |
| r | test records over training records |
| s_w² | variance of the gain over noise seeds, within splits |
| s_split² | variance of the splits' means, less s_w²/K: the part that splits share |

s.e.² = (1/n + r) s_split² + s_w²/(n K): Nadeau & Bengio (Machine Learning 52, 2003) correct for what splits of the
same records share; they do not share noise.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.figures import upper_figure
from fedpriv.core.random import public_generator

Floats = NDArray[np.float64]
_DRAWS = 1000
_TAIL = 0.05


class Estimate(NamedTuple):
    """A mean over splits and noise seeds; `noise` is the standard deviation over seeds within a split."""

    mean: float
    error: float | None
    """None for one split, which does not tell it."""
    noise: float | None


def estimate(gains: Floats, ratio: float) -> Estimate:
    """The mean of `gains` (n, K) with its standard error; `ratio` is test records over training records."""
    n, seeds = gains.shape
    within = float(gains.var(axis=1, ddof=1).mean()) if seeds > 1 else 0.0
    noise = math.sqrt(within) if seeds > 1 else None
    if n < 2:
        return Estimate(float(gains.mean()), None, noise)
    between = max(0.0, float(gains.mean(axis=1).var(ddof=1)) - within / seeds)
    error = math.sqrt((1.0 / n + ratio) * between + within / (n * seeds))
    return Estimate(float(gains.mean()), error, noise)


def isotonic(values: Floats) -> Floats:
    """The nearest line that never falls, with equal weights: neighbours that fall are pooled."""
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        blocks.append((mean, size))
    return np.concatenate([np.full(size, mean) for mean, size in blocks])


def crossing(epsilons: Floats, line: Floats) -> float:
    """The ε from which the line stays at or above 0, interpolated in log ε; 0 below the grid, ∞ above it."""
    under = np.flatnonzero(line < 0.0)
    if not len(under):
        return 0.0
    last = int(under[-1])
    if last == len(line) - 1:
        return math.inf
    low, high = np.log(epsilons[last : last + 2])
    share = -line[last] / (line[last + 1] - line[last])
    return float(math.exp(low + share * (high - low)))


@dataclass(frozen=True)
class BreakEven:
    """The ε from which joining pays, with the 5th and 95th percentile over splits drawn again; 0 and ∞ off it."""

    epsilon: float
    low: float | None
    high: float | None
    line: Floats
    """The fitted gains, one an ε of the grid."""


def break_even(epsilons: Floats, gains: Floats, ratio: float, *, monotone: bool) -> BreakEven:
    """Of `gains` (ε, n, K); `monotone` where settings at ε are the best in hindsight of all smaller ε.

    Splits are drawn with replacement for all ε together, and deviations from the mean are scaled by what the
    standard error is above that of independent splits: else the interval would shrink with n while the records
    stay the same.
    """
    means = gains.mean(axis=2)
    found = means.mean(axis=1)
    fitted = isotonic if monotone else np.asarray
    line = fitted(found)
    n = means.shape[1]
    if n < 2:
        return BreakEven(crossing(epsilons, line), None, None, line)
    plain = means.std(axis=1, ddof=1) / math.sqrt(n)
    errors = np.array([estimate(each, ratio).error or 0.0 for each in gains])
    scale = np.divide(errors, plain, out=np.ones_like(plain), where=plain > 0.0)
    generator = public_generator(0, "splits drawn again")
    crossings = []
    for _ in range(_DRAWS):
        drawn = means[:, generator.integers(0, n, n)].mean(axis=1)
        crossings.append(crossing(epsilons, fitted(found + scale * (drawn - found))))
    low, high = (float(np.quantile(crossings, tail, method="nearest")) for tail in (_TAIL, 1.0 - _TAIL))
    return BreakEven(crossing(epsilons, line), low, high, line)


def epsilon_words(value: float, epsilons: Floats) -> str:
    """ "1.6", "below 0.1" or "above 30"."""
    if value == 0.0:
        return f"below {upper_figure(epsilons[0], 3)}"
    return f"above {upper_figure(epsilons[-1], 3)}" if math.isinf(value) else f"{value:.2g}"


def verdict(found: BreakEven, epsilons: Floats, noiseless: float, united: float) -> str:
    """The words for a break-even: `noiseless` is the settings' gain without noise, `united` pooling's."""
    if not math.isinf(found.epsilon) or noiseless >= 0.0:
        words = epsilon_words(found.epsilon, epsilons)
        if found.low is None or found.high is None:
            return words
        low, high = (epsilon_words(end, epsilons) for end in (found.low, found.high))
        return words if low == high == words else f"{words} ({low} to {high})"
    return "never: the settings lose it, not the noise" if united > 0.0 else "never, even without noise"


def better_by_chance(tests: NDArray[np.int64], differing: NDArray[np.float64]) -> float:
    """The share of silos that pure noise would show better off at a true gain of 0.

    Of a silo's T `tests` a share `differing` is decided rightly by one model alone, each as often: the silo is
    better off with probability (1 - P(tie)) / 2, and P(tie) is nearly 1/√(2π T differing).
    """
    wide = np.maximum(tests * differing, 1e-12)
    ties = np.where(wide > 0.5, np.minimum(1.0, 1.0 / np.sqrt(2.0 * math.pi * wide)), np.exp(-wide))
    return float(np.mean((1.0 - ties) / 2.0))
