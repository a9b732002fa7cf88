"""One round under Poisson sampling, and compositions of rounds, beside dp-accounting, which has both elsewhere."""

import math

import numpy as np
import pytest
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_mechanism as theirs

from fedpriv.accounting.losses import _CUT_MASS, _self_convolve
from fedpriv.accounting.poisson import PoissonGaussian, _round_deltas, _RoundHockeyStick

ORDERS = ("REMOVE", "ADD", "REPLACE")
RATES = (1.0, 0.999, 0.5, 0.1, 0.01, 1e-4, 1e-7)
MULTIPLIERS = (0.05, 0.3, 0.7, 1.0, 2.0, 10.0, 300.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rate", RATES)
def test_one_round_hockey_stick_matches_dp_accounting(rate: float, order: str) -> None:
    """Guarantee: no δ of a round is below dp-accounting's by more than rounding, at any ε on the grid's range."""
    for z in MULTIPLIERS:
        pair = theirs.GaussianPrivacyLoss(z, sampling_prob=rate, adjacency_type=theirs.AdjacencyType[order])
        bounds = pair.connect_dots_bounds()
        ends = max(bounds.epsilon_lower, -700.0), min(bounds.epsilon_upper, 700.0)
        epsilons = np.concatenate([np.linspace(*ends, 801), [0.0], np.linspace(-1e-3, 1e-3, 11)])
        with np.errstate(all="ignore"):
            expected = np.asarray(pair.get_delta_for_epsilon(epsilons))
        deltas = _round_deltas(epsilons, rate, z, order)
        assert np.all(np.isfinite(deltas))
        assert float(np.max(np.abs(deltas - expected))) < 2e-15, (z, rate)
        large = expected > 1e-10
        assert np.allclose(deltas[large], expected[large], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("order", ORDERS)
def test_sampling_rates_next_to_one_have_finite_deltas_close_to_those_of_rate_one(order: str) -> None:
    """There dp-accounting raises ValueError; between a rate of 1 and one below nothing jumps."""
    epsilons = np.linspace(-30.0, 30.0, 1201)
    deltas = [_round_deltas(epsilons, rate, 1.0, order) for rate in (1.0 - 1e-15, 1.0 - 1e-12, 1.0)]
    assert all(np.all(np.isfinite(values)) for values in deltas)
    assert np.max(np.abs(deltas[0] - deltas[2])) < 1e-11
    assert np.max(np.abs(deltas[1] - deltas[2])) < 1e-11


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rate", [0.999, 0.5, 0.01, 1e-4])
def test_range_of_one_round_losses_matches_dp_accounting(rate: float, order: str) -> None:
    for z in MULTIPLIERS:
        pair = theirs.GaussianPrivacyLoss(z, sampling_prob=rate, adjacency_type=theirs.AdjacencyType[order])
        bounds, stick = pair.connect_dots_bounds(), _RoundHockeyStick.from_mechanism(mechanism(rate, z), order)
        assert stick.low == pytest.approx(bounds.epsilon_lower, rel=1e-8)
        assert stick.high == pytest.approx(bounds.epsilon_upper, rel=1e-8)


def mechanism(rate: float, z: float) -> PoissonGaussian:
    return PoissonGaussian(z, rate, 1, "zero-out")


@pytest.mark.parametrize(
    ("count", "times", "bend"), [(2, 1, 0.0), (50, 3, 0.0), (1000, 100, 0.0), (4000, 600, 0.0), (1000, 10, 4.0)]
)
def test_self_convolution_equals_that_of_dp_accounting_bit_for_bit(count: int, times: int, bend: float) -> None:
    """Of masses that end abruptly, and of a bell, whose tails are cut by the largest orders."""
    masses = np.random.default_rng(count).random(count)
    masses *= np.exp(-0.5 * (bend * np.linspace(-1.0, 1.0, count)) ** 2)
    masses /= 1.001 * masses.sum()
    low, composed = common.self_convolve(masses, times, _CUT_MASS)
    cut, mine = _self_convolve(masses, times)
    assert cut == low
    assert np.array_equal(mine, np.asarray(composed))
    assert math.isclose(float(mine.sum()), 1.001**-times, rel_tol=1e-9)
