"""Every term that makes a walk's bound one: each is needed, on chains where leaving it out shows."""

import math

import numpy as np
import pytest

from fedpriv.accounting import chain, fading
from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.chain import CovarianceChain, FadingOverlaps, SumGrid
from fedpriv.accounting.curves import lower_gaussian_curve
from fedpriv.accounting.losses import GridLossDistribution
from fedpriv.core.errors import InputError
from tests.accounting.builders import require
from tests.parts import in_parts

CRUDE = fading.ChainResolution(1.0, 80, 0.05, 0.4)
"""A lattice so coarse that what a step to it gains and errs shows."""
TWO = CovarianceChain((0.25, 0.25), (0.2,))


def one(variance: float, grain: fading.ChainResolution = fading.FINE) -> fading.ChainEpoch:
    return fading.ChainEpoch(CovarianceChain((variance,), ()), grain)


@pytest.mark.parametrize(
    ("variance", "grain"),
    [(1e-4, fading.FINE), (1.0, fading.COARSE), (4.0, fading.FINE), (9.0, fading.FINE), (16.0, fading.FINE)],
)
def test_one_round_delta_is_never_below_that_of_a_gaussian_release(
    variance: float, grain: fading.ChainResolution
) -> None:
    """The guarantee of `fading` where the truth is known, down to δ = 1e-11: a lattice reaches far enough."""
    epoch, mu = one(variance, grain), math.sqrt(variance)
    epsilons = np.linspace(-2.0 * mu, 0.5 * mu**2 + 6.0 * mu, 60)
    truth = lower_gaussian_curve(mu)(epsilons)
    for losses in (fading.epoch_removal_losses, fading.epoch_addition_losses):
        assert np.all(require(losses(epoch)).deltas(epsilons) >= truth)
    if (exchanged := fading.epoch_replacement_losses(epoch)) is not None:
        mu, positive = 2.0 * mu, np.linspace(0.0, 0.5 * (2.0 * mu) ** 2 + 10.0 * mu, 30)
        assert np.all(exchanged.deltas(positive) >= lower_gaussian_curve(mu)(positive))


GRAINS = [(bins, grain) for bins in (2, 3, 10) for grain in (fading.FINE, fading.COARSE)]


@pytest.mark.parametrize(("bins", "grain"), in_parts(GRAINS, [row for row in GRAINS if row != (10, fading.FINE)]))
def test_delta_of_almost_fully_correlated_rounds_is_never_below_a_gaussian_release(
    bins: int, grain: fading.ChainResolution
) -> None:
    """Gains: .375 for .853 where a unit is added: sums of few rounds came up to the bottom of a grid."""
    for variance in (1.0, 2.0, 6.0, 16.0, 24.0):
        chain = CovarianceChain((variance,) * bins, (variance * (1.0 - 1e-9),) * (bins - 1))
        epsilons = np.linspace(0.0, 0.5 * variance + 5.0 * math.sqrt(variance), 40)
        truth = lower_gaussian_curve(math.sqrt(variance) * (1.0 - 1e-6))(epsilons)
        for losses in (fading.epoch_removal_losses, fading.epoch_addition_losses):
            if (law := losses(fading.ChainEpoch(chain, grain))) is not None:
                assert np.all(law.deltas(epsilons) >= truth), variance


@pytest.mark.parametrize(
    ("variance", "spacing", "exists"),
    [(24.9, 0.1, True), (25.1, 0.1, False), (4.0, 0.424, True), (4.0, 0.426, False)],
)
def test_a_bound_exists_up_to_a_variance_of_25_and_an_error_of_5_percent(
    variance: float, spacing: float, exists: bool
) -> None:
    """A walk of one round has the step h = spacing · 2, and errs by .0081 h³ + .0235 h⁴ e^(3h/2) at most."""
    epoch = one(variance, fading.ChainResolution(spacing, 400, 0.05, 0.4))
    assert (epoch.exponent_grid is not None) == exists


def test_likelihood_ratios_rounded_to_zero_count_as_infinite_addition_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a variance of 4 many ratios are near 0: what a coarse grid moves there counts where a unit is added."""
    monkeypatch.setattr(chain, "_MIN_SUM_LOG", 1.0)
    law = require(fading.epoch_addition_losses(one(4.0, fading.COARSE)))
    assert law.infinity_mass > 1e-3
    assert float(np.sum(law.masses)) + law.infinity_mass == pytest.approx(1.0, abs=1e-9)


def test_split_epochs_that_start_with_a_small_clip_stay_above_the_true_delta() -> None:
    """H_ε ≥ 1 - e^ε of any two distributions; and quadrature gives .62245 at ε = 0, where a bound was .62169."""
    chain = CovarianceChain((8.0, 8e-5, 0.0960392, 8.0), (0.0, 5.6e-5, 0.0))
    epsilons = np.linspace(-6.0, -0.01, 40)
    for curve in require(fading.removal_and_addition_curves(FadingOverlaps(chain.split_at(2)), 1.0, fading.FINE)):
        assert np.all(curve(epsilons) >= -np.expm1(epsilons))
        assert curve(np.zeros(1)) >= 0.62245


def test_relative_error_of_the_exponent_grid_is_included_in_every_bound() -> None:
    """(1 - κ) S ≤ E S~ ≤ (1 + κ) S: a law has the mass and the mean that S~ over 1 ∓ κ has."""
    epoch = fading.ChainEpoch(TWO, CRUDE)
    grid = require(epoch.exponent_grid)
    error = grid.relative_error
    assert error > 5e-4
    law, other = require(fading.epoch_removal_losses(epoch)), require(fading.epoch_addition_losses(epoch))
    mean = float(other.masses @ np.exp(-other.losses)) * (1.0 + error)
    assert abs(mean - 1.0) <= error, "E S~"
    assert mean > 1.0 + 1e-5, "here it is above 1, so that without κ a unit that is added would be priced too low"
    assert float(np.sum(law.masses)) + law.infinity_mass == pytest.approx(mean / (1.0 - error), rel=1e-7)
    assert float(law.masses @ np.exp(-law.losses)) == pytest.approx(1.0, abs=1e-9)
    assert float(np.sum(other.masses)) + other.infinity_mass == pytest.approx(1.0, abs=1e-9)
    sticks = fading._replacement_hockey_stick(epoch, grid)
    assert 1e-9 < sticks(0.0) * (1.0 - error) / mean - 1.0 < 1.2e-9, "margins for rounding"
    both = mean / (1.0 - error) + 0.5 * mean / (1.0 + error)  # E (S + S'/2): nothing is cut
    assert sticks(-0.5) == pytest.approx(both, rel=1e-6)


def test_likelihood_ratios_above_the_sum_grid_are_included_in_every_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums above a grid's top count: with one at half a standard deviation nothing falls below the truth."""
    monkeypatch.setattr(fading, "_GRID_STDS", 0.5)
    monkeypatch.setattr(fading, "_MAX_TRIALS", 1)
    epoch, epsilons = one(1.0, fading.COARSE), np.array([0.0, 0.5, 1.0, 1.5])
    law, curve = (
        require(fading.epoch_removal_losses(epoch)),
        require(fading.epoch_replacement_losses(epoch)).deltas,
    )
    assert law.infinity_mass > 0.01
    assert np.all(law.deltas(epsilons) >= lower_gaussian_curve(1.0)(epsilons))
    assert np.all(curve(epsilons) >= lower_gaussian_curve(2.0)(epsilons))
    alike = fading.ChainEpoch(CovarianceChain((1.0, 1.0), (1.0 - 1e-9,)), fading.COARSE)
    law = require(fading.epoch_removal_losses(alike))  # a walk carries it on from round to round
    assert float(np.sum(law.masses)) + law.infinity_mass >= 1.0 - 1e-6, "the mean of S"


def test_a_grid_of_sums_that_misses_too_much_gets_a_higher_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first top is at half a standard deviation of an exponent."""
    monkeypatch.setattr(fading, "_GRID_STDS", 0.5)
    assert require(fading.epoch_removal_losses(one(1.0, fading.COARSE))).infinity_mass < 1e-11


def test_delta_between_two_knots_is_linear_in_the_exponential_of_epsilon() -> None:
    """A hockey stick is convex in e^ε, and may lie above the chord in ε."""
    epoch = one(1.0, fading.COARSE)
    curve = require(fading.epoch_replacement_losses(epoch)).deltas
    step = fading.COARSE.knot_spacing * epoch.ratio_std
    low, high = curve(np.array([2.0 * step, 3.0 * step]))
    share = math.expm1(0.5 * step) / math.expm1(step)
    assert curve(np.array([2.5 * step]))[0] == pytest.approx(low + share * (high - low), rel=1e-9)


def test_addition_bound_counts_probability_lost_beyond_the_exponent_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fading, "LOST_MEAN", 1e-3)
    assert require(fading.epoch_addition_losses(fading.ChainEpoch(TWO, fading.FINE))).infinity_mass >= 1e-3


def test_composition_keeps_all_infinity_mass_of_a_loss_distribution_with_mass_above_one() -> None:
    """(f + i)^k - f^k is infinite of k releases, which 1 - (1 - i)^k would be for a mass of 1."""
    law = GridLossDistribution(0.1, 0, np.array([0.9, 0.6]), 1e-3)
    assert law.self_compose(10).infinity_mass >= 1.501**10 - 1.5**10
    other = GridLossDistribution(0.1, 0, np.array([0.7, 0.7]), 2e-3)
    assert law.compose(other).infinity_mass == pytest.approx(1.501 * 1.402 - 1.5 * 1.4, rel=1e-9)
    small = GridLossDistribution(0.1, 0, np.array([0.4, 0.6 - 1e-3]), 1e-3)
    assert small.self_compose(10).infinity_mass == pytest.approx(1.0 - 0.999**10, rel=1e-9)
    short = GridLossDistribution(0.1, 0, np.array([0.3, 0.2]), 0.1)  # masses may be lost, too
    assert short.self_compose(2).infinity_mass == pytest.approx(1.0 - 0.9**2, rel=1e-9)


def test_sum_grid_whose_lower_end_is_a_grid_point_shifts_sums_correctly() -> None:
    for place in range(1, 40):
        sums = SumGrid(-0.3 * math.sinh(0.05 * place), 2.0, 0.3, 0.05)
        laws = np.zeros((1, len(sums.points)))
        laws[0, sums.zero] = 1.0
        found, beyond = sums.shift_onto(laws, np.array([float(sums.points[0])]), sums)
        assert np.all(np.isfinite(found))
        assert float((found @ sums.points)[0]) == pytest.approx(float(sums.points[0]), rel=1e-6)
        assert beyond[0] == 0.0


def test_points_come_close_to_the_least_sum() -> None:
    points = SumGrid(-1.0, 3.0, 0.3, 0.05, fine_at_bottom=True).points
    assert points[0] == -1.0
    assert 0.0 < points[1] + 1.0 < math.exp(-13.0)
    assert np.all(np.diff(points) > 0.0)


def test_overlap_bounds_with_other_epochs_or_rounds_than_the_run_are_refused() -> None:
    """They are one an epoch, of as many rounds as a unit draws among: others would be the price of another run."""
    for chains in ([CovarianceChain((1.0,) * 4, (0.5,) * 3)], [CovarianceChain((1.0,) * 5, (0.5,) * 4)] * 2):
        with pytest.raises(InputError, match="other than 1 chains of 5 rounds"):
            AllocatedGaussian(1.0, bins=5, overlaps=FadingOverlaps(tuple(chains)))


def test_chains_of_rounds_that_do_not_overlap_change_nothing_under_replace_one() -> None:
    """Before: several epochs were refused, for chains of the run beside a single epoch of it."""
    overlaps = chain.find_overlaps(np.eye(4), np.ones(4), 2)
    with_chains, without = (AllocatedGaussian(2.0, 2, 2, "replace-one", 0.0, bound) for bound in (overlaps, None))
    assert with_chains.epsilon_of(1e-5) <= without.epsilon_of(1e-5)


def test_replace_one_delta_at_negative_epsilon_is_at_least_one_minus_exp_epsilon() -> None:
    """H_ε ≥ 1 - e^ε."""
    law, epsilons = (
        require(fading.epoch_replacement_losses(fading.ChainEpoch(TWO, fading.COARSE))),
        np.linspace(-3.0, -0.1, 20),
    )
    assert np.all(law.deltas(epsilons) >= -np.expm1(epsilons))
