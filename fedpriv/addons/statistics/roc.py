"""AUC, sensitivity, specificity and calibration of a noisy table of class by score bin.

The input is y = C c + noise for each class, where c (bins,) are the class's counts by bin, C is the matrix whose
square takes prefix sums, and the noise has the same standard deviation in all coordinates.  The estimated counts
C^-1 y of classes 1 and 0 are p and n, and their sums are P and N.  W_ij is 1 where bin i lies above bin j, 1/2 for
i = j, and else 0.

| figure | estimate |
|---|---|
| `auc` | pᵀ W n / (P N) |
| `sensitivity`, `specificity` | fractions of P and N on the right side of the threshold |
| `balanced_accuracy` | mean of the two |
| `calibration_error_squared` | Σ_b (D_b² - bias of D_b² by noise and sampling) / m_b, over Σ m_b |

D_b is the number of records of class 1 in bin b minus the sum of the scores of its records, each taken at the
centre of its own small bin, and m_b is the number of records in it.  Bins b are unions of neighbours
(`TwoClassTable._merge_bins`).

Intervals are of 95 %, and include the noise and the sampling of the records.

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
"""Fewest records of a class or merged bin, and fewest standard errors of their number, for any figure.

The last merged bin can have fewer (`TwoClassTable._merge_bins`).
"""


class IntervalEstimate(NamedTuple):
    """An estimate with an interval of 95 % for the population, noise included."""

    value: float
    low: float
    high: float


class ReliabilityBin(NamedTuple):
    """A bin of a reliability curve: the scores' mean, and the share of class 1 with its interval."""

    mean_score: float
    observed_share: IntervalEstimate


@dataclass(frozen=True)
class TwoClassTable:
    """Noisy table y = C c + noise of class 1 and of class 0, by bins of the score."""

    ones: Floats
    """y of class 1, (bins,)."""
    zeros: Floats
    """y of class 0, (bins,)."""
    std: float
    """Standard deviation of the noise in each coordinate, in records."""
    edges: Floats
    """Edges between bins, in logits."""
    threshold_bin: int
    """Index of the first bin that is predicted 1."""

    @property
    def has_enough_records(self) -> bool:
        """Whether both classes have enough records for any figure."""
        error = _MIN_STANDARD_ERRORS * self.std * float(np.linalg.norm(prefix_root_matrix(len(self.ones))[-1]))
        return all(
            self._prefix_sums(released)[-1] >= max(_MIN_RECORDS, error) for released in (self.ones, self.zeros)
        )

    def figures(self) -> dict[str, IntervalEstimate]:
        """Return the figures by name, without those for which there are too few records."""
        if not self.has_enough_records:
            return {}
        (sensitivity, sensitivity_variance), (specificity, specificity_variance) = (
            self._share_on_side(self.ones, above=True),
            self._share_on_side(self.zeros, above=False),
        )
        error_squared = self.calibration_error_squared()
        return {
            "auc": self.auc(),
            "balanced_accuracy": _clip_interval(
                (sensitivity + specificity) / 2.0, math.sqrt(sensitivity_variance + specificity_variance) / 2.0
            ),
            "sensitivity": _clip_interval(sensitivity, math.sqrt(sensitivity_variance)),
            "specificity": _clip_interval(specificity, math.sqrt(specificity_variance)),
            **({} if error_squared is None else {"calibration_error_squared": error_squared}),
        }

    def auc(self) -> IntervalEstimate:
        """Estimate the area under the ROC curve, pᵀ W n / (P N), with its interval.

        The squared standard error is the larger of DeLong's variance, with divisors P² and N², and of Hanley &
        McNeil's, plus the variance of the noise to first order, plus h²/3.  Hanley & McNeil's variance is that at
        the value cut to 1/(2P) … 1 - 1/(2P).  Here 2h is the fraction of pairs that share a bin, any part of which
        may be in order.  P and N must be at least 1.
        """
        p, n, bins = self._bin_counts(self.ones), self._bin_counts(self.zeros), len(self.ones)
        above = np.tril(np.ones((bins, bins)), -1) + np.eye(bins) / 2.0
        one_count, zero_count = float(p.sum()), float(n.sum())
        pairs = one_count * zero_count
        value = float(p @ above @ n) / pairs
        # `gradient` times the y of one class is the gradient of the value by the y of the other.
        inverse = _inverse_root_matrix(bins)
        gradient = inverse.T @ ((above - value) / pairs) @ inverse
        noise = self.std**2 * float(((gradient @ self.zeros) ** 2).sum() + ((self.ones @ gradient) ** 2).sum())
        delong = float(p @ (above @ n / zero_count - value) ** 2) / one_count**2
        delong += float(n @ (p @ above / one_count - value) ** 2) / zero_count**2
        # At 0 and 1 Hanley & McNeil's variance would be 0.
        bounded_value = min(max(value, 0.5 / one_count), 1.0 - 0.5 / one_count)
        sampling_variance = max(delong, _hanley_mcneil_variance(bounded_value, one_count, zero_count))
        tied_fraction = max(0.0, 0.5 * float(p @ n) / pairs)
        return _clip_interval(value, math.sqrt(sampling_variance + noise + tied_fraction**2 / 3.0))

    def _share_on_side(self, released: Floats, *, above: bool) -> tuple[float, float]:
        """Return the share of a class on one side of the threshold, and the variance of that share.

        The variance is that of the noise to first order, plus the binomial one of sampling, for the share after
        the adjustment of Agresti & Coull (two more records on each side).

        Args:
            released: y of the class, (bins,).
            above: Whether the side is that of scores from the threshold on, else below.
        """
        root, sums = prefix_root_matrix(len(released)), self._prefix_sums(released)
        total = float(sums[-1])
        below = float(sums[self.threshold_bin - 1]) / total
        noise = self.std**2 * float(((root[self.threshold_bin - 1] - below * root[-1]) ** 2).sum()) / total**2
        adjusted_share = (min(max(below, 0.0), 1.0) * total + 2.0) / (total + 4.0)  # Agresti & Coull
        return (1.0 - below if above else below), noise + adjusted_share * (1.0 - adjusted_share) / total

    def calibration_error_squared(self) -> IntervalEstimate | None:
        """Estimate the squared calibration error, or return None if no merged bin has enough records.

        The estimate is Σ_b (D_b² - v_b) / m_b, over Σ m_b, for the merged bins b.  The bias v_b of D_b² is the
        variance of D_b's noise plus m_b q (1 - q), with q the observed share of class 1 in b.  For the interval
        D_b² has the variance 2 v_b² + 4 v_b · max(0, D_b² - v_b), as if D_b were normal.
        """
        total = error = count = 0.0
        for rows in self._merge_bins():
            (gap, noise, record_count), share = self._calibration_gap(rows), self._observed_share(rows)
            spread = noise + share * (1.0 - share) * record_count
            squared = gap**2 - spread
            total, count = total + squared / record_count, count + record_count
            error += (2.0 * spread**2 + 4.0 * spread * max(squared, 0.0)) / record_count**2
        if not count:
            return None
        value, half = total / count, _Z * math.sqrt(error) / count
        return IntervalEstimate(value, max(0.0, value - half), max(0.0, value + half))

    def reliability(self) -> list[ReliabilityBin]:
        """Return the mean score and the observed share of class 1 in each merged bin.

        The mean score is the observed share minus D_b/m_b, and both are cut to 0 … 1.  The variance for the
        interval of the share is that of the noise in D_b/m_b plus the binomial one of sampling, for the share
        after the adjustment of Agresti & Coull.
        """
        reliability_bins = []
        for rows in self._merge_bins():
            (gap, noise, record_count), share = self._calibration_gap(rows), self._observed_share(rows)
            adjusted_share = (share * record_count + 2.0) / (record_count + 4.0)
            error = math.sqrt(noise / record_count**2 + adjusted_share * (1.0 - adjusted_share) / record_count)
            reliability_bins.append(
                ReliabilityBin(min(max(share - gap / record_count, 0.0), 1.0), _clip_interval(share, error))
            )
        return reliability_bins

    def _observed_share(self, rows: NDArray[np.bool_]) -> float:
        """Return the share of class 1 in the bins of the mask `rows`, cut to 0 … 1."""
        ones, zeros = (float(self._bin_counts(released)[rows].sum()) for released in (self.ones, self.zeros))
        return min(max(ones / (ones + zeros), 0.0), 1.0)

    def _calibration_gap(self, rows: NDArray[np.bool_]) -> tuple[float, float, float]:
        """Return D_b, the variance of its noise, and m_b, for the bins of the mask `rows` together."""
        score, inverse = 1.0 / (1.0 + np.exp(-_bin_centres(self.edges))), _inverse_root_matrix(len(self.ones))
        one_weights, zero_weights = ((1.0 - score) * rows) @ inverse, (-score * rows) @ inverse
        noise = self.std**2 * float((one_weights**2).sum() + (zero_weights**2).sum())
        record_count = float((self._bin_counts(self.ones) + self._bin_counts(self.zeros))[rows].sum())
        return float(one_weights @ self.ones + zero_weights @ self.zeros), noise, record_count

    def _merge_bins(self) -> list[NDArray[np.bool_]]:
        """Return masks of the table's bins, (bins,) each, one for each merged bin.

        Bins are merged to one logit of width, and to one bin on each side beyond ± 4.  These are merged further,
        from below, until each has at least 30 records, and 4 standard errors of their noisy number.  What remains
        above joins the last mask, whose noisy number may then be smaller.
        """
        # Coarse bin 0 is up to -4, coarse bin 9 above 4.
        coarse = np.searchsorted(np.arange(-4.0, 5.0), _bin_centres(self.edges))
        inverse, masks = _inverse_root_matrix(len(self.ones)), list[NDArray[np.bool_]]()
        rows = np.zeros(len(coarse), np.bool_)
        for coarse_bin in range(10):
            rows = rows | (coarse == coarse_bin)
            error = self.std * math.sqrt(2.0) * float(np.linalg.norm(rows @ inverse))
            if self._calibration_gap(rows)[2] >= max(_MIN_RECORDS, _MIN_STANDARD_ERRORS * error):
                masks.append(rows)
                rows = np.zeros(len(coarse), np.bool_)
        if masks and rows.any():
            masks[-1] = masks[-1] | rows
        return masks

    def _prefix_sums(self, released: Floats) -> Floats:
        return np.asarray(prefix_root_matrix(len(released)) @ released, np.float64)

    def _bin_counts(self, released: Floats) -> Floats:
        return np.asarray(_inverse_root_matrix(len(released)) @ released, np.float64)


def combine_groups(tables: Sequence[Floats], stds: Sequence[float]) -> tuple[Floats, float]:
    """Combine tables of the same records by different groupings into one table of all records.

    Each table is summed over its groups.  The result is the mean of these sums, weighted by the inverse variance
    of their noise.

    Args:
        tables: Tables of the same records by different groupings, (groups, 2, bins) each.
        stds: Standard deviation of the noise in each coordinate of each table, 0 for all tables or for none.

    Returns:
        The combined table (2, bins), and the standard deviation of the noise in each of its coordinates.
    """
    variances = np.array([len(table) * std**2 for table, std in zip(tables, stds, strict=True)])
    if not variances.all():  # without noise, every grouping of the records has the same sums
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
    """Return the centres of the bins, where the outermost are as wide as their neighbours."""
    ends = np.concatenate([[2.0 * edges[0] - edges[1]], edges, [2.0 * edges[-1] - edges[-2]]])
    return np.asarray((ends[1:] + ends[:-1]) / 2.0, np.float64)


@lru_cache(maxsize=8)
def _inverse_root_matrix(size: int) -> Floats:
    """Return the inverse of `prefix_root_matrix`, by the series of √(1 - x)."""
    steps = np.arange(1.0, size)
    return lower_toeplitz(np.concatenate([[1.0], np.cumprod((steps - 1.5) / steps)]))
