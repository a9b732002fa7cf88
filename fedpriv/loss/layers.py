"""Layers whose per-record gradients are known: what each saw, times the slope of the loss at its outputs.

Values have shape (..., B, *shape) with any leading axes, so several models run at once; weights (..., d_layer)
have the leading axes alone.  A gradient of one record is Σ_k slopes[k] ⊗ seen[k]: an increment's terms.

Layers without parameters: they pass values on, and slopes back.

Values have shape (..., B, *shape) with any leading axes, as in layered.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.loss.clipping import NormBounds, upper_norm, vector_bounds

Shape = tuple[int, ...]


class StatelessLayer(Protocol):
    """A layer without parameters; `forward` also gives what `back` needs."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]: ...

    def input_gradient(self, slope: Tensor, saved: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Pointwise:
    """nn.Tanh or nn.ReLU, whose slope follows from their outputs; that of a rectifier at 0 is 0, as in torch."""

    function: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    """From the slope at the outputs, and these."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.function(values)
        return outputs, outputs

    def input_gradient(self, slope: Tensor, saved: Tensor) -> Tensor:
        return self.gradient(slope, saved)


@dataclass(frozen=True)
class Reshape:
    """nn.Flatten and nn.Unflatten of one record's values."""

    input_shape: Shape
    output_shape: Shape

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values.reshape(*values.shape[: -len(self.input_shape)], *self.output_shape), values

    def input_gradient(self, slope: Tensor, saved: Tensor) -> Tensor:
        return slope.reshape(saved.shape)


@dataclass(frozen=True)
class MaxPool:
    """nn.MaxPool2d; `saved` is where in its image each largest value was."""

    input_shape: Shape
    layer: nn.MaxPool2d

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        one = self.layer
        outputs, places = functional.max_pool2d(
            values.flatten(0, -4), one.kernel_size, one.stride, one.padding, one.dilation, return_indices=True
        )
        leading = values.shape[:-3]
        return outputs.view(*leading, *outputs.shape[1:]), places.view(*leading, *places.shape[1:])

    def input_gradient(self, slope: Tensor, saved: Tensor) -> Tensor:
        values = slope.new_zeros(*slope.shape[:-2], prod(self.input_shape[1:]))
        values.scatter_add_(-1, saved.flatten(-2), slope.flatten(-2))
        return values.view(*values.shape[:-1], *self.input_shape[1:])


def match_stateless_layer(layer: nn.Module, inward: Shape, outward: Shape) -> StatelessLayer | None:
    """The layer's counterpart here if it is known and exactly torch's layer."""
    if type(layer) is nn.Tanh:
        return Pointwise(torch.tanh, torch.ops.aten.tanh_backward)
    if type(layer) is nn.ReLU:
        return Pointwise(torch.relu, lambda slope, saved: torch.ops.aten.threshold_backward(slope, saved, 0))
    if type(layer) in (nn.Flatten, nn.Unflatten):
        return Reshape(inward, outward)
    if type(layer) is nn.MaxPool2d and not layer.ceil_mode and not layer.return_indices:
        return MaxPool(inward, layer)
    return None


class ParameterLayer(Protocol):
    """A layer with parameters; `see` is all of the forward pass that does not depend on them.

    Parameters are the layer's weight, flattened, and its bias.
    """

    @property
    def working_values(self) -> int:
        """How many values one record takes at one point, about."""
        ...

    def prepare_inputs(self, values: Tensor) -> Tensor: ...

    def compute_outputs(self, seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_gradient(self, slope: Tensor, weight: Tensor) -> Tensor:
        """The slope at the layer's inputs."""
        ...

    def make_terms(self, slopes: Sequence[Tensor], seen: Sequence[Tensor]) -> "LayerTerms": ...


class LayerTerms(Protocol):
    """One layer's part of the increments of a batch."""

    def to_dtype(self, dtype: torch.dtype) -> "LayerTerms":
        """The same numbers in another type."""
        ...

    def norm_bounds(self) -> NormBounds:
        """Of each record's increment in this layer."""
        ...

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        """Σ_b factor[..., b] · increment b, (..., size) for the weight and for the bias if there is one."""
        ...

    def per_record(self, factor: Tensor) -> list[Tensor]:
        """factor[..., b] · increment b, (..., B, size) for the weight and for the bias if there is one."""
        ...

    def zero_others(self, kept: Tensor) -> "LayerTerms":
        """The same with zeros for the records that are not kept; `kept` is (..., B) of booleans."""
        ...


@dataclass(frozen=True)
class Dense:
    """nn.Linear."""

    input_size: int
    output_size: int
    has_bias: bool

    @property
    def working_values(self) -> int:
        return 2 * (self.input_size + self.output_size)

    def prepare_inputs(self, values: Tensor) -> Tensor:
        return values

    def compute_outputs(self, seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = seen @ weight.mT
        return product if bias is None else product.add_(bias.unsqueeze(-2))

    def input_gradient(self, slope: Tensor, weight: Tensor) -> Tensor:
        return slope @ weight

    def make_terms(self, slopes: Sequence[Tensor], seen: Sequence[Tensor]) -> "DenseTerms":
        return DenseTerms(slopes, seen, self.has_bias)


@dataclass(frozen=True)
class DenseTerms:
    """Norms without the gradients: ⟨u ⊗ v, u' ⊗ v'⟩ = ⟨u, u'⟩⟨v, v'⟩ (Goodfellow 2015; "ghost norms")."""

    output_gradients: Sequence[Tensor]
    inputs: Sequence[Tensor]
    has_bias: bool

    def to_dtype(self, dtype: torch.dtype) -> "DenseTerms":
        slopes, seen = ([part.to(dtype) for part in parts] for parts in (self.output_gradients, self.inputs))
        return DenseTerms(slopes, seen, self.has_bias)

    def norm_bounds(self) -> NormBounds:
        """Weight and bias are kept apart: terms of the weight may cancel, and must not take the bias with them."""
        slopes, seen = ([upper_norm(part) for part in parts] for parts in (self.output_gradients, self.inputs))
        terms = [slope * values for slope, values in zip(slopes, seen, strict=True)]
        spread = sum_tensors(terms)
        squared = spread.square() if len(terms) == 1 else self._squared_weight(spread)
        if self.has_bias:  # it sees a constant 1 in every term: the first slope here is the sum of them all
            squared, spread = squared + slopes[0].square(), spread + slopes[0]
        return NormBounds(squared.sqrt(), spread, len(terms) + 4.0, sum_tensors([spread, *slopes, *seen]))

    def _squared_weight(self, spread: Tensor) -> Tensor:
        """At least ‖Σ_k u_k ⊗ v_k‖², from products in float64; `spread` is at least Σ_k ‖u_k‖ ‖v_k‖."""
        slopes, seen = ([part.double() for part in parts] for parts in (self.output_gradients, self.inputs))
        products = [
            (1.0 if first == second else 2.0)
            * _inner_products(slopes[first], slopes[second])
            * _inner_products(seen[first], seen[second])
            for first in range(len(slopes))
            for second in range(first + 1)
        ]
        roundings = slopes[0].shape[-1] + seen[0].shape[-1] + len(products) + 8.0
        return sum_tensors(products).clamp(min=0.0) + roundings * 2.0**-52 * spread.square()

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        column = factor.unsqueeze(-1)
        weight = sum_tensors(
            [(slope * column).mT @ seen for slope, seen in zip(self.output_gradients, self.inputs, strict=True)]
        )
        return [
            weight.flatten(-2),
            *([(factor.unsqueeze(-2) @ self.output_gradients[0]).squeeze(-2)] if self.has_bias else []),
        ]

    def per_record(self, factor: Tensor) -> list[Tensor]:
        column = factor.unsqueeze(-1)
        slopes = [slope * column for slope in self.output_gradients]
        weight = sum_tensors(
            [slope.unsqueeze(-1) * seen.unsqueeze(-2) for slope, seen in zip(slopes, self.inputs, strict=True)]
        )
        return [weight.flatten(-2), *(slopes[:1] if self.has_bias else [])]

    def zero_others(self, kept: Tensor) -> "DenseTerms":
        column = kept.unsqueeze(-1)
        slopes, seen = (
            [part.where(column, 0.0) for part in parts] for parts in (self.output_gradients, self.inputs)
        )
        return DenseTerms(slopes, seen, self.has_bias)


@dataclass(frozen=True)
class Convolution:
    """nn.Conv2d without groups: a product with the patches of its input.

    A record's gradient is a sum over places and smaller than the patches, so it is formed and not avoided.
    """

    input_shape: Shape
    output_shape: Shape
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    has_bias: bool

    @property
    def working_values(self) -> int:
        patch = self.input_shape[0] * prod(self.kernel)
        return 2 * prod(self.output_shape) + 2 * patch * prod(self.output_shape[1:]) + patch * self.output_shape[0]

    def prepare_inputs(self, values: Tensor) -> Tensor:
        """Patches (..., B, channels · kernel, places)."""
        patches = extract_patches(values.flatten(0, -4), self.kernel, self.dilation, self.padding, self.stride)
        return patches.view(*values.shape[:-3], *patches.shape[1:])

    def compute_outputs(self, seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = weight.flatten(-3).unsqueeze(-3) @ seen
        if bias is not None:
            product.add_(bias[..., None, :, None])
        return product.view(*product.shape[:-1], *self.output_shape[1:])

    def input_gradient(self, slope: Tensor, weight: Tensor) -> Tensor:
        patches = weight.flatten(-3).mT.unsqueeze(-3) @ slope.flatten(-2)
        values = functional.fold(
            patches.flatten(0, -3), self.input_shape[1:], self.kernel, self.dilation, self.padding, self.stride
        )
        return values.view(*slope.shape[:-3], *self.input_shape)

    def make_terms(self, slopes: Sequence[Tensor], seen: Sequence[Tensor]) -> "GradientTerms":
        weight = sum_tensors([slope.flatten(-2) @ patches.mT for slope, patches in zip(slopes, seen, strict=True)])
        return GradientTerms([weight.flatten(-2), *([slopes[0].flatten(-2).sum(-1)] if self.has_bias else [])])


@dataclass(frozen=True)
class GradientTerms:
    """The gradients themselves, each (..., B, size)."""

    gradients: list[Tensor]

    def to_dtype(self, dtype: torch.dtype) -> Self:
        return type(self)([part.to(dtype) for part in self.gradients])

    def norm_bounds(self) -> NormBounds:
        return vector_bounds(sum_tensors([upper_norm(part).square() for part in self.gradients]).sqrt())

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        return [(factor.unsqueeze(-2) @ part).squeeze(-2) for part in self.gradients]

    def per_record(self, factor: Tensor) -> list[Tensor]:
        return [factor.unsqueeze(-1) * part for part in self.gradients]

    def zero_others(self, kept: Tensor) -> Self:
        return type(self)([part.where(kept.unsqueeze(-1), 0.0) for part in self.gradients])


def match_parameter_layer(layer: nn.Module, inward: Shape, outward: Shape) -> ParameterLayer | None:
    """The layer's counterpart here if its gradients are known in closed form and it is exactly torch's layer."""
    if type(layer) is nn.Linear and len(inward) == 1:
        return Dense(layer.in_features, layer.out_features, layer.bias is not None)
    if type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        kernel, stride, padding, dilation = (
            _as_pair(size) for size in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        )
        return (
            None
            if padding is None or kernel is None or stride is None or dilation is None
            else Convolution(inward, outward, kernel, stride, padding, dilation, layer.bias is not None)
        )
    return None


def extract_patches(
    pictures: Tensor,
    kernel: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    stride: tuple[int, int],
) -> Tensor:
    """As torch's `unfold` of pictures (N, channels, height, width): (N, channels · kernel, places).

    That asks a GPU for one picture after another; there all patches are one copy of a view.
    """
    unfold = functional.unfold if pictures.is_cpu else extract_patches_by_view
    return unfold(pictures, kernel, dilation, padding, stride)


def extract_patches_by_view(
    pictures: Tensor,
    kernel: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    stride: tuple[int, int],
) -> Tensor:
    """As `patches_of`, on any device."""
    (down, right), (tall, wide) = padding, kernel
    padded = functional.pad(pictures, (right, right, down, down))
    sides = zip(padded.shape[2:], kernel, dilation, stride, strict=True)
    places = [(side - reach * (size - 1) - 1) // step + 1 for side, size, reach, step in sides]
    number, channel, row, column = padded.stride()
    strides = (row * dilation[0], column * dilation[1], row * stride[0], column * stride[1])
    view = padded.as_strided((*padded.shape[:2], tall, wide, *places), (number, channel, *strides))
    return view.reshape(len(padded), -1, prod(places))


def _as_pair(size: object) -> tuple[int, int] | None:
    return size if isinstance(size, tuple) and len(size) == 2 else None


def sum_tensors(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(left, right)
    return products
