"""The Goldstein rows on the engines: they are charged exactly, and refuse what is not sound."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import count_gradient_evaluations
from fedpriv.core.errors import InputError
from fedpriv.loss.goldstein import RandomSmoothing, measure_objective
from fedpriv.noise.tree import level_count
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import check_record_count, load_task, partition_records
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import run

MakeCell = Callable[..., Cell]

COMMON = {
    "smoothing": 0.4,
    "radius": 0.02,
    "period": 4,
    "anchor_clip": 5.0,
    "clip": 1.0,
    "directions": 2,
    "window": 3,
}
SINGLE = {"name": "goldstein-single-pass", "trust": "untrusted", "anchor_batches": 3, **COMMON}
ERM = {"name": "goldstein-erm", "trust": "untrusted", **COMMON}
ONE_PASS = {"silos": 3, "rounds": 11, "batch": 2}
ALL_RECORDS = {"silos": 3, "rounds": 11, "epochs": 11, "batch": 5}


ANCHORED = SINGLE | {"noise": "anchored"}
every_noise = pytest.mark.parametrize(
    ("algorithm", "federation"),
    [(SINGLE, ONE_PASS), (ANCHORED, ONE_PASS), (ERM, ALL_RECORDS)],
    ids=["single", "anchored", "erm"],
)
MU = {"relation": "replace-one", "mu": 4.0}


def checked_plan(cell: Cell) -> Plan:
    check_record_count(cell)
    return make_plan(cell, load_task(cell).objective)


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@every_noise
def test_the_ledger_gives_back_the_target(
    small_cell: MakeCell, algorithm: dict[str, Any], federation: dict[str, Any], relation: str
) -> None:
    cell = small_cell(federation=federation, algorithm=algorithm, privacy={"relation": relation, "mu": 0.7})
    claim = compute_claim(make_release_streams(make_plan(cell, load_task(cell).objective), 11))
    assert claim is not None
    assert claim.guarantee.mu == pytest.approx(0.7, rel=1e-12)
    assert claim.relation == relation


@pytest.mark.parametrize(("anchor_clip", "clip"), [(0.5, 0.2), (0.1, 5.0), (3.0, 0.01)])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_node_has_the_noise_of_the_formula(
    small_cell: MakeCell, anchor_clip: float, clip: float, trust: str
) -> None:
    """σ = max(s1 √h1, s2 √h2)/μ, s1 = 2 C1/B1 and s2 = 2 C2/B2 of a silo's batch, or of all silos'."""
    settings = {**SINGLE, "anchor_clip": anchor_clip, "clip": clip, "period": 5, "trust": trust}
    cell = small_cell(federation=ONE_PASS, algorithm=settings, privacy={"relation": "replace-one", "mu": 2.0})
    source = make_plan(cell, load_task(cell).objective).noise.sources[0]
    together = 3 if trust == "trusted" else 1
    first, other = 2 * anchor_clip / (6 * together), 2 * clip / (2 * together)
    height = level_count(5)
    assert float(source.std) == pytest.approx(max(first * height**0.5, other * (height - 1) ** 0.5) / 2.0)


def test_an_anchor_of_its_own_has_the_noise_of_its_clip(small_cell: MakeCell) -> None:
    """2 C1/(B1 μ) at an anchor; the square root's column of three rounds is what a difference is charged."""
    cell = small_cell(federation=ONE_PASS, algorithm=ANCHORED, privacy={"relation": "replace-one", "mu": 2.0})
    plan = make_plan(cell, load_task(cell).objective)
    std, anchor = float(plan.noise.sources[0].std), plan.mechanism.anchor
    assert std * anchor == pytest.approx(2 * 5.0 / 6 / 2.0)
    assert std == pytest.approx(2 * 1.0 / 2 * (1 + 1 / 4 + 9 / 64) ** 0.5 / 2.0)


def test_leaves_of_all_records_have_the_least_noise_at_their_price(small_cell: MakeCell) -> None:
    """Section 6.3: with a = n_a s1², b = n_d s2², Q = √a + √((Σ-1) b): σ1² = Q√a/μ², σ2² = Q √(b/(Σ-1))/μ²."""
    cell = small_cell(federation=ALL_RECORDS, algorithm=ERM, privacy={"relation": "replace-one", "mu": 2.0})
    plan = make_plan(cell, load_task(cell).objective)
    a, b = 3 * (2 * 5.0 / 5) ** 2, 8 * (2 * 1.0 / 5) ** 2
    q = a**0.5 + (3 * b) ** 0.5
    std = float(plan.noise.sources[0].std)
    assert std**2 == pytest.approx(q * (b / 3) ** 0.5 / 4.0)
    assert (std * plan.mechanism.first) ** 2 == pytest.approx(q * a**0.5 / 4.0)


def test_every_record_is_read_once_in_order_anchors_more(small_cell: MakeCell) -> None:
    cell = small_cell(federation=ONE_PASS, algorithm=SINGLE, privacy=MU)
    schedule = cell.schedule
    sizes = [len(schedule.batches(t)) for t in range(1, 12)]
    assert sizes == [3, 1, 1, 1, 3, 1, 1, 1, 3, 1, 1]
    assert [place for t in range(1, 12) for place in schedule.batches(t)] == list(range(schedule.batches_per_silo))
    assert all(len(share) == schedule.batches_per_silo * 2 for share in partition_records(cell))
    assert schedule.single_pass


def test_gradient_evaluations_are_counted(small_cell: MakeCell) -> None:
    cell = small_cell(federation=ONE_PASS, algorithm=SINGLE, privacy=MU)
    plan = make_plan(cell, load_task(cell).objective)
    assert isinstance(plan.objective, RandomSmoothing)
    anchors, others = 3 * 3, 8
    assert count_gradient_evaluations(plan, 11) == 6 * (anchors * 1 + others * 2 * 2)
    values = small_cell(federation=ONE_PASS, algorithm={**SINGLE, "oracle": "zeroth-order"}, privacy=MU)
    assert count_gradient_evaluations(make_plan(values, load_task(values).objective), 11) == 6 * (
        anchors * 2 * 2 + others * 4 * 2
    )


@pytest.mark.parametrize("oracle", ["first-order", "zeroth-order"])
def test_anchors_take_directions_of_their_own_number_at_the_same_price(small_cell: MakeCell, oracle: str) -> None:
    """m directions at 3 anchors, J = 2 at both points of 8 differences; the clip and so the noise stay."""
    plans, models = {}, []
    for m in (None, 1, 5):
        cell = small_cell(federation=ALL_RECORDS, algorithm={**ERM, "oracle": oracle}, privacy=MU)
        if m is not None:
            cell = small_cell(
                federation=ALL_RECORDS, algorithm={**ERM, "oracle": oracle, "anchor_directions": m}, privacy=MU
            )
        plan = plans[m] = make_plan(cell, load_task(cell).objective)
        values = 1 if oracle == "first-order" else 2
        at_anchor = m or (1 if oracle == "first-order" else 2)
        assert count_gradient_evaluations(plan, 11) == 15 * values * (3 * at_anchor + 8 * 2 * 2)
        assert plan.noise.sources == plans[None].noise.sources
        assert [plan.estimator.round(t).clip for t in (1, 2)] == [5.0, 1.0]
        (vectorized,), _ = run("vectorized", cell)
        (inprocess,), _ = run("inprocess", cell)
        np.testing.assert_allclose(
            vectorized.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-12
        )
        models.append(vectorized.cell_outcome.model)
    assert not np.array_equal(models[0], models[2])


def test_a_single_pass_has_no_directions_of_anchors(small_cell: MakeCell) -> None:
    with pytest.raises(InputError, match="anchor_directions"):
        small_cell(federation=ONE_PASS, algorithm={**SINGLE, "anchor_directions": 4}, privacy=MU)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"federation": {**ONE_PASS, "epochs": 11}, "algorithm": {**SINGLE, "anchor_batches": 1}}, "second pass"),
        ({"federation": {**ONE_PASS, "epochs": 11}, "algorithm": SINGLE}, "second pass"),
        ({"federation": {"silos": 3, "samples": 300}, "algorithm": SINGLE}, "give rounds and batch"),
        ({"federation": ONE_PASS, "algorithm": ERM}, "all of a silo's records"),
        (
            {
                "federation": ONE_PASS,
                "algorithm": {**SINGLE, "oracle": "zeroth-order"},
                "run": {"dtype": "float32"},
            },
            "float64",
        ),
        ({"federation": ONE_PASS, "algorithm": {**SINGLE, "window": 12}}, "12 rounds are averaged"),
        ({"federation": {**ONE_PASS, "batch": 200}, "algorithm": SINGLE}, "17 batches of 600 records"),
    ],
)
def test_what_is_not_sound_is_refused(small_cell: MakeCell, overrides: dict[str, Any], reason: str) -> None:
    cell = small_cell(privacy=MU, **overrides)
    with pytest.raises(InputError, match=reason):
        checked_plan(cell)


def test_a_seed_fixes_coins_and_directions(small_cell: MakeCell) -> None:
    cell = small_cell(federation=ONE_PASS, algorithm=SINGLE, privacy=MU)
    first, again = run("vectorized", cell)[0][0], run("vectorized", cell)[0][0]
    assert np.array_equal(first.cell_outcome.model, again.cell_outcome.model)
    assert torch.from_numpy(first.cell_outcome.model).norm() > 0


def test_both_engines_report_the_measure_by_name(small_cell: MakeCell) -> None:
    """Phase retrieval through a scenario: no accuracy, the objective's own metric, and the Goldstein measure."""
    cell = small_cell(
        data__name="phase-retrieval",
        model__name="robust-phase-retrieval",
        federation=ONE_PASS,
        algorithm=SINGLE,
        privacy=MU,
        run={"dtype": "float64", "evaluations": 2, "goldstein_radius": 0.8},
    )
    vectorized, inprocess = (run(engine, cell)[0][0].cell_outcome for engine in ("vectorized", "inprocess"))
    assert set(vectorized.metrics) == {"test_loss", "sizes_met", "goldstein"}
    assert dict(inprocess.metrics) == pytest.approx(dict(vectorized.metrics), abs=1e-8)
    task = load_task(cell)
    model = torch.from_numpy(vectorized.model)
    expected = measure_objective(task.objective, model, task.test, 0.8, count=256, seed=0)
    assert vectorized.metrics["goldstein"] == pytest.approx(expected)


def test_a_model_of_real_values_needs_data_of_real_values(small_cell: MakeCell) -> None:
    for data, model in (("phase-retrieval", "softmax-regression"), ("synthetic", "robust-phase-retrieval")):
        with pytest.raises(InputError, match="does not fit"):
            load_task(small_cell(data__name=data, model__name=model))
