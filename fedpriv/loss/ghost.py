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

from fedpriv.core.replicates import Scalar, at_once
from fedpriv.loss.alone import own
from fedpriv.loss.clipping import clipping, together
from fedpriv.loss.functions import KNOWN, Known, LongTerms, Use, weight_terms
from fedpriv.loss.layers import Terms, sum_of
from fedpriv.loss.module import ModuleObjective, named_parts
from fedpriv.loss.objective import Batch, Increment, Query, Records
from fedpriv.loss.unrolled import STEP_BY_STEP


class Call(NamedTuple):
    """One call of a known function, for a batch of records."""

    known: Known
    names: tuple[str | None, str | None]
    """Of its weight and its bias."""
    seen: Tensor
    """Its input, (B, …)."""
    version: int
    """Of what it saw, to tell a change in place."""
    outputs: GradientEdge
    first: bool
    """Whether what it saw depends on no parameter, so that autograd has no reason to go beyond it."""


Tell = Callable[[int, Call, Tensor], None]
"""Is given a call's place among the calls, itself, and the slope of each record's loss at its outputs, (B, …)."""


_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""How attention of a batch may be computed: both take heads and records one by one."""


@dataclass
class Watched:
    """One pass of a batch: parameters by name, which must require gradients, and the calls in their order."""

    parameters: Mapping[str, Tensor]
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._twins = {id(one): (name, one.detach().requires_grad_()) for name, one in self.parameters.items()}

    def twin(self, parameter: Tensor | None) -> tuple[str | None, Tensor | None]:
        """The name of a parameter and what stands for it in calls, to tell these from its other ways."""
        return self._twins.get(id(parameter), (None, None))

    def tell(self, loss: Tensor, leaves: Sequence[Tensor], told: Tell) -> tuple[set[str], Sequence[Tensor | None]]:
        """Tell the slope of every call, which is kept here no longer, in no order.

        RuntimeError if what a call saw is changed afterwards.

        Returns:
            The parameters that the calls do not tell all of, and the slopes by `leaves`.
        """
        if any(call.seen._version != call.version for call in self.calls):
            raise RuntimeError("a change in place of what a function of parameters saw")
        waiting = dict(enumerate(self.calls))
        self.calls.clear()

        def arrived(place: int, slopes: Sequence[Tensor | None]) -> None:
            if (slope := slopes[waiting[place].outputs.output_nr]) is not None:
                told(place, waiting.pop(place), slope)

        first = [place for place, call in waiting.items() if call.first]
        handles = [
            call.outputs.node.register_prehook(partial(arrived, place))
            for place, call in waiting.items()
            if not call.first
        ]
        wanted: Any = [*(waiting[place].outputs for place in first), *leaves, *self.parameters.values()]
        try:
            found: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
        finally:  # a node that holds what leads to itself would never be freed
            for handle in handles:
                handle.remove()
        for place, slope in zip(first, found, strict=False):
            if slope is not None:
                told(place, waiting.pop(place), slope)
        untold = {name for call in waiting.values() for name in call.names if name is not None}
        past = zip(self.parameters, found[len(first) + len(leaves) :], strict=True)
        untold |= {name for name, slope in past if slope is not None}
        return untold, found[len(first) : len(first) + len(leaves)]


class Watch(TorchFunctionMode):
    """While it is entered, calls of known functions of parameters are noted in `watched`."""

    def __init__(self, watched: Watched, one: Tensor, count: int) -> None:
        """In a vmap over `count` records, of which `one` is a part of a record."""
        super().__init__()
        self.watched = watched
        self._count, self._level = count, _functorch.maybe_get_level(one)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        if func in KNOWN and (call := KNOWN[func](*args, **settings)) is not None:
            values, weight, bias, known = call
            (name, own), (other, shift) = self.watched.twin(weight), self.watched.twin(bias)
            if (name or other) and (own is None) == (weight is None) and (shift is None) == (bias is None):
                seen = self._of_all(values)
                outputs = known.outputs(seen, own, shift)
                if outputs._is_view():  # changed in place, a view would be another node of autograd's
                    outputs = torch.ops.aten._unsafe_view(outputs, outputs.shape)
                edge = get_gradient_edge(outputs)
                self.watched.calls.append(
                    Call(known, (name, other), seen.detach(), seen._version, edge, not seen.requires_grad)
                )
                return self._of_one(outputs)
        elif func in STEP_BY_STEP:
            with self:
                return STEP_BY_STEP[func](*args, **settings)
        elif func is functional.multi_head_attention_forward:
            with self:
                return _attention_forward(*args, **settings)
        elif func is functional.scaled_dot_product_attention and (plain := _plain(*args, **settings)) is not None:
            query, key, value = (self._of_all(part) for part in args[:3])  # torch takes a batch apart
            with sdpa_kernel(_ATTENTION):
                outputs = func(query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4), **plain)
            return self._of_one(outputs.view(*query.shape[:-3], *outputs.shape[1:]))
        return func(*args, **settings)

    def _of_all(self, values: Tensor) -> Tensor:
        """One record's values as those of all records, (B, …); RuntimeError in a vmap of the module's own."""
        if not _functorch.is_batchedtensor(values):
            return values.expand(self._count, *values.shape)
        every = _functorch.get_unwrapped(values)
        if _functorch.maybe_get_level(values) != self._level or _functorch.is_batchedtensor(every):
            raise RuntimeError("a vmap inside of another")
        return every.movedim(_functorch.maybe_get_bdim(values), 0)

    def _of_one(self, every: Tensor) -> Tensor:
        return _functorch._add_batch_dim(every, 0, self._level)


def _plain(
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


class _Plan(NamedTuple):
    """How a module's records are computed."""

    formed: frozenset[str]
    """The parameters whose gradients are formed by autograd."""
    record_values: int
    """How many values one record takes at each of several points, about."""
    alone_values: int
    """The same for a single point."""


class _Told(NamedTuple):
    """A call, and the slope of each record's loss at its outputs, (B, …)."""

    call: Call
    slope: Tensor


class _Pass(NamedTuple):
    """One pass forward and back at one point."""

    told: list[_Told]
    """In the order of the calls."""
    terms: dict[str, Terms]
    """Of parameters whose one call is not in `told`."""
    formed: dict[str, Tensor]
    """(B, size) by parameter."""
    past: set[str]
    """Parameters that the calls do not tell all of."""


@dataclass(frozen=True)
class GhostObjective(ModuleObjective):
    """As `ModuleObjective`, whose way it takes for what this one has no closed form for.

    Guarantee: each record passes through the module alone, under vmap, whatever the module's code does with a
    batch; functions of all records at once are torch's own, and known to take them apart.
    """

    @cached_property
    def plans(self) -> dict[torch.Size, _Plan | None]:
        """By the shape of a record; None where the way of `ModuleObjective` is taken."""
        return {}

    def _increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """See `ModuleObjective`; about `_CHUNK_VALUES` values exist at a time, or 8 d, or one record's."""
        records, weights = batch
        plan = self._plan(query.points[0], records) if len(weights) > 1 else None
        if plan is None:
            return super()._increment(query, batch, clip)
        points = len(query.points)
        values = plan.alone_values if points == 1 else points * plan.record_values
        most = at_once(_CHUNK_VALUES, weights.device)
        rows = max(1, _VALUES_PER_PARAMETER * self.dimension // (values // points), most // values)
        rows = math.ceil(len(weights) / math.ceil(len(weights) / rows))  # as many in each
        total = torch.zeros_like(query.points[0], dtype=weights.dtype)
        clipped = torch.zeros((), dtype=torch.int64, device=weights.device)
        for *parts, weight in zip(*(torch.split(part, rows) for part in (*records, weights)), strict=True):
            chunk = Batch(Records(*parts), weight)
            sums = self._sums(query, chunk, clip, plan)
            if sums is None:
                part = super()._increment(query, chunk, clip)
                total += part.total
                clipped += part.clipped
                continue
            sizes = [shape.numel() for shape in self.shapes.values()]
            for place, piece in zip(torch.split(total, sizes), sums[0], strict=True):
                if piece is not None:
                    place += piece
            clipped += sums[1]
        return Increment(total, clipped)

    def _plan(self, point: Tensor, records: Records) -> _Plan | None:
        """None if a pass of zeros fails, or no parameter goes into a known function."""
        key = records.features.shape[1:]
        if key not in self.plans:
            with torch.inference_mode(False):
                zeros = Records(*(column.new_zeros(1, *column.shape[1:]) for column in records))
            try:
                self.plans[key] = self._planned(point, zeros)
            except (RuntimeError, IndexError, ValueError):
                self.plans[key] = None
        return self.plans[key]

    def _planned(self, point: Tensor, zeros: Records) -> _Plan | None:
        formed: frozenset[str] = frozenset()
        while (one := self._pass(point, zeros, 1.0, formed, False)).past:
            formed |= one.past
        if not one.told:
            return None
        terms = self._pass(point, zeros, 1.0, formed, True).terms
        made = {name for name, term in terms.items() if isinstance(term, LongTerms)}
        record = alone = zeros.features.numel() + sum(self.shapes[name].numel() for name in formed)
        for call, slope in one.told:
            values = call.seen.numel() + slope.numel()
            weight = call.names[0]
            working = 0 if weight is None else call.known.working_values(slope, self.shapes[weight])
            record += 3 * values + working
            alone += working + (3 * values // 2 if made.issuperset(filter(None, call.names)) else 3 * values)
        return _Plan(formed, record, alone)

    def _pass(
        self, point: Tensor, records: Records, coefficient: float, formed: frozenset[str], alone: bool
    ) -> _Pass:
        """The calls and the gradients of a batch, times `coefficient`.

        Where it is `alone`, the only one of its records, a parameter's terms are made as soon as its only call is
        told, so that what this saw need not be kept.
        """
        with torch.inference_mode(False), torch.enable_grad():
            named = {name: own(value).requires_grad_() for name, value in named_parts(self.shapes, point).items()}
            watched = Watched({name: value for name, value in named.items() if name not in formed})
            count = len(records.labels)
            leaves = {
                name: named[name].detach().expand(count, *named[name].shape).requires_grad_() for name in formed
            }

            def loss(batched: dict[str, Tensor], *one: Tensor) -> Tensor:
                with Watch(watched, one[0], count):
                    return self._loss_of_one({**named, **batched}, *one)

            losses = vmap(loss)(leaves, *records)
            weights, biases = (Counter(call.names[place] for call in watched.calls) for place in (0, 1))
            both = {name for name in weights if name is not None and name in biases}
            kept: dict[int, _Told] = {}
            terms: dict[str, Terms] = {}

            def told(place: int, call: Call, slope: Tensor) -> None:
                weight, bias = call.names
                if alone and all(name is None or weights[name] + biases[name] == 1 for name in call.names):
                    if bias is not None:
                        terms[bias] = LongTerms([call.known.bias(slope)])
                    if weight is not None:
                        terms[weight] = weight_terms(_uses(call.known, [call.seen], [slope]), self.shapes[weight])
                else:
                    kept[place] = _Told(call, slope)

            past, slopes = watched.tell(coefficient * losses.sum(), list(leaves.values()), told)
        gradients = {
            name: slope.flatten(1) for name, slope in zip(leaves, slopes, strict=True) if slope is not None
        }
        return _Pass([kept[place] for place in sorted(kept)], terms, gradients, past | both)

    def _sums(
        self, query: Query, batch: Batch, clip: Scalar, plan: _Plan
    ) -> tuple[list[Tensor | None], Tensor] | None:
        """The clipped sum by parameters, None for one without a gradient, and how many were clipped.

        None if a record makes the module raise, or do otherwise than planned.
        """
        weights = batch.weights
        try:
            with torch.inference_mode(False):  # one copy for all points: what does not move is seen as such
                records = Records(*(own(column) for column in batch.records))
            passes = [
                self._pass(point, records, coefficient, plan.formed, len(query.points) == 1)
                for point, coefficient in zip(query.points, query.coefficients, strict=True)
            ]
        except (RuntimeError, IndexError, ValueError):
            return None
        if any(one.past for one in passes) or not _alike(passes):
            return None
        terms = {name: term.to(weights.dtype) for name, term in self._terms(passes)}
        clipped = clipping(together([term.size() for term in terms.values()]), weights, clip)
        if (held := clipped.held) is not None:
            terms = {name: term.only(held) for name, term in terms.items()}
        sums = {name: term.weighted_sum(clipped.factor)[0] for name, term in terms.items()}
        return [sums.get(name) for name in self.shapes], clipped.clipped

    def _terms(self, passes: Sequence[_Pass]) -> Iterator[tuple[str, Terms]]:
        """Of every parameter that the losses depend on."""
        uses: dict[str, list[Use]] = {}
        shifts: dict[str, list[Tensor]] = {}
        for told in zip(*(one.told for one in passes), strict=True):
            calls, slopes = zip(*told, strict=True)
            weight, bias = calls[0].names
            if bias is not None:
                shifts.setdefault(bias, []).append(calls[0].known.bias(sum_of(slopes)))
            if weight is not None:
                uses.setdefault(weight, []).extend(_uses(calls[0].known, [call.seen for call in calls], slopes))
        for name, shape in self.shapes.items():
            formed = [one.formed[name] for one in passes if name in one.formed]
            if name in passes[0].terms:
                yield name, passes[0].terms[name]
            elif name in uses:
                yield name, weight_terms(uses[name], shape)
            elif formed or name in shifts:
                yield name, LongTerms([sum_of(formed or shifts[name])])


def _uses(known: Known, seen: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Use]:
    """Of a call at several points, in terms as small as their sum; what a record itself shows does not move."""
    if not seen[0].is_floating_point():
        return (
            [Use(known, seen[0], sum_of(slopes))]
            if all(torch.equal(one, seen[0]) for one in seen[1:])
            else [Use(known, *one) for one in zip(seen, slopes, strict=True)]
        )
    first = known.moved(seen[0])
    moved = [
        Use(known, known.moved(one) - first, slope)
        for one, slope in zip(seen[1:], slopes[1:], strict=True)
        if one.data_ptr() != seen[0].data_ptr()
    ]
    return [Use(known, first, sum_of(slopes)), *moved]


def _alike(passes: Sequence[_Pass]) -> bool:
    """Whether the module makes the same calls at every point."""
    shapes = [[(call.known, call.names, call.seen.shape) for call, _ in each.told] for each in passes]
    return all(one == shapes[0] for one in shapes[1:])
