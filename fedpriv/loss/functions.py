"""Known functions of parameters: what each gives for a batch of records, and every record's gradient by them.

With δ the slope of a record's loss at the outputs, a weight's gradient is a sum over places t (of a sequence, of a
picture, or of calls one after another) of what the function saw there and the slope there:

| | gradient |
|---|---|
| linear, convolution | Σ_t δ_t ⊗ a_t |
| normalization | Σ_t δ_t · â_t, one by one |
| embedding | δ_t added to row a_t |
| any bias | Σ_t δ_t |

`weight_terms` makes the terms of the sum of several of them: over calls, and over the points of an increment as
layered.py writes them.  Outer products are kept as gradients where these are smaller, an embedding's as its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.core.replicates import max_values_at_once
from fedpriv.loss.clipping import NormBounds, upper_norm, vector_bounds
from fedpriv.loss.layers import DenseTerms, GradientTerms, LayerTerms, extract_patches, sum_tensors

_MAX_PRODUCT_SHARE = 0.4
"""Values of places against values of a gradient: with a smaller share, products of places are faster."""
_MAX_GRADIENT_SHARE = 0.5
"""Values of a gradient against values of places: with a smaller share, gradients are kept."""
_CHUNK_VALUES = 2**18
"""Values of gradients that are formed at a time for their norms alone: they stay in a cache."""
_CHUNK_LENGTH = 128


class LayerFunction(Protocol):
    """A function with all that it is given beside its input and its parameters."""

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Of all records: `seen` is one record's input with an axis (B, …) before it."""
        ...

    def linear_part(self, seen: Tensor) -> Tensor:
        """What the gradient by the weight is linear in, so that it may be subtracted at another point."""
        ...

    def weight_gradient(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradients by a weight of this shape, (B, size); `seen` is as `moved` gives it."""
        ...

    def bias_gradient(self, slope: Tensor) -> Tensor:
        """The gradients by the bias, (B, size)."""
        ...

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        """How many values `weight` takes beside its arguments, about."""
        ...


class ParameterUse(NamedTuple):
    """What a function saw, as `moved` gives it, and the slope at its outputs; both (B, …)."""

    function: LayerFunction
    inputs: Tensor
    output_gradient: Tensor


@dataclass(frozen=True)
class LinearFunction:
    """functional.linear."""

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return functional.linear(seen, weight, bias)

    def linear_part(self, seen: Tensor) -> Tensor:
        return seen

    def weight_gradient(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return (_flatten_positions(slope).mT @ _flatten_positions(seen)).flatten(1)

    def bias_gradient(self, slope: Tensor) -> Tensor:
        return _flatten_positions(slope).sum(1)

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return 0


@dataclass(frozen=True)
class ConvolutionFunction:
    """functional.conv1d and conv2d, of (N, channels, …) or (channels, …)."""

    axes: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        function: Callable[..., Tensor] = functional.conv1d if self.axes == 1 else functional.conv2d
        outputs = function(
            seen.flatten(0, -self.axes - 2), weight, bias, self.stride, self.padding, self.dilation, self.groups
        )
        return outputs.view(*seen.shape[: -self.axes - 1], *outputs.shape[1:])

    def linear_part(self, seen: Tensor) -> Tensor:
        return seen

    def weight_gradient(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        """As products with the patches of the input, a few pictures' at a time; rows are pictures of one row."""
        pictures, slopes = seen.flatten(0, -self.axes - 2), slope.flatten(-self.axes).flatten(0, -3)
        pictures = pictures.unsqueeze(-2) if self.axes == 1 else pictures
        one, none = ((1,), (0,)) if self.axes == 1 else ((), ())
        products = slopes.new_empty(len(slopes) * self.groups, shape[0] // self.groups, prod(shape[1:]))
        several = max(
            1,
            max_values_at_once(_CHUNK_VALUES, slopes.device) // (self.groups * prod(shape[1:]) * slopes.shape[-1]),
        )
        for some, own, into in zip(
            *(torch.split(part, several) for part in (pictures, slopes)),
            torch.split(products, several * self.groups),
            strict=True,
        ):
            patches = extract_patches(
                some,
                (*one, *shape[2:]),
                (*one, *self.dilation),
                (*none, *self.padding),
                (*one, *self.stride),
            )
            left, right = (part.reshape(len(into), -1, part.shape[-1]) for part in (own, patches))
            torch.bmm(left, right.mT, out=into)
        return _sum_calls(products.view(len(seen), -1, prod(shape)))

    def bias_gradient(self, slope: Tensor) -> Tensor:
        sums = slope.flatten(-self.axes).sum(-1)
        return _sum_calls(sums.flatten(1, -2)) if sums.dim() > 2 else sums

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return slope.numel() // shape[0] * prod(shape[1:]) + prod(shape)


@dataclass(frozen=True)
class EmbeddingFunction:
    """functional.embedding; a padding row has no gradient."""

    padding: int | None

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return functional.embedding(seen, weight)

    def linear_part(self, seen: Tensor) -> Tensor:
        return seen

    def weight_gradient(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        places = _flatten_positions(self.mask_padding(seen, slope))
        rows = seen.flatten(1).unsqueeze(-1).expand(places.shape)
        return places.new_zeros(len(seen), *shape).scatter_add_(1, rows, places).flatten(1)

    def mask_padding(self, seen: Tensor, slope: Tensor) -> Tensor:
        return slope if self.padding is None else slope.where((seen != self.padding).unsqueeze(-1), 0.0)

    def bias_gradient(self, slope: Tensor) -> Tensor:
        raise NotImplementedError("an embedding has no bias")

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return slope[..., 0].numel() ** 2


@dataclass(frozen=True)
class LayerNormFunction:
    """functional.layer_norm over the last axes."""

    shape: tuple[int, ...]
    eps: float

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(seen, self.shape, weight, bias, self.eps)

    def linear_part(self, seen: Tensor) -> Tensor:
        return functional.layer_norm(seen, self.shape, None, None, self.eps)

    def weight_gradient(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return self.bias_gradient(seen * slope)

    def bias_gradient(self, slope: Tensor) -> Tensor:
        return _flatten_positions(slope.flatten(-len(self.shape))).sum(1)

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return slope.numel()


@dataclass(frozen=True)
class GroupNormFunction:
    """functional.group_norm of (N, channels, …)."""

    groups: int
    eps: float

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.group_norm(seen.flatten(0, 1), self.groups, weight, bias, self.eps).view(seen.shape)

    def linear_part(self, seen: Tensor) -> Tensor:
        return self.outputs(seen, None, None)

    def weight_gradient(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return self.bias_gradient(seen * slope)

    def bias_gradient(self, slope: Tensor) -> Tensor:
        return (slope.flatten(3).sum(-1) if slope.dim() > 3 else slope).sum(1)

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return slope.numel()


def _sum_calls(values: Tensor) -> Tensor:
    """Σ of (B, calls, size) over the middle, (B, size); without a copy of one."""
    return values.squeeze(1) if values.shape[1] == 1 else values.sum(1)


def _flatten_positions(values: Tensor) -> Tensor:
    """(B, …, size) as (B, T, size)."""
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)


def make_weight_terms(uses: Sequence[ParameterUse], shape: Sequence[int]) -> LayerTerms:
    """Of the increments in a weight of this shape, the sums over these uses of it."""
    if all(isinstance(use.function, LinearFunction) for use in uses):
        places = [(_flatten_positions(use.output_gradient), _flatten_positions(use.inputs)) for use in uses]
        count = sum(slope.shape[1] for slope, _ in places)
        if count == len(uses) <= 2:
            return DenseTerms(
                [slope.squeeze(1) for slope, _ in places], [seen.squeeze(1) for _, seen in places], False
            )
        slopes, seen = (torch.cat(parts, 1) if len(uses) > 1 else parts[0] for parts in zip(*places, strict=True))
        return (
            LongGradientTerms([(slopes.mT @ seen).flatten(1)])
            if prod(shape) <= _MAX_GRADIENT_SHARE * count * sum(shape)
            else PositionTerms(slopes, seen)
        )
    if all(isinstance(use.function, EmbeddingFunction) for use in uses):
        rows = torch.cat([use.inputs.flatten(1) for use in uses], 1)
        kept = [
            use.function.mask_padding(use.inputs, use.output_gradient)
            for use in uses
            if isinstance(use.function, EmbeddingFunction)
        ]
        return EmbeddingTerms.merge_rows(
            rows, torch.cat([_flatten_positions(slope) for slope in kept], 1), shape[0]
        )
    return LongGradientTerms(
        [sum_tensors([use.function.weight_gradient(use.inputs, use.output_gradient, shape) for use in uses])]
    )


class LongGradientTerms(GradientTerms):
    """Gradients themselves, of more values than can be squared and added in float32 at once."""

    def norm_bounds(self) -> NormBounds:
        norms = [long_upper_norm(part) for part in self.gradients]
        return vector_bounds(norms[0] if len(norms) == 1 else upper_norm(torch.stack(norms, -1)))


def long_upper_norm(vectors: Tensor) -> Tensor:
    """At least the norm of each row (B, n), in float64: of pieces in the rows' type, and of these in float64."""
    if vectors.shape[1] <= _CHUNK_LENGTH:
        return upper_norm(vectors)
    whole = vectors.shape[1] // _CHUNK_LENGTH * _CHUNK_LENGTH
    pieces = upper_norm(vectors[:, :whole].reshape(len(vectors), -1, _CHUNK_LENGTH))
    if whole < vectors.shape[1]:
        pieces = torch.cat([pieces, upper_norm(vectors[:, whole:]).unsqueeze(1)], 1)
    return upper_norm(pieces)


@dataclass(frozen=True)
class PositionTerms:
    """Σ_t δ_t ⊗ a_t, whose gradients are never kept: the sum over records is one product."""

    output_gradients: Tensor
    """(B, T, outputs)"""
    inputs: Tensor
    """(B, T, inputs)"""

    def to_dtype(self, dtype: torch.dtype) -> "PositionTerms":
        return PositionTerms(self.output_gradients.to(dtype), self.inputs.to(dtype))

    def norm_bounds(self) -> NormBounds:
        """Rounding is relative to Σ_t ‖δ_t‖ ‖a_t‖: terms that cancel leave theirs behind."""
        slope, values = upper_norm(self.output_gradients), upper_norm(self.inputs)
        spread = (slope * values).sum(-1)
        (places, outputs), inputs = self.output_gradients.shape[1:], self.inputs.shape[-1]
        few = places * (inputs + outputs) <= _MAX_PRODUCT_SHARE * inputs * outputs
        norm = self._norm_of_products(spread) if few else self._norm_of_gradients(spread)
        return NormBounds(norm, spread, places + 4.0, spread + slope.sum(-1) + values.sum(-1))

    def _norm_of_products(self, spread: Tensor) -> Tensor:
        """From ⟨δ_s, δ_t⟩ ⟨a_s, a_t⟩ in float64: in float32 their rounding would show."""
        slopes, seen = self.output_gradients.double(), self.inputs.double()
        squared = ((slopes @ slopes.mT) * (seen @ seen.mT)).sum((-2, -1)).clamp_(min=0.0)
        roundings = slopes.shape[-1] + seen.shape[-1] + slopes.shape[1] ** 2 + 8.0
        return squared.add_(spread.square(), alpha=roundings * 2.0**-52).sqrt_()

    def _norm_of_gradients(self, spread: Tensor) -> Tensor:
        """From the gradients, a few records' at a time, and what their rounding can be."""
        rows = max(
            1,
            max_values_at_once(_CHUNK_VALUES, self.output_gradients.device)
            // (self.output_gradients.shape[-1] * self.inputs.shape[-1]),
        )
        parts = zip(torch.split(self.output_gradients, rows), torch.split(self.inputs, rows), strict=True)
        norm = torch.cat([long_upper_norm((slopes.mT @ seen).flatten(1)) for slopes, seen in parts])
        return norm.add_(
            spread, alpha=(self.output_gradients.shape[1] + 2.0) * torch.finfo(self.output_gradients.dtype).eps
        )

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        return [
            (
                (self.output_gradients * factor[:, None, None]).flatten(0, 1).mT @ self.inputs.flatten(0, 1)
            ).flatten()
        ]

    def per_record(self, factor: Tensor) -> list[Tensor]:
        return [((self.output_gradients * factor[:, None, None]).mT @ self.inputs).flatten(1)]

    def zero_others(self, kept: Tensor) -> "PositionTerms":
        return PositionTerms(
            *(part.where(kept[:, None, None], 0.0) for part in (self.output_gradients, self.inputs))
        )


@dataclass(frozen=True)
class EmbeddingTerms:
    """Gradients of few rows among many: row `places` (B, T) is `values` (B, T, width), no row twice but as 0."""

    table_rows: Tensor
    row_gradients: Tensor
    row_count: int
    """Of all rows."""

    @classmethod
    def merge_rows(cls, places: Tensor, values: Tensor, count: int) -> "EmbeddingTerms":
        """The sums of values of the same row, at the first place that has it."""
        same = places.unsqueeze(2) == places.unsqueeze(1)
        again = same.tril(-1).any(-1)
        return cls(places, (same.to(values.dtype) @ values).masked_fill(again.unsqueeze(-1), 0.0), count)

    def to_dtype(self, dtype: torch.dtype) -> "EmbeddingTerms":
        return EmbeddingTerms(self.table_rows, self.row_gradients.to(dtype), self.row_count)

    def norm_bounds(self) -> NormBounds:
        return vector_bounds(long_upper_norm(self.row_gradients.flatten(1)))

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        values = (self.row_gradients * factor[:, None, None]).flatten(0, 1)
        return [
            values.new_zeros(self.row_count, values.shape[-1])
            .index_add_(0, self.table_rows.flatten(), values)
            .flatten()
        ]

    def per_record(self, factor: Tensor) -> list[Tensor]:
        values = self.row_gradients * factor[:, None, None]
        whole = values.new_zeros(len(values), self.row_count, values.shape[-1])
        return [whole.scatter_add_(1, self.table_rows.unsqueeze(-1).expand(values.shape), values).flatten(1)]

    def zero_others(self, kept: Tensor) -> "EmbeddingTerms":
        return EmbeddingTerms(self.table_rows, self.row_gradients.where(kept[:, None, None], 0.0), self.row_count)


def _parse_linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return values, weight, bias, LinearFunction()


def _parse_convolution(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    axes = weight.dim() - 2
    if isinstance(padding, str):
        return None
    stride, padding, dilation = (
        (size,) * axes if isinstance(size, int) else tuple(size) for size in (stride, padding, dilation)
    )
    return values, weight, bias, ConvolutionFunction(axes, stride, padding, dilation, groups)


def _parse_embedding(
    values: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq:
        return None
    return values, weight, None, EmbeddingFunction(padding_idx % len(weight) if padding_idx is not None else None)


def _parse_layer_norm(
    values: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return values, weight, bias, LayerNormFunction(tuple(shape), eps)


def _parse_group_norm(
    values: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return values, weight, bias, GroupNormFunction(groups, eps)


LAYER_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.linear: _parse_linear,
    functional.conv1d: _parse_convolution,
    functional.conv2d: _parse_convolution,
    functional.embedding: _parse_embedding,
    functional.layer_norm: _parse_layer_norm,
    functional.group_norm: _parse_group_norm,
}
"""From a call's arguments to (input, weight, bias, `Known`), or None for settings that are not known."""
