"""Inspect a table for its owner: what it holds, and a description to start from.

All of it is read from the records: to publish it is to release it, without noise.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.data.cells import CellColumn, RawTable, parse_number
from fedpriv.data.encode import TableRows
from fedpriv.data.partition import index_persons
from fedpriv.data.schema import OTHER_WORD, FeatureColumn, TableSchema

MAX_WORDS = 50
"""A column of words that has more of them is taken for a name or a text, and left out."""
MAX_CLASS_CODES = 10
"""Whole numbers of a target that are taken for codes of classes: so many different ones, each often."""
_MIN_OCCURRENCES = 5
_MAX_SHOWN_WORDS = 8
_MIN_NUMBER_SHARE = 0.9
"""The share of cells that are numbers in a column of numbers with mistakes; one with codes has fewer numbers."""
_MIN_DISTINCT_NUMBERS = 10
_MAX_SHOWN_ODD = 3
_MAX_LISTED_WORDS = 10_000
"""Different words of a column that are listed at all."""
_REMEDIES = (
    (re.compile(r"[-+]?[\d.]*\d,\d+"), "they seem to be numbers with decimal commas: write points"),
    (
        re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}"),
        "they seem to be dates: give numbers, such as years since a day",
    ),
)


@dataclass(frozen=True)
class ColumnSummary:
    """One column: its numbers' span, or its words from the most frequent on (none of more than 10,000).

    `odd` says where the first cells stand that are no numbers, and what they hold, where nearly all others are;
    there are `odd_count` of them.
    """

    name: str
    records: int
    missing: int
    span: tuple[float, float] | None
    distinct: int
    words: tuple[str, ...]
    odd_cells: tuple[str, ...] = ()
    odd_count: int = 0

    @property
    def is_numeric(self) -> bool:
        return self.span is not None

    @property
    def is_usable(self) -> bool:
        """Whether it can become features as it is."""
        if self.span is not None:
            return self.span[0] < self.span[1] and math.isfinite(self.span[1] - self.span[0])
        return not self.odd_cells and 2 <= self.distinct <= MAX_WORDS

    @property
    def has_class_codes(self) -> bool:
        """Whether it holds a few whole numbers only, each of them often."""
        if not self.is_numeric or self.distinct > MAX_CLASS_CODES:
            return False
        whole = all((number := parse_number(word)) is not None and number.is_integer() for word in self.words)
        return whole and self.records - self.missing >= _MIN_OCCURRENCES * self.distinct

    def describe(self) -> str:
        gaps = f", {self.missing} missing" if self.missing else ""
        if self.odd_cells:
            return (
                f"{self.describe_odd_cells()}{gaps}; mend what is wrong, and empty a cell whose value nobody knows"
            )
        if self.span is not None:
            return f"numbers from {self.span[0]:g} to {self.span[1]:g}{gaps}"
        shown = ", ".join(sanitize_line(word, 30) for word in self.words[:_MAX_SHOWN_WORDS])
        more = f" and {self.distinct - _MAX_SHOWN_WORDS} more" if self.distinct > _MAX_SHOWN_WORDS else ""
        remedy = "".join(f"; {words}" for kind, words in _REMEDIES if self.words and self._nearly_all_match(kind))
        return f"{self.distinct} words{': ' * bool(shown)}{shown}{more}{gaps}{remedy}"

    def _nearly_all_match(self, kind: re.Pattern[str]) -> bool:
        """Whether nearly all words are of a kind."""
        return sum(kind.fullmatch(word) is not None for word in self.words) >= _MIN_NUMBER_SHARE * len(self.words)

    def describe_odd_cells(self) -> str:
        """Count the cells of a column of numbers that are none, and return the first of them."""
        numbers, cells = self.records - self.missing - self.odd_count, self.odd_count
        more = f" and {cells - _MAX_SHOWN_ODD} more" if cells > _MAX_SHOWN_ODD else ""
        which = "1 cell that is none" if cells == 1 else f"{cells} cells that are none"
        return f"{numbers} numbers, and {which}: {', '.join(self.odd_cells)}{more}"


@dataclass(frozen=True)
class PersonCounts:
    """Number of persons, of those with several records, and the most records that one has."""

    count: int
    repeated_count: int
    max_records: int


def count_persons(encoded: TableRows) -> PersonCounts | None:
    """The persons of a table; None if it does not say whose a record is."""
    if encoded.persons is None:
        return None
    records = np.bincount(index_persons(encoded.persons)[1])
    return PersonCounts(len(records), int((records > 1).sum()), int(records.max()))


def summarize_columns(table: RawTable) -> list[ColumnSummary]:
    """Every column of a table."""
    return [_summarize_column(table, name, cells) for name, cells in table.columns.items()]


def _summarize_column(table: RawTable, name: str, cells: CellColumn) -> ColumnSummary:
    numbers, missing = cells.to_numbers(), int(cells.is_missing.sum())
    distinct, words = cells.count_values(_MAX_LISTED_WORDS)
    spelled_out = distinct <= 2 * MAX_CLASS_CODES and {word.lower() for word in words} <= {"true", "false"}
    odd = np.flatnonzero(np.isnan(numbers) & ~cells.is_missing)
    if distinct and not odd.size and not spelled_out:
        span = (float(np.nanmin(numbers)), float(np.nanmax(numbers)))
        return ColumnSummary(name, len(cells), missing, span, distinct, words)
    many = len(np.unique(numbers[~np.isnan(numbers)])) >= _MIN_DISTINCT_NUMBERS
    if not many or len(odd) > (1.0 - _MIN_NUMBER_SHARE) * (len(cells) - missing):
        return ColumnSummary(name, len(cells), missing, None, distinct, words)
    first = odd[:_MAX_SHOWN_ODD].tolist()
    places = zip(table.locate_rows(first), first, strict=True)
    shown = tuple(f"{table.row_unit} {place}: {sanitize_line(repr(cells[row]), 30)}" for place, row in places)
    return ColumnSummary(name, len(cells), missing, None, distinct, words, shown, len(odd))


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
    """A description with everything that was seen, public = false: ranges are rounded outwards, words sorted.

    `regression` is guessed if it is None: a target of numbers is real, but for two numbers and for a few whole
    ones, which are codes of classes.  InputError for a column that is not there, or a target that says nothing.
    """
    seen = {column.name: column for column in columns}
    _check_roles(table, {"target": target, "site": site, "person": person, "split": split})
    aim = seen[target]
    if aim.odd_cells and regression is not False:
        raise InputError(
            f"{table.source}, column {target!r}: {aim.describe_odd_cells()}; mend it: a target holds one or the "
            "other"
        )
    real = (
        regression if regression is not None else aim.is_numeric and aim.distinct > 2 and not aim.has_class_codes
    )
    where = f"{table.source}, column {target!r}:"
    refuse(
        {
            f"{where} holds words, so it is no real target": real and not aim.is_numeric,
            f"{where} holds one value only, which nothing has to predict": (
                aim.distinct < 2 or (real and not aim.is_usable)
            ),
            f"{where} {aim.distinct} different values are too many for classes": not real and not aim.words,
        }
    )
    roles = {target, site, person, split}
    features = {
        name: _make_column(column) for name, column in seen.items() if name not in roles and column.is_usable
    }
    if not features:
        raise InputError(f"{table.source}: no column beside the target could become a feature")
    return TableSchema(
        public=False,
        target=target,
        classes=None if real else tuple(sorted(aim.words, key=_parse_number if aim.has_class_codes else str)),
        range=round_outwards(*(aim.span or (0.0, 0.0))) if real else None,
        columns=features,
        site=site,
        sites=() if site is None else tuple(sorted(seen[site].words)),
        person=person,
        split=split,
        test_share=None
        if split is None
        else min(0.99, round(float(np.mean(table.column(split).vocabulary_indices(["test"]) == 0)), 2)),
        missing="drop" if aim.missing else "refuse",
    )


def _parse_number(word: str) -> float:
    number = parse_number(word)
    assert number is not None
    return number


def _check_roles(table: RawTable, roles: Mapping[str, str | None]) -> None:
    """InputError for a column that is not there, that has two roles, or a site that no record names."""
    role_of: dict[str, str] = {}
    for role, name in roles.items():
        if name is None:
            continue
        cells = table.column(name)
        if name in role_of:
            raise InputError(
                f"{table.source}, column {name!r}: is named as {role_of[name]} and as {role}; it can have one role"
            )
        if role == "site" and cells.is_missing.all():
            raise InputError(f"{table.source}, column {name!r}: is empty, so it says of no record whose it is")
        role_of[name] = role


def find_unused_columns(table: RawTable, schema: TableSchema) -> list[str]:
    """The columns that have no role in `schema`."""
    roles = {schema.target, schema.site, schema.person, schema.split, *schema.columns}
    return [name for name in table.columns if name not in roles]


def _make_column(seen: ColumnSummary) -> FeatureColumn:
    if seen.span is not None:
        low, high = round_outwards(*seen.span)
        return FeatureColumn(range=(low, high), missing=(low + high) / 2.0 if seen.missing else None)
    words = sorted(seen.words)
    return FeatureColumn(
        values=tuple(dict.fromkeys((*words, OTHER_WORD))), missing=OTHER_WORD if seen.missing else None
    )


def round_outwards(low: float, high: float) -> tuple[float, float]:
    """The nearest bounds outside that have one digit behind the size of the span: 17 … 83 becomes 10 … 90."""
    step = 10.0 ** math.floor(math.log10(high - low))
    return math.floor(low / step) * step, math.ceil(high / step) * step
