"""Who may write what a guard relies on: its policy, records, keys and ledger."""

import stat
from collections.abc import Iterable
from pathlib import Path

from fedpriv.errors import InputError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_writers(files: Iterable[Path]) -> None:
    """InputError for a file, or a folder that it is in, that group or others may write; what is not there passes.

    A folder with the sticky bit passes, as /tmp has it: there nobody renames or removes what is another's.  Modes
    count whoever the owner is, root too.

    Guarantee: at the time of the check nobody but root and the owners of the files, and of all folders above them,
    can replace what a guard starts from; and a group that may write a folder further up, as some systems have it.
    """
    for file in files:
        path = file.resolve()  # a link's own mode says nothing
        for place, each in enumerate((path, *path.parents)):
            try:
                mode = each.stat().st_mode
            except OSError:  # whoever reads it says so
                continue
            if mode & (_OTHERS if place < 2 else stat.S_IWOTH) and not (
                stat.S_ISDIR(mode) and mode & stat.S_ISVTX
            ):
                raise InputError(
                    f"{each}: mode {stat.S_IMODE(mode):04o}, not only its owner may write it, and so change what "
                    f"this silo allows or releases; chmod go-w {each}"
                )


def own_folder(path: Path, mode: int = 0o755) -> None:
    """Make a folder and those above it that are not there: nobody else may write them, whatever the umask is."""
    if not path.is_dir():
        own_folder(path.parent)
        path.mkdir(mode, exist_ok=True)


def keep_to_owner(path: Path) -> None:
    """Take the right to write from group and others, whatever the umask was when `path` was made."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)
