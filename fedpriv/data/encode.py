"""Encode a table: texts become features, each record by itself, by what is public about the table.

Columns of numbers may be scaled, less their mean and in units of their deviation: a public map of one record by
itself.  Means and deviations of records are releases.  Where they come from noisy ones that were accounted for,
the map is post-processing of those, and a constant for all that follows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, suggestion
from fedpriv.data.cells import MISSING, RawTable
from fedpriv.data.partition import Places, places
from fedpriv.data.schema import OTHER, Column, TableSchema

SMALLEST = 1.0 / 16.0
"""Of a deviation, where a column's public range is -1 … 1: noise must not blow a column up without end."""


@dataclass(frozen=True)
class Scaling:
    """Feature columns[j] of a record becomes (feature - means[j]) / deviations[j]; all others stay."""

    columns: tuple[int, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def applied(self, features: NDArray[Any]) -> NDArray[Any]:
        """Of features (n, width) that are numbers; InputError for others, and for columns that are not there.

        Guarantee: row b of the result is a function of row b and of these numbers alone.
        """
        if features.ndim != 2 or features.dtype.kind != "f" or max(self.columns) >= features.shape[1]:
            raise InputError(
                f"data.scale: is for features that are numbers, {max(self.columns) + 1} or more of a record, and "
                f"here a record has shape {features.shape[1:]} and type {features.dtype}"
            )
        scaled = features.astype(np.float64)
        places = list(self.columns)
        scaled[:, places] = (scaled[:, places] - np.array(self.means)) / np.array(self.deviations)
        return scaled


def moments_of(values: NDArray[Any]) -> NDArray[np.float64]:
    """Moments that a record adds to the first step: (n, k) in -1 … 1 -> (n, 2k), of norm 1 at most.

    Column j gives x and 2x² - 1, both in -1 … 1, so that k columns have norm √(2k); they are divided by that.
    """
    wide = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):  # what does not fit is infinite, and an increment of zeros
        squares = 2.0 * wide**2 - 1.0
    return np.concatenate([wide, squares], axis=1) / math.sqrt(2 * wide.shape[1])


def scaling_from(columns: Sequence[int], released: NDArray[Any]) -> Scaling:
    """The scaling that noisy means of `moments_of`, (2k,), give: post-processing, whatever they are."""
    count = len(columns)
    if released.shape != (2 * count,) or not np.isfinite(released).all():
        raise ValueError(f"{2 * count} finite moments were expected, not an array of shape {released.shape}")
    first, second = np.split(np.asarray(released, np.float64) * math.sqrt(2 * count), 2)
    means = first.clip(-1.0, 1.0)
    variances = (second + 1.0) / 2.0 - means**2
    deviations = np.sqrt(variances.clip(SMALLEST**2, 1.0))
    return Scaling(tuple(columns), tuple(means.tolist()), tuple(deviations.tolist()))


_GONE = -1
_SPLIT = 'the two words of a split, "train" and "test"'


@dataclass(frozen=True)
class Encoded:
    """Every row of the file, in its order; what it holds where a value is missing is read nowhere."""

    features: NDArray[np.float64]
    """(n, width): every column's features, in the alphabetical order of the columns."""
    labels: NDArray[np.int64] | NDArray[np.float64]
    places: Places
    """Where the rows sit, and which of them count."""
    sites: NDArray[np.int64] | None
    persons: NDArray[np.str_] | None


def encode(table: RawTable, schema: TableSchema, *, of_one_site: bool = False) -> Encoded:
    """The features, labels, sites and persons of a table; one `of_one_site` has no column for it.

    Guarantee: a record's features and label, and whether and where it counts, depend on its own cells, on its
    place in the file and on `schema`; never on another record.  Where it sits depends on no cell at all.
    InputError, naming line and column, for a missing value that the schema has no remedy for, a row that is
    nobody's, text among numbers, or a word that is in no vocabulary.
    """
    widths = [1 if column.values is None else len(column.values) for _, column in schema.features]
    features, gone = np.zeros((len(table), sum(widths))), np.zeros(len(table), np.bool_)
    for (name, column), end in zip(schema.features, np.cumsum(widths).tolist(), strict=True):
        gone |= _write_features(table, name, column, features[:, :end])
    labels, absent = _labels(table, schema)
    gone |= absent
    sites = None if schema.site is None or of_one_site else _words(table, schema.site, schema.sites, "sites")
    persons = None if schema.person is None else _persons(table, schema.person)
    said = (
        None if schema.split is None else _words(table, schema.split, ("train", "test"), _SPLIT).astype(np.bool_)
    )
    if gone.any() and schema.missing == "refuse":
        _refuse_missing(table, schema, int(gone.argmax()))
    if gone.all():
        raise InputError(f"{table.source}: every record has a missing value, none is left")
    names = None if persons is None else persons.tolist()
    found = places(~gone, said, names if schema.by_content else None, schema.share)
    return Encoded(features, labels, found, sites, persons)


def _write_features(table: RawTable, name: str, column: Column, before: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Put a column, in -1 … 1, last in the features so far; which records lack a value without a remedy."""
    if column.range is not None:
        filler = None if column.missing is None else float(column.missing)
        numbers, absent = _numbers(table, name, filler)
        before[:, -1] = _scaled(numbers, column.range)
        return absent
    assert column.values is not None
    codes = _words(table, name, column.values, "values", column.missing, may_lack=True)
    absent = np.equal(codes, _GONE)
    before[np.arange(len(codes)), np.where(absent, 0, codes) - len(column.values)] = 1.0
    return absent


def _labels(
    table: RawTable, schema: TableSchema
) -> tuple[NDArray[np.int64] | NDArray[np.float64], NDArray[np.bool_]]:
    if schema.range is not None:
        numbers, absent = _numbers(table, schema.target, None)
        return _scaled(numbers, schema.range), absent
    assert schema.classes is not None
    codes = _words(table, schema.target, schema.classes, "classes", may_lack=True)
    return codes, codes == _GONE


def _scaled(numbers: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    low, high = bounds
    return 2.0 * (numbers.clip(low, high) - low) / (high - low) - 1.0


def _numbers(table: RawTable, name: str, filler: float | None) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column's numbers, and where there is none and no `filler` either (0 stands there)."""
    cells = table.column(name)
    numbers, absent = cells.numbers(), cells.missing
    if (odd := np.isnan(numbers) & ~absent).any():
        where = table.at(int(odd.argmax()), name)
        raise InputError(f"{where} is no finite number; a column with words has values")
    if filler is not None:
        return np.where(absent, filler, numbers), np.zeros(len(cells), np.bool_)
    return np.where(absent, 0.0, numbers), absent


def _words(
    table: RawTable,
    name: str,
    vocabulary: Sequence[str],
    key: str,
    filler: float | str | None = None,
    *,
    may_lack: bool = False,
) -> NDArray[np.int64]:
    """Each record's place in the vocabulary; _GONE where a value is missing and `may_lack`."""
    cells = table.column(name)
    found = cells.codes(vocabulary)
    unknown = found < 0
    if may_lack:
        found[unknown & cells.missing] = vocabulary.index(filler) if isinstance(filler, str) else _GONE
        unknown &= ~cells.missing
    if unknown.any():
        if OTHER not in vocabulary:
            remedy = f"; add it to {key}" + (f', or "{OTHER}" for every other word' if key == "values" else "")
            if key == _SPLIT:
                remedy = "; name a column of these two, or none: rows are then put aside by their place"
            row = int(unknown.argmax())
            near = suggestion(cells[row], vocabulary)
            raise InputError(f"{table.at(row, name)} is not among {key}{near}{remedy}")
        found[unknown] = vocabulary.index(OTHER)
    return found


def _persons(table: RawTable, name: str) -> NDArray[np.str_]:
    """Name of the person of each row; a row without a name would be one person more, or less."""
    cells = table.column(name)
    if cells.missing.any():
        where = table.at(int(cells.missing.argmax()), name)
        raise InputError(f"{where} does not say whose the row is; every row needs a person")
    return cells.array()


def _refuse_missing(table: RawTable, schema: TableSchema, row: int) -> None:
    open_to_gaps = [(name, column.values or ()) for name, column in schema.features if column.missing is None]
    name = next(
        name
        for name, words in [*open_to_gaps, (schema.target, schema.classes or ())]
        if (cell := table.columns[name][row]).lower() in MISSING and cell not in words
    )
    raise InputError(
        f"{table.at(row, name)} is a missing value; give the column `missing`, what stands in for it, or the "
        'table missing = "drop"'
    )
