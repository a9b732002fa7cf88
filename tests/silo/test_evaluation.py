"""A silo's test records against a server that may ask anything: their own guard, ledger and budget."""

import json
import math
from pathlib import Path
from typing import Any

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
from fedpriv.silo.guards import begin_ledgers, end_run, format_status, open_guards
from fedpriv.silo.ledger import LedgerError, SiloLedger
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo
from tests.silo.charged import charged
from tests.silo.evaluated import ASKED, MODEL, SCENARIO, evaluator, guards_of, ledger_of, write_tested
from tests.silo.guarded import CELL, ZERO, cell_json, write_silo

E = 4


def planned(scenario: str = SCENARIO) -> EvaluationPlan:
    cell = resolve_cell(json.loads(scenario), "test")
    asked = make_evaluation_plan(cell, load_task(cell).objective, for_release=True)
    assert asked is not None
    return asked


def exact_means(path: Path, model: torch.Tensor) -> torch.Tensor:
    """What an honest silo would say without noise, of its test records."""
    shard = read_policy(path).load_shard().test
    assert shard is not None
    cell = resolve_cell(json.loads(SCENARIO), "test")
    return planned().scores.contributions(model, shard.model_records(cell)).mean(0)


@pytest.mark.slow
def test_an_evaluation_is_of_the_test_records_and_noisy_as_the_plan_says(tmp_path: Path) -> None:
    """30 guards with keys of the system's: errors of 60 numbers in standard deviations, a χ² of 60 degrees."""
    std, squares = float(planned().plan.noise.std_of(0)), []
    for number in range(30):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write_tested(folder)
        found = evaluator(path).answer("run", SCENARIO, 1, MODEL)
        squares += [((found - exact_means(path, MODEL)) / std).square().sum()]
    assert 26.0 < float(sum(squares)) < 112.0  # false alarm 1e-4


def test_a_loss_and_an_accuracy_come_out_where_noise_is_next_to_nothing(tmp_path: Path) -> None:
    path = write_tested(tmp_path, evaluation={"budget": 1e4})
    scenario = cell_json(evaluation={"records": 30, "mu": 5e3})
    found = evaluator(path).answer("run", scenario, 1, MODEL)
    torch.testing.assert_close(found, exact_means(path, MODEL), atol=1e-3, rtol=0.0)


def test_a_repeated_question_gets_the_same_bytes_is_charged_once_and_another_model_is_refused(
    tmp_path: Path,
) -> None:
    path = write_tested(tmp_path)
    guard = evaluator(path)
    first = guard.answer("run", SCENARIO, 1, MODEL)
    for _ in range(20):
        assert torch.equal(guard.answer("run", SCENARIO, 1, MODEL), first)
    with pytest.raises(RunError, match="round 1 was answered already, for another query"):
        guard.answer("run", SCENARIO, 1, MODEL + 1e-12)
    assert charged(ledger_of(path)) == pytest.approx([1.0])
    assert torch.equal(evaluator(path).answer("run", SCENARIO, 1, MODEL), first)  # a guard that was restarted


def test_a_restarted_guard_goes_on_and_the_last_evaluation_wipes_the_key(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    answers = [evaluator(path).answer("run", SCENARIO, k, MODEL * k) for k in range(1, E + 1)]
    assert len({tuple(answer.tolist()) for answer in answers}) == E
    run = ledger_of(path).find_run("run")
    assert run is not None
    assert (run.key, run.state) == (None, None)
    with pytest.raises(RunError, match="round 5: this run is over"):
        evaluator(path).answer("run", SCENARIO, E + 1, MODEL)
    assert torch.equal(evaluator(path).answer("run", SCENARIO, E, MODEL * E), answers[-1])


@pytest.mark.slow
def test_a_thousand_evaluations_are_refused_after_the_budget(tmp_path: Path) -> None:
    """A new run's name each time, as cheap as it comes: what was charged never exceeds the budget."""
    path = write_tested(tmp_path, evaluation={"budget": 0.5})
    guard, cheap, answered = evaluator(path), cell_json(evaluation={"records": 30, "mu": 0.15}), 0
    for number in range(1000):
        try:
            guard.answer(f"run {number}", cheap, 1, MODEL + number)
            answered += 1
        except RunError as error:
            refused = str(error)
    assert answered == 8  # of 8 runs under way, each 0.15
    assert "8 runs are under way" in refused
    for number in range(8):
        guard.end_run(f"run {number}")
    for number in range(8, 11):  # 11 of them fit into 0.5, and no more
        guard.answer(f"run {number}", cheap, 1, MODEL)
        guard.end_run(f"run {number}")
    with pytest.raises(RunError, match=r"with all before 0\.5197; the budget is 0\.5"):
        guard.answer("run 11", cheap, 1, MODEL)
    assert compose(charged(ledger_of(path))) <= 0.5


@pytest.mark.parametrize(
    ("scenario", "evaluation", "reason"),
    [
        (
            cell_json(evaluation={"records": 31, "mu": 1.0}),
            {},
            "evaluates on 31 test records of this silo, here are",
        ),
        (
            cell_json(evaluation={"records": 30, "mu": 1.5}),
            {},
            "the run costs mu = 1.5, with all before 1.5; the bud",
        ),
        (SCENARIO, {"evaluations": 3}, "the scenario has 4 evaluations, allowed are 3"),
        (CELL, {}, "the scenario has no .evaluation."),
        (
            cell_json(evaluation=ASKED, privacy__relation="zero-out"),
            {},
            "relation is zero-out, allowed is replace-one",
        ),
        (cell_json(evaluation=ASKED, federation__rounds=11), {}, "the scenario has 11 rounds, allowed are 10"),
        (cell_json(evaluation=ASKED, algorithm__trust="trusted"), {}, "this silo release its sums without noise"),
        (
            cell_json(evaluation={"records": 30}, algorithm__trust="trusted"),
            {},
            "this silo release its sums without noise",
        ),
    ],
)
def test_what_a_policy_does_not_allow_is_refused_in_public_words(
    tmp_path: Path, scenario: str, evaluation: dict[str, Any], reason: str
) -> None:
    guard = evaluator(write_tested(tmp_path, evaluation=evaluation))
    with pytest.raises(RunError, match=reason) as refused:
        guard.answer("run", scenario, 1, MODEL)
    assert len(str(refused.value).splitlines()) == 1
    fine = cell_json(evaluation=ASKED, run__evaluations=1)
    assert torch.isfinite(
        guard.answer("other", fine, 1, MODEL)
    ).all()  # a refusal costs nothing and breaks nothing


def test_exact_sums_leave_only_where_the_policy_gives_up_all_protection(tmp_path: Path) -> None:
    exact = cell_json(evaluation={"records": 30}, algorithm__trust="trusted")
    path = write_tested(tmp_path, trust="trusted")
    with pytest.raises(RunError, match="the scenario has nobody add noise"):
        evaluator(path).answer("run", exact, 1, MODEL)
    sums = evaluator(path).answer("noised", cell_json(evaluation=ASKED, algorithm__trust="trusted"), 1, MODEL)
    assert sums.dtype == torch.int64  # exact: the server adds the noise that the scenario says
    free = tmp_path / "free"
    free.mkdir()
    given_up = evaluator(write_tested(free, trust="trusted", noise_free=True))
    torch.testing.assert_close(given_up.answer("run", exact, 1, MODEL), exact_means(path, MODEL))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_that_is_not_finite_is_refused_and_a_huge_one_tells_no_more(tmp_path: Path, bad: float) -> None:
    guard = evaluator(write_tested(tmp_path))
    model = MODEL.clone()
    model[7] = bad
    with pytest.raises(RunError, match="has values that are not finite"):
        guard.answer("run", SCENARIO, 1, model)
    found = guard.answer("run", SCENARIO, 1, MODEL * 2.0**39)
    assert float(found.abs().max()) < 0.5 + 10.0 * float(planned().plan.noise.std_of(0))


def test_neighbours_integer_sums_differ_by_no_more_than_is_accounted_for(tmp_path: Path) -> None:
    """Models chosen so that one record is as far from its exchanged self as it can be."""
    asked, generator = planned(), np.random.default_rng(0)
    exact = asked.plan.required_exact_plan
    assert exact is not None
    path = write_tested(tmp_path)
    shard, cell = read_policy(path).load_shard().test, resolve_cell(json.loads(SCENARIO), "test")
    assert shard is not None
    images, labels = shard.images.copy(), shard.labels.copy()
    images[3], labels[3] = 255 - images[3], (labels[3] + 5) % 10
    other = Shard(images, labels)
    (norm,) = exact.norms(1)
    for scale in (0.0, 1.0, 2.0**30, 2.0**39):
        model = torch.from_numpy(generator.choice([-scale, scale], 7850))
        model[labels[3] * 785 : (labels[3] + 1) * 785] = scale  # the exchanged record is right, and sure of it
        sums = [
            silo.steps.sum_increments(
                silo.initial_state(), asked.plan.rounds[0], model, silo._read_batch(asked.plan.rounds[0])
            ).values
            for silo in (silo_of(asked, each, cell) for each in (shard, other))
        ]
        difference = (sums[0] - sums[1]).numpy()
        assert int((difference.astype(object) ** 2).sum()) <= (2 * norm) ** 2
        if scale:
            assert difference.any()  # it is not a comparison of the same


def silo_of(asked: EvaluationPlan, shard: Shard, cell: Any) -> Silo:
    return Silo.for_release(0, asked.plan, shard.model_records(cell), bytes(32), b"")


def test_training_and_evaluation_share_no_record_no_budget_and_no_ledger(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    guards = guards_of(path)
    assert guards.tests is not None
    assert guards.tests.shard is guards.training.shard.test
    assert guards.tests.shard.content_digest != guards.training.shard.content_digest
    for t in range(1, 9):
        guards.training.answer("run", CELL, t, ZERO)
    assert charged(ledger_of(path)) == []
    guards.tests.answer("run", SCENARIO, 1, MODEL)
    policy = read_policy(path)
    assert charged(SiloLedger(policy.ledger, policy.mark_path)) == pytest.approx([4.0])
    assert charged(ledger_of(path)) == pytest.approx([1.0])


def test_changed_training_records_change_no_evaluation(tmp_path: Path) -> None:
    """What a server gets of test records is a function of them alone: exactly, with the noise all but gone."""
    scenario = cell_json(evaluation={"records": 30, "mu": 5e3})
    found = []
    for name, flip in (("a", False), ("b", True)):
        folder = tmp_path / name
        folder.mkdir()
        path = write_tested(folder, evaluation={"budget": 1e4})
        if flip:
            arrays = dict(np.load(folder / "shard-0.npz"))
            np.savez(folder / "shard-0.npz", **{**arrays, "images": 255 - arrays["images"]})
        found.append(evaluator(path).answer("run", scenario, 1, MODEL))
    torch.testing.assert_close(found[0], found[1], atol=2e-3, rtol=0.0)


def test_records_are_read_only_after_the_question_is_on_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard that dies between: the same question is answered, another one never."""
    path = write_tested(tmp_path)
    guard = evaluator(path)

    def full(*_: object) -> None:
        raise LedgerError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(SiloLedger, "record_reply", full)
        with pytest.raises(LedgerError, match="full"):
            guard.answer("run", SCENARIO, 1, MODEL)
    with pytest.raises(RunError, match="round 1 was asked already, for another query"):
        evaluator(path).answer("run", SCENARIO, 1, -MODEL)
    assert torch.isfinite(evaluator(path).answer("run", SCENARIO, 1, MODEL)).all()


def test_other_test_records_have_no_ledger_of_these(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    guards_of(path)
    arrays = dict(np.load(tmp_path / "shard-0.npz"))
    np.savez(tmp_path / "shard-0.npz", **{**arrays, "test_labels": arrays["test_labels"][::-1]})
    with pytest.raises(InputError, match="these are not the records, in the order"):
        open_guards(read_policy(path))


def test_a_policy_without_evaluation_answers_none_and_one_without_test_records_is_refused(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    assert guards_of(path).tests is None
    path.write_text(path.read_text() + "[evaluation]\nbudget = 1.0\n")
    with pytest.raises(InputError, match=r"has no test records, for which .evaluation. answers") as refused:
        begin_ledgers(read_policy(path))
    assert len(str(refused.value).splitlines()) == 1


def test_a_policy_that_gets_an_evaluation_later_begins_the_second_ledger_once(tmp_path: Path) -> None:
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


def test_an_administrator_sees_and_ends_evaluations(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    guards = guards_of(path)
    assert guards.tests is not None
    guards.tests.answer("a run", SCENARIO, 1, MODEL)
    lines = format_status(path)
    place = lines.index("evaluations of test records:")
    assert "budget mu = 1, spent 1 by 1 run," in lines[place + 2]
    assert "'a run': mu = 1, 1 round answered, under way" in lines[place + 3]
    end_run(path, "a run")
    run = ledger_of(path).find_run("a run")
    assert run is not None
    assert run.key is None
    with pytest.raises(InputError, match="has no run 'other'"):
        end_run(path, "other")


def test_silo_init_begins_both_ledgers(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["silo", "init", str(write_tested(tmp_path))])
    assert done.exit_code == 0, done.output
    assert "ledger-0.sqlite" in done.output
    assert "ledger-0-tests.sqlite" in done.output


def test_persons_are_not_evaluated_on_one_by_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'allow\.unit = "user": test records are protected one by one'):
        guards_of(write_tested(tmp_path, unit="user"))
