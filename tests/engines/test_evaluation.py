"""Silos that evaluate on their own test records: the same on both fast engines, private where it has to be."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.core.errors import InputError
from fedpriv.plan.evaluation import (
    held_out_indices_by_silo,
    held_out_records_by_silo,
    make_evaluation_plan,
    partition_test_records,
    train_indices_of_silos,
)
from fedpriv.plan.task import load_public_task, load_task
from fedpriv.scenario.load import resolve_cell
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv
from tests.engines.builders import run, run_cell, small_cell

ASKED: dict[str, Any] = {"records": [50, 60, 70], "mu": 1.0}
SETTINGS = {
    "untrusted": {"evaluation": ASKED, "run__per_silo": True},
    "secure-aggregation": {"evaluation": ASKED, "algorithm__trust": "secure-aggregation"},
    "trusted": {"evaluation": ASKED, "algorithm__trust": "trusted"},
    "trusted, exact": {"evaluation": {"records": 40}, "algorithm__trust": "trusted", "run__per_silo": True},
    "not private": {
        "evaluation": {"records": 40},
        "privacy": {"relation": "replace-one", "mode": "none"},
        "run__per_silo": True,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_both_engines_tell_the_same_metrics(name: str) -> None:
    cell = small_cell(**SETTINGS[name])
    (fast,), heard = run("vectorized", cell)
    (slow,), also = run("inprocess", cell)
    rounding = 1e-4 if name == "secure-aggregation" else 1e-9
    assert fast.cell_outcome.metrics == pytest.approx(slow.cell_outcome.metrics, rel=rounding)
    assert set(fast.cell_outcome.metrics) == set(slow.cell_outcome.metrics)
    assert ("test_accuracy_worst_silo" in fast.cell_outcome.metrics) == cell.run.per_silo
    assert np.allclose([line[1:] for line in heard.evaluations], [line[1:] for line in also.evaluations])
    assert fast.cell_outcome.evaluations == slow.cell_outcome.evaluations


@pytest.mark.parametrize("name", ["trusted, exact", "not private"])
def test_exact_metrics_are_those_of_the_silos_own_test_records(name: str) -> None:
    cell = small_cell(**SETTINGS[name])
    outcome = run_cell("inprocess", cell)
    model, objective = torch.from_numpy(outcome.model), load_task(cell).objective
    of_silos = [objective.evaluate(model, own) for own in held_out_records_by_silo(cell)]
    metrics = outcome.metrics
    for silo, found in enumerate(of_silos):
        assert found.accuracy is not None
        assert metrics[f"test_accuracy_at_silo_{silo}"] == pytest.approx(float(found.accuracy))
        assert metrics[f"test_loss_at_silo_{silo}"] == pytest.approx(float(found.loss))
    assert metrics["test_loss"] == pytest.approx(np.mean([float(found.loss) for found in of_silos]))
    assert metrics["test_loss_worst_silo"] == pytest.approx(max(float(found.loss) for found in of_silos))


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float", "integers"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_noise_of_evaluations_has_the_deviation_that_the_ledger_says(trust: str, arithmetic: str) -> None:
    """Metrics of many seeds about the exact ones, in standard deviations: a χ² with 2 · 40 degrees of freedom."""
    tree = small_tree(
        evaluation={"records": 50, "mu": 0.5}, algorithm__trust=trust, federation__rounds=1, run__evaluations=1
    )
    squares = []
    for seed in range(40):
        tree["seed"], tree["run"]["arithmetic"] = seed, arithmetic
        cell = resolve_cell(tree, "test")
        outcome = run_cell("inprocess", cell)
        model, own = torch.from_numpy(outcome.model), held_out_records_by_silo(cell)
        asked = make_evaluation_plan(cell, load_task(cell).objective)
        assert asked is not None
        exact = torch.stack([asked.scores.contributions(model, each).mean(0) for each in own]).mean(0)
        (stream,) = outcome.evaluations
        std = stream.std / (1.0 if trust == "trusted" else math.sqrt(3))
        metrics = outcome.metrics
        found = [metrics["test_accuracy"] - 0.5, metrics["test_loss"] / 10.0 - 0.5]
        squares += [((value - float(mean)) / std) ** 2 for value, mean in zip(found, exact, strict=True)]
    assert 44 < sum(squares) < 130  # false alarm 2e-4 a case


@pytest.mark.parametrize(("trust", "sensitivity"), [("untrusted", 1 / 50), ("trusted", 1 / 150)])
@pytest.mark.parametrize(("relation", "factor"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_the_claim_is_of_all_evaluations_and_of_every_test_record(
    trust: str, sensitivity: float, relation: str, factor: float
) -> None:
    """σ = factor · (√2 / 2) · √E / (n μ): the sensitivity of E vectors that one record moves by so much."""
    cell = small_cell(
        evaluation={"records": 50, "mu": 0.5},
        algorithm__trust=trust,
        run__evaluations=4,
        privacy__relation=relation,
    )
    outcome = run_cell("vectorized", cell)
    (stream,) = outcome.evaluations
    assert stream.mu == pytest.approx(0.5)
    assert stream.schedule.rounds == 4
    assert stream.std == pytest.approx(factor * math.sqrt(0.5) * sensitivity * math.sqrt(4) / 0.5)


def test_no_test_record_is_a_training_record_or_at_two_silos() -> None:
    for data in ({"partition": "iid"}, {"partition": "dirichlet", "concentration": 0.3}):
        cell = small_cell(evaluation=ASKED, data={"name": "synthetic", **data})
        numbers = [number for own in held_out_indices_by_silo(cell) for number in own.tolist()]
        assert len(numbers) == len(set(numbers)) == 180
        assert max(numbers) < len(load_task(cell).test.labels)


def test_silos_of_a_skewed_partition_are_tested_on_the_labels_that_they_train_on() -> None:
    cell = small_cell(
        evaluation={"records": 100, "mu": 1.0},
        data__partition="dirichlet",
        data__concentration=0.1,
        federation={"silos": 3, "rounds": 8, "batch": 40},
    )
    task = load_task(cell)
    for train, test in zip(train_indices_of_silos(cell), partition_test_records(cell), strict=True):
        trained, tested = (
            np.bincount(labels.numpy(), minlength=10) / len(labels)
            for labels in (task.train.labels[train], task.test.labels[test])
        )
        assert np.abs(trained - tested).sum() < 0.5  # 2 would be no label in common


def test_hospitals_are_tested_on_their_own_records_without_a_public_table(tmp_path: Path) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["evaluation"] = {"records": [30, 24], "mu": 2.0}  # rows, of which a third are for testing
    tree["run"]["per_silo"] = True
    said = tree["data"]["table"].pop("test_share")
    with pytest.raises(InputError, match=r"table\.test_share: this key is missing; published means are divided"):
        run("vectorized", resolve_cell(tree, "test"))
    tree["data"]["table"]["test_share"] = said
    cell = resolve_cell(tree, "test")
    fast = run_cell("vectorized", cell)
    slow = run_cell("inprocess", cell)
    assert fast.metrics == pytest.approx(slow.metrics)
    assert "test_accuracy_at_north" in fast.metrics
    tree["data"]["name"] = str(tmp_path / "nowhere.csv")
    task = load_public_task(resolve_cell(tree, "test"))
    assert task.objective.dimension == load_task(cell).objective.dimension
    assert len(task.test.labels) == 0
    tree["data"]["name"], tree["evaluation"]["records"] = str(tmp_path / "t.csv"), [9, 40]
    with pytest.raises(InputError, match=r"evaluation\.records: 'south' has 24 rows, and 40 are asked for"):
        run("vectorized", resolve_cell(tree, "test"))


@pytest.mark.parametrize("partition", ["site", "iid"])
def test_rows_that_cells_put_aside_are_scored_over_the_public_share(tmp_path: Path, partition: str) -> None:
    """Without noise, and with all rows read: the mean over those that are for testing, a third of them."""
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["data"]["partition"], tree["federation"]["batches"] = partition, [18, 12]
    tree["federation"] |= {"rounds": 2, "epochs": 1}
    tree["evaluation"], tree["privacy"] = {"records": [36, 24]}, {"relation": "zero-out", "mode": "none"}
    tree["algorithm"]["trust"] = "trusted"
    cell = resolve_cell(tree, "test")
    task = load_task(cell)
    assert len(task.test.labels) == 20
    for engine in ("vectorized", "inprocess"):
        outcome = run_cell(engine, cell)
        model = torch.from_numpy(outcome.model)
        wanted = task.objective.evaluate(model, task.test).to_metrics()
        for name, value in wanted.items():
            assert outcome.metrics[name] == pytest.approx(float(value), rel=1e-9)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            {"evaluation": {"records": 50}},
            "evaluation.mu: this key is missing: under a server that is not trusted",
        ),
        (
            {"evaluation": {"records": [50, 50], "mu": 1.0}},
            "evaluation.records has 2 numbers, and there are 3 silos",
        ),
        ({"run__metrics": ["auc"]}, "auc is none: it ranks every record against all others"),
        ({"run__metrics": ["calibration_error"]}, "it needs sums over the records of every bin"),
        ({"run__goldstein_radius": 0.1}, "gradients of test records are not sent"),
        ({"algorithm__trust": "trusted", "run__per_silo": True}, "run.per_silo: a trusted server adds the noise"),
        (
            {"privacy": {"relation": "zero-out", "mode": "none"}},
            'evaluation.mu: privacy.mode = "none" means no noise',
        ),
        ({"deployment__missing": "continue"}, "an evaluation needs all silos"),
        ({"data__validation": 10}, "no silo's test records"),
        ({"evaluation": {"records": 50, "mu": 1.0, "loss_bound": 0.0}}, "evaluation.loss_bound"),
        ({"evaluation": {"records": 0, "mu": 1.0}}, "evaluation.records"),
    ],
)
def test_what_silos_cannot_evaluate_is_refused_in_one_line(overrides: dict[str, Any], reason: str) -> None:
    tree = small_tree(**{"evaluation": ASKED, **overrides})
    with pytest.raises(InputError) as raised:
        resolve_cell(tree, "test")
    assert reason in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_more_test_records_than_there_are_is_refused() -> None:
    cell = small_cell(evaluation={"records": 10**6, "mu": 1.0})
    with pytest.raises(
        InputError, match=r"evaluation\.records: 3000000 test records of all silos, and synthetic has"
    ):
        run("vectorized", cell)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_one_records_share_is_bounded_whatever_the_model_is(bad: float) -> None:
    """Guarantee of SummedScores: finite, and no longer than its norm."""
    cell = small_cell(evaluation=ASKED)
    asked = make_evaluation_plan(cell, load_task(cell).objective)
    assert asked is not None
    model = torch.full((load_task(cell).objective.dimension,), bad, dtype=torch.float64)
    model[::7] = -bad
    shares = asked.scores.contributions(model, held_out_records_by_silo(cell)[0])
    assert torch.isfinite(shares).all()
    assert float(torch.linalg.vector_norm(shares, dim=-1).max()) <= asked.scores.norm


def test_replicates_of_other_seeds_do_not_change_an_evaluation() -> None:
    cells = [small_cell(evaluation=ASKED, seed=seed) for seed in (1, 2)]
    together, _ = run("vectorized", *cells)
    for cell, outcome in zip(cells, together, strict=True):
        alone = run_cell("inprocess", cell)
        assert outcome.cell_outcome.metrics == pytest.approx(alone.metrics)


def test_evaluating_changes_no_model() -> None:
    models = []
    for evaluation, engine in itertools.product((None, ASKED), ("vectorized", "inprocess")):
        outcome = run_cell(engine, small_cell(evaluation=evaluation))
        models.append(outcome.model)
    for model in models[1:]:
        np.testing.assert_allclose(model, models[0], rtol=1e-9, atol=1e-13)
