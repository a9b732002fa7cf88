"""Random allocation: golden noise multipliers, both relations, several epochs, and the law of one secret round."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.allocation import (
    AllocatedGaussian,
    RatioDistribution,
    RatioGrid,
    calibrate,
    grid_masses,
    ratio_distribution,
    ratio_grid,
    removal_and_addition_curves,
)
from fedpriv.accounting.curves import delta_at
from fedpriv.accounting.gaussian import Relation
from fedpriv.accounting.poisson import calibrate as calibrated_poisson
from fedpriv.core.errors import InputError
from tests.accounting.builders import RELATIONS, hockey_stick, sampled_stick
from tests.accounting.ratios import of_three_rounds, of_two_rounds, removed_by_sampling
from tests.parts import in_parts

DELTA = 1e-5
EPSILON_03, EPSILON_1 = gdp.epsilon_of(0.3, DELTA), gdp.epsilon_of(1.0, DELTA)

ONE_EPOCH = {  # (T, ε): z, confirmed by unbiased sampling and by PLD_accounting 2.0
    (16, 0.5): 1.9363, (16, EPSILON_03): 1.2183, (16, EPSILON_1): 0.6599, (16, 8.0): 0.4707,
    (60, 0.5): 1.2248, (60, EPSILON_03): 0.9205, (60, EPSILON_1): 0.5732, (60, 8.0): 0.4290,
    (240, 0.5): 0.8964, (240, EPSILON_03): 0.7414, (240, EPSILON_1): 0.5063, (240, 8.0): 0.3936,
    (600, 0.5): 0.7724, (600, EPSILON_03): 0.6603, (600, EPSILON_1): 0.4711, (600, 8.0): 0.3737,
    # classes of rounds: 60 rounds in 4, 240 in 8, 600 in 8
    (15, EPSILON_03): 1.2385, (30, EPSILON_03): 1.0537, (75, EPSILON_03): 0.8853,
    (15, EPSILON_1): 0.6649, (30, EPSILON_1): 0.6152, (75, EPSILON_1): 0.5611,
}  # fmt: skip
SEVERAL_EPOCHS = {  # (T, k, ε): z
    (60, 5, EPSILON_03): 1.2007, (60, 10, EPSILON_03): 1.5310, (120, 8, EPSILON_03): 1.1039,
    (16, 4, EPSILON_03): 1.8202,
    (60, 5, EPSILON_1): 0.6879, (60, 10, EPSILON_1): 0.7613, (120, 8, EPSILON_1): 0.6561,
    (16, 4, EPSILON_1): 0.8425,
}  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.sample(2)
@pytest.mark.parametrize(("key", "golden"), in_parts(ONE_EPOCH.items(), list(ONE_EPOCH.items())[::5]))
def test_calibrated_noise_of_one_epoch_matches_golden_multipliers(key: tuple[int, float], golden: float) -> None:
    bins, epsilon = key
    assert calibrate(epsilon, DELTA, bins).noise_multiplier == pytest.approx(golden, rel=1e-3)


@pytest.mark.every(3)
@pytest.mark.parametrize(("key", "golden"), in_parts(SEVERAL_EPOCHS.items(), list(SEVERAL_EPOCHS.items())[::3]))
def test_calibrated_noise_of_several_epochs_matches_golden_multipliers(
    key: tuple[int, int, float], golden: float
) -> None:
    bins, epochs, epsilon = key
    assert calibrate(epsilon, DELTA, bins, epochs).noise_multiplier == pytest.approx(golden, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "golden", "chained"), [(EPSILON_03, 0.9881, 1.1417), (EPSILON_1, 0.5892, 0.6644)]
)
def test_calibrated_replace_one_noise_matches_golden_values_below_the_triangle_bound(
    epsilon: float, golden: float, chained: float
) -> None:
    """By the symmetric pair; Poisson sampling needs 1.0411 and 0.6216, the chain of both directions more."""
    multiplier = calibrate(epsilon, DELTA, 60, relation="replace-one").noise_multiplier
    assert multiplier == pytest.approx(golden, rel=1e-3)
    assert multiplier < 0.9 * chained


def test_epsilon_agrees_with_the_bounds_that_pld_accounting_gives() -> None:
    """PLD_accounting 2.0: 1.1254 and 1.1337 are its lower and its upper end; for five epochs its upper end."""
    assert 1.1254 < AllocatedGaussian(0.92098, 60).epsilon_of(DELTA) < 1.1337
    assert AllocatedGaussian(1.2, 60, 5).epsilon_of(DELTA) == pytest.approx(1.132, abs=1.5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "poisson"), [(EPSILON_03, 0.9639), (EPSILON_1, 0.6098)])
def test_allocation_needs_less_noise_than_poisson_sampling(epsilon: float, poisson: float) -> None:
    theirs = calibrated_poisson(epsilon, DELTA, 1 / 60, 60).noise_multiplier
    assert theirs == pytest.approx(poisson, rel=1e-3)
    assert calibrate(epsilon, DELTA, 60).noise_multiplier < theirs


def test_balls_in_bins_over_ten_epochs_needs_a_noise_multiplier_of_2_911() -> None:
    """Balls in bins: one epoch at z/√k.  Fresh bins: 1.531."""
    assert math.sqrt(10) * calibrate(EPSILON_03, DELTA, 60).noise_multiplier == pytest.approx(2.911, rel=1e-3)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("z", "epochs"), [(0.8, 1), (3.0, 1), (2.0, 4)])
def test_allocation_to_a_single_round_matches_the_exact_gaussian(
    relation: Relation, z: float, epochs: int
) -> None:
    mu = (2.0 if relation == "replace-one" else 1.0) * math.sqrt(epochs) / z
    epsilon = AllocatedGaussian(z, 1, epochs, relation).epsilon_of(DELTA)
    assert gdp.epsilon_of(mu, DELTA) * (1 - 1e-9) <= epsilon <= gdp.epsilon_of(mu, DELTA) * (1 + 1e-6)


def test_two_round_deltas_bound_the_exact_hockey_sticks_under_both_relations() -> None:
    """The guarantee of AllocatedGaussian, against all events on a grid of two rounds, in one dimension.

    Zero-out: increment 1 against 0.  Replace-one: 1 against -1.  The unit's round is drawn among the two.
    """
    z, epsilons = 0.9, np.array([0.0, 0.5, 1.5, 3.0])
    line = np.linspace(-9.0, 9.0, 1201) * z

    def released(increment: float) -> np.ndarray:
        moved, still = (norm.pdf(line, mean, z) * (line[1] - line[0]) for mean in (increment, 0.0))
        return 0.5 * (np.outer(moved, still) + np.outer(still, moved))

    with_it, without, other = released(1.0), released(0.0), released(-1.0)
    for epsilon in epsilons:
        zero_out = AllocatedGaussian(z, 2).delta_of(epsilon)
        for first, second in ((with_it, without), (without, with_it)):
            assert hockey_stick(first, second, epsilon) <= zero_out + 1e-7
        replaced = AllocatedGaussian(z, 2, relation="replace-one").delta_of(epsilon)
        assert hockey_stick(with_it, other, epsilon) <= replaced + 1e-7


def test_two_epoch_removal_delta_agrees_with_monte_carlo() -> None:
    """E(1 - e^ε/(W_1 W_2))+ under P, 4.5 standard errors: a false alarm in 1.5e5 draws of the seed."""
    z, bins, samples = 1.0, 8, 400_000
    draw = np.random.default_rng(11)
    logs = np.zeros(samples)
    for _ in range(2):
        normal = draw.standard_normal((samples, bins))
        normal[:, 0] += 1.0 / z  # by symmetry the unit's round is the first
        logs += np.log(np.exp(normal / z - 0.5 / z**2).mean(1))
    curve, _ = removal_and_addition_curves(AllocatedGaussian(z, bins, 2))
    for epsilon in (0.5, 1.5):
        mean, error = sampled_stick(logs, epsilon)
        assert mean - 4.5 * error < delta_at(curve, epsilon) < mean + 4.5 * error + 1e-4


@pytest.mark.slow
@settings(max_examples=12)
@given(z=st.floats(0.3, 5.0), bins=st.integers(1, 300), epsilon=st.floats(0.0, 10.0))
@example(z=0.3125, bins=90, epsilon=3.0)
@example(z=0.6, bins=300, epsilon=3.0)
def test_secret_allocation_never_raises_delta_and_small_zero_out_deltas_are_below_replace_one(
    z: float, bins: int, epsilon: float
) -> None:
    """For a δ up to .3: above it zero-out's bound can be looser (z = .3, 300 bins: .54 and .17; .12 is exact)."""
    zero_out = AllocatedGaussian(z, bins).delta_of(epsilon)
    assert zero_out <= gdp.delta_of(1.0 / z, epsilon) * (1 + 1e-9) + 1e-20
    replace_one = AllocatedGaussian(z, bins, relation="replace-one").delta_of(epsilon)
    assert zero_out > 0.3 or zero_out <= replace_one * (1 + 1e-9)
    assert replace_one <= gdp.delta_of(2.0 / z, epsilon) * (1 + 1e-9) + 1e-20


@pytest.mark.slow
@settings(max_examples=8)
@given(z=st.floats(0.5, 3.0), bins=st.integers(2, 100), epsilon=st.floats(0.0, 5.0))
def test_delta_does_not_rise_with_more_noise_more_rounds_or_larger_epsilon(
    z: float, bins: int, epsilon: float
) -> None:
    """Up to 2 % + 1e-8: the bounds' looseness may differ between two settings."""
    base = AllocatedGaussian(z, bins).delta_of(epsilon)
    for better in (AllocatedGaussian(1.05 * z, bins), AllocatedGaussian(z, bins + 5)):
        assert better.delta_of(epsilon) <= base * 1.02 + 1e-8
    assert AllocatedGaussian(z, bins).delta_of(epsilon + 0.1) <= base


@pytest.mark.slow
def test_zero_out_epsilon_of_100000_rounds_is_below_replace_one_and_below_30000_rounds() -> None:
    """Before: ε = 0.043 of 100,000 rounds at z = 5, 38 times the truth, and 0.0049 of a third as many."""
    most, fewer = (AllocatedGaussian(5.0, bins).epsilon_of(1e-5) for bins in (100_000, 30_000))
    assert most <= AllocatedGaussian(5.0, 100_000, relation="replace-one").epsilon_of(1e-5)
    assert most < 0.00115 < 0.0023 < fewer < 0.0024


ASKED = [(1.0, 60, 1), (4.0, 16, 3), (20.0, 60, 1), (0.1, 600, 1)]


@pytest.mark.slow
def test_epsilon_rises_with_the_number_of_epochs() -> None:
    costs = [AllocatedGaussian(1.5, 60, epochs).epsilon_of(DELTA) for epochs in (1, 2, 4, 8)]
    assert costs == sorted(costs)
    assert costs[-1] < gdp.epsilon_of(math.sqrt(8) / 1.5, DELTA)


@pytest.mark.parametrize(
    ("asked", "relation"),
    in_parts(itertools.product(ASKED, RELATIONS), long=zip(ASKED, itertools.cycle(RELATIONS), strict=False)),
)
def test_calibrated_noise_multiplier_is_the_smallest_that_meets_the_epsilon_target(
    asked: tuple[float, int, int], relation: Relation
) -> None:
    epsilon, bins, epochs = asked
    mechanism = calibrate(epsilon, DELTA, bins, epochs, relation)
    assert mechanism.epsilon_of(DELTA) <= epsilon
    less = AllocatedGaussian(mechanism.noise_multiplier * (1 - 1e-3), bins, epochs, relation)
    assert less.epsilon_of(DELTA) > epsilon


@pytest.mark.slow
def test_epsilon_falls_back_to_the_known_round_bound_where_grids_resolve_nothing() -> None:
    """Where the grids resolve nothing, what is left is the bound of a known round."""
    assert AllocatedGaussian(0.05, 60).epsilon_of(DELTA) <= gdp.epsilon_of(20.0, DELTA) * (1 + 1e-9)
    with pytest.raises(InputError, match="epochs = 0"):
        calibrate(1.0, DELTA, 60, 0)
    assert AllocatedGaussian(1e4, 60, 3).epsilon_of(DELTA) <= gdp.epsilon_of(math.sqrt(3) / 1e4, DELTA) + 1e-9


multipliers = st.floats(0.35, 3.0)


def ratios_of(z: float, bins: int, half_size: int = 2**11) -> RatioDistribution:
    return ratio_distribution(z, bins, ratio_grid(z, bins, half_size))


def removed(z: float, bins: int, epsilon: float, half_size: int = 2**11) -> float:
    return float(ratios_of(z, bins, half_size).removal_losses.deltas(epsilon))


def added(z: float, bins: int, epsilon: float, half_size: int = 2**11) -> float:
    return float(ratios_of(z, bins, half_size).addition_losses.deltas(epsilon))


@pytest.mark.parametrize(("z", "epsilon"), [(0.5, 0.0), (0.5, 3.0), (0.8, 1.0), (1.5, 0.5), (3.0, 0.2)])
def test_removal_and_addition_deltas_of_two_and_three_rounds_are_just_above_quadrature(
    z: float, epsilon: float
) -> None:
    for bins, accuracy, truth in ((2, 1e-9, of_two_rounds(z, epsilon)), (3, 2e-5, of_three_rounds(z, epsilon))):
        bounds = removed(z, bins, epsilon), added(z, bins, epsilon)
        for true, bound in zip(truth, bounds, strict=True):
            assert true * (1 - accuracy) <= bound <= true * 1.002


@pytest.mark.parametrize(
    ("z", "rounds", "epsilon", "samples"),
    [
        (1.2183, 16, 1.1318, 400_000), (0.9205, 60, 1.1318, 150_000), (0.5732, 60, 4.3772, 150_000),
        (0.4290, 60, 8.0, 150_000), (0.8964, 240, 0.5, 40_000),
    ],
)  # fmt: skip
def test_removal_delta_of_many_rounds_agrees_with_unbiased_monte_carlo(
    z: float, rounds: int, epsilon: float, samples: int
) -> None:
    """4.5 standard errors: a false alarm in 1.5e5 draws of the seed."""
    estimate, error = removed_by_sampling(z, rounds, epsilon, samples, seed=7)
    assert error < 0.05 * estimate
    assert abs(removed(z, rounds, epsilon) - estimate) < 4.5 * error + 2e-3 * estimate


@pytest.mark.parametrize(("z", "spacing"), [(0.4, 0.05), (0.92, 0.007), (2.0, 0.3), (10.0, 0.01)])
def test_grid_masses_match_high_precision_values_from_mpmath(z: float, spacing: float) -> None:
    """E max(0, 1 - |Y - jh|/h), the share of a neighbour, with fifty digits."""
    masses = grid_masses(z, spacing * np.arange(2**12 + 1))
    half = 0.5 / mpmath.mpf(z)

    def stop_loss(x: mpmath.mpf) -> mpmath.mpf:
        if x == 0:
            return mpmath.mpf(1)
        logs = z * mpmath.log(x)
        return mpmath.ncdf(half - logs) - x * mpmath.ncdf(-half - logs)

    with mpmath.workdps(50):
        step = mpmath.mpf(spacing)
        for j in (1, 2, 3, 17, 100, 143, 1000, 4000):
            true = (stop_loss((j - 1) * step) - 2 * stop_loss(j * step) + stop_loss((j + 1) * step)) / step
            assert abs(masses[j] - true) < 1e-6 * true + 1e-14
        at_zero = (stop_loss(step) - 1 + step) / step
        assert abs(masses[0] - at_zero) < 1e-9 * at_zero + 1e-14


@settings(max_examples=30)
@given(z=multipliers, spacing=st.floats(0.02, 0.5))
def test_likelihood_ratio_grid_never_exceeds_mean_one_and_dominates_in_convex_order(
    z: float, spacing: float
) -> None:
    size = 2**12
    points = spacing * np.arange(size)
    masses = grid_masses(z, spacing * np.arange(size + 1))
    assert float(masses.sum()) <= 1.0 + 1e-12
    assert float(points @ masses) <= 1.0 + 1e-9
    for strike in spacing * np.array([0.3, 1.5, 7.25, 40.5]):  # E(Y - x)+ is enough for the convex order
        logs = z * math.log(strike)
        true = float(mpmath.ncdf(0.5 / z - logs) - strike * mpmath.ncdf(-0.5 / z - logs))
        beyond = 1.0 - float(points @ masses)  # the mean that lies beyond the grid
        assert float(np.maximum(points - strike, 0.0) @ masses) + beyond >= true - 1e-9


@pytest.mark.slow
@settings(max_examples=25)
@given(z=multipliers, bins=st.integers(1, 100), epsilon=st.floats(0.0, 6.0))
def test_delta_on_a_finer_grid_is_never_above_that_on_one_twice_as_coarse(
    z: float, bins: int, epsilon: float
) -> None:
    """The fine grid's Y, moved to the coarse grid that it contains, is the coarse one's Y."""
    for bound in (removed, added):
        assert bound(z, bins, epsilon, 2**9) <= bound(z, bins, epsilon, 2**8) * (1 + 1e-6) + 1e-11


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_increments_that_depend_on_earlier_releases_gain_nothing(epsilon: float) -> None:
    """Two rounds, the second increment any function of the first release: the guarantee for adaptive runs."""
    z, draw = 0.8, np.random.default_rng(3)
    grid = np.linspace(-9.0, 9.0, 901) * z
    density = norm.pdf(grid, 0.0, z) * (grid[1] - grid[0])
    most_removed, most_added = removed(z, 2, epsilon), added(z, 2, epsilon)
    for _ in range(8):
        turns = draw.choice([-1.0, 1.0, 0.5, 0.0], size=12)[np.digitize(grid, np.linspace(-2.5, 2.5, 11))]
        first = np.exp((grid - 0.5) / z**2)
        second = np.exp((np.multiply.outer(turns, grid) - 0.5 * turns[:, None] ** 2) / z**2)
        law = np.outer(density, density)
        with_it = 0.5 * (first[:, None] + second) * law
        assert hockey_stick(with_it, law, epsilon) <= most_removed * (1 + 1e-6) + 1e-9
        assert hockey_stick(law, with_it, epsilon) <= most_added * (1 + 1e-6) + 1e-9


def test_mass_beyond_the_grid_counts_as_infinite() -> None:
    law = ratio_distribution(0.5, 4, RatioGrid(0.0, 40.0 / 2**10, 2**10, 1)).removal_losses
    assert law.infinity_mass > 0.01
    assert float(law.masses.sum()) + law.infinity_mass == pytest.approx(1.0, abs=1e-9)
    assert float(law.deltas(50.0)) >= law.infinity_mass


@pytest.mark.parametrize(
    ("z", "bins", "size"), [(0.5, 300, 2**10), (2.0, 60, 2**8), (5.0, 2, 2**10), (5.0, 300, 2**10)]
)
def test_no_mass_is_negative_where_rounding_makes_the_others_more_than_one(z: float, bins: int, size: int) -> None:
    ratios = ratios_of(z, bins, size)
    for law in (ratios.removal_losses, ratios.addition_losses):
        assert law.infinity_mass >= 0.0
        assert np.all(law.masses >= 0.0)


@pytest.mark.parametrize("cap", [8.0, 1.0, 0.25])
def test_ratios_above_the_cap_count_as_at_the_cap(cap: float) -> None:
    law = ratio_distribution(0.7, 8, RatioGrid(0.0, 8.0 * cap / 2**14, 2**14, 1)).addition_losses
    assert law.losses[0] == pytest.approx(-math.log(cap), abs=1e-4)
    assert float(law.deltas(0.4)) >= added(0.7, 8, 0.4) * (1 - 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("z", [1.0, 5.0])
def test_epsilon_of_a_hundred_thousand_rounds_is_close_to_that_of_the_normal_limit(z: float) -> None:
    """Before: 2.4 times as large.  The sum of so many Y is nearly normal."""
    limit = gdp.epsilon_of(math.sqrt(math.expm1(z**-2) / 1e5), DELTA)
    assert limit * (1 - 0.01) <= AllocatedGaussian(z, 100_000).epsilon_of(DELTA) <= 1.3 * limit


def test_noise_next_to_none_has_no_finite_epsilon() -> None:
    """Before: an OverflowError from the multiplier's square."""
    assert math.isinf(AllocatedGaussian(1e-160, 2).epsilon_of(1e-5))


@pytest.mark.parametrize("z", [1e14, 1e99])
def test_noise_far_above_all_else_has_epsilon_zero(z: float) -> None:
    """Before: infinity, from a grid whose points no float tells apart."""
    run = AllocatedGaussian(z, 2)
    assert run.epsilon_of(DELTA) == 0.0
    assert run.delta_of(0.0) <= 1e-12
