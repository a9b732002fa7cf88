"""zCDP and the papers' formula; Rényi DP against dp-accounting; the order of the three conversions."""

import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp as their_rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi as rdp
from fedpriv.core.errors import InputError

log_uniform_mu = st.floats(-6.0, 3.0).map(lambda power: 10.0**power)
log_uniform_delta = st.floats(-300.0, -1.0).map(lambda power: 10.0**power)


def test_zcdp_and_paper_epsilon_follow_the_papers_formula() -> None:
    rho, delta = 0.5 * 0.3**2, 1e-5
    assert rdp.zcdp_of(0.3) == pytest.approx(rho, rel=1e-15)
    expected = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert rdp.paper_epsilon(0.3, delta) == pytest.approx(expected, rel=1e-14)
    assert expected == pytest.approx(0.3**2 / 2 + 0.3 * math.sqrt(2 * math.log(1 / delta)), rel=1e-14)


@pytest.mark.parametrize(
    ("epsilon", "delta", "sigma"), [(0.5, 1e-5, 9.70), (1.0, 1e-5, 4.90), (2.0, 1e-6, 2.72), (8.0, 1e-5, 0.690)]
)
def test_sigma_by_the_papers_formula_matches_published_calibrations(
    epsilon: float, delta: float, sigma: float
) -> None:
    assert 1.0 / rdp.paper_mu(epsilon, delta) == pytest.approx(sigma, abs=0.005)


@pytest.mark.parametrize(
    ("epsilon", "delta", "sigma"), [(0.5, 1e-5, 7.03), (1.0, 1e-5, 3.73), (2.0, 1e-6, 2.23), (8.0, 1e-5, 0.600)]
)
def test_sigma_by_the_exact_conversion_matches_published_calibrations(
    epsilon: float, delta: float, sigma: float
) -> None:
    assert 1.0 / gdp.mu_of(epsilon, delta) == pytest.approx(sigma, abs=0.005)


@given(mu=log_uniform_mu, delta=log_uniform_delta)
def test_paper_mu_inverts_paper_epsilon(mu: float, delta: float) -> None:
    epsilon = rdp.paper_epsilon(mu, delta)
    assert rdp.paper_mu(epsilon, delta) == pytest.approx(mu, rel=1e-9)


@given(rho=st.floats(-6.0, 3.0).map(lambda power: 10.0**power))
def test_mu_of_a_zcdp_target_is_never_above_it(rho: float) -> None:
    mu = rdp.mu_of_zcdp(rho)
    assert rdp.zcdp_of(mu) <= rho
    assert mu == pytest.approx(math.sqrt(2 * rho), rel=1e-15)


def test_targets_whose_double_is_no_float_are_refused() -> None:
    """Before: a μ of 1.8e308, which is 1e616-zCDP, and a μ that is NaN."""
    with pytest.raises(InputError, match="zcdp = 1e\\+308"):
        rdp.mu_of_zcdp(1e308)
    with pytest.raises(InputError, match="epsilon = inf"):
        rdp.paper_mu(1e308, 1e-5)


def test_a_zcdp_target_whose_root_is_a_float_loses_nothing() -> None:
    assert [rdp.mu_of_zcdp(rho) for rho in (0.0, 0.125, 2.0)] == [0.0, 0.5, 2.0]


@settings(max_examples=100)
@given(mu=log_uniform_mu, delta=log_uniform_delta)
def test_exact_epsilon_is_at_most_renyi_and_renyi_at_most_the_papers_formula(mu: float, delta: float) -> None:
    exact, renyi, paper = gdp.epsilon_of(mu, delta), rdp.epsilon_of(mu, delta), rdp.paper_epsilon(mu, delta)
    assert exact <= renyi * (1.0 + 1e-12) <= paper * (1.0 + 1e-9)


@pytest.mark.every(4)
@pytest.mark.parametrize("mu", [1e-6, 0.1, 1.0, 5.0, 30.0])  # theirs skips orders below 1.01, needed above
@pytest.mark.parametrize("delta", [1e-300, 1e-6, 0.01])
def test_renyi_epsilon_agrees_with_dp_accounting_on_fine_renyi_orders(mu: float, delta: float) -> None:
    best = math.sqrt(2.0 * math.log(1 / delta)) / mu
    accountant = their_rdp.RdpAccountant(1.0 + best * np.geomspace(0.05, 20.0, 20_001))  # ε errs by 1e-7
    accountant.compose(dp_accounting.GaussianDpEvent(1.0 / mu))
    assert rdp.epsilon_of(mu, delta) == pytest.approx(accountant.get_epsilon(delta), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize(("mu", "delta"), [(0.1, 1e-5), (0.37, 1e-7), (1.0, 1e-5), (1.7, 1e-3), (5.0, 1e-6)])
def test_the_best_order_is_found_to_ten_digits(mu: float, delta: float) -> None:
    def epsilon(log_excess: float) -> float:
        excess = np.array([math.exp(log_excess)])
        return float(rdp.renyi_to_epsilons(excess, (1.0 + excess) * mu**2 / 2, math.log(delta))[0])

    best = minimize_scalar(epsilon, bounds=(-5.0, 10.0), method="bounded", options={"xatol": 1e-9}).fun
    assert rdp.epsilon_of(mu, delta) == pytest.approx(best, rel=1e-10)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("delta", [1e-100, 1e-5])
def test_mu_by_renyi_calibration_lies_between_the_papers_formula_and_the_exact_one(
    epsilon: float, delta: float
) -> None:
    mu = rdp.mu_of(epsilon, delta)
    assert rdp.epsilon_of(mu, delta) <= epsilon
    assert rdp.epsilon_of(mu * (1 + 1e-9), delta) > epsilon
    assert rdp.paper_mu(epsilon, delta) < mu < gdp.mu_of(epsilon, delta)


def test_papers_sigma_formula_misses_its_delta_at_epsilon_20_and_delta_0_1() -> None:
    """σ = 2√ln(1/δ)/ε is not (ε, δ)-DP where ε > ln(1/δ): at ε = 20, δ = 0.1 the exact δ is 0.543."""
    sigma = 2 * math.sqrt(math.log(10)) / 20
    assert gdp.delta_of(1 / sigma, 20) == pytest.approx(0.543, abs=5e-4)


@pytest.mark.parametrize(
    "figure", [rdp.zcdp_of, lambda mu: rdp.epsilon_of(mu, 1e-5), lambda mu: rdp.paper_epsilon(mu, 1e-5)]
)
def test_a_mu_whose_square_is_no_float_is_refused(figure: Callable[[float], float]) -> None:
    """Before: OverflowError."""
    with pytest.raises(InputError, match="its square is too large for floating point"):
        figure(1e155)
