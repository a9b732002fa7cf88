"""The Goldstein rows on the engines: they are charged exactly, and refuse what is not sound."""

from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.claims.outcome import count_gradient_evaluations
from fedpriv.loss.goldstein import RandomSmoothing, measure_objective
from fedpriv.noise.tree import level_count
from fedpriv.plan.task import check_record_count, load_task, partition_records
from fedpriv.scenario.schema import Cell
from tests.engines.builders import ENGINES, claim_of, plan_cell, refusal, run_cell, small_cell, streams_of

COMMON = {
    "trust": "untrusted", "smoothing": 0.4, "radius": 0.02, "period": 4, "anchor_clip": 5.0, "clip": 1.0,
    "directions": 2, "window": 3,
}  # fmt: skip
SINGLE: dict[str, Any] = {"name": "goldstein-single-pass", "anchor_batches": 3, **COMMON}
ERM: dict[str, Any] = {"name": "goldstein-erm", **COMMON}
ONE_PASS = {"silos": 3, "rounds": 11, "batch": 2}
ALL_RECORDS = {"silos": 3, "rounds": 11, "epochs": 11, "batch": 5}


def goldstein_cell(row: dict[str, Any] = SINGLE, mu: float = 2.0, **changes: Any) -> Cell:
    federation = ALL_RECORDS if row is ERM else ONE_PASS
    privacy = {"relation": "replace-one", "mu": mu}
    return small_cell(**{"federation": federation, "algorithm": row, "privacy": privacy, **changes})


ANCHORED = SINGLE | {"noise": "anchored"}


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("row", [SINGLE, ANCHORED, ERM], ids=["single", "anchored", "erm"])
def test_the_claim_of_a_goldstein_run_equals_its_mu_target(row: dict[str, Any], relation: str) -> None:
    claim = claim_of(streams_of(goldstein_cell(row, 0.7, privacy__relation=relation)))
    assert claim.guarantee.mu == pytest.approx(0.7, rel=1e-12)
    assert claim.relation == relation


@pytest.mark.parametrize(("anchor_clip", "clip"), [(0.5, 0.2), (0.1, 5.0), (3.0, 0.01)])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_tree_nodes_have_the_noise_of_the_goldstein_formula(anchor_clip: float, clip: float, trust: str) -> None:
    """σ = max(s1 √h1, s2 √h2)/μ, s1 = 2 C1/B1 and s2 = 2 C2/B2 of a silo's batch, or of all silos'."""
    settings = {**SINGLE, "anchor_clip": anchor_clip, "clip": clip, "period": 5, "trust": trust}
    source = plan_cell(goldstein_cell(settings)).noise.sources[0]
    together = 3 if trust == "trusted" else 1
    first, other = 2 * anchor_clip / (6 * together), 2 * clip / (2 * together)
    height = level_count(5)
    assert float(source.std) == pytest.approx(max(first * height**0.5, other * (height - 1) ** 0.5) / 2.0)


def test_a_separately_released_anchor_has_noise_proportional_to_its_own_clip() -> None:
    """2 C1/(B1 μ) at an anchor; the square root's column of three rounds is what a difference is charged."""
    plan = plan_cell(goldstein_cell(ANCHORED))
    std, anchor = float(plan.noise.sources[0].std), plan.mechanism.anchor
    assert std * anchor == pytest.approx(2 * 5.0 / 6 / 2.0)
    assert std == pytest.approx(2 * 1.0 / 2 * (1 + 1 / 4 + 9 / 64) ** 0.5 / 2.0)


def test_full_batch_releases_have_the_optimal_noise_split_of_the_goldstein_paper() -> None:
    """Section 6.3: with a = n_a s1², b = n_d s2², Q = √a + √((Σ-1) b): σ1² = Q√a/μ², σ2² = Q √(b/(Σ-1))/μ²."""
    plan = plan_cell(goldstein_cell(ERM))
    a, b = 3 * (2 * 5.0 / 5) ** 2, 8 * (2 * 1.0 / 5) ** 2
    q = a**0.5 + (3 * b) ** 0.5
    std = float(plan.noise.sources[0].std)
    assert std**2 == pytest.approx(q * (b / 3) ** 0.5 / 4.0)
    assert (std * plan.mechanism.first) ** 2 == pytest.approx(q * a**0.5 / 4.0)


def test_every_record_is_read_once_in_order_and_anchors_read_larger_batches() -> None:
    cell = goldstein_cell()
    schedule = cell.schedule
    sizes = [len(schedule.batches(t)) for t in range(1, 12)]
    assert sizes == [3, 1, 1, 1, 3, 1, 1, 1, 3, 1, 1]
    assert [place for t in range(1, 12) for place in schedule.batches(t)] == list(range(schedule.batches_per_silo))
    assert all(len(share) == schedule.batches_per_silo * 2 for share in partition_records(cell))
    assert schedule.single_pass


def test_gradient_evaluations_of_goldstein_runs_are_counted() -> None:
    plan = plan_cell(goldstein_cell())
    assert isinstance(plan.objective, RandomSmoothing)
    anchors, others = 3 * 3, 8
    assert count_gradient_evaluations(plan, 11) == 6 * (anchors * 1 + others * 2 * 2)
    values = plan_cell(goldstein_cell({**SINGLE, "oracle": "zeroth-order"}))
    assert count_gradient_evaluations(values, 11) == 6 * (anchors * 2 * 2 + others * 4 * 2)


@pytest.mark.every(2)
@pytest.mark.parametrize("oracle", ["first-order", "zeroth-order"])
def test_the_number_of_anchor_directions_changes_evaluations_but_not_the_noise(oracle: str) -> None:
    """m directions at 3 anchors, J = 2 at both points of 8 differences; the clip and so the noise stay."""
    plans, models = {}, []
    for m in (None, 1, 5):
        row = {**ERM, "oracle": oracle} | ({} if m is None else {"anchor_directions": m})
        cell = goldstein_cell(row, federation=ALL_RECORDS)
        plan = plans[m] = plan_cell(cell)
        values = 1 if oracle == "first-order" else 2
        at_anchor = m or (1 if oracle == "first-order" else 2)
        assert count_gradient_evaluations(plan, 11) == 15 * values * (3 * at_anchor + 8 * 2 * 2)
        assert plan.noise.sources == plans[None].noise.sources
        assert [plan.estimator.round(t).clip for t in (1, 2)] == [5.0, 1.0]
        if m != 1:
            models.append(run_cell("vectorized", cell).model)
    np.testing.assert_allclose(models[1], run_cell("inprocess", cell).model, rtol=1e-9, atol=1e-12)
    assert not np.array_equal(*models)


def test_the_single_pass_algorithm_refuses_a_number_of_anchor_directions() -> None:
    with refusal("anchor_directions"):
        goldstein_cell({**SINGLE, "anchor_directions": 4}, federation=ONE_PASS)


@pytest.mark.parametrize(
    ("row", "changes", "reason"),
    [
        (SINGLE, {"federation__epochs": 11, "algorithm__anchor_batches": 1}, "second pass"),
        (SINGLE, {"federation__epochs": 11}, "second pass"),
        (SINGLE, {"federation": {"silos": 3, "samples": 300}}, "give rounds and batch"),
        (ERM, {"federation": ONE_PASS}, "all of a silo's records"),
        (SINGLE, {"algorithm__oracle": "zeroth-order", "run": {"dtype": "float32"}}, "float64"),
        (SINGLE, {"algorithm__window": 12}, "12 rounds are averaged"),
        (SINGLE, {"federation__batch": 200}, "17 batches of 600 records"),
    ],
)
def test_unsound_goldstein_settings_are_refused(row: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    cell = goldstein_cell(row, **changes)
    with refusal(reason):
        check_record_count(cell)
        plan_cell(cell)


def test_a_seed_determines_the_random_directions_of_a_goldstein_run() -> None:
    first, again = (run_cell("vectorized", goldstein_cell()).model for _ in range(2))
    assert np.array_equal(first, again)
    assert np.linalg.norm(first) > 0


def test_both_engines_report_the_goldstein_measure_of_phase_retrieval() -> None:
    """Phase retrieval through a scenario: no accuracy, the objective's own metric, and the Goldstein measure."""
    names = {"data__name": "phase-retrieval", "model__name": "robust-phase-retrieval"}
    cell = goldstein_cell(**names, run={"dtype": "float64", "evaluations": 2, "goldstein_radius": 0.8})
    vectorized, inprocess = (run_cell(engine, cell) for engine in ENGINES)
    assert set(vectorized.metrics) == {"test_loss", "sizes_met", "goldstein"}
    assert dict(inprocess.metrics) == pytest.approx(dict(vectorized.metrics), abs=1e-8)
    task = load_task(cell)
    model = torch.from_numpy(vectorized.model)
    expected = measure_objective(task.objective, model, task.test, 0.8, count=256, seed=0)
    assert vectorized.metrics["goldstein"] == pytest.approx(expected)


def test_a_model_whose_label_type_does_not_fit_the_data_is_refused() -> None:
    for data, model in (("phase-retrieval", "softmax-regression"), ("synthetic", "robust-phase-retrieval")):
        with refusal("does not fit"):
            load_task(small_cell(data__name=data, model__name=model))
