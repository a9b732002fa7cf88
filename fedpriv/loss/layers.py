"""Layers of torch with derivatives in closed form, for several models at once.

Values have shape (..., B, *shape), where the leading axes are models.  Values that are the same for all models may
lack the leading axes.  Weights are (..., *shape), without B.  A layer without parameters (`StatelessLayer`) maps
values to outputs, and output gradients to input gradients.  A layer with parameters (`ParameterLayer`) also makes
terms (`LayerTerms`).

A query has points x_k and coefficients c_k, and a record's increment is the sum of c_k times the gradient of its
loss at x_k.  With a_k the layer's inputs, and δ_k the gradient at its outputs times c_k, both at point k, the
increment's part in the layer's weight is (Σ_k δ_k) ⊗ a_0 + Σ_{k≥1} δ_k ⊗ (a_k - a_0).  Its terms are written
u_k ⊗ v_k: u_0 = Σ_k δ_k and v_0 = a_0, then u_k = δ_k and v_k = a_k - a_0.  Terms of a convolution are also summed
over positions.
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
    """A layer without parameters, whose `forward` also returns the tensor that `input_gradient` needs.

    `input_gradient` maps the loss's gradient at the outputs and the saved tensor to the gradient at the inputs.
    """

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]: ...

    def input_gradient(self, output_gradient: Tensor, saved: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Pointwise:
    """nn.Tanh or nn.ReLU, whose derivatives follow from their outputs.

    The derivative of ReLU at 0 is 0, as in torch.
    """

    function: Callable[[Tensor], Tensor]
    """Function of each value."""
    gradient: Callable[[Tensor, Tensor], Tensor]
    """Input gradient from the output gradient and the outputs."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.function(values)
        return outputs, outputs

    def input_gradient(self, output_gradient: Tensor, saved: Tensor) -> Tensor:
        return self.gradient(output_gradient, saved)


@dataclass(frozen=True)
class Reshape:
    """nn.Flatten and nn.Unflatten of one record's values."""

    input_shape: Shape
    """Shape of one record's inputs."""
    output_shape: Shape
    """Shape of one record's outputs."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values.reshape(*values.shape[: -len(self.input_shape)], *self.output_shape), values

    def input_gradient(self, output_gradient: Tensor, saved: Tensor) -> Tensor:
        return output_gradient.reshape(saved.shape)


@dataclass(frozen=True)
class MaxPool:
    """nn.MaxPool2d, for which `saved` holds the index of each largest value in its channel."""

    input_shape: Shape
    """Shape (channels, height, width) of one record's inputs."""
    layer: nn.MaxPool2d
    """torch's layer, which has the sizes."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        outputs, indices = functional.max_pool2d(
            values.flatten(0, -4),
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            return_indices=True,
        )
        leading = values.shape[:-3]
        return outputs.view(*leading, *outputs.shape[1:]), indices.view(*leading, *indices.shape[1:])

    def input_gradient(self, output_gradient: Tensor, saved: Tensor) -> Tensor:
        values = output_gradient.new_zeros(*output_gradient.shape[:-2], prod(self.input_shape[1:]))
        values.scatter_add_(-1, saved.flatten(-2), output_gradient.flatten(-2))
        return values.view(*values.shape[:-1], *self.input_shape[1:])


def match_stateless_layer(layer: nn.Module, inward: Shape, outward: Shape) -> StatelessLayer | None:
    """Return the counterpart of torch's layer, or None for a subclass or a layer without counterpart.

    Counterparts exist for nn.Tanh, nn.ReLU, nn.Flatten, nn.Unflatten, and nn.MaxPool2d of pictures, without
    `ceil_mode` and `return_indices`.

    Args:
        layer: Layer of torch.
        inward: Shape of one record's inputs.
        outward: Shape of one record's outputs.
    """
    if type(layer) is nn.Tanh:
        return Pointwise(torch.tanh, torch.ops.aten.tanh_backward)
    if type(layer) is nn.ReLU:
        return Pointwise(
            torch.relu, lambda output_gradient, saved: torch.ops.aten.threshold_backward(output_gradient, saved, 0)
        )
    if type(layer) in (nn.Flatten, nn.Unflatten):
        return Reshape(inward, outward)
    if type(layer) is nn.MaxPool2d and len(inward) == 3 and not layer.ceil_mode and not layer.return_indices:
        return MaxPool(inward, layer)
    return None


class ParameterLayer(Protocol):
    """A layer with a weight, (..., *shape) with torch's shape, and possibly a bias.

    `prepare_inputs` is the part of the forward pass that depends on neither weight nor bias, such as the
    extraction of patches.  `make_terms` makes the layer's part of the increments of a batch from the output
    gradient u_k and the prepared inputs v_k of every term.  u_0 is the sum over all points of the query, which is
    the gradient of a bias.
    """

    @property
    def working_values(self) -> int:
        """Approximate number of values that one record takes at one point."""
        ...

    def prepare_inputs(self, values: Tensor) -> Tensor: ...

    def compute_outputs(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_gradient(self, output_gradient: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the loss at the layer's inputs."""
        ...

    def make_terms(self, output_gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> "LayerTerms": ...


class LayerTerms(Protocol):
    """One layer's part of the increments of a batch."""

    def to_dtype(self, dtype: torch.dtype) -> "LayerTerms":
        """Convert the terms to another type."""
        ...

    def norm_bounds(self) -> NormBounds:
        """Bounds on the norm of each record's increment in this layer."""
        ...

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        """Sum factor[..., b] · increment b, (..., size), for the weight and for a bias if the layer has one."""
        ...

    def per_record(self, factor: Tensor) -> list[Tensor]:
        """Compute factor[..., b] · increment b, (..., B, size), for the weight and for a bias if any."""
        ...

    def zero_others(self, mask: Tensor) -> "LayerTerms":
        """Return terms with zeros for records outside of `mask`, which is (..., B) of booleans."""
        ...


@dataclass(frozen=True)
class Dense:
    """nn.Linear."""

    input_size: int
    """Number of inputs."""
    output_size: int
    """Number of outputs."""
    has_bias: bool
    """Whether the layer has a bias."""

    @property
    def working_values(self) -> int:
        return 2 * (self.input_size + self.output_size)

    def prepare_inputs(self, values: Tensor) -> Tensor:
        return values

    def compute_outputs(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = inputs @ weight.mT
        return product if bias is None else product.add_(bias.unsqueeze(-2))

    def input_gradient(self, output_gradient: Tensor, weight: Tensor) -> Tensor:
        return output_gradient @ weight

    def make_terms(self, output_gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> "DenseTerms":
        return DenseTerms(output_gradients, inputs, self.has_bias)


@dataclass(frozen=True)
class DenseTerms:
    """Terms of a linear layer, whose norms need no gradients.

    Norms follow from ⟨u ⊗ v, u' ⊗ v'⟩ = ⟨u, u'⟩⟨v, v'⟩ (Goodfellow 2015; "ghost norms").
    """

    output_gradients: Sequence[Tensor]
    """Output gradients u_k, (..., B, outputs) each.  With a bias, u_0 is the sum over all points."""
    inputs: Sequence[Tensor]
    """Inputs v_k, (..., B, inputs) each."""
    has_bias: bool
    """Whether the terms include the gradient of a bias."""

    def to_dtype(self, dtype: torch.dtype) -> "DenseTerms":
        output_gradients, inputs = (
            [part.to(dtype) for part in parts] for parts in (self.output_gradients, self.inputs)
        )
        return DenseTerms(output_gradients, inputs, self.has_bias)

    def norm_bounds(self) -> NormBounds:
        """Bounds on each record's norm √(‖Σ_k u_k ⊗ v_k‖² + ‖bias gradient‖²), (..., B).

        The bias gradient is u_0, or missing without a bias.  The squares of weight and bias are bounded
        separately: inner products of the weight's terms may cancel each other, but must not cancel the square of
        the bias.  Rounding is relative to Σ_k ‖u_k‖ ‖v_k‖, plus ‖u_0‖ with a bias: once for the addition of each
        term, and 4 times for products and factors.
        """
        gradient_norms, input_norms = (
            [upper_norm(part) for part in parts] for parts in (self.output_gradients, self.inputs)
        )
        terms = [
            gradient_norm * input_norm
            for gradient_norm, input_norm in zip(gradient_norms, input_norms, strict=True)
        ]
        spread = sum_tensors(terms)
        squared = spread.square() if len(terms) == 1 else self._squared_weight(spread)
        if self.has_bias:  # its input is 1 at every point, so its gradient is the sum over all points
            squared, spread = squared + gradient_norms[0].square(), spread + gradient_norms[0]
        return NormBounds(
            squared.sqrt(),
            rounding_scale=spread,
            rounding_count=len(terms) + 4.0,
            operand_norm=sum_tensors([spread, *gradient_norms, *input_norms]),
        )

    def _squared_weight(self, spread: Tensor) -> Tensor:
        """Upper bound on ‖Σ_k u_k ⊗ v_k‖², from products in float64.

        `spread` is an upper bound on Σ_k ‖u_k‖ ‖v_k‖.
        """
        output_gradients, inputs = (
            [part.double() for part in parts] for parts in (self.output_gradients, self.inputs)
        )
        products = [
            (1.0 if first == second else 2.0)
            * _inner_products(output_gradients[first], output_gradients[second])
            * _inner_products(inputs[first], inputs[second])
            for first in range(len(output_gradients))
            for second in range(first + 1)
        ]
        roundings = output_gradients[0].shape[-1] + inputs[0].shape[-1] + len(products) + 8.0
        return sum_tensors(products).clamp(min=0.0) + roundings * 2.0**-52 * spread.square()

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        column = factor.unsqueeze(-1)
        weight = sum_tensors(
            [
                (output_gradient * column).mT @ inputs
                for output_gradient, inputs in zip(self.output_gradients, self.inputs, strict=True)
            ]
        )
        return [
            weight.flatten(-2),
            *([(factor.unsqueeze(-2) @ self.output_gradients[0]).squeeze(-2)] if self.has_bias else []),
        ]

    def per_record(self, factor: Tensor) -> list[Tensor]:
        output_gradients = [output_gradient * factor.unsqueeze(-1) for output_gradient in self.output_gradients]
        weight = sum_tensors(
            [
                output_gradient.unsqueeze(-1) * inputs.unsqueeze(-2)
                for output_gradient, inputs in zip(output_gradients, self.inputs, strict=True)
            ]
        )
        return [weight.flatten(-2), *(output_gradients[:1] if self.has_bias else [])]

    def zero_others(self, mask: Tensor) -> "DenseTerms":
        column = mask.unsqueeze(-1)
        output_gradients, inputs = (
            [part.where(column, 0.0) for part in parts] for parts in (self.output_gradients, self.inputs)
        )
        return DenseTerms(output_gradients, inputs, self.has_bias)


@dataclass(frozen=True)
class Convolution:
    """nn.Conv2d without groups, as a product with the patches of its input.

    A record's gradient is materialized, since it is usually smaller than the record's patches.
    """

    input_shape: Shape
    """Shape (channels, height, width) of one record's inputs."""
    output_shape: Shape
    """Shape (channels, height, width) of one record's outputs."""
    kernel: tuple[int, int]
    """Height and width of a patch."""
    stride: tuple[int, int]
    """Distance of neighbouring positions, down and right."""
    padding: tuple[int, int]
    """Rows and columns of zeros on each side of the input."""
    dilation: tuple[int, int]
    """Distance of neighbouring pixels of a patch, down and right."""
    has_bias: bool
    """Whether the layer has a bias."""

    @property
    def working_values(self) -> int:
        patch = self.input_shape[0] * prod(self.kernel)
        return 2 * prod(self.output_shape) + 2 * patch * prod(self.output_shape[1:]) + patch * self.output_shape[0]

    def prepare_inputs(self, values: Tensor) -> Tensor:
        """Extract patches, (..., B, channels · kernel height · kernel width, positions)."""
        patches = extract_patches(values.flatten(0, -4), self.kernel, self.dilation, self.padding, self.stride)
        return patches.view(*values.shape[:-3], *patches.shape[1:])

    def compute_outputs(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = weight.flatten(-3).unsqueeze(-3) @ inputs
        if bias is not None:
            product.add_(bias[..., None, :, None])
        return product.view(*product.shape[:-1], *self.output_shape[1:])

    def input_gradient(self, output_gradient: Tensor, weight: Tensor) -> Tensor:
        patches = weight.flatten(-3).mT.unsqueeze(-3) @ output_gradient.flatten(-2)
        values = functional.fold(
            patches.flatten(0, -3), self.input_shape[1:], self.kernel, self.dilation, self.padding, self.stride
        )
        return values.view(*output_gradient.shape[:-3], *self.input_shape)

    def make_terms(self, output_gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> "GradientTerms":
        weight_gradient = sum_tensors(
            [
                output_gradient.flatten(-2) @ patches.mT
                for output_gradient, patches in zip(output_gradients, inputs, strict=True)
            ]
        )
        return GradientTerms(
            [weight_gradient.flatten(-2), *([output_gradients[0].flatten(-2).sum(-1)] if self.has_bias else [])]
        )


@dataclass(frozen=True)
class GradientTerms:
    """Terms of a layer whose increments are materialized."""

    gradients: list[Tensor]
    """Increments by the weight and, if there is one, by the bias, (..., B, size) each."""

    def to_dtype(self, dtype: torch.dtype) -> Self:
        return type(self)([part.to(dtype) for part in self.gradients])

    def norm_bounds(self) -> NormBounds:
        return vector_bounds(sum_tensors([upper_norm(part).square() for part in self.gradients]).sqrt())

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        return [(factor.unsqueeze(-2) @ part).squeeze(-2) for part in self.gradients]

    def per_record(self, factor: Tensor) -> list[Tensor]:
        return [factor.unsqueeze(-1) * part for part in self.gradients]

    def zero_others(self, mask: Tensor) -> Self:
        return type(self)([part.where(mask.unsqueeze(-1), 0.0) for part in self.gradients])


def match_parameter_layer(layer: nn.Module, inward: Shape, outward: Shape) -> ParameterLayer | None:
    """Return the counterpart of torch's layer, or None for a subclass or a layer without closed form.

    Counterparts exist for nn.Linear on flat inputs, and for nn.Conv2d of pictures, without groups and with a
    number of zeros as padding.

    Args:
        layer: Layer of torch.
        inward: Shape of one record's inputs.
        outward: Shape of one record's outputs.
    """
    if type(layer) is nn.Linear and len(inward) == 1:
        return Dense(layer.in_features, layer.out_features, layer.bias is not None)
    if type(layer) is nn.Conv2d and len(inward) == 3 and layer.groups == 1 and layer.padding_mode == "zeros":
        kernel, stride, padding, dilation = (
            size if isinstance(size, tuple) and len(size) == 2 else None
            for size in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
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
    """Extract the patches of pictures by torch's `unfold` on a CPU, or by `extract_patches_by_view`.

    Pictures are (N, channels, height, width), and the patches (N, channels · kernel height · kernel width,
    positions).
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
    """Extract the patches of pictures by a strided view, on any device.

    A position is a place of the kernel on the padded picture.  Its patch is the column of the pixels under the
    kernel: channel by channel, row by row.

    Args:
        pictures: Pictures, (N, channels, height, width).
        kernel: Height and width of a patch, in pixels.
        dilation: Distance of neighbouring pixels of a patch, down and right.
        padding: Rows of zeros above and below, and columns of zeros left and right.
        stride: Distance of neighbouring positions, down and right.

    Returns:
        The patches, (N, channels · kernel height · kernel width, positions), as torch's `unfold` returns them.
    """
    (vertical_padding, horizontal_padding), (kernel_height, kernel_width) = padding, kernel
    (row_spacing, column_spacing), (row_step, column_step) = dilation, stride
    padded = functional.pad(pictures, (horizontal_padding, horizontal_padding, vertical_padding, vertical_padding))
    axes = zip(padded.shape[2:], kernel, dilation, stride, strict=True)
    position_counts = [(side - spacing * (size - 1) - 1) // step + 1 for side, size, spacing, step in axes]
    picture_stride, channel_stride, row_stride, column_stride = padded.stride()
    # (N, channels, kernel height, kernel width, positions down, positions right), without a copy.
    view = padded.as_strided(
        (*padded.shape[:2], kernel_height, kernel_width, *position_counts),
        (
            picture_stride,
            channel_stride,
            row_stride * row_spacing,
            column_stride * column_spacing,
            row_stride * row_step,
            column_stride * column_step,
        ),
    )
    return view.flatten(1, 3).flatten(2)


def sum_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Add up tensors whose shapes broadcast.  A single tensor is returned itself, without a copy."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _inner_products(first: Tensor, second: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(first, second)
    return products
