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
from fedpriv.core.errors import InputError, RunError
from fedpriv.data.schema import TableSchema
from fedpriv.engines.table import make_engine
from fedpriv.loss.scores import SummedScores
from fedpriv.plan.evaluation import EvaluationPlan, make_evaluation_plan
from fedpriv.plan.plan import find_increment_diameter
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.demo import format_policy
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import begin_ledgers, open_guards
from fedpriv.silo.policy import read_policy
from fedpriv.silo.silo import Silo
from tests.data.tables import SCHEMA, rows, table_tree, write_csv

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


def planned(cell: Cell, *, released: bool = True) -> EvaluationPlan:
    asked = make_evaluation_plan(cell, load_task(cell).objective, for_release=released)
    assert asked is not None
    return asked


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_engines_give_the_same_figures(tmp_path: Path, trust: str) -> None:
    """And integers, with noise that is next to nothing in both, give those of the records.

    Integers have other noise than floats, and on another processor again other: its key has the query's bits.
    """
    others: dict[str, dict[str, Any]] = {"algorithm": {"trust": trust}, "privacy": {"mu": 400.0}}
    cell = cell_of(tmp_path, mu=400.0, **others)
    whole = cell_of(tmp_path, mu=400.0, run={"arithmetic": "integers"}, **others)
    asked = [("vectorized", cell), ("inprocess", cell), ("inprocess", whole)]
    found = [next(iter(make_engine(name)([each], RunObserver()))).cell_outcome.metrics for name, each in asked]
    assert found[0] == pytest.approx(found[1], rel=1e-6, abs=1e-9)
    assert {"test_auc", "test_auc_low", "test_auc_high"} <= found[0].keys()
    assert any("_of_sex=" in name for name in found[0])
    assert any("_of_age=" in name for name in found[0])
    for name in ("test_auc", "test_balanced_accuracy", "test_specificity", "test_accuracy", "test_loss"):
        assert found[2][name] == pytest.approx(found[0][name], abs=0.02)
    assert 0.2 < found[0]["test_loss"] < 0.7


def test_one_evaluation_is_charged_for_the_distance_that_is_proved(tmp_path: Path) -> None:
    once, often = planned(cell_of(tmp_path)), planned(cell_of(tmp_path, evaluations=4))
    assert once.plan.increment_diameter == pytest.approx(math.sqrt(8.0 / 3.0), rel=1e-5)
    assert often.plan.increment_diameter == 2.0
    (stream, *_) = make_release_streams(once.plan, 1)
    assert stream.mu == pytest.approx(1.0, rel=1e-9)
    noise = [float(each.plan.noise.std_of(0)) for each in (once, often)]
    assert noise[1] / noise[0] == pytest.approx(2.0 * 2.0 / once.plan.increment_diameter, rel=1e-6)


class Liar(CurveScores):
    """Scores that say of themselves that they lie close together."""

    @property
    def diameter(self) -> float:
        return 0.1


def test_no_other_class_of_scores_is_believed(tmp_path: Path) -> None:
    asked = planned(cell_of(tmp_path))
    scores = asked.scores
    assert isinstance(scores, CurveScores)
    plan = asked.plan
    lying = Liar(scores.base, scores.loss_bound, scores.classes, scores.settings, scores.groupings)
    assert find_increment_diameter(lying, plan.estimator, plan.mechanism, plan.schedule) == 2.0
    assert find_increment_diameter(scores, plan.estimator, plan.mechanism, plan.schedule) < 2.0


def guard_at(folder: Path, records: list[dict[str, str]], **evaluation: Any) -> Guard:
    folder.mkdir(exist_ok=True)
    write_csv(folder / "own.csv", records).chmod(0o600)
    keys = {"silo": 0, "shard": "own.csv", "ledger": "l.sqlite", "socket": "s.sock"}
    allow = {"relation": "replace-one", "clip": 4.0, "rounds": 8, "budget": 4.0}
    path = folder / "policy.toml"
    text = format_policy(keys, allow, TableSchema.model_validate(SCHEMA), {"budget": 1.0, **evaluation})
    path.write_text(text)
    path.chmod(0o600)
    policy = read_policy(path)
    if not policy.ledger.exists():
        begin_ledgers(policy)
    guard = open_guards(policy).tests
    assert guard is not None
    return guard


def own_rows() -> list[dict[str, str]]:
    return [record for record in rows(600) if record["hospital"] == "north"]


def text_of(cell: Cell, **curves: Any) -> str:
    tree = cell.canonical_data()
    tree["evaluation"]["curves"] |= curves
    return json.dumps(tree, sort_keys=True)


def test_a_guard_answers_once_and_charges_what_was_planned(tmp_path: Path) -> None:
    cell = cell_of(tmp_path)
    guard, asked = guard_at(tmp_path / "own", own_rows()), planned(cell)
    model = load_task(cell).objective.initial()
    first = guard.answer("run", text_of(cell), 1, model)
    assert first.shape == (asked.scores.dimension,)
    assert torch.equal(guard.answer("run", text_of(cell), 1, model), first)
    assert [charge.mu for charge in guard._ledger.charges()] == [pytest.approx(1.0, rel=1e-9)]


@pytest.mark.parametrize(
    "curves",
    [
        {"by": ["patient"]},
        {"by": ["hospital"]},
        {"edges": {"age": [90, 50]}},
        {"edges": {"age": [1e300]}},
        {"edges": {}},
        {"bins": 2**20},
        {"weight": -1.0},
        {"threshold": 2.0},
    ],
)
def test_hostile_tables_are_refused_and_nothing_is_charged(tmp_path: Path, curves: dict[str, Any]) -> None:
    cell = cell_of(tmp_path)
    guard, model = guard_at(tmp_path / "own", own_rows()), load_task(cell).objective.initial()
    with pytest.raises((InputError, RunError)) as refused:
        guard.answer("run", text_of(cell, **curves), 1, model)
    assert len(str(refused.value).splitlines()) == 1
    assert guard._ledger.charges() == []


def sums(asked: EvaluationPlan, guard: Guard, cell: Cell, model: torch.Tensor) -> torch.Tensor:
    silo = Silo.for_release(0, asked.plan, guard.shard.model_records(cell), b"k" * 32)
    return silo.steps.sum_increments(
        silo.initial_state(), asked.plan.rounds[0], model, silo._read_batch(asked.plan.rounds[0])
    ).values


@pytest.mark.every(3)
@pytest.mark.parametrize("change", [{"outcome": "ill"}, {"sex": "m", "age": "21"}, {"part": "train"}])
def test_files_that_differ_in_one_row_stay_within_the_certificate(tmp_path: Path, change: dict[str, str]) -> None:
    """Guarantee: in integers, for models that are as sure as they like."""
    cell = cell_of(tmp_path)
    asked, records = planned(cell), own_rows()
    exact = asked.plan.required_exact_plan
    assert exact is not None
    (norm,) = exact.norms(1)
    place = next(n for n, row in enumerate(records) if row["part"] == "test" and row["outcome"] == "well")
    neighbour = [{**row, **change} if n == place else row for n, row in enumerate(records)]
    guards = [guard_at(tmp_path / name, own) for name, own in (("a", records), ("b", neighbour))]
    moved = False
    for scale in (1.0, 2.0**39):
        model = torch.full((load_task(cell).objective.dimension,), scale, dtype=torch.float64)
        model[::2] *= -1.0
        one, other = (sums(asked, guard, cell, model) for guard in guards)
        far = math.sqrt(sum(int(each) ** 2 for each in (one - other).tolist())) / norm
        assert far <= asked.plan.increment_diameter
        moved |= far > 0.5
    assert moved


def test_curves_of_labels_that_have_none_are_refused(tmp_path: Path) -> None:
    three = cell_of(tmp_path, data={"table": {**SCHEMA, "classes": ["well", "ill", "unknown"]}})
    with pytest.raises(InputError, match="two classes"):
        planned(three)


def test_without_curves_an_evaluation_is_what_it_was(tmp_path: Path) -> None:
    cell = cell_of(tmp_path, curves=None)
    asked = planned(cell)
    assert type(asked.scores) is SummedScores
    assert asked.plan.increment_diameter == 2.0
    assert "curves" not in cell.canonical_data()["evaluation"]
