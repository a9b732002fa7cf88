"""Grids, rows and trials of a tuning.

A row is a point of the scenario's sweep, with a grid: values to try for some dotted keys, such as algorithm.step.
A setting has one value for each of these keys.  A trial is a run with a setting that trains without the held-out
records, and is judged on them.  A cell is a run with every key of its scenario resolved.

A grid may vary keys of training, but neither the promise (what is protected, against whom and at which price) nor
the data.  Rounds, epochs and batches may change how many records take part.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedpriv.core.errors import InputError, refuse
from fedpriv.core.figures import format_count_range
from fedpriv.plan.task import ModelInputs, check_record_count, load_task, load_task_of_inputs, partition_records
from fedpriv.scenario.load import Scenario, resolve_cell
from fedpriv.scenario.published import assign_key, look_up_key, parse_assignment
from fedpriv.scenario.schema import Cell

_READING_KEYS = ("rounds", "batch", "batches", "cohort", "epochs")
"""Keys of [federation] that a grid may vary, all about how many records a round reads and how often."""
MEASURE_KEYS = ("model.loss", "model.class_weights", "model.label_smoothing")
"""Keys that say what `test_loss` is, so that values of it cannot be compared if they differ."""
_PROMISE_KEYS = ("sampling", "groups", "min_separation", "max_participations")
_ALLOWED_KEYS = f"algorithm.KEY, model.KEY and federation.{', '.join(_READING_KEYS[:-1])} or {_READING_KEYS[-1]}"


def check_grid(grid: Any, source: str) -> None:
    """Check that a value is a grid, with lists of values for keys that a grid may vary.

    Guarantee: settings of such a grid differ in no key of [privacy], [data] or [evaluation], nor in
    algorithm.trust, the silos or clients, or the sampling: a choice among them keeps the promise and the problem.

    Args:
        grid: Values by dotted key.
        source: Start of the error message, which names the option or file of the grid.

    Raises:
        InputError: The value is no grid, or varies a key that it may not.
    """
    if not isinstance(grid, Mapping):
        raise InputError(
            f"{source.rstrip(':')}: expected keys with lists of values, such as algorithm.step = [0.1, 1, 10]"
        )
    for key, values in grid.items():
        if (reason := _why_refused(key)) is not None:
            raise InputError(f"{source} {key}: {reason}")
        if not isinstance(values, list) or not values:
            raise InputError(f"{source} {key}: expected a list of values, such as [0.1, 1, 10]")


def _why_refused(key: str) -> str | None:
    """Return the reason for which a grid may not vary a dotted key, or None if it may.

    Grids are for settings of training.  Other keys could let the weakest promise or the easiest problem win.
    """
    section, _, name = key.partition(".")
    if key in ("seed", "seeds"):
        return "no setting to choose; give --seeds for those of the trials"
    if section not in Cell.model_fields:
        return (
            "no key of a scenario"
            + ("." if name else f"; did you mean 'algorithm.{key}'?")
            + f" A grid is over {_ALLOWED_KEYS}"
        )
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
    is_allowed = name and (
        section in ("algorithm", "model") or (section == "federation" and name in _READING_KEYS)
    )
    return (
        None
        if is_allowed
        else f"another value is another problem, or another measure of it. A grid is over {_ALLOWED_KEYS}"
    )


Setting = Mapping[str, Any]
Grid = Mapping[str, Sequence[Any]]

_MAX_FACTOR = 9.0  # largest factor of a number of the scenario, and inverse of the smallest one
_FACTOR_COUNT = 5  # for each number, if there are several
_SINGLE_NUMBER_FACTOR_COUNT = 25  # for a single number


def list_settings(grid: Grid) -> list[Setting]:
    """Return all combinations of the values of all keys."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def parse_grid(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Parse "KEY=[VALUES]" of a command line to the values of each dotted key.

    Raises:
        InputError: An assignment is not KEY=[VALUES] with one value or more, or a key has two grids.
    """
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
    """Return a grid of multiples of the numbers that the scenario sets in [algorithm].

    Varied are floats that may be any number above a bound, such as a step size.  The factors, from 1/9 to 9, are
    equally spaced in logarithm: 25 for a single number, or 5 for each of several.  Values have at most four
    significant digits.

    Raises:
        InputError: The scenario has no such number.
    """
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
            f"algorithm.name = {cell.algorithm.name!r}: the scenario gives it no number to vary; "
            "give --grid KEY=[VALUE, …]"
        )
    factors = np.geomspace(
        1.0 / _MAX_FACTOR, _MAX_FACTOR, _SINGLE_NUMBER_FACTOR_COUNT if len(numbers) == 1 else _FACTOR_COUNT
    )
    return {
        f"algorithm.{name}": [float(f"{value * factor:.4g}") for factor in factors]
        for name, value in numbers.items()
    }


def _is_scale(annotation: Any, metadata: Sequence[Any]) -> bool:
    """Whether a field of settings has a lower bound such as > 0, and no upper bound."""
    # Pydantic has bounds in the field's metadata or in that of a type in a union, some of them inside an object.
    kinds = annotation, *getattr(annotation, "__args__", ())
    entries = [*metadata, *(part for kind in kinds for part in getattr(kind, "__metadata__", ()))]
    flat = [part for entry in entries for part in (getattr(entry, "metadata", None) or [entry])]
    return {name for part in flat for name in ("gt", "lt", "le") if getattr(part, name, None) is not None} == {
        "gt"
    }


def choose_settings(
    grids: Sequence[Grid], trials: int | None, generator: np.random.Generator
) -> list[list[Setting]]:
    """Choose the settings to try for each grid: all, or `trials` of each at random without replacement.

    Random choices from grids of the same size have the same positions, so that rows with the same grid try the
    same settings.

    Args:
        grids: Grid of each row.
        trials: Number of settings of each row, or None for all, which then have to be equally many.
        generator: Source of the random choice.

    Raises:
        InputError: The rows cannot have `trials` settings each, or have different numbers of settings without
            `trials`.
    """
    if trials is not None and trials < 1:
        raise InputError(f"--trials {trials}: at least 1 setting of every row is tried")
    settings_of_grids = [list_settings(grid) for grid in grids]
    sizes = sorted(set(map(len, settings_of_grids)))
    if trials is None and len(sizes) > 1:
        raise InputError(
            f"grids of {sizes[0]} and {sizes[-1]} settings: every row gets as many, "
            f"so give --trials {sizes[0]} or grids of one size"
        )
    if trials is not None and trials > sizes[0]:
        raise InputError(f"--trials {trials}: the smallest grid has {sizes[0]} settings; widen it, or give fewer")
    if trials is None:
        return settings_of_grids
    order = generator.permutation  # grids of the same size get the same indices
    picks: dict[int, list[int]] = {size: sorted(order(size)[:trials].tolist()) for size in sizes}
    return [[settings[index] for index in picks[len(settings)]] for settings in settings_of_grids]


@dataclass(frozen=True)
class GridPosition:
    """Position of a chosen value among those of its key."""

    key: str
    """Dotted key."""
    value: Any
    """Chosen value."""
    number: int
    """Position, from 1."""
    count: int
    """Number of values of the key."""

    @property
    def is_edge(self) -> bool:
        """Whether the value is a number, and the first or last of several values."""
        numeric = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return numeric and self.count > 1 and self.number in (1, self.count)


def find_positions(grid: Grid, setting: Setting) -> list[GridPosition]:
    """Return the position, from 1, of the setting's value for each key that has several values.

    The values of a key are in increasing order if all are numbers, and else in the order of the grid.
    """
    positions = []
    for key, values in grid.items():
        numeric = all(type(value) in (int, float) for value in values)
        ordered = sorted(values) if numeric else list(values)
        if len(values) > 1:
            positions.append(GridPosition(key, setting[key], ordered.index(setting[key]) + 1, len(ordered)))
    return positions


_HELD_OUT_DIVISOR = 10  # by default the fraction of held-out training records is one over this number
LOWER_IS_BETTER = ("loss", "error", "mae", "brier", "risk", "norm", "goldstein")


@dataclass(frozen=True)
class TuningRow:
    """Row of a tuning: one point of the scenario's sweep, for all of its seeds."""

    when: Mapping[str, Any]
    """Swept keys and their values, or the algorithm if nothing is swept."""
    cell: Cell
    """Cell of the point, for the first seed."""
    grid: Grid
    """Values to try, by dotted key."""


def pair_grids(
    scenario: Scenario, grids: Mapping[Any, Grid] | None, axis: str
) -> list[tuple[Mapping[str, Any], Cell, Grid]]:
    """Pair each point with the grid for its value of `axis`, and leave out points without a grid.

    Args:
        scenario: Scenario that is tuned.
        grids: Grids by the value of `axis` as text, such as "dp-sgd", "1" or "1.0", or None for an empty grid
            at each point.
        axis: Dotted key, which need not be swept and which points may lack.

    Returns:
        For each point the swept keys with their values, or algorithm.name with its value if nothing is swept, then
        the cell of the first seed, and the grid.
    """
    pairs: list[tuple[Mapping[str, Any], Cell, Grid]] = []
    for point in scenario.points[:: len(scenario.seeds)]:  # the first seed of each sweep point
        when = dict(point.swept_values) or {"algorithm.name": point.cell.algorithm.name}
        value = point.swept_values.get(axis, look_up_key(point.cell.canonical_data(), axis))
        # The name of a grid is a value as text or as TOML, where 1 and 1.0 are one number.
        grid = (
            {}
            if grids is None
            else next(
                (
                    grid_of_value
                    for name, grid_of_value in grids.items()
                    if name == str(value) or parse_assignment(f"{axis}={name}")[1] == value
                ),
                None,
            )
        )
        if grid is not None:
            pairs.append((when, point.cell, grid))
    return pairs


@dataclass(frozen=True)
class HeldOut:
    """Held-out training records, on which settings are compared: the last ones of the training set."""

    count: int
    """Number of held-out records."""
    total_count: int
    """Number of training records, held-out ones included."""
    silo_counts_by_run: tuple[tuple[int, ...], ...]
    """Number of held-out records of each silo, for each run of the scenario.

    Runs with equal numbers share an entry.
    """

    @property
    def description(self) -> str:
        """Description of the held-out records, and of the silos to which they belong."""
        run_total, silo_range = (
            format_count_range(map(sum, self.silo_counts_by_run)),
            format_count_range(count for run in self.silo_counts_by_run for count in run),
        )
        silos = format_count_range(map(len, self.silo_counts_by_run))
        return (
            f"the last {self.count:,} of {self.total_count:,} training records are held out while tuning; "
            f"in a run of the tuned scenario {run_total} of them belong to its silos, "
            f"{silo_range} to each of {silos}"
        )

    def count_in_runs(self, cells: Sequence[Cell]) -> "HeldOut":
        """Count the held-out records of each silo in the runs of `cells`.

        Raises:
            InputError: A cell asks for more records than there are, or its data cannot be used or have another
                number of training records.
        """
        # Cells that agree in these sections partition the records alike.
        distinct = {
            repr((cell.seed, cell.data, cell.federation, cell.schedule, cell.privacy.protected_unit)): cell
            for cell in cells
        }
        return replace(
            self, silo_counts_by_run=tuple(dict.fromkeys(_count_by_silo(cell, self) for cell in distinct.values()))
        )


def _count_by_silo(cell: Cell, held_out: HeldOut) -> tuple[int, ...]:
    """Count the held-out records that each silo of a run reads.

    Raises:
        InputError: The run's data have another number of training records, or cannot be used.
    """
    refuse(
        {
            f"data.name = {cell.data.name!r}: has other than {held_out.total_count} training records, the last of "
            "which are held out in every row; tune data of different sizes one by one": (
                len(load_task_of_inputs(ModelInputs.from_cell(cell)).train.labels) != held_out.total_count
            )
        }
    )
    units = load_task(cell).unit_indices
    # A unit has a row of row indices, since a person can have several records.
    row_indices = np.arange(held_out.total_count)[:, None] if units is None else np.asarray(units)
    are_held_out = row_indices >= held_out.total_count - held_out.count
    return tuple(int(are_held_out[order.numpy()].sum()) for order in partition_records(cell))


def hold_out(cell: Cell, count: int | None) -> HeldOut:
    """Hold out the last `count` training records, or about a tenth of them if it is None.

    Raises:
        InputError: The number is not from 1 to one less than the number of training records, or the cell's data
            cannot be used or are too few.
    """
    records = len(load_task_of_inputs(ModelInputs.from_cell(cell)).train.labels)
    held_out_count = max(1, records // _HELD_OUT_DIVISOR) if count is None else count
    if not isinstance(held_out_count, int) or not 0 < held_out_count < records:
        raise InputError(
            f"--held-out {held_out_count}: {cell.data.name} has {records} training records; hold out 1 or more, "
            "and not all"
        )
    return HeldOut(held_out_count, records, ()).count_in_runs([cell])


def make_trial(cell: Cell, setting: Setting, held_out: HeldOut, fixed: Sequence[str], seed: int) -> Cell:
    """Return the cell with a setting, trained on the records that are not held out.

    If these are too few for an epoch, the trial has fewer rounds or samples, or smaller batches
    (`_reduce_reading`).  It has one evaluation.  Values in `fixed` take precedence over these keys, and values in
    the setting over both.

    Args:
        cell: Cell of the scenario.
        setting: Values by dotted key.
        held_out: Held-out records, on which the trial is evaluated.
        fixed: "KEY=VALUE" of keys that all trials have, neither "data" nor "data.validation".
        seed: Seed of the trial.

    Raises:
        InputError: The trial cannot run.
    """
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
    """Check that a run on all records has enough records with each setting.

    Without a key of [federation] in the row's grid, settings need the records of the scenario, and nothing is
    checked.

    Raises:
        InputError: A setting needs more records than there are, or the scenario cannot have it.
    """
    for setting in settings if any(key.startswith("federation.") for key in row.grid) else ():
        try:
            check_record_count(_with_reading_keys(row.cell, setting))
        except InputError as error:
            setting_text = ", ".join(f"{key} = {value}" for key, value in setting.items())
            raise InputError(f"a run with {setting_text}: {error}") from None


def _with_reading_keys(cell: Cell, setting: Setting) -> Cell:
    """Return the cell with the keys of a setting in [federation], such as rounds and batch sizes.

    Raises:
        InputError: The cell cannot run with them.
    """
    reading_keys = {key: value for key, value in setting.items() if key.startswith("federation.")}
    if not reading_keys:
        return cell
    tree = cell.canonical_data()
    for key, value in reading_keys.items():
        assign_key(tree, key, value)
    return _resolve_trial(tree, reading_keys)


def _resolve_trial(tree: dict[str, Any], setting: Setting) -> Cell:
    """Return the validated cell of a trial.

    Args:
        tree: Scenario of the trial as nested dictionaries.
        setting: Values that an error message names, unless it names one of them already.

    Raises:
        InputError: The trial cannot run.
    """
    try:
        return resolve_cell(tree, "while tuning")
    except InputError as error:
        message = f"while tuning: {str(error).removeprefix('while tuning: ')}"  # some begin with their key
        if not any(f" {key} = {value!r}: " in message for key, value in setting.items()):
            setting_text = "".join(f", {key} = {value}" for key, value in setting.items())
            message = f"while tuning{setting_text}{message.removeprefix('while tuning')}"
        raise InputError(message) from None


def _reduce_reading(cell: Cell, held_out: HeldOut) -> dict[str, Any]:
    """Return keys with fewer rounds or samples, or smaller batches, if the remaining records are too few.

    The records have to suffice for one epoch, in which each batch is read once.  In a partition by site with given
    batches, the records of each site have to suffice.  Otherwise single records are counted, even if persons
    or clients are the unit of protection, and a round counts as one batch if rounds are reduced.

    Returns:
        Values by dotted key, such as "federation.rounds".  Without site batches it is {} if the remaining records
        suffice.
    """
    federation, remaining = cell.federation, held_out.total_count - held_out.count
    if cell.data.partition == "site" and federation.batches is not None:
        return _reduce_site_batches(cell, held_out, federation.batches)
    if sum(cell.batch_sizes) * cell.schedule.batches_per_silo <= remaining:
        return {}
    if federation.samples is not None:
        return {"federation.samples": min(federation.samples, remaining)}
    if federation.batches is not None:
        return {
            "federation.batches": [max(1, size * remaining // held_out.total_count) for size in federation.batches]
        }
    return {
        "federation.rounds": max(1, min(federation.rounds_per_epoch, remaining // sum(cell.batch_sizes)))
        * federation.epochs
    }


def _reduce_site_batches(cell: Cell, held_out: HeldOut, batches: Sequence[int]) -> dict[str, Any]:
    """Return federation.batches, made smaller as far as the remaining records of a site require it.

    Batches stay at least 1.  If persons are protected, they count in place of records.

    Raises:
        InputError: The cell cannot run with these held-out records.
    """
    tree = cell.canonical_data()
    assign_key(tree, "data.validation", held_out.count)
    sites = load_task(resolve_cell(tree, "while tuning")).train_sites
    assert sites is not None
    max_batches = np.bincount(sites, minlength=len(batches)) // cell.schedule.batches_per_silo
    return {
        "federation.batches": [max(1, min(sizes)) for sizes in zip(batches, max_batches.tolist(), strict=True)]
    }


def is_better(metric: str, one: float, other: float) -> bool:
    """Whether `one` is the better value of a metric.

    Smaller is better for a metric with a word of `LOWER_IS_BETTER` in its name, larger for others.
    """
    return one < other if any(word in metric for word in LOWER_IS_BETTER) else one > other
