"""Allocation along chains: never below the truth, above any overlaps, and rounded to the safe side."""

import math

import numpy as np
import pytest

from fedpriv.accounting import chain as chains
from fedpriv.accounting import fading
from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.chain import (
    LOST_MEAN,
    CovarianceChain,
    ExponentGrid,
    FadingOverlaps,
    SumGrid,
    dominating_chain,
    find_overlaps,
)
from fedpriv.accounting.curves import Curve, Floats, gaussian_curve, lower_gaussian_curve
from fedpriv.accounting.fading import (
    COARSE,
    FINE,
    ChainEpoch,
    epoch_addition_losses,
    epoch_removal_losses,
    epoch_replacement_curve,
    epoch_replacement_losses,
    removal_and_addition_curves,
    replacement_curve,
)
from fedpriv.accounting.gaussian import Relation, mu_of
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.participation.secret import BalancedSubsampling, RandomAllocation
from fedpriv.plan.sums import RunningSums

EPSILONS = np.array([0.0, 0.2, 0.5, 1.0, 1.7, 2.5, 4.0])


def chain_of(decay: float, rounds: int, first: float = 1.0) -> CovarianceChain:
    """Equal variances, and overlaps that fall by `decay` a round."""
    return CovarianceChain((first,) * rounds, (first * decay,) * (rounds - 1))


def quadrature(chain: CovarianceChain) -> tuple[Curve, Curve, Curve]:
    """Removed, added and replaced of a chain of one, two or three rounds, all patterns of a grid."""
    line = np.linspace(-9.0, 9.0, (0, 6001, 601, 81)[len(chain.variances)])
    weight = np.exp(-0.5 * line**2) * (line[1] - line[0]) / math.sqrt(2.0 * math.pi)
    covariances = chain.covariances
    root = np.linalg.cholesky(covariances)
    axes = np.meshgrid(*[line] * len(covariances), indexing="ij")
    exponents = [sum(root[i, j] * axes[j] for j in range(i + 1)) for i in range(len(covariances))]
    halves = covariances.diagonal() / 2.0
    ratio = np.mean([np.exp(e - h) for e, h in zip(exponents, halves, strict=True)], axis=0)
    other = np.mean([np.exp(-e - h) for e, h in zip(exponents, halves, strict=True)], axis=0)
    law = weight
    for _ in range(len(covariances) - 1):
        law = np.multiply.outer(law, weight)

    def curve(gain: str) -> Curve:
        def of(epsilons: Floats) -> Floats:
            gammas = np.exp(epsilons)
            if gain == "removed":
                return np.array([np.sum(np.maximum(0.0, ratio - g) * law) for g in gammas])
            if gain == "added":
                return np.array([np.sum(np.maximum(0.0, 1.0 - g * ratio) * law) for g in gammas])
            return np.array([np.sum(np.maximum(0.0, ratio - g * other) * law) for g in gammas])

        return of

    return curve("removed"), curve("added"), curve("replaced")


@pytest.mark.parametrize(
    ("rounds", "decay", "first"),
    [
        (1, 0.0, 4.0),
        (1, 0.0, 1e-4),
        (2, 0.01, 0.6),
        (2, 0.6, 4.0),
        (2, 0.6, 1e-4),
        (2, 0.999, 0.05),
        (3, 0.7, 0.6),
    ],
)
def test_few_rounds_are_the_quadrature_on_the_safe_side(rounds: int, decay: float, first: float) -> None:
    """The guarantee of `fading` for one epoch: zero-out in both orders and replace-one."""
    chain = chain_of(decay, rounds, first)
    exact = quadrature(chain)
    epsilons = EPSILONS[::3] * math.sqrt(first)
    epoch = ChainEpoch(chain, FINE)
    laws, curve = (epoch_removal_losses(epoch), epoch_addition_losses(epoch)), epoch_replacement_curve(epoch)
    assert laws[0] is not None
    assert laws[1] is not None
    assert curve is not None
    for found, truth in zip([laws[0].deltas, laws[1].deltas, curve], exact, strict=True):
        bound, least = found(epsilons), truth(epsilons)
        assert np.all(bound >= least - (1e-3 if rounds == 3 else 2e-5) * math.sqrt(first))
        assert first > 1.0 or np.all(bound <= 1.15 * least + 4e-3 * math.sqrt(first))


def test_chains_lie_above_what_they_are_asked_to_and_are_exact_where_it_is_one() -> None:
    draw = np.random.default_rng(3)
    for _ in range(20):
        rounds = int(draw.integers(1, 9))
        columns = np.abs(draw.standard_normal((12, rounds))) * draw.random((12, rounds))
        clips = np.exp(draw.uniform(-2.0, 2.0, rounds))
        wanted = columns.T @ columns
        found = dominating_chain(wanted, clips).covariances
        assert np.all(found >= wanted * np.outer(clips, clips))
        assert np.linalg.eigvalsh(found).min() >= -1e-9 * found.max()
    lag = np.abs(np.subtract.outer(np.arange(7), np.arange(7)))
    exact, clips = 0.8**lag * 0.9 ** np.maximum.outer(np.arange(7), np.arange(7)), np.exp(draw.uniform(-1, 1, 7))
    np.testing.assert_allclose(
        dominating_chain(exact, clips).covariances, exact * np.outer(clips, clips), rtol=1e-6
    )


def test_a_step_to_the_lattice_keeps_means_and_what_its_moments_promise() -> None:
    """Rows of a walk are probabilities, their mean is kept, and E e^(re) is m(r) (1 ± η(r)) for every start."""
    lattice = ExponentGrid(chain_of(0.7, 4), 0.5, 400)
    std = float(lattice.stds[1])
    moves, inner = lattice.transition_matrix(0.7, std), np.abs(lattice.points) < 2.0
    assert np.allclose(moves[inner].sum(axis=1), 1.0, atol=1e-12)
    assert np.allclose(moves[inner] @ lattice.points, 0.7 * lattice.points[inner], atol=1e-12)
    for r in (1.0, -1.0, 0.3):
        found = (
            moves[inner]
            @ np.exp(r * lattice.points)
            / np.exp(r * 0.7 * lattice.points[inner] + 0.5 * (r * std) ** 2)
        )
        size = abs(r) * lattice.step
        error = 0.0081 * size**3 + 0.0235 * size**4 * math.exp(1.5 * size)
        assert np.all(np.abs(found / (1.0 + size**2 / 8.0) - 1.0) <= error + 1e-12)


def test_what_leaves_the_lattice_is_less_than_is_added() -> None:
    lattice = ExponentGrid(chain_of(0.9, 12), 0.4, 80)
    tilted = lattice.prior * np.exp(lattice.points - 0.5) / (1.0 + lattice.step**2 / 8.0)
    assert 1.0 - float(np.sum(lattice.prior)) <= LOST_MEAN + 1e-15
    assert abs(1.0 - float(np.sum(tilted))) <= LOST_MEAN + lattice.relative_error


def test_a_grid_of_sums_keeps_means_and_says_what_lies_above_it() -> None:
    sums = SumGrid(-1.0, 3.0, 0.1, 0.05)
    law = np.zeros((2, len(sums.points)))
    law[:, sums.zero] = 1.0
    moved, above = sums.shift_onto(law, np.array([0.234, 7.0]), sums)
    assert np.allclose(moved @ sums.points + above, [0.234, 7.0], atol=1e-12)
    assert above[0] == 0.0
    assert above[1] > 3.0
    assert np.count_nonzero(moved[0]) == 2


def test_a_mass_far_below_every_delta_is_kept_where_a_sum_is_large() -> None:
    """At a variance of 25 sums reach 1e21: a mass of 1e-31 there is a hundred times what is added to every δ."""
    sums = SumGrid(-1.0, 1e21, 1.0, 0.05)
    law = np.zeros((1, len(sums.points)))
    law[0, sums.zero], law[0, -2] = 1.0, 1e-31
    moved, above = sums.shift_onto(law, np.array([0.0]), sums)
    assert float(moved[0] @ sums.points) + above[0] == pytest.approx(1e-31 * sums.points[-2])


MECHANISMS = [LambdaCgd(1.0, (0.9,), (0.0,)), BufferedToeplitz(1.0, (0.9, 0.5), (0.6, 0.1))]


def run_of(mechanism: Mechanism, order: RandomAllocation, relation: Relation, z: float) -> AllocatedGaussian:
    sums = RunningSums(mechanism, Workload(order, 1.0, np.ones(order.rounds)), relation)
    return order.guarantee(sums, z * sums.displacement_and_overlap(order.groups)[0])


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.name)
def test_it_is_smaller_than_by_the_two_nearest_rounds(mechanism: Mechanism) -> None:
    order = RandomAllocation(40, 20, 5)
    run = run_of(mechanism, order, "zero-out", 1.5)
    assert run.overlaps is not None
    before = AllocatedGaussian(run.noise_multiplier, run.bins, run.epochs, run.relation, run.common_share)
    assert run.epsilon_of(1e-3) < 0.9 * before.epsilon_of(1e-3)


def test_chains_lie_above_every_group_and_a_calibration_meets_its_target() -> None:
    """A group whose clips are larger than those of group 0 counts, and so does what rounds overlap by."""
    order = RandomAllocation(24, 12, 3)
    clips = np.where(np.arange(24) % 3 == 1, 1.0, 0.4)
    sums = RunningSums(MECHANISMS[0], Workload(order, 1.0, clips), "zero-out")
    overlaps, kappa = sums.fading_overlaps(3, 4), sums.displacement_and_overlap(3)[0]
    assert overlaps is not None
    inner = sums.mechanism.columns(sums.workload).inner
    own = sum(float(np.sum(inner(np.arange(first, first + 12, 3)))) for first in (1, 13)) / kappa**2
    shared = (
        2 * 16 * overlaps.shared_variance / 4
    )  # of 4 x 4 rounds in each of two epochs, over the square of these
    assert sum(chain.covariance_sum for chain in overlaps.epoch_chains) + shared >= own
    asked = kappa / order.calibrated_mu(sums, mu_of(1.0, 1e-3), 1e-3)
    assert 0.97 < order.guarantee(sums, asked).epsilon_of(1e-3) <= 1.0


def test_a_drawn_partition_has_no_chain() -> None:
    """The parts of balanced subsampling have rounds of any distance: the bound of `displacement_and_overlap`
    alone.
    """
    assert run_of(MECHANISMS[0], BalancedSubsampling(40, 20, 5), "zero-out", 1.5).overlaps is None


LAG = np.abs(np.subtract.outer(np.arange(4), np.arange(4)))
SLOW_AND_FAST = 0.5 + 0.5 * 0.2**LAG


@pytest.mark.parametrize("moved", [0.5**LAG, SLOW_AND_FAST], ids=["one buffer", "a slow and a fast one"])
def test_overlaps_of_several_epochs_all_count(moved: Floats) -> None:
    """Four epochs of one round: nothing is secret, and what overlaps adds up to ‖Σ C_t‖²."""
    overlaps = find_overlaps(moved, np.ones(4), 1)
    found, other = removal_and_addition_curves(overlaps, 4.0, COARSE), replacement_curve(overlaps, 4.0, COARSE)
    assert found is not None
    assert other is not None
    mu = math.sqrt(float(np.sum(moved))) / 4.0
    for curve in found:
        assert np.all(curve(EPSILONS) >= lower_gaussian_curve(mu)(EPSILONS))
    assert np.all(other(EPSILONS) >= lower_gaussian_curve(2.0 * mu)(EPSILONS))


def test_cuts_give_nothing_away_where_an_epoch_has_one_round() -> None:
    """N_π is 0 where Σ f = Σ g of one round before and all behind: three cuts of a chain are exact."""
    overlaps = find_overlaps(0.5**LAG, np.ones(4), 1)
    assert overlaps.shared_variance == 0.0
    assert sum(chain.covariance_sum for chain in overlaps.epoch_chains) == pytest.approx(
        float(np.sum(0.5**LAG)), rel=0.02
    )
    found = removal_and_addition_curves(overlaps, 4.0, FINE)
    assert found is not None
    truth, few = gaussian_curve(math.sqrt(float(np.sum(0.5**LAG))) / 4.0), EPSILONS[:4]
    for curve in found:
        assert np.all(curve(few) <= 1.03 * truth(few))


@pytest.mark.parametrize("decay", [0.999, 0.5, 1e-3])
def test_a_cut_only_adds_to_what_patterns_share(decay: float) -> None:
    """The guarantee of `Chain.split_at`: exponents of all patterns are those before and N_π, a Gaussian."""
    lag = np.abs(np.subtract.outer(np.arange(7), np.arange(7)))
    for clips in (np.ones(7), np.geomspace(0.2, 1.0, 7), np.geomspace(1.0, 0.2, 7)):
        chain = dominating_chain(decay**lag, clips)
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


def test_chains_of_epochs_that_are_alike_become_one_above_them() -> None:
    draw = np.random.default_rng(5)
    for _ in range(20):
        first, second = (
            dominating_chain(float(d) ** LAG, np.exp(draw.uniform(-1, 1, 4))) for d in draw.uniform(0.1, 1, 2)
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
    lag = np.abs(np.subtract.outer(np.arange(60), np.arange(60)))
    overlaps = find_overlaps(0.6**lag, np.ones(60), 6)
    assert len(overlaps.epoch_chains) == 10
    assert len(set(overlaps.epoch_chains)) == 2, "the first and the last, turned around, and the others"


def test_what_all_rounds_share_is_known_and_chains_lie_above_the_rest() -> None:
    for rounds in (2, 4):
        moved = SLOW_AND_FAST[:rounds, :rounds]
        overlaps = find_overlaps(moved, np.ones(rounds), rounds)
        assert (rounds == 2) == (overlaps.shared_variance == 0.0)  # of two rounds every law is a chain
        (epoch,) = overlaps.epoch_chains
        assert np.all(epoch.covariances + overlaps.shared_variance >= moved)
        assert np.sum(epoch.covariances + overlaps.shared_variance) <= 1.02 * np.sum(moved)
    assert find_overlaps(0.9**LAG, np.ones(4), 4).shared_variance == 0.0
    curve, whole = replacement_curve(overlaps, 1.0, FINE), epoch_replacement_curve(ChainEpoch(epoch, FINE))
    assert curve is not None
    assert whole is not None
    assert np.all(curve(EPSILONS) > 1.05 * whole(EPSILONS))


@pytest.mark.parametrize("decay", [0.05, 0.4])
def test_two_epochs_of_another_unit_are_the_truth_on_the_safe_side(decay: float) -> None:
    """The guarantee of `fading` for two epochs under replace-one: one round each is a Gaussian release."""
    curve = replacement_curve(FadingOverlaps(chain_of(decay, 2, 0.3).split_at(1)), 1.0, FINE)
    assert curve is not None
    mu = math.sqrt(0.6 * (1.0 + decay))
    epsilons, other = np.array([0.0, 0.3, 1.0, 3.0, 8.0, 12.0]), np.array([-0.5, -2.0])
    found = curve(epsilons)
    assert np.all(found >= lower_gaussian_curve(2.0 * mu)(epsilons))
    assert np.all(found <= 1.02 * gaussian_curve(2.0 * mu)(0.98 * epsilons) + 3e-11)
    mirror = -np.expm1(other) + np.exp(other) * lower_gaussian_curve(2.0 * mu)(-other)
    assert np.all(curve(other) >= mirror)


def sampled(moves: Floats, draws: int, seed: int) -> tuple[Floats, Floats]:
    """Losses when a unit is removed and when it is added, of patterns that move releases by `moves`."""
    draw = np.random.default_rng(seed)
    still = draw.standard_normal((draws, moves.shape[1]))
    moved = still + moves[draw.integers(len(moves), size=draws)]
    halves = 0.5 * np.sum(moves**2, axis=1)

    def loss(at: Floats) -> Floats:
        return np.asarray(np.logaddexp.reduce(at @ moves.T - halves, axis=1) - math.log(len(moves)))

    return loss(moved), -loss(still)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.name)
@pytest.mark.parametrize("epochs", [2, 3, 4])
def test_epochs_along_one_chain_are_never_below_samples(mechanism: Mechanism, epochs: int) -> None:
    groups, bins, z = 3, 3, 1.5 * math.sqrt(epochs)
    rounds = groups * bins * epochs
    run = run_of(mechanism, RandomAllocation(rounds, groups * bins, groups), "zero-out", z)
    assert run.overlaps is not None
    series = mechanism.strategy_series(rounds) if isinstance(mechanism, BufferedToeplitz) else np.ones(0)
    lag = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    matrix = np.where(lag >= 0, series[np.maximum(lag, 0)], 0.0)
    sigma, moves = z * float(np.linalg.norm(matrix[:, 0])), np.zeros((1, rounds))
    for epoch in range(epochs):
        own = matrix[:, epoch * groups * bins : (epoch + 1) * groups * bins : groups].T / sigma
        moves = (moves[:, None] + own[None]).reshape(-1, rounds)
    both = removal_and_addition_curves(run.overlaps, run.noise_multiplier, FINE)
    assert both is not None
    for curve, losses in zip(both, sampled(moves, 20_000, epochs), strict=True):
        for epsilon, bound in zip(EPSILONS, curve(EPSILONS), strict=True):
            gains = np.maximum(0.0, -np.expm1(epsilon - losses))
            assert bound >= gains.mean() - 4.0 * gains.std() / math.sqrt(len(gains))


def test_a_law_that_ends_early_counts_what_lies_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under replace-one: three points above 0, and every loss beyond is infinite."""
    epoch = ChainEpoch(chain_of(0.05, 2, 0.3), FINE)
    whole = epoch_replacement_losses(epoch)
    monkeypatch.setattr(fading, "_MAX_KNOTS", 3)
    short = epoch_replacement_losses(epoch)
    assert whole is not None
    assert short is not None
    assert short.infinity_mass > 0.1
    assert np.all(short.deltas(EPSILONS) >= whole.deltas(EPSILONS) - 1e-9)
