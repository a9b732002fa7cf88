"""The peak of this process's resident memory."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


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
