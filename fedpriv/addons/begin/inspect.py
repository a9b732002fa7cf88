"""Inspection of a table for its owner: a summary of its columns, and a schema to start from.

Both are read from the records.  Publishing them is a release without noise.

A *cell* is the value of a column in one record.  The distinct texts of a column are its *words*.  *Odd cells* are
cells without a number in a column where nearly all have one.  The *role* of a column is to be the target, the site
(a silo's name), the person or the split ("train" or "test").  Other columns may become features.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

import numpy as np

from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.data.cells import CellColumn, RawTable, parse_number
from fedpriv.data.encode import TableRows
from fedpriv.data.partition import index_persons
from fedpriv.data.schema import OTHER_WORD, FeatureColumn, TableSchema

MAX_WORDS = 50
"""Most words of a column of words that becomes features.  One of more is left out, unless it has a role."""
MAX_CLASS_CODES = 10
"""Most distinct integers of a target that is treated as codes of classes."""
_MIN_OCCURRENCES = 5  # smallest mean number of records of such a code
_MAX_SHOWN_WORDS = 8
_MIN_NUMBER_SHARE = 0.9
"""Smallest share of numbers among the present cells of a column of numbers with odd cells.

Also the smallest share of a column's words that have to look like dates or numbers for a remedy.
"""
_MIN_DISTINCT_NUMBERS = 10
_MAX_SHOWN_ODD = 3
_MAX_LISTED_WORDS = 10_000
"""Most distinct words of a column that are listed."""
_LIMIT, _PERCENT = re.compile(r"[<>≤≥].*"), re.compile(r".*%")
_REMEDIES = (
    (
        re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+"),
        "they seem to be numbers with commas, and three digits follow each: give --thousands , if 1,234 is above "
        "a thousand, or --decimal , if it is between 1 and 2",
    ),
    (
        re.compile(r"(?![-+]?[1-9]\d{0,2}(,\d{3})+$)[-+]?[\d.]*,\d+"),
        "they seem to be numbers with decimal commas: give --decimal ,",
    ),
    (
        re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}"),
        "they seem to be dates: give numbers, such as years since a day",
    ),
)


@dataclass(frozen=True)
class ColumnSummary:
    """Summary of a column of numbers, with a `span`, or of words, or of numbers with a few odd cells."""

    name: str
    records: int
    """Number of cells, missing ones included."""
    missing: int
    """Number of missing cells."""
    span: tuple[float, float] | None
    """Smallest and largest number, or None for a column of words, or of numbers with odd cells."""
    distinct: int
    """Number of distinct values as they are written, missing ones not included."""
    words: tuple[str, ...]
    """Texts of the distinct values, the most frequent first, or empty if there are more than 10,000."""
    odd_cells: tuple[str, ...] = ()
    """Location and content of the first three odd cells, or empty if the column has none."""
    odd_count: int = 0
    """Number of odd cells."""

    @property
    def is_numeric(self) -> bool:
        return self.span is not None

    @property
    def is_usable(self) -> bool:
        """Whether the column can become features without changes.

        A column of numbers needs two different ones, all of them below 1e307 in size, and a column of words 2 to
        50 of them.  A column with odd cells is not usable.
        """
        if self.span is not None:
            return self.span[0] < self.span[1] and max(map(abs, self.span)) < 1e307
        return not self.odd_cells and 2 <= self.distinct <= MAX_WORDS

    @property
    def has_class_codes(self) -> bool:
        """Whether the column has at most 10 distinct integers, each with 5 occurrences or more on average."""
        if not self.is_numeric or self.distinct > MAX_CLASS_CODES:
            return False
        are_integers = all(
            (number := parse_number(word)) is not None and number.is_integer() for word in self.words
        )
        return are_integers and self.records - self.missing >= _MIN_OCCURRENCES * self.distinct

    def describe(self) -> str:
        """Describe the column's values, missing cells and remedies in a line.

        Numbers are described by their range, and by how detection limits and percents are read.  Words are
        described by their number and the most frequent ones, and odd cells by a few of them.  A remedy is added to
        words that look like dates or like numbers with commas.  Without listed `words` the line has no examples.
        """
        gaps = f", {self.missing} missing" if self.missing else ""
        if self.odd_cells:
            return (
                f"{self.describe_odd_cells()}{gaps}; mend what is wrong, and empty a cell whose value nobody knows"
            )
        if self.span is not None:
            return f"numbers from {self.span[0]:g} to {self.span[1]:g}{gaps}{self._describe_marks()}"
        examples = ", ".join(sanitize_line(word, 30) for word in self.words[:_MAX_SHOWN_WORDS])
        more = f" and {self.distinct - _MAX_SHOWN_WORDS} more" if len(self.words) > _MAX_SHOWN_WORDS else ""
        min_count = max(1.0, _MIN_NUMBER_SHARE * len(self.words))
        remedy = "".join(
            f"; {advice}"
            for kind, advice in _REMEDIES
            if sum(map(bool, map(kind.fullmatch, self.words))) >= min_count
        )
        return f"{self.distinct} words{': ' * bool(examples)}{examples}{more}{gaps}{remedy}"

    def _describe_marks(self) -> str:
        """Describe how detection limits and percents among the numbers are read, or return "".

        A detection limit is a number after "<" or the like.  Only listed texts are looked at (`words`).
        """
        limits = [word for word in self.words if _LIMIT.fullmatch(word)]
        percents = [word for word in self.words if _PERCENT.fullmatch(word)]
        text = f"; limits such as {sanitize_line(limits[0], 30)} are read as the limit" if limits else ""
        if percents:
            text += f"; {sanitize_line(percents[0], 30)} is read as {parse_number(percents[0]):g}"
        if percents and len(percents) < len(self.words):
            text += ", and other cells have no percent sign: write all cells in one way"
        return text

    def describe_odd_cells(self) -> str:
        """Describe the number of cells that are no numbers, and the first of them."""
        numbers, cells = self.records - self.missing - self.odd_count, self.odd_count
        more = f" and {cells - _MAX_SHOWN_ODD} more" if cells > _MAX_SHOWN_ODD else ""
        odd_text = "1 cell that is none" if cells == 1 else f"{cells} cells that are none"
        return f"{numbers} numbers, and {odd_text}: {', '.join(self.odd_cells)}{more}"


@dataclass(frozen=True)
class PersonCounts:
    """Number of persons, number of persons with several records, and most records of a person."""

    count: int
    repeated_count: int
    max_records: int


def count_persons(encoded: TableRows) -> PersonCounts | None:
    """Count the persons of a table, or return None if it has no column of persons."""
    if encoded.persons is None:
        return None
    records = np.bincount(index_persons(encoded.persons)[1])
    return PersonCounts(len(records), int((records > 1).sum()), int(records.max()))


def summarize_columns(table: RawTable) -> list[ColumnSummary]:
    """Summarize the columns of a table."""
    return [_summarize_column(table, name, cells) for name, cells in table.columns.items()]


def _summarize_column(table: RawTable, name: str, cells: CellColumn) -> ColumnSummary:
    """Summarize a column as numbers, as numbers with some odd cells, or as words.

    A column of "true" and "false" is one of words, and so is one of missing cells only.  Cells that are no numbers
    are odd if the column has ten different numbers or more, and they are at most a tenth of its present cells.

    Args:
        table: The table, which locates the rows of odd cells in its file.
        name: Name of the column.
        cells: Cells of the column.
    """
    numbers, missing = cells.to_numbers(), int(cells.is_missing.sum())
    distinct, vocabulary = cells.count_values(_MAX_LISTED_WORDS)
    # The vocabulary is empty if it is too large to be listed, so that the number of words counts, too.
    are_booleans = distinct <= 2 * MAX_CLASS_CODES and {word.lower() for word in vocabulary} <= {"true", "false"}
    odd_rows = np.flatnonzero(np.isnan(numbers) & ~cells.is_missing)
    if distinct and not odd_rows.size and not are_booleans:
        span = (float(np.nanmin(numbers)), float(np.nanmax(numbers)))
        return ColumnSummary(name, len(cells), missing, span, distinct, vocabulary)
    has_many_numbers = len(np.unique(numbers[~np.isnan(numbers)])) >= _MIN_DISTINCT_NUMBERS
    if not has_many_numbers or len(cells) - missing - len(odd_rows) < _MIN_NUMBER_SHARE * (len(cells) - missing):
        return ColumnSummary(name, len(cells), missing, None, distinct, vocabulary)
    first_rows = odd_rows[:_MAX_SHOWN_ODD].tolist()
    locations = zip(table.locate_rows(first_rows), first_rows, strict=True)
    odd_cells = tuple(
        f"{table.row_unit} {location}: {sanitize_line(repr(cells[row]), 30)}" for location, row in locations
    )
    return ColumnSummary(name, len(cells), missing, None, distinct, vocabulary, odd_cells, len(odd_rows))


def describe_table(
    table: RawTable,
    columns: Sequence[ColumnSummary],
    target: str,
    *,
    regression: bool | None = None,
    site: str | None = None,
    person: str | None = None,
    split: str | None = None,
) -> TableSchema:
    """Describe a table by a schema that is not public, with ranges rounded outwards and sorted words.

    Columns without a role become features if they are usable (`ColumnSummary.is_usable`).
    With a column of splits, the share of test records is that of the table, rounded to two decimals and at most
    0.99.  `missing` is "drop" if the target has missing cells, and else "refuse".

    Args:
        table: The table.
        columns: Summaries of all its columns.
        target: Column to predict.
        regression: Whether the target is real, or None for a guess.  A target of numbers is then real, unless it
            has two words only, or a few integers that are codes of classes (`ColumnSummary.has_class_codes`).
        site: Column of sites, each of which becomes a silo, or None.
        person: Column of persons, or None if each record is another person's.
        split: Column with "train" and "test", or None.

    Raises:
        InputError: If a column is missing, cannot be read or has two roles, the target cannot be predicted, the
            column of sites is empty or has more than 10,000 sites, or no column can become a feature.
    """
    columns_by_name = {column.name: column for column in columns}
    _check_roles(table, {"target": target, "site": site, "person": person, "split": split})
    # The target is real, or has classes.
    target_column = columns_by_name[target]
    if target_column.odd_cells and regression is not False:
        raise InputError(
            f"{table.source}, column {target!r}: {target_column.describe_odd_cells()}; "
            "mend it: a target holds one or the other"
        )
    is_real = (
        regression
        if regression is not None
        else target_column.is_numeric and target_column.distinct > 2 and not target_column.has_class_codes
    )
    location = f"{table.source}, column {target!r}:"
    refuse(
        {
            f"{location} is empty, so there is nothing to predict": not target_column.distinct,
            f"{location} holds words, so it is no real target": is_real and not target_column.is_numeric,
            f"{location} holds a number of size 1e307 or more; empty its cell if nobody knows the value": is_real
            and max(map(abs, target_column.span or (0.0,))) >= 1e307,
            f"{location} holds one value only, which nothing has to predict": (
                target_column.distinct < 2 or (is_real and not target_column.is_usable)
            ),
            f"{location} {target_column.distinct} different values are too many for classes": not is_real
            and not target_column.words,
            f"{table.source}, column {site!r}: holds more than {_MAX_LISTED_WORDS:,} sites": site is not None
            and bool(columns_by_name[site].distinct)
            and not columns_by_name[site].words,
        }
    )
    # Columns without a role become features, and the shares of the split are read off the table.
    features = {
        name: _make_column(column)
        for name, column in columns_by_name.items()
        if name not in (target, site, person, split) and column.is_usable
    }
    if not features:
        raise InputError(f"{table.source}: no column beside the target could become a feature")
    return TableSchema(
        public=False,
        target=target,
        classes=None
        if is_real
        else tuple(sorted(target_column.words, key=_parse_number if target_column.has_class_codes else str)),
        range=round_outwards(*(target_column.span or (0.0, 0.0))) if is_real else None,
        columns=features,
        site=site,
        sites=() if site is None else tuple(sorted(columns_by_name[site].words)),
        person=person,
        split=split,
        test_share=None
        if split is None
        else min(0.99, round(float(np.mean(table.column(split).vocabulary_indices(["test"]) == 0)), 2)),
        missing="drop" if target_column.missing else "refuse",
    )


def _parse_number(word: str) -> float:
    number = parse_number(word)
    assert number is not None
    return number


def _check_roles(table: RawTable, roles: Mapping[str, str | None]) -> None:
    """Check that the columns with roles exist, and that each has a single role.

    Args:
        table: The table.
        roles: Name of the column by role, or None for a role without a column.

    Raises:
        InputError: If a column is missing, cannot be read or has two roles, or the column of sites is empty.
    """
    role_of: dict[str, str] = {}
    for role, name in roles.items():
        if name is None:
            continue
        cells = table.column(name)  # refuses a column that is not there or cannot be read
        if name in role_of:
            raise InputError(
                f"{table.source}, column {name!r}: is named as {role_of[name]} and as {role}; it can have one role"
            )
        if role == "site" and cells.is_missing.all():
            raise InputError(f"{table.source}, column {name!r}: is empty, so it says of no record whose it is")
        role_of[name] = role


def find_unused_columns(table: RawTable, schema: TableSchema) -> list[str]:
    """Return the columns that have no role in `schema` and are no features."""
    roles = {schema.target, schema.site, schema.person, schema.split, *schema.columns}
    return [name for name in table.columns if name not in roles]


def _make_column(column: ColumnSummary) -> FeatureColumn:
    if column.span is not None:
        low, high = round_outwards(*column.span)
        return FeatureColumn(range=(low, high), missing=(low + high) / 2.0 if column.missing else None)
    return FeatureColumn(
        values=tuple(dict.fromkeys((*sorted(column.words), OTHER_WORD))),
        missing=OTHER_WORD if column.missing else None,
    )


def round_outwards(low: float, high: float) -> tuple[float, float]:
    """Round bounds outwards to multiples of the span's power of ten: 17 … 83 becomes 10 … 90.

    The power is the largest one that is not above the span.

    Args:
        low: Lower bound.
        high: Upper bound, above `low`.
    """
    power = Decimal(1).scaleb(Decimal(high - low).adjusted())
    return (
        float(Decimal(repr(float(low))).quantize(power, ROUND_FLOOR)) + 0.0,
        float(Decimal(repr(float(high))).quantize(power, ROUND_CEILING)) + 0.0,  # -0.0 becomes 0.0
    )
