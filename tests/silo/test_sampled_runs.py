"""A guard charges runs whose records take part in secret by (μ, δ₀), and draws their rounds from its own key."""

import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.budget import ApproximateGDP, LifetimeBudget
from fedpriv.accounting.gaussian import delta_of, mu_of
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.claims.ledger import make_silo_stream
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.figures import format_upper
from fedpriv.participation.secret import RandomAllocation
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.admission import Charge, compose_prices, price_charges, why_over_budget
from fedpriv.silo.demo import run_allowance
from fedpriv.silo.guard import open_guard
from fedpriv.silo.guards import begin_ledgers, format_status
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import PriceCurve, price_curve, read_policy
from fedpriv.silo.silo import Silo
from tests.accounting.ratios import replaced_by_sampling
from tests.conftest import small_tree
from tests.silo.guarded import write_silo

ROUNDS = 10
SLACK = 1e-8


def tree(sampling: str = "allocation", epsilon: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Silo 0 of two holds 20 records, each in one secret round of 10; its own noise."""
    return small_tree(
        federation={"silos": 2, "rounds": ROUNDS, "batch": 2, "sampling": sampling},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "epsilon": epsilon},
        run={"dtype": "float32"},
        **changes,
    )


def scenario(sampling: str = "allocation", epsilon: float = 1.0) -> str:
    return json.dumps(resolve_cell(tree(sampling, epsilon), "test").canonical_data())


def policy_of(folder: Path, **allow: Any) -> Path:
    given = {"relation": "zero-out", "slack": 1e-6, "budget": 1.0, "clip": 1.0, **allow}
    path = write_silo(folder, **given)
    if not (folder / "ledger-0.sqlite").exists():
        begin_ledgers(read_policy(path))
    return path


QUERY = torch.zeros(7850)


@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_a_sampled_run_is_charged_what_its_curve_certifies(tmp_path: Path, sampling: str) -> None:
    """Guarantee: (μ, 1e-8) of this silo's own stream, before its first answer; not the μ that ε alone would be."""
    path = policy_of(tmp_path)
    guard = open_guard(read_policy(path))
    for t in range(1, ROUNDS + 1):
        assert torch.isfinite(guard.answer("run", scenario(sampling), t, QUERY)).all()
    (charge,) = SiloLedger(read_policy(path).ledger).charges()
    plan = guard._admission.admit(guard._admission.canonicalize(scenario(sampling))).plan
    guarantee = make_silo_stream(plan, 0, ROUNDS).guarantee
    assert isinstance(guarantee, AllocatedGaussian | PoissonGaussian)
    assert 0.98 < guarantee.epsilon_of(1e-5) <= 1.0
    exact = guarantee.charge(SLACK)
    assert charge.slack == SLACK
    assert exact.mu <= charge.mu < 1.01 * exact.mu  # a little of the slack is for rounds that draw very many
    assert charge.mu > 1.1 * mu_of(1.0, 1e-5)  # the μ with the same ε: as a lifetime budget it would be a lie


def test_a_replaced_record_is_charged_no_less_than_its_two_runs_differ(tmp_path: Path) -> None:
    """Guarantee: the price (μ, 1e-8) under replace-one lies above samples of the two runs.

    And below twice the price of a record that is zeroed out: what a chain through the run without it asks for.
    """
    asked = scenario(epsilon=2.0).replace("zero-out", "replace-one")
    path = policy_of(tmp_path, relation="replace-one", budget=9.0)
    guard = open_guard(read_policy(path))
    guard.answer("run", asked, 1, QUERY)
    (charge,) = SiloLedger(read_policy(path).ledger).charges()
    plan = guard._admission.admit(guard._admission.canonicalize(asked)).plan
    guarantee = make_silo_stream(plan, 0, ROUNDS).guarantee
    assert isinstance(guarantee, AllocatedGaussian)
    assert guarantee.relation == "replace-one"
    z = (
        float(plan.noise.std_of(0)) * 2.0
    )  # a record moves the mean of two by clip / 2, its replacement the other way
    for epsilon in (0.1, 0.5, 1.0, 2.0, 4.0):
        mean, error = replaced_by_sampling(z, ROUNDS, epsilon, 400_000, seed=5)
        assert mean - 4.0 * error <= delta_of(charge.mu, epsilon) + SLACK, epsilon
    removed = AllocatedGaussian(z, ROUNDS, 1, "zero-out").charge(SLACK)
    assert removed.mu < charge.mu < 0.95 * 2.0 * removed.mu


def test_without_slack_a_sampled_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    guard = open_guard(read_policy(policy_of(tmp_path, slack=0.0)))
    with pytest.raises(RunError, match=r"a run with random allocation keeps to one but for a probability: allow"):
        guard.answer("run", scenario(), 1, QUERY)
    assert guard._ledger.charges() == []


def test_slack_and_budget_are_both_used_up(tmp_path: Path) -> None:
    """Two runs use a slack of 2e-8 up; with more of it the third would cost √3 times μ, above the budget."""
    guard = open_guard(read_policy(policy_of(tmp_path, slack=2e-8, budget=9.0)))
    guard.answer("a", scenario(), 1, QUERY)
    guard.answer("b", scenario(), 1, QUERY)
    with pytest.raises(RunError, match=r"with slack 3e-08; the budget is 9 with slack 2e-08"):
        guard.answer("c", scenario(), 1, QUERY)
    mu = guard._ledger.charges()[0].mu
    wide = open_guard(read_policy(policy_of(tmp_path, slack=1.0 - 1e-9, budget=1.6 * mu)))
    with pytest.raises(RunError, match="the budget is"):
        wide.answer("c", scenario(), 1, QUERY)
    wide = open_guard(read_policy(policy_of(tmp_path, slack=3e-8, budget=1.8 * mu)))
    wide.answer("c", scenario(), 1, QUERY)
    assert len(wide._ledger.charges()) == 3


def test_exact_and_sampled_runs_share_one_budget(tmp_path: Path) -> None:
    guard = open_guard(read_policy(policy_of(tmp_path, budget=1.0)))
    exact = resolve_cell(tree("fixed", 1.0), "test")
    guard.answer("exact", json.dumps(exact.canonical_data()), 1, QUERY)
    guard.answer("secret", scenario(), 1, QUERY)
    charges = guard._ledger.charges()
    assert [charge.slack for charge in charges] == [0.0, SLACK]
    line = format_status(tmp_path / "silo-0.toml")
    assert f"spent {format_upper(math.hypot(*(charge.mu for charge in charges)), 6)} by 2 runs" in line[1]
    assert line[2] == "slack 1e-06, spent 1e-08, left 9.9e-07"
    assert "with slack 1e-08, 1 round answered" in line[4]


@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_a_guard_that_restarts_in_the_middle_draws_the_same_bins(tmp_path: Path, sampling: str) -> None:
    """Every answer of guards that end after each round is that of one silo with the ledger's key."""
    path = policy_of(tmp_path)
    policy, answers, keys = read_policy(path), [], set()
    for t in range(1, ROUNDS + 1):
        guard = open_guard(policy)
        answers.append(guard.answer("run", scenario(sampling), t, QUERY))
        run = guard._ledger.find_run("run")
        assert run is not None
        keys.add(run.key)
        if t == 1:
            admitted = guard._admission.admit(run.cell)
            records = guard._views.records(admitted.cell)
        guard._ledger.close()
    (key,) = keys - {None}
    assert isinstance(key, bytes)
    silo = Silo.for_release(0, admitted.plan, records, key, admitted.scenario_digest)
    state, drawn = silo.initial_state(), []
    for t, answer in enumerate(answers, start=1):
        release, state = silo.answer(state, t, QUERY)
        assert torch.equal(silo.make_message(release.vector, t, b"", state.query_chain), answer)
        drawn.append(release.counts.drawn)
    if sampling == "allocation":
        assert sum(drawn) == 20  # every record once
    assert any(count != 2 for count in drawn)  # in rounds of its own choice


def test_a_narrowed_policy_holds_for_sampled_runs_that_are_open(tmp_path: Path) -> None:
    open_guard(read_policy(policy_of(tmp_path))).answer("run", scenario(), 1, QUERY)
    for narrow, reason in (
        ({"slack": 0.0}, "leaves none"),
        ({"slack": 1e-9}, "with slack 1e-08; the budget is 1"),
    ):
        with pytest.raises(RunError, match=reason):
            open_guard(read_policy(policy_of(tmp_path, **narrow))).answer("run", scenario(), 2, QUERY)
    other = open_guard(read_policy(policy_of(tmp_path, slack_per_run=1e-7)))
    assert torch.isfinite(other.answer("run", scenario(), 2, QUERY)).all()  # charged when it was opened


def test_a_policy_for_one_run_admits_it_and_no_other(tmp_path: Path) -> None:
    """What `--engine deployment` writes for its silos."""
    cell = resolve_cell({**tree(), "data": {"name": "synthetic"}}, "test")
    allow = run_allowance(cell, load_task(cell))
    assert allow["slack"] == SLACK
    guard = open_guard(read_policy(policy_of(tmp_path, **{**allow, "clip": 1.0, "trust": None})))
    guard.answer("run", scenario(), 1, QUERY)
    with pytest.raises(RunError, match="the budget is"):
        guard.answer("another", scenario(epsilon=0.1), 1, QUERY)


def test_other_neighbours_double_an_exact_price_and_leave_a_sampled_one_unknown() -> None:
    """Guarantee of `spent`: replace-one is two steps of zero-out; a curve in (μ, δ₀) has no such rule."""
    zero_out, replace_one = scenario(), scenario().replace("zero-out", "replace-one")
    exact, sampled = Charge(zero_out, 0.5, 0.0), Charge(zero_out, 0.5, SLACK)
    assert price_charges([exact, sampled], "zero-out") == [ApproximateGDP(0.5), ApproximateGDP(0.5, SLACK)]
    doubled, unknown = price_charges([exact, sampled], "replace-one")
    assert doubled is not None
    assert doubled.mu == pytest.approx(1.0)
    assert unknown is None
    assert price_charges([Charge(replace_one, 0.5, SLACK)], "zero-out") == [ApproximateGDP(0.5, SLACK)]
    assert price_charges([Charge("no scenario", 0.5, 0.0), Charge(zero_out, math.inf, 0.0)], "zero-out") == [
        None,
        None,
    ]
    assert why_over_budget(LifetimeBudget(9.0, 0.1), [None], ApproximateGDP(0.1)) == (
        "the run costs mu = 0.1, with all before inf; the budget is 9 with slack 0.1"
    )


def test_rounds_that_draw_very_many_records_are_in_the_slack() -> None:
    """What they can give away comes off what the curve may use: the price rises, its slack is the policy's."""
    cell = resolve_cell(tree(), "test")
    guard_plan = make_plan(cell, dataclasses.replace(_objective(cell)))
    cost = price_curve(guard_plan, make_silo_stream(guard_plan, 0, ROUNDS).guarantee, 0)
    assert isinstance(guard_plan.schedule, RandomAllocation)
    capacity = guard_plan.schedule.capacity(2)
    assert 8 <= capacity.row_count < 20
    assert cost.overflow_slack == pytest.approx(ROUNDS * capacity.overflow_probability)
    assert 0.0 < capacity.overflow_probability <= 2.0**-40
    with pytest.raises(InputError, match="slack_per_run = 1e-10: a run of this length"):
        cost.price_at(1e-10)
    heavy = PriceCurve(PoissonGaussian(1.0, 0.1, 10), overflow_slack=5e-9).price_at(SLACK)
    light = PriceCurve(PoissonGaussian(1.0, 0.1, 10)).price_at(SLACK)
    assert heavy is not None
    assert light is not None
    assert heavy.slack == light.slack == SLACK
    assert heavy.mu > light.mu


def _objective(cell: Any) -> Any:
    return load_task(cell).objective


@pytest.mark.parametrize("slack", [1e-8, 3e-7, 0.1])
def test_what_is_certified_and_what_overflows_are_within_the_slack(slack: float) -> None:
    """Guarantee: in rationals, not only up to a rounding."""
    for part in (0.1, 0.3, 1 / 3, 0.7):
        overflow, asked = part * slack, []
        with mock.patch(
            "fedpriv.silo.policy._mu_at_slack", lambda _, rest, found=asked: found.append(rest) or 1.0
        ):
            PriceCurve(PoissonGaussian(1.0, 0.1, 10), overflow).price_at(slack)
        (rest,) = asked
        assert Fraction(rest) + Fraction(overflow) <= Fraction(slack)


def test_runs_whose_slacks_add_up_to_one_are_more_than_any_budget() -> None:
    """δ = 1 promises nothing, and neither does a run whose cost is not known."""
    half = ApproximateGDP(1.0, 0.5)
    assert compose_prices([half, half]) is None
    assert compose_prices([half, None]) is None
    most = compose_prices([half, ApproximateGDP(1.0, 0.25)])
    assert most is not None
    assert most.slack == pytest.approx(0.75)
