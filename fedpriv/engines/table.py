"""Engines by name, the memory that a run needs, and the retention of freed memory during a run.

A cell is one run of a scenario: a value of each swept key, and a seed.  A group is the cells that an engine
computes together, as replicates.  Each silo, a party that holds records, keeps a running sum over rounds, which is
released with the noise of a mechanism.

`check_memory` refuses a run that needs more memory than there is, before the run starts, on engines in this
process.  The need of each process is the memory that this process has already, plus an estimate for vectors of
the model's size and for the records of a round.

`retain_freed_pages` makes glibc keep freed memory during a run (`mallopt`).  A round allocates vectors as long as
those of the round before, and getting and clearing their pages can take longer than computing with them.
"""

import ctypes
import mmap
import os
import re
import sys
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
from fedpriv.plan.plan import Plan, draw_absences, make_plan
from fedpriv.plan.task import Task, load_task
from fedpriv.rounds.floats import rounds_per_draw
from fedpriv.scenario.schema import Cell

_FLOAT64_BYTES = 8
_NOISE_BLOCK_COUNT = 4
"""Number of blocks of noise in the estimate: one in use, two prefetched, and one for copies."""
_NOISE_BLOCK_VALUES = 2**21
"""Most values of a block of noise, unless one round has more."""
_VECTORS_PER_REPLICATE = 8
"""Vectors of a replicate in a round: query, increments, sum, noise, mean, step, two temporary ones."""
_INPROCESS_VECTORS = 14
"""Float64 vectors of one silo and of the server in a round of the in-process engine, with messages."""
_BYTES_PER_SILO = 2**17
"""Bytes of a simulated silo besides its vectors."""
_SCRATCH_BYTES = 96 * 2**20
"""Bytes of torch and of the increments of a few records, whatever the model's size."""
_NUMBERS_PER_RECORD = 16
"""Numbers computed for a record besides its features: scores, output gradients, lengths, factors."""
_MIN_SHOWN_BYTES = 2**20


@dataclass(frozen=True)
class MemoryNeed:
    """Estimate of the largest number of bytes that a run takes."""

    resident: int
    """Bytes that this process has: the program and the records."""
    parts: dict[str, int]
    """Bytes that the run adds in one process, by purpose."""
    processes: int = 1
    """Number of processes that take these bytes at the same time."""

    @property
    def total(self) -> int:
        return self.processes * (self.resident + sum(self.parts.values()))

    def describe(self) -> str:
        """Describe the need in megabytes for a person, with the parts of at least 1 MiB."""
        size_by_part = {"the program and the records": self.resident} | self.parts
        sizes = ", ".join(
            f"{name} {_format_megabytes(size)}" for name, size in size_by_part.items() if size >= _MIN_SHOWN_BYTES
        )
        process_note = f"; each of {self.processes} processes" if self.processes > 1 else ""
        return f"{_format_megabytes(self.total)} ({sizes}{process_note})"


def estimate_memory(cells: Sequence[Cell], engine: str, workers: int = 1) -> MemoryNeed | None:
    """Estimate the largest memory of a run of these cells, or return None if there is no estimate.

    A process computes one group of cells at a time, and counts with the need of the largest group.  The result is
    None for an engine with processes of its own, and for no cells.

    Args:
        cells: Cells of the run.
        engine: Name of the engine, a key of `ENGINES`.
        workers: Number of processes that run groups of cells at once.

    Raises:
        InputError: There is no such engine, or a cell cannot be computed by it, loaded or planned.
    """
    engine_row = find_engine_row(engine)
    if engine_row.group_cells is None or not cells:
        return None
    largest, groups = dict[str, int](), engine_row.group_cells(cells)
    for members in groups:
        group = [cells[index] for index in members]
        task, measure = load_task(group[0]), _vectorized_memory if engine == "vectorized" else _inprocess_memory
        parts = measure(make_plan(group[0], task.objective), task, group)
        if sum(parts.values()) > sum(largest.values()):
            largest = parts
    return MemoryNeed(_resident_bytes(), largest, min(workers, len(groups)))


def check_memory(cells: Sequence[Cell], engine: str, workers: int = 1) -> MemoryNeed | None:
    """Estimate the memory of a run, and check that it is available.

    Args:
        cells: Cells of the run.
        engine: Name of the engine, a key of `ENGINES`.
        workers: Number of processes that run groups of cells at once.

    Returns:
        The estimate, or None if there is none for this engine or for no cells (`estimate_memory`).

    Raises:
        InputError: There is too little memory, or `estimate_memory` refuses the cells.
    """
    need = estimate_memory(cells, engine, workers)
    available, limit = available_memory(1 if need is None else need.processes)
    if need is None or need.total <= available:
        return need
    remedies = {
        "fewer processes (--workers)": need.processes > 1,
        "fewer cells at a time (--set seeds=1, or a narrower sweep)": (len(cells) > 1 and engine == "vectorized"),
        'run.dtype = "float32"': cells[0].run.dtype == "float64",
        "--engine vectorized, which keeps no silo by itself": (
            engine == "inprocess"
            and cells[0].run.arithmetic == "float"
            and cells[0].absence_key is None  # an absent silo has noise of its own
            and make_plan(cells[0], load_task(cells[0]).objective).estimator.round(1).local is None
        ),
        "a smaller model or batch, or a machine with more": True,
    }
    advice, location = (
        [remedy for remedy, fits in remedies.items() if fits][:2],
        f"here ({limit})" if limit else "here",
    )
    raise InputError(
        f"memory: a run takes up to {need.describe()}, and there are {_format_megabytes(available)} {location}: "
        f"take {'; or '.join(advice)}"
    )


def available_memory(processes: int = 1) -> tuple[int, str]:
    """Return the memory for `processes` processes like this one in bytes, and the setting that limits it.

    The memory is the least of the machine's (used or not), of the control group's limit, and of `processes` times
    each limit of one process.  What counts against a limit besides resident memory, such as mapped libraries, is
    subtracted from it.  The setting is a text such as "mem_limit, MemoryMax", or "" for the machine's memory.

    Args:
        processes: Number of processes that run at the same time.
    """
    usage, resident = memory_usage(), _resident_bytes()
    has_sysconf = hasattr(os, "sysconf")  # not on Windows, where the machine's memory counts as unlimited
    available = [(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE if has_sysconf else sys.maxsize, "")]
    for name, limit in memory_limits().items():
        allowance = max(0, limit - max(0, usage.get(name, resident) - resident))
        # All processes share the memory of a control group; the other limits hold for each process by itself.
        available.append((allowance if name == "memory" else processes * allowance, LIMIT_REMEDIES[name]))
    return min(available)


def describe_available_memory() -> str:
    """Describe the memory that this process may take, with the limit that applies."""
    available, limit = available_memory()
    if available == sys.maxsize:
        return "an unknown amount"
    return f"{_format_megabytes(available)} ({limit})" if limit else _format_megabytes(available)


def _vectorized_memory(plan: Plan, task: Task, cells: Sequence[Cell]) -> dict[str, int]:
    """Estimate the bytes of the vectorized engine for one group of replicates, by purpose.

    The state of a replicate, a cell of the group, has the vectors of the optimizer, the running sum, past rounds
    and the mechanism.  If silos take local steps, all of these but the optimizer's count for each silo.  States
    count twice, before and after a round, and twice again in a checkpoint.  A silo that is absent in some round,
    and adds noise, has the state of its noise (`absence_corrections`).  Directions and copies are values that a
    loss makes besides increments, such as random directions or augmented copies of records.

    Args:
        plan: Plan of the group's first cell.
        task: Records and objective of that cell.
        cells: Cells of the group, one replicate each.

    Returns:
        Bytes that the run adds, by purpose.
    """
    count, size, vector = len(cells), task.train.features.element_size(), plan.objective.dimension
    absent_silos = {
        silo
        for cell in cells
        if plan.noise.sources and not cell.algorithm.trust_setting.noise_at_server
        for silo in draw_absences(cell).rounds
    }
    silos = len(plan.batch_sizes) if plan.estimator.round(1).local is not None else 1
    states = count * vector * size * (_count_optimizer_vectors(plan) + silos * _count_accumulator_vectors(plan))
    draws = max(plan.mechanism.draws(t) or 1 for t in range(1, plan.schedule.rounds + 1))
    return {
        "states": 2 * states,
        "noise": _NOISE_BLOCK_COUNT * max(_NOISE_BLOCK_VALUES, count * silos * vector * draws) * size
        if plan.noise.sources
        else 0,
        "absent silos": count * vector * size * len(absent_silos) * _count_accumulator_vectors(plan),
        "directions and copies": count * NUMBERS_PER_EXTRA_VALUE * plan.extra_values * size,
        "rounds": count * vector * size * _VECTORS_PER_REPLICATE
        + _SCRATCH_BYTES
        + _record_bytes(plan, task, cells),
        "checkpoints": 2 * states,
    }


def _inprocess_memory(plan: Plan, task: Task, cells: Sequence[Cell]) -> dict[str, int]:
    """Estimate the bytes of the in-process engine for one cell, by purpose.

    All silos have their own state, but one silo or the server computes at a time.
    """
    size, vector, silos = task.train.features.element_size(), plan.objective.dimension, len(plan.batch_sizes)
    prefetched_rounds = min(rounds_per_draw(vector, silos), plan.schedule.rounds)
    return {
        "silos": silos
        * (vector * (_FLOAT64_BYTES * _count_accumulator_vectors(plan) + 2 * size) + _BYTES_PER_SILO),
        "noise": silos * (prefetched_rounds if prefetched_rounds > 1 else 0) * vector * _FLOAT64_BYTES
        if plan.noise.sources
        else 0,
        "server": vector * _FLOAT64_BYTES * (_count_optimizer_vectors(plan) + _count_accumulator_vectors(plan)),
        "directions and copies": NUMBERS_PER_EXTRA_VALUE * plan.extra_values * size,
        "rounds": vector * _FLOAT64_BYTES * _INPROCESS_VECTORS + _SCRATCH_BYTES + _record_bytes(plan, task, cells),
    }


def _count_optimizer_vectors(plan: Plan) -> int:
    """Count the vectors of an optimizer's state, at least 1, in the state of a model of one number."""
    return max(1, _count_tensors(plan.optimizer.start(plan.objective.initial()[:1])))


def _count_tensors(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return 1
    if hasattr(state, "__dataclass_fields__"):
        return sum(_count_tensors(getattr(state, name)) for name in state.__dataclass_fields__)
    return sum(map(_count_tensors, state)) if isinstance(state, tuple | list) else 0


def _count_accumulator_vectors(plan: Plan) -> int:
    """Upper bound on the vectors of a running sum, the past vectors, and the mechanism state."""
    first_round = plan.estimator.round(1)
    past_vectors = plan.estimator.memory if first_round.split is None else 2 + first_round.split.rounds_per_epoch
    workload = make_silo_stream(plan, 0, plan.schedule.rounds).workload if plan.noise.sources else None
    return 1 + past_vectors + (0 if workload is None else plan.mechanism.memory_vectors(workload))


def _record_bytes(plan: Plan, task: Task, cells: Sequence[Cell]) -> int:
    """Estimate the bytes of a round's records and of the numbers computed for each record.

    Records are gathered once for each order of records, or for each cell if they are drawn, and are twice in
    memory.  The numbers include those computed for the test records.
    """
    size, record_values = task.train.features.element_size(), task.train.features[0].numel()
    orders = len({cell.seed for cell in cells}) if isinstance(plan.schedule, PublicOrder) else len(cells)
    records_per_round = sum(map(plan.record_capacity, range(len(plan.batch_sizes))))
    return size * (
        2 * orders * records_per_round * record_values
        + _NUMBERS_PER_RECORD * len(cells) * (records_per_round + len(task.test.labels))
    )


def _resident_bytes() -> int:
    """Bytes of this process, or 350 MiB for torch and Python if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 350 * 2**20
    return pages * mmap.PAGESIZE


def _format_megabytes(size: int) -> str:
    return f"{-(-size // 10**6):,} MB"


@dataclass(frozen=True)
class IndexedOutcome:
    """Outcome of a finished cell, with its index in the engine's list of cells."""

    index: int
    cell_outcome: CellOutcome


class Engine(Protocol):
    """Function that runs cells, one by one or many at once, and yields each outcome when it is ready.

    The observer receives `advanced`, `evaluated`, `notified`, and `lost` if workers die.  A cell is named by its
    index in the list.
    """

    def __call__(self, cells: Sequence[Cell], observer: RunObserver) -> Iterator[IndexedOutcome]: ...


@dataclass(frozen=True)
class Connection:
    """Address of a running SuperLink and the root certificates that authenticate it.

    Without an address, a run whose engine needs a SuperLink starts its own.

    Raises:
        InputError: The address has another form, or certificates are given without an address or are no file.
    """

    superlink: str | None = None
    """Address unix:SOCKET or HOST:PORT, or None for a SuperLink of the run's own."""
    root_certificates: Path | None = None
    """File of the certificates, or None if none are given."""

    def __post_init__(self) -> None:
        address, certificates = self.superlink, self.root_certificates
        if address is not None and not re.fullmatch(r"unix:.+|.+:\d+", address):
            raise InputError(f"--superlink {address}: expected unix:SOCKET, or HOST:PORT of somebody's SuperLink")
        if certificates is not None and (address is None or not certificates.is_file()):
            raise InputError(f"--root-certificates {certificates}: expected a file, and --superlink with it")


LOCAL = Connection()
"""Connection of a run that starts all its processes itself."""


CellGrouping = Callable[[Sequence[Cell]], list[list[int]]]


@dataclass(frozen=True)
class EngineRow:
    """Properties of an engine."""

    group_cells: CellGrouping | None = None
    """Grouping of cells, or None without one."""
    can_connect: bool = False
    """Whether the engine can use a running SuperLink, whose silos have their own records."""
    can_resume_cells: bool = False
    """Whether a failed cell continues from its last round, because silos and server store their releases."""
    makes_release: bool = False
    """Whether the noise protects real records: integer releases with keys of the operating system."""


ENGINES = {
    "vectorized": EngineRow(group_cells),
    "inprocess": EngineRow(lambda cells: [[place] for place in range(len(cells))]),
    "ray": EngineRow(),
    "deployment": EngineRow(can_connect=True, can_resume_cells=True, makes_release=True),
}


def find_engine_row(name: str) -> EngineRow:
    """Return the properties of an engine.

    Raises:
        InputError: There is no engine of this name.
    """
    if name not in ENGINES:
        raise InputError(f"--engine {name}: known engines are {', '.join(ENGINES)}{suggestion(name, ENGINES)}")
    return ENGINES[name]


def make_engine(
    name: str, folder: Path = Path(), connection: Connection = LOCAL, checkpoints: Checkpoints = NO_CHECKPOINTS
) -> Engine:
    """Make the function that runs cells, by the name of its engine.

    Args:
        name: Name of the engine, a key of `ENGINES`.
        folder: Folder of the results, used by "deployment" only.
        connection: SuperLink of the run, which only engines that can connect take.
        checkpoints: Store of checkpoints of unfinished cells, used by "vectorized" only.

    Raises:
        InputError: There is no engine of this name, its add-on is not installed, or it cannot use the connection.
    """
    if not find_engine_row(name).can_connect and connection != LOCAL:
        connectable = ", ".join(other for other, engine_row in ENGINES.items() if engine_row.can_connect)
        raise InputError(f"--engine {name}: --superlink and --root-certificates are for --engine {connectable}")
    if name == "vectorized":
        from fedpriv.engines.vectorized.engine import run_vectorized

        return partial(run_vectorized, checkpoints=checkpoints)
    if name == "inprocess":
        from fedpriv.engines.inprocess import run_inprocess

        return run_inprocess
    engine: Any = load_add_on_part("engine", name)
    return cast(Engine, engine) if name == "ray" else partial(engine, folder=folder, connection=connection)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of two settings in glibc's malloc.h
_NEVER_TRIM = -1
"""Value of the first setting with which freed memory at the end of the heap is never returned."""
_MAX_RETAINED_BYTES = 2**27
"""Size in bytes below which a freed block is kept, because a heap with holes can take twice its use."""
_GLIBC_FUNCTIONS = ("gnu_get_libc_version", "mallopt", "malloc_trim")
_MAX_OLD_GLIBC_BYTES = 2**25
"""Largest mmap threshold that glibc before 2.35 accepts.  Any glibc raises it so far by itself."""
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")


@contextmanager
def retain_freed_pages() -> Iterator[None]:
    """Keep freed memory in the process within this context, and return it after the last such context.

    Blocks of 128 MiB or more, or of 32 MiB or more with glibc before 2.35, are returned at once.  The context has
    no effect if `_load_glibc` returns None.
    """
    libc = _load_glibc()
    if libc is None:
        yield
        return
    _ACTIVE_RUNS.append(libc)
    if not libc.mallopt(_MMAP_THRESHOLD, _MAX_RETAINED_BYTES):  # refused by an old glibc
        libc.mallopt(_MMAP_THRESHOLD, _MAX_OLD_GLIBC_BYTES)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)
    try:
        yield
    finally:
        _ACTIVE_RUNS.pop()
        if not _ACTIVE_RUNS:  # a run that starts in another thread right now is only slower
            # Once they are set, glibc no longer adapts its thresholds, so leave those that it reaches at most.
            libc.mallopt(_MMAP_THRESHOLD, _MAX_OLD_GLIBC_BYTES)
            libc.mallopt(_TRIM_THRESHOLD, 2 * _MAX_OLD_GLIBC_BYTES)
            libc.malloc_trim(0)


def _load_glibc() -> ctypes.CDLL | None:
    """Load the C library, or return None without glibc, or if the environment may set its thresholds."""
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
"""An entry for each open context of `retain_freed_pages` with an effect, in all threads."""
