"""The SuperNode's loop, which waits for events where Flower's waits for a time."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar
from unittest import mock

from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode import start_client_internal as loop
from flwr.supernode.cli import flower_supernode
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedpriv.engines.flower_private import SOON
from fedpriv.engines.flower_private.superlink import hand_on_whole_answers, wait_for_slow_starts

_LONGEST_WAIT = 3.0  # seconds between two looks at a SuperLink that answers "nothing" at once
_HELD = 1.0  # seconds after which such an answer was held back
P = ParamSpec("P")
R = TypeVar("R")


class Waits:
    """A stand-in for the loop's module `time`: a sleep that ends when there is something to do.

    The loop sleeps after it asked the SuperLink in vain, and while it waits for the ClientApp's reply and objects.
    A SuperLink of ours holds its answers, so that asking again at once costs nothing; others are asked after
    times that double.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._happened = threading.Event()
        self._wait, self._woke = SOON, now()

    def happened(self) -> None:
        """A reply or an object of one is there; called by any thread."""
        self._happened.set()

    def message(self) -> None:
        """The SuperLink had one."""
        self._wait = SOON

    def sleep(self, seconds: float) -> None:
        if seconds < _LONGEST_WAIT:
            self._happened.wait(seconds)
            self._happened.clear()
        else:
            self._wait = SOON if self._now() - self._woke > _HELD else min(2.0 * self._wait, _LONGEST_WAIT)
            threading.Event().wait(self._wait)
        self._woke = self._now()


def run_supernode(options: Sequence[str], bell: int) -> None:
    """`flower-supernode OPTIONS`, a byte written to `bell` for each message whose objects are all there."""
    start_parent_process_monitor(os.getppid())
    wait_for_slow_starts()
    hand_on_whole_answers()
    waits = Waits()
    pull = loop._pull_and_store_message

    def pulled(*given: Any, **named: Any) -> int | None:
        run = pull(*given, **named)
        if run is not None:
            waits.message()
            os.write(bell, b"\n")
        return run

    with (
        mock.patch.object(loop, "time", waits),
        mock.patch.object(loop, "pull_objects", partial(pull_objects, initial_backoff=SOON)),
        mock.patch.object(loop, "_pull_and_store_message", pulled),
        mock.patch.object(
            InMemoryNodeState, "store_message", _then(InMemoryNodeState.store_message, waits.happened)
        ),
        mock.patch.object(InMemoryObjectStore, "put", _then(InMemoryObjectStore.put, waits.happened)),
        mock.patch.object(sys, "argv", ["flower-supernode", *options]),
    ):
        flower_supernode()


def _then(function: Callable[P, R], afterwards: Callable[[], None]) -> Callable[P, R]:
    def both(*given: P.args, **named: P.kwargs) -> R:
        result = function(*given, **named)
        afterwards()
        return result

    return both
