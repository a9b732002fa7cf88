"""Sections of a scenario about its results: [paper], [table], [scaling] and [tuned].

These sections change no run.  They hold the values that were published for a scenario, the layout of its tables,
the resource whose growth is fitted, and the record of the choice of settings, which `fedpriv tune` writes.  They
name other keys of the parsed TOML tree by dotted paths.  An axis is a swept key with the list of its values.
"""

import dataclasses
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedpriv.accounting.selection import NegativeBinomialRunCount, PoissonRunCount, RunCountDistribution
from fedpriv.core.errors import InputError, refuse
from fedpriv.scenario.messages import validate_section


def assign_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key in a tree, and create missing sections.

    Args:
        tree: Nested keys, which the function changes.
        dotted: Key with the sections on its path, such as "privacy.mu".
        value: Value of the key.

    Raises:
        InputError: A section on the path is a value or a list.
    """
    *sections, key = dotted.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise InputError(f"{dotted}: {section} is a value, not a table of keys")
    node[key] = value


def look_up_key(tree: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a dotted key, or None if it or a section on its path is missing."""
    node: Any = tree
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested keys as pairs of dotted key and value, with `prefix` before each key."""
    keys: list[tuple[str, Any]] = []
    for key, value in tree.items():
        keys += (
            flatten_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
        )
    return keys


def parse_assignment(assignment: str, option: str = "--set") -> tuple[str, Any]:
    """Parse "KEY=VALUE" of a command line's option, with the value as TOML.

    Args:
        assignment: Text "KEY=VALUE", where the key ends at the first equals sign.  A value that is no TOML, or is
            followed by further keys, counts as a text, without blanks around it.
        option: Name of the option in messages.

    Returns:
        The dotted key, and the value.

    Raises:
        InputError: The text has no equals sign, or no key before it.
    """
    key, equals, text = map(str.strip, assignment.partition("="))
    if not equals or not key:
        raise InputError(f"{option} {assignment!r}: expected KEY=VALUE, such as {option} federation.silos=10")
    try:
        (value,) = tomllib.loads(f"value = {text}").values()  # a line break in the text may begin further keys
        return key, value
    except (ValueError, RecursionError):  # an integer of thousands of digits is no TOMLDecodeError
        return key, text  # a bare word counts as a text, so that a shell needs no quotes around quotes


PUBLISHED_METRICS = ("test_loss", "test_accuracy", "test_accuracy_mean_of_silos")
"""Metrics for which published tables can be given."""


class PublishedTables(BaseModel):
    """Section [paper] with published values, for reports to show beside measured ones.

    Each metric is a table rows × columns, as a list of rows, or None if it was not published.  A section [table]
    has the same keys, and is for a layout without published values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rows: str
    """Swept key whose values are the rows of the tables."""
    columns: str
    """Swept key whose values are the columns of the tables."""
    metrics: list[str] = []
    """Metrics that are shown as tables without published values."""
    test_loss: list[list[float]] | None = None
    test_accuracy: list[list[float]] | None = None
    test_accuracy_mean_of_silos: list[list[float]] | None = None

    @property
    def published_metrics(self) -> list[str]:
        """Metrics with published values."""
        return [key for key in PUBLISHED_METRICS if getattr(self, key) is not None]

    @property
    def table_metrics(self) -> list[str]:
        """Metrics that are shown as tables of rows × columns."""
        return [*self.metrics, *self.published_metrics]


class Growth(BaseModel):
    """Section [scaling] on the growth of a resource with n, shown as fitted and as theoretical exponents."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    along: str
    """Swept key that is n."""
    by: str
    """Swept key of the compared values, such as algorithm.name."""
    metric: str
    """Metric whose mean over seeds is shown, or with `smallest` must be at most the target."""
    smallest: str | None = None
    """Swept key whose smallest sufficient value is searched for, such as federation.rounds."""
    factor: float | None = None
    """Factor of the target, which `smallest` needs."""
    scale: float = 1.0
    """Product L R, the unit of the target factor · scale · (1/√n + √d/(ε n)).

    Without noise the target has no term √d/(ε n).
    """
    over: Literal["best", "worst"] = "best"
    """Choice among the points of all other swept keys without `smallest`, by the smallest or largest mean."""
    chosen_on: list[int] = []
    """Seeds that serve for this choice alone, or empty to choose on all seeds."""
    start: float | None = None
    """Metric without training, or None.  Without `smallest`, values of at least `start` are not fitted."""
    floor: float = 0.0
    """Metric that more records do not lower.  Without `smallest`, values of at most `floor` are not fitted."""
    theory: dict[str, float] = {}
    """Theoretical exponents by value of `by`, dropped if overrides or `fedpriv tune` change the setting."""

    def without_theory_if(self, changed: list[str]) -> "Growth":
        """Return the section without theoretical exponents if any key was changed."""
        return self.model_copy(update={"theory": {}}) if changed else self


@dataclass(frozen=True)
class PublishedValues:
    """Published tables with the axis values that they were printed for.

    A value is found by the axis values of its point, and not by its place in a sweep that an override may change.
    """

    tables: PublishedTables
    row_values: list[Any]
    """Values of the swept key `tables.rows`, one for each row."""
    column_values: list[Any]
    """Values of the swept key `tables.columns`, one for each column."""
    withheld_keys: list[str] = dataclasses.field(default_factory=list)
    """Changed keys that hide the published values, and a text if `fedpriv tune` chose settings."""

    def to_data(self) -> dict[str, Any]:
        """Return plain data for results.json, which `from_data` reads."""
        return {
            **self.tables.model_dump(),
            "row_values": self.row_values,
            "column_values": self.column_values,
            "withheld": self.withheld_keys,
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "PublishedValues":
        """Return the published values of plain data that `to_data` returned."""
        table = {key: value for key, value in data.items() if key in PublishedTables.model_fields}
        return PublishedValues(
            PublishedTables.model_validate(table),
            data["row_values"],
            data["column_values"],
            data.get("withheld", []),
        )

    def without_values(self, changed: list[str]) -> "PublishedValues":
        """Return the layout alone if any key was changed, since values belong to their published settings.

        The layout then shows the metrics that had published values, too.
        """
        if not changed or not self.tables.published_metrics:
            return self
        return dataclasses.replace(
            self,
            tables=PublishedTables(
                rows=self.tables.rows, columns=self.tables.columns, metrics=self.tables.table_metrics
            ),
            withheld_keys=changed,
        )

    def value(self, metric: str, swept: Mapping[str, Any]) -> float | None:
        """Return the published value of a metric at a sweep point, or None without one.

        Args:
            metric: Key of a metric.
            swept: Value of each swept key at the point.
        """
        cells: list[list[float]] | None = getattr(self.tables, metric, None)
        row, column = swept[self.tables.rows], swept[self.tables.columns]
        if cells is None or row not in self.row_values or column not in self.column_values:
            return None
        return cells[self.row_values.index(row)][self.column_values.index(column)]


def _check_swept(name: str, key: str, axes: Mapping[str, list[Any]], source: str) -> None:
    if key not in axes:
        raise InputError(f"{source}: {name} = {key!r}: expected a swept key: {', '.join(axes) or 'none'}")


def parse_growth(section: Any, axes: Mapping[str, list[Any]], source: str) -> Growth | None:
    """Parse the section [scaling] of a file, and check its keys against the sweep.

    Returns:
        The section, or None without it.

    Raises:
        InputError: The section is malformed, names a key that is not swept, has `smallest` without `factor`, or
            `along` or `smallest` names a key with values that are no positive numbers.
    """
    if section is None:
        return None
    growth = validate_section(Growth, section, source, "scaling")
    for role in ("along", "by", *(("smallest",) if growth.smallest else ())):
        _check_swept(f"scaling.{role}", getattr(growth, role), axes, source)
    refuse(
        {
            f"{source}: scaling.factor: expected the target's factor, since scaling.smallest is given": (
                growth.smallest and growth.factor is None
            ),
            **{
                f"{source}: scaling.{role}: {key} is swept over {axes[key]}; expected positive numbers": not all(
                    isinstance(value, int | float) and value > 0 for value in axes[key]
                )
                for role, key in (("along", growth.along), ("smallest", growth.smallest))
                if key
            },
        }
    )
    return growth


def parse_published(
    values: Any, axes: Mapping[str, list[Any]], source: str, section: str = "paper"
) -> PublishedValues | None:
    """Parse the section [paper] or [table] of a file, which lays out tables of rows × columns.

    Returns:
        The tables with the values of their axes in the file, or None without the section.

    Raises:
        InputError: The section is malformed, `rows` or `columns` is no swept key, or a table has another number of
            rows or columns than these keys have values.
    """
    if values is None:
        return None
    paper = validate_section(PublishedTables, values, source, section)
    _check_swept(f"{section}.rows", paper.rows, axes, source)
    _check_swept(f"{section}.columns", paper.columns, axes, source)
    rows, columns = axes[paper.rows], axes[paper.columns]
    for metric in PUBLISHED_METRICS:
        table = getattr(paper, metric)
        if table is not None and (len(table) != len(rows) or any(len(row) != len(columns) for row in table)):
            raise InputError(f"{source}: {section}.{metric}: expected {len(rows)} rows of {len(columns)} values")
    return PublishedValues(paper, rows, columns)


_NEUTRAL_KEYS = ("name", "title", "seed", "run", "deployment", "label")
"""Keys and sections that name a run, or set how it is computed, and leave its setting unchanged."""


def find_changed_keys(
    file_tree: Mapping[str, Any],
    fixed_values: Mapping[str, Any],
    rule_values: Sequence[tuple[str, Any]] = (),
    conditions: Collection[str] = (),
) -> list[str]:
    """Return the overridden keys that may change the setting for which values were published.

    A value that the file has as well changes nothing, unless a rule [[where]] sets another one.  A key of
    `_NEUTRAL_KEYS` changes nothing, unless it or a key in it is in a condition of a rule.  The default value of a
    key that the file leaves out counts as a change.

    Args:
        file_tree: Nested keys of the file.
        fixed_values: Value of each overridden key.
        rule_values: Dotted keys that rules set, with their values.
        conditions: Dotted keys in conditions of rules.
    """
    return [
        key
        for key, value in fixed_values.items()
        if (
            key.partition(".")[0] not in _NEUTRAL_KEYS
            or any(f"{condition}.".startswith(f"{key}.") for condition in conditions)
        )
        and (
            look_up_key(file_tree, key) != value
            or any((name == key and other != value) or name.startswith(f"{key}.") for name, other in rule_values)
        )
    ]


def find_changed_axes(
    file_axes: Mapping[str, list[Any]], axes: Mapping[str, list[Any]], published: PublishedValues
) -> list[str]:
    """Return the file's swept keys whose values changed, without rows and columns of the tables.

    A key has changed if it is not swept any more, or has a value that the file's sweep does not have.
    """
    table_axes = (published.tables.rows, published.tables.columns)
    return [
        key
        for key, values in file_axes.items()
        if key not in table_axes and (key not in axes or any(value not in values for value in axes[key]))
    ]


class TunedChoice(BaseModel):
    """Choice of settings for one point of the sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: dict[str, Any]
    """Values of the swept keys at the point, or of algorithm.name if nothing is swept."""
    mu: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Privacy parameter μ of every run of a private choice, or None for a choice that is not private."""

    def matches(self, tree: Mapping[str, Any]) -> bool:
        """Whether a cell's tree belongs to this point."""
        return all(look_up_key(tree, key) == value for key, value in self.when.items())


class Tuning(BaseModel):
    """Section [tuned], the record of the choice of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: int = Field(ge=1)
    """Number of settings that were tried for the first row, or after a private choice those of its grid."""
    held_out: int = Field(ge=1)
    """Number of held-out training records on which settings were compared."""
    metric: str
    """Metric by which settings were compared."""
    law: Literal["none", "negative-binomial", "poisson"] = "none"
    """Distribution of the number of runs of a private choice, or "none" for a choice that is not private."""
    mean: float | None = None
    """Mean of this distribution, or None without one."""
    eta: float = 0.0
    """Parameter η of the negative binomial distribution."""
    rows: tuple[TunedChoice, ...] = ()
    """Choice for each tuned point of the sweep."""

    @property
    def run_count_distribution(self) -> RunCountDistribution | None:
        """Distribution of the number of runs of a private choice, or None.

        Raises:
            InputError: The distribution cannot have this mean or this η.
        """
        if self.law == "none":
            return None
        mean = 0.0 if self.mean is None else self.mean
        return PoissonRunCount(mean) if self.law == "poisson" else NegativeBinomialRunCount(mean, self.eta)

    def find_choice(self, tree: Mapping[str, Any]) -> TunedChoice | None:
        """Return the choice for the point of a cell's tree, or None for a point that was not tuned."""
        return next((row for row in self.rows if row.matches(tree)), None)


def parse_tuning(section: Any, source: str) -> Tuning | None:
    """Parse the section [tuned] of a file, and check the distribution that it states.

    Returns:
        The section, or None without it.

    Raises:
        InputError: The section is malformed, or has a mean or an η that is out of its range.
    """
    if section is None:
        return None
    tuning = validate_section(Tuning, section, source, "tuned")
    try:  # the distribution cannot be made with a mean or an η out of its range
        _ = tuning.run_count_distribution
    except InputError as error:
        raise InputError(f"{source}: tuned: {error}") from None
    return tuning
