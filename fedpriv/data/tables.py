"""Tables as data sets: one file with everybody's records for a simulation, a silo's own records for a guard.

Scenarios and policies hold a table's public description as TOML, which is written here.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.data.cells import RawTable, read_table
from fedpriv.data.encode import Encoded, encode
from fedpriv.data.own import Dataset, HeldOut, Sites
from fedpriv.data.schema import TableSchema


def load_table(name: str, path: Path, schema: TableSchema) -> Dataset:
    """A table as a data set called `name`; training records in an order that is public and mixed.

    InputError, in one line, for a table that does not keep to `schema`.
    """
    encoded = encoded_table(path, schema)
    for name_of, part in (("training", encoded.places.train), ("test", encoded.places.test)):
        if not part.counts.any() and not (name_of == "test" and schema.test_share == 0.0):
            raise InputError(f"{path}: has no {name_of} records; look at `split` and `test_share`")
    order = public_generator(0, "table order").permutation(len(encoded.places.train.rows))
    (train_features, train_labels), (test_features, test_labels) = (
        part.taken(encoded.features, encoded.labels) for part in (encoded.places.train, encoded.places.test)
    )
    train, test = encoded.places.train.rows[order], encoded.places.test.rows
    sites = None
    if encoded.sites is not None:
        sites = Sites(schema.sites, encoded.sites[train], encoded.sites[test])
        check_persons(encoded, schema, path)
    return Dataset(
        name,
        train_features[order],
        train_labels[order],
        test_features,
        test_labels,
        schema.class_count,
        sites,
        None if encoded.persons is None else encoded.persons[train],
        schema.unit,
        (train, test),
        encoded.places.train.taken(encoded.cells, encoded.labels)[0][order],
    )


def load_table_test(name: str, path: Path, schema: TableSchema) -> HeldOut:
    """The test records, all that a server reads: its file may hold no others, and no column for their sites."""
    table = raw_table(path)
    encoded = encode(table, schema, of_one_site=schema.site is not None and schema.site not in table.columns)
    part, nothing = encoded.places.test, np.zeros(0, np.int64)
    if not (test := part.rows[part.counts]).size:
        raise InputError(f"{path}: has no test records; look at `split` and `test_share`")
    sites = None if encoded.sites is None else Sites(schema.sites, nothing, encoded.sites[test])
    features, labels = encoded.features[test], encoded.labels[test]
    return HeldOut(features, labels, schema.class_count, sites, schema.unit)


def load_silo(path: Path, schema: TableSchema, silo: int) -> Encoded:
    """One silo's own table, in the order of its file; a column that says whose site it is may be there.

    InputError, in one line, for a table that does not keep to `schema`, or holds another site's records.
    """
    table = read_table(path)
    if schema.site is not None and schema.site not in table.columns:
        encoded = encode(table, schema, of_one_site=True)
        encoded.cells[:, -1] = silo
        return encoded
    encoded = encode(table, schema)
    if encoded.sites is not None:
        if silo >= len(schema.sites):
            raise InputError(f"{path}: silo = {silo}, and table.sites names {len(schema.sites)} sites, from 0")
        if (foreign := np.flatnonzero(encoded.sites != silo)).size:
            assert schema.site is not None
            where = table.at(int(foreign[0]), schema.site)
            raise InputError(f"{where} is another site than silo {silo}, {schema.sites[silo]!r}")
    return encoded


@lru_cache(maxsize=4)
def _read(path: Path, size: int, changed: int) -> RawTable:
    return read_table(path)


def raw_table(path: Path) -> RawTable:
    """The file's texts; a file that has not changed is not read twice."""
    try:
        found = path.stat()
    except OSError:
        return read_table(path)  # says what is wrong
    return _read(path, found.st_size, found.st_mtime_ns)


def encoded_table(path: Path, schema: TableSchema) -> Encoded:
    return encode(raw_table(path), schema)


def check_persons(encoded: Encoded, schema: TableSchema, path: Path) -> None:
    """InputError if a person has records at two sites: then no site's budget would bound what they give away."""
    if encoded.persons is None or encoded.sites is None:
        return
    names, numbers = np.unique(encoded.persons, return_inverse=True)
    low, high = _extremes(numbers, encoded.sites, len(names))
    if (twice := np.flatnonzero(low != high)).size:
        place = int(twice[0])
        two = " and ".join(repr(schema.sites[site]) for site in (low[place], high[place]))
        raise InputError(
            f"{path}, column {schema.person!r}: {str(names[place])!r} has records at {two} (and so have "
            f"{len(twice) - 1} others); a person belongs to one silo: give them one site, or a name at each"
        )


def _extremes(
    groups: NDArray[np.int64], values: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The smallest and the largest value of each group."""
    low, high = np.full(count, values.max()), np.full(count, values.min())
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low, high


def schema_toml(schema: TableSchema, header: str) -> str:
    """[header] and [header.columns], a line a column; defaults are left out."""
    tree = schema.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    columns: Mapping[str, Mapping[str, Any]] = tree.pop("columns")
    lines = [
        f"[{header}]",
        *(f"{key} = {_value(value)}" for key, value in tree.items()),
        "",
        f"[{header}.columns]",
    ]
    lines += [f"{_value(name)} = {_value(column)}" for name, column in sorted(columns.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """JSON's spelling of numbers, texts, booleans and lists is TOML's too, but for characters beyond 16 bits."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
