"""Replicates: many runs computed together, whose numbers are columns of tensors.

A component, such as an optimizer, is a frozen dataclass whose formulas broadcast, so that an optimizer whose step
is a tensor (R, 1) moves R replicates at once.  `stack` makes one component of R components that differ only in
floats and in entries for each replicate.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

if TYPE_CHECKING:  # commands of accounting import this module without torch, to start fast
    import torch
    from torch import Tensor


Scalar = Union[float, "Tensor"]
"""Number, or one number for each replicate as a tensor (R, 1), so that the same formulas serve both."""

SHARED = {"shared": True}
"""Metadata of a dataclass field whose value must be equal in all runs that are computed together."""

PER_REPLICATE = {"per replicate": True}
"""Metadata of a dataclass field that holds a tuple with an entry for each run computed together."""


def is_known_true(condition: "Tensor") -> bool:
    """Whether a condition, a tensor of one boolean, is on the CPU and true.

    A condition on another device counts as false, because reading it would wait for the device.  So False means
    that the general case has to be computed.
    """
    return condition.device.type == "cpu" and bool(condition)


_MIN_DEVICE_VALUES = 2**28
_GPU_BYTES_PER_VALUE = 64
"""Bytes of a GPU's memory for each value held at a time, 16 times the size of a float32."""


def max_values_at_once(values: int, device: "torch.device") -> int:
    """Return how many values of a long computation to hold at a time on a device.

    On another device than a CPU the result may be larger than `values`, because a small piece takes as long to
    launch as a large one.

    Args:
        values: Number of values for a CPU, such that they fit into its caches.
        device: Device that computes.
    """
    if device.type == "cpu":
        return values
    if device.type != "cuda":
        return max(values, _MIN_DEVICE_VALUES)
    import torch

    return max(values, torch.cuda.get_device_properties(device).total_memory // _GPU_BYTES_PER_VALUE)


@contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """Keep torch to one thread within this context.

    Threads of torch wait for each other in a busy loop, which takes long on a busy machine.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


Stackable = TypeVar("Stackable")


def stack_signature(component: Any) -> Any:
    """Return the data that must be equal in components to be stacked, of a component or a value in one.

    The signature of a dataclass is its type and the signatures of its fields.  A field with the metadata `SHARED`
    counts with its value, and one with `PER_REPLICATE` does not count.  Floats may differ, so that the signature
    of a float is its type.  Any other value is its own signature.

    A dataclass with further attributes, which no copy with other fields would have, has a signature that equals no
    other.
    """
    if not dataclasses.is_dataclass(component) or isinstance(component, type):
        return float if isinstance(component, float) else component
    fields = dataclasses.fields(component)
    if any(
        not isinstance(getattr(type(component), name, None), cached_property)
        for name in {
            *getattr(component, "__dict__", ()),
            *(slot for kind in type(component).__mro__ for slot in getattr(kind, "__slots__", ())),
        }
        - {field.name for field in fields}
    ):
        return object()
    return type(component), tuple(
        getattr(component, field.name)
        if field.metadata == SHARED
        else stack_signature(getattr(component, field.name))
        for field in fields
        if field.metadata != PER_REPLICATE
    )


def stack(components: Sequence[Stackable], dtype: "torch.dtype", device: "torch.device") -> Stackable:
    """Return one component for R components that differ only in floats and in entries for each replicate.

    Dataclasses are stacked field by field.  A float that is equal in all components stays a float, and other
    floats become a column (R, 1).  Tuples in `PER_REPLICATE` fields are concatenated.  Any other value is that of
    the first component.  A single component is returned as it is.

    Args:
        components: One component for each replicate, R of them, with equal `stack_signature`.
        dtype: Type of the columns.
        device: Device of the columns.
    """
    first: Any = components[0]
    if isinstance(first, float) and any(component != first for component in components):
        import torch

        return cast(Stackable, torch.tensor(components, dtype=dtype, device=device).unsqueeze(-1))
    if not dataclasses.is_dataclass(first) or isinstance(first, type) or len(components) == 1:
        return cast(Stackable, first)
    columns = {
        field.name: sum((getattr(component, field.name) for component in components), ())
        if field.metadata == PER_REPLICATE
        else stack([getattr(component, field.name) for component in components], dtype, device)
        for field in dataclasses.fields(first)
    }
    return cast(Stackable, dataclasses.replace(first, **columns))
