"""Clipped sums for any module, from terms in closed form for the parameters that allow it.

The increment of a record z is Σ_k c_k ∇f(x_k; z), for the points x_k and the coefficients c_k of a query, and is
clipped as a whole.  If a parameter goes only into layer functions with a closed form (functions.py), always as a
weight or always as a bias, its part of the increments of all B records is represented by `LayerTerms`, from which
each record's norm and the clipped sum are computed.  For linear functions these terms may be factors in place of
gradients ("ghost norms").  Gradients of all other parameters are materialized record by record, (B, size), in the
same backward pass.  A plan (`_GhostPlan`) says which parameters those are.  The plan is made with a record of
zeros, and depends on no record of the batch.

The records of a batch pass through the module under vmap, so that code of the module computes with one record's
values.  `TracingMode` stands between the module and torch's functions.  It computes a layer function that is
called with a parameter for all records at once, as vmap would do, and stores the call as a `TracedCall`.  One
backward pass of autograd then gives the gradients at the outputs of the calls.

Guarantee: if a part of a loss's gradient by a parameter does not come from the traced calls, autograd finds it.
`Trace.compute_output_gradients` names the parameters that have another way into a loss, and those of calls that
autograd did not come to, in every pass anew.  Changes in place after a call do not touch the call's output
gradient.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedpriv.core.replicates import Scalar, max_values_at_once
from fedpriv.loss.alone import aligned_copy
from fedpriv.loss.clipping import combine_bounds, compute_clipping
from fedpriv.loss.functions import (
    LAYER_FUNCTIONS,
    LayerFunction,
    LongGradientTerms,
    ParameterUse,
    make_weight_terms,
)
from fedpriv.loss.layers import LayerTerms, sum_tensors
from fedpriv.loss.module import ModuleObjective, unflatten_point
from fedpriv.loss.objective import Batch, Increment, Query, Records
from fedpriv.loss.unrolled import UNROLLED_FUNCTIONS


class TracedCall(NamedTuple):
    """One call of a layer function, for a batch of records."""

    function: LayerFunction
    """Function that was called, with its settings."""
    parameter_names: tuple[str | None, str | None]
    """Names of its weight and its bias, or None for one that is missing."""
    inputs: Tensor
    """Inputs of the function, (B, …)."""
    input_version: int
    """Version counter of the inputs at the call, which reveals a later change in place."""
    output_edge: GradientEdge
    """Edge of autograd's graph at the outputs."""
    is_input_constant: bool
    """Whether the inputs require no gradient, so that autograd does not go beyond them."""


OnGradient = Callable[[int, TracedCall, Tensor], None]
"""Callback for a call's index, the call, and the gradients of the losses at its outputs, (B, …)."""


_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Implementations of attention that compute each head of each record from its own values."""


@dataclass
class Trace:
    """Traced calls of one forward pass of a batch, in the order of the calls."""

    parameters: Mapping[str, Tensor]
    """Parameters to trace by name, which must require gradients."""
    calls: list[TracedCall] = field(default_factory=list)
    """Calls so far."""

    def __post_init__(self) -> None:
        self._twins = {
            id(parameter): (name, parameter.detach().requires_grad_())
            for name, parameter in self.parameters.items()
        }

    def twin(self, parameter: Tensor | None) -> tuple[str | None, Tensor | None]:
        """Return a parameter's name and its twin, a leaf of autograd that stands for it in traced calls.

        So a gradient by the parameter itself shows that the parameter has another way into the loss.

        Args:
            parameter: Tensor that a function was called with, or None.

        Returns:
            The name and the twin, or (None, None) for None and for any tensor that is not in `parameters`.
        """
        return self._twins.get(id(parameter), (None, None))

    def compute_output_gradients(
        self, loss: Tensor, leaves: Sequence[Tensor], on_gradient: OnGradient
    ) -> tuple[set[str], Sequence[Tensor | None]]:
        """Pass the output gradients of the calls to `on_gradient`, in any order, and drop the calls.

        An output gradient is the gradient of `loss` at the outputs of a call.  One backward pass computes all of
        them.

        Args:
            loss: Sum of the losses of all records, times a coefficient, ().
            leaves: Tensors to differentiate by in the same pass.
            on_gradient: Callback that takes the index of a call, the call and its output gradient (B, …).

        Returns:
            Names of the traced parameters whose gradient is not all in the calls, and the gradients by `leaves`,
            None for a leaf that the loss does not depend on.  A name is returned if the loss depends on the
            parameter outside of the calls, or if autograd does not come to one of the parameter's calls.

        Raises:
            RuntimeError: A tensor that was the input of a call has been changed in place since, or autograd fails.
        """
        if any(call.inputs._version != call.input_version for call in self.calls):
            raise RuntimeError("a change in place of what a function of parameters saw")
        # Calls whose output gradient is still missing.
        pending = dict(enumerate(self.calls))
        self.calls.clear()

        def on_node_gradient(call_index: int, gradients: Sequence[Tensor | None]) -> None:
            if (output_gradient := gradients[pending[call_index].output_edge.output_nr]) is not None:
                on_gradient(call_index, pending.pop(call_index), output_gradient)

        # Autograd does not come to a call with constant inputs, so the call's output is a target of its own.
        constant_calls = [call_index for call_index, call in pending.items() if call.is_input_constant]
        handles = [
            call.output_edge.node.register_prehook(partial(on_node_gradient, call_index))
            for call_index, call in pending.items()
            if not call.is_input_constant
        ]
        targets: Any = [
            *(pending[call_index].output_edge for call_index in constant_calls),
            *leaves,
            *self.parameters.values(),
        ]
        try:
            target_gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, targets, allow_unused=True)
        finally:  # a hook that refers to its own node would keep it alive for ever
            for handle in handles:
                handle.remove()
        for call_index, output_gradient in zip(constant_calls, target_gradients, strict=False):
            if output_gradient is not None:
                on_gradient(call_index, pending.pop(call_index), output_gradient)
        untraced = {name for call in pending.values() for name in call.parameter_names if name is not None}
        direct_gradients = zip(self.parameters, target_gradients[len(constant_calls) + len(leaves) :], strict=True)
        untraced |= {name for name, gradient in direct_gradients if gradient is not None}
        return untraced, target_gradients[len(constant_calls) : len(constant_calls) + len(leaves)]


class TracingMode(TorchFunctionMode):
    """Mode in which calls of layer functions with traced parameters are added to `trace`."""

    def __init__(self, trace: Trace, record_part: Tensor, count: int) -> None:
        """Trace calls inside of a vmap over `count` records.

        Args:
            trace: Trace that the calls are added to.
            record_part: Any tensor of one record inside the vmap, which shows the vmap's level of nesting.
            count: Number of records B.
        """
        super().__init__()
        self.trace = trace
        self._count, self._level = count, _functorch.maybe_get_level(record_part)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call of a torch function on one record's values inside the vmap, with a trace of parameters.

        * A layer function with a closed form whose weight and bias are traced parameters, or one of the two if it
          has no other, is computed for all records at once, and the call is added to the trace.  Twins take the
          place of the parameters: leaves of autograd with the same values.
        * A recurrent layer or cell without keyword arguments runs as its unrolled form, and multi-head attention
          as torch's own code, both in this mode, so that the functions inside of them are traced.
        * Attention without mask and dropout, whose three tensors have equal leading axes (`_plain_attention`), is
          one call for all records, by an implementation that computes each from its own values.
        * Any other call is passed on unchanged.
        """
        settings = kwargs or {}
        if func in LAYER_FUNCTIONS and (call := LAYER_FUNCTIONS[func](*args, **settings)) is not None:
            values, weight, bias, function = call
            (name, weight_twin), (bias_name, bias_twin) = self.trace.twin(weight), self.trace.twin(bias)
            # A call whose weight or bias is no traced parameter, such as a product of parameters, is passed on.
            if (
                (name or bias_name)
                and (weight_twin is None) == (weight is None)
                and (bias_twin is None) == (bias is None)
            ):
                inputs = self._batch_values(values)
                outputs = function.outputs(inputs, weight_twin, bias_twin)
                if outputs._is_view():  # a change in place would give a view another node of autograd
                    outputs = torch.ops.aten._unsafe_view(outputs, outputs.shape)
                edge = get_gradient_edge(outputs)
                self.trace.calls.append(
                    TracedCall(
                        function,
                        (name, bias_name),
                        inputs.detach(),
                        inputs._version,
                        edge,
                        not inputs.requires_grad,
                    )
                )
                return self._record_values(outputs)
        elif func in UNROLLED_FUNCTIONS and not settings:  # keywords of torch's functions are other names
            with self:
                return UNROLLED_FUNCTIONS[func](*args, **settings)
        elif func is functional.multi_head_attention_forward:
            with self:
                return _attention_forward(*args, **settings)
        elif (
            func is functional.scaled_dot_product_attention
            and (attention := _plain_attention(*args, **settings)) is not None
        ):
            query, key, value = (self._batch_values(part) for part in attention[0])
            with sdpa_kernel(_ATTENTION):
                outputs = func(query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4), **attention[1])
            return self._record_values(outputs.view(*query.shape[:-3], *outputs.shape[1:]))
        return func(*args, **settings)

    def _batch_values(self, values: Tensor) -> Tensor:
        """Values of all records, (B, …), from one record's values inside the vmap.

        Values that do not depend on the record are repeated B times, as a view.

        Raises:
            RuntimeError: The values are of a vmap that the module itself runs.
        """
        if not _functorch.is_batchedtensor(values):
            return values.expand(self._count, *values.shape)
        batched = _functorch.get_unwrapped(values)
        if _functorch.maybe_get_level(values) != self._level or _functorch.is_batchedtensor(batched):
            raise RuntimeError("a vmap inside of another")
        return batched.movedim(_functorch.maybe_get_bdim(values), 0)

    def _record_values(self, batched: Tensor) -> Tensor:
        return _functorch._add_batch_dim(batched, 0, self._level)


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]] | None:
    """Tensors and settings of attention without mask and dropout, or None for any other call.

    The three tensors are (…, heads, positions, width), of one record, and need equal leading axes and heads.
    """
    has_equal_axes = all(
        part.dim() == query.dim() >= 3 and part.shape[:-2] == query.shape[:-2] for part in (query, key, value)
    )
    return (
        ((query, key, value), {"is_causal": is_causal, "scale": scale})
        if has_equal_axes and attn_mask is None and not dropout_p
        else None
    )


_attention_forward = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda _tensors: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)
"""Copy of torch's function that does not look for a mode, so that the functions it calls are traced."""


_CHUNK_VALUES = 2**24
"""Approximate number of values that exist at a time on a CPU, 64 MiB in float32."""
_VALUES_PER_PARAMETER = 8
"""Number of values for each parameter that a chunk may have at a point, even beyond `_CHUNK_VALUES`.

Adding the sum of a chunk to the total goes through all parameters once, so that small chunks are slow.
"""


class _GhostPlan(NamedTuple):
    """Plan for a module and for records of one shape, made from a record of zeros."""

    materialized: frozenset[str]
    """Names of the parameters whose gradients are formed by autograd, record by record."""
    values_per_record: int
    """Approximate number of values in memory for one record and point, for a query of several points."""
    single_point_values: int
    """Approximate number of values in memory for one record, for a query of one point."""


class _CallGradient(NamedTuple):
    """A call, and the gradients of the losses at its outputs, (B, …)."""

    call: TracedCall
    """Call of a layer function."""
    output_gradient: Tensor
    """Gradients of the losses at the outputs, times the point's coefficient, (B, …)."""


class _TracedPass(NamedTuple):
    """Result of one forward and backward pass at one point."""

    call_gradients: list[_CallGradient]
    """Calls that have no terms yet, in their order."""
    terms: dict[str, LayerTerms]
    """Terms by name of parameter, for calls that share no parameter with another call.

    Such a call is not in `call_gradients`.  There are no terms for a query of several points.
    """
    materialized: dict[str, Tensor]
    """Gradients of the materialized parameters by name, (B, size).

    Parameters that the losses do not depend on are left out.
    """
    untraced: set[str]
    """Names of the traced parameters that have to be materialized.

    Their gradients are not all in the calls, or they are both a weight and a bias of calls.
    """


@dataclass(frozen=True)
class GhostObjective(ModuleObjective):
    """`ModuleObjective` with terms in closed form for parameters that go into traced calls only.

    Without such parameters, and where a pass fails, increments are computed as by `ModuleObjective`.

    Guarantee: each record passes through the module alone, under vmap or in a batch of one, whatever the module's
    code does with a batch.  Functions of all records at once are torch's own, and known to compute each record
    from its own values.
    """

    @cached_property
    def plans(self) -> dict[torch.Size, _GhostPlan | None]:
        """Plan by shape of a record's features, or None where increments are those of `ModuleObjective`."""
        return {}

    def _increment_of_replicate(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the weighted clipped increments of one replicate by the plan, chunk by chunk of records.

        `ModuleObjective` computes a single record, records of a shape without a plan, and a chunk for which
        `_sum_increments` has no result.  A replicate is one of several runs that are computed side by side.

        Args:
            query: Combination of gradients, at points (d,).
            batch: Records (B, …) and weights (B,).
            clip: Norm bound.

        Returns:
            The sum, (d,) in the type of the weights, and the number of clipped records, ().
        """
        records, weights = batch
        plan = self._find_plan(query.points[0], records) if len(weights) > 1 else None
        if plan is None:
            return super()._increment_of_replicate(query, batch, clip)
        # Number of records of a chunk, from the number of values that a record takes at all points.
        points = len(query.points)
        values = plan.single_point_values if points == 1 else points * plan.values_per_record
        max_values = max_values_at_once(_CHUNK_VALUES, weights.device)
        rows = max(1, _VALUES_PER_PARAMETER * self.dimension // (values // points), max_values // values)
        rows = math.ceil(len(weights) / math.ceil(len(weights) / rows))  # chunks of about equal size
        total = torch.zeros_like(query.points[0], dtype=weights.dtype)
        clipped = torch.zeros((), dtype=torch.int64, device=weights.device)
        for *parts, weight in zip(*(torch.split(part, rows) for part in (*records, weights)), strict=True):
            chunk = Batch(Records(*parts), weight)
            sums = self._sum_increments(query, chunk, clip, plan)
            if sums is None:  # the module raises on the chunk, or does not follow the plan
                part = super()._increment_of_replicate(query, chunk, clip)
                total += part.total
                clipped += part.clipped_count
                continue
            sizes = [shape.numel() for shape in self.shapes.values()]
            for total_part, summand in zip(torch.split(total, sizes), sums[0], strict=True):
                if summand is not None:
                    total_part += summand
            clipped += sums[1]
        return Increment(total, clipped)

    def _find_plan(self, point: Tensor, records: Records) -> _GhostPlan | None:
        """Find the plan for the shape of these records' features, or make one for a new shape.

        Of the records, only shapes, types and device are used.

        Returns:
            The plan, or None if the module raises a RuntimeError, IndexError or ValueError on zeros, or if no
            gradient is in a traced call.  Other errors of the module are passed on.
        """
        shape = records.features.shape[1:]
        if shape not in self.plans:
            with torch.inference_mode(False):
                zeros = Records(*(column.new_zeros(1, *column.shape[1:]) for column in records))
            try:
                self.plans[shape] = self._make_plan(point, zeros)
            except (RuntimeError, IndexError, ValueError):
                self.plans[shape] = None
        return self.plans[shape]

    def _make_plan(self, point: Tensor, zeros: Records) -> _GhostPlan | None:
        """Make a plan from passes of `zeros`, a batch of one record, or return None without traced gradients.

        The first pass materializes no parameters.  Those that turn out to have no closed form are materialized in
        the next pass, until there are no more of them.  The plan also estimates how many values one record takes
        in memory, from which the size of a chunk follows.
        """
        materialized: frozenset[str] = frozenset()
        # As one of several points, so that the pass returns every call and makes no terms.
        while (traced := self._run_pass(point, zeros, 1.0, materialized, False)).untraced:
            materialized |= traced.untraced
        if not traced.call_gradients:
            return None
        # As the only point: inputs of calls whose terms are gradients are not stored.
        terms = self._run_pass(point, zeros, 1.0, materialized, True).terms
        stored = {name for name, term in terms.items() if isinstance(term, LongGradientTerms)}
        values_per_record = single_point_values = zeros.features.numel() + sum(
            self.shapes[name].numel() for name in materialized
        )
        # An estimate: three times the inputs and output gradients of a call, half of it if inputs are not stored.
        for call, output_gradient in traced.call_gradients:
            values = call.inputs.numel() + output_gradient.numel()
            weight = call.parameter_names[0]
            working = 0 if weight is None else call.function.working_values(output_gradient, self.shapes[weight])
            values_per_record += 3 * values + working
            single_point_values += working + (
                3 * values // 2 if stored.issuperset(filter(None, call.parameter_names)) else 3 * values
            )
        return _GhostPlan(materialized, values_per_record, single_point_values)

    def _run_pass(
        self,
        point: Tensor,
        records: Records,
        coefficient: float,
        materialized: frozenset[str],
        is_only_point: bool,
    ) -> _TracedPass:
        """Run a batch forward and backward at one point, and collect traced and materialized gradients.

        All gradients are multiplied by `coefficient`.

        Args:
            point: Model, (d,).
            records: Records of the batch, (B, …).
            coefficient: Coefficient of the point in the query.
            materialized: Names of parameters whose gradients autograd forms record by record.
            is_only_point: Whether the query has no other point.  Calls that share no parameter with another call
                then get their terms at once, so that their inputs need not be stored.
        """
        with torch.inference_mode(False), torch.enable_grad():
            # Forward pass.  A materialized parameter has a row of its own for every record, so that autograd's
            # gradient by it is one gradient for each record.
            parameters = {
                name: aligned_copy(value).requires_grad_()
                for name, value in unflatten_point(self.shapes, point).items()
            }
            trace = Trace({name: value for name, value in parameters.items() if name not in materialized})
            count = len(records.labels)
            leaves = {
                name: parameters[name].detach().expand(count, *parameters[name].shape).requires_grad_()
                for name in materialized
            }

            def loss(batched: dict[str, Tensor], *record: Tensor) -> Tensor:
                with TracingMode(trace, record[0], count):
                    return self._loss_of_one({**parameters, **batched}, *record)

            losses = vmap(loss)(leaves, *records)
            # Number of calls of every parameter as a weight, and as a bias.
            weights, biases = (Counter(call.parameter_names[index] for call in trace.calls) for index in (0, 1))
            # A parameter that is both a weight and a bias of calls has no closed form.
            double_use = {name for name in weights if name is not None and name in biases}
            call_gradients: dict[int, _CallGradient] = {}
            terms: dict[str, LayerTerms] = {}

            def store_gradient(index: int, call: TracedCall, output_gradient: Tensor) -> None:
                """Make terms of a call's gradients at once if that is possible, or store them with the call."""
                weight, bias = call.parameter_names
                if is_only_point and all(
                    name is None or weights[name] + biases[name] == 1 for name in call.parameter_names
                ):
                    if bias is not None:
                        terms[bias] = LongGradientTerms([call.function.bias_gradient(output_gradient)])
                    if weight is not None:
                        terms[weight] = make_weight_terms(
                            _make_uses(call.function, [call.inputs], [output_gradient]), self.shapes[weight]
                        )
                else:
                    call_gradients[index] = _CallGradient(call, output_gradient)

            # Backward pass.
            untraced, leaf_gradients = trace.compute_output_gradients(
                coefficient * losses.sum(), list(leaves.values()), store_gradient
            )
        gradients = {
            name: gradient.reshape(count, self.shapes[name].numel())
            for name, gradient in zip(leaves, leaf_gradients, strict=True)
            if gradient is not None
        }
        return _TracedPass(
            [call_gradients[index] for index in sorted(call_gradients)], terms, gradients, untraced | double_use
        )

    def _sum_increments(
        self, query: Query, batch: Batch, clip: Scalar, plan: _GhostPlan
    ) -> tuple[list[Tensor | None], Tensor] | None:
        """Sum the weighted clipped increments of a batch, and count the clipped records.

        A record's norm is combined from the bounds of the terms of all parameters.

        Args:
            query: Combination of gradients, at points (d,).
            batch: Records (B, …) and weights (B,).
            clip: Norm bound.
            plan: Plan for records of this shape.

        Returns:
            The sum by parameters, (size,) each or None for a parameter without gradient, and the count, ().  The
            result is None if the module raises a RuntimeError, IndexError or ValueError, or its calls do not
            follow the plan or differ between points.
        """
        weights = batch.weights
        try:
            with torch.inference_mode(False):  # one copy for all points, so that equal inputs share memory
                records = Records(*(aligned_copy(column) for column in batch.records))
            passes = [
                self._run_pass(point, records, coefficient, plan.materialized, len(query.points) == 1)
                for point, coefficient in zip(query.points, query.coefficients, strict=True)
            ]
        except (RuntimeError, IndexError, ValueError):
            return None
        if any(traced.untraced for traced in passes) or not _have_same_calls(passes):
            return None
        terms = {name: term.to_dtype(weights.dtype) for name, term in self._make_terms(passes)}
        clipped = compute_clipping(combine_bounds([term.norm_bounds() for term in terms.values()]), weights, clip)
        if (mask := clipped.representable) is not None:
            terms = {name: term.zero_others(mask) for name, term in terms.items()}
        sums = {name: term.weighted_sum(clipped.factor)[0] for name, term in terms.items()}
        return [sums.get(name) for name in self.shapes], clipped.clipped_count

    def _make_terms(self, passes: Sequence[_TracedPass]) -> Iterator[tuple[str, LayerTerms]]:
        """Yield the name and the terms of every parameter that the losses depend on.

        The terms represent each record's gradient by the parameter, summed over `passes`, one for each point of a
        query.  Passes have the same calls and complete gradients.
        """
        # Uses of each weight, and gradients of each bias, by call.
        uses: dict[str, list[ParameterUse]] = {}
        bias_gradients: dict[str, list[Tensor]] = {}
        for call_gradients in zip(*(traced.call_gradients for traced in passes), strict=True):
            calls, output_gradients = zip(*call_gradients, strict=True)
            weight, bias = calls[0].parameter_names
            if bias is not None:
                bias_gradients.setdefault(bias, []).append(
                    calls[0].function.bias_gradient(sum_tensors(output_gradients))
                )
            if weight is not None:
                uses.setdefault(weight, []).extend(
                    _make_uses(calls[0].function, [call.inputs for call in calls], output_gradients)
                )
        for name, shape in self.shapes.items():
            gradients = [traced.materialized[name] for traced in passes if name in traced.materialized]
            if name in passes[0].terms:  # made at once, in a single pass
                yield name, passes[0].terms[name]
            elif name in uses:
                yield name, make_weight_terms(uses[name], shape)
            elif gradients or name in bias_gradients:
                yield name, LongGradientTerms([sum_tensors(gradients or bias_gradients[name])])


def _make_uses(
    function: LayerFunction, inputs: Sequence[Tensor], output_gradients: Sequence[Tensor]
) -> list[ParameterUse]:
    """Uses of a call's weight at all points of a query, written as differences to the first point.

    With inputs a_k and output gradients δ_k (coefficient included) at point k, the sum Σ_k δ_k ⊗ a_k becomes
    (Σ_k δ_k) ⊗ a_0 + Σ_{k≥1} δ_k ⊗ (a_k - a_0).  If the points are close, these terms are about as small as their
    sum, and so are bounds on rounding, which are relative to the terms.  Tokens have no differences: they are one
    use if they are the same at every point, and one use for each point otherwise.

    Args:
        function: Function of the call.
        inputs: Inputs at each point, (B, …).
        output_gradients: Gradients at the outputs at each point, (B, …).
    """
    if not inputs[0].is_floating_point():
        return (
            [ParameterUse(function, inputs[0], sum_tensors(output_gradients))]
            if all(torch.equal(operand, inputs[0]) for operand in inputs[1:])
            else [ParameterUse(function, *operand) for operand in zip(inputs, output_gradients, strict=True)]
        )
    first = function.linear_part(inputs[0])
    differences = [
        ParameterUse(function, function.linear_part(operand) - first, output_gradient)
        for operand, output_gradient in zip(inputs[1:], output_gradients[1:], strict=True)
        if operand.data_ptr() != inputs[0].data_ptr()  # the same tensor, such as the record, has no difference
    ]
    return [ParameterUse(function, first, sum_tensors(output_gradients)), *differences]


def _have_same_calls(passes: Sequence[_TracedPass]) -> bool:
    """Whether the calls have the same functions, parameters and input shapes at every point."""
    shapes = [
        [(call.function, call.parameter_names, call.inputs.shape) for call, _ in traced.call_gradients]
        for traced in passes
    ]
    return all(call_shapes == shapes[0] for call_shapes in shapes[1:])
