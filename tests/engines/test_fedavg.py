"""Federated averaging: the mean of the silos' own models, on every engine, and never with noise."""

from typing import Any

import numpy as np
import pytest

from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.schema import Cell
from tests.engines.builders import ENGINES, QUIET, plan_cell, refusal, run_cell, small_cell

FEDAVG = {"name": "fedavg", "trust": "trusted", "step": 0.01, "local_batch": 4, "local_epochs": 2}
UNEQUAL = {"silos": 3, "rounds": 6, "epochs": 2, "samples": 90, "size_skew": 1.0}


def averaging(**changes: Any) -> Cell:
    return small_cell(**{"algorithm": FEDAVG, "privacy": QUIET, "federation": UNEQUAL, **changes})


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_equals_a_literal_transcription_of_federated_averaging(engine: str) -> None:
    """w_{t+1} = Σ_i (B_i/B) w_i after two local passes of steps over four records each."""
    cell = averaging()
    assert len(set(cell.batch_sizes)) > 1
    task = load_task(cell)
    features, labels = task.train.features.numpy(), task.train.labels.numpy()
    model = np.zeros((10, features.shape[1]))
    for t in range(6):
        mean = np.zeros_like(model)
        for share, size in zip(partition_records(cell), cell.batch_sizes, strict=True):
            rows = share.numpy().reshape(-1, size)[t % 3]
            own = model.copy()
            for _ in range(2):
                for start in range(0, size, 4):
                    part = rows[start : start + 4]
                    scores = np.exp(features[part] @ own.T)
                    residual = scores / scores.sum(1, keepdims=True)
                    residual[np.arange(len(part)), labels[part]] -= 1.0
                    own = own - 0.01 * residual.T @ features[part] / len(part)
            mean += own * size / sum(cell.batch_sizes)
        model = mean
    outcome = run_cell(engine, cell)
    np.testing.assert_allclose(outcome.model, model.ravel(), rtol=1e-9, atol=1e-12)
    assert np.linalg.norm(model) > 1e-2
    assert outcome.gradient_evaluations == 2 * 6 * sum(cell.batch_sizes)
    assert outcome.releases[0].std == 0.0


def test_federated_averaging_with_one_full_batch_step_equals_gradient_descent() -> None:
    steps = averaging(algorithm__local_batch=1000, algorithm__local_epochs=1)
    descent = averaging(algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 1e9, "step": 0.01})
    one, other = (run_cell("vectorized", cell) for cell in (steps, descent))
    np.testing.assert_allclose(one.model, other.model, rtol=1e-9, atol=1e-12)


def test_federated_averaging_with_noise_is_refused() -> None:
    with refusal(r"nothing bounds how far one record moves.*privacy.mode = \"none\""):
        plan_cell(averaging(privacy={"relation": "zero-out", "mu": 1.0}))
