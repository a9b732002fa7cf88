"""Allocation along chains: never below the truth, above any overlaps, and rounded to the safe side."""

import functools
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fedpriv.accounting import chain as chains
from fedpriv.accounting import fading
from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.curves import Curve, Floats, gaussian_curve, lower_gaussian_curve
from fedpriv.accounting.gaussian import Relation, mu_of
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.series import Workload
from fedpriv.participation.secret import BalancedSubsampling, RandomAllocation
from fedpriv.plan.sums import RunningSums
from tests.accounting.builders import chain_of, hockey_stick, lags, require, sampled_losses, sampled_stick
from tests.accounting.falsified import matrix_of, moves_of
from tests.parts import in_parts

EPSILONS = np.array([0.0, 0.2, 0.5, 1.0, 1.7, 2.5, 4.0])


def quadrature(chain: chains.CovarianceChain) -> tuple[Curve, Curve, Curve]:
    """Removed, added and replaced of a chain of one, two or three rounds, all patterns of a grid."""
    line = np.linspace(-9.0, 9.0, (0, 6001, 601, 81)[len(chain.variances)])
    weight = np.exp(-0.5 * line**2) * (line[1] - line[0]) / math.sqrt(2.0 * math.pi)
    covariances = chain.covariances
    root = np.linalg.cholesky(covariances)
    axes = np.meshgrid(*[line] * len(covariances), indexing="ij")
    exponents = [sum(root[i, j] * axes[j] for j in range(i + 1)) for i in range(len(covariances))]
    halves = covariances.diagonal() / 2.0
    law = functools.reduce(np.multiply.outer, [weight] * len(covariances))
    one, other = (
        law * np.mean([np.exp(sign * e - h) for e, h in zip(exponents, halves, strict=True)], axis=0)
        for sign in (1.0, -1.0)
    )

    def curve(first: Floats, second: Floats) -> Curve:
        return lambda epsilons: np.array([hockey_stick(first, second, epsilon) for epsilon in epsilons])

    return curve(one, law), curve(law, one), curve(one, other)


@pytest.mark.parametrize(
    ("rounds", "decay", "first"),
    [
        (1, 0.0, 4.0), (1, 0.0, 1e-4), (2, 0.01, 0.6), (2, 0.6, 4.0), (2, 0.6, 1e-4), (2, 0.999, 0.05),
        (3, 0.7, 0.6),
    ],
)  # fmt: skip
def test_delta_bound_of_up_to_three_correlated_rounds_is_not_below_quadrature(
    rounds: int, decay: float, first: float
) -> None:
    """The guarantee of `fading` for one epoch: zero-out in both orders and replace-one."""
    chain, epsilons = chain_of(decay, rounds, first), EPSILONS[::3] * math.sqrt(first)
    epoch = fading.ChainEpoch(chain, fading.FINE)
    laws = [
        require(losses(epoch)).deltas for losses in (fading.epoch_removal_losses, fading.epoch_addition_losses)
    ]
    for found, truth in zip(
        [*laws, require(fading.epoch_replacement_losses(epoch)).deltas], quadrature(chain), strict=True
    ):
        bound, least = found(epsilons), truth(epsilons)
        assert np.all(bound >= least - (1e-3 if rounds == 3 else 2e-5) * math.sqrt(first))
        assert first > 1.0 or np.all(bound <= 1.15 * least + 4e-3 * math.sqrt(first))


@functools.cache
def replaced(decay: float) -> tuple[Any, int]:
    """The bound of 20 rounds under replace-one, and how many distributions of sums it took."""
    with patch.object(fading, "sum_distribution", wraps=fading.sum_distribution) as grids:
        losses = fading.epoch_replacement_losses(fading.ChainEpoch(chain_of(decay, 20, 1.2), fading.FINE))
    return require(losses), grids.call_count


@pytest.mark.parametrize("decay", in_parts([0.8, 0.95]))
def test_replace_one_delta_bound_keeps_falling_at_large_epsilon(decay: float) -> None:
    """A grid of sums that is fine at their mean, and not at the threshold, stops falling near 1e-7."""
    near, far, farther = replaced(decay)[0].deltas(np.array([6.0, 8.0, 12.0]))
    assert far <= 0.05 * near
    assert farther <= 1e-3 * far


@pytest.mark.parametrize("decay", in_parts([0.5, 0.8]))
def test_replace_one_bound_computes_at_most_sixty_likelihood_ratio_distributions(decay: float) -> None:
    assert 20 <= replaced(decay)[1] <= 60


def test_dominating_markov_covariances_are_upper_bounds_and_exact_for_markov_inputs() -> None:
    draw = np.random.default_rng(3)
    for _ in range(20):
        rounds = int(draw.integers(1, 9))
        columns = np.abs(draw.standard_normal((12, rounds))) * draw.random((12, rounds))
        clips = np.exp(draw.uniform(-2.0, 2.0, rounds))
        wanted = columns.T @ columns
        found = chains.dominating_chain(wanted, clips).covariances
        assert np.all(found >= wanted * np.outer(clips, clips))
        assert np.linalg.eigvalsh(found).min() >= -1e-9 * found.max()
    exact, clips = (
        0.8 ** lags(7) * 0.9 ** np.maximum.outer(np.arange(7), np.arange(7)),
        np.exp(draw.uniform(-1, 1, 7)),
    )
    found = chains.dominating_chain(exact, clips).covariances
    np.testing.assert_allclose(found, exact * np.outer(clips, clips), rtol=1e-6)


def test_covariances_of_a_chain_and_its_sum_by_hand() -> None:
    chain = chains.CovarianceChain((1.0, 2.0, 4.0), (0.5, 3.0))
    expected = np.array([[1.0, 0.5, 0.75], [0.5, 2.0, 3.0], [0.75, 3.0, 4.0]])
    assert np.allclose(chain.covariances, expected, rtol=1e-15, atol=0.0)
    assert chain.covariance_sum == pytest.approx(15.5, rel=1e-15)
    assert chain.largest_first == chains.CovarianceChain((4.0, 2.0, 1.0), (3.0, 0.5))
    assert chain.largest_first.largest_first == chain.largest_first
    doubled = chain.with_noise_multiplier(2.0).covariances
    assert np.all(doubled >= expected / 4.0)
    assert np.allclose(doubled, expected / 4.0, rtol=1e-11, atol=0.0)


@pytest.mark.parametrize(
    ("squared_norm", "clip", "variance"),
    [(1e-12, 1.0, 1e-6), (0.0, 1.0, 1e-6), (1.0, 1e-3, 1e-2), (1.0, 0.0, 1e-2)],
)
def test_a_round_that_hardly_moves_anything_has_a_variance_above_0(
    squared_norm: float, clip: float, variance: float
) -> None:
    chain = chains.dominating_chain(np.diag([1.0, squared_norm]), np.array([1.0, clip]))
    assert chain.variances == pytest.approx((1.0, variance), rel=1e-8, abs=0.0)


def test_overlaps_that_rise_are_bounded_by_a_decay_of_one() -> None:
    """Decays .6 and 1 give sums of covariances of 3.2 and 2.8, by hand."""
    chain = chains.dominating_chain(np.array([[1.0, 0.6], [0.6, 0.4]]), np.ones(2))
    assert chain.variances == pytest.approx((1.0, 0.6))
    assert chain.next_covariances == pytest.approx((0.6,))


def test_grid_transitions_preserve_mass_and_mean_and_bound_the_exponential_moment_error() -> None:
    """Rows of a walk are probabilities, their mean is kept, and E e^(re) is m(r) (1 ± η(r)) for every start."""
    lattice = chains.ExponentGrid(chain_of(0.7, 4), 0.5, 400)
    std = float(lattice.stds[1])
    moves, inner = lattice.transition_matrix(0.7, std), np.abs(lattice.points) < 2.0
    assert np.allclose(moves[inner].sum(axis=1), 1.0, atol=1e-12)
    assert np.allclose(moves[inner] @ lattice.points, 0.7 * lattice.points[inner], atol=1e-12)
    for r in (1.0, -1.0, 0.3):
        exact = np.exp(r * 0.7 * lattice.points[inner] + 0.5 * (r * std) ** 2)
        found = moves[inner] @ np.exp(r * lattice.points) / exact
        size = abs(r) * lattice.step
        error = 0.0081 * size**3 + 0.0235 * size**4 * math.exp(1.5 * size)
        assert np.all(np.abs(found / (1.0 + size**2 / 8.0) - 1.0) <= error + 1e-12)


def test_probability_lost_beyond_the_exponent_grid_is_within_its_allowance() -> None:
    lattice = chains.ExponentGrid(chain_of(0.9, 12), 0.4, 80)
    tilted = lattice.prior * np.exp(lattice.points - 0.5) / (1.0 + lattice.step**2 / 8.0)
    assert 1.0 - float(np.sum(lattice.prior)) <= chains.LOST_MEAN + 1e-15
    assert abs(1.0 - float(np.sum(tilted))) <= chains.LOST_MEAN + lattice.relative_error


@pytest.mark.parametrize("spacing", [0.3, 0.37, 0.41, 0.5])
def test_the_lattice_covers_the_range_that_walks_seldom_leave(spacing: float) -> None:
    lattice = chains.ExponentGrid(chain_of(0.9, 12), spacing, 400)
    low, high = lattice._range()
    assert lattice.points[0] <= low < lattice.points[1]
    assert lattice.points[-2] < high <= lattice.points[-1]


@pytest.mark.parametrize("most", [40, 80])
def test_the_lattice_has_about_as_many_points_as_it_may(most: int) -> None:
    assert most <= chains.ExponentGrid(chain_of(0.1, 3), 0.1, most).size <= most + 12


def test_sum_grid_preserves_the_mean_and_reports_what_lies_above_its_top() -> None:
    sums = chains.SumGrid(-1.0, 3.0, 0.1, 0.05)
    law = np.zeros((2, len(sums.points)))
    law[:, sums.zero] = 1.0
    moved, above = sums.shift_onto(law, np.array([0.234, 7.0]), sums)
    assert np.allclose(moved @ sums.points + above, [0.234, 7.0], atol=1e-12)
    assert above[0] == 0.0
    assert above[1] > 3.0
    assert np.count_nonzero(moved[0]) == 2


@pytest.mark.parametrize(("bins", "finer"), [(4, 1.0), (25, 1.0), (100, 0.5)])
def test_sums_are_resolved_as_is_documented(bins: int, finer: float) -> None:
    """The grid of sums has the relative step of its resolution up to 25 rounds, and a finer one for more."""
    epoch = fading.ChainEpoch(chain_of(0.2, bins, 0.5), fading.FINE)
    grid, step = epoch.sum_grid(-1.0, 4.0), fading.FINE.sum_spacing * finer
    assert epoch.ratio_std == pytest.approx(math.sqrt(math.expm1(0.5)), rel=1e-14)
    assert grid.points[grid.zero + 1] == pytest.approx(0.3 * epoch.ratio_std * math.sinh(step), rel=1e-12)
    assert grid.points[-1] / grid.points[-2] == pytest.approx(math.exp(step), rel=1e-3)
    assert 4.0 * epoch.largest_sum <= grid.points[-1] <= 4.0 * epoch.largest_sum * math.exp(step)


def test_tiny_mass_at_a_large_likelihood_ratio_sum_is_not_dropped() -> None:
    """At a variance of 25 sums reach 1e21: a mass of 1e-31 there is a hundred times what is added to every δ."""
    sums = chains.SumGrid(-1.0, 1e21, 1.0, 0.05)
    law = np.zeros((1, len(sums.points)))
    law[0, sums.zero], law[0, -2] = 1.0, 1e-31
    moved, above = sums.shift_onto(law, np.array([0.0]), sums)
    assert float(moved[0] @ sums.points) + above[0] == pytest.approx(1e-31 * sums.points[-2])


MECHANISMS: list[BufferedToeplitz] = [
    LambdaCgd(1.0, (0.9,), (0.0,)),
    BufferedToeplitz(1.0, (0.9, 0.5), (0.6, 0.1)),
]


def run_of(
    mechanism: BufferedToeplitz, order: RandomAllocation, relation: Relation, z: float
) -> AllocatedGaussian:
    sums = RunningSums(mechanism, Workload(order, 1.0, np.ones(order.rounds)), relation)
    return order.guarantee(sums, z * sums.displacement_and_overlap(order.groups)[0])


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_epsilon_from_markov_covariances_is_at_least_ten_percent_below_the_largest_overlap_bound(
    mechanism: BufferedToeplitz,
) -> None:
    order = RandomAllocation(40, 20, 5)
    run = run_of(mechanism, order, "zero-out", 1.5)
    assert run.overlaps is not None
    before = AllocatedGaussian(run.noise_multiplier, run.bins, run.epochs, run.relation, run.common_share)
    assert run.epsilon_of(1e-3) < 0.9 * before.epsilon_of(1e-3)


@pytest.mark.slow
def test_overlap_bound_covers_a_group_with_larger_clips_and_calibration_meets_its_epsilon() -> None:
    """A group whose clips are larger than those of group 0 counts, and so does what rounds overlap by."""
    order = RandomAllocation(24, 12, 3)
    clips = np.where(np.arange(24) % 3 == 1, 1.0, 0.4)
    sums = RunningSums(MECHANISMS[0], Workload(order, 1.0, clips), "zero-out")
    overlaps, kappa = require(sums.fading_overlaps(3, 4)), sums.displacement_and_overlap(3)[0]
    inner = sums.mechanism.columns(sums.workload).inner
    own = sum(float(np.sum(inner(np.arange(first, first + 12, 3)))) for first in (1, 13)) / kappa**2
    shared = 2 * 16 * overlaps.shared_variance / 4  # of 4 x 4 rounds in two epochs, over the square of these
    assert sum(chain.covariance_sum for chain in overlaps.epoch_chains) + shared >= own
    asked = kappa / order.calibrated_mu(sums, mu_of(1.0, 1e-3), 1e-3)
    assert 0.97 < order.guarantee(sums, asked).epsilon_of(1e-3) <= 1.0


def test_balanced_subsampling_has_no_markov_bound_of_its_column_overlaps() -> None:
    """Parts of balanced subsampling have rounds of any distance: `displacement_and_overlap` alone bounds them."""
    assert run_of(MECHANISMS[0], BalancedSubsampling(40, 20, 5), "zero-out", 1.5).overlaps is None


FADING = 0.5 ** lags(4)
SLOW_AND_FAST = 0.5 + 0.5 * 0.2 ** lags(4)


@pytest.mark.parametrize("moved", [FADING, SLOW_AND_FAST], ids=["one buffer", "a slow and a fast one"])
def test_delta_of_several_one_round_epochs_is_not_below_the_gaussian_of_summed_columns(moved: Floats) -> None:
    """Four epochs of one round: nothing is secret, and what overlaps adds up to ‖Σ C_t‖²."""
    overlaps = chains.find_overlaps(moved, np.ones(4), 1)
    replaced = require(fading.replacement_curve(overlaps, 4.0, fading.COARSE))
    mu = math.sqrt(float(np.sum(moved))) / 4.0
    for curve in require(fading.removal_and_addition_curves(overlaps, 4.0, fading.COARSE)):
        assert np.all(curve(EPSILONS) >= lower_gaussian_curve(mu)(EPSILONS))
    assert np.all(replaced(EPSILONS) >= lower_gaussian_curve(2.0 * mu)(EPSILONS))


def test_splitting_into_one_round_epochs_keeps_delta_within_three_percent_of_the_gaussian() -> None:
    """N_π is 0 where Σ f = Σ g of one round before and all behind: three cuts of a chain are exact."""
    overlaps, square = chains.find_overlaps(FADING, np.ones(4), 1), float(np.sum(FADING))
    assert overlaps.shared_variance == 0.0
    assert sum(chain.covariance_sum for chain in overlaps.epoch_chains) == pytest.approx(square, rel=0.02)
    truth, few = gaussian_curve(math.sqrt(square) / 4.0), EPSILONS[:4]
    for curve in require(fading.removal_and_addition_curves(overlaps, 4.0, fading.FINE)):
        assert np.all(curve(few) <= 1.03 * truth(few))


@pytest.mark.parametrize("decay", [0.999, 0.5, 1e-3])
def test_splitting_a_markov_chain_adds_one_gaussian_term_to_the_pattern_covariances(decay: float) -> None:
    """The guarantee of `Chain.split_at`: exponents of all patterns are those before and N_π, a Gaussian."""
    for clips in (np.ones(7), np.geomspace(0.2, 1.0, 7), np.geomspace(1.0, 0.2, 7)):
        chain = chains.dominating_chain(decay ** lags(7), clips)
        first, second = (half.covariances for half in chain.split_at(3))
        before = chain.covariances
        f, g = before[:3, 2] / before[2, 2], before[3, 3:] / before[3, 3]
        f *= math.sqrt(before[2, 3] * float(np.sum(g)) / float(np.sum(f)))
        g *= before[2, 3] / f[-1]
        assert np.allclose(np.outer(f, g), before[:3, 3:], rtol=1e-9)
        pairs = [(s, t) for s in range(3) for t in range(3, 7)]
        here = np.array([[before[np.ix_(p, q)].sum() for q in pairs] for p in pairs])
        then = np.array([[first[p[0], q[0]] + second[p[1] - 3, q[1] - 3] for q in pairs] for p in pairs])
        noise = np.array([f[s] - g[t - 3] for s, t in pairs])
        assert np.allclose(then, here + np.outer(noise, noise), rtol=1e-8, atol=1e-12)
        assert np.all(then >= here + np.outer(noise, noise)), "rounded up"


def test_similar_markov_covariances_of_epochs_merge_into_one_upper_bound() -> None:
    draw = np.random.default_rng(5)
    for _ in range(20):
        decays = draw.uniform(0.1, 1, 2)
        first, second = (
            chains.dominating_chain(float(d) ** lags(4), np.exp(draw.uniform(-1, 1, 4))) for d in decays
        )
        both = first.maximum_with(second).covariances
        assert np.all(both >= np.maximum(first.covariances, second.covariances))
        assert np.linalg.eigvalsh(both).min() >= -1e-9 * both.max()
        assert np.allclose(np.sort(first.largest_first.covariances.ravel()), np.sort(first.covariances.ravel()))
        assert first.covariance_sum == pytest.approx(float(np.sum(first.covariances)))
    near = [chain_of(0.6 + 1e-4 * number, 5, 1.0 + 1e-4 * number) for number in range(4)]
    merged = chains._merge_chains(near)
    assert len(set(merged)) == 1
    for own, one in zip(near, merged, strict=True):
        assert np.all(one.covariances >= own.covariances)
    overlaps = chains.find_overlaps(0.6 ** lags(60), np.ones(60), 6)
    assert len(overlaps.epoch_chains) == 10
    assert len(set(overlaps.epoch_chains)) == 2, "the first and the last, turned around, and the others"


def test_shared_variance_plus_markov_covariances_bounds_all_column_overlaps() -> None:
    for rounds in (2, 4):
        moved = SLOW_AND_FAST[:rounds, :rounds]
        overlaps = chains.find_overlaps(moved, np.ones(rounds), rounds)
        assert (rounds == 2) == (overlaps.shared_variance == 0.0)  # of two rounds every law is a chain
        (epoch,) = overlaps.epoch_chains
        assert np.all(epoch.covariances + overlaps.shared_variance >= moved)
        assert np.sum(epoch.covariances + overlaps.shared_variance) <= 1.02 * np.sum(moved)
    assert chains.find_overlaps(0.9 ** lags(4), np.ones(4), 4).shared_variance == 0.0
    curve = require(fading.replacement_curve(overlaps, 1.0, fading.FINE))
    whole = require(fading.epoch_replacement_losses(fading.ChainEpoch(epoch, fading.FINE))).deltas
    assert np.all(curve(EPSILONS) > 1.05 * whole(EPSILONS))


@pytest.mark.parametrize(
    ("rounds", "common", "decay", "share"),
    [(6, 0.1, 0.2, 1 / 2), (6, 0.1, 0.5, 1 / 4), (8, 1e-3, 0.5, 1 / 64), (4, 0.02, 0.8, 0.0)],
)
def test_the_common_overlap_is_a_power_of_two_below_the_median(
    rounds: int, common: float, decay: float, share: float
) -> None:
    """The median itself and a 128th of it would be better in the first and the third row, by brute force.

    In the last row no candidate is better than none by 0.1 %.
    """
    overlaps = common + (1.0 - common) * decay ** lags(rounds)
    overlaps[0, -1] = overlaps[-1, 0] = 0.0  # so that the smallest overlap is no better candidate
    median = float(np.median(overlaps[np.triu_indices(rounds, 1)]))
    found = chains.find_overlaps(overlaps, np.ones(rounds), rounds)
    assert found.shared_variance == pytest.approx(share * median, rel=1e-6)


@pytest.mark.parametrize("decay", [0.05, 0.4])
def test_replace_one_delta_of_two_one_round_epochs_is_just_above_the_gaussian(decay: float) -> None:
    """The guarantee of `fading` for two epochs under replace-one: one round each is a Gaussian release."""
    curve = require(
        fading.replacement_curve(chains.FadingOverlaps(chain_of(decay, 2, 0.3).split_at(1)), 1.0, fading.FINE)
    )
    mu = math.sqrt(0.6 * (1.0 + decay))
    epsilons, other = np.array([0.0, 0.3, 1.0, 3.0, 8.0, 12.0]), np.array([-0.5, -2.0])
    found = curve(epsilons)
    assert np.all(found >= lower_gaussian_curve(2.0 * mu)(epsilons))
    assert np.all(found <= 1.02 * gaussian_curve(2.0 * mu)(0.98 * epsilons) + 3e-11)
    mirror = -np.expm1(other) + np.exp(other) * lower_gaussian_curve(2.0 * mu)(-other)
    assert np.all(curve(other) >= mirror)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
@pytest.mark.parametrize("epochs", [2, 3, 4])
def test_zero_out_delta_of_several_correlated_epochs_is_never_below_monte_carlo(
    mechanism: BufferedToeplitz, epochs: int
) -> None:
    groups, bins, z = 3, 3, 1.5 * math.sqrt(epochs)
    rounds = groups * bins * epochs
    order = RandomAllocation(rounds, groups * bins, groups)
    run, matrix = run_of(mechanism, order, "zero-out", z), matrix_of(mechanism, rounds)
    moves = moves_of(matrix, np.ones(rounds), order, 0, z * float(np.linalg.norm(matrix[:, 0])))
    both = require(fading.removal_and_addition_curves(require(run.overlaps), run.noise_multiplier, fading.FINE))
    for curve, losses in zip(both, sampled_losses(moves, "zero-out", 20_000, epochs), strict=True):
        for epsilon, bound in zip(EPSILONS, curve(EPSILONS), strict=True):
            mean, error = sampled_stick(losses, epsilon)
            assert bound >= mean - 4.0 * error


def test_truncated_loss_distribution_counts_larger_losses_as_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under replace-one: three points above 0, and every loss beyond is infinite."""
    epoch = fading.ChainEpoch(chain_of(0.05, 2, 0.3), fading.FINE)
    whole = require(fading.epoch_replacement_losses(epoch))
    monkeypatch.setattr(fading, "_MAX_KNOTS", 3)
    short = require(fading.epoch_replacement_losses(epoch))
    assert short.infinity_mass > 0.1
    assert np.all(short.deltas(EPSILONS) >= whole.deltas(EPSILONS) - 1e-9)
