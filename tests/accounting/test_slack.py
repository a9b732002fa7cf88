"""(μ, δ₀)-GDP: the table, what it implies, composition and the lifetime budget."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.allocation import (
    AllocatedGaussian,
    ratio_distribution,
    ratio_grid,
)
from fedpriv.accounting.budget import (
    ApproximateGDP,
    LifetimeBudget,
    compose_charges,
    exact_decimal,
    min_mu,
    price_at_distance,
    sum_slacks,
    sum_squares,
)
from fedpriv.accounting.curves import gaussian_curve
from fedpriv.accounting.guarantees import Sampled
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.core.errors import InputError
from tests.accounting.builders import require

DELTA = 1e-5
FIRST, FIFTH = AllocatedGaussian(0.9205, 60), PoissonGaussian(1.0, 0.01, 1000)
SLACKS = (1e-6, 1e-7, 1e-8, 1e-10)

charges = st.builds(ApproximateGDP, mu=st.floats(0.0, 3.0), slack=st.floats(0.0, 1e-3))


@pytest.mark.parametrize(
    ("run", "mus"),
    [
        (FIRST, (0.325, 0.373, 0.416, 0.4865)),
        (AllocatedGaussian(0.5732, 60), (1.0199, 1.077, 1.1222, 1.190)),
        (AllocatedGaussian(1.546, 60, 10), (0.2957, 0.2963, 0.2968, 0.298)),
        (PoissonGaussian(0.9639, 1 / 60, 60), (0.317, 0.358, 0.396, 0.463)),
        (FIFTH, (0.461, 0.473, 0.486, 0.516)),
    ],
)
def test_charged_mus_at_given_slacks_match_golden_values(run: Sampled, mus: tuple[float, ...]) -> None:
    """Computed twice before, by dp-accounting and by own laws; the entries have three digits."""
    for slack, golden in zip(SLACKS, mus, strict=True):
        assert run.charge(slack).mu == pytest.approx(golden, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("slack", [1e-6, 1e-8])
def test_run_curve_stays_below_its_charged_mu_and_slack_between_certified_points(slack: float) -> None:
    """The guarantee of smallest_mu, at four thousand ε that are none of its points."""
    for run in (FIRST, FIFTH, AllocatedGaussian(0.9205, 60, relation="replace-one")):
        mu = min_mu(run.curve, slack)
        epsilons = np.random.default_rng(1).uniform(0.0, 30.0, 4_000)
        allowed = (1.0 - slack) * gaussian_curve(mu)(epsilons) + slack
        assert np.all(run.curve(epsilons) <= allowed * (1 + 1e-12))


def test_min_mu_covers_a_staircase_curve_just_before_its_drop() -> None:
    """A staircase keeps its δ up to the next of the points: to certify each point alone would be too little."""
    slack = 1e-6
    mu = min_mu(lambda epsilons: np.where(epsilons < 1.0, 0.3, 0.0), slack)
    assert (1.0 - slack) * gdp.delta_of(mu, 1.0 - 1e-9) + slack >= 0.3
    assert gdp.delta_of(mu * (1 - 1e-4), 1.0 - 1e-9) < 0.3


def test_charged_mu_and_slack_bound_both_directions_at_negative_epsilon() -> None:
    """δ(ε) for ε < 0 follows from the other direction, by the law of the loss itself."""
    slack, z, bins = 1e-7, 0.9205, 60
    mu = min_mu(FIRST.curve, slack)
    epsilons = np.linspace(-6.0, 0.0, 601)
    mirrored = 1.0 - np.exp(epsilons) * (1.0 - gaussian_curve(mu)(-epsilons))
    ratios = ratio_distribution(z, bins, ratio_grid(z, bins, 2**12))
    removed, added = ratios.removal_losses.deltas(epsilons), ratios.addition_losses.deltas(epsilons)
    assert np.all(np.maximum(removed, added) <= ((1.0 - slack) * mirrored + slack) * (1 + 1e-4))


def test_mu_with_the_same_epsilon_at_one_delta_is_below_every_charged_mu() -> None:
    """One pass at z = 0.9205 has the ε of 0.3-GDP at 1e-5; at 1e-8 it has far more, and no small μ at all."""
    assert FIRST.epsilon_of(DELTA) == pytest.approx(gdp.epsilon_of(0.3, DELTA), rel=1e-3)
    assert FIRST.epsilon_of(1e-8) == pytest.approx(2.341, abs=2e-3)
    assert gdp.epsilon_of(0.3, 1e-8) == pytest.approx(1.568, abs=1e-3)
    for slack in SLACKS:
        assert FIRST.charge(slack).mu > 0.32


def test_epsilon_from_charged_mu_and_slack_is_never_below_the_runs_own_curve() -> None:
    """Never below what the run's own curve gives at the same δ."""
    for run, slack, delta in itertools.product((FIRST, FIFTH), (1e-7, 1e-8), (1e-4, 1e-5, 1e-6)):
        assert run.charge(slack).epsilon_of(delta) >= run.epsilon_of(delta) * (1 - 1e-3)
    assert FIRST.charge(1e-6).epsilon_of(1e-6) == math.inf
    assert re.fullmatch("0.37[0-9]+ with slack 1e-07", FIRST.charge(1e-7).description)
    assert ApproximateGDP(0.3).description == "0.3"


def test_composed_charges_match_golden_epsilons() -> None:
    first, fifth = FIRST.charge(1e-7), FIFTH.charge(1e-7)
    assert compose_charges([ApproximateGDP(0.5), first, fifth]).epsilon_of(DELTA) == pytest.approx(3.307, abs=3e-3)
    assert compose_charges([first] * 10).epsilon_of(DELTA) == pytest.approx(5.33, abs=1e-2)
    assert AllocatedGaussian(0.9205, 60, 10).epsilon_of(DELTA) == pytest.approx(2.724, abs=2e-3)


@settings(max_examples=200)
@given(mu=st.floats(1e-6, 10.0), slack=st.floats(0.0, 1e-2), epsilon=st.floats(0.0, 20.0))
def test_epsilon_at_the_delta_of_a_charge_never_has_a_larger_delta(
    mu: float, slack: float, epsilon: float
) -> None:
    charge = ApproximateGDP(mu, slack)
    delta = charge.delta_of(epsilon)
    assert delta >= slack
    if slack < delta < 1.0 and delta > 1e-300:
        back = charge.epsilon_of(delta)
        assert math.isinf(back) or charge.delta_of(back) <= delta * (1 + 1e-9)


def test_a_large_slack_is_a_share_of_what_is_revealed() -> None:
    """(1 - δ₀) δ_μ(ε) + δ₀ by hand, and its inverse."""
    charge, delta = ApproximateGDP(1.0, 0.3), 0.3 + 0.7 * gdp.delta_of(1.0, 0.5)
    assert charge.delta_of(0.5) == pytest.approx(delta, rel=1e-14)
    assert charge.epsilon_of(delta) == pytest.approx(0.5, rel=1e-12)
    assert ApproximateGDP(50.0, 0.3).delta_of(0.0) == 1.0


@settings(max_examples=200)
@given(several=st.lists(charges, max_size=8))
def test_composed_charges_are_rounded_up(several: list[ApproximateGDP]) -> None:
    together = compose_charges(several)
    assert exact_decimal(together.mu) ** 2 >= sum_squares(several)
    assert exact_decimal(together.slack) >= sum_slacks(several)
    assert together.mu <= math.hypot(*(each.mu for each in several)) * (1 + 1e-14) + 1e-300


def test_charges_whose_sums_are_floats_are_added_exactly() -> None:
    first, second = ApproximateGDP(3.0, 1e-8), ApproximateGDP(4.0, 2e-8)
    assert compose_charges([first, second]) == ApproximateGDP(5.0, 3e-8)


def test_charges_whose_squares_fit_no_float_are_added_and_refused() -> None:
    """Before: an OverflowError from the square of μ, where a budget has to refuse the run."""
    assert compose_charges([ApproximateGDP(3e200), ApproximateGDP(4e200)]) == ApproximateGDP(5e200)
    assert LifetimeBudget(5e200).remaining([ApproximateGDP(3e200)]) == ApproximateGDP(4e200)
    assert "mu = 1e+160" in require(LifetimeBudget(1.0).why_over_budget([], ApproximateGDP(1e160)))


def test_charges_whose_composed_mu_fits_no_float_are_refused() -> None:
    """Before: an OverflowError, where a budget has to refuse the run and a command to say why."""
    charges = [ApproximateGDP(1.7e308)] * 2
    assert "mu = inf" in require(LifetimeBudget(1.0).why_over_budget(charges, HALF))
    with pytest.raises(InputError, match="mu = inf"):
        compose_charges(charges)


def test_a_curve_below_the_slack_costs_nothing() -> None:
    assert min_mu(lambda epsilons: np.full_like(epsilons, 1e-9), 1e-6) == 0.0


# The lifetime budget


HALF, EXACT, LOOSE = ApproximateGDP(0.5, 1e-8), ApproximateGDP(0.5), ApproximateGDP(0.9, 0.6)


@pytest.mark.parametrize(
    ("budget", "before", "run", "reason"),
    [
        (LifetimeBudget(1.0, 3e-8), [HALF] * 2, HALF, ""),
        (LifetimeBudget(1.0, 3e-8), [HALF] * 3, HALF, "slack"),
        (LifetimeBudget(1.0, 3e-8), [HALF] * 3, EXACT, ""),
        (LifetimeBudget(1.0, 3e-8), [HALF, HALF, HALF, EXACT], EXACT, "mu = 1.11804"),
        # of all runs, also if their slacks make no probability: of the last run alone, 0.9 fitted the budget
        (LifetimeBudget(1.0, 0.5), [LOOSE], LOOSE, "mu = 1.2728"),
        (LifetimeBudget(100.0), [], FIRST.charge(1e-8), "secret participation"),
        (LifetimeBudget(100.0), [], ApproximateGDP(1.0), ""),
    ],
)
def test_lifetime_budget_is_used_up_exactly_and_a_refusal_names_its_cause(
    budget: LifetimeBudget, before: list[ApproximateGDP], run: ApproximateGDP, reason: str
) -> None:
    refusal = budget.why_over_budget(before, run)
    assert refusal is None if reason == "" else reason in (refusal or "")


def test_sampled_run_at_distance_two_has_no_price_and_fits_no_budget() -> None:
    """A row of another unit or relation: k·μ for an exact run, nothing known for a sampled one."""
    old = price_at_distance(FIRST.charge(1e-8), distance=2)
    assert old is None
    assert 0.5 <= require(price_at_distance(ApproximateGDP(0.25), distance=2)).mu <= 0.5 * (1 + 1e-14)
    assert price_at_distance(FIRST.charge(1e-8)) == FIRST.charge(1e-8)
    assert "earlier run" in (LifetimeBudget(10.0, 1e-6).why_over_budget([old], ApproximateGDP(0.1)) or "")
    assert "nothing is known" in (LifetimeBudget(10.0, 1e-6).why_over_budget([], old) or "")
    assert LifetimeBudget(10.0, 1e-6).remaining([old]) is None


@settings(max_examples=200)
@given(several=st.lists(charges, max_size=6), mu=st.floats(0.1, 5.0), slack=st.floats(0.0, 1e-2))
def test_remaining_budget_is_admitted_and_any_more_is_refused(
    several: list[ApproximateGDP], mu: float, slack: float
) -> None:
    budget = LifetimeBudget(mu, slack)
    left = budget.remaining(several)
    if left is None:
        assert budget.why_over_budget(several, ApproximateGDP(0.0)) is not None
        return
    assert budget.why_over_budget(several, left) is None
    more = ApproximateGDP(left.mu * (1 + 1e-9) + 1e-6, left.slack)
    assert budget.why_over_budget(several, more) is not None


def test_a_run_picked_after_seeing_the_first_stays_within_the_budget() -> None:
    """The guarantee of LifetimeBudget.  The attacker would gain a δ above the promised one.

    After a first exact run he picks, by its loss x, the second of two runs that are both admitted: an exact one or
    a sampled one.  For his best pick at ε, δ = E max(δ_A(ε - x), δ_B(ε - x)): more than each fixed pick gives, and
    never more than the budget.
    """
    slack, z, bins = 1e-6, 0.9205, 60
    first, sampled = 0.4, FIRST.charge(slack)
    exact = ApproximateGDP(sampled.mu)
    budget = LifetimeBudget(compose_charges([ApproximateGDP(first), sampled]).mu, slack)
    for second in (exact, sampled):
        assert budget.why_over_budget([ApproximateGDP(first)], second) is None
    grid = np.linspace(-9.0, 9.0, 3001)
    weights = np.exp(-0.5 * grid**2) / math.sqrt(2.0 * math.pi) * (grid[1] - grid[0])
    losses = first * grid + 0.5 * first**2
    law = ratio_distribution(z, bins, ratio_grid(z, bins, 2**11)).removal_losses
    gained = 0
    for epsilon in np.linspace(0.5, 3.0, 11):
        rest = epsilon - losses
        of_exact = gaussian_curve(exact.mu)(np.abs(rest))
        of_exact = np.where(rest < 0.0, 1.0 - np.exp(rest) * (1.0 - of_exact), of_exact)
        of_sampled = law.deltas(rest)
        adaptive = float(weights @ np.maximum(of_exact, of_sampled))
        fixed = max(float(weights @ of_exact), float(weights @ of_sampled))
        gained += adaptive > fixed * 1.001
        assert adaptive <= ApproximateGDP(budget.mu, budget.slack).delta_of(float(epsilon)) * (1 + 1e-6)
    assert gained >= 3
