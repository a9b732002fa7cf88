"""AUC, sensitivity, specificity and calibration of a noisy table of class by score bin, with intervals of 95 %.

What comes in is y = C n + noise of each class, C the square root of prefix sums, noise of one deviation on all
coordinates.  So everything here is a function of what was released.  With p and n the classes' counts by bin,
P and N their sums, W_ij = 1 where bin i lies above bin j and 1/2 where they are one:

| figure | estimate |
|---|---|
| `auc` | pᵀ W n / (P N) |
| `sensitivity`, `specificity` | shares of P and N on the right side of the threshold |
| `balanced_accuracy` | the mean of the two |
| `calibration_error_squared` | Σ_b (D_b² - what noise and coins add to it) / m_b, over Σ m_b |

D_b is the class 1 seen in bin b less the scores' sum, and m_b how many are in it.  Squares are debiased; an
absolute error cannot be: it reads .04 of a calibrated model of 300 records at μ = 1.

Intervals have the sampling in them (DeLong's variance from the table, Hanley & McNeil's at least; binomial) and
the noise by an estimate's gradient; that of an AUC also the pairs that share a bin, of which any share may be in
order, as a uniform error.

Sources: DeLong, DeLong & Clarke-Pearson 1988; Hanley & McNeil 1982; Fichtenberger, Henzinger & Upadhyay 2023 (C).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.addons.statistics.indicators import lower_toeplitz, prefix_root_matrix

Floats = NDArray[np.float64]
_Z = 1.959963984540054
_MIN_RECORDS, _MIN_STANDARD_ERRORS = 30.0, 4.0
"""Records of a class, or of a bin, and standard errors of their number, below which nothing is said."""


class IntervalEstimate(NamedTuple):
    """An estimate with an interval of 95 % of the population, noise included."""

    value: float
    low: float
    high: float


class ReliabilityBin(NamedTuple):
    """A bin of a reliability curve: the scores' mean, and the share of class 1 with its interval."""

    mean_score: float
    observed_share: IntervalEstimate


@dataclass(frozen=True)
class TwoClassTable:
    """A noisy table: C n of class 1 and of class 0, (bins,) each, and the noise's deviation, in records."""

    ones: Floats
    zeros: Floats
    std: float
    edges: Floats
    """Between bins, of the logit."""
    threshold_bin: int
    """The first bin that is predicted 1."""

    @property
    def has_enough_records(self) -> bool:
        """Whether there are enough of both classes: "too little budget", or records, for any figure if not."""
        error = _MIN_STANDARD_ERRORS * self.std * float(np.linalg.norm(prefix_root_matrix(len(self.ones))[-1]))
        return all(self._prefix_sums(each)[-1] >= max(_MIN_RECORDS, error) for each in (self.ones, self.zeros))

    def figures(self) -> dict[str, IntervalEstimate]:
        """By name; none where there are too few records of a class."""
        if not self.has_enough_records:
            return {}
        (found, one), (missed, other) = (
            self._share_on_side(self.ones, above=True),
            self._share_on_side(self.zeros, above=False),
        )
        squared = self.calibration_error_squared()
        return {
            "auc": self.auc(),
            "balanced_accuracy": _clip_interval((found + missed) / 2.0, math.sqrt(one + other) / 2.0),
            "sensitivity": _clip_interval(found, math.sqrt(one)),
            "specificity": _clip_interval(missed, math.sqrt(other)),
            **({} if squared is None else {"calibration_error_squared": squared}),
        }

    def auc(self) -> IntervalEstimate:
        p, n, bins = self._bin_counts(self.ones), self._bin_counts(self.zeros), len(self.ones)
        above = np.tril(np.ones((bins, bins)), -1) + np.eye(bins) / 2.0
        of_ones, of_zeros = float(p.sum()), float(n.sum())
        pairs = of_ones * of_zeros
        value = float(p @ above @ n) / pairs
        inverse = _inverse_root_matrix(bins)
        moved = inverse.T @ ((above - value) / pairs) @ inverse
        noise = self.std**2 * float(((moved @ self.zeros) ** 2).sum() + ((self.ones @ moved) ** 2).sum())
        delong = float(p @ (above @ n / of_zeros - value) ** 2) / of_ones**2
        delong += float(n @ (p @ above / of_ones - value) ** 2) / of_zeros**2
        within = min(max(value, 0.5 / of_ones), 1.0 - 0.5 / of_ones)
        sampled = max(delong, _hanley_mcneil_variance(within, of_ones, of_zeros))
        tied = max(0.0, 0.5 * float(p @ n) / pairs)
        return _clip_interval(value, math.sqrt(sampled + noise + tied**2 / 3.0))

    def _share_on_side(self, released: Floats, *, above: bool) -> tuple[float, float]:
        """The share of a class on its side of the threshold, and the variance of that."""
        root, sums = prefix_root_matrix(len(released)), self._prefix_sums(released)
        whole = float(sums[-1])
        below = float(sums[self.threshold_bin - 1]) / whole
        noise = self.std**2 * float(((root[self.threshold_bin - 1] - below * root[-1]) ** 2).sum()) / whole**2
        held = (min(max(below, 0.0), 1.0) * whole + 2.0) / (whole + 4.0)  # Agresti & Coull
        return (1.0 - below if above else below), noise + held * (1.0 - held) / whole

    def calibration_error_squared(self) -> IntervalEstimate | None:
        """None where no bin has enough records."""
        total = error = count = 0.0
        for rows in self._merge_bins():
            (gap, noise, held), share = self._calibration_gap(rows), self._observed_share(rows)
            spread = noise + share * (1.0 - share) * held
            squared = gap**2 - spread
            total, count = total + squared / held, count + held
            error += (2.0 * spread**2 + 4.0 * spread * max(squared, 0.0)) / held**2
        if not count:
            return None
        value, half = total / count, _Z * math.sqrt(error) / count
        return IntervalEstimate(value, max(0.0, value - half), max(0.0, value + half))

    def reliability(self) -> list[ReliabilityBin]:
        """Bins of the logit, neighbours together where there are few records, with their observed shares."""
        found = []
        for rows in self._merge_bins():
            (gap, noise, held), share = self._calibration_gap(rows), self._observed_share(rows)
            coins = (share * held + 2.0) / (held + 4.0)
            error = math.sqrt(noise / held**2 + coins * (1.0 - coins) / held)
            found.append(ReliabilityBin(min(max(share - gap / held, 0.0), 1.0), _clip_interval(share, error)))
        return found

    def _observed_share(self, rows: NDArray[np.bool_]) -> float:
        ones, zeros = (float(self._bin_counts(each)[rows].sum()) for each in (self.ones, self.zeros))
        return min(max(ones / (ones + zeros), 0.0), 1.0)

    def _calibration_gap(self, rows: NDArray[np.bool_]) -> tuple[float, float, float]:
        """D_b, the variance of its noise, and m_b."""
        score, inverse = 1.0 / (1.0 + np.exp(-_bin_centres(self.edges))), _inverse_root_matrix(len(self.ones))
        of_ones, of_zeros = ((1.0 - score) * rows) @ inverse, (-score * rows) @ inverse
        noise = self.std**2 * float((of_ones**2).sum() + (of_zeros**2).sum())
        held = float((self._bin_counts(self.ones) + self._bin_counts(self.zeros))[rows].sum())
        return float(of_ones @ self.ones + of_zeros @ self.zeros), noise, held

    def _merge_bins(self) -> list[NDArray[np.bool_]]:
        """Bins one logit wide, those beyond ± 4 together, merged from below until each has enough records."""
        coarse = np.searchsorted(np.arange(-4.0, 5.0), _bin_centres(self.edges))
        inverse, found = _inverse_root_matrix(len(self.ones)), list[NDArray[np.bool_]]()
        rows = np.zeros(len(coarse), np.bool_)
        for each in range(10):
            rows = rows | (coarse == each)
            error = self.std * math.sqrt(2.0) * float(np.linalg.norm(rows @ inverse))
            if self._calibration_gap(rows)[2] >= max(_MIN_RECORDS, _MIN_STANDARD_ERRORS * error):
                found.append(rows)
                rows = np.zeros(len(coarse), np.bool_)
        if found and rows.any():
            found[-1] = found[-1] | rows
        return found

    def _prefix_sums(self, released: Floats) -> Floats:
        return np.asarray(prefix_root_matrix(len(released)) @ released, np.float64)

    def _bin_counts(self, released: Floats) -> Floats:
        return np.asarray(_inverse_root_matrix(len(released)) @ released, np.float64)


def combine_groups(tables: Sequence[Floats], stds: Sequence[float]) -> tuple[Floats, float]:
    """Everybody's (2, bins) of tables (groups, 2, bins), by inverse variance, and the deviation of its noise."""
    variances = np.array([len(table) * std**2 for table, std in zip(tables, stds, strict=True)])
    if not variances.all():
        return tables[0].sum(axis=0), 0.0
    shares = 1.0 / variances
    sums = sum(share * table.sum(axis=0) for share, table in zip(shares, tables, strict=True))
    return np.asarray(sums / shares.sum(), np.float64), float(1.0 / math.sqrt(shares.sum()))


def _clip_interval(value: float, error: float) -> IntervalEstimate:
    half = _Z * error
    return IntervalEstimate(value, min(max(value - half, 0.0), 1.0), min(max(value + half, 0.0), 1.0))


def _hanley_mcneil_variance(area: float, ones: float, zeros: float) -> float:
    first, second = area / (2.0 - area), 2.0 * area**2 / (1.0 + area)
    spread = (ones - 1.0) * (first - area**2) + (zeros - 1.0) * (second - area**2)
    return (area * (1.0 - area) + spread) / (ones * zeros)


def _bin_centres(edges: Floats) -> Floats:
    """Of the bins, the outermost as wide as their neighbours."""
    ends = np.concatenate([[2.0 * edges[0] - edges[1]], edges, [2.0 * edges[-1] - edges[-2]]])
    return np.asarray((ends[1:] + ends[:-1]) / 2.0, np.float64)


@lru_cache(maxsize=8)
def _inverse_root_matrix(size: int) -> Floats:
    """Of `prefix_root_matrix`: the series of √(1 - x)."""
    steps = np.arange(1.0, size)
    return lower_toeplitz(np.concatenate([[1.0], np.cumprod((steps - 1.5) / steps)]))
