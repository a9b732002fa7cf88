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


class Room:
    """The bytes that the runs of a silo share: what is kept for some makes way for what others take."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[str, tuple[int, Callable[[], object]]] = {}

    def make_way(self, name: str, taken: int, forget: Callable[[], object]) -> None:
        """Note that a run takes so many bytes, and let go what is kept for others if all do not fit.

        `forget` lets go all that is kept for this one.
        """
        own = {name: (taken, forget)}
        others = {other: noted for other, noted in self._taken.items() if other != name}
        if taken + sum(size for size, _ in others.values()) > self.size or len(others) >= _KEPT:
            for _, each in others.values():
                each()
            others = {}
        self._taken = others | own
