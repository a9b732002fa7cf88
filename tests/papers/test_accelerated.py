"""The theorems of Accelerated-DP-SRGD against their formulas evaluated apart, in mpmath with 50 digits."""

import itertools
import math
from dataclasses import replace

import mpmath
import pytest

from fedpriv.accounting import gaussian as gdp
from fedpriv.core.errors import InputError
from fedpriv.papers.base import Problem
from fedpriv.papers.choquette_choo import (
    AcceleratedParameters,
    non_realizable_parameters,
    realizable_factor,
    realizable_parameters,
)
from fedpriv.participation.orders import FixedOrder

MNIST = Problem(7850, 2.0, 3.0, True, 1, FixedOrder(60_000, 60_000), epsilon=1.0, delta=1e-5, relation="zero-out")
RADIUS = 10.0


def problem_of(records: int = 60_000, **changes: float) -> Problem:
    return replace(MNIST, schedule=FixedOrder(records, records), **changes)  # type: ignore[arg-type]


def holds(asked: AcceleratedParameters) -> dict[str, bool]:
    return {condition.text: condition.holds for condition in asked.conditions}


def factor_in_mpmath(n: int, delta: str) -> mpmath.mpf:
    with mpmath.workdps(50):
        d = mpmath.mpf(delta)
        return mpmath.sqrt(32) * mpmath.log(n, 2) ** 1.5 * mpmath.sqrt(mpmath.log(2 * n / d)) * mpmath.log(2.5 / d)


@pytest.mark.parametrize("n", [1000, 60_000, 10**9])
def test_the_realizable_factor_matches_an_evaluation_with_fifty_digits(n: int) -> None:
    assert realizable_factor(n, 1e-5) == pytest.approx(float(factor_in_mpmath(n, "1e-5")), rel=1e-13)


def test_the_realizable_factor_is_about_21_thousand_for_mnist() -> None:
    assert realizable_factor(60_000, 1e-5) == pytest.approx(21_420, abs=0.5)


def test_realizable_parameters_match_a_calculation_by_hand() -> None:
    """n = 10^8, p = 10^10, ε = 2: √p/(ε√n) = 5, n^{1/4} = 100, n^{3/4} = 10^6."""
    problem = problem_of(10**8, dimension=10**10, epsilon=2.0, delta=1e-9, lipschitz=3.0, smoothness=0.5)
    factor = float(factor_in_mpmath(10**8, "1e-9"))
    asked = realizable_parameters(problem, 4.0)
    assert asked.rounds == pytest.approx(100 * factor, rel=1e-12)
    assert asked.batch == pytest.approx(1e6 / factor, rel=1e-12)
    assert asked.beta == pytest.approx(5 * factor**2 * 3 / 4, rel=1e-12)
    assert asked.clip == pytest.approx(3 * factor, rel=1e-12)
    nodes = math.floor(math.log2(100 * factor)) + 1
    sigma = asked.clip / asked.batch * math.sqrt(nodes) / gdp.mu_of(2.0, 1e-9)
    assert asked.sigma == pytest.approx(sigma, rel=1e-12)
    assert asked.refusal is None
    assert all(holds(asked).values())
    assert asked.whole_batch == math.floor(1e6 / factor)
    assert asked.whole_rounds * asked.whole_batch <= 10**8 < (asked.whole_rounds + 1) * asked.whole_batch


@pytest.mark.parametrize(("records", "dimension", "epsilon"), [(2, 18, 1.5), (8, 18, 0.375)])
def test_a_number_of_rounds_that_is_rounded_below_a_power_of_two_has_all_its_nodes(
    records: int, dimension: int, epsilon: float
) -> None:
    """T = 1.9999999999999996 is a run of two rounds, whose records are in two nodes."""
    settings = non_realizable_parameters(problem_of(records, epsilon=epsilon, dimension=dimension), RADIUS)
    assert settings.whole_rounds > settings.rounds
    nodes = math.floor(math.log2(settings.whole_rounds)) + 1
    sensitivity = settings.clip / settings.batch * math.sqrt(nodes)
    assert gdp.epsilon_of(sensitivity / settings.sigma, settings.problem.delta) <= epsilon * (1 + 1e-9)


def test_realizable_beta_ignores_noise_in_dimension_one() -> None:
    asked = realizable_parameters(problem_of(dimension=1), RADIUS)
    assert asked.beta == pytest.approx(float(factor_in_mpmath(60_000, "1e-5")) ** 2 * 2.0 / 10.0, rel=1e-12)


def test_realizable_parameters_for_mnist_are_refused_with_a_batch_below_one() -> None:
    asked = realizable_parameters(MNIST, RADIUS)
    assert asked.refusal is not None
    assert "335,237 rounds of B = 0.179 examples" in asked.refusal
    assert "n = 60,000" in asked.refusal
    assert not holds(asked)["1 ≤ B"]
    with pytest.raises(InputError, match="B must be 1 or more"):
        _ = asked.whole_batch


def test_realizable_parameters_exist_from_1014903_examples_on() -> None:
    """n^{3/4} = c_DP at δ = 1e-5, solved in mpmath."""
    with mpmath.workdps(30):
        root = mpmath.findroot(lambda n: n**0.75 - factor_in_mpmath(n, "1e-5"), 1e6)
    assert 1_014_902 < float(root) < 1_014_903
    assert realizable_parameters(problem_of(1_014_902), RADIUS).refusal is not None
    assert realizable_parameters(problem_of(1_014_903), RADIUS).refusal is None


def test_non_realizable_parameters_match_a_calculation_by_hand() -> None:
    """c = M R / L = 15: β = (240 + 8) L n^{3/2} / (R n) = 248 · 2 · √n / 10, clip = 124 · 2."""
    asked = non_realizable_parameters(problem_of(40_000), RADIUS)
    assert (asked.rounds, asked.batch) == (pytest.approx(200.0), pytest.approx(200.0))
    assert asked.beta == pytest.approx(248 * 2 * 200 / 10, rel=1e-13)
    assert asked.clip == pytest.approx(248.0, rel=1e-13)
    assert asked.sigma == pytest.approx(248 / 200 * math.sqrt(8) / gdp.mu_of(1.0, 1e-5), rel=1e-12)
    assert (asked.whole_batch, asked.whole_rounds) == (200, 200)
    assert all(holds(asked).values())
    assert asked.refusal is None


@pytest.mark.parametrize(("epsilon", "least"), [(1.0, 1.084), (8.0, 11.94)])
def test_the_printed_noise_of_corollary_9_is_too_small_for_its_epsilon(epsilon: float, least: float) -> None:
    """Guarantee of `sigma`: a tree node's noise by the printed formula, in mpmath, and the ε it really has."""
    asked = realizable_parameters(replace(MNIST, epsilon=epsilon), RADIUS)
    with mpmath.workdps(30):
        spread = mpmath.sqrt(mpmath.log(asked.rounds, 2) * mpmath.log(mpmath.mpf("2.5") / mpmath.mpf("1e-5")))
        printed = float(asked.clip / asked.batch * spread / epsilon)
    assert asked.printed_sigma == pytest.approx(printed, rel=1e-12)
    nodes = math.floor(math.log2(asked.rounds)) + 1
    really = gdp.epsilon_of(math.sqrt(nodes) * asked.clip / asked.batch / printed, 1e-5)
    assert asked.printed_epsilon == pytest.approx(really, rel=1e-9)
    assert least < asked.printed_epsilon < least + 0.01
    assert asked.sigma > asked.printed_sigma


def test_the_printed_noise_of_corollary_13_is_private_and_over_twice_what_is_needed() -> None:
    asked = non_realizable_parameters(replace(MNIST, epsilon=8.0), RADIUS)
    relative = MNIST.smoothness * RADIUS / MNIST.lipschitz
    factor = (16.0 * math.sqrt(2.0) * relative + 8.0 * math.sqrt(2.0)) * MNIST.lipschitz
    log = math.log2(asked.rounds) * math.log(2.5 / 1e-5)
    assert asked.printed_sigma == pytest.approx(factor * math.sqrt(log) / (8.0 * asked.batch), rel=1e-12)
    assert 3.41 < asked.printed_epsilon < 3.42
    assert 2.0 * asked.sigma < asked.printed_sigma


def test_the_theorems_can_be_evaluated_for_a_huge_epsilon() -> None:
    """Before, an OverflowError, as ε² n² is above the largest float."""
    for prescribe in (realizable_parameters, non_realizable_parameters):
        asked = prescribe(problem_of(64, epsilon=1e300), RADIUS)
        assert asked.sigma > asked.printed_sigma > 0.0
        assert holds(asked)["p ≤ ε² n²"]


def test_the_two_bounds_on_the_batch_meet_at_the_largest_dimension_of_the_theorem() -> None:
    n, epsilon = 10_000, 0.01
    limit = round((epsilon * n) ** 2)
    at, beyond = (
        non_realizable_parameters(problem_of(n, epsilon=epsilon, dimension=dimension), RADIUS)
        for dimension in (limit, 4 * limit)
    )
    assert at.batch == pytest.approx(100.0)
    assert holds(at)["p ≤ ε² n²"]
    assert beyond.batch == pytest.approx(50.0)
    assert not holds(beyond)["p ≤ ε² n²"]
    assert beyond.beta == pytest.approx(4 * at.beta)


def test_non_realizable_beta_is_at_least_twice_smoothness_times_rounds() -> None:
    for epsilon, smoothness in itertools.product((1.0, 0.01, 0.001), (1e-3, 1.0, 1e3)):
        # the second bound on B holds from ε = 0.0015 down
        asked = non_realizable_parameters(problem_of(smoothness=smoothness, epsilon=epsilon), RADIUS)
        assert holds(asked)["2 M T ≤ β"]


def test_non_realizable_parameters_with_a_batch_below_one_are_refused() -> None:
    asked = non_realizable_parameters(replace(MNIST, epsilon=1e-6), RADIUS)
    assert asked.batch == pytest.approx(1e-6 * 60_000**1.5 / math.sqrt(7850))
    assert asked.batch < 1.0
    assert asked.refusal is not None


def test_a_delta_above_one_over_n_or_too_large_a_smoothness_breaks_a_condition() -> None:
    assert not holds(realizable_parameters(problem_of(delta=1e-4), RADIUS))["δ ≤ 1/n"]
    assert holds(realizable_parameters(problem_of(delta=1 / 60_000), RADIUS))["δ ≤ 1/n"]
    rough = 1.01 * realizable_parameters(MNIST, RADIUS).beta
    assert not holds(realizable_parameters(problem_of(smoothness=rough), RADIUS))["M ≤ β"]


@pytest.mark.parametrize("key", ["epsilon", "delta", "lipschitz", "smoothness", "radius"])
def test_accelerated_parameters_refuse_constants_of_zero(key: str) -> None:
    changed, radius = (MNIST, 0.0) if key == "radius" else (problem_of(**{key: 0.0}), RADIUS)  # type: ignore[arg-type]
    for theorem in (realizable_parameters, non_realizable_parameters):
        with pytest.raises(InputError, match=key):
            theorem(changed, radius)
