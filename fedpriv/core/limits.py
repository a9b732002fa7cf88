"""Memory limits of this process: address space, data, and control groups.

A guard is the process that has a silo's records.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from fedpriv.core.errors import InputError

MIB = 2**20
GUARD_MEMORY = {"address space": 832 * MIB, "data": 320 * MIB, "memory": 352 * MIB}
"""Bytes of each limit that a guard with few records takes once it has started, without `allow.memory`.

They are measured, and rounded up.
"""
COMPILER_MEMORY = {"address space": 256 * MIB, "data": 64 * MIB, "memory": 128 * MIB}
"""Bytes that a guard needs in addition if numba is installed, whose LLVM crashes without memory."""
LIMIT_REMEDIES = {
    "address space": "`ulimit -v`, LimitAS",
    "data": "`ulimit -d`, LimitDATA",
    "memory": "mem_limit, MemoryMax",
}
"""Settings that raise each limit."""
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map",
    "error return without exception",
)
"""Parts of libraries' error messages that mean a lack of memory."""
_CGROUP_FOLDER, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1_LIMIT_FILE, _V2_LIMIT_FILE = "memory.limit_in_bytes", "memory.max"


def format_mebibytes(size: int) -> str:
    """Format a number of bytes in MiB, rounded up."""
    return f"{-(-size // MIB)} MiB"


def memory_limits() -> dict[str, int]:
    """Return the memory limits of this process in bytes, by name.

    "address space" and "data" are soft limits of the process, and "memory" is `control_group_limit`.  Limits that
    are not set or cannot be read are left out.
    """
    limits = dict[str, int | None]()
    if find_spec("resource") is not None:  # it is missing on Windows
        import resource

        for name, number in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
            limits[name] = None if (size := resource.getrlimit(number)[0]) == resource.RLIM_INFINITY else size
    limits["memory"] = control_group_limit()
    return {name: size for name, size in limits.items() if size is not None}


def check_memory_limits(policy: Path) -> None:
    """Check that a guard with few records can start under the limits of this process.

    Raises:
        InputError: A limit is too small.
    """
    for name, limit in memory_limits().items():
        needed = GUARD_MEMORY[name] + (COMPILER_MEMORY[name] if find_spec("numba") else 0)
        if limit < needed:
            raise InputError(
                f"{policy}: a guard takes {format_mebibytes(needed)} of {name}, then its records and "
                f"allow.memory, and this process may take {limit // MIB} MiB: raise the limit "
                f"({LIMIT_REMEDIES[name]}); nothing was charged"
            )


@contextmanager
def report_low_memory(policy: Path) -> Iterator[None]:
    """Check the limits of memory, and report a lack of memory in the block as an InputError.

    The limits are checked first, because libraries that lack memory do not name the limit.

    Args:
        policy: Path of the guard's policy, for the message.

    Raises:
        InputError: A limit is too small for a guard, or the block raises an error that means a lack of memory.
            Other errors of the block are raised unchanged.
    """
    check_memory_limits(policy)
    try:
        yield
    except (MemoryError, RuntimeError, SystemError, ImportError, OSError) as error:
        if not (isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)):
            raise
        raise InputError(
            f"{policy}: no memory is left for the guard, its records and its ledger: raise the limit of this "
            f"process ({', '.join(LIMIT_REMEDIES.values())}), or take fewer records; this failure charged nothing"
        ) from None


def control_group_limit(groups: Path = _CGROUP_FOLDER, membership_file: Path = _OWN_CGROUPS) -> int | None:
    """Return the smallest memory limit of this process's control groups, in bytes, or None without one.

    A control group is a folder of Linux, and a process is under the limits of its group and of those above it.
    The root is read as well, because a container may see its own group there.

    Args:
        groups: Folder where the control groups are mounted, of version 1, 2 or both.
        membership_file: File that lists the groups of the process.
    """
    try:
        lines = membership_file.read_text().splitlines()
    except OSError:
        lines = []
    limits = [_read_limit(groups / "memory" / _V1_LIMIT_FILE), _read_limit(groups / _V2_LIMIT_FILE)]
    for line in lines:
        # A line is NUMBER:CONTROLLERS:PATH, and version 2 has no controllers there.
        _, _, controllers_path = line.partition(":")
        controllers, _, path = controllers_path.partition(":")
        nested = Path(path.lstrip("/"))
        if ".." in nested.parts:
            continue  # outside of this container's view
        if "memory" in controllers.split(","):
            tops, name = [groups / "memory"], _V1_LIMIT_FILE
        elif not controllers:
            # Beside version 1, version 2 is mounted as "unified".
            tops, name = [groups, groups / "unified"], _V2_LIMIT_FILE
        else:
            continue
        limits += [_read_limit(top / entry / name) for top in tops for entry in (nested, *nested.parents)]
    return min((entry for entry in limits if entry is not None), default=None)


def memory_usage() -> dict[str, int]:
    """Return the bytes that this process uses of each limit, by its name, or {} if there is no /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return {}
    size = {name: int(number) * 1024 for name, number in re.findall(r"(Vm\w+):\s+(\d+) kB", status.read_text())}
    return {"address space": size["VmSize"], "data": size["VmData"], "memory": size["VmRSS"]}


def _read_limit(path: Path) -> int | None:
    """Return the limit in a file of a control group in bytes, or None.

    The result is None for "max", for a number of 2^60 or more, which means no limit, and for a file that is
    missing or cannot be read.
    """
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 2**60 else None
