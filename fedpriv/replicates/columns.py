"""Numbers that many runs computed together share, or have one each."""

from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:  # accounting reads rounds without a model, and must start fast
    from torch import Tensor

Scalar = Union[float, "Tensor"]
"""A number, or one number a replicate as a tensor of shape (replicates, 1): the same formulas serve both."""

SHARED = {"shared": True}
"""Metadata of a dataclass field whose value runs that are computed together must have in common."""

PER_REPLICATE = {"per replicate": True}
"""Metadata of a dataclass field that holds a tuple with an entry for each run computed together."""
