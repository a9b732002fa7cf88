"""Any module whose parameters go into known functions: clips from what these saw, without a gradient by record.

Every record's increment is written as in layered.py, by functions.py's closed forms; parameters that go elsewhere
have their gradients formed record by record, in the same pass back.  Which ones do follows from the module: from a
pass of a record of zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedpriv.core.replicates import Scalar
from fedpriv.loss.alone import own
from fedpriv.loss.clipping import clipping, together
from fedpriv.loss.frozen import trained_of
from fedpriv.loss.functions import Known, LongTerms, Use, weight_terms
from fedpriv.loss.layers import Terms, sum_of
from fedpriv.loss.module import ModuleObjective, parameters_of
from fedpriv.loss.objective import Batch, Increment, Query, Records
from fedpriv.loss.watch import Call, Watch, Watched

_CHUNK_VALUES = 2**24
"""Values that exist at a time, about: 64 MB in float32."""
_VALUES_PER_PARAMETER = 8  # of a chunk: adding its sum to the others' goes through all parameters once


class _Plan(NamedTuple):
    """How a module's records are computed."""

    formed: frozenset[str]
    """The parameters whose gradients are formed by autograd."""
    record_values: int
    """How many values one record takes at one point, about."""


class _Pass(NamedTuple):
    """One pass forward and back at one point."""

    calls: list[Call]
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
        least = _VALUES_PER_PARAMETER * self.dimension // plan.record_values
        rows = max(1, least, _CHUNK_VALUES // (plan.record_values * len(query.points)))
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
            for place, piece in zip(torch.split(total, self._sizes()), sums[0], strict=True):
                if piece is not None:
                    place += piece
            clipped += sums[1]
        return Increment(total, clipped)

    def _sizes(self) -> list[int]:
        return [parameter.numel() for parameter in trained_of(self.module).values()]

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
        while (one := self._pass(point, zeros, 1.0, formed)).past:
            formed |= one.past
        shapes = {name: parameter.shape for name, parameter in trained_of(self.module).items()}
        values = zeros.features.numel() + sum(shapes[name].numel() for name in formed)
        for call in one.calls:
            values += 3 * (call.seen.numel() + call.slope.numel())
            if call.names[0] is not None:
                values += call.known.working_values(call.slope, shapes[call.names[0]])
        return _Plan(formed, values) if one.calls else None

    def _pass(self, point: Tensor, records: Records, coefficient: float, formed: frozenset[str]) -> _Pass:
        """The calls and the gradients of a batch, times `coefficient`."""
        with torch.inference_mode(False), torch.enable_grad():
            named = {
                name: own(value).requires_grad_() for name, value in parameters_of(self.module, point).items()
            }
            watched = Watched({name: value for name, value in named.items() if name not in formed})
            count = len(records.labels)
            leaves = {
                name: named[name].detach().expand(count, *named[name].shape).requires_grad_() for name in formed
            }

            def loss(batched: dict[str, Tensor], *one: Tensor) -> Tensor:
                with Watch(watched, one[0], count):
                    return self._loss_of_one({**named, **batched}, *one)

            losses = vmap(loss)(leaves, *records)
            past, slopes = watched.slopes(coefficient * losses.sum(), list(leaves.values()))
        gradients = {
            name: slope.flatten(1) for name, slope in zip(leaves, slopes, strict=True) if slope is not None
        }
        weights, biases = zip(*(call.names for call in watched.calls), strict=True) if watched.calls else ((), ())
        both = {name for name in weights if name is not None and name in biases}
        return _Pass(watched.calls, gradients, past | both)

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
                self._pass(point, records, coefficient, plan.formed)
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
        return [sums.get(name) for name in trained_of(self.module)], clipped.clipped

    def _terms(self, passes: Sequence[_Pass]) -> Iterator[tuple[str, Terms]]:
        """Of every parameter that the losses depend on."""
        uses: dict[str, list[Use]] = {}
        shifts: dict[str, list[Tensor]] = {}
        for calls in zip(*(one.calls for one in passes), strict=True):
            (weight, bias), slopes = calls[0].names, [call.slope for call in calls]
            if bias is not None:
                shifts.setdefault(bias, []).append(calls[0].known.bias(sum_of(slopes)))
            if weight is not None:
                uses.setdefault(weight, []).extend(_uses(calls[0].known, [call.seen for call in calls], slopes))
        for name, parameter in trained_of(self.module).items():
            formed = [one.formed[name] for one in passes if name in one.formed]
            if name in uses:
                yield name, weight_terms(uses[name], parameter.shape)
            elif formed or name in shifts:
                yield name, LongTerms([sum_of(formed or shifts[name])])


def _uses(known: Known, seen: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Use]:
    """Of a call at several points, in terms as small as their sum; what a record itself shows does not move."""
    if not seen[0].is_floating_point():
        if all(torch.equal(one, seen[0]) for one in seen[1:]):
            return [Use(known, seen[0], sum_of(slopes))]
        return [Use(known, *one) for one in zip(seen, slopes, strict=True)]
    first = known.moved(seen[0])
    moved = [
        Use(known, known.moved(one) - first, slope)
        for one, slope in zip(seen[1:], slopes[1:], strict=True)
        if one.data_ptr() != seen[0].data_ptr()
    ]
    return [Use(known, first, sum_of(slopes)), *moved]


def _alike(passes: Sequence[_Pass]) -> bool:
    """Whether the module makes the same calls at every point."""
    shapes = [[(one.known, one.names, one.seen.shape, one.slope is None) for one in each.calls] for each in passes]
    return all(one == shapes[0] for one in shapes[1:])
