"""Scores in integers and softmax in written order: right, and the same whatever order a processor adds in."""

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.loss.alone import exp_nonpositive, integer_scores, softmax_residuals, sum_columns, weight_bits
from fedpriv.loss.linear import SoftmaxRegression
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
    generator = np.random.default_rng(1)
    values = np.concatenate(
        [-generator.random(2000) * 40, -(2.0 ** generator.uniform(-60, 9.2, 2000)), [0.0, -0.0]]
    )
    found = exp_nonpositive(values)
    with mpmath.workdps(100):
        for value, exp in zip(values.tolist(), found.tolist(), strict=True):
            assert abs(mpmath.mpf(exp) / mpmath.exp(mpmath.mpf(value)) - 1) < 2 * 2.0**-52
    assert exp_nonpositive(np.array([-np.inf, -600.1, -1e300])).tolist() == [0.0, 0.0, 0.0]
    assert exp_nonpositive(np.array([0.0])).tolist() == [1.0]


def test_golden_bits() -> None:
    """On every processor; a library's exp has other last bits here and there."""
    values = exp_nonpositive(-np.arange(1, 9) / 7.0)
    assert [value.hex() for value in values.tolist()] == GOLDEN


GOLDEN = [
    "0x1.bbd76b8a1ab98p-1",
    "0x1.80c1a1bae3d1ep-1",
    "0x1.4d896b8eddab2p-1",
    "0x1.2122bbd2f6b6ep-1",
    "0x1.f54a68a74e851p-2",
    "0x1.b28ecb95f8c94p-2",
    "0x1.78b56362cef38p-2",
    "0x1.468f70c8bee04p-2",
]


def some_query(seed: int, cancelling: bool) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = np.where(generator.random((40, FEATURES)) < 0.2, generator.integers(0, 256, (40, FEATURES)), 0).astype(
        float
    )
    weights = generator.standard_normal((CLASSES, FEATURES)) * (2.0**36 if cancelling else 0.1)
    if cancelling:
        weights[:, 1::2] = -weights[:, : FEATURES - 1 : 2]
    return x, weights.ravel()


@pytest.mark.parametrize("cancelling", [False, True])
def test_scores_are_whole_and_no_order_of_additions_changes_them(cancelling: bool) -> None:
    """Guarantee: the same on every processor and in any order of additions, for weights that cancel too."""
    x, point = some_query(2, cancelling)
    found = integer_scores(point, CLASSES, x, LEVELS, BITS)
    assert np.abs(found.numerators).max() <= 2.0**52
    assert (found.numerators == np.rint(found.numerators)).all()
    generator = np.random.default_rng(3)
    for _ in range(5):
        order = generator.permutation(FEATURES)
        moved = point.reshape(CLASSES, FEATURES)[:, order].ravel()
        assert np.array_equal(
            integer_scores(moved, CLASSES, x[:, order], LEVELS, BITS).numerators, found.numerators
        )
    rows = generator.permutation(len(x))[:7]
    assert np.array_equal(integer_scores(point, CLASSES, x[rows], LEVELS, BITS).numerators, found.numerators[rows])
    exact = [sum(int(a) * int(b) for a, b in zip(x[5], row, strict=True)) for row in _grid(point, found.exponent)]
    assert found.numerators[5].tolist() == exact


def _grid(point: np.ndarray, exponent: int) -> np.ndarray:
    return np.rint(point.reshape(CLASSES, FEATURES) * 2.0**-exponent)


def test_slopes_are_the_softmax_less_the_label() -> None:
    x, point = some_query(4, False)
    labels = np.arange(40) % CLASSES
    found = softmax_residuals(integer_scores(point, CLASSES, x, LEVELS, BITS), labels)
    logits = torch.from_numpy(x / LEVELS) @ torch.from_numpy(point.reshape(CLASSES, FEATURES)).T
    expected = logits.softmax(-1).numpy() - np.eye(CLASSES)[labels]
    assert np.abs(found - expected).max() < FEATURES * 2.0**-BITS  # what rounding the weights moves
    assert np.abs(found.sum(axis=1)).max() < 1e-14


def test_slopes_do_not_follow_from_a_processors_order() -> None:
    x, point = some_query(7, False)
    labels = np.arange(40) % CLASSES
    expected = softmax_residuals(integer_scores(point, CLASSES, x, LEVELS, BITS), labels)
    with disordered():
        assert np.array_equal(softmax_residuals(integer_scores(point, CLASSES, x, LEVELS, BITS), labels), expected)
        some = softmax_residuals(integer_scores(point, CLASSES, x[3:9], LEVELS, BITS), labels[3:9])
    assert np.array_equal(some, expected[3:9])


@given(st.lists(st.floats(width=64), min_size=20, max_size=20), st.integers(0, 9))
@settings(max_examples=200, deadline=None, derandomize=True)
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
    found = (slopes.T @ (x / LEVELS)).ravel()
    assert np.linalg.norm(found - gradient) < 1e-6 * np.linalg.norm(gradient)
