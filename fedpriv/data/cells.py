"""Read files of tables as columns of cells, with Arrow.

A plain .csv file has commas, one header and the encoding UTF-8.  Other files of text (`CellFormat`) and
spreadsheets are converted to such a text in memory.  Columns of a .parquet file that hold no texts keep their
type.  A column that cannot be read, such as one of lists, is an error only if a caller asks for it, or if no
column can be read.
"""

import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, sanitize_line, suggestion
from fedpriv.core.extensions import load_add_on_part
from fedpriv.core.files import write_text

TABLE_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".xlsx", ".parquet")
_UTF16_STARTS = (b"\xff\xfe", b"\xfe\xff")
MISSING_TEXTS = (
    *("", "?", "na", "n/a", "#n/a", "nan", "null"),
    *(f"{sign}{name}" for sign in ("", "-", "+") for name in ("inf", "infinity")),
)
"""Texts of a missing value, compared without regard to case, unless a vocabulary lists the text."""
_MAX_TEXT_LENGTH = 80
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_BYTES = 1 << 23
"""Bytes of a .csv file that are read in one block."""
_BLOCKS_PER_MERGE = 8
"""Number of blocks of a column whose texts are merged with the earlier texts at once."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""Separators of cells in a text file, with their names in messages."""
_LIMIT_OR_PERCENT = re.compile(r"^[<>≤≥]=?|%$")
"""Sign of a detection limit before a number, and of percent behind it."""


class CellFormat(NamedTuple):
    """Format of a text file's cells, which is public."""

    separator: str | None = None
    """Separator of the cells, or None for tabs in a .tsv file and commas in any other."""
    decimal: str | None = None
    """Mark before the decimals of a number, or None for a point."""
    thousands: str | None = None
    """Mark between the thousands of a number, or None.  A space stands for any kind of space."""


@dataclass(frozen=True)
class CellColumn:
    """Column of n cells, as an Arrow array of texts or of other values.  Each different text is stored once."""

    arrow_array: Any
    """Dictionary array of texts in the order of their first cells, or array of numbers or other values."""

    @staticmethod
    def from_texts(texts: Sequence[str]) -> "CellColumn":
        """Return a column of the texts, without the spaces around them."""
        pa, _ = _import_arrow()
        builder = ColumnBuilder()
        builder.add(pa.array(list(texts), pa.string()).dictionary_encode())
        return builder.build()

    def __len__(self) -> int:
        return len(self.arrow_array)

    def __getitem__(self, row: int) -> str:
        return _as_text(self.arrow_array[row].as_py())

    def encode_values(self) -> tuple[NDArray[np.signedinteger[Any]], Any]:
        """Encode the cells as indices into their different values.

        Returns:
            Index of each cell's value, (n,), and the different values as an Arrow array, which may end with a null
            that stands for null cells.
        """
        pa, _ = _import_arrow()
        if pa.types.is_dictionary(self.arrow_array.type):
            return np.asarray(self.arrow_array.indices), self.arrow_array.dictionary
        encoding = self.arrow_array.dictionary_encode().unify_dictionaries().combine_chunks()
        values = pa.concat_arrays([encoding.dictionary, pa.nulls(1, encoding.dictionary.type)])
        return np.asarray(encoding.indices.fill_null(len(encoding.dictionary))).astype(np.int32), values

    def encode_texts(self) -> tuple[NDArray[np.signedinteger[Any]], Any]:
        """Encode the cells as indices into their different texts.

        Returns:
            The index of each cell's text, (n,), and the different texts as an Arrow array.
        """
        codes, values = self.encode_values()
        return codes, _as_texts(values)

    @property
    def is_missing(self) -> NDArray[np.bool_]:
        """Mask of the missing cells, (n,)."""
        pa, _ = _import_arrow()
        return (
            np.take(_missing_mask(self.arrow_array.dictionary), np.asarray(self.arrow_array.indices))
            if pa.types.is_dictionary(self.arrow_array.type)
            else _missing_mask(self.arrow_array)
        )

    def to_numbers(self) -> NDArray[np.float64]:
        """Return the finite number of each cell, (n,), or NaN for a cell that is missing or no finite number.

        Arrow reads the numbers if it can read all of them, and otherwise `parse_number` reads each different text.
        """
        pa, _ = _import_arrow()
        if (
            not pa.types.is_dictionary(self.arrow_array.type)
            and (numbers := _cast_numbers(self.arrow_array)) is not None
        ):
            return numbers
        codes, texts = self.encode_texts()
        text_numbers = _cast_numbers(texts)
        if text_numbers is None:
            python_numbers = np.array(
                [np.nan if number is None else number for number in map(parse_number, texts.to_pylist())],
                np.float64,
            )
            text_numbers = np.where(_missing_mask(texts), np.nan, python_numbers)
        return np.take(text_numbers, codes)

    def vocabulary_indices(self, vocabulary: Sequence[str]) -> NDArray[np.int64]:
        """Return the index of each cell's text in `vocabulary`, (n,), or -1 for a text outside it."""
        pa, compute = _import_arrow()
        codes, texts = self.encode_texts()
        indices = compute.fill_null(compute.index_in(texts, value_set=pa.array(vocabulary, pa.string())), -1)
        return np.take(np.asarray(indices).astype(np.int64), codes)

    def count_values(self, max_count: int) -> tuple[int, tuple[str, ...]]:
        """Count the different values of the cells, without missing ones.

        Args:
            max_count: Largest number of different values with which they are listed.

        Returns:
            Number of different values, and their texts from the most frequent one on, or () if there are more than
            `max_count`.
        """
        codes, values = self.encode_values()
        value_indices = np.flatnonzero(~_missing_mask(values))
        if len(value_indices) > max_count:
            return len(value_indices), ()
        counts = np.bincount(codes, minlength=len(values))[value_indices]
        return len(value_indices), tuple(
            _as_texts(values.take(value_indices[np.argsort(-counts, kind="stable")])).to_pylist()
        )

    def to_numpy(self) -> NDArray[np.str_]:
        """Return the cells as a NumPy array of texts, (n,)."""
        codes, texts = self.encode_texts()
        return np.take(np.array(texts.to_pylist(), np.str_), codes)

    def take_texts(self, rows: Sequence[int]) -> list[str]:
        """Return the texts of the cells in these rows."""
        codes, texts = self.encode_texts()
        return list(texts.take(codes[list(rows)]).to_pylist())


def _as_texts(values: Any) -> Any:
    pa, _ = _import_arrow()
    return values if pa.types.is_string(values.type) else pa.array(map(_as_text, values.to_pylist()), pa.string())


def _missing_mask(values: Any) -> NDArray[np.bool_]:
    """Return the mask of the missing values of an Arrow array.

    A number is missing if it is null or not finite.  Any other value is missing if its text is one of
    `MISSING_TEXTS`, and the text of null is empty.
    """
    pa, compute = _import_arrow()
    return np.asarray(
        compute.invert(compute.fill_null(compute.is_finite(values), False))
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        else compute.is_in(compute.utf8_lower(_as_texts(values)), value_set=pa.array(MISSING_TEXTS, pa.string()))
    ).astype(np.bool_)


def _cast_numbers(values: Any) -> NDArray[np.float64] | None:
    """Cast values to finite numbers with Arrow, NaN for missing ones, or return None if that fails.

    Args:
        values: Arrow array of n values.

    Returns:
        Numbers, (n,), or None if the values are neither texts, integers nor floats, or Arrow cannot cast each
        that is not missing to a finite float64.
    """
    pa, compute = _import_arrow()
    arrow_type, is_missing = values.type, _missing_mask(values)
    if not (pa.types.is_string(arrow_type) or pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type)):
        return None
    try:
        numbers = np.asarray(
            compute.cast(compute.if_else(pa.array(is_missing), None, values), pa.float64()), np.float64
        )
    except pa.ArrowInvalid:
        return None  # Arrow cannot read a cell, or a float would round an integer
    return numbers if np.array_equal(np.isfinite(numbers), ~is_missing) else None


class ColumnBuilder:
    """Column of texts under construction: its different texts, and for each cell the index of its text.

    Until a block of cells is merged, its indices are those among the block's own texts.
    """

    def __init__(self) -> None:
        pa, _ = _import_arrow()
        self._distinct_texts = pa.array([], pa.string())
        self._codes: list[NDArray[np.signedinteger[Any]]] = []
        self._blocks: list[tuple[NDArray[np.signedinteger[Any]], Any]] = []

    def add(self, block: Any) -> None:
        """Add a block of cells, a dictionary array of texts without nulls, and trim the texts."""
        _, compute = _import_arrow()
        texts = compute.utf8_trim_whitespace(block.dictionary)
        self._blocks.append((_narrow_codes(np.asarray(block.indices), len(texts)), texts))
        if len(self._blocks) == _BLOCKS_PER_MERGE:
            self._merge()

    def _merge(self) -> None:
        """Merge the texts of the stored blocks into `_distinct_texts`, and replace the blocks by codes.

        A stored block is a pair: a code for each cell, and the block's own texts, in which a trimmed text may
        occur twice.  `_distinct_texts` grows at its end, so that codes of earlier blocks stay valid.
        """
        pa, compute = _import_arrow()
        texts = pa.chunked_array([block_texts for _, block_texts in self._blocks], pa.string())
        self._distinct_texts = compute.unique(pa.chunked_array([self._distinct_texts, *texts.chunks]))
        # New code of each block's texts, with the blocks one after another.
        new_codes = np.asarray(compute.index_in(texts, value_set=self._distinct_texts))
        starts = np.cumsum([0, *(len(block_texts) for _, block_texts in self._blocks)])
        # `starts` has one more entry, the number of all texts.
        block_codes = [new_codes[start:][codes] for start, (codes, _) in zip(starts, self._blocks, strict=False)]
        self._codes += [_narrow_codes(cell_codes, len(self._distinct_texts)) for cell_codes in block_codes]
        self._blocks = []

    def build(self) -> CellColumn:
        """Return a column of all added cells, and drop their codes here."""
        pa, _ = _import_arrow()
        self._merge()
        codes = np.concatenate(self._codes or [np.zeros(0, np.int8)])
        self._codes = []
        return CellColumn(pa.DictionaryArray.from_arrays(pa.array(codes), self._distinct_texts))


def _narrow_codes(codes: NDArray[Any], count: int) -> NDArray[np.signedinteger[Any]]:
    return codes.astype(np.int8 if count < 2**7 else np.int16 if count < 2**15 else np.int32)


def parse_number(text: str) -> float | None:
    """Return the finite number that a text spells, or None if it spells none.

    In any case of letters, true is 1 and false is 0.  A detection limit such as <0.8 is the limit, and 5 % is 5.

    Example:
        >>> parse_number("1.5"), parse_number("<0.8"), parse_number("none")
        (1.5, 0.8, None)
    """
    lowered = text.lower()
    if lowered in ("true", "false"):
        return float(lowered == "true")
    try:
        number = float(_LIMIT_OR_PERCENT.sub("", text))
    except ValueError:
        return None
    return None if "_" in text or number - number != 0.0 else number  # Python reads 1_000, inf and nan as well


@dataclass(frozen=True)
class RawTable:
    """Table of cells, whose columns have one length."""

    source: str
    """Name of the table in messages, such as the path of its file."""
    columns: Mapping[str, CellColumn]
    """Readable columns by name, in the order of the file."""
    row_unit: str
    """Unit of the numbers of `locate_rows`, "line" or "row"."""
    locate_rows: Callable[[Sequence[int]], list[int]]
    """Function of row indices that returns the lines of the file, or the rows counted from 1."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Reason why a column is passed over, by its name, or by "column 3" if the third has no name."""

    @staticmethod
    def from_texts(source: str, columns: Mapping[str, Sequence[str]]) -> "RawTable":
        """Return a table of texts in memory, whose rows count from 1.

        Args:
            source: Name of the table in messages.
            columns: Cells of each column, as many in each.

        Example:
            >>> table = RawTable.from_texts("memory", {"age": ["1", "2"]})
            >>> len(table), table.describe_cell(1, "age")
            (2, "memory, row 2, column 'age': '2'")
        """
        return RawTable(
            source, {name: CellColumn.from_texts(cells) for name, cells in columns.items()}, "row", _number_rows
        )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str) -> CellColumn:
        """Return a column by its name.

        Raises:
            InputError: The table has no such column, or the column cannot be read.
        """
        if name in self.unreadable:
            raise InputError(f"{self.source}, column {name!r}: {self.unreadable[name]}")
        if name not in self.columns:
            raise InputError(
                f"{self.source}: has no column {name!r}, only "
                f"{sanitize_line(', '.join(map(repr, self.columns)))}{suggestion(name, self.columns)}"
            )
        return self.columns[name]

    def distinct_cells(self, name: str) -> tuple[NDArray[np.signedinteger[Any]], "RawTable"]:
        """Return the different cells of a column of texts, so that each is converted only once.

        Returns:
            For each record the row of its cell in a second table, (n,), and the second table, of the column's
            different cells.  For a column without texts the second table is this one.

        Raises:
            InputError: The table has no column of this name, or the column cannot be read.
        """
        cells = self.column(name)
        pa, _ = _import_arrow()
        if not pa.types.is_dictionary(cells.arrow_array.type):
            return np.arange(len(cells)), self
        codes, values = cells.encode_values()
        value_cells = pa.DictionaryArray.from_arrays(pa.array(np.arange(len(values), dtype=np.int32)), values)
        return codes, RawTable(self.source, {name: CellColumn(value_cells)}, self.row_unit, self.locate_rows)

    def describe_cell(self, row: int, column: str) -> str:
        """Describe the location and the sanitized text of a cell, cut if it is long, for an error message."""
        return (
            f"{self.source}, {self.row_unit} {self.locate_rows([row])[0]}, column {column!r}: "
            f"{sanitize_line(repr(self.columns[column][row]), _MAX_TEXT_LENGTH)}"
        )

    def duplicate_count(self) -> int:
        """Number of records that equal an earlier one in every readable column, by a hash of 64 bits."""
        hashes = np.zeros(len(self), np.uint64)
        for cells in self.columns.values():
            hashes = (hashes ^ cells.encode_values()[0].astype(np.uint64)) * _HASH_MULTIPLIER
            hashes ^= hashes >> np.uint64(29)
        return len(self) - len(np.unique(hashes))


def is_table_path(name: str) -> bool:
    """Whether a data set's name is the path of a table.

    Example:
        >>> is_table_path("patients.csv"), is_table_path("mnist")
        (True, False)
    """
    return name.lower().endswith(TABLE_SUFFIXES)


def read_table(path: Path, cell_format: CellFormat = CellFormat()) -> RawTable:  # noqa: B008 - immutable
    """Read the whole file of a table, such as a .csv or .parquet file.

    Args:
        path: The file.
        cell_format: Format of its cells, for any file but .parquet and .xlsx.

    Raises:
        InputError: The file is missing, is not a readable table, or has no records.
    """
    try:
        table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path, cell_format)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file (looked for {path.resolve()})") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: is not in UTF-8 ({error}); save it as 'CSV UTF-8' in a spreadsheet, or, if it is Latin-1, "
            f"with: {'gzip -dc' if path.suffix.lower() == '.gz' else 'cat'} {shlex.quote(str(path))} | "
            f"iconv -f LATIN1 -t UTF-8 > NEW{'.tsv' if '.tsv' in path.name.lower() else '.csv'}"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a table ({error})") from None
    return check_records(table)


def write_rows(table: RawTable, rows: Sequence[int], path: Path) -> None:
    """Write the readable columns of records of a table as a CSV file, in the order of `rows`."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(zip(*(cells.take_texts(rows) for cells in table.columns.values()), strict=True))
    write_text(path, buffer.getvalue())


def open_text(path: Path, cell_format: CellFormat) -> IO[bytes]:
    """Open a table's text in binary mode, as .csv with commas in UTF-8.

    A plain .csv file is opened as it is, unchecked, and another file is converted.

    Raises:
        InputError: The file cannot be converted.
        UnicodeDecodeError: The file has to be converted, and is in neither UTF-8 nor UTF-16.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(2)
    is_plain = path.name.lower().endswith(".csv") and not any(cell_format) and start not in _UTF16_STARTS
    if is_plain and b"\0" not in start:
        return path.open("rb")
    return io.BytesIO(load_add_on_part("table file", "text")(path, cell_format))


def _read_csv(path: Path, cell_format: CellFormat) -> RawTable:
    """Read a text file into columns of texts, block by block.

    Arrow reads the cells.  Python's strict reader reads the header, and checks a file with quotes or with a fault.

    Raises:
        InputError: The file is no table.
        UnicodeDecodeError: The file is in neither UTF-8 nor UTF-16.
        OSError: The file cannot be read.
    """
    pa, _ = _import_arrow()
    from pyarrow import csv as arrow

    header_line, names = next(_iterate_records(path, cell_format), (0, []))
    header, unreadable = _check_header(names, str(path))
    # Arrow counts empty lines before the header as rows, and a header with ends of lines in quotes as one row.  An
    # end of a line is \n, \r or \r\n.
    header_rows = header_line - (text := ",".join(names)).count("\n") - text.count("\r") + text.count("\r\n")
    # Arrow reads `"a"b` as ab, and Python's strict reader refuses it.
    if quoted := _has_quotes(path, cell_format):
        _check_rows(path, cell_format)
    # For Arrow columns are named by their numbers, because names may be missing or occur twice.
    cell_type = pa.dictionary(pa.int32(), pa.string())
    builders = [ColumnBuilder() for _ in header]
    try:
        with (
            open_text(path, cell_format) as file,
            arrow.open_csv(
                file,
                arrow.ReadOptions(
                    column_names=[str(index) for index in range(len(header))],
                    skip_rows_after_names=header_rows,
                    use_threads=False,
                    block_size=_BLOCK_BYTES,
                ),
                arrow.ParseOptions(newlines_in_values=quoted),
                arrow.ConvertOptions(column_types={str(index): cell_type for index in range(len(header))}),
            ) as blocks,
        ):
            for block in blocks:
                for builder, cells in zip(builders, block.columns, strict=True):
                    builder.add(cells)
    except pa.ArrowInvalid as error:
        _check_rows(path, cell_format)  # raises first, with the line, if it finds the fault
        raise InputError(f"{path}: cannot be read as a table ({str(error).splitlines()[0]})") from None
    columns_by_name = {
        name: builder.build() for name, builder in zip(header, builders, strict=True) if name not in unreadable
    }
    pa.default_memory_pool().release_unused()
    return RawTable(
        str(path), columns_by_name, "line", lambda rows: _find_lines(path, cell_format, rows), unreadable
    )


def _iterate_records(path: Path, cell_format: CellFormat) -> Iterator[tuple[int, list[str]]]:
    """Read a file with Python's reader, and yield each record as (number of its last line, cells).

    Lines are counted from 1.  The header is the first record, and empty lines are left out.

    Raises:
        InputError: A record is no CSV, or the file cannot be converted to CSV.
        UnicodeDecodeError: The file is in neither UTF-8 nor UTF-16.
        OSError: The file cannot be read.
    """
    with io.TextIOWrapper(open_text(path, cell_format), encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            for row in reader:
                if row:  # skips empty lines
                    yield reader.line_num, row
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: {error}") from None


def _check_rows(path: Path, cell_format: CellFormat) -> None:
    """Check that every record is CSV with as many values as the header.

    Raises:
        InputError: A record is not, and the message names the line of the first one, or the file cannot be
            converted.
        UnicodeDecodeError: The file is in neither UTF-8 nor UTF-16.
        OSError: The file cannot be read.
    """
    column_count = None
    for line, row in _iterate_records(path, cell_format):
        column_count = len(row) if column_count is None else column_count
        if len(row) != column_count:
            raise InputError(f"{path}, line {line}: has {len(row)} values, and the header names {column_count}")


def _find_lines(path: Path, cell_format: CellFormat, rows: Sequence[int]) -> list[int]:
    """Return the lines at which records end, read from the file again."""
    wanted_rows = set(rows)
    # Record 0 is the header, so that row 0 is record 1.
    lines = {
        record_number - 1: line
        for record_number, (line, _) in enumerate(_iterate_records(path, cell_format))
        if record_number - 1 in wanted_rows
    }
    return [lines[row] for row in rows]


def _number_rows(rows: Sequence[int]) -> list[int]:
    return [row + 1 for row in rows]


def _has_quotes(path: Path, cell_format: CellFormat) -> bool:
    """Whether a quote occurs behind the first line, which may end with a carriage return alone."""
    with open_text(path, cell_format) as file:
        return b'"' in file.readline().partition(b"\r")[2] or any(
            b'"' in block for block in iter(lambda: file.read(1 << 20), b"")
        )


def _read_parquet(path: Path) -> RawTable:
    """Read a .parquet file, column by column.

    Raises:
        InputError: The file is no .parquet file, or has no records, no column that can be read, or no usable
            header.
        OSError: The file cannot be read.
    """
    pa, _ = _import_arrow()
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            return table_from_columns(
                {name: file.read([name]).column(name) for name in names if names.count(name) == 1},
                names,
                str(path),
            )
    except pa.ArrowException as error:
        raise InputError(f"{path}: not a readable .parquet file ({str(error).splitlines()[0]})") from None


def table_from_columns(
    columns: Mapping[str, Any], names: Sequence[str], source: str, unreadable: Mapping[str, str] | None = None
) -> RawTable:
    """Convert columns of Arrow to a table.

    Args:
        columns: Chunked array of each column whose name is unique and not in `unreadable`.
        names: Names of all columns, in their order.
        source: Name of the table in error messages.
        unreadable: Reason why a column is in no Arrow array, by its name, or None.

    Raises:
        InputError: No column can be read, there are no records, or the header cannot be used.
    """
    pa, compute = _import_arrow()
    header, reasons = _check_header(names, source)
    reasons |= {name.strip(): reason for name, reason in (unreadable or {}).items()}
    cells = {}
    for name, label in zip(names, header, strict=True):
        if label in reasons:
            continue
        array = columns[name]
        value_type = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
        if pa.types.is_nested(value_type) or re.match("extension|.*binary", str(value_type)):  # four binary types
            reasons[label] = f"of type {value_type}; expected numbers, words or booleans"
        else:
            try:
                if pa.types.is_date(value_type) or pa.types.is_timestamp(value_type):
                    compute.min_max(array.cast(value_type)).as_py()  # Python refuses other years than 1 to 9999
                cells[label] = _column_from_arrow(array.cast(value_type))
            except (OverflowError, ValueError):
                reasons[label] = f"of type {value_type}, with dates beyond the years 1 to 9999; write it as texts"
    return check_records(RawTable(source, cells, "row", _number_rows, reasons))


def check_records(table: RawTable) -> RawTable:
    """Return a table that has records.

    Raises:
        InputError: The table has no records, or no column that can be read.
    """
    if not len(table):
        raise InputError(
            f"{table.source}: has no records"
            + "".join(f"; column {name!r}: {reason}" for name, reason in list(table.unreadable.items())[:1])
        )
    return table


def _column_from_arrow(column: Any) -> CellColumn:
    """Convert a column of an Arrow table.

    Texts are trimmed and stored once each, and null becomes the empty text.  Other values keep their type.

    Args:
        column: Chunked array of Arrow, neither nested, binary nor a dictionary.
    """
    pa, compute = _import_arrow()
    if not (
        pa.types.is_string(column.type)
        or pa.types.is_large_string(column.type)
        or pa.types.is_string_view(column.type)
    ):
        return CellColumn(column)
    builder = ColumnBuilder()
    for block in compute.fill_null(column.cast(pa.string()), "").chunks:
        builder.add(block.dictionary_encode())
    return builder.build()


def _as_text(value: Any) -> str:
    """Return a value's text, for a float that is an integer below 2^53 in size without a point.

    So an integer has one text, even if another record's missing value makes floats of the column.
    """
    return (
        ""
        if value is None
        else str(int(value))
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        else str(value).strip()
    )


def _check_header(names: Sequence[str], source: str) -> tuple[list[str], dict[str, str]]:
    """Check the names of a table's columns, and give reasons for columns that are passed over.

    Args:
        names: Names of the columns, with spaces around them or not.
        source: Name of the table in messages.

    Returns:
        Name of each column without spaces around it, or "column 3" for the third if it has none, and by these
        names the reason why a column is passed over.

    Raises:
        InputError: The header is empty, or is one name with a separator in it, so that it seems to be several.
    """
    labels = [name.strip() or f"column {number}" for number, name in enumerate(names, start=1)]
    if not labels:
        raise InputError(f"{source}: is empty; expected a line with the names of the columns")
    for separator, name in SEPARATORS.items():
        if len(labels) == 1 and separator in labels[0]:
            raise InputError(
                f"{source}: seems to be separated by {name}; give separator = {json.dumps(separator)} in the "
                "table's section, which `fedpriv data inspect` writes"
            )
    return labels, {
        label: "the name is given to several columns; give each its own"
        if name.strip()
        else "is without a name, as R and pandas write the numbers of rows; give it a name, or write the file "
        "with row.names = FALSE or index = False"
        for name, label in zip(names, labels, strict=True)
        if not name.strip() or labels.count(label) > 1
    }


def _import_arrow() -> tuple[Any, Any]:
    import pyarrow
    from pyarrow import compute

    return pyarrow, compute
