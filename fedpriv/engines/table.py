"""Engines by name, and what all of them do: run cells, tell an observer of their progress, return outcomes.

Each engine is imported when it is asked for, because each is heavy in its own way.

During a run glibc is made to keep freed memory (`mallopt`), so that rounds do not fault in new pages: it asks the
system for every long piece of memory anew and gives it back when it is freed.  A round of a large model allocates
the vectors of the round before, and to get and clear their pages takes longer than to compute with them.  Very
long vectors still go back: memory for two of each is worse than a round that takes longer.

Say what memory a run takes before it starts, and refuse one that the machine cannot hold.

All is counted from public numbers and from what this process has already: the program and the records, which are
loaded when a scenario is checked.  What comes on top are vectors of the model's size, and the records of a round.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from fedpriv.claims.ledger import stream_of
from fedpriv.claims.outcome import Finished, RunObserver
from fedpriv.core.errors import InputError, suggestion
from fedpriv.core.extensions import added
from fedpriv.core.limits import REMEDIES, limits, taken
from fedpriv.engines.vectorized.checkpoints import NO_CHECKPOINTS, Checkpoints
from fedpriv.engines.vectorized.silos import BESIDE_COPIES, groups_of
from fedpriv.participation.orders import PublicOrder
from fedpriv.plan.plan import Plan, plan_of
from fedpriv.plan.task import Task, task_of_cell
from fedpriv.rounds.floats import rounds_ahead
from fedpriv.scenario.schema import Cell

_WIDE = 8
_FEED = 4
"""Blocks of noise: one in use, two drawn ahead, one that is drawn."""
_FEED_VALUES = 2**21
_WORK = 8
"""Vectors of a replicate in a round: its query, increments, their sum, noise, the mean, the step."""
_PARTS = 14
"""The same of the one silo and the server that compute at a time in process, in float64, messages included."""
_CONTAINERS = 2**17
"""Of a simulated silo, whatever its model."""
_SCRATCH = 96 * 2**20
"""What torch and the increments of a few records take whatever the model's size."""
_BESIDE = 16
"""Numbers that are computed of a record beside its features: scores, slopes, lengths, factors."""
_SHOWN = 2**20


@dataclass(frozen=True)
class Need:
    """Bytes that a run takes at most."""

    here: int
    """What this process has: the program and the records."""
    parts: dict[str, int]
    """What the run adds, by what it is for."""
    processes: int = 1

    @property
    def total(self) -> int:
        return self.processes * (self.here + sum(self.parts.values()))

    def words(self) -> str:
        named = {"the program and the records": self.here} | self.parts
        told = ", ".join(f"{name} {_mb(size)}" for name, size in named.items() if size >= _SHOWN)
        each = f"; each of {self.processes} processes" if self.processes > 1 else ""
        return f"{_mb(self.total)} ({told}{each})"


def need_of(cells: Sequence[Cell], engine: str, workers: int = 1) -> Need | None:
    """The most that a run of these cells takes at a time; None for an engine with processes of its own."""
    row = ENGINES[engine]
    if row.groups is None or not cells:
        return None
    largest: dict[str, int] = {}
    for members in row.groups(cells):
        group = [cells[place] for place in members]
        task = task_of_cell(group[0])
        plan = plan_of(group[0], task.objective)
        parts = (_together if engine == "vectorized" else _in_process)(plan, task, group)
        if sum(parts.values()) > sum(largest.values()):
            largest = parts
    return Need(_resident(), largest, min(workers, len(cells)))


def check_memory(cells: Sequence[Cell], engine: str, workers: int = 1) -> None:
    """Count what a run takes; InputError, with the remedy, if the machine, a control group or a limit has less."""
    there, limit = memory_there(min(workers, len(cells)))
    need = need_of(cells, engine, workers)
    if need is None or need.total <= there:
        return
    remedies = {
        "fewer processes (--workers)": need.processes > 1,
        "fewer cells at a time (--set seeds=1, a narrower sweep; --resume with the others)": len(cells) > 1,
        'run.dtype = "float32"': cells[0].run.dtype == "float64",
        "--engine vectorized, which keeps no silo by itself": engine == "inprocess",
        "a smaller model or batch, or a machine with more": True,
    }
    first, here = [remedy for remedy, fits in remedies.items() if fits][:2], f"here ({limit})" if limit else "here"
    raise InputError(
        f"memory: a run takes up to {need.words()}, and there are {_mb(there)} {here}: take {'; or '.join(first)}"
    )


def memory_there(processes: int = 1) -> tuple[int, str]:
    """Bytes that so many processes like this one may take, and what says so: empty for the machine itself.

    A limit of a process's address space or data counts libraries that are mapped, which nothing else can have.
    """
    has, here = taken(), _resident()
    there = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "")]
    for name, limit in limits().items():
        own = max(0, limit - max(0, has.get(name, here) - here))
        there.append((own if name == "memory" else processes * own, REMEDIES[name]))
    return min(there)


def memory_words() -> str:
    there, limit = memory_there()
    return f"{_mb(there)} ({limit})" if limit else _mb(there)


def _together(plan: Plan, task: Task, cells: Sequence[Cell]) -> dict[str, int]:
    """Replicates that the vectorized engine computes in step."""
    count = len(cells)
    size, vector = task.train.features.element_size(), plan.objective.dimension
    silos = len(plan.batch_sizes) if plan.estimator.round(1).local is not None else 1
    states = count * vector * size * (_of_optimizer(plan) + silos * _of_sums(plan))
    draws = max(plan.mechanism.draws(t) or 1 for t in range(1, plan.schedule.rounds + 1))
    return {
        "states": 2 * states,
        "noise": _FEED * max(_FEED_VALUES, count * silos * vector * draws) * size if plan.noise.sources else 0,
        "directions and copies": count * BESIDE_COPIES * plan.beside * size,
        "rounds": count * vector * size * _WORK + _SCRATCH + _of_records(plan, task, cells),
        "checkpoints": 2 * states,
    }


def _in_process(plan: Plan, task: Task, cells: Sequence[Cell]) -> dict[str, int]:
    """The apps of one cell: every silo's own state, and what is computed of one at a time."""
    size, vector, silos = task.train.features.element_size(), plan.objective.dimension, len(plan.batch_sizes)
    ahead = min(rounds_ahead(vector, silos), plan.schedule.rounds)
    return {
        "silos": silos * (vector * (_WIDE * _of_sums(plan) + 2 * size) + _CONTAINERS),
        "noise": silos * (ahead if ahead > 1 else 0) * vector * _WIDE if plan.noise.sources else 0,
        "server": vector * _WIDE * (_of_optimizer(plan) + _of_sums(plan)),
        "directions and copies": BESIDE_COPIES * plan.beside * size,
        "rounds": vector * _WIDE * _PARTS + _SCRATCH + _of_records(plan, task, cells),
    }


def _of_optimizer(plan: Plan) -> int:
    """Vectors of an optimizer's state."""
    return max(1, _tensors(plan.optimizer.start(plan.objective.initial()[:1])))


def _tensors(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return 1
    if hasattr(state, "__dataclass_fields__"):
        return sum(_tensors(getattr(state, name)) for name in state.__dataclass_fields__)
    return sum(map(_tensors, state)) if isinstance(state, tuple | list) else 0


def _of_sums(plan: Plan) -> int:
    """Vectors of a running sum, of the points that it remembers, and of a mechanism's state."""
    first = plan.estimator.round(1)
    past = plan.estimator.memory if first.split is None else 2 + first.split.rounds_per_epoch
    workload = stream_of(plan, 0, plan.schedule.rounds).workload if plan.noise.sources else None
    return 1 + past + (0 if workload is None else plan.mechanism.memory_vectors(workload))


def _of_records(plan: Plan, task: Task, cells: Sequence[Cell]) -> int:
    """Records of a round, gathered for all that read them, what is computed of each, and of the test records."""
    size, record = task.train.features.element_size(), task.train.features[0].numel()
    orders = len({cell.seed for cell in cells}) if isinstance(plan.schedule, PublicOrder) else len(cells)
    read = sum(map(plan.most_held, range(len(plan.batch_sizes))))
    return size * (2 * orders * read * record + _BESIDE * (len(cells) * read + len(task.test.labels)))


def _resident() -> int:
    """Bytes of this process; what torch and Python take where the system does not say it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 350 * 2**20
    return pages * os.sysconf("SC_PAGE_SIZE")


def _mb(size: int) -> str:
    return f"{-(-size // 10**6):,} MB"


@dataclass(frozen=True)
class Outcome:
    """A finished cell and its place in the list the engine was given."""

    index: int
    finished: Finished


class Engine(Protocol):
    """Runs cells one after another or many at once, and yields each as soon as it is finished.

    The observer hears `advanced` and `evaluated` only, in the engine's own process and thread; a cell's place is
    its place in the list.
    """

    def __call__(self, cells: Sequence[Cell], observer: RunObserver) -> Iterator[Outcome]: ...


@dataclass(frozen=True)
class Connection:
    """A SuperLink that runs already, and the certificates it is trusted by; nothing for what is started here.

    InputError for what is no address, and for certificates without one or that are not there.
    """

    superlink: str | None = None
    root_certificates: Path | None = None

    def __post_init__(self) -> None:
        address, certificates = self.superlink, self.root_certificates
        if address is not None and not re.fullmatch(r"unix:.+|.+:\d+", address):
            raise InputError(f"--superlink {address}: expected unix:SOCKET, or HOST:PORT of somebody's SuperLink")
        if certificates is not None and (address is None or not certificates.is_file()):
            raise InputError(f"--root-certificates {certificates}: expected a file, and --superlink with it")


LOCAL = Connection()
"""Everything is started here."""


Grouping = Callable[[Sequence[Cell]], list[list[int]]]


@dataclass(frozen=True)
class EngineRow:
    """What a caller has to know of an engine."""

    groups: Grouping | None = None
    """The cells that it computes together, as places in the list; None if it has processes of its own."""
    connects: bool = False
    """Whether it can use a SuperLink that runs already, with records that are not here."""
    resumes_cells: bool = False
    """Whether a cell that failed goes on from its last round: its silos and server keep what they released."""
    releases: bool = False
    """Whether its noise protects somebody: releases are integers, with keys of the operating system."""


ENGINES = {
    "vectorized": EngineRow(groups_of),
    "inprocess": EngineRow(lambda cells: [[place] for place in range(len(cells))]),
    "ray": EngineRow(),
    "deployment": EngineRow(connects=True, resumes_cells=True, releases=True),
}


def engine_row(name: str) -> EngineRow:
    """InputError for an engine that there is not."""
    if name not in ENGINES:
        raise InputError(f"--engine {name}: known engines are {', '.join(ENGINES)}{suggestion(name, ENGINES)}")
    return ENGINES[name]


def engine_named(
    name: str, folder: Path = Path(), connection: Connection = LOCAL, kept: Checkpoints = NO_CHECKPOINTS
) -> Engine:
    """The engine for a run whose results go to `folder`; InputError for a connection that it cannot use.

    `kept` is where it keeps checkpoints of cells that it is in the middle of, if it does.
    """
    if not engine_row(name).connects and connection != LOCAL:
        able = ", ".join(other for other, each in ENGINES.items() if each.connects)
        raise InputError(f"--engine {name}: --superlink and --root-certificates are for --engine {able}")
    if name == "vectorized":
        from fedpriv.engines.vectorized.engine import run_vectorized

        return partial(run_vectorized, kept=kept)
    if name == "inprocess":
        from fedpriv.engines.inprocess import run_inprocess

        return run_inprocess
    engine: Any = added("engine", name)
    return cast(Engine, engine) if name == "ray" else partial(engine, folder=folder, connection=connection)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_NEVER = -1
_LONGEST_KEPT = 2**27
"""Bytes.  A heap with holes where pieces were freed can take twice what is held; longer pieces go back at once."""
_NAMES = ("gnu_get_libc_version", "mallopt", "malloc_trim")
_LONGEST_ALLOWED = 2**25  # glibc before 2.35 refuses more
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")


@contextmanager
def kept_pages() -> Iterator[None]:
    """While a run is in here, memory that is freed stays with the process; afterwards it goes to the system.

    Afterwards the thresholds are those up to which glibc itself raises them in a process with long vectors.
    Nothing happens where malloc is not glibc's, or its thresholds were set by hand.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    _USERS.append(libc)
    if not libc.mallopt(_MMAP_THRESHOLD, _LONGEST_KEPT):
        libc.mallopt(_MMAP_THRESHOLD, _LONGEST_ALLOWED)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        _USERS.pop()
        if not _USERS:  # a run that begins here in another thread is slower, and no more
            libc.mallopt(_MMAP_THRESHOLD, _LONGEST_ALLOWED)
            libc.mallopt(_TRIM_THRESHOLD, 2 * _LONGEST_ALLOWED)
            libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if all(hasattr(libc, name) for name in _NAMES) else None


_USERS: list[ctypes.CDLL] = []
"""An entry for each run of this process, in all threads, that wants pages to be kept."""
