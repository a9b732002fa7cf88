"""The record of a finished cell, checkpoints of others, and what a resumed run must share with its folder.

A record of results.json says what was asked for, measured, spent and claimed.  RUN_DIR/checkpoints has a file for
each group of cells that the run is in the middle of, gone when the group is finished; it holds sums without noise,
so that its mode is 0600, and the folder's 0700.  A run that is resumed may add seeds, and nothing else: a cell
keeps its number, and so the name of its model, and cells of added seeds are numbered after all others.
"""

import dataclasses
import itertools
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.claims.claim import add_external_first_step, claim_figures, compute_claim, evaluation_to_data
from fedpriv.claims.ledger import ReleaseStream, stream_to_data
from fedpriv.claims.outcome import CellOutcome, RunObserver, cell_digest
from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.figures import format_upper, format_upper_delta
from fedpriv.core.files import PRIVATE_MODE, write_bytes
from fedpriv.engines.vectorized.checkpoints import Checkpoints, read_header
from fedpriv.scenario.load import Scenario, SweepPoint
from fedpriv.scenario.schema import Cell


def program_versions() -> dict[str, str]:
    """Versions of the programs that compute the results."""
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("fedpriv", "torch", "numpy", "flwr", "cryptography")},
        "platform": sys.platform,
    }


def privacy_data(
    cell: Cell, releases: Sequence[ReleaseStream], noise: Literal["simulation", "release"] = "simulation"
) -> dict[str, Any]:
    """The privacy statement of a cell as data: computed from its ledger, not from what the scenario asked for.

    A first step that the cell's budget has, and its ledger has not, is charged as one elsewhere.
    """
    releases = add_external_first_step(releases, cell.budget.other_mu)
    claim, delta = compute_claim(releases), cell.privacy.delta
    figures = claim_figures(claim, delta)
    return {
        "trust": cell.algorithm.trust,
        "relation": cell.privacy.relation,
        "unit": cell.privacy.protected_unit.description,
        "participation": cell.schedule.title,
        "noise": "none" if claim is None else noise,
        "delta": delta,
        "releases": [stream_to_data(stream) for stream in releases],
        "target": _describe_target(cell),
        **figures,
        "rho": figures["mu"] if cell.algorithm.row.name_of_mu == "rho" else None,
    }


def _describe_target(cell: Cell) -> str:
    """Target that the noise was calibrated to, and the key of the scenario from which it follows."""
    asked, target = cell.privacy, cell.privacy.target_mu
    if target is None:
        return "none"
    if not cell.schedule.secret:
        return f"mu = {format_upper(target, 6)}"
    given = "" if asked.epsilon is not None else f", what mu = {format_upper(target, 6)} gives"
    spent = epsilon_of(target, asked.delta)
    return f"epsilon = {format_upper(spent, 6)} at delta = {format_upper_delta(asked.delta)}{given}"


class NamedSection(BaseModel):
    """A section with a name, whatever else it has."""

    name: str


class _DataSection(NamedSection):
    partition: str


class _CellScenario(NamedSection):
    """The scenario of a cell, by what is shown of it; `resolve_cell` reads all of it."""

    data: _DataSection
    model: NamedSection
    algorithm: NamedSection
    federation: dict[str, Any]
    privacy: dict[str, Any]
    run: dict[str, Any]


class CellRecord(BaseModel):
    """The fields of `record_of` that readers rely on; those with a default are absent in older files."""

    model_config = ConfigDict(extra="allow", strict=True)

    cell: int
    point: dict[str, Any]
    seed: int
    trust: str
    noise: str
    releases: list[dict[str, Any]]
    evaluation: dict[str, Any] | None = None
    silos: int
    clients: int = 0
    rounds: int
    records: int = 0
    unread: int = 0
    smallest_silo: int = 0
    batch: int = 0
    dimension: int
    gradient_evaluations: int
    bytes_sent: int
    fraction_clipped: float | None
    missed: dict[str, list[int]] = {}
    wall_seconds: float
    engine: str
    scenario: _CellScenario
    model: str

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        """Metrics are numbers."""
        for name, value in (self.model_extra or {}).items():
            if name.startswith("test_") and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} = {value!r}: expected a number")
        return self


def derived_fields(
    cell: Cell,
    releases: Sequence[ReleaseStream],
    evaluations: Sequence[ReleaseStream],
    noise: Literal["simulation", "release"],
) -> dict[str, Any]:
    """What a record says that follows from the scenario and the releases alone."""
    held, stated = cell.schedule.batches_per_silo, privacy_data(cell, releases, noise)
    return {
        "seed": cell.seed,
        **stated,
        "evaluation": evaluation_to_data(evaluations, cell.algorithm.trust, stated["mu"]),
        "silos": cell.federation.silos,
        **({} if cell.federation.clients is None else {"clients": cell.federation.clients}),
        "rounds": cell.schedule.rounds,
        "records": sum(cell.batch_sizes) * held,
        "unread": cell.unread_count,
        "smallest_silo": min(cell.batch_sizes) * held,
        "batch": sum(cell.batch_sizes),
    }


def make_cell_record(place: int, point: SweepPoint, finished: CellOutcome, engine: str) -> dict[str, Any]:
    """Everything that results.json says of one finished cell."""
    return {
        "cell": place,
        "point": dict(point.swept_values),
        **finished.metrics,
        **derived_fields(point.cell, finished.releases, finished.evaluations, finished.noise),
        "dimension": finished.model.size,
        "gradient_evaluations": finished.gradient_evaluations,
        "bytes_sent": finished.bytes_sent,
        "fraction_clipped": finished.fraction_clipped,
        "missed": {str(silo): list(rounds) for silo, rounds in finished.missed.items()},
        "wall_seconds": finished.wall_seconds,
        "engine": engine,
        "scenario": point.cell.canonical_data(),
    }


_CHECKPOINT_FOLDER = "checkpoints"
_CHECKPOINT_SUFFIX = ".npz"


class CheckpointFolder(Checkpoints):
    """Checkpoints as files.  One that cannot be written is said once, and fails nothing."""

    def __init__(self, run: Path, observer: RunObserver) -> None:
        self._folder, self._observer = run / _CHECKPOINT_FOLDER, observer
        self._write_failed = False

    def check_scenario(self, scenario: Scenario) -> None:
        """Set aside what cannot be used; InputError for checkpoints of another scenario, which stay."""
        found = find_checkpoints(self._folder.parent)
        ours = {cell_digest(point.cell) for point in scenario.points} if found else set()
        for path in found:
            try:
                header = read_header(path.read_bytes())
                why = header.why_unusable()
            except ValueError as error:
                why = str(error)
            else:
                if why is None and not ours.issuperset(header.cells):
                    raise InputError(
                        f"{self._folder.parent} holds another run: {path.name} is a checkpoint of cells that this "
                        "scenario does not have; give another --out, or the scenario and --set options it was "
                        "started with"
                    )
            if why is not None:
                path.unlink()
                self._observer.notified(f"{path}: not used, and its rounds are run again: {why}")

    def latest(self, name: str) -> bytes | None:
        path = self._path(name)
        return path.read_bytes() if path.exists() else None

    def keep(self, name: str, content: bytes) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_bytes(self._path(name), content, PRIVATE_MODE, durable=False)
        except OSError as error:
            if not self._write_failed:
                self._observer.notified(f"{self._path(name)}: no checkpoints are kept: {error.strerror}")
            self._write_failed = True

    def drop(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)
        with suppress(OSError):  # there are others, or there was none
            self._folder.rmdir()

    def clear(self) -> None:
        """Remove all, and drafts of killed processes with them."""
        for path in self._folder.glob("*"):
            path.unlink()
        with suppress(FileNotFoundError):
            self._folder.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_CHECKPOINT_SUFFIX}"


def find_checkpoints(run: Path) -> Sequence[Path]:
    """The files of the checkpoints that a run folder has."""
    return sorted((run / _CHECKPOINT_FOLDER).glob(f"[!.]*{_CHECKPOINT_SUFFIX}"))


_REMEDY = "give another --out, or the scenario and --set options it was started with; only seeds can be added"


def other_run_error(folder: Path, what: str) -> InputError:
    """The line for a folder whose run is not the one that is asked for; `what` differs."""
    return InputError(f"{folder} holds another run: {sanitize_line(what)}; {_REMEDY}")


def extend_seed_batches(folder: Path, before: Sequence[Sequence[int]], asked: Sequence[int]) -> list[list[int]]:
    """Group the seeds of the run in `folder` by the invocation that added them: those of `before`, then new ones.

    InputError where a seed of the run is not among those `asked` for.
    """
    known = [seed for start in before for seed in start]
    if gone := [seed for seed in known if seed not in asked]:
        there, not_here = (", ".join(map(str, seeds)) for seeds in (known, gone))
        raise other_run_error(folder, f"its seeds are {there}, and this scenario has no seed {not_here}")
    added = [seed for seed in asked if seed not in known]
    return [*map(list, before), *([added] if added else [])]


def order_by_batch(scenario: Scenario, starts: Sequence[Sequence[int]]) -> Scenario:
    """The scenario with its seeds and points in the order of the starts; every start has all sweep points."""
    count = len(scenario.seeds)
    blocks = (scenario.points[first : first + count] for first in range(0, len(scenario.points), count))
    by_seed = [{point.cell.seed: point for point in block} for block in blocks]
    points = [found[seed] for start in starts for found in by_seed for seed in start]
    return dataclasses.replace(scenario, seeds=[seed for start in starts for seed in start], points=points)


def batch_ranges(scenario: Scenario, starts: Sequence[Sequence[int]]) -> list[range]:
    """Places of a scenario's points, ordered by its batches of seeds, for each batch."""
    blocks = len(scenario.points) // len(scenario.seeds)
    ends = [0, *itertools.accumulate(blocks * len(start) for start in starts)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def check_axes(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """InputError where the swept keys, their order or their values are not those of the run in `folder`."""
    if list(then.items()) != list(now.items()):
        raise other_run_error(
            folder, f"its sweep differs from this scenario's: {first_difference(then, now) or 'in its order'}"
        )


def check_cell(folder: Path, place: int, then: Cell, scenario: Scenario) -> None:
    """InputError where the finished cell at `place` is not the scenario's."""
    points = scenario.points
    what = (
        first_difference(then.canonical_data(), points[place].cell.canonical_data())
        if place < len(points)
        else f"this scenario has {len(points)} cells"
    )
    if what:
        raise other_run_error(folder, f"its cell {place} differs from this scenario's: {what}")


def first_difference(then: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> str:
    """The first key of two trees whose values differ, with both; nothing where there is none."""
    for key in dict.fromkeys([*then, *now]):
        one, other = then.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if deeper := first_difference(one, other, f"{section}{key}."):
                return deeper
        elif one != other:
            there, here = ("not given" if value is None else repr(value) for value in (one, other))
            return f"{section}{key} is {there} there, {here} here"
    return ""
