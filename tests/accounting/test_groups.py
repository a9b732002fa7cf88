"""Several units of a sampled run together: always a number, and never below the truth."""

import math

import mpmath as mp
import numpy as np
import pytest
from scipy.stats import binom, norm

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.curves import chain, delta_at, epsilon_at, epsilon_of_chain
from fedpriv.accounting.guarantees import Sampled
from fedpriv.accounting.poisson import GroupJoins, PoissonGaussian
from fedpriv.rounds.claim import bounds_of_several, epsilons_of_several, words_of_several

DELTA = 1e-5


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("run", "two", "eight"),
    [
        (PoissonGaussian(2.0, 0.02, 500), 1.985, 9.97),  # before: unknown, unknown
        (PoissonGaussian(1.0, 0.01, 1000), 3.98, 20.9),  # before: unknown, unknown
        (PoissonGaussian(0.8, 0.005, 200), 1.998, 7.70),  # before: unknown, unknown
        (PoissonGaussian(1.0, 0.01, 100), 1.530, 6.75),  # before: 1.671, unknown
        (AllocatedGaussian(1.0, 60), 2.083, 65.32),  # before: 125.07 for eight
    ],
)
def test_several_records_of_a_sampled_run_always_have_a_number(run: Sampled, two: float, eight: float) -> None:
    """A chain rises again, and was asked at ε = 700 alone: most ordinary runs said "unknown"."""
    found = epsilons_of_several(run, DELTA)
    assert found[2] == pytest.approx(two, rel=2e-3)
    assert found[8] == pytest.approx(eight, rel=2e-3)
    assert "unknown" not in words_of_several(run, DELTA)
    assert all(math.isfinite(each["epsilon"] or math.inf) for each in bounds_of_several(run, DELTA).values())


@pytest.mark.slow
def test_a_number_is_there_beyond_every_curve_too() -> None:
    """No curve comes down to δ below ε = 700: known rounds say how much it is at most."""
    run = PoissonGaussian(0.3, 0.5, 20)
    assert math.isinf(epsilon_of_chain(run.curve, 8, DELTA))
    assert epsilons_of_several(run, DELTA)[8] == pytest.approx(gdp.epsilon_of(8 * run.known_mu, DELTA))


def test_the_smallest_feasible_epsilon_of_a_chain_is_found() -> None:
    run = PoissonGaussian(2.0, 0.02, 500)
    several = chain(run.curve, 8)
    assert delta_at(several, 700.0) > DELTA  # it rises again
    found = epsilon_of_chain(run.curve, 8, DELTA)
    assert found == pytest.approx(11.9594, rel=1e-4)
    assert delta_at(several, found) <= DELTA < delta_at(several, found * (1 - 1e-6))


def _truth(pair: GroupJoins, epsilon: float, removed: bool) -> mp.mpf:
    """The hockey stick of one round in 40 digits, from its definition."""
    with mp.workdps(40):
        z, rate, size = mp.mpf(pair.multiplier), mp.mpf(pair.rate), pair.size
        chances = [mp.binomial(size, j) * rate**j * (1 - rate) ** (size - j) for j in range(size + 1)]
        wanted = mp.mpf(epsilon) * (1 if removed else -1)
        if wanted <= size * mp.log(1 - rate):
            return mp.mpf(1) - mp.e**epsilon if removed else mp.mpf(0)
        low, high = mp.mpf(-400), mp.mpf(400)
        for _ in range(160):
            x = (low + high) / 2
            loss = mp.log(sum(p * mp.e ** ((j * x - mp.mpf(j) ** 2 / 2) / z**2) for j, p in enumerate(chances)))
            low, high = (x, high) if loss < wanted else (low, x)
        if removed:
            found = sum(p * mp.ncdf((j - x) / z) for j, p in enumerate(chances)) - mp.e**epsilon * mp.ncdf(-x / z)
        else:
            found = mp.ncdf(x / z) - mp.e**epsilon * sum(p * mp.ncdf((x - j) / z) for j, p in enumerate(chances))
        return found


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize(("z", "rate", "size"), [(2.0, 0.02, 2), (0.8, 0.005, 8), (5.0, 0.3, 4)])
def test_one_round_of_a_group_is_the_hockey_stick_of_its_mixture(
    z: float, rate: float, size: int, removed: bool
) -> None:
    """dp-accounting's own mixture is low by 1.4e-6 at ε = .335 of the second: its roots are not found closely."""
    pair = GroupJoins(z, rate, size)
    low, high = pair.range_of(removed)
    epsilons = np.array([low, 0.5 * low, 0.0, 0.335, 0.01 * high, 0.1 * high, 0.5 * high])
    for epsilon, found in zip(epsilons, pair.deltas(epsilons, removed), strict=True):
        assert abs(found - float(_truth(pair, float(epsilon), removed))) < 1e-13


def test_a_group_that_always_takes_part_is_gaussian() -> None:
    for size in (1, 3):
        run = PoissonGaussian(4.0, 1.0, 10)
        curve = run.group_curve(size)
        assert curve is not None
        exact = gdp.epsilon_of(size * 10**0.5 / 4.0, DELTA)
        assert exact <= epsilon_at(curve, DELTA) <= exact * 1.001
        assert exact <= epsilons_of_several(PoissonGaussian(4.0 / size, 1.0, 10), DELTA)[2] * (1 + 1e-12)


@pytest.mark.parametrize("size", [2, 8])
def test_replaced_groups_are_never_below_opposite_increments(size: int) -> None:
    """One round, all k records one way in P and the other way in Q: what the printed bound has to cover."""
    z, rate = 1.3, 0.2
    curve = PoissonGaussian(z, rate, 1, "replace-one").group_curve(size)
    assert curve is not None
    x, p = np.linspace(-60.0, 60.0, 240_001), binom.pmf(np.arange(size + 1), size, rate)
    one = sum(weight * norm.pdf(x, j, z) for j, weight in enumerate(p))
    other = sum(weight * norm.pdf(x, -j, z) for j, weight in enumerate(p))
    for epsilon in (0.0, 0.5, 2.0, 6.0, 12.0):
        least = float(np.sum(np.maximum(one - math.exp(epsilon) * other, 0.0)) * (x[1] - x[0]))
        assert delta_at(curve, epsilon) >= least * (1 - 1e-9)


def test_units_in_two_classes_of_rounds_are_no_worse_than_in_one() -> None:
    """What `group_curve` says of classes: (Bin(1), Bin(1)) in two rounds against Bin(2) in one of them."""
    z, rate, draws = 0.8, 0.3, 400_000
    generator = np.random.default_rng(0)
    curve = PoissonGaussian(z, rate, 1).group_curve(2)
    assert curve is not None
    joins = generator.random((draws, 2)) < rate
    released = joins + z * generator.standard_normal((draws, 2))
    losses = np.log1p(rate * np.expm1((released - 0.5) / z**2)).sum(axis=1)
    for epsilon in (0.5, 1.0, 2.0):
        gain = np.maximum(0.0, -np.expm1(epsilon - losses))
        error = 4.0 * gain.std() / draws**0.5  # false alarms below 1e-4
        assert gain.mean() - error <= delta_at(curve, epsilon)
