"""The grid of masked simulations: exact sums of what was rounded."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.core.errors import InputError, RunError
from fedpriv.rounds.arithmetic import Grid, grid_for

UNIT = 2.0**-10
values = st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=6)


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


@pytest.mark.parametrize("digits", [24, 53])
@pytest.mark.parametrize("share", [1e-6, 0.7, 1.0, 55.68])
def test_the_grid_is_a_power_of_two_with_half_of_the_digits_above_it(share: float, digits: int) -> None:
    unit = grid_for(share, digits, 1.0).unit
    assert math.frexp(unit)[0] == 0.5
    assert 2.0 ** (digits // 2) <= share / unit < 2.0 ** (digits // 2 + 1)


def test_a_grid_that_has_no_room_is_refused() -> None:
    assert grid_for(1.0, 53, 2.0**22).unit == 2.0**-26
    with pytest.raises(InputError, match="do not fit on a grid"):
        grid_for(1.0, 53, 2.0**22 + 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**62])
def test_what_cannot_be_encoded_is_refused(value: float) -> None:
    with pytest.raises(RunError, match="not finite, or outside"):
        Grid(1.0).encode(np.array([0.0, value]))
