"""One record computed by itself, whatever it makes a model do: the one way in which this is ensured.

Rows of a matrix product round by their place in a batch, by how many rows there are and by the address of their
memory, and code that a silo permits may look at all of a batch.  So everything of which is said that a record
decides it alone is computed for one record after another, each the only row of a batch of public shape.

Linear scores and softmax that have the same bits on every processor and in any company.

A floating-point product rounds in an order of additions that follows from the processor, the row's place in a
batch, the batch's size and the address of its memory; the last bit of a score becomes another class under a query
that is made for it.  So scores are computed in integers, which no order of additions changes, and all that
follows is a written sequence of IEEE operations that are correctly rounded everywhere (+, -, ·, /, √, rint and
products with powers of two), each on whole columns: no library's exp, no library's sum.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

_ALIGNMENT = 64
"""Bytes, of all memory that torch allocates on a processor."""


def each_alone(
    of_one: Callable[..., Tensor],
    columns: Sequence[Tensor],
    nothing: Tensor,
    dummy: Sequence[Tensor] = (),
    least: int = 0,
) -> Iterator[Tensor]:
    """What `of_one` gives for each record, one after another, in the shape and the type of `nothing`.

    `of_one` takes one row of each column, (1, …).  `nothing` is given for a record on which it raises, or gives
    something of another shape.  Where there are fewer records than `least`, it is called for the `dummy` (one row
    a column) in their place, and `nothing` is given for each.

    Guarantee: what is given for a record is a function of its own row, of `of_one` and of public values, whatever
    the record makes `of_one` do, provided that this keeps nothing between calls.  The row, and what is given, lie
    in memory of their own, aligned as torch aligns all; a draw from torch's generator is the same for every
    record, and what `of_one` does to its row or to the modes of gradients reaches no other.  How often it is
    called follows from the number of records and `least` alone.  How long it takes is not hidden here.
    """
    count = len(columns[0])
    for place in range(max(count, least)):
        row, source = (place, columns) if place < count else (0, dummy)
        given = _attempt(of_one, [column[row : row + 1] for column in source], nothing)
        yield given if place < count else own(nothing)


def _attempt(of_one: Callable[..., Tensor], row: Sequence[Tensor], nothing: Tensor) -> Tensor:
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        with torch.inference_mode(False), torch.no_grad():
            given = of_one(*map(own, row))
            if given.shape == nothing.shape:
                return torch.empty_like(nothing).copy_(given)
    except (Exception, SystemExit):  # whatever a record makes a stranger's code do: it must not be seen who did
        pass
    finally:
        torch.set_rng_state(before)
    return own(nothing)


def own(values: Tensor) -> Tensor:
    """A copy in memory of its own: contiguous, and aligned as torch aligns all that it allocates."""
    return values.clone(memory_format=torch.contiguous_format)


def aligned(values: Tensor) -> Tensor:
    """`values`, or a copy of them where their memory is not aligned as torch aligns its own.

    Guarantee: products of the same values in the same shapes have the same bits in every process of one machine,
    wherever a message or an array put the values.
    """
    return values if values.is_contiguous() and values.data_ptr() % _ALIGNMENT == 0 else own(values)


def rows_apart(call: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
    """`call` of rows (B, …), to which each row is a batch of one: (B, outputs).

    No row can look at another.  For more than one record these are the numbers of `each_alone` up to rounding, at
    a fraction of the time, for simulations and public test records; one record is computed as it is.
    """
    if len(features) <= 1:
        return call(features)
    return vmap(lambda row: call(row.unsqueeze(0)).squeeze(0))(features)


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
