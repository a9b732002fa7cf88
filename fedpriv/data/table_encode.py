"""From texts to features, each record by itself, by what is public about the table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.placing import Places, places
from fedpriv.data.table_file import MISSING, RawTable
from fedpriv.data.table_schema import OTHER, Column, TableSchema
from fedpriv.errors import InputError, suggestion

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
    blocks, gone = [], np.zeros(len(table), np.bool_)
    for name, column in schema.features:
        block, absent = _features(table, name, column)
        blocks.append(block)
        gone |= absent
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
    return Encoded(np.concatenate(blocks, axis=1), labels, found, sites, persons)


def _features(table: RawTable, name: str, column: Column) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(n, width) in -1 … 1, and which records lack a value that nothing stands in for."""
    if column.range is not None:
        filler = None if column.missing is None else float(column.missing)
        numbers, absent = _numbers(table, name, filler)
        return _scaled(numbers, column.range)[:, None], absent
    assert column.values is not None
    codes = _words(table, name, column.values, "values", column.missing, may_lack=True)
    absent = codes == _GONE
    return np.eye(len(column.values))[np.where(absent, 0, codes)], absent


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
    absent = np.array([cell.lower() in MISSING for cell in cells])
    texts = ["0" if lacks else cell for cell, lacks in zip(cells, absent.tolist(), strict=True)]
    try:
        numbers = np.array([_number(text) for text in texts])
    except ValueError:
        row = next(row for row, text in enumerate(texts) if as_number(text) is None)
        raise InputError(f"{table.at(row, name)} is no finite number; a column with words has values") from None
    if filler is not None:
        return np.where(absent, filler, numbers), np.zeros(len(cells), np.bool_)
    return numbers, absent


def _number(text: str) -> float:
    """ValueError for what is no finite number; true and false are 1 and 0."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return float(lowered == "true")
    number = float(text)
    if "_" in text or number - number != 0.0:  # Python reads 1_000; and what is not finite
        raise ValueError(text)
    return number


def as_number(text: str) -> float | None:
    """A finite number, None for what is none."""
    try:
        return _number(text)
    except ValueError:
        return None


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
    codes = {word: code for code, word in enumerate(vocabulary)}
    other = codes.get(OTHER)
    absent = codes[filler] if isinstance(filler, str) else _GONE
    found = np.empty(len(table), np.int64)
    for row, cell in enumerate(table.column(name)):
        code = codes.get(cell)
        if code is None and may_lack and cell.lower() in MISSING:
            code = absent
        if code is None:
            code = other
        if code is None:
            remedy = f"; add it to {key}" + (f', or "{OTHER}" for every other word' if key == "values" else "")
            if key == _SPLIT:
                remedy = "; name a column of these two, or none: rows are then put aside by their place"
            raise InputError(f"{table.at(row, name)} is not among {key}{suggestion(cell, vocabulary)}{remedy}")
        found[row] = code
    return found


def _persons(table: RawTable, name: str) -> NDArray[np.str_]:
    """Whose each row is; a row without a name would be one person more, or less."""
    for row, cell in enumerate(cells := table.column(name)):
        if cell.lower() in MISSING:
            raise InputError(f"{table.at(row, name)} does not say whose the row is; every row needs a person")
    return np.array(cells, np.str_)


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
