"""Limit the memory that runs may take of a guard: counted before they are opened, enforced by the system.

What a run takes is counted from public numbers: the scenario, the policy, how many records the silo has and their
shape.  Where too little was counted, one answer fails, and not the process, with which all runs of the silo would
end.
"""

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from fedpriv.core.errors import InputError
from fedpriv.loss.augment import Augmented
from fedpriv.loss.estimators import rounds_of
from fedpriv.loss.smoothed import Smoothed
from fedpriv.noise.integers.increments import VALUES_TOGETHER
from fedpriv.rounds.plan import Plan

MIB = 2**20
LONGEST_STATE = 2**29
"""Bytes: half of what a row of the ledger can hold."""
LEAST, DEFAULT = 64 * MIB, 512 * MIB
_NUMBER = 8  # bytes
_UNITS = {"B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}
_VIEW = 3
"""Copies of a shard's features while they are made from its records; one of them stays."""
_BATCH = 6
"""Copies of a round's features: selected, aligned, and as integers."""
_RECORD = 5
"""Numbers for every value of a record's increment while it is evaluated, clipped and rounded."""
_STATE = 5
"""Copies of a state: as it was read, as it is next, packed, and as SQLite writes it."""
_HALVES = 2
"""The strategy that integers go through keeps as much as the mechanism that turns them into what leaves."""
_VECTORS = 16
"""Vectors of a release: the model, the query, integers, noise and what it is drawn from."""
_MODULE = 96 * MIB
"""What torch loads for the first model that is a module, and its first plan."""
_BESIDE = 128 * MIB
"""Requests that wait, and a scenario before it is known what it takes."""
_RUNS = 4
"""The most runs for which something is kept."""
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1, _V2 = "memory.limit_in_bytes", "memory.max"


def _bytes(given: object) -> object:
    """A number of bytes from "512 MiB"; anything else is left to be refused, or to be a number."""
    found = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]iB|B)", given) if isinstance(given, str) else None
    return given if found is None else int(found[1]) * _UNITS[found[2]]


def _enough(given: int) -> int:
    if given < LEAST:
        raise ValueError(f'at least "{LEAST // MIB} MiB"')
    return given


MemorySize = Annotated[int, BeforeValidator(_bytes), AfterValidator(_enough)]
"""A number of bytes, or text such as "512 MiB"."""


def mebibytes(size: int) -> str:
    return f"{-(-size // MIB)} MiB"


def taken_by(plan: Plan, silo: int, rows: int, features: int) -> int:
    """Bytes that answering one round of a plan takes at most, with all that is kept for it.

    `rows` are the silo's, of `features` numbers each, as the model sees them.

    Guarantee: a function of public numbers: no record's values are looked at, and the rows are those of the unit.
    """
    dimension = plan.objective.dimension
    draws = max(plan.kept_length(1), dimension)
    held, own = min(rows, plan.most_held(silo)), plan.objective.initial().element_size()
    return (
        _MODULE
        + _VIEW * own * rows * features
        + _NUMBER
        * (_BATCH * held * features + _RECORD * _of_record(plan) + _VECTORS * max(draws, plan.query_length))
        + _STATE * state_of(plan, silo)
    )


def state_of(plan: Plan, silo: int) -> int:
    """Bytes that a silo keeps from round to round at most."""
    first = plan.estimator.round(1)
    past = plan.estimator.memory if first.split is None else 2 + first.split.rounds_per_epoch
    workload = plan.stream_of(silo, plan.schedule.rounds).workload
    return _NUMBER * plan.objective.dimension * (1 + past + _HALVES * plan.mechanism.memory_vectors(workload))


def _of_record(plan: Plan) -> int:
    """Values of a record's increment, or features that are looked at together, where they are the most."""
    objective, most = plan.objective, max(plan.query_length, VALUES_TOGETHER)
    for points in {current.gradients for current in rounds_of(plan.estimator, plan.schedule.rounds)}:
        held = (
            objective.held(points) if isinstance(objective, Smoothed | Augmented) else objective.dimension * points
        )
        most = max(most, held)
    return most


def hold_to(memory: int) -> None:
    """Let this process take so many bytes more than it has now, and no more, for good.

    InputError where the machine, or the container, gives it less: it would be ended in the middle of a run.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return  # only Linux says it
    size = {name: int(number) * 1024 for name, number in re.findall(r"(Vm\w+):\s+(\d+) kB", status.read_text())}
    limit = limit_of()
    if limit is not None and size["VmRSS"] + memory + _BESIDE > limit:
        has = mebibytes(size["VmRSS"] + _BESIDE)
        raise InputError(
            f'allow.memory = "{mebibytes(memory)}": the guard itself and its records take {has}, and the '
            f"container or service gives {mebibytes(limit)} for all; lower allow.memory, or raise that "
            "(mem_limit, MemoryMax)"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = size["VmData"] + memory + _BESIDE
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def limit_of(groups: Path = _GROUPS, own: Path = _OWN) -> int | None:
    """Bytes that the control groups of this process may take, the smallest of all it is in; None if nobody says.

    `groups` is where the control groups are mounted, of version 1, 2 or both; `own` says in which of them the
    process is.  A container may see its own group at the root, under a path that only its host knows.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    found = [_read(groups / "memory" / _V1), _read(groups / _V2)]
    for line in lines:
        _, _, controllers_path = line.partition(":")
        controllers, _, path = controllers_path.partition(":")
        nested = Path(path.lstrip("/"))
        if ".." in nested.parts:
            continue  # outside of what can be seen from here
        if "memory" in controllers.split(","):
            tops, name = [groups / "memory"], _V1
        elif not controllers:
            tops, name = [groups, groups / "unified"], _V2
        else:
            continue
        found += [_read(top / each / name) for top in tops for each in (nested, *nested.parents)]
    return min((each for each in found if each is not None), default=None)


def _read(path: Path) -> int | None:
    """The limit in a file of a control group; None for "max", a number that means it, or no file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 2**60 else None


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
        if taken + sum(size for size, _ in others.values()) > self.size or len(others) >= _RUNS:
            for _, each in others.values():
                each()
            others = {}
        self._taken = others | own
