"""Columns of numbers less their mean, in units of their deviation: a public map of one record by itself.

Means and deviations of records are releases.  Where they come from noisy ones that were accounted for, the map is
post-processing of those, and a constant for all that follows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError

SMALLEST = 1.0 / 16.0
"""Of a deviation, where a column's public range is -1 … 1: noise must not blow a column up without end."""


@dataclass(frozen=True)
class Scaling:
    """Feature columns[j] of a record becomes (feature - means[j]) / deviations[j]; all others stay."""

    columns: tuple[int, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def applied(self, features: NDArray[Any]) -> NDArray[Any]:
        """Of features (n, width) that are numbers; InputError for others, and for columns that are not there.

        Guarantee: row b of the result is a function of row b and of these numbers alone.
        """
        if features.ndim != 2 or features.dtype.kind != "f" or max(self.columns) >= features.shape[1]:
            raise InputError(
                f"data.scale: is for features that are numbers, {max(self.columns) + 1} or more of a record, and "
                f"here a record has shape {features.shape[1:]} and type {features.dtype}"
            )
        scaled = features.astype(np.float64)
        places = list(self.columns)
        scaled[:, places] = (scaled[:, places] - np.array(self.means)) / np.array(self.deviations)
        return scaled


def moments_of(values: NDArray[Any]) -> NDArray[np.float64]:
    """What a record adds to the first step: (n, k) in -1 … 1 -> (n, 2k), of norm 1 at most.

    Column j gives x and 2x² - 1, both in -1 … 1, so that k columns have norm √(2k); they are divided by that.
    """
    wide = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):  # what does not fit is infinite, and an increment of zeros
        squares = 2.0 * wide**2 - 1.0
    return np.concatenate([wide, squares], axis=1) / math.sqrt(2 * wide.shape[1])


def scaling_from(columns: Sequence[int], released: NDArray[Any]) -> Scaling:
    """The scaling that noisy means of `moments_of`, (2k,), give: post-processing, whatever they are."""
    count = len(columns)
    if released.shape != (2 * count,) or not np.isfinite(released).all():
        raise ValueError(f"{2 * count} finite moments were expected, not an array of shape {released.shape}")
    first, second = np.split(np.asarray(released, np.float64) * math.sqrt(2 * count), 2)
    means = first.clip(-1.0, 1.0)
    variances = (second + 1.0) / 2.0 - means**2
    deviations = np.sqrt(variances.clip(SMALLEST**2, 1.0))
    return Scaling(tuple(columns), tuple(means.tolist()), tuple(deviations.tolist()))
