"""Accelerated-DP-SRGD and its comparisons on the engines against their literal transcriptions, noise on."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.engines.table import engine_named
from fedpriv.federation import spread, task_of_cell
from fedpriv.randomness import SERVER, simulation_noise
from fedpriv.scenario import Cell
from tests import oracles_accelerated as oracles

SILOS, ROUNDS, BATCH, CLIP, MU = 2, 13, 3, 2.0, 3.0
NODES = 4  # released tree nodes that hold round 1 of 13: [1], [1, 2], [1, 4] and [1, 8]

ROWS: dict[str, tuple[dict[str, Any], Callable[[oracles.Setup], oracles.Vector], float]] = {
    "accelerated-dp-srgd": (
        {"beta": 2.0, "radius": 0.5},
        lambda setup: oracles.accelerated_dp_srgd(setup, 2.0, 0.5),
        math.sqrt(NODES),
    ),
    "unaccelerated-dp-srgd": (
        {"beta": 2.0, "radius": 0.5},
        lambda setup: oracles.unaccelerated_dp_srgd(setup, 2.0, 0.5),
        math.sqrt(NODES),
    ),
    "accelerated-independent": (
        {"beta": 2.0, "radius": 0.5},
        lambda setup: oracles.accelerated_independent(setup, 2.0, 0.5),
        1.0,
    ),
    "online-to-batch": (
        {"step": 0.1, "radius": 0.5, "power": 2},
        lambda setup: oracles.online_to_batch(setup, 0.1, 0.5, 2),
        math.sqrt(NODES),
    ),
    "dp-ftrl": (
        {"step": 0.05, "radius": 0.5, "momentum": 0.5},
        lambda setup: oracles.dp_ftrl(setup, 0.05, 0.5, 0.5),
        math.sqrt(NODES),
    ),
}


class Silent:
    def advanced(self, client_rounds: int) -> None: ...

    def evaluated(self, index: int, t: int, test_loss: float, test_accuracy: float) -> None: ...


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("name", ROWS)
def test_engine_is_the_algorithm_as_written(
    small_cell: Callable[..., Cell], engine: str, trust: str, name: str
) -> None:
    """Zero-out: σ = C √nodes/(μ B), B the batch of a silo (untrusted) or of all (trusted)."""
    settings, transcription, sensitivity = ROWS[name]
    cell = small_cell(
        algorithm={"name": name, "trust": trust, "clip": CLIP, **settings},
        privacy={"relation": "zero-out", "mu": MU},
        federation={"silos": SILOS, "rounds": ROUNDS, "batch": BATCH},
    )
    task = task_of_cell(cell)
    order = torch.stack(list(spread(cell))).reshape(SILOS, ROUNDS, BATCH)
    noise = simulation_noise(cell.seed, np.float64)
    size = task.objective.dimension
    setup = oracles.Setup(
        task.train.features[order].numpy(),
        task.train.labels[order].numpy(),
        classes=10,
        clip=CLIP,
        sigma=CLIP * sensitivity / MU / (BATCH * SILOS if trust == "trusted" else BATCH),
        trusted=trust == "trusted",
        normal=lambda owner, t: noise.vector(size, SERVER if owner < 0 else owner, t),
    )
    expected = transcription(setup)
    (outcome,) = engine_named(engine)([cell], Silent())
    np.testing.assert_allclose(outcome.finished.model, expected, rtol=1e-9, atol=1e-12)
    assert np.linalg.norm(expected) > 1e-3
