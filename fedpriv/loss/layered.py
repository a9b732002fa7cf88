"""Sequential modules of layers with closed forms: one forward and backward pass at each point.

A query has points x_k and coefficients c_k, and a record's increment is the sum of c_k times the gradient of its
loss at x_k, clipped as a whole.  With δ_k the gradient of the loss at a layer's outputs and a_k the layer's
inputs, both at point k, the increment's part in the layer's weight is Σ_k c_k δ_k ⊗ a_k before it is clipped.  In
a convolution the products are summed over positions, too.  This part is computed as

    (Σ_k c_k δ_k) ⊗ a_0 + Σ_{k≥1} c_k δ_k ⊗ (a_k - a_0),

whose terms are usually about as small as the increment itself if the points are close.  The terms c_k δ_k ⊗ a_k
may be much larger than their sum, so that the norm of the sum would be dominated by their rounding.

A block is a layer with parameters, and the layers without parameters after it, up to the next block or the end.

`make_module_objective` chooses the objective of a module: `LayeredObjective` if `LayeredObjective.from_module` can
make one, and `GhostObjective` (ghost.py) otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from fedpriv.core.replicates import Scalar, max_values_at_once
from fedpriv.loss.clipping import Clipping, combine_bounds, compute_clipping
from fedpriv.loss.frozen import trainable_parameters
from fedpriv.loss.ghost import GhostObjective
from fedpriv.loss.layers import (
    LayerTerms,
    ParameterLayer,
    StatelessLayer,
    match_parameter_layer,
    match_stateless_layer,
    sum_tensors,
)
from fedpriv.loss.losses import Loss
from fedpriv.loss.module import BaseModuleObjective, ModuleObjective, check_module, unflatten_point
from fedpriv.loss.objective import Batch, Increment, Query, Records

_CHUNK_VALUES = 2**21
"""Approximate number of values that exist at a time on a CPU, 8 MiB in float32."""
_VALUES_PER_PARAMETER = 8
"""Number of values for each parameter that a chunk of records may have, even beyond `_CHUNK_VALUES`.

Adding the sum of a chunk to the total goes through all parameters once, so that small chunks are slow.
"""


class LayerBlock(NamedTuple):
    """A layer with parameters, and the layers without parameters after it."""

    layer: ParameterLayer
    """Layer with parameters."""
    weight: str
    """Name of the weight."""
    bias: str | None
    """Name of the bias, or None without bias."""
    stateless_layers: tuple[StatelessLayer, ...]
    """Layers without parameters up to the next layer with parameters, in order."""


class _ForwardPass(NamedTuple):
    """Result of a forward pass at one point."""

    inputs: list[Tensor]
    """Prepared inputs of each layer with parameters (`ParameterLayer.prepare_inputs`)."""
    saved: list[list[Tensor]]
    """Tensors saved by the layers without parameters, block by block."""
    outputs: Tensor
    """Outputs of the module, (..., B, outputs)."""


@dataclass(frozen=True)
class LayeredObjective(BaseModuleObjective):
    """Loss of a sequential module's outputs, for layers with closed forms."""

    module: nn.Sequential
    """Sequential module of the model."""
    leading_layers: tuple[StatelessLayer, ...]
    """Layers before the first layer with parameters."""
    blocks: tuple[LayerBlock, ...]
    """Layers with parameters in order, each with the layers up to the next."""
    values_per_record: int
    """Approximate number of values that one record takes at one point."""

    @classmethod
    def from_module(
        cls, module: nn.Module, features: int, loss: Loss, seed: int, dtype: torch.dtype
    ) -> Self | None:
        """Make the objective of a module, or return None if the module has to be traced.

        Args:
            module: Module of the model.
            features: Number of features of a record.
            loss: Loss of the module's outputs.
            seed: Seed of the initial model.
            dtype: Type of the parameters.

        Returns:
            The objective, or None if the module is no nn.Sequential itself, has a forward hook or a `forward` set
            on an instance, has a layer without a closed form or one that does not keep the axis of records, or has
            a parameter that is frozen or used more than once.

        Raises:
            InputError: The module cannot be trained (`check_module`).  Errors of a layer on zeros are passed on.
        """
        check_module(module)
        # Closed forms run neither hooks nor a `forward` that an instance has of its own.
        if type(module) is not nn.Sequential or any(
            layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
            for layer in module.modules()
        ):
            return None
        # A record of zeros goes through the layers, which shows the shapes of inputs and outputs.
        leading_layers: list[StatelessLayer] = []
        blocks: list[LayerBlock] = []
        values, probe = features, torch.zeros(1, features)
        for name, layer in _leaves(module, ""):
            input_shape, probe = tuple(probe.shape[1:]), _run_layer(layer, probe)
            if probe.dim() < 2 or probe.shape[0] != 1:  # no axis of records is left, such as after nn.Flatten(0)
                return None
            output_shape = tuple(probe.shape[1:])
            parameter_layer, stateless = (
                match_parameter_layer(layer, input_shape, output_shape),
                match_stateless_layer(layer, input_shape, output_shape),
            )
            values += prod(output_shape)
            if parameter_layer is not None:
                values += parameter_layer.working_values
                blocks.append(
                    LayerBlock(
                        parameter_layer, f"{name}.weight", f"{name}.bias" if layer.bias is not None else None, ()
                    )
                )
            elif stateless is None:
                return None
            elif blocks:
                blocks[-1] = blocks[-1]._replace(stateless_layers=(*blocks[-1].stateless_layers, stateless))
            else:
                leading_layers.append(stateless)
        # The names differ if a layer with parameters occurs twice, or a parameter is frozen or in two layers.
        parameter_names = [name for block in blocks for name in (block.weight, block.bias) if name is not None]
        if parameter_names != list(trainable_parameters(module)):
            return None
        return cls(module, loss, seed, dtype, tuple(leading_layers), tuple(blocks), values)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the weighted clipped increments of a batch, in chunks of records to bound the memory.

        Leading axes of points (..., d) and records (..., B, …) are models.

        Returns:
            The sum, (..., d), and the number of clipped records, (...).
        """
        records, weights = batch
        chunk_size = max(
            self._records_per_chunk(
                query.points[0].shape[:-1].numel() * len(query.points), records.features.device
            ),
            _VALUES_PER_PARAMETER * self.dimension // self.values_per_record,
        )
        axis = records.record_axis
        total: Tensor | None = None
        clipped: Tensor | None = None
        for features, labels, weight in zip(
            torch.split(records.features, chunk_size, axis),
            torch.split(records.labels, chunk_size, axis),
            torch.split(weights, chunk_size, -1),
            strict=True,
        ):
            terms, chunk = self._clip_increments(query, Batch(Records(features, labels), weight), clip)
            sums = [part_sum for term in terms for part_sum in term.weighted_sum(chunk.factor)]
            total = torch.cat(sums, dim=-1) if total is None else _add_parts(total, sums)
            clipped = chunk.clipped_count if clipped is None else clipped + chunk.clipped_count
        assert total is not None
        assert clipped is not None
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        terms, clipped = self._clip_increments(query, batch, clip)
        return torch.cat([part for term in terms for part in term.per_record(clipped.factor)], dim=-1)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        """Sum weighted gradients without clipping, (..., d), in chunks of the last axis of models."""
        if point.dim() == 1:
            return self._sum_gradients(point, batch)
        records, weights = batch
        axis = point.dim() - 2  # the last of the leading axes
        values = self.values_per_record * records.features.shape[-2] * point.shape[:axis].numel()
        chunk_size = max(1, max_values_at_once(_CHUNK_VALUES, point.device) // max(1, values))
        parts = (
            torch.split(part, chunk_size, axis)
            for part in (point, *records, weights.expand(records.features.shape[:-1]))
        )
        return torch.cat(
            [
                self._sum_gradients(model, Batch(Records(*columns), weight))
                for model, *columns, weight in zip(*parts, strict=True)
            ],
            axis,
        )

    def _sum_gradients(self, point: Tensor, batch: Batch) -> Tensor:
        terms = self._make_terms(Query((point,)), batch.records)
        return torch.cat([part_sum for term in terms for part_sum in term.weighted_sum(batch.weights)], dim=-1)

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[list[LayerTerms], Clipping]:
        """Terms of a batch's increments, one for each layer with parameters, and the clipping of each record.

        Terms have the type of the weights, and are not clipped yet.  A record's norm is combined from the bounds
        of all layers.  The terms of an increment that is not representable (`Clipping`) are zero.
        """
        records, weights = batch
        terms = [term.to_dtype(weights.dtype) for term in self._make_terms(query, records)]
        clipped = compute_clipping(combine_bounds([term.norm_bounds() for term in terms]), weights, clip)
        mask = clipped.representable
        return terms if mask is None else [term.zero_others(mask) for term in terms], clipped

    def _records_per_chunk(self, models: int, device: torch.device) -> int:
        return max(1, max_values_at_once(_CHUNK_VALUES, device) // (self.values_per_record * models))

    def _make_terms(self, query: Query, records: Records) -> list[LayerTerms]:
        """Terms of each layer with parameters, in order, by differences from the inputs at the first point.

        With output gradients δ_k (coefficient included) and inputs a_k at point k, the terms of a layer are
        (Σ_k δ_k) ⊗ a_0 and δ_k ⊗ (a_k - a_0) for k ≥ 1.  The first layer has only the first of these terms, since
        its inputs are the same at every point.
        """
        points = [unflatten_point(self.shapes, point) for point in query.points]
        first_inputs = self._first_inputs(records.features)
        passes = [self._forward(point, first_inputs) for point in points]
        output_gradients = [
            self._backward(
                point, forward_pass, coefficient * self.loss.output_gradient(forward_pass.outputs, records.labels)
            )
            for point, forward_pass, coefficient in zip(points, passes, query.coefficients, strict=True)
        ]
        terms = []
        for index, block in enumerate(self.blocks):
            layer_gradients = [point_gradients[index] for point_gradients in output_gradients]
            inputs = [forward_pass.inputs[index] for forward_pass in passes]
            if index == 0:  # differences of inputs are 0
                terms.append(block.layer.make_terms([sum_tensors(layer_gradients)], inputs[:1]))
            else:
                terms.append(
                    block.layer.make_terms(
                        [sum_tensors(layer_gradients), *layer_gradients[1:]],
                        [inputs[0], *[point_inputs - inputs[0] for point_inputs in inputs[1:]]],
                    )
                )
        return terms

    def _first_inputs(self, features: Tensor) -> Tensor:
        for layer in self.leading_layers:
            features, _ = layer.forward(features)
        return self.blocks[0].layer.prepare_inputs(features)

    def _forward(self, point: dict[str, Tensor], first_inputs: Tensor) -> _ForwardPass:
        """Run the module forward from the prepared inputs of its first layer with parameters.

        The parameters of `point`, by name, are (..., *shape).
        """
        inputs, saved, values = [first_inputs], [], first_inputs
        for index, block in enumerate(self.blocks):
            if index:
                inputs.append(block.layer.prepare_inputs(values))
            values = block.layer.compute_outputs(
                inputs[-1], point[block.weight], None if block.bias is None else point[block.bias]
            )
            block_saved = []
            for layer in block.stateless_layers:
                values, layer_saved = layer.forward(values)
                block_saved.append(layer_saved)
            saved.append(block_saved)
        return _ForwardPass(inputs, saved, values)

    def _backward(self, point: dict[str, Tensor], forward_pass: _ForwardPass, gradient: Tensor) -> list[Tensor]:
        """Output gradients of the layers with parameters, first layer first, (..., B, *output shape) each.

        Args:
            point: Parameters by name, (..., *shape).
            forward_pass: Result of `_forward` at this point.
            gradient: Gradient at the module's outputs, times the point's coefficient, (..., B, outputs).
        """
        output_gradients: list[Tensor] = []
        for index in reversed(range(len(self.blocks))):
            block = self.blocks[index]
            for layer, saved in zip(
                reversed(block.stateless_layers), reversed(forward_pass.saved[index]), strict=True
            ):
                gradient = layer.input_gradient(gradient, saved)
            output_gradients.append(gradient)
            if index:
                gradient = block.layer.input_gradient(gradient, point[block.weight])
        return output_gradients[::-1]

    def losses(self, point: Tensor, records: Records) -> Tensor:
        if records.record_axis == 0:  # there may be many records without leading axes, so in chunks
            return self.loss.value(self.outputs(point, records), records.labels)
        parameters = unflatten_point(self.shapes, point)
        return self.loss.value(
            self._forward(parameters, self._first_inputs(records.features)).outputs, records.labels
        )

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        parameters = unflatten_point(self.shapes, point)
        chunks = torch.split(records.features, self._records_per_chunk(point.shape[:-1].numel(), point.device))
        return torch.cat(
            [self._forward(parameters, self._first_inputs(chunk)).outputs for chunk in chunks], dim=-2
        )


def _add_parts(total: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Add parts (..., size), whose sizes sum to d and which are in order, to `total` (..., d) in place."""
    for total_part, part in zip(
        torch.split(total, [part.shape[-1] for part in parts], dim=-1), parts, strict=True
    ):
        total_part.add_(part)
    return total


def _leaves(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module._modules.items():  # named_children yields a layer only once
        assert layer is not None
        if type(layer) is nn.Sequential:
            yield from _leaves(layer, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", layer


def _run_layer(layer: nn.Module, values: Tensor) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = layer(values.to(next(layer.parameters(), values).dtype))
    return outputs


def make_module_objective(
    module: nn.Module, features: int, loss: Loss, seed: int, dtype: torch.dtype = torch.float32
) -> LayeredObjective | ModuleObjective:
    """Make the objective of a module that maps (records, features) to (records, outputs).

    An nn.Sequential of Linear, Conv2d, MaxPool2d, Tanh, ReLU, Flatten and Unflatten gets a `LayeredObjective` if
    `LayeredObjective.from_module` can make one, and any other module gets a `GhostObjective`.  Both compute the
    same increments up to rounding.

    Args:
        module: Module whose trainable parameters are the point.
        features: Number of features of a record.
        loss: Loss of the module's outputs.
        seed: Seed of the initial model.
        dtype: Type of the parameters.

    Raises:
        InputError: A layer is refused, or no parameter is trainable (`check_module`).  Errors of a layer on zeros
            are passed on.
    """
    layered = LayeredObjective.from_module(module, features, loss, seed, dtype)
    return GhostObjective(module, loss, seed, dtype) if layered is None else layered
