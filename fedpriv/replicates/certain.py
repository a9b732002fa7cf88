"""Shortcuts that need an answer from the data, where the answer is at hand."""

from typing import TYPE_CHECKING

from fedpriv.replicates.columns import Scalar

if TYPE_CHECKING:
    from torch import Tensor


def certain(condition: "Tensor") -> bool:
    """Whether a condition, a tensor of one boolean, is known to hold without waiting for a device.

    On a GPU nothing is known: whoever asks takes the way that is right in any case, and no number is copied.
    """
    return condition.device.type == "cpu" and bool(condition)


def never_above(values: "Tensor", bound: Scalar) -> bool:
    """Whether no value is above its bound, or NaN, as far as `certain` knows; a tensor's bounds broadcast."""
    if not values.numel():
        return True
    if isinstance(bound, float):
        return values.is_cpu and values.max().item() <= bound  # a third of the time of tensors of booleans
    return certain((values <= bound).all())
