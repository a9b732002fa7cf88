"""Any module whose parameters go into known functions: clips from what these saw, without a gradient by record.

Every record's increment is written as in layered.py, by functions.py's closed forms; parameters that go elsewhere
have their gradients formed record by record, in the same pass back.  Which ones do follows from the module: from a
pass of a record of zeros.

What a module does with its parameters, seen while it runs: known functions of them, and slopes at outputs.

A record passes through the module alone, under vmap, so that no code of the module can look at another record.
`Watch` stands between the module and torch's functions: a known function of a parameter is computed for all
records at once, as vmap would do, and noted as a `Call`.  One pass of autograd then tells the slope at the outputs
of every call, one after another as it comes to them, and forms no gradient by any parameter.

Guarantee: a parameter's way into a loss is through the noted calls, or autograd finds it: `Watched.tell` names
the parameters that have another way, and those of calls that autograd did not come to, in every pass anew.
Changes in place after a call do not touch its slope.
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
    """One call of a known function, for a batch of records."""

    function: LayerFunction
    parameter_names: tuple[str | None, str | None]
    """Of its weight and its bias."""
    inputs: Tensor
    """Its input, (B, …)."""
    input_version: int
    """Of what it saw, to tell a change in place."""
    output_edge: GradientEdge
    is_input_constant: bool
    """Whether what it saw depends on no parameter, so that autograd has no reason to go beyond it."""


OnGradient = Callable[[int, TracedCall, Tensor], None]
"""Is given a call's place among the calls, itself, and the slope of each record's loss at its outputs, (B, …)."""


_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""How attention of a batch may be computed: both take heads and records one by one."""


@dataclass
class Trace:
    """One pass of a batch: parameters by name, which must require gradients, and the calls in their order."""

    parameters: Mapping[str, Tensor]
    calls: list[TracedCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._twins = {id(one): (name, one.detach().requires_grad_()) for name, one in self.parameters.items()}

    def twin(self, parameter: Tensor | None) -> tuple[str | None, Tensor | None]:
        """The name of a parameter and what stands for it in calls, to tell these from its other ways."""
        return self._twins.get(id(parameter), (None, None))

    def compute_output_gradients(
        self, loss: Tensor, leaves: Sequence[Tensor], on_gradient: OnGradient
    ) -> tuple[set[str], Sequence[Tensor | None]]:
        """Tell the slope of every call, which is kept here no longer, in no order.

        RuntimeError if what a call saw is changed afterwards.

        Returns:
            The parameters that the calls do not tell all of, and the slopes by `leaves`.
        """
        if any(call.inputs._version != call.input_version for call in self.calls):
            raise RuntimeError("a change in place of what a function of parameters saw")
        waiting = dict(enumerate(self.calls))
        self.calls.clear()

        def arrived(place: int, slopes: Sequence[Tensor | None]) -> None:
            if (slope := slopes[waiting[place].output_edge.output_nr]) is not None:
                on_gradient(place, waiting.pop(place), slope)

        first = [place for place, call in waiting.items() if call.is_input_constant]
        handles = [
            call.output_edge.node.register_prehook(partial(arrived, place))
            for place, call in waiting.items()
            if not call.is_input_constant
        ]
        wanted: Any = [*(waiting[place].output_edge for place in first), *leaves, *self.parameters.values()]
        try:
            found: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
        finally:  # a node that holds what leads to itself would never be freed
            for handle in handles:
                handle.remove()
        for place, slope in zip(first, found, strict=False):
            if slope is not None:
                on_gradient(place, waiting.pop(place), slope)
        untold = {name for call in waiting.values() for name in call.parameter_names if name is not None}
        past = zip(self.parameters, found[len(first) + len(leaves) :], strict=True)
        untold |= {name for name, slope in past if slope is not None}
        return untold, found[len(first) : len(first) + len(leaves)]


class TracingMode(TorchFunctionMode):
    """While it is entered, calls of known functions of parameters are noted in `watched`."""

    def __init__(self, watched: Trace, one: Tensor, count: int) -> None:
        """In a vmap over `count` records, of which `one` is a part of a record."""
        super().__init__()
        self.trace = watched
        self._count, self._level = count, _functorch.maybe_get_level(one)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        if func in LAYER_FUNCTIONS and (call := LAYER_FUNCTIONS[func](*args, **settings)) is not None:
            values, weight, bias, known = call
            (name, own), (other, shift) = self.trace.twin(weight), self.trace.twin(bias)
            if (name or other) and (own is None) == (weight is None) and (shift is None) == (bias is None):
                seen = self._batch_values(values)
                outputs = known.outputs(seen, own, shift)
                if outputs._is_view():  # changed in place, a view would be another node of autograd's
                    outputs = torch.ops.aten._unsafe_view(outputs, outputs.shape)
                edge = get_gradient_edge(outputs)
                self.trace.calls.append(
                    TracedCall(known, (name, other), seen.detach(), seen._version, edge, not seen.requires_grad)
                )
                return self._record_values(outputs)
        elif func in UNROLLED_FUNCTIONS:
            with self:
                return UNROLLED_FUNCTIONS[func](*args, **settings)
        elif func is functional.multi_head_attention_forward:
            with self:
                return _attention_forward(*args, **settings)
        elif (
            func is functional.scaled_dot_product_attention
            and (plain := _plain_attention(*args, **settings)) is not None
        ):
            query, key, value = (self._batch_values(part) for part in args[:3])  # torch takes a batch apart
            with sdpa_kernel(_ATTENTION):
                outputs = func(query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4), **plain)
            return self._record_values(outputs.view(*query.shape[:-3], *outputs.shape[1:]))
        return func(*args, **settings)

    def _batch_values(self, values: Tensor) -> Tensor:
        """One record's values as those of all records, (B, …); RuntimeError in a vmap of the module's own."""
        if not _functorch.is_batchedtensor(values):
            return values.expand(self._count, *values.shape)
        every = _functorch.get_unwrapped(values)
        if _functorch.maybe_get_level(values) != self._level or _functorch.is_batchedtensor(every):
            raise RuntimeError("a vmap inside of another")
        return every.movedim(_functorch.maybe_get_bdim(values), 0)

    def _record_values(self, every: Tensor) -> Tensor:
        return _functorch._add_batch_dim(every, 0, self._level)


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any] | None:
    """The settings of attention of three tensors (…, heads, places, width) without a mask or a draw, else None."""
    alike = all(
        part.dim() == query.dim() >= 3 and part.shape[:-2] == query.shape[:-2] for part in (query, key, value)
    )
    return {"is_causal": is_causal, "scale": scale} if alike and attn_mask is None and not dropout_p else None


_attention_forward = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda _tensors: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)
"""torch's own, without the question who stands between: the functions that it calls are watched in turn."""


_CHUNK_VALUES = 2**24
"""Values that exist at a time, about: 64 MB in float32."""
_VALUES_PER_PARAMETER = 8  # of a chunk: adding its sum to the others' goes through all parameters once


class _GhostPlan(NamedTuple):
    """How a module's records are computed."""

    materialized: frozenset[str]
    """The parameters whose gradients are formed by autograd."""
    values_per_record: int
    """How many values one record takes at each of several points, about."""
    single_point_values: int
    """The same for a single point."""


class _CallGradient(NamedTuple):
    """A call, and the slope of each record's loss at its outputs, (B, …)."""

    call: TracedCall
    output_gradient: Tensor


class _TracedPass(NamedTuple):
    """One pass forward and back at one point."""

    call_gradients: list[_CallGradient]
    """In the order of the calls."""
    terms: dict[str, LayerTerms]
    """Of parameters whose one call is not in `told`."""
    materialized: dict[str, Tensor]
    """(B, size) by parameter."""
    untraced: set[str]
    """Parameters that the calls do not tell all of."""


@dataclass(frozen=True)
class GhostObjective(ModuleObjective):
    """As `ModuleObjective`, whose way it takes for what this one has no closed form for.

    Guarantee: each record passes through the module alone, under vmap, whatever the module's code does with a
    batch; functions of all records at once are torch's own, and known to take them apart.
    """

    @cached_property
    def plans(self) -> dict[torch.Size, _GhostPlan | None]:
        """By the shape of a record; None where the way of `ModuleObjective` is taken."""
        return {}

    def _increment_of_replicate(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """See `ModuleObjective`; about `_CHUNK_VALUES` values exist at a time, or 8 d, or one record's."""
        records, weights = batch
        plan = self._find_plan(query.points[0], records) if len(weights) > 1 else None
        if plan is None:
            return super()._increment_of_replicate(query, batch, clip)
        points = len(query.points)
        values = plan.single_point_values if points == 1 else points * plan.values_per_record
        most = max_values_at_once(_CHUNK_VALUES, weights.device)
        rows = max(1, _VALUES_PER_PARAMETER * self.dimension // (values // points), most // values)
        rows = math.ceil(len(weights) / math.ceil(len(weights) / rows))  # as many in each
        total = torch.zeros_like(query.points[0], dtype=weights.dtype)
        clipped = torch.zeros((), dtype=torch.int64, device=weights.device)
        for *parts, weight in zip(*(torch.split(part, rows) for part in (*records, weights)), strict=True):
            chunk = Batch(Records(*parts), weight)
            sums = self._sum_increments(query, chunk, clip, plan)
            if sums is None:
                part = super()._increment_of_replicate(query, chunk, clip)
                total += part.total
                clipped += part.clipped_count
                continue
            sizes = [shape.numel() for shape in self.shapes.values()]
            for place, piece in zip(torch.split(total, sizes), sums[0], strict=True):
                if piece is not None:
                    place += piece
            clipped += sums[1]
        return Increment(total, clipped)

    def _find_plan(self, point: Tensor, records: Records) -> _GhostPlan | None:
        """None if a pass of zeros fails, or no parameter goes into a known function."""
        key = records.features.shape[1:]
        if key not in self.plans:
            with torch.inference_mode(False):
                zeros = Records(*(column.new_zeros(1, *column.shape[1:]) for column in records))
            try:
                self.plans[key] = self._make_plan(point, zeros)
            except (RuntimeError, IndexError, ValueError):
                self.plans[key] = None
        return self.plans[key]

    def _make_plan(self, point: Tensor, zeros: Records) -> _GhostPlan | None:
        formed: frozenset[str] = frozenset()
        while (one := self._run_pass(point, zeros, 1.0, formed, False)).untraced:
            formed |= one.untraced
        if not one.call_gradients:
            return None
        terms = self._run_pass(point, zeros, 1.0, formed, True).terms
        made = {name for name, term in terms.items() if isinstance(term, LongGradientTerms)}
        record = alone = zeros.features.numel() + sum(self.shapes[name].numel() for name in formed)
        for call, slope in one.call_gradients:
            values = call.inputs.numel() + slope.numel()
            weight = call.parameter_names[0]
            working = 0 if weight is None else call.function.working_values(slope, self.shapes[weight])
            record += 3 * values + working
            alone += working + (
                3 * values // 2 if made.issuperset(filter(None, call.parameter_names)) else 3 * values
            )
        return _GhostPlan(formed, record, alone)

    def _run_pass(
        self,
        point: Tensor,
        records: Records,
        coefficient: float,
        materialized: frozenset[str],
        is_only_point: bool,
    ) -> _TracedPass:
        """The calls and the gradients of a batch, times `coefficient`.

        Where it is `alone`, the only one of its records, a parameter's terms are made as soon as its only call is
        told, so that what this saw need not be kept.
        """
        with torch.inference_mode(False), torch.enable_grad():
            named = {
                name: aligned_copy(value).requires_grad_()
                for name, value in unflatten_point(self.shapes, point).items()
            }
            watched = Trace({name: value for name, value in named.items() if name not in materialized})
            count = len(records.labels)
            leaves = {
                name: named[name].detach().expand(count, *named[name].shape).requires_grad_()
                for name in materialized
            }

            def loss(batched: dict[str, Tensor], *one: Tensor) -> Tensor:
                with TracingMode(watched, one[0], count):
                    return self._loss_of_one({**named, **batched}, *one)

            losses = vmap(loss)(leaves, *records)
            weights, biases = (Counter(call.parameter_names[place] for call in watched.calls) for place in (0, 1))
            both = {name for name in weights if name is not None and name in biases}
            kept: dict[int, _CallGradient] = {}
            terms: dict[str, LayerTerms] = {}

            def told(place: int, call: TracedCall, slope: Tensor) -> None:
                weight, bias = call.parameter_names
                if is_only_point and all(
                    name is None or weights[name] + biases[name] == 1 for name in call.parameter_names
                ):
                    if bias is not None:
                        terms[bias] = LongGradientTerms([call.function.bias_gradient(slope)])
                    if weight is not None:
                        terms[weight] = make_weight_terms(
                            _make_uses(call.function, [call.inputs], [slope]), self.shapes[weight]
                        )
                else:
                    kept[place] = _CallGradient(call, slope)

            past, slopes = watched.compute_output_gradients(
                coefficient * losses.sum(), list(leaves.values()), told
            )
        gradients = {
            name: slope.flatten(1) for name, slope in zip(leaves, slopes, strict=True) if slope is not None
        }
        return _TracedPass([kept[place] for place in sorted(kept)], terms, gradients, past | both)

    def _sum_increments(
        self, query: Query, batch: Batch, clip: Scalar, plan: _GhostPlan
    ) -> tuple[list[Tensor | None], Tensor] | None:
        """The clipped sum by parameters, None for one without a gradient, and how many were clipped.

        None if a record makes the module raise, or do otherwise than planned.
        """
        weights = batch.weights
        try:
            with torch.inference_mode(False):  # one copy for all points: what does not move is seen as such
                records = Records(*(aligned_copy(column) for column in batch.records))
            passes = [
                self._run_pass(point, records, coefficient, plan.materialized, len(query.points) == 1)
                for point, coefficient in zip(query.points, query.coefficients, strict=True)
            ]
        except (RuntimeError, IndexError, ValueError):
            return None
        if any(one.untraced for one in passes) or not _have_same_calls(passes):
            return None
        terms = {name: term.to_dtype(weights.dtype) for name, term in self._make_terms(passes)}
        clipped = compute_clipping(combine_bounds([term.norm_bounds() for term in terms.values()]), weights, clip)
        if (held := clipped.representable) is not None:
            terms = {name: term.zero_others(held) for name, term in terms.items()}
        sums = {name: term.weighted_sum(clipped.factor)[0] for name, term in terms.items()}
        return [sums.get(name) for name in self.shapes], clipped.clipped_count

    def _make_terms(self, passes: Sequence[_TracedPass]) -> Iterator[tuple[str, LayerTerms]]:
        """Of every parameter that the losses depend on."""
        uses: dict[str, list[ParameterUse]] = {}
        shifts: dict[str, list[Tensor]] = {}
        for told in zip(*(one.call_gradients for one in passes), strict=True):
            calls, slopes = zip(*told, strict=True)
            weight, bias = calls[0].names
            if bias is not None:
                shifts.setdefault(bias, []).append(calls[0].function.bias_gradient(sum_tensors(slopes)))
            if weight is not None:
                uses.setdefault(weight, []).extend(
                    _make_uses(calls[0].function, [call.inputs for call in calls], slopes)
                )
        for name, shape in self.shapes.items():
            formed = [one.materialized[name] for one in passes if name in one.materialized]
            if name in passes[0].terms:
                yield name, passes[0].terms[name]
            elif name in uses:
                yield name, make_weight_terms(uses[name], shape)
            elif formed or name in shifts:
                yield name, LongGradientTerms([sum_tensors(formed or shifts[name])])


def _make_uses(known: LayerFunction, seen: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[ParameterUse]:
    """Of a call at several points, in terms as small as their sum; what a record itself shows does not move."""
    if not seen[0].is_floating_point():
        return (
            [ParameterUse(known, seen[0], sum_tensors(slopes))]
            if all(torch.equal(one, seen[0]) for one in seen[1:])
            else [ParameterUse(known, *one) for one in zip(seen, slopes, strict=True)]
        )
    first = known.linear_part(seen[0])
    moved = [
        ParameterUse(known, known.linear_part(one) - first, slope)
        for one, slope in zip(seen[1:], slopes[1:], strict=True)
        if one.data_ptr() != seen[0].data_ptr()
    ]
    return [ParameterUse(known, first, sum_tensors(slopes)), *moved]


def _have_same_calls(passes: Sequence[_TracedPass]) -> bool:
    """Whether the module makes the same calls at every point."""
    shapes = [
        [(call.function, call.parameter_names, call.inputs.shape) for call, _ in each.call_gradients]
        for each in passes
    ]
    return all(one == shapes[0] for one in shapes[1:])
