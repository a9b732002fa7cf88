"""Rounding to the grid: exact sums, and errors that give nothing away."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InputError, RunError
from fedpriv.secure_aggregation.grid import Grid, grid_for, log_total_variation

UNIT = 2.0**-10
values = st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=6)


def rounded(grid: Grid, value: float) -> int:
    return int(grid.encode(np.array([value])).view(np.int64)[0])


@given(values)
def test_a_sum_of_encoded_vectors_is_exact_and_signed(multiples: list[int]) -> None:
    grid = Grid(UNIT)
    messages = [grid.encode(np.array([k * UNIT, -k * UNIT])) for k in multiples]
    assert grid.decode_sum(messages).tolist() == [sum(multiples) * UNIT, -sum(multiples) * UNIT]


def test_a_sum_beyond_64_bits_wraps_as_a_residue() -> None:
    """The residue is a function of the sum: 3 · 2^61 units come back as 3 · 2^61 - 2^64 if added twice."""
    grid = Grid(1.0)
    words = grid.encode(np.array([3.0 * 2.0**60]))
    assert grid.decode_sum([words] * 4) == [3.0 * 2.0**62 - 2.0**64]


@given(st.lists(st.integers(-(2**30), 2**30), min_size=2, max_size=6))
def test_the_rounded_sum_is_the_exact_sum_with_the_errors_of_all_but_one_rounded(numerators: list[int]) -> None:
    """Guarantee, step 1: Σ round(X_i) = round(Y - Σ_{i<M} F_i), on 1/16ths of a unit, ties included."""
    grid, parts = Grid(1.0), [Fraction(numerator, 16) for numerator in numerators]
    whole = [rounded(grid, float(part)) for part in parts]
    errors = [part - number for part, number in zip(parts, whole, strict=True)]
    assert sum(whole) == rounded(grid, float(sum(parts) - sum(errors[:-1])))


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.8])
def test_the_distance_to_uniform_errors_is_bounded_for_two_silos(ratio: float) -> None:
    """Guarantee, step 2: numerically, for N(0, r²/2) folded into the cell; and the bound is not vacuous."""
    deviation = ratio / math.sqrt(2.0)
    cell = (np.arange(20_000) + 0.5) / 20_000 - 0.5
    density = sum(stats.norm.pdf(cell + n, scale=deviation) for n in range(-60, 61))
    distance = 0.5 * float(np.mean(np.abs(density - 1.0)))
    bound = math.exp(log_total_variation(ratio, 2))
    assert distance <= bound
    if bound < 0.1:
        assert bound < 5.0 * distance


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_the_distance_to_uniform_errors_is_bounded_for_three_silos(ratio: float) -> None:
    """By the Fourier series of the folded normal law with covariance r² (I - J/3)."""
    n = np.arange(-8, 9)
    first, second = np.meshgrid(n, n)
    form = first**2 + second**2 - (first + second) ** 2 / 3.0
    coefficients = np.exp(-2.0 * math.pi**2 * ratio**2 * form)
    turn = np.exp(2j * math.pi * np.outer((np.arange(200) + 0.5) / 200, n))
    density = np.real(turn @ coefficients @ turn.T)
    distance = 0.5 * float(np.mean(np.abs(density - 1.0)))
    assert 0.0 < distance <= math.exp(log_total_variation(ratio, 3))


@pytest.mark.parametrize("digits", [24, 53])
@pytest.mark.parametrize("fresh_std", [1e-6, 0.7, 1.0, 55.68])
def test_the_grid_is_a_power_of_two_with_half_of_the_digits_above_it(fresh_std: float, digits: int) -> None:
    unit = grid_for(fresh_std, 100, digits, 1.0).unit
    assert math.frexp(unit)[0] == 0.5
    assert 2.0 ** (digits // 2) <= fresh_std / unit < 2.0 ** (digits // 2 + 1)
    assert log_total_variation(fresh_std / unit, 100) < -4600.0


def test_a_grid_that_is_too_coarse_or_has_no_room_is_refused() -> None:
    with pytest.raises(InputError, match=r"federation\.silos = 3: too many"):
        grid_for(1.0, 3, 8, 1.0)
    assert grid_for(1.0, 3, 53, 2.0**22).unit == 2.0**-26
    with pytest.raises(InputError, match="do not fit on a grid"):
        grid_for(1.0, 3, 53, 2.0**22 + 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**62])
def test_what_cannot_be_encoded_is_refused(value: float) -> None:
    with pytest.raises(RunError, match="not finite, or outside"):
        Grid(1.0).encode(np.array([0.0, value]))
