"""Silos that evaluate on their own test records: the same on both fast engines, private where it has to be."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.plan.evaluation import (
    held_out_indices_by_silo,
    held_out_records_by_silo,
    make_evaluation_plan,
    partition_test_records,
    train_indices_of_silos,
)
from fedpriv.plan.task import load_public_task, load_task
from fedpriv.scenario.load import resolve_cell
from tests.data.tables import rows, table_tree, write_csv
from tests.engines.builders import ENGINES, QUIET, refusal, run, run_cell, run_on_both, run_together, small_cell

PRIVATE: dict[str, Any] = {"records": [50, 60, 70], "mu": 1.0}
SETTINGS = {
    "untrusted": {"evaluation": PRIVATE, "run__per_silo": True},
    "secure-aggregation": {"evaluation": PRIVATE, "algorithm__trust": "secure-aggregation"},
    "trusted": {"evaluation": PRIVATE, "algorithm__trust": "trusted"},
    "trusted, exact": {"evaluation": {"records": 40}, "algorithm__trust": "trusted", "run__per_silo": True},
    "not private": {
        "evaluation": {"records": 40},
        "privacy": {"relation": "replace-one", "mode": "none"},
        "run__per_silo": True,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_both_engines_report_the_same_silo_evaluation_metrics(name: str) -> None:
    cell = small_cell(**SETTINGS[name])
    ((fast,), heard), ((slow,), also) = (run(engine, cell) for engine in ENGINES)
    ours, theirs = fast.cell_outcome, slow.cell_outcome
    rounding = 1e-4 if name == "secure-aggregation" else 1e-9
    assert ours.metrics == pytest.approx(theirs.metrics, rel=rounding)
    assert ("test_accuracy_worst_silo" in ours.metrics) == cell.run.per_silo
    assert np.allclose(heard.evaluations, also.evaluations)
    assert ours.evaluations == theirs.evaluations


@pytest.mark.parametrize("name", ["trusted, exact", "not private"])
def test_evaluation_metrics_without_noise_equal_those_of_the_silo_test_records(name: str) -> None:
    cell = small_cell(**SETTINGS[name])
    outcome = run_cell("inprocess", cell)
    model, objective = torch.from_numpy(outcome.model), load_task(cell).objective
    scores = [objective.evaluate(model, records).to_metrics() for records in held_out_records_by_silo(cell)]
    losses, accuracies = ([float(score[f"test_{name}"]) for score in scores] for name in ("loss", "accuracy"))
    metrics = outcome.metrics
    assert [metrics[f"test_accuracy_at_silo_{silo}"] for silo in range(3)] == pytest.approx(accuracies)
    assert [metrics[f"test_loss_at_silo_{silo}"] for silo in range(3)] == pytest.approx(losses)
    assert metrics["test_loss"] == pytest.approx(np.mean(losses))
    assert metrics["test_loss_worst_silo"] == pytest.approx(max(losses))


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float", "integers"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_evaluation_noise_has_the_standard_deviation_stated_in_the_ledger(trust: str, arithmetic: str) -> None:
    """Metrics of many seeds about the exact ones, in standard deviations: a χ² with 2 · 40 degrees of freedom."""
    squares = []
    changes = {"run__evaluations": 1, "run__arithmetic": arithmetic, "federation__rounds": 1}
    for seed in range(40):
        cell = small_cell(evaluation={"records": 50, "mu": 0.5}, algorithm__trust=trust, seed=seed, **changes)
        outcome = run_cell("inprocess", cell)
        model, records = torch.from_numpy(outcome.model), held_out_records_by_silo(cell)
        evaluation = make_evaluation_plan(cell, load_task(cell).objective)
        assert evaluation is not None
        exact = torch.stack([evaluation.scores.contributions(model, part).mean(0) for part in records]).mean(0)
        (stream,) = outcome.evaluations
        std = stream.std / (1.0 if trust == "trusted" else math.sqrt(3))
        metrics = outcome.metrics
        private = [metrics["test_accuracy"] - 0.5, metrics["test_loss"] / 10.0 - 0.5]
        squares += [((value - float(mean)) / std) ** 2 for value, mean in zip(private, exact, strict=True)]
    assert 44 < sum(squares) < 130  # false alarm 2e-4 a case


@pytest.mark.parametrize(("trust", "sensitivity"), [("untrusted", 1 / 50), ("trusted", 1 / 150)])
@pytest.mark.parametrize(("relation", "factor"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_the_evaluation_claim_covers_all_evaluations_of_a_test_record(
    trust: str, sensitivity: float, relation: str, factor: float
) -> None:
    """σ = factor · (√2 / 2) · √E / (n μ): the sensitivity of E vectors that one record moves by so much."""
    changes = {"algorithm__trust": trust, "privacy__relation": relation, "run__evaluations": 4}
    (stream,) = run_cell("vectorized", small_cell(evaluation={"records": 50, "mu": 0.5}, **changes)).evaluations
    assert stream.mu == pytest.approx(0.5)
    assert stream.schedule.rounds == 4
    assert stream.std == pytest.approx(factor * math.sqrt(0.5) * sensitivity * math.sqrt(4) / 0.5)


def test_test_records_of_silos_are_disjoint() -> None:
    for data in ({"partition": "iid"}, {"partition": "dirichlet", "concentration": 0.3}):
        cell = small_cell(evaluation=PRIVATE, data={"name": "synthetic", **data})
        numbers = [number for own in held_out_indices_by_silo(cell) for number in own.tolist()]
        assert len(numbers) == len(set(numbers)) == 180
        assert max(numbers) < len(load_task(cell).test.labels)


def test_silos_of_a_label_skewed_partition_have_similar_training_and_test_labels() -> None:
    skew = {"data__partition": "dirichlet", "data__concentration": 0.1}
    cell = small_cell(evaluation={"records": 100, "mu": 1.0}, federation__batch=40, **skew)
    task = load_task(cell)
    for train, test in zip(train_indices_of_silos(cell), partition_test_records(cell), strict=True):
        labels = task.train.labels[train], task.test.labels[test]
        trained, tested = (np.bincount(part.numpy(), minlength=10) / len(part) for part in labels)
        assert np.abs(trained - tested).sum() < 0.5  # 2 would be no label in common


def test_hospitals_are_evaluated_on_test_rows_of_their_tables(tmp_path: Path) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["evaluation"] = {"records": [30, 24], "mu": 2.0}  # rows, of which a third are for testing
    tree["run"]["per_silo"] = True
    share = tree["data"]["table"].pop("test_share")
    with refusal(r"table\.test_share: this key is missing or 0; published means are divided"):
        run("vectorized", resolve_cell(tree, "test"))
    tree["data"]["table"]["test_share"] = share
    cell = resolve_cell(tree, "test")
    outcome, _ = run_on_both(cell, is_split_by_cells=True)
    assert "test_accuracy_at_north" in outcome.metrics
    tree["data"]["name"] = str(tmp_path / "nowhere.csv")
    task = load_public_task(resolve_cell(tree, "test"))
    assert task.objective.dimension == load_task(cell).objective.dimension
    assert len(task.test.labels) == 0
    tree["data"]["name"], tree["evaluation"]["records"] = str(tmp_path / "t.csv"), [9, 40]
    with refusal(r"evaluation\.records: 'south' has 24 rows, and 40 are asked for"):
        run("vectorized", resolve_cell(tree, "test"))


@pytest.mark.parametrize("partition", ["site", "iid"])
def test_table_test_rows_are_averaged_over_the_public_test_share(tmp_path: Path, partition: str) -> None:
    """Without noise, and with all rows read: the mean over those that are for testing, a third of them."""
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["data"]["partition"], tree["federation"]["batches"] = partition, [18, 12]
    tree["federation"] |= {"rounds": 2, "epochs": 1}
    tree["evaluation"], tree["privacy"] = {"records": [36, 24]}, QUIET
    tree["algorithm"]["trust"] = "trusted"
    cell = resolve_cell(tree, "test")
    task = load_task(cell)
    assert len(task.test.labels) == 20
    for engine in ENGINES:
        outcome = run_cell(engine, cell)
        expected = task.objective.evaluate(torch.from_numpy(outcome.model), task.test).to_metrics()
        for name, value in expected.items():
            assert outcome.metrics[name] == pytest.approx(float(value), rel=1e-9)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"evaluation__mu": None}, "evaluation.mu: this key is missing: under a server that is not trusted"),
        ({"evaluation__records": [50, 50]}, "evaluation.records has 2 numbers, and there are 3 silos"),
        ({"run__metrics": ["auc"]}, "auc is none: it ranks every record against all others"),
        ({"run__metrics": ["calibration_error"]}, "it needs sums over the records of every bin"),
        ({"run__goldstein_radius": 0.1}, "gradients of test records are not sent"),
        ({"algorithm__trust": "trusted", "run__per_silo": True}, "run.per_silo: a trusted server adds the noise"),
        ({"privacy": QUIET}, 'evaluation.mu: privacy.mode = "none" means no noise'),
        ({"deployment__missing": "continue"}, "an evaluation needs all silos"),
        ({"data__validation": 10}, "no silo's test records"),
        ({"evaluation__loss_bound": 0.0}, "evaluation.loss_bound"),
        ({"evaluation__records": 0}, "evaluation.records"),
        (
            {"evaluation__records": 10**6},
            "evaluation.records: 3000000 test records of all silos, and synthetic has",
        ),
    ],
)
def test_invalid_silo_evaluations_are_refused_in_one_line(overrides: dict[str, Any], reason: str) -> None:
    with refusal(re.escape(reason)):
        run("vectorized", small_cell(**{"evaluation": PRIVATE, **overrides}))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_evaluation_scores_of_one_record_are_bounded_for_any_model(bad: float) -> None:
    """Guarantee of SummedScores: finite, and no longer than its norm."""
    cell = small_cell(evaluation=PRIVATE)
    objective = load_task(cell).objective
    evaluation = make_evaluation_plan(cell, objective)
    assert evaluation is not None
    model = torch.full((objective.dimension,), bad, dtype=torch.float64)
    model[::7] = -bad
    shares = evaluation.scores.contributions(model, held_out_records_by_silo(cell)[0])
    assert torch.isfinite(shares).all()
    assert float(torch.linalg.vector_norm(shares, dim=-1).max()) <= evaluation.scores.norm


def test_evaluations_of_replicates_run_together_equal_those_run_alone() -> None:
    cells = [small_cell(evaluation=PRIVATE, seed=seed) for seed in (1, 2)]
    run_together(cells)


def test_silo_evaluation_does_not_change_the_trained_model() -> None:
    cells = small_cell(), small_cell(evaluation=PRIVATE)
    first, *others = (run_cell(engine, cell).model for cell in cells for engine in ENGINES)
    for model in others:
        np.testing.assert_allclose(model, first, rtol=1e-9, atol=1e-13)
