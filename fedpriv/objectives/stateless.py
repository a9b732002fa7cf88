"""Layers without parameters: they pass values on, and slopes back.

Values have shape (..., B, *shape) with any leading axes, as in `objectives.layers`.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = tuple[int, ...]


class Stateless(Protocol):
    """A layer without parameters; `forward` also gives what `back` needs."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]: ...

    def back(self, slope: Tensor, saved: Tensor) -> Tensor: ...


class Tanh:
    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        outputs = values.tanh()
        return outputs, outputs

    def back(self, slope: Tensor, saved: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.tanh_backward(slope, saved)
        return result


class Rectifier:
    """nn.ReLU; the derivative at 0 is 0, as in torch."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        outputs = values.relu()
        return outputs, outputs

    def back(self, slope: Tensor, saved: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.threshold_backward(slope, saved, 0)
        return result


@dataclass(frozen=True)
class Reshape:
    """nn.Flatten and nn.Unflatten of one record's values."""

    inward: Shape
    outward: Shape

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values.reshape(*values.shape[: -len(self.inward)], *self.outward), values

    def back(self, slope: Tensor, saved: Tensor) -> Tensor:
        return slope.reshape(saved.shape)


@dataclass(frozen=True)
class MaxPool:
    """nn.MaxPool2d; `saved` is where in its image each largest value was."""

    inward: Shape
    layer: nn.MaxPool2d

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        one = self.layer
        outputs, places = functional.max_pool2d(
            values.flatten(0, -4), one.kernel_size, one.stride, one.padding, one.dilation, return_indices=True
        )
        leading = values.shape[:-3]
        return outputs.view(*leading, *outputs.shape[1:]), places.view(*leading, *places.shape[1:])

    def back(self, slope: Tensor, saved: Tensor) -> Tensor:
        values = slope.new_zeros(*slope.shape[:-2], prod(self.inward[1:]))
        values.scatter_add_(-1, saved.flatten(-2), slope.flatten(-2))
        return values.view(*values.shape[:-1], *self.inward[1:])


def stateless_of(layer: nn.Module, inward: Shape, outward: Shape) -> Stateless | None:
    """The layer's counterpart here if it is known and exactly torch's layer."""
    if type(layer) is nn.Tanh:
        return Tanh()
    if type(layer) is nn.ReLU:
        return Rectifier()
    if type(layer) in (nn.Flatten, nn.Unflatten):
        return Reshape(inward, outward)
    if type(layer) is nn.MaxPool2d and not layer.ceil_mode and not layer.return_indices:
        return MaxPool(inward, layer)
    return None
