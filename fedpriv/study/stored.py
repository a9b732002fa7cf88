"""Stored records of finished cells, checkpoints of unfinished ones, and checks of a resumed run.

A cell is one run of a scenario: a value of each swept key, and a seed.  A record of results.json holds a cell's
scenario, its measurements, its releases (published vectors and their noise), and its claim of privacy.

RUN_DIR/checkpoints has the last checkpoints of unfinished groups of cells.  Checkpoints hold sums without
noise, so that their mode is 0600.

A resumed run may add seeds, whose cells are numbered after all others.
"""

import dataclasses
import itertools
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, model_validator
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.claims.claim import add_external_first_step, claim_figures, compute_claim, evaluation_to_data
from fedpriv.claims.ledger import ReleaseStream, stream_to_data
from fedpriv.claims.outcome import CellOutcome, RunObserver, cell_digest
from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.figures import format_upper, format_upper_delta
from fedpriv.core.files import PRIVATE_MODE, write_bytes
from fedpriv.engines.vectorized.checkpoints import Checkpoints, installed_versions, read_header
from fedpriv.plan.evaluation import apply_scaling
from fedpriv.scenario.load import Scenario, SweepPoint
from fedpriv.scenario.schema import Cell


def program_versions() -> dict[str, str]:
    """Return versions of Python and of packages that compute the results, by name, and the platform."""
    return {
        "python": platform.python_version(),
        **installed_versions(),
        "flwr": metadata.version("flwr"),
        "platform": sys.platform,
    }


def privacy_data(
    cell: Cell, releases: Sequence[ReleaseStream], noise: Literal["simulation", "release"] = "simulation"
) -> dict[str, Any]:
    """Compute the privacy statement of a cell as data.

    Its ε and μ follow from the ledger `releases`, with a first step that was taken elsewhere
    (`add_external_first_step`), and not from the target.
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
    """Describe the privacy target of the run: "none", a μ, or for secret participation an ε at δ.

    With secret participation the text also names the μ that gives the ε, unless the scenario sets the ε itself.
    """
    privacy, target = cell.privacy, cell.privacy.target_mu
    if target is None:
        return "none"
    if not cell.schedule.secret:
        return f"mu = {format_upper(target, 6)}"
    mu_note = "" if privacy.epsilon is not None else f", what mu = {format_upper(target, 6)} gives"
    return (
        f"epsilon = {format_upper(epsilon_of(target, privacy.delta), 6)} at delta = "
        f"{format_upper_delta(privacy.delta)}{mu_note}"
    )


class NamedSection(BaseModel):
    """Section that has at least a name."""

    name: str


class _DataSection(NamedSection):
    partition: str


class _CellScenario(NamedSection):
    """Shown part of a cell's scenario.  `resolve_cell` reads all of the scenario."""

    data: _DataSection
    model: NamedSection
    algorithm: NamedSection
    federation: dict[str, Any]
    privacy: dict[str, Any]
    run: dict[str, Any]


_Pair = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
_LearningFacts = TypedDict(  # noqa: UP013 - a table, as in `measure_learning`
    "_LearningFacts",
    {
        "tests": PositiveInt,
        "classes": PositiveInt,
        "train": int,
        "first": _Pair,
        "start_and_end": _Pair,
        "loss": FiniteFloat,
        "commonest": Annotated[float, Field(ge=0.0, le=1.0)],
        "balanced": FiniteFloat,
        "has_unit_outputs": bool,
    },
    total=False,
)
"""Facts of an add-on on what the model learnt, as far as they are known (`measure_learning`)."""


class CellRecord(BaseModel):
    """Fields of a cell's record that readers need.  Fields with a default may be absent.

    Further fields are accepted, among them metrics by name, such as test_loss.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    cell: int
    """Number of the cell, from 0."""
    point: dict[str, Any]
    """Swept values by dotted key."""
    seed: int
    trust: str
    noise: str
    """Kind of noise: "simulation" (seeded, protects no record), "release" or "none"."""
    releases: list[dict[str, Any]]
    """Release streams of the run as data, its ledger."""
    evaluation: dict[str, Any] | None = None
    """Entry on the federated evaluation by silos, with its claim for test records, or None without one."""
    silos: PositiveInt
    clients: int = 0
    """Number of clients, or 0 if the scenario sets none."""
    rounds: int
    records: int = 0
    """Number of training records, or other units of protection, that silos hold together."""
    unread: int = 0
    """Number of `federation.samples` that no silo holds."""
    smallest_silo: int = 0
    """Number of training records, or other units of protection, of the smallest silo."""
    batch: int = 0
    """Number of records, or other units of protection, of all silos in one batch each."""
    dimension: int
    """Number d of parameters in the published model."""
    gradient_evaluations: int
    """Number of gradients, or values, of single records in all rounds, expected if records are sampled."""
    bytes_sent: int
    """Bytes of one silo's messages in all rounds and a first step, without headers, if it misses none."""
    fraction_clipped: float | None
    """Fraction of increments that were clipped, or None if they are not counted."""
    missed: dict[str, list[int]] = {}
    """Rounds in which a silo did not reply, by silo."""
    wall_seconds: float
    """Share of this cell in the run time of its group, plus the time of its first step, in seconds."""
    engine: str
    """Name of the engine that computed the cell."""
    participation: str = ""
    """Title of the participation."""
    learning: _LearningFacts = {}
    """Facts on what the model learnt."""
    scenario: _CellScenario
    """Resolved scenario of the cell."""
    model: str
    """Path of the model's file in the folder of the run."""

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        """Check that metrics are numbers."""
        for name, value in (self.model_extra or {}).items():
            if name.startswith(("test_", "excess_risk", "gradient_norm", "goldstein")) and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise ValueError(f"{name} = {value!r}: expected a number")
        return self


def derived_fields(
    cell: Cell,
    releases: Sequence[ReleaseStream],
    evaluations: Sequence[ReleaseStream],
    noise: Literal["simulation", "release"],
) -> dict[str, Any]:
    """Compute the fields of a record that follow from the scenario and the releases."""
    batches_per_silo, privacy = cell.schedule.batches_per_silo, privacy_data(cell, releases, noise)
    return {
        "seed": cell.seed,
        **privacy,
        "evaluation": evaluation_to_data(evaluations, cell.algorithm.trust, privacy["mu"]),
        "silos": cell.federation.silos,
        **({} if cell.federation.clients is None else {"clients": cell.federation.clients}),
        "rounds": cell.schedule.rounds,
        "records": sum(cell.batch_sizes) * batches_per_silo,
        "unread": cell.unread_count,
        "smallest_silo": min(cell.batch_sizes) * batches_per_silo,
        "batch": sum(cell.batch_sizes),
    }


def make_cell_record(place: int, point: SweepPoint, finished: CellOutcome, engine: str) -> dict[str, Any]:
    """Make the record of a finished cell, without its model's path and the measurements of add-ons."""
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
    """Checkpoints as files of a run folder.

    The observer is notified of the first checkpoint that cannot be written, and the run continues.
    """

    def __init__(self, run: Path, observer: RunObserver) -> None:
        self._folder, self._observer = run / _CHECKPOINT_FOLDER, observer
        self._write_failed = False

    def check_scenario(self, scenario: Scenario) -> None:
        """Delete checkpoints with a damaged header or other versions, and check the cells of the others.

        The observer is notified of each deleted checkpoint.

        Raises:
            InputError: One of the others is of cells that the scenario does not have.
        """
        checkpoint_paths = find_checkpoints(self._folder.parent)
        cell_digests = {cell_digest(point.cell) for point in scenario.points} if checkpoint_paths else set()
        for path in checkpoint_paths:
            try:
                header = read_header(path.read_bytes())
                reason = header.why_unusable()
            except ValueError as error:
                reason = str(error)
            else:
                if reason is None and not cell_digests.issuperset(header.cells):
                    raise InputError(
                        f"{self._folder.parent} holds another run: {path.name} is a checkpoint of cells that this "
                        "scenario does not have; give another --out, or the scenario and --set options it was "
                        "started with"
                    )
            if reason is not None:
                path.unlink()
                self._observer.notified(f"{path}: not used, and its rounds are run again: {reason}")

    def latest(self, name: str) -> bytes | None:
        return self._path(name).read_bytes() if self._path(name).exists() else None

    def keep(self, name: str, content: bytes) -> None:
        """Write a checkpoint, of mode 0600.

        Args:
            name: Name of the checkpoint, which gives the name of its file.
            content: Checkpoint as bytes.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            # Not durable: a checkpoint that a crash of the machine loses costs only time.
            write_bytes(self._path(name), content, PRIVATE_MODE, durable=False)
        except OSError as error:
            if not self._write_failed:
                self._observer.notified(f"{self._path(name)}: no checkpoints are kept: {error.strerror}")
            self._write_failed = True

    def drop(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)
        with suppress(OSError):  # other checkpoints remain, or the folder does not exist
            self._folder.rmdir()

    def clear(self) -> None:
        """Delete all checkpoints, and the temporary files of killed processes."""
        for path in self._folder.glob("*"):
            path.unlink()
        with suppress(FileNotFoundError):
            self._folder.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_CHECKPOINT_SUFFIX}"


def find_checkpoints(run: Path) -> Sequence[Path]:
    """List the checkpoint files of a run folder."""
    return sorted((run / _CHECKPOINT_FOLDER).glob(f"[!.]*{_CHECKPOINT_SUFFIX}"))


def other_run_error(folder: Path, difference: str) -> InputError:
    """Make the error for a folder that holds another run, with the difference."""
    return InputError(
        f"{folder} holds another run: {sanitize_line(difference)}; "
        "give another --out, or the scenario and --set options it was started with; only seeds can be added"
    )


def extend_seed_batches(
    folder: Path, stored_batches: Sequence[Sequence[int]], requested_seeds: Sequence[int]
) -> list[list[int]]:
    """Return the seeds of a resumed run as one list for each invocation that brought seeds.

    The seeds that are new now form the last list, if there are any.

    Args:
        folder: Folder of the run, for errors.
        stored_batches: Seeds of the invocations so far.
        requested_seeds: Seeds of the scenario.

    Raises:
        InputError: A stored seed is not requested.
    """
    stored_seeds = [seed for batch in stored_batches for seed in batch]
    if dropped_seeds := [seed for seed in stored_seeds if seed not in requested_seeds]:
        stored_text, dropped_text = (", ".join(map(str, seeds)) for seeds in (stored_seeds, dropped_seeds))
        raise other_run_error(folder, f"its seeds are {stored_text}, and this scenario has no seed {dropped_text}")
    new_seeds = [seed for seed in requested_seeds if seed not in stored_seeds]
    return [*map(list, stored_batches), *([new_seeds] if new_seeds else [])]


def order_by_batch(scenario: Scenario, seed_batches: Sequence[Sequence[int]]) -> Scenario:
    """Order the seeds and points of a scenario by batch of seeds.

    Each batch has all sweep points.
    """
    count = len(scenario.seeds)
    blocks = (scenario.points[first : first + count] for first in range(0, len(scenario.points), count))
    points_by_block = [{point.cell.seed: point for point in block} for block in blocks]
    points = [point_by_seed[seed] for batch in seed_batches for point_by_seed in points_by_block for seed in batch]
    return dataclasses.replace(scenario, seeds=[seed for batch in seed_batches for seed in batch], points=points)


def batch_ranges(scenario: Scenario, seed_batches: Sequence[Sequence[int]]) -> list[range]:
    """Return the range of cell numbers of each batch of seeds."""
    blocks = len(scenario.points) // len(scenario.seeds)
    ends = [0, *itertools.accumulate(blocks * len(batch) for batch in seed_batches)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def check_axes(folder: Path, stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise InputError if the sweep differs from that of the run in `folder`.

    The swept keys, their order and their values are compared.
    """
    if list(stored.items()) != list(current.items()):
        raise other_run_error(
            folder,
            f"its sweep differs from this scenario's: {first_difference(stored, current) or 'in its order'}",
        )


def check_cell(folder: Path, number: int, stored: Cell, scenario: Scenario) -> None:
    """Raise InputError if the finished cell `number` of the folder is not the scenario's.

    A cell that waits for its first step is compared as if the step had given the stored cell's scaling.
    """
    cell = scenario.points[number].cell if 0 <= number < len(scenario.points) else None
    if cell is not None and cell.data.needs_first_step and (scaling := stored.data.scaling) is not None:
        cell = apply_scaling(cell, scaling)
    difference = (
        f"this scenario has {len(scenario.points)} cells"
        if cell is None
        else first_difference(stored.canonical_data(), cell.canonical_data())
    )
    if difference:
        raise other_run_error(folder, f"its cell {number} differs from this scenario's: {difference}")


def first_difference(stored: Mapping[str, Any], current: Mapping[str, Any], section: str = "") -> str:
    """Describe the first dotted key whose values differ in two trees, or return "" if none differ.

    A key that is missing equals one whose value is None, and the order of keys does not matter.

    Args:
        stored: Scenario or section of the stored run.
        current: Scenario or section of this run.
        section: Prefix of the keys, such as "data.", or "" at the top.
    """
    for key in dict.fromkeys([*stored, *current]):
        stored_value, current_value = stored.get(key), current.get(key)
        if isinstance(stored_value, Mapping) and isinstance(current_value, Mapping):
            if nested_difference := first_difference(stored_value, current_value, f"{section}{key}."):
                return nested_difference
        elif stored_value != current_value:
            stored_text, current_text = (
                "not given" if value is None else repr(value) for value in (stored_value, current_value)
            )
            return f"{section}{key} is {stored_text} there, {current_text} here"
    return ""
