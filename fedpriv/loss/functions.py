"""Functions of parameters whose per-record gradients have a closed form.

Each function computes its outputs for a batch of B records, and the gradient of every record's loss with respect
to its weight and bias.  With δ the gradient with respect to the outputs, and a the inputs, a parameter's gradient
is a sum over positions t = 1 … T.  A position is a place of a sequence or a picture, or a call among several.  For
a convolution a_t is the patch of the input at t, for a normalization â_t is the normalized input before weight and
bias, and for an embedding a_t is a token: the index of a row of the table.

| | gradient |
|---|---|
| weight of a linear function or a convolution | Σ_t δ_t ⊗ a_t |
| weight of a normalization | Σ_t δ_t · â_t, elementwise |
| embedding | Σ_t δ_t, added to row a_t |
| any bias | Σ_t δ_t |

An increment of a record is Σ_k c_k times its gradient at point x_k, with public coefficients c_k.  A parameter's
part of it, summed over calls and over points, is stored as a gradient, as the factors δ and a, or as the rows of a
table that the record's tokens name (`make_weight_terms`).
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
"""Largest ratio of values of positions to values of a gradient at which products are faster."""
_MAX_GRADIENT_SHARE = 0.5
"""Largest ratio of values of a gradient to values of positions at which gradients are stored."""
_CHUNK_VALUES = 2**18
"""Number of values of gradients, or of patches of pictures, that are formed at a time on a CPU.

They fit into a cache, unless one record's gradient or one picture's patches have more.
"""
_CHUNK_LENGTH = 128
"""Number of values of a gradient whose squares are added in the gradient's type."""


class LayerFunction(Protocol):
    """Function of a weight and a bias, with its settings.

    Output gradients are the gradients of the records' losses at the outputs, (B, …).
    """

    def outputs(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Outputs for all records, (B, …).

        `inputs` (B, …) have the axes of one record's input behind the axis of records.
        """
        ...

    def linear_part(self, inputs: Tensor) -> Tensor:
        """Values (B, …), made of the inputs, in which the gradient by the weight is linear.

        Tokens are returned as they are, although no gradient is linear in them.
        """
        ...

    def weight_gradient(self, inputs: Tensor, output_gradient: Tensor, shape: Sequence[int]) -> Tensor:
        """Gradients by a weight of this shape, (B, size), from inputs as `linear_part` returns them."""
        ...

    def bias_gradient(self, output_gradient: Tensor) -> Tensor:
        """Gradients by the bias, (B, size)."""
        ...

    def working_values(self, output_gradient: Tensor, shape: Sequence[int]) -> int:
        """Approximate number of values that are allocated to form the terms of a weight of this shape.

        Inputs and output gradients do not count.
        """
        ...


class ParameterUse(NamedTuple):
    """Use of a weight by one call of a function, at one point of an increment or as a difference of two."""

    function: LayerFunction
    """Function that the weight goes into."""
    inputs: Tensor
    """Inputs as `linear_part` returns them, (B, …)."""
    output_gradient: Tensor
    """Gradients at the outputs, (B, …)."""


@dataclass(frozen=True)
class LinearFunction:
    """Linear function of (…, inputs), as functional.linear."""

    def outputs(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return functional.linear(inputs, weight, bias)

    def linear_part(self, inputs: Tensor) -> Tensor:
        return inputs

    def weight_gradient(self, inputs: Tensor, output_gradient: Tensor, shape: Sequence[int]) -> Tensor:
        return (_flatten_positions(output_gradient).mT @ _flatten_positions(inputs)).flatten(1)

    def bias_gradient(self, output_gradient: Tensor) -> Tensor:
        return _flatten_positions(output_gradient).sum(1)

    def working_values(self, output_gradient: Tensor, shape: Sequence[int]) -> int:
        return 0


@dataclass(frozen=True)
class ConvolutionFunction:
    """Convolution of (N, channels, …) or (channels, …), as functional.conv1d and conv2d."""

    axes: int
    """Number of spatial axes, 1 or 2."""
    stride: tuple[int, ...]
    """Distance of neighbouring positions by axis."""
    padding: tuple[int, ...]
    """Zeros before and after the input by axis."""
    dilation: tuple[int, ...]
    """Distance of neighbouring values of a patch by axis."""
    groups: int
    """Number of groups of channels that do not meet."""

    def outputs(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        function: Callable[..., Tensor] = functional.conv1d if self.axes == 1 else functional.conv2d
        outputs = function(
            inputs.flatten(0, -self.axes - 2), weight, bias, self.stride, self.padding, self.dilation, self.groups
        )
        return outputs.view(*inputs.shape[: -self.axes - 1], *outputs.shape[1:])

    def linear_part(self, inputs: Tensor) -> Tensor:
        return inputs

    def weight_gradient(self, inputs: Tensor, output_gradient: Tensor, shape: Sequence[int]) -> Tensor:
        """Compute Σ_t δ_t ⊗ (patch of the input at t) for every record, a few pictures at a time.

        δ_t is the output gradient at position t.  A sequence, as conv1d takes, is treated as a picture of one row.

        Args:
            inputs: Inputs, (B, …, channels, *sides), with any number of axes between B and the channels.
            output_gradient: Gradients at the outputs, (B, …, output channels, *output sides).
            shape: Shape of the weight, (output channels, channels / groups, *kernel).

        Returns:
            Gradients by the weight, (B, prod(shape)), summed over the axes between B and the channels.
        """
        # Pictures of all records, (N, channels, height, width), and output gradients, (N, output channels, T).
        pictures, output_gradients = (
            inputs.flatten(0, -self.axes - 2),
            output_gradient.flatten(-self.axes).flatten(0, -3),
        )
        pictures = pictures.unsqueeze(-2) if self.axes == 1 else pictures
        row_ones, row_zeros = ((1,), (0,)) if self.axes == 1 else ((), ())
        products = output_gradients.new_empty(
            len(output_gradients) * self.groups, shape[0] // self.groups, prod(shape[1:])
        )
        chunk_size = max(
            1,
            max_values_at_once(_CHUNK_VALUES, output_gradients.device)
            // (self.groups * prod(shape[1:]) * output_gradients.shape[-1]),
        )
        for chunk, chunk_gradients, chunk_products in zip(
            *(torch.split(part, chunk_size) for part in (pictures, output_gradients)),
            torch.split(products, chunk_size * self.groups),
            strict=True,
        ):
            patches = extract_patches(
                chunk,
                (*row_ones, *shape[2:]),
                (*row_ones, *self.dilation),
                (*row_zeros, *self.padding),
                (*row_ones, *self.stride),
            )
            # (pictures · groups, channels of a group, T), and the product over the positions T.
            left_factor, right_factor = (
                part.reshape(len(chunk_products), -1, part.shape[-1]) for part in (chunk_gradients, patches)
            )
            torch.bmm(left_factor, right_factor.mT, out=chunk_products)
        return _sum_calls(products.view(len(inputs), -1, prod(shape)))

    def bias_gradient(self, output_gradient: Tensor) -> Tensor:
        position_sums = output_gradient.flatten(-self.axes).sum(-1)
        return _sum_calls(position_sums.flatten(1, -2)) if position_sums.dim() > 2 else position_sums

    def working_values(self, output_gradient: Tensor, shape: Sequence[int]) -> int:
        return output_gradient.numel() // shape[0] * prod(shape[1:]) + prod(shape)


@dataclass(frozen=True)
class EmbeddingFunction:
    """Table of embeddings, as functional.embedding, whose inputs are tokens (B, …)."""

    padding: int | None
    """Row that gets no gradient, or None."""

    def outputs(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return functional.embedding(inputs, weight)

    def linear_part(self, inputs: Tensor) -> Tensor:
        return inputs

    def weight_gradient(self, inputs: Tensor, output_gradient: Tensor, shape: Sequence[int]) -> Tensor:
        position_gradients = _flatten_positions(self.mask_padding(inputs, output_gradient))
        rows = inputs.flatten(1).unsqueeze(-1).expand(position_gradients.shape)
        return (
            position_gradients.new_zeros(len(inputs), *shape).scatter_add_(1, rows, position_gradients).flatten(1)
        )

    def mask_padding(self, inputs: Tensor, output_gradient: Tensor) -> Tensor:
        """Output gradients, with zeros at the positions whose token is the padding row."""
        return (
            output_gradient
            if self.padding is None
            else output_gradient.where((inputs != self.padding).unsqueeze(-1), 0.0)
        )

    def bias_gradient(self, output_gradient: Tensor) -> Tensor:
        raise NotImplementedError("an embedding has no bias")

    def working_values(self, output_gradient: Tensor, shape: Sequence[int]) -> int:
        return output_gradient[..., 0].numel() ** 2


@dataclass(frozen=True)
class LayerNormFunction:
    """Normalization over the last axes, as functional.layer_norm."""

    shape: tuple[int, ...]
    """Lengths of the axes that are normalized, which are the last ones."""
    eps: float
    """Summand of the variance."""

    def outputs(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(inputs, self.shape, weight, bias, self.eps)

    def linear_part(self, inputs: Tensor) -> Tensor:
        return functional.layer_norm(inputs, self.shape, None, None, self.eps)

    def weight_gradient(self, inputs: Tensor, output_gradient: Tensor, shape: Sequence[int]) -> Tensor:
        return self.bias_gradient(inputs * output_gradient)

    def bias_gradient(self, output_gradient: Tensor) -> Tensor:
        return _flatten_positions(output_gradient.flatten(-len(self.shape))).sum(1)

    def working_values(self, output_gradient: Tensor, shape: Sequence[int]) -> int:
        return output_gradient.numel()


@dataclass(frozen=True)
class GroupNormFunction:
    """Normalization of (N, channels, …) by groups of channels, as functional.group_norm."""

    groups: int
    """Number of groups of channels that are normalized separately."""
    eps: float
    """Summand of the variance."""

    def outputs(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.group_norm(inputs.flatten(0, 1), self.groups, weight, bias, self.eps).view(inputs.shape)

    def linear_part(self, inputs: Tensor) -> Tensor:
        return self.outputs(inputs, None, None)

    def weight_gradient(self, inputs: Tensor, output_gradient: Tensor, shape: Sequence[int]) -> Tensor:
        return self.bias_gradient(inputs * output_gradient)

    def bias_gradient(self, output_gradient: Tensor) -> Tensor:
        return (output_gradient.flatten(3).sum(-1) if output_gradient.dim() > 3 else output_gradient).sum(1)

    def working_values(self, output_gradient: Tensor, shape: Sequence[int]) -> int:
        return output_gradient.numel()


def _sum_calls(values: Tensor) -> Tensor:
    """Sum values (B, N, size) over the N inputs of a record, (B, size), without a copy for N = 1."""
    return values.squeeze(1) if values.shape[1] == 1 else values.sum(1)


def _flatten_positions(values: Tensor) -> Tensor:
    """Reshape values (B, …, size) to (B, T, size)."""
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)


def make_weight_terms(uses: Sequence[ParameterUse], shape: Sequence[int]) -> LayerTerms:
    """Represent each record's gradient with respect to a weight, as a sum over the uses of the weight.

    A use is one call of a function at one point of an increment, or the difference of two points.  For a linear
    function its gradient is Σ_t δ_t ⊗ a_t over positions t, with the output gradients δ and the inputs a.

    Args:
        uses: Uses of this weight, one or more.
        shape: Shape of the weight.

    Returns:
        * For one or two uses by linear functions with a single position each, the factors δ and a (`DenseTerms`).
        * For other uses by linear functions, the gradients (`LongGradientTerms`) if they have at most half as many
          values as the factors of all positions, and otherwise these factors (`PositionTerms`).
        * For embeddings, gradients of the rows of the table that are the record's tokens (`EmbeddingTerms`).
        * For other functions, or several kinds of functions, the gradients.
    """
    if all(isinstance(use.function, LinearFunction) for use in uses):
        positions = [(_flatten_positions(use.output_gradient), _flatten_positions(use.inputs)) for use in uses]
        position_count = sum(output_gradient.shape[1] for output_gradient, _ in positions)
        if position_count == len(uses) <= 2:  # one position of each use
            return DenseTerms(
                [output_gradient.squeeze(1) for output_gradient, _ in positions],
                [inputs.squeeze(1) for _, inputs in positions],
                False,  # without a bias
            )
        output_gradients, inputs = (
            torch.cat(arrays, 1) if len(uses) > 1 else arrays[0] for arrays in zip(*positions, strict=True)
        )
        return (
            LongGradientTerms([(output_gradients.mT @ inputs).flatten(1)])
            if prod(shape) <= _MAX_GRADIENT_SHARE * position_count * sum(shape)
            else PositionTerms(output_gradients, inputs)
        )
    if all(isinstance(use.function, EmbeddingFunction) for use in uses):
        table_rows = torch.cat([use.inputs.flatten(1) for use in uses], 1)
        masked_gradients = [
            use.function.mask_padding(use.inputs, use.output_gradient)
            for use in uses
            if isinstance(use.function, EmbeddingFunction)
        ]
        return EmbeddingTerms.merge_rows(
            table_rows,
            torch.cat([_flatten_positions(output_gradient) for output_gradient in masked_gradients], 1),
            shape[0],
        )
    return LongGradientTerms(
        [sum_tensors([use.function.weight_gradient(use.inputs, use.output_gradient, shape) for use in uses])]
    )


class LongGradientTerms(GradientTerms):
    """Gradients of any number of values, whose norms are bounded piece by piece (`long_upper_norm`)."""

    def norm_bounds(self) -> NormBounds:
        part_norms = [long_upper_norm(part) for part in self.gradients]
        return vector_bounds(part_norms[0] if len(part_norms) == 1 else upper_norm(torch.stack(part_norms, -1)))


def long_upper_norm(vectors: Tensor) -> Tensor:
    """Upper bound in float64 on the Euclidean norm of each row, (B, n) -> (B,).

    A row is cut into pieces, whose squares are added in the type of the rows.  The bounds of the pieces are
    combined in float64.  So rounding enlarges the bound little, however many values a row has.
    """
    if vectors.shape[1] <= _CHUNK_LENGTH:
        return upper_norm(vectors)
    whole_length = vectors.shape[1] // _CHUNK_LENGTH * _CHUNK_LENGTH
    pieces = upper_norm(vectors[:, :whole_length].reshape(len(vectors), -1, _CHUNK_LENGTH))
    if whole_length < vectors.shape[1]:
        pieces = torch.cat([pieces, upper_norm(vectors[:, whole_length:]).unsqueeze(1)], 1)
    return upper_norm(pieces)


@dataclass(frozen=True)
class PositionTerms:
    """Gradients Σ_t δ_t ⊗ a_t of a weight, stored as their factors.

    The weighted sum over all records is one product of matrices.
    """

    output_gradients: Tensor
    """Gradients δ at the outputs, (B, T, outputs)."""
    inputs: Tensor
    """Inputs a, (B, T, inputs)."""

    def to_dtype(self, dtype: torch.dtype) -> "PositionTerms":
        return PositionTerms(self.output_gradients.to(dtype), self.inputs.to(dtype))

    def norm_bounds(self) -> NormBounds:
        """Bounds on the norm ‖Σ_t δ_t ⊗ a_t‖ of each record's gradient, (B,).

        The norm is computed from the T² inner products of positions if this is faster, else from the gradients of
        a few records at a time.  Rounding is relative to Σ_t ‖δ_t‖ ‖a_t‖, since terms that cancel in the gradient
        leave their errors in it.  T + 4 roundings are counted, one for each of T additions and 4 for products and
        factors.  The last entry of the result bounds all numbers that occur, with the factors δ and a themselves.
        """
        gradient_norms, input_norms = upper_norm(self.output_gradients), upper_norm(self.inputs)
        spread = (gradient_norms * input_norms).sum(-1)
        (position_count, output_size), input_size = self.output_gradients.shape[1:], self.inputs.shape[-1]
        is_product_faster = (
            position_count * (input_size + output_size) <= _MAX_PRODUCT_SHARE * input_size * output_size
        )
        norm = self._norm_of_products(spread) if is_product_faster else self._norm_of_gradients(spread)
        return NormBounds(
            norm, spread, position_count + 4.0, spread + gradient_norms.sum(-1) + input_norms.sum(-1)
        )

    def _norm_of_products(self, spread: Tensor) -> Tensor:
        """Upper bounds on the norms √(Σ_{s,t} ⟨δ_s, δ_t⟩ ⟨a_s, a_t⟩), (B,), in float64.

        Products are computed in float64, since float32 would round too coarsely.  A norm below 1e-40 may be
        above its bound, since products of small factors underflow.  `spread` is an upper bound of Σ_t ‖δ_t‖ ‖a_t‖,
        (B,), to which the rounding is relative.
        """
        output_gradients, inputs = self.output_gradients.double(), self.inputs.double()
        squared = ((output_gradients @ output_gradients.mT) * (inputs @ inputs.mT)).sum((-2, -1)).clamp_(min=0.0)
        roundings = output_gradients.shape[-1] + inputs.shape[-1] + output_gradients.shape[1] ** 2 + 8.0
        return squared.add_(spread.square(), alpha=roundings * 2.0**-52).sqrt_()

    def _norm_of_gradients(self, spread: Tensor) -> Tensor:
        """Upper bounds on the norms of the gradients, (B,), which are formed for a few records at a time.

        `spread` is an upper bound of Σ_t ‖δ_t‖ ‖a_t‖, (B,), to which the rounding is relative.
        """
        chunk_size = max(
            1,
            max_values_at_once(_CHUNK_VALUES, self.output_gradients.device)
            // (self.output_gradients.shape[-1] * self.inputs.shape[-1]),
        )
        chunks = zip(
            torch.split(self.output_gradients, chunk_size), torch.split(self.inputs, chunk_size), strict=True
        )
        norm = torch.cat(
            [long_upper_norm((output_gradients.mT @ inputs).flatten(1)) for output_gradients, inputs in chunks]
        )
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

    def zero_others(self, mask: Tensor) -> "PositionTerms":
        return PositionTerms(
            *(part.where(mask[:, None, None], 0.0) for part in (self.output_gradients, self.inputs))
        )


@dataclass(frozen=True)
class EmbeddingTerms:
    """Gradients of an embedding, stored as the rows of each record's T tokens.

    If a table row occurs several times among a record's tokens, all but the first occurrence have gradient 0.
    """

    table_rows: Tensor
    """Tokens, which are row indices of the table, (B, T)."""
    row_gradients: Tensor
    """Gradients of these rows, (B, T, width)."""
    row_count: int
    """Number of rows of the table."""

    @classmethod
    def merge_rows(cls, table_rows: Tensor, gradients: Tensor, row_count: int) -> "EmbeddingTerms":
        """Add up gradients of the same row at its first position, and leave zeros at the later ones.

        Row indices are (B, T), and gradients (B, T, width).
        """
        # (B, T, T) and (B, T)
        is_same_row = table_rows.unsqueeze(2) == table_rows.unsqueeze(1)
        is_repeated = is_same_row.tril(-1).any(-1)
        return cls(
            table_rows,
            (is_same_row.to(gradients.dtype) @ gradients).masked_fill(is_repeated.unsqueeze(-1), 0.0),
            row_count,
        )

    def to_dtype(self, dtype: torch.dtype) -> "EmbeddingTerms":
        return EmbeddingTerms(self.table_rows, self.row_gradients.to(dtype), self.row_count)

    def norm_bounds(self) -> NormBounds:
        return vector_bounds(long_upper_norm(self.row_gradients.flatten(1)))

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        gradients = (self.row_gradients * factor[:, None, None]).flatten(0, 1)
        return [
            gradients.new_zeros(self.row_count, gradients.shape[-1])
            .index_add_(0, self.table_rows.flatten(), gradients)
            .flatten()
        ]

    def per_record(self, factor: Tensor) -> list[Tensor]:
        gradients = self.row_gradients * factor[:, None, None]
        table_gradients = gradients.new_zeros(len(gradients), self.row_count, gradients.shape[-1])
        return [
            table_gradients.scatter_add_(
                1, self.table_rows.unsqueeze(-1).expand(gradients.shape), gradients
            ).flatten(1)
        ]

    def zero_others(self, mask: Tensor) -> "EmbeddingTerms":
        return EmbeddingTerms(self.table_rows, self.row_gradients.where(mask[:, None, None], 0.0), self.row_count)


# Names of arguments are torch's where torch may pass them by keyword.


def _parse_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002
    return input, weight, bias, LinearFunction()


def _parse_convolution(
    input: Tensor,  # noqa: A002
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
    return input, weight, bias, ConvolutionFunction(axes, stride, padding, dilation, groups)


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
"""Parsers of calls of torch's functions.

A parser maps a call's arguments to (inputs, weight, bias, `LayerFunction`), or to None for settings without a
closed form.  torch hands over the inputs of its functions in Python by position, and those of its functions in C
as the module gave them.
"""
