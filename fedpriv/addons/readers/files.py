"""Convert files of tables to .csv text with commas.

The files are compressed texts, spreadsheets, texts in UTF-16, and texts with other separators or marks in numbers.
The result is in UTF-8, but a text that is only decompressed keeps its encoding.
"""

import codecs
import csv
import gzip
import importlib
import io
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.data.cells import CellFormat, parse_number

_SEPARATED_DIGITS = "[+-]?[1-9][0-9]{0,2}(?:MARK[0-9]{3})+"
_DIGITS = "[+-]?[0-9]*"
_EXPONENT = "(?:[eE][+-]?[0-9]+)?"


def read_text(path: Path, cell_format: CellFormat) -> bytes:
    """Return the content of a table's file as .csv with commas, and with points in numbers of the format.

    Args:
        path: File of a table, but not .parquet.
        cell_format: Format of the cells of a text file.

    Raises:
        InputError: The file cannot be converted.
        UnicodeDecodeError: A text that has to be converted is in neither UTF-8 nor UTF-16.
        OSError: The file cannot be read.
    """
    status = path.stat()
    return _convert(path, cell_format, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _convert(path: Path, cell_format: CellFormat, size: int, changed: int) -> bytes:
    """Return the result of `read_text`, and cache the last one.

    `size` (bytes) and `changed` (time in nanoseconds) are those of the file, so that a changed file is read again.
    """
    content = path.read_bytes()
    if path.suffix.lower() == ".xlsx":
        return _rows_as_text(_read_sheet(path, content))
    if path.suffix.lower() == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}: cannot be decompressed ({error}); compress it with gzip") from None
    content = _decode_utf16(content, path)
    separator = cell_format.separator or find_separator(path)
    if separator == "," and not cell_format.decimal and not cell_format.thousands:
        return content
    reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), delimiter=separator, strict=True)
    convert_number = make_converter(cell_format)
    try:
        return _rows_as_text([convert_number(cell.strip()) for cell in row] for row in reader)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from None


def find_separator(path: Path) -> str:
    """Return the usual separator of a file by its name, a tab for .tsv and .tsv.gz, or else a comma."""
    return "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","


def make_converter(cell_format: CellFormat) -> Callable[[str], str]:
    """Return a function that writes a number of this format with a point, and without marks of thousands.

    A number may have the sign of a detection limit, such as <, before it and a percent sign behind it.  A number
    with a point that does not fit the format gets a remark, so that it is not read as a number of another size.
    Other texts stay unchanged, such as 0,123 with commas for thousands, which begins with 0.

    Guarantee: the function depends on the format alone, so that a record's cells depend on the record alone.
    """
    decimal, thousands = cell_format.decimal or ".", cell_format.thousands
    if decimal == "." and not thousands:
        return str
    mark = r"\s" if thousands == " " else re.escape(thousands or "")
    integer_pattern = f"{_SEPARATED_DIGITS.replace('MARK', mark)}|{_DIGITS}" if thousands else _DIGITS
    number = re.compile(rf"([<>≤≥]=?\s*)?({integer_pattern})(?:{re.escape(decimal)}([0-9]*))?({_EXPONENT})(\s*%)?")

    @lru_cache(maxsize=1 << 16)
    def convert(text: str) -> str:
        """Convert one cell."""
        match = number.fullmatch(text)
        if match is None or not (match[2] or match[3]):
            return f"{text} (with a point)" if "." in text and parse_number(text) is not None else text
        limit, digits, decimals, exponent, percent = match.groups("")
        digits = re.sub(mark, "", digits) if thousands else digits
        return f"{limit}{digits}{'.' * bool(decimals)}{decimals}{exponent}{percent}"

    return convert


def _decode_utf16(content: bytes, path: Path) -> bytes:
    """Convert a text in UTF-16 to UTF-8, and return any other content unchanged.

    UTF-16 is recognized by a mark of the byte order at the start, or by a zero among the first two bytes.

    Raises:
        InputError: The content begins like UTF-16 and cannot be decoded.
    """
    if not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" not in content[:2]:
        return content
    encoding = (
        "utf-16" if content[:1] in (b"\xff", b"\xfe") else "utf-16-be" if content[:1] == b"\0" else "utf-16-le"
    )
    try:
        return content.decode(encoding).encode()
    except UnicodeError as error:
        raise InputError(f"{path}: begins as UTF-16 and is not ({error}); save it as 'CSV UTF-8'") from None


def _read_sheet(path: Path, content: bytes) -> list[list[str]]:
    """Return the rows of the only sheet with cells in a spreadsheet, as texts.

    Rows with a text are filled up to the length of the longest one, and other rows are empty.  Without a sheet
    that has cells there are no rows.

    Raises:
        InputError: openpyxl is not installed, the file is no spreadsheet, or several sheets have cells.
    """
    try:
        openpyxl: Any = importlib.import_module("openpyxl")
    except ModuleNotFoundError:
        raise InputError(
            f"{path}: openpyxl, which reads spreadsheets, is missing; pip install 'fedpriv[sheets]', or save it "
            "as CSV"
        ) from None
    try:
        book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
        sheets = {
            sheet.title: [list(row) for row in sheet.iter_rows(values_only=True)] for sheet in book.worksheets
        }
    except Exception as error:  # openpyxl raises many kinds for a damaged file
        reason = sanitize_line(str(error))
        raise InputError(
            f"{path}: not a readable spreadsheet ({reason}); save it as .xlsx again, or as CSV"
        ) from None
    filled = [title for title, rows in sheets.items() if any(value is not None for row in rows for value in row)]
    if len(filled) > 1:
        raise InputError(
            f"{path}: the sheets {', '.join(map(repr, filled))} have cells; give a file with one of them"
        )
    rows = [[_cell_text(value) for value in row] for row in (sheets[filled[0]] if filled else [])]
    width = max((index + 1 for row in rows for index, text in enumerate(row) if text), default=0)
    return [[*row, *[""] * width][:width] if any(row) else [] for row in rows]


def _rows_as_text(rows: Iterable[Sequence[str]]) -> bytes:
    """Return rows as .csv with commas in UTF-8, and an empty line for a row without cells."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")  # with "\n" a carriage return in a cell is not quoted
    for row in rows:
        if row:
            writer.writerow(row)
        else:
            buffer.write("\r\n")
    return buffer.getvalue().encode()


def _cell_text(value: Any) -> str:
    """Return a cell's text, with whole numbers below 2^53 in size without a point.

    Midnights are written as year-month-day.  An empty cell has the text "", and a truth value "true" or "false".
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, datetime) and not (value.hour or value.minute or value.second or value.microsecond):
        return value.date().isoformat()
    return value.isoformat() if isinstance(value, date) else str(value)
