"""What a data set is, once it is in memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sites:
    """Which site each record belongs to: its place in `names`, silo 0 first."""

    names: tuple[str, ...]
    train: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """Images as bytes, (n, height, width) or (n, height, width, channels), and labels 0 … classes-1 (n,).

    Features that are numbers are vectors of floats (n, features) instead; a regression has classes = 0 and floats
    for labels.  A row of a table that does not count where it has a place is zeros, with a label that is no class
    (-1) or no number: see `placing`.
    """

    name: str
    train_images: NDArray[Any]
    train_labels: NDArray[Any]
    test_images: NDArray[Any]
    test_labels: NDArray[Any]
    classes: int
    sites: Sites | None = None
    """Where the records come from, if the data say so."""
    persons: NDArray[np.str_] | None = None
    """Whose each training record is, if the data say so."""
    unit: float = 1.0
    """How much of a real target's own unit 1 of a label is."""
    rows: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Which row of its file each training and each test record is, from 0, for a table."""


@dataclass(frozen=True)
class HeldOut:
    """The test images and labels of a data set, shaped as in `Dataset`."""

    images: NDArray[Any]
    labels: NDArray[Any]
    classes: int
    sites: Sites | None = None
    unit: float = 1.0
