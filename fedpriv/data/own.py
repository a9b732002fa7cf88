"""Data sets in memory, and a data set of one's own: one .npz file, named by its path in `data.name`.

| array | shape and type |
|---|---|
| `train_images`, `test_images` | (n, ...): bytes; finite floats for numbers; other whole numbers are tokens |
| `train_labels`, `test_labels` | (n, ...): whole numbers 0 … classes - 1 or booleans, floats for a regression |
| `train_features`, `test_features` | the same by another name |
| `train_features.NAME`, `test_features.NAME` | inputs of records that have several, in the order of the file |
| `classes` | one whole number; 0 for a regression |

The server of a deployment needs the test arrays and `classes` only.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.data.layout import IGNORED_CLASS, MAX_INTEGER, combine_inputs, describe_inputs, split_inputs


@dataclass(frozen=True)
class Sites:
    """Site of each record: its place in `names`, silo 0 first."""

    names: tuple[str, ...]
    train: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """Images as bytes, (n, height, width) or (n, height, width, channels), and labels 0 … classes-1 (n,).

    Features that are numbers are vectors of floats (n, features) instead, and `layout` describes tokens, several
    inputs and several labels of a record.  A regression has classes = 0 and floats for labels.  A row of a table
    that does not count where it has a place is zeros, with a label that is no class (-1) or no number: `placing`.
    """

    name: str
    train_images: NDArray[Any]
    train_labels: NDArray[Any]
    test_images: NDArray[Any]
    test_labels: NDArray[Any]
    class_count: int
    sites: Sites | None = None
    """Where the records come from, if the data say so."""
    persons: NDArray[np.str_] | None = None
    """Whose each training record is, if the data say so."""
    label_scale: float = 1.0
    """How much of a real target's own unit 1 of a label is."""
    row_indices: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Which row of its file each training and each test record is, from 0, for a table."""
    raw_cells: NDArray[np.float64] | None = None
    """The training records' raw cells (n, columns), for a table of which they were asked: see `Encoded.cells`."""


@dataclass(frozen=True)
class HeldOutData:
    """The test images and labels of a data set, shaped as in `Dataset`."""

    images: NDArray[Any]
    labels: NDArray[Any]
    class_count: int
    sites: Sites | None = None
    label_scale: float = 1.0


NPZ_SUFFIX = ".npz"


def is_npz_path(name: str) -> bool:
    """Whether a data set's name is the path of a file."""
    return name.endswith(NPZ_SUFFIX)


def load_npz(name: str) -> Dataset:
    """The whole data set in a file; InputError, naming the array, if something in it cannot be used."""
    arrays = _read_arrays(name)
    classes = _read_class_count(arrays, name)
    (train, train_labels), (test, test_labels) = (
        _read_split(arrays, part, classes, name) for part in ("train", "test")
    )
    check_same_shapes((train, train_labels), (test, test_labels), f"data.name = {name!r}")
    return Dataset(name, train, train_labels, test, test_labels, classes)


def load_npz_held_out(name: str) -> HeldOutData:
    """The test part, which is all that a server reads."""
    arrays = _read_arrays(name)
    classes = _read_class_count(arrays, name)
    return HeldOutData(*_read_split(arrays, "test", classes, name), classes)


def check_records(images: NDArray[Any], labels: NDArray[Any], classes: int, source: str) -> None:
    """InputError, naming `source`, unless these are records with labels for `classes` classes (0: numbers)."""
    parts, several = split_inputs(images), images.dtype.names is not None
    for part in parts.values():
        if part.dtype.kind not in ("fiub" if several else "fiu"):
            raise InputError(
                f"{source}: records are bytes (0 … 255), other whole numbers or floats, not {part.dtype}"
            )
    if images.ndim < (1 if several else 2) or not labels.ndim or len(images) != len(labels) or not labels.size:
        raise InputError(
            f"{source}: expected records (n, ...) and as many labels (n,), or (n, ...), found {images.shape} and "
            f"{labels.shape}"
        )
    whole = labels.dtype.kind in "iub"
    if not whole and labels.dtype.kind != "f":
        raise InputError(
            f"{source}: labels are numbers, not {labels.dtype}; np.unique(labels, return_inverse=True)[1] numbers "
            "classes that have names"
        )
    if not all(np.isfinite(part).all() for part in (*parts.values(), labels)):
        raise InputError(f"{source}: a value is not finite; every one must be a number")
    for part in (*parts.values(), labels):
        if (
            part.dtype.kind in "iu"
            and part.size
            and not -MAX_INTEGER <= int(part.min()) <= int(part.max()) <= MAX_INTEGER
        ):
            raise InputError(
                f"{source}: whole numbers are at most 2^24 = {MAX_INTEGER:,} in size; give others as floats"
            )
    if classes:
        known = labels[labels != IGNORED_CLASS] if labels.ndim > 1 else labels
        if not whole or (known.size and (known.min() < 0 or known.max() >= classes)):
            found = f"found {labels.min()} … {labels.max()}" if whole else f"not {labels.dtype}"
            raise InputError(
                f"{source}: labels are whole numbers from 0 to {classes - 1}, {found}; "
                + ("classes that begin with 1 are labels - 1" if whole else "classes are labels.astype(int)")
            )


def check_same_shapes(
    train: tuple[NDArray[Any], NDArray[Any]], test: tuple[NDArray[Any], NDArray[Any]], source: str
) -> None:
    """InputError, naming `source`, unless records and labels of both parts have the same shapes and kinds."""
    for what, one, other in zip(("records", "labels"), train, test, strict=True):
        kinds = [
            (describe_inputs(part), [each.dtype == np.uint8 for each in split_inputs(part).values()])
            for part in (one, other)
        ]
        if not (kinds[0] == kinds[1] if what == "records" else one.shape[1:] == other.shape[1:]):
            raise InputError(
                f"{source}: training and test {what} must be alike, found {one.dtype} {one.shape} and "
                f"{other.dtype} {other.shape}"
            )


def _read_arrays(name: str) -> dict[str, NDArray[Any]]:
    try:
        with np.load(name, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise InputError(f"data.name = {name!r}: no such file (looked for {Path(name).resolve()})") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"data.name = {name!r}: not a readable .npz file without objects ({error})") from None


def combine_named_inputs(arrays: Mapping[str, NDArray[Any]], name: str, source: str) -> dict[str, NDArray[Any]]:
    """`arrays`, with those called `name`.INPUT as one array `name` of several inputs."""
    inputs = {key.removeprefix(f"{name}."): each for key, each in arrays.items() if key.startswith(f"{name}.")}
    if len({len(each) if each.ndim else None for each in inputs.values()}) > 1:
        raise InputError(f"{source}: the inputs {', '.join(inputs)} must have as many records each")
    return {**arrays, **({name: combine_inputs(inputs)} if inputs else {})}


def _read_class_count(arrays: dict[str, NDArray[Any]], name: str) -> int:
    classes = arrays.get("classes")
    if classes is None or classes.size != 1 or not np.issubdtype(classes.dtype, np.integer) or classes.item() < 0:
        raise InputError(f"data.name = {name!r}: `classes` must be one whole number, 0 for a regression")
    return int(classes.item())


def _read_split(
    arrays: dict[str, NDArray[Any]], part: str, classes: int, name: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    arrays = combine_named_inputs(arrays, f"{part}_features", f"data.name = {name!r}")
    spelled = f"{part}_features" if f"{part}_features" in arrays else f"{part}_images"
    for array in (spelled, f"{part}_labels"):
        if array not in arrays:
            raise InputError(f"data.name = {name!r}: has no array `{array}`, only {', '.join(sorted(arrays))}")
    images, labels = arrays[spelled], arrays[f"{part}_labels"]
    check_records(images, labels, classes, f"data.name = {name!r}, {part} part")
    return images, labels.astype(np.int64 if classes else np.float64)
