"""Strategies C on integers: what a mechanism's fresh noise is added to."""

from fedpriv.exact.strategies.aligned import IntegerAligned
from fedpriv.exact.strategies.banded import IntegerBanded
from fedpriv.exact.strategies.base import Group, IntegerStrategy, IntState, Load, Reach, skipped
from fedpriv.exact.strategies.buffered import IntegerBuffered
from fedpriv.exact.strategies.leaf import IntegerLeaf
from fedpriv.exact.strategies.prefix import IntegerPrefix, IntegerScheduled
from fedpriv.exact.strategies.tree import IntegerTree

__all__ = [
    "Group",
    "IntState",
    "IntegerAligned",
    "IntegerBanded",
    "IntegerBuffered",
    "IntegerLeaf",
    "IntegerPrefix",
    "IntegerScheduled",
    "IntegerStrategy",
    "IntegerTree",
    "Load",
    "Reach",
    "skipped",
]
