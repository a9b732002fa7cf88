"""A silo's test records against a server that may ask anything: their own guard, ledger and budget."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedpriv.accounting.gaussian import compose
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.plan.evaluation import EvaluationPlan, make_evaluation_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.demo import evaluation_allowance
from fedpriv.silo.guards import begin_ledgers, end_run, format_status, open_guards
from fedpriv.silo.ledger import LedgerError, SiloLedger
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo
from tests.conftest import small_tree
from tests.silo.charged import charged
from tests.silo.evaluated import ASKED, MODEL, SCENARIO, evaluator, guards_of, ledger_of, write_tested
from tests.silo.guarded import CELL, ZERO, cell_json, change_shard, find_run, refused, write_silo

EVALUATIONS = 4
CELL_OF_SCENARIO = resolve_cell(json.loads(SCENARIO), "test")
NEARLY_EXACT = cell_json(evaluation={"records": 30, "mu": 5e3})


def planned() -> EvaluationPlan:
    plan = make_evaluation_plan(CELL_OF_SCENARIO, load_task(CELL_OF_SCENARIO).objective, for_release=True)
    assert plan is not None
    return plan


def exact_means(path: Path, model: torch.Tensor) -> torch.Tensor:
    """Scores of the test records without noise, as an honest silo has them."""
    shard = read_policy(path).load_shard().test
    assert shard is not None
    return planned().scores.contributions(model, shard.model_records(CELL_OF_SCENARIO)).mean(0)


@pytest.mark.slow
def test_an_evaluation_scores_the_test_records_with_the_noise_of_the_plan(tmp_path: Path) -> None:
    """30 guards with keys of the system's: errors of 60 numbers in standard deviations, a χ² of 60 degrees."""
    std, squares = float(planned().plan.noise.std_of(0)), []
    for number in range(30):
        path = write_tested(tmp_path / str(number))
        scores = evaluator(path).answer("run", SCENARIO, 1, MODEL)
        squares += [((scores - exact_means(path, MODEL)) / std).square().sum()]
    assert 26.0 < float(sum(squares)) < 112.0  # false alarm 1e-4


def test_an_evaluation_with_negligible_noise_returns_the_exact_mean_scores(tmp_path: Path) -> None:
    path = write_tested(tmp_path, evaluation={"budget": 1e4})
    scores = evaluator(path).answer("run", NEARLY_EXACT, 1, MODEL)
    torch.testing.assert_close(scores, exact_means(path, MODEL), atol=1e-3, rtol=0.0)


def test_a_repeated_evaluation_gets_the_same_bytes_at_one_charge_and_another_model_is_refused(
    tmp_path: Path,
) -> None:
    guard = evaluator(path := write_tested(tmp_path))
    first = guard.answer("run", SCENARIO, 1, MODEL)
    for _ in range(20):
        assert torch.equal(guard.answer("run", SCENARIO, 1, MODEL), first)
    refused(guard, "round 1 was answered already, for another query", SCENARIO, query=MODEL + 1e-12)
    assert charged(guard) == pytest.approx([1.0])
    assert torch.equal(evaluator(path).answer("run", SCENARIO, 1, MODEL), first)  # a guard that was restarted


def test_a_restarted_guard_continues_evaluating_and_wipes_the_key_after_the_last_evaluation(
    tmp_path: Path,
) -> None:
    path, rounds = write_tested(tmp_path), range(1, EVALUATIONS + 1)
    answers = [evaluator(path).answer("run", SCENARIO, k, MODEL * k) for k in rounds]
    assert len({tuple(answer.tolist()) for answer in answers}) == EVALUATIONS
    run = find_run(guard := evaluator(path))
    assert (run.key, run.state) == (None, None)
    refused(guard, "round 5: this run is over", SCENARIO, t=EVALUATIONS + 1, query=MODEL)
    assert torch.equal(guard.answer("run", SCENARIO, EVALUATIONS, MODEL * EVALUATIONS), answers[-1])


@pytest.mark.slow
def test_repeated_evaluations_under_new_run_names_never_exceed_the_budget(tmp_path: Path) -> None:
    """A new run's name each time, as cheap as it comes: what was charged never exceeds the budget."""
    guard, answered = evaluator(write_tested(tmp_path, evaluation={"budget": 0.5})), 0
    cheap = cell_json(evaluation={"records": 30, "mu": 0.15})
    for number in range(1000):
        try:
            guard.answer(f"run {number}", cheap, 1, MODEL + number)
            answered += 1
        except RunError as error:
            refusal = str(error)
    assert answered == 8  # of 8 runs under way, each 0.15
    assert "8 runs are under way" in refusal
    for number in range(8):
        guard.end_run(f"run {number}")
    for number in range(8, 11):  # 11 of them fit into 0.5, and no more
        guard.answer(f"run {number}", cheap, 1, MODEL)
        guard.end_run(f"run {number}")
    refused(guard, r"with all others 0\.5197; the budget is 0\.5", cheap, query=MODEL, run="run 11")
    assert compose(charged(guard)) <= 0.5


EXACT = cell_json(evaluation={"records": 30}, algorithm__trust="trusted")
SUMMED = cell_json(evaluation=ASKED, algorithm__trust="trusted")
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (cell_json(evaluation={"records": 31, "mu": 1.0}), {}, "evaluates on 31 test records of this silo, here are"),
    (cell_json(evaluation={"records": 30, "mu": 1.5}), {}, "the run costs mu = 1.5, with all others 1.5; the bud"),
    (SCENARIO, {"evaluations": 3}, "the scenario has 4 evaluations, allowed are 3"),
    (CELL, {}, "the scenario has no .evaluation."),
    (
        cell_json(evaluation=ASKED, privacy__relation="zero-out"),
        {},
        "relation is zero-out, allowed is replace-one",
    ),
    (cell_json(evaluation=ASKED, federation__rounds=11), {}, "the scenario has 11 rounds, allowed are 10"),
    (SUMMED, {}, "this silo release its sums without noise"),
    (EXACT, {}, "this silo release its sums without noise"),
]


@pytest.mark.parametrize(("scenario", "evaluation", "reason"), REFUSED)
def test_evaluations_outside_the_policy_are_refused_without_any_cost(
    tmp_path: Path, scenario: str, evaluation: dict[str, Any], reason: str
) -> None:
    guard = evaluator(write_tested(tmp_path, evaluation=evaluation))
    refused(guard, reason, scenario, query=MODEL)
    fine = guard.answer("other", cell_json(evaluation=ASKED, run__evaluations=1), 1, MODEL)
    assert torch.isfinite(fine).all()  # a refusal costs nothing and breaks nothing


def test_evaluations_without_noise_are_released_only_under_a_policy_that_allows_no_noise(tmp_path: Path) -> None:
    guard = evaluator(path := write_tested(tmp_path, trust="trusted"))
    refused(guard, "the scenario has nobody add noise", EXACT, query=MODEL)
    sums = guard.answer("noised", SUMMED, 1, MODEL)
    assert sums.dtype == torch.int64  # exact: the server adds the noise that the scenario says
    given_up = evaluator(write_tested(tmp_path / "free", trust="trusted", noise_free=True))
    torch.testing.assert_close(given_up.answer("run", EXACT, 1, MODEL), exact_means(path, MODEL))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_that_is_not_finite_is_refused_and_scores_of_a_huge_model_are_bounded(
    tmp_path: Path, bad: float
) -> None:
    guard, model = evaluator(write_tested(tmp_path)), MODEL.clone()
    model[7] = bad
    refused(guard, "has values that are not finite", SCENARIO, query=model)
    scores = guard.answer("run", SCENARIO, 1, MODEL * 2.0**39)
    assert float(scores.abs().max()) < 0.5 + 10.0 * float(planned().plan.noise.std_of(0))


def test_integer_evaluation_sums_of_neighbouring_records_differ_by_at_most_two_clip_norms(tmp_path: Path) -> None:
    """Models chosen so that one record is as far from its exchanged self as it can be."""
    evaluation, generator = planned().plan, np.random.default_rng(0)
    (norm,) = evaluation.required_exact_plan.norms(1)
    shard = read_policy(write_tested(tmp_path)).load_shard().test
    assert shard is not None
    images, labels = shard.images.copy(), shard.labels.copy()
    images[3], labels[3] = 255 - images[3], (labels[3] + 5) % 10
    silos = [
        Silo.for_release(0, evaluation, records.model_records(CELL_OF_SCENARIO), bytes(32), b"")
        for records in (shard, Shard(images, labels))
    ]
    for scale in (0.0, 1.0, 2.0**30, 2.0**39):
        model = torch.from_numpy(generator.choice([-scale, scale], 7850))
        model[labels[3] * 785 : (labels[3] + 1) * 785] = scale  # the exchanged record is right, and sure of it
        one, other = (
            silo.steps.sum_increments(
                silo.initial_state(), evaluation.rounds[0], model, silo._read_batch(evaluation.rounds[0])
            ).values
            for silo in silos
        )
        difference = (one - other).numpy()
        assert int((difference.astype(object) ** 2).sum()) <= (2 * norm) ** 2
        if scale:
            assert difference.any()  # it is not a comparison of the same


def test_training_and_evaluation_have_separate_records_budgets_and_ledgers(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    guards = guards_of(path)
    assert guards.tests is not None
    assert guards.tests.shard is guards.training.shard.test
    assert guards.tests.shard.content_digest != guards.training.shard.content_digest
    for t in range(1, 9):
        guards.training.answer("run", CELL, t, ZERO)
    assert charged(ledger_of(path)) == []
    guards.tests.answer("run", SCENARIO, 1, MODEL)
    assert charged(path) == pytest.approx([4.0])
    assert charged(ledger_of(path)) == pytest.approx([1.0])


def test_replacing_the_training_records_does_not_change_an_evaluation(tmp_path: Path) -> None:
    """What a server gets of test records is a function of them alone: exactly, with the noise all but gone."""
    paths = [write_tested(tmp_path / name, evaluation={"budget": 1e4}) for name in ("a", "b")]
    change_shard(tmp_path / "b", images=255 - np.load(tmp_path / "b" / "shard-0.npz")["images"])
    one, other = (evaluator(path).answer("run", NEARLY_EXACT, 1, MODEL) for path in paths)
    torch.testing.assert_close(one, other, atol=2e-3, rtol=0.0)


def test_an_evaluation_query_is_stored_before_its_records_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard that dies between: the same question is answered, another one never."""
    path = write_tested(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(SiloLedger, "record_reply", Mock(side_effect=LedgerError("the disk is full")))
        refused(evaluator(path), "full", SCENARIO, query=MODEL, error=LedgerError)
    refused(evaluator(path), "round 1 was asked already, for another query", SCENARIO, query=-MODEL)
    assert torch.isfinite(evaluator(path).answer("run", SCENARIO, 1, MODEL)).all()


def test_a_ledger_is_refused_for_changed_test_records(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    guards_of(path)
    change_shard(tmp_path, test_labels=np.load(tmp_path / "shard-0.npz")["test_labels"][::-1])
    with pytest.raises(InputError, match="these are not the records, in the order"):
        open_guards(read_policy(path))


def test_evaluation_requires_an_evaluation_section_in_the_policy_and_test_records(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    assert guards_of(path).tests is None
    path.write_text(path.read_text() + "[evaluation]\nbudget = 1.0\n")
    with pytest.raises(InputError, match=r"has no test records, for which .evaluation. answers") as refused:
        begin_ledgers(read_policy(path))
    assert len(str(refused.value).splitlines()) == 1


def test_adding_evaluation_to_a_policy_later_creates_the_second_ledger_exactly_once(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.index("[evaluation]")])
    begin_ledgers(read_policy(path))
    path.write_text(text)
    with pytest.raises(InputError, match="no ledger is there"):
        open_guards(read_policy(path))
    (begun,) = begin_ledgers(read_policy(path))
    assert begun.ledger == tmp_path / "ledger-0-tests.sqlite"
    with pytest.raises(InputError, match="a ledger is begun once"):
        begin_ledgers(read_policy(path))


def test_an_administrator_can_list_and_end_evaluation_runs(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    guards = guards_of(path)
    assert guards.tests is not None
    guards.tests.answer("a run", SCENARIO, 1, MODEL)
    lines = format_status(path)
    place = lines.index("evaluations of test records:")
    assert "budget mu = 1, spent 1 by 1 run," in lines[place + 2]
    assert "'a run': mu = 1, 1 round answered, under way" in lines[place + 3]
    end_run(path, "a run")
    assert find_run(guards.tests, "a run").key is None
    with pytest.raises(InputError, match="has no run 'other'"):
        end_run(path, "other")


def test_silo_init_creates_the_training_and_the_evaluation_ledger(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["silo", "init", str(write_tested(tmp_path))])
    assert done.exit_code == 0, done.output
    assert "ledger-0.sqlite" in done.output
    assert "ledger-0-tests.sqlite" in done.output


def test_evaluation_is_refused_under_a_policy_whose_unit_is_the_person(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'allow\.unit = "user": test records are protected one by one'):
        guards_of(write_tested(tmp_path, unit="user"))


def test_a_policy_is_made_for_evaluations_with_noise_alone() -> None:
    """Its budget is for runs whose evaluations compose: four cost √4 = 2 times as much as one."""
    allowed = evaluation_allowance(resolve_cell(small_tree(evaluation=ASKED), "test"), 4)
    assert allowed == {"budget": 2.0, "evaluations": 4}
    assert evaluation_allowance(resolve_cell(small_tree(), "test")) == {}
    without = small_tree(evaluation={"records": 30}, privacy={"mode": "none", "relation": "replace-one"})
    with pytest.raises(InputError, match=r"evaluation\.mu: this key is missing"):
        evaluation_allowance(resolve_cell(without, "test"))
