"""Poisson sampling under zero-out: against Rényi accounting, the exact unsampled Gaussian, and by monotonicity."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp as their_rdp

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.poisson import PoissonGaussian, calibrated
from fedpriv.core.errors import InputError

DELTA = 1e-5


def renyi_epsilon(mechanism: PoissonGaussian, delta: float) -> float:
    accountant = their_rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(
        mechanism.sampling_rate, dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
    )
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, mechanism.rounds))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(("multiplier", "rounds"), [(2.0, 1), (2.0, 4), (5.0, 16)])
def test_without_sampling_it_is_the_exact_gaussian_on_the_safe_side(multiplier: float, rounds: int) -> None:
    mu = np.sqrt(rounds) / multiplier
    mechanism = PoissonGaussian(multiplier, 1.0, rounds)
    exact = gdp.epsilon_of(mu, DELTA)
    assert exact - 1e-7 <= mechanism.epsilon_of(DELTA) <= exact + 1e-4
    assert gdp.delta_of(mu, 1.0) * (1 - 1e-7) <= mechanism.delta_of(1.0) <= gdp.delta_of(mu, 1.0) * 1.001


@pytest.mark.parametrize(("multiplier", "rate", "rounds"), [(1.0, 0.01, 600), (2.0, 0.05, 100), (4.0, 0.1, 400)])
def test_it_is_tighter_than_renyi_and_far_below_no_sampling(multiplier: float, rate: float, rounds: int) -> None:
    mechanism = PoissonGaussian(multiplier, rate, rounds)
    renyi = renyi_epsilon(mechanism, DELTA)
    assert 0.7 * renyi < mechanism.epsilon_of(DELTA) < renyi
    assert mechanism.epsilon_of(DELTA) < 0.5 * gdp.epsilon_of(np.sqrt(rounds) / multiplier, DELTA)


def test_one_round_is_the_closed_form_of_both_directions() -> None:
    """Removing: q·N(1, σ²) + (1-q)·N(0, σ²) against N(0, σ²); adding: the reverse.  Integrated on a fine grid."""
    multiplier, rate, epsilon = 0.8, 0.2, 0.5
    points = np.linspace(-12.0, 14.0, 400_001)
    without = np.exp(-((points / multiplier) ** 2) / 2)
    with_it = rate * np.exp(-(((points - 1) / multiplier) ** 2) / 2) + (1 - rate) * without
    scale = (points[1] - points[0]) / (multiplier * np.sqrt(2 * np.pi))
    removing = scale * np.sum(np.maximum(with_it - np.exp(epsilon) * without, 0.0))
    adding = scale * np.sum(np.maximum(without - np.exp(epsilon) * with_it, 0.0))
    expected = max(removing, adding)
    delta = PoissonGaussian(multiplier, rate, 1).delta_of(epsilon)
    assert expected * (1 - 1e-6) <= delta <= expected * 1.001


def test_more_noise_less_sampling_and_fewer_rounds_cost_less() -> None:
    base = PoissonGaussian(1.5, 0.02, 100).epsilon_of(DELTA)
    assert PoissonGaussian(1.6, 0.02, 100).epsilon_of(DELTA) < base
    assert PoissonGaussian(1.5, 0.019, 100).epsilon_of(DELTA) < base
    assert PoissonGaussian(1.5, 0.02, 99).epsilon_of(DELTA) < base
    assert PoissonGaussian(1.5, 0.02, 100).epsilon_of(10 * DELTA) < base


@pytest.mark.parametrize(("epsilon", "rate", "rounds"), [(1.0, 0.05, 100), (4.0, 0.1, 50)])
def test_calibration_ends_on_the_safe_side_and_not_far_from_it(epsilon: float, rate: float, rounds: int) -> None:
    mechanism = calibrated(epsilon, DELTA, rate, rounds)
    assert mechanism.epsilon_of(DELTA) <= epsilon
    less = PoissonGaussian(mechanism.noise_multiplier * (1 - 1.1e-4), rate, rounds)
    assert less.epsilon_of(DELTA) > epsilon


@pytest.mark.parametrize(
    ("multiplier", "rate", "rounds", "named"),
    [
        (0.0, 0.1, 1, "noise_multiplier"),
        (1.0, 0.0, 1, "sampling_rate"),
        (1.0, 1.1, 1, "sampling_rate"),
        (1.0, 0.1, 0, "rounds"),
    ],
)
def test_what_means_nothing_is_refused(multiplier: float, rate: float, rounds: int, named: str) -> None:
    with pytest.raises(InputError, match=named):
        PoissonGaussian(multiplier, rate, rounds)


@pytest.mark.parametrize(
    ("multiplier", "rate", "rounds", "golden"),
    [(2.0, 1 / 60, 1200, 1.199365861), (1.5, 0.25, 8, 2.814557826)],
)
def test_golden_epsilon_below_renyi(multiplier: float, rate: float, rounds: int, golden: float) -> None:
    """The figures of dp-accounting 0.6 at a step of 1e-4, to a relative 1e-4, and a bound by Rényi accounting."""
    mechanism = PoissonGaussian(multiplier, rate, rounds)
    assert mechanism.epsilon_of(DELTA) == pytest.approx(golden, rel=1e-4)
    assert mechanism.epsilon_of(DELTA) < renyi_epsilon(mechanism, DELTA)
