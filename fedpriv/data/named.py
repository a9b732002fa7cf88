"""Load data sets as arrays, by name or path: fedpriv's, a program's, an extension's or a file's."""

import gzip
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.extensions import load_extensions, note_table_change
from fedpriv.data.cells import is_table_path
from fedpriv.data.fetch import (
    COMPUTED_DATA_SETS,
    EMNIST_ARCHIVE,
    LINEAR_REGRESSION,
    ORIGINS,
    PHASE_RETRIEVAL,
    SENTENCES,
    SYNTHETIC,
    check_data_name,
    fetch,
)
from fedpriv.data.formats import parse_idx, read_idx, unpickle_arrays
from fedpriv.data.layout import combine_unnamed_inputs
from fedpriv.data.own import (
    Dataset,
    HeldOutData,
    Sites,
    check_records,
    check_same_shapes,
    is_npz_path,
    load_npz,
    load_npz_held_out,
)
from fedpriv.data.public import PUBLIC_TABLES, TABLE_FILE, VISITS
from fedpriv.data.public import VISITS_SCHEMA as VISITS_SCHEMA
from fedpriv.data.schema import TableSchema
from fedpriv.data.synthetic import (
    TOPIC_COUNT,
    make_blobs,
    make_phase_retrieval,
    make_power_law_regression,
    make_sentences,
)
from fedpriv.data.tables import IN_MEMORY_PREFIX, load_table, load_table_held_out

SplitArrays = tuple[ArrayLike, ArrayLike]
"""Pair of records and labels.

Records (n, ...) are bytes, numbers or tokens (`layout`), or a tuple of such arrays and masks if a record has
several inputs.  Labels are (n,), or (n, ...) if a record has several.
"""
_Images = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (n, height, width) or (n, height, width, channels), and labels (n,)."""

_USER_DATA: dict[str, tuple[Callable[[], tuple[SplitArrays, SplitArrays]], int | None, Sites | None]] = {}
"""Function, number of classes and sites (`add_data`) of each registered data set, by its name."""


def add_data(
    name: str,
    load: Callable[[], tuple[SplitArrays, SplitArrays]],
    classes: int | None = None,
    *,
    sites: Sites | None = None,
) -> None:
    """Register `load` under a name for `data.name`, or replace the registered data set of this name.

    Args:
        name: Name of the data set, of lower-case letters, digits and dashes, without a dash in front.
        load: Function that returns the training pair and the test pair of (records, labels).
        classes: Number of classes, 0 for a regression, or None to infer it from the labels, which makes the number
            public.
        sites: Sites, such as hospitals, and the site of each training and test record, or None.  The keys
            `data.partition = "site"` and `run.per_silo` take sites only of a name that begins with
            "given-", as `fedpriv.run` makes it.

    Raises:
        InputError: The name is one of fedpriv's own, or not of the form above.
    """
    if name in (*ORIGINS, *COMPUTED_DATA_SETS):
        raise InputError(f"add_data: {name!r} is a data set of fedpriv; give yours another name")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InputError(
            f"add_data: name = {name!r}: expected lower-case letters, digits and dashes, without a dash in front"
        )
    _USER_DATA[name] = (load, classes, sites)
    note_table_change()


def list_user_data() -> list[str]:
    """Return the names that `add_data` registered."""
    return list(_USER_DATA)


def is_user_data(name: str) -> bool:
    """Whether a data set of this name was added, after loading extensions if the name is unknown.

    Raises:
        InputError: An extension cannot be imported.
    """
    if name not in _USER_DATA and name not in (*ORIGINS, *COMPUTED_DATA_SETS):
        load_extensions()
    return name in _USER_DATA


def load_user_data(name: str) -> Dataset:
    """Load and check a data set that was added.

    Raises:
        InputError: An array cannot be used, or both parts differ in shape or kind.
        ValueError: Lists in place of an array have unequal lengths.
        Exception: The function that loads the data set fails.
    """
    load, classes, sites = _USER_DATA[name]
    return replace(make_dataset(name, *load(), classes), sites=sites)


def make_dataset(name: str, train: SplitArrays, test: SplitArrays, classes: int | None) -> Dataset:
    """Return checked arrays as a data set.

    Labels become int64 for classes and float64 for a regression.

    Args:
        name: Name of the data set, or `ARGUMENT_NAMES` for the arguments of a program.
        train: Training records and labels.
        test: Test records and labels.
        classes: Number of classes, 0 for a regression, or None to infer it: one more than the largest label if the
            labels of both parts are integers or booleans, else 0.

    Raises:
        InputError: An array cannot be used, or both parts differ in shape or kind.
        ValueError: Lists in place of an array have unequal lengths.
    """
    (records, labels), (test_records, test_labels) = (
        (_as_records(split[0]), np.asarray(split[1])) for split in (train, test)
    )
    if classes is None:
        classes = _count_classes(labels, test_labels)
    key = name if name == ARGUMENT_NAMES else f"data.name = {name!r}"
    for split, images, targets in (("train", records, labels), ("test", test_records, test_labels)):
        check_records(images, targets, classes, split if name == ARGUMENT_NAMES else f"{key}, {split} part")
    check_same_shapes((records, labels), (test_records, test_labels), key)
    label_type = np.int64 if classes else np.float64
    return Dataset(name, records, labels.astype(label_type), test_records, test_labels.astype(label_type), classes)


ARGUMENT_NAMES = "train, test"
"""Name of a data set whose arrays are arguments of a program, in error messages."""


def display_name(name: str) -> str:
    """Return a data set's name for an error message, "train" for one of records in memory."""
    return "train" if name.startswith(IN_MEMORY_PREFIX) else name


def _as_records(values: ArrayLike) -> NDArray[Any]:
    """Return records as an array, booleans as floats, and a tuple of arrays as several inputs."""
    if isinstance(values, tuple) and all(isinstance(column, np.ndarray) for column in values):
        return combine_unnamed_inputs(values)
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype == np.bool_ else array


def _count_classes(*labels: NDArray[Any]) -> int:
    are_integers = all(np.issubdtype(column.dtype, np.integer) or column.dtype == np.bool_ for column in labels)
    return max((int(column.max(initial=0)) for column in labels), default=0) + 1 if are_integers else 0


_NAMED_TABLES = {VISITS: VISITS_SCHEMA, **{name: table.schema for name, table in PUBLIC_TABLES.items()}}

__all__ = ["Dataset", "HeldOutData", "fetch", "load", "load_held_out"]


def find_schema(name: str, table: TableSchema | None) -> TableSchema | None:
    """Return the public schema of a table, known by its name or given, or None if the data are no table.

    Args:
        name: Name of the data set, or path of its file.
        table: Schema in the scenario, for the path of a table's file, or None for another data set.

    Raises:
        InputError: The schema is missing, or is given for another data set.
    """
    if name in _NAMED_TABLES or not is_table_path(name):
        if table is not None:
            raise InputError(
                f"data.table: is for a table, such as a .csv or .parquet file; data.name = {name!r} is none"
            )
        return _NAMED_TABLES.get(name)
    if table is None:
        raise InputError(
            f"data.table: this section is missing, and has to say what is public about the columns of {name}; "
            f"`fedpriv data inspect {name}` writes one to start from, with --target and --out"
        )
    return table


RECORDS_FOLDER_VARIABLE = "FEDPRIV_RECORDS_FOLDER"
"""Environment variable with the folder of relative paths of records, by default the working directory."""


def find_file(name: str) -> Path:
    """Return the path of a file of records.  A relative one begins at the folder in `RECORDS_FOLDER_VARIABLE`."""
    return Path(os.environ.get(RECORDS_FOLDER_VARIABLE, ""), name)


def table_path(name: str, root: Path | None = None) -> Path:
    """Return the path of a table's file, after fetching and verifying a table that has a name.

    Args:
        name: Name of a table, or a path.
        root: Root of the data sets, or None for the default one.

    Raises:
        InputError: The table has a name, its file is missing or another one, and it cannot be fetched, or the
            folder cannot be used.
    """
    return fetch(name, root) / ORIGINS[name].folder / TABLE_FILE if name in _NAMED_TABLES else find_file(name)


def load(
    name: str,
    root: Path | None = None,
    table: TableSchema | None = None,
    *,
    with_cells: bool = False,
    dtype: str = "float64",
) -> Dataset:
    """Load a data set by its name or path.

    Args:
        name: One of the following names or paths.

            * mnist, fashion-mnist, cifar10, and emnist (its split "balanced", 47 classes, images transposed as
              published).
            * Computed, without a file: synthetic, sentences, phase-retrieval (8 dimensions, 10 % outliers) and
              linear-regression (256 dimensions of decreasing curvature, a minimizer of norm 1, noise 0.1).
            * The path of an .npz file (`own`), or of a table's file (`is_table_path`) that `table` describes, or
              the name of a DataFrame (`add_frame`) in place of this path.
            * Tables with a known schema: heart-hospitals, dialysis, dialysis-survival, dialysis-times, adult and
              visits (made up).
            * A name that was added (`add_data`).
        root: Folder of the data, or None for the default one.
        table: Public schema of the table, for the path of a table's file or the name of a DataFrame, or None for
            another data set.
        with_cells: Whether the result has the raw cells of a table's training records.
        dtype: Floating-point type that the features of a table are rounded to.

    Raises:
        InputError: The name is unknown, its data cannot be fetched or used, an extension cannot be imported, or
            `table` is missing or superfluous.
        Exception: An added data set cannot be loaded (`load_user_data`).
    """
    if is_npz_path(name) and table is None:
        return load_npz(str(find_file(name)))
    if is_user_data(name) and table is None:
        return load_user_data(name)
    if (schema := find_schema(name, table)) is not None:
        return load_table(name, table_path(name, root), schema, with_cells=with_cells, dtype=dtype)
    check_data_name(name)
    if name == SYNTHETIC:
        return Dataset(name, *make_blobs(train=6000, test=1000), class_count=10)
    if name == SENTENCES:
        return Dataset(name, *make_sentences(train=12_000, test=4000), class_count=TOPIC_COUNT)
    if name == PHASE_RETRIEVAL:
        return Dataset(
            name, *make_phase_retrieval(train=200_000, test=4000, dimension=8, outliers=0.1, seed=0), class_count=0
        )
    if name == LINEAR_REGRESSION:
        problem = make_power_law_regression(n=65_536 + 1000, dimension=256, noise=0.1, seed=0)
        train, test = slice(None, -1000), slice(-1000, None)
        features, labels = problem.features, problem.labels
        return Dataset(name, features[train], labels[train], features[test], labels[test], class_count=0)
    (read, classes), folder = _READERS[name], fetch(name, root) / ORIGINS[name].folder
    return Dataset(name, *read(folder, "train"), *read(folder, "test"), class_count=classes)


def load_held_out(name: str, root: Path | None = None, table: TableSchema | None = None) -> HeldOutData:
    """Load the test records of a data set.

    Data that were added or are computed, an .npz file and a table's file are read whole, and their training
    records dropped.

    Args:
        name: Name of a data set, or path of an .npz file or of a table's file (`load`).
        root: Folder of the data, or None for the default one.
        table: Public schema of the table, for the path of a table's file or the name of a DataFrame, or None for
            another data set.

    Raises:
        InputError: The name is unknown, its data cannot be fetched or used, an extension cannot be imported, or
            `table` is missing or superfluous.
        Exception: An added data set cannot be loaded (`load_user_data`).
    """
    if is_npz_path(name) and table is None:
        return load_npz_held_out(str(find_file(name)))
    if is_user_data(name) or name in COMPUTED_DATA_SETS:
        data = load(name, root, table)
        return HeldOutData(data.test_images, data.test_labels, data.class_count, data.sites)
    if (schema := find_schema(name, table)) is not None:
        return load_table_held_out(name, table_path(name, root), schema)
    check_data_name(name)
    read, classes = _READERS[name]
    return HeldOutData(*read(fetch(name, root) / ORIGINS[name].folder, "test"), class_count=classes)


def _read_emnist(folder: Path, split: str) -> _Images:
    """Read images and labels of EMNIST out of the published archive.

    Returns:
        Images (n, 28, 28), transposed as published, and labels 0 … 46, (n,).

    Raises:
        InputError: The archive cannot be read.
    """
    path = folder / EMNIST_ARCHIVE

    def member(array_name: str) -> NDArray[np.uint8]:
        name = f"gzip/emnist-balanced-{split}-{array_name}-ubyte.gz"
        try:
            with zipfile.ZipFile(path) as archive:
                return parse_idx(gzip.decompress(archive.read(name)), f"{path}, {name}")
        except (KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{path}: {name} cannot be read ({error})") from None

    return member("images-idx3"), member("labels-idx1").astype(np.int64)


def _read_mnist(folder: Path, split: str) -> _Images:
    prefix = "train" if split == "train" else "t10k"
    return (
        read_idx(folder / f"{prefix}-images-idx3-ubyte"),
        read_idx(folder / f"{prefix}-labels-idx1-ubyte").astype(np.int64),
    )


def _read_cifar(folder: Path, split: str) -> _Images:
    if split == "test":
        return _read_cifar_batch(folder / "test_batch")
    images, labels = zip(
        *(_read_cifar_batch(folder / f"data_batch_{number}") for number in range(1, 6)), strict=True
    )
    return np.concatenate(images), np.concatenate(labels)


def _read_cifar_batch(path: Path) -> _Images:
    """Read a batch file, which stores an image as a row of 3,072 bytes: channel, then row, then column."""
    batch = unpickle_arrays(path.read_bytes())
    return (
        np.ascontiguousarray(batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)),
        np.asarray(batch["labels"], np.int64),
    )


_READERS: dict[str, tuple[Callable[[Path, str], _Images], int]] = {
    "mnist": (_read_mnist, 10),
    "fashion-mnist": (_read_mnist, 10),
    "emnist": (_read_emnist, 47),
    "cifar10": (_read_cifar, 10),
}
"""Reader of the parts "train" and "test" of each data set's folder, and its number of classes."""
