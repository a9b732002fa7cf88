"""Encode a table: map each record to features, by the table's public schema and the record alone.

A row of the file has a place in the training part of the data, in the test part, or in both, and counts in at most
one of them.  An incomplete row counts in none.  The site of a row is the hospital, bank or centre that it comes
from, and its person the one that it describes.

Features of numbers may be scaled by means and deviations from noisy moments (`Scaling`), which is post-processing
if the moments were accounted for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, suggestion
from fedpriv.data.cells import RawTable
from fedpriv.data.partition import TableSplit, split_rows
from fedpriv.data.schema import OTHER_WORD, FeatureColumn, TableSchema

MIN_DEVIATION = 1.0 / 16.0
"""Smallest deviation by which a column of range -1 … 1 is divided, as noise may make a deviation tiny."""


@dataclass(frozen=True)
class Scaling:
    """Public map that replaces the feature of index columns[j] by (feature - means[j]) / deviations[j]."""

    columns: tuple[int, ...]
    """Indices of the scaled features in a record, (k,), one or more."""
    means: tuple[float, ...]
    """(k,), for features of range -1 … 1."""
    deviations: tuple[float, ...]
    """(k,), above 0."""

    def apply(self, features: NDArray[Any]) -> NDArray[Any]:
        """Return a scaled float64 copy of features, (n, width).

        Guarantee: row b of the result is a function of row b and of the fields of this object alone.

        Raises:
            InputError: Features are no floats of shape (n, width), or lack an index of `columns`.
        """
        if features.ndim != 2 or features.dtype.kind != "f" or max(self.columns) >= features.shape[1]:
            raise InputError(
                f"data.scale: is for features that are numbers, {max(self.columns) + 1} or more of a record, and "
                f"here a record has shape {features.shape[1:]} and type {features.dtype}"
            )
        scaled = features.astype(np.float64)
        columns = list(self.columns)
        scaled[:, columns] = (scaled[:, columns] - np.array(self.means)) / np.array(self.deviations)
        return scaled


_WORST_SUM = (2.0 + math.sqrt(2.0)) / 4.0
MOMENTS_DIAMETER = (2.0 - _WORST_SUM) * math.sqrt(1.0 + 4.0 * _WORST_SUM**2)
"""Largest distance of two points (x, 2x²) and (y, 2y²) with |x| ≤ 1 and |y| ≤ 1.

The squared distance is d² (1 + 4s²) with s = x + y and d = x - y, where |s| + |d| ≤ 2.  Its maximum is at
s = `_WORST_SUM` and d = 2 - s.
"""
MOMENTS_RADIUS = 1.25
"""Largest norm of (x, 2x² - 1.25).

The squared norm x² + (2x² - 1.25)² is convex in x², and equals 1.25² at x² = 0 and at x² = 1.
"""


def bounded_moments(values: NDArray[Any]) -> NDArray[np.float64]:
    """Map (n, k) numbers in -1 … 1 to (n, 2k) bounded moments, which a record adds to the first step.

    A number x of column j becomes x in column j and 2x² - 1.25 in column k + j, both divided by 1.25 √k.  So a
    record's moments have norm 1 at most.

    Guarantee: the moments of two records without NaN are at most `MOMENTS_DIAMETER` / 1.25 apart.  Numbers beyond
    -1 … 1 count as the ends of this range.  NaN stays NaN, and has no bound.
    """
    clipped = np.asarray(values, np.float64).clip(-1.0, 1.0)
    return np.concatenate([clipped, 2.0 * clipped**2 - MOMENTS_RADIUS], axis=1) / (
        MOMENTS_RADIUS * math.sqrt(clipped.shape[1])
    )


def scaling_from_moments(columns: Sequence[int], release: NDArray[Any]) -> Scaling:
    """Compute a scaling from a release of the noisy means of `bounded_moments`, (2k,).

    With r the release times 1.25 √k, the mean of feature j of k is r_j, clipped to -1 … 1.  Its variance is
    (r_{k+j} + 1.25)/2 - mean², clipped so that the deviation lies in `MIN_DEVIATION` … 1.

    Args:
        columns: Indices of the k features.
        release: Noisy means of the columns of `bounded_moments`, (2k,).

    Raises:
        ValueError: The release has another shape, or a value is not finite.
    """
    count = len(columns)
    if release.shape != (2 * count,) or not np.isfinite(release).all():
        raise ValueError(f"{2 * count} finite moments were expected, not an array of shape {release.shape}")
    scaled_means, scaled_squares = np.split(np.asarray(release, np.float64) * MOMENTS_RADIUS * math.sqrt(count), 2)
    means = scaled_means.clip(-1.0, 1.0)
    variances = (scaled_squares + MOMENTS_RADIUS) / 2.0 - means**2
    return Scaling(
        tuple(columns), tuple(means.tolist()), tuple(np.sqrt(variances.clip(MIN_DEVIATION**2, 1.0)).tolist())
    )


_MISSING_CODE = -1
_CHUNK_ROWS = 2**13
"""Number of rows whose features are written at once, so that they fit into a cache."""
_SPLIT_DESCRIPTION = 'the two words of a split, "train" and "test"'


@dataclass(frozen=True)
class TableRows:
    """Labels, places, sites and persons of every row of a file, in its order.

    The label of a row that does not count may mean nothing.
    """

    labels: NDArray[np.int64] | NDArray[np.float64]
    """Class of each row, (n,), or the real target scaled to -1 … 1."""
    split: TableSplit
    """Row indices of the training and the test part, and masks of the rows that count."""
    sites: NDArray[np.int64] | None
    """Index of each row's site in `TableSchema.sites`, (n,), or None without a column for the site."""
    persons: NDArray[np.str_] | None
    """Name of each row's person, (n,), or None without a column for the person."""


@dataclass(frozen=True)
class EncodedTable(TableRows):
    """Rows of a file with their features and raw cells."""

    features: NDArray[np.floating[Any]]
    """Features of all columns, (n, width), in the order of `TableSchema.sorted_columns`."""
    raw_cells: NDArray[np.float64]
    """Cells of all rows (`read_raw_cells`), (n, columns)."""


def encode_table(table: RawTable, schema: TableSchema, *, single_site: bool = False) -> EncodedTable:
    """Return `read_rows` of a table with the features and the raw cells of all rows.

    The arguments are those of `read_rows`.

    Raises:
        InputError: The table does not keep to the schema (`read_rows`).
    """
    rows = read_rows(table, schema, single_site=single_site)
    all_rows = np.arange(len(table))
    features, raw_cells = encode_features(table, schema, all_rows), read_raw_cells(table, schema, all_rows, rows)
    return EncodedTable(rows.labels, rows.split, rows.sites, rows.persons, features, raw_cells)


def read_rows(table: RawTable, schema: TableSchema, *, single_site: bool = False) -> TableRows:
    """Read the labels, the split into training and test part, the sites and the persons of a table's rows.

    Only complete rows count.  In a complete row the label is present, and each feature is present or has a value
    in its place (`FeatureColumn.missing`).  The split is that of `split_rows`.

    Guarantee: a record's label, and whether and in which part the record counts, depend on the record's own cells,
    on its row number and on `schema`, and on no other record.  The place of a record depends on no cell at all.

    Args:
        table: Table with all columns of the schema.
        schema: Public schema of the table.
        single_site: Whether the table is that of one site, without a column for the site.

    Raises:
        InputError: A value is missing or malformed and the schema does not allow it, a column is missing or cannot
            be read, or no row is complete.
    """
    is_incomplete = np.zeros(len(table), np.bool_)
    for name, column in schema.sorted_columns:
        # A missing value counts against a row only if the schema gives no value in its place.
        is_incomplete |= _read_values(table, name, column)[1] & (column.missing is None)
    labels, is_missing, _ = _read_labels(table, schema)
    is_incomplete |= is_missing
    sites = None if schema.site is None or single_site else _read_codes(table, schema.site, schema.sites, "sites")
    persons = None if schema.person is None else _read_persons(table, schema.person)
    is_test = (
        None
        if schema.split is None
        else _read_codes(table, schema.split, ("train", "test"), _SPLIT_DESCRIPTION).astype(np.bool_)
    )
    if is_incomplete.any() and schema.missing == "refuse":
        _refuse_missing(table, schema, int(is_incomplete.argmax()))
    if is_incomplete.all():
        raise InputError(f"{table.source}: every record has a missing value, none is left")
    names = persons.tolist() if persons is not None and schema.splits_by_content else None
    return TableRows(
        labels, split_rows(~is_incomplete, is_test, names, schema.expected_test_share), sites, persons
    )


def encode_features(
    table: RawTable, schema: TableSchema, rows: NDArray[np.int64], dtype: str = "float64"
) -> NDArray[np.floating[Any]]:
    """Return the features of rows, (n, width), rounded to `dtype`.

    A column of numbers is one feature in -1 … 1, and a column of words has one feature for each word, 1 for the
    cell's word and otherwise 0.  Columns are in the order of `TableSchema.sorted_columns`.  A missing value is
    encoded as the value that the schema puts in its place, or as any value in a row that does not count.

    Guarantee: a record's features depend on its own cells and on `schema` alone.

    Args:
        table: Table that `read_rows` accepts.
        schema: Public schema of the table.
        rows: Indices of the rows, (n,).
        dtype: Name of a floating-point type of NumPy.
    """
    features, end = np.zeros((len(rows), schema.width), dtype), 0
    column_maps = []
    for name, column in schema.sorted_columns:
        start, end = end, end + column.width
        codes, distinct = table.distinct_cells(name)
        # Code of each row's cell, the mapped value of each code, and the column's features.
        column_maps.append((codes, _map_column(distinct, name, column), range(start, end)))
    for offset in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[offset : offset + _CHUNK_ROWS]
        output = features[offset : offset + _CHUNK_ROWS]
        for codes, values, span in column_maps:
            mapped = values.take(codes.take(chunk))
            if values.dtype == np.float64:  # a column of numbers, and else one of words
                output[:, span.start] = mapped
            else:
                output[np.arange(len(chunk)), span.start + mapped] = 1.0
    return features


def read_raw_cells(
    table: RawTable, schema: TableSchema, rows: NDArray[np.int64], of: TableRows
) -> NDArray[np.float64]:
    """Return the cells of rows before they are clipped or filled, (n, columns).

    The columns are those of `TableSchema.raw_columns`: the features', the target, and the site if the schema has
    one.  A number stands as it is, a word is its index in the vocabulary, and a missing value is NaN.

    Args:
        table: Table that `read_rows` accepts.
        schema: Public schema of the table.
        rows: Indices of the rows, (n,).
        of: Result of `read_rows` for the table.  The site is NaN if `of` has no sites.
    """
    cells = np.full((len(rows), len(schema.raw_columns)), np.nan)
    for index, (name, column) in enumerate(schema.sorted_columns):
        values, is_missing = _read_values(table, name, column)
        cells[:, index] = np.where(is_missing, np.nan, values)[rows]
    cells[:, len(schema.columns)] = _read_labels(table, schema)[2][rows]
    if of.sites is not None:
        cells[:, schema.raw_columns.index(schema.site or "")] = of.sites[rows]
    return cells


def _read_values(table: RawTable, name: str, column: FeatureColumn) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return a column's numbers or the indices of its words, (n,), and the mask of the missing values."""
    if column.values is None:
        return _read_numbers(table, name)
    codes = _read_codes(table, name, column.values, "values", allow_missing=True)
    return codes, np.equal(codes, _MISSING_CODE)


def _map_column(table: RawTable, name: str, column: FeatureColumn) -> NDArray[Any]:
    """Return a column's numbers in -1 … 1, (n,), or the indices of its words among the column's features."""
    values, is_missing = _read_values(table, name, column)
    if column.range is not None:
        return _scale_numbers(
            np.where(is_missing, 0.0 if column.missing is None else float(column.missing), values), column.range
        )
    assert column.values is not None
    return np.where(is_missing, 0 if column.missing is None else column.values.index(str(column.missing)), values)


def _read_labels(
    table: RawTable, schema: TableSchema
) -> tuple[NDArray[np.int64] | NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    """Return labels, mask of the records whose label is missing, and raw cells of the target, (n,) each.

    A label is a real target scaled to -1 … 1, a class index, or the class of a time and an event
    (`Survival.make_labels`), and means nothing where it is missing.  A raw cell is the number or the class index
    in the target's column, NaN if missing.
    """
    if schema.range is not None:
        numbers, is_missing = _read_numbers(table, schema.target)
        return _scale_numbers(numbers, schema.range), is_missing, np.where(is_missing, np.nan, numbers)
    assert schema.classes is not None
    codes = _read_codes(table, schema.target, schema.classes, "classes", allow_missing=True)
    is_missing = codes == _MISSING_CODE
    cells = np.where(is_missing, np.nan, codes)
    if schema.survival is not None:
        times, time_is_missing = _read_numbers(table, schema.survival.time)
        codes, is_missing = schema.survival.make_labels(times, codes == 1), is_missing | time_is_missing
    return codes, is_missing, cells


def _scale_numbers(numbers: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    low, high = bounds
    return 2.0 * (numbers.clip(low, high) - low) / (high - low) - 1.0


def _read_numbers(table: RawTable, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a column's numbers, (n,), with 0 for a missing value, and the mask of the missing values.

    Raises:
        InputError: A cell is neither a finite number nor missing, or the column is missing or cannot be read.
    """
    cells = table.column(name)
    numbers, is_missing = cells.to_numbers(), cells.is_missing
    if (bad := np.isnan(numbers) & ~is_missing).any():
        raise InputError(
            f"{table.describe_cell(int(bad.argmax()), name)} is no finite number; a column of words has `values`, "
            "and a target of words `classes`"
        )
    return np.where(is_missing, 0.0, numbers), is_missing


def _read_codes(
    table: RawTable,
    name: str,
    vocabulary: Sequence[str],
    key: str,
    *,
    allow_missing: bool = False,
) -> NDArray[np.int64]:
    """Return the index of each record's word in a vocabulary, (n,).

    An allowed missing value has `_MISSING_CODE` instead, unless the vocabulary lists its text.  Any other word
    outside a vocabulary that lists `OTHER_WORD` has the index of that entry.

    Args:
        table: Table with the column.
        name: Name of the column.
        vocabulary: Words of the column, which may have `OTHER_WORD` for all words that are not listed.
        key: Key of the schema that lists the words, or `_SPLIT_DESCRIPTION`, for the message.
        allow_missing: Whether a missing value is allowed.

    Raises:
        InputError: A cell's text has no index in the vocabulary, or the column is missing or cannot be read.
    """
    cells = table.column(name)
    codes = cells.vocabulary_indices(vocabulary)
    is_unknown = codes < 0
    if allow_missing:
        codes[is_unknown & cells.is_missing] = _MISSING_CODE
        is_unknown &= ~cells.is_missing
    if is_unknown.any():
        if OTHER_WORD not in vocabulary:
            remedy = f"; add it to {key}" + (
                f', or "{OTHER_WORD}" for every other word' if key == "values" else ""
            )
            if key == _SPLIT_DESCRIPTION:
                remedy = "; name a column of these two, or none: `test_share` then applies"
            row = int(is_unknown.argmax())
            hint = suggestion(cells[row], vocabulary)
            raise InputError(f"{table.describe_cell(row, name)} is not among {key}{hint}{remedy}")
        codes[is_unknown] = vocabulary.index(OTHER_WORD)
    return codes


def _read_persons(table: RawTable, name: str) -> NDArray[np.str_]:
    """Return the name of each row's person, (n,).

    Raises:
        InputError: A row has no name, so that it might belong to any person, or the column is missing or cannot be
            read.
    """
    cells = table.column(name)
    if cells.is_missing.any():
        raise InputError(
            f"{table.describe_cell(int(cells.is_missing.argmax()), name)} names no person; every row needs one"
        )
    return cells.to_numpy()


def _refuse_missing(table: RawTable, schema: TableSchema, row: int) -> None:
    """Raise InputError for a missing value of a row, with the column's name and the remedies."""
    required_columns = [
        (name, column.values or ()) for name, column in schema.sorted_columns if column.missing is None
    ]
    times: list[tuple[str, Sequence[str]]] = [] if schema.survival is None else [(schema.survival.time, ())]
    name = next(
        name
        for name, vocabulary in [*required_columns, (schema.target, schema.classes or ()), *times]
        if table.columns[name].is_missing[row] and table.columns[name][row] not in vocabulary
    )
    raise InputError(
        f"{table.describe_cell(row, name)} is a missing value; give "
        f"{'the column `missing`, the value in its place, or ' if name in schema.columns else ''}"
        'the table missing = "drop"'
    )
