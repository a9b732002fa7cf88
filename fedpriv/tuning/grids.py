"""Which settings are tried: a grid for every row, or factors of the numbers that a scenario has."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpriv.errors import InputError
from fedpriv.scenario import Cell
from fedpriv.scenario.tree import parsed_assignment

Setting = Mapping[str, Any]
Grid = Mapping[str, Sequence[Any]]

_WIDTH = 9.0  # the largest factor of a number of the scenario, and one over the smallest
_FACTORS = 5  # of each number, where there are two or more
_SETTINGS = 25  # of one number alone


def settings_of(grid: Grid) -> list[Setting]:
    """Every combination."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def given_grid(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """ "KEY=[VALUES]" of a command line; InputError for what is no list of values, or a key given twice."""
    grid: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, values = parsed_assignment(assignment) if assignment.strip().find("=") > 0 else (assignment, None)
        if not isinstance(values, list) or not values:
            raise InputError(f"--grid {assignment!r}: expected KEY=[VALUE, …], such as algorithm.step=[0.1,1,10]")
        if key in grid:
            raise InputError(f"--grid {assignment!r}: {key} has a grid already; give all its values in one list")
        grid[key] = values
    return grid


def grid_around(cell: Cell) -> dict[str, list[Any]]:
    """Factors from 1/9 to 9 of every positive number that the cell's [algorithm] has; InputError for none."""
    settings = cell.algorithm.settings
    numbers = {
        name: value
        for name, field in type(settings).model_fields.items()
        if isinstance(value := getattr(settings, name), float)
        and math.isfinite(value)
        and name in settings.model_fields_set
        and _is_a_scale(field.annotation, field.metadata)
    }
    if not numbers:
        raise InputError(
            f"algorithm.name = {cell.algorithm.name!r}: the scenario gives it no number to vary; give --grid "
            "KEY=[VALUE, …]"
        )
    count = _SETTINGS if len(numbers) == 1 else _FACTORS
    factors = np.geomspace(1.0 / _WIDTH, _WIDTH, count)
    return {
        f"algorithm.{name}": [float(f"{value * factor:.4g}") for factor in factors]
        for name, value in numbers.items()
    }


def _is_a_scale(annotation: Any, metadata: Sequence[Any]) -> bool:
    """Whether a field takes every number above 0: one that has an upper end is no scale."""
    found = [*metadata, *(part for kind in _kinds(annotation) for part in getattr(kind, "__metadata__", ()))]
    flat = [part for each in found for part in (getattr(each, "metadata", None) or [each])]
    ends = {name for part in flat for name in ("gt", "lt", "le") if getattr(part, name, None) is not None}
    return ends == {"gt"}


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *getattr(annotation, "__args__", ()))


def chosen_settings(
    grids: Sequence[Grid], trials: int | None, generator: np.random.Generator
) -> list[list[Setting]]:
    """The settings to try for every grid: all, or `trials` of each at random, of each grid as many.

    InputError where grids have other numbers of settings and nothing says how many are tried, and for less than 1.
    """
    if trials is not None and trials < 1:
        raise InputError(f"--trials {trials}: at least 1 setting of every row is tried")
    whole = [settings_of(grid) for grid in grids]
    sizes = sorted(set(map(len, whole)))
    if trials is None and len(sizes) > 1:
        raise InputError(
            f"grids of {sizes[0]} and {sizes[-1]} settings: every row gets as many, so give --trials {sizes[0]} "
            "or grids of one size"
        )
    if trials is not None and trials > sizes[0]:
        raise InputError(f"--trials {trials}: the smallest grid has {sizes[0]} settings; widen it, or give fewer")
    if trials is None:
        return whole
    order = generator.permutation  # grids that are alike get the same settings
    picks: dict[int, list[int]] = {size: sorted(order(size)[:trials].tolist()) for size in sizes}
    return [[settings[place] for place in picks[len(settings)]] for settings in whole]


@dataclass(frozen=True)
class Place:
    """Where a chosen value stands among those of its key."""

    key: str
    value: Any
    number: int
    """From 1."""
    of: int

    @property
    def edge(self) -> bool:
        """Whether a wider grid might have a better one: numbers only, of which there are several."""
        numeric = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return numeric and self.of > 1 and self.number in (1, self.of)


def places(grid: Grid, setting: Setting) -> list[Place]:
    """A place for every key that has several values."""
    found = []
    for key, values in grid.items():
        numeric = all(isinstance(value, int | float) for value in values)
        ordered = sorted(values) if numeric else list(values)
        if len(values) > 1:
            found.append(Place(key, setting[key], ordered.index(setting[key]) + 1, len(ordered)))
    return found
