"""Disordered products: a test double for the processors that are not at hand.

A processor's library may add the terms of a product or a sum in an order that depends on where a row sits in its
batch, on how large the batch is, and on where in memory its inputs lie.  Which orders occur differs from one
processor to the next, so a test that passes on one tells little of the others.  Inside `disordered()` every
matrix product, convolution (both directions) and reduction of torch adds the same terms in an order that depends
on all three, and so do numpy's `einsum`, `matmul`, `dot` and `sum` where they are called by name.  Results are
correct up to rounding, and the same again for the same place, size and address: whatever claims equal bits, or
that a record's numbers do not depend on others, has to hold here, too.

Not covered: `@` and `.sum()` of numpy arrays (write `np.matmul` and `np.sum`), other threads and processes,
transposed and three-dimensional convolutions, and elementwise functions, whose bits may differ between the body of
a vector and its tail.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._decomp import decomposition_table
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

_PLACES = 3
"""Neighbouring places have different orders; every third one has the same again."""
_ORDERS = 16
_ALIGNMENT = 64
_EINSUM, _MATMUL, _SUM = np.einsum, np.matmul, np.sum
_aten = torch.ops.aten


@contextmanager
def disordered() -> Iterator[None]:
    """Everything in here adds in an order of place, size and address."""
    with (
        _Disorder(),
        mock.patch.object(np, "einsum", _einsum),
        mock.patch.object(np, "matmul", _np_matmul),
        mock.patch.object(np, "dot", _np_matmul),
        mock.patch.object(np, "sum", _np_sum),
        _without_mkldnn(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def at_address(tensor: Tensor, offset: int) -> Tensor:
    """The same numbers in other memory, `offset` elements behind a place of torch's own alignment."""
    room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    return room[offset:].view(tensor.shape).copy_(tensor)


@lru_cache(maxsize=4096)
def _order(length: int, number: int) -> NDArray[np.int64]:
    return np.random.default_rng([length, number]).permutation(length)


def _orders(length: int, *where: object) -> list[NDArray[np.int64]]:
    """An order of `length` terms for each kind of place, another for each, of what else it depends on."""
    first = zlib.crc32(repr((length, *where)).encode())
    return [_order(length, (first + place) % _ORDERS) for place in range(_PLACES)]


def _addresses(*arrays: Any) -> tuple[int, ...]:
    starts = (each.data_ptr() if isinstance(each, Tensor) else each.ctypes.data for each in arrays)
    return tuple(start % _ALIGNMENT for start in starts)


def _contract(left: Any, right: Any, out: Any) -> Any:
    """left (N, n, k) @ right (N, k, m) into `out` (N, n, m), tensors or arrays."""
    many, rows, columns = out.shape
    orders = _orders(left.shape[-1], many, rows, columns, *_addresses(left, right))
    for order, terms in enumerate(orders):
        a, b = left[..., terms], right[:, terms]
        for outer, row in itertools.product(range(min(_PLACES, many)), range(min(_PLACES, rows))):
            column = (order - outer - row) % _PLACES
            if column < columns:
                places = slice(outer, None, _PLACES), slice(row, None, _PLACES), slice(column, None, _PLACES)
                out[places] = _product(a[places[:2]], b[places[0], :, places[2]])
    return out


def _product(left: Any, right: Any) -> Any:
    return left @ right if isinstance(left, Tensor) else _MATMUL(left, right)


def _rows(x: Tensor, dims: Sequence[int], function: Callable[[Tensor], Tensor], restored: bool) -> Tensor:
    """`function` over the last axis, into which `dims` are moved, row by row in the row's order."""
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    flat = x.permute(*kept, *dims)
    shape = flat.shape
    flat = flat.reshape(shape[: len(kept)].numel(), shape[len(kept) :].numel())
    parts: list[tuple[int, Tensor]] = []
    for place, order in enumerate(_orders(flat.shape[1], *x.shape, *_addresses(x))):
        terms = torch.from_numpy(order)
        found = function(flat[place::_PLACES][:, terms])
        parts.append((place, found[:, torch.argsort(terms)] if restored else found))
    first = parts[0][1]
    out = first.new_empty((len(flat), *first.shape[1:]))
    for place, part in parts:
        out[place::_PLACES] = part
    if not restored:
        return out.reshape(shape[: len(kept)])
    back = torch.argsort(torch.tensor([*kept, *dims]))
    return out.reshape(shape).permute(*back.tolist()).contiguous()


def _dims(x: Tensor, dim: Any) -> list[int]:
    given = [dim] if isinstance(dim, int) else list(dim) if dim else range(x.dim())
    return [each % x.dim() for each in given]


def _reduced(real: Callable[[Tensor], Tensor], x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    if x.dim() == 0 or x.numel() == 0 or not (x.is_floating_point() and x.is_cpu):
        return NotImplemented
    dims = _dims(x, dim)
    out = _rows(x, dims, real, restored=False)
    return out.reshape([1 if place in dims else size for place, size in enumerate(x.shape)]) if keepdim else out


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _reduced(lambda rows: rows.sum(-1, dtype=dtype), x, dim, keepdim)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _reduced(lambda rows: rows.mean(-1, dtype=dtype), x, dim, keepdim)


def _norm(x: Tensor, kind: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _reduced(lambda rows: torch.linalg.vector_norm(rows, kind, -1, dtype=dtype), x, dim, keepdim)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return _reduced(lambda rows: rows.logsumexp(-1), x, dim, keepdim)


def _softmax(x: Tensor, dim: int, half: bool) -> Tensor:
    return _rows(x, _dims(x, dim), lambda rows: rows.softmax(-1), restored=True) if x.dim() else NotImplemented


def _log_softmax(x: Tensor, dim: int, half: bool) -> Tensor:
    return _rows(x, _dims(x, dim), lambda rows: rows.log_softmax(-1), restored=True) if x.dim() else NotImplemented


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return _contract(a, b, a.new_empty((a.shape[0], a.shape[1], b.shape[2])))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _bmm(a[None], b[None])[0]


def _mv(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b[:, None])[:, 0]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a[None], b[:, None])[0, 0]


def _plus(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def plus(base: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        term = product(a, b) if alpha == 1 else alpha * product(a, b)
        return term if beta == 0 else beta * base + term

    return plus


def _as_2d(*shapes: Sequence[int]) -> Iterator[list[int]]:
    fill = (1, 0, 1)  # stride, padding, dilation of an axis that is not there
    return (
        [filler, *shape] if len(shape) == 1 else list(shape) for filler, shape in zip(fill, shapes, strict=True)
    )


def _columns(x: Tensor, weight: Tensor, geometry: Sequence[list[int]], groups: int) -> Tensor:
    """(B, G, C/G · k, L): what every place of a convolution multiplies."""
    stride, padding, dilation = geometry
    columns = functional.unfold(x, weight.shape[2:], dilation, padding, stride)  # type: ignore[arg-type]
    return columns.reshape(len(x), groups, -1, columns.shape[-1])


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """a (..., n, k) @ b (..., k, m), leading axes broadcast."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*lead, *a.shape[-2:]), b.expand(*lead, *b.shape[-2:])
    found = _bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
    return found.reshape(*lead, *found.shape[-2:])


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    _: Any,
    groups: int,
) -> Tensor:
    if transposed or x.dim() not in (3, 4):
        return NotImplemented
    flat = x.dim() == 3
    if flat:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    geometry = list(_as_2d(stride, padding, dilation))
    columns = _columns(x, weight, geometry, groups)
    kernels = weight.reshape(groups, len(weight) // groups, -1)
    out = _batched(kernels[None], columns).reshape(len(x), len(weight), -1)
    out = out.reshape(len(x), len(weight), *_sizes(x, weight, geometry))
    if bias is not None:
        out = out + bias.view(-1, 1, 1)
    return out.squeeze(2) if flat else out


def _sizes(x: Tensor, weight: Tensor, geometry: Sequence[list[int]]) -> list[int]:
    each = zip(x.shape[2:], weight.shape[2:], *geometry, strict=True)
    return [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, gap in each]


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, _: Any, groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    if transposed or x.dim() not in (3, 4):
        return NotImplemented
    flat = x.dim() == 3
    if flat:
        grad, x, weight = grad.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2)
    geometry = list(_as_2d(stride, padding, dilation))
    slopes = grad.reshape(len(x), groups, len(weight) // groups, -1)
    to_x = to_weight = to_bias = None
    if mask[0]:
        kernels = weight.reshape(groups, len(weight) // groups, -1)
        columns = _batched(kernels.mT[None], slopes).reshape(len(x), -1, slopes.shape[-1])
        step, pad, gap = geometry
        to_x = functional.fold(columns, x.shape[2:], weight.shape[2:], gap, pad, step)  # type: ignore[arg-type]
    if mask[1]:
        columns = _columns(x, weight, geometry, groups)
        by_group = slopes.permute(1, 2, 0, 3).flatten(2), columns.permute(1, 2, 0, 3).flatten(2)
        to_weight = _bmm(by_group[0], by_group[1].mT).reshape(weight.shape)
    if mask[2]:
        to_bias = _sum(grad, [0, 2, 3])
    if flat:
        to_x, to_weight = (None if each is None else each.squeeze(2) for each in (to_x, to_weight))
    return to_x, to_weight, to_bias


def _into(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given, out: out.copy_(product(*given))


_OURS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _bmm,
    _aten.mv.default: _mv,
    _aten.mm.out: _into(_mm),
    _aten.mv.out: _into(_mv),
    _aten.dot.default: _dot,
    _aten.vdot.default: _dot,
    _aten.addmm.default: _plus(_mm),
    _aten.addmv.default: _plus(_mv),
    _aten.baddbmm.default: _plus(_bmm),
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.linalg_vector_norm.default: _norm,
    _aten.logsumexp.default: _logsumexp,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _log_softmax,
}
_BY_PARTS = {
    _aten.native_layer_norm.default,
    _aten.native_layer_norm_backward.default,
    _aten.native_group_norm.default,
    _aten.native_group_norm_backward.default,
    _aten._softmax_backward_data.default,
    _aten._log_softmax_backward_data.default,
    _aten.mse_loss.default,
    _aten.nll_loss_forward.default,
    _aten.var.correction,
    _aten.var_mean.correction,
    _aten.std.correction,
}
"""Ops that torch can write as sums and elementwise functions, in which this mode then sees the sums."""


class _Disorder(TorchDispatchMode):
    """Sees what is left of torch's functions below autograd and vmap: products that are really taken."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = NotImplemented
        if func in _OURS:
            found = _OURS[func](*args, **kwargs)
        elif func in _BY_PARTS:
            with self:
                found = decomposition_table[func](*args, **kwargs)
        else:
            with self:  # in inference mode whole functions such as matmul arrive here
                found = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found


def _floats(*arrays: Any) -> bool:
    return all(isinstance(each, np.ndarray) and each.dtype.kind == "f" and each.size for each in arrays)


@wraps(np.matmul)
def _np_matmul(a: Any, b: Any, *rest: Any, **options: Any) -> Any:
    if not _floats(a, b) or a.ndim != 2 or b.ndim != 2 or rest or options:
        return _MATMUL(a, b, *rest, **options)
    return _contract(a[None], b[None], np.empty((1, len(a), b.shape[1]), np.result_type(a, b)))[0]


@wraps(np.sum)
def _np_sum(a: Any, axis: Any = None, *rest: Any, **options: Any) -> Any:
    if not _floats(a) or not isinstance(axis, int) or rest or options:
        return _SUM(a, axis, *rest, **options)
    rows = np.moveaxis(a, axis, -1)
    out = np.empty(rows.shape[:-1], a.dtype).ravel()
    flat = rows.reshape(-1, rows.shape[-1])
    for place, order in enumerate(_orders(flat.shape[1], *a.shape, *_addresses(a))):
        out[place::_PLACES] = _SUM(flat[place::_PLACES][:, order], axis=-1)
    return out.reshape(rows.shape[:-1])[()]


@wraps(np.einsum)
def _einsum(subscripts: str, *arrays: Any, **options: Any) -> Any:
    inputs, _, output = subscripts.partition("->")
    letters = inputs.split(",")
    summed = [letter for letter in dict.fromkeys("".join(letters)) if letter not in output]
    if not _floats(*arrays) or options or not summed or not output:
        return _EINSUM(subscripts, *arrays, **options)
    (over, *_), first = summed, output[0]
    sizes = {
        letter: size
        for named, each in zip(letters, arrays, strict=True)
        for letter, size in zip(named, each.shape, strict=True)
    }
    out = np.empty([sizes[letter] for letter in output], np.result_type(*arrays))
    shapes = [each.shape for each in arrays]
    for place, order in enumerate(_orders(sizes[over], *shapes, *_addresses(*arrays))):
        some = []
        for named, each in zip(letters, arrays, strict=True):
            if first in named:
                each = each[(*[slice(None)] * named.index(first), slice(place, None, _PLACES))]
            some.append(np.take(each, order, axis=named.index(over)) if over in named else each)
        out[place::_PLACES] = _EINSUM(subscripts, *some)
    return out
