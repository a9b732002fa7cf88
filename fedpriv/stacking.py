"""Many runs as one: parts that differ in numbers only become one part whose numbers are columns.

Estimators, mechanisms and optimizers are frozen dataclasses whose formulas broadcast, so an optimizer whose step
is a tensor of shape (R, 1) moves R replicates at once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch

from fedpriv.rounds import SHARED

Part = TypeVar("Part")


def signature(part: Any) -> Any:
    """What two parts must have in common to be stacked: all but the values of floats that are not `SHARED`."""
    if isinstance(part, float):
        return float
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = dataclasses.fields(part)
        return type(part), tuple(
            getattr(part, field.name) if field.metadata == SHARED else signature(getattr(part, field.name))
            for field in fields
        )
    return part


def stack(parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Part:
    """One part for all: a float that is equal everywhere stays one, others become a column (R, 1)."""
    first: Any = parts[0]
    stacked: Any = first
    if isinstance(first, float) and any(part != first for part in parts):
        stacked = torch.tensor(parts, dtype=dtype, device=device).unsqueeze(-1)
    elif dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        columns = {name: stack([getattr(part, name) for part in parts], dtype, device) for name in names}
        stacked = dataclasses.replace(first, **columns)
    return cast(Part, stacked)
