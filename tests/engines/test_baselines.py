"""Baselines on the engines against their literal transcriptions, noise on, its size computed by hand."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.federation import spread, task_of_cell
from fedpriv.randomness import SERVER, simulation_noise
from fedpriv.scenario import Cell
from tests import oracle_baselines as oracle
from tests.engines.test_engines import run
from tests.oracle_single_epoch import softmax_gradient

SILOS, ROUNDS, BATCH, CLIP, MU = 2, 13, 3, 5.0, 3.0


def nodes_with(t: int) -> int:
    """Of the released nodes, which end at 1 … T and are as long as their end is divisible by a power of two."""
    return sum(end - (end & -end) < t <= end for end in range(1, ROUNDS + 1))


ROWS: dict[str, tuple[dict[str, Any], Callable[..., oracle.Vector], float | None]] = {
    "online-to-batch": (
        {"step": 0.01, "radius": 0.5, "clip": CLIP, "power": 2},
        lambda *given: oracle.online_to_batch(*given[:3], CLIP, 0.01, 0.5, given[3]),
        CLIP * max(t * math.sqrt(nodes_with(t)) for t in range(1, ROUNDS + 1)),
    ),
    "dp-ftrl": (
        {"step": 0.05, "clip": CLIP, "momentum": 0.5},
        lambda *given: oracle.dp_ftrl(*given[:3], CLIP, 0.05, 0.5, given[3]),
        CLIP * math.sqrt(max(nodes_with(t) for t in range(1, ROUNDS + 1))),
    ),
    "phased-sgd": (
        {"step": 0.02, "radius": 0.5},
        lambda *given: oracle.phased_sgd(*given[:3], math.inf, 0.02, 0.5, given[3]),
        None,
    ),
}


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize(
    ("name", "trust"),
    [(name, trust) for name in ("online-to-batch", "dp-ftrl") for trust in ("untrusted", "trusted")]
    + [("phased-sgd", "curator")],
)
def test_engine_is_the_algorithm_as_written(
    small_cell: Callable[..., Cell], engine: str, name: str, trust: str
) -> None:
    """Zero-out: σ = sensitivity/(μ B), B the batch of a silo (untrusted) or of all silos; 1e-9 in float64."""
    settings, transcription, sensitivity = ROWS[name]
    cell = small_cell(
        algorithm={"name": name, "trust": trust, **settings},
        privacy={"relation": "zero-out", "mu": MU},
        federation={"silos": SILOS, "rounds": ROUNDS, "batch": BATCH},
    )
    task, noise = task_of_cell(cell), simulation_noise(cell.seed, np.float64)
    size = task.objective.dimension
    owners = range(SILOS) if trust == "untrusted" else [SERVER]
    moved = sensitivity if sensitivity is not None else task.objective.lipschitz
    sigma = moved / (MU * BATCH * (1 if trust == "untrusted" else SILOS))
    order = torch.stack(list(spread(cell))).reshape(SILOS, ROUNDS, BATCH).swapaxes(0, 1).reshape(ROUNDS, -1)
    features, labels = task.train.features.numpy(), task.train.labels.numpy()
    expected = transcription(
        [[(features[record], int(labels[record])) for record in batch] for batch in order.tolist()],
        softmax_gradient(10),
        np.zeros(size),
        lambda t: sigma * np.mean([noise.vector(size, owner, t) for owner in owners], axis=0),
    )
    (outcome,), _ = run(engine, cell)
    np.testing.assert_allclose(outcome.finished.model, expected, rtol=1e-9, atol=1e-12)
    assert np.linalg.norm(expected) > 1e-3
