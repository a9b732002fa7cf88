"""DataFrames of a program as tables, of pandas, polars, or another library that exports Arrow columns."""

import hashlib
from copy import deepcopy
from typing import Any

import pyarrow

from fedpriv.core.errors import sanitize_line
from fedpriv.data.cells import table_from_columns
from fedpriv.data.tables import DataFrame, add_frame, in_memory_name


def register_frame(frame: DataFrame) -> str:
    """Copy a DataFrame, and return the table name under which it can be loaded.

    The name is a digest of the readable columns under a key of the user, with the ending .parquet.  A column that
    cannot be read, such as one of lists, is an error only if it is used.

    Raises:
        InputError: The DataFrame has no records, or its columns cannot be used.
    """
    columns, names, unreadable = _read_columns(frame)
    table, digest = table_from_columns(columns, names, "train", unreadable), hashlib.sha256()
    for name, cells in table.columns.items():
        codes, values = cells.encode_values()
        digest.update(f"{name!r} {codes.dtype} {len(codes)}".encode())
        digest.update(codes.tobytes())
        digest.update(pyarrow.record_batch([values], [name]).serialize())
    name = f"{in_memory_name(digest.digest())}.parquet"
    add_frame(name, table)
    return name


def _read_columns(frame: Any) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Copy the columns of a DataFrame as Arrow columns, together or, if that fails, one by one.

    The index of a pandas DataFrame is a column, too, if Arrow exports it and the columns are copied together.

    Returns:
        Arrow columns by name, without those that share a name, then the names of all columns, and the reason for
        each column that cannot be exported, by name.
    """
    try:
        table = deepcopy(pyarrow.table(frame))  # Arrow alone would share the memory of NumPy's columns
        names = table.column_names
        return {name: _as_words(table.column(name)) for name in names if names.count(name) == 1}, names, {}
    except _ARROW_ERRORS:
        names = [str(name) for name in frame.columns]
    columns, unreadable = {}, {}
    for name, label in zip(names, frame.columns, strict=True):
        if names.count(name) > 1:
            continue
        try:
            columns[name] = _as_words(deepcopy(pyarrow.table(frame[[label]])).column(name))
        except _ARROW_ERRORS as error:
            reason = sanitize_line(str(error).split("\n")[0])
            unreadable[name] = f"not of numbers or words ({reason}); a column holds one of them"
    return columns, names, unreadable


def _as_words(column: Any) -> Any:
    """Return a column of polars' categories with plain texts as categories, and any other unchanged.

    Arrow cannot cast the type that polars exports to texts directly.
    """
    is_category = pyarrow.types.is_dictionary(column.type) and pyarrow.types.is_string_view(column.type.value_type)
    return column.cast(pyarrow.dictionary(pyarrow.int32(), pyarrow.string())) if is_category else column


_ARROW_ERRORS = (pyarrow.ArrowException, AttributeError, KeyError, NotImplementedError, TypeError, ValueError)
