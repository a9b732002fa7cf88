"""Random allocation under noise that fades, against the laws that it stands for: never below the truth."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.special import ndtr

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
from tests.accounting.builders import RELATIONS, hockey_stick, lags, sampled_losses, sampled_stick
from tests.accounting.falsified import matrix_of, moves_of
from tests.parts import in_parts

DELTA = 1e-5


def cgd(theta: float) -> LambdaCgd:
    return LambdaCgd(1.0, (theta,), (0.0,))


def promised(theta: float, order: RandomAllocation, sigma: float, relation: Relation) -> AllocatedGaussian:
    """What a run promises: through the mechanism and the schedule, as runs do."""
    sums = RunningSums(cgd(theta), Workload(order, 1.0, np.ones(order.rounds)), relation)
    return order.guarantee(sums, sigma)


def moves(theta: float, order: RandomAllocation, sigma: float, group: int) -> Floats:
    """What a record of `group` moves y / σ by, for everything that it may draw; (patterns, T)."""
    return moves_of(matrix_of(cgd(theta), order.rounds), np.ones(order.rounds), order, group, sigma)


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
    order = RandomAllocation(rounds, rounds // epochs, groups)
    sigma = z * math.sqrt(np.sum(matrix_of(cgd(theta), rounds)[:, 0] ** 2))
    run = promised(theta, order, sigma, relation)
    for group in {0, groups - 1}:
        laws = sampled_losses(moves(theta, order, sigma, group), relation, draws, seed=group)
        for epsilon, bound in zip(EPSILONS, run.curve(EPSILONS), strict=True):
            yield epsilon, bound, *max(sampled_stick(law, epsilon) for law in laws)


@pytest.mark.parametrize(
    ("setting", "relation", "draws"),
    in_parts(
        [
            (SETTINGS[0], "zero-out", 4_000),
            *((setting, relation, 60_000) for setting in SETTINGS for relation in RELATIONS),
        ],
        fast=[(SETTINGS[0], "zero-out", 4_000)],
    ),
)
def test_delta_of_random_allocation_under_lambda_cgd_is_never_below_monte_carlo_estimates(
    setting: tuple[float, int, int, float, int], relation: Relation, draws: int
) -> None:
    """The guarantee of `displacement_and_overlap`, in the worst direction of increments.

    Of 60,000 draws a bound 5 % below a δ of 0.05 is seen.
    """
    for epsilon, bound, mean, error in compared(setting, relation, draws):
        assert bound >= mean - 5.0 * error, epsilon


@pytest.mark.every(3)
@pytest.mark.parametrize(("theta", "sigma"), [(0.1, 4.0), (0.5, 0.8), (0.9, 1.5)])
def test_no_adaptive_second_increment_of_two_rounds_exceeds_the_delta_bound(theta: float, sigma: float) -> None:
    """Functions of the first release that have few values are tried, by quadrature: constants, signs, thresholds.

    A record of round 1 moves (y_1, y_2) by (u, θu), one of round 2 by (0, v(y_1)), and which of both is secret.
    """
    run, replaced = (promised(theta, RandomAllocation(2, 2, 1), sigma, relation) for relation in RELATIONS)
    line = np.linspace(-8.5, 8.5, 241)
    weight = np.exp(-0.5 * line**2) * (line[1] - line[0]) / math.sqrt(2.0 * math.pi)
    law, (first, second) = np.outer(weight, weight), np.meshgrid(line, line, indexing="ij")

    def released(u: float, v: Floats) -> Floats:
        one = np.exp((u * first + theta * u * second) / sigma - 0.5 * u * u * (1.0 + theta**2) / sigma**2)
        return 0.5 * law * (one + np.exp(v * second / sigma - 0.5 * v**2 / sigma**2))

    constant = np.ones_like(first)
    rules = [constant, -constant, 0.5 * constant, np.sign(first), np.where(first > 1.0, 1.0, -1.0), np.tanh(first)]
    for epsilon in (0.0, 0.7, 3.0):
        for rule in rules:
            for one, other in ((released(1.0, rule), law), (law, released(1.0, rule))):
                assert hockey_stick(one, other, epsilon) <= delta_at(run.curve, epsilon) + 1e-7
        for rule, other in [(constant, -constant), (np.sign(first), -np.sign(first)), (constant, np.sign(first))]:
            found = hockey_stick(released(1.0, rule), released(-1.0, other), epsilon)
            assert found <= delta_at(replaced.curve, epsilon) + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("relation", RELATIONS)
def test_overlap_near_zero_gives_plain_allocation_and_one_round_gives_a_gaussian_release(
    relation: Relation,
) -> None:
    plain = AllocatedGaussian(1.0, 20, 1, relation).epsilon_of(DELTA)
    assert plain <= AllocatedGaussian(1.0, 20, 1, relation, 1e-9).epsilon_of(DELTA) <= plain * 1.01
    exact = gdp.epsilon_of(RELATION_FACTOR[relation] / 2.0, DELTA)
    one_round = AllocatedGaussian(2.0, 1, 1, relation, 0.4).epsilon_of(DELTA)
    assert exact <= one_round * (1.0 + 1e-12)
    assert one_round <= exact * 1.001
    assert plain < AllocatedGaussian(1.0, 20, 1, relation, 0.4).epsilon_of(DELTA)


@pytest.mark.parametrize("epochs", [1, 3])
def test_mu_of_publicly_known_rounds_is_never_below_the_norm_of_summed_columns(epochs: int) -> None:
    """`known_mu` is never below ‖Σ C_t‖ / σ of any rounds of one record."""
    theta, order, sigma = 0.8, RandomAllocation(12, 12 // epochs, 2), 1.7
    run = promised(theta, order, sigma, "zero-out")
    for group in range(order.groups):
        longest = np.linalg.norm(moves(theta, order, sigma, group), axis=1).max()
        assert run.known_mu >= longest * (1.0 - 1e-12)


def test_overlap_of_two_one_round_epochs_is_counted_for_every_pair_of_rounds() -> None:
    """Two epochs of one round each: nothing is secret, and both columns add up to 2 (v + a)."""
    run = AllocatedGaussian(2.0, 1, 2, "zero-out", 0.5)
    known = gdp.epsilon_of(math.sqrt(2 * (1.0 + 0.5)) / 2.0, DELTA)
    assert known * (1.0 - 1e-9) <= run.epsilon_of(DELTA) <= known * 1.001
    assert run.common_mu == pytest.approx(2 * math.sqrt(0.5) / 2.0)
    for direction in removal_and_addition_curves(run):
        assert delta_at(direction, known) >= DELTA * (1.0 - 1e-6)


def test_the_overlap_of_all_rounds_is_known_and_the_remaining_noise_is_larger() -> None:
    """√(epochs (1 + 3/2)) of known rounds, epochs √(1/2) of the overlap, and z √2, by hand for z = 2."""
    run = AllocatedGaussian(2.0, 10, 4, "replace-one", 0.5)
    assert run.known_mu == pytest.approx(math.sqrt(4 * 2.5), rel=1e-14)
    assert run.common_mu == pytest.approx(4.0 * math.sqrt(0.5), rel=1e-14)
    part = run.independent_part
    assert (part.bins, part.epochs, part.relation, part.common_share) == (10, 4, "replace-one", 0.0)
    assert 2.0 * math.sqrt(2.0) * (1.0 - 1e-14) <= part.noise_multiplier <= 2.0 * math.sqrt(2.0)


def test_composing_a_loss_distribution_with_a_gaussian_never_underestimates_delta() -> None:
    """Two Gaussians are one of √(μ² + ν²), as they stand and after a step of a lattice."""
    for mu, nu in ((0.3, 0.4), (1.0, 0.05), (0.05, 2.0)):
        empty = PrivacyLossDistribution(np.array([0.0]), np.array([1.0]), 0.0)
        both = compose_with_gaussian(compose_with_gaussian(empty, mu), nu)
        epsilons, norm = np.array([-1.0, -0.1, 0.0, 0.1, 0.5, 1.0, 2.0, 4.0]), math.hypot(mu, nu)
        exact = ndtr(norm / 2 - epsilons / norm) - np.exp(epsilons) * ndtr(-norm / 2 - epsilons / norm)
        found = both.deltas(epsilons)
        assert np.all(found >= exact)
        assert np.all(found <= exact + 2e-3 * exact + 1e-9)


@pytest.mark.slow
def test_calibration_with_overlap_meets_the_epsilon_target_and_needs_more_noise() -> None:
    run = calibrate(1.0, DELTA, 10, 1, "zero-out", 0.3)
    assert 0.99 <= run.epsilon_of(DELTA) <= 1.0
    assert run.noise_multiplier > calibrate(1.0, DELTA, 10).noise_multiplier


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    ("order", "exact"), [(PoissonSampling(12, 12, 4), False), (RandomAllocation(12, 12, 4), True)]
)
def test_unending_correlated_noise_is_refused_for_poisson_sampling_and_on_integers(
    relation: Relation, order: PoissonSampling | RandomAllocation, exact: bool
) -> None:
    sums = RunningSums(cgd(0.9), Workload(order, 1.0, np.ones(12)), relation, exact=exact)
    with pytest.raises(InputError, match="fades and never ends, by Poisson sampling or on integers"):
        order.guarantee(sums, 1.0)


def test_displacement_and_overlap_match_the_strategy_matrix_weighted_by_clips() -> None:
    """κ² and the largest ⟨C_s, C_t⟩ clip_s clip_t of two rounds of a group, from the matrix itself."""
    clips = np.array([1.0, 3.0, 0.5, 2.0, 4.0, 1.0, 0.2, 2.0, 1.0, 1.0, 2.0, 0.7])
    mechanism = BufferedToeplitz(1.0, (0.9, 0.4), (0.6, 0.1))
    workload = Workload(RandomAllocation(12, 12, 3), 1.0, clips)
    matrix = matrix_of(mechanism, 12)
    products = (matrix.T @ matrix) * np.outer(clips, clips)
    apart = (lags(12) != 0) & (lags(12) % 3 == 0)
    clip, common = RunningSums(mechanism, workload, "zero-out").displacement_and_overlap(3)
    assert clip == pytest.approx(math.sqrt(products.diagonal().max()), rel=1e-12)
    assert clip**2 * common == pytest.approx(products[apart].max(), rel=1e-9)
    assert clip**2 * common >= products[apart].max()
