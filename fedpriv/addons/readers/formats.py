"""Format of a table's cells, found in its records: the separator, and the marks in numbers.

The search reads the records, and so is for their owner.  A format that a scenario or a policy names is public.
"""

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fedpriv.addons.readers.files import find_separator, make_converter
from fedpriv.core.errors import InputError
from fedpriv.data.cells import SEPARATORS, CellFormat, open_text, parse_number
from fedpriv.data.tables import read_raw_table

_MARKS = ((None, None), (None, ","), (None, " "), (None, "'"), (",", None), (",", "."), (",", " "), (",", "'"))
"""Marks of decimals and of thousands that are tried, the plainest first."""
_MARKED_DIGIT = re.compile(r"(^|\d)[,'\s](?=\d)|\.\d{3}\.\d")
"""A digit behind a mark that a plain number does not have."""
_MIN_NUMBER_SHARE = 0.9
"""Smallest share of numbers among the different texts of a column of numbers."""
_MAX_TEXTS = 10_000


def find_format(path: Path, known_format: CellFormat) -> CellFormat:
    """Find the separator of a text file's cells, and the marks of decimals and thousands in its numbers.

    The separator is the one that gives the header most names, or commas if these give as many.  In a .tsv file
    commas are not tried, and tabs come first.

    Marks are sought if some text has a comma, an apostrophe or a space before a digit (between two digits, or at
    the start), or points as in 1.234.5.  The marks are those with which most texts read as numbers, where each
    different text of a column counts once.  A column counts for a choice of marks if at least nine in ten of its
    texts are then numbers.  Of a column with more than 10,000 different texts, those in the first 10,000 records
    count.  In doubt, as with 1,234, which may be 1.234 or 1234, the format has no marks.

    Args:
        path: File of a table.  For a Parquet file or a spreadsheet, the known format is returned.
        known_format: Format that the owner knows.  Its separator is kept, and so are its marks if it has any.

    Raises:
        InputError: The file is no readable table.
        OSError: The file cannot be opened to look for the separator.
    """
    if path.suffix.lower() in (".parquet", ".xlsx"):
        return known_format
    separator = known_format.separator or _find_separator(path)
    if known_format.decimal or known_format.thousands:
        return CellFormat(separator, known_format.decimal, known_format.thousands)
    table = read_raw_table(path, CellFormat(separator))
    first_rows = range(min(_MAX_TEXTS, len(table)))
    columns = [
        column.count_values(_MAX_TEXTS)[1] or tuple(dict.fromkeys(column.take_texts(first_rows)))
        for column in table.columns.values()
    ]
    if not any(_MARKED_DIGIT.search(text) for texts in columns for text in texts):
        return CellFormat(separator)
    totals: list[tuple[int, float]] = []  # number of texts that the marks make numbers, and their sum
    for marks in _MARKS:
        convert = make_converter(CellFormat(None, *marks))
        scores = [_sum_numbers(texts, convert) for texts in columns]
        totals.append((sum(count for count, _ in scores), sum(value for _, value in scores)))
    max_count = max(count for count, _ in totals)
    best = [index for index, (count, _) in enumerate(totals) if count == max_count]
    # Index 0 is without marks.  Marks that make as many numbers with another sum are a doubt.
    if 0 in best or len({totals[index][1] for index in best}) > 1:
        return CellFormat(separator)
    return CellFormat(separator, *_MARKS[best[0]])


def _find_separator(path: Path) -> str | None:
    """Return the separator with which the header has most names, or None for the file name's usual one."""
    # `open_text` puts commas in place of a .tsv file's tabs, so that "," stands for the usual separator.
    usual = find_separator(path)
    try:
        with open_text(path, CellFormat(usual if usual != "," else None)) as file:
            content = file.read(2**16)
        # The header is the first line that is not empty, and lines may end with a carriage return alone.
        lines = content.decode("utf-8-sig", "ignore").splitlines(keepends=True)
        counts = {
            separator: len(next(filter(None, csv.reader(lines, delimiter=separator)), []))
            for separator in SEPARATORS
        }
    except (UnicodeDecodeError, csv.Error):
        return None  # reading the table says what is wrong
    best = max(counts, key=lambda separator: (counts[separator], separator == ","))
    return None if best == "," else best


def _sum_numbers(texts: Sequence[str], convert: Callable[[str], str]) -> tuple[int, float]:
    """Return how many of a column's texts are numbers once converted, and the sum of these numbers.

    Both are 0 if fewer than nine in ten of the texts are numbers.
    """
    numbers = [number for text in texts if (number := parse_number(convert(text))) is not None]
    return (len(numbers), sum(numbers)) if len(numbers) >= max(1, _MIN_NUMBER_SHARE * len(texts)) else (0, 0.0)


def describe_format(cell_format: CellFormat) -> str:
    """Describe a format for the owner of a table, or return "" for the plain one."""
    parts = [f"cells are separated by {SEPARATORS[cell_format.separator]}"] if cell_format.separator else []
    if cell_format.decimal or cell_format.thousands:
        example = f"1{cell_format.thousands or ''}234{cell_format.decimal or '.'}5"
        parts.append(f"numbers are written as {example}")
    return ", and ".join(parts)


def parse_format(separator: str | None, decimal: str | None, thousands: str | None) -> CellFormat:
    """Return the format that options of a command name.

    Raises:
        InputError: An option has a value that no table has, or decimals and thousands have one mark.
    """
    separator = "\t" if separator in ("tab", "\\t") else separator
    for option, value, values in (
        ("--separator", separator, (*SEPARATORS, "tab")),
        (
            "--decimal",
            "." if decimal is None else decimal,
            tuple(mark for mark in (".", ",") if mark != thousands),
        ),
        ("--thousands", thousands, (",", ".", " ", "'")),
    ):
        if value is not None and value not in values:
            raise InputError(f"{option} {value!r}: expected one of {' '.join(map(repr, values))}")
    return CellFormat(separator, decimal, thousands)
