"""What the Fourier transforms of the accountants lose to rounding, against 80-bit floats."""

import math

import numpy as np
import pytest
from scipy import fft

from fedpriv.accounting import allocation
from fedpriv.accounting.allocation import (
    AllocatedGaussian,
    RatioDistribution,
    RatioGrid,
    ratio_distribution,
    ratio_grid,
    removal_and_addition_curves,
)
from fedpriv.accounting.losses import MAX_EPSILON, GridLossDistribution, PrivacyLossDistribution

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="no extended precision here")


def extended_ratios(z: float, bins: int, grid: RatioGrid) -> RatioDistribution:
    """Distribution of an epoch with all sums in extended precision."""
    power, result = grid.masses_of_one(z).astype(np.longdouble), None
    for doubling in range(bins.bit_length()):
        power = allocation._convolve(power, power) if doubling else power
        if bins >> doubling & 1:
            result = power if result is None else allocation._convolve(result, power)
    sums = (bins * grid.center + grid.offsets).ravel()
    return RatioDistribution(bins, np.maximum(sums, 0).astype(np.longdouble) / bins, result.ravel(), 1e300)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("z", "bins"),
    [(0.4, 60), (0.9205, 60), (0.5, 600), (2.0, 600), (1.0, 2000), (0.45, 20_000), (0.8, 100_000), (5.0, 100_000)],
)
def test_guarantee_no_delta_of_one_epoch_is_below_its_value_in_extended_precision(z: float, bins: int) -> None:
    """Before: short by 3e-11 of a million rounds, where 1e-12 was added whatever the number of rounds."""
    grid = ratio_grid(z, bins, 2**9)
    computed, exact = ratio_distribution(z, bins, grid), extended_ratios(z, bins, grid)
    for epsilon in (0.0, 0.01, 0.1, 0.5, 1.1318, 4.3772, 8.0):
        gamma = np.exp(np.longdouble(epsilon))
        removed = np.maximum(exact.ratios - gamma, 0) @ exact.masses
        removed += max(np.longdouble(0), 1 - exact.ratios @ exact.masses)
        added = np.maximum(1 - gamma * exact.ratios, 0) @ exact.masses
        assert float(computed.removal_losses.deltas(epsilon)) >= removed
        assert float(computed.addition_losses.deltas(epsilon)) >= added


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("z", "bins"), [(0.4, 60), (30.0, 60), (1.0, 2000), (5.0, 2000), (0.45, 20_000), (5.0, 100_000)]
)
def test_rounding_errors_of_one_epoch_are_covered_by_the_mass_for_each_round(z: float, bins: int) -> None:
    """All errors added up in size, under P and under Q, are below what is counted as infinite."""
    grid = ratio_grid(z, bins, 2**9)
    masses = allocation._self_convolve(grid.masses_of_one(z), bins).ravel()
    exact = extended_ratios(z, bins, grid)
    errors = np.abs(masses - exact.masses)
    assert max(float(errors.sum()), float(exact.ratios @ errors)) <= 1e-12 + allocation._rounding_mass(bins)


@pytest.mark.parametrize(("bins", "epochs"), [(200, 10), (60, 5), (20, 1000)])
def test_the_mass_that_rounding_hides_in_every_epoch_is_charged_for_each(bins: int, epochs: int) -> None:
    """At the largest ε next to nothing else is left; before, a run of several epochs had it for one alone."""
    mechanism = AllocatedGaussian(8.0, bins, epochs)
    for curve in removal_and_addition_curves(mechanism):
        assert float(curve(MAX_EPSILON)) >= 0.99 * epochs * bins * allocation._ROUNDING_MASS


@pytest.mark.every(3)
@pytest.mark.parametrize(("times", "length"), [(2, 2**16), (10, 2**19), (1000, 2**20)])
def test_rounding_errors_of_a_composition_are_covered_by_its_infinity_mass(times: int, length: int) -> None:
    """The masses of `times` epochs, all errors added up in size, against those of extended precision."""
    losses = ratio_distribution(1.5, 60, ratio_grid(1.5, 60, 2**11)).removal_losses
    lattice = losses.to_grid(2e-3)
    composed = lattice.self_compose(times)
    assert len(composed.masses) < length  # what lies beyond is next to nothing, and wraps around
    whole = fft.ifft(fft.fft(lattice.masses.astype(np.longdouble), length) ** times).real
    offset = round(composed.losses[0] / lattice.step) - times * lattice.first_index
    exact = np.roll(whole, -(offset % length))[: len(composed.masses)]
    assert float(np.abs(exact - composed.masses).sum()) < times * 1e-15
    assert composed.infinity_mass >= times * 1e-15


def test_composition_of_a_loss_distribution_without_finite_mass_has_infinity_mass_one() -> None:
    assert GridLossDistribution(1e-3, 0, np.zeros(1), 1.0).self_compose(3).infinity_mass == 1.0


def test_guarantee_no_delta_of_very_many_masses_is_below_its_exact_sum() -> None:
    """Four million equal masses just above ε, whose running sums lose digits."""
    count = 2**22
    losses, mass = np.linspace(1e-13, 1e-10, count), 0.7 / count
    delta = PrivacyLossDistribution(losses, np.full(count, mass), 0.0).deltas([0.0])[0]
    assert math.fsum((-mass * np.expm1(-losses)).tolist()) <= delta <= 2e-9
