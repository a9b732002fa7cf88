"""Discrete hazards against literal definitions: labels, the likelihood, the measures, and one clip a record."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.core.errors import InputError, RunError
from fedpriv.data.cells import read_table
from fedpriv.data.encode import encode_table
from fedpriv.data.schema import Survival, TableSchema
from fedpriv.loss.losses import HazardLoss, concordance, decode_labels, integrated_brier, survival_curve
from fedpriv.loss.models import MODELS, SoftmaxSettings
from fedpriv.loss.objective import Records
from fedpriv.loss.scores import Score, ScoreView, check_scores
from fedpriv.plan.evaluation import make_evaluation_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.demo import format_policy
from fedpriv.silo.guard import open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from tests.data.tables import write_csv
from tests.engines.test_engines import run
from tests.loss.builders import F64, list_integers, sum_increments

K = 4
GENERATOR = torch.Generator().manual_seed(3)
OUTPUTS = torch.randn(3, 60, K, generator=GENERATOR, dtype=F64).round(decimals=1)
LABELS = torch.randint(0, 2 * K + 1, (60,), generator=GENERATOR)
EDGES = (0.0, 1.0, 2.0, 4.0, 8.0)


def test_labels_are_bins_survived_and_the_event() -> None:
    times = np.array([0.0, 0.4, 0.6, 1.0, 3.0, 7.9, 8.0, 90.0, -1.0, math.inf])
    dead, alive = np.ones(10, np.bool_), np.zeros(10, np.bool_)
    survived = {
        "midpoint": [0, 0, 1, 1, 3, 4, 4, 4, 0, 4],
        "through": [1, 1, 1, 2, 3, 4, 4, 4, 0, 4],
        "before": [0, 0, 0, 1, 2, 3, 4, 4, 0, 4],
    }
    for censored, labels in survived.items():
        rule = Survival(time="t", edges=EDGES, censored=censored)  # type: ignore[arg-type]
        assert rule.make_labels(times, dead).tolist() == [5, 5, 5, 6, 7, 8, 4, 4, 0, 4]  # the same for all
        assert rule.make_labels(times, alive).tolist() == labels
        assert rule.class_count == 9


def test_the_loss_is_the_likelihood_of_the_persons_periods() -> None:
    hazards = OUTPUTS.sigmoid()
    for model in range(3):
        for place, label in enumerate(LABELS.tolist()):
            survived, seen = label % (K + 1), label > K
            likelihood = math.prod(1.0 - float(hazards[model, place, each]) for each in range(survived))
            likelihood *= float(hazards[model, place, survived]) if seen else 1.0
            result = float(HazardLoss().value(OUTPUTS[model, place], LABELS[place]))
            assert result == pytest.approx(-math.log(likelihood), rel=1e-9, abs=1e-12)
    outputs = OUTPUTS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(HazardLoss().value(outputs, LABELS).sum(), outputs)
    torch.testing.assert_close(HazardLoss().output_gradient(OUTPUTS, LABELS), expected)


def pairs_in_order(alive: Tensor) -> float:
    (last, seen), won, pairs = decode_labels(LABELS, K), 0.0, 0
    for one in range(60):
        for other in range(60):
            if bool(seen[one]) and int(last[other]) > int(last[one]):
                mine, theirs = (float(alive[who, int(last[one])]) for who in (one, other))
                won, pairs = won + (mine < theirs) + 0.5 * (mine == theirs), pairs + 1
    return won / pairs


def test_concordance_counts_the_pairs_in_order() -> None:
    result = concordance(OUTPUTS, LABELS).tolist()
    assert result == pytest.approx([pairs_in_order(survival_curve(each)) for each in OUTPUTS], rel=1e-12)
    perfect = 20.0 * (1.0 - 2.0 * torch.arange(60)[:, None] / 60.0) + torch.zeros(60, K)
    last = (torch.arange(60) // 12).clamp(max=K - 1)
    assert float(concordance(perfect.double(), last + K + 1)) == 1.0


def brier(alive: Tensor) -> float:
    last, seen = (each.tolist() for each in decode_labels(LABELS, K))

    def kept(before: int) -> float:
        """Of not being censored in the bins before."""
        product = 1.0
        for each in range(before):
            lost = sum(m == each and not s for m, s in zip(last, seen, strict=True))
            at_risk = sum(m >= each and not (m == each and s) for m, s in zip(last, seen, strict=True))
            product *= 1.0 - lost / at_risk
        return product

    total = 0.0
    for each in range(K):
        for who, (m, s) in enumerate(zip(last, seen, strict=True)):
            chance = float(alive[who, each])
            total += chance**2 / kept(m) if s and m <= each else 0.0
            total += (1.0 - chance) ** 2 / kept(each + 1) if m > each else 0.0
    return total / 60 / K


def test_the_integrated_brier_score_weighs_against_censoring() -> None:
    result = integrated_brier(OUTPUTS, LABELS).tolist()
    assert result == pytest.approx([brier(survival_curve(each)) for each in OUTPUTS], rel=1e-9)


@pytest.mark.parametrize("score", [concordance, integrated_brier])
def test_scores_of_a_diverged_model_are_not_numbers(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    outputs = OUTPUTS.clone()
    outputs[1, 7, 2] = math.nan
    assert score(outputs, LABELS).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("score", [concordance, integrated_brier])
def test_scores_of_records_without_an_event_are_zero_for_each_model(
    score: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """All records leave in the first bin, so that there is no pair, and no bin with a chance to see an event."""
    assert score(OUTPUTS, torch.zeros(60, dtype=torch.int64)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("score", [concordance, integrated_brier])
def test_scores_are_computed_on_the_device_of_the_outputs(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    """With another default device, a tensor that names none is on the wrong one."""
    expected = score(OUTPUTS, LABELS)
    with torch.device("meta"):
        assert torch.equal(score(OUTPUTS, LABELS), expected)


def test_the_score_does_not_depend_on_censoring() -> None:
    """A true model of 40,000 records: as without censoring, to a hundredth."""
    draw = np.random.default_rng(0)
    hazards = 1.0 / (1.0 + np.exp(-draw.normal(-1.0, 1.0, (40_000, K))))
    coins = draw.random((40_000, K)) < hazards
    events, died = coins.argmax(axis=1), coins.any(axis=1)
    lost = draw.integers(0, 2 * K, 40_000)  # censored in that bin, an event there comes first
    logits = torch.from_numpy(np.log(hazards / (1.0 - hazards)))
    last = np.where(died, events, K)
    whole = torch.from_numpy(last + (K + 1) * died)
    seen = died & (events <= lost)
    cut = torch.from_numpy(np.where(seen, events + K + 1, np.minimum(np.where(died, events, K), lost)))
    assert float(integrated_brier(logits, cut)) == pytest.approx(float(integrated_brier(logits, whole)), abs=0.01)
    assert float(concordance(logits, cut)) == pytest.approx(float(concordance(logits, whole)), abs=0.02)


@pytest.mark.parametrize("label", [0, 4, 5, 8, -1, 10**6])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30, 2.0**39])
def test_a_record_is_clipped_once_however_many_bins_it_survived(label: int, scale: float) -> None:
    """Guarantee: person and periods are one record: its increment has norm `clip` at most, in integers."""
    row = MODELS["hazard-regression"]
    objective = row.objective((3,), 2 * K + 1, F64, SoftmaxSettings(feature_norm=2.0))
    assert objective.dimension == 3 * K
    point = torch.linspace(-scale, scale, objective.dimension, dtype=F64)
    record = Records(torch.tensor([[1.0, -1.0, 1.0]], dtype=F64), torch.tensor([label]))
    integers = list_integers(objective, point, record, 0.25, 2**30)
    assert sum(value**2 for value in integers[0].tolist()) <= 2**60
    total = sum_increments(objective, point, record, 0.25).total
    assert float(torch.linalg.vector_norm(total)) <= 0.25 * (1.0 + 1e-9)


SCHEMA: dict[str, Any] = {
    "public": True, "target": "seen", "classes": ["no", "yes"], "site": "clinic", "sites": ["north", "south"],
    "survival": {"time": "years", "edges": list(EDGES)}, "columns": {"age": {"range": [0.0, 100.0]}},
}  # fmt: skip


def own_rows(count: int = 400) -> list[dict[str, str]]:
    draw = np.random.default_rng(5)
    made = []
    for number in range(count):
        age = float(draw.uniform(0.0, 100.0))
        event, lost = draw.exponential(6.0 * math.exp(-age / 40.0)), draw.exponential(6.0)
        outcome = {"years": f"{min(event, lost):.3f}", "seen": "yes" if event <= lost else "no"}
        made.append({"clinic": ("north", "south")[number % 2], "age": f"{age:.1f}", **outcome})
    return made


def tree_of(path: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "name": "hazards",
        "seed": 1,
        "data": {"name": str(write_csv(path / "t.csv", own_rows())), "partition": "site", "table": SCHEMA},
        "model": {"name": "hazard-regression", "feature_norm": 1.0},
        "federation": {"silos": 2, "rounds": 20, "epochs": 20, "batches": [150, 150]},
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 2.0, "step": 1.0},
        "privacy": {"relation": "replace-one", "mu": 3.0},
        "run": {"dtype": "float64", "evaluations": 1, "metrics": ["concordance", "integrated_brier"]},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree


@pytest.mark.parametrize("score", ["concordance", "integrated_brier"])
def test_a_silo_whose_records_define_no_score_is_left_out_of_mean_and_worst(score: Score) -> None:
    """Silo a has no event that another record survived, and none that is seen beyond the first bin."""
    objective = MODELS["hazard-regression"].objective((3,), 2 * K + 1, F64, SoftmaxSettings(feature_norm=1.0))
    features = torch.randn(60, 3, generator=torch.Generator().manual_seed(5), dtype=F64)
    labels = torch.cat([torch.tensor([0, 0, K + 1]), LABELS[3:]])
    view = ScoreView(objective, (score,), (("a", 3), ("b", 27), ("c", 30)))
    check_scores((score,), labels, view.silos, regression=False, bins=K)
    metrics = view.evaluate(objective.initial() + 0.3, Records(features, labels)).to_metrics()
    at_others = [metrics[f"test_{score}_at_{silo}"].item() for silo in "bc"]
    assert f"test_{score}_at_a" not in metrics
    assert metrics[f"test_{score}_silos"].item() == 2.0
    assert metrics[f"test_{score}_mean_of_silos"].item() == pytest.approx(sum(at_others) / 2.0)
    assert metrics[f"test_{score}_worst_silo"].item() in (min(at_others), max(at_others))


@pytest.mark.parametrize("model", [{"name": "hazard-regression", "feature_norm": 1.0}, {"name": "hazard-mlp"}])
def test_engines_agree_on_a_model_of_hazards(tmp_path: Path, model: dict[str, Any]) -> None:
    cell = resolve_cell({**tree_of(tmp_path), "model": model}, "test")
    fast, slow = (run(engine, cell)[0][0].cell_outcome.metrics for engine in ("vectorized", "inprocess"))
    assert fast == pytest.approx(slow, rel=1e-6)
    assert set(fast) == {"test_loss", "test_concordance", "test_integrated_brier"}
    assert fast["test_concordance"] > 0.6


def test_silos_do_not_evaluate_what_has_no_loss_record_by_record(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, evaluation={"records": 30, "mu": 50.0})
    tree["run"]["metrics"] = []
    cell = resolve_cell(tree, "test")
    with pytest.raises(InputError, match="gives no losses record by record"):
        make_evaluation_plan(cell, load_task(cell).objective)


def test_a_guard_answers_for_times_and_events_as_its_own_policy_reads_them(tmp_path: Path) -> None:
    cell = resolve_cell(tree_of(tmp_path), "test")
    write_csv(tmp_path / "own.csv", [row for row in own_rows() if row["clinic"] == "north"]).chmod(0o600)
    keys = {"silo": 0, "shard": "own.csv", "ledger": "l.sqlite", "socket": "s.sock"}
    allow = {"relation": "replace-one", "clip": 4.0, "rounds": 20, "budget": 4.0}
    path = tmp_path / "policy.toml"
    path.write_text(format_policy(keys, allow, TableSchema.model_validate(SCHEMA)))
    path.chmod(0o600)
    policy = read_policy(path)
    begin_ledgers(policy)
    guard = open_guard(policy)
    model = load_task(cell).objective.initial()
    release = guard.answer("run", json.dumps(cell.canonical_data()), 1, model)
    assert release.shape == (2 * K,)
    other = {**SCHEMA, "survival": {**SCHEMA["survival"], "censored": "before"}}
    asked = resolve_cell(tree_of(tmp_path, data={"table": other}), "test")
    with pytest.raises(RunError, match="describes the columns of the table otherwise"):
        guard.answer("other", json.dumps(asked.canonical_data()), 1, model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"name": "softmax-regression"}}, "take hazard-regression"),
        ({"run": {"metrics": ["auc"]}}, "auc is not for labels that are times and events"),
        ({"data": {"table": {**SCHEMA, "columns": {"years": {"range": [0.0, 9.0]}}}}}, "'years' has two roles"),
        ({"data": {"table": {**SCHEMA, "classes": ["a", "b", "c"]}}}, "the target has two classes"),
        ({"data": {"table": {**SCHEMA, "survival": {"time": "years", "edges": [1.0, 1.0]}}}}, "that increase"),
        ({"data": {"table": {key: SCHEMA[key] for key in SCHEMA if key != "survival"}}}, "table with survival"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_task(resolve_cell(tree_of(tmp_path, **changes), "test"))


def test_a_row_without_a_time_is_refused_or_dropped(tmp_path: Path) -> None:
    rows = own_rows(20)
    rows[3]["years"] = ""
    path = write_csv(tmp_path / "gaps.csv", rows)
    with pytest.raises(InputError, match="line 5, column 'years': '' is a missing value"):
        encode_table(read_table(path), TableSchema.model_validate(SCHEMA))
    dropped = encode_table(read_table(path), TableSchema.model_validate({**SCHEMA, "missing": "drop"}))
    counts = np.zeros(20, np.bool_)
    for part in (dropped.split.train, dropped.split.test):
        counts[part.row_indices[part.is_counted]] = True
    assert np.flatnonzero(~counts).tolist() == [3]
