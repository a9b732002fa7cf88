"""Engines that submit a run to a SuperLink: `deployment`, and `ray`, which is Flower's own simulation.

An engine computes cells, which are single runs of a scenario, and yields their outcomes.  A deployment has a
SuperNode and a guard for each silo.  The guard is the process with the silo's records (its shard), which answers
queries within a policy and accounts for its replies in a ledger.

Without an address, a deployment starts SuperLink, SuperNodes and guards as processes of this machine, and `ray`
starts a SuperLink alone.  With an address, the app is submitted to a SuperLink whose silos other people run.

A token in the run's folder identifies a run of a deployment, because Flower gives a resubmitted run another
number.  The journal is the server's store of releases, from which an interrupted run continues under the same
token.
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
from fedpriv.plan.evaluation import held_out_indices_by_silo, train_indices_of_silos
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
    """Running SuperLink.

    All fields but `control` are None if other people run the SuperLink.
    """

    control: ControlClient
    """Client that can start runs on the SuperLink."""
    home: Path | None = None
    """Folder of the SuperLink's socket and log."""
    address: str | None = None
    """Address for SuperNodes, or None for a simulation, which has none."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the SuperLink's process was started here and has ended."""
        return self.process is not None and self.process.poll() is not None

    def submit(self, run_config: Mapping[str, str | int], simulation: Mapping[str, int] | None = None) -> int:
        """Submit fedpriv's app with a run configuration, and return the run's id.

        Args:
            run_config: Run configuration, from `make_run_config`.
            simulation: Settings of Flower's simulation, or None for a deployment.

        Raises:
            RunError: The SuperLink does not answer, or does not start the run.
        """
        return self.control.start_run(_APP_TOML + format_toml(run_config), str(run_config["out"]), simulation)

    def log_tail(self) -> str:
        """Return the end of the log to append to a message, empty if other people run the SuperLink."""
        return "" if self.home is None else log_tail(self.home, "superlink", 12)


@contextmanager
def simulation_superlink(home: Path) -> Iterator[SuperLink]:
    """Start a SuperLink for Flower's own simulation engine.

    The SuperLink and the processes that it started end with the block.

    Guarantee: Ray, which listens on every address of the machine and runs the code that it is sent, asks for a
    token that only our processes have, and keeps its sockets and files in `home`.

    Raises:
        RunError: The SuperLink does not start, or a program of Flower is missing.
    """
    script_path("flwr-simulation")  # without this script Flower's executor would wait without end
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
    """Start a SuperLink on this machine for the SuperNodes of `silos` silos, with new keys.

    The key of silo N's SuperNode is in home/node-N.  The SuperLink and the silos' processes end with the block.

    Raises:
        RunError: The SuperLink does not start.
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
    """Start `fedpriv superlink OPTIONS`, and return it when it answers.

    Guarantee: a user who cannot enter `home`, which has to be of mode 0700, cannot start a run on the SuperLink.

    Args:
        home: Folder of the SuperLink's socket and log.
        options: Options of the command.
        port: Port of 127.0.0.1 for SuperNodes, or None for a simulation.
        variables: Further environment variables of the process.

    Raises:
        RunError: The SuperLink ends, does not answer within a minute and the time of one request, or is not
            installed.
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
    """Write for each silo a policy that allows this run, and a shard and a ledger if it has neither.

    A shard is the file of a silo's records: a CSV file if the model reads the raw cells of a table, and else
    arrays.  Existing shards and ledgers are kept, because ledgers record earlier releases.  Those of a silo that
    is marked as unfinished are written again: an earlier call ended before it finished them, and no guard used
    them.

    Args:
        cell: Cell of the run.
        folder: Folder of shards and ledgers, which survives an interruption of the run.
        home: Folder of policies and sockets.

    Returns:
        Paths of the policies, one a silo.

    Raises:
        InputError: No policy allows the run, or data, policy or ledger cannot be used.
    """
    limits, evaluation, test_indices = (
        run_allowance(cell, load_task(cell)),
        evaluation_allowance(cell),
        held_out_indices_by_silo(cell),
    )
    dataset, train_indices = load(cell.data.name, table=cell.data.table), train_indices_of_silos(cell)
    policies, schema = [], cell.data.table_schema if cell.model.row.of_cells else None
    for silo in range(cell.federation.silos):
        persistent_folder, temporary_folder = folder / f"silo-{silo}", home / f"silo-{silo}"
        unfinished_mark = folder / f"silo-{silo}.unfinished"
        if unfinished_mark.exists():
            shutil.rmtree(persistent_folder, ignore_errors=True)
        for path in (persistent_folder, temporary_folder):
            make_own_folder(path, 0o700)
        shard = persistent_folder / ("shard.npz" if schema is None else "shard.csv")
        keys = {
            "silo": silo,
            **({"classes": dataset.class_count} if schema is None else {}),
            "shard": str(shard),
            "ledger": str(persistent_folder / "ledger.sqlite"),
            "socket": str(temporary_folder / GUARD_SOCKET),
        }
        policies.append(temporary_folder / "policy.toml")
        # With shares each silo has a target, and so a budget, of its own.
        allow = run_allowance(cell, load_task(cell), silo) if cell.privacy.shares else limits
        write_policy(policies[-1], format_policy(keys, allow, schema and schema.without_format, evaluation))
        if not ((persistent_folder / "ledger.sqlite").exists() or shard.exists()):
            unfinished_mark.touch()
            if schema is None:
                write_shard(shard, dataset, train_indices[silo], test_indices[silo])
            else:
                write_table_shard(shard, cell, dataset, silo, train_indices[silo])
            begin_ledgers(read_policy(policies[-1]))
            unfinished_mark.unlink()
    return policies


@dataclass
class LocalSilo:
    """Processes of a silo on this machine, whose socket and logs are in the folder of the silo's policy."""

    number: int
    policy: Path
    """File of the silo's policy, from `write_silos`."""
    superlink: str
    """Address of the SuperLink."""
    key_folder: Path
    """Folder of the SuperNode's key."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Started processes by name, "guard" and "supernode"."""

    @property
    def home(self) -> Path:
        return self.policy.parent

    def start(self, *names: str) -> None:
        """Start the processes "guard" and "supernode", or those of `names` only, and append to their logs."""
        commands = {
            "guard": [script_path("fedpriv"), "silo", "run", str(self.policy)],
            "supernode": supernode_process.supernode_command(
                self.superlink, self.number, self.home / GUARD_SOCKET, self.key_folder
            ),
        }
        for name in names or commands:
            self.processes[name] = start_logged(commands[name], self.home, name)

    def describe_ended_process(self) -> str | None:
        """Describe the process that has ended with the end of its log, or return None while both run."""
        return next(
            (
                f"silo {self.number}'s {name} ended with exit code {process.returncode}"
                f"{log_tail(self.home, name, 5)}"
                for name, process in self.processes.items()
                if process.poll() is not None
            ),
            None,
        )


_MAX_START_SECONDS = 600.0  # a server has started within seconds, and on a very busy machine within minutes
_POLL_SECONDS = 0.2
_STATUS_SECONDS = 5.0
_END_SECONDS = 60.0  # longest wait for the end of a simulation that has an outcome
_REPORT_SECONDS = 60.0  # time between two reports of the same wait
_UNREACHABLE_SECONDS = 120.0  # longest silence of a SuperLink, for example during a snapshot of its machine


class RunProgress:
    """Progress of a cell over restarts of its server, with reports of long waits."""

    def __init__(self, observer: RunObserver, index: int, rounds: int) -> None:
        """Observe the cell at `index` of the engine's list, which has this number of rounds."""
        self.observer, self.index, self.planned_rounds, self.rounds = observer, index, rounds, 0
        self._last_report: tuple[str, float] = "", 0.0

    def advance_to(self, rounds: int) -> None:
        if rounds > self.rounds:
            self.observer.advanced(rounds - self.rounds)
            self.rounds = rounds

    def report_waiting(self, reason: str, start_time: float) -> None:
        """Report a wait for `reason` since `start_time`, in seconds since 1970.

        A reason is reported at once if the last report had another one, and again after a minute at the earliest.
        """
        now = time.monotonic()
        if reason == self._last_report[0] and now - self._last_report[1] < _REPORT_SECONDS:
            return
        self._last_report = reason, now
        clock, seconds = time.strftime("%H:%M:%S", time.gmtime(start_time)), time.time() - start_time
        self.observer.notified(f"waiting for {reason} since {clock} UTC ({seconds:.0f} s)")


def follow_run(
    link: SuperLink, run: int, reader: FolderReader, describe_lost_process: HealthCheck, progress: RunProgress
) -> CellOutcome:
    """Relay a run's progress to the observer until the run has an outcome, and return the outcome.

    Args:
        link: SuperLink of the run.
        run: Id of the run at the SuperLink.
        reader: Reader of the run's folder, where the server reports.
        describe_lost_process: Function that describes a necessary process that has ended, or returns None.
        progress: Progress of the cell.

    Raises:
        InputError: The run fails at the server with an InputError, or has stored releases that no run can have.
        RunError: The run fails otherwise, ends without an outcome or is not started within ten minutes, a
            necessary process has ended, the SuperLink refuses a request, or a file of the run is damaged.
        LostRunError: The SuperLink does not know the run, such as one from before its restart.
        UnreachableError: The SuperLink does not answer for two minutes.
    """
    last_query_time, last_answer_time, start_time = time.monotonic(), time.monotonic(), time.time()
    while True:
        outcome = reader.read_result()
        progress.advance_to(progress.planned_rounds if outcome is not None else reader.read_round())
        for line in reader.read_new_evaluations():
            progress.observer.evaluated(progress.index, line.pop("round"), line)
        if outcome is not None:
            return outcome
        end_reason = (
            f"Flower's SuperLink ended before the run did{link.log_tail()}"
            if link.has_ended
            else describe_lost_process()
        )
        if end_reason is not None:
            raise RunError(end_reason)
        if time.monotonic() - last_query_time > _STATUS_SECONDS:
            last_query_time = time.monotonic()
            try:
                status = link.control.run_status(run)
            except UnreachableError:
                if last_query_time - last_answer_time > _UNREACHABLE_SECONDS:
                    raise
                progress.report_waiting(
                    "an answer of the SuperLink", time.time() - (time.monotonic() - last_answer_time)
                )
            else:
                last_answer_time = last_query_time
                # The server may have written the outcome since it was read above.
                if status.is_over and reader.read_result() is None:
                    raise RunError(
                        "Flower ended the run without a result"
                        f"{f' ({status.details})' if status.details else ''}{link.log_tail()}"
                    )
                if not (status.is_over or status.state.startswith("running")):
                    progress.report_waiting(f"the SuperLink to start the run, which is {status.state}", start_time)
                    seconds = time.time() - start_time
                    refuse(
                        {
                            f"the SuperLink has not started the run in {seconds:.0f} s; its log says why"
                            f"{link.log_tail()}": seconds > _MAX_START_SECONDS
                        },
                        RunError,
                    )
            if (wait := reader.read_waiting()) is not None:
                silos, wait_start = wait
                progress.report_waiting(
                    f"silo {', '.join(map(str, silos))} in round {progress.rounds + 1} of "
                    f"{progress.planned_rounds}",
                    wait_start,
                )
        time.sleep(_POLL_SECONDS)


def run_deployment(
    cells: Sequence[Cell], observer: RunObserver, *, folder: Path, connection: Connection
) -> Iterator[IndexedOutcome]:
    """Run cells one after another at a SuperLink, or without an address at a new one for each cell.

    A second call with the same folder takes a finished outcome from it, and continues an unfinished run.  A run
    that a restart of the SuperLink ended is submitted again.

    Args:
        cells: Cells to run.
        observer: Observer of progress.
        folder: The RUN_DIR, below which the server writes.
        connection: Address of a SuperLink, or none, so that all processes are started on this machine.

    Yields:
        The outcome of each cell, with the index of the cell.

    Raises:
        InputError: A cell cannot be run as a deployment, no policy can allow the run, the root certificates cannot
            be used, a server refuses its run, or processes are to be started and `refuse_root` refuses.
        RunError: A run failed, a SuperLink does not start or answer, or a program of Flower is missing.
    """
    # Refuse settings that a deployment cannot have before the first cell is started.
    is_local = connection.superlink is None
    if is_local:
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
        run_folder = folder.resolve() / "deployment" / cell_digest(cell)[:16]
        if not (run_folder / "token").exists():
            write_text(run_folder / "token", secrets.token_hex(16))
        token = (run_folder / "token").read_text(encoding="utf-8", errors="replace")
        refuse(
            # The token names a folder that is removed after the run.
            {
                f"{run_folder / 'token'}: damaged; it has the name of a run": not (
                    token.isalnum() and token.isascii()
                )
            },
            RunError,
        )
        outcome = FolderReader(run_folder).read_result() if (run_folder / "outcome.json").exists() else None
        if outcome is None:
            clear_reports(run_folder)
            with _open_federation(cell, connection, token) as (link, describe_lost_process):
                reader, progress = FolderReader(run_folder), RunProgress(observer, index, cell.schedule.rounds)
                while outcome is None:
                    run = link.submit(make_run_config(cell, run_folder, token))
                    try:
                        outcome = follow_run(link, run, reader, describe_lost_process, progress)
                    except LostRunError:
                        observer.notified("the SuperLink was started again; the run goes on from its journal")
                        clear_reports(run_folder)
                    except BaseException:
                        if not is_local:  # a SuperLink of this machine is ended as a whole
                            with suppress(RunError):  # the SuperLink may have ended
                                link.control.stop_run(run)
                        raise
        yield IndexedOutcome(index, outcome)
        # The caller has taken the outcome, so that nothing resumes from the silos' shards and ledgers any more.
        if is_local and (state_root() / token).exists():
            shutil.rmtree(state_root() / token)


@contextmanager
def _open_federation(cell: Cell, connection: Connection, token: str) -> Iterator[tuple[SuperLink, HealthCheck]]:
    """Open a SuperLink, and yield it with a function that describes a necessary process that has ended.

    Without an address, SuperLink and silos are started on this machine, and end with the block.  The silos'
    processes are then necessary, unless the run may continue without silos.  The function returns None as long as
    no necessary process has ended.

    Args:
        cell: Cell of the run.
        connection: Address of a SuperLink with its root certificates, or no address.
        token: Name of the folder of shards and ledgers, which survives an interruption.
    """
    if connection.superlink is not None:
        check_certificates(*filter(None, [connection.root_certificates]))
        yield SuperLink(ControlClient(connection.superlink, connection.root_certificates)), lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="fedpriv-") as name:
        home = Path(name)
        # shards and ledgers must survive an interruption, and never lie in RUN_DIR
        policies = write_silos(cell, state_root() / token, home)
        with federation_superlink(home, len(policies)) as link:
            assert link.address is not None
            silos = [
                LocalSilo(silo_id, policy, link.address, node_key_folder(home, silo_id))
                for silo_id, policy in enumerate(policies)
            ]
            for silo in silos:
                silo.start()
            yield (
                link,
                lambda: next(
                    (
                        description
                        for silo in ([] if cell.deployment.missing == "continue" else silos)
                        if (description := silo.describe_ended_process()) is not None
                    ),
                    None,
                ),
            )


def run_ray(cells: Sequence[Cell], observer: RunObserver) -> Iterator[IndexedOutcome]:
    """Run cells one after another on a SuperLink that simulates a SuperNode for each silo.

    Yields:
        The outcome of each cell, with the index of the cell.

    Raises:
        InputError: Ray is not installed, `refuse_root` refuses, a cell has settings of the vectorized engine, or a
            server refuses its run.
        RunError: A run failed, the SuperLink does not start or answer, or a program of Flower is missing.
    """
    refuse({"--engine ray: Ray is not installed here; pip install 'fedpriv[ray]'": find_spec("ray") is None})
    refuse_root("--engine ray")
    with (
        tempfile.TemporaryDirectory(prefix="fedpriv-ray-") as folder,
        simulation_superlink(Path(folder)) as link,
    ):
        for index, cell in enumerate(cells):
            refuse_vectorized_options(cell, "ray")
            run_folder = Path(folder, f"cell-{index}")
            run_folder.mkdir()
            run = link.submit(
                make_run_config(cell, run_folder),
                {
                    "num_supernodes": cell.federation.silos,
                    "client_resources_num_cpus": 1,
                    "init_args_num_cpus": os.cpu_count() or 1,
                },
            )
            outcome = follow_run(
                link,
                run,
                FolderReader(run_folder),
                lambda: None,
                RunProgress(observer, index, cell.schedule.rounds),
            )
            # Flower ends the run after its outcome is there, and Ray's processes outlive an interruption.
            deadline = time.monotonic() + _END_SECONDS
            while not link.control.run_status(run).is_over and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            yield IndexedOutcome(index, outcome)
