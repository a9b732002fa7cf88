"""The data sets by name, as arrays."""

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.dataset import Dataset, HeldOut
from fedpriv.data.fetch import (
    COMPUTED,
    EMNIST_ARCHIVE,
    LINEAR_REGRESSION,
    ORIGINS,
    PHASE_RETRIEVAL,
    SYNTHETIC,
    check_name,
    fetch,
)
from fedpriv.data.idx import parse_idx, read_idx
from fedpriv.data.own import is_own, load_own, load_own_test
from fedpriv.data.public_tables import FILE, PUBLIC_TABLES
from fedpriv.data.registered import is_added, load_added
from fedpriv.data.synthetic import blobs, phase_retrieval, power_law_regression
from fedpriv.data.table_file import is_table
from fedpriv.data.table_schema import TableSchema
from fedpriv.data.tables import load_table, load_table_test
from fedpriv.data.unpickle import unpickle_arrays
from fedpriv.data.visits import SCHEMA as VISITS_SCHEMA
from fedpriv.data.visits import VISITS
from fedpriv.errors import InputError

_NAMED_TABLES = {VISITS: VISITS_SCHEMA, **{name: table.schema for name, table in PUBLIC_TABLES.items()}}

__all__ = ["Dataset", "HeldOut", "fetch", "load", "load_test"]


def schema_of(name: str, table: TableSchema | None) -> TableSchema | None:
    """What is public about the table called `name`, None for a data set that is no table.

    InputError for a file without a description, and for a description of what is no file.
    """
    if name in _NAMED_TABLES or not is_table(name):
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
    return fetch(name, root) / ORIGINS[name].folder / FILE if name in _NAMED_TABLES else Path(name)


def load(name: str, root: Path | None = None, table: TableSchema | None = None) -> Dataset:
    """The data set `name`, fetched on first use and verified on every use; see `fetch` for `root` and errors.

    Names: mnist, fashion-mnist, emnist (its split "balanced", 47 classes, images transposed as it is published),
    cifar10, and three that need no file: synthetic, phase-retrieval (8 dimensions, 10 % outliers) and
    linear-regression (256 dimensions of falling curvature, a known minimizer of norm 1, noise 0.1).  A name
    that ends in .npz is the path of a file of one's own, see `own`; one that ends in .csv or .parquet the path of
    a table, which `table` describes.  heart-hospitals, adult and visits (made up: several records a person) are
    tables whose description is known.
    Others may have been added, see `add_data`.
    """
    if is_own(name) and table is None:
        return load_own(name)
    if is_added(name):
        return load_added(name)
    if (schema := schema_of(name, table)) is not None:
        return load_table(name, table_path(name, root), schema)
    check_name(name)
    if name == SYNTHETIC:
        return Dataset(name, *blobs(train=6000, test=1000), classes=10)
    if name == PHASE_RETRIEVAL:
        records = phase_retrieval(train=200_000, test=4000, dimension=8, outliers=0.1, seed=0)
        return Dataset(name, *records, classes=0)
    if name == LINEAR_REGRESSION:
        problem = power_law_regression(n=65_536 + 1000, dimension=256, noise=0.1, seed=0)
        train, test = slice(None, -1000), slice(-1000, None)
        features, labels = problem.features, problem.labels
        return Dataset(name, features[train], labels[train], features[test], labels[test], classes=0)
    return _READERS[name](name, fetch(name, root) / ORIGINS[name].folder)


def load_test(name: str, root: Path | None = None, table: TableSchema | None = None) -> HeldOut:
    """The test records only: for a server, which has no training record; otherwise as `load`."""
    if is_own(name) and table is None:
        return load_own_test(name)
    if is_added(name):
        whole = load_added(name)
        return HeldOut(whole.test_images, whole.test_labels, whole.classes)
    if (schema := schema_of(name, table)) is not None:
        return load_table_test(name, table_path(name, root), schema)
    check_name(name)
    if name in COMPUTED:
        whole = load(name)
        return HeldOut(whole.test_images, whole.test_labels, whole.classes)
    read, classes = _TEST_READERS[name]
    return HeldOut(*read(fetch(name, root) / ORIGINS[name].folder), classes=classes)


def _read_mnist(name: str, folder: Path) -> Dataset:
    return Dataset(name, *_idx_part(folder, "train"), *_idx_part(folder, "t10k"), classes=10)


def _read_emnist(name: str, folder: Path) -> Dataset:
    (train_images, train_labels), (test_images, test_labels) = (_emnist_part(folder, p) for p in ("train", "test"))
    return Dataset(name, train_images, train_labels, test_images, test_labels, classes=47)


def _emnist_part(folder: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
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


def _idx_part(folder: Path, prefix: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte")
    return images, read_idx(folder / f"{prefix}-labels-idx1-ubyte").astype(np.int64)


def _read_cifar10(name: str, folder: Path) -> Dataset:
    batches = [_cifar_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    train_images, train_labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    test_images, test_labels = _cifar_batch(folder / "test_batch")
    return Dataset(name, train_images, train_labels, test_images, test_labels, classes=10)


def _cifar_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A batch keeps an image as a row of 3,072 bytes: channel, then row, then column."""
    batch = unpickle_arrays(path.read_bytes())
    images: NDArray[np.uint8] = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.asarray(batch["labels"], np.int64)


_READERS: dict[str, Callable[[str, Path], Dataset]] = {
    "mnist": _read_mnist,
    "fashion-mnist": _read_mnist,
    "emnist": _read_emnist,
    "cifar10": _read_cifar10,
}

_TEST_READERS: dict[str, tuple[Callable[[Path], tuple[NDArray[np.uint8], NDArray[np.int64]]], int]] = {
    "mnist": (lambda folder: _idx_part(folder, "t10k"), 10),
    "fashion-mnist": (lambda folder: _idx_part(folder, "t10k"), 10),
    "emnist": (lambda folder: _emnist_part(folder, "test"), 47),
    "cifar10": (lambda folder: _cifar_batch(folder / "test_batch"), 10),
}
