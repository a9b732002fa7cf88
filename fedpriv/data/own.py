"""Hold data sets in memory, and read a user's own from the .npz file that `data.name` names.

| array | shape and type |
|---|---|
| `train_images`, `test_images` | (n, ...): bytes, floats (finite) for numbers, or other integers for tokens |
| `train_labels`, `test_labels` | (n, ...): integers 0 … classes - 1 or booleans, finite numbers for a regression |
| `train_features`, `test_features` | other names of the images |
| `train_features.NAME`, `test_features.NAME` | inputs of a record with several ones, in the order of the file |
| `classes` | one integer, 0 for a regression |

A single input has at least two axes.  Among several classes of a record, -100 stands for one that is not counted.
"""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, refuse
from fedpriv.data.layout import IGNORED_CLASS, MAX_INTEGER, combine_inputs, describe_inputs, split_inputs


@dataclass(frozen=True)
class Sites:
    """Site of each record, as an index into `names`, silo 0 first."""

    names: tuple[str, ...]
    train: NDArray[np.int64]
    """Indices of the training records' sites, (training records,)."""
    test: NDArray[np.int64]
    """Indices of the test records' sites, (test records,), or empty if test records are of no site."""


@dataclass(frozen=True)
class Dataset:
    """Training and test records with their labels.

    Images are bytes, such as (n, height, width) or (n, height, width, channels), and labels are 0 … classes - 1,
    (n,).  Numeric features are floats (n, ...), such as vectors (n, features), instead.  `fedpriv.data.layout`
    describes tokens, several inputs, and several labels of a record.  A regression has 0 classes and floats for
    labels.  A row that has a place in a part and does not count there has the label -1, or NaN among floats
    (`partition.blank_labels`).
    """

    name: str
    train_images: NDArray[Any]
    train_labels: NDArray[Any]
    test_images: NDArray[Any]
    test_labels: NDArray[Any]
    class_count: int
    """Number of classes, or 0 for a regression."""
    sites: Sites | None = None
    """Site of each record, or None if the data name no sites."""
    persons: NDArray[np.str_] | None = None
    """Name of each training record's person, (n,), or None if the data name no persons."""
    label_scale: float = 1.0
    """Number of units of a real target that a difference of 1 between labels stands for."""
    row_indices: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Row numbers of the training and the test records in a table's file, from 0, or None."""
    raw_cells: NDArray[np.float64] | None = None
    """Raw cells of the training records (`EncodedTable.raw_cells`), (n, columns), or None."""


@dataclass(frozen=True)
class HeldOutData:
    """Test images and labels of a data set, shaped as in `Dataset`."""

    images: NDArray[Any]
    labels: NDArray[Any]
    class_count: int
    """Number of classes, or 0 for a regression."""
    sites: Sites | None = None
    """Sites of the test records, or None if the data name no sites."""
    label_scale: float = 1.0
    """Number of units of a real target that a difference of 1 between labels stands for."""


NPZ_SUFFIX = ".npz"


def is_npz_path(name: str) -> bool:
    """Whether a data set's name is the path of an .npz file.

    Example:
        >>> is_npz_path("records.npz"), is_npz_path("mnist")
        (True, False)
    """
    return name.endswith(NPZ_SUFFIX)


def load_npz(name: str) -> Dataset:
    """Load the whole data set of an .npz file.

    Raises:
        InputError: The file or an array in it cannot be used.  The message names the file.
    """
    arrays = _read_arrays(name)
    classes = _read_class_count(arrays, name)
    (train, train_labels), (test, test_labels) = (
        _read_split(arrays, split, classes, name) for split in ("train", "test")
    )
    check_same_shapes((train, train_labels), (test, test_labels), f"data.name = {name!r}")
    return Dataset(name, train, train_labels, test, test_labels, classes)


def load_npz_held_out(name: str) -> HeldOutData:
    """Load the test part of an .npz file, whose training part may be missing and is not checked.

    Raises:
        InputError: The file cannot be read, or an array of the test part or `classes` cannot be used.
    """
    arrays = _read_arrays(name)
    classes = _read_class_count(arrays, name)
    return HeldOutData(*_read_split(arrays, "test", classes, name), classes)


def check_records(images: NDArray[Any], labels: NDArray[Any], classes: int, source: str) -> None:
    """Check the shapes, types and ranges of records and their labels.

    Args:
        images: Records, (n, ...) with at least two axes, or a structured array (n,) of several inputs.
        labels: Labels, (n,) or (n, ...).  Records with several labels may have IGNORED_CLASS among them.
        classes: Number of classes, or 0 if labels are numbers.
        source: Name of the data in error messages.

    Raises:
        InputError: There is no record, a shape or type cannot be used, a value is not finite, an integer is larger
            than 2^24 in size, or a label is none of the classes.
    """
    # Types and shapes.  Booleans are masks among several inputs.
    inputs, has_inputs = split_inputs(images), images.dtype.names is not None
    for column in inputs.values():
        if column.dtype.kind not in ("fiub" if has_inputs else "fiu"):
            raise InputError(
                f"{source}: records are bytes (0 … 255), other whole numbers or floats, not {column.dtype}"
            )
    if images.ndim < (1 if has_inputs else 2) or not labels.ndim or len(images) != len(labels) or not labels.size:
        raise InputError(
            f"{source}: expected records (n, ...) and as many labels (n,), or (n, ...), "
            f"found {images.shape} and {labels.shape}"
        )
    are_integers = labels.dtype.kind in "iub"
    if not are_integers and labels.dtype.kind != "f":
        raise InputError(
            f"{source}: labels are numbers, not {labels.dtype}; np.unique(labels, return_inverse=True)[1] numbers "
            "classes that have names"
        )
    # Values.
    if not all(np.isfinite(column).all() for column in (*inputs.values(), labels)):
        raise InputError(f"{source}: a value is not finite; every one must be a number")
    for column in (*inputs.values(), labels):
        if (
            column.dtype.kind in "iu"
            and column.size
            and not -MAX_INTEGER <= int(column.min()) <= int(column.max()) <= MAX_INTEGER
        ):
            raise InputError(
                f"{source}: whole numbers are at most 2^24 = {MAX_INTEGER:,} in size; give others as floats"
            )
    # Classes, without labels IGNORED_CLASS of a record with several ones.
    if classes:
        class_labels = labels[labels != IGNORED_CLASS] if labels.ndim > 1 else labels
        if not are_integers or (class_labels.size and (class_labels.min() < 0 or class_labels.max() >= classes)):
            problem = f"found {labels.min()} … {labels.max()}" if are_integers else f"not {labels.dtype}"
            raise InputError(
                f"{source}: labels are whole numbers from 0 to {classes - 1}, {problem}; "
                + (
                    "classes that begin with 1 are labels - 1"
                    if are_integers
                    else "classes are labels.astype(int)"
                )
            )


def check_same_shapes(
    train: tuple[NDArray[Any], NDArray[Any]], test: tuple[NDArray[Any], NDArray[Any]], source: str
) -> None:
    """Check that records of both parts have the same shapes and kinds, and labels the same shape.

    Kinds are bytes, other numbers, tokens and masks (`fedpriv.data.layout`).  Floats of two lengths are alike.
    The names of the inputs after the first have to be equal, too, so that inputs in another order differ.

    Args:
        train: Training records (n, …) and labels (n,) or (n, …).
        test: Test records and labels of the same form.
        source: Name of the data in messages.

    Raises:
        InputError: A shape, kind or name differs.  The message names `source`.
    """
    for subject, first, second in zip(("records", "labels"), train, test, strict=True):
        signatures = [
            (describe_inputs(values), [column.dtype == np.uint8 for column in split_inputs(values).values()])
            for values in (first, second)
        ]
        if not (
            signatures[0] == signatures[1] and (first.dtype.names or ())[1:] == (second.dtype.names or ())[1:]
            if subject == "records"
            else first.shape[1:] == second.shape[1:]
        ):
            raise InputError(
                f"{source}: training and test {subject} must be alike, found {first.dtype} {first.shape} and "
                f"{second.dtype} {second.shape}"
            )


def _read_arrays(name: str) -> dict[str, NDArray[Any]]:
    """Read all arrays of an .npz file by name.

    Raises:
        InputError: The file is missing, damaged or no .npz file, or has objects.
    """
    try:
        with np.load(name, allow_pickle=False) as arrays:
            return {key: values for key, values in arrays.items() if isinstance(values, np.ndarray)}
    except FileNotFoundError:
        raise InputError(f"data.name = {name!r}: no such file (looked for {Path(name).resolve()})") from None
    # A single array in the format .npy is no context manager, hence TypeError.
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise InputError(f"data.name = {name!r}: not a readable .npz file without objects ({error})") from None


def combine_named_inputs(arrays: Mapping[str, NDArray[Any]], name: str, source: str) -> dict[str, NDArray[Any]]:
    """Return a copy of `arrays` that also has any arrays `name`.INPUT as one structured array `name`.

    Args:
        arrays: Arrays of a file by name.
        name: Name of the records, such as "train_features".
        source: Name of the file in messages.

    Raises:
        InputError: Inputs differ in their number of records, one is a single number or has an empty name, or there
            is an array `name` besides.
    """
    inputs = {key.removeprefix(f"{name}."): column for key, column in arrays.items() if key.startswith(f"{name}.")}
    if len(lengths := {column.shape[:1] for column in inputs.values()}) > 1 or () in lengths or "" in inputs:
        raise InputError(
            f"{source}: the inputs {', '.join(inputs)} must be arrays of as many records each, with names"
        )
    refuse(
        {
            f"{source}: has {name} and {name}.{next(iter(inputs), '')}; leave one of them out": (
                inputs and name in arrays
            )
        }
    )
    return {**arrays, **({name: combine_inputs(inputs)} if inputs else {})}


def _read_class_count(arrays: dict[str, NDArray[Any]], name: str) -> int:
    classes = arrays.get("classes")
    if classes is None or classes.size != 1 or not np.issubdtype(classes.dtype, np.integer) or classes.item() < 0:
        raise InputError(f"data.name = {name!r}: `classes` must be one whole number, 0 for a regression")
    return int(classes.item())


def _read_split(
    arrays: dict[str, NDArray[Any]], split: str, classes: int, name: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the checked records and labels of the split "train" or "test".

    Records are the arrays `SPLIT_features.NAME` of several inputs, as one structured array (n,), or else the array
    `SPLIT_features`, or else `SPLIT_images`, (n, ...).  Labels (n, ...) become int64, or float64 for a regression.

    Args:
        arrays: All arrays of the file by name.
        split: "train" or "test".
        classes: Number of classes, or 0 for a regression.
        name: Path of the file, for messages.

    Raises:
        InputError: An array is missing or cannot be used.
    """
    arrays = combine_named_inputs(arrays, f"{split}_features", f"data.name = {name!r}")
    records_key = f"{split}_features" if f"{split}_features" in arrays else f"{split}_images"
    for key in (records_key, f"{split}_labels"):
        if key not in arrays:
            raise InputError(f"data.name = {name!r}: has no array `{key}`, only {', '.join(sorted(arrays))}")
    images, labels = arrays[records_key], arrays[f"{split}_labels"]
    check_records(images, labels, classes, f"data.name = {name!r}, {split} part")
    return images, labels.astype(np.int64 if classes else np.float64)
