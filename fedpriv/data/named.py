"""Data sets by name, as arrays: those of fedpriv, and those that a program or an imported file adds."""

import gzip
import re
import zipfile
from collections.abc import Callable
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
"""Records (n, ...), bytes, numbers or tokens (`layout`), and labels (n,), or (n, ...) of several a record."""
_Images = tuple[NDArray[np.uint8], NDArray[np.int64]]

_USER_DATA: dict[str, tuple[Callable[[], tuple[SplitArrays, SplitArrays]], int | None]] = {}


def add_data(name: str, load: Callable[[], tuple[SplitArrays, SplitArrays]], classes: int | None = None) -> None:
    """Make `data.name = name` mean what `load()` returns: (records, labels) for training, and for the test.

    `classes` is 0 for a regression.  Left out, it is one more than the largest label where labels are whole
    numbers, which is public from then on, and 0 where they are not.  One's own data set of that name is replaced.

    InputError for a name that fedpriv has already, or that is not made of lower-case letters, digits and dashes.
    """
    if name in (*ORIGINS, *COMPUTED_DATA_SETS):
        raise InputError(f"add_data: {name!r} is a data set of fedpriv; give yours another name")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InputError(f"add_data: name = {name!r}: expected lower-case letters, digits and dashes")
    _USER_DATA[name] = (load, classes)
    note_table_change()


def list_user_data() -> list[str]:
    """The names that were added."""
    return list(_USER_DATA)


def is_user_data(name: str) -> bool:
    """Whether a data set of this name was added; imports extensions if it is not known here."""
    if name not in _USER_DATA and name not in (*ORIGINS, *COMPUTED_DATA_SETS):
        load_extensions()
    return name in _USER_DATA


def load_user_data(name: str) -> Dataset:
    """The data set, checked; InputError if something in it cannot be used."""
    load, classes = _USER_DATA[name]
    train, test = load()
    return make_dataset(name, train, test, classes)


def make_dataset(name: str, train: SplitArrays, test: SplitArrays, classes: int | None) -> Dataset:
    """Arrays as a data set; see `add_data` for `classes`.  InputError if they cannot be used."""
    (records, labels), (test_records, test_labels) = (
        (_as_records(part[0]), np.asarray(part[1])) for part in (train, test)
    )
    if classes is None:
        classes = _count_classes(labels, test_labels)
    key = name if name == ARGUMENT_NAMES else f"data.name = {name!r}"
    for part, images, targets in (("train", records, labels), ("test", test_records, test_labels)):
        check_records(images, targets, classes, part if name == ARGUMENT_NAMES else f"{key}, {part} part")
    check_same_shapes((records, labels), (test_records, test_labels), key)
    kind = np.int64 if classes else np.float64
    return Dataset(name, records, labels.astype(kind), test_records, test_labels.astype(kind), classes)


ARGUMENT_NAMES = "train, test"
"""The name of such arrays while they are checked."""


def display_name(name: str) -> str:
    """Name a data set for an error: by its name, or by the argument that it was given as."""
    return "train" if name.startswith(IN_MEMORY_PREFIX) else name


def _as_records(values: ArrayLike) -> NDArray[Any]:
    """Truth values are numbers like any other; a tuple of arrays are several inputs."""
    if isinstance(values, tuple) and all(isinstance(each, np.ndarray) for each in values):
        return combine_unnamed_inputs(values)
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype == np.bool_ else array


def _count_classes(*labels: NDArray[Any]) -> int:
    whole = all(np.issubdtype(each.dtype, np.integer) or each.dtype == np.bool_ for each in labels)
    return max((int(each.max(initial=0)) for each in labels), default=0) + 1 if whole else 0


_NAMED_TABLES = {VISITS: VISITS_SCHEMA, **{name: table.schema for name, table in PUBLIC_TABLES.items()}}

__all__ = ["Dataset", "HeldOutData", "fetch", "load", "load_held_out"]


def find_schema(name: str, table: TableSchema | None) -> TableSchema | None:
    """Public schema of the table called `name`, None for a data set that is no table.

    InputError for a file without a description, and for a description of what is no file.
    """
    if name in _NAMED_TABLES or not is_table_path(name):
        if table is not None:
            raise InputError(f"data.table: is for a .csv or .parquet file; data.name = {name!r} is none")
        return _NAMED_TABLES.get(name)
    if table is None:
        raise InputError(
            f"data.table: this key is missing, what is public about the columns of {name}; `fedpriv data inspect "
            f"{name}` writes one to start from"
        )
    return table


def table_path(name: str, root: Path | None = None) -> Path:
    """The file of a table by name or path, fetched and verified if it has a name."""
    return fetch(name, root) / ORIGINS[name].folder / TABLE_FILE if name in _NAMED_TABLES else Path(name)


def load(
    name: str,
    root: Path | None = None,
    table: TableSchema | None = None,
    *,
    with_cells: bool = False,
    dtype: str = "float64",
) -> Dataset:
    """The data set `name`, fetched on first use and verified on every use; see `fetch` for `root` and errors.

    Names: mnist, fashion-mnist, emnist (its split "balanced", 47 classes, images transposed as it is published),
    cifar10, and four that need no file: synthetic, sentences (made up, of words), phase-retrieval (8 dimensions,
    10 % outliers) and linear-regression (256 dimensions of falling curvature, a known minimizer of norm 1, noise
    0.1).  A name that ends in .npz is the path of a file of one's own, see `own`; one that ends in .csv or
    .parquet the path of a table, which `table` describes.  heart-hospitals, dialysis, dialysis-survival,
    dialysis-times, adult and visits (made up) are tables whose description is known.
    Others may have been added, see `add_data`.  Features of a table are rounded to `dtype`, and with `cells` the
    raw cells are there, too.
    """
    if is_npz_path(name) and table is None:
        return load_npz(name)
    if is_user_data(name):
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
    """The test records only: for a server, which has no training record; otherwise as `load`."""
    if is_npz_path(name) and table is None:
        return load_npz_held_out(name)
    if is_user_data(name) or name in COMPUTED_DATA_SETS:
        whole = load(name, root, table)
        return HeldOutData(whole.test_images, whole.test_labels, whole.class_count)
    if (schema := find_schema(name, table)) is not None:
        return load_table_held_out(name, table_path(name, root), schema)
    check_data_name(name)
    read, classes = _READERS[name]
    return HeldOutData(*read(fetch(name, root) / ORIGINS[name].folder, "test"), class_count=classes)


def _read_emnist(folder: Path, part: str) -> _Images:
    """Out of the archive as it is published: the only thing that there is a hash of."""
    path = folder / EMNIST_ARCHIVE

    def member(kind: str) -> NDArray[np.uint8]:
        name = f"gzip/emnist-balanced-{part}-{kind}-ubyte.gz"
        try:
            with zipfile.ZipFile(path) as archive:
                return parse_idx(gzip.decompress(archive.read(name)), f"{path}, {name}")
        except (KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: {name} cannot be read ({error})") from None

    return member("images-idx3"), member("labels-idx1").astype(np.int64)


def _read_mnist(folder: Path, part: str) -> _Images:
    prefix = "train" if part == "train" else "t10k"
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte")
    return images, read_idx(folder / f"{prefix}-labels-idx1-ubyte").astype(np.int64)


def _read_cifar(folder: Path, part: str) -> _Images:
    if part == "test":
        return _read_cifar_batch(folder / "test_batch")
    images, labels = zip(
        *(_read_cifar_batch(folder / f"data_batch_{number}") for number in range(1, 6)), strict=True
    )
    return np.concatenate(images), np.concatenate(labels)


def _read_cifar_batch(path: Path) -> _Images:
    """A batch keeps an image as a row of 3,072 bytes: channel, then row, then column."""
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
"""How "train" and "test" are read from a data set's folder, and how many classes there are."""
