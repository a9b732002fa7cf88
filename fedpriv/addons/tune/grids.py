"""Grids, rows and trials of a tuning: the points of a scenario, each with settings to try on fewer records.

A grid varies keys that train, never the promise, the adversary or the records; where none is given it has factors
of the numbers in the scenario.  Trials train without the records that are held out.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_count_range
from fedpriv.plan.task import ModelInputs, check_record_count, load_task, load_task_of_inputs, partition_records
from fedpriv.scenario.load import Scenario, resolve_cell
from fedpriv.scenario.published import assign_key, look_up_key, parse_assignment
from fedpriv.scenario.schema import Cell

_READING_KEYS = ("rounds", "batch", "batches", "cohort", "epochs")
"""Of [federation]: how the records are read.  Who has them, and what of the reading is secret, is not chosen."""
_PROMISE_KEYS = ("sampling", "groups", "min_separation", "max_participations")
_ALLOWED_KEYS = f"algorithm.KEY, model.KEY and federation.{', '.join(_READING_KEYS[:-1])} or {_READING_KEYS[-1]}"


def check_grid(grid: Any, where: str) -> None:
    """Refuse a grid over keys that do not train, and a value that is no grid; InputError names the key.

    Guarantee: settings of such a grid differ in no key of [privacy], [data] or [evaluation], nor in
    algorithm.trust, the silos or clients, or the sampling: a choice among them keeps the promise and the problem.
    """
    if not isinstance(grid, Mapping):
        raise InputError(
            f"{where.rstrip(':')}: expected keys with lists of values, such as algorithm.step = [0.1, 1, 10]"
        )
    for key, values in grid.items():
        if (reason := _why_refused(key)) is not None:
            raise InputError(f"{where} {key}: {reason}")
        if not isinstance(values, list) or not values:
            raise InputError(f"{where} {key}: expected a list of values, such as [0.1, 1, 10]")


def _why_refused(key: str) -> str | None:
    """Say why a grid may not vary a key; None where it may."""
    section, _, name = key.partition(".")
    if key in ("seed", "seeds"):
        return "no setting to choose; give --seeds for those of the trials"
    if section not in Cell.model_fields:
        meant = "." if name else f"; did you mean 'algorithm.{key}'?"
        return f"no key of a scenario{meant} A grid is over {_ALLOWED_KEYS}"
    if key == "algorithm.name":
        return "every algorithm is a row of its own; sweep it, and give every row its grid"
    if (
        section == "privacy"
        or key.split(".")[:2] == ["algorithm", "trust"]
        or (section == "federation" and name in _PROMISE_KEYS)
    ):
        return (
            "says what is protected, against whom or at which price, which is given and not chosen: the weakest "
            f"would always win. A grid is over {_ALLOWED_KEYS}; sweep {key} for a row of each"
        )
    may = name and (section in ("algorithm", "model") or (section == "federation" and name in _READING_KEYS))
    return (
        None
        if may
        else f"another value is another problem, or another measure of it. A grid is over {_ALLOWED_KEYS}"
    )


Setting = Mapping[str, Any]
Grid = Mapping[str, Sequence[Any]]

_MAX_FACTOR = 9.0  # the largest factor of a number of the scenario, and one over the smallest
_FACTOR_COUNT = 5  # of each number, where there are two or more
_SINGLE_NUMBER_FACTOR_COUNT = 25  # of one number alone


def list_settings(grid: Grid) -> list[Setting]:
    """Combine the values of all keys, in every way."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def parse_grid(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Read "KEY=[VALUES]" of a command line; InputError for a value that is no list, or a key given twice."""
    grid: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, values = parse_assignment(assignment) if assignment.strip().find("=") > 0 else (assignment, None)
        if not isinstance(values, list) or not values:
            raise InputError(f"--grid {assignment!r}: expected KEY=[VALUE, …], such as algorithm.step=[0.1,1,10]")
        if key in grid:
            raise InputError(f"--grid {assignment!r}: {key} has a grid already; give all its values in one list")
        grid[key] = values
    return grid


def make_default_grid(cell: Cell) -> dict[str, list[Any]]:
    """Take factors from 1/9 to 9 of every positive number in the cell's [algorithm]; InputError if it has none."""
    settings = cell.algorithm.settings
    numbers = {
        name: value
        for name, field in type(settings).model_fields.items()
        if isinstance(value := getattr(settings, name), float)
        and math.isfinite(value)
        and name in settings.model_fields_set
        and _is_scale(field.annotation, field.metadata)
    }
    if not numbers:
        raise InputError(
            f"algorithm.name = {cell.algorithm.name!r}: the scenario gives it no number to vary; give --grid "
            "KEY=[VALUE, …]"
        )
    factors = np.geomspace(
        1.0 / _MAX_FACTOR, _MAX_FACTOR, _SINGLE_NUMBER_FACTOR_COUNT if len(numbers) == 1 else _FACTOR_COUNT
    )
    return {
        f"algorithm.{name}": [float(f"{value * factor:.4g}") for factor in factors]
        for name, value in numbers.items()
    }


def _is_scale(annotation: Any, metadata: Sequence[Any]) -> bool:
    """Tell whether a field takes every number above 0: one that has an upper end is no scale."""
    kinds = annotation, *getattr(annotation, "__args__", ())
    found = [*metadata, *(part for kind in kinds for part in getattr(kind, "__metadata__", ()))]
    flat = [part for each in found for part in (getattr(each, "metadata", None) or [each])]
    ends = {name for part in flat for name in ("gt", "lt", "le") if getattr(part, name, None) is not None}
    return ends == {"gt"}


def choose_settings(
    grids: Sequence[Grid], trials: int | None, generator: np.random.Generator
) -> list[list[Setting]]:
    """Choose the settings to try for every grid: all, or `trials` of each at random, of each grid as many.

    InputError where grids have other numbers of settings and nothing says how many are tried, and for less than 1.
    """
    if trials is not None and trials < 1:
        raise InputError(f"--trials {trials}: at least 1 setting of every row is tried")
    whole = [list_settings(grid) for grid in grids]
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
class GridPosition:
    """Place of a chosen value among those of its key."""

    key: str
    value: Any
    number: int
    """From 1."""
    count: int

    @property
    def is_edge(self) -> bool:
        """Whether a wider grid might have a better one: numbers only, of which there are several."""
        numeric = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return numeric and self.count > 1 and self.number in (1, self.count)


def find_positions(grid: Grid, setting: Setting) -> list[GridPosition]:
    """Find the place of the setting's value for every key that has several."""
    found = []
    for key, values in grid.items():
        numeric = all(isinstance(value, int | float) for value in values)
        ordered = sorted(values) if numeric else list(values)
        if len(values) > 1:
            found.append(GridPosition(key, setting[key], ordered.index(setting[key]) + 1, len(ordered)))
    return found


_HELD_OUT_DIVISOR = 10  # one in so many training records is held out by default
LOWER_IS_BETTER = ("loss", "error")


@dataclass(frozen=True)
class TuningRow:
    """Row of a tuning: one point of the scenario's sweep; seeds apart, one cell."""

    when: Mapping[str, Any]
    """The swept keys and their values; where nothing is swept, the algorithm."""
    cell: Cell
    grid: Grid


def pair_grids(
    scenario: Scenario, grids: Mapping[Any, Grid] | None, axis: str
) -> list[tuple[Mapping[str, Any], Cell, Grid]]:
    """Pair points with the grid of their value of `axis`, which they may lack; leave out those without a grid."""
    found: list[tuple[Mapping[str, Any], Cell, Grid]] = []
    for point in scenario.points[:: len(scenario.seeds)]:
        tree = point.cell.canonical_data()
        when = dict(point.swept_values) or {"algorithm.name": point.cell.algorithm.name}
        grid = {} if grids is None else grids.get(point.swept_values.get(axis, look_up_key(tree, axis)))
        if grid is not None:
            found.append((when, point.cell, grid))
    return found


@dataclass(frozen=True)
class HeldOut:
    """Held-out training records, on which settings are compared: the last ones of the training set."""

    count: int
    total_count: int
    silo_counts_by_run: tuple[tuple[int, ...], ...]
    """How many of them each silo reads, for every run of the scenario that reads others."""

    @property
    def description(self) -> str:
        """Words for the owner of the held-out records."""
        read, each = (
            format_count_range(map(sum, self.silo_counts_by_run)),
            format_count_range(count for run in self.silo_counts_by_run for count in run),
        )
        silos = format_count_range(map(len, self.silo_counts_by_run))
        return (
            f"the last {self.count:,} of {self.total_count:,} training records are held out while tuning; in a "
            "run of the "
            f"tuned scenario {read} of them belong to its silos, {each} to each of {silos}"
        )

    def count_in_runs(self, cells: Sequence[Cell]) -> "HeldOut":
        """Count the same records in the runs of `cells`; InputError for a cell that asks for too many."""
        distinct = {
            repr((cell.seed, cell.data, cell.federation, cell.schedule, cell.privacy.protected_unit)): cell
            for cell in cells
        }
        return replace(
            self, silo_counts_by_run=tuple(dict.fromkeys(_count_by_silo(cell, self) for cell in distinct.values()))
        )


def _count_by_silo(cell: Cell, held_out: HeldOut) -> tuple[int, ...]:
    """Count the held-out records that each silo of a run reads."""
    units = load_task(cell).unit_indices
    of_rows = (
        np.arange(held_out.total_count)[:, None] if units is None else np.asarray(units)
    )  # persons may have several
    are_held_out = of_rows >= held_out.total_count - held_out.count
    return tuple(int(are_held_out[order.numpy()].sum()) for order in partition_records(cell))


def hold_out(cell: Cell, count: int | None) -> HeldOut:
    """Hold out the last `count` training records (default a tenth); InputError if there are fewer."""
    records = len(load_task_of_inputs(ModelInputs.from_cell(cell)).train.labels)
    chosen = max(1, records // _HELD_OUT_DIVISOR) if count is None else count
    if chosen >= records:
        raise InputError(f"--held-out {chosen}: {cell.data.name} has {records} training records")
    return HeldOut(chosen, records, ()).count_in_runs([cell])


def make_trial(cell: Cell, setting: Setting, held_out: HeldOut, fixed: Sequence[str], seed: int) -> Cell:
    """Give the cell a setting and the records that are left; InputError, with the setting, if it cannot run."""
    tree = cell.canonical_data()
    for key, value in _reduce_reading(_with_reading_keys(cell, setting), held_out).items():
        assign_key(tree, key, value)
    assign_key(tree, "data.validation", held_out.count)
    assign_key(tree, "run.evaluations", 1)
    for key, value in (*map(parse_assignment, fixed), *setting.items()):
        assign_key(tree, key, value)
    tree["seed"] = seed
    return _resolve_trial(tree, setting)


def check_settings(row: TuningRow, settings: Sequence[Setting]) -> None:
    """Refuse a setting with which a run on all records asks for more of them than there are."""
    for setting in settings if any(key.startswith("federation.") for key in row.grid) else ():
        try:
            check_record_count(_with_reading_keys(row.cell, setting))
        except InputError as error:
            named = ", ".join(f"{key} = {value}" for key, value in setting.items())
            raise InputError(f"a run with {named}: {error}") from None


def _with_reading_keys(cell: Cell, setting: Setting) -> Cell:
    """Give the cell the keys of a setting that say how records are read."""
    said = {key: value for key, value in setting.items() if key.startswith("federation.")}
    if not said:
        return cell
    tree = cell.canonical_data()
    for key, value in said.items():
        assign_key(tree, key, value)
    return _resolve_trial(tree, said)


def _resolve_trial(tree: dict[str, Any], setting: Setting) -> Cell:
    """Resolve a trial's cell; an InputError names the setting, once."""
    try:
        return resolve_cell(tree, "while tuning")
    except InputError as error:
        said = str(error)
        if not any(f" {key} = {value!r}: " in said for key, value in setting.items()):
            named = "".join(f", {key} = {value}" for key, value in setting.items())
            said = f"while tuning{named}{said.removeprefix('while tuning')}"
        raise InputError(said) from None


def _reduce_reading(cell: Cell, held_out: HeldOut) -> dict[str, Any]:
    """Ask for fewer rounds, samples or batches where the records that are left do not last."""
    federation, left = cell.federation, held_out.total_count - held_out.count
    if cell.data.partition == "site" and federation.batches is not None:
        return _reduce_site_batches(cell, held_out, federation.batches)
    if sum(cell.batch_sizes) * cell.schedule.batches_per_silo <= left:
        return {}
    if federation.samples is not None:
        return {"federation.samples": min(federation.samples, left)}
    if federation.batches is not None:
        return {"federation.batches": [max(1, size * left // held_out.total_count) for size in federation.batches]}
    passes = left // sum(cell.batch_sizes)
    return {"federation.rounds": max(1, min(federation.rounds_per_epoch, passes)) * federation.epochs}


def _reduce_site_batches(cell: Cell, held_out: HeldOut, batches: Sequence[int]) -> dict[str, Any]:
    """Give each site the batch that its records, or persons, that are left last for."""
    tree = cell.canonical_data()
    assign_key(tree, "data.validation", held_out.count)
    sites = load_task(resolve_cell(tree, "while tuning")).train_sites
    assert sites is not None
    has = np.bincount(sites, minlength=len(batches)) // cell.schedule.batches_per_silo
    return {"federation.batches": [max(1, min(pair)) for pair in zip(batches, has.tolist(), strict=True)]}


def is_better(metric: str, one: float, other: float) -> bool:
    """Tell whether `one` is the better value of a metric: smaller for a loss or error, larger for others."""
    lower = any(word in metric for word in LOWER_IS_BETTER)
    return one < other if lower else one > other
