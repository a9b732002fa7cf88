"""Worker engine: groups of cells as Ray tasks, on the cores of this machine or on a cluster.

A cell is one run of a scenario: a value of each swept key, and a seed.  Its outcome is the result of this run.
Checkpoints are stored states from which an unfinished group continues.

    cells ── groups that an engine runs together ── a task each ──▶ a worker, which runs the same engine
    observer, checkpoints, caller ◀── progress and evaluations, checkpoints, outcomes, one stream a task ──

A group is not split, because arithmetic on several replicates at once may round otherwise than on one.  Ray is
used, and no process pool of `concurrent.futures`, because its tasks yield streams of events, and a worker that
dies ends no other worker's task.
"""

import importlib
import importlib.util
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedpriv.claims.outcome import RunObserver, cell_digest
from fedpriv.core.errors import FedprivError, InputError, RunError, sanitize_line
from fedpriv.core.extensions import IMPORT_VARIABLE, import_files
from fedpriv.engines.table import Engine, IndexedOutcome, find_engine_row, make_engine
from fedpriv.engines.vectorized.checkpoints import NO_CHECKPOINTS, Checkpoints, checkpoint_name, installed_versions
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell

_REPORT_SECONDS = 0.1


class RemoteCall(NamedTuple):
    """Call of a method of `RunObserver` or `Checkpoints`, which the submitting process makes for a worker."""

    method: str
    """Name of the method, but "noted" for `notified`, and "began" for a worker's first event."""
    arguments: tuple[Any, ...]
    """Arguments of the method, or the machine, process id and versions of the worker that began."""


Event = RemoteCall | IndexedOutcome


def run_worker(
    engine: str,
    cells: Sequence[Mapping[str, Any]],
    imports: Sequence[str],
    checkpoints: Mapping[str, bytes] | None = None,
) -> Iterator[Event]:
    """Run cells on an engine in this worker, and yield its events and outcomes.

    The first event is "began".  Evaluations and outcomes name a cell by its index in `cells`.

    Args:
        engine: Name of the engine, a key of `ENGINES`.
        cells: Resolved cells as plain data (`Cell.canonical_data`).
        imports: Files that define the user's algorithms, models and data, imported before the cells are parsed.
        checkpoints: Stored checkpoints of the cells, by name, or None without one.

    Raises:
        FedprivError: A file, a cell or the engine's name cannot be used, or the engine raised this error.  Other
            exceptions of the engine are passed on.
    """
    yield RemoteCall("began", (socket.gethostname(), os.getpid(), installed_versions()))
    import_files([Path(file) for file in imports])
    resolved = [resolve_cell(cell, "a worker's cell") for cell in cells]
    events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()  # None after the last outcome
    sender = _EventSender(checkpoints or {}, events.put)

    def run() -> None:
        """Run the cells, and put their outcomes, and then None or an error, into `events`."""
        try:
            for outcome in make_engine(engine, checkpoints=sender)(resolved, sender):
                # An outcome comes after all progress of its rounds.
                sender.flush()
                events.put(outcome)
            events.put(None)
        # The generator raises it, in the thread of its caller.
        except BaseException as error:
            events.put(error)

    # In a thread, because the engine calls `sender` while it computes, and only this generator can yield to Ray.
    threading.Thread(target=run, daemon=True).start()
    while (event := events.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        yield event


class _EventSender(RunObserver, Checkpoints):
    """Observer and checkpoint store that forward progress, evaluations, notes and checkpoints as events."""

    def __init__(self, checkpoints: Mapping[str, bytes], send: Callable[[Event], None]) -> None:
        self._checkpoints, self._send = checkpoints, send
        self._unsent_rounds, self._last_time = 0, time.monotonic()

    def advanced(self, rounds: int) -> None:
        self._unsent_rounds += rounds
        if time.monotonic() - self._last_time > _REPORT_SECONDS:
            self.flush()

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self._send(RemoteCall("evaluated", (place, t, metrics)))

    def notified(self, line: str) -> None:
        self._send(RemoteCall("noted", (line,)))

    def flush(self) -> None:
        if self._unsent_rounds:
            self._send(RemoteCall("advanced", (self._unsent_rounds,)))
        self._unsent_rounds, self._last_time = 0, time.monotonic()

    def latest(self, name: str) -> bytes | None:
        return self._checkpoints.get(name)

    def keep(self, name: str, content: bytes) -> None:
        self._send(RemoteCall("keep", (name, content)))

    def drop(self, name: str) -> None:
        self._send(RemoteCall("drop", (name,)))


_MAX_ATTEMPTS = 3  # of one group: if the worker of the last one dies, the run ends
_POLL_SECONDS = 0.5  # so that Ctrl-C takes effect
_OBJECT_STORE_BYTES = 2**27


@dataclass(frozen=True)
class Workers:
    """Number of worker processes on this machine, or the address of a Ray cluster.

    Raises:
        InputError: Neither or both are given, or the number is below 1.
    """

    count: int | None = None
    """Number of worker processes on this machine, or None for a cluster."""
    address: str | None = None
    """Address of a Ray cluster, or None for processes on this machine."""

    def __post_init__(self) -> None:
        if (self.count is None) == (self.address is None):
            raise InputError("--workers and --ray: give one of them")
        if self.count is not None and self.count < 1:
            raise InputError(f"--workers {self.count}: give a number of processes, 1 or more")


@dataclass
class _CellGroup:
    """Cells that one task runs together, and a record of their events in all attempts."""

    indices: list[int]
    """Index of each cell in the list of all cells."""
    cells: list[Cell]
    attempts: int = 0
    """Number of tasks that were submitted for the group."""
    worker: str = "a worker"
    """Name of the worker of this attempt, with its process and machine once it began."""
    finished_indices: set[int] = field(default_factory=set)
    """Indices in `cells` of the cells whose outcome was yielded."""
    reported_evaluations: set[tuple[int, int]] = field(default_factory=set)
    """Evaluations that were reported to the observer, as (index in `cells`, round)."""
    reported_rounds: int = 0
    """Rounds that were reported to the observer."""
    attempt_rounds: int = 0
    """Rounds of this attempt, whether reported or not."""

    def estimated_cost(self) -> int:
        """Estimate the cost of the group, used only to order groups."""
        first_cell = self.cells[0]
        return first_cell.schedule.rounds * (24 + len(self.cells) * sum(first_cell.batch_sizes))


def make_worker_engine(name: str, workers: Workers, checkpoints: Checkpoints = NO_CHECKPOINTS) -> Engine:
    """Make a function that runs groups of cells as Ray tasks, each in a worker that runs the named engine.

    Guarantee: on a processor of the same kind and with the same files, a worker computes the numbers that this
    process would compute, but for run times.  The group of a worker that dies is run again, from its last
    checkpoint if it has one, and the observer is notified of the death (`lost`).  RunError for a group whose
    workers died three times in a row, and for workers that have other versions than this process of fedpriv,
    torch, numpy, scipy or cryptography.

    Args:
        name: Name of the engine that each worker runs.
        workers: Processes or cluster.
        checkpoints: Store of the checkpoints of unfinished groups.

    Raises:
        InputError: There is no engine of this name, or the engine starts its own processes.
    """
    groups = find_engine_row(name).group_cells
    if groups is None:
        raise InputError(f"--engine {name}: it has processes of its own, and takes neither --workers nor --ray")

    def run(cells: Sequence[Cell], observer: RunObserver) -> Iterator[IndexedOutcome]:
        """Run groups of cells as tasks, and submit a group again if its worker died, up to two times.

        Each task has a stream of events, which ends without an error if its group is finished.  An outcome is
        yielded with its index in `cells`, and other events go to the observer or the checkpoints.  If an error
        ends the run, the other tasks are cancelled.

        Raises:
            InputError: The engine cannot compute a cell, or Ray is not installed or may not be started here.
            RunError: An error ended a worker's task, the workers of a group died three times, a worker has other
                versions, or Ray cannot be used.  An error of fedpriv that ended a task is raised itself.
        """
        cell_groups = [
            _CellGroup(list(members), [cells[member] for member in members]) for members in groups(cells)
        ]
        # Large groups first, so that small ones fill the end.
        ordered_groups = sorted(cell_groups, key=_CellGroup.estimated_cost, reverse=True)
        with _connect_ray(workers) as ray:
            group_by_stream = {_submit_group(ray, name, group, checkpoints): group for group in ordered_groups}
            try:
                while group_by_stream:
                    ready_streams, _ = ray.wait(list(group_by_stream), num_returns=1, timeout=_POLL_SECONDS)
                    for stream in ready_streams:
                        group = group_by_stream[stream]
                        try:
                            event = ray.get(next(stream))
                        except StopIteration:  # the group is finished
                            del group_by_stream[stream]
                        except ray.exceptions.RayTaskError as error:  # the task raised an error
                            if isinstance(error.cause, FedprivError):
                                raise error.cause from None
                            reason = f"{type(error.cause).__name__}: {sanitize_line(str(error.cause))}"
                            raise RunError(f"{group.worker}: {reason}") from None
                        except ray.exceptions.RayError as error:  # the worker died
                            del group_by_stream[stream]
                            observer.lost(group.worker, group.indices)
                            if group.attempts >= _MAX_ATTEMPTS:
                                raise RunError(
                                    f"cells {', '.join(map(str, group.indices))}: {group.worker} died, "
                                    f"{_MAX_ATTEMPTS} times in a row: {_first_line(error)}"
                                ) from error
                            group_by_stream[_submit_group(ray, name, group, checkpoints)] = group
                        else:
                            yield from _forward_event(event, group, observer, checkpoints)
            finally:
                for stream in group_by_stream:
                    ray.cancel(stream, force=True)

    return run


def _forward_event(
    event: Event, group: _CellGroup, observer: RunObserver, checkpoints: Checkpoints
) -> Iterator[IndexedOutcome]:
    """Pass a worker's event to the observer or the checkpoints, or yield it if it is an outcome.

    The event "began" gives the worker its name in messages.  Indices in the group become indices in the list of
    all cells.  Rounds, evaluations and outcomes that an earlier attempt of the group reported are not repeated.

    Raises:
        RunError: The worker has other versions than this process.
    """
    match event:
        case RemoteCall("began", (machine, process, versions)):
            group.worker = f"worker {process} on {sanitize_line(machine)}"
            if differences := [
                f"{name} {versions.get(name)} where this machine has {installed_version}"
                for name, installed_version in installed_versions().items()
                if versions.get(name) != installed_version
            ]:
                raise RunError(f"{group.worker} has {', has '.join(differences)}: results would not be the same")
        case RemoteCall("advanced", (int(rounds),)):
            group.attempt_rounds += rounds
            if (new_rounds := group.attempt_rounds - group.reported_rounds) > 0:
                group.reported_rounds = group.attempt_rounds
                observer.advanced(new_rounds)
        case RemoteCall("evaluated", (int(place), int(t), metrics)):
            if (place, t) not in group.reported_evaluations:
                group.reported_evaluations.add((place, t))
                observer.evaluated(group.indices[place], t, metrics)
        case RemoteCall("noted", (line,)):
            observer.notified(line)
        case RemoteCall("keep" | "drop" as method, arguments):
            getattr(checkpoints, method)(*arguments)
        case IndexedOutcome(place, finished):
            if place not in group.finished_indices:
                group.finished_indices.add(place)
                yield IndexedOutcome(group.indices[place], finished)


def _first_line(error: Exception) -> str:
    return sanitize_line((str(error).strip() or type(error).__name__).splitlines()[0])


def _submit_group(ray: Any, engine: str, group: _CellGroup, checkpoints: Checkpoints) -> Any:
    """Submit a group, with its last checkpoint if there is one, and return the task's stream of events.

    Ray itself does not retry (max_retries=0), so that an attempt starts from the latest checkpoint.

    Args:
        ray: The module `ray`, connected to a cluster.
        engine: Name of the engine that the worker runs.
        group: Cells of the group, whose record of attempts is updated.
        checkpoints: Store of checkpoints.
    """
    group.attempts += 1
    group.attempt_rounds, group.worker = 0, _CellGroup.worker
    task = ray.remote(run_worker).options(num_cpus=1, max_retries=0, num_returns="streaming")
    imports = list(filter(None, os.environ.get(IMPORT_VARIABLE, "").split(os.pathsep)))
    name = checkpoint_name(tuple(map(cell_digest, group.cells)))
    checkpoint_by_name = {} if (content := checkpoints.latest(name)) is None else {name: content}
    return task.remote(engine, [cell.canonical_data() for cell in group.cells], imports, checkpoint_by_name)


@contextmanager
def _connect_ray(workers: Workers) -> Iterator[Any]:
    """Connect to Ray's cluster, or start one on this machine, and yield the module `ray`.

    A cluster that was started for this block is stopped at the end of the block.  Within the block, lines that a
    thread of Ray prints on stdout are dropped (`StreamWithoutRay`).

    Args:
        workers: Address of a cluster, or number of processes of the one to start.

    Raises:
        InputError: Ray is not installed, or root would start a cluster and FEDPRIV_ALLOW_ROOT is not 1.
        RunError: Ray cannot be started or reached.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("--workers, --ray: Ray is not installed here; pip install 'fedpriv[ray]'")
    with ExitStack() as stack:
        options: dict[str, Any] = {"address": workers.address}
        if workers.address is None:
            from fedpriv.engines.children import reap_processes, refuse_root

            refuse_root(f"--workers {workers.count}")
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedpriv-workers-")))
            stack.enter_context(reap_processes(home))
            stack.enter_context(_ray_environment(home))
            options = {
                "num_cpus": workers.count,
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_temp_dir": str(home / "r"),  # Ray opens this folder to all users, and its parent stays private
                "_node_ip_address": "127.0.0.1",
            }
        import ray

        sigterm_handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**options, configure_logging=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RunError(
                f"Ray at {workers.address or 'this machine'} cannot be used: {_first_line(error)}"
            ) from None
        stack.callback(ray.shutdown)
        if sigterm_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm_handler)  # Ray's handler gives no hint on resuming
        output: Any = StreamWithoutRay(sys.stdout)
        stack.enter_context(redirect_stdout(output))
        yield ray


@contextmanager
def _ray_environment(home: Path) -> Iterator[None]:
    """Set the environment variables of the processes that Ray starts on this machine.

    With the variables Ray requires a new token for its messages, sends no statistics of use, and leaves the
    accelerators that a task sees as they are.  At the end of the context the earlier values are restored.

    Guarantee: Ray, which runs the code that it is sent, requires a token that is new and random.  fedpriv writes
    the token into no file.  The token is in the environment of this run's processes, which no other user but root
    can read.

    Args:
        home: Folder whose name marks the processes, so that they are found and ended.
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "FLWR_HOME": str(home),  # by which `reap_processes` finds the processes
    }
    previous_values = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    _reload_ray_token()
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(previous_values)
        _reload_ray_token()


def _reload_ray_token() -> None:
    """Make Ray read its token settings again, because it reads them once per process."""
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


class StreamWithoutRay:
    """Standard output without lines of a thread of Ray, which would break this program's lines of JSON."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        is_ours = threading.current_thread().name != "ray_listen_error_messages"
        return int(self._stream.write(text)) if is_ours else len(text)
