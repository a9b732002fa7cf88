"""Outcomes of cells, observers of runs and checkpoints of simulations: all that an engine hands out.

`Finished` is the outcome of a cell, whichever engine ran it.  `RunObserver` is one protocol for servers, engines,
results, progress, trackers and your own.

A checkpoint lets a simulation that was killed resume.  It is bytes: a header in JSON and the tensors as they are,
without code.  It says which cells it is of and which versions computed it, because only the same ones would have
computed the same numbers.  States are trees of tensors, numbers, tuples, named tuples and dataclasses.
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
    """The usual figures of `metrics`, by name."""

    metrics: Mapping[str, float]
    """A field of dataclasses."""

    @property
    def test_loss(self) -> float:
        return self.metrics["test_loss"]

    @property
    def test_accuracy(self) -> float:
        """A share, 0 … 1; KeyError for a regression, which has none."""
        return self.metrics["test_accuracy"]


@dataclass(frozen=True)
class CellOutcome(MetricsMixin):
    """What one finished cell gave.

    `metrics` are those of its published model on the test set, by name: "test_loss", for a classification
    "test_accuracy" (a share), and what else the objective knows.

    `fraction_clipped` is None where silos do not tell; `wall_seconds` is its share of the time of cells that
    were run together; `releases` is its ledger; `gradient_evaluations` counts gradients of single records of all
    silos.
    """

    metrics: Mapping[str, float]
    fraction_clipped: float | None
    wall_seconds: float
    releases: tuple[ReleaseStream, ...]
    gradient_evaluations: int
    model: NDArray[np.floating]
    noise: Literal["simulation", "release"] = "simulation"
    """Whose key the noise was drawn with: the scenario's seed, or the operating system's."""
    missed: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Silo -> rounds in which it did not answer, and counted with an increment of 0."""
    bytes_sent: int = 0
    """By one silo in all rounds, headers apart."""
    evaluations: tuple[ReleaseStream, ...] = ()
    """What evaluations released of the silos' test records, which are other records than those of `releases`;
    empty where the server evaluated on a public test set."""


def make_outcome(
    plan: Plan,
    rounds: int,
    model: NDArray[np.floating],
    metrics: Mapping[str, float],
    fraction_clipped: float | None,
    wall_seconds: float,
    missed: Mapping[int, Sequence[int]] | None = None,
    evaluations: tuple[ReleaseStream, ...] = (),
) -> CellOutcome:
    """The outcome of a plan's first `rounds` rounds, its ledger and its costs with it."""
    return CellOutcome(
        metrics=metrics,
        fraction_clipped=fraction_clipped,
        wall_seconds=wall_seconds,
        releases=make_release_streams(plan, rounds),
        gradient_evaluations=count_gradient_evaluations(plan, rounds, missed),
        model=model,
        missed=missed or {},
        bytes_sent=sum(planned.message_length for planned in plan.rounds[:rounds]) * plan.message_dtype.itemsize,
        evaluations=evaluations,
    )


def count_gradient_evaluations(plan: Plan, rounds: int, missed: Mapping[int, Sequence[int]] | None = None) -> int:
    """Count gradients, or values, of single records that all silos take in the first rounds.

    The number is expected if records are sampled.  `missed` has the rounds in which a silo did not answer.
    """
    per_record = [
        plan.schedule.expected_batches(planned.step.t) * plan.objective.evaluations(planned.step.gradient_count)
        for planned in plan.rounds[:rounds]
    ]
    not_taken = sum(
        plan.batch_sizes[silo] * sum(per_record[t - 1] for t in rounds_missed)
        for silo, rounds_missed in (missed or {}).items()
    )
    return sum(plan.batch_sizes) * sum(per_record) - not_taken


def evaluate_models(
    objective: Objective, model: Tensor, test: Records, names: Sequence[str]
) -> list[dict[str, float]]:
    """The metrics of a model (d,), or of each of several (n, d), on the test set.

    RunError, with its name in `names`, for one whose loss is not finite.
    """
    evaluation = objective.evaluate(model, test)
    for name, finite in zip(names, torch.isfinite(evaluation.loss).reshape(-1).tolist(), strict=True):
        if not finite:
            raise RunError(f"{name}: the test loss is not finite")
    columns = {name: values.reshape(-1).tolist() for name, values in evaluation.to_metrics().items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def evaluation_rounds(rounds: int, evaluations: int) -> frozenset[int]:
    """`evaluations` rounds evenly spaced over 1 … rounds, the last always among them."""
    count = min(rounds, evaluations)
    return frozenset(-(-rounds * (place + 1) // count) for place in range(count))


class RunObserver:
    """Receives the events of a run; override the methods you need.  All calls come from one process and thread.

    `place` is a cell's number: in `Scenario.points` for observers of a run, in the list of cells for the observer
    of an engine, and 0 for that of a server, which runs one cell.
    """

    def fitted(self, fit: FittedNoise) -> None:
        """Noise was fitted to what some cells publish; called before `started`, once for each such fit."""

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        """The cells at `places` are about to be run, with results in `folder`; finished ones are left out."""

    def advanced(self, rounds: int) -> None:
        """So many more rounds, summed over cells, are done."""

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        """A cell was evaluated on the test set after round t: test_loss, test_accuracy (a share), … by name."""

    def finished(self, place: int, finished: CellOutcome) -> None:
        """A cell is finished."""

    def lost(self, worker: str, places: Sequence[int]) -> None:
        """A worker died; the cells it had are run again."""

    def notified(self, line: str) -> None:
        """Something that a person should know of, in one line; nothing failed."""

    def failed(self, error: FedprivError) -> None:
        """The run failed; the error is also raised to whoever started it."""

    def ended(self) -> None:
        """The run is over: every cell is finished, or it was stopped, or it failed."""


class ObserverGroup(RunObserver):
    """Several as one; an engine numbers the cells by their place in `places`, and observers hear those."""

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
    """Of everything that decides what a cell computes."""
    return hashlib.sha256(json.dumps(cell.canonical_data(), sort_keys=True).encode()).hexdigest()[:32]
