"""Inspect a table for its owner: what it holds, and a description to start from.

All of it is read from the records: to publish it is to release it, without noise.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedpriv.core.errors import InputError, printable, refuse
from fedpriv.data.cells import Cells, RawTable, as_number
from fedpriv.data.encode import Rows
from fedpriv.data.partition import roster
from fedpriv.data.schema import OTHER, Column, TableSchema

MOST_WORDS = 50
"""A column of words that has more of them is taken for a name or a text, and left out."""
FEW_NUMBERS = 10
"""Whole numbers of a target that are taken for codes of classes: so many different ones, each often."""
_OFTEN = 5
_SHOWN = 8
_NEARLY_ALL = 0.9
"""The share of cells that are numbers in a column of numbers with mistakes; one with codes has fewer numbers."""
_MANY_NUMBERS = 10
_SHOWN_ODD = 3
_MOST_CLASSES = 10_000
"""Different words of a column that are listed at all."""
_REMEDIES = (
    (re.compile(r"[-+]?[\d.]*\d,\d+"), "they seem to be numbers with decimal commas: write points"),
    (
        re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}"),
        "they seem to be dates: give numbers, such as years since a day",
    ),
)


@dataclass(frozen=True)
class Seen:
    """One column: its numbers' span, or its words from the most frequent on (none of more than 10,000).

    `odd` says where the first cells stand that are no numbers, and what they hold, where nearly all others are;
    there are `mistaken` of them.
    """

    name: str
    records: int
    missing: int
    span: tuple[float, float] | None
    distinct: int
    words: tuple[str, ...]
    odd: tuple[str, ...] = ()
    mistaken: int = 0

    @property
    def is_numbers(self) -> bool:
        return self.span is not None

    @property
    def usable(self) -> bool:
        """Whether it can become features as it is."""
        if self.span is not None:
            return self.span[0] < self.span[1] and math.isfinite(self.span[1] - self.span[0])
        return not self.odd and 2 <= self.distinct <= MOST_WORDS

    @property
    def codes(self) -> bool:
        """Whether it holds a few whole numbers only, each of them often."""
        if not self.is_numbers or self.distinct > FEW_NUMBERS:
            return False
        whole = all((number := as_number(word)) is not None and number.is_integer() for word in self.words)
        return whole and self.records - self.missing >= _OFTEN * self.distinct

    def line(self) -> str:
        gaps = f", {self.missing} missing" if self.missing else ""
        if self.odd:
            return f"{self.mistakes()}{gaps}; mend what is wrong, and empty a cell whose value nobody knows"
        if self.span is not None:
            return f"numbers from {self.span[0]:g} to {self.span[1]:g}{gaps}"
        shown = ", ".join(printable(word, 30) for word in self.words[:_SHOWN])
        more = f" and {self.distinct - _SHOWN} more" if self.distinct > _SHOWN else ""
        remedy = "".join(f"; {words}" for kind, words in _REMEDIES if self.words and self._all(kind))
        return f"{self.distinct} words{': ' * bool(shown)}{shown}{more}{gaps}{remedy}"

    def _all(self, kind: re.Pattern[str]) -> bool:
        """Whether nearly all words are of a kind."""
        return sum(kind.fullmatch(word) is not None for word in self.words) >= _NEARLY_ALL * len(self.words)

    def mistakes(self) -> str:
        """Count the cells of a column of numbers that are none, and return the first of them."""
        numbers, cells = self.records - self.missing - self.mistaken, self.mistaken
        more = f" and {cells - _SHOWN_ODD} more" if cells > _SHOWN_ODD else ""
        which = "1 cell that is none" if cells == 1 else f"{cells} cells that are none"
        return f"{numbers} numbers, and {which}: {', '.join(self.odd)}{more}"


@dataclass(frozen=True)
class Persons:
    """Number of persons, of those with several records, and the most records that one has."""

    count: int
    several: int
    most: int


def persons_of(encoded: Rows) -> Persons | None:
    """The persons of a table; None if it does not say whose a record is."""
    if encoded.persons is None:
        return None
    records = np.bincount(roster(encoded.persons)[1])
    return Persons(len(records), int((records > 1).sum()), int(records.max()))


def see(table: RawTable) -> list[Seen]:
    """Every column of a table."""
    return [_seen(table, name, cells) for name, cells in table.columns.items()]


def _seen(table: RawTable, name: str, cells: Cells) -> Seen:
    numbers, missing = cells.numbers(), int(cells.missing.sum())
    distinct, words = cells.counted(_MOST_CLASSES)
    spelled_out = distinct <= 2 * FEW_NUMBERS and {word.lower() for word in words} <= {"true", "false"}
    odd = np.flatnonzero(np.isnan(numbers) & ~cells.missing)
    if distinct and not odd.size and not spelled_out:
        span = (float(np.nanmin(numbers)), float(np.nanmax(numbers)))
        return Seen(name, len(cells), missing, span, distinct, words)
    many = len(np.unique(numbers[~np.isnan(numbers)])) >= _MANY_NUMBERS
    if not many or len(odd) > (1.0 - _NEARLY_ALL) * (len(cells) - missing):
        return Seen(name, len(cells), missing, None, distinct, words)
    first = odd[:_SHOWN_ODD].tolist()
    places = zip(table.places(first), first, strict=True)
    shown = tuple(f"{table.place} {place}: {printable(repr(cells[row]), 30)}" for place, row in places)
    return Seen(name, len(cells), missing, None, distinct, words, shown, len(odd))


def describe(
    table: RawTable,
    columns: Sequence[Seen],
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
    if aim.odd and regression is not False:
        raise InputError(
            f"{table.source}, column {target!r}: {aim.mistakes()}; mend it: a target holds one or the other"
        )
    real = regression if regression is not None else aim.is_numbers and aim.distinct > 2 and not aim.codes
    where = f"{table.source}, column {target!r}:"
    refuse(
        {
            f"{where} holds words, so it is no real target": real and not aim.is_numbers,
            f"{where} holds one value only, which nothing has to predict": (
                aim.distinct < 2 or (real and not aim.usable)
            ),
            f"{where} {aim.distinct} different values are too many for classes": not real and not aim.words,
        }
    )
    roles = {target, site, person, split}
    features = {name: _column(column) for name, column in seen.items() if name not in roles and column.usable}
    if not features:
        raise InputError(f"{table.source}: no column beside the target could become a feature")
    return TableSchema(
        public=False,
        target=target,
        classes=None if real else tuple(sorted(aim.words, key=_by_number if aim.codes else str)),
        range=rounded_out(*(aim.span or (0.0, 0.0))) if real else None,
        columns=features,
        site=site,
        sites=() if site is None else tuple(sorted(seen[site].words)),
        person=person,
        split=split,
        test_share=None
        if split is None
        else min(0.99, round(float(np.mean(table.column(split).codes(["test"]) == 0)), 2)),
        missing="drop" if aim.missing else "refuse",
    )


def _by_number(word: str) -> float:
    number = as_number(word)
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
        if role == "site" and cells.missing.all():
            raise InputError(f"{table.source}, column {name!r}: is empty, so it says of no record whose it is")
        role_of[name] = role


def left_out(table: RawTable, schema: TableSchema) -> list[str]:
    """The columns that have no role in `schema`."""
    roles = {schema.target, schema.site, schema.person, schema.split, *schema.columns}
    return [name for name in table.columns if name not in roles]


def _column(seen: Seen) -> Column:
    if seen.span is not None:
        low, high = rounded_out(*seen.span)
        return Column(range=(low, high), missing=(low + high) / 2.0 if seen.missing else None)
    words = sorted(seen.words)
    return Column(values=tuple(dict.fromkeys((*words, OTHER))), missing=OTHER if seen.missing else None)


def rounded_out(low: float, high: float) -> tuple[float, float]:
    """The nearest bounds outside that have one digit behind the size of the span: 17 … 83 becomes 10 … 90."""
    step = 10.0 ** math.floor(math.log10(high - low))
    return math.floor(low / step) * step, math.ceil(high / step) * step
