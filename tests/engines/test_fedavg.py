"""Federated averaging: the mean of the silos' own models, on every engine, and never with noise."""

from typing import Any

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.plan.task import load_task, partition_records
from tests.engines.builders import plan_cell, run_cell, small_cell


def tree(**algorithm: Any) -> dict[str, Any]:
    return {
        "algorithm": {
            "name": "fedavg",
            "trust": "trusted",
            "step": 0.01,
            "local_batch": 4,
            "local_epochs": 2,
            **algorithm,
        },
        "privacy": {"relation": "zero-out", "mode": "none"},
        "federation": {"silos": 3, "rounds": 6, "epochs": 2, "samples": 90, "size_skew": 1.0},
    }


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_it_is_the_algorithm_as_written(engine: str) -> None:
    """w_{t+1} = Σ_i (B_i/B) w_i after two local passes of steps over four records each."""
    cell = small_cell(**tree())
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


def test_one_local_step_over_everything_is_gradient_descent() -> None:
    averaging = small_cell(**tree(local_batch=1000, local_epochs=1))
    descent = small_cell(
        **{**tree(), "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1e9, "step": 0.01}}
    )
    one = run_cell("vectorized", averaging)
    other = run_cell("vectorized", descent)
    np.testing.assert_allclose(one.model, other.model, rtol=1e-9, atol=1e-12)


def test_noise_is_refused() -> None:
    cell = small_cell(**{**tree(), "privacy": {"relation": "zero-out", "mu": 1.0}})
    with pytest.raises(InputError, match=r"no bound for one record.*privacy.mode = \"none\""):
        plan_cell(cell)
