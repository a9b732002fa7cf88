"""Sections of a scenario about its results, which no run reads: [paper], [table], [scaling] and [tuned].

They say what was published for a scenario, how its tables are laid out, which growth it is about, and how its
settings were chosen, which `fedpriv tune` writes and reports read.  They name other keys by dotted paths, which
`look_up` and `assign` follow in a parsed TOML tree.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedpriv.accounting.selection import NegativeBinomialRunCount, PoissonRunCount, RunCountDistribution
from fedpriv.core.errors import InputError
from fedpriv.scenario.messages import validate_section


def assign_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key, making its sections; InputError if one of them is a value."""
    *sections, key = dotted.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise InputError(f"{dotted}: {section} is a value, not a table of keys")
    node[key] = value


def look_up_key(tree: Mapping[str, Any], dotted: str) -> Any:
    """The value of a key, None if it is not there."""
    node: Any = tree
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested keys as dotted ones, with their values."""
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += (
            flatten_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
        )
    return found


def parse_assignment(assignment: str, option: str = "--set") -> tuple[str, Any]:
    """A "KEY=VALUE" of a command line's `option`, its value as TOML reads it; InputError if it is none."""
    key, equals, text = assignment.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"{option} {assignment!r}: expected KEY=VALUE, such as {option} federation.silos=10")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text.strip()  # a bare word is taken as text, so that quotes need no quoting in a shell


PUBLISHED_METRICS = ("test_loss", "test_accuracy", "test_accuracy_mean_of_silos")
"""The metrics that tables beside the measured ones can be given for."""


class PublishedTables(BaseModel):
    """[paper]: published values, shown beside what was measured; each metric is a table rows × columns.

    [table] lays out the same tables where nothing was published.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: str
    columns: str
    metrics: list[str] = []
    """Shown as tables although nothing was published for them."""
    test_loss: list[list[float]] | None = None
    test_accuracy: list[list[float]] | None = None
    test_accuracy_mean_of_silos: list[list[float]] | None = None

    @property
    def published_metrics(self) -> list[str]:
        """The metrics of which values were published."""
        return [key for key in PUBLISHED_METRICS if getattr(self, key) is not None]

    @property
    def table_metrics(self) -> list[str]:
        """The metrics that get a table of rows × columns."""
        return [*self.metrics, *self.published_metrics]


class Growth(BaseModel):
    """[scaling]: how what an algorithm needs grows with n; shown as fitted exponents beside the theory's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    along: str
    """The swept key that is n."""
    smallest: str
    """The swept key whose smallest sufficient value is looked for, such as federation.rounds."""
    by: str
    """The swept key of what is compared, such as algorithm.name."""
    metric: str
    factor: float
    scale: float
    """L R: the unit of the target factor · scale · (1/√n + √d/(ε n))."""
    theory: dict[str, float] = {}
    """Exponents to compare with, by value of `by`; none where overrides change the setting that they are about."""

    def without_theory_if(self, changed: list[str]) -> "Growth":
        """The layout without the theory's exponents, if any key has `changed`."""
        return self.model_copy(update={"theory": {}}) if changed else self


@dataclass(frozen=True)
class PublishedValues:
    """The paper's tables with the axis values they were printed for: a narrowed sweep still finds its own."""

    tables: PublishedTables
    row_values: list[Any]
    column_values: list[Any]
    withheld_keys: list[str] = dataclasses.field(default_factory=list)
    """The overridden keys for which published values are not shown."""

    def to_data(self) -> dict[str, Any]:
        """Plain data for results.json, enough to build this again."""
        axes = {"row_values": self.row_values, "column_values": self.column_values}
        return {**self.tables.model_dump(), **axes, "withheld": self.withheld_keys}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "PublishedValues":
        """The inverse of `as_data`."""
        table = {key: value for key, value in data.items() if key in PublishedTables.model_fields}
        return PublishedValues(
            PublishedTables.model_validate(table),
            data["row_values"],
            data["column_values"],
            data.get("withheld", []),
        )

    def without_values(self, changed: list[str]) -> "PublishedValues":
        """The layout alone, if any key has `changed`: values belong to the settings they were published for."""
        if not changed or not self.tables.published_metrics:
            return self
        empty = PublishedTables(
            rows=self.tables.rows, columns=self.tables.columns, metrics=self.tables.table_metrics
        )
        return dataclasses.replace(self, tables=empty, withheld_keys=changed)

    def value(self, metric: str, swept: Mapping[str, Any]) -> float | None:
        """The published `metric` (one of `PUBLISHED`) at a sweep point; None where none was printed."""
        cells: list[list[float]] | None = getattr(self.tables, metric, None)
        row, column = swept[self.tables.rows], swept[self.tables.columns]
        if cells is None or row not in self.row_values or column not in self.column_values:
            return None
        return cells[self.row_values.index(row)][self.column_values.index(column)]


def _check_swept(name: str, key: str, axes: Mapping[str, list[Any]], source: str) -> None:
    if key not in axes:
        raise InputError(f"{source}: {name} = {key!r}: expected a swept key: {', '.join(axes) or 'none'}")


def parse_growth(given: Any, axes: Mapping[str, list[Any]], source: str) -> Growth | None:
    """[scaling] of a file; InputError if it is malformed."""
    if given is None:
        return None
    scaling = validate_section(Growth, given, source, "scaling")
    for role in ("along", "smallest", "by"):
        _check_swept(f"scaling.{role}", getattr(scaling, role), axes, source)
    return scaling


def parse_published(
    given: Any, axes: Mapping[str, list[Any]], source: str, section: str = "paper"
) -> PublishedValues | None:
    """[paper] or [table] of a file, by the name that the file has for it; InputError if it is malformed."""
    if given is None:
        return None
    paper = validate_section(PublishedTables, given, source, section)
    _check_swept(f"{section}.rows", paper.rows, axes, source)
    _check_swept(f"{section}.columns", paper.columns, axes, source)
    rows, columns = axes[paper.rows], axes[paper.columns]
    for metric in PUBLISHED_METRICS:
        table = getattr(paper, metric)
        if table is not None and (len(table) != len(rows) or any(len(row) != len(columns) for row in table)):
            raise InputError(f"{source}: {section}.{metric}: expected {len(rows)} rows of {len(columns)} values")
    return PublishedValues(paper, rows, columns)


_NEUTRAL_KEYS = ("name", "title", "seed", "run", "deployment", "label")
"""Keys and sections that say how to compute or what to call it, not what."""


def find_changed_keys(printed: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[str]:
    """The overridden keys that make another setting of the one that values were published for."""
    return [
        key
        for key, value in fixed.items()
        if key.partition(".")[0] not in _NEUTRAL_KEYS and look_up_key(printed, key) != value
    ]


def find_changed_axes(
    printed: Mapping[str, list[Any]], axes: Mapping[str, list[Any]], published: PublishedValues
) -> list[str]:
    """Swept keys beside rows and columns that have a value now which the printed sweep had not."""
    own = (published.tables.rows, published.tables.columns)
    return [
        key
        for key, values in printed.items()
        if key not in own and (key not in axes or any(value not in values for value in axes[key]))
    ]


class TunedChoice(BaseModel):
    """The choice of one point of the sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: dict[str, Any]
    """The swept keys and their values there."""
    mu: float | None = Field(None, gt=0, allow_inf_nan=False)
    """What every run of a private choice promised; None for a choice that is not."""

    def matches(self, tree: Mapping[str, Any]) -> bool:
        """Whether a cell's tree is of this point."""
        return all(look_up_key(tree, key) == value for key, value in self.when.items())


class Tuning(BaseModel):
    """Record of how settings were chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: int = Field(ge=1)
    """In the grid of every row, or tried of it."""
    held_out: int = Field(ge=1)
    metric: str
    law: Literal["none", "negative-binomial", "poisson"] = "none"
    """Of the number of runs of a private choice; "none" for a choice that nothing accounts for."""
    mean: float | None = None
    eta: float = 0.0
    rows: tuple[TunedChoice, ...] = ()

    @property
    def run_count_distribution(self) -> RunCountDistribution | None:
        """The law of a private choice; InputError for a mean that it cannot have."""
        if self.law == "none":
            return None
        mean = 0.0 if self.mean is None else self.mean
        return PoissonRunCount(mean) if self.law == "poisson" else NegativeBinomialRunCount(mean, self.eta)

    def find_choice(self, tree: Mapping[str, Any]) -> TunedChoice | None:
        """The choice that a cell's tree has its settings from; None for a point that was not tuned."""
        return next((row for row in self.rows if row.matches(tree)), None)


def parse_tuning(given: Any, source: str) -> Tuning | None:
    """[tuned] of a file; InputError if it is malformed."""
    if given is None:
        return None
    tuned = validate_section(Tuning, given, source, "tuned")
    try:
        _ = tuned.run_count_distribution
    except InputError as error:
        raise InputError(f"{source}: tuned: {error}") from None
    return tuned
