"""Schema of a table: which columns are read, their public ranges and vocabularies, and what the target is.

Every record is mapped to its features by this and by nothing else, so the map looks at one record alone and
releases nothing.  Means, deviations, quantiles or vocabularies that were taken from the records would be releases.
"""

import json
import math
from itertools import accumulate
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedpriv.core.errors import InputError

NumberRange = Annotated[tuple[float, float], Field(strict=False)]
Vocabulary = Annotated[tuple[str, ...], Field(strict=False)]
_TEST_SHARE = 0.2
OTHER_WORD = "*"
"""In a vocabulary: every word that is not listed."""


class TableSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FeatureColumn(TableSection):
    """A column that becomes features: numbers scaled by `range` to -1 … 1, or words one-hot by `values`.

    Guarantee: whatever a cell holds, a column's features have norm at most 1.
    """

    range: NumberRange | None = Field(
        None, description="[low, high]: numbers are clipped to it and scaled to -1 … 1"
    )
    values: Vocabulary | None = Field(
        None, description='the words that a cell can hold, one feature each; "*" stands for every other word'
    )
    missing: float | str | None = Field(
        None, description="what stands in for a missing value: a number of the range, a word of the values"
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.range is None) == (self.values is None):
            raise ValueError("a column has either range, for numbers, or values, for words")
        if self.range is not None:
            check_range(self.range)
            if self.missing is not None and not (
                isinstance(self.missing, int | float) and self.range[0] <= self.missing <= self.range[1]
            ):
                raise ValueError(f"missing = {self.missing!r}: expected a number of the range {list(self.range)}")
        if self.values is not None:
            check_vocabulary(self.values)
            if self.missing is not None and self.missing not in self.values:
                raise ValueError(f"missing = {self.missing!r}: expected one of the values")
        return self

    @property
    def width(self) -> int:
        """Number of features that it becomes."""
        return 1 if self.values is None else len(self.values)


class Survival(TableSection):
    """[data.table.survival]: the target is whether an event was seen by the end of a time, in public bins."""

    time: str = Field(description="the column with the time until the event, or until the record was last seen")
    edges: Annotated[tuple[float, ...], Field(strict=False, min_length=2, max_length=257)] = Field(
        description="of bins [e, e') that a model has hazards for; who lives beyond the last survived all"
    )
    censored: Literal["midpoint", "through", "before"] = Field(
        "midpoint",
        description="whether a record that was last seen in a bin survived it: if it was seen beyond its middle, "
        '"through" always, "before" never',
    )

    @model_validator(mode="after")
    def _check_edges(self) -> Self:
        if not all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError(f"edges = {list(self.edges)[:8]}: expected numbers that increase")
        return self

    @property
    def bin_count(self) -> int:
        """K."""
        return len(self.edges) - 1

    @property
    def class_count(self) -> int:
        """Of labels m + (K + 1) δ: m of K bins survived, δ = 1 if the event was seen in the next."""
        return 2 * self.bin_count + 1

    def make_labels(self, times: NDArray[np.float64], seen: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Of times (n,) and whether the event was seen then, each a function of its own record.

        A time before the first edge says nothing of any bin: no bin survived, no event.
        """
        edges = np.array(self.edges)
        place = np.searchsorted(edges, times, side="right") - 1  # -1 … K
        inside = (place >= 0) & (place < self.bin_count)
        held = place.clip(0, self.bin_count)
        middle = (edges[:-1] + edges[1:])[held.clip(max=self.bin_count - 1)] / 2.0
        more = {"midpoint": times >= middle, "through": inside, "before": np.zeros_like(inside)}[self.censored]
        return np.asarray(held + (inside & ~seen & more) + (self.bin_count + 1) * (inside & seen), np.int64)


class TableSchema(TableSection):
    """[data.table] of a scenario, [table] of a policy: the public description of a table.

    Features come in the alphabetical order of their columns.
    """

    public: bool = Field(
        description="true declares that ranges, values and classes below are known without a look at the records; "
        "false is refused where noise is to protect them"
    )
    target: str = Field(description="the column that is to be predicted")
    classes: Vocabulary | None = Field(None, description="the target's words; class 0 is the first")
    range: NumberRange | None = Field(
        None, description="a real target's [low, high]: it is clipped to it and scaled to -1 … 1"
    )
    columns: dict[str, FeatureColumn] = Field(description="the columns that become features; others are not read")
    site: str | None = Field(None, description="the column that says which silo a record belongs to")
    sites: Vocabulary = Field((), description="the words of the column `site`, silo 0 first")
    person: str | None = Field(None, description="the column that says whose record it is")
    split: str | None = Field(None, description='a column with "train" and "test"; otherwise `test_share` applies')
    test_share: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="the expected share of rows that are for testing, 0.2 unless given: chosen by their place in "
        "the file alone, or by a hash of the person; with split the public share that it puts aside, by which "
        "published means are divided",
    )
    survival: Survival | None = Field(
        None, description="a target with a time: class 1 is an event that was seen, class 0 one that was not"
    )
    missing: Literal["refuse", "drop"] = Field(
        "refuse", description='records with a missing value: "drop" makes zeros of them, which keep their place'
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if (self.classes is None) == (self.range is None):
            raise ValueError("a target has either classes, or range if it is a real number")
        if self.classes is not None:
            check_vocabulary(self.classes)
        if self.range is not None:
            check_range(self.range)
        if not self.columns:
            raise ValueError("columns: at least one column has to become features")
        if (self.site is None) != (not self.sites):
            raise ValueError("site, a column, and sites, its words, are given together")
        if len(set(self.sites)) != len(self.sites):
            raise ValueError(f"sites = {list(self.sites)}: each is named once")
        time = None if self.survival is None else self.survival.time
        if time is not None and len(self.classes or ()) != 2:
            raise ValueError("survival: the target has two classes, not seen and seen, in that order")
        roles = [self.target, self.site, self.person, self.split, time]
        for name in filter(None, roles):
            if name in self.columns or roles.count(name) > 1:
                raise ValueError(
                    f"column {name!r} has two roles; each column has one of target, site, person, "
                    "split, time and feature"
                )
        return self

    def __hash__(self) -> int:
        return hash(json.dumps(self.model_dump(mode="json"), sort_keys=True))

    @property
    def expected_test_share(self) -> float:
        """The expected share of rows, or persons, that are for testing."""
        return _TEST_SHARE if self.test_share is None else self.test_share

    @property
    def splits_by_content(self) -> bool:
        """Whether cells say if a row is for testing, so that every row has a place in both parts."""
        return self.split is not None or (self.person is not None and self.expected_test_share > 0.0)

    @property
    def may_zero_rows(self) -> bool:
        """Whether what a row holds can make a zero of it where it has a place."""
        return self.splits_by_content or self.missing == "drop"

    def counted_share(self, *, for_testing: bool) -> float:
        """The public share of the places of a part that count, missing values apart; published means divide by it.

        InputError for a column `split` of which no share is said.
        """
        if not self.splits_by_content:
            return 1.0
        if self.split is not None and not self.test_share:
            raise InputError(
                "table.test_share: this key is missing; published means are divided by the public share of rows "
                f"that count, and nothing else says how many the column {self.split!r} puts aside for testing"
            )
        return self.expected_test_share if for_testing else 1.0 - self.expected_test_share

    @property
    def sorted_columns(self) -> list[tuple[str, FeatureColumn]]:
        """The columns in the order of their features."""
        return sorted(self.columns.items())

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The columns whose cells a record has as they are: features, target, and site where there is one."""
        return (*sorted(self.columns), self.target, *(() if self.site is None else (self.site,)))

    @property
    def width(self) -> int:
        """Number of features of a record."""
        return sum(column.width for column in self.columns.values())

    @property
    def number_features(self) -> tuple[int, ...]:
        """Features that are columns of numbers, each in -1 … 1."""
        columns = [column for _, column in self.sorted_columns]
        starts = accumulate((column.width for column in columns), initial=0)
        return tuple(start for start, column in zip(starts, columns, strict=False) if column.range is not None)

    @property
    def max_norm(self) -> float:
        """A bound on the norm of a record's features: √(number of columns)."""
        return math.sqrt(len(self.columns))

    @property
    def class_count(self) -> int:
        """Of labels; 0 for a real target."""
        if self.survival is not None:
            return self.survival.class_count
        return 0 if self.classes is None else len(self.classes)

    @property
    def label_scale(self) -> float:
        """Size of 1 of the scaled target in the target's own unit."""
        return 1.0 if self.range is None else (self.range[1] - self.range[0]) / 2.0


def check_range(bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not low < high or not math.isfinite(high - low):
        raise ValueError(f"range = {list(bounds)}: expected [low, high] with low below high")


def check_vocabulary(words: tuple[str, ...]) -> None:
    if len(words) < 2 or len(set(words)) != len(words):
        raise ValueError(f"{list(words)}: expected at least two words, each once")
    if any(word != word.strip() for word in words):
        raise ValueError(f"{list(words)}: a word has no spaces around it")
