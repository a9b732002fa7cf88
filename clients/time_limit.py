"""How long a stranger's scenario may keep a guard busy."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_TIMERS = ((signal.ITIMER_PROF, signal.SIGPROF), (signal.ITIMER_REAL, signal.SIGALRM))


@contextmanager
def within(processor: float, clock: float) -> Iterator[None]:
    """TimeoutError in the main thread if what is inside takes more seconds of the processor, or by the clock.

    What other programs of the machine take counts by the clock only, so that a busy machine refuses nothing that
    an idle one takes.
    """

    def late(number: int, _: object) -> None:
        spent = f"{processor:g} s of the processor" if number == signal.SIGPROF else f"{clock:g} s"
        raise TimeoutError(f"it takes more than {spent}")

    before = [signal.signal(number, late) for _, number in _TIMERS]
    for (timer, _), seconds in zip(_TIMERS, (processor, clock), strict=True):
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, number), handler in zip(_TIMERS, before, strict=True):
            signal.setitimer(timer, 0.0)
            signal.signal(number, handler)
