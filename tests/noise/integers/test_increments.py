"""Increments as integers: no float, and no flag of the processor, makes a row longer than K."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from fedpriv.loss.alone import softmax_residuals
from fedpriv.loss.objective import OuterProduct
from fedpriv.noise.integers import fixed_point, increments
from fedpriv.noise.integers.increments import (
    add_truncated,
    integer_residuals,
    squared_norms,
    suits_rank_one,
    sum_outer_products,
    sum_rank_one,
)
from fedpriv.noise.integers.strategies import choose_lattice
from tests.disordered import disordered
from tests.noise.integers.hostile_floats import CLIPS, random_rows, truncated

DRAWS = 400
"""Of rows of any floats, for each flag of the processor."""


def random_norm(generator: np.random.Generator) -> int:
    ways = generator.integers(1, 41), generator.integers(2**15, 2**37), generator.choice([2**36, 2**37 - 1, 2**52])
    return int(ways[generator.integers(3)])


def defined(row: np.ndarray, norm: int, factor: float) -> np.ndarray:
    """Definition of the integers, without bounds of any value: shrunk, scaled, truncated, checked."""
    with np.errstate(all="ignore"):
        values, exponent = increments.shrink_rows(row[None])
        scale = increments.row_scales(np.sqrt(squared_norms(values)), exponent, norm, factor)
        values = np.trunc(values * scale[:, None])
        is_within = squared_norms(values) <= increments.max_squared_norm(norm)
    return np.where(is_within[:, None], values, 0.0).astype(np.int64)[0]


@contextlib.contextmanager
def flushing(denormals: bool) -> Iterator[None]:
    """With denormals flushed to zero; only around what is tested, since hypothesis itself needs them."""
    torch.set_flush_denormal(denormals)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


both_flags = pytest.mark.parametrize("flushed", [False, True], ids=["denormals", "flushed"])


def exact_square(row: np.ndarray) -> int:
    return sum(int(value) ** 2 for value in row.tolist())


EDGES = [
    (np.full((1, 3), 1.7e308), 2**36, 1.0),
    (np.array([[np.nan, 1.0], [1.0, 1.0]]), 2**36, 1.0),
    (np.full((1, 7), 5e-324), 2**36, 2.0**-40),
    (np.full((2, 1), 3.0), 3, 1.0),
]


@both_flags
def test_no_truncated_row_is_longer_than_its_integer_norm(flushed: bool) -> None:
    generator = np.random.default_rng(10)
    drawn = ((random_rows(generator), random_norm(generator), generator.choice(CLIPS)) for _ in range(DRAWS))
    for given_rows, norm, clip in itertools.chain(EDGES, drawn):
        with flushing(flushed):
            found = truncated(given_rows, norm, norm / clip)
        assert found.dtype == np.int64
        assert found.shape == given_rows.shape
        for row, k in zip(given_rows, found, strict=True):
            assert exact_square(k) <= (norm**2 if np.all(np.isfinite(row)) else 0)


def test_no_scaling_factor_makes_a_row_longer_than_its_integer_norm() -> None:
    generator = np.random.default_rng(11)
    for _ in range(DRAWS):
        given_rows, factor = random_rows(generator), float(random_rows(generator, 1)[0, 0])
        assert max(map(exact_square, truncated(given_rows, 1000, factor))) <= 1000**2


@both_flags
@pytest.mark.parametrize("clip", [1.6e-44, 1e-310, 1e-38, 2.0**-40])
def test_denormal_clip_makes_no_row_longer_than_its_integer_norm(flushed: bool, clip: float) -> None:
    """Guards refuse such clips before any record is read; should one get here, it only costs utility."""
    generator = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        for kind in (np.float32, np.float64):
            given_rows = (generator.normal(size=(8, 50)) * clip).astype(kind)
            with flushing(flushed):
                found = truncated(given_rows, 2**36, float(np.float64(2**36) / clip))
            assert max(map(exact_square, found)) <= 2**72


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0.2, 0.99, 1.0, 5.0, 1e6])
def test_ordinary_increments_become_their_clipped_values_on_the_lattice(kind: type, size: float) -> None:
    """Clipped at 1 and within 2^-27 of the clip: truncation costs √d / K at most, the margin 2^-30."""
    generator, norm = np.random.default_rng(2), 2**36
    given_rows = generator.normal(size=(5, 1000))
    given_rows = (given_rows / np.linalg.norm(given_rows, axis=1, keepdims=True) * size).astype(kind)
    clipped = given_rows.astype(np.float64)
    clipped /= np.maximum(np.linalg.norm(clipped, axis=1, keepdims=True), 1.0)
    found = truncated(given_rows, norm, float(norm)) / norm
    assert np.max(np.linalg.norm(found - clipped, axis=1)) < 2.0**-27
    assert np.all(np.abs(found) <= np.abs(clipped) * (1 + 2.0**-50))  # towards zero: this is why no norm grows


def test_row_clipped_to_the_norm_is_not_zeroed_by_the_final_check() -> None:
    """Not refused by the last check: the aim leaves room for its allowance."""
    for size in (1, 3, 1000, 7850):
        k = truncated(np.ones((1, size)), 2**36, 2.0**60)
        assert math.isqrt(exact_square(k[0])) > 2**36 * (1 - 2.0**-25)


@both_flags
def test_a_row_depends_on_itself_alone(flushed: bool) -> None:
    """What the attacker would gain: one record's increment steered by another's."""
    generator = np.random.default_rng(3)
    given_rows = generator.normal(size=(7, 513)) * 10.0 ** generator.integers(-3, 3, (7, 1))
    with flushing(flushed):
        before = truncated(given_rows, 2**36, 2.0**36)
        for hostile in (np.nan, np.inf, -np.inf, 1e308, 5e-324, 0.0):
            changed = given_rows.copy()
            changed[[0, 2, 3, 6]] = hostile
            after = truncated(changed, 2**36, 2.0**36)
            assert np.array_equal(after[[1, 4, 5]], before[[1, 4, 5]])


@pytest.mark.parametrize(
    ("size", "compiled"), [*((size, False) for size in (2, 64, 65, 140)), (4096, True), (4097, True)]
)
def test_add_truncated_adds_the_integers_of_their_definition(
    size: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the edges of the pieces, for rows of any length, and for records that do not count."""
    if not compiled:
        monkeypatch.setattr(fixed_point, "compile_function", lambda *_: None)
    monkeypatch.setattr(increments, "_CHUNK_VALUES", 64)
    generator = np.random.default_rng(7)
    for length in (1e-200, 1e-100, 0.3, 1.0, 1e30, 1e200):
        for last in (1.0, 0.0, 1e-300, 1e-310, np.nan, np.inf, -np.inf):
            row = generator.normal(size=size)
            row *= length / np.linalg.norm(row)
            row[-1] *= last
            total, own = np.full(size, 5, np.int64), partial(np.array, row)
            for factor in (2.0**36, 1e150, math.inf, 0.0, -1.0):
                total[:] = 5
                add_truncated(total, own(), 2**36, factor, True)
                assert np.array_equal(total - 5, defined(row, 2**36, factor))
            add_truncated(total, own(), 2**36, 2.0**80, True)
            before = total.copy()
            add_truncated(total, own(), 2**36, 2.0**35, False)
            assert np.array_equal(total, before)
            add_truncated(total, own(), 2**36, math.nan, True)  # no number is a part of the sum
            assert np.array_equal(total, before)
            assert np.array_equal(row, own(), equal_nan=True)  # an increment is read only


@pytest.mark.parametrize("value", [2.0**-440, 2.0**60])
def test_values_beyond_the_bounds_are_shrunk_and_others_need_not_be(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Squares of values at a bound, and of their quotients, are normal numbers: 2^-1000 at least."""
    beyond = math.nextafter(value, 0.0 if value < 1.0 else math.inf)
    cases = [np.array([first, 0.0, 1.0]) for first in (value, -value, beyond, -beyond, math.nan)]
    expected, shrunk, shrink = [defined(case, 2**36, 2.0**36) for case in cases], [], increments.shrink_rows
    monkeypatch.setattr(increments, "shrink_rows", lambda rows: shrunk.append(rows[0, 0]) or shrink(rows))
    monkeypatch.setattr(increments, "compiled_or", lambda function, *_: function)
    for case, integers in zip(cases, expected, strict=True):
        total = np.zeros(3, np.int64)
        add_truncated(total, case, 2**36, 2.0**36, True)
        assert np.array_equal(total, integers)
    assert np.array_equal(shrunk, [beyond, -beyond, math.nan], equal_nan=True)


def test_squared_norms_of_long_rows_are_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2^22 values a plain float64 sum may err by more than the allowance."""
    generator = np.random.default_rng(4)
    given_rows = generator.normal(size=(2, 1000))
    whole = squared_norms(given_rows)
    monkeypatch.setattr(increments, "_BLOCK", 64)
    assert np.allclose(squared_norms(given_rows), whole, rtol=1e-14)
    assert exact_square(truncated(given_rows, 2**36, 2.0**36)[1]) <= 2**72


@pytest.mark.slow
def test_row_longer_than_a_block_stays_within_its_integer_norm() -> None:
    size = 2**22 + 5
    k = truncated(np.random.default_rng(5).normal(size=(1, size)).astype(np.float32), 2**36, 2.0**50)
    assert 2**72 * (1 - 2.0**-20) < exact_square(k[0]) <= 2**72


@pytest.mark.parametrize("factor", [1 + 2.0**-29, 1.01, 1.7, 1e3, 1e300])
def test_final_norm_check_holds_even_if_the_scaling_is_too_large(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Whatever happened before it, here a scale that is too large: rows are in the ball, or zeros."""
    ordinary = increments.row_scales
    monkeypatch.setattr(increments, "row_scales", lambda *arguments: ordinary(*arguments) * factor)
    generator = np.random.default_rng(8)
    for size in (1, 2, 50):
        for k in truncated(generator.normal(size=(40, size)) * 100, 2**36, 2.0**36):
            assert exact_square(k) <= 2**72
        x = generator.integers(-255, 256, (40, 7))
        residuals = integer_residuals(generator.normal(size=(40, size)) * 100, x, 2**36, 2.0**36)
        for r, feature in zip(residuals, x, strict=True):
            assert exact_square(r) * exact_square(feature) <= 2**72


def test_rows_within_the_rounding_allowance_of_the_norm_become_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float sums of squares may err by 2^-30: up to K² (1 - 2^-30) a row is surely not longer than K."""
    monkeypatch.setattr(
        increments, "row_scales", lambda size, exponent, *_: np.ldexp(np.ones_like(size), exponent)
    )
    norm = 2**36
    near, within = norm - 16, norm - 64  # squares of K² (1 - 2^-31) and K² (1 - 2^-29)
    assert truncated(np.array([[near, 0.0], [within, 0.0]]), norm, 1.0).tolist() == [[0, 0], [within, 0]]


@pytest.mark.parametrize("size", [1e-290, 1e-200, 1e200, 1e300])
def test_enormous_and_tiny_increments_are_clipped_and_not_lost(size: float) -> None:
    """Their squares over- and underflow: without the shift by a power of 2 they would count as nothing."""
    for sign in (1, -1):
        k = sign * truncated(np.full((1, 4), sign * size), 2**36, 1e308)
        assert k.tolist() == [[k[0, 0]] * 4]
        assert 2**35 * (1 - 2.0**-28) < k[0, 0] <= 2**35


@pytest.mark.every(8)
@pytest.mark.parametrize("offset", range(8))
def test_sums_of_squares_are_taken_in_aligned_memory(offset: int) -> None:
    """Gains: a record's integers differ by where in memory its increment happens to lie."""
    given_row = np.random.default_rng(1).standard_normal(600)
    expected = truncated(given_row[None], 2**36, 2.0**36)
    assert np.linalg.norm(expected[0].astype(float)) == pytest.approx(2**36, rel=1e-6)  # the norm cuts it off
    room = np.empty(len(given_row) + 8)[offset:][: len(given_row)]
    room[:] = given_row
    with disordered():
        first = truncated(given_row[None].copy(), 2**36, 2.0**36)
        assert np.array_equal(truncated(room[None], 2**36, 2.0**36), first)
        found, _ = increments.shrink_rows(room[None])
    assert found.ctypes.data % 64 == 0


def test_clips_become_norms_exactly() -> None:
    lattice = choose_lattice([0.75, 1.0], 36)
    assert lattice.unit == 2.0**-36
    assert (lattice.norm(1.0), lattice.norm(0.75)) == (2**36, 3 * 2**34)
    assert lattice.factor(batches=4) == 2.0**34
    for power in (1.0, 2.0**30):  # the largest float below, whose log2 rounds to 30
        near = math.nextafter(power, 0.0)
        assert choose_lattice([near], 36).norm(near) == 2**37 - 1


@both_flags
def test_no_outer_product_is_longer_than_its_integer_norm(flushed: bool) -> None:
    generator = np.random.default_rng(12)
    for _ in range(DRAWS):
        residuals, norm = random_rows(generator), random_norm(generator)
        x = generator.integers(-255, 256, (len(residuals), generator.integers(1, 7)))
        x *= generator.random(x.shape) < generator.random()
        with flushing(flushed):
            r = integer_residuals(residuals, x, norm, norm / 255.0)
        total = np.zeros((r.shape[1], x.shape[1]), object)
        for row, feature in zip(r, x, strict=True):
            assert exact_square(row) * exact_square(feature) <= norm**2
            total += np.outer(np.array([int(v) for v in row], object), feature.astype(object))
        assert sum_outer_products(r, x, norm).tolist() == total.ravel().tolist()


def test_rank_one_sums_match_the_general_path_up_to_truncation() -> None:
    generator, norm = np.random.default_rng(6), 2**36
    x = np.where(generator.random((50, 785)) < 0.2, generator.integers(0, 256, (50, 785)), 0)
    x[:, -1] = 255
    residuals = generator.normal(size=(50, 10)) * 3
    products = (residuals[:, :, None] * (x / 255)[:, None]).reshape(50, -1)
    general = truncated(products, norm, float(norm)).sum(axis=0)
    found = sum_outer_products(integer_residuals(residuals, x, norm, norm / 255), x, norm)
    assert np.linalg.norm(found - general) / np.linalg.norm(general) < 2.0**-20
    outer = OuterProduct(softmax_residuals, 10, 255, 255 * 28)
    assert suits_rank_one(norm, outer, 785)
    assert not suits_rank_one(2**31, outer._replace(max_feature_norm=255 * 1000), 785)
    assert not suits_rank_one(norm, outer, 2**20)  # weights of 19 bits
    small = outer._replace(denominator=1, max_feature_norm=1026)  # weights of 21 and 20 bits
    assert suits_rank_one(norm, small, 2**20)
    assert not suits_rank_one(norm, small, 2**20 + 1)  # squares of so many features may not add up exactly


def test_rank_one_rows_depend_on_themselves_alone() -> None:
    generator = np.random.default_rng(7)
    residuals, x = generator.normal(size=(6, 10)), generator.integers(0, 256, (6, 30))
    before = integer_residuals(residuals, x, 2**36, 2.0**36)
    for hostile in (np.nan, np.inf, 1e308, 5e-324):
        changed, other = residuals.copy(), x.copy()
        changed[::2], other[::2] = hostile, 2**40
        after = integer_residuals(changed, other, 2**36, 2.0**36)
        assert np.array_equal(after[1::2], before[1::2])
        assert not after[::2].any()


def test_more_features_than_2_to_the_20_are_refused() -> None:
    """Squares of up to 2^32 each add up exactly in float64 below 2^53."""
    residual, features = np.ones((1, 1)), np.ones((1, 2**20 + 1), np.int8)
    assert integer_residuals(residual, features[:, 1:], 2**36, 5.0).tolist() == [[5.0]]
    with pytest.raises(ValueError, match="at most 2\\^20"):
        integer_residuals(residual, features, 2**36, 5.0)


def test_rank_one_rows_do_not_depend_on_the_order_of_additions() -> None:
    """Guarantee: clipped rows too have the same bits in any order of additions and in any place."""
    generator = np.random.default_rng(9)
    residuals, x, norm = generator.normal(size=(60, 10)) * 5, generator.integers(0, 4, (60, 2)), 2**52
    expected = integer_residuals(residuals, x, norm, float(norm))
    with disordered():
        assert np.array_equal(integer_residuals(residuals, x, norm, float(norm)), expected)
        assert np.array_equal(integer_residuals(residuals[7:], x[7:], norm, float(norm)), expected[7:])


@pytest.mark.parametrize("row", [(5.5, 0.0), (0.0, -5.5), (math.nan, 1.0), (1.0, -math.inf)])
def test_a_record_with_a_feature_beyond_the_largest_norm_adds_nothing(row: tuple[float, float]) -> None:
    outer, rows = OuterProduct(softmax_residuals, 3, 2, 10), [(1.5, -2.0), (5.0, 0.0)]

    def total(*features: tuple[float, float]) -> list[int]:
        labels = np.zeros(len(features), np.int64)
        return list(sum_rank_one(outer, [np.zeros(6)], [1.0], np.array(features), labels, 2**36, 2.0**30).tolist())

    assert all(any(total(inside)) for inside in rows)
    assert total(rows[0], row, rows[1]) == total(*rows)


def test_outer_product_sums_are_exact_where_a_batch_exceeds_53_bits() -> None:
    norm, count = 2**50, 40
    x = np.ones((count, 2), np.int64)
    r = np.full((count, 1), float(2**49 - 1))
    assert sum_outer_products(r, x, norm).tolist() == [count * (2**49 - 1)] * 2
