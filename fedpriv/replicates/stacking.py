"""Many runs as one: parts that differ in numbers only become one part whose numbers are columns.

Estimators, mechanisms and optimizers are frozen dataclasses whose formulas broadcast, so an optimizer whose step
is a tensor of shape (R, 1) moves R replicates at once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch

from fedpriv.replicates.columns import PER_REPLICATE, SHARED

Part = TypeVar("Part")


def signature(part: Any) -> Any:
    """What two parts must have in common to be stacked.

    That is all but the values of floats that are not `SHARED`, and of fields with an entry a replicate.
    """
    if isinstance(part, float):
        return float
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = [field for field in dataclasses.fields(part) if field.metadata != PER_REPLICATE]
        return type(part), tuple(
            getattr(part, field.name) if field.metadata == SHARED else signature(getattr(part, field.name))
            for field in fields
        )
    return part


def stack(parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Part:
    """One part for all.

    A float that is equal everywhere stays one, others become a column (R, 1); tuples with an entry a replicate
    are joined.
    """
    first: Any = parts[0]
    stacked: Any = first
    if isinstance(first, float) and any(part != first for part in parts):
        stacked = torch.tensor(parts, dtype=dtype, device=device).unsqueeze(-1)
    elif dataclasses.is_dataclass(first) and not isinstance(first, type):
        columns = {
            field.name: sum((getattr(part, field.name) for part in parts), ())
            if field.metadata == PER_REPLICATE
            else stack([getattr(part, field.name) for part in parts], dtype, device)
            for field in dataclasses.fields(first)
        }
        stacked = dataclasses.replace(first, **columns)
    return cast(Part, stacked)
