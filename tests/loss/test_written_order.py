"""Numbers in written order are right and the same on every processor; a glance says what each record says."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.loss.alone import exp_nonpositive, integer_scores, softmax_residuals, sum_columns, weight_bits
from fedpriv.loss.clipping import (
    NormBounds,
    clipping_if_certain,
    combine_bounds,
    compute_clipping,
    joint_upper_norm,
    rank_one_bounds,
    upper_norm,
    vector_bounds,
)
from fedpriv.loss.layers import DenseTerms
from fedpriv.loss.linear import RecordBlock, SoftmaxRegression, _max_feature_norm
from fedpriv.loss.objective import Batch, Records
from tests.disordered import disordered

FEATURES, CLASSES, LEVELS, LARGEST = 785, 10, 255, 255 * 28 + 29
BITS = weight_bits(FEATURES, LARGEST)


def test_a_weight_has_what_is_left_of_53_bits() -> None:
    assert weight_bits(785, 2**15 - 1) == 27  # the specification's figure: 53 - 15 - 10 - 1
    assert weight_bits(1, 1) == 50
    assert weight_bits(1024, 2**15 - 1) == 27
    assert weight_bits(1025, 2**15 - 1) == 26


def test_exp_is_that_of_a_hundred_digits_to_two_units() -> None:
    draw = np.random.default_rng(1)
    values = np.concatenate([-draw.random(2000) * 40, -(2.0 ** draw.uniform(-60, 9.2, 2000)), [0.0, -0.0]])
    result = exp_nonpositive(values)
    with mpmath.workdps(100):
        for value, exp in zip(values.tolist(), result.tolist(), strict=True):
            assert abs(mpmath.mpf(exp) / mpmath.exp(mpmath.mpf(value)) - 1) < 2 * 2.0**-52
    assert exp_nonpositive(np.array([-np.inf, -600.1, -1e300])).tolist() == [0.0, 0.0, 0.0]
    assert exp_nonpositive(np.array([0.0])).tolist() == [1.0]


def test_golden_bits() -> None:
    """On every processor; a library's exp has other last bits here and there."""
    values = exp_nonpositive(-np.arange(1, 9) / 7.0)
    assert [value.hex() for value in values.tolist()] == GOLDEN


GOLDEN = [
    "0x1.bbd76b8a1ab98p-1", "0x1.80c1a1bae3d1ep-1", "0x1.4d896b8eddab2p-1", "0x1.2122bbd2f6b6ep-1",
    "0x1.f54a68a74e851p-2", "0x1.b28ecb95f8c94p-2", "0x1.78b56362cef38p-2", "0x1.468f70c8bee04p-2",
]  # fmt: skip


def some_query(seed: int, cancelling: bool) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    bright = generator.random((40, FEATURES)) < 0.2
    x = np.where(bright, generator.integers(0, 256, (40, FEATURES)), 0).astype(float)
    weights = generator.standard_normal((CLASSES, FEATURES)) * (2.0**36 if cancelling else 0.1)
    if cancelling:
        weights[:, 1::2] = -weights[:, : FEATURES - 1 : 2]
    return x, weights.ravel()


@pytest.mark.parametrize("cancelling", [False, True])
def test_scores_are_whole_and_no_order_of_additions_changes_them(cancelling: bool) -> None:
    """Guarantee: the same on every processor and in any order of additions, for weights that cancel too."""
    x, point = some_query(2, cancelling)
    result = integer_scores(point, CLASSES, x, LEVELS, BITS)
    assert np.abs(result.numerators).max() <= 2.0**52
    assert (result.numerators == np.rint(result.numerators)).all()
    generator = np.random.default_rng(3)
    for _ in range(5):
        order = generator.permutation(FEATURES)
        moved = point.reshape(CLASSES, FEATURES)[:, order].ravel()
        again = integer_scores(moved, CLASSES, x[:, order], LEVELS, BITS)
        assert np.array_equal(again.numerators, result.numerators)
    rows = generator.permutation(len(x))[:7]
    assert np.array_equal(
        integer_scores(point, CLASSES, x[rows], LEVELS, BITS).numerators, result.numerators[rows]
    )
    grid = np.rint(point.reshape(CLASSES, FEATURES) * 2.0**-result.exponent)
    exact = [sum(int(a) * int(b) for a, b in zip(x[5], row, strict=True)) for row in grid]
    assert result.numerators[5].tolist() == exact


def test_slopes_are_the_softmax_less_the_label() -> None:
    x, point = some_query(4, False)
    labels = np.arange(40) % CLASSES
    result = softmax_residuals(integer_scores(point, CLASSES, x, LEVELS, BITS), labels)
    logits = torch.from_numpy(x / LEVELS) @ torch.from_numpy(point.reshape(CLASSES, FEATURES)).T
    expected = logits.softmax(-1).numpy() - np.eye(CLASSES)[labels]
    assert np.abs(result - expected).max() < FEATURES * 2.0**-BITS  # what rounding the weights moves
    assert np.abs(result.sum(axis=1)).max() < 1e-14


def test_slopes_do_not_follow_from_a_processors_order() -> None:
    x, point = some_query(7, False)
    labels = np.arange(40) % CLASSES
    expected = softmax_residuals(integer_scores(point, CLASSES, x, LEVELS, BITS), labels)
    with disordered():
        assert np.array_equal(softmax_residuals(integer_scores(point, CLASSES, x, LEVELS, BITS), labels), expected)
        some = softmax_residuals(integer_scores(point, CLASSES, x[3:9], LEVELS, BITS), labels[3:9])
    assert np.array_equal(some, expected[3:9])


@given(st.lists(st.floats(width=64), min_size=20, max_size=20), st.integers(0, 9))
@settings(max_examples=80, derandomize=True)
def test_any_point_gives_finite_slopes(point: list[float], seed: int) -> None:
    """Guarantee: whatever bits the points have."""
    x = np.random.default_rng(seed).integers(-100, 101, (6, 10)).astype(float)
    labels = np.arange(6) % 2
    with np.errstate(all="ignore"):
        slopes = softmax_residuals(integer_scores(np.array(point), 2, x, 100, weight_bits(10, 350)), labels)
    assert np.isfinite(slopes).all()
    assert np.abs(slopes).max() <= 1.0


def test_a_sum_is_taken_from_the_first_column_to_the_last() -> None:
    values = np.random.default_rng(5).standard_normal((3, 40)) * 10.0 ** np.arange(-20, 20)
    expected = np.zeros(3)
    for place in range(40):
        expected = expected + values[:, place]
    assert sum_columns(values).tolist() == expected.tolist()


def test_rounded_weights_move_a_record_by_less_than_a_millionth() -> None:
    """Against the loss's own gradient in float64, at a point such as training reaches."""
    x, point = some_query(6, False)
    objective = SoftmaxRegression(FEATURES, CLASSES, 28.0, torch.float64, denominator=LEVELS)
    labels = torch.arange(40) % CLASSES
    slopes = softmax_residuals(integer_scores(point, CLASSES, x, LEVELS, BITS), labels.numpy())
    records = Records(torch.from_numpy(x / LEVELS), labels)
    batch = Batch(records, torch.ones(40, dtype=torch.float64))
    gradient = objective.gradient(torch.from_numpy(point), batch).numpy()
    result = (slopes.T @ (x / LEVELS)).ravel()
    assert np.linalg.norm(result - gradient) < 1e-6 * np.linalg.norm(gradient)


# Bounds of norms, and factors computed from them

WIDE, NARROW = torch.float64, torch.float32


@pytest.mark.parametrize(
    ("count", "dtype", "roundings", "unit", "lost"),
    [
        (3, NARROW, 0.51 * 3 + 4.0, 2.0**-24, 2.0**-63),
        (1024, NARROW, 0.51 * 1024 + 4.0, 2.0**-24, 2.0**-63),
        (1025, NARROW, 263.0, 2.0**-52, 2.0**-511),
        (4, WIDE, 3.0, 2.0**-52, 2.0**-511),
        (6, WIDE, 4.0, 2.0**-52, 2.0**-511),
    ],
)
def test_a_norm_is_enlarged_by_what_rounding_and_underflow_may_have_taken(
    count: int, dtype: torch.dtype, roundings: float, unit: float, lost: float
) -> None:
    """Add n · 0.51 + 4 roundings of a norm of 1, to the next float64, and √n of what one square may lose."""
    vectors = torch.zeros(1, 2, count, dtype=dtype)
    vectors[0, 1, -1] = 1.0
    for (bounds,) in (upper_norm(vectors), upper_norm(vectors.mT, -2)):
        assert bounds.tolist() == pytest.approx(
            [math.sqrt(count) * lost, 1.0 + roundings * unit], rel=2.0**-53, abs=0.0
        )
    assert [joint_upper_norm(vector) for vector in vectors[0]] == bounds.tolist()


@pytest.mark.parametrize("axis", [0, -1])
def test_a_norm_of_many_values_of_float32_has_no_rounding_of_float32(axis: int) -> None:
    vectors = torch.full((1025, 2) if axis == 0 else (2, 1025), 0.1, dtype=NARROW)
    exact = float(Fraction(float(vectors[0, 0]))) * math.sqrt(1025.0)
    assert upper_norm(vectors, axis).tolist() == pytest.approx([exact] * 2, rel=1e-12, abs=0.0)
    assert joint_upper_norm(vectors) == pytest.approx(math.sqrt(2.0) * exact, rel=1e-12, abs=0.0)


def test_parts_are_bounded_by_their_norms_and_all_their_roundings() -> None:
    one, two = rank_one_bounds(torch.tensor([3.0]), torch.tensor([2.0])), vector_bounds(torch.tensor([8.0]))
    assert one == NormBounds(torch.tensor([6.0]), torch.tensor([6.0]), 4.0, torch.tensor([11.0]))
    assert two == NormBounds(torch.tensor([8.0]), torch.tensor([8.0]), 4.0, torch.tensor([8.0]))
    both = torch.tensor([10.0]), torch.tensor([4.0 * 6.0 + 4.0 * 8.0]), 1.0, torch.tensor([19.0])
    joined = combine_bounds([one, two])
    assert torch.allclose(joined.norm, both[0].double(), rtol=1e-6, atol=0.0)
    assert joined[1:] == both[1:]


def test_guarantee_many_small_parts_beside_a_large_one_stay_within_the_clip() -> None:
    """Squares of 1e-16 beside 1 are lost one by one in float64, and 1,999 of them are not."""
    parts = [torch.ones(1, 1, dtype=WIDE), *(torch.full((1, 1), 1e-8, dtype=WIDE) for _ in range(1999))]
    bounds = combine_bounds([vector_bounds(upper_norm(part)) for part in parts])
    factor = compute_clipping(bounds, torch.ones(1, dtype=WIDE), 0.5).factor
    assert sum(Fraction(float(part * factor)) ** 2 for part in parts) <= Fraction(1, 4)


@pytest.mark.parametrize(("dtype", "limit", "tolerance"), [(NARROW, 2.0**50, 1e-4), (WIDE, 2.0**400, 1e-9)])
def test_a_factor_is_the_clip_by_the_norm_with_its_rounding(
    dtype: torch.dtype, limit: float, tolerance: float
) -> None:
    clip, eps = 2.5, torch.finfo(dtype).eps
    #  not clipped, clipped by its rounding, a little above and below the tolerance, too large, NaN, absent
    norms = [2.0, 3.0, clip * (1.0 + 1.1 * tolerance), clip * (1.0 + 0.9 * tolerance), 1.0, 1.0, 9.0]
    numbers = [limit, 1.0, 1.0, 1.0, math.nextafter(limit, math.inf), math.nan, 1.0]
    roundings = [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    norm, rounding, operands = (torch.tensor(row, dtype=WIDE) for row in (norms, roundings, numbers))
    bounds = NormBounds(norm, rounding, 1.0 / eps, operands)
    weights = torch.tensor([0.5] * 6 + [0.0], dtype=dtype)
    result = compute_clipping(bounds, weights, clip)
    expected = [0.5, 0.25, 0.5 / (1.0 + 1.1 * tolerance), 0.5 / (1.0 + 0.9 * tolerance), 0.0, 0.0, 0.0]
    assert result.factor.dtype == dtype
    assert result.factor.tolist() == pytest.approx(expected, rel=4.0 * eps)
    assert result.representable is not None
    assert result.is_clipped is not None
    assert result.representable.tolist() == [True] * 4 + [False] * 2 + [True]
    assert result.is_clipped.tolist() == [False, True, True, False, True, True, False]
    assert int(result.clipped_count) == 4
    part = torch.full((7, 2), math.nan)
    zeros = ~result.representable.unsqueeze(1).expand(7, 2)
    assert torch.equal(result.zero_unrepresentable(part) == 0.0, zeros)
    assert torch.equal(result.zero_unrepresentable(part.mT, 0) == 0.0, zeros.mT)


def test_factors_of_replicates_have_their_axes() -> None:
    sizes = torch.arange(12.0, dtype=WIDE).view(3, 2, 2)
    for clip, count in ((11.001, [[0, 0]] * 3), (4.5, [[0, 0], [1, 2], [2, 2]])):
        result = compute_clipping(vector_bounds(sizes), torch.ones(2, dtype=WIDE), clip)
        assert result.factor.shape == (3, 2, 2)
        assert result.clipped_count.tolist() == count
    result = compute_clipping(vector_bounds(1.0 / (11.0 - sizes)), torch.ones(2, dtype=WIDE), 1.0)
    counts = result.zero_unrepresentable(torch.ones(3, 2, 2, 5)).sum(-1)
    assert counts.flatten().tolist() == [5.0] * 11 + [0.0]


# A glance


CLIPS = st.floats(2.0**-40, 2.0**40)
ANY = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 3e38, 2.0**-64, 2.0**49, 2.0**50, 2.0**51]),
    st.floats(-2.0, 2.0, width=32),
)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    slopes=st.lists(ANY, min_size=6, max_size=6),
    seen=st.lists(st.one_of(ANY.map(abs), st.floats(0.0, 10.0)), min_size=3, max_size=3),
    weights=st.lists(st.floats(0.0, 2.0, width=32), min_size=3, max_size=3),
    clip=CLIPS,
    wide=st.booleans(),
    summed_wide=st.booleans(),
)
def test_a_glance_says_what_the_clip_of_each_record_says(
    slopes: list[float], seen: list[float], weights: list[float], clip: float, wide: bool, summed_wide: bool
) -> None:
    kind = torch.float64 if wide else torch.float32
    summed = torch.float64 if wide or summed_wide else torch.float32
    columns = torch.tensor(slopes, dtype=kind).view(2, 3).to(summed)
    norms, weight = torch.tensor(seen, dtype=torch.float64), torch.tensor(weights, dtype=summed)
    result = clipping_if_certain(columns, lambda: norms.max().item(), weight, clip)
    if result is None:
        return
    each = compute_clipping(rank_one_bounds(upper_norm(columns, -2), norms), weight, clip)
    assert result.representable is each.representable is None
    assert result.is_clipped is each.is_clipped is None
    assert torch.equal(result.factor, each.factor)
    assert torch.equal(result.clipped_count, each.clipped_count)


@pytest.mark.parametrize("clip", [0.999, 1.001])
def test_it_knows_a_clip_that_is_just_long_enough(clip: float) -> None:
    slopes = torch.tensor([[0.6], [0.8]])
    result = clipping_if_certain(slopes, lambda: 1.0, torch.ones(1), clip)
    assert (result is not None) == (clip > 1.0)


@pytest.mark.parametrize(("dtype", "limit"), [(NARROW, 2.0**50), (WIDE, 2.0**400)])
def test_a_glance_counts_roundings_twice_and_all_numbers(dtype: torch.dtype, limit: float) -> None:
    """Below are a norm of 1, for 0.51 + 4 roundings of its own and 8 ε, and numbers up to the limit."""
    one, weights = torch.ones(1, 1), torch.tensor([0.5], dtype=dtype)
    rounding = 4.51 * 2.0**-24 + 8.0 * torch.finfo(dtype).eps
    for share in (0.98, 1.02):
        assert (clipping_if_certain(one, lambda: 1.0, weights, 1.0 + share * rounding) is None) == (share < 1.0)
    # The numbers are the gradient of norm 1, the input and their product.
    assert clipping_if_certain(one, lambda: 0.499 * limit, weights, limit) is not None
    assert clipping_if_certain(one, lambda: 0.501 * limit, weights, limit) is None
    assert clipping_if_certain(limit * one.to(dtype), lambda: 1.0 / limit, weights, 9.0) is None
    result = clipping_if_certain(torch.ones(3, 2, 4, 1), lambda: 1.0, weights, 9.0)
    assert result is not None
    assert torch.equal(result.factor, weights)
    assert torch.equal(result.clipped_count, torch.zeros(3, 2, dtype=torch.int64))


def test_it_does_not_look_where_each_replicate_has_a_clip_of_its_own_or_records_are_many() -> None:
    def looked() -> float:
        raise AssertionError("nobody asks for the longest")

    assert clipping_if_certain(torch.zeros(2, 2, 1), looked, torch.ones(1), torch.tensor([[1.0], [2.0]])) is None
    assert clipping_if_certain(torch.zeros(1, 1025), looked, torch.ones(1025), 1.0) is None
    assert clipping_if_certain(torch.zeros(1, 1024), lambda: 1.0, torch.ones(1024), 1.0) is not None
    assert clipping_if_certain(torch.zeros(2, 0), looked, torch.ones(0), 1.0) is None


@pytest.mark.slow
@settings(max_examples=300)
@given(values=st.lists(ANY, min_size=1, max_size=6), wide=st.booleans(), long=st.booleans())
def test_the_length_of_all_is_at_least_the_norm_of_each(values: list[float], wide: bool, long: bool) -> None:
    """Also beyond 1,024 values, from where on squares are added in float64; NaN and infinity say nothing."""
    vectors = torch.tensor(values, dtype=torch.float64 if wide else torch.float32).unsqueeze(-1)
    vectors = vectors.expand(-1, 300 if long else 2)
    length, norms = joint_upper_norm(vectors), upper_norm(vectors)
    if math.isfinite(length):
        exact = sum(Fraction(value) ** 2 for value in vectors.double().flatten().tolist())
        assert Fraction(length) ** 2 >= exact
    if len(values) == 1 and not long:
        assert length == norms.item() or math.isnan(length)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**31), together=st.integers(1, 3), wide=st.booleans())
def test_a_block_knows_the_longest_of_each_round(seed: int, together: int, wide: bool) -> None:
    """As records that are no part of a block are looked at: the same number for the same records."""
    draw, kind = torch.Generator().manual_seed(seed), torch.float64 if wide else torch.float32
    features = torch.randn(4, together, 9, generator=draw)
    block = RecordBlock(Records(features, torch.zeros(4, together, dtype=torch.int64)), 2)
    for of_round in block.split_rounds():
        assert _max_feature_norm(of_round, kind) == _max_feature_norm(of_round.shared, kind)


@pytest.mark.parametrize("terms", [2, 3])
def test_guarantee_a_norm_from_products_is_at_least_the_exact_one(terms: int) -> None:
    """Σ_k u_k v_k of numbers that nearly cancel, against fractions: the roundings cover all that floats lose."""
    draw = np.random.default_rng(7)
    for _ in range(500):
        slopes = draw.standard_normal((terms, 1))
        seen = draw.standard_normal((terms, 1))
        seen[-1] = -(slopes[:-1] * seen[:-1]).sum() / slopes[-1] * (1.0 + draw.choice([0.0, 1e-16, 1e-9, 0.3]))
        exact = sum(Fraction(float(u)) * Fraction(float(v)) for u, v in zip(slopes[:, 0], seen[:, 0], strict=True))
        held = DenseTerms(*([torch.from_numpy(each)[None] for each in parts] for parts in (slopes, seen)), False)
        assert Fraction(float(held.norm_bounds().norm)) ** 2 * (1 + Fraction(1, 2**50)) >= exact**2
