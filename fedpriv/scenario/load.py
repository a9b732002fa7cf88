"""Load a TOML file as the cells it stands for: overrides, sweep, seeds, validation.

`--set` gives a key a value, narrows a swept one, and drops keys that the new one excludes.

[[where]] sets keys where swept keys have certain values: a sweep over algorithms needs settings of its own for
each, and a rule says at which points they hold:

    [[where]]
    when = { "algorithm.name" = "dp-sgd", "privacy.mu" = [0.3, 1.0] }
    set = { "algorithm.clip" = 5.0 }

Rules apply in the order of the file, after the sweep and before overrides of single keys.
"""

import copy
import dataclasses
import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fedpriv.core.errors import InputError
from fedpriv.core.files import find_scenario_file
from fedpriv.data.cells import is_table_path
from fedpriv.scenario.data import PARTITION_KEYS
from fedpriv.scenario.messages import validate_section
from fedpriv.scenario.published import (
    Growth,
    PublishedValues,
    Tuning,
    assign_key,
    find_changed_axes,
    find_changed_keys,
    look_up_key,
    parse_assignment,
    parse_growth,
    parse_published,
    parse_tuning,
)
from fedpriv.scenario.schema import AlgorithmSection, Cell, ModelSection

PRIVACY_TARGETS = ("mu", "rho", "zcdp", "epsilon")
"""The keys of [privacy] of which exactly one says how private a run is."""


@dataclass(frozen=True)
class Overrides:
    """Overrides, by what they override."""

    axes: Mapping[str, Any]
    """The axes of the sweep; "seeds" as it was given."""
    fixed_values: Mapping[str, Any]
    """Keys that get one value."""
    overridden_keys: frozenset[str]
    """Every key that was overridden."""


def split_overrides(overrides: Iterable[str], swept: Mapping[str, Any]) -> Overrides:
    """Split "KEY=VALUE" overrides into axes of the sweep and fixed keys.

    A swept key is narrowed to the value or the list of values given; another key with a list becomes an axis.  A
    privacy target takes the place of another one, swept or not, and `privacy.mode=none` of all.  A value that is
    given twice counts once.  InputError for an empty list.
    """
    axes, fixed, touched = dict(swept), dict[str, Any](), set[str]()
    for assignment in overrides:
        key, value = parse_assignment(assignment)
        key = key.removeprefix("sweep.")  # as it stands in the file
        if key != "seeds" and isinstance(value, list):
            if not value:
                raise InputError(f"--set {assignment!r}: expected at least one value to sweep")
            axes[key] = drop_duplicates(value)
            fixed.pop(key, None)
        elif key in axes or key == "seeds":
            axes[key] = value if key == "seeds" else [value]
        else:
            fixed[key] = value
        touched.add(key)
    for key in find_excluded_targets(touched, fixed.get("privacy.mode")):
        axes.pop(key, None)
    return Overrides(axes, fixed, frozenset(touched))


def drop_duplicates(values: list[Any]) -> list[Any]:
    """Drop values that are there already: the same cell twice is no second seed."""
    return [each for place, each in enumerate(values) if each not in values[:place]]


def find_excluded_targets(given: Iterable[str], mode: Any = None) -> list[str]:
    """The privacy targets that give way to those that were `given`, or to a mode without noise."""
    targets = [f"privacy.{name}" for name in PRIVACY_TARGETS]
    chosen = [key for key in targets if key in given]
    return [key for key in targets if key not in chosen] if chosen or mode == "none" else []


def drop_superseded_keys(tree: dict[str, Any], given: Overrides) -> None:
    """Take out of a cell's tree what an override excludes: other privacy targets, settings of other partitions."""
    for key in find_excluded_targets(given.overridden_keys, given.fixed_values.get("privacy.mode")):
        tree.get("privacy", {}).pop(key.removeprefix("privacy."), None)
    if "data.partition" in given.overridden_keys:
        for partition, key in PARTITION_KEYS.items():
            if tree["data"]["partition"] != partition and f"data.{key}" not in given.overridden_keys:
                tree["data"].pop(key, None)


class Rule(BaseModel):
    """[[where]]: if every key of `when` has its value, or one of its values, the keys of `set` get theirs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: dict[str, Any] = Field(description="dotted keys and the value, or the list of values, they must have")
    set: dict[str, Any] = Field(description="dotted keys and the values they get")

    def apply(self, tree: dict[str, Any]) -> None:
        """Set the rule's keys in a cell's tree, if it holds there."""
        if all(look_up_key(tree, key) in _as_list(wanted) for key, wanted in self.when.items()):
            for key, value in self.set.items():
                assign_key(tree, key, value)


def parse_rules(given: Any, axes: Mapping[str, list[Any]], source: str) -> list[Rule]:
    """The rules of a file; InputError if one is malformed or names a value that its swept key never has."""
    if not isinstance(given, list):
        raise InputError(f"{source}: where = {given!r}: expected [[where]] tables with `when` and `set`")
    rules = []
    for place, entry in enumerate(given, start=1):
        rule = validate_section(Rule, entry, source, f"where (number {place})")
        for key, wanted in rule.when.items():
            for value in _as_list(wanted):
                if key in axes and value not in axes[key]:
                    raise InputError(
                        f"{source}: where (number {place}): {key} is never {value!r}; "
                        f"the sweep has {', '.join(map(repr, axes[key]))}"
                    )
        if swept := [key for key in rule.set if key in axes]:
            raise InputError(f"{source}: where (number {place}): {swept[0]} is swept and cannot be set by a rule")
        rules.append(rule)
    return rules


def _as_list(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


@dataclass(frozen=True)
class SweepPoint:
    """One run of a scenario: which swept values it has (dotted key -> value), and the resolved cell."""

    swept_values: Mapping[str, Any]
    cell: Cell


@dataclass(frozen=True)
class Scenario:
    """A scenario file with its overrides: every point to run, and what was published."""

    name: str
    title: str
    axes: Mapping[str, list[Any]]
    seeds: list[int]
    points: list[SweepPoint]
    published: PublishedValues | None
    growth: Growth | None = None
    tuning: Tuning | None = None
    """How its settings were chosen, where `fedpriv tune` wrote the file."""

    def at_single_point(self, place: int) -> "Scenario":
        """The scenario of its point at `place` only: its axes and seeds have one value each."""
        point = self.points[place]
        axes = {key: [value] for key, value in point.swept_values.items()}
        return dataclasses.replace(self, axes=axes, seeds=[point.cell.seed], points=[point])


def load_scenario(path: Path, overrides: Iterable[str] = ()) -> Scenario:
    """Read, override ("KEY=VALUE", dotted keys, TOML values), sweep and validate a scenario.

    `path` is a file or the name of a shipped scenario, as `scenario_file` finds it.
    """
    return parse_scenario(read_toml(find_scenario_file(path)), str(path), overrides)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a text file: {error}") from None
    except tomllib.TOMLDecodeError as error:
        if is_table_path(path.name):
            made = f"fedpriv data inspect {path} --target COLUMN --out FOLDER"
            raise InputError(f"{path}: is a table, and no scenario; write one with: {made}") from None
        raise InputError(f"{path}: not valid TOML: {error}") from None


def parse_scenario(tree: Mapping[str, Any], source: str, overrides: Iterable[str] = ()) -> Scenario:
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
    printed = copy.deepcopy(base)
    published = parse_published(paper, printed_axes, source, *layout)
    scaling = parse_growth(base.pop("scaling", None), printed_axes, source)
    tuned = parse_tuning(base.pop("tuned", None), source)
    rules = parse_rules(base.pop("where", []), printed_axes, source)
    given = split_overrides(
        overrides,
        {key: drop_duplicates(values) if isinstance(values, list) else values for key, values in sweep.items()},
    )
    axes = dict(given.axes)
    labels = {key: value for key, value in given.fixed_values.items() if key.startswith("label.")}
    for key, values in (labels | axes).items():
        given_values = values if isinstance(values, list) else [values]
        if any(isinstance(value, float) and not math.isfinite(value) for value in given_values):
            raise InputError(f"{source}: {key}: swept values and labels are finite numbers, texts or lists")
    for key, value in given.fixed_values.items():
        assign_key(base, key, value)
    if published is not None and not {published.tables.rows, published.tables.columns} <= axes.keys():
        published = None  # another privacy target took an axis away
    if published is not None or scaling is not None:
        added = {key: values for key, values in axes.items() if key != "seeds" and key not in printed_axes}
        alone = {key: values[0] if len(values) == 1 else values for key, values in added.items()}
        other = find_changed_keys(printed, {**given.fixed_values, **alone})  # no setting equals a list
        other += [] if tuned is None else ["what `fedpriv tune` chose"]
        if published is not None:
            published = published.without_values(other + find_changed_axes(printed_axes, axes, published))
        scaling = scaling and scaling.without_theory_if(other)
    seeds = _parse_seeds(axes.pop("seeds", None), base.pop("seed", 0), source)
    points = [
        SweepPoint(
            dict(zip(axes, values, strict=True)), _resolve_point(base, axes, values, rules, given, seed, source)
        )
        for values in itertools.product(*axes.values())
        for seed in seeds
    ]
    first = points[0].cell
    return Scenario(first.name, first.title, axes, seeds, points, published, scaling, tuned)


def resolve_cell(tree: Mapping[str, Any], source: str) -> Cell:
    """Validate one cell; InputError with one line if it cannot be run."""
    cell = validate_section(Cell, tree, source)
    row = cell.algorithm.row
    validate_section(row.settings, cell.algorithm.model_extra or {}, source, "algorithm", AlgorithmSection)
    validate_section(cell.model.row.settings, cell.model.model_extra or {}, source, "model", ModelSection)
    if cell.algorithm.trust not in row.trusts:
        raise InputError(
            f"{source}: algorithm.trust = {cell.algorithm.trust!r}: {row.name} can be run with "
            f"{' or '.join(map(repr, row.trusts))}"
        )
    if cell.federation.sampling != "fixed" or cell.federation.groups > 1:
        try:  # refused at once where rounds do not fit; the plan refuses what cannot be accounted for
            _ = cell.schedule
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
    if cell.privacy.rho is not None and row.name_of_mu != "rho":
        raise InputError(
            f"{source}: privacy.rho: only dp-mu2-fl's paper calls mu so; write privacy.mu for {row.name}"
        )
    return cell


def _resolve_point(
    base: Mapping[str, Any],
    axes: Mapping[str, Any],
    values: tuple[Any, ...],
    rules: Iterable[Rule],
    given: Overrides,
    seed: int,
    source: str,
) -> Cell:
    """One cell: the file with the overrides, at a sweep point, with its rules, which overrides outrank."""
    tree = copy.deepcopy(dict(base))
    for key, value in zip(axes, values, strict=True):
        assign_key(tree, key, value)
    for rule in rules:
        rule.apply(tree)
    for key, value in given.fixed_values.items():
        assign_key(tree, key, value)
    drop_superseded_keys(tree, given)
    tree["seed"] = seed
    return resolve_cell(tree, source)


def _parse_seeds(swept: Any, single: Any, source: str) -> list[int]:
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
