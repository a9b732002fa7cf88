"""Linear scores and softmax that have the same bits on every processor and in any company.

A floating-point product rounds in an order of additions that follows from the processor, the row's place in a
batch, the batch's size and the address of its memory; the last bit of a score becomes another class under a query
that is made for it.  So scores are computed in integers, which no order of additions changes, and all that
follows is a written sequence of IEEE operations that are correctly rounded everywhere (+, -, ·, /, √, rint and
products with powers of two), each on whole columns: no library's exp, no library's sum.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_WHOLE = 52
"""Partial sums of scores stay at or below 2^52, and so below the 2^53 from which float64 would round."""
LEAST_BITS = 20
"""Of a weight, below which increments are formed one by one instead."""

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
"""ln 2 in two parts; the first has 21 zeros at its end, so that its products with exponents are exact."""
_VANISHES = -600.0
"""exp of less counts as 0: beside the largest term of a softmax, which is 1, it is below 1e-260."""
_NEAR_ZERO = -200
"""Exponents of scores below this are raised to it: exp of such a score is 1 in float64 either way."""


class Scores(NamedTuple):
    """Linear scores of B records: whole / levels · 2^exponent, exactly."""

    whole: Floats
    """(B, classes), integers of at most 2^52."""
    levels: int
    exponent: int


def weight_bits(features: int, largest: int) -> int:
    """Bits b of a weight: no partial sum of `features` products with integers up to `largest` exceeds 2^52."""
    return _WHOLE - largest.bit_length() - max(1, features - 1).bit_length()


def scores_of(point: NDArray[np.floating], classes: int, whole: Floats, levels: int, bits: int) -> Scores:
    """Scores of records with integer features `whole` (B, f) at a `point` (classes · f,) rounded to `bits` bits.

    Weights are rounded to the multiples of 2^(e - bits), where 2^e is the least power of two above all of them:
    a public grid of the query's, which moves a weight by at most 2^-(bits + 1) of 2^e.  A point with a value that
    is not finite gives zeros.

    Guarantee: the scores of a record are a function of its own features and of the query, the same on every
    processor and in any order of additions: products and partial sums are integers of at most 2^52 where
    `bits` = `weight_bits` and features are at most `largest`, and float64 adds such integers without rounding.
    """
    weights = np.array(point, np.float64).reshape(classes, -1)
    top = float(np.abs(weights).max(initial=0.0))
    if not math.isfinite(top):
        weights, top = np.zeros_like(weights), 0.0
    exponent = math.frexp(top)[1]
    half = (bits - exponent) // 2  # 2^(bits - e) itself may be out of range
    grid = np.rint(np.ldexp(np.ldexp(weights, half), bits - exponent - half))
    return Scores(np.matmul(whole, grid.T), levels, exponent - bits)


def softmax_slopes(scores: Scores, labels: NDArray[np.int64]) -> Floats:
    """softmax(scores) - onehot(labels), (B, classes): the cross-entropy's derivative by the scores.

    Off by less than 1e-14 from the softmax of these scores.

    Guarantee: row b is a function of row b of the arguments, with the same bits on every processor.
    """
    below = scores.whole - scores.whole.max(axis=-1, keepdims=True)  # exact: integers below 2^53
    with np.errstate(over="ignore"):
        shares = exp_of_negative(np.ldexp(below / scores.levels, max(scores.exponent, _NEAR_ZERO)))
    shares /= sum_in_order(shares)[:, None]
    shares -= labels[:, None] == np.arange(shares.shape[1])
    return shares


def exp_of_negative(values: Floats) -> Floats:
    """exp of values ≤ 0, -∞ included, to 2 units in the last place; 0 below -600.

    exp(x) = 2^n exp(r) with n = rint(x / ln 2) and |r| ≤ 0.35, where Taylor's polynomial of degree 14 errs by less
    than 2e-19; each step is one correctly rounded operation, so that no processor may fuse two of them.
    """
    bounded = np.maximum(values, _VANISHES)
    power = np.rint(bounded * _LOG2_E)
    rest = bounded - power * _LN2_HIGH
    rest = rest - power * _LN2_LOW
    result = np.full_like(rest, 1.0 / math.factorial(14))
    for degree in range(13, -1, -1):
        result *= rest
        result += 1.0 / math.factorial(degree)
    return np.where(values < _VANISHES, 0.0, np.ldexp(result, power.astype(np.int64)))


def sum_in_order(values: Floats) -> Floats:
    """Σ of each row of (B, columns), from the first column to the last, (B,)."""
    total = np.zeros(len(values))
    for column in values.T:
        total = total + column
    return total
