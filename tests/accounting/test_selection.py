"""What publishing the best of several runs costs: golden numbers, another accountant, exact curves below it."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting import rdp as theirs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import norm

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi as rdp
from fedpriv.accounting.selection import (
    NegativeBinomialRunCount,
    PoissonRunCount,
    PrivateSelection,
    RunCountDistribution,
    negative_binomial_mean,
)
from tests.accounting.builders import hockey_stick
from tests.cli.command import fedpriv, refusal

Floats = NDArray[np.float64]
LAWS: list[RunCountDistribution] = [
    NegativeBinomialRunCount(20.0, 0.0),
    NegativeBinomialRunCount(20.0, 0.5),
    NegativeBinomialRunCount(5.0, 1.0),
    PoissonRunCount(5.0),
]


def theorem_2(mu: float, eta: float, gamma: float, delta: float) -> float:
    """Word for word, with both orders searched on a grid; then Proposition 12 of Canonne, Kamath & Steinke."""
    rho, mean = mu**2 / 2, negative_binomial_mean(eta, gamma)
    others = 1.0 + np.concatenate([[0.0], np.logspace(-4, 4, 20001)])
    least = np.min((1 + eta) * (1 - 1 / others) * (others * rho) + (1 + eta) * math.log(1 / gamma) / others)
    order = 1.0 + np.logspace(-3, 4, 20001)
    curve = order * rho + least + math.log(mean) / (order - 1)
    return float(np.min(curve + np.log1p(-1 / order) - (math.log(delta) + np.log(order)) / (order - 1)))


@given(mu=st.floats(0.1, 4.0), eta=st.just(0.0) | st.floats(1e-6, 1.0), mean=st.floats(2.0, 20.0))
@settings(max_examples=10, derandomize=True)
@example(mu=0.1, eta=0.0, mean=20.0)
@example(mu=4.0, eta=0.5, mean=2.0)
@example(mu=1.0, eta=1.0, mean=2.0)
def test_private_selection_epsilon_by_renyi_orders_matches_a_literal_theorem_2(
    mu: float, eta: float, mean: float
) -> None:
    law = NegativeBinomialRunCount(mean, eta)
    assert negative_binomial_mean(eta, law.gamma) == pytest.approx(mean, rel=1e-9)
    expected = theorem_2(mu, eta, law.gamma, 1e-5)
    assert PrivateSelection(mu, law).epsilon_by_orders(1e-5) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("mean", [1.5, 1000.0, 1e6])
def test_gamma_gives_the_mean_and_is_not_too_large(mean: float, eta: float) -> None:
    gamma = NegativeBinomialRunCount(mean, eta).gamma
    assert mean * (1.0 - 1e-13) <= negative_binomial_mean(eta, gamma) <= mean * (1.0 + 1e-9)


@pytest.mark.parametrize(
    ("mu", "law", "epsilon"),
    [
        (1.0, NegativeBinomialRunCount(20.0, 0.0), 7.865511),
        (1.0, NegativeBinomialRunCount(20.0, 0.5), 8.597001),
        (1.0, NegativeBinomialRunCount(20.0, 1.0), 9.256371),
        (0.1, NegativeBinomialRunCount(5.0, 0.0), 0.639840),
        (0.1, PoissonRunCount(5.0), 0.560836),
        (1.0, PoissonRunCount(5.0), 6.697431),
    ],
)
def test_private_selection_epsilon_by_renyi_orders_matches_golden_values(
    mu: float, law: RunCountDistribution, epsilon: float
) -> None:
    assert PrivateSelection(mu, law).epsilon_by_orders(1e-5) == pytest.approx(epsilon, abs=2e-6)


@pytest.mark.parametrize(
    ("mu", "law", "epsilon"),
    [
        (1.0, NegativeBinomialRunCount(20.0, 0.0), 6.654035),
        (1.0, NegativeBinomialRunCount(20.0, 1.0), 7.255889),
        (0.1, NegativeBinomialRunCount(5.0, 0.0), 0.484163),
        (4.0, NegativeBinomialRunCount(100.0, 0.5), 35.465628),
        (1.0, PoissonRunCount(5.0), 6.653351),
        (0.1, PoissonRunCount(5.0), 0.560836),
    ],
)
def test_private_selection_epsilon_matches_golden_values(
    mu: float, law: RunCountDistribution, epsilon: float
) -> None:
    assert PrivateSelection(mu, law).epsilon_of(1e-5) == pytest.approx(epsilon, abs=1e-5)


@pytest.mark.parametrize("mu", [1e-6, 0.1, 1.0, 8.0])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_selection_epsilon_shift_is_the_largest_log_ratio_of_winner_weights(
    law: RunCountDistribution, mu: float
) -> None:
    """ε₂ is above the ratio on a fine grid of probabilities of a better run, by at most 1e-4 of it."""
    z = np.linspace(-20.0, 20.0, 400_001)
    weight = density(law)
    ratios = np.log(weight(1.0 - ndtr(z)) / weight(1.0 - ndtr(z + mu)))
    shift, largest = law.epsilon_shift(mu), float(ratios.max())
    assert largest * (1.0 - 1e-4) <= shift + 1e-12 <= largest * (1.0 + 1e-4) + 1e-11


@pytest.mark.parametrize("mu", [1e10, 1e60])
def test_selection_among_runs_of_huge_mu_costs_at_least_one_run(mu: float) -> None:
    for law in LAWS:
        assert PrivateSelection(mu, law).epsilon_of(1e-5) >= gdp.epsilon_of(mu, 1e-5)


@pytest.mark.parametrize(("mu", "mean", "shape"), [(0.5, 10.0, 0.0), (1.0, 20.0, 1.0), (1.0, 5.0, math.inf)])
def test_selection_epsilon_agrees_with_dp_accounting_and_never_exceeds_it(
    mu: float, mean: float, shape: float
) -> None:
    """On a grid of orders, and with a rougher δ for the Poisson law, so that it is never below ours."""
    law = PoissonRunCount(mean) if shape == math.inf else NegativeBinomialRunCount(mean, shape)
    accountant = theirs.RdpAccountant(1 + np.logspace(-2, 3, 400))
    accountant.compose(dp_event.RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(1 / mu), mean, shape))
    ours, other = PrivateSelection(mu, law).epsilon_by_orders(1e-6), accountant.get_epsilon(1e-6)
    assert other == pytest.approx(ours, rel=0.15 if shape == math.inf else 1e-3)
    assert ours <= other


def density(law: RunCountDistribution) -> Callable[[Floats], Floats]:
    """G' of the probability generating function of K: the density of the best of K is f(x) G'(F(x))."""
    if isinstance(law, PoissonRunCount):
        return lambda z: law.mean * np.exp(law.mean * (z - 1.0))
    assert isinstance(law, NegativeBinomialRunCount)
    gamma, eta = law.gamma, law.eta
    if eta == 0.0:
        return lambda z: (1 - gamma) / ((1 - (1 - gamma) * z) * math.log(1 / gamma))
    return lambda z: eta * (1 - gamma) * (1 - (1 - gamma) * z) ** (-eta - 1) / (gamma**-eta - 1)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_exact_delta_of_selecting_the_best_gaussian_score_is_within_the_claim(
    law: RunCountDistribution, mu: float
) -> None:
    """Runs that release their Gaussian score: the exact curve of the best one, in both directions."""
    x = np.linspace(-12.0, 12.0, 200_001)
    weight = density(law)

    def best(center: float) -> Floats:
        return norm.pdf(x - center) * weight(ndtr(x - center))

    one_run = 0
    for delta in (1e-3, 1e-5):
        claimed = PrivateSelection(mu, law).epsilon_of(delta)
        for pair in ((best(0.0), best(mu)), (best(mu), best(0.0))):
            assert hockey_stick(*pair, claimed) * (x[1] - x[0]) <= delta
            one_run += hockey_stick(*pair, gdp.epsilon_of(mu, delta)) * (x[1] - x[0]) > delta
    assert one_run, "what one run costs is not enough"


def test_exact_deltas_of_300_random_selections_are_within_the_claim() -> None:
    """The run's release is its score, or the score with its sign turned, and K has either law."""
    draw, x = np.random.default_rng(8), np.linspace(-11.0, 15.0, 20_001)
    width, checked = x[1] - x[0], 0
    for number in range(75):
        mu, mean = float(draw.uniform(0.05, 4.0)), float(np.exp(draw.uniform(0.01, 5.0)))
        eta = float(draw.choice([0.0, 0.3, 1.0, 2.0]))
        law = PoissonRunCount(mean) if number % 3 == 0 else NegativeBinomialRunCount(mean, eta)
        weight = density(law)
        side = draw.choice([-1.0, 1.0])
        low, high = (norm.pdf(x - center) * weight(ndtr(side * (x - center))) for center in (0.0, mu))
        for delta in (1e-3, 1e-6):
            epsilon = PrivateSelection(mu, law).epsilon_of(delta)
            for pair in ((low, high), (high, low)):
                assert hockey_stick(*pair, epsilon) * width <= delta
                checked += 1
    assert checked == 300


@settings(max_examples=30)
@given(
    st.floats(0.05, 4.0), st.floats(1.0, 1000.0), st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]),
    st.floats(0.0, 2.0), st.floats(1e-9, 1e-2),
)  # fmt: skip
def test_selection_curve_bound_is_at_least_one_run_and_epsilon_is_the_smaller_of_two_bounds(
    mu: float, mean: float, eta: float, then: float, delta: float
) -> None:
    choice = PrivateSelection(mu, NegativeBinomialRunCount(mean, eta), then)
    alone = gdp.epsilon_of(math.hypot(mu, then), delta)
    assert alone <= choice.epsilon_by_curve(delta) * (1 + 1e-12)
    assert choice.epsilon_of(delta) == min(choice.epsilon_by_curve(delta), choice.epsilon_by_orders(delta))


@pytest.mark.every(4)
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_numbers_of_runs_follow_their_law(law: RunCountDistribution) -> None:
    """Mean and probabilities, of 40,000 draws."""
    generator = np.random.default_rng(5)
    drawn = np.array([law.draw(generator) for _ in range(40_000)])
    spread = np.std(drawn) / 200.0
    assert abs(drawn.mean() - law.mean) < 5.0 * spread
    weight = density(law)
    first = float(weight(np.array(0.0)))  # P[K = 1] = G'(0)
    assert abs(np.mean(drawn == 1) - first) < 5.0 * math.sqrt(first / 40_000)
    assert drawn.min() == (0 if isinstance(law, PoissonRunCount) else 1)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 3.0])
def test_a_number_of_runs_is_the_quantile_of_a_uniform_number(eta: float) -> None:
    """P[K = k] is proportional to (1 - γ)^k Π (l + η)/(l + 1), summed up to k = 2000."""
    law, counts = NegativeBinomialRunCount(6.0, eta), np.arange(1.0, 2000.0)
    weights = np.cumprod(np.append(1.0 - law.gamma, (1.0 - law.gamma) * (counts + eta) / (counts + 1.0)))
    distribution = np.cumsum(weights) / np.sum(weights)
    for seed in range(100):
        quantile = 1 + int(np.searchsorted(distribution, np.random.default_rng(seed).random()))
        assert law.draw(np.random.default_rng(seed)) == quantile


def test_a_poisson_number_of_runs_has_its_mean_and_may_be_0() -> None:
    """Of 4,000 draws, within five standard deviations."""
    generator = np.random.default_rng(6)
    drawn = np.array([PoissonRunCount(2.5).draw(generator) for _ in range(4000)])
    assert abs(drawn.mean() - 2.5) < 5.0 * math.sqrt(2.5 / 4000)
    assert abs(np.mean(drawn == 0) - math.exp(-2.5)) < 5.0 * math.sqrt(math.exp(-2.5) / 4000)


def test_the_mean_of_a_rounded_gamma_is_not_above_the_mean_that_is_charged() -> None:
    """γ next to 1 has few digits of 1 - γ; E[K] is 1 / ((1 - x)(1 + x/2 + x²/3 + …)) for x = 1 - γ and η = 0."""
    law, excess = NegativeBinomialRunCount(1.000000000191977), np.array([1e-3])
    x = 1 - Fraction(law.gamma)
    mean_excess = float(1 / ((1 - x) * (1 + x / 2 + x**2 / 3)) - 1)
    assert mean_excess > law.mean - 1.0
    charged = PrivateSelection(0.5, law).renyi(excess) - (1.0 + excess) * 0.125 - law.renyi_constant(0.5, excess)
    assert charged[0] >= math.log1p(mean_excess) / excess[0]


def cost(mean: float, eta: float = 0.0, later_mu: float = 0.0) -> float:
    return PrivateSelection(1.0, NegativeBinomialRunCount(mean, eta), later_mu).epsilon_of(1e-5)


def test_selection_from_one_run_costs_that_run_and_cost_grows_with_the_mean_run_count() -> None:
    assert cost(1.0) == pytest.approx(gdp.epsilon_of(1.0, 1e-5), rel=1e-6)
    alone = PrivateSelection(1.0, NegativeBinomialRunCount(1.0))
    assert alone.epsilon_by_orders(1e-5) == pytest.approx(rdp.epsilon_of(1.0, 1e-5), rel=1e-6)
    costs = [cost(mean) for mean in (1.5, 3.0, 10.0, 100.0)]
    assert costs == sorted(costs)
    assert cost(10.0, later_mu=1.0) > cost(10.0)
    assert cost(1.0, later_mu=1.0) == pytest.approx(gdp.epsilon_of(math.sqrt(2.0), 1e-5), rel=1e-6)
    assert NegativeBinomialRunCount(1.0).draw(np.random.default_rng(0)) == 1


def test_privacy_selection_command_prints_the_epsilons_and_refuses_a_bad_eta() -> None:
    done = fedpriv("privacy", "selection", "--mu", "1", "--trials", "20", "--json", cwd=Path())
    printed = json.loads(done.stdout)
    assert printed["epsilon_of_the_choice"] == cost(20.0)
    assert printed["epsilon_of_choice_and_run"] == cost(20.0, later_mu=1.0)
    for eta in ("1000.0", "5e-324", "1e-17", "nan"):
        line = refusal(["privacy", "selection", "--mu", "1", "--eta", eta])
        said = "for a truncated negative binomial number of runs it is 0, or from 1e-06 to 100"
        assert line == f"fedpriv: eta = {eta}: {said}\n"
    assert cost(20.0, 1e-6) == pytest.approx(printed["epsilon_of_the_choice"], rel=1e-5)


def test_a_poisson_number_of_runs_with_a_shape_is_refused() -> None:
    """Was: --eta was ignored."""
    line = refusal(["privacy", "selection", "--mu", "1", "--poisson", "--eta", "1"])
    assert "--poisson: a Poisson number of runs has no --eta; give one of them" in line
