"""Outcomes of cells and observers of runs, which engines, servers and results share.

`CellOutcome` is the outcome of a cell, whichever engine ran it.  `RunObserver` is the base class of observers that
are called during a run: those of result folders, progress, trackers and your own.
`evaluate_models` computes the metrics of models on a test set.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.claims.ledger import ReleaseStream, make_release_streams
from fedpriv.core.errors import FedprivError, RunError
from fedpriv.loss.objective import Objective, Records
from fedpriv.plan.calibration import FittedNoise
from fedpriv.plan.plan import Plan
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import Cell


class MetricsMixin:
    """Properties for the usual entries of `metrics`."""

    metrics: Mapping[str, float]
    """Metrics by name, a field of the dataclasses that inherit from this class."""

    @property
    def test_loss(self) -> float:
        return self.metrics["test_loss"]

    @property
    def test_accuracy(self) -> float:
        """Share of test records that are classified correctly, 0 … 1 but for the noise of private evaluations.

        Raises:
            AttributeError: If the metrics have no accuracy, as those of a regression.
        """
        if "test_accuracy" not in self.metrics:
            raise AttributeError(f"test_accuracy: is of classes; the metrics are {', '.join(self.metrics)}")
        return self.metrics["test_accuracy"]


@dataclass(frozen=True)
class CellOutcome(MetricsMixin):
    """Outcome of a finished cell.

    Attributes:
        metrics: Metrics of the published model on the test set, or on the silos' test records, by name:
            "test_loss", "test_accuracy" (a share) for most classifications, and further ones.
        fraction_clipped: Fraction of increments that were clipped, or None if they are not counted.
        wall_seconds: Wall-clock time in seconds, a share of it for cells that were run together.
        releases: Release streams of the run, its ledger.
        gradient_evaluations: Number of gradients, or values, of single records, over silos and rounds, an
            expectation if records are sampled.
        model: Published model, (d,).
    """

    metrics: Mapping[str, float]
    fraction_clipped: float | None
    wall_seconds: float
    releases: tuple[ReleaseStream, ...]
    gradient_evaluations: int
    model: NDArray[np.floating]
    noise: Literal["simulation", "release"] = "simulation"
    """Source of the noise's key: the scenario's seed ("simulation") or the operating system ("release")."""
    missed: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Rounds that a silo missed, by silo.  Its increment counted as 0 in these rounds."""
    bytes_sent: int = 0
    """Bytes of one silo's messages, without headers, if it misses no round."""
    evaluations: tuple[ReleaseStream, ...] = ()
    """Release streams of evaluations on the silos' test records, or () if silos do not evaluate."""


def make_outcome(
    plan: Plan,
    rounds: int,
    model: NDArray[np.floating],
    metrics: Mapping[str, float],
    fraction_clipped: float | None,
    wall_seconds: float,
    absences: Mapping[int, Sequence[int]] | None = None,
    evaluations: tuple[ReleaseStream, ...] = (),
) -> CellOutcome:
    """Make the outcome of a plan's first `rounds` rounds, with release streams and costs.

    Args:
        plan: Plan of the run.
        rounds: Number of rounds that were run.
        model: Published model, (d,).
        metrics: Metrics of the model on the test set, by name.
        fraction_clipped: Fraction of increments that were clipped, or None if it is not reported.
        wall_seconds: Share of the cell in the wall-clock time, in seconds.
        absences: Rounds that a silo missed, by silo.
        evaluations: Release streams of evaluations on the silos' test records.
    """
    return CellOutcome(
        metrics=metrics,
        fraction_clipped=fraction_clipped,
        wall_seconds=wall_seconds,
        releases=make_release_streams(plan, rounds),
        gradient_evaluations=count_gradient_evaluations(plan, rounds, absences),
        model=model,
        missed=absences or {},
        bytes_sent=sum(round_plan.message_length for round_plan in plan.rounds[:rounds])
        * plan.message_dtype.itemsize,
        evaluations=evaluations,
    )


def count_gradient_evaluations(
    plan: Plan, rounds: int, absences: Mapping[int, Sequence[int]] | None = None
) -> int:
    """Count gradients, or values, of single records that all silos take in the first rounds.

    The number is an expectation if records are sampled.

    Args:
        plan: Plan of the run.
        rounds: Number of rounds that are counted.
        absences: Rounds of 1 … `rounds` that a silo missed, by silo.
    """
    counts_per_record = [
        plan.schedule.expected_batches(round_plan.step.t)
        * plan.objective.evaluations(round_plan.step.gradient_count)
        for round_plan in plan.rounds[:rounds]
    ]
    return sum(plan.batch_sizes) * sum(counts_per_record) - sum(
        plan.batch_sizes[silo] * sum(counts_per_record[t - 1] for t in missed_rounds)
        for silo, missed_rounds in (absences or {}).items()
    )


def evaluate_models(
    objective: Objective, model: Tensor, test: Records, names: Sequence[str]
) -> list[dict[str, float]]:
    """Evaluate a model (d,), or each of n models (n, d), on the test set.

    Args:
        objective: Objective of the models.
        model: One model or several.
        test: Test records.
        names: Names of the models for errors, one for each model.

    Returns:
        Metrics by name, such as test_loss and test_accuracy (a share), for each model in a list.

    Raises:
        RunError: If the loss of a model is not finite.  The message names the first such model.
    """
    evaluation = objective.evaluate(model, test)
    for name, is_finite in zip(names, torch.isfinite(evaluation.loss).reshape(-1).tolist(), strict=True):
        if not is_finite:
            raise RunError(f"{name}: the test loss is not finite")
    columns = {name: values.reshape(-1).tolist() for name, values in evaluation.to_metrics().items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def evaluation_rounds(rounds: int, evaluations: int) -> frozenset[int]:
    """Return `evaluations` rounds, spaced evenly over 1 … rounds and including the last one.

    Args:
        rounds: Number of rounds, 1 or more.
        evaluations: Number of evaluations, 1 or more.

    Returns:
        Rounds after which there is an evaluation: all rounds if they are not more than `evaluations`.

    Example:
        >>> sorted(evaluation_rounds(rounds=10, evaluations=4))
        [3, 5, 8, 10]
    """
    count = min(rounds, evaluations)
    return frozenset(-(-rounds * (index + 1) // count) for index in range(count))


class RunObserver:
    """Observer of the events of a run, a base class whose methods do nothing.

    Override the methods that you need.

    `place` is the number of a cell.  It is an index of `Scenario.points` for the observer of a run, an index of
    the list of cells for the observer of an engine, and 0 for the observer of a server, which runs one cell.
    """

    def fitted(self, fit: FittedNoise) -> None:
        """Handle a new fit of noise to the releases of some cells, before `started` and once for each fit."""

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        """Handle the start of a run of the cells at `places`, without those that are finished already.

        Args:
            scenario: Scenario of the run.
            places: Numbers of the cells that are about to be run.
            folder: Folder of the results.
        """

    def advanced(self, rounds: int) -> None:
        """Handle the end of `rounds` further rounds, summed over cells."""

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        """Handle an evaluation of a cell on the test set after round t.

        Args:
            place: Number of the cell.
            t: Round.
            metrics: Metrics by name, such as test_loss and test_accuracy (a share).
        """

    def finished(self, place: int, finished: CellOutcome) -> None:
        """Handle the outcome of a finished cell.

        Args:
            place: Number of the cell.
            finished: Outcome of the cell.
        """

    def lost(self, worker: str, places: Sequence[int]) -> None:
        """Handle the death of a worker, whose cells have to be run again.

        Args:
            worker: Name of the worker.
            places: Numbers of its cells.
        """

    def notified(self, line: str) -> None:
        """Handle a message of one line for a person, which is no error."""

    def failed(self, error: FedprivError) -> None:
        """Handle an error that ends the runs of cells."""

    def ended(self) -> None:
        """Handle the end of a run that was started: its cells are finished, or it was stopped, or it failed."""


class ObserverGroup(RunObserver):
    """Group of observers that receives the events of an engine as one observer.

    A cell's number i of the engine becomes `places[i]`.  The events `started` and `ended` are not passed on.
    """

    def __init__(self, places: Sequence[int], observers: Sequence[RunObserver]) -> None:
        self._places, self._observers = places, observers

    def fitted(self, fit: FittedNoise) -> None:
        self._tell(lambda observer: observer.fitted(fit))

    def advanced(self, rounds: int) -> None:
        self._tell(lambda observer: observer.advanced(rounds))

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self._tell(lambda observer: observer.evaluated(self._places[place], t, metrics))

    def finished(self, place: int, finished: CellOutcome) -> None:
        self._tell(lambda observer: observer.finished(self._places[place], finished))

    def lost(self, worker: str, places: Sequence[int]) -> None:
        self._tell(lambda observer: observer.lost(worker, [self._places[place] for place in places]))

    def notified(self, line: str) -> None:
        self._tell(lambda observer: observer.notified(line))

    def failed(self, error: FedprivError) -> None:
        self._tell(lambda observer: observer.failed(error))

    def _tell(self, event: Callable[[RunObserver], None]) -> None:
        for observer in self._observers:
            event(observer)


def cell_digest(cell: Cell) -> str:
    """Return a digest of all values of a cell's scenario, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(cell.canonical_data(), sort_keys=True).encode()).hexdigest()[:32]
