"""What a cell gives, whichever engine ran it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedpriv.privacy.ledger import ReleaseStream


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
    """Silo -> rounds in which its last release stood in for the one that did not come."""

    @property
    def test_loss(self) -> float:
        return self.metrics["test_loss"]

    @property
    def test_accuracy(self) -> float:
        """A share; KeyError for a regression, which has none."""
        return self.metrics["test_accuracy"]


def evaluation_rounds(rounds: int, evaluations: int) -> frozenset[int]:
    """`evaluations` rounds evenly spaced over 1 … rounds, the last always among them."""
    count = min(rounds, evaluations)
    return frozenset(-(-rounds * (place + 1) // count) for place in range(count))
