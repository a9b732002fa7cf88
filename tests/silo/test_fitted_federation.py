"""Three guards and a server with fitted noise: the server fits, guards get numbers, certify and charge them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.claims.ledger import make_silo_stream
from fedpriv.loss.estimators import Round
from fedpriv.plan.calibration import fit_cell_noise
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.conftest import small_tree
from tests.silo.charged import charged
from tests.silo.guarded import ZERO, guard_at, refused

ROUNDS, MU = 8, 2.0
ALGORITHMS: dict[str, dict[str, Any]] = {
    "blt": {"name": "dp-ftrl", "clip": 2.0, "step": 0.01},
    "lambda-cgd": {"name": "accelerated-dp-srgd", "clip": 4.0, "beta": 200.0, "radius": 2.0},
    "scheduled": {"name": "online-to-batch", "clip": 2.0, "step": 0.001, "radius": 2.0, "power": 2},
}
"""What `auto` takes for each: one pass of eight rounds."""


def cell_of(algorithm: dict[str, Any]) -> Cell:
    tree = small_tree(
        federation={"silos": 3, "rounds": ROUNDS, "batch": 2},
        algorithm={"trust": "untrusted", "mechanism": "auto", **algorithm},
        privacy={"relation": "replace-one", "mu": MU},
    )
    return resolve_cell(tree, "test")


def plan_of(cell: Cell) -> Plan:
    return make_plan(cell, load_task(cell).objective, for_release=True)


@pytest.mark.slow
def test_guards_release_and_charge_the_noise_that_the_server_fitted(tmp_path: Path) -> None:
    for name, algorithm in ALGORITHMS.items():
        cell = fit_cell_noise(cell_of(algorithm))
        sent = json.dumps(cell.canonical_data())
        assert json.loads(sent)["algorithm"]["mechanism"] == name
        plan = plan_of(cell)
        silos = [guard_at(tmp_path / name, number, clip=100.0, budget=1.2 * MU) for number in range(3)]
        state = plan.optimizer.start(plan.objective.initial())
        for t in range(1, ROUNDS + 1):
            query = plan.optimizer.query(state)
            answers = [guard.answer("run", sent, t, query) for guard in silos]
            assert len({answer.numpy().tobytes() for answer in answers}) == 3
            released = sum(weight * answer for weight, answer in zip(plan.weights, answers, strict=True))
            assert isinstance(released, torch.Tensor)
            current: Round = plan.estimator.round(t)
            state = plan.optimizer.update(state, released.to(query.dtype), current)
        assert torch.isfinite(plan.optimizer.output(state)).all()
        for guard in silos:
            (mu,) = charged(guard)
            assert mu == pytest.approx(MU, rel=1e-6)
            assert mu <= MU
        assert make_silo_stream(plan, 0, ROUNDS).mechanism.name == name
        refused(silos[0], "budget", sent, run="another")


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_rescaling_the_noise_sizes_of_a_scenario_does_not_change_the_noise_of_a_guard(
    tmp_path: Path, factor: float
) -> None:
    """Guarantee: a server that sends small numbers gets no less noise; a guard sizes it by the certificate."""
    cell = fit_cell_noise(cell_of(ALGORITHMS["scheduled"]))
    hostile = cell.canonical_data()
    hostile["algorithm"]["noise_sizes"] = [size * factor for size in hostile["algorithm"]["noise_sizes"]]

    def noise_of(plan: Plan) -> Any:
        workload = make_silo_stream(plan, 0, ROUNDS).workload
        return float(plan.noise.std_of(0)) * plan.mechanism.variance(workload) ** 0.5

    noise = noise_of(plan_of(resolve_cell(hostile, "test")))
    assert noise == pytest.approx(noise_of(plan_of(cell)), rel=1e-6)
    first = guard_at(tmp_path, clip=100.0).answer("run", json.dumps(hostile), 1, ZERO)
    assert 0.9 * noise[0] < float(first.std()) < 1.1 * noise[0] + 3.0


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([1.0] * 7, "7 numbers, and there are 8 rounds"),
        ([1.0] * 7 + [1e-7], "at most 1e"),
        ([1.0] * 7 + [0.0], "noise_sizes"),
        ([1.0] * 7 + [float("inf")], "cannot be planned"),
        ([], "fitted before a run starts"),
    ],
)
def test_invalid_noise_sizes_are_refused_before_anything_is_charged(
    tmp_path: Path, sizes: list[float], reason: str
) -> None:
    hostile = fit_cell_noise(cell_of(ALGORITHMS["scheduled"])).canonical_data()
    hostile["algorithm"]["noise_sizes"] = sizes
    guard = guard_at(tmp_path, clip=100.0)
    refused(guard, reason, json.dumps(hostile))
    assert charged(guard) == []
