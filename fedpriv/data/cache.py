"""A data set's files on disk: verified each time they are used, fetched again if they do not verify.

Files are written to a draft folder beside their place and moved there whole, one `os.replace` each.  A fetch that
is killed leaves a folder that does not verify; two fetches at once put the same bytes in place.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpriv.errors import InputError


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


def ensure(name: str, origin: Origin, root: Path, say: Callable[[str], None]) -> None:
    """Make sure that the files of `origin` are below `root` and verify; try its sources if they do not.

    A cache that verifies is only read.  InputError, saying what to do, if no source gives the right files; what
    was in the cache before is then left as it was.
    """
    target = root / origin.folder
    try:
        problem = _problem(target, origin.files)
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
        f"{name}: could not be fetched ({'; '.join(reasons)}); connect to a network and try again, or put the "
        f"files {', '.join(origin.files)}, unpacked as they are named, into {target}"
    )


def _put_in_place(origin: Origin, draft: Path, target: Path) -> None:
    problem = _problem(draft, origin.files)
    if problem is not None:
        raise InputError(f"what came is not the data set ({problem})")
    target.mkdir(parents=True, exist_ok=True)
    for name in origin.files:
        os.replace(draft / name, target / name)


def _problem(folder: Path, files: Mapping[str, str]) -> str | None:
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
