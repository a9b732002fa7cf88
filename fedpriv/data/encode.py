"""Encode a table: texts become features, each record by itself, by what is public about the table.

A table on the disk is .csv (commas, one header line, UTF-8) or .parquet, and is read as columns of texts.

Columns of numbers may be scaled, less their mean and in units of their deviation: a public map of one record by
itself.  Means and deviations of records are releases.  Where they come from noisy ones that were accounted for,
the map is post-processing of those, and a constant for all that follows.
"""

import csv
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, printable, suggestion
from fedpriv.core.files import write_text
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


_BEND = (2.0 + math.sqrt(2.0)) / 4.0
MOMENTS_APART = (2.0 - _BEND) * math.sqrt(1.0 + 4.0 * _BEND**2)
"""Largest distance of two points (x, 2x² - 1): d² (1 + 4s²) for s = x + y, d = x - y, where |s| + |d| ≤ 2."""


def moments_of(values: NDArray[Any]) -> NDArray[np.float64]:
    """Moments that a record adds to the first step: (n, k) in -1 … 1 -> (n, 2k), of norm 1 at most.

    Column j gives x and 2x² - 1, both in -1 … 1, so that k columns have norm √(2k); they are divided by that.

    Guarantee: two records are at most `MOMENTS_APART` / √2 apart, whatever they hold; numbers beyond -1 … 1 count
    as its ends, and what is no number stays none.
    """
    wide = np.asarray(values, np.float64).clip(-1.0, 1.0)
    return np.concatenate([wide, 2.0 * wide**2 - 1.0], axis=1) / math.sqrt(2 * wide.shape[1])


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


SUFFIXES = (".csv", ".parquet")
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null"})
"""What stands for a missing value, in any spelling of capitals, unless a vocabulary has the word."""
_LONGEST = 80


@dataclass(frozen=True)
class RawTable:
    """Columns of texts without spaces around them, all of one length; `lines` says where each record stands."""

    source: str
    columns: Mapping[str, Sequence[str]]
    lines: Sequence[int]
    place: str
    """What `lines` counts: "line" or "row"."""

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> Sequence[str]:
        """InputError if there is no such column."""
        if name not in self.columns:
            known = ", ".join(map(repr, self.columns))
            raise InputError(
                f"{self.source}: has no column {name!r}, only {printable(known)}{suggestion(name, self.columns)}"
            )
        return self.columns[name]

    def at(self, row: int, column: str) -> str:
        """Where a cell is and what it holds, for an error."""
        held = printable(repr(self.columns[column][row]), _LONGEST)
        return f"{self.source}, {self.place} {self.lines[row]}, column {column!r}: {held}"


def is_table(name: str) -> bool:
    """Whether a data set's name is the path of a table."""
    return name.endswith(SUFFIXES)


def read_table(path: Path) -> RawTable:
    """The whole file; InputError in one line if it is no table."""
    try:
        return _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file (looked for {path.resolve()})") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: is not in UTF-8 ({error}); save it as 'CSV UTF-8' in a spreadsheet, or, if it is Latin-1, "
            f"with: iconv -f LATIN1 -t UTF-8 {shlex.quote(str(path))} > NEW.csv"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a table ({error})") from None


def write_rows(table: RawTable, rows: Sequence[int], path: Path) -> None:
    """These records of the table, in this order, as a CSV file."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    columns = list(table.columns.values())
    writer.writerows([column[row] for column in columns] for row in rows)
    write_text(path, buffer.getvalue())


def _read_csv(path: Path) -> RawTable:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(header, str(path))
            lines, rows = [], []
            for row in reader:
                if not row:
                    continue  # an empty line
                if len(row) != len(header):
                    raise InputError(
                        f"{path}, line {reader.line_num}: has {len(row)} values, and the header names "
                        f"{len(header)}"
                    )
                lines.append(reader.line_num)
                rows.append([value.strip() for value in row])
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: {error}") from None
    return _checked(
        RawTable(str(path), dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else {}, lines, "line")
    )


def _read_parquet(path: Path) -> RawTable:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"{path}: .parquet needs pyarrow: pip install 'fedpriv[parquet]', or write a .csv"
        ) from None
    try:
        read = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a readable .parquet file ({str(error).splitlines()[0]})") from None
    _check_header(read.column_names, str(path))
    columns = {}
    for name in read.column_names:
        kind = read.schema.field(name).type
        if pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind):
            raise InputError(f"{path}, column {name!r}: of type {kind}; expected numbers, words or booleans")
        columns[name.strip()] = [_text(value) for value in read.column(name).to_pylist()]
    return _checked(RawTable(str(path), columns, range(1, read.num_rows + 1), "row"))


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _check_header(header: Sequence[str], source: str) -> None:
    if not header:
        raise InputError(f"{source}: is empty; expected a line with the names of the columns")
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise InputError(f"{source}: seems to be separated by semicolons or tabs; expected commas")
    for name in header:
        if not name or header.count(name) > 1:
            raise InputError(f"{source}: the column {name!r} is {'named twice' if name else 'without a name'}")


def _checked(table: RawTable) -> RawTable:
    if not len(table):
        raise InputError(f"{table.source}: has no records")
    return table


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
    cells: NDArray[np.float64]
    """(n, columns): what the rows hold before it is clipped or filled, in the order of `TableSchema.raw`.

    Numbers as they are, the places of words in their vocabulary, and NaN where a value is missing.
    """


def encode(table: RawTable, schema: TableSchema, *, of_one_site: bool = False) -> Encoded:
    """The features, labels, sites and persons of a table; one `of_one_site` has no column for it.

    Guarantee: a record's features and label, and whether and where it counts, depend on its own cells, on its
    place in the file and on `schema`; never on another record.  Where it sits depends on no cell at all.
    InputError, naming line and column, for a missing value that the schema has no remedy for, a row that is
    nobody's, text among numbers, or a word that is in no vocabulary.
    """
    blocks, gone = [], np.zeros(len(table), np.bool_)
    cells = np.full((len(table), len(schema.raw)), np.nan)
    for place, (name, column) in enumerate(schema.features):
        block, absent, cells[:, place] = _features(table, name, column)
        blocks.append(block)
        gone |= absent
    labels, absent, cells[:, len(schema.columns)] = _labels(table, schema)
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
    if sites is not None:
        cells[:, schema.raw.index(schema.site or "")] = sites
    return Encoded(np.concatenate(blocks, axis=1), labels, found, sites, persons, cells)


Read = tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]
"""Features, which records lack a value that nothing stands in for, and the values as they are, or NaN."""


def _features(table: RawTable, name: str, column: Column) -> Read:
    """Features (n, width) in -1 … 1."""
    filled = column.missing is not None
    if column.range is not None:
        numbers, absent = _numbers(table, name)
        filler = 0.0 if column.missing is None else float(column.missing)
        held = _scaled(np.where(absent, filler, numbers), column.range)
        return held[:, None], absent & (not filled), np.where(absent, np.nan, numbers)
    assert column.values is not None
    codes = _words(table, name, column.values, "values", may_lack=True)
    absent = codes == _GONE
    filler = column.values.index(str(column.missing)) if filled else 0
    held = np.eye(len(column.values))[np.where(absent, filler, codes)]
    return held, absent & (not filled), np.where(absent, np.nan, codes)


def _labels(
    table: RawTable, schema: TableSchema
) -> tuple[NDArray[np.int64] | NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    if schema.range is not None:
        numbers, absent = _numbers(table, schema.target)
        return _scaled(numbers, schema.range), absent, np.where(absent, np.nan, numbers)
    assert schema.classes is not None
    codes = _words(table, schema.target, schema.classes, "classes", may_lack=True)
    absent = codes == _GONE
    return codes, absent, np.where(absent, np.nan, codes)


def _scaled(numbers: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    low, high = bounds
    return 2.0 * (numbers.clip(low, high) - low) / (high - low) - 1.0


def _numbers(table: RawTable, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column's numbers, and where there is none (0 stands there)."""
    cells = table.column(name)
    absent = np.array([cell.lower() in MISSING for cell in cells])
    texts = ["0" if lacks else cell for cell, lacks in zip(cells, absent.tolist(), strict=True)]
    try:
        numbers = np.array([_number(text) for text in texts])
    except ValueError:
        row = next(row for row, text in enumerate(texts) if as_number(text) is None)
        raise InputError(f"{table.at(row, name)} is no finite number; a column with words has values") from None
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
    *,
    may_lack: bool = False,
) -> NDArray[np.int64]:
    """Each record's place in the vocabulary; _GONE where a value is missing and `may_lack`."""
    codes = {word: code for code, word in enumerate(vocabulary)}
    other = codes.get(OTHER)
    found = np.empty(len(table), np.int64)
    for row, cell in enumerate(table.column(name)):
        code = codes.get(cell)
        if code is None and may_lack and cell.lower() in MISSING:
            code = _GONE
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
    """Name of the person of each row; a row without a name would be one person more, or less."""
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
