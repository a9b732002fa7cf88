"""A data set's files on disk: verified each time they are used, fetched again if they do not verify.

Files are written to a draft folder beside their place and moved there whole, one `os.replace` each.  A fetch that
is killed leaves a folder that does not verify; two fetches at once put the same bytes in place.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedpriv.errors import InputError
from fedpriv.files import write_json

RECORD = "fedpriv-sha256.json"


@dataclass(frozen=True)
class Source:
    """One way to get a data set: `write` puts its files below an empty root, or raises InputError or OSError."""

    label: str
    write: Callable[[Path], None]


@dataclass(frozen=True)
class Origin:
    """Where a data set's files come from and how they are checked.

    `folder` is their place below the root, as torchvision has it; `files` are the ones that are kept; `sources`
    are tried in order; `sha256` are hashes known beforehand.  A file without one is pinned when it is fetched: its
    hash is written to RECORD, beside it.
    """

    folder: str
    files: Sequence[str]
    sources: Sequence[Source]
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def unpinned(self) -> list[str]:
        """The files whose hash is not known beforehand."""
        return [name for name in self.files if name not in self.sha256]


def ensure(name: str, origin: Origin, root: Path, say: Callable[[str], None]) -> None:
    """Make sure that the files of `origin` are below `root` and verify; try its sources if they do not.

    A cache that verifies is only read.  InputError, saying what to do, if no source gives the right files; what
    was in the cache before is then left as it was.
    """
    target = root / origin.folder
    try:
        problem = _problem(target, origin.files, _expected(origin, target))
        if problem is None:
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
                _put_in_place(origin, draft / origin.folder, target)
                return
            except (InputError, OSError) as error:
                reasons.append(f"{source.label}: {error}")
    raise InputError(
        f"{name}: could not be fetched ({'; '.join(reasons)}); connect to a network and try again, or put "
        f"{_by_hand(name, origin)} into {target}"
    )


def _by_hand(name: str, origin: Origin) -> str:
    if not origin.unpinned:
        return f"the uncompressed files {', '.join(origin.files)}"
    return f"a copy of that folder from a machine where `fedpriv data fetch {name}` worked"


def _put_in_place(origin: Origin, draft: Path, target: Path) -> None:
    hashes = {**_hashes(draft, origin.unpinned), **origin.sha256}
    problem = _problem(draft, origin.files, hashes)
    if problem is not None:
        raise InputError(f"what came is not the data set ({problem})")
    target.mkdir(parents=True, exist_ok=True)
    for name in origin.files:
        os.replace(draft / name, target / name)
    if origin.unpinned:
        write_json(target / RECORD, hashes)  # last: until it is there the folder does not verify


def _expected(origin: Origin, target: Path) -> dict[str, str]:
    """The hashes the files must have; those of RECORD count only for files without a hash known beforehand."""
    try:
        recorded = json.loads((target / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        recorded = {}
    return {**(recorded if isinstance(recorded, dict) else {}), **origin.sha256}


def _problem(folder: Path, files: Iterable[str], expected: Mapping[str, str]) -> str | None:
    """Why the files in `folder` cannot be used, or None."""
    for name in files:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if name not in expected:
            return f"it is not recorded in {RECORD} what {name} should hold"
        if _sha256(path) != expected[name]:
            return f"{name} has been changed or cut short"
    return None


def _hashes(folder: Path, files: Iterable[str]) -> dict[str, str]:
    return {name: _sha256(folder / name) for name in files if (folder / name).is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
