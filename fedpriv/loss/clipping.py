"""Norms that are never too small, and the factors that clip with them.

A clip holds in exact arithmetic; a silo computes in floating point, at queries that its server may choose.  So
every norm here is an upper bound of the exact norm of what is added up, rounding of the sum included:

* relative rounding enlarges a norm by what it can be;
* squares that underflow and sums that overflow are kept out of reach: numbers above `largest_held` are not held;
* what is not finite, or not held, is set to zero by `where`: a product with 0 would keep a NaN.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.core.replicates import Scalar, is_known_true

_MAX_FLOAT32_SQUARES = 1024
_FACTOR_ROUNDINGS = 4.0  # of a factor, and of its products with an increment's numbers
_MAX_REPRESENTABLE = {torch.float32: 2.0**50, torch.float64: 2.0**400}
_EPS = {dtype: torch.finfo(dtype).eps for dtype in _MAX_REPRESENTABLE}
_FACTOR_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


class NormBounds(NamedTuple):
    """How large the increments of a batch can be, each (..., B) in float64."""

    norm: Tensor
    """At least the norm of each increment."""
    rounding_scale: Tensor
    """Times `roundings`, in relative roundings of the type they are summed in: what rounding adds at most."""
    rounding_count: float
    operand_norm: Tensor
    """At least the norm of everything that an increment is computed from."""


class Clipping(NamedTuple):
    """What each record's increment is multiplied by, (..., B) of the sum's type, and whether it is there."""

    factor: Tensor
    representable: Tensor | None
    """None where all records are known to be held, as they are in any honest run."""
    clipped_count: Tensor
    """How many records of weight above 0 were clipped, or not held: (...)."""
    is_clipped: Tensor | None
    """Which ones, (..., B); None where none is known to be."""

    def zero_unrepresentable(self, part: Tensor, axis: int = -1) -> Tensor:
        """`part`, whose axis `axis` goes through one record's values, with zeros for the records not held."""
        return part if self.representable is None else part.where(self.representable.unsqueeze(axis), 0.0)


def upper_norm(vectors: Tensor, axis: int = -1) -> Tensor:
    """At least the norm along an axis, without it in float64; inf or NaN where it is not known.

    Too large by about n/2 + 4 roundings of the type that n squares are added in, float32 for up to 1,024 of them.
    """
    size = vectors.shape[axis]
    factor, lost = _norm_correction(size, vectors.dtype)
    if _sums_in_float32(size, vectors.dtype):
        norm = _norm(vectors, axis)
    elif axis == -1:
        norm = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    else:
        norm = _norm(vectors.double(), axis)
    return norm.mul_(factor).add_(lost)


def joint_upper_norm(vectors: Tensor) -> float:
    """At least the norm of all `vectors` in a row, and so of each of them; as `upper_norm`, in fewer calls."""
    size = vectors.numel()
    factor, lost = _norm_correction(size, vectors.dtype)
    wide = None if _sums_in_float32(size, vectors.dtype) else torch.float64
    length: float = torch.linalg.vector_norm(vectors, dtype=wide).item() * factor + lost
    return length


def _sums_in_float32(size: int, dtype: torch.dtype) -> bool:
    """Whether so many squares are added in float32."""
    return dtype == torch.float32 and size <= _MAX_FLOAT32_SQUARES


def _norm_correction(size: int, dtype: torch.dtype) -> tuple[float, float]:
    """A factor of a norm of `size` squares and what is added to it, so that it is at least the exact one."""
    if _sums_in_float32(size, dtype):  # squares below 2^-126 may be lost: less than (2^-63)² of each
        return 1.0 + (0.51 * size + 4.0) * 2.0**-24, math.sqrt(size) * 2.0**-63
    return 1.0 + (0.51 * size + 4.0) * 2.0**-53, math.sqrt(size) * 2.0**-511


def _norm(vectors: Tensor, axis: int) -> Tensor:
    """In float64, of squares in the vectors' type; torch's own is slow along any axis but the last."""
    if axis == -1:
        norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return norm.double()
    return vectors.square().sum(axis, dtype=torch.float64).sqrt_()


def rank_one_bounds(gradient_norm: Tensor, input_norm: Tensor) -> NormBounds:
    """Of an outer product of two vectors with these upper norms (..., B)."""
    norm = gradient_norm * input_norm
    return NormBounds(norm, norm, _FACTOR_ROUNDINGS, torch.add(norm, gradient_norm).add_(input_norm))


def vector_bounds(norm: Tensor) -> NormBounds:
    """Of a vector that is there as such, with this upper norm (..., B)."""
    return NormBounds(norm, norm, _FACTOR_ROUNDINGS, norm)


def combine_bounds(sizes: Sequence[NormBounds]) -> NormBounds:
    """Of increments that have several parts, each of its own size."""
    norms = torch.stack([size.norm for size in sizes])
    spread = torch.stack([size.rounding_count * size.rounding_scale for size in sizes]).sum(0)
    return NormBounds(
        torch.linalg.vector_norm(norms, dim=0),
        spread,
        1.0,
        torch.stack([size.operand_norm for size in sizes]).sum(0),
    )


def clipping_if_certain(
    output_gradients: Tensor, max_input_norm: Callable[[], float], weights: Tensor, clip: Scalar
) -> Clipping | None:
    """What `clipping` gives where it clips none of the outer products of `slopes` and vectors of one batch.

    `slopes` are one below the other, (..., n, B), and `longest` gives at least the norm of each vector, as
    `upper_norm` does.  None if the common norm of the slopes does not tell: it is at least that of each, and for a
    handful of records it takes a fraction of the time of all norms.

    Guarantee: what is given is what `clipping` gives, bit for bit, so that its own guarantee holds.
    """
    if (
        not isinstance(clip, float)
        or not output_gradients.is_cpu
        or not 0 < output_gradients.numel() <= _MAX_FLOAT32_SQUARES
    ):
        return None
    slope, seen = joint_upper_norm(output_gradients), max_input_norm()
    norm = slope * seen * (1.0 + 2.0 * _FACTOR_ROUNDINGS * _EPS[weights.dtype])
    if not (norm <= clip and norm + slope + seen <= _MAX_REPRESENTABLE[weights.dtype]):
        return None
    shape = *output_gradients.shape[:-2], output_gradients.shape[-1]
    factor = weights if weights.shape == shape else weights.expand(shape)
    return Clipping(factor, None, output_gradients.new_zeros(shape[:-1], dtype=torch.int64), None)


def compute_clipping(bounds: NormBounds, weights: Tensor, clip: Scalar) -> Clipping:
    """weights · min(1, clip / norm) for increments of this size, `weights` (..., B) or (B,) in the sum's type.

    Guarantee: a factor times its increment, summed in the type of `weights`, has norm at most weight · `clip`
    whatever the increment is, for clips of 2^-40 to 2^40.  Records that are not finite, or too large for the type
    to hold, are not held and have factor 0.
    """
    bound, eps = _MAX_REPRESENTABLE[weights.dtype], _EPS[weights.dtype]
    held = None if never_above(bounds.operand_norm, bound) else bounds.operand_norm <= bound  # false for NaN
    norm = bounds.norm.add(bounds.rounding_scale, alpha=bounds.rounding_count * eps)
    if held is None and never_above(norm, clip):
        return Clipping(weights.expand(norm.shape), None, norm.new_zeros(norm.shape[:-1], dtype=torch.int64), None)
    # A true quotient: exactly 1 up to the clip, so that a record's factor is the same whatever stands beside it.
    factor = torch.div(norm, clip).clamp_(min=1.0).reciprocal_() * weights
    if held is not None:
        factor = factor.where(held, 0.0)
    beyond = factor * (1.0 + _FACTOR_TOLERANCE[weights.dtype]) < weights
    return Clipping(factor.to(weights.dtype), held, beyond.sum(-1), beyond)


def never_above(values: Tensor, bound: Scalar) -> bool:
    """Whether no value is above its bound, or NaN, as far as `certain` knows; a tensor's bounds broadcast."""
    if not values.numel():
        return True
    if isinstance(bound, float):  # a third of the time of tensors of booleans
        return values.is_cpu and (values.max() if values.numel() > 1 else values).item() <= bound
    return is_known_true((values <= bound).all())
