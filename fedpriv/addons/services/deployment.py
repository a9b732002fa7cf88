"""Engines that submit a run to a SuperLink: `deployment`, and `ray`, which is Flower's own simulation.

A deployment has a SuperNode and a guard for each silo.  Without an address all of it is started here, as processes
of this machine; with one, the app is submitted to a SuperLink whose silos other people run.  A run's identity is a
token that is kept in its folder, since Flower gives a resubmitted run another number: silos and server resume from
their ledgers under the same token.

A silo of this machine shares nothing with the others, as on a machine of its own: the shard, the ledger with its
keys and the policy lie in a folder of mode 0700, and only the SuperNode talks to the SuperLink.

Flower's simulation sends every client message of the same apps through a Ray actor.  The progress of either comes
through the run's folder, its end from Flower.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fedpriv.addons.services import supernode_process
from fedpriv.addons.services.certificates import (
    AUTHORITY_FILE,
    check_certificates,
    make_node_key,
    make_server_keys,
)
from fedpriv.addons.services.flower_private.control import (
    UNIX_PREFIX,
    ControlClient,
    LostRunError,
    UnreachableError,
)
from fedpriv.addons.services.service import HealthCheck, free_port, log_tail, script_path, start_logged, state_root
from fedpriv.claims.outcome import CellOutcome, RunObserver, cell_digest
from fedpriv.core.errors import RunError, refuse
from fedpriv.core.files import write_text
from fedpriv.data.named import load
from fedpriv.engines.children import reap_processes, refuse_root
from fedpriv.engines.inprocess import refuse_vectorized_options
from fedpriv.engines.table import Connection, IndexedOutcome
from fedpriv.plan.evaluation import test_indices_of_silos, train_indices_of_silos
from fedpriv.plan.task import load_task
from fedpriv.protocol.cell_folder import FolderReader, clear_reports, make_run_config
from fedpriv.scenario.schema import Cell
from fedpriv.silo.demo import (
    evaluation_allowance,
    format_policy,
    format_toml,
    run_allowance,
    write_policy,
    write_shard,
    write_table_shard,
)
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import make_own_folder, read_policy

_APP_TOML = """\
[project]
name = "fedpriv"
version = "0.0.0"
description = "fedpriv, as installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedpriv"

[tool.flwr.app.components]
serverapp = "fedpriv.server.app:app"
clientapp = "fedpriv.clients.app:app"

[tool.flwr.app.config]
"""
_START_SECONDS = 60.0


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink: who may start runs on it, and our folder for it, its process and its silos' address."""

    control: ControlClient
    home: Path | None = None
    address: str | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it was ours and is gone."""
        return self.process is not None and self.process.poll() is not None

    def submit(self, run_config: Mapping[str, str | int], simulation: Mapping[str, int] | None = None) -> int:
        """Submit fedpriv's app, as installed where it runs, with a run configuration; the run's id."""
        return self.control.start_run(_APP_TOML + format_toml(run_config), str(run_config["out"]), simulation)

    def log_tail(self) -> str:
        """The end of its log, to be put behind a message; empty for a SuperLink that is not ours."""
        return "" if self.home is None else log_tail(self.home, "superlink", 12)


@contextmanager
def simulation_superlink(home: Path) -> Iterator[SuperLink]:
    """A SuperLink for Flower's own simulation engine; gone, with everything it started, when the block is left.

    Guarantee: Ray, which listens on every address of the machine and runs what it is sent, asks for a token that
    only our processes have, and keeps its sockets and files in `home`.
    """
    script_path("flwr-simulation")  # without it Flower's executor would wait for ever
    with reap_processes(home):
        yield start_superlink(
            home,
            ["--simulation"],
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=secrets.token_hex(32),
            RAY_TMPDIR=str(home),
        )


@contextmanager
def federation_superlink(home: Path, silos: int) -> Iterator[SuperLink]:
    """A SuperLink for the SuperNodes of `silos` silos, whose keys are in home/node-N, and for no others.

    Gone, with everything that was started with a home in `home`, when the block is left.
    """
    keys = home / "keys"
    (keys / "nodes").mkdir(mode=0o700, parents=True)
    make_server_keys(keys)
    for silo in range(silos):
        node = node_key_folder(home, silo)
        node.mkdir(mode=0o700)
        make_node_key(node / "node.key", keys / "nodes" / f"silo-{silo}.pub")
        (node / AUTHORITY_FILE).write_bytes((keys / AUTHORITY_FILE).read_bytes())
    with reap_processes(home):
        yield start_superlink(home, ["--keys", str(keys)], free_port())


def node_key_folder(home: Path, silo: int) -> Path:
    """Return the folder of a SuperNode's key and of the certificate that it trusts."""
    return home / f"node-{silo}"


def start_superlink(home: Path, options: Sequence[str], port: int | None = None, **variables: str) -> SuperLink:
    """`fedpriv superlink OPTIONS`, for SuperNodes on a port of 127.0.0.1, once it answers.

    Guarantee: who cannot enter `home`, which has to be of mode 0700, cannot start a run on it.
    """
    socket = home / "control.sock"
    command = [script_path("fedpriv"), "superlink", "--control", str(socket), *options]
    process = start_logged(
        [*command, *([] if port is None else ["--port", str(port)])], home, "superlink", **variables
    )
    link = SuperLink(
        ControlClient(f"{UNIX_PREFIX}{socket}"), home, None if port is None else f"127.0.0.1:{port}", process
    )
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if link.has_ended:
            raise RunError(f"Flower's SuperLink did not start{link.log_tail()}")
        with suppress(RunError):
            link.control.fetch_presence()
            return link
        time.sleep(0.1)
    raise RunError(f"Flower's SuperLink did not answer within {_START_SECONDS:.0f} s{link.log_tail()}")


GUARD_SOCKET = "guard.sock"


def write_silos(cell: Cell, folder: Path, home: Path) -> list[Path]:
    """For each silo a policy that allows exactly this run, in `home`, over its shard and ledger in `folder`.

    The paths of the policies, one a silo.  Shards and ledgers that are there are left as they are: they say what
    was released.  InputError for a run that no policy allows.
    """
    allow, evaluation, tests = (
        run_allowance(cell, load_task(cell)),
        evaluation_allowance(cell),
        test_indices_of_silos(cell),
    )
    dataset, order = load(cell.data.name, table=cell.data.table), train_indices_of_silos(cell)
    policies, table = [], cell.data.table_schema if cell.model.row.of_cells else None
    for silo in range(cell.federation.silos):
        if cell.privacy.shares:
            allow = run_allowance(cell, load_task(cell), silo)
        kept, own = folder / f"silo-{silo}", home / f"silo-{silo}"
        for path in (kept, own):
            make_own_folder(path, 0o700)
        shard = kept / ("shard.npz" if table is None else "shard.csv")
        keys = {
            "silo": silo,
            **({"classes": dataset.class_count} if table is None else {}),
            "shard": str(shard),
            "ledger": str(kept / "ledger.sqlite"),
            "socket": str(own / GUARD_SOCKET),
        }
        policies.append(own / "policy.toml")
        write_policy(policies[-1], format_policy(keys, allow, table, evaluation))
        if not ((kept / "ledger.sqlite").exists() or shard.exists()):
            if table is None:
                write_shard(shard, dataset, order[silo], tests[silo])
            else:
                write_table_shard(shard, cell, dataset, silo, order[silo])
            begin_ledgers(read_policy(policies[-1]))
    return policies


@dataclass
class LocalSilo:
    """The processes of silo `number`; the short-lived folder of `policy` has its socket and logs.

    `keys` is the folder with its SuperNode's key.
    """

    number: int
    policy: Path
    superlink: str
    key_folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.policy.parent

    def start(self, *names: str) -> None:
        """Start "guard" and "supernode", or those that are named; their logs are appended to."""
        commands = {
            "guard": [script_path("fedpriv"), "silo", "run", str(self.policy)],
            "supernode": supernode_process.supernode_command(
                self.superlink, self.number, self.home / GUARD_SOCKET, self.key_folder
            ),
        }
        for name in names or commands:
            self.processes[name] = start_logged(commands[name], self.home, name)

    def describe_ended_process(self) -> str | None:
        """Name the process that has ended, with the end of its log; None while both run."""
        return next(
            (
                f"silo {self.number}'s {name} ended with exit code {process.returncode}"
                f"{log_tail(self.home, name, 5)}"
                for name, process in self.processes.items()
                if process.poll() is not None
            ),
            None,
        )


_POLL_SECONDS = 0.2
_STATUS_SECONDS = 5.0
_END_SECONDS = 60.0  # for Ray's own processes, which outlive a simulation that is cut off
_REPORT_SECONDS = 60.0  # between two lines on the same wait
_UNREACHABLE_SECONDS = 120.0  # for which a SuperLink may not answer: a snapshot of its machine, say


class RunProgress:
    """Tells a person how far a cell is, however often its server begins again, and for whom it waits."""

    def __init__(self, observer: RunObserver, index: int, rounds: int) -> None:
        """The cell's place in the list that the engine was given, and the number of its rounds."""
        self.observer, self.index, self.planned_rounds, self.rounds = observer, index, rounds, 0
        self._last_report: tuple[str, float] = "", 0.0

    def advance_to(self, rounds: int) -> None:
        if rounds > self.rounds:
            self.observer.advanced(rounds - self.rounds)
            self.rounds = rounds

    def report_waiting(self, whom: str, since: float) -> None:
        """After some seconds, then once a minute; `since` in seconds of the epoch."""
        now = time.monotonic()
        if whom == self._last_report[0] and now - self._last_report[1] < _REPORT_SECONDS:
            return
        self._last_report = whom, now
        clock, seconds = time.strftime("%H:%M:%S", time.gmtime(since)), time.time() - since
        self.observer.notified(f"waiting for {whom} since {clock} UTC ({seconds:.0f} s)")


def follow_run(
    link: SuperLink, run: int, reader: FolderReader, describe_lost_process: HealthCheck, progress: RunProgress
) -> CellOutcome:
    """Relay a run's progress until it has an outcome; RunError if it ends without one.

    `lost` says which process has ended, and how, without which there will be none; None while all are there.
    """
    asked, answered, began = time.monotonic(), time.monotonic(), time.time()
    while True:
        finished = reader.read_result()
        progress.advance_to(progress.planned_rounds if finished is not None else reader.read_round())
        for line in reader.read_new_evaluations():
            progress.observer.evaluated(progress.index, line.pop("round"), line)
        if finished is not None:
            return finished
        ended = (
            f"Flower's SuperLink ended before the run did{link.log_tail()}"
            if link.has_ended
            else describe_lost_process()
        )
        if ended is not None:
            raise RunError(ended)
        if time.monotonic() - asked > _STATUS_SECONDS:
            asked = time.monotonic()
            try:
                status = link.control.run_status(run)
            except UnreachableError:
                if asked - answered > _UNREACHABLE_SECONDS:
                    raise
                progress.report_waiting("an answer of the SuperLink", time.time() - (asked - answered))
            else:
                answered = asked
                if status.is_over and reader.read_result() is None:
                    why = f" ({status.details})" if status.details else ""
                    raise RunError(f"Flower ended the run without a result{why}{link.log_tail()}")
                if not (status.is_over or status.state.startswith("running")):
                    progress.report_waiting(f"the SuperLink to start the run, which is {status.state}", began)
            if (wait := reader.read_waiting()) is not None:
                silos, since = wait
                progress.report_waiting(
                    f"silo {', '.join(map(str, silos))} in round {progress.rounds + 1} of "
                    f"{progress.planned_rounds}",
                    since,
                )
        time.sleep(_POLL_SECONDS)


def run_deployment(
    cells: Sequence[Cell], observer: RunObserver, *, folder: Path, connection: Connection
) -> Iterator[IndexedOutcome]:
    """Run cells one after another; see `Engine`.

    `folder` is the RUN_DIR: the server writes below it, so that it must be the same folder where the SuperLink
    runs.
    """
    local = connection.superlink is None
    if local:
        refuse_root("--engine deployment")
    for cell in cells:
        refuse_vectorized_options(cell, "deployment")
        refuse(
            {
                f"federation.clients = {cell.federation.clients}: engine deployment has silos with guards, and no "
                "clients that come and go; use --engine vectorized": cell.federation.clients is not None,
                "federation.drop_out and federation.away are for simulations: silos of a deployment are away when "
                'they are; write deployment.missing = "continue" instead': (
                    cell.federation.drop_out or cell.federation.away
                ),
            }
        )
    for index, cell in enumerate(cells):
        out = folder.resolve() / "deployment" / cell_digest(cell)[:16]
        if not (out / "token").exists():
            write_text(out / "token", secrets.token_hex(16))
        token = (out / "token").read_text(encoding="utf-8")
        finished = FolderReader(out).read_result() if (out / "outcome.json").exists() else None
        if finished is None:
            clear_reports(out)
            with _open_federation(cell, connection, token) as (link, lost):
                reader, progress = FolderReader(out), RunProgress(observer, index, cell.schedule.rounds)
                while finished is None:
                    run = link.submit(make_run_config(cell, out, token))
                    try:
                        finished = follow_run(link, run, reader, lost, progress)
                    except LostRunError:
                        observer.notified("the SuperLink was started again; the run goes on from its journal")
                        clear_reports(out)
                    except BaseException:
                        if not local:  # our own is ended as a whole
                            with suppress(RunError):  # it may have ended
                                link.control.stop_run(run)
                        raise
        yield IndexedOutcome(index, finished)
        if local and (state_root() / token).exists():
            shutil.rmtree(state_root() / token)


@contextmanager
def _open_federation(cell: Cell, connection: Connection, token: str) -> Iterator[tuple[SuperLink, HealthCheck]]:
    """A SuperLink, and what says that a process has ended without which there will be no outcome.

    Without an address SuperLink and silos are processes of ours that are gone when the block is left.  A run that
    continues without a missing silo is told of none.
    """
    if connection.superlink is not None:
        check_certificates(*filter(None, [connection.root_certificates]))
        yield SuperLink(ControlClient(connection.superlink, connection.root_certificates)), lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="fedpriv-") as name:
        home = Path(name)
        # what must survive an interruption is never in RUN_DIR
        policies = write_silos(cell, state_root() / token, home)
        with federation_superlink(home, len(policies)) as link:
            assert link.address is not None
            silos = [
                LocalSilo(number, policy, link.address, node_key_folder(home, number))
                for number, policy in enumerate(policies)
            ]
            for silo in silos:
                silo.start()
            needed = [] if cell.deployment.missing == "continue" else silos
            yield (
                link,
                lambda: next(
                    (said for silo in needed if (said := silo.describe_ended_process()) is not None), None
                ),
            )


def run_ray(cells: Sequence[Cell], observer: RunObserver) -> Iterator[IndexedOutcome]:
    """Run cells one after another on one SuperLink in simulation mode; see `Engine`."""
    refuse({"--engine ray: Ray is not installed here; pip install 'fedpriv[ray]'": find_spec("ray") is None})
    refuse_root("--engine ray")
    with (
        tempfile.TemporaryDirectory(prefix="fedpriv-ray-") as folder,
        simulation_superlink(Path(folder)) as link,
    ):
        for index, cell in enumerate(cells):
            refuse_vectorized_options(cell, "ray")
            out = Path(folder, f"cell-{index}")
            out.mkdir()
            run = link.submit(
                make_run_config(cell, out),
                {
                    "num_supernodes": cell.federation.silos,
                    "client_resources_num_cpus": 1,
                    "init_args_num_cpus": os.cpu_count() or 1,
                },
            )
            progress = RunProgress(observer, index, cell.schedule.rounds)
            finished = follow_run(link, run, FolderReader(out), lambda: None, progress)
            deadline = time.monotonic() + _END_SECONDS
            while not link.control.run_status(run).is_over and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            yield IndexedOutcome(index, finished)
