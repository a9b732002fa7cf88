"""A guard charges runs whose records take part in secret by (μ, δ₀), and draws their rounds from its own key."""

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
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_upper
from fedpriv.participation.secret import RandomAllocation
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.admission import Charge, compose_prices, price_charges, why_over_budget
from fedpriv.silo.demo import run_allowance
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import format_status
from fedpriv.silo.policy import PriceCurve, price_curve
from tests.accounting.ratios import replaced_by_sampling
from tests.conftest import small_tree
from tests.silo.guarded import guard_of, refused, replay, silo_with_key_of, write_silo

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


def guard_at(folder: Path, **allow: Any) -> Guard:
    return guard_of(
        write_silo(folder, **{"relation": "zero-out", "slack": 1e-6, "budget": 1.0, "clip": 1.0, **allow})
    )


QUERY = torch.zeros(7850)


def plan_of(guard: Guard, text: str) -> Plan:
    return guard._admission.admit(guard._admission.canonicalize(text)).plan


@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_a_subsampled_run_is_charged_the_mu_that_its_privacy_curve_certifies_at_the_slack(
    tmp_path: Path, sampling: str
) -> None:
    """Guarantee: (μ, 1e-8) of this silo's own stream, before its first answer; not the μ that ε alone would be."""
    guard = guard_at(tmp_path)
    for t in range(1, ROUNDS + 1):
        assert torch.isfinite(guard.answer("run", scenario(sampling), t, QUERY)).all()
    (charge,) = guard._ledger.charges()
    guarantee = make_silo_stream(plan_of(guard, scenario(sampling)), 0, ROUNDS).guarantee
    assert isinstance(guarantee, AllocatedGaussian | PoissonGaussian)
    assert 0.98 < guarantee.epsilon_of(1e-5) <= 1.0
    exact = guarantee.charge(SLACK)
    assert charge.slack == SLACK
    assert exact.mu <= charge.mu < 1.01 * exact.mu  # a little of the slack is for rounds that draw very many
    assert charge.mu > 1.1 * mu_of(1.0, 1e-5)  # the μ with the same ε: as a lifetime budget it would be a lie


@pytest.mark.slow
def test_the_replace_one_price_of_random_allocation_is_never_below_monte_carlo_estimates(tmp_path: Path) -> None:
    """Guarantee: the price (μ, 1e-8) under replace-one lies above samples of the two runs.

    And below twice the price of a record that is zeroed out: what a chain through the run without it asks for.
    """
    text = scenario(epsilon=2.0).replace("zero-out", "replace-one")
    guard = guard_at(tmp_path, relation="replace-one", budget=9.0)
    guard.answer("run", text, 1, QUERY)
    (charge,), plan = guard._ledger.charges(), plan_of(guard, text)
    guarantee = make_silo_stream(plan, 0, ROUNDS).guarantee
    assert isinstance(guarantee, AllocatedGaussian)
    assert guarantee.relation == "replace-one"
    z = float(plan.noise.std_of(0)) * 2.0  # a record moves the mean of two by clip / 2, its replacement back
    for epsilon in (0.1, 0.5, 1.0, 2.0, 4.0):
        mean, error = replaced_by_sampling(z, ROUNDS, epsilon, 400_000, seed=5)
        assert mean - 4.0 * error <= delta_of(charge.mu, epsilon) + SLACK, epsilon
    removed = AllocatedGaussian(z, ROUNDS, 1, "zero-out").charge(SLACK)
    assert removed.mu < charge.mu < 0.95 * 2.0 * removed.mu


def test_a_subsampled_run_is_refused_by_a_policy_without_slack(tmp_path: Path) -> None:
    guard = guard_at(tmp_path, slack=0.0)
    reason = "a run with random allocation keeps to one but for a probability: allow"
    refused(guard, reason, scenario(), query=QUERY)
    assert guard._ledger.charges() == []


def test_subsampled_runs_consume_both_the_slack_and_the_budget(tmp_path: Path) -> None:
    """Two runs use a slack of 2e-8 up; with more of it the third would cost √3 times μ, above the budget."""
    guard = guard_at(tmp_path, slack=2e-8, budget=9.0)
    guard.answer("a", scenario(), 1, QUERY)
    guard.answer("b", scenario(), 1, QUERY)
    refused(guard, "with slack 3e-08; the budget is 9 with slack 2e-08", scenario(), query=QUERY, run="c")
    mu = guard._ledger.charges()[0].mu
    wide = guard_at(tmp_path, slack=1.0 - 1e-9, budget=1.6 * mu)
    refused(wide, "the budget is", scenario(), query=QUERY, run="c")
    wide = guard_at(tmp_path, slack=3e-8, budget=1.8 * mu)
    wide.answer("c", scenario(), 1, QUERY)
    assert len(wide._ledger.charges()) == 3


def test_runs_with_and_without_subsampling_share_one_budget(tmp_path: Path) -> None:
    guard = guard_at(tmp_path, budget=1.0)
    guard.answer("exact", scenario("fixed"), 1, QUERY)
    guard.answer("secret", scenario(), 1, QUERY)
    charges = guard._ledger.charges()
    assert [charge.slack for charge in charges] == [0.0, SLACK]
    line = format_status(tmp_path / "silo-0.toml")
    assert f"spent {format_upper(math.hypot(*(charge.mu for charge in charges)), 6)} by 2 runs" in line[1]
    assert line[2] == "slack 1e-06, spent 1e-08, left 9.9e-07"
    assert "with slack 1e-08, 1 round answered" in line[4]


@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_a_restarted_guard_reproduces_its_secret_schedule_of_records(tmp_path: Path, sampling: str) -> None:
    """Every answer of guards that end after each round is that of one silo with the ledger's key."""
    answers, rounds = [guard_at(tmp_path).answer("run", scenario(sampling), 1, QUERY)], range(1, ROUNDS + 1)
    silo = silo_with_key_of(guard_at(tmp_path))
    answers += [guard_at(tmp_path).answer("run", scenario(sampling), t, QUERY) for t in rounds[1:]]
    drawn = []
    for answer, (message, release, _) in zip(answers, replay(silo, [QUERY] * ROUNDS), strict=True):
        assert torch.equal(message, answer)
        drawn.append(release.counts.drawn)
    if sampling == "allocation":
        assert sum(drawn) == 20  # every record once
    assert any(count != 2 for count in drawn)  # in rounds of its own choice


def test_a_lowered_slack_applies_to_open_subsampled_runs(tmp_path: Path) -> None:
    guard_at(tmp_path).answer("run", scenario(), 1, QUERY)
    for slack, reason in ((0.0, "leaves none"), (1e-9, "with slack 1e-08; the budget is 1")):
        refused(guard_at(tmp_path, slack=slack), reason, scenario(), t=2, query=QUERY)
    other = guard_at(tmp_path, slack_per_run=1e-7)
    assert torch.isfinite(other.answer("run", scenario(), 2, QUERY)).all()  # charged when it was opened


@pytest.mark.slow
def test_a_policy_computed_for_one_subsampled_run_admits_no_second_run(tmp_path: Path) -> None:
    """What `--engine deployment` writes for its silos."""
    cell = resolve_cell({**tree(), "data": {"name": "synthetic"}}, "test")
    allow = run_allowance(cell, load_task(cell))
    assert allow["slack"] == SLACK
    guard = guard_at(tmp_path, **{**allow, "clip": 1.0, "trust": None})
    guard.answer("run", scenario(), 1, QUERY)
    refused(guard, "the budget is", scenario(epsilon=0.1), query=QUERY, run="another")


def test_replace_one_doubles_a_gaussian_zero_out_price_and_leaves_a_subsampled_one_unknown() -> None:
    """Guarantee of `spent`: replace-one is two steps of zero-out; a curve in (μ, δ₀) has no such rule."""
    zero_out, replace_one = scenario(), scenario().replace("zero-out", "replace-one")
    exact, sampled = Charge(zero_out, 0.5, 0.0), Charge(zero_out, 0.5, SLACK)
    assert price_charges([exact, sampled], "zero-out") == [ApproximateGDP(0.5), ApproximateGDP(0.5, SLACK)]
    doubled, unknown = price_charges([exact, sampled], "replace-one")
    assert doubled is not None
    assert doubled.mu == pytest.approx(1.0)
    assert unknown is None
    assert price_charges([Charge(replace_one, 0.5, SLACK)], "zero-out") == [ApproximateGDP(0.5, SLACK)]
    priceless = [Charge("no scenario", 0.5, 0.0), Charge(zero_out, math.inf, 0.0)]
    assert price_charges(priceless, "zero-out") == [None, None]
    assert why_over_budget(LifetimeBudget(9.0, 0.1), [None], ApproximateGDP(0.1)) == (
        "the run costs mu = 0.1, with all others inf; the budget is 9 with slack 0.1"
    )


def test_slacks_that_add_up_to_nearly_1_have_no_composed_price() -> None:
    """Their sum, rounded up, is 1, which is no slack."""
    assert compose_prices([ApproximateGDP(1.0, 0.7), ApproximateGDP(1.0, 0.29999999999999993)]) is None
    assert compose_prices([ApproximateGDP(1.0, 0.7), ApproximateGDP(1.0, 0.29)]) is not None


def test_the_probability_of_overfull_rounds_is_part_of_the_slack_and_raises_the_price() -> None:
    """What they can give away comes off what the curve may use: the price rises, its slack is the policy's."""
    cell = resolve_cell(tree(), "test")
    plan = make_plan(cell, load_task(cell).objective)
    cost = price_curve(plan, make_silo_stream(plan, 0, ROUNDS).guarantee, 0)
    assert isinstance(plan.schedule, RandomAllocation)
    capacity = plan.schedule.capacity(2)
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


@pytest.mark.parametrize("slack", [1e-8, 3e-7, 0.1])
def test_certified_delta_plus_overflow_probability_never_exceed_the_slack(slack: float) -> None:
    """Guarantee: in rationals, not only up to a rounding."""
    for part in (0.1, 0.3, 1 / 3, 0.7):
        overflow = part * slack
        with mock.patch("fedpriv.silo.policy._mu_at_slack", return_value=1.0) as mu_at_slack:
            PriceCurve(PoissonGaussian(1.0, 0.1, 10), overflow).price_at(slack)
        ((_, rest),) = (call.args for call in mu_at_slack.call_args_list)
        assert Fraction(rest) + Fraction(overflow) <= Fraction(slack)


def test_prices_whose_slacks_add_up_to_one_have_no_composition() -> None:
    """δ = 1 promises nothing, and neither does a run whose cost is not known."""
    half = ApproximateGDP(1.0, 0.5)
    assert compose_prices([half, half]) is None
    assert compose_prices([half, None]) is None
    most = compose_prices([half, ApproximateGDP(1.0, 0.25)])
    assert most is not None
    assert most.slack == pytest.approx(0.75)
