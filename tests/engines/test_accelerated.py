"""Accelerated-DP-SRGD and its comparisons on the engines against their literal transcriptions, noise on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.engines.table import engine_named
from fedpriv.papers.table import ALGORITHMS
from fedpriv.rounds.outcome import RunObserver
from fedpriv.rounds.task import spread, task_of_cell
from fedpriv.scenario.schema import Cell
from tests import oracle_single_epoch as oracle

ROUNDS, CLIP, MU, POWER = 13, 10.0, 3.0, 2

ROWS: dict[str, tuple[dict[str, Any], Callable[[oracle.Setup], oracle.Vector]]] = {
    "accelerated-dp-srgd": (
        {"beta": 20.0, "radius": 0.5},
        lambda setup: oracle.accelerated_dp_srgd(setup, 20.0, 0.5),
    ),
    "unaccelerated-dp-srgd": (
        {"beta": 20.0, "radius": 0.5},
        lambda setup: oracle.unaccelerated_dp_srgd(setup, 20.0, 0.5),
    ),
    "accelerated-independent": (
        {"beta": 20.0, "radius": 0.5},
        lambda setup: oracle.accelerated_independent(setup, 20.0, 0.5),
    ),
    "online-to-batch": (
        {"step": 0.001, "radius": 0.5, "power": POWER},
        lambda setup: oracle.online_to_batch(setup, 0.001, 0.5, POWER),
    ),
    "dp-ftrl": (
        {"step": 0.01, "radius": 0.5, "momentum": 0.5},
        lambda setup: oracle.dp_ftrl(setup, 0.01, 0.5, 0.5),
    ),
    "phased-sgd": (
        {"step": 0.01, "radius": 0.5},
        lambda setup: oracle.phased_sgd(setup, ROUNDS, 0.01, 0.5),
    ),
}
LIPSCHITZ = (2 * 785) ** 0.5  # √2 max‖z‖: the phased method's clip, which never bites


def clip_of(name: str) -> float:
    return LIPSCHITZ if name == "phased-sgd" else CLIP


def sensitivity(name: str) -> float:
    """Zero-out: the clip times the root of the number of releases or tree nodes that hold the worst record."""
    if name in ("accelerated-independent", "phased-sgd"):
        return clip_of(name)
    growth = POWER - 1 if name == "online-to-batch" else 0
    return max(CLIP * t**growth * oracle.nodes_holding(t, ROUNDS) ** 0.5 for t in range(1, ROUNDS + 1))


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize(("name", "trust"), [(name, trust) for name in ROWS for trust in ALGORITHMS[name].trusts])
def test_engine_is_the_algorithm_as_written(
    small_cell: Callable[..., Cell], engine: str, name: str, trust: str
) -> None:
    """Silos of unequal size, increments clipped: σ = sensitivity/(μ B), B a silo's batch or all of them.

    With secure aggregation the noise is the sum of equal shares, and messages are rounded to 2^-26 of one.
    """
    settings, transcription = ROWS[name]
    cell = small_cell(
        algorithm={"name": name, "trust": trust, "clip": clip_of(name), **settings},
        privacy={"relation": "zero-out", "mu": MU},
        federation={"silos": 3, "rounds": ROUNDS, "samples": 150, "size_skew": 1.0},
    )
    assert len(set(cell.batch_sizes)) > 1
    task, noise = task_of_cell(cell), simulation_noise(cell.seed, np.float64)
    size = task.objective.dimension
    shares = [share.reshape(cell.schedule.batches_held, -1) for share in spread(cell)]

    def normal(owner: int, t: int) -> NDArray[np.floating]:
        if owner < 0 and cell.algorithm.trust_setting.masked:
            return noise.weighted_sum(size, [0, 1, 2], [3**-0.5] * 3, t)
        return noise.vector(size, SERVER if owner < 0 else owner, t)

    expected = transcription(
        oracle.Setup(
            [task.train.features[share].numpy() for share in shares],
            [task.train.labels[share].numpy() for share in shares],
            classes=10,
            clip=clip_of(name),
            unit=sensitivity(name) / MU,
            trusted=trust != "untrusted",
            normal=normal,
        )
    )
    (outcome,) = engine_named(engine)([cell], RunObserver())
    rounding = 1e-7 * np.linalg.norm(expected) if cell.algorithm.trust_setting.masked else 0.0
    np.testing.assert_allclose(outcome.finished.model, expected, rtol=1e-9, atol=1e-12 + rounding)
    assert np.linalg.norm(expected) > 1e-3
    assert outcome.finished.fraction_clipped is not None
    assert (outcome.finished.fraction_clipped > 0.0) == (name != "phased-sgd")
