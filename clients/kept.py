"""A few things that can be built again, kept in memory."""

from collections.abc import Callable
from typing import TypeVar

_KEPT = 4
Kept = TypeVar("Kept")


def kept(things: dict[str, Kept], name: str, build: Callable[[], Kept]) -> Kept:
    """`things[name]`, built if it is not there; the oldest of too many is let go."""
    if name not in things:
        things[name] = build()
        while len(things) > _KEPT:
            del things[next(iter(things))]
    return things[name]
