"""Norm bounds that are never too small, and clipping factors computed from them.

An increment is the vector that is clipped for a record: its gradient, or a combination of its gradients at several
points.  A batch of B records contributes the sum of its clipped increments, each times its record's weight, which
is not negative.

A clip holds in exact arithmetic, but increments are computed in floating point, at queries that a server may
choose.  So an increment is clipped by an upper bound of the exact norm of the vector that is added up:

* A norm is enlarged by its largest relative rounding, and by the largest norm that squares may lose by underflow.
* The rounding of the increment itself, and of its product with the factor, is added to its norm.
* Increments computed from numbers that are not finite, or whose norm may be above `_MAX_REPRESENTABLE`, might
  overflow.  They are not representable, and are set to zero.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.core.replicates import Scalar, is_known_true

_MAX_FLOAT32_SQUARES = 1024
"""Most squares of one norm that are computed in float32."""
_FACTOR_ROUNDINGS = 4.0
"""Number of relative roundings of a factor and of its products with an increment's numbers."""
_MAX_REPRESENTABLE = {torch.float32: 2.0**50, torch.float64: 2.0**400}
"""Largest operand norm of a representable increment, by the type of the sum."""
_EPS = {dtype: torch.finfo(dtype).eps for dtype in _MAX_REPRESENTABLE}
_FACTOR_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest relative excess of a norm over the clip for which its record does not count as clipped."""


class NormBounds(NamedTuple):
    """Bounds on the size of each increment of a batch, with tensors (..., B) in float64."""

    norm: Tensor
    """Upper bound of the norm of each increment."""
    rounding_scale: Tensor
    """Norm to which roundings are relative, as each is relative to a term of the increment.

    `rounding_scale` · `rounding_count` · eps bounds the norm that rounding adds, with eps the machine epsilon of
    the sum's type.
    """
    rounding_count: float
    """Number of relative roundings of `rounding_scale`."""
    operand_norm: Tensor
    """Upper bound of the norm of all numbers that represent an increment.

    The numbers are the increment's values, or its factors and their products.
    """


class Clipping(NamedTuple):
    """Clipping factor of each record's increment, and a mask of representable increments."""

    factor: Tensor
    """Weight · min(1, clip / norm) of each record, (..., B) or (B,), in the sum's type.

    The factor is 0 for an increment that is not representable.
    """
    representable: Tensor | None
    """Mask of representable increments, (..., B), or None if all are known to be representable."""
    clipped_count: Tensor
    """Number of records of weight above 0 that were clipped or not representable, (...)."""
    is_clipped: Tensor | None
    """Mask of the records that `clipped_count` counts, (..., B), or None if the count is 0 for certain."""

    def zero_unrepresentable(self, part: Tensor, axis: int = -1) -> Tensor:
        """Set the values of unrepresentable increments to zero.

        Args:
            part: Values of the increments, (..., B, n), or (..., n, B) with `axis` = -2.
            axis: Axis of `part` that goes through one record's n values.
        """
        return part if self.representable is None else part.where(self.representable.unsqueeze(axis), 0.0)


def upper_norm(vectors: Tensor, axis: int = -1) -> Tensor:
    """Bound the norm along an axis from above, in float64, and drop the axis.

    The bound is the computed norm, enlarged by all that rounding and underflow may have taken from it.  It is inf
    or NaN if a value is not finite, and may be inf if squares overflow.

    Args:
        vectors: Vectors of n values along `axis`, float32 or float64.
        axis: Axis of the values.
    """
    size = vectors.shape[axis]
    factor, summand = _norm_correction(size, vectors.dtype)
    if _sums_in_float32(size, vectors.dtype):
        norm = _norm(vectors, axis)
    elif axis == -1:
        norm = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    else:
        norm = _norm(vectors.double(), axis)
    return norm.mul_(factor).add_(summand)


def joint_upper_norm(vectors: Tensor) -> float:
    """Bound the norm of all vectors joined to one from above, and so the norm of each vector.

    The vectors are a tensor of any shape, which is read as one vector of all its values.  The bound is computed
    like `upper_norm`, in fewer calls.
    """
    size = vectors.numel()
    factor, summand = _norm_correction(size, vectors.dtype)
    dtype = None if _sums_in_float32(size, vectors.dtype) else torch.float64
    return float(torch.linalg.vector_norm(vectors, dtype=dtype)) * factor + summand


def _sums_in_float32(size: int, dtype: torch.dtype) -> bool:
    """Whether the squares of `size` values of this type are computed in float32, and not in float64."""
    return dtype == torch.float32 and size <= _MAX_FLOAT32_SQUARES


@lru_cache(maxsize=256)
def _norm_correction(size: int, dtype: torch.dtype) -> tuple[float, float]:
    """Factor and summand that turn a computed norm of `size` values into an upper bound."""
    if _sums_in_float32(size, dtype):  # squares below 2^-126 may be lost: less than (2^-63)² of each
        return 1.0 + (0.51 * size + 4.0) * 2.0**-24, math.sqrt(size) * 2.0**-63
    return 1.0 + (0.51 * size + 4.0) * 2.0**-53, math.sqrt(size) * 2.0**-511


def _norm(vectors: Tensor, axis: int) -> Tensor:
    """Compute norms along an axis, from squares in the vectors' type, and return them in float64.

    torch's own norm is used along the last axis only, since it is slow along any other.
    """
    if axis == -1:
        norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return norm.double()
    return vectors.square().sum(axis, dtype=torch.float64).sqrt_()


def rank_one_bounds(gradient_norm: Tensor, input_norm: Tensor) -> NormBounds:
    """Bound outer products of two vectors, given upper norms (..., B) of both vectors."""
    norm = gradient_norm * input_norm
    return NormBounds(norm, norm, _FACTOR_ROUNDINGS, torch.add(norm, gradient_norm).add_(input_norm))


def vector_bounds(norm: Tensor) -> NormBounds:
    """Bound increments that are stored as vectors, given their upper norms (..., B)."""
    return NormBounds(norm, norm, _FACTOR_ROUNDINGS, norm)


def combine_bounds(bounds: Sequence[NormBounds]) -> NormBounds:
    """Bound increments that consist of several parts, given the bounds of each part."""
    norms = torch.stack([part.norm for part in bounds])
    rounding = torch.stack([part.rounding_count * part.rounding_scale for part in bounds]).sum(0)
    return NormBounds(
        upper_norm(norms, axis=0),
        rounding,
        1.0,
        torch.stack([part.operand_norm for part in bounds]).sum(0),
    )


def clipping_if_certain(
    output_gradients: Tensor, max_input_norm: Callable[[], float], weights: Tensor, clip: Scalar
) -> Clipping | None:
    """Compute the clipping of outer products if a cheap bound shows that no product is clipped.

    A record's increment is the outer product of its output gradient and its input.  The cheap bound is the joint
    norm of all output gradients, which is at least the norm of each, times the largest norm of an input.

    Guarantee: if the result is not None, no increment is longer than the clip.  The result's factors are those of
    `compute_clipping`, bit for bit, unless a bound of that function exceeds its limit by rounding, relatively by
    at most 1e-4.

    Args:
        output_gradients: Output gradients of n values, one column for each record, (..., n, B).
        max_input_norm: Function that returns an upper bound of the norms of all inputs (`upper_norm`).
        weights: (..., B) or (B,), in the sum's type.
        clip: Clip norm, a number or a tensor that is broadcast to (..., B).

    Returns:
        The clipping, or None if the cheap bound is NaN or above the clip, or an increment might not be
        representable.  It is None, too, for a clip that is no float, on another device than the CPU, and for no
        value or more than 1024 values of output gradients.
    """
    if (
        not isinstance(clip, float)
        or not output_gradients.is_cpu
        or not 0 < output_gradients.numel() <= _MAX_FLOAT32_SQUARES
    ):
        return None
    gradient_norm, input_norm = joint_upper_norm(output_gradients), max_input_norm()
    # Twice the allowance for rounding of `compute_clipping`, so that rounding of this product is covered too.
    norm = gradient_norm * input_norm * (1.0 + 2.0 * _FACTOR_ROUNDINGS * _EPS[weights.dtype])
    if not (norm <= clip and norm + gradient_norm + input_norm <= _MAX_REPRESENTABLE[weights.dtype]):
        return None
    return Clipping(weights, None, _zero_counts(output_gradients.shape[:-2]), None)


@lru_cache(maxsize=16)
def _zero_counts(shape: torch.Size) -> Tensor:
    """Zeros of this shape on the CPU, one tensor for all rounds, which must not be written into."""
    with torch.inference_mode(False):  # the cached tensor outlives the run that creates it
        return torch.zeros(shape, dtype=torch.int64)


def compute_clipping(bounds: NormBounds, weights: Tensor, clip: Scalar) -> Clipping:
    """Compute the factors weights · min(1, clip / norm) of increments with these bounds, (..., B).

    `norm` is the upper bound of an increment's norm plus its largest rounding.  Increments that are not
    representable, because they are computed from numbers that are too large or not finite, have factor 0.  The
    caller sets their values to zero (`Clipping.zero_unrepresentable`).

    Guarantee: if the bounds hold, a factor times its increment, computed in the type of `weights`, has norm at
    most weight · `clip` whatever the increment is, for clips of 2^-40 to 2^40 and once unrepresentable increments
    are set to zero.

    Args:
        bounds: Bounds of the increments.
        weights: (..., B) or (B,), in the sum's type.
        clip: Clip norm, a number or a tensor that is broadcast to (..., B).

    Returns:
        The factors and masks.  A record of weight above 0 counts as clipped if it is not representable, or if its
        norm exceeds the clip by more than `_FACTOR_TOLERANCE`, relatively.
    """
    max_norm, eps = _MAX_REPRESENTABLE[weights.dtype], _EPS[weights.dtype]
    # A comparison with NaN is False.
    representable = None if never_above(bounds.operand_norm, max_norm) else bounds.operand_norm <= max_norm
    norm = bounds.norm.add(bounds.rounding_scale, alpha=bounds.rounding_count * eps)
    if representable is None and never_above(norm, clip):
        return Clipping(weights.expand(norm.shape), None, norm.new_zeros(norm.shape[:-1], dtype=torch.int64), None)
    # The quotient clamped at 1 is exactly 1 up to the clip, so that a factor does not depend on the other records.
    factor = torch.div(norm, clip).clamp_(min=1.0).reciprocal_() * weights
    if representable is not None:
        factor = factor.where(representable, 0.0)
    is_clipped = factor * (1.0 + _FACTOR_TOLERANCE[weights.dtype]) < weights
    return Clipping(factor.to(weights.dtype), representable, is_clipped.sum(-1), is_clipped)


def never_above(values: Tensor, bound: Scalar) -> bool:
    """Whether it is certain that no value is above its bound, and none is NaN.

    The result is True for no values.  Otherwise it is False on another device than the CPU, since reading values
    would take time.

    Args:
        values: Values, of any shape.
        bound: One bound, or a tensor of bounds that is broadcast.
    """
    if not values.numel():
        return True
    if isinstance(bound, float):
        return values.is_cpu and (values.max() if values.numel() > 1 else values).item() <= bound
    return is_known_true((values <= bound).all())
