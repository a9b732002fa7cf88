"""Replicates: many runs computed together, as parts whose numbers are columns.

Estimators, mechanisms and optimizers are frozen dataclasses whose formulas broadcast, so an optimizer whose step
is a tensor of shape (R, 1) moves R replicates at once.  `stack` makes one part of many that differ in numbers
only; a number that all replicates share stays a number.  Data-dependent shortcuts (`certain`, `never_above`) are
taken on the CPU only: a GPU would have to synchronise.  They compute in one thread of torch (`one_thread`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

if TYPE_CHECKING:  # accounting reads rounds without a model, and must start fast
    import torch
    from torch import Tensor


Scalar = Union[float, "Tensor"]
"""A number, or one number a replicate as a tensor of shape (replicates, 1): the same formulas serve both."""

SHARED = {"shared": True}
"""Metadata of a dataclass field whose value runs that are computed together must have in common."""

PER_REPLICATE = {"per replicate": True}
"""Metadata of a dataclass field that holds a tuple with an entry for each run computed together."""


def is_known_true(condition: "Tensor") -> bool:
    """Whether a condition, a tensor of one boolean, is known to hold without waiting for a device.

    On a GPU nothing is known: the caller takes the way that is right in any case, and no number is copied.
    """
    return condition.device.type == "cpu" and bool(condition)


_MIN_DEVICE_VALUES = 2**28
_GPU_BYTES_PER_VALUE = 64
"""Bytes of a GPU's memory for each value held at a time: 16 times what a value in float32 takes."""


def max_values_at_once(values: int, where: "torch.device") -> int:
    """How many values to hold at a time: `values`, which fit a processor's caches, or what a GPU has room for.

    A GPU has no use for small pieces: the processor takes as long to ask for each of them as for a large one.
    """
    if where.type == "cpu":
        return values
    if where.type != "cuda":
        return max(values, _MIN_DEVICE_VALUES)
    import torch

    return max(values, torch.cuda.get_device_properties(where).total_memory // _GPU_BYTES_PER_VALUE)


@contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """Keep torch to one thread: its threads wait for each other in a busy loop, on a busy machine for ever."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


Stackable = TypeVar("Stackable")


def stack_signature(part: Any) -> Any:
    """Return what two parts must have in common to be stacked.

    That is all but the values of floats that are not `SHARED`, and of fields with an entry a replicate.
    """
    if isinstance(part, float):
        return float
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = [field for field in dataclasses.fields(part) if field.metadata != PER_REPLICATE]
        return type(part), tuple(
            getattr(part, field.name) if field.metadata == SHARED else stack_signature(getattr(part, field.name))
            for field in fields
        )
    return part


def stack(parts: Sequence[Stackable], dtype: "torch.dtype", device: "torch.device") -> Stackable:
    """One part for all.

    A float that is equal everywhere stays one, others become a column (R, 1); tuples with an entry a replicate
    are joined.
    """
    first: Any = parts[0]
    stacked: Any = first
    if isinstance(first, float) and any(part != first for part in parts):
        import torch

        stacked = torch.tensor(parts, dtype=dtype, device=device).unsqueeze(-1)
    elif dataclasses.is_dataclass(first) and not isinstance(first, type):
        columns = {
            field.name: sum((getattr(part, field.name) for part in parts), ())
            if field.metadata == PER_REPLICATE
            else stack([getattr(part, field.name) for part in parts], dtype, device)
            for field in dataclasses.fields(first)
        }
        stacked = dataclasses.replace(first, **columns)
    return cast(Stackable, stacked)
