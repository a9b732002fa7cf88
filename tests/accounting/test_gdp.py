"""The exact Gaussian conversions against mpmath and against dp-accounting, on the safe side everywhere."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import pld
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.guarantees import GaussianDP, weakest
from fedpriv.accounting.poisson import PoissonGaussian
from tests.parts import in_parts

MUS = (1e-6, 1e-3, 0.1, 1.0, 4.0, 30.0, 1e3)
DELTAS = (1e-300, 1e-100, 1e-12, 1e-5, 0.1, 0.9)

log_uniform_mu = st.floats(-6.0, 3.0).map(lambda power: 10.0**power)
log_uniform_delta = st.floats(-300.0, -0.01).map(lambda power: 10.0**power)


def true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2), with enough digits that nothing cancels."""
    with mpmath.workdps(400):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("steps", [-100.0, -20.0, -1.0, 0.0, 0.1, 3.0, 36.0])
def test_delta_is_the_true_value_rounded_up(mu: float, steps: float) -> None:
    epsilon = max(0.0, mu * mu / 2 + steps * mu)
    true, ours = true_delta(mu, epsilon), gdp.delta_of(mu, epsilon)
    assert 0 <= (ours - true) / true < 1e-9


@pytest.mark.parametrize("mu", [1e2, 1e4])
def test_delta_is_rounded_up_where_epsilon_is_about_half_the_square_of_mu(mu: float) -> None:
    """There ε/μ - μ/2 has lost most of its digits."""
    for steps in np.random.default_rng(3).uniform(-4.0, -1.0, 40).tolist():
        epsilon = mu * mu / 2 + steps * mu
        assert gdp.delta_of(mu, epsilon) >= true_delta(mu, epsilon)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon_is_never_below_the_true_value_and_close_to_it(mu: float, delta: float) -> None:
    epsilon = gdp.epsilon_of(mu, delta)
    assert true_delta(mu, epsilon) <= delta
    smaller = epsilon - max(1e-9 * epsilon, 1e-15)
    assert epsilon == 0.0 or true_delta(mu, max(0.0, smaller)) > delta


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.5, 8.0, 1e3, 5e5])
@pytest.mark.parametrize("delta", DELTAS)
def test_mu_is_never_above_the_true_value_and_close_to_it(epsilon: float, delta: float) -> None:
    mu = gdp.mu_of(epsilon, delta)
    assert true_delta(mu, epsilon) <= delta
    assert true_delta(mu * (1.0 + 1e-8), epsilon) > delta


@settings(max_examples=200)
@given(mu=log_uniform_mu, delta=log_uniform_delta)
def test_mu_epsilon_and_delta_conversions_are_inverse_and_never_optimistic(mu: float, delta: float) -> None:
    epsilon = gdp.epsilon_of(mu, delta)
    assert gdp.delta_of(mu, epsilon) <= delta * (1.0 + 1e-12)
    back = gdp.mu_of(epsilon, delta)
    assert gdp.delta_of(back, epsilon) <= delta * (1.0 + 1e-12)
    assert back >= mu * (1.0 - 1e-9)
    if epsilon > 1e-3 * mu:
        assert back <= mu * (1.0 + 1e-6)


@pytest.mark.parametrize(
    ("mu", "epsilon"), [(0.1, 0.340669), (0.5, 1.993091), (1.0, 4.377178), (2.0, 9.997256), (4.0, 24.381611)]
)
def test_epsilons_of_given_mus_match_published_values(mu: float, epsilon: float) -> None:
    assert gdp.epsilon_of(mu, 1e-5) == pytest.approx(epsilon, abs=5e-7)


@pytest.mark.parametrize(
    ("epsilon", "delta", "mu"),
    [(1, 1e-5, 0.268051), (2, 1e-6, 0.448335), (8, 1e-5, 1.666031), (1, 1e-6, 0.236704381)],
)
def test_mus_of_given_epsilons_match_published_values(epsilon: float, delta: float, mu: float) -> None:
    assert gdp.mu_of(epsilon, delta) == pytest.approx(mu, abs=5e-7)


UNEQUAL = [1 / 2.0, 1 / 5.0, 1 / 9.0], 1e-6
EQUAL = [([mu / 2] * 4, delta) for mu in (0.1, 0.5, 1.0, 2.0) for delta in (1e-5, 1e-8)]


@pytest.mark.parametrize(("mus", "delta"), in_parts([*EQUAL, UNEQUAL], [*EQUAL[::5], UNEQUAL]))
def test_composed_epsilon_is_never_above_the_pld_accountant_and_within_1e_6_of_it(
    mus: list[float], delta: float
) -> None:
    accountant = pld.PLDAccountant()
    for mu in mus:
        accountant.compose(dp_accounting.GaussianDpEvent(1.0 / mu))
    exact = gdp.epsilon_of(gdp.compose(mus), delta)
    assert exact <= accountant.get_epsilon(delta) <= exact + 1e-6


@pytest.mark.parametrize("mu", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_delta_agrees_with_the_closed_form_of_dp_accounting(mu: float, epsilon: float) -> None:
    theirs = GaussianPrivacyLoss(1.0 / mu).get_delta_for_epsilon(epsilon)
    assert gdp.delta_of(mu, epsilon) == pytest.approx(theirs, rel=1e-6)


def test_noise_that_differs_between_rounds_adds_up_in_inverse_squares() -> None:
    stds, clips = np.array([3.0, 4.0, 12.0]), np.array([1.0, 2.0, 6.0])
    assert gdp.compose(1.0 / stds) == pytest.approx(math.sqrt(1 / 9 + 1 / 16 + 1 / 144))
    assert gdp.compose(clips / stds) == pytest.approx(math.sqrt(1 / 9 + 1 / 4 + 1 / 4))


@pytest.mark.slow
def test_mu_of_ten_million_equal_rounds_composes_accurately() -> None:
    assert gdp.compose(np.full(10_000_000, 1e-4)) == pytest.approx(math.sqrt(1e7) / 1e4, rel=1e-12)


@given(mu=log_uniform_mu, sensitivity=st.floats(1e-6, 1e9))
def test_calibrated_noise_never_spends_more_than_its_target(mu: float, sensitivity: float) -> None:
    std = gdp.noise_for(mu, sensitivity)
    assert sensitivity / std <= mu
    assert sensitivity / std >= mu * (1.0 - 1e-15)


def test_zero_mu_or_no_release_costs_zero_epsilon_and_delta() -> None:
    assert gdp.epsilon_of(0.0, 1e-9) == 0.0
    assert gdp.delta_of(0.0, 0.0) == 0.0
    assert gdp.compose([]) == 0.0


def test_a_delta_too_small_for_a_float_is_not_reported_as_zero() -> None:
    assert gdp.delta_of(1e-6, 1.0) == math.ulp(0.0)
    assert gdp.delta_of(1e-200, 1e200) == math.ulp(0.0)


def test_a_delta_of_few_digits_is_rounded_up() -> None:
    """Before: 5e-324 in place of 7e-324."""
    for steps in np.linspace(37.4, 38.5, 12).tolist():
        assert mpmath.mpf(gdp.delta_of(1.0, 0.5 + steps)) >= true_delta(1.0, 0.5 + steps)


def test_noise_below_the_smallest_float_is_the_smallest_float() -> None:
    """Before: ZeroDivisionError."""
    assert gdp.noise_for(1e300, 1e-300) == math.ulp(0.0)


def test_weakest_guarantee_has_the_largest_mu_or_the_smallest_noise_multiplier() -> None:
    assert weakest([GaussianDP(1.0), GaussianDP(2.0), GaussianDP(0.5)]) == GaussianDP(2.0)
    sampled = [PoissonGaussian(multiplier, 0.1, 10) for multiplier in (2.0, 1.0, 3.0)]
    assert weakest(sampled) == sampled[1]
