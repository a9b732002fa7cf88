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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, sanitize_line, suggestion
from fedpriv.core.files import write_text

TABLE_SUFFIXES = (".csv", ".parquet")
MISSING_TEXTS = ("", "?", "na", "n/a", "nan", "null")
"""What stands for a missing value, in any spelling of capitals, unless a vocabulary has the word."""
_MAX_TEXT_LENGTH = 80
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_BYTES = 1 << 23
"""Bytes of a .csv file that are read at a time."""
_BLOCKS_PER_MERGE = 8
"""Blocks of a column whose texts are compared at a time with those before them."""
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class CellColumn:
    """A column of n cells: an Arrow array of numbers from a .parquet file, or of texts, each kept once."""

    arrow_array: Any
    """Texts as a dictionary array, its words in the order in which they first occur."""

    @staticmethod
    def from_texts(texts: Sequence[str]) -> "CellColumn":
        pa, _ = _import_arrow()
        found = ColumnBuilder()
        found.add(pa.array(list(texts), pa.string()).dictionary_encode())
        return found.build()

    def __len__(self) -> int:
        return len(self.arrow_array)

    def __getitem__(self, row: int) -> str:
        return _as_text(self.arrow_array[row].as_py())

    def encode_values(self) -> tuple[NDArray[np.signedinteger[Any]], Any]:
        """Which of the different values each cell holds, (n,), and these as an Arrow array of texts or numbers."""
        pa, _ = _import_arrow()
        if pa.types.is_dictionary(self.arrow_array.type):
            return np.asarray(self.arrow_array.indices), self.arrow_array.dictionary
        found = self.arrow_array.dictionary_encode().unify_dictionaries().combine_chunks()
        values = pa.concat_arrays([found.dictionary, pa.nulls(1, found.dictionary.type)])
        return np.asarray(found.indices.fill_null(len(found.dictionary))).astype(np.int32), values

    def encode_texts(self) -> tuple[NDArray[np.signedinteger[Any]], Any]:
        """Which of the different texts each cell holds, (n,), and these as an Arrow array."""
        codes, values = self.encode_values()
        return codes, _as_texts(values)

    @property
    def is_missing(self) -> NDArray[np.bool_]:
        """Where a word stands that means a missing value; (n,)."""
        pa, _ = _import_arrow()
        return (
            np.take(_missing_mask(self.arrow_array.dictionary), np.asarray(self.arrow_array.indices))
            if pa.types.is_dictionary(self.arrow_array.type)
            else _missing_mask(self.arrow_array)
        )

    def to_numbers(self) -> NDArray[np.float64]:
        """The finite number of each cell, (n,); NaN for a missing cell, and for what is none.

        A number does not depend on how the rest of the column is spelled: Arrow and Python round alike.
        """
        pa, _ = _import_arrow()
        if (
            not pa.types.is_dictionary(self.arrow_array.type)
            and (found := _cast_numbers(self.arrow_array)) is not None
        ):
            return found
        codes, words = self.encode_texts()
        known = _cast_numbers(words)
        if known is None:
            told = np.array(
                [np.nan if number is None else number for number in map(parse_number, words.to_pylist())],
                np.float64,
            )
            known = np.where(_missing_mask(words), np.nan, told)
        return np.take(known, codes)

    def vocabulary_indices(self, vocabulary: Sequence[str]) -> NDArray[np.int64]:
        """Each cell's place in `vocabulary`, (n,); -1 for a word that is not there."""
        pa, compute = _import_arrow()
        codes, words = self.encode_texts()
        places = compute.fill_null(compute.index_in(words, value_set=pa.array(vocabulary, pa.string())), -1)
        return np.take(np.asarray(places).astype(np.int64), codes)

    def count_values(self, most: int) -> tuple[int, tuple[str, ...]]:
        """Number of different cells, missing ones left out, and these from the most frequent on.

        None of them is listed where there are more than `most`.
        """
        codes, values = self.encode_values()
        known = np.flatnonzero(~_missing_mask(values))
        if len(known) > most:
            return len(known), ()
        counts = np.bincount(codes, minlength=len(values))[known]
        return len(known), tuple(_as_texts(values.take(known[np.argsort(-counts, kind="stable")])).to_pylist())

    def to_numpy(self) -> NDArray[np.str_]:
        """The cells as a NumPy array of texts; (n,)."""
        codes, words = self.encode_texts()
        return np.take(np.array(words.to_pylist(), np.str_), codes)

    def take_texts(self, rows: Sequence[int]) -> list[str]:
        """The texts of some cells."""
        codes, words = self.encode_texts()
        return list(words.take(codes[list(rows)]).to_pylist())


def _as_texts(values: Any) -> Any:
    pa, _ = _import_arrow()
    return values if pa.types.is_string(values.type) else pa.array(map(_as_text, values.to_pylist()), pa.string())


def _missing_mask(values: Any) -> NDArray[np.bool_]:
    """Which values of an Arrow array mean a missing one."""
    pa, compute = _import_arrow()
    found = (
        compute.is_null(values, nan_is_null=True)
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        else compute.is_in(compute.utf8_lower(_as_texts(values)), value_set=pa.array(MISSING_TEXTS, pa.string()))
    )
    return np.asarray(found).astype(np.bool_)


def _cast_numbers(values: Any) -> NDArray[np.float64] | None:
    """Arrow's finite numbers of values, NaN where they are missing; None where it does not read them all."""
    pa, compute = _import_arrow()
    kind, missing = values.type, _missing_mask(values)
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    try:
        found = np.asarray(
            compute.cast(compute.if_else(pa.array(missing), None, values), pa.float64()), np.float64
        )
    except pa.ArrowInvalid:
        return None  # a cell that Arrow does not read, or a whole number that a float rounds
    return found if np.array_equal(np.isfinite(found), ~missing) else None


class ColumnBuilder:
    """A column of texts while blocks of it are read: each text once, and a small whole number a cell."""

    def __init__(self) -> None:
        pa, _ = _import_arrow()
        self._distinct_texts = pa.array([], pa.string())
        self._codes: list[NDArray[np.signedinteger[Any]]] = []
        self._blocks: list[tuple[NDArray[np.signedinteger[Any]], Any]] = []

    def add(self, block: Any) -> None:
        """Take a dictionary array of texts, none of which is null."""
        _, compute = _import_arrow()
        words = compute.utf8_trim_whitespace(block.dictionary)
        self._blocks.append((_narrow_codes(np.asarray(block.indices), len(words)), words))
        if len(self._blocks) == _BLOCKS_PER_MERGE:
            self._merge()

    def _merge(self) -> None:
        pa, compute = _import_arrow()
        told = pa.chunked_array([words for _, words in self._blocks], pa.string())
        self._distinct_texts = compute.unique(pa.chunked_array([self._distinct_texts, *told.chunks]))
        place = np.asarray(compute.index_in(told, value_set=self._distinct_texts))
        starts = np.cumsum([0, *(len(words) for _, words in self._blocks)])
        parts = [place[start:][codes] for start, (codes, _) in zip(starts, self._blocks, strict=False)]
        self._codes += [_narrow_codes(part, len(self._distinct_texts)) for part in parts]
        self._blocks = []

    def build(self) -> CellColumn:
        """All cells that were added, which are kept there alone."""
        pa, _ = _import_arrow()
        self._merge()
        codes = np.concatenate(self._codes or [np.zeros(0, np.int8)])
        self._codes = []
        return CellColumn(pa.DictionaryArray.from_arrays(pa.array(codes), self._distinct_texts))


def _narrow_codes(codes: NDArray[Any], count: int) -> NDArray[np.signedinteger[Any]]:
    return codes.astype(np.int8 if count < 2**7 else np.int16 if count < 2**15 else np.int32)


def parse_number(text: str) -> float | None:
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
    columns: Mapping[str, CellColumn]
    row_unit: str
    """What `places` counts: "line" or "row"."""
    locate_rows: Callable[[Sequence[int]], list[int]]

    @staticmethod
    def from_texts(source: str, columns: Mapping[str, Sequence[str]]) -> "RawTable":
        """A table that lies in memory; rows count from 1."""
        return RawTable(
            source, {name: CellColumn.from_texts(cells) for name, cells in columns.items()}, "row", _number_rows
        )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> CellColumn:
        """InputError if there is no such column."""
        if name not in self.columns:
            known = ", ".join(map(repr, self.columns))
            raise InputError(
                f"{self.source}: has no column {name!r}, only "
                f"{sanitize_line(known)}{suggestion(name, self.columns)}"
            )
        return self.columns[name]

    def distinct_cells(self, name: str) -> tuple[NDArray[np.signedinteger[Any]], "RawTable"]:
        """Which of its different cells each record has in a column, and a table of these alone."""
        cells = self.column(name)
        pa, _ = _import_arrow()
        if not pa.types.is_dictionary(cells.arrow_array.type):
            return np.arange(len(cells)), self
        codes, words = cells.encode_values()
        each = pa.DictionaryArray.from_arrays(pa.array(np.arange(len(words), dtype=np.int32)), words)
        return codes, RawTable(self.source, {name: CellColumn(each)}, self.row_unit, self.locate_rows)

    def describe_cell(self, row: int, column: str) -> str:
        """Where a cell is and what it holds, for an error."""
        held = sanitize_line(repr(self.columns[column][row]), _MAX_TEXT_LENGTH)
        return f"{self.source}, {self.row_unit} {self.locate_rows([row])[0]}, column {column!r}: {held}"

    def duplicate_count(self) -> int:
        """Number of records that equal an earlier one in every column, by 64 bits of hash."""
        mixed = np.zeros(len(self), np.uint64)
        for cells in self.columns.values():
            mixed = (mixed ^ cells.encode_values()[0].astype(np.uint64)) * _HASH_MULTIPLIER
            mixed ^= mixed >> np.uint64(29)
        return len(self) - len(np.unique(mixed))


def is_table_path(name: str) -> bool:
    """Whether a data set's name is the path of a table."""
    return name.endswith(TABLE_SUFFIXES)


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
    writer.writerows(zip(*(cells.take_texts(rows) for cells in table.columns.values()), strict=True))
    write_text(path, buffer.getvalue())


def _read_csv(path: Path) -> RawTable:
    pa, _ = _import_arrow()
    from pyarrow import csv as arrow

    header = _read_header(path)
    if quoted := _has_quotes(path):
        _check_rows(path)
    kind = pa.dictionary(pa.int32(), pa.string())
    columns = [ColumnBuilder() for _ in header]
    try:
        with arrow.open_csv(
            path,
            arrow.ReadOptions(
                column_names=[str(place) for place in range(len(header))],
                skip_rows_after_names=1,
                use_threads=False,
                block_size=_BLOCK_BYTES,
            ),
            arrow.ParseOptions(newlines_in_values=quoted),
            arrow.ConvertOptions(column_types={str(place): kind for place in range(len(header))}),
        ) as blocks:
            for block in blocks:
                for words, cells in zip(columns, block.columns, strict=True):
                    words.add(cells)
    except pa.ArrowInvalid as error:
        _check_rows(path)
        raise InputError(f"{path}: cannot be read as a table ({str(error).splitlines()[0]})") from None
    named = {name: words.build() for name, words in zip(header, columns, strict=True)}
    pa.default_memory_pool().release_unused()
    return RawTable(str(path), named, "line", lambda rows: _find_lines(path, rows))


def _iterate_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The line at which each record ends, and its cells, by Python's reader; the first is the header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            for row in reader:
                if row:  # and no empty line
                    yield reader.line_num, row
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: {error}") from None


def _read_header(path: Path) -> list[str]:
    header = [name.strip() for name in next(_iterate_records(path), (0, []))[1]]
    _check_header(header, str(path))
    return header


def _check_rows(path: Path) -> None:
    """InputError for the first record that has other than one value a column, or is no CSV."""
    wanted = None
    for line, row in _iterate_records(path):
        wanted = len(row) if wanted is None else wanted
        if len(row) != wanted:
            raise InputError(f"{path}, line {line}: has {len(row)} values, and the header names {wanted}")


def _find_lines(path: Path, rows: Sequence[int]) -> list[int]:
    """The lines at which these records end: read again, for messages alone."""
    wanted = set(rows)
    found = {number - 1: line for number, (line, _) in enumerate(_iterate_records(path)) if number - 1 in wanted}
    return [found[row] for row in rows]


def _number_rows(rows: Sequence[int]) -> list[int]:
    return [row + 1 for row in rows]


def _has_quotes(path: Path) -> bool:
    """Whether a cell below the first line has one."""
    with path.open("rb") as file:
        file.readline()
        return any(b'"' in block for block in iter(lambda: file.read(1 << 20), b""))


def _read_parquet(path: Path) -> RawTable:
    pa, _ = _import_arrow()
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            fields = list(file.schema_arrow)
            header = [field.name.strip() for field in fields]
            _check_header(header, str(path))
            columns = {
                name: _column_from_arrow(file.read([field.name]).column(field.name), f"{path}, column {name!r}")
                for name, field in zip(header, fields, strict=True)
            }
    except pa.ArrowException as error:
        raise InputError(f"{path}: not a readable .parquet file ({str(error).splitlines()[0]})") from None
    return RawTable(str(path), columns, "row", _number_rows)


def table_from_arrow(held: Any, source: str) -> RawTable:
    """An Arrow table that lies in memory; InputError for one without columns of numbers and words."""
    header = [name.strip() for name in held.column_names]
    _check_header(header, source)
    columns = {
        name: _column_from_arrow(column, f"{source}, column {name!r}")
        for name, column in zip(header, held.columns, strict=True)
    }
    if not held.num_rows:
        raise InputError(f"{source}: has no records")
    return RawTable(source, columns, "row", _number_rows)


def _column_from_arrow(column: Any, where: str) -> CellColumn:
    """A column of an Arrow table."""
    pa, compute = _import_arrow()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_nested(kind) or pa.types.is_binary(kind):
        raise InputError(f"{where}: of type {kind}; expected numbers, words or booleans")
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        return CellColumn(column.cast(kind))
    words = ColumnBuilder()
    for block in compute.fill_null(column.cast(pa.string()), "").chunks:
        words.add(block.dictionary_encode())
    return words.build()


def _as_text(value: Any) -> str:
    return "" if value is None else str(value).strip()


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


def _import_arrow() -> tuple[Any, Any]:
    import pyarrow
    from pyarrow import compute

    return pyarrow, compute
