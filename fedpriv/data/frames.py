"""DataFrames as tables: what a program holds, by pandas, polars or Arrow, in place of a file."""

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol, TypeGuard

from fedpriv.core.errors import InputError
from fedpriv.core.files import make_secret
from fedpriv.data.cells import RawTable, table_of
from fedpriv.data.fetch import default_root

GIVEN = "given-"
_KEY_BYTES = 32
"""How names of what a program gave begin; nobody typed such a name."""
_FRAMES: dict[Path, RawTable] = {}


class Frame(Protocol):
    """A DataFrame of any library that hands its columns over as Arrow's."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


def is_frame(value: object) -> TypeGuard[Frame]:
    """Whether it is a DataFrame, and no single column of one."""
    return hasattr(value, "__arrow_c_stream__") and hasattr(value, "columns")


def add_frame(frame: Frame) -> str:
    """Keep a DataFrame as the table of a name that follows from its content; InputError if it is none.

    Later changes of the program's own change no run.
    """
    import pyarrow

    try:
        held = pyarrow.table(frame)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise InputError(
            f"train: not a table of numbers and words ({str(error).splitlines()[0]}); a column holds one of them"
        ) from None
    table, digest = table_of(held, "train"), hashlib.sha256()
    for name, cells in table.columns.items():
        codes, values = cells.once()
        digest.update(f"{name!r} {codes.dtype} {len(codes)}".encode())
        digest.update(codes.tobytes())
        digest.update(pyarrow.record_batch([values], [name]).serialize())
    name = f"{given_name(digest.digest())}.parquet"
    _FRAMES[Path(name)] = table
    return name


def given_name(digest: bytes) -> str:
    """Name records that a program gives by their digest, under a key of the user that lies beside the data folder.

    Guarantee: results and certificates have the name, and without the key nobody can try on it what a record is.
    Without a folder that can be written the key is the process's own, and so is the name; so too where another
    user has put a key there, or others can read it.
    """
    key = _key_in(default_root().parent)
    return f"{GIVEN}{hmac.digest(key, digest, 'sha256').hex()[:16]}"


@cache
def _key_in(folder: Path) -> bytes:
    path = folder / "records.key"
    with suppress(OSError):
        if not path.exists():
            make_secret(path, _KEY_BYTES)
        with path.open("rb") as file:
            key, about = file.read(_KEY_BYTES + 1), os.fstat(file.fileno())
        others = stat.S_IMODE(about.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
        if len(key) == _KEY_BYTES and about.st_uid == os.geteuid() and not others:
            return key
    return secrets.token_bytes(_KEY_BYTES)


def frame_at(path: Path) -> RawTable | None:
    """The DataFrame that was added under a name, None for a file."""
    return _FRAMES.get(path)
