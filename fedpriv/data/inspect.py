"""What a table holds, said to the person who has it, and a description to start from.

All of it was read from the records: whoever publishes it has released it, without noise.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.data.table_encode import as_number
from fedpriv.data.table_file import MISSING, RawTable
from fedpriv.data.table_schema import OTHER, Column, TableSchema
from fedpriv.errors import InputError, printable

MOST_WORDS = 50
"""A column of words that has more of them is taken for a name or a text, and left out."""
_FEW_NUMBERS = 2
_SHOWN = 8


@dataclass(frozen=True)
class Seen:
    """One column: its numbers' span, or its words from the most frequent on."""

    name: str
    records: int
    missing: int
    span: tuple[float, float] | None
    words: tuple[str, ...]

    @property
    def is_numbers(self) -> bool:
        return self.span is not None

    @property
    def usable(self) -> bool:
        """Whether it can become features as it is."""
        if self.span is not None:
            return self.span[0] < self.span[1]
        return 2 <= len(self.words) <= MOST_WORDS

    def line(self) -> str:
        gaps = f", {self.missing} missing" if self.missing else ""
        if self.span is not None:
            return f"numbers from {self.span[0]:g} to {self.span[1]:g}{gaps}"
        shown = ", ".join(printable(word, 30) for word in self.words[:_SHOWN])
        more = f" and {len(self.words) - _SHOWN} more" if len(self.words) > _SHOWN else ""
        return f"{len(self.words)} words: {shown}{more}{gaps}"


def see(table: RawTable) -> list[Seen]:
    """Every column of a table."""
    return [_seen(name, values) for name, values in table.columns.items()]


def _seen(name: str, values: Sequence[str]) -> Seen:
    held = [value for value in values if value.lower() not in MISSING]
    words = tuple(word for word, _ in Counter(held).most_common())
    numbers = [number for number in map(as_number, words) if number is not None]
    spelled_out = {word.lower() for word in words} <= {"true", "false"}
    if words and len(numbers) == len(words) and not spelled_out:
        return Seen(name, len(values), len(values) - len(held), (min(numbers), max(numbers)), words)
    return Seen(name, len(values), len(values) - len(held), None, words)


def describe(
    table: RawTable,
    target: str,
    *,
    regression: bool | None = None,
    site: str | None = None,
    person: str | None = None,
    split: str | None = None,
) -> TableSchema:
    """A description with everything that was seen, public = false: ranges are rounded outwards, words sorted.

    `regression` is guessed if it is None: a target of numbers that are not two whole ones is real.  InputError for
    a column that is not there, or a target that says nothing.
    """
    seen = {column.name: column for column in see(table)}
    for name in filter(None, (target, site, person, split)):
        table.column(name)
    aim = seen[target]
    real = regression if regression is not None else aim.is_numbers and len(aim.words) > _FEW_NUMBERS
    if real and not aim.is_numbers:
        raise InputError(f"{table.source}, column {target!r}: holds words, so it is no real target")
    if len(aim.words) < 2:
        raise InputError(f"{table.source}, column {target!r}: holds one value only, which nothing has to predict")
    roles = {target, site, person, split}
    columns = {name: _column(column) for name, column in seen.items() if name not in roles and column.usable}
    if not columns:
        raise InputError(f"{table.source}: no column beside the target could become a feature")
    return TableSchema(
        public=False,
        target=target,
        classes=None if real else tuple(sorted(aim.words)),
        range=rounded_out(*(aim.span or (0.0, 0.0))) if real else None,
        columns=columns,
        site=site,
        sites=() if site is None else tuple(sorted(seen[site].words)),
        person=person,
        split=split,
        missing="drop" if aim.missing else "refuse",
    )


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
