"""From a TOML file to the cells it stands for: overrides, sweep, seeds, validation."""

import copy
import dataclasses
import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fedpriv.errors import InputError
from fedpriv.scenario.data_section import PARTITION_KEYS
from fedpriv.scenario.messages import explain
from fedpriv.scenario.rules import Rule, rules_of
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.tree import assign, look_up, parsed_assignment

PUBLISHED = ("test_loss", "test_accuracy", "test_accuracy_mean_of_silos")
"""The metrics that tables beside the measured ones can be given for."""


class Paper(BaseModel):
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
    def values(self) -> list[str]:
        """The metrics of which values were published."""
        return [key for key in PUBLISHED if getattr(self, key) is not None]

    @property
    def shown(self) -> list[str]:
        """The metrics that get a table of rows × columns."""
        return [*self.metrics, *self.values]


class Scaling(BaseModel):
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
    """Exponents to compare with, by value of `by`."""


@dataclass(frozen=True)
class Published:
    """The paper's tables with the axis values they were printed for: a narrowed sweep still finds its own."""

    table: Paper
    row_values: list[Any]
    column_values: list[Any]
    withheld: list[str] = dataclasses.field(default_factory=list)
    """The overridden keys for which published values are not shown."""

    def as_data(self) -> dict[str, Any]:
        """Plain data for results.json, enough to build this again."""
        axes = {"row_values": self.row_values, "column_values": self.column_values}
        return {**self.table.model_dump(), **axes, "withheld": self.withheld}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "Published":
        """The inverse of `as_data`."""
        table = {key: value for key, value in data.items() if key in Paper.model_fields}
        return Published(
            Paper.model_validate(table), data["row_values"], data["column_values"], data.get("withheld", [])
        )

    def without_values(self, changed: list[str]) -> "Published":
        """The layout alone, if any key has `changed`: values belong to the settings they were published for."""
        if not changed or not self.table.values:
            return self
        empty = Paper(rows=self.table.rows, columns=self.table.columns, metrics=self.table.shown)
        return dataclasses.replace(self, table=empty, withheld=changed)

    def value(self, metric: str, swept: Mapping[str, Any]) -> float | None:
        """The published `metric` (one of `PUBLISHED`) at a sweep point; None where none was printed."""
        cells: list[list[float]] | None = getattr(self.table, metric, None)
        row, column = swept[self.table.rows], swept[self.table.columns]
        if cells is None or row not in self.row_values or column not in self.column_values:
            return None
        return cells[self.row_values.index(row)][self.column_values.index(column)]


@dataclass(frozen=True)
class Point:
    """One run of a scenario: which swept values it has (dotted key -> value), and the resolved cell."""

    swept: Mapping[str, Any]
    cell: Cell


@dataclass(frozen=True)
class Scenario:
    """A scenario file with its overrides: every point to run, and what was published."""

    name: str
    title: str
    axes: Mapping[str, list[Any]]
    seeds: list[int]
    points: list[Point]
    published: Published | None
    scaling: Scaling | None = None


def load_scenario(path: Path, overrides: Iterable[str] = ()) -> Scenario:
    """Read, override ("KEY=VALUE", dotted keys, TOML values), sweep and validate a scenario file."""
    return scenario_of(read_toml(path), str(path), overrides)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such file; a scenario is a TOML file such as scenarios/quickstart.toml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a text file: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None


def scenario_of(tree: Mapping[str, Any], source: str, overrides: Iterable[str] = ()) -> Scenario:
    """The scenario that a parsed TOML tree stands for; `source` names it in messages.

    Overriding a swept key narrows its axis to the value, or the list of values, given.
    """
    base = copy.deepcopy(dict(tree))
    sweep, layout = base.pop("sweep", {}), [key for key in ("paper", "table") if key in base]
    if len(layout) > 1:
        raise InputError(f"{source}: [paper] and [table] both lay out the tables: give one of them")
    paper = base.pop(layout[0]) if layout else None
    if "seeds" in base:
        raise InputError(f"{source}: seeds = {base['seeds']!r}: this key stands in [sweep], a single `seed` here")
    if not isinstance(sweep, dict):
        raise InputError(f"{source}: sweep = {sweep!r}: expected a table of keys and lists of values")
    for key, values in sweep.items():
        if key != "seeds" and (not isinstance(values, list) or not values):
            raise InputError(f'{source}: sweep."{key}" = {values!r}: expected a list of at least one value')
    printed_axes = {key: values for key, values in sweep.items() if key != "seeds"}
    printed, published = copy.deepcopy(base), _published(paper, printed_axes, source)
    scaling = _scaling(base.pop("scaling", None), printed_axes, source)
    rules = rules_of(base.pop("where", []), printed_axes, source)
    axes, fixed = dict(sweep), dict[str, Any]()
    for assignment in overrides:
        key, value = parsed_assignment(assignment)
        key = "seeds" if key == "sweep.seeds" else key  # as it stands in the file
        if key in axes or key == "seeds":
            axes[key] = value if isinstance(value, list) or key == "seeds" else [value]
        else:
            fixed[key] = value
            assign(base, key, value)
    if published is not None:
        published = published.without_values(
            _changed(printed, fixed) + _changed_axes(printed_axes, axes, published)
        )
    seeds = _seeds(axes.pop("seeds", None), base.pop("seed", 0), source)
    points = [
        Point(dict(zip(axes, values, strict=True)), _cell(base, axes, values, rules, fixed, seed, source))
        for values in itertools.product(*axes.values())
        for seed in seeds
    ]
    first = points[0].cell
    return Scenario(first.name, first.title, axes, seeds, points, published, scaling)


def resolve_cell(tree: Mapping[str, Any], source: str) -> Cell:
    """Validate one cell; InputError with one line if it cannot be run."""
    try:
        cell = Cell.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error, Cell)}") from None
    row = cell.algorithm.row
    _ = cell.algorithm.trust_setting
    for name, section in (("algorithm", cell.algorithm), ("model", cell.model)):
        try:
            _ = section.settings
        except ValidationError as error:
            raise InputError(f"{source}: {explain(error, section.row.settings, name)}") from None
    if cell.algorithm.trust not in row.trusts:
        raise InputError(
            f"{source}: algorithm.trust = {cell.algorithm.trust!r}: {row.name} can be run with "
            f"{' or '.join(map(repr, row.trusts))}"
        )
    _check_sampling(cell, source)
    if cell.privacy.rho is not None and row.name_of_mu != "rho":
        raise InputError(
            f"{source}: privacy.rho: only dp-mu2-fl's paper calls mu so; write privacy.mu for {row.name}"
        )
    return cell


def _check_sampling(cell: Cell, source: str) -> None:
    """Refuse at once a sampling that the rounds do not fit; the plan refuses what cannot be accounted for."""
    if cell.federation.sampling == "fixed" and cell.federation.groups == 1:
        return
    try:
        _ = cell.schedule
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _cell(
    base: Mapping[str, Any],
    axes: Mapping[str, Any],
    values: tuple[Any, ...],
    rules: Iterable[Rule],
    fixed: Mapping[str, Any],
    seed: int,
    source: str,
) -> Cell:
    """One cell: the file with the overrides, at a sweep point, with its rules, which overrides outrank."""
    tree = copy.deepcopy(dict(base))
    for key, value in zip(axes, values, strict=True):
        assign(tree, key, value)
    for rule in rules:
        rule.apply(tree)
    for key, value in fixed.items():
        assign(tree, key, value)
    if "data.partition" in fixed:
        _forget_other_partitions(tree, fixed)
    tree["seed"] = seed
    return resolve_cell(tree, source)


def _forget_other_partitions(tree: dict[str, Any], fixed: Mapping[str, Any]) -> None:
    """An override of the partition takes the file's settings of the others with it; those given beside it stay."""
    for partition, key in PARTITION_KEYS.items():
        if fixed["data.partition"] != partition and f"data.{key}" not in fixed:
            tree["data"].pop(key, None)


def _seeds(swept: Any, single: Any, source: str) -> list[int]:
    """`sweep.seeds = 5` means seeds 0 … 4, a list exactly those; without it the one `seed` of the file."""
    if swept is None:
        if type(single) is int and single >= 0:
            return [single]
        raise InputError(f"{source}: seed = {single!r}: expected a whole number of at least 0")
    if type(swept) is int and swept >= 1:
        return list(range(swept))
    if isinstance(swept, list) and swept and all(type(seed) is int and seed >= 0 for seed in swept):
        return list(dict.fromkeys(swept))
    raise InputError(
        f"{source}: seeds = {swept!r}: expected how many (such as 5) or a list of non-negative numbers"
    )


def _scaling(given: Any, axes: Mapping[str, list[Any]], source: str) -> Scaling | None:
    if given is None:
        return None
    try:
        scaling = Scaling.model_validate(given)
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error, Scaling, 'scaling')}") from None
    for role in ("along", "smallest", "by"):
        if (key := getattr(scaling, role)) not in axes:
            raise InputError(
                f"{source}: scaling.{role} = {key!r}: expected a swept key: {', '.join(axes) or 'none'}"
            )
    return scaling


def _published(given: Any, axes: Mapping[str, list[Any]], source: str) -> Published | None:
    if given is None:
        return None
    try:
        paper = Paper.model_validate(given)
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error, Paper, 'paper')}") from None
    for role, key in (("rows", paper.rows), ("columns", paper.columns)):
        if key not in axes:
            raise InputError(
                f"{source}: paper.{role} = {key!r}: expected a swept key: {', '.join(axes) or 'none'}"
            )
    rows, columns = axes[paper.rows], axes[paper.columns]
    for metric in PUBLISHED:
        table = getattr(paper, metric)
        if table is not None and (len(table) != len(rows) or any(len(row) != len(columns) for row in table)):
            raise InputError(f"{source}: paper.{metric}: expected {len(rows)} rows of {len(columns)} values")
    return Published(paper, rows, columns)


_SAME_RESULT = ("name", "title", "seed", "run", "deployment", "label")
"""Keys and sections that say how to compute or what to call it, not what."""


def _changed(printed: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[str]:
    """The overridden keys that make another setting of the one that values were published for."""
    return [
        key
        for key, value in fixed.items()
        if key.partition(".")[0] not in _SAME_RESULT and look_up(printed, key) != value
    ]


def _changed_axes(
    printed: Mapping[str, list[Any]], axes: Mapping[str, list[Any]], published: Published
) -> list[str]:
    """Swept keys beside rows and columns that have a value now which the printed sweep had not."""
    own = (published.table.rows, published.table.columns)
    return [
        key
        for key, values in printed.items()
        if key not in own and any(value not in values for value in axes[key])
    ]
