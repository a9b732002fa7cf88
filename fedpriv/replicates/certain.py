"""Shortcuts that need an answer from the data, where the answer is at hand."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def certain(condition: "Tensor") -> bool:
    """Whether a condition, a tensor of one boolean, is known to hold without waiting for a device.

    On a GPU nothing is known: whoever asks takes the way that is right in any case, and no number is copied.
    """
    return condition.device.type == "cpu" and bool(condition)
