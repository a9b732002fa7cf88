"""Load a TOML file as the cells of a scenario: overrides, sweep, seeds and validation.

An option `--set` overrides the value of a key, or the values of a swept key.

A rule [[where]] sets keys at the sweep points where other keys have certain values.  A sweep over algorithms, for
instance, needs different settings for each algorithm:

    [[where]]
    when = { "algorithm.name" = "dp-sgd", "privacy.mu" = [0.3, 1.0] }
    set = { "algorithm.clip" = 5.0 }

Rules apply in the order of the file.  A swept value or an override takes the place of a rule's value, and later
rules check their conditions with it.

* An axis is a swept key, such as "privacy.mu", with the list of its values.
* A point of the sweep has one value of each axis.
* A cell is one run: a point and a seed, with every key resolved.
* A setting is what a run computes, without its name, its seed and the way in which it is run.
* The tree of a file or of a cell is its nested keys, as the TOML parser returns them.
"""

import copy
import dataclasses
import itertools
import math
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fedpriv.core.errors import InputError
from fedpriv.core.files import find_scenario_file
from fedpriv.data.cells import is_table_path
from fedpriv.data.named import RECORDS_FOLDER_VARIABLE
from fedpriv.data.own import is_npz_path
from fedpriv.scenario.data import PARTITION_KEYS
from fedpriv.scenario.messages import validate_section
from fedpriv.scenario.published import (
    Growth,
    PublishedValues,
    Tuning,
    assign_key,
    find_changed_axes,
    find_changed_keys,
    flatten_keys,
    look_up_key,
    parse_assignment,
    parse_growth,
    parse_published,
    parse_tuning,
)
from fedpriv.scenario.schema import AlgorithmSection, Cell, ModelSection

PRIVACY_TARGETS = ("mu", "rho", "zcdp", "epsilon")
"""Keys of [privacy] for the privacy target.  A private run has exactly one of them."""


@dataclass(frozen=True)
class Overrides:
    """Overrides of a scenario, split into axes of the sweep and single values."""

    axes: Mapping[str, Any]
    """Values of each axis of the sweep, and "seeds" in the form of the file."""
    fixed_values: Mapping[str, Any]
    """Value of each key that has one value for all points."""
    overridden_keys: frozenset[str]
    """Names of the overridden keys."""


def split_overrides(overrides: Iterable[str], sweep_axes: Mapping[str, Any]) -> Overrides:
    """Split "KEY=VALUE" overrides into axes of the sweep and fixed keys.

    The value, or the list of values, takes the place of a swept key's values.  A key that is not swept becomes an
    axis if its value is a list (and "seeds" in any case), and otherwise a fixed key.  An overridden privacy target
    removes the axes of other targets.  Without one `privacy.mode=none` removes the axes of all targets if the mode
    is not swept.  An overridden partition removes the axes of the keys of other partitions.

    Args:
        overrides: Texts "KEY=VALUE", of which a later one of the same key replaces an earlier one.
        sweep_axes: Values of each axis in the file, with the seeds as the key "seeds".

    Raises:
        InputError: An override is malformed, or has an empty list and is not "seeds".
    """
    axes, fixed_values, overridden_keys = dict(sweep_axes), dict[str, Any](), set[str]()
    for assignment in overrides:
        key, value = parse_assignment(assignment)
        key = key.removeprefix("sweep.")  # a user may name the key as it stands in the file
        if key != "seeds" and isinstance(value, list):
            if not value:
                raise InputError(f"--set {assignment!r}: expected at least one value to sweep")
            axes[key] = drop_duplicates(value)
            # An earlier override of the key counts no more.
            fixed_values.pop(key, None)
        elif key in axes or key == "seeds":
            axes[key] = value if key == "seeds" else [value]
        else:
            fixed_values[key] = value
        overridden_keys.add(key)
    for key in [
        *find_excluded_targets(overridden_keys, fixed_values.get("privacy.mode")),
        *find_excluded_partition_keys(
            overridden_keys, axes.get("data.partition", [fixed_values.get("data.partition")])
        ),
    ]:
        axes.pop(key, None)
    return Overrides(axes, fixed_values, frozenset(overridden_keys))


def drop_duplicates(values: list[Any]) -> list[Any]:
    """Drop repeated values, since a cell that occurs twice is no second seed."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def find_excluded_targets(overridden_keys: Iterable[str], mode: Any = None) -> list[str]:
    """Return the privacy targets that the overridden ones replace, or all targets in a mode without noise.

    Args:
        overridden_keys: Dotted names of the overridden keys.
        mode: Overridden value of privacy.mode, or None.

    Returns:
        Dotted names.  If targets are overridden, they are the others, whatever the mode.
    """
    targets = [f"privacy.{name}" for name in PRIVACY_TARGETS]
    kept_targets = [key for key in targets if key in overridden_keys]
    return [key for key in targets if key not in kept_targets] if kept_targets or mode == "none" else []


def find_excluded_partition_keys(overridden_keys: Iterable[str], partitions: Collection[Any]) -> list[str]:
    """Return the keys of other partitions if the partition is overridden, unless they are overridden, too.

    Args:
        overridden_keys: Dotted names of the overridden keys.
        partitions: Values of data.partition, whose keys stay.

    Returns:
        Dotted names.
    """
    return [
        f"data.{key}"
        for partition, key in PARTITION_KEYS.items()
        if partition not in partitions
        and "data.partition" in overridden_keys
        and f"data.{key}" not in overridden_keys
    ]


def drop_superseded_keys(tree: dict[str, Any], overrides: Overrides) -> None:
    """Drop keys from a cell's tree that an override excludes.

    The keys are those for which `split_overrides` removes axes, privacy targets and keys of other partitions.

    Args:
        tree: Nested keys of a cell, which the function changes.
        overrides: Overrides of the scenario, which the tree has already.
    """
    keys = [
        *find_excluded_targets(overrides.overridden_keys, overrides.fixed_values.get("privacy.mode")),
        *find_excluded_partition_keys(overrides.overridden_keys, [look_up_key(tree, "data.partition")]),
    ]
    for section, key in (dotted.split(".") for dotted in keys):
        if isinstance(tree.get(section), dict):  # a rule may have set the section to another value, refused later
            tree[section].pop(key, None)


class Rule(BaseModel):
    """Rule [[where]], which sets the keys of `set` at the points that `when` selects.

    At these points every key of `when` has its value, or one of its values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: dict[str, Any] = Field(description="dotted keys and the value, or the list of values, they must have")
    set: dict[str, Any] = Field(description="dotted keys and the values they get")

    def apply(self, tree: dict[str, Any]) -> None:
        """Set the rule's keys in a cell's tree, if all its conditions hold there."""
        if all(look_up_key(tree, key) in _as_list(condition) for key, condition in self.when.items()):
            for key, value in self.set.items():
                assign_key(tree, key, copy.deepcopy(value))  # later keys may be set in it


def parse_rules(entries: Any, axes: Mapping[str, list[Any]], source: str) -> list[Rule]:
    """Parse the [[where]] rules of a file, and check them against its sweep.

    Args:
        entries: Value of the key `where`, a list of tables with `when` and `set`.
        axes: Values of each axis of the sweep in the file.
        source: Name of the file in messages.

    Raises:
        InputError: A rule is malformed, needs a value that its axis does not have, or sets a swept key.
    """
    if not isinstance(entries, list):
        raise InputError(f"{source}: where = {entries!r}: expected [[where]] tables with `when` and `set`")
    rules = []
    for number, entry in enumerate(entries, start=1):
        rule = validate_section(Rule, entry, source, f"where (number {number})")
        for key, condition in rule.when.items():
            for value in _as_list(condition):
                if key in axes and value not in axes[key]:
                    raise InputError(
                        f"{source}: where (number {number}): {key} is never {value!r}; "
                        f"the sweep has {', '.join(map(repr, axes[key]))}"
                    )
        if swept_keys := [key for key in rule.set if key in axes]:
            raise InputError(
                f"{source}: where (number {number}): {swept_keys[0]} is swept and cannot be set by a rule"
            )
        rules.append(rule)
    return rules


def _as_list(condition: Any) -> list[Any]:
    return condition if isinstance(condition, list) else [condition]


@dataclass(frozen=True)
class SweepPoint:
    """Run of a scenario: the value of each swept key, by its dotted name, and the resolved cell."""

    swept_values: Mapping[str, Any]
    cell: Cell


@dataclass(frozen=True)
class Scenario:
    """Scenario file with its overrides: all points to run, and the published values."""

    name: str
    """Name of the scenario, of lower-case letters, digits and dashes."""
    title: str
    axes: Mapping[str, list[Any]]
    """Values of each swept key, by its dotted name."""
    seeds: list[int]
    """Seeds of the runs at each point."""
    points: list[SweepPoint]
    """Runs, in the order of the axes' values, with the seeds of a point one after another."""
    published: PublishedValues | None
    """Section [paper] or [table], or None without it or if an override removed an axis of its tables.

    Values are withheld if an override changed their setting.
    """
    growth: Growth | None = None
    """Section [scaling], or None without it or if an override removed one of its axes.

    Theoretical exponents are left out if an override changed the setting.
    """
    tuning: Tuning | None = None
    """Record of the choice of settings, if `fedpriv tune` wrote the file."""

    def at_single_point(self, index: int) -> "Scenario":
        """Return the scenario of one point alone, whose axes and seeds have one value each."""
        point = self.points[index]
        return dataclasses.replace(
            self,
            axes={key: [value] for key, value in point.swept_values.items()},
            seeds=[point.cell.seed],
            points=[point],
        )


def load_scenario(path: Path, overrides: Iterable[str] = (), *, finds_tables: bool = True) -> Scenario:
    """Read, override, sweep and validate a scenario.

    Args:
        path: File, or name of a shipped scenario (`find_scenario_file`).
        overrides: Texts "KEY=VALUE" with dotted keys and TOML values.
        finds_tables: Whether files of records that [data] or [sweep] names are looked for in the scenario's folder
            first.

    Raises:
        InputError: The file cannot be read, a key or an override is malformed, or a cell cannot be run.
    """
    tree = read_toml(file := find_scenario_file(path))
    if finds_tables:
        _find_tables(tree, file.parent)
    return parse_scenario(tree, str(path), overrides)


def _find_tables(tree: dict[str, Any], folder: Path) -> None:
    """Replace paths of records from the scenario's folder by paths from the working directory.

    The paths are those in [data] and [sweep].  A path that leads to no file from the scenario's folder stays.
    Where `RECORDS_FOLDER_VARIABLE` names the folder in which relative paths begin, the new paths are absolute.
    """
    format_path = os.path.abspath if os.environ.get(RECORDS_FOLDER_VARIABLE) else os.path.normpath
    for section, key in (("data", "name"), ("sweep", "data.name")):
        if isinstance(keys := tree.get(section), dict) and key in keys:
            names = [
                format_path(folder / name)
                if isinstance(name, str)
                and (is_table_path(name) or is_npz_path(name))
                and (folder / name).is_file()
                else name
                for name in _as_list(keys[key])
            ]
            keys[key] = names if isinstance(keys[key], list) else names[0]


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        InputError: The file cannot be read, is a table of records, or is not valid TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a text file: {error}") from None
    except (ValueError, RecursionError) as error:  # such as an integer of thousands of digits
        if is_table_path(path.name):
            command = f"fedpriv data inspect {path} --target COLUMN --out FOLDER"
            raise InputError(f"{path}: is a table, and no scenario; write one with: {command}") from None
        raise InputError(f"{path}: not valid TOML: {error}") from None


def parse_scenario(tree: Mapping[str, Any], source: str, overrides: Iterable[str] = ()) -> Scenario:
    """Return the scenario of a parsed TOML tree.

    The points are all combinations of the axes' values, each with every seed.  Published values are withheld if an
    override changes their setting (`find_changed_keys`, `find_changed_axes`), and theoretical exponents of
    [scaling] if it changes a key outside the file's sweep (`find_changed_keys`).  Both are withheld if
    `fedpriv tune` wrote the file.  Published tables and [scaling] are dropped if an override removes one of their
    axes.

    Args:
        tree: Parsed TOML.
        source: Name of the file in messages.
        overrides: Texts "KEY=VALUE" with dotted keys and TOML values.

    Returns:
        The scenario, with validated cells.

    Raises:
        InputError: A key, a section or an override is malformed, or a cell cannot be run.
    """
    # Sections of the file about the sweep and the tables.
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
    # Sections about results and rules, which are checked against the axes of the file, before any override.
    file_axes = {key: values for key, values in sweep.items() if key != "seeds"}
    file_tree = copy.deepcopy(base)
    published = parse_published(paper, file_axes, source, *layout)
    growth = parse_growth(base.pop("scaling", None), file_axes, source)
    tuning = parse_tuning(base.pop("tuned", None), source)
    rules = parse_rules(base.pop("where", []), file_axes, source)
    # Overrides: axes of the sweep, and keys with one value for all points.
    override_parts = split_overrides(
        overrides,
        {key: drop_duplicates(values) if isinstance(values, list) else values for key, values in sweep.items()},
    )
    axes = dict(override_parts.axes)
    for key, value in override_parts.fixed_values.items():
        assign_key(base, key, value)
    # Labels are free names of settings, shown in tables.  They have to be finite there, as swept values do.
    labels = [
        pair
        for keys in (base, *(rule.set for rule in rules))
        for pair in flatten_keys(keys)
        if pair[0].startswith("label.")
    ]
    for key, values in [*labels, *axes.items()]:
        if any(
            isinstance(value, float) and not math.isfinite(value)
            for value in (values if isinstance(values, list) else [values])
        ):
            raise InputError(f"{source}: {key}: swept values and labels have to be finite")
    # A cell has one of the `seeds`, in place of any other value of `seed`.
    if (
        ("seeds" in axes and "seed" in override_parts.fixed_values)
        or "seed" in axes
        or any("seed" in rule.set for rule in rules)
    ):
        raise InputError(f"{source}: seed: a sweep has `seeds`, a count or a list: give them in place of `seed`")
    # Published values and theory are shown only for the setting that they belong to.
    # Without an axis, which an override removed, there is no layout.
    published = (
        published if published and {published.tables.rows, published.tables.columns} <= axes.keys() else None
    )
    growth = growth if growth and {growth.along, growth.by, growth.smallest or growth.by} <= axes.keys() else None
    if published is not None or growth is not None:
        new_axes = {key: values for key, values in axes.items() if key != "seeds" and key not in file_axes}
        new_values = {key: values[0] if len(values) == 1 else values for key, values in new_axes.items()}
        # Of an axis that the file has not, the one value or the list of values is compared with the file's value.
        # A list differs from it, unless the file has this list as the value.
        changed = find_changed_keys(
            file_tree,
            {**override_parts.fixed_values, **new_values},
            [pair for rule in rules for pair in flatten_keys(rule.set)],
            {key for rule in rules for key in rule.when},
        )
        changed += [] if tuning is None else ["what `fedpriv tune` chose"]
        if published is not None:
            published = published.without_values(changed + find_changed_axes(file_axes, axes, published))
        growth = growth and growth.without_theory_if(changed)
    # A cell for each point and seed.
    seeds = _parse_seeds(axes.pop("seeds", None), base.pop("seed", 0), source)
    points = [
        SweepPoint(
            dict(zip(axes, values, strict=True)),
            _resolve_point(base, axes, values, rules, override_parts, seed, source),
        )
        for values in itertools.product(*axes.values())
        for seed in seeds
    ]
    return Scenario(points[0].cell.name, points[0].cell.title, axes, seeds, points, published, growth, tuning)


def resolve_cell(tree: Mapping[str, Any], source: str) -> Cell:
    """Validate one cell, with the own keys of its algorithm and its model.

    An algorithm or model has a row in its table, which says what keys it takes.  Trust and privacy.rho have to fit
    the algorithm's row, too, and so have rounds in groups or other than in the fixed order.

    Args:
        tree: Nested keys of the cell.
        source: Name of the file in messages.

    Raises:
        InputError: The cell cannot be run.
    """
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
        try:  # rounds that do not fit are refused here, and the plan refuses what cannot be accounted for
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
    overrides: Overrides,
    seed: int,
    source: str,
) -> Cell:
    """Resolve one point of the sweep: the file, the rules, then the swept values and the fixed overrides.

    Each of these may replace values of those before.  A rule's conditions are checked with the values of earlier
    rules, as far as no swept value or override takes their place.  Then the keys are dropped that an override
    excludes, as `privacy.mu` does `privacy.epsilon`.

    Args:
        base: Nested keys of the file, without sections about the sweep and the results.
        axes: Axes of the sweep, of which only the order of the keys counts.
        values: Value of each axis at the point, in this order.
        rules: Rules [[where]] in the order of the file.
        overrides: Overrides of the scenario.
        seed: Seed of the run.
        source: Name of the file in messages.

    Raises:
        InputError: The cell cannot be run.
    """
    tree, swept_values = copy.deepcopy(dict(base)), dict(zip(axes, values, strict=True))
    point_values = {**swept_values, **overrides.fixed_values}
    # A first rule sets nothing.  After each rule its values give way, before a later rule can see them.
    for rule in (Rule(when={}, set={}), *rules):
        rule.apply(tree)
        for key in sorted(point_values, key=lambda key: key.count(".")):  # a section before the keys in it
            assign_key(tree, key, copy.deepcopy(point_values[key]))
    drop_superseded_keys(tree, overrides)
    tree["seed"] = seed
    return resolve_cell(tree, source)


def _parse_seeds(seeds: Any, single: Any, source: str) -> list[int]:
    """Return the seeds of a list, 0 … n - 1 for a count n, or else the one `seed` of the file.

    Args:
        seeds: Value of `sweep.seeds`: a list, in which a repeated seed counts once, a count, or None.
        single: Value of `seed`, which is used if `seeds` is None.
        source: Name of the file in messages.

    Raises:
        InputError: The seeds are no whole numbers of at least 0, the list is empty, or the count is not 1 to 10^6.
    """
    if seeds is None:
        if type(single) is int and single >= 0:
            return [single]
        raise InputError(f"{source}: seed = {single!r}: expected a whole number of at least 0")
    if type(seeds) is int and 1 <= seeds <= 10**6:
        return list(range(seeds))
    if isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds):
        return list(dict.fromkeys(seeds))
    raise InputError(
        f"{source}: seeds = {seeds!r}: expected how many (such as 5) or a list of non-negative numbers"
    )
