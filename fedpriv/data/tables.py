"""Load tables as data sets: a file of all records for a simulation, or the file of one silo.

A silo is a party that holds records, and a site is the value in a table that names a record's silo.  A row of a
table has a place in the training part of the data, in the test part, or in both, and counts in at most one of
them.  An incomplete row, with a missing value that the schema does not replace, counts in none.  A DataFrame of a
program may take the place of a file (`add_frame`).
"""

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import tomli_w
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.files import create_secret_file
from fedpriv.core.random import public_generator
from fedpriv.data.cells import CellFormat, RawTable, read_table
from fedpriv.data.encode import EncodedTable, TableRows, encode_features, encode_table, read_raw_cells, read_rows
from fedpriv.data.fetch import default_data_root
from fedpriv.data.own import Dataset, HeldOutData, Sites
from fedpriv.data.partition import blank_labels
from fedpriv.data.schema import TableSchema

IN_MEMORY_PREFIX = "given-"
"""Prefix of the names that `in_memory_name` makes for records in a program's memory."""
_KEY_BYTES = 32
"""Length of the user's key (`in_memory_name`)."""
_FRAMES: dict[str, RawTable] = {}


class DataFrame(Protocol):
    """DataFrame of any library that exports its columns to Arrow."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


def is_data_frame(value: object) -> TypeGuard[DataFrame]:
    """Check whether a value is a DataFrame, and not a single column of one."""
    return hasattr(value, "__arrow_c_stream__") and hasattr(value, "columns")


def add_frame(name: str, table: RawTable) -> None:
    """Register a table in memory under a name that reads as the file name of a table."""
    _FRAMES[name] = table


def in_memory_name(digest: bytes) -> str:
    """Return a name for records in a program's memory, a digest under a key of the user.

    The key is in the file records.key beside the data folder.  If this file cannot be made or read, has another
    length, belongs to another user, or gives other users any right, the key is drawn for this process, and another
    process gives the same records another name.

    Guarantee: without the key nobody can test a guess of a record against the name, which results hold.
    """
    key = _read_or_create_key(default_data_root().parent)
    return f"{IN_MEMORY_PREFIX}{hmac.digest(key, digest, 'sha256').hex()[:16]}"


@cache
def _read_or_create_key(folder: Path) -> bytes:
    """Return the user's key (`in_memory_name`) from the file records.key of a folder, or make one."""
    path = folder / "records.key"
    with suppress(OSError):
        if not path.exists():
            create_secret_file(path, _KEY_BYTES)
        with path.open("rb") as file:
            key, status = file.read(_KEY_BYTES + 1), os.fstat(file.fileno())
        shared_bits = stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
        if (
            len(key) == _KEY_BYTES
            and status.st_uid == getattr(os, "geteuid", lambda: status.st_uid)()
            and not shared_bits
        ):
            return key
    return secrets.token_bytes(_KEY_BYTES)


def find_frame(path: Path) -> RawTable | None:
    """Return the table that `add_frame` registered under the file name of a path, in any folder, or None."""
    return _FRAMES.get(path.name)


def load_table(
    name: str, path: Path, schema: TableSchema, *, with_cells: bool = False, dtype: str = "float64"
) -> Dataset:
    """Load a table as a data set, with the training records in a public random order.

    Rows that have a place in a part and do not count there are zeros, with the label -1, or NaN for numbers.

    Args:
        name: Name of the data set.
        path: Path of the file, or of a registered DataFrame.
        schema: Public schema of the table.
        with_cells: Whether the result has the raw cells of the training records.
        dtype: Floating-point type that features are rounded to.

    Raises:
        InputError: The table cannot be read or does not keep to the schema, a person has records at two sites, or
            no record counts in a part that must not be empty.
    """
    table = read_raw_table(path, schema.cell_format)
    rows = read_rows(table, schema)
    for part_name, part in (("training", rows.split.train), ("test", rows.split.test)):
        if not part.is_counted.any() and not (part_name == "test" and schema.test_share == 0.0):
            raise InputError(f"{table.source}: has no {part_name} records; look at `split` and `test_share`")
    order = public_generator(0, "table order").permutation(len(rows.split.train.row_indices))
    train, test = rows.split.train.reorder(order), rows.split.test
    sites = None
    if rows.sites is not None:
        sites = Sites(schema.sites, rows.sites[train.row_indices], rows.sites[test.row_indices])
        check_persons(rows, schema, path)
    (train_features, train_labels), (test_features, test_labels) = (
        (
            part.zero_uncounted(encode_features(table, schema, part.row_indices, dtype)),
            blank_labels(rows.labels[part.row_indices], part.is_counted),
        )
        for part in (train, test)
    )
    return Dataset(
        name,
        train_features,
        train_labels,
        test_features,
        test_labels,
        schema.class_count,
        sites,
        None if rows.persons is None else rows.persons[train.row_indices],
        schema.label_scale,
        (train.row_indices, test.row_indices),
        train.zero_uncounted(read_raw_cells(table, schema, train.row_indices, rows)) if with_cells else None,
    )


def load_table_held_out(name: str, path: Path, schema: TableSchema) -> HeldOutData:
    """Load the test records of a table that count, with or without a column for the site.

    The arguments are those of `load_table`.

    Raises:
        InputError: The table cannot be read, does not keep to the schema, or has no test records.
    """
    table = read_raw_table(path, schema.cell_format)
    rows = read_rows(table, schema, single_site=_lacks_site(table, schema))
    test_part, no_rows = rows.split.test, np.zeros(0, np.int64)
    if not (test_rows := test_part.row_indices[test_part.is_counted]).size:
        raise InputError(f"{path}: has no test records; look at `split` and `test_share`")
    sites = None if rows.sites is None else Sites(schema.sites, no_rows, rows.sites[test_rows])
    return HeldOutData(
        encode_features(table, schema, test_rows),
        rows.labels[test_rows],
        schema.class_count,
        sites,
        schema.label_scale,
    )


def _lacks_site(table: RawTable, schema: TableSchema) -> bool:
    """Whether a table lacks the column that the schema names for the site, even an unreadable one."""
    return schema.site is not None and schema.site not in {*table.columns, *table.unreadable}


def load_silo_table(path: Path, schema: TableSchema, silo: int) -> EncodedTable:
    """Load a silo's own table, in the order of its file.

    Without a column for the site, all records are the silo's, and the site among their raw cells is `silo`.

    Args:
        path: File of the silo's table.
        schema: Public schema of the table.
        silo: Number of the silo, from 0.

    Raises:
        InputError: The table cannot be read, does not keep to the schema or holds a record of another site, or it
            has a column for the site and the schema names no site of this number.
    """
    table = read_table(path, schema.cell_format)
    if _lacks_site(table, schema):
        encoded = encode_table(table, schema, single_site=True)
        encoded.raw_cells[:, -1] = silo
        return encoded
    encoded = encode_table(table, schema)
    if encoded.sites is not None:
        if silo >= len(schema.sites):
            raise InputError(f"{path}: silo = {silo}, and table.sites names {len(schema.sites)} sites, from 0")
        if (foreign := np.flatnonzero(encoded.sites != silo)).size:
            assert schema.site is not None
            description = table.describe_cell(int(foreign[0]), schema.site)
            raise InputError(f"{description} is another site than silo {silo}, {schema.sites[silo]!r}")
    return encoded


def file_version(path: Path) -> tuple[int, int]:
    """Return the size and the time of modification of a file, or zeros if its status cannot be read."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return (0, 0)
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4)
def _read_cached(path: Path, cell_format: CellFormat, _version: tuple[int, int]) -> RawTable:
    """Read a table, and cache it for this version of the file."""
    return read_table(path, cell_format)


def read_raw_table(path: Path, cell_format: CellFormat = CellFormat()) -> RawTable:  # noqa: B008
    """Return the cells of a file or of a registered DataFrame.

    The last four files are cached.  A file is read again if its size or its time of modification has changed.

    Args:
        path: Path of the file, or of a registered DataFrame.
        cell_format: Format of the file's cells.

    Raises:
        InputError: The file is missing, is not a readable table, or has no records.
    """
    frame = find_frame(path)
    return _read_cached(path, cell_format, file_version(path)) if frame is None else frame


def check_persons(encoded: TableRows, schema: TableSchema, path: Path) -> None:
    """Refuse a person with records at two sites, since a site's budget would not bound that person's loss.

    A table without sites or without persons passes.

    Args:
        encoded: Rows of the table, whether they count or not.
        schema: Public schema of the table.
        path: File of the table, for messages.

    Raises:
        InputError: A person has records at two sites.
    """
    if encoded.persons is None or encoded.sites is None:
        return
    names, numbers = np.unique(encoded.persons, return_inverse=True)
    low, high = _group_extremes(numbers, encoded.sites, len(names))
    if (doubled := np.flatnonzero(low != high)).size:
        person = int(doubled[0])
        site_names = " and ".join(repr(schema.sites[site]) for site in (low[person], high[person]))
        raise InputError(
            f"{path}, column {schema.person!r}: {str(names[person])!r} has records at {site_names} (and so have "
            f"{len(doubled) - 1} others); a person belongs to one silo: give them one site, or a name at each"
        )


def _group_extremes(
    groups: NDArray[np.int64], values: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the smallest and the largest value of each group, (count,) each."""
    low, high = np.full(count, values.max()), np.full(count, values.min())
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low, high


def format_schema_toml(schema: TableSchema, header: str) -> str:
    """Return a schema as TOML, [header] and [header.columns], with a line for each column and no defaults.

    Args:
        schema: Public schema of a table.
        header: Name of the section, such as "data.table".
    """
    values = schema.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    columns: Mapping[str, Mapping[str, Any]] = values.pop("columns")
    lines = [
        f"[{header}]",
        *(f"{key} = {format_toml_value(value)}" for key, value in values.items()),
        "",
        f"[{header}.columns]",
    ]
    lines += [
        f"{format_toml_value(name)} = {format_toml_value(column)}" for name, column in sorted(columns.items())
    ]
    return "\n".join(lines) + "\n"


def format_toml_value(value: Any) -> str:
    """Format a value as TOML in one line, with lists and tables inline."""
    return (
        "{" + ", ".join(f"{key} = {format_toml_value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, Mapping)
        else "[" + ", ".join(map(format_toml_value, value)) + "]"
        if isinstance(value, list | tuple)
        else tomli_w.dumps({"key": value}).removeprefix("key = ").removesuffix("\n")
    )
