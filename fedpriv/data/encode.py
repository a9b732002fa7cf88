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
from fedpriv.data.cells import MISSING_TEXTS, RawTable
from fedpriv.data.partition import TableSplit, split_rows
from fedpriv.data.schema import OTHER_WORD, FeatureColumn, TableSchema

MIN_DEVIATION = 1.0 / 16.0
"""Of a deviation, where a column's public range is -1 … 1: noise must not blow a column up without end."""


@dataclass(frozen=True)
class Scaling:
    """Feature columns[j] of a record becomes (feature - means[j]) / deviations[j]; all others stay."""

    columns: tuple[int, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def apply(self, features: NDArray[Any]) -> NDArray[Any]:
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


_BEND = (2.0 + math.sqrt(2.0)) / 4.0
MOMENTS_DIAMETER = (2.0 - _BEND) * math.sqrt(1.0 + 4.0 * _BEND**2)
"""Largest distance of two points (x, 2x²): d² (1 + 4s²) for s = x + y, d = x - y, where |s| + |d| ≤ 2."""
MOMENTS_RADIUS = 1.25
"""Norm of (x, 2x² - 1.25) at most: its square is x² + (2x² - 1.25)², convex in x² and 1.25² at 0 and at 1."""


def bounded_moments(values: NDArray[Any]) -> NDArray[np.float64]:
    """Moments that a record adds to the first step: (n, k) in -1 … 1 -> (n, 2k), of norm 1 at most.

    Column j gives x and 2x² - 1.25, so that k columns have norm 1.25 √k; they are divided by that.

    Guarantee: two records are at most `MOMENTS_APART` / 1.25 apart, whatever they hold; numbers beyond -1 … 1
    count as its ends, and what is no number stays none.
    """
    wide = np.asarray(values, np.float64).clip(-1.0, 1.0)
    return np.concatenate([wide, 2.0 * wide**2 - MOMENTS_RADIUS], axis=1) / (
        MOMENTS_RADIUS * math.sqrt(wide.shape[1])
    )


def scaling_from_moments(columns: Sequence[int], released: NDArray[Any]) -> Scaling:
    """The scaling that noisy means of `moments_of`, (2k,), give: post-processing, whatever they are."""
    count = len(columns)
    if released.shape != (2 * count,) or not np.isfinite(released).all():
        raise ValueError(f"{2 * count} finite moments were expected, not an array of shape {released.shape}")
    first, second = np.split(np.asarray(released, np.float64) * MOMENTS_RADIUS * math.sqrt(count), 2)
    means = first.clip(-1.0, 1.0)
    variances = (second + MOMENTS_RADIUS) / 2.0 - means**2
    return Scaling(
        tuple(columns), tuple(means.tolist()), tuple(np.sqrt(variances.clip(MIN_DEVIATION**2, 1.0)).tolist())
    )


_MISSING_CODE = -1
_CHUNK_ROWS = 2**13
"""Rows whose features are written at a time, while they are in a cache."""
_SPLIT_DESCRIPTION = 'the two words of a split, "train" and "test"'


@dataclass(frozen=True)
class TableRows:
    """Every row of a file, in its order; what it holds where a value is missing is read nowhere."""

    labels: NDArray[np.int64] | NDArray[np.float64]
    split: TableSplit
    """Where the rows sit, and which of them count."""
    sites: NDArray[np.int64] | None
    persons: NDArray[np.str_] | None


@dataclass(frozen=True)
class EncodedTable(TableRows):
    """Rows with all that they hold."""

    features: NDArray[np.floating[Any]]
    """(n, width): every column's features, in the alphabetical order of the columns."""
    raw_cells: NDArray[np.float64]
    """(n, columns): what the rows hold before it is clipped or filled, in the order of `TableSchema.raw`.

    Numbers as they are, the places of words in their vocabulary, and NaN where a value is missing.
    """


def encode_table(table: RawTable, schema: TableSchema, *, single_site: bool = False) -> EncodedTable:
    """Add the features and the cells of all rows to `rows_of`, whose errors and guarantee it has."""
    rows = read_rows(table, schema, single_site=single_site)
    everywhere = np.arange(len(table))
    features, cells = encode_features(table, schema, everywhere), read_raw_cells(table, schema, everywhere, rows)
    return EncodedTable(rows.labels, rows.split, rows.sites, rows.persons, features, cells)


def read_rows(table: RawTable, schema: TableSchema, *, single_site: bool = False) -> TableRows:
    """The labels, sites and persons of a table; one `of_one_site` has no column for it.

    Guarantee: a record's features and label, and whether and where it counts, depend on its own cells, on its
    place in the file and on `schema`; never on another record.  Where it sits depends on no cell at all.
    InputError, naming line and column, for a missing value that the schema has no remedy for, a row that is
    nobody's, text among numbers, or a word that is in no vocabulary.
    """
    gone = np.zeros(len(table), np.bool_)
    for name, column in schema.sorted_columns:
        gone |= _read_values(table, name, column)[1] & (column.missing is None)  # nothing stands in for the value
    labels, absent, _ = _read_labels(table, schema)
    gone |= absent
    sites = None if schema.site is None or single_site else _read_codes(table, schema.site, schema.sites, "sites")
    persons = None if schema.person is None else _read_persons(table, schema.person)
    said = (
        None
        if schema.split is None
        else _read_codes(table, schema.split, ("train", "test"), _SPLIT_DESCRIPTION).astype(np.bool_)
    )
    if gone.any() and schema.missing == "refuse":
        _refuse_missing(table, schema, int(gone.argmax()))
    if gone.all():
        raise InputError(f"{table.source}: every record has a missing value, none is left")
    names = persons.tolist() if persons is not None and schema.splits_by_content else None
    return TableRows(labels, split_rows(~gone, said, names, schema.expected_test_share), sites, persons)


def encode_features(
    table: RawTable, schema: TableSchema, rows: NDArray[np.int64], dtype: str = "float64"
) -> NDArray[np.floating[Any]]:
    """The features of `rows`, of a table that `rows_of` takes, rounded to `dtype`: (rows, width).

    Guarantee: a record's features depend on its own cells and on `schema` alone.
    """
    features, end = np.zeros((len(rows), schema.width), dtype), 0
    maps = []
    for name, column in schema.sorted_columns:
        start, end = end, end + column.width
        codes, once = table.distinct_cells(name)
        maps.append((codes, _map_column(once, name, column), range(start, end)))
    for first in range(0, len(rows), _CHUNK_ROWS):
        part = rows[first : first + _CHUNK_ROWS]
        written = features[first : first + _CHUNK_ROWS]
        for codes, values, span in maps:
            found = values.take(codes.take(part))
            if values.dtype == np.float64:
                written[:, span.start] = found
            else:
                written[np.arange(len(part)), span.start + found] = 1.0
    return features


def read_raw_cells(
    table: RawTable, schema: TableSchema, rows: NDArray[np.int64], of: TableRows
) -> NDArray[np.float64]:
    """What `rows` hold as it is, (rows, columns): see `Encoded.cells`; a site that no column says is NaN."""
    cells = np.full((len(rows), len(schema.raw_columns)), np.nan)
    for place, (name, column) in enumerate(schema.sorted_columns):
        values, absent = _read_values(table, name, column)
        cells[:, place] = np.where(absent, np.nan, values)[rows]
    cells[:, len(schema.columns)] = _read_labels(table, schema)[2][rows]
    if of.sites is not None:
        cells[:, schema.raw_columns.index(schema.site or "")] = of.sites[rows]
    return cells


def _read_values(table: RawTable, name: str, column: FeatureColumn) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """A column's numbers, or the places of its words, and which of them are missing."""
    if column.values is None:
        return _read_numbers(table, name)
    codes = _read_codes(table, name, column.values, "values", allow_missing=True)
    return codes, np.equal(codes, _MISSING_CODE)


def _map_column(table: RawTable, name: str, column: FeatureColumn) -> NDArray[Any]:
    """A column's numbers in -1 … 1, or the places of its words among its features."""
    values, absent = _read_values(table, name, column)
    if column.range is not None:
        return _scale_numbers(
            np.where(absent, 0.0 if column.missing is None else float(column.missing), values), column.range
        )
    assert column.values is not None
    return np.where(absent, 0 if column.missing is None else column.values.index(str(column.missing)), values)


def _read_labels(
    table: RawTable, schema: TableSchema
) -> tuple[NDArray[np.int64] | NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    if schema.range is not None:
        numbers, absent = _read_numbers(table, schema.target)
        return _scale_numbers(numbers, schema.range), absent, np.where(absent, np.nan, numbers)
    assert schema.classes is not None
    codes = _read_codes(table, schema.target, schema.classes, "classes", allow_missing=True)
    absent = codes == _MISSING_CODE
    cells = np.where(absent, np.nan, codes)
    if schema.survival is not None:
        times, lacking = _read_numbers(table, schema.survival.time)
        codes, absent = schema.survival.make_labels(times, codes == 1), absent | lacking
    return codes, absent, cells


def _scale_numbers(numbers: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    low, high = bounds
    return 2.0 * (numbers.clip(low, high) - low) / (high - low) - 1.0


def _read_numbers(table: RawTable, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column's numbers, and where there is none (0 stands there)."""
    cells = table.column(name)
    numbers, absent = cells.to_numbers(), cells.is_missing
    if (odd := np.isnan(numbers) & ~absent).any():
        raise InputError(
            f"{table.describe_cell(int(odd.argmax()), name)} is no finite number; a column with words has values"
        )
    return np.where(absent, 0.0, numbers), absent


def _read_codes(
    table: RawTable,
    name: str,
    vocabulary: Sequence[str],
    key: str,
    *,
    allow_missing: bool = False,
) -> NDArray[np.int64]:
    """Each record's place in the vocabulary; _GONE where a value is missing and `may_lack`."""
    cells = table.column(name)
    found = cells.vocabulary_indices(vocabulary)
    unknown = found < 0
    if allow_missing:
        found[unknown & cells.is_missing] = _MISSING_CODE
        unknown &= ~cells.is_missing
    if unknown.any():
        if OTHER_WORD not in vocabulary:
            remedy = f"; add it to {key}" + (
                f', or "{OTHER_WORD}" for every other word' if key == "values" else ""
            )
            if key == _SPLIT_DESCRIPTION:
                remedy = "; name a column of these two, or none: rows are then put aside by their place"
            row = int(unknown.argmax())
            near = suggestion(cells[row], vocabulary)
            raise InputError(f"{table.describe_cell(row, name)} is not among {key}{near}{remedy}")
        found[unknown] = vocabulary.index(OTHER_WORD)
    return found


def _read_persons(table: RawTable, name: str) -> NDArray[np.str_]:
    """Name of the person of each row; a row without a name would be one person more, or less."""
    cells = table.column(name)
    if cells.is_missing.any():
        place = table.describe_cell(int(cells.is_missing.argmax()), name)
        raise InputError(f"{place} does not say whose the row is; every row needs a person")
    return cells.to_numpy()


def _refuse_missing(table: RawTable, schema: TableSchema, row: int) -> None:
    open_to_gaps = [
        (name, column.values or ()) for name, column in schema.sorted_columns if column.missing is None
    ]
    times: list[tuple[str, Sequence[str]]] = [] if schema.survival is None else [(schema.survival.time, ())]
    name = next(
        name
        for name, words in [*open_to_gaps, (schema.target, schema.classes or ()), *times]
        if (cell := table.columns[name][row]).lower() in MISSING_TEXTS and cell not in words
    )
    raise InputError(
        f"{table.describe_cell(row, name)} is a missing value; give the column `missing`, what stands in for it, "
        "or the "
        'table missing = "drop"'
    )
