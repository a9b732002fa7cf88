"""Power series beyond one block, where the matrices of the other tests would not fit."""

import math

import numpy as np
import pytest

from fedpriv.noise import series
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedOptions, BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("bands", [1, 2, 16, 300, 1500])
def test_a_series_times_its_inverse_is_one(decay: float, bands: int) -> None:
    coefficients = np.convolve(series.square_root(decay, bands), [1.0, -decay])
    inverted = series.inverse(coefficients, 5000)
    product = np.convolve(coefficients, inverted)[:5000]
    np.testing.assert_allclose(product, np.eye(1, 5000)[0], atol=1e-13)


def test_inverse_of_a_slowly_falling_series_is_not_cut_off_early() -> None:
    coefficients = np.array([1.0, -0.9999])
    np.testing.assert_allclose(series.inverse(coefficients, 20_000), 0.9999 ** np.arange(20_000), rtol=1e-10)


def test_series_inverse_continues_after_a_long_run_of_equal_entries() -> None:
    """Here entries 1 to 2,047 are equal, and the next one is not."""
    rest = -1e-3 * (1.0 - 1e-3) ** np.arange(2047)
    coefficients = np.concatenate([[1.0], rest])
    inverted = series.inverse(coefficients, 4096)
    expected = np.zeros(4096)
    expected[0] = 1.0
    for t in range(1, 4096):
        expected[t] = -np.dot(
            coefficients[1 : t + 1], expected[max(0, t - 2047) : t][::-1][: len(coefficients) - 1]
        )
    np.testing.assert_allclose(inverted, expected, rtol=1e-9)


def test_millionth_square_root_coefficient_matches_its_asymptotic_value() -> None:
    far = series.square_root(1.0, 1_000_000)[-1]
    assert far == pytest.approx(1 / math.sqrt(math.pi * 999_999), rel=1e-6)


def test_variance_of_banded_noise_over_a_million_rounds_grows_linearly() -> None:
    """The variance grows like t/c(1)², the mean over rounds like half of it."""
    rounds, bands = 1_000_000, 8
    workload = Workload(FixedOrder(rounds, rounds), 1.0, np.ones(rounds))
    total = float(np.sum(series.square_root(1.0, bands)))
    variance = BandedSquareRoot(1.0, bands).variance(workload)
    assert variance[-1] == pytest.approx(rounds / total**2, rel=1e-4)
    assert np.mean(variance) == pytest.approx(rounds / total**2 / 2, rel=1e-4)


def test_more_bands_lower_the_error_at_the_same_privacy_guarantee() -> None:
    """Noise for μ = 1 times its growth: doubling few bands helps, and the square root beats the tree."""
    rounds = 512
    workload = Workload(FixedOrder(rounds, rounds), 1.0, np.ones(rounds))

    def error(mechanism: BandedSquareRoot | BinaryTree | IndependentGaussian) -> float:
        return mechanism.sensitivity(workload) * math.sqrt(mechanism.mean_variance(workload))

    errors = [error(BandedSquareRoot(1.0, bands)) for bands in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert errors == sorted(errors, reverse=True)
    assert error(BandedSquareRoot(1.0, rounds)) < error(BinaryTree(1.0)) < error(IndependentGaussian())


@pytest.mark.parametrize(
    ("rounds", "names"),
    [
        (8, ["banded (1)", "square root"]),
        (9, ["banded (1)", "banded (8)", "square root"]),
        (1_000_000, ["banded (1)", "banded (8)", "banded (64)", "square root"]),
        (1_000_001, ["banded (1)", "banded (8)", "banded (64)"]),
    ],
)
def test_a_comparison_has_fewer_bands_than_rounds_and_the_square_root_up_to_a_million(
    rounds: int, names: list[str]
) -> None:
    workload = Workload(FixedOrder(rounds, rounds), 1.0, np.ones(rounds))
    assert list(BandedSquareRoot.comparisons(workload, BandedOptions())) == names


@pytest.mark.parametrize(("rounds", "bands"), [(1, 1), (3, 3), (4, 4), (5, 4)])
def test_a_comparison_has_four_bands_of_the_inverse_and_no_more_than_rounds(rounds: int, bands: int) -> None:
    workload = Workload(FixedOrder(rounds, rounds), 1.0, np.ones(rounds))
    compared = BandedInverseSquareRoot.comparisons(workload, BandedOptions())
    assert compared == {f"bisr ({bands})": BandedInverseSquareRoot(1.0, bands)}
