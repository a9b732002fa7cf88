"""Sequential modules of known layers: every record's increment from one pass forward and one back at each point.

With δ_k the slope of the loss at a layer's outputs and a_k what the layer saw, both at point k, an increment's
part in that layer is Σ_k c_k δ_k ⊗ a_k.  It is kept as

    (Σ_k c_k δ_k) ⊗ a_0 + Σ_{k≥1} c_k δ_k ⊗ (a_k - a_0),

whose terms are as small as the increment itself: with c = (t, -(t-1)) a norm from the products of c_k δ_k ⊗ a_k
would lose all digits to cancellation in float32, and a norm that is too small breaks the clip.

`objective_of` chooses a module's route: this one where every layer has a closed form, that of ghost.py otherwise.
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
_VALUES_PER_PARAMETER = 8  # of a chunk: adding its sum to the others' goes through all parameters once


class LayerBlock(NamedTuple):
    """A layer with parameters, the names of its weight and bias, and the layers without parameters after it."""

    layer: ParameterLayer
    weight: str
    bias: str | None
    stateless_layers: tuple[StatelessLayer, ...]


class _ForwardPass(NamedTuple):
    """One pass at one point: what each layer saw, what the layers after it saved, and the outputs."""

    inputs: list[Tensor]
    saved: list[list[Tensor]]
    outputs: Tensor


@dataclass(frozen=True)
class LayeredObjective(BaseModuleObjective):
    """The loss of a sequential module's outputs; made by `of`."""

    module: nn.Sequential
    leading_layers: tuple[StatelessLayer, ...]
    blocks: tuple[LayerBlock, ...]
    values_per_record: int
    """How many values one record takes at one point, about."""

    @classmethod
    def from_module(
        cls, module: nn.Module, features: int, loss: Loss, seed: int, dtype: torch.dtype
    ) -> Self | None:
        """The objective, or None if the module has a layer that is not known here or used twice."""
        check_module(module)
        if type(module) is not nn.Sequential:
            return None
        before: list[StatelessLayer] = []
        blocks: list[LayerBlock] = []
        values, probe = features, torch.zeros(1, features)
        for name, layer in _leaves(module, ""):
            shape, probe = tuple(probe.shape[1:]), _run_layer(layer, probe)
            if probe.shape[0] != 1:
                return None
            outward = tuple(probe.shape[1:])
            linked, stateless = (
                match_parameter_layer(layer, shape, outward),
                match_stateless_layer(layer, shape, outward),
            )
            values += prod(outward)
            if linked is not None:
                values += linked.working_values
                blocks.append(
                    LayerBlock(linked, f"{name}.weight", f"{name}.bias" if layer.bias is not None else None, ())
                )
            elif stateless is None:
                return None
            elif blocks:
                blocks[-1] = blocks[-1]._replace(stateless_layers=(*blocks[-1].stateless_layers, stateless))
            else:
                before.append(stateless)
        used = [name for block in blocks for name in (block.weight, block.bias) if name is not None]
        if used != list(trainable_parameters(module)):
            return None
        return cls(module, loss, seed, dtype, tuple(before), tuple(blocks), values)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """See `Objective`; about `_CHUNK_VALUES` values, 8 d, or one record's exist at a time, if that is more."""
        records, weights = batch
        rows = max(
            self._records_per_chunk(
                query.points[0].shape[:-1].numel() * len(query.points), records.features.device
            ),
            _VALUES_PER_PARAMETER * self.dimension // self.values_per_record,
        )
        axis = records.record_axis
        total: Tensor | None = None
        clipped: Tensor | None = None
        for features, labels, weight in zip(
            torch.split(records.features, rows, axis),
            torch.split(records.labels, rows, axis),
            torch.split(weights, rows, -1),
            strict=True,
        ):
            terms, chunk = self._clip_increments(query, Batch(Records(features, labels), weight), clip)
            parts = [piece for term in terms for piece in term.weighted_sum(chunk.factor)]
            total = torch.cat(parts, dim=-1) if total is None else _add_parts(total, parts)
            clipped = chunk.clipped_count if clipped is None else clipped + chunk.clipped_count
        assert total is not None
        assert clipped is not None
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        terms, clipped = self._clip_increments(query, batch, clip)
        return torch.cat([part for term in terms for part in term.per_record(clipped.factor)], dim=-1)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        """See `Objective`; models side by side are taken a few at a time, each with all of its records."""
        if point.dim() == 1:
            return self._sum_gradients(point, batch)
        records, weights = batch
        axis = point.dim() - 2  # the last of the leading axes
        values = self.values_per_record * records.features.shape[-2] * point.shape[:axis].numel()
        several = max(1, max_values_at_once(_CHUNK_VALUES, point.device) // values)
        parts = (
            torch.split(part, several, axis)
            for part in (point, *records, weights.expand(records.features.shape[:-1]))
        )
        return torch.cat(
            [
                self._sum_gradients(own, Batch(Records(*some), weight))
                for own, *some, weight in zip(*parts, strict=True)
            ],
            axis,
        )

    def _sum_gradients(self, point: Tensor, batch: Batch) -> Tensor:
        terms = self._make_terms(Query((point,)), batch.records)
        return torch.cat([piece for term in terms for piece in term.weighted_sum(batch.weights)], dim=-1)

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[list[LayerTerms], Clipping]:
        """The increments of a batch by layers, zeros for records that are not held, and what clips them."""
        records, weights = batch
        terms = [term.to_dtype(weights.dtype) for term in self._make_terms(query, records)]
        clipped = compute_clipping(combine_bounds([term.norm_bounds() for term in terms]), weights, clip)
        held = clipped.representable
        return terms if held is None else [term.zero_others(held) for term in terms], clipped

    def _records_per_chunk(self, models: int, where: torch.device) -> int:
        return max(1, max_values_at_once(_CHUNK_VALUES, where) // (self.values_per_record * models))

    def _make_terms(self, query: Query, records: Records) -> list[LayerTerms]:
        points = [unflatten_point(self.shapes, point) for point in query.points]
        first = self._first_inputs(records.features)
        passes = [self._forward(point, first) for point in points]
        slopes = [
            self._backward(point, one, coefficient * self.loss.output_gradient(one.outputs, records.labels))
            for point, one, coefficient in zip(points, passes, query.coefficients, strict=True)
        ]
        terms = []
        for place, block in enumerate(self.blocks):
            own = [slope[place] for slope in slopes]
            seen = [one.inputs[place] for one in passes]
            if place == 0:  # the first layer sees the record itself at every point
                terms.append(block.layer.make_terms([sum_tensors(own)], seen[:1]))
            else:
                terms.append(
                    block.layer.make_terms(
                        [sum_tensors(own), *own[1:]], [seen[0], *[later - seen[0] for later in seen[1:]]]
                    )
                )
        return terms

    def _first_inputs(self, features: Tensor) -> Tensor:
        for layer in self.leading_layers:
            features, _ = layer.forward(features)
        return self.blocks[0].layer.prepare_inputs(features)

    def _forward(self, point: dict[str, Tensor], first: Tensor) -> _ForwardPass:
        seen, saved, values = [first], [], first
        for place, block in enumerate(self.blocks):
            if place:
                seen.append(block.layer.prepare_inputs(values))
            values = block.layer.compute_outputs(
                seen[-1], point[block.weight], None if block.bias is None else point[block.bias]
            )
            kept = []
            for layer in block.stateless_layers:
                values, keep = layer.forward(values)
                kept.append(keep)
            saved.append(kept)
        return _ForwardPass(seen, saved, values)

    def _backward(self, point: dict[str, Tensor], one: _ForwardPass, slope: Tensor) -> list[Tensor]:
        """The slope at each block's layer's outputs, first block first."""
        slopes: list[Tensor] = []
        for place in reversed(range(len(self.blocks))):
            block = self.blocks[place]
            for layer, saved in zip(reversed(block.stateless_layers), reversed(one.saved[place]), strict=True):
                slope = layer.input_gradient(slope, saved)
            slopes.append(slope)
            if place:
                slope = block.layer.input_gradient(slope, point[block.weight])
        return slopes[::-1]

    def losses(self, point: Tensor, records: Records) -> Tensor:
        if records.record_axis == 0:  # as many as may be evaluated on, in blocks
            return self.loss.value(self.outputs(point, records), records.labels)
        named = unflatten_point(self.shapes, point)
        return self.loss.value(self._forward(named, self._first_inputs(records.features)).outputs, records.labels)

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        named = unflatten_point(self.shapes, point)
        chunks = torch.split(records.features, self._records_per_chunk(point.shape[:-1].numel(), point.device))
        return torch.cat([self._forward(named, self._first_inputs(chunk)).outputs for chunk in chunks], dim=-2)


def _add_parts(total: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """`total` (..., d) with the parts (..., size) added to it where they lie in a row."""
    for own, part in zip(torch.split(total, [part.shape[-1] for part in parts], dim=-1), parts, strict=True):
        own.add_(part)
    return total


def _leaves(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module._modules.items():  # named_children leaves out what occurs twice
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
    """The objective of a module that maps (records, features) to (records, outputs); x_1 follows from `seed`.

    Sequential modules of Linear, Conv2d, MaxPool2d, Tanh, ReLU, Flatten and Unflatten take the route here, others
    that of ghost.py.  Both compute the same numbers.  InputError if a layer mixes records, draws random numbers
    or keeps buffers.
    """
    layered = LayeredObjective.from_module(module, features, loss, seed, dtype)
    return GhostObjective(module, loss, seed, dtype) if layered is None else layered
