"""Engines by name, and what all of them do: run cells, tell an observer of their progress, return outcomes.

Each engine is imported when it is asked for, because each is heavy in its own way.

During a run glibc keeps freed memory (`mallopt`): a round of a large model allocates the vectors of the round
before, and to get and clear their pages takes longer than to compute with them.  Very long vectors still go back,
because memory for two of each is worse than a round that takes longer.

A run that needs more memory than the machine has is refused before it starts.  The need is counted from public
numbers and from what this process has already: the program and the records.  Vectors of the model's size, and the
records of a round, come on top.
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

from fedpriv.claims.ledger import make_silo_stream
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import InputError, suggestion
from fedpriv.core.extensions import load_add_on_part
from fedpriv.core.limits import LIMIT_REMEDIES, memory_limits, memory_usage
from fedpriv.engines.vectorized.checkpoints import NO_CHECKPOINTS, Checkpoints
from fedpriv.engines.vectorized.silos import NUMBERS_PER_EXTRA_VALUE, group_cells
from fedpriv.participation.orders import PublicOrder
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import Task, load_task
from fedpriv.rounds.floats import rounds_per_draw
from fedpriv.scenario.schema import Cell

_FLOAT64_BYTES = 8
_NOISE_BLOCK_COUNT = 4
"""Blocks of noise: one in use, two drawn ahead, one that is drawn."""
_NOISE_BLOCK_VALUES = 2**21
_VECTORS_PER_REPLICATE = 8
"""Vectors of a replicate in a round: its query, increments, their sum, noise, the mean, the step."""
_INPROCESS_VECTORS = 14
"""The same of the one silo and the server that compute at a time in process, in float64, messages included."""
_BYTES_PER_SILO = 2**17
"""Of a simulated silo, whatever its model."""
_SCRATCH_BYTES = 96 * 2**20
"""What torch and the increments of a few records take whatever the model's size."""
_NUMBERS_PER_RECORD = 16
"""Numbers that are computed of a record beside its features: scores, slopes, lengths, factors."""
_MIN_SHOWN_BYTES = 2**20


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a run takes at most."""

    resident: int
    """What this process has: the program and the records."""
    parts: dict[str, int]
    """What the run adds, by what it is for."""
    processes: int = 1

    @property
    def total(self) -> int:
        return self.processes * (self.resident + sum(self.parts.values()))

    def describe(self) -> str:
        named = {"the program and the records": self.resident} | self.parts
        told = ", ".join(
            f"{name} {_format_megabytes(size)}" for name, size in named.items() if size >= _MIN_SHOWN_BYTES
        )
        each = f"; each of {self.processes} processes" if self.processes > 1 else ""
        return f"{_format_megabytes(self.total)} ({told}{each})"


def estimate_memory(cells: Sequence[Cell], engine: str, workers: int = 1) -> MemoryNeed | None:
    """The most that a run of these cells takes at a time; None for an engine with processes of its own."""
    row = ENGINES[engine]
    if row.group_cells is None or not cells:
        return None
    largest: dict[str, int] = {}
    for members in row.group_cells(cells):
        group = [cells[place] for place in members]
        task = load_task(group[0])
        plan = make_plan(group[0], task.objective)
        parts = (_vectorized_memory if engine == "vectorized" else _inprocess_memory)(plan, task, group)
        if sum(parts.values()) > sum(largest.values()):
            largest = parts
    return MemoryNeed(_resident_bytes(), largest, min(workers, len(cells)))


def check_memory(cells: Sequence[Cell], engine: str, workers: int = 1) -> None:
    """Count what a run takes; InputError, with the remedy, if the machine, a control group or a limit has less."""
    there, limit = available_memory(min(workers, len(cells)))
    need = estimate_memory(cells, engine, workers)
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
        f"memory: a run takes up to {need.describe()}, and there are {_format_megabytes(there)} {here}: take "
        f"{'; or '.join(first)}"
    )


def available_memory(processes: int = 1) -> tuple[int, str]:
    """Bytes that so many processes like this one may take, and what says so: empty for the machine itself.

    A limit of a process's address space or data counts libraries that are mapped, which nothing else can have.
    """
    has, here = memory_usage(), _resident_bytes()
    there = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "")]
    for name, limit in memory_limits().items():
        own = max(0, limit - max(0, has.get(name, here) - here))
        there.append((own if name == "memory" else processes * own, LIMIT_REMEDIES[name]))
    return min(there)


def describe_available_memory() -> str:
    there, limit = available_memory()
    return f"{_format_megabytes(there)} ({limit})" if limit else _format_megabytes(there)


def _vectorized_memory(plan: Plan, task: Task, cells: Sequence[Cell]) -> dict[str, int]:
    """Replicates that the vectorized engine computes in step."""
    count = len(cells)
    size, vector = task.train.features.element_size(), plan.objective.dimension
    silos = len(plan.batch_sizes) if plan.estimator.round(1).local is not None else 1
    states = count * vector * size * (_count_optimizer_vectors(plan) + silos * _count_accumulator_vectors(plan))
    draws = max(plan.mechanism.draws(t) or 1 for t in range(1, plan.schedule.rounds + 1))
    return {
        "states": 2 * states,
        "noise": _NOISE_BLOCK_COUNT * max(_NOISE_BLOCK_VALUES, count * silos * vector * draws) * size
        if plan.noise.sources
        else 0,
        "directions and copies": count * NUMBERS_PER_EXTRA_VALUE * plan.extra_values * size,
        "rounds": count * vector * size * _VECTORS_PER_REPLICATE
        + _SCRATCH_BYTES
        + _record_bytes(plan, task, cells),
        "checkpoints": 2 * states,
    }


def _inprocess_memory(plan: Plan, task: Task, cells: Sequence[Cell]) -> dict[str, int]:
    """The apps of one cell: every silo's own state, and what is computed of one at a time."""
    size, vector, silos = task.train.features.element_size(), plan.objective.dimension, len(plan.batch_sizes)
    ahead = min(rounds_per_draw(vector, silos), plan.schedule.rounds)
    return {
        "silos": silos
        * (vector * (_FLOAT64_BYTES * _count_accumulator_vectors(plan) + 2 * size) + _BYTES_PER_SILO),
        "noise": silos * (ahead if ahead > 1 else 0) * vector * _FLOAT64_BYTES if plan.noise.sources else 0,
        "server": vector * _FLOAT64_BYTES * (_count_optimizer_vectors(plan) + _count_accumulator_vectors(plan)),
        "directions and copies": NUMBERS_PER_EXTRA_VALUE * plan.extra_values * size,
        "rounds": vector * _FLOAT64_BYTES * _INPROCESS_VECTORS + _SCRATCH_BYTES + _record_bytes(plan, task, cells),
    }


def _count_optimizer_vectors(plan: Plan) -> int:
    """Vectors of an optimizer's state."""
    return max(1, _count_tensors(plan.optimizer.start(plan.objective.initial()[:1])))


def _count_tensors(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return 1
    if hasattr(state, "__dataclass_fields__"):
        return sum(_count_tensors(getattr(state, name)) for name in state.__dataclass_fields__)
    return sum(map(_count_tensors, state)) if isinstance(state, tuple | list) else 0


def _count_accumulator_vectors(plan: Plan) -> int:
    """Vectors of a running sum, of the points that it remembers, and of a mechanism's state."""
    first = plan.estimator.round(1)
    past = plan.estimator.memory if first.split is None else 2 + first.split.rounds_per_epoch
    workload = make_silo_stream(plan, 0, plan.schedule.rounds).workload if plan.noise.sources else None
    return 1 + past + (0 if workload is None else plan.mechanism.memory_vectors(workload))


def _record_bytes(plan: Plan, task: Task, cells: Sequence[Cell]) -> int:
    """Records of a round, gathered for all that read them, what is computed of each, and of the test records."""
    size, record = task.train.features.element_size(), task.train.features[0].numel()
    orders = len({cell.seed for cell in cells}) if isinstance(plan.schedule, PublicOrder) else len(cells)
    read = sum(map(plan.record_capacity, range(len(plan.batch_sizes))))
    return size * (2 * orders * read * record + _NUMBERS_PER_RECORD * (len(cells) * read + len(task.test.labels)))


def _resident_bytes() -> int:
    """Bytes of this process; what torch and Python take where the system does not say it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 350 * 2**20
    return pages * os.sysconf("SC_PAGE_SIZE")


def _format_megabytes(size: int) -> str:
    return f"{-(-size // 10**6):,} MB"


@dataclass(frozen=True)
class IndexedOutcome:
    """A finished cell and its place in the list the engine was given."""

    index: int
    cell_outcome: CellOutcome


class Engine(Protocol):
    """Runs cells one after another or many at once, and yields each as soon as it is finished.

    The observer hears `advanced` and `evaluated` only, in the engine's own process and thread; a cell's place is
    its place in the list.
    """

    def __call__(self, cells: Sequence[Cell], observer: RunObserver) -> Iterator[IndexedOutcome]: ...


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


CellGrouping = Callable[[Sequence[Cell]], list[list[int]]]


@dataclass(frozen=True)
class EngineRow:
    """What a caller has to know of an engine."""

    group_cells: CellGrouping | None = None
    """The cells that it computes together, as places in the list; None if it has processes of its own."""
    can_connect: bool = False
    """Whether it can use a SuperLink that runs already, with records that are not here."""
    can_resume_cells: bool = False
    """Whether a cell that failed goes on from its last round: its silos and server keep what they released."""
    makes_release: bool = False
    """Whether its noise protects somebody: releases are integers, with keys of the operating system."""


ENGINES = {
    "vectorized": EngineRow(group_cells),
    "inprocess": EngineRow(lambda cells: [[place] for place in range(len(cells))]),
    "ray": EngineRow(),
    "deployment": EngineRow(can_connect=True, can_resume_cells=True, makes_release=True),
}


def find_engine_row(name: str) -> EngineRow:
    """InputError for an engine that there is not."""
    if name not in ENGINES:
        raise InputError(f"--engine {name}: known engines are {', '.join(ENGINES)}{suggestion(name, ENGINES)}")
    return ENGINES[name]


def make_engine(
    name: str, folder: Path = Path(), connection: Connection = LOCAL, checkpoints: Checkpoints = NO_CHECKPOINTS
) -> Engine:
    """The engine for a run whose results go to `folder`; InputError for a connection that it cannot use.

    `kept` is where it keeps checkpoints of cells that it is in the middle of, if it does.
    """
    if not find_engine_row(name).can_connect and connection != LOCAL:
        able = ", ".join(other for other, each in ENGINES.items() if each.can_connect)
        raise InputError(f"--engine {name}: --superlink and --root-certificates are for --engine {able}")
    if name == "vectorized":
        from fedpriv.engines.vectorized.engine import run_vectorized

        return partial(run_vectorized, checkpoints=checkpoints)
    if name == "inprocess":
        from fedpriv.engines.inprocess import run_inprocess

        return run_inprocess
    engine: Any = load_add_on_part("engine", name)
    return cast(Engine, engine) if name == "ray" else partial(engine, folder=folder, connection=connection)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_NEVER_TRIM = -1
_MAX_RETAINED_BYTES = 2**27
"""Bytes.  A heap with holes where pieces were freed can take twice what is held; longer pieces go back at once."""
_GLIBC_FUNCTIONS = ("gnu_get_libc_version", "mallopt", "malloc_trim")
_MAX_OLD_GLIBC_BYTES = 2**25  # glibc before 2.35 refuses more
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")


@contextmanager
def retain_freed_pages() -> Iterator[None]:
    """While a run is in here, memory that is freed stays with the process; afterwards it goes to the system.

    Afterwards the thresholds are those up to which glibc itself raises them in a process with long vectors.
    Nothing happens where malloc is not glibc's, or its thresholds were set by hand.
    """
    libc = _load_glibc()
    if libc is None:
        yield
        return
    _ACTIVE_RUNS.append(libc)
    if not libc.mallopt(_MMAP_THRESHOLD, _MAX_RETAINED_BYTES):
        libc.mallopt(_MMAP_THRESHOLD, _MAX_OLD_GLIBC_BYTES)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)
    try:
        yield
    finally:
        _ACTIVE_RUNS.pop()
        if not _ACTIVE_RUNS:  # a run that begins here in another thread is slower, and no more
            libc.mallopt(_MMAP_THRESHOLD, _MAX_OLD_GLIBC_BYTES)
            libc.mallopt(_TRIM_THRESHOLD, 2 * _MAX_OLD_GLIBC_BYTES)
            libc.malloc_trim(0)


def _load_glibc() -> ctypes.CDLL | None:
    if any(name in os.environ for name in _MALLOC_VARIABLES) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return None
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if all(hasattr(libc, name) for name in _GLIBC_FUNCTIONS) else None


_ACTIVE_RUNS: list[ctypes.CDLL] = []
"""An entry for each run of this process, in all threads, that wants pages to be kept."""
