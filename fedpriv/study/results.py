"""Results folder of a run: written cell by cell, and read to resume the run or to report it.

| file | content |
|---|---|
| results.json | finished cells, and whether all cells are finished |
| cells.jsonl | cells that were finished after results.json was written |
| history.jsonl | one line for each evaluated round of a cell |
| checkpoints/ | checkpoints of unfinished cells |
| .lock, .lock-holder | lock of the process that runs in the folder, and its name |
| models/NNNN.npy | published model of cell NNNN |
| table.md | measured values, beside published ones if a paper reports some |

A cell is one run of a scenario: a value of each swept key, and a seed.  Its record in the folder has a number, its
scenario, its measurements, its claim of privacy, and a description of its releases (the vectors that were
published, and their noise).
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from fedpriv.claims.entries import check_copies, format_differing_cells, make_entry
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import FedprivError, InputError, RunError, sanitize_line
from fedpriv.core.extensions import load_add_on_parts
from fedpriv.core.files import append_line, load_json, read_complete_lines, write_json, write_text, write_vector
from fedpriv.engines.table import CellGrouping
from fedpriv.plan.calibration import FittedNoise
from fedpriv.scenario.load import Scenario, resolve_cell
from fedpriv.scenario.messages import validate_section
from fedpriv.scenario.published import Growth, PublishedValues, Tuning
from fedpriv.study.stored import (
    CellRecord,
    CheckpointFolder,
    NamedSection,
    batch_ranges,
    check_axes,
    check_cell,
    extend_seed_batches,
    find_checkpoints,
    make_cell_record,
    order_by_batch,
    other_run_error,
    program_versions,
)

FORMAT = 1
_MAX_TITLE_LENGTH = 1000
"""Most characters of a stored title that are read."""
_JOURNAL_FILE = "cells.jsonl"
_REWRITE_SECONDS = 1.0  # a sweep of thousands of cells would otherwise spend its time on rewriting


@dataclass(frozen=True)
class Results:
    """Content of a results.json, with the cells of cells.jsonl."""

    name: str
    """Name of the scenario."""
    title: str
    """Title of the scenario, cut after 1,000 characters, with escapes (`sanitize_line`)."""
    engine: str
    """Engine of the latest invocation.  Each cell has the engine that computed it."""
    complete: bool
    """Whether every cell of the scenario was finished when results.json was written."""
    axes: Mapping[str, list[Any]]
    """Values of each swept key, by dotted key."""
    seeds: list[int]
    """Seeds of all invocations."""
    published: PublishedValues | None
    """Values that a paper reports for the same settings, or None."""
    cells: list[Mapping[str, Any]]
    """Records of the finished cells (`CellRecord`), sorted by cell number."""
    versions: Mapping[str, str]
    """Versions of the programs of the latest invocation, and the platform (`program_versions`)."""
    rerun: str | None
    """Command that runs the same again, or None if it is not known, as for a program's own records."""
    growth: Growth | None = None
    """Section [scaling] on the growth of a resource along a swept key, or None."""
    tuning: Tuning | None = None
    """Section [tuned], the record of the choice of settings, or None."""
    date: str = ""
    """Time in UTC at which the folder was opened by the first invocation that left progress."""
    added_seeds: tuple[list[int], ...] = ()
    """Seeds that later invocations added, one list each, or empty if none added seeds."""
    differs: tuple[int, ...] = ()
    """Cells whose stored claim, releases and scenario contradict each other, if claims were recomputed."""

    @property
    def seed_batches(self) -> list[list[int]]:
        """Seeds of each invocation that brought seeds: the first one, and those that added some."""
        return [
            [seed for seed in self.seeds if not any(seed in batch for batch in self.added_seeds)],
            *self.added_seeds,
        ]


class RunFolder(RunObserver):
    """Writer of a results folder, which observes a run."""

    def __init__(
        self,
        path: Path,
        scenario: Scenario,
        engine: str,
        *,
        resume: bool,
        rerun: str | None = None,
        fits: Mapping[str, FittedNoise] | None = None,
        group_cells: CellGrouping | None = None,
        checkpoints: CheckpointFolder | None = None,
        check_only: bool = False,
    ) -> None:
        """Open a results folder, and load its finished cells if the run is resumed.

        Seeds that a resumed run did not have form a batch of their own.  If some cells of a group are missing, the
        whole group is computed again, because a smaller group may round otherwise.  Evaluations of unfinished
        cells are removed from history.jsonl, and results.json is written.

        The scenario's section [tuned], which `fedpriv tune` writes, records how its settings were chosen, and so
        what their choice cost.

        Guarantee: statements on all cells of the folder together count the cells of every invocation.  Once the
        folder has progress, a scenario without one of its seeds, or with another [tuned] or none, is refused.

        Args:
            path: The folder.
            scenario: Scenario of the run.
            engine: Name of the engine.
            resume: Whether the folder may hold results of this run.
            rerun: Command that runs the same again, or None if it is not known.
            fits: Fitted noise of the scenario by request (`FittedNoise.asked`), or None for none.
            group_cells: Function that groups the cells which the engine computes together, or None for single
                cells.
            checkpoints: Checkpoints of the folder, which are checked, or None to check none.
            check_only: Whether the folder is read and checked alone, and nothing in it is written.  Points that
                wait for a first step pass for stored ones that have taken it, whatever its result.

        Raises:
            InputError: The folder holds results or checkpoints of another run, progress of any run without
                `resume`, cells for which fedpriv 0.3.0 made a false claim, or malformed results or history.
        """
        self.path = path
        self._fits = fits or {}
        self.scenario = scenario  # the index of a point is the number of its cell in this folder
        self._engine, self._rerun = engine, rerun
        self._seed_batches = [scenario.seeds]
        self._date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._records: dict[int, dict[str, Any]] = {}
        self._first_evaluations: dict[int, tuple[int, float]] = {}
        self._is_new, self._is_refused = not (path / "results.json").exists(), False
        check_no_results(path, resume=resume)
        if (path / "results.json").exists() and _has_progress(path):
            self._records = self._load_finished(group_cells)
        if checkpoints is not None:
            checkpoints.check_scenario(self.scenario)
        if not check_only:
            self._drop_unfinished_history()
            self._write_results()

    @property
    def missing_by_batch(self) -> list[list[int]]:
        """Indices of the missing cells, by batch of seeds, without batches that miss no cell.

        An engine that gets one batch at a time rounds as in the invocation that added the seeds.
        """
        return [
            missing
            for batch_range in batch_ranges(self.scenario, self._seed_batches)
            if (missing := [index for index in batch_range if index not in self._records])
        ]

    @property
    def missing_indices(self) -> list[int]:
        """Indices of the scenario's points that are not finished yet."""
        return [index for index in range(len(self.scenario.points)) if index not in self._records]

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        point = self.scenario.points[place]
        append_line(
            self.path / "history.jsonl",
            {"cell": place, **point.swept_values, "seed": point.cell.seed, "round": t, **metrics},
        )
        if "test_loss" in metrics:
            self._first_evaluations.setdefault(place, (t, metrics["test_loss"]))

    def finished(self, place: int, finished: CellOutcome) -> None:
        """Store the outcome of a cell, so that a run which is killed afterwards keeps it.

        The record goes to cells.jsonl at once, and to results.json after the last cell, or if this is over a
        second old.

        Args:
            place: Number of the cell in the folder.
            finished: Outcome of the cell.

        Raises:
            ValueError: A number of the record is not finite.
        """
        model = f"models/{place:04d}.npy"
        write_vector(self.path / model, finished.model)
        point, first = self.scenario.points[place], self._first_evaluations.get(place)
        record = {**make_cell_record(place, point, finished, self._engine), "model": model} | {
            name: measure(point.cell, finished, first)
            for name, measure in load_add_on_parts("measurement").items()
        }
        append_line(self.path / _JOURNAL_FILE, record, allow_nan=False)
        self._records[place] = record
        if not self.missing_indices or time.monotonic() - self._write_time > _REWRITE_SECONDS:
            self._write_results()

    def failed(self, error: FedprivError) -> None:
        self._is_refused = self._is_new and isinstance(error, InputError) and not self._records

    def ended(self) -> None:
        """Write results.json, or remove it and history.jsonl if a new run was refused without a cell."""
        self._write_results()
        for name in ("results.json", "history.jsonl") if self._is_refused else ():
            (self.path / name).unlink(missing_ok=True)

    def _write_results(self) -> None:
        """Rewrite results.json with the cells that are not run again, and delete the journal."""
        scenario = self.scenario
        write_json(
            self.path / "results.json",
            {
                "format": FORMAT,
                "scenario": {"name": scenario.name, "title": scenario.title},
                "axes": dict(scenario.axes),
                "seeds": scenario.seeds,
                **({"added_seeds": self._seed_batches[1:]} if self._seed_batches[1:] else {}),
                "published": scenario.published and scenario.published.to_data(),
                "scaling": scenario.growth and scenario.growth.model_dump(),
                **({} if scenario.tuning is None else {"tuned": scenario.tuning.model_dump(mode="json")}),
                "engine": self._engine,
                "versions": program_versions(),
                "rerun": self._rerun,
                "date": self._date,
                "complete": not self.missing_indices,
                "fits": [fit.to_data() for fit in self._fits.values()],
                "cells": [self._records[index] for index in sorted(self._records)],
            },
        )
        (self.path / _JOURNAL_FILE).unlink(missing_ok=True)
        self._write_time = time.monotonic()

    def _load_finished(self, group_cells: CellGrouping | None) -> dict[int, dict[str, Any]]:
        """Load the finished cells of a stored run by number, without groups that have to be computed again.

        A group of cells that the engine computes together is computed again if one of its cells is missing.  A
        cell whose model file is missing counts as missing.  The seeds of this object become those of the stored
        run, followed by the added ones.

        Args:
            group_cells: Function from cells to groups of their indices, or None if each cell is computed alone.

        Raises:
            InputError: The stored run is another one, has cells for which fedpriv 0.3.0 made a false claim, or
                is malformed.
        """
        stored_results, path = read_results(self.path), self.path
        check_copies(path, stored_results.versions, stored_results.cells)
        self._continue_run(stored_results)
        records = {cell["cell"]: dict(cell) for cell in stored_results.cells if (path / cell["model"]).exists()}
        for cell_index, record in records.items():
            check_cell(path, cell_index, resolve_cell(record["scenario"], str(path)), self.scenario)
        if group_cells is None:
            return records
        repeated_indices = set[int]()
        for batch_range in batch_ranges(self.scenario, self._seed_batches):
            finished_indices = records.keys() & set(batch_range)
            if finished_indices and len(finished_indices) < len(batch_range):
                index_groups = (
                    {batch_range[index] for index in group}
                    for group in group_cells([self.scenario.points[cell_index].cell for cell_index in batch_range])
                )
                repeated_indices.update(*(group for group in index_groups if not finished_indices >= group))
        return {cell_index: record for cell_index, record in records.items() if cell_index not in repeated_indices}

    def _continue_run(self, stored_results: Results) -> None:
        """Take the seed batches and the date of the stored run, and append a batch of the new seeds, if any.

        A batch has the seeds that one invocation brought.  The points of the scenario are ordered by batch, so
        that finished cells keep their numbers.  Without new seeds the stored run's command, if any, is taken, too.

        Raises:
            InputError: The stored run is another one.
        """
        path, scenario = self.path, self.scenario
        check_axes(path, stored_results.axes, scenario.axes)
        if stored_results.tuning != scenario.tuning:
            raise other_run_error(
                path, "its [tuned], what choosing its settings cost, differs from this scenario's"
            )
        self._seed_batches = extend_seed_batches(path, stored_results.seed_batches, scenario.seeds)
        self.scenario = order_by_batch(scenario, self._seed_batches)
        if self.scenario.seeds == stored_results.seeds:  # with added seeds, the stored command would run too few
            self._rerun = stored_results.rerun or self._rerun
        self._date = stored_results.date

    def _drop_unfinished_history(self) -> None:
        """Remove the history of unfinished cells, which would appear in it twice."""
        path = self.path / "history.jsonl"
        finished_lines = [
            line for line in (read_history(self.path) if path.exists() else ()) if line["cell"] in self._records
        ]
        write_text(path, "".join(json.dumps(line) + "\n" for line in finished_lines))


class _StoredPublished(BaseModel):
    """Rows and columns of a paper's values, whose table is checked when it is read."""

    row_values: list[Any]
    column_values: list[Any]
    withheld: list[str] = []


class _StoredResults(BaseModel):
    """Fields of results.json whose types are checked before `Results` is made."""

    model_config = ConfigDict(strict=True)

    scenario: NamedSection
    engine: str
    complete: bool
    axes: dict[str, list[Any]]
    seeds: list[int]
    added_seeds: list[list[int]] = []
    versions: dict[str, str]
    rerun: str | None
    date: str
    published: _StoredPublished | None
    cells: list[CellRecord]

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        """Check that each cell has a value for each swept key."""
        for cell in self.cells:
            if missing_keys := self.axes.keys() - cell.point.keys():
                raise ValueError(f"the point of cell {cell.cell} does not say {', '.join(sorted(missing_keys))}")
        return self


def read_results(folder: Path) -> Results:
    """Read RUN_DIR/results.json, with the cells of cells.jsonl, which finished later.

    Raises:
        InputError: There is no results.json, or one of the files is not of this format.
    """
    path = folder / "results.json"
    try:
        tree = load_json(path.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            raise InputError(f"{path}: format {tree['format']}, this version of fedpriv reads format {FORMAT}")
        cell_by_number = {
            cell["cell"]: cell
            for cell in (*tree["cells"], *map(load_json, read_complete_lines(folder / _JOURNAL_FILE)))
        }
        cells = [cell_by_number[number] for number in sorted(cell_by_number)]
        validate_section(_StoredResults, {**tree, "cells": cells}, f"{path}: not a results file of fedpriv")
        return Results(
            name=tree["scenario"]["name"],
            title=sanitize_line(tree["scenario"]["title"], _MAX_TITLE_LENGTH),
            engine=tree["engine"],
            complete=tree["complete"],
            axes=tree["axes"],
            seeds=tree["seeds"],
            published=PublishedValues.from_data(tree["published"]) if tree["published"] else None,
            cells=cells,
            growth=Growth.model_validate(tree["scaling"]) if tree["scaling"] else None,
            tuning=Tuning.model_validate(tree["tuned"]) if tree.get("tuned") else None,
            versions=tree["versions"],
            rerun=tree["rerun"],
            date=tree["date"],
            added_seeds=tuple(tree.get("added_seeds", ())),
        )
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{folder}: no results.json there; give a folder that `fedpriv run` wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: not a results file of fedpriv ({type(error).__name__}: {sanitize_line(str(error))})"
        ) from None


def read_fits(folder: Path) -> dict[str, FittedNoise]:
    """Read the noise mechanisms that were fitted for a run, by request (`FittedNoise.asked`).

    The result is {} if there is no results.json, or no fit in it.

    Raises:
        InputError: results.json is no JSON object, or its fits are malformed.
    """
    path = folder / "results.json"
    if not path.exists():
        return {}
    try:
        return {
            fit["asked"]: FittedNoise(**fit) for fit in load_json(path.read_text(encoding="utf-8")).get("fits", [])
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a results file of fedpriv ({type(error).__name__}: {error})") from None


def describe_engines(results: Results) -> str:
    """List the engines that computed the cells, or without cells the engine of the latest invocation."""
    return ", ".join(dict.fromkeys(str(cell["engine"]) for cell in results.cells)) or results.engine


def read_history(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Read the evaluations in RUN_DIR/history.jsonl, one dictionary for each complete line.

    The keys are "cell" (its number), "round", "seed", the swept keys and the metrics.  A last line without an end,
    which a killed run may leave, is skipped.

    Raises:
        InputError: There is no history, or a line is no JSON object with cell, round and metrics as numbers.
    """
    path = folder / "history.jsonl"
    if not path.exists():
        raise InputError(f"{folder}: no history.jsonl there; give a folder that `fedpriv run` wrote")
    for number, line in enumerate(read_complete_lines(path), start=1):
        try:
            evaluation = load_json(line)
            # `sum` refuses what is no number.  Values of swept keys, which have a dot, may be texts.
            _ = (
                range(evaluation["round"]),
                sum(
                    value
                    for key, value in {"cell": evaluation["cell"], **evaluation}.items()
                    if "." not in key or key.startswith("test_")
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{path}, line {number}: not an evaluation; take the line out") from None
        yield evaluation


def check_no_results(path: Path, *, resume: bool) -> None:
    """Raise InputError for a folder that holds results, unless they are to be resumed.

    Evaluations and checkpoints of unfinished cells count as results, beside a results.json only.
    """
    if not resume and (path / "results.json").exists() and _has_progress(path):
        raise InputError(f"{path} holds results already; give another --out, or --resume to resume there")


def _has_progress(folder: Path) -> bool:
    """Whether a run in the folder stored a cell, an evaluation or a checkpoint."""
    history = folder / "history.jsonl"
    return bool(
        read_results(folder).cells or (history.exists() and history.stat().st_size > 0) or find_checkpoints(folder)
    )


def read_claims(folder: Path) -> Results:
    """Read results for display, with the figures of each cell's claim computed from its releases.

    Guarantee: figures of a cell's claim that somebody wrote into results.json are not shown.  The cell is in
    `differs` if its ε or μ there is not the one that its releases give, up to rounding, and up to 1 % above for an
    ε that is computed numerically.

    Raises:
        InputError: The folder has no results, they are malformed, a release cannot be accounted for, or fedpriv
            0.3.0 made a false claim for a cell.
    """
    stored = read_results(folder)
    check_copies(folder, stored.versions, stored.cells)
    try:
        entries = list(map(make_entry, stored.cells))
        differs = tuple(checked.cell for checked in entries if not checked.agrees)
        return replace(stored, cells=[entry.recomputed_record for entry in entries], differs=differs)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InputError(
            f"{folder}: not a ledger of fedpriv ({type(error).__name__}: {sanitize_line(str(error))})"
        ) from None


def check_claims(folder: Path, results: Results) -> None:
    """Raise RunError (exit code 1) if `results.differs` names a cell."""
    if results.differs:
        raise RunError(f"{folder}: {format_differing_cells(results.differs)}")
