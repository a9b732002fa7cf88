"""Momentum in fresh permutations as it runs: the paper's algorithm, and the same result of every engine."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.participation.orders import FreshOrder
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import run
from tests.oracle import Vector

MakeCell = Callable[..., Cell]

ALPHA, STEP, EPOCH, ROUNDS = 0.3, 0.05, 5, 13


def tree(trust: str, seed: int, **run_keys: Any) -> dict[str, Any]:
    """13 rounds of 5 an epoch: the last epoch is cut."""
    return {
        "seed": seed,
        "algorithm": {
            "name": "momentum-tree", "trust": trust, "order": "fresh", "alpha": ALPHA, "step": STEP, "clip": 0.5,
        },
        "privacy": {"relation": "replace-one", "mu": 2.0},
        "federation": {"silos": 3, "rounds": ROUNDS, "samples": 30, "batch": 2},
        **run_keys,
    }  # fmt: skip


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_both_engines_equal_algorithm_1_of_the_momentum_paper_with_fresh_permutations(
    small_cell: MakeCell, engine: str, trust: str
) -> None:
    """Momentum over the permuted batches with tree noise node by node, and steps of one length."""
    cell = small_cell(**tree(trust, seed=3))
    task, plan = load_task(cell), make_plan(cell, load_task(cell).objective)
    rows, size = torch.stack(partition_records(cell)), task.objective.dimension
    batches, noise = FreshOrder(ROUNDS, EPOCH, 3).visits, simulation_noise(cell.seed, np.float64)
    parties = [SERVER] if trust == "trusted" else [0, 1, 2]
    features, labels = task.train.features.double().numpy(), task.train.labels.tolist()
    weights, momentum = task.objective.initial().double().numpy(), np.zeros(size)
    nodes: dict[int, Vector] = {}
    for t in range(1, ROUNDS + 1):
        of_round = rows[:, 2 * batches[t - 1] : 2 * batches[t - 1] + 2].flatten().tolist()
        gradients = [clipped_gradient(features[row], labels[row], weights) for row in of_round]
        momentum = (1.0 - ALPHA) * momentum + ALPHA * np.mean(gradients, axis=0)
        nodes[t] = np.mean([noise.vector(size, party, t) * plan.noise.std_of(party) for party in parties], axis=0)
        end, prefix_noise = t, np.zeros(size)
        while end:  # the nodes of the set bits of t
            prefix_noise += (1.0 - ALPHA) ** (t - end) * nodes[end]
            end -= end & -end
        noisy = momentum + prefix_noise
        weights = weights - STEP * noisy / np.linalg.norm(noisy)
    (outcome,), _ = run(engine, cell)
    np.testing.assert_allclose(outcome.cell_outcome.model, weights, rtol=1e-8, atol=1e-11)


def clipped_gradient(features: Vector, label: int, weights: Vector) -> Vector:
    """The gradient of softmax cross-entropy of one record, clipped to norm 1/2."""
    logits = weights.reshape(10, -1) @ features
    residual = np.exp(logits - logits.max())
    residual /= residual.sum()
    residual[label] -= 1.0
    gradient = np.outer(residual, features).ravel()
    return gradient * min(1.0, 0.5 / float(np.linalg.norm(gradient)))


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_both_engines_agree_on_fresh_permutations_and_different_seeds_give_different_models(
    small_cell: MakeCell, trust: str
) -> None:
    cells = [small_cell(**tree(trust, seed)) for seed in (3, 4)]
    together, _ = run("vectorized", *cells)
    models = []
    for cell, vectorized in zip(cells, together, strict=True):
        (inprocess,), _ = run("inprocess", cell)
        np.testing.assert_allclose(
            vectorized.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-12
        )
        assert vectorized.cell_outcome.releases == inprocess.cell_outcome.releases
        assert vectorized.cell_outcome.releases[0].schedule == FreshOrder(ROUNDS, EPOCH, cell.seed)
        models.append(vectorized.cell_outcome.model)
    assert not np.allclose(models[0], models[1], atol=1e-3)
