"""Masks cancel in the sum of all silos and hide everything else; their grid adds what was rounded exactly."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import KeyedNormal, seed_key
from fedpriv.rounds.arithmetic import Grid, Words, grid_for
from fedpriv.silo.masks import Masker


def maskers(silos: int, run: int = 0) -> list[Masker]:
    source = KeyedNormal(seed_key(run, "noise"))
    return [Masker(source.secret(number), number) for number in range(silos)]


def masks(of: list[Masker], t: int, size: int) -> list[Words]:
    keys = b"".join(masker.public for masker in of)
    return [masker.mask(keys, len(of), t, size) for masker in of]


def p_value(words: Words) -> float:
    """Of the bytes being uniform: χ² with 255 degrees of freedom."""
    return float(stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue)


@settings(max_examples=25, deadline=None)
@given(silos=st.integers(2, 7), size=st.integers(1, 40), t=st.integers(1, 2**40), run=st.integers(0, 2**64))
def test_masks_of_all_silos_cancel_exactly(silos: int, size: int, t: int, run: int) -> None:
    assert not np.any(np.sum(masks(maskers(silos, run), t, size), axis=0, dtype=np.uint64))


def test_a_masked_message_is_uniform_and_so_is_every_sum_of_fewer_than_all() -> None:
    """Guarantee: silos send a constant; 15 tests at level 1e-6 and a fixed seed; without masks each fails."""
    constant = np.full(20_000, 12345, np.uint64)
    messages = [constant + mask for mask in masks(maskers(4), 3, len(constant))]
    for count in (1, 2, 3):
        for subset in combinations(messages, count):
            assert p_value(np.sum(subset, axis=0, dtype=np.uint64)) > 1e-6
    assert np.array_equal(np.sum(messages, axis=0, dtype=np.uint64), 4 * constant)
    assert p_value(constant) < 1e-100


def test_masks_of_rounds_and_runs_have_nothing_in_common() -> None:
    """Level 1e-6 each: differences of one silo's masks are as uniform as the masks."""
    of, others = maskers(3), maskers(3, run=1)
    first, second = masks(of, 1, 20_000)[0], masks(of, 2, 20_000)[0]
    elsewhere = masks(others, 1, 20_000)[0]
    assert p_value(first - second) > 1e-6
    assert p_value(first - elsewhere) > 1e-6
    assert np.array_equal(first, masks(maskers(3), 1, 20_000)[0])


def test_keys_that_would_leave_a_message_bare_are_refused() -> None:
    of = maskers(3)
    good = [masker.public for masker in of]
    again = [(int.from_bytes(key, "little") | 1 << 255).to_bytes(32, "little") for key in good]
    for keys, reason in (
        ([], "expected 3 different public keys"),
        (good[:1], "expected 3 different public keys"),
        ([*good, bytes(32)], "expected 3 different public keys"),
        ([good[0], good[1], good[1]], "expected 3 different public keys"),
        ([good[1], good[0], good[2]], "another public key as this silo's"),
        ([good[0], good[1], again[1]], "is none"),  # the point of silo 1 again, in other bytes
        ([good[0], again[0], good[2]], "is none"),  # its own: a mask agreed on with itself
        ([good[0], good[1], (2**255 - 19 + 9).to_bytes(32, "little")], "is none"),
        ([good[0], good[1], bytes(32)], "is none"),  # a point of low order: the shared secret would be 0
    ):
        with pytest.raises(RunError, match=f"silo 0: .*{reason}"):
            of[0].mask(b"".join(keys), 3, 1, 8)
    assert np.any(of[0].mask(b"".join(good), 3, 1, 8))


def test_each_run_and_silo_has_a_key_of_its_own() -> None:
    public = {masker.public for run in (0, 1) for masker in maskers(3, run)}
    assert len(public) == 6


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
