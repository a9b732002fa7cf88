"""What the system lets this process take: its address space, its data, its control groups."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from fedpriv.core.errors import InputError

MIB = 2**20
GUARD_MEMORY = {"address space": 832 * MIB, "data": 320 * MIB, "memory": 352 * MIB}
"""What a guard with few records takes once it has started, before `allow.memory`: measured, and a little more."""
COMPILER_MEMORY = {"address space": 256 * MIB, "data": 64 * MIB, "memory": 128 * MIB}
"""What it takes beside that where numba is installed: LLVM, which crashes where it finds no room."""
LIMIT_REMEDIES = {
    "address space": "`ulimit -v`, LimitAS",
    "data": "`ulimit -d`, LimitDATA",
    "memory": "mem_limit, MemoryMax",
}
"""Where each limit is raised."""
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map",
    "error return without exception",
)
"""How libraries say it."""
_SYSTEM_RESOURCES = {"address space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}
_CGROUP_FOLDER, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1_LIMIT_FILE, _V2_LIMIT_FILE = "memory.limit_in_bytes", "memory.max"


def format_mebibytes(size: int) -> str:
    return f"{-(-size // MIB)} MiB"


def memory_limits() -> dict[str, int]:
    """The limits of this process by name, in bytes; those that are not set are not there."""
    all_limits = {name: resource.getrlimit(number)[0] for name, number in _SYSTEM_RESOURCES.items()}
    group = resource.RLIM_INFINITY if (limit := control_group_limit()) is None else limit
    return {name: size for name, size in {**all_limits, "memory": group}.items() if size != resource.RLIM_INFINITY}


def check_memory_limits(policy: Path) -> None:
    """InputError where no guard can start, before a library is loaded that would fail in words of its own."""
    for name, limit in memory_limits().items():
        needed = GUARD_MEMORY[name] + (COMPILER_MEMORY[name] if find_spec("numba") else 0)
        if limit < needed:
            raise InputError(
                f"{policy}: a guard takes {format_mebibytes(needed)} of {name}, then its records and "
                "allow.memory, "
                f"and this process may take {format_mebibytes(limit)}: raise the limit ({LIMIT_REMEDIES[name]}); "
                "nothing was "
                "charged"
            )


@contextmanager
def report_low_memory(policy: Path) -> Iterator[None]:
    """Start a guard; InputError instead of a library's words where its limits leave no memory for it."""
    check_memory_limits(policy)
    try:
        yield
    except (MemoryError, RuntimeError, SystemError, ImportError, OSError) as error:
        if not (isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY_TEXTS)):
            raise
        raise InputError(
            f"{policy}: no memory is left for the guard, its records and its ledger: raise the limit of this "
            f"process ({', '.join(LIMIT_REMEDIES.values())}), or take fewer records; nothing was charged"
        ) from None


def control_group_limit(groups: Path = _CGROUP_FOLDER, own: Path = _OWN_CGROUPS) -> int | None:
    """Bytes that the control groups of this process may take, the smallest of all it is in; None if nobody says.

    `groups` is where the control groups are mounted, of version 1, 2 or both; `own` says in which of them the
    process is.  A container may see its own group at the root, under a path that only its host knows.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    found = [_read_limit(groups / "memory" / _V1_LIMIT_FILE), _read_limit(groups / _V2_LIMIT_FILE)]
    for line in lines:
        _, _, controllers_path = line.partition(":")
        controllers, _, path = controllers_path.partition(":")
        nested = Path(path.lstrip("/"))
        if ".." in nested.parts:
            continue  # outside of what can be seen from here
        if "memory" in controllers.split(","):
            tops, name = [groups / "memory"], _V1_LIMIT_FILE
        elif not controllers:
            tops, name = [groups, groups / "unified"], _V2_LIMIT_FILE
        else:
            continue
        found += [_read_limit(top / each / name) for top in tops for each in (nested, *nested.parents)]
    return min((each for each in found if each is not None), default=None)


def memory_usage() -> dict[str, int]:
    """What this process has now, by the names of the limits; nothing where the system does not say it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return {}
    size = {name: int(number) * 1024 for name, number in re.findall(r"(Vm\w+):\s+(\d+) kB", status.read_text())}
    return {"address space": size["VmSize"], "data": size["VmData"], "memory": size["VmRSS"]}


def _read_limit(path: Path) -> int | None:
    """The limit in a file of a control group; None for "max", a number that means it, or no file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 2**60 else None
