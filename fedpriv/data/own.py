"""Data sets in memory, and a data set of one's own: one .npz file, named by its path in `data.name`.

| array | shape and type |
|---|---|
| `train_images`, `test_images` | (n, ...): bytes, or finite floats for features that are numbers |
| `train_labels`, `test_labels` | (n,): whole numbers 0 … classes - 1 or booleans, floats for a regression |
| `train_features`, `test_features` | the same by another name |
| `classes` | one whole number; 0 for a regression |

The server of a deployment needs the test arrays and `classes` only.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError


@dataclass(frozen=True)
class Sites:
    """Site of each record: its place in `names`, silo 0 first."""

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
    cells: NDArray[np.float64] | None = None
    """The training records' raw cells (n, columns), for a table: see `Encoded.cells`."""


@dataclass(frozen=True)
class HeldOut:
    """The test images and labels of a data set, shaped as in `Dataset`."""

    images: NDArray[Any]
    labels: NDArray[Any]
    classes: int
    sites: Sites | None = None
    unit: float = 1.0


SUFFIX = ".npz"


def is_own(name: str) -> bool:
    """Whether a data set's name is the path of a file."""
    return name.endswith(SUFFIX)


def load_own(name: str) -> Dataset:
    """The whole data set in a file; InputError, naming the array, if something in it cannot be used."""
    arrays = _arrays(name)
    classes = _classes(arrays, name)
    (train, train_labels), (test, test_labels) = (_part(arrays, part, classes, name) for part in ("train", "test"))
    if train.shape[1:] != test.shape[1:] or (train.dtype == np.uint8) != (test.dtype == np.uint8):
        raise InputError(
            f"data.name = {name!r}: train and test records must be alike, found {train.dtype} {train.shape} and "
            f"{test.dtype} {test.shape}"
        )
    return Dataset(name, train, train_labels, test, test_labels, classes)


def load_own_test(name: str) -> HeldOut:
    """The test part, which is all that a server reads."""
    arrays = _arrays(name)
    classes = _classes(arrays, name)
    return HeldOut(*_part(arrays, "test", classes, name), classes)


def check_records(images: NDArray[Any], labels: NDArray[Any], classes: int, source: str) -> None:
    """InputError, naming `source`, unless these are records with labels for `classes` classes (0: numbers)."""
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise InputError(f"{source}: records are bytes (0 … 255) or floats, not {images.dtype}")
    if images.ndim < 2 or labels.ndim != 1 or len(images) != len(labels) or not len(labels):
        raise InputError(
            f"{source}: expected records (n, ...) and as many labels (n,), found {images.shape} and {labels.shape}"
        )
    whole = np.issubdtype(labels.dtype, np.integer) or labels.dtype == np.bool_
    if not (whole or np.issubdtype(labels.dtype, np.floating)):
        raise InputError(f"{source}: labels are numbers, not {labels.dtype}")
    if not np.isfinite(images).all() or not np.isfinite(labels).all():
        raise InputError(f"{source}: a value is not finite; every one must be a number")
    if classes and (not whole or labels.min() < 0 or labels.max() >= classes):
        raise InputError(f"{source}: labels are whole numbers from 0 to {classes - 1}")


def _arrays(name: str) -> dict[str, NDArray[Any]]:
    try:
        with np.load(name, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise InputError(f"data.name = {name!r}: no such file (looked for {Path(name).resolve()})") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"data.name = {name!r}: not a readable .npz file without objects ({error})") from None


def _classes(arrays: dict[str, NDArray[Any]], name: str) -> int:
    classes = arrays.get("classes")
    if classes is None or classes.size != 1 or not np.issubdtype(classes.dtype, np.integer) or classes.item() < 0:
        raise InputError(f"data.name = {name!r}: `classes` must be one whole number, 0 for a regression")
    return int(classes.item())


def _part(
    arrays: dict[str, NDArray[Any]], part: str, classes: int, name: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    spelled = f"{part}_features" if f"{part}_features" in arrays else f"{part}_images"
    for array in (spelled, f"{part}_labels"):
        if array not in arrays:
            raise InputError(f"data.name = {name!r}: has no array `{array}`, only {', '.join(sorted(arrays))}")
    images, labels = arrays[spelled], arrays[f"{part}_labels"]
    check_records(images, labels, classes, f"data.name = {name!r}, {part} part")
    return images, labels.astype(np.int64 if classes else np.float64)
