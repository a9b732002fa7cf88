"""The law of the loss of one secret round: against quadrature, Monte Carlo, mpmath and an adaptive adversary."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.allocation import end_of_grid, grid_masses, losses_when_added, losses_when_removed
from tests.accounting.ratios import of_three_rounds, of_two_rounds, removed_by_sampling

multipliers = st.floats(0.35, 3.0)


def removed(z: float, bins: int, epsilon: float, size: int) -> float:
    """The smallest bound of three grids that end in different places."""
    ends = [end_of_grid(z, bins, tail) for tail in (1e-4, 1e-7, 1e-10)]
    return min(float(losses_when_removed(z, bins, size, end).deltas(epsilon)) for end in ends)


def added(z: float, bins: int, epsilon: float, size: int, cap: float = 8.0) -> float:
    return float(losses_when_added(z, bins, size, cap).deltas(epsilon))


@pytest.mark.parametrize(("z", "epsilon"), [(0.5, 0.0), (0.5, 3.0), (0.8, 1.0), (1.5, 0.5), (3.0, 0.2)])
def test_two_and_three_rounds_are_the_quadrature_on_the_safe_side(z: float, epsilon: float) -> None:
    for bins, accuracy, truth in ((2, 1e-9, of_two_rounds(z, epsilon)), (3, 2e-6, of_three_rounds(z, epsilon))):
        bounds = removed(z, bins, epsilon, 2**15), added(z, bins, epsilon, 2**15)
        for true, bound in zip(truth, bounds, strict=True):
            assert true * (1 - accuracy) <= bound <= true * 1.002


@pytest.mark.parametrize(
    ("z", "rounds", "epsilon", "samples"),
    [
        (1.2183, 16, 1.1318, 400_000),
        (0.9205, 60, 1.1318, 150_000),
        (0.5732, 60, 4.3772, 150_000),
        (0.4290, 60, 8.0, 150_000),
        (0.8964, 240, 0.5, 40_000),
    ],
)
def test_many_rounds_agree_with_unbiased_sampling(z: float, rounds: int, epsilon: float, samples: int) -> None:
    """4.5 standard errors: a false alarm in 1.5e5 draws of the seed."""
    estimate, error = removed_by_sampling(z, rounds, epsilon, samples, seed=7)
    assert error < 0.05 * estimate
    assert abs(removed(z, rounds, epsilon, 2**14) - estimate) < 4.5 * error + 2e-3 * estimate


@pytest.mark.parametrize(("z", "spacing"), [(0.4, 0.05), (0.92, 0.007), (2.0, 0.3), (10.0, 0.01)])
def test_the_masses_on_the_grid_are_those_of_mpmath(z: float, spacing: float) -> None:
    """E max(0, 1 - |Y - jh|/h), the share of a neighbour, with fifty digits."""
    masses = grid_masses(z, spacing, 2**12)
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


@settings(max_examples=30, deadline=None)
@given(z=multipliers, spacing=st.floats(0.02, 0.5))
def test_the_grid_keeps_the_mean_and_lies_above_in_convex_order(z: float, spacing: float) -> None:
    size = 2**12
    masses, points = grid_masses(z, spacing, size), spacing * np.arange(size)
    assert float(masses.sum()) <= 1.0 + 1e-12
    assert float(points @ masses) <= 1.0 + 1e-9
    for strike in spacing * np.array([0.3, 1.5, 7.25, 40.5]):  # E(Y - x)+ is enough for the convex order
        logs = z * math.log(strike)
        true = float(mpmath.ncdf(0.5 / z - logs) - strike * mpmath.ncdf(-0.5 / z - logs))
        beyond = 1.0 - float(points @ masses)  # the mean that lies beyond the grid
        assert float(np.maximum(points - strike, 0.0) @ masses) + beyond >= true - 1e-9


@settings(max_examples=25, deadline=None)
@given(z=multipliers, bins=st.integers(1, 100), epsilon=st.floats(0.0, 6.0))
def test_a_finer_grid_is_never_above_twice_as_coarse_a_one(z: float, bins: int, epsilon: float) -> None:
    """The fine grid's Y, moved to the coarse grid that it contains, is the coarse one's Y."""
    end = end_of_grid(z, bins, 1e-9)
    coarse = losses_when_removed(z, bins, 2**10, end).deltas(epsilon)
    fine = losses_when_removed(z, bins, 2**11, end).deltas(epsilon)
    assert float(fine) <= float(coarse) * (1 + 1e-6) + 1e-11
    assert added(z, bins, epsilon, 2**11) <= added(z, bins, epsilon, 2**10) * (1 + 1e-6) + 1e-11


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_increments_that_depend_on_earlier_releases_gain_nothing(epsilon: float) -> None:
    """Two rounds, the second increment any function of the first release: the guarantee for adaptive runs."""
    z, draw = 0.8, np.random.default_rng(3)
    grid = np.linspace(-9.0, 9.0, 901) * z
    density = np.exp(-0.5 * (grid / z) ** 2) / (z * math.sqrt(2.0 * math.pi)) * (grid[1] - grid[0])
    most_removed, most_added = removed(z, 2, epsilon, 2**14), added(z, 2, epsilon, 2**14)
    for _ in range(8):
        turns = draw.choice([-1.0, 1.0, 0.5, 0.0], size=12)[np.digitize(grid, np.linspace(-2.5, 2.5, 11))]
        first = np.exp((grid - 0.5) / z**2)
        second = np.exp((np.multiply.outer(turns, grid) - 0.5 * turns[:, None] ** 2) / z**2)
        ratio = 0.5 * (first[:, None] + second)
        gained = float(density @ np.maximum(ratio - math.exp(epsilon), 0.0) @ density)
        lost = float(density @ np.maximum(1.0 - math.exp(epsilon) * ratio, 0.0) @ density)
        assert gained <= most_removed * (1 + 1e-6) + 1e-9
        assert lost <= most_added * (1 + 1e-6) + 1e-9


def test_mass_beyond_the_grid_counts_as_infinite() -> None:
    law = losses_when_removed(0.5, 4, 2**10, 40.0)
    assert law.infinite > 0.01
    assert float(law.masses.sum()) + law.infinite == pytest.approx(1.0, abs=1e-9)
    assert float(law.deltas(50.0)) >= law.infinite


@pytest.mark.parametrize("cap", [8.0, 1.0, 0.125])
def test_ratios_above_the_cap_count_as_at_the_cap(cap: float) -> None:
    law = losses_when_added(0.7, 8, 2**14, cap)
    assert law.losses[0] == pytest.approx(-math.log(cap))
    reference = float(losses_when_added(0.7, 8, 2**16, 64.0).deltas(0.4))
    assert float(law.deltas(0.4)) >= reference * (1 - 1e-3)
