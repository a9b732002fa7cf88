"""Shard of a silo: its records as files, the key of their fingerprint, and their form for a model.

A silo's ledger, its file of charges, contains a fingerprint of the records under a key.  The key is 32 random
bytes in a file beside the records, mode 0600.  Neither ledgers nor backups contain the key, so that nobody who has
only these can test guesses at records on the fingerprint.

* A cell is the scenario of one run, with a value for each key.
* A unit is what neighbouring data sets differ in: a record, or a person with all records of this person.
* A record that does not count is a dummy record: it fills a row, and contributes nothing.
* A split is the training part or the test part of a silo's records.
"""

import dataclasses
import hashlib
import hmac
import json
import os
import shlex
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.core.files import create_secret_file
from fedpriv.data.encode import EncodedTable
from fedpriv.data.layout import describe_inputs
from fedpriv.data.own import check_records, combine_named_inputs
from fedpriv.data.partition import (
    SplitRows,
    UnitTable,
    counted_mask,
    group_by_person,
    index_persons,
    secret_permutation,
)
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import load_silo_table
from fedpriv.loss.objective import Records
from fedpriv.noise.trust import RECORD, USER, Unit
from fedpriv.plan.task import ModelInputs, group_records
from fedpriv.scenario.schema import Cell

_KEY_BYTES = 32
_REMEDY = (
    "so nobody knows whether these are the records that a ledger is for, and nothing is released: put the key "
    "back from where copies of the records are, or move the ledger into a folder of its own, and `fedpriv silo "
    "restore POLICY FOLDER` begins again from it with another key, with the budget counted as spent"
)


def key_path(shard: Path) -> Path:
    """Return the path of the key of the records in the file `shard`."""
    return shard.with_name(shard.name + ".key")


def read_key(path: Path) -> bytes:
    """Read the key of a fingerprint, 32 bytes, from its file.

    Raises:
        InputError: If the file cannot be read, is no ordinary file of 32 bytes, or has permissions for group or
            others.
    """
    try:
        # Opening a named pipe would wait for a writer without O_NONBLOCK; it is refused below.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(_KEY_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no key of the records, {_REMEDY}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read as the key of the records: {error.strerror}") from None
    if stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"{path}: others can read this key of the records; chmod 600 {path}")
    if not stat.S_ISREG(mode) or len(key) != _KEY_BYTES:
        raise InputError(f"{path}: is no key of the records, which has {_KEY_BYTES} bytes, {_REMEDY}")
    return key


def load_or_create_key(path: Path) -> bytes:
    """Read the key at `path`, after making one if the file does not exist.

    Raises:
        InputError: If the key cannot be made, or cannot be used.
    """
    if not path.exists():
        try:
            create_secret_file(path, _KEY_BYTES)
        except OSError as error:
            raise InputError(
                f"{path}: the key of the records cannot be made here ({error.strerror}); make it once, as their "
                f"owner: (umask 077; head -c {_KEY_BYTES} /dev/urandom > {shlex.quote(str(path))})"
            ) from None
    return read_key(path)


_MAX_VALUES = 2**26
_MAX_PADDED_RECORDS = 16
"""Limits for units that are padded to the most records of a unit.

A shard has at most `_MAX_VALUES` values after padding, or a person at most `_MAX_PADDED_RECORDS` records.
"""


@dataclass(frozen=True)
class Shard:
    """Records of a silo in a fixed order."""

    images: NDArray[Any]
    """(n, ...), images as bytes, features as floats, or tokens, or (n,) of several inputs (`data.layout`)."""
    labels: NDArray[Any]
    """(n, ...), classes, or floats of a regression.

    The label of a record that does not count is -1, or NaN in a regression.
    """
    persons: NDArray[Any] | None = field(default=None, kw_only=True)
    """Person of each record, (n,), or None if the silo's file names no persons of these records."""
    test: "Shard | None" = None
    """Test records of the silo, or None without any."""
    cells: NDArray[np.float64] | None = field(default=None, kw_only=True)
    """Raw cells of the table from which `images` are computed, (n, columns), or None without a table."""

    @cached_property
    def person_count(self) -> int:
        """Number of persons who have rows, counted or not, or 0 if the file has no persons."""
        return 0 if self.persons is None else len(index_persons(self.persons)[0])

    def unit_count(self, unit: Unit) -> int:
        """Return the number of units, including units that do not count.

        Raises:
            InputError: If these records cannot be protected by this unit.
        """
        self._check_unit(unit)
        return len(self.labels) if unit.name == RECORD.name else self.person_count

    def fingerprint(self, key: bytes, *, with_cells: bool = True) -> bytes:
        """Return the fingerprint, 64 bytes: `key_check(key)`, and an HMAC of the records in their order.

        Test records (`test`) are left out, and without `with_cells` the raw cells of a table, as in ledgers of
        fedpriv 0.3.1.

        Guarantee: without the key the fingerprint reveals nothing about the records, if HMAC-SHA256 is a
        pseudorandom function.
        """
        cells = b"" if self.cells is None or not with_cells else hashlib.sha256(self.cells.tobytes()).digest()
        return key_check(key) + hmac.digest(key, b"fedpriv records" + self.content_digest + cells, "sha256")

    @cached_property
    def content_digest(self) -> bytes:
        """SHA-256 of images, labels and persons, which is not to be written to any file.

        A reader who knows all records but one could test guesses at the last record with this digest.
        """
        digest = hashlib.sha256()
        for values in (self.images, self.labels, *(() if self.persons is None else (self.persons,))):
            kind = values.dtype.str if values.dtype.names is None else values.dtype.descr
            digest.update(f"{kind} {values.shape} ".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.digest()

    def model_records(self, cell: Cell) -> Records:
        """Return features and labels in the form of the cell's model, a row for each unit of protection.

        Raises:
            InputError: If these records do not fit the model or the unit.
        """
        records = ModelInputs.from_cell(cell).make_records(self.model_inputs(cell), self.labels)
        units = self.rows_by_unit(cell.privacy.protected_unit)
        return records if units is None else group_records(records, units)

    def model_inputs(self, cell: Cell) -> NDArray[Any]:
        """Return the inputs of the cell's model: images, or a table's raw cells.

        Raises:
            InputError: If the model needs a table and these records are none.
        """
        if not cell.model.row.of_cells:
            return self.images
        if self.cells is None:
            raise InputError(f"model.name = {cell.model.name!r}: is of a table, and these records are none")
        return self.cells

    def rows_by_unit(self, unit: Unit) -> UnitTable | None:
        """Return the row indices of each unit's records, or None if units are records.

        The indices have shape (persons, `unit.max_records`).  A row has the person's first records that count, and
        -1 for each record that the person lacks.

        Raises:
            InputError: If these records cannot be protected by this unit.
        """
        self._check_unit(unit)
        if unit.name == RECORD.name:
            return None
        assert self.persons is not None
        return group_by_person(self.persons, unit.max_records, counted_mask(self.labels))

    def _check_unit(self, unit: Unit) -> None:
        """Check that these records can be protected by a unit.

        Single records pass, and persons if the records name them, unless a person's records, filled up by dummy
        records to `unit.max_records`, which a server chooses, take too much memory.

        Guarantee: of the records a refusal depends on their shape, on whether they name persons, and on the number
        of persons, and not on a person's number of records.

        Raises:
            InputError: If the records cannot be protected so.
        """
        if unit.name == RECORD.name:
            return
        refuse(
            {
                f"unit = {unit.name!r}: a silo's guard answers for records, or for persons": unit.name
                != USER.name,
                "unit = 'user': this silo's records do not say whose they are; give `persons` in the .npz file, "
                "or table.person": self.persons is None,
            }
        )
        values = (
            self.person_count
            * unit.max_records
            * sum(model_input.size for model_input in describe_inputs(self.images))
        )
        if unit.max_records > _MAX_PADDED_RECORDS and values > _MAX_VALUES:
            raise InputError(
                f"privacy.records = {unit.max_records}: {self.person_count} persons filled up to so many records "
                "each are more than a silo computes with; take a smaller bound"
            )


def key_check(key: bytes) -> bytes:
    """Return 32 bytes that distinguish keys of fingerprints without revealing a key."""
    return hmac.digest(key, b"fedpriv key of a fingerprint", "sha256")


def load_shard(path: Path, classes: int, test: str = "test_") -> Shard:
    """Read and check a silo's records in an .npz file.

    The file has the arrays `images` (or `features`, or `features.NAME` for each of several inputs) and `labels`,
    with a row for each record.  It may have `persons`, an integer or name for each record, and `counts`, which is
    false for dummy records.  Test records are read if there are labels with the prefix `test`.

    Args:
        path: File of the records.
        classes: Number of classes, or 0 for real numbers.
        test: Prefix of the test records' arrays.

    Raises:
        InputError: If the file cannot be read, an array is missing or has a wrong shape or type, or values are
            none that a record can have.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: array for name, array in file.items() if isinstance(array, np.ndarray)}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; it is to hold the silo's records") from None
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: expected an .npz file of arrays, without objects ({sanitize_line(str(error))})"
        ) from None
    held_out = _parse_split(arrays, test, classes, path) if f"{test}labels" in arrays else None
    return _parse_split(arrays, "", classes, path, held_out)


def load_table_shard(path: Path, schema: TableSchema, silo: int) -> Shard:
    """Read and check a silo's own table.

    Args:
        path: File of the table.
        schema: Public description of the columns.
        silo: Number of the silo.

    Raises:
        InputError: If the table cannot be read, does not keep to `schema`, has records of another site, has a
            column for the site in a `schema` without the site `silo`, or has no training records that count.
    """
    encoded = load_silo_table(path, schema, silo)
    train, test = encoded.split.train, encoded.split.test
    if not train.is_counted.any():
        raise InputError(f"{path}: has no training records; look at table.split and table.test_share")
    held_out = _freeze(_shard_of_split(encoded, test)) if test.is_counted.any() else None
    return _freeze(dataclasses.replace(_shard_of_split(encoded, train), test=held_out))


def _shard_of_split(encoded: EncodedTable, split: SplitRows) -> Shard:
    """Build the shard of one split, with zeros in features and cells of rows that do not count."""
    persons = None if encoded.persons is None else encoded.persons[split.row_indices]
    features, labels = split.take(encoded.features, encoded.labels)
    return Shard(features, labels, persons=persons, cells=split.take(encoded.raw_cells, encoded.labels)[0])


def _parse_split(
    arrays: Mapping[str, NDArray[Any]], prefix: str, classes: int, path: Path, test: Shard | None = None
) -> Shard:
    """Check and convert the arrays of one split.

    A row that does not count has features of zeros in the result, and a label of -1, or NaN for real numbers.

    Args:
        arrays: Arrays of the file by name.
        prefix: Prefix of the names of this split's arrays, "" for the training records.
        classes: Number of classes, or 0 for real numbers.
        path: File of the arrays, for errors.
        test: Shard of the test records, which becomes a part of the result, or None.

    Raises:
        InputError: If the arrays are not the records of a split.
    """
    arrays = combine_named_inputs(arrays, f"{prefix}features", str(path))
    names = [name for name in (f"{prefix}images", f"{prefix}features") if name in arrays]
    if len(names) != 1 or f"{prefix}labels" not in arrays:
        raise InputError(
            f"{path}: expected `{prefix}labels`, and either `{prefix}images` or `{prefix}features`; "
            f"found {', '.join(sorted(arrays)) or 'nothing'}"
        )
    values, labels = arrays[names[0]], arrays[f"{prefix}labels"]
    check_records(values, labels, classes, str(path))
    persons = arrays.get(f"{prefix}persons")
    if persons is not None and (persons.shape != labels.shape[:1] or persons.dtype.kind not in "iuUS"):
        raise InputError(
            f"{path}: `{prefix}persons` needs one whole number or text for each of {len(labels)} records"
        )
    labels = labels.astype(np.int64 if classes else np.float64)
    counts = arrays.get(f"{prefix}counts", np.ones(len(labels), np.bool_))
    if counts.shape != labels.shape[:1] or counts.dtype != np.bool_:
        raise InputError(f"{path}: `{prefix}counts` needs true or false for each of {len(labels)} records")
    features, labels = SplitRows(np.arange(len(labels)), counts).take(values, labels)
    return _freeze(Shard(features, labels, test, persons=persons))


def _freeze(shard: Shard) -> Shard:
    """Make the arrays of a shard read-only, so that their fingerprint stays valid."""
    for values in (shard.images, shard.labels, shard.persons, shard.cells):
        if values is not None:
            values.flags.writeable = False
    return shard


_MAX_CACHED = 4
"""Most values of a cache."""
Value = TypeVar("Value")


def get_or_build(cache: dict[str, Value], name: str, build: Callable[[], Value]) -> Value:
    """Return `cache[name]`, built if it is missing.

    After a build the values that were built first are dropped until `_MAX_CACHED` are left.
    """
    if name not in cache:
        cache[name] = build()
        while len(cache) > _MAX_CACHED:
            del cache[next(iter(cache))]
    return cache[name]


class ShardViews:
    """Forms of one shard for the models of any scenarios, cached."""

    def __init__(self, shard: Shard) -> None:
        """Start with an empty cache for `shard`."""
        self._shard, self._cached_records = shard, dict[str, Records]()

    def blank_record(self, cell: Cell) -> Records:
        """Return a record of zeros in the form of the cell's model, as the only unit.

        Guarantee: features and labels of the records are not read, only their shapes and types and the number of
        persons.

        Raises:
            InputError: If the model does not take such records, or these records cannot be protected by the unit.
        """
        shard, persons = self._shard, self._shard.persons
        # Refuses a unit by which the records cannot be protected.
        shard.unit_count(cell.privacy.protected_unit)
        image, label = np.zeros_like(shard.images[:1]), np.zeros_like(shard.labels[:1])
        cells = None if shard.cells is None else np.zeros_like(shard.cells[:1])
        return Shard(image, label, persons=None if persons is None else persons[:1], cells=cells).model_records(
            cell
        )

    def records(self, cell: Cell) -> Records:
        """Return all records in the form of the cell's model, a row for each unit of protection.

        Raises:
            InputError: If these records do not fit the model or the unit.
        """
        model, unit = cell.model.model_dump(mode="json"), cell.privacy.protected_unit.to_data()
        name = json.dumps([cell.run.dtype, model, unit, cell.data.model_dump(mode="json")], sort_keys=True)
        return get_or_build(self._cached_records, name, lambda: self._shard.model_records(cell))

    def order(self, cell: Cell, key: bytes) -> Tensor | None:
        """Return the index of the person that is read at each position in the run of this key, (persons,).

        The result is None if units are records, which are read in the order of the shard.

        Guarantee: without the key, the distribution of a person's position is the same for all names of persons
        (`secret_permutation`).

        Raises:
            InputError: If these records cannot be protected by the unit.
        """
        unit = cell.privacy.protected_unit
        return (
            torch.from_numpy(secret_permutation(key, self._shard.unit_count(unit)))
            if unit.name == USER.name
            else None
        )

    def clear(self) -> None:
        """Drop the cached records."""
        self._cached_records.clear()
