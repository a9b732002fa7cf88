"""DataFrames as tables: what a program holds, by pandas, polars or Arrow, in place of a file."""

import hashlib
from pathlib import Path
from typing import Protocol, TypeGuard

from fedpriv.core.errors import InputError
from fedpriv.data.cells import RawTable, table_of

GIVEN = "given-"
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
    name = f"{GIVEN}{digest.hexdigest()[:16]}.parquet"
    _FRAMES[Path(name)] = table
    return name


def frame_at(path: Path) -> RawTable | None:
    """The DataFrame that was added under a name, None for a file."""
    return _FRAMES.get(path)
