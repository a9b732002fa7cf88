"""What a module does with its parameters, seen while it runs: known functions of them, and slopes at outputs.

A record passes through the module alone, under vmap, so that no code of the module can look at another record.
`Watch` stands between the module and torch's functions: a known function of a parameter is computed for all
records at once, as vmap would do, and noted as a `Call`.  One pass of autograd then tells the slope at the outputs
of every call, one after another as it comes to them, and forms no gradient by any parameter.

Guarantee: a parameter's way into a loss is through the noted calls, or autograd finds it: `Watched.tell` names
the parameters that have another way, and those of calls that autograd did not come to, in every pass anew.
Changes in place after a call do not touch its slope.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedpriv.loss.functions import KNOWN, Known
from fedpriv.loss.recurrent import STEP_BY_STEP


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
                first = not seen.requires_grad
                self.watched.calls.append(Call(known, (name, other), seen.detach(), seen._version, edge, first))
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
    parts = query, key, value
    alike = all(part.dim() == query.dim() >= 3 and part.shape[:-2] == query.shape[:-2] for part in parts)
    return {"is_causal": is_causal, "scale": scale} if alike and attn_mask is None and not dropout_p else None


_attention_forward = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda _tensors: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)
"""torch's own, without the question who stands between: the functions that it calls are watched in turn."""
