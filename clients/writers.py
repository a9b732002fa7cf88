"""Who may write what a guard relies on: its policy, records, keys and ledger."""

import stat
from collections.abc import Iterable
from pathlib import Path

from fedpriv.errors import InputError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_writers(files: Iterable[Path]) -> None:
    """InputError for a file, or its folder, that its group or others may write; what is not there passes.

    A folder with the sticky bit passes, as /tmp has it: there nobody renames or removes what is another's.  Modes
    count whoever the owner is, root too.

    Guarantee: at the time of the check nobody but owners and root can replace what a guard starts from.
    """
    for file in files:
        path = file.resolve()  # a link's own mode says nothing
        for each in (path, path.parent):
            try:
                mode = each.stat().st_mode
            except OSError:  # whoever reads it says so
                continue
            if mode & _OTHERS and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
                raise InputError(
                    f"{each}: mode {stat.S_IMODE(mode):04o}, not only its owner may write it, and so change what "
                    f"this silo allows or releases; chmod go-w {each}"
                )


def keep_to_owner(path: Path) -> None:
    """Take the right to write from group and others, whatever the umask was when `path` was made."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)
