"""Describe a table in public: the columns that are read, their ranges, vocabularies and target.

The schema maps a record to its features, without a look at other records, so that the map releases nothing.
Means, deviations, quantiles or vocabularies that were computed from the records would be releases.
"""

import json
import math
from itertools import accumulate
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedpriv.core.errors import InputError
from fedpriv.data.cells import CellFormat

NumberRange = Annotated[tuple[float, float], Field(strict=False)]
Vocabulary = Annotated[tuple[str, ...], Field(strict=False)]
_TEST_SHARE = 0.2
OTHER_WORD = "*"
"""Entry of a vocabulary that stands for every word outside it."""


class TableSection(BaseModel):
    """Section of a scenario or a policy, immutable, without unknown keys or numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FeatureColumn(TableSection):
    """Column that becomes features: numbers scaled by `range` to -1 … 1, or words one-hot by `values`.

    Guarantee: whatever a cell holds, a column's features have norm at most 1 before [data.scale] scales them.
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
        """Check that the column is of one kind, numbers or words, and that `missing` fits it.

        Raises:
            ValueError: Both or none of `range` and `values` are given, one of them is malformed, or `missing` is
                no number of the range or none of the words.
        """
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
        """Number of features of the column."""
        return 1 if self.values is None else len(self.values)


class Survival(TableSection):
    """Section `survival` of a table: the target is an event with a time, in public bins of time."""

    time: str = Field(description="the column with the time until the event, or until the record was last seen")
    edges: Annotated[tuple[float, ...], Field(strict=False, min_length=2, max_length=257)] = Field(
        description="of bins [e, e') that a model has hazards for; who lives beyond the last survived all"
    )
    censored: Literal["midpoint", "through", "before"] = Field(
        "midpoint",
        description="whether a record that was last seen in a bin survived it: if it was seen at its middle or "
        'beyond, "through" always, "before" never',
    )

    @model_validator(mode="after")
    def _check_edges(self) -> Self:
        if not all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError(f"edges = {list(self.edges)[:8]}: expected numbers that increase")
        return self

    @property
    def bin_count(self) -> int:
        """Number K of bins."""
        return len(self.edges) - 1

    @property
    def class_count(self) -> int:
        """Number of classes 2K + 1, of labels m + (K + 1) δ (`make_labels`)."""
        return 2 * self.bin_count + 1

    def make_labels(self, times: NDArray[np.float64], was_seen: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Compute the labels m + (K + 1) δ of records, each from its own time and event.

        Bin i of the K bins goes from edge i to edge i + 1, which is not in it.  A record survived the first m
        bins, and δ is 1 if its event was seen in the next bin, and otherwise 0.  `censored` says whether a record
        that was last seen in a bin, without the event, survived this bin.  An event outside all bins is not
        counted.

        Args:
            times: Time of the event, or of the last sight of the record, (n,), in the unit of `edges`.
            was_seen: Whether the event was seen at that time, (n,).

        Returns:
            Labels, integers 0 … 2K, (n,).
        """
        edges = np.array(self.edges)
        bin_index = np.searchsorted(edges, times, side="right") - 1  # -1 … K
        in_bin = (bin_index >= 0) & (bin_index < self.bin_count)
        survived_bins = bin_index.clip(0, self.bin_count)
        middle = (edges[:-1] + edges[1:])[survived_bins.clip(max=self.bin_count - 1)] / 2.0
        survives_last_bin = {"midpoint": times >= middle, "through": in_bin, "before": np.zeros_like(in_bin)}[
            self.censored
        ]
        return np.asarray(
            survived_bins + (in_bin & ~was_seen & survives_last_bin) + (self.bin_count + 1) * (in_bin & was_seen),
            np.int64,
        )


class TableSchema(TableSection):
    """Public description of a table, [data.table] of a scenario and [table] of a policy.

    Features stand in the order of `sorted_columns`.
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
    separator: Literal[",", ";", "\t", "|"] | None = Field(
        None, description="between the cells of a text file; a tab in a .tsv file, and else a comma, unless given"
    )
    decimal: Literal[".", ","] | None = Field(
        None, description="before the decimals of a number, a point unless given"
    )
    thousands: Literal[".", ",", " ", "'"] | None = Field(
        None, description="between the thousands of a number, nothing unless given"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        """Check that the keys fit each other, and that each column has one role.

        Raises:
            ValueError: A key is missing or malformed, or contradicts another.
        """
        if (self.classes is None) == (self.range is None):
            raise ValueError("a target has either classes, or range if it is a real number")
        if self.classes is not None:
            check_vocabulary(self.classes)
        if self.range is not None:
            check_range(self.range)
        if not self.columns:
            raise ValueError("columns: at least one column has to become features")
        if self.thousands == (self.decimal or "."):
            raise ValueError(f"thousands = {self.thousands!r}: is the mark of decimals, too; give decimal another")
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
    def cell_format(self) -> CellFormat:
        """Format of the cells of the table's file."""
        return CellFormat(self.separator, self.decimal, self.thousands)

    @property
    def without_format(self) -> "TableSchema":
        """The schema without the format of cells, which is a file's own."""
        return self.model_copy(update={"separator": None, "decimal": None, "thousands": None})

    @property
    def expected_test_share(self) -> float:
        """Expected share of the rows or persons that are for testing, 0.2 unless `test_share` is given."""
        return _TEST_SHARE if self.test_share is None else self.test_share

    @property
    def splits_by_content(self) -> bool:
        """Whether cells decide if a row is for testing, so that every row has a place in both parts."""
        return self.split is not None or (self.person is not None and self.expected_test_share > 0.0)

    @property
    def may_zero_rows(self) -> bool:
        """Whether the content of a row can make it a row of zeros in a place that it has."""
        return self.splits_by_content or self.missing == "drop"

    def counted_share(self, *, for_testing: bool) -> float:
        """Public share of the rows of the training or the test part that count, apart from missing values.

        If cells decide which rows are for testing, every row has a place in both parts, and counts in one of them
        at most.  A mean over all places of a part is divided by this share.  If a hash of the person decides, the
        share is the expected one.

        Raises:
            InputError: The schema has a column `split`, and `test_share` is missing or 0.
        """
        if not self.splits_by_content:
            return 1.0
        if self.split is not None and not self.test_share:
            raise InputError(
                "table.test_share: this key is missing or 0; published means are divided by the public share of "
                f"rows that count, and nothing else says how many the column {self.split!r} puts aside for testing"
            )
        return self.expected_test_share if for_testing else 1.0 - self.expected_test_share

    @property
    def sorted_columns(self) -> list[tuple[str, FeatureColumn]]:
        """Names and columns, sorted by name, which is the order of their features."""
        return sorted(self.columns.items())

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """Columns of a record's raw cells: features, target, and site if the schema names a column for it."""
        return (*sorted(self.columns), self.target, *(() if self.site is None else (self.site,)))

    @property
    def width(self) -> int:
        """Number of features of a record."""
        return sum(column.width for column in self.columns.values())

    @property
    def number_features(self) -> tuple[int, ...]:
        """Indices of the features that are columns of numbers, each in -1 … 1 before [data.scale]."""
        columns = [column for _, column in self.sorted_columns]
        return tuple(
            start
            for start, column in zip(
                accumulate((column.width for column in columns), initial=0), columns, strict=False
            )
            if column.range is not None
        )

    @property
    def max_norm(self) -> float:
        """Bound on the norm of a record's features without [data.scale], √(number of columns)."""
        return math.sqrt(len(self.columns))

    @property
    def class_count(self) -> int:
        """Number of classes of the labels, or 0 for a real target."""
        if self.survival is not None:
            return self.survival.class_count
        return 0 if self.classes is None else len(self.classes)

    @property
    def label_scale(self) -> float:
        """Half the length of `range`, the target's own units for 1 in the scaled target, or 1 for classes."""
        return 1.0 if self.range is None else (self.range[1] - self.range[0]) / 2.0

    def to_target_units(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Convert labels of a scaled real target to the target's own units, and return classes unchanged."""
        return labels if self.range is None else self.range[0] + (labels + 1.0) * self.label_scale


def check_range(bounds: tuple[float, float]) -> None:
    """Check that a range is increasing, and that twice its length, which the scaling computes, is finite.

    Raises:
        ValueError: The range does not increase, or twice its length is no finite float.
    """
    low, high = bounds
    if not low < high or not math.isfinite(2.0 * (high - low)):
        raise ValueError(f"range = {list(bounds)}: expected [low, high] with low below high, at most 8e307 apart")


def check_vocabulary(vocabulary: tuple[str, ...]) -> None:
    """Check that a vocabulary has at least two words, each once and without spaces around it.

    Raises:
        ValueError: There are fewer words, one occurs twice, or one has spaces around it.
    """
    if len(vocabulary) < 2 or len(set(vocabulary)) != len(vocabulary):
        raise ValueError(f"{list(vocabulary)}: expected at least two words, each once")
    if any(word != word.strip() for word in vocabulary):
        raise ValueError(f"{list(vocabulary)}: a word has no spaces around it")
