"""The peak of this process's resident memory, and the processor's time."""

import ctypes
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_STATUS = Path("/proc/self/status")
_REPEATS = 3


def peak() -> int:
    """In bytes.

    Linux counts the peak of the process that started this one into `ru_maxrss`, but not into VmHWM.
    """
    if _STATUS.exists():
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Start the peak anew, as Linux allows; elsewhere it is the process's own, loading included."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak of memory includes loading the data", file=sys.stderr)


class Cost(NamedTuple):
    """Of one clipped sum."""

    microseconds: float
    """Of the processor's time, per record: the median of some sums."""
    megabytes: float
    """What the process's peak rises by in the first sum."""


def cost_of(step: Callable[[], None], records: int) -> Cost:
    """`step` has been run for a batch of some other size, so that all is loaded."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier steps left would hide what this one takes
    forget_peak()
    before = peak()
    step()
    megabytes = (peak() - before) / 2**20
    taken = []
    for _ in range(_REPEATS):
        started = time.process_time()
        step()
        taken.append(time.process_time() - started)
    return Cost(1e6 * statistics.median(taken) / records, megabytes)
