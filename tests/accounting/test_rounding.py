"""What the Fourier transforms of the accountants lose to rounding, against 80-bit floats."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import fft

from fedpriv.accounting.allocation import grid_end, grid_masses, removal_loss_distribution
from fedpriv.accounting.losses import GridLossDistribution, PrivacyLossDistribution

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="no extended precision here")

Extended = NDArray[np.longdouble]
SIZE = 2**14


def extended_sum(first: Extended, second: Extended) -> Extended:
    size = len(first)
    product = fft.rfft(first, 2 * size) * fft.rfft(second, 2 * size)
    return np.maximum(fft.irfft(product, 2 * size)[:size], 0.0)


def extended_power(masses: Extended, times: int) -> Extended:
    result = masses
    for bit in bin(times)[3:]:
        result = extended_sum(result, result)
        if bit == "1":
            result = extended_sum(result, masses)
    return result


def extended_deltas(
    z: float, bins: int, end: float, epsilons: tuple[float, ...]
) -> Iterator[tuple[float, np.longdouble]]:
    """Every ε with δ of one epoch on the grid that ends at `end`."""
    masses, sums = grid_masses(z, end / SIZE, SIZE), end / SIZE * np.arange(SIZE)
    others = extended_power(masses.astype(np.longdouble), bins - 1)
    law = extended_sum(others, (sums * masses).astype(np.longdouble))
    missing = max(np.longdouble(0.0), 1 - law.sum())
    for epsilon in epsilons:
        ratios = math.exp(epsilon) * bins / sums[1:].astype(np.longdouble)
        yield epsilon, missing + np.maximum(1 - ratios, 0) @ law[1:]


@pytest.mark.parametrize("z", [0.6, 0.8])
@pytest.mark.parametrize("bins", [20_000, 10**6])
def test_guarantee_no_delta_of_very_many_rounds_is_below_its_value_in_extended_precision(
    z: float, bins: int
) -> None:
    """Before: short by 3e-11 of a million rounds, where 1e-12 was added whatever the number of rounds."""
    end = grid_end(z, bins, 1e-13, narrow=True)
    computed = removal_loss_distribution(z, bins, SIZE, end)
    for epsilon, exact in extended_deltas(z, bins, end, (0.0, 0.01, 0.1, 0.5, 1.1318)):
        assert float(computed.deltas(epsilon)) >= exact


@pytest.mark.parametrize(
    ("z", "bins", "tail"), [(0.9205, 60, 1e-9), (0.5732, 60, 1e-13), (0.66, 600, 1e-13), (0.374, 600, 1e-9)]
)
def test_no_delta_of_one_epoch_is_below_its_value_in_extended_precision(z: float, bins: int, tail: float) -> None:
    end = grid_end(z, bins, tail)
    computed, sums = removal_loss_distribution(z, bins, SIZE, end), end / SIZE * np.arange(1, SIZE)
    for epsilon, exact in extended_deltas(z, bins, end, (0.0, 0.5, 1.1318, 4.3772, 8.0)):
        stick = float(np.maximum(1 - math.exp(epsilon) * bins / sums, 0) @ computed.masses)
        assert computed.infinity_mass + stick >= exact - 1e-13
        assert float(computed.deltas(epsilon)) >= exact


@pytest.mark.parametrize(("times", "length"), [(2, 2**16), (10, 2**19), (1000, 2**20)])
def test_rounding_errors_of_a_composition_are_covered_by_its_infinity_mass(times: int, length: int) -> None:
    """The masses of `times` epochs, all errors added up in size, against those of extended precision."""
    losses = removal_loss_distribution(1.5, 60, 2**14, grid_end(1.5, 60, 1e-12))
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
