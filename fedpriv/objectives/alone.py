"""One record computed by itself, whatever it makes a model do: the one way in which this is ensured.

Rows of a matrix product round by their place in a batch, by how many rows there are and by the address of their
memory, and code that a silo permits may look at all of a batch.  So everything of which is said that a record
decides it alone is computed for one record after another, each the only row of a batch of public shape.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.func import vmap

_ALIGNMENT = 64
"""Bytes, of all memory that torch allocates on a processor."""


def each_alone(
    of_one: Callable[..., Tensor],
    columns: Sequence[Tensor],
    nothing: Tensor,
    dummy: Sequence[Tensor] = (),
    least: int = 0,
) -> Iterator[Tensor]:
    """What `of_one` gives for each record, one after another, in the shape and the type of `nothing`.

    `of_one` takes one row of each column, (1, …).  `nothing` is given for a record on which it raises, or gives
    something of another shape.  Where there are fewer records than `least`, it is called for the `dummy` (one row
    a column) in their place, and `nothing` is given for each.

    Guarantee: what is given for a record is a function of its own row, of `of_one` and of public values, whatever
    the record makes `of_one` do, provided that this keeps nothing between calls.  The row, and what is given, lie
    in memory of their own, aligned as torch aligns all; a draw from torch's generator is the same for every
    record, and what `of_one` does to its row or to the modes of gradients reaches no other.  How often it is
    called follows from the number of records and `least` alone.  How long it takes is not hidden here.
    """
    count = len(columns[0])
    for place in range(max(count, least)):
        row, source = (place, columns) if place < count else (0, dummy)
        given = _attempt(of_one, [column[row : row + 1] for column in source], nothing)
        yield given if place < count else own(nothing)


def _attempt(of_one: Callable[..., Tensor], row: Sequence[Tensor], nothing: Tensor) -> Tensor:
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        with torch.inference_mode(False), torch.no_grad():
            given = of_one(*map(own, row))
            if given.shape == nothing.shape:
                return torch.empty_like(nothing).copy_(given)
    except (Exception, SystemExit):  # whatever a record makes a stranger's code do: it must not be seen who did
        pass
    finally:
        torch.set_rng_state(before)
    return own(nothing)


def own(values: Tensor) -> Tensor:
    """A copy in memory of its own: contiguous, and aligned as torch aligns all that it allocates."""
    return values.clone(memory_format=torch.contiguous_format)


def aligned(values: Tensor) -> Tensor:
    """`values`, or a copy of them where their memory is not aligned as torch aligns its own.

    Guarantee: products of the same values in the same shapes have the same bits in every process of one machine,
    wherever a message or an array put the values.
    """
    return values if values.is_contiguous() and values.data_ptr() % _ALIGNMENT == 0 else own(values)


def rows_apart(call: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
    """`call` of rows (B, …), to which each row is a batch of one: (B, outputs).

    No row can look at another.  For more than one record these are the numbers of `each_alone` up to rounding, at
    a fraction of the time, for simulations and public test records; one record is computed as it is.
    """
    if len(features) <= 1:
        return call(features)
    return vmap(lambda row: call(row.unsqueeze(0)).squeeze(0))(features)
