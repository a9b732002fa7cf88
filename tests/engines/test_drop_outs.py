"""Silos that do not answer: fixed denominators, the same claim, and no engine that disagrees with another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.engines.table import make_engine
from fedpriv.engines.vectorized.silos import group_cells
from fedpriv.noise.trust import TRUSTS
from fedpriv.participation.registry import SELECTABLE_PARTICIPATIONS
from fedpriv.plan.plan import draw_absences
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.schema import Cell
from tests.engines.builders import (
    ENGINES,
    Recorder,
    claim_of,
    plan_cell,
    refusal,
    run,
    run_cell,
    run_on_both,
    run_together,
    small_cell,
)
from tests.engines.test_sampling import gradient
from tests.engines.test_units import person_cell

SGD = {"name": "dp-sgd", "clip": 1.0, "step": 0.1, "momentum": 0.5}
BANDED = {"name": "dp-ftrl", "clip": 1.0, "step": 0.1, "mechanism": "banded", "bands": 2}
TREE = {"name": "dp-ftrl", "clip": 1.0, "step": 0.1, "mechanism": "tree"}


ROUNDS: dict[str, Any] = {"silos": 3, "rounds": 8, "epochs": 2, "batch": 4, "drop_out": 0.35}
"""Two epochs; each silo is absent in about a third of the rounds."""


def dropping(trust: str = "untrusted", algorithm: dict[str, Any] = SGD, **changes: Any) -> Cell:
    privacy = {"relation": "zero-out", "epsilon": 4.0}
    algorithm = {"trust": trust, **algorithm}
    return small_cell(**{"federation": ROUNDS, "algorithm": algorithm, "privacy": privacy, **changes})


@pytest.mark.parametrize("arithmetic", ["float", "integers"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_round_with_absent_silos_sums_the_others_over_unchanged_denominators(
    trust: str, arithmetic: str
) -> None:
    """DP-SGD record by record, whoever is away: their records and their noise are not there, weights are fixed."""
    cell = dropping(trust, {"name": "dp-sgd", "clip": 1.0, "step": 0.1}, run__arithmetic=arithmetic)
    task, noise, absences = load_task(cell), simulation_noise(cell.seed, np.float64), draw_absences(cell)
    plan, orders = plan_cell(cell), partition_records(cell)
    size, model = task.objective.dimension, np.zeros(task.objective.dimension)
    for t in range(1, 9):
        mean = np.zeros(size)
        for silo in {0, 1, 2} - absences.absent_silos(t):
            place = (t - 1) % 4
            for record in orders[silo][4 * place : 4 * place + 4].tolist():
                of_record = gradient(model, task.train.features[record].numpy(), int(task.train.labels[record]))
                mean += of_record * min(1.0, 1.0 / float(np.linalg.norm(of_record))) / 12
            if arithmetic == "float":
                mean += float(plan.noise.std_of(silo)) * noise.vector(size, silo, t) / 3
        if arithmetic == "float":
            mean += float(plan.noise.std_of(SERVER)) * noise.vector(size, SERVER, t)
        model = model - 0.1 * mean
    assert 4 <= sum(map(len, absences.rounds.values())) <= 16
    if arithmetic == "float":
        for engine in ENGINES:
            np.testing.assert_allclose(run_cell(engine, cell).model, model, rtol=1e-9, atol=1e-12)
        return
    # noise of integers: as much as all rounds together have of it
    distance = np.linalg.norm(run_cell("inprocess", cell).model - model)
    counts = [3 - len(absences.absent_silos(t)) if trust == "untrusted" else 3 for t in range(1, 9)]
    assert distance == pytest.approx(plan.noise.std_in_mean * 0.1 * np.sqrt(size * sum(counts) / 3), rel=0.05)


@pytest.mark.every(4)
@pytest.mark.parametrize("algorithm", [SGD, BANDED, TREE], ids=["sgd", "banded", "tree"])
@pytest.mark.parametrize(
    "sampling", [name for name, kind in SELECTABLE_PARTICIPATIONS.items() if not kind.client_initiated]
)
@pytest.mark.parametrize("trust", TRUSTS)
def test_both_engines_agree_on_absent_silos_and_meet_the_epsilon_target(
    trust: str, sampling: str, algorithm: dict[str, Any]
) -> None:
    secret = SELECTABLE_PARTICIPATIONS[sampling].secret
    federation = {**ROUNDS, "sampling": sampling, "groups": 2 if secret and algorithm is BANDED else 1}
    reasons = {"secure-aggregation": "masks cancel in the sum of all silos only", "curator": "no silo can be away"}
    if trust in reasons:
        with refusal(reasons[trust]):
            dropping(trust, algorithm, federation=federation)
        return
    cells = [dropping(trust, algorithm, federation=federation, seed=seed) for seed in (1, 2)]
    if secret and algorithm is TREE:
        with refusal("is unbounded there"):
            plan_cell(cells[0])
        return
    for cell, outcome in zip(cells, run_together(cells, share=1e-9), strict=True):  # absent in other rounds
        assert np.linalg.norm(outcome.model) > 1e-3
        assert outcome.missed == draw_absences(cell).rounds
        assert 3.9 < claim_of(outcome.releases).guarantee.epsilon_of(1e-5) <= 4.0 + 1e-9


def test_absent_silos_of_a_sweep_over_trusts_take_their_own_noise_away() -> None:
    """Was: in a group whose first cell has the server's noise, absent silos counted with fresh noise."""
    cells = [dropping(trust) for trust in ("trusted", "untrusted")]
    assert group_cells(cells) == [[0, 1]]
    run_together(cells, share=1e-9)


def test_both_engines_agree_on_absent_silos_with_persons(tmp_path: Path) -> None:
    outcome, _ = run_on_both(person_cell(tmp_path, federation__away={"1": [1, 2, 7]}))
    assert outcome.missed == {1: (1, 2, 7)}


def test_records_of_absent_silos_do_not_change_the_model() -> None:
    """Guarantee of `substitute_message`: what is counted in its place is made of earlier releases alone."""
    federation = {"silos": 3, "rounds": 4, "batch": 4, "away": {"2": [1, 4]}}
    for trust, engine in (("untrusted", "inprocess"), ("trusted", "inprocess"), ("trusted", "vectorized")):
        cell = dropping(trust, BANDED, federation=federation)
        before = run_cell(engine, cell)
        order = partition_records(cell)[2]
        features, held = load_task(cell).train.features, torch.cat([order[:4], order[12:]])
        kept = features[held].clone()
        with torch.inference_mode():
            features[held] = 50.0
        try:
            after = run_cell(engine, cell)
        finally:
            with torch.inference_mode():
                features[held] = kept
        assert np.array_equal(before.model, after.model)


def test_recursive_gradient_algorithms_allow_absent_silos_only_on_the_inprocess_engine() -> None:
    cell = dropping(algorithm={"name": "accelerated-dp-srgd", "clip": 2.0, "beta": 5.0, "radius": 3.0})
    assert np.isfinite(run_cell("inprocess", cell).model).all()
    with refusal("keeps one for all silos; use --engine inprocess"):
        run("vectorized", cell)


@pytest.mark.parametrize(
    ("federation", "line"),
    [
        ({"away": {"3": [1]}}, "federation.away: '3' is no silo; there are 0 to 2"),
        ({"away": {"01": [1]}}, "federation.away: '01' is no silo"),
        ({"away": {"x": [1]}}, "federation.away: 'x' is no silo"),
        ({"away": {"0": [9]}}, "federation.away: round 9 of silo 0: there are 8"),
        ({"away": {"0": [9]}, "rounds": None, "samples": 24}, "federation.away: round 9 of silo 0: there are 8"),
        ({"away": {"0": [0]}}, "expected a number of at least 1"),
        ({"drop_out": 1.0}, "drop_out"),
        ({"drop_out": -0.1}, "drop_out"),
    ],
)
def test_impossible_absences_in_a_scenario_are_refused(federation: dict[str, Any], line: str) -> None:
    with refusal(line):
        dropping(federation={"silos": 3, "rounds": 8, **federation})


def test_absent_silos_are_refused_for_incompatible_algorithms_and_aggregate_noise() -> None:
    reduced = {"name": "momentum-tree-reduced", "alpha": 0.2, "step": 0.005}
    with refusal(r"federation\.drop_out = 0\.35: momentum-tree-reduced cannot go on"):
        plan_cell(dropping(algorithm=reduced, privacy={"relation": "zero-out", "mu": 1.0}))
    with refusal(r"mean of all silos' noise, and with federation\.drop_out = 0\.35"):
        run("vectorized", dropping(run__noise="aggregate"))


def test_absent_silos_are_refused_on_a_device_that_draws_only_aggregate_noise() -> None:
    """Was: from a device's noise, one draw of the mean, the processor's noise of a silo was taken away."""
    with refusal(
        r'run\.device = "cuda" draws the mean of all silos\' noise, and with federation\.drop_out = 0\.35'
    ):
        group_cells([dropping("untrusted", run__device="cuda")])
    for trust, changes in (("untrusted", {"privacy": {"relation": "zero-out", "mode": "none"}}), ("trusted", {})):
        assert group_cells([dropping(trust, run__device="cuda", **changes)])


def test_the_deployment_engine_refuses_simulated_absences(tmp_path: Path) -> None:
    with refusal("are for simulations"):
        list(make_engine("deployment", tmp_path)([dropping()], Recorder()))
