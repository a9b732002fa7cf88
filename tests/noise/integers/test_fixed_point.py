"""Fixed-point products and directed roots are exact: compared with Python's integers and rationals."""

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedpriv.noise.integers.fixed_point import (
    COEFFICIENT_ONE,
    compile_function,
    repeated_squares,
    round_coefficient,
    scale_bound,
    scale_integers,
    to_coefficient,
)
from fedpriv.noise.integers.strategies import round_up_to_float, sqrt_above

LIMIT = 2**61 - 1
values = st.one_of(
    st.integers(-LIMIT, LIMIT),
    st.sampled_from([0, 1, -1, COEFFICIENT_ONE, -COEFFICIENT_ONE, LIMIT, -LIMIT, COEFFICIENT_ONE - 1]),
)
multipliers = st.one_of(
    st.integers(0, COEFFICIENT_ONE),
    st.sampled_from([0, 1, COEFFICIENT_ONE - 1, COEFFICIENT_ONE, COEFFICIENT_ONE // 2]),
)


@settings(max_examples=100)
@given(st.lists(values, min_size=1, max_size=8), multipliers, st.sampled_from([0, 1, 10, 24, 29]))
@example([LIMIT, -LIMIT], COEFFICIENT_ONE, 0)
@example([3, -3, 1, -1], COEFFICIENT_ONE // 2, 0)  # halves go up
def test_a_scaled_integer_is_the_rounded_product(numbers: list[int], multiplier: int, extra: int) -> None:
    found = scale_integers(np.array(numbers, np.int64), multiplier, extra).tolist()
    divisor = 1 << (31 + extra)
    assert found == [(number * multiplier + divisor // 2) // divisor for number in numbers]
    assert max(map(abs, found)) <= scale_bound(max(map(abs, numbers)), multiplier, extra)


@settings(max_examples=100)
@given(values, st.integers(-10, 10), multipliers)
def test_rounding_changes_the_difference_of_neighbours_by_at_most_one(
    number: int, moved: int, multiplier: int
) -> None:
    pair = np.clip(np.array([number, number + moved]), -LIMIT, LIMIT)
    first, second = scale_integers(pair, multiplier).tolist()
    real = Fraction(int(pair[1]) - int(pair[0])) * multiplier / COEFFICIENT_ONE
    assert abs(second - first - real) <= 1


def test_scaling_leaves_its_argument_alone() -> None:
    given_values = np.arange(5)
    scale_integers(given_values, COEFFICIENT_ONE // 3)
    scale_integers(given_values, COEFFICIENT_ONE // 3, 4)
    assert given_values.tolist() == [0, 1, 2, 3, 4]


def test_without_numba_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compile_function(lambda: 0) is None


@given(st.floats(0.0, 1.0))
def test_coefficients_are_the_nearest_multiples(value: float) -> None:
    assert abs(Fraction(round_coefficient(value)) - Fraction(value)) <= Fraction(1, 2**32)
    assert to_coefficient(round_coefficient(value)) == to_coefficient(value)


@given(st.integers(0, COEFFICIENT_ONE))
def test_squarings_are_correctly_rounded_powers(multiplier: int) -> None:
    squares = repeated_squares(multiplier, 7)
    assert len(squares) == 7
    for level, found in enumerate(squares):
        exact = Fraction(multiplier, COEFFICIENT_ONE) ** (2**level) * COEFFICIENT_ONE
        assert abs(found - exact) <= Fraction(1, 2) + Fraction(1, 2**100)


@settings(max_examples=100)
@given(st.fractions(min_value=0, max_denominator=10**40), st.integers(-300, 300))
@example(Fraction(4), 0)
@example(Fraction(0), 0)
def test_square_root_is_rounded_up_to_the_smallest_float_not_below_the_truth(value: Fraction, shift: int) -> None:
    value = value * Fraction(2) ** shift
    root = sqrt_above(value)
    assert Fraction(root) ** 2 >= value
    assert root == 0.0 or Fraction(math.nextafter(root, 0.0)) ** 2 < value
    above = round_up_to_float(value)
    assert Fraction(above) >= value
    assert above == 0.0 or Fraction(math.nextafter(above, 0.0)) < value
