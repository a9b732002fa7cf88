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

    The name follows from the content and the user's key (`in_memory_name`), and ends in .parquet, so that it reads
    as the path of a table.  Later changes of the DataFrame change no run.  Columns that no table can have, such as
    lists, are passed over until they are asked for.

    Raises:
        InputError: The value has no records or no column that can be read, or the core refuses its column names.
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

    It fails if a column cannot be exported, or in pandas if two columns have one name.  Columns that are copied
    together include pandas' index, unless it is a plain range.

    Returns:
        Arrow columns by name, without those whose name occurs twice, the names of all columns in their order, and
        for each column that cannot be exported its name with the reason.
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
    """Return a column of polars' categories as one of texts, and any other column unchanged.

    Arrow cannot cast the type that polars exports to texts directly.
    """
    is_category = pyarrow.types.is_dictionary(column.type) and pyarrow.types.is_string_view(column.type.value_type)
    return column.cast(pyarrow.dictionary(pyarrow.int32(), pyarrow.string())) if is_category else column


_ARROW_ERRORS = (pyarrow.ArrowException, AttributeError, KeyError, NotImplementedError, TypeError, ValueError)
