"""Tables as data sets: one file with everybody's records for a simulation, a silo's own records for a guard.

Scenarios and policies hold a table's public description as TOML, which is written here.

DataFrames as tables: what a program holds, by pandas, polars or Arrow, in place of a file.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.files import create_secret_file
from fedpriv.core.random import public_generator
from fedpriv.data.cells import RawTable, read_table, table_from_arrow
from fedpriv.data.encode import EncodedTable, TableRows, encode_features, encode_table, read_raw_cells, read_rows
from fedpriv.data.fetch import default_data_root
from fedpriv.data.own import Dataset, HeldOutData, Sites
from fedpriv.data.partition import blank_labels
from fedpriv.data.schema import TableSchema

IN_MEMORY_PREFIX = "given-"
_KEY_BYTES = 32
"""How names of what a program gave begin; nobody typed such a name."""
_FRAMES: dict[Path, RawTable] = {}


class DataFrame(Protocol):
    """A DataFrame of any library that hands its columns over as Arrow's."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


def is_data_frame(value: object) -> TypeGuard[DataFrame]:
    """Whether it is a DataFrame, and no single column of one."""
    return hasattr(value, "__arrow_c_stream__") and hasattr(value, "columns")


def register_frame(frame: DataFrame) -> str:
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
    table, digest = table_from_arrow(held, "train"), hashlib.sha256()
    for name, cells in table.columns.items():
        codes, values = cells.encode_values()
        digest.update(f"{name!r} {codes.dtype} {len(codes)}".encode())
        digest.update(codes.tobytes())
        digest.update(pyarrow.record_batch([values], [name]).serialize())
    name = f"{in_memory_name(digest.digest())}.parquet"
    _FRAMES[Path(name)] = table
    return name


def in_memory_name(digest: bytes) -> str:
    """Name records that a program gives by their digest, under a key of the user that lies beside the data folder.

    Guarantee: results and certificates have the name, and without the key nobody can try on it what a record is.
    Without a folder that can be written the key is the process's own, and so is the name; so too where another
    user has put a key there, or others can read it.
    """
    key = _read_or_create_key(default_data_root().parent)
    return f"{IN_MEMORY_PREFIX}{hmac.digest(key, digest, 'sha256').hex()[:16]}"


@cache
def _read_or_create_key(folder: Path) -> bytes:
    path = folder / "records.key"
    with suppress(OSError):
        if not path.exists():
            create_secret_file(path, _KEY_BYTES)
        with path.open("rb") as file:
            key, about = file.read(_KEY_BYTES + 1), os.fstat(file.fileno())
        others = stat.S_IMODE(about.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
        if len(key) == _KEY_BYTES and about.st_uid == os.geteuid() and not others:
            return key
    return secrets.token_bytes(_KEY_BYTES)


def find_frame(path: Path) -> RawTable | None:
    """The DataFrame that was added under a name, None for a file."""
    return _FRAMES.get(path)


def load_table(
    name: str, path: Path, schema: TableSchema, *, with_cells: bool = False, dtype: str = "float64"
) -> Dataset:
    """A table as a data set called `name`; training records in an order that is public and mixed.

    Features are rounded to `dtype`; with `cells` it has the raw cells of training records, too.  InputError, in
    one line, for a table that does not keep to `schema`.
    """
    table = read_raw_table(path)
    rows = read_rows(table, schema)
    for name_of, part in (("training", rows.split.train), ("test", rows.split.test)):
        if not part.is_counted.any() and not (name_of == "test" and schema.test_share == 0.0):
            raise InputError(f"{table.source}: has no {name_of} records; look at `split` and `test_share`")
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
    """The test records, all that a server reads: its file may hold no others, and no column for their sites."""
    table = read_raw_table(path)
    rows = read_rows(table, schema, single_site=schema.site is not None and schema.site not in table.columns)
    part, nothing = rows.split.test, np.zeros(0, np.int64)
    if not (test := part.row_indices[part.is_counted]).size:
        raise InputError(f"{path}: has no test records; look at `split` and `test_share`")
    sites = None if rows.sites is None else Sites(schema.sites, nothing, rows.sites[test])
    return HeldOutData(
        encode_features(table, schema, test), rows.labels[test], schema.class_count, sites, schema.label_scale
    )


def load_silo_table(path: Path, schema: TableSchema, silo: int) -> EncodedTable:
    """One silo's own table, in the order of its file; a column that says whose site it is may be there.

    InputError, in one line, for a table that does not keep to `schema`, or holds another site's records.
    """
    table = read_table(path)
    if schema.site is not None and schema.site not in table.columns:
        encoded = encode_table(table, schema, single_site=True)
        encoded.raw_cells[:, -1] = silo
        return encoded
    encoded = encode_table(table, schema)
    if encoded.sites is not None:
        if silo >= len(schema.sites):
            raise InputError(f"{path}: silo = {silo}, and table.sites names {len(schema.sites)} sites, from 0")
        if (foreign := np.flatnonzero(encoded.sites != silo)).size:
            assert schema.site is not None
            where = table.describe_cell(int(foreign[0]), schema.site)
            raise InputError(f"{where} is another site than silo {silo}, {schema.sites[silo]!r}")
    return encoded


@lru_cache(maxsize=4)
def _read_cached(path: Path, size: int, changed: int) -> RawTable:
    return read_table(path)


def read_raw_table(path: Path) -> RawTable:
    """The file's cells, or those of a DataFrame; a file that has not changed is not read twice."""
    if (given := find_frame(path)) is not None:
        return given
    try:
        found = path.stat()
    except OSError:
        return read_table(path)  # says what is wrong
    return _read_cached(path, found.st_size, found.st_mtime_ns)


def check_persons(encoded: TableRows, schema: TableSchema, path: Path) -> None:
    """InputError if a person has records at two sites: then no site's budget would bound what they give away."""
    if encoded.persons is None or encoded.sites is None:
        return
    names, numbers = np.unique(encoded.persons, return_inverse=True)
    low, high = _group_extremes(numbers, encoded.sites, len(names))
    if (twice := np.flatnonzero(low != high)).size:
        place = int(twice[0])
        two = " and ".join(repr(schema.sites[site]) for site in (low[place], high[place]))
        raise InputError(
            f"{path}, column {schema.person!r}: {str(names[place])!r} has records at {two} (and so have "
            f"{len(twice) - 1} others); a person belongs to one silo: give them one site, or a name at each"
        )


def _group_extremes(
    groups: NDArray[np.int64], values: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The smallest and the largest value of each group."""
    low, high = np.full(count, values.max()), np.full(count, values.min())
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low, high


def format_schema_toml(schema: TableSchema, header: str) -> str:
    """[header] and [header.columns], a line a column; defaults are left out."""
    tree = schema.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    columns: Mapping[str, Mapping[str, Any]] = tree.pop("columns")
    lines = [
        f"[{header}]",
        *(f"{key} = {_format_value(value)}" for key, value in tree.items()),
        "",
        f"[{header}.columns]",
    ]
    lines += [f"{_format_value(name)} = {_format_value(column)}" for name, column in sorted(columns.items())]
    return "\n".join(lines) + "\n"


def _format_value(value: Any) -> str:
    """JSON's spelling of numbers, texts, booleans and lists is TOML's too, but for characters beyond 16 bits."""
    return (
        "{" + ", ".join(f"{key} = {_format_value(each)}" for key, each in value.items()) + "}"
        if isinstance(value, Mapping)
        else json.dumps(value, ensure_ascii=False)
    )
