"""From how many epochs on Tran & Cutkosky's Algorithm 2 adds less noise than Algorithm 1, by accounting alone.

Root mean square noise per coordinate of the released momentum over the run, at the same μ = 1 under replace-one,
exact calibration of both, α = 1/N, η = 1/√(N T), γ = min(1/2, η N L / G) or η N, G = 1, one record per round.
"""

import math
from typing import NamedTuple

import numpy as np

from fedpriv.accounting.gaussian import RELATION_FACTOR
from fedpriv.noise.differences import AlignedDifferences, DifferenceTrees, calibrate_trees
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder

_EPOCHS = {50: (5, 10, 20, 40, 80, 100, 400), 200: (10, 20, 40, 80, 160)}


class Crossing(NamedTuple):
    """One line of the table: noise of Algorithm 1, and of the two forms of Algorithm 2 for two smoothnesses."""

    rounds_per_epoch: int
    epochs: int
    tree: float
    sliding: float
    aligned: float
    sliding_smoother: float
    aligned_smoother: float


def noise(mechanism: Mechanism, workload: Workload) -> float:
    """Root mean square over the run for μ = 1 under replace-one."""
    sensitivity = RELATION_FACTOR["replace-one"] * mechanism.sensitivity(workload)
    return sensitivity * math.sqrt(mechanism.mean_variance(workload))


def momentum(rounds_per_epoch: int, epochs: int) -> Workload:
    """α = 1/N and increments of norm α."""
    rounds, alpha = rounds_per_epoch * epochs, 1.0 / rounds_per_epoch
    return Workload(FixedOrder(rounds, rounds_per_epoch), 1.0 - alpha, np.full(rounds, alpha))


def tree_noise(rounds_per_epoch: int, epochs: int) -> float:
    """Of Algorithm 1."""
    return noise(BinaryTree(1.0 - 1.0 / rounds_per_epoch), momentum(rounds_per_epoch, epochs))


def reduced_noise(
    kind: type[DifferenceTrees], rounds_per_epoch: int, epochs: int, smoothness: float, balanced: bool = True
) -> float:
    """Of Algorithm 2 with L = `smoothness`, and γ = η N L if `balanced`, else the paper's η N."""
    workload = momentum(rounds_per_epoch, epochs)
    moved = 1.0 / math.sqrt(epochs)  # η N
    difference = smoothness * moved / rounds_per_epoch  # α L η N
    trees = kind(
        rounds_per_epoch,
        min(0.5, smoothness * moved if balanced else moved),
        difference,
        difference / rounds_per_epoch,
        moved / rounds_per_epoch,
        decay=workload.decay,
    )
    return noise(calibrate_trees(trees, workload, "best"), workload)


def crossing_table(epochs_of: dict[int, tuple[int, ...]]) -> list[Crossing]:
    """A line for each number of epochs of each N."""
    return [
        Crossing(
            rounds_per_epoch,
            epochs,
            tree_noise(rounds_per_epoch, epochs),
            *(
                reduced_noise(kind, rounds_per_epoch, epochs, smoothness)
                for smoothness in (1.0, 0.1)
                for kind in (SlidingDifferences, AlignedDifferences)
            ),
        )
        for rounds_per_epoch, members in epochs_of.items()
        for epochs in members
    ]


def run() -> None:
    print("| N | epochs | Algorithm 1 | Algorithm 2, L = G | aligned | Algorithm 2, L = G/10 | aligned |")
    print("|---|---|---|---|---|---|---|")
    for line in crossing_table(_EPOCHS):
        print(
            f"| {line.rounds_per_epoch} | {line.epochs} | "
            + " | ".join(f"{value:.3f}" for value in line[2:])
            + " |"
        )
