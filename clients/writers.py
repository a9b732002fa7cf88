"""Who may write what a guard relies on: its policy, records, keys and ledger."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedpriv.errors import InputError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40
"""On the way to a file, as Linux follows them."""


def check_writers(files: Iterable[Path]) -> None:
    """InputError for a file, or a folder that it is in, that group or others may write; what is not there passes.

    A folder with the sticky bit passes, as /tmp has it: there nobody renames or removes what is another's.  Modes
    count whoever the owner is, root too.

    Guarantee: at the time of the check nobody but root and the owners of the files, and of all folders above them,
    can replace what a guard starts from; and a group that may write a folder further up, as some systems have it.
    """
    for file in files:
        for each, parent in _places(file):
            try:
                mode = each.stat().st_mode
            except OSError:  # whoever reads it says so
                continue
            if mode & (stat.S_IWOTH if parent else _OTHERS) and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
                raise InputError(
                    f"{each}: mode {stat.S_IMODE(mode):04o}, not only its owner may write it, and so change what "
                    f"this silo allows or releases; chmod go-w {each}"
                )


def _places(file: Path) -> Iterator[tuple[Path, bool]]:
    """The file that a path leads to and every folder on the way, and whether it is further up than what decides.

    The folder of the file decides, and so does that of every link on the way: there the link can be exchanged.
    """
    here, left, links = Path("/"), list(reversed(file.absolute().parts[1:])), 0
    decides: dict[Path, bool] = {}
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        decides.setdefault(here, False)
        if os.path.islink(here / name) and (links := links + 1) <= _MOST_LINKS:
            decides[here] = True
            target = (here / name).readlink()
            here = Path("/") if target.is_absolute() else here
            left += reversed([part for part in target.parts if part != "/"])
        else:
            here = here / name
    decides |= {here.parent: True, here: True}
    for place in reversed(decides):
        yield place, not decides[place]


def check_readers(file: Path) -> None:
    """InputError for records that others than their owner may read; a file that is not there passes."""
    try:
        mode = file.stat().st_mode
    except OSError:  # whoever reads it says so
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"{file}: mode {stat.S_IMODE(mode):04o}, others can read these records; chmod 600 {file}")


@contextmanager
def private() -> Iterator[None]:
    """Files that are made inside are their owner's alone, whatever the umask is."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def own_folder(path: Path, mode: int = 0o755) -> None:
    """Make a folder and those above it that are not there: nobody else may write them, whatever the umask is."""
    if not path.is_dir():
        own_folder(path.parent)
        path.mkdir(mode, exist_ok=True)


def keep_to_owner(path: Path) -> None:
    """Take the right to write from group and others, whatever the umask was when `path` was made."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)
