"""Fetch a data set by name: from torchvision's hosts, or from a mirror where they cannot be reached."""

import os
from collections.abc import Callable
from pathlib import Path

from fedpriv.data.cache import Origin, ensure
from fedpriv.data.debian import fashion_mnist_package
from fedpriv.data.mirror import mnist_package
from fedpriv.data.public_tables import FILE, PUBLIC_TABLES
from fedpriv.data.sources import torchvision_download
from fedpriv.data.visits import SHA256 as VISITS_SHA256
from fedpriv.data.visits import VISITS
from fedpriv.data.visits import source as visits_source
from fedpriv.errors import InputError, suggestion

SYNTHETIC = "synthetic"
PHASE_RETRIEVAL = "phase-retrieval"
LINEAR_REGRESSION = "linear-regression"
COMPUTED = (SYNTHETIC, PHASE_RETRIEVAL, LINEAR_REGRESSION)
"""The data sets that are computed, not fetched."""

_MNIST = {
    "train-images-idx3-ubyte": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_FASHION_MNIST = {
    "train-images-idx3-ubyte": "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
EMNIST_ARCHIVE = "gzip.zip"
_CIFAR10 = {
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
    "batches.meta": "md5:5ff9c542aee3614f3951f8cda6e48888",
}
"""As torchvision has them."""

ORIGINS = {
    "mnist": Origin("MNIST/raw", _MNIST, (torchvision_download("MNIST"), mnist_package("MNIST/raw"))),
    "fashion-mnist": Origin(
        "FashionMNIST/raw",
        _FASHION_MNIST,
        (torchvision_download("FashionMNIST"), fashion_mnist_package("FashionMNIST/raw", tuple(_FASHION_MNIST))),
    ),
    "emnist": Origin(  # a hash is published for the archive only, so that is what is kept
        "EMNIST/raw",
        {EMNIST_ARCHIVE: "md5:58c8d27c78d21e728a6bc7b3cc06412e"},
        (torchvision_download("EMNIST", split="balanced"),),
    ),
    "cifar10": Origin("cifar-10-batches-py", _CIFAR10, (torchvision_download("CIFAR10"),)),
    **{name: Origin(name, {FILE: table.sha256}, (table.source(name),)) for name, table in PUBLIC_TABLES.items()},
    VISITS: Origin(VISITS, {FILE: VISITS_SHA256}, (visits_source(VISITS),)),
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
        f"data.name = {name!r}: known data sets are {', '.join(known)}, or the path of a .csv, .parquet or .npz "
        f"file{suggestion(name, known)}"
    )
