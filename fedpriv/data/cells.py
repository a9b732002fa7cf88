"""Files of tables as columns of cells: .csv (commas, one header line, UTF-8) and .parquet, read by Arrow.

Arrow is imported when a table is read.  A cell is a text without spaces around it; columns of a .parquet file that
are numbers are taken as such, and have texts only where something asks for them.  A file with quotes is read by
Python's strict reader, too, because Arrow takes `"a"b` for ab.
"""

import csv
import io
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, printable, suggestion
from fedpriv.core.files import write_text

SUFFIXES = (".csv", ".parquet")
MISSING = ("", "?", "na", "n/a", "nan", "null")
"""What stands for a missing value, in any spelling of capitals, unless a vocabulary has the word."""
_LONGEST = 80
_ODD = np.uint64(0x9E3779B97F4A7C15)
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class Cells:
    """A column of n cells, an Arrow array of texts, or of numbers from a .parquet file."""

    given: Any

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, row: int) -> str:
        return _text(self.given[row].as_py())

    @cached_property
    def texts(self) -> Any:
        """The cells as an Arrow array of strings."""
        pa, compute = _arrow()
        if pa.types.is_string(self.given.type):
            return self.given
        once = self.given.dictionary_encode().unify_dictionaries().combine_chunks()
        words = pa.array([_text(word) for word in once.dictionary.to_pylist()], pa.string())
        return compute.fill_null(words.take(once.indices), "")

    @cached_property
    def missing(self) -> NDArray[np.bool_]:
        """Where a word stands that means a missing value; (n,)."""
        pa, compute = _arrow()
        if pa.types.is_integer(self.given.type):
            return _bools(compute.is_null(self.given))
        if pa.types.is_floating(self.given.type):
            return _bools(compute.is_null(self.given, nan_is_null=True))
        return _bools(compute.is_in(compute.utf8_lower(self.texts), value_set=pa.array(MISSING, pa.string())))

    def numbers(self) -> NDArray[np.float64]:
        """The finite number of each cell, (n,); NaN for a missing cell, and for what is none.

        A number does not depend on how the rest of the column is spelled: Arrow and Python round alike.
        """
        pa, compute = _arrow()
        kind = self.given.type
        if pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
            try:
                told = compute.if_else(pa.array(self.missing), None, self.given)
                found = np.asarray(compute.cast(told, pa.float64()), np.float64)
            except pa.ArrowInvalid:
                found = np.zeros(0)  # a cell that Arrow does not read, or a whole number that a float rounds
            if np.array_equal(np.isfinite(found), ~self.missing):
                return found
        codes, words = self.coded()
        each = [as_number(word) for word in words.to_pylist()]
        known = np.array([np.nan if number is None else number for number in each], np.float64)
        return np.where(self.missing, np.nan, known[codes])

    def codes(self, vocabulary: Sequence[str]) -> NDArray[np.int64]:
        """Each cell's place in `vocabulary`, (n,); -1 for a word that is not there."""
        pa, compute = _arrow()
        found = compute.index_in(self.texts, value_set=pa.array(vocabulary, pa.string()))
        return np.asarray(compute.fill_null(found, -1)).astype(np.int64)

    def counted(self, most: int) -> tuple[int, tuple[str, ...]]:
        """Number of different cells, missing ones left out, and these from the most frequent on.

        None of them is listed where there are more than `most`.
        """
        pa, compute = _arrow()
        held = compute.filter(self.given, pa.array(~self.missing))
        counts = compute.value_counts(held)
        if len(counts) > most:
            return len(counts), ()
        order = np.argsort(-np.asarray(counts.field("counts")), kind="stable")
        words = [_text(word) for word in counts.field("values").to_pylist()]
        return len(words), tuple(words[place] for place in order)

    def array(self) -> NDArray[np.str_]:
        """The cells as a NumPy array of texts; (n,)."""
        return np.array(self.texts.to_pylist(), np.str_)

    def coded(self) -> tuple[NDArray[np.int32], Any]:
        """Which of the different texts each cell holds, (n,), and these as an Arrow array."""
        once = self.texts.dictionary_encode()
        once = once.unify_dictionaries().combine_chunks() if hasattr(once, "unify_dictionaries") else once
        return np.asarray(once.indices).astype(np.int32), once.dictionary


def as_number(text: str) -> float | None:
    """A finite number, None for what is none; true and false are 1 and 0."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return float(lowered == "true")
    try:
        number = float(text)
    except ValueError:
        return None
    return None if "_" in text or number - number != 0.0 else number  # Python reads 1_000; and what is not finite


@dataclass(frozen=True)
class RawTable:
    """Columns of cells, all of one length; `places` says at which line or row of the file records stand."""

    source: str
    columns: Mapping[str, Cells]
    place: str
    """What `places` counts: "line" or "row"."""
    places: Callable[[Sequence[int]], list[int]]

    @staticmethod
    def of(source: str, columns: Mapping[str, Sequence[str]]) -> "RawTable":
        """A table that lies in memory; rows count from 1."""
        pa, _ = _arrow()
        texts = {name: Cells(pa.array(list(cells), pa.string())) for name, cells in columns.items()}
        return RawTable(source, texts, "row", _rows)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> Cells:
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
        return f"{self.source}, {self.place} {self.places([row])[0]}, column {column!r}: {held}"

    def copies(self) -> int:
        """Number of records that equal an earlier one in every column, by 64 bits of hash."""
        mixed = np.zeros(len(self), np.uint64)
        for cells in self.columns.values():
            mixed = (mixed ^ cells.coded()[0].astype(np.uint64)) * _ODD
            mixed ^= mixed >> np.uint64(29)
        return len(self) - len(np.unique(mixed))


def is_table(name: str) -> bool:
    """Whether a data set's name is the path of a table."""
    return name.endswith(SUFFIXES)


def read_table(path: Path) -> RawTable:
    """The whole file; InputError in one line if it is no table."""
    try:
        table = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file (looked for {path.resolve()})") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: is not in UTF-8 ({error}); save it as 'CSV UTF-8' in a spreadsheet, or, if it is Latin-1, "
            f"with: iconv -f LATIN1 -t UTF-8 {shlex.quote(str(path))} > NEW.csv"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a table ({error})") from None
    if not len(table):
        raise InputError(f"{path}: has no records")
    return table


def write_rows(table: RawTable, rows: Sequence[int], path: Path) -> None:
    """These records of the table, in this order, as a CSV file."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(
        zip(*(cells.texts.take(list(rows)).to_pylist() for cells in table.columns.values()), strict=True)
    )
    write_text(path, buffer.getvalue())


def _read_csv(path: Path) -> RawTable:
    pa, compute = _arrow()
    from pyarrow import csv as arrow

    header = _header(path)
    if quoted := _has_quotes(path):
        _check_rows(path)
    try:
        read = arrow.read_csv(
            path,
            arrow.ReadOptions(column_names=[str(place) for place in range(len(header))], skip_rows_after_names=1),
            arrow.ParseOptions(newlines_in_values=quoted),
            arrow.ConvertOptions(column_types={str(place): pa.string() for place in range(len(header))}),
        )
    except pa.ArrowInvalid as error:
        _check_rows(path)
        raise InputError(f"{path}: cannot be read as a table ({str(error).splitlines()[0]})") from None
    columns = {}
    for name in header:
        columns[name] = Cells(compute.utf8_trim_whitespace(read.column(0)))
        read = read.remove_column(0)  # a column is in memory once
    return RawTable(str(path), columns, "line", lambda rows: _lines(path, rows))


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The line at which each record ends, and its cells, by Python's reader; the first is the header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            for row in reader:
                if row:  # and no empty line
                    yield reader.line_num, row
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: {error}") from None


def _header(path: Path) -> list[str]:
    header = [name.strip() for name in next(_records(path), (0, []))[1]]
    _check_header(header, str(path))
    return header


def _check_rows(path: Path) -> None:
    """InputError for the first record that has other than one value a column, or is no CSV."""
    wanted = None
    for line, row in _records(path):
        wanted = len(row) if wanted is None else wanted
        if len(row) != wanted:
            raise InputError(f"{path}, line {line}: has {len(row)} values, and the header names {wanted}")


def _lines(path: Path, rows: Sequence[int]) -> list[int]:
    """The lines at which these records end: read again, for messages alone."""
    wanted = set(rows)
    found = {number - 1: line for number, (line, _) in enumerate(_records(path)) if number - 1 in wanted}
    return [found[row] for row in rows]


def _rows(rows: Sequence[int]) -> list[int]:
    return [row + 1 for row in rows]


def _has_quotes(path: Path) -> bool:
    """Whether a cell below the first line has one."""
    with path.open("rb") as file:
        file.readline()
        return any(b'"' in block for block in iter(lambda: file.read(1 << 20), b""))


def _read_parquet(path: Path) -> RawTable:
    pa, compute = _arrow()
    from pyarrow import parquet

    try:
        read = parquet.read_table(path)
    except pa.ArrowException as error:
        raise InputError(f"{path}: not a readable .parquet file ({str(error).splitlines()[0]})") from None
    header = [name.strip() for name in read.column_names]
    _check_header(header, str(path))
    columns = {}
    for place, name in enumerate(header):
        kind = read.schema.field(place).type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind):
            raise InputError(f"{path}, column {name!r}: of type {kind}; expected numbers, words or booleans")
        cells = read.column(place)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            cells = compute.utf8_trim_whitespace(compute.fill_null(cells.cast(pa.string()), ""))
        columns[name] = Cells(cells)
    return RawTable(str(path), columns, "row", _rows)


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _bools(values: Any) -> NDArray[np.bool_]:
    return np.asarray(values).astype(np.bool_)


def _check_header(header: Sequence[str], source: str) -> None:
    if not header:
        raise InputError(f"{source}: is empty; expected a line with the names of the columns")
    for separator, name in _SEPARATORS.items():
        if len(header) == 1 and separator in header[0]:
            raise InputError(
                f"{source}: seems to be separated by {name}; expected commas: save it as 'CSV, separated by "
                "commas' in a spreadsheet, with points in its numbers"
            )
    for name in header:
        if not name or header.count(name) > 1:
            raise InputError(f"{source}: the column {name!r} is {'named twice' if name else 'without a name'}")


def _arrow() -> tuple[Any, Any]:
    import pyarrow
    from pyarrow import compute

    return pyarrow, compute
