"""What a module does with its parameters, seen while it runs: known functions of them, and slopes at outputs.

A record passes through the module alone, under vmap, so that no code of the module can look at another record.
`Watch` stands between the module and torch's functions: a known function of a parameter is computed for all
records at once, as vmap would do, and noted as a `Call`.  One pass of autograd then gives the slope at the outputs
of every call, and no gradient by any parameter.

Guarantee: a parameter's way into a loss is through the noted calls, or autograd finds it: `Watched.slopes` names
the parameters that have another way, in every pass anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedpriv.loss.functions import KNOWN, Known


@dataclass
class Call:
    """One call of a known function, for a batch of records."""

    known: Known
    names: tuple[str | None, str | None]
    """Of its weight and its bias."""
    seen: Tensor
    """Its input, (B, …)."""
    slope: Tensor | None = None
    """Of each record's loss at its outputs, (B, …); None where the loss does not depend on them."""


@dataclass
class Watched:
    """One pass of a batch: parameters by name, which must require gradients, and the calls in their order."""

    parameters: Mapping[str, Tensor]
    calls: list[Call] = field(default_factory=list)
    token: Tensor = field(default_factory=lambda: torch.zeros(0, requires_grad=True))
    """What every call's outputs depend on, so that autograd passes all of them."""

    def name_of(self, tensor: Tensor | None) -> str | None:
        return next((name for name, one in self.parameters.items() if one is tensor), None)

    def slopes(self, loss: Tensor, leaves: Sequence[Tensor]) -> tuple[set[str], Sequence[Tensor | None]]:
        """Give every call its slope; the parameters that reach `loss` past all calls, and slopes by `leaves`."""
        wanted = [self.token, *leaves, *self.parameters.values()]
        found: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
        past = zip(self.parameters, found[1 + len(leaves) :], strict=True)
        return {name for name, slope in past if slope is not None}, found[1 : 1 + len(leaves)]


class Watch(TorchFunctionMode):
    """While it is entered, calls of known functions of parameters are noted in `watched`."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        if func in KNOWN and (call := KNOWN[func](*args, **settings)) is not None:
            values, weight, bias, known = call
            names = self.watched.name_of(weight), self.watched.name_of(bias)
            if any(names) and all(name or one is None for name, one in zip(names, (weight, bias), strict=True)):
                return _applied(_Noted, self.watched, known, names, values, weight, bias)
        elif func is functional.multi_head_attention_forward:
            with self:
                return _attention_forward(*args, **settings)
        elif func is functional.scaled_dot_product_attention and (plain := _plain(*args, **settings)) is not None:
            return _applied(_Attention, plain, *args[:3])
        return func(*args, **settings)


def _applied(function: Any, *given: Any) -> Any:
    """What torch leaves without types."""
    return function.apply(*given)


class _Noted(Function):
    """A known function of one record's input, of which vmap makes that of all records' inputs."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("a function of parameters alone")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, watched: Watched, known: Known, names: Any, *given: Any) -> Any:
        values, *parameters = given
        seen = values.movedim(in_dims[3], 0)
        outputs = known.outputs(seen, *(None if one is None else one.detach() for one in parameters))
        call = Call(known, names, seen.detach())
        watched.calls.append(call)
        return _applied(_Tapped, outputs, watched.token, call), 0


class _Tapped(Function):
    """Passes values on as they are, and notes their slope; changes in place after it do not touch that."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Tensor, call: Call) -> Tensor:
        ctx.call = call
        ctx.mark_dirty(values)
        return values

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        ctx.call.slope = slopes[0]
        return slopes[0], None, None


class _Attention(Function):
    """Attention of one record, of which vmap makes that of a batch: torch's own takes the parts of it apart."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("attention to parameters alone")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, settings: Any, *given: Any) -> Any:
        parts = [
            part.expand(info.batch_size, *part.shape) if place is None else part.movedim(place, 0)
            for part, place in zip(given, in_dims[1:], strict=True)
        ]
        outputs = functional.scaled_dot_product_attention(*(part.flatten(0, -4) for part in parts), **settings)
        return outputs.view(*parts[0].shape[:-3], *outputs.shape[1:]), 0


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
