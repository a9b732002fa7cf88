"""Worker engine: groups of cells as Ray tasks, on the cores of this machine or on a cluster's; Ray schedules.

    cells ── groups that an engine runs together ── a task each ──▶ a worker, which runs the same engine
    observer ◀── progress, evaluations, outcomes, one stream a task ──

A group is never cut: arithmetic on several replicates at once may round otherwise than on one.  A worker runs an
engine and forwards the engine's events as they come.

A pool of processes without Ray would not do: in joblib's loky, as in `concurrent.futures`, a task has one result
and no stream of events, and a worker that dies breaks the pool, with the tasks of all others.
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
    """A call of a method of `RunObserver` or `Checkpoints`, which the process that asked for the work makes.

    The first thing a worker says is who it is: "began", with its machine, its process and its versions.
    """

    method: str
    arguments: tuple[Any, ...]


Event = RemoteCall | IndexedOutcome


def run_worker(
    engine: str,
    cells: Sequence[Mapping[str, Any]],
    imports: Sequence[str],
    before: Mapping[str, bytes] | None = None,
) -> Iterator[Event]:
    """Run cells on the engine of this name; what it would tell an observer comes as events, and its outcomes.

    `cells` are resolved ones as plain data (`Cell.canonical`), `imports` files of algorithms, models and data of
    one's own: what they define is not known here before they are imported.  `before` are the checkpoints that
    were kept of them, by name.
    """
    yield RemoteCall("began", (socket.gethostname(), os.getpid(), installed_versions()))
    import_files([Path(file) for file in imports])
    resolved = [resolve_cell(cell, "a worker's cell") for cell in cells]
    said: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
    teller = _EventSender(before or {}, said.put)

    def run() -> None:
        try:
            for outcome in make_engine(engine, checkpoints=teller)(resolved, teller):
                teller.flush()
                said.put(outcome)
            said.put(None)
        except BaseException as error:
            said.put(error)

    threading.Thread(target=run, daemon=True).start()
    while (event := said.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        yield event


class _EventSender(RunObserver, Checkpoints):
    """Says what an engine says, rounds not more often than a person reads.

    Checkpoints go the same way: the folder of the process that asked may be on another machine, and is its own.
    """

    def __init__(self, before: Mapping[str, bytes], say: Callable[[Event], None]) -> None:
        self._checkpoints, self._send = before, say
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


_MAX_ATTEMPTS = 3
_POLL_SECONDS = 0.5  # so that Ctrl-C is heard
_OBJECT_STORE_BYTES = 2**27


@dataclass(frozen=True)
class Workers:
    """So many worker processes of this machine, or the Ray cluster at an address; InputError unless it is one."""

    count: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.address is None):
            raise InputError("--workers and --ray: give one of them")
        if self.count is not None and self.count < 1:
            raise InputError(f"--workers {self.count}: give a number of processes, 1 or more")


@dataclass
class _CellGroup:
    """Cells that are run together by one task, and what was heard of them, through all its attempts."""

    indices: list[int]
    cells: list[Cell]
    attempts: int = 0
    worker: str = "a worker"
    finished_indices: set[int] = field(default_factory=set)
    reported_evaluations: set[tuple[int, int]] = field(default_factory=set)
    reported_rounds: int = 0
    """Rounds that were told to the observer."""
    attempt_rounds: int = 0
    """Rounds of this attempt, told before or not."""

    def estimated_cost(self) -> int:
        """Estimate that decides nothing but the order."""
        first = self.cells[0]
        return first.schedule.rounds * (24 + len(self.cells) * sum(first.batch_sizes))


def make_worker_engine(name: str, workers: Workers, checkpoints: Checkpoints = NO_CHECKPOINTS) -> Engine:
    """The engine of this name, on workers; InputError for one that starts processes of its own.

    What workers keep of groups that they are in the middle of comes here, to `kept`.

    Guarantee: what a worker computes is what this process would.  The groups of a worker that dies are run again
    from their last checkpoints, and the observer hears of it (`lost`).  RunError for a group whose worker died
    three times in a row, and for workers that have other versions than this process.
    """
    groups = find_engine_row(name).group_cells
    if groups is None:
        raise InputError(f"--engine {name}: it has processes of its own, and takes neither --workers nor --ray")

    def run(cells: Sequence[Cell], observer: RunObserver) -> Iterator[IndexedOutcome]:
        found = [_CellGroup(list(members), [cells[member] for member in members]) for members in groups(cells)]
        ordered = sorted(
            found, key=_CellGroup.estimated_cost, reverse=True
        )  # the last to be begun should be small
        with _connect_ray(workers) as ray:
            running = {_submit_group(ray, name, group, checkpoints): group for group in ordered}
            try:
                while running:
                    ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS)
                    for stream in ready:
                        group = running[stream]
                        try:
                            event = ray.get(next(stream))
                        except StopIteration:
                            del running[stream]
                        except ray.exceptions.RayTaskError as error:
                            if isinstance(error.cause, FedprivError):
                                raise error.cause from None
                            reason = f"{type(error.cause).__name__}: {sanitize_line(str(error.cause))}"
                            raise RunError(f"{group.worker}: {reason}") from None
                        except ray.exceptions.RayError as error:
                            del running[stream]
                            observer.lost(group.worker, group.indices)
                            if group.attempts >= _MAX_ATTEMPTS:
                                raise RunError(
                                    f"cells {', '.join(map(str, group.indices))}: {group.worker} died, "
                                    f"{_MAX_ATTEMPTS} times in a row: {_first_line(error)}"
                                ) from error
                            running[_submit_group(ray, name, group, checkpoints)] = group
                        else:
                            yield from _forward_event(event, group, observer, checkpoints)
            finally:
                for stream in running:
                    ray.cancel(stream, force=True)

    return run


def _forward_event(
    event: Event, group: _CellGroup, observer: RunObserver, kept: Checkpoints
) -> Iterator[IndexedOutcome]:
    """Tell the observer what a worker said, once, however often a group is run."""
    match event:
        case RemoteCall("began", (machine, process, versions)):
            group.worker = f"worker {process} on {sanitize_line(machine)}"
            if others := [
                f"{name} {versions.get(name)} where this machine has {here}"
                for name, here in installed_versions().items()
                if versions.get(name) != here
            ]:
                raise RunError(f"{group.worker} has {', has '.join(others)}: results would not be the same")
        case RemoteCall("advanced", (int(rounds),)):
            group.attempt_rounds += rounds
            if (news := group.attempt_rounds - group.reported_rounds) > 0:
                group.reported_rounds = group.attempt_rounds
                observer.advanced(news)
        case RemoteCall("evaluated", (int(place), int(t), metrics)):
            if (place, t) not in group.reported_evaluations:
                group.reported_evaluations.add((place, t))
                observer.evaluated(group.indices[place], t, metrics)
        case RemoteCall("noted", (line,)):
            observer.notified(line)
        case RemoteCall("keep" | "drop" as method, arguments):
            getattr(kept, method)(*arguments)
        case IndexedOutcome(place, finished):
            if place not in group.finished_indices:
                group.finished_indices.add(place)
                yield IndexedOutcome(group.indices[place], finished)


def _first_line(error: Exception) -> str:
    return sanitize_line(str(error).strip().splitlines()[0])


def _submit_group(ray: Any, engine: str, group: _CellGroup, kept: Checkpoints) -> Any:
    group.attempts += 1
    group.attempt_rounds = 0
    task = ray.remote(run_worker).options(num_cpus=1, max_retries=0, num_returns="streaming")
    imports = list(filter(None, os.environ.get(IMPORT_VARIABLE, "").split(os.pathsep)))
    name = checkpoint_name(tuple(map(cell_digest, group.cells)))
    before = {} if (content := kept.latest(name)) is None else {name: content}
    return task.remote(engine, [cell.canonical_data() for cell in group.cells], imports, before)


@contextmanager
def _connect_ray(workers: Workers) -> Iterator[Any]:
    """Ray, connected; a cluster that was started here is gone when the block is left."""
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
                "_temp_dir": str(home / "r"),  # which it opens to everybody; what is around it stays ours
                "_node_ip_address": "127.0.0.1",
            }
        import ray

        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**options, configure_logging=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RunError(
                f"Ray at {workers.address or 'this machine'} cannot be used: {_first_line(error)}"
            ) from None
        stack.callback(ray.shutdown)
        if before is not None:
            signal.signal(signal.SIGTERM, before)  # Ray's own would end the run without a word how to go on
        output: Any = StreamWithoutRay(sys.stdout)
        stack.enter_context(redirect_stdout(output))
        yield ray


@contextmanager
def _ray_environment(home: Path) -> Iterator[None]:
    """Variables that what Ray starts here is to have.

    Guarantee: Ray, which runs what it is sent, asks for a token that only our processes have.
    """
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "FLWR_HOME": str(home),  # by which `reap_processes` knows them
    }
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    _reload_ray_token()
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]
        os.environ.update(before)
        _reload_ray_token()


def _reload_ray_token() -> None:
    """Ray reads whether there is a token, and which, once a process, and may have been imported before."""
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


class StreamWithoutRay:
    """Standard output, less what a thread of Ray's prints, which would stand between our lines of JSON.

    Ray raises as an exception, too, what it prints there.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        own = threading.current_thread().name != "ray_listen_error_messages"
        return int(self._stream.write(text)) if own else len(text)
