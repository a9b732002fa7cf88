"""From a TOML file to the cells it stands for: overrides, sweep, seeds, validation."""

import copy
import dataclasses
import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedpriv.errors import InputError
from fedpriv.scenario.messages import explain
from fedpriv.scenario.overrides import Sorted, forget_what_gave_way, once, sort_out
from fedpriv.scenario.published import Published, Scaling, changed, changed_axes, published_of, scaling_of
from fedpriv.scenario.rules import Rule, rules_of
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.tree import assign
from fedpriv.scenario.tuned import Tuned, tuned_of
from fedpriv.shipped import scenario_file


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
    tuned: Tuned | None = None
    """How its settings were chosen, where `fedpriv tune` wrote the file."""

    def alone(self, place: int) -> "Scenario":
        """The scenario of its point at `place` only: its axes and seeds have one value each."""
        point = self.points[place]
        axes = {key: [value] for key, value in point.swept.items()}
        return dataclasses.replace(self, axes=axes, seeds=[point.cell.seed], points=[point])


def load_scenario(path: Path, overrides: Iterable[str] = ()) -> Scenario:
    """Read, override ("KEY=VALUE", dotted keys, TOML values), sweep and validate a scenario.

    `path` is a file or the name of a shipped scenario, as `scenario_file` finds it.
    """
    return scenario_of(read_toml(scenario_file(path)), str(path), overrides)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
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
    printed = copy.deepcopy(base)
    published = published_of(paper, printed_axes, source, *layout)
    scaling = scaling_of(base.pop("scaling", None), printed_axes, source)
    tuned = tuned_of(base.pop("tuned", None), source)
    rules = rules_of(base.pop("where", []), printed_axes, source)
    given = sort_out(
        overrides, {key: once(values) if isinstance(values, list) else values for key, values in sweep.items()}
    )
    axes = dict(given.axes)
    for key, value in given.fixed.items():
        assign(base, key, value)
    if published is not None and not {published.table.rows, published.table.columns} <= axes.keys():
        published = None  # another privacy target took an axis away
    if published is not None:
        other = changed(printed, {**given.fixed, **_new_axes(printed_axes, axes)})
        other += [] if tuned is None else ["what `fedpriv tune` chose"]
        published = published.without_values(other + changed_axes(printed_axes, axes, published))
    seeds = _seeds(axes.pop("seeds", None), base.pop("seed", 0), source)
    points = [
        Point(dict(zip(axes, values, strict=True)), _cell(base, axes, values, rules, given, seed, source))
        for values in itertools.product(*axes.values())
        for seed in seeds
    ]
    first = points[0].cell
    return Scenario(first.name, first.title, axes, seeds, points, published, scaling, tuned)


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
    given: Sorted,
    seed: int,
    source: str,
) -> Cell:
    """One cell: the file with the overrides, at a sweep point, with its rules, which overrides outrank."""
    tree = copy.deepcopy(dict(base))
    for key, value in zip(axes, values, strict=True):
        assign(tree, key, value)
    for rule in rules:
        rule.apply(tree)
    for key, value in given.fixed.items():
        assign(tree, key, value)
    forget_what_gave_way(tree, given)
    tree["seed"] = seed
    return resolve_cell(tree, source)


def _new_axes(printed: Mapping[str, list[Any]], axes: Mapping[str, Any]) -> dict[str, Any]:
    """Axes that an override added, with their only value, or with the list that no setting equals."""
    return {
        key: values[0] if len(values) == 1 else values
        for key, values in axes.items()
        if key != "seeds" and key not in printed
    }


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
