"""What is tuned: the points of a scenario, each with its grid, on training records without those held out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedpriv.errors import InputError
from fedpriv.extensions import revision
from fedpriv.running.task import check_records, spread, task_of, task_of_cell
from fedpriv.scenario import Cell, Scenario, resolve_cell
from fedpriv.scenario.tree import assign, look_up, parsed_assignment
from fedpriv.tuning.grids import Grid, Setting

_SHARE = 10  # one in so many training records is held out where nobody says how many
LOWER_IS_BETTER = ("loss", "error")


@dataclass(frozen=True)
class Row:
    """One point of the scenario's sweep; seeds apart, one cell."""

    when: Mapping[str, Any]
    """The swept keys and their values; where nothing is swept, the algorithm."""
    cell: Cell
    grid: Grid


def rows_of(
    scenario: Scenario, grids: Mapping[Any, Grid] | None, axis: str
) -> list[tuple[Mapping[str, Any], Cell, Grid]]:
    """Every point with the grid of its value of `axis`, which it may lack; points without a grid are left out."""
    found: list[tuple[Mapping[str, Any], Cell, Grid]] = []
    for point in scenario.points[:: len(scenario.seeds)]:
        tree = point.cell.canonical()
        when = dict(point.swept) or {"algorithm.name": point.cell.algorithm.name}
        grid = {} if grids is None else grids.get(point.swept.get(axis, look_up(tree, axis)))
        if grid is not None:
            found.append((when, point.cell, grid))
    return found


@dataclass(frozen=True)
class HeldOut:
    """The training records that settings are compared on: the last ones of the training set."""

    count: int
    of: int
    runs: tuple[tuple[int, ...], ...]
    """How many of them each silo reads, for every run of the scenario that reads others."""

    @property
    def words(self) -> str:
        """Whose they are."""
        read, each = (_span(map(sum, self.runs)), _span(count for run in self.runs for count in run))
        return (
            f"the last {self.count:,} of {self.of:,} training records are held out while tuning; in a run of the "
            f"tuned scenario {read} of them belong to its silos, {each} to each of {_span(map(len, self.runs))}"
        )

    def in_runs(self, cells: Sequence[Cell]) -> "HeldOut":
        """The same records, as the runs of `cells` read them; InputError for a cell that asks for too many."""
        distinct = {
            repr((cell.seed, cell.data, cell.federation, cell.schedule, cell.privacy.protected)): cell
            for cell in cells
        }
        return replace(self, runs=tuple(dict.fromkeys(_of_silos(cell, self) for cell in distinct.values())))


def _span(counts: Iterable[int]) -> str:
    """One number, or the smallest and the largest."""
    found = sorted(set(counts))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def _of_silos(cell: Cell, held_out: HeldOut) -> tuple[int, ...]:
    """How many of the held-out records each silo of a run reads."""
    units = task_of_cell(cell).units
    of_rows = np.arange(held_out.of)[:, None] if units is None else np.asarray(units)  # persons may have several
    first = held_out.of - held_out.count
    return tuple(int((of_rows[order.numpy()] >= first).sum()) for order in spread(cell))


def held_out_of(cell: Cell, count: int | None) -> HeldOut:
    """InputError for more than there are."""
    data = cell.data
    records = len(task_of(data.name, cell.model, cell.run.dtype, None, data.table, revision()).train.labels)
    chosen = max(1, records // _SHARE) if count is None else count
    if chosen >= records:
        raise InputError(f"--held-out {chosen}: {cell.data.name} has {records} training records")
    return HeldOut(chosen, records, ()).in_runs([cell])


def trial(cell: Cell, setting: Setting, held_out: HeldOut, fixed: Sequence[str], seed: int) -> Cell:
    """The cell with a setting, on what is left of the records; InputError, with the setting, if it cannot run."""
    tree = cell.canonical()
    for key, value in _fewer(_reading(cell, setting), held_out).items():
        assign(tree, key, value)
    assign(tree, "data.validation", held_out.count)
    assign(tree, "run.evaluations", 1)
    for key, value in (*map(parsed_assignment, fixed), *setting.items()):
        assign(tree, key, value)
    tree["seed"] = seed
    return _resolved(tree, setting)


def check_settings(row: Row, settings: Sequence[Setting]) -> None:
    """InputError for a setting with which a run on all records asks for more of them than there are."""
    for setting in settings if any(key.startswith("federation.") for key in row.grid) else ():
        try:
            check_records(_reading(row.cell, setting))
        except InputError as error:
            named = ", ".join(f"{key} = {value}" for key, value in setting.items())
            raise InputError(f"a run with {named}: {error}") from None


def _reading(cell: Cell, setting: Setting) -> Cell:
    """The cell with what a setting says of how records are read."""
    said = {key: value for key, value in setting.items() if key.startswith("federation.")}
    if not said:
        return cell
    tree = cell.canonical()
    for key, value in said.items():
        assign(tree, key, value)
    return _resolved(tree, said)


def _resolved(tree: dict[str, Any], setting: Setting) -> Cell:
    """InputError that says the setting, once."""
    try:
        return resolve_cell(tree, "while tuning")
    except InputError as error:
        said = str(error)
        if not any(f" {key} = {value!r}: " in said for key, value in setting.items()):
            named = "".join(f", {key} = {value}" for key, value in setting.items())
            said = f"while tuning{named}{said.removeprefix('while tuning')}"
        raise InputError(said) from None


def _fewer(cell: Cell, held_out: HeldOut) -> dict[str, Any]:
    """What is asked for of fewer records, where those that are left do not last: rounds, samples or batches."""
    federation, left = cell.federation, held_out.of - held_out.count
    if sum(cell.batch_sizes) * cell.schedule.batches_held <= left:
        return {}
    if federation.samples is not None:
        return {"federation.samples": min(federation.samples, left)}
    if federation.batches is not None:
        return {"federation.batches": [max(1, size * left // held_out.of) for size in federation.batches]}
    passes = left // sum(cell.batch_sizes)
    return {"federation.rounds": max(1, min(federation.rounds_per_epoch, passes)) * federation.epochs}


def better(metric: str, one: float, other: float) -> bool:
    """Whether `one` is the better value of a metric: the smaller loss or error, the larger of anything else."""
    lower = any(word in metric for word in LOWER_IS_BETTER)
    return one < other if lower else one > other
