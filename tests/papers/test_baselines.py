"""The parameters of the baselines, by hand and against brute force."""

import math

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.papers import noisy_minibatch, phased
from fedpriv.papers.base import Condition, Problem
from fedpriv.papers.online_to_batch import increment_bound
from fedpriv.papers.table import find_algorithm
from fedpriv.participation.orders import FixedOrder


def failing(conditions: tuple[Condition, ...]) -> list[str]:
    return [condition.text for condition in conditions if not condition.holds]


def test_phase_lengths_halve_and_phase_steps_quarter() -> None:
    assert [phased.phase_step_factor(i) for i in (1, 2, 3)] == [0.25, 0.0625, 0.015625]
    assert phased.make_phases(64).lengths == (32, 16, 8, 4, 2, 1)
    assert phased.make_phases(60_000, batch=250).lengths == (120, 60, 30, 15, 7, 3, 1)


@pytest.mark.parametrize(("examples", "batch"), [(100, 1), (1000, 7), (60_000, 600)])
def test_phases_never_use_more_examples_than_exist(examples: int, batch: int) -> None:
    assert phased.make_phases(examples, batch).rounds_per_epoch * batch < examples


@pytest.mark.parametrize(("examples", "batch"), [(1, 1), (10, 6), (10, 0)])
def test_too_few_examples_for_a_phase_are_refused(examples: int, batch: int) -> None:
    with pytest.raises(InputError, match="two batches"):
        phased.make_phases(examples, batch)


def test_the_suggested_step_of_phased_sgd_matches_a_calculation_by_hand() -> None:
    """(D/L) min{4/100, μ/(2·10)} = 2·min{0.04, μ/20}."""
    assert phased.suggested_step(10_000, 100, lipschitz=3.0, diameter=6.0, mu=4.0) == pytest.approx(0.08)
    assert phased.suggested_step(10_000, 100, lipschitz=3.0, diameter=6.0, mu=0.2) == pytest.approx(0.02)


def test_the_first_phase_may_step_up_to_two_over_smoothness() -> None:
    assert failing(phased.step_conditions(step=8.0, smoothness=1.0)) == []
    assert failing(phased.step_conditions(step=8.1, smoothness=1.0)) == ["η/4 ≤ 2/smoothness"]


def test_noisy_minibatch_parameters_match_a_calculation_by_hand() -> None:
    """n = 100, R = 25, ε = 4, δ = e^-2, L = 3: σ² = 8·9·25·2/(10⁴·16), K = 100·√(4/100)."""
    setting = noisy_minibatch.parameters_by_moments(100, 25, 4.0, math.exp(-2.0), 3.0)
    assert setting.sigma**2 == pytest.approx(8 * 9 * 25 * 2 / 160_000)
    assert setting.batch == 20
    assert failing(setting.conditions) == []
    larger = noisy_minibatch.parameters_by_moments(100, 25, 4.1, math.exp(-2.0), 3.0)
    assert failing(larger.conditions) == ["ε ≤ 2 ln(1/δ)"]


def test_noisy_minibatch_parameters_by_advanced_composition_match_a_calculation_by_hand() -> None:
    """δ = 2 e^-8: K = 1000·2/(4·√(2·36·8)) = 20.8, σ² = 256·36·ln(2.5·36·20/(1000 δ))·8/(10⁶·4)."""
    delta = 2.0 * math.exp(-8.0)
    setting = noisy_minibatch.parameters_by_advanced_composition(1000, 36, 2.0, delta, 1.0)
    assert setting.batch == 20
    assert setting.sigma**2 == pytest.approx(256 * 36 * (math.log(1.8 / 2) + 8) * 8 / 4e6)
    assert failing(setting.conditions) == []


def test_few_rounds_break_the_batch_condition_and_a_small_epsilon_gives_batch_one() -> None:
    setting = noisy_minibatch.parameters_by_moments(100, 1, 5.0, 1e-5, 1.0)
    assert setting.batch == 111
    assert failing(setting.conditions) == ["K ≤ n"]
    assert noisy_minibatch.parameters_by_moments(100, 1000, 1e-9, 1e-5, 1.0).batch == 1


@pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
def test_online_to_batch_increments_stay_below_their_bound(power: float) -> None:
    """Random Huber losses, G-Lipschitz and H-smooth; queries are averages of points on a ball of diameter D."""
    generator = np.random.default_rng(5)
    lipschitz, smoothness, diameter, rounds, dimension = 2.0, 3.0, 1.5, 60, 4
    largest = 0.0
    for _ in range(50):
        average, before = np.zeros(dimension), np.zeros(dimension)
        weights = np.arange(rounds + 1, dtype=np.float64) ** power
        for t in range(1, rounds + 1):
            point = generator.normal(size=dimension)
            point *= diameter / 2 / np.linalg.norm(point)
            before, average = average, average + weights[t] / weights[1 : t + 1].sum() * (point - average)
            direction = generator.normal(size=dimension)
            direction /= np.linalg.norm(direction)

            def gradient(x: np.ndarray, along: np.ndarray = direction) -> np.ndarray:
                return np.clip(smoothness * (x @ along), -lipschitz, lipschitz) * along

            increment = weights[t] * gradient(average) - weights[t - 1] * gradient(before)
            bound = increment_bound(t, power, lipschitz, smoothness, diameter)
            largest = max(largest, float(np.linalg.norm(increment)) / bound)
    assert 0.1 < largest <= 1.0


def test_the_increment_bound_of_linear_weights_is_that_of_dp_mu2_fl() -> None:
    assert increment_bound(17, 1.0, 39.6, 392.5, 0.1) == pytest.approx(39.6 + 2 * 392.5 * 0.1)


def test_conditions_that_are_equalities_hold_despite_rounding() -> None:
    assert Condition("", 0.1 + 0.2, 0.3).holds
    assert not Condition("", 0.3 + 1e-9, 0.3).holds


def test_online_to_batch_gives_a_reason_where_a_convex_loss_has_no_smoothness() -> None:
    """A user's hinge loss, say: the command about theorems ended with an error."""
    row = find_algorithm("online-to-batch")
    settings = row.settings.model_validate({"clip": 1.0, "step": 0.1, "radius": 1.0})
    problem = Problem(10, 1.0, math.inf, True, 4, FixedOrder(16, 16), epsilon=1.0, convex_within=math.inf)
    (prescription,) = row.theorems(settings, problem)
    assert not prescription.numbers
    assert str(prescription.refusal).startswith("smoothness = inf")


def test_a_linear_loss_puts_no_condition_on_the_step_of_phased_sgd() -> None:
    """Its smoothness is 0, by which the condition was divided."""
    row = find_algorithm("phased-sgd")
    settings = row.settings.model_validate({"step": 0.1, "radius": 1.0})
    problem = Problem(10, 1.0, 0.0, True, 4, FixedOrder(16, 16), epsilon=1.0, convex_within=math.inf)
    (prescription,) = row.theorems(settings, problem)
    assert prescription.refusal is None
    assert prescription.conditions == ()
