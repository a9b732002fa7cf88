"""When a group of cells is kept: every few seconds, and for a small share of the time."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from fedpriv.running.checkpoint import Checkpoint, Checkpoints, digest_of, name_of, packed, unpacked
from fedpriv.running.observer import RunObserver
from fedpriv.scenario import Cell

_EVERY = 2.0  # seconds
_SHARE = 0.005  # of the time; what takes long to write is written less often


class Keeper:
    """The checkpoints of one group of cells."""

    def __init__(self, kept: Checkpoints, cells: Sequence[Cell], observer: RunObserver) -> None:
        self._kept, self._observer = kept, observer
        self._cells = tuple(map(digest_of, cells))
        self._name = name_of(self._cells)
        self._next: float | None = time.perf_counter() + _EVERY

    def latest(self, like: Any, device: torch.device) -> Checkpoint | None:
        """What the group goes on from, with states of the types of `like`; None where it starts anew."""
        content = self._kept.latest(self._name)
        if content is None:
            return None
        try:
            return unpacked(content, like, device)
        except ValueError as error:
            self._observer.noted(f"a checkpoint is not used, and its rounds are run again: {error}")
            return None

    def due(self, now: float) -> bool:
        """Whether it is time to keep the group; `now` is by `time.perf_counter`."""
        return self._next is not None and now >= self._next

    def keep(self, checkpoint: Checkpoint) -> None:
        """A state that cannot be kept is said once, and the group goes on without checkpoints."""
        began = time.perf_counter()
        try:
            self._kept.keep(self._name, packed(checkpoint, self._cells))
        except TypeError as error:
            self._observer.noted(f"no checkpoints of cells that are in the middle: {error}")
            self._next = None
            return
        ended = time.perf_counter()
        self._next = ended + max(_EVERY, (ended - began) / _SHARE)

    def drop(self) -> None:
        """What the group gave is written."""
        self._kept.drop(self._name)
