"""Fetch a data set by name: from torchvision's hosts, or from a mirror where they cannot be reached."""

import os
from collections.abc import Callable
from pathlib import Path

from fedpriv.data.cache import Origin, ensure
from fedpriv.data.mirror import mnist_package
from fedpriv.data.sources import torchvision_download
from fedpriv.errors import InputError, suggestion

SYNTHETIC = "synthetic"
PHASE_RETRIEVAL = "phase-retrieval"
LINEAR_REGRESSION = "linear-regression"
COMPUTED = (SYNTHETIC, PHASE_RETRIEVAL, LINEAR_REGRESSION)
"""The data sets that are computed, not fetched."""

_MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

ORIGINS = {
    "mnist": Origin(
        folder="MNIST/raw",
        files=tuple(_MNIST_SHA256),
        sources=(torchvision_download("MNIST"), mnist_package("MNIST/raw")),
        sha256=_MNIST_SHA256,
    ),
    "fashion-mnist": Origin(
        folder="FashionMNIST/raw",
        files=tuple(_MNIST_SHA256),  # the same names
        sources=(torchvision_download("FashionMNIST"),),
    ),
    "emnist": Origin(
        folder="EMNIST/raw",
        files=tuple(
            f"emnist-balanced-{part}-{kind}-ubyte"
            for part in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ),
        sources=(torchvision_download("EMNIST", split="balanced"),),
    ),
    "cifar10": Origin(
        folder="cifar-10-batches-py",
        files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
        sources=(torchvision_download("CIFAR10"),),
    ),
}


def default_root() -> Path:
    """$FEDPRIV_DATA, or fedpriv/data in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    if chosen := os.environ.get("FEDPRIV_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedpriv" / "data"


def fetch(name: str, root: Path | None = None, *, say: Callable[[str], None] = lambda _: None) -> Path:
    """The root below which the verified files of `name` lie, fetched if they are not there.

    `say` gets one line for every step that is worth a person's attention.  InputError if the name is unknown, or
    if the files are not there and no source gives them.
    """
    check_name(name)
    if name in COMPUTED:
        raise InputError(f"{name}: is computed when it is used, there is nothing to fetch")
    root = root or default_root()
    ensure(name, ORIGINS[name], root, say)
    return root


def check_name(name: str) -> None:
    """InputError, with a suggestion, if there is no data set of that name."""
    known = [*ORIGINS, *COMPUTED]
    if name in known:
        return
    raise InputError(
        f"data.name = {name!r}: known data sets are {', '.join(known)}, or the path of an .npz file"
        f"{suggestion(name, known)}"
    )
