"""RUN_DIR: the results that a sweep writes cell by cell, and reads back to resume or to report.

results.json     every finished cell; rewritten whole, at most once a second; `complete` only when all are there
cells.jsonl      cells that results.json does not have yet
history.jsonl    a line an evaluated round
checkpoints/     cells that a run is in the middle of
.lock            held by the process that runs there
models/NNNN.npy  the published model of cell NNNN
table.md         measured beside published

Where results are shown, claims of privacy are those that the releases give, whatever is written beside them.
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
from fedpriv.core.errors import InputError, RunError, sanitize_line
from fedpriv.core.files import append_line, read_complete_lines, write_json, write_text, write_vector
from fedpriv.engines.table import CellGrouping
from fedpriv.plan.calibration import FittedNoise
from fedpriv.scenario.load import Scenario, resolve_cell
from fedpriv.scenario.messages import validate_section
from fedpriv.scenario.published import Growth, PublishedValues, Tuning
from fedpriv.study.stored import (
    CellRecord,
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
"""Characters of a title that are shown."""
_JOURNAL_FILE = "cells.jsonl"
_REWRITE_SECONDS = 1.0  # a sweep of thousands of cells would else spend its time on writing them again and again


@dataclass(frozen=True)
class Results:
    """A results.json, read."""

    name: str
    title: str
    engine: str
    complete: bool
    axes: Mapping[str, list[Any]]
    seeds: list[int]
    published: PublishedValues | None
    cells: list[Mapping[str, Any]]
    versions: Mapping[str, str]
    rerun: str | None
    """The command that runs the same again; None for a run of a program's own."""
    growth: Growth | None = None
    tuning: Tuning | None = None
    date: str = ""
    """When the run began, UTC."""
    added_seeds: tuple[list[int], ...] = ()
    """Which of the seeds later starts added, start by start; none in a run that had all from the beginning."""
    differs: tuple[int, ...] = ()
    """Cells whose record claims another privacy than their releases give, where claims were recomputed."""

    @property
    def seed_batches(self) -> list[list[int]]:
        """The seeds of every start of the run."""
        return [
            [seed for seed in self.seeds if not any(seed in start for start in self.added_seeds)],
            *self.added_seeds,
        ]


class RunFolder(RunObserver):
    """The writing side of a RUN_DIR."""

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
    ) -> None:
        """InputError if the folder holds results of another run, or of any run without `resume`.

        `fits` are those of the scenario's noise: a run that is resumed takes them from here.  `groups` are the
        cells that the engine computes together: where not all of them are written they are computed again, since
        fewer at once may round otherwise.  Seeds that a resumed run did not have are a start of their own: what it
        has stays as it is.

        Guarantee: what is said of all cells of the folder together counts those of every start, since a run that
        is resumed keeps its seeds and its [tuned]: a scenario without one of them is refused.
        """
        self.path = path
        self._fits = fits or {}
        self.scenario = scenario  # with its points at the places that their cells have in this folder
        self._engine, self._rerun = engine, rerun
        self._seed_batches = [scenario.seeds]
        self._date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._records: dict[int, dict[str, Any]] = {}
        check_no_results(path, resume=resume)
        if (path / "results.json").exists() and _has_progress(path):
            self._records = self._load_finished(group_cells)
        path.mkdir(parents=True, exist_ok=True)
        self._drop_unfinished_history()
        self._write_results()

    @property
    def missing_by_batch(self) -> list[list[int]]:
        """`missing`, start by start: what an engine is given at once, so that it rounds as it did then."""
        return [
            missing
            for places in batch_ranges(self.scenario, self._seed_batches)
            if (missing := [place for place in places if place not in self._records])
        ]

    @property
    def missing_indices(self) -> list[int]:
        """The places of the scenario's points that are not finished yet."""
        return [place for place in range(len(self.scenario.points)) if place not in self._records]

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        point = self.scenario.points[place]
        line = {"cell": place, **point.swept_values, "seed": point.cell.seed, "round": t, **metrics}
        append_line(self.path / "history.jsonl", line)

    def finished(self, place: int, finished: CellOutcome) -> None:
        """Add a cell; a run that is killed right after this has lost nothing of it."""
        model = f"models/{place:04d}.npy"
        write_vector(self.path / model, finished.model)
        record = {**make_cell_record(place, self.scenario.points[place], finished, self._engine), "model": model}
        append_line(self.path / _JOURNAL_FILE, record, allow_nan=False)
        self._records[place] = record
        if not self.missing_indices or time.monotonic() - self._write_time > _REWRITE_SECONDS:
            self._write_results()

    def ended(self) -> None:
        self._write_results()

    def _write_results(self) -> None:
        """Rewrite results.json, after which the journal has nothing of its own."""
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
                "cells": [self._records[place] for place in sorted(self._records)],
            },
        )
        (self.path / _JOURNAL_FILE).unlink(missing_ok=True)
        self._write_time = time.monotonic()

    def _load_finished(self, groups: CellGrouping | None) -> dict[int, dict[str, Any]]:
        before, path = read_results(self.path), self.path
        check_copies(path, before.versions, before.cells)
        self._continue_run(before)
        found = {  # a cell without its model is run again
            cell["cell"]: dict(cell) for cell in before.cells if (path / cell["model"]).exists()
        }
        for place, record in found.items():
            check_cell(path, place, resolve_cell(record["scenario"], str(path)), self.scenario)
        if groups is None:
            return found
        again = set[int]()
        for places in batch_ranges(self.scenario, self._seed_batches):
            there = found.keys() & set(places)
            if there and len(there) < len(places):
                together = groups([self.scenario.points[place].cell for place in places])
                members = ({places[index] for index in group} for group in together)
                again.update(*(group for group in members if not there >= group))
        return {place: record for place, record in found.items() if place not in again}

    def _continue_run(self, before: Results) -> None:
        """Go on as the run that was here, with the seeds that are added to it; InputError if this is another."""
        path, scenario = self.path, self.scenario
        check_axes(path, before.axes, scenario.axes)
        if before.tuning != scenario.tuning:
            raise other_run_error(
                path, "its [tuned], what choosing its settings cost, differs from this scenario's"
            )
        self._seed_batches = extend_seed_batches(path, before.seed_batches, scenario.seeds)
        self.scenario = order_by_batch(scenario, self._seed_batches)
        if self.scenario.seeds == before.seeds:  # else the command of before runs fewer
            self._rerun = before.rerun or self._rerun
        self._date = before.date

    def _drop_unfinished_history(self) -> None:
        """A cell that is run again must not appear twice in the history."""
        path = self.path / "history.jsonl"
        kept = [
            line for line in (read_history(self.path) if path.exists() else ()) if line["cell"] in self._records
        ]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


class _StoredPublished(BaseModel):
    """Where a paper's values stand; its table is checked when it is read."""

    row_values: list[Any]
    column_values: list[Any]
    withheld: list[str] = []


class _StoredResults(BaseModel):
    """What every reader of a results.json relies on; `Results` has the rest of it, too."""

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
        """Every cell says where it stands in the sweep."""
        for cell in self.cells:
            if unsaid := self.axes.keys() - cell.point.keys():
                raise ValueError(f"the point of cell {cell.cell} does not say {', '.join(sorted(unsaid))}")
        return self


def read_results(folder: Path) -> Results:
    """Read RUN_DIR/results.json; InputError if it is not one."""
    path = folder / "results.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            raise InputError(f"{path}: format {tree['format']}, this version of fedpriv reads format {FORMAT}")
        found = {
            cell["cell"]: cell
            for cell in (*tree["cells"], *map(json.loads, read_complete_lines(folder / _JOURNAL_FILE)))
        }
        cells = [found[place] for place in sorted(found)]  # with those that were finished after it was written
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
        raise InputError(f"{path}: not a results file of fedpriv ({type(error).__name__}: {error})") from None


def read_fits(folder: Path) -> dict[str, FittedNoise]:
    """The fits of a run that is to be resumed, by what they were asked for; none if there is no run yet."""
    path = folder / "results.json"
    if not path.exists():
        return {}
    try:
        fits = [FittedNoise(**fit) for fit in json.loads(path.read_text(encoding="utf-8")).get("fits", [])]
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a results file of fedpriv ({type(error).__name__}: {error})") from None
    return {fit.asked: fit for fit in fits}


def describe_engines(results: Results) -> str:
    """Engines that computed the cells: a run can be resumed on another one."""
    return ", ".join(dict.fromkeys(str(cell["engine"]) for cell in results.cells)) or results.engine


def read_history(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of RUN_DIR/history.jsonl; a last line cut short by a kill is left out."""
    path = folder / "history.jsonl"
    if not path.exists():
        raise InputError(f"{folder}: no history.jsonl there; give a folder that `fedpriv run` wrote")
    for number, line in enumerate(read_complete_lines(path), start=1):
        try:
            evaluation = json.loads(line)
            _ = evaluation["cell"], evaluation["round"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}, line {number}: not an evaluation; take the line out") from None
        yield evaluation


def check_no_results(path: Path, *, resume: bool) -> None:
    """InputError for a folder that holds results, unless they are to be resumed."""
    if not resume and (path / "results.json").exists() and _has_progress(path):
        raise InputError(f"{path} holds results already; give another --out, or --resume to resume there")


def _has_progress(folder: Path) -> bool:
    """Whether a run there got as far as an evaluation or a checkpoint: one that could not start leaves nothing."""
    history = folder / "history.jsonl"
    return bool(
        read_results(folder).cells or (history.exists() and history.stat().st_size > 0) or find_checkpoints(folder)
    )


def read_claims(folder: Path) -> Results:
    """`read_results` for whatever is shown: every figure of privacy is computed from what was released.

    Guarantee: a figure that somebody wrote into results.json is not shown, and its cell is in `differs`.
    InputError also for releases that cannot be accounted for, and for a claim that fedpriv 0.3.0 made falsely.
    """
    stored = read_results(folder)
    check_copies(folder, stored.versions, stored.cells)
    try:
        entries = list(map(make_entry, stored.cells))
        differs = tuple(each.cell for each in entries if not each.agrees)
        return replace(stored, cells=[entry.recomputed_record for entry in entries], differs=differs)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: not a ledger of fedpriv ({type(error).__name__}: {error})") from None


def check_claims(folder: Path, results: Results) -> None:
    """RunError, exit code 1, for a folder that claims something else than it released: after it was shown."""
    if results.differs:
        raise RunError(f"{folder}: {format_differing_cells(results.differs)}")
