"""Random allocation under noise that fades, against the laws that it stands for: never below the truth."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.allocation import AllocatedGaussian, calibrate, removal_and_addition_curves
from fedpriv.accounting.curves import Floats, delta_at
from fedpriv.accounting.fading import compose_with_gaussian
from fedpriv.accounting.gaussian import RELATION_FACTOR, Relation
from fedpriv.accounting.losses import PrivacyLossDistribution
from fedpriv.core.errors import InputError
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.series import Workload
from fedpriv.participation.secret import PoissonSampling, RandomAllocation
from fedpriv.plan.sums import RunningSums

DELTA = 1e-5


def powers(theta: float, rounds: int) -> Floats:
    """C of λ-CGD: (C)_rt = θ^(r-t)."""
    lag = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return np.where(lag >= 0, theta ** np.maximum(lag, 0.0), 0.0)


def promised(
    theta: float, rounds: int, groups: int, sigma: float, epochs: int, relation: Relation
) -> AllocatedGaussian:
    """What a run promises: through the mechanism and the schedule, as runs do."""
    mechanism = LambdaCgd(1.0, (theta,), (0.0,))
    order = RandomAllocation(rounds, rounds // epochs, groups)
    sums = RunningSums(mechanism, Workload(order, 1.0, np.ones(rounds)), relation)
    return order.guarantee(sums, sigma)


def exponents(columns: Floats, chosen: Floats, sign: float) -> Floats:
    """ln of the likelihood ratio of every pattern: `columns` (patterns, T), releases `chosen` (n, T) over σ."""
    return sign * chosen @ columns.T - 0.5 * np.sum(columns**2, axis=1)


def sampled(columns: Floats, relation: Relation, epsilons: Floats, draws: int, seed: int) -> tuple[Floats, Floats]:
    """Hockey sticks of the true pair at every ε, in the worst order, and their standard errors, by sampling."""
    generator = np.random.default_rng(seed)
    released = generator.standard_normal((draws, columns.shape[1]))
    moved = released + columns[generator.integers(len(columns), size=draws)]

    def loss(at: Floats) -> Floats:
        first = np.logaddexp.reduce(exponents(columns, at, 1.0), axis=1)
        if relation == "replace-one":
            return np.asarray(first - np.logaddexp.reduce(exponents(columns, at, -1.0), axis=1))
        return np.asarray(first - math.log(len(columns)))

    laws = [loss(moved)] if relation == "replace-one" else [loss(moved), -loss(released)]
    gains = [np.maximum(0.0, -np.expm1(epsilons[:, None] - law)) for law in laws]
    means = np.array([gain.mean(axis=1) for gain in gains])
    errors = np.array([gain.std(axis=1) for gain in gains]) / math.sqrt(draws)
    worst = np.argmax(means, axis=0)
    place = np.arange(len(epsilons))
    return means[worst, place], errors[worst, place]


def patterns(theta: float, rounds: int, groups: int, sigma: float, epochs: int, first: int) -> Floats:
    """What a record of group `first` moves y / σ by, for everything that it may draw; (patterns, T)."""
    matrix, epoch = powers(theta, rounds), rounds // epochs
    own = [range(e * epoch + first, (e + 1) * epoch, groups) for e in range(epochs)]
    found = [np.zeros((1, rounds))]
    for each in own:
        found.append((found[-1][:, None, :] + matrix[:, list(each)].T[None]).reshape(-1, rounds))
    return np.asarray(found[-1] / sigma)


SETTINGS = [  # θ, T, groups, σ over the longest column's norm, epochs
    (0.3, 8, 1, 1.0, 1),
    (0.5, 6, 1, 2.0, 1),
    (0.9, 12, 3, 1.5, 1),
    (0.95, 60, 12, 1.2, 1),
    (0.95, 60, 20, 0.8, 1),
    (0.7, 40, 4, 1.0, 1),
    (0.8, 12, 2, 2.0, 2),
    (0.6, 27, 3, 3.0, 3),
]
EPSILONS = np.array([0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0])


def compared(
    setting: tuple[float, int, int, float, int], relation: Relation, draws: int
) -> Iterator[tuple[float, ...]]:
    """ε, what is promised, the truth by sampling and its standard error, for the first and the last group."""
    theta, rounds, groups, z, epochs = setting
    sigma = z * math.sqrt(np.sum(powers(theta, rounds)[:, 0] ** 2))
    run = promised(theta, rounds, groups, sigma, epochs, relation)
    for first in {0, groups - 1}:
        columns = patterns(theta, rounds, groups, sigma, epochs, first)
        means, errors = sampled(columns, relation, EPSILONS, draws, seed=first)
        yield from zip(EPSILONS, run.curve(EPSILONS), means, errors, strict=True)


@pytest.mark.every(4)
@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[6]], ids=str)
def test_allocation_under_fading_noise_is_never_below_samples(
    setting: tuple[float, int, int, float, int], relation: Relation
) -> None:
    """The guarantee of `displacement_and_overlap`, in the worst direction of increments."""
    for epsilon, bound, mean, error in compared(setting, relation, 4_000):
        assert bound >= mean - 5.0 * error, epsilon


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_allocation_under_fading_noise_is_never_below_many_samples(
    setting: tuple[float, int, int, float, int], relation: Relation
) -> None:
    for epsilon, bound, mean, error in compared(setting, relation, 200_000):
        assert bound >= mean - 5.0 * error, epsilon


def integrated(ratio: Floats, law: Floats, epsilon: float) -> tuple[float, float]:
    """Both hockey sticks of ratio·law and law on a grid."""
    gamma = math.exp(epsilon)
    return float(np.sum(np.maximum(ratio - gamma, 0.0) * law)), float(
        np.sum(np.maximum(1.0 - gamma * ratio, 0.0) * law)
    )


@pytest.mark.parametrize(("theta", "sigma"), [(0.1, 4.0), (0.5, 0.8), (0.9, 1.5)])
def test_no_increments_of_two_rounds_do_better_however_they_follow_the_first_release(
    theta: float, sigma: float
) -> None:
    """Functions of the first release that have few values are tried, by quadrature: constants, signs, thresholds.

    A record of round 1 moves (y_1, y_2) by (u, θu), one of round 2 by (0, v(y_1)), and which of both is secret.
    """
    run = promised(theta, 2, 1, sigma, 1, "zero-out")
    replaced = promised(theta, 2, 1, sigma, 1, "replace-one")
    line = np.linspace(-8.5, 8.5, 241)
    weight = np.exp(-0.5 * line**2) * (line[1] - line[0]) / math.sqrt(2.0 * math.pi)
    law, (first, second) = np.outer(weight, weight), np.meshgrid(line, line, indexing="ij")

    def ratio(u: float, v: Floats) -> Floats:
        one = np.exp((u * first + theta * u * second) / sigma - 0.5 * u * u * (1.0 + theta**2) / sigma**2)
        return 0.5 * (one + np.exp(v * second / sigma - 0.5 * v**2 / sigma**2))

    constant = np.ones_like(first)
    rules = [constant, -constant, 0.5 * constant, np.sign(first), np.where(first > 1.0, 1.0, -1.0), np.tanh(first)]
    for epsilon in (0.0, 0.7, 3.0):
        for rule in rules:
            both = integrated(ratio(1.0, rule), law, epsilon)
            assert max(both) <= delta_at(run.curve, epsilon) + 1e-7
        for rule, other in [(constant, -constant), (np.sign(first), -np.sign(first)), (constant, np.sign(first))]:
            difference = ratio(1.0, rule) - math.exp(epsilon) * ratio(-1.0, other)
            found = float(np.sum(np.maximum(difference, 0.0) * law))
            assert found <= delta_at(replaced.curve, epsilon) + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_without_overlap_it_is_allocation_and_in_one_round_it_is_gaussian(relation: Relation) -> None:
    plain = AllocatedGaussian(1.0, 20, 1, relation).epsilon_of(DELTA)
    assert plain <= AllocatedGaussian(1.0, 20, 1, relation, 1e-9).epsilon_of(DELTA) <= plain * 1.01
    exact = gdp.epsilon_of(RELATION_FACTOR[relation] / 2.0, DELTA)
    for common in (0.4,):
        assert exact <= AllocatedGaussian(2.0, 1, 1, relation, common).epsilon_of(DELTA) * (1.0 + 1e-12)
        assert AllocatedGaussian(2.0, 1, 1, relation, common).epsilon_of(DELTA) <= exact * 1.001
        assert plain < AllocatedGaussian(1.0, 20, 1, relation, common).epsilon_of(DELTA)


@pytest.mark.parametrize("epochs", [1, 3])
def test_rounds_that_everybody_knows_cost_what_columns_add_up_to(epochs: int) -> None:
    """`known_mu` is never below ‖Σ C_t‖ / σ of any rounds of one record."""
    theta, rounds, groups, sigma = 0.8, 12, 2, 1.7
    run = promised(theta, rounds, groups, sigma, epochs, "zero-out")
    for first in range(groups):
        longest = np.linalg.norm(patterns(theta, rounds, groups, sigma, epochs, first), axis=1).max()
        assert run.known_mu >= longest * (1.0 - 1e-12)


def test_overlaps_between_epochs_count_as_often_as_there_are_pairs() -> None:
    """Two epochs of one round each: nothing is secret, and both columns add up to 2 (v + a)."""
    run = AllocatedGaussian(2.0, 1, 2, "zero-out", 0.5)
    known = gdp.epsilon_of(math.sqrt(2 * (1.0 + 0.5)) / 2.0, DELTA)
    assert known * (1.0 - 1e-9) <= run.epsilon_of(DELTA) <= known * 1.001
    assert run.common_mu == pytest.approx(2 * math.sqrt(0.5) / 2.0)
    for direction in removal_and_addition_curves(run):
        assert delta_at(direction, known) >= DELTA * (1.0 - 1e-6)


def test_a_gaussian_beside_a_law_is_never_below_both_together() -> None:
    """Two Gaussians are one of √(μ² + ν²), as they stand and after a step of a lattice."""
    for mu, nu in ((0.3, 0.4), (1.0, 0.05), (0.05, 2.0)):
        empty = PrivacyLossDistribution(np.array([0.0]), np.array([1.0]), 0.0)
        both = compose_with_gaussian(compose_with_gaussian(empty, mu), nu)
        epsilons = np.array([-1.0, -0.1, 0.0, 0.1, 0.5, 1.0, 2.0, 4.0])
        exact = gdp_curve(math.hypot(mu, nu), epsilons)
        found = both.deltas(epsilons)
        assert np.all(found >= exact)
        assert np.all(found <= exact + 2e-3 * exact + 1e-9)


def gdp_curve(mu: float, epsilons: Floats) -> Floats:
    from scipy.special import ndtr

    return np.asarray(ndtr(mu / 2 - epsilons / mu) - np.exp(epsilons) * ndtr(-mu / 2 - epsilons / mu))


def test_calibrated_noise_keeps_what_it_is_asked_for() -> None:
    run = calibrate(1.0, DELTA, 10, 1, "zero-out", 0.3)
    assert 0.99 <= run.epsilon_of(DELTA) <= 1.0
    assert run.noise_multiplier > calibrate(1.0, DELTA, 10).noise_multiplier


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_what_nobody_has_proved_is_refused(relation: Relation) -> None:
    """Poisson sampling, and integers."""
    mechanism, clips = LambdaCgd(1.0, (0.9,), (0.0,)), np.ones(12)
    sums = RunningSums(mechanism, Workload(PoissonSampling(12, 12, 4), 1.0, clips), relation)
    with pytest.raises(InputError, match="fades and never ends, by Poisson sampling or on integers"):
        PoissonSampling(12, 12, 4).guarantee(sums, 1.0)
    exact = RunningSums(mechanism, Workload(RandomAllocation(12, 12, 4), 1.0, clips), relation, exact=True)
    with pytest.raises(InputError, match="fades and never ends, by Poisson sampling or on integers"):
        RandomAllocation(12, 12, 4).guarantee(exact, 1.0)


def test_overlaps_are_those_of_the_strategy_and_clips_count() -> None:
    """κ² and the largest ⟨C_s, C_t⟩ clip_s clip_t of two rounds of a group, from the matrix itself."""
    clips = np.array([1.0, 3.0, 0.5, 2.0, 4.0, 1.0, 0.2, 2.0, 1.0, 1.0, 2.0, 0.7])
    mechanism = BufferedToeplitz(1.0, (0.9, 0.4), (0.6, 0.1))
    workload = Workload(RandomAllocation(12, 12, 3), 1.0, clips)
    coefficients = mechanism.strategy_series(12)
    lag = np.subtract.outer(np.arange(12), np.arange(12))
    matrix = np.where(lag >= 0, coefficients[np.maximum(lag, 0)], 0.0)
    products = (matrix.T @ matrix) * np.outer(clips, clips)
    apart = (lag != 0) & (lag % 3 == 0)
    clip, common = RunningSums(mechanism, workload, "zero-out").displacement_and_overlap(3)
    assert clip == pytest.approx(math.sqrt(products.diagonal().max()), rel=1e-12)
    assert clip**2 * common == pytest.approx(products[apart].max(), rel=1e-9)
    assert clip**2 * common >= products[apart].max()
