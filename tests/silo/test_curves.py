"""[evaluation.curves] on a hospital's own table: engines agree, guards charge and refuse."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.addons.statistics.curves import CurveScores
from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import InputError
from fedpriv.engines.table import make_engine
from fedpriv.loss.scores import SummedScores
from fedpriv.plan.evaluation import EvaluationPlan, make_evaluation_plan
from fedpriv.plan.plan import Plan, find_increment_diameter
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.guard import Guard
from fedpriv.silo.silo import Silo
from tests.data.tables import SCHEMA, rows, table_tree, write_csv
from tests.silo.charged import charged
from tests.silo.evaluated import evaluator
from tests.silo.guarded import refused, write_table_policy

CURVES: dict[str, Any] = {"bins": 16, "by": ["sex", "age"], "edges": {"age": [50]}}
RECORDS = [360, 240]


def cell_of(
    folder: Path, *, evaluations: int = 1, mu: float = 1.0, curves: Any = CURVES, **sections: dict[str, Any]
) -> Cell:
    tree = table_tree(write_csv(folder / "table.csv", rows(600)))
    tree["privacy"] = {"relation": "replace-one", "mu": 1.0}
    tree["federation"] = {"silos": 2, "rounds": 4, "epochs": 4, "batches": RECORDS}
    tree["evaluation"] = {"records": RECORDS, "mu": mu, "curves": curves}
    tree["run"] = {"dtype": "float64", "evaluations": evaluations}
    for name, section in sections.items():
        tree[name] = {**tree[name], **section}
    return resolve_cell(tree, "test")


def planned(cell: Cell) -> EvaluationPlan:
    plan = make_evaluation_plan(cell, load_task(cell).objective, for_release=True)
    assert plan is not None
    return plan


@pytest.mark.every(2)
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_engines_agree_on_roc_metrics_and_integer_arithmetic_agrees_at_negligible_noise(
    tmp_path: Path, trust: str
) -> None:
    """And integers, with noise that is next to nothing in both, give those of the records.

    Integers have other noise than floats, and on another processor again other: its key has the query's bits.
    """
    others: dict[str, dict[str, Any]] = {"algorithm": {"trust": trust}, "privacy": {"mu": 400.0}}
    cell = cell_of(tmp_path, mu=400.0, **others)
    whole = cell_of(tmp_path, mu=400.0, run={"arithmetic": "integers"}, **others)
    vectorized, inprocess, integers = (
        next(iter(make_engine(name)([run], RunObserver()))).cell_outcome.metrics
        for name, run in (("vectorized", cell), ("inprocess", cell), ("inprocess", whole))
    )
    assert vectorized == pytest.approx(inprocess, rel=1e-6, abs=1e-9)
    assert {"test_auc", "test_auc_low", "test_auc_high"} <= vectorized.keys()
    for group in ("_of_sex=", "_of_age="):
        assert any(group in name for name in vectorized)
    for name in ("test_auc", "test_balanced_accuracy", "test_specificity", "test_accuracy", "test_loss"):
        assert integers[name] == pytest.approx(vectorized[name], abs=0.02)
    assert 0.2 < vectorized["test_loss"] < 0.7


def test_curve_evaluations_are_charged_at_the_proved_increment_diameter_for_the_target_mu(tmp_path: Path) -> None:
    once, often = (planned(cell_of(tmp_path, evaluations=count)).plan for count in (1, 4))
    assert once.increment_diameter == often.increment_diameter == pytest.approx(math.sqrt(8.0 / 3.0), rel=1e-5)
    for plan, count in ((once, 1), (often, 4)):
        assert make_release_streams(plan, count)[0].mu == pytest.approx(1.0, rel=1e-9)
    ratio = float(often.noise.std_of(0)) / float(once.noise.std_of(0))
    assert ratio == pytest.approx(2.0, rel=1e-6)


class Liar(CurveScores):
    """Scores that say of themselves that they lie close together."""

    @property
    def diameter(self) -> float:
        return 0.1


def test_a_subclass_declaring_a_smaller_diameter_is_accounted_at_the_general_bound(tmp_path: Path) -> None:
    evaluation = planned(cell_of(tmp_path))
    scores, plan = evaluation.scores, evaluation.plan
    assert isinstance(scores, CurveScores)
    lying = Liar(scores.base, scores.loss_bound, scores.classes, scores.settings, scores.groupings)
    assert find_increment_diameter(lying, plan.estimator, plan.mechanism, plan.schedule) == 2.0
    assert find_increment_diameter(scores, plan.estimator, plan.mechanism, plan.schedule) < 2.0


def guard_at(folder: Path, records: list[dict[str, str]]) -> Guard:
    folder.mkdir(exist_ok=True)
    shard = write_csv(folder / "own.csv", records)
    allow = {"relation": "replace-one", "clip": 4.0, "rounds": 8, "budget": 4.0}
    return evaluator(write_table_policy(folder, shard, allow, SCHEMA, {"budget": 1.0}))


def own_rows() -> list[dict[str, str]]:
    return [record for record in rows(600) if record["hospital"] == "north"]


def text_of(cell: Cell, **curves: Any) -> str:
    tree = cell.canonical_data()
    tree["evaluation"]["curves"] |= curves
    return json.dumps(tree, sort_keys=True)


def test_a_repeated_curve_evaluation_gets_the_same_reply_and_is_charged_once(tmp_path: Path) -> None:
    cell = cell_of(tmp_path)
    guard, model = guard_at(tmp_path / "own", own_rows()), load_task(cell).objective.initial()
    first = guard.answer("run", text_of(cell), 1, model)
    assert first.shape == (planned(cell).scores.dimension,)
    assert torch.equal(guard.answer("run", text_of(cell), 1, model), first)
    assert charged(guard) == [pytest.approx(1.0, rel=1e-9)]


@pytest.mark.parametrize(
    ("curves", "reason"),
    [
        ({"by": ["patient"]}, "edges of 'age', which is none of `by`"),
        ({"by": ["patient"], "edges": {}}, "patient"),
        ({"by": ["hospital"], "edges": {}}, "hospital"),
        ({"edges": {"age": [90, 50]}}, "edges of 'age': expected numbers that increase"),
        ({"edges": {"age": [1e300]}}, r"edges.age = 1e\+300: no number of a scenario is that large"),
        ({"edges": {}}, "by: 'age' needs edges"),
        ({"bins": 2**20}, "bins = 1048576: expected a number of at most 256"),
        ({"weight": -1.0}, "weight = -1.0: expected a number above 0"),
        ({"threshold": 2.0}, "threshold = 2.0: expected a number of at most 0.999"),
    ],
)
def test_invalid_curve_settings_are_refused_before_anything_is_charged(
    tmp_path: Path, curves: dict[str, Any], reason: str
) -> None:
    cell = cell_of(tmp_path)
    guard, model = guard_at(tmp_path / "own", own_rows()), load_task(cell).objective.initial()
    refused(guard, rf"evaluation\.curves.*{reason}", text_of(cell, **curves), query=model)
    assert charged(guard) == []


def sums(plan: Plan, guard: Guard, cell: Cell, model: torch.Tensor) -> torch.Tensor:
    silo = Silo.for_release(0, plan, guard.shard.model_records(cell), b"k" * 32)
    batch = silo._read_batch(plan.rounds[0])
    return silo.steps.sum_increments(silo.initial_state(), plan.rounds[0], model, batch).values


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"outcome": "ill"}, {"sex": "m", "age": "21"}, {"part": "train"}])
def test_sums_of_files_that_differ_in_one_row_stay_within_the_certified_distance(
    tmp_path: Path, change: dict[str, str]
) -> None:
    """Guarantee: in integers, for models that are as sure as they like."""
    cell, records = cell_of(tmp_path), own_rows()
    plan = planned(cell).plan
    (norm,) = plan.required_exact_plan.norms(1)
    place = next(n for n, row in enumerate(records) if row["part"] == "test" and row["outcome"] == "well")
    neighbour = [{**row, **change} if n == place else row for n, row in enumerate(records)]
    guards = guard_at(tmp_path / "a", records), guard_at(tmp_path / "b", neighbour)
    distances = []
    for scale in (1.0, 2.0**39):
        model = torch.full((load_task(cell).objective.dimension,), scale, dtype=torch.float64)
        model[::2] *= -1.0
        one, other = (sums(plan, guard, cell, model) for guard in guards)
        distances.append(math.sqrt(sum(int(value) ** 2 for value in (one - other).tolist())) / norm)
    assert 0.5 < max(distances) <= plan.increment_diameter


def test_roc_curves_of_more_than_two_classes_are_refused(tmp_path: Path) -> None:
    three = cell_of(tmp_path, data={"table": {**SCHEMA, "classes": ["well", "ill", "unknown"]}})
    with pytest.raises(InputError, match="two classes"):
        planned(three)


def test_an_evaluation_without_curves_has_plain_summed_scores_and_increment_diameter_two(tmp_path: Path) -> None:
    cell = cell_of(tmp_path, curves=None)
    assert type(planned(cell).scores) is SummedScores
    assert planned(cell).plan.increment_diameter == 2.0
    assert "curves" not in cell.canonical_data()["evaluation"]
