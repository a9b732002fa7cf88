"""How long a stranger's scenario may keep a guard busy."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOK = 0.1  # seconds


@contextmanager
def within(processor: float, clock: float) -> Iterator[None]:
    """TimeoutError in the main thread if what is inside takes more seconds of the processor, or by the clock.

    What other programs take of the machine, and other threads of this one, counts by the clock only: a busy one
    refuses nothing that an idle one takes.  Who swallows the error gets it again.
    """
    used, began, over = time.thread_time(), time.monotonic(), False

    def look(*_: object) -> None:
        if over:
            return
        if time.thread_time() - used > processor:
            raise TimeoutError(f"it takes more than {processor:g} s of the processor")
        if time.monotonic() - began > clock:
            raise TimeoutError(f"it takes more than {clock:g} s")

    before = signal.signal(signal.SIGALRM, look)

    def stop() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

    try:
        signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
        try:
            yield
        finally:
            over = True
            stop()
    except TimeoutError:  # it may have come on the way out, before the end was noted
        over = True
        stop()
        raise
