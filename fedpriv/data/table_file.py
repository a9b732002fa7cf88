"""A table as it lies on the disk: .csv (commas, one header line, UTF-8) or .parquet, as columns of texts."""

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError, printable, suggestion
from fedpriv.files import write_text

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
