"""Several files as one table, in which each file is a site unless a column of sites is named."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.extensions import load_add_on_part
from fedpriv.data.cells import CellFormat, RawTable
from fedpriv.data.tables import read_raw_table

JOINED_FILE = "records.csv"
"""Name of the file with the records of several files."""


def find_formats(paths: Sequence[Path], marks: Mapping[str, str | None]) -> list[CellFormat]:
    """Find the formats of the cells of files, as far as options do not name them.

    Args:
        paths: Files of tables.
        marks: Values of the options `separator`, `decimal` and `thousands`, or None.

    Raises:
        InputError: An option is malformed, or a file cannot be read as a table.
        OSError: A text file cannot be opened.
    """
    find = load_add_on_part("table format", "find")
    known_format = load_add_on_part("table format", "parse")(**marks)
    return [find(path, known_format) for path in paths]


def describe_format(path: Path, cell_format: CellFormat) -> str:
    """Describe the format of a file's cells in a line, or return "" for the plain one."""
    text = load_add_on_part("table format", "describe")(cell_format)
    return f"{path}: {text}" if text else ""


def join_files(paths: Sequence[Path], formats: Sequence[CellFormat], site: str | None) -> tuple[RawTable, str]:
    """Return one table of the records of all files, and the name of its column of sites.

    The table has the columns that all files have.  A column that some files lack is listed as unreadable, with the
    reason.  If `site` is None, a column of sites is added, with the name of a record's file up to the first dot.
    It is called "site", or has another name if a file has such a column.

    Args:
        paths: Files of the table.
        formats: Formats of their cells.
        site: Column of sites in each file, or None if each file is a site.

    Raises:
        InputError: A file cannot be read, two files have one name up to its first dot, or the table would have one
            column or none.
    """
    tables = [read_raw_table(path, cell_format) for path, cell_format in zip(paths, formats, strict=True)]
    stems = [path.name.split(".")[0] for path in paths]
    if len(set(stems)) < len(stems):
        raise InputError(f"{', '.join(map(str, paths))}: a site has the name of its file; give each another name")
    names = dict.fromkeys(name for table in tables for name in table.columns)
    columns = {
        name: [text for table in tables for text in table.columns[name].to_numpy().tolist()]
        for name in names
        if all(name in table.columns for table in tables)
    }
    unreadable = {name: reason for table in tables for name, reason in table.unreadable.items()}
    for name in names.keys() - columns.keys():
        without = [str(path) for path, table in zip(paths, tables, strict=True) if name not in table.columns]
        unreadable[name] = unreadable.get(name, f"is not in {sanitize_line(', '.join(without))}")
    if site is None:
        numbered = (f"site {number}" for number in range(len(columns) + len(unreadable) + 1))
        site = next(
            name
            for name in ("site", "site_of_file", f"site of {stems[0]}", *numbered)
            if name not in {*columns, *unreadable}
        )
        columns[site] = [stem for stem, table in zip(stems, tables, strict=True) for _ in range(len(table))]
    if len(columns) < 2:
        raise InputError(
            f"{', '.join(map(str, paths))}: share fewer than two columns, that of sites counted; give each file "
            "the same names"
        )
    joined = RawTable.from_texts(", ".join(map(str, paths)), columns)
    return RawTable(joined.source, joined.columns, joined.row_unit, joined.locate_rows, unreadable), site
