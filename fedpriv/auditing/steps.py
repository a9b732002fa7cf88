"""How far an audit is, and the thread that it runs in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Progress = Callable[[float], None]
"""Hears which share of the work is done."""


class Steps:
    """Counts steps that take about as long as one run of canaries."""

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress, self._total, self._done = progress, total, 0.0

    def __call__(self, steps: float = 1.0) -> None:
        self._done += steps
        self._progress(min(1.0, self._done / self._total))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's threads would wait for each other in a busy loop, and on a busy machine for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
