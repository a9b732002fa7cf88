"""What a cell gives, whichever engine ran it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.objectives import Objective, Records
from fedpriv.privacy.ledger import ReleaseStream
from fedpriv.running.plan import Plan


@dataclass(frozen=True)
class Finished:
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

    @property
    def test_loss(self) -> float:
        return self.metrics["test_loss"]

    @property
    def test_accuracy(self) -> float:
        """A share; KeyError for a regression, which has none."""
        return self.metrics["test_accuracy"]


def finished_after(
    plan: Plan,
    rounds: int,
    model: NDArray[np.floating],
    metrics: Mapping[str, float],
    fraction_clipped: float | None,
    wall_seconds: float,
    missed: Mapping[int, Sequence[int]] | None = None,
    evaluations: tuple[ReleaseStream, ...] = (),
) -> Finished:
    """The outcome of a plan's first `rounds` rounds, its ledger and its costs with it."""
    return Finished(
        metrics=metrics,
        fraction_clipped=fraction_clipped,
        wall_seconds=wall_seconds,
        releases=plan.releases(rounds),
        gradient_evaluations=plan.gradient_evaluations(rounds, missed),
        model=model,
        missed=missed or {},
        bytes_sent=plan.bytes_sent(rounds),
        evaluations=evaluations,
    )


def measured(objective: Objective, model: Tensor, test: Records, names: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of a model (d,), or of each of several (n, d), on the test set.

    RunError, with its name in `names`, for one whose loss is not finite.
    """
    evaluation = objective.evaluate(model, test)
    for name, finite in zip(names, torch.isfinite(evaluation.loss).reshape(-1).tolist(), strict=True):
        if not finite:
            raise RunError(f"{name}: the test loss is not finite")
    columns = {name: values.reshape(-1).tolist() for name, values in evaluation.named().items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def evaluation_rounds(rounds: int, evaluations: int) -> frozenset[int]:
    """`evaluations` rounds evenly spaced over 1 … rounds, the last always among them."""
    count = min(rounds, evaluations)
    return frozenset(-(-rounds * (place + 1) // count) for place in range(count))
