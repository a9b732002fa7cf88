"""Silos that do not answer: fixed denominators, the same claim, and no engine that disagrees with another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.claims.claim import compute_claim
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.engines.table import make_engine
from fedpriv.engines.vectorized.silos import group_cells
from fedpriv.noise.trust import TRUSTS
from fedpriv.participation.registry import SELECTABLE_PARTICIPATIONS
from fedpriv.plan.plan import draw_absences, make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import Recorder, run
from tests.engines.test_sampling import gradient
from tests.engines.test_units import person_cell

MakeCell = Callable[..., Cell]
SGD = {"name": "dp-sgd", "clip": 1.0, "step": 0.1, "momentum": 0.5}
BANDED = {"name": "dp-ftrl", "clip": 1.0, "step": 0.1, "mechanism": "banded", "bands": 2}
TREE = {"name": "dp-ftrl", "clip": 1.0, "step": 0.1, "mechanism": "tree"}


def dropping(make: MakeCell, trust: str = "untrusted", algorithm: dict[str, Any] = SGD, **changes: Any) -> Cell:
    """Three silos of two epochs; each is away in about a third of the rounds."""
    return make(
        **{
            "federation": {"silos": 3, "rounds": 8, "epochs": 2, "batch": 4, "drop_out": 0.35},
            "algorithm": {"trust": trust, **algorithm},
            "privacy": {"relation": "zero-out", "epsilon": 4.0},
            **changes,
        }
    )


@pytest.mark.parametrize("arithmetic", ["float", "integers"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_round_without_a_silo_is_the_others_sum_over_the_same_denominators(
    small_cell: MakeCell, trust: str, arithmetic: str
) -> None:
    """DP-SGD record by record, whoever is away: their records and their noise are not there, weights are fixed."""
    cell = dropping(small_cell, trust, {"name": "dp-sgd", "clip": 1.0, "step": 0.1}, run__arithmetic=arithmetic)
    task, noise, absences = load_task(cell), simulation_noise(cell.seed, np.float64), draw_absences(cell)
    plan, orders = make_plan(cell, task.objective), partition_records(cell)
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
        for engine in ("vectorized", "inprocess"):
            (outcome,), _ = run(engine, cell)
            np.testing.assert_allclose(outcome.cell_outcome.model, model, rtol=1e-9, atol=1e-12)
        return
    (outcome,), _ = run("inprocess", cell)  # noise of integers: as much as all rounds together have of it
    away = np.linalg.norm(outcome.cell_outcome.model - model)
    each = plan.noise.std_in_mean * 0.1
    rounds = [3 - len(absences.absent_silos(t)) if trust == "untrusted" else 3 for t in range(1, 9)]
    assert away == pytest.approx(each * np.sqrt(size * sum(rounds) / 3), rel=0.05)


@pytest.mark.every(4)
@pytest.mark.parametrize("algorithm", [SGD, BANDED, TREE], ids=["sgd", "banded", "tree"])
@pytest.mark.parametrize(
    ("trust", "sampling"),
    [
        (trust, name)
        for trust in TRUSTS
        for name in SELECTABLE_PARTICIPATIONS
        if not SELECTABLE_PARTICIPATIONS[name].client_initiated
    ],
)
def test_both_fast_engines_leave_out_the_same_or_the_cell_is_refused(
    small_cell: MakeCell, trust: str, sampling: str, algorithm: dict[str, Any]
) -> None:
    groups = 2 if SELECTABLE_PARTICIPATIONS[sampling].secret and algorithm is BANDED else 1
    changes = {
        "federation": {
            "silos": 3, "rounds": 8, "epochs": 2, "batch": 4, "drop_out": 0.35, "sampling": sampling,
            "groups": groups,
        }
    }  # fmt: skip
    refused = {"secure-aggregation": "masks cancel in the sum of all silos only", "curator": "no silo can be away"}
    if trust in refused:
        with pytest.raises(InputError, match=refused[trust]) as caught:
            dropping(small_cell, trust, algorithm, **changes)
        assert "\n" not in str(caught.value)
        return
    cell = dropping(small_cell, trust, algorithm, **changes)
    if SELECTABLE_PARTICIPATIONS[sampling].secret and algorithm is TREE:
        with pytest.raises(InputError, match="is unbounded there"):
            make_plan(cell, load_task(cell).objective)
        return
    together = [cell, dropping(small_cell, trust, algorithm, seed=2, **changes)]  # away in other rounds
    for alone, outcome in zip(together, run("vectorized", *together)[0], strict=True):
        (inprocess,), _ = run("inprocess", alone)
        model = outcome.cell_outcome.model
        assert np.linalg.norm(model) > 1e-3
        np.testing.assert_allclose(
            model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-9 * np.linalg.norm(model)
        )
        assert outcome.cell_outcome.fraction_clipped == pytest.approx(
            inprocess.cell_outcome.fraction_clipped, abs=1e-12
        )
        assert outcome.cell_outcome.missed == draw_absences(alone).rounds
        assert {silo: tuple(rounds) for silo, rounds in inprocess.cell_outcome.missed.items()} == dict(
            outcome.cell_outcome.missed
        )
        assert outcome.cell_outcome.gradient_evaluations == inprocess.cell_outcome.gradient_evaluations
        claim = compute_claim(outcome.cell_outcome.releases)
        assert claim is not None
        assert 3.9 < claim.guarantee.epsilon_of(1e-5) <= 4.0 + 1e-9


def test_persons_and_integers_too(tmp_path: Path) -> None:
    cell = person_cell(tmp_path, federation__away={"1": [1, 2, 7]})
    (vectorized,), _ = run("vectorized", cell)
    (inprocess,), _ = run("inprocess", cell)
    np.testing.assert_allclose(vectorized.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-12)
    assert inprocess.cell_outcome.missed == {1: [1, 2, 7]}


def test_a_record_of_a_silo_that_is_away_moves_nothing(small_cell: MakeCell) -> None:
    """Guarantee of `substitute_message`: what is counted in its place is made of earlier releases alone."""
    rounds = {"away": {"2": [1, 4]}}
    for trust, engine in (("untrusted", "inprocess"), ("trusted", "inprocess"), ("trusted", "vectorized")):
        changes = {"federation": {"silos": 3, "rounds": 4, "batch": 4, **rounds}}
        cell = dropping(small_cell, trust, BANDED, **changes)
        (before,), _ = run(engine, cell)
        order = partition_records(cell)[2]
        features, held = load_task(cell).train.features, torch.cat([order[:4], order[12:]])
        kept = features[held].clone()
        with torch.inference_mode():
            features[held] = 50.0
        try:
            (after,), _ = run(engine, cell)
        finally:
            with torch.inference_mode():
                features[held] = kept
        assert np.array_equal(before.cell_outcome.model, after.cell_outcome.model)


def test_recursive_gradients_start_again_from_the_query_that_was_answered(small_cell: MakeCell) -> None:
    cell = dropping(
        small_cell, "untrusted", {"name": "accelerated-dp-srgd", "clip": 2.0, "beta": 5.0, "radius": 3.0}
    )
    (inprocess,), _ = run("inprocess", cell)
    assert np.isfinite(inprocess.cell_outcome.model).all()
    with pytest.raises(InputError, match="keeps one for all silos; use --engine inprocess"):
        run("vectorized", cell)


@pytest.mark.parametrize(
    ("federation", "line"),
    [
        ({"away": {"3": [1]}}, "federation.away: '3' is no silo; there are 0 to 2"),
        ({"away": {"01": [1]}}, "federation.away: '01' is no silo"),
        ({"away": {"x": [1]}}, "federation.away: 'x' is no silo"),
        ({"away": {"0": [9]}}, "federation.away: round 9 of silo 0: there are 8"),
        ({"away": {"0": [0]}}, "expected a number of at least 1"),
        ({"drop_out": 1.0}, "drop_out"),
        ({"drop_out": -0.1}, "drop_out"),
    ],
)
def test_absences_that_there_cannot_be_are_refused(
    small_cell: MakeCell, federation: dict[str, Any], line: str
) -> None:
    with pytest.raises(InputError, match=line) as caught:
        dropping(small_cell, federation={"silos": 3, "rounds": 8, **federation})
    assert "\n" not in str(caught.value)


def test_what_cannot_go_on_without_a_silo_is_refused(small_cell: MakeCell) -> None:
    reduced = {"name": "momentum-tree-reduced", "alpha": 0.2, "step": 0.005}
    cell = dropping(small_cell, "untrusted", reduced, privacy={"relation": "zero-out", "mu": 1.0})
    with pytest.raises(InputError, match=r"federation\.drop_out = 0\.35: momentum-tree-reduced cannot go on"):
        make_plan(cell, load_task(cell).objective)
    with pytest.raises(InputError, match=r"mean of all silos' noise, and with federation\.drop_out = 0\.35"):
        run("vectorized", dropping(small_cell, run__noise="aggregate"))


def test_absent_silos_are_refused_on_a_device_that_draws_no_silos_noise(small_cell: MakeCell) -> None:
    """Was: from a device's noise, one draw of the mean, the processor's noise of a silo was taken away."""
    line = r'run\.device = "cuda" draws the mean of all silos\' noise, and with federation\.drop_out = 0\.35'
    with pytest.raises(InputError, match=line):
        group_cells([dropping(small_cell, "untrusted", run__device="cuda")])
    for trust, changes in (("untrusted", {"privacy": {"relation": "zero-out", "mode": "none"}}), ("trusted", {})):
        assert group_cells([dropping(small_cell, trust, run__device="cuda", **changes)])


def test_a_deployment_has_no_absences_of_a_scenario(small_cell: MakeCell, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="are for simulations"):
        list(make_engine("deployment", tmp_path)([dropping(small_cell)], Recorder()))
