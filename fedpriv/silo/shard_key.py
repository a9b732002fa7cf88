"""Key of the fingerprint of a silo's records.

The key is 32 random bytes in a file beside the records, mode 0600.  No ledger and no backup contains the key, so
that nobody who has only these can test guesses at records on the fingerprint in a ledger.
"""

import os
import shlex
import stat
from pathlib import Path

from fedpriv.core.errors import InputError
from fedpriv.core.files import make_secret

_BYTES = 32
_REMEDY = (
    "so nobody knows whether these are the records that a ledger is for, and nothing is released: put the key "
    "back from where copies of the records are, or move the ledger into a folder of its own, and `fedpriv silo "
    "restore POLICY FOLDER` begins again from it with another key, with the budget counted as spent"
)


def key_beside(shard: Path) -> Path:
    """Return the path of the key of the records in the file `shard`."""
    return shard.with_name(shard.name + ".key")


def read_key(path: Path) -> bytes:
    """Read a key.

    Raises:
        InputError: There is no key, or none that can be used.  One line says so, with the remedy.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no key of the records, {_REMEDY}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read as the key of the records: {error.strerror}") from None
    if stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"{path}: others can read this key of the records; chmod 600 {path}")
    if not stat.S_ISREG(mode) or len(key) != _BYTES:
        raise InputError(f"{path}: is no key of the records, which has {_BYTES} bytes, {_REMEDY}")
    return key


def made_key(path: Path) -> bytes:
    """Read the key at `path`, after making one if there is none.

    A key is written whole or not at all.
    """
    if not path.exists():
        try:
            make_secret(path, _BYTES)
        except OSError as error:
            raise InputError(
                f"{path}: the key of the records cannot be made here ({error.strerror}); make it once, as their "
                f"owner: (umask 077; head -c {_BYTES} /dev/urandom > {shlex.quote(str(path))})"
            ) from None
    return read_key(path)
