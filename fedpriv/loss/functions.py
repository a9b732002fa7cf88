"""Known functions of parameters: what each gives for a batch of records, and every record's gradient by them.

With δ the slope of a record's loss at the outputs, a weight's gradient is a sum over places t (of a sequence, of a
picture, or of calls one after another) of what the function saw there and the slope there:

| | gradient |
|---|---|
| linear, convolution | Σ_t δ_t ⊗ a_t |
| normalization | Σ_t δ_t · â_t, one by one |
| embedding | δ_t added to row a_t |
| any bias | Σ_t δ_t |

`weight_terms` makes the terms of the sum of several of them: over calls, and over the points of an increment as
layered.py writes them.  Outer products are kept as gradients where these are smaller, an embedding's as its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.core.replicates import at_once
from fedpriv.loss.clipping import Size, formed, upper_norm
from fedpriv.loss.layers import DenseTerms, FormedTerms, Terms, patches_of, sum_of

_FEWER = 0.4
"""Values of places against values of a gradient: with a smaller share, products of places are faster."""
_KEPT = 0.5
"""Values of a gradient against values of places: with a smaller share, gradients are kept."""
_FORMED_VALUES = 2**18
"""Values of gradients that are formed at a time for their norms alone: they stay in a cache."""
_PIECE = 128


class Known(Protocol):
    """A function with all that it is given beside its input and its parameters."""

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Of all records: `seen` is one record's input with an axis (B, …) before it."""
        ...

    def moved(self, seen: Tensor) -> Tensor:
        """What the gradient by the weight is linear in, so that it may be subtracted at another point."""
        ...

    def weight(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradients by a weight of this shape, (B, size); `seen` is as `moved` gives it."""
        ...

    def bias(self, slope: Tensor) -> Tensor:
        """The gradients by the bias, (B, size)."""
        ...

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        """How many values `weight` takes beside its arguments, about."""
        ...


class Use(NamedTuple):
    """What a function saw, as `moved` gives it, and the slope at its outputs; both (B, …)."""

    known: Known
    seen: Tensor
    slope: Tensor


@dataclass(frozen=True)
class Linear:
    """functional.linear."""

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return functional.linear(seen, weight, bias)

    def moved(self, seen: Tensor) -> Tensor:
        return seen

    def weight(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return (_places(slope).mT @ _places(seen)).flatten(1)

    def bias(self, slope: Tensor) -> Tensor:
        return _places(slope).sum(1)

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return 0


@dataclass(frozen=True)
class Convolution:
    """functional.conv1d and conv2d, of (N, channels, …) or (channels, …)."""

    axes: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        function: Callable[..., Tensor] = functional.conv1d if self.axes == 1 else functional.conv2d
        outputs = function(
            seen.flatten(0, -self.axes - 2), weight, bias, self.stride, self.padding, self.dilation, self.groups
        )
        return outputs.view(*seen.shape[: -self.axes - 1], *outputs.shape[1:])

    def moved(self, seen: Tensor) -> Tensor:
        return seen

    def weight(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        """As products with the patches of the input, a few pictures' at a time; rows are pictures of one row."""
        pictures, slopes = seen.flatten(0, -self.axes - 2), slope.flatten(-self.axes).flatten(0, -3)
        pictures = pictures.unsqueeze(-2) if self.axes == 1 else pictures
        one, none = ((1,), (0,)) if self.axes == 1 else ((), ())
        products = slopes.new_empty(len(slopes) * self.groups, shape[0] // self.groups, prod(shape[1:]))
        several = max(
            1, at_once(_FORMED_VALUES, slopes.device) // (self.groups * prod(shape[1:]) * slopes.shape[-1])
        )
        for some, own, into in zip(
            *(torch.split(part, several) for part in (pictures, slopes)),
            torch.split(products, several * self.groups),
            strict=True,
        ):
            patches = patches_of(
                some,
                (*one, *shape[2:]),
                (*one, *self.dilation),
                (*none, *self.padding),
                (*one, *self.stride),
            )
            left, right = (part.reshape(len(into), -1, part.shape[-1]) for part in (own, patches))
            torch.bmm(left, right.mT, out=into)
        return _sum_of_calls(products.view(len(seen), -1, prod(shape)))

    def bias(self, slope: Tensor) -> Tensor:
        sums = slope.flatten(-self.axes).sum(-1)
        return _sum_of_calls(sums.flatten(1, -2)) if sums.dim() > 2 else sums

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return slope.numel() // shape[0] * prod(shape[1:]) + prod(shape)


@dataclass(frozen=True)
class Embedding:
    """functional.embedding; a padding row has no gradient."""

    padding: int | None

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return functional.embedding(seen, weight)

    def moved(self, seen: Tensor) -> Tensor:
        return seen

    def weight(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        places = _places(self.kept(seen, slope))
        rows = seen.flatten(1).unsqueeze(-1).expand(places.shape)
        return places.new_zeros(len(seen), *shape).scatter_add_(1, rows, places).flatten(1)

    def kept(self, seen: Tensor, slope: Tensor) -> Tensor:
        return slope if self.padding is None else slope.where((seen != self.padding).unsqueeze(-1), 0.0)

    def bias(self, slope: Tensor) -> Tensor:
        raise NotImplementedError("an embedding has no bias")

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return slope[..., 0].numel() ** 2


@dataclass(frozen=True)
class LayerNorm:
    """functional.layer_norm over the last axes."""

    shape: tuple[int, ...]
    eps: float

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(seen, self.shape, weight, bias, self.eps)

    def moved(self, seen: Tensor) -> Tensor:
        return functional.layer_norm(seen, self.shape, None, None, self.eps)

    def weight(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return self.bias(seen * slope)

    def bias(self, slope: Tensor) -> Tensor:
        return _places(slope.flatten(-len(self.shape))).sum(1)

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return slope.numel()


@dataclass(frozen=True)
class GroupNorm:
    """functional.group_norm of (N, channels, …)."""

    groups: int
    eps: float

    def outputs(self, seen: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.group_norm(seen.flatten(0, 1), self.groups, weight, bias, self.eps).view(seen.shape)

    def moved(self, seen: Tensor) -> Tensor:
        return self.outputs(seen, None, None)

    def weight(self, seen: Tensor, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return self.bias(seen * slope)

    def bias(self, slope: Tensor) -> Tensor:
        return (slope.flatten(3).sum(-1) if slope.dim() > 3 else slope).sum(1)

    def working_values(self, slope: Tensor, shape: Sequence[int]) -> int:
        return slope.numel()


def _sum_of_calls(values: Tensor) -> Tensor:
    """Σ of (B, calls, size) over the middle, (B, size); without a copy of one."""
    return values.squeeze(1) if values.shape[1] == 1 else values.sum(1)


def _places(values: Tensor) -> Tensor:
    """(B, …, size) as (B, T, size)."""
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)


def weight_terms(uses: Sequence[Use], shape: Sequence[int]) -> Terms:
    """Of the increments in a weight of this shape, the sums over these uses of it."""
    if all(isinstance(use.known, Linear) for use in uses):
        places = [(_places(use.slope), _places(use.seen)) for use in uses]
        count = sum(slope.shape[1] for slope, _ in places)
        if count == len(uses) <= 2:
            return DenseTerms(
                [slope.squeeze(1) for slope, _ in places], [seen.squeeze(1) for _, seen in places], False
            )
        slopes, seen = (torch.cat(parts, 1) if len(uses) > 1 else parts[0] for parts in zip(*places, strict=True))
        return (
            LongTerms([(slopes.mT @ seen).flatten(1)])
            if prod(shape) <= _KEPT * count * sum(shape)
            else PlacedTerms(slopes, seen)
        )
    if all(isinstance(use.known, Embedding) for use in uses):
        rows = torch.cat([use.seen.flatten(1) for use in uses], 1)
        kept = [use.known.kept(use.seen, use.slope) for use in uses if isinstance(use.known, Embedding)]
        return RowTerms.of(rows, torch.cat([_places(slope) for slope in kept], 1), shape[0])
    return LongTerms([sum_of([use.known.weight(use.seen, use.slope, shape) for use in uses])])


class LongTerms(FormedTerms):
    """Gradients themselves, of more values than can be squared and added in float32 at once."""

    def size(self) -> Size:
        norms = [long_norm(part) for part in self.gradients]
        return formed(norms[0] if len(norms) == 1 else upper_norm(torch.stack(norms, -1)))


def long_norm(vectors: Tensor) -> Tensor:
    """At least the norm of each row (B, n), in float64: of pieces in the rows' type, and of these in float64."""
    if vectors.shape[1] <= _PIECE:
        return upper_norm(vectors)
    whole = vectors.shape[1] // _PIECE * _PIECE
    pieces = upper_norm(vectors[:, :whole].reshape(len(vectors), -1, _PIECE))
    if whole < vectors.shape[1]:
        pieces = torch.cat([pieces, upper_norm(vectors[:, whole:]).unsqueeze(1)], 1)
    return upper_norm(pieces)


@dataclass(frozen=True)
class PlacedTerms:
    """Σ_t δ_t ⊗ a_t, whose gradients are never kept: the sum over records is one product."""

    slopes: Tensor
    """(B, T, outputs)"""
    seen: Tensor
    """(B, T, inputs)"""

    def to(self, dtype: torch.dtype) -> "PlacedTerms":
        return PlacedTerms(self.slopes.to(dtype), self.seen.to(dtype))

    def size(self) -> Size:
        """Rounding is relative to Σ_t ‖δ_t‖ ‖a_t‖: terms that cancel leave theirs behind."""
        slope, values = upper_norm(self.slopes), upper_norm(self.seen)
        spread = (slope * values).sum(-1)
        (places, outputs), inputs = self.slopes.shape[1:], self.seen.shape[-1]
        few = places * (inputs + outputs) <= _FEWER * inputs * outputs
        norm = self._norm_of_products(spread) if few else self._norm_of_gradients(spread)
        return Size(norm, spread, places + 4.0, spread + slope.sum(-1) + values.sum(-1))

    def _norm_of_products(self, spread: Tensor) -> Tensor:
        """From ⟨δ_s, δ_t⟩ ⟨a_s, a_t⟩ in float64: in float32 their rounding would show."""
        slopes, seen = self.slopes.double(), self.seen.double()
        squared = ((slopes @ slopes.mT) * (seen @ seen.mT)).sum((-2, -1)).clamp_(min=0.0)
        roundings = slopes.shape[-1] + seen.shape[-1] + slopes.shape[1] ** 2 + 8.0
        return squared.add_(spread.square(), alpha=roundings * 2.0**-52).sqrt_()

    def _norm_of_gradients(self, spread: Tensor) -> Tensor:
        """From the gradients, a few records' at a time, and what their rounding can be."""
        rows = max(1, at_once(_FORMED_VALUES, self.slopes.device) // (self.slopes.shape[-1] * self.seen.shape[-1]))
        parts = zip(torch.split(self.slopes, rows), torch.split(self.seen, rows), strict=True)
        norm = torch.cat([long_norm((slopes.mT @ seen).flatten(1)) for slopes, seen in parts])
        return norm.add_(spread, alpha=(self.slopes.shape[1] + 2.0) * torch.finfo(self.slopes.dtype).eps)

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        return [((self.slopes * factor[:, None, None]).flatten(0, 1).mT @ self.seen.flatten(0, 1)).flatten()]

    def rows(self, factor: Tensor) -> list[Tensor]:
        return [((self.slopes * factor[:, None, None]).mT @ self.seen).flatten(1)]

    def only(self, kept: Tensor) -> "PlacedTerms":
        return PlacedTerms(*(part.where(kept[:, None, None], 0.0) for part in (self.slopes, self.seen)))


@dataclass(frozen=True)
class RowTerms:
    """Gradients of few rows among many: row `places` (B, T) is `values` (B, T, width), no row twice but as 0."""

    places: Tensor
    values: Tensor
    count: int
    """Of all rows."""

    @classmethod
    def of(cls, places: Tensor, values: Tensor, count: int) -> "RowTerms":
        """The sums of values of the same row, at the first place that has it."""
        same = places.unsqueeze(2) == places.unsqueeze(1)
        again = same.tril(-1).any(-1)
        return cls(places, (same.to(values.dtype) @ values).masked_fill(again.unsqueeze(-1), 0.0), count)

    def to(self, dtype: torch.dtype) -> "RowTerms":
        return RowTerms(self.places, self.values.to(dtype), self.count)

    def size(self) -> Size:
        return formed(long_norm(self.values.flatten(1)))

    def weighted_sum(self, factor: Tensor) -> list[Tensor]:
        values = (self.values * factor[:, None, None]).flatten(0, 1)
        return [
            values.new_zeros(self.count, values.shape[-1]).index_add_(0, self.places.flatten(), values).flatten()
        ]

    def rows(self, factor: Tensor) -> list[Tensor]:
        values = self.values * factor[:, None, None]
        whole = values.new_zeros(len(values), self.count, values.shape[-1])
        return [whole.scatter_add_(1, self.places.unsqueeze(-1).expand(values.shape), values).flatten(1)]

    def only(self, kept: Tensor) -> "RowTerms":
        return RowTerms(self.places, self.values.where(kept[:, None, None], 0.0), self.count)


def _linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return values, weight, bias, Linear()


def _convolution(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    axes = weight.dim() - 2
    if isinstance(padding, str):
        return None
    stride, padding, dilation = (
        (size,) * axes if isinstance(size, int) else tuple(size) for size in (stride, padding, dilation)
    )
    return values, weight, bias, Convolution(axes, stride, padding, dilation, groups)


def _embedding(
    values: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq:
        return None
    return values, weight, None, Embedding(padding_idx % len(weight) if padding_idx is not None else None)


def _layer_norm(
    values: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return values, weight, bias, LayerNorm(tuple(shape), eps)


def _group_norm(
    values: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return values, weight, bias, GroupNorm(groups, eps)


KNOWN: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.conv1d: _convolution,
    functional.conv2d: _convolution,
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
}
"""From a call's arguments to (input, weight, bias, `Known`), or None for settings that are not known."""
