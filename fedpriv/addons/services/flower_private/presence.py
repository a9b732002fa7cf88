"""State that a SuperLink knows about silos and runs.

A silo is named silo-N by the key that is registered for it.  The Control API serves commands, and the Fleet API
serves SuperNodes.  A follower of a run is a command that asks for the run's status until it ends.

A restart loses the state of silos.  The list of runs can be kept in a file over restarts.
"""

import datetime
import json
import logging
import os
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpriv.addons.services.flower_private import FOLLOWED_RUN_HEADER, RESTART_REASON, VERSION_HEADER
from fedpriv.addons.services.flower_private.control import ControlClient, RunStatus
from fedpriv.addons.services.flower_private.names import CONTROL_PREFIX, FLEET_PREFIX
from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.core.files import PRIVATE_MODE, acquire_lock, write_bytes
from fedpriv.core.logs import log_fields
from fedpriv.silo.metrics import ServiceMetric

_log = logging.getLogger("fedpriv.superlink")
_MAX_RUNS, _POLL_SECONDS = 1000, 2.0
_ROUND_LOG_SECONDS = 60.0
"""Shortest time between two lines on the rounds of one run, in seconds."""
_START_SECONDS = 360.0
"""Seconds after which a run that no server has taken up makes the service unhealthy."""


class Presence:
    """ASGI app that records the silos and runs from which its requests come.

    Guarantee: a silo's entry is changed by requests whose time its registered key has signed, and by no others.  A
    revoked key is registered no longer.  The entry has the time of the request, the version that the silo claims
    to run, and its clock's difference.  A silo whose key is revoked is marked until it gets another key.
    """

    def __init__(self, app: ASGIApp, nodes: Mapping[str, bytes], refusals_path: Path | None = None) -> None:
        """Set up the record of silos and runs for the requests to `app`.

        Args:
            app: App that answers the requests.
            nodes: Public key (PEM) by the name of the silo.
            refusals_path: File in which a run's server finds the silos that their clocks keep out, or None.
        """
        self.app, self._refusals_path, self._start_time = app, refusals_path, time.time()
        self._name_by_key: dict[bytes, str] = {}
        self._silos: dict[str, dict[str, Any]] = {}
        self.add_nodes(nodes)
        self._followed_runs: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the app, and record the follower of a run or the silo that sent it.

        A silo is recorded by its registered key if the app admits the request (200), or refuses it (401) because
        of the silo's clock.
        """
        headers = (
            Headers(scope=scope) if scope["type"] == "http" else Headers()
        )  # the first of two equal headers, as Flower reads them
        if scope["type"] == "http" and scope["path"].startswith(CONTROL_PREFIX) and FOLLOWED_RUN_HEADER in headers:
            self._note_follower(headers[FOLLOWED_RUN_HEADER])
        if scope["type"] != "http" or not scope["path"].startswith(FLEET_PREFIX) or not self._name_by_key:
            await self.app(scope, receive, send)
            return
        arrival_time = time.time()

        async def record_silo(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (200, 401):
                # Requests of unknown keys belong to no silo.
                with suppress(ValueError, KeyError, TypeError, InvalidSignature):
                    self._note_silo(headers, arrival_time, is_admitted=message["status"] == 200)
            await send(message)

        await self.app(scope, receive, record_silo)

    def add_nodes(self, nodes: Mapping[str, bytes], revoked: Collection[str] = ()) -> None:
        """Record silos by these names and public keys (PEM), which replace their former keys and entries.

        Args:
            nodes: Public key by the name of the silo.
            revoked: Names of silos whose keys are revoked, and which have none from now on.
        """
        self._name_by_key = {
            key: name for key, name in self._name_by_key.items() if name not in nodes and name not in revoked
        } | {key.strip(): name for name, key in nodes.items()}
        self._silos |= {name: {} for name in nodes} | {
            name: {**self._silos.get(name, {}), "revoked": True} for name in revoked
        }
        self._write_refusals()

    def snapshot(self) -> dict[str, Any]:
        """Return the entries of silos by name, and the time of the last request of a run's follower by run.

        Times are in seconds of the epoch, and "since" is the start of this record.
        """
        return {"since": self._start_time, "silos": self._silos, "followed": self._followed_runs}

    def _note_follower(self, run: str) -> None:
        if run.isascii() and run.isdigit() and len(run) <= 20:
            other_runs = [item for item in self._followed_runs.items() if item[0] != run]
            self._followed_runs = dict([*other_runs, (run, time.time())][-_MAX_RUNS:])

    def metrics(self) -> list[ServiceMetric]:
        """Return metrics of each silo by its number, also of one that never connected, for Prometheus."""
        return [
            ServiceMetric(f"fedpriv_superlink_silo_{name}", help_text, silo.get(key, 0.0), {"silo": number})
            for name, help_text, key in (
                ("seen_seconds", "When it was heard of, since 1970; 0 if never.", "seen"),
                ("ahead_seconds", "By how much its clock is ahead.", "ahead"),
                ("refused_seconds", "When its clock kept it out, since 1970; 0 if it does not.", "refused"),
            )
            for number, silo in [(name.removeprefix("silo-"), silo) for name, silo in self._silos.copy().items()]
        ]

    def _note_silo(self, headers: Headers, arrival_time: float, *, is_admitted: bool) -> None:
        """Record a silo's admitted request, or the refusal of a signed request with a wrong clock.

        Flower has verified the signature of an admitted request, and a refused one is verified here.  A request
        that was refused with a tolerated clock changes nothing.

        Args:
            headers: Headers with the key, the time of the signature, and the signature.
            arrival_time: Arrival of the request, in seconds of the epoch.
            is_admitted: Whether the app admitted the request.

        Raises:
            ValueError, KeyError, TypeError, InvalidSignature: The key is of no silo, or a header is missing or
                wrong.
        """
        from flwr.common.constant import TIMESTAMP_HEADER  # slow to import, and no command needs them
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

        from fedpriv.protocol.messages import is_clock_tolerated

        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        silo = self._silos[self._name_by_key[key.strip()]]
        timestamp = headers[TIMESTAMP_HEADER]
        ahead = datetime.datetime.fromisoformat(timestamp).timestamp() - arrival_time
        was_refused = "refused" in silo
        if is_admitted:
            silo.update(
                seen=arrival_time,
                ahead=ahead,
                fedpriv=sanitize_line(headers.get(VERSION_HEADER, "an unknown version"), 40),
            )
            silo.pop("refused", None)
        elif not is_clock_tolerated(ahead) and isinstance(
            public_key := serialization.load_pem_public_key(key), ec.EllipticCurvePublicKey
        ):
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            public_key.verify(signature, timestamp.encode(), ec.ECDSA(hashes.SHA256()))
            silo.update(refused=arrival_time, ahead=ahead)
        # The file has the refused silos, of which this one may have become or ceased to be one.
        if was_refused != ("refused" in silo):
            self._write_refusals()

    def _write_refusals(self) -> None:
        if self._refusals_path is not None:
            refusals = {
                name: format_clock_refusal(silo["ahead"])
                for name, silo in self._silos.items()
                if "refused" in silo
            }
            with suppress(OSError):  # the folder is deleted with the service
                self._refusals_path.write_text(json.dumps(refusals), encoding="utf-8")


def _format_offset(ahead: float) -> str:
    from fedpriv.protocol.messages import format_clock_offset  # imports Flower

    return format_clock_offset(ahead)


def format_clock_refusal(ahead: float) -> str:
    """Return the reason for which a silo's clock keeps it out."""
    return f"its clock is {_format_offset(ahead)} the SuperLink's, which refuses it; set both by NTP"


class RunReport(NamedTuple):
    """Report of a run's server in the run's folder."""

    rounds: int = 0
    """Number of finished rounds."""
    silos: tuple[int, ...] = ()
    """Silos for which the server waits."""
    failure: str = ""
    """Reason of the run's failure, or "" without one."""


def read_report(folder: str) -> RunReport:
    """Read the reports in the folder of a run.

    A missing or damaged report counts as none.  If `folder` is "", all are missing.
    """

    def read(name: str, convert: Callable[[str], Any], fallback: object) -> Any:
        try:
            return convert(Path(folder or os.devnull, name).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return fallback

    return RunReport(
        read("progress", int, 0),
        read("waiting.json", lambda text: tuple(map(int, json.loads(text)["silos"])), ()),
        read("failure.json", lambda text: str(json.loads(text)["message"]), ""),
    )


class RunHistory:
    """Last thousand runs, stored in a file of mode 0600 if a path is given."""

    def __init__(self, path: Path | None) -> None:
        """Lock the file of runs against other SuperLinks, and read it if it exists.

        Unfinished runs in the file count as failed by the restart, since their servers are gone.

        Args:
            path: File, which need not exist, or None for a history in memory.

        Raises:
            InputError: The file cannot be used, others have permissions on it, or another SuperLink has it locked.
        """
        self._path, self._next_poll = path, 0.0
        self._runs: dict[str, dict[str, Any]] = {}
        self._reports: dict[str, tuple[RunReport, float]] = {}
        self._start_times: dict[str, float] = {}
        self._stored_entries: list[dict[str, Any]] = []
        if path is None:
            return
        end_fields = {
            "state": f"finished:failed ({RESTART_REASON})",
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        }
        try:
            exists = path.exists()
            refuse(
                {
                    f"--state {path}: others can read it; chmod 600 {path}": exists
                    and path.stat().st_mode & 0o077,
                    f"--state {path}: cannot be written there": not (exists or os.access(path.parent, os.W_OK)),
                }
            )
            self._lock = path.with_name(f".{path.name}.lock").open("a")
            acquire_lock(self._lock.fileno(), 0.0)
            if exists:
                self._runs = {
                    str(run["run"]): dict(run) if run.get("finished") else {**run, **end_fields}
                    for run in json.loads(path.read_text(encoding="utf-8"))
                }
        except BlockingIOError:
            raise InputError(f"--state {path}: another SuperLink keeps its runs there; end it first") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"--state {path}: cannot be used ({error}); move it away to begin another") from None

    def is_due(self) -> bool:
        """Whether the runs are to be polled again, at most every two seconds.

        The two seconds begin with an answer True.
        """
        if time.monotonic() < self._next_poll:
            return False
        self._next_poll = time.monotonic() + _POLL_SECONDS
        return True

    def update(self, runs: Iterable[Any]) -> None:
        """Record these runs, as Flower lists them, log their changes, and update the file.

        Runs that were recorded as over are not logged again.  The file, which lacks Flower's details, is written
        if the runs differ from those written last, or if it is gone.
        """
        current_runs, now = [_run_data(run) for run in runs], time.monotonic()
        for data in current_runs:
            if not RunStatus(self._runs.get(data["run"], data | {"state": ""})["state"]).is_over:
                self._log_changes(data, now)
        # Times since which runs wait for their server (`why_stuck`).
        self._start_times = {
            data["run"]: self._start_times.get(data["run"], now)
            for data in current_runs
            if data["state"] in ("pending", "starting")
        }
        self._runs |= {data["run"]: data for data in current_runs}
        self._runs = dict(list(self._runs.items())[-_MAX_RUNS:])
        entries = [{key: value for key, value in run.items() if key != "details"} for run in self.runs()]
        if self._path is not None and (entries != self._stored_entries or not self._path.exists()):
            with suppress(OSError):
                write_bytes(self._path, json.dumps(entries).encode(), PRIVATE_MODE)
                self._stored_entries = entries

    def _log_changes(self, data: Mapping[str, Any], now: float) -> None:
        """Log a run's start and end, changes of the silos that it waits for, and rounds once a minute at most.

        `data` is from `_run_data`, and `now` the time on the monotonic clock.
        """
        run, status, report = data["run"], RunStatus(data["state"]), read_report(data["folder"])
        last_report, last_time = self._reports.get(run, (RunReport(), 0.0))
        is_round_due = report.rounds > last_report.rounds and now - last_time > _ROUND_LOG_SECONDS
        reason = f": {report.failure or data['details']}" if report.failure or data["details"] else ""
        lines = [
            (run not in self._reports, "started", f"is to write to {sanitize_line(data['folder'])}"),
            (
                report.silos != last_report.silos and not status.is_over,
                "waiting",
                f"waits for silo {', '.join(map(str, report.silos))}" if report.silos else "waits no longer",
            ),
            (is_round_due, "round", f"has done round {report.rounds}"),
            (status.is_over, "ended", f"{status.state}{reason}"),
        ]
        for is_due, event, message in lines:
            is_warning = (event == "waiting" and report.silos) or (event == "ended" and reason)
            if is_due:
                _log.log(
                    logging.WARNING if is_warning else logging.INFO,
                    "%s",
                    message,
                    extra=log_fields(run, report.rounds, event),
                )
        # Until rounds are logged again, the last logged number of rounds and its time stay.
        self._reports[run] = (
            (report, now) if is_round_due else (last_report._replace(silos=report.silos), last_time)
        )
        if status.is_over:
            del self._reports[run]

    def why_stuck(self) -> str | None:
        """Return a fault if no server has taken up a run for six minutes, or None."""
        return next(
            (
                f"run {run} is not started after {wait:.0f} s"
                for run, start_time in self._start_times.items()
                if (wait := time.monotonic() - start_time) > _START_SECONDS
            ),
            None,
        )

    def metrics(self) -> list[ServiceMetric]:
        """Return metrics of all runs by state, and of each open run, for Prometheus."""
        runs, name = self.runs(), "fedpriv_superlink_run"
        counts = Counter(data["state"].partition(" ")[0] for data in runs)
        reports = {
            data["run"]: read_report(data["folder"]) for data in runs if not RunStatus(data["state"]).is_over
        }
        return [
            *(ServiceMetric(f"{name}s", "Runs.", count, {"state": state}) for state, count in counts.items()),
            *(
                ServiceMetric(f"{name}_rounds", "Rounds done of a run under way.", report.rounds, {"run": run})
                for run, report in reports.items()
            ),
            *(
                ServiceMetric(
                    f"{name}_disk_free_bytes", "Free for its folder.", disk_usage(path).free, {"run": run}
                )
                for run, path in ((data["run"], data["folder"]) for data in runs if data["run"] in reports)
                if path and Path(path).is_dir()
            ),
            *(
                ServiceMetric(f"{name}_waits", "Silos that it waits for.", len(report.silos), {"run": run})
                for run, report in reports.items()
            ),
        ]

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs, the oldest first."""
        return list(self._runs.values())


def _run_data(run: Any) -> dict[str, Any]:
    status = RunStatus.from_run(run)
    return {
        **{"run": str(run.run_id), "state": status.state, "details": status.details},
        **{"started": run.running_at, "finished": run.finished_at},
        "folder": run.override_config["out"].string if "out" in run.override_config else "",
    }


_MAX_SHOWN_RUNS = 100
_AWAY_SECONDS = 60.0
"""Seconds without a request after which a silo is not connected, and a run has no follower."""


@dataclass(frozen=True)
class FederationSilo:
    """Silo whose key is or was registered, and facts that the SuperLink recorded since its start."""

    silo: int
    """Number of the silo."""
    connected: bool
    """Whether a request was admitted in the last minute, and the silo is not `refused`."""
    seen: float | None
    """Time of the last admitted request in seconds of the epoch, or None without one."""
    fedpriv: str | None
    """Version that the silo claims to run, or None without an admitted request."""
    clock_ahead: float | None
    """Seconds by which the silo's clock was ahead of the coordinator's, or None if they are not known.

    The value is smaller than the real one by the travel time of the request.
    """
    refused: str | None
    """Reason why the silo is not let in, or None.

    The reason is a revoked key, or the clock at a refusal less than two minutes ago, since which no request was
    admitted.
    """

    def format_line(self) -> str:
        """Format one line for a person: refusal, or connection, version and clock."""
        ago = "never" if self.seen is None else f"{time.time() - self.seen:.0f} s ago"
        if self.refused:
            return f"silo {self.silo}: not let in (last connected: {ago}): {self.refused}"
        if self.seen is None or self.clock_ahead is None:
            return f"silo {self.silo}: not connected since the SuperLink was started"
        clock = (
            "as here" if abs(self.clock_ahead) < 1.0 else f"{_format_offset(self.clock_ahead)} the coordinator's"
        )
        return (
            f"silo {self.silo}: {'connected' if self.connected else 'away'}, last seen {ago}, "
            f"fedpriv {self.fedpriv}, clock {clock}"
        )


@dataclass(frozen=True)
class FederationRun:
    """A run.  Times are in Flower's format, or "" for events that have not happened."""

    run: str
    """Id of the run."""
    state: str
    """State of the run, such as "running", with a reason if a restart of the SuperLink ended the run."""
    started: str
    """Start of the run."""
    finished: str
    """End of the run."""
    rounds: int
    """Number of rounds that the run's server has reported, or 0 without a readable report."""
    folder: str
    """Folder of the run's reports, or "" if the run names none."""
    orphan: bool
    """Whether the run is not over, and no `fedpriv run` has asked for it for a minute."""
    details: str = ""
    """Details that Flower gives of the run's end, or "" if there are none."""

    def format_line(self) -> str:
        """Format one line for a person."""
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'} done"
        note = f" ({self.details})" if self.details else ""
        start = f", started {self.started[:19]}Z" if self.started else ""
        return f"run {self.run}: {self.state}{start}, {rounds}, in {self.folder or 'an unknown folder'}{note}" + (
            f"; no `fedpriv run` follows it: `fedpriv federation stop {self.run}` ends it" if self.orphan else ""
        )


def list_silos(control: ControlClient) -> list[FederationSilo]:
    """List the silos whose keys are registered, or were since the SuperLink's start, by number.

    Raises:
        RunError: No SuperLink of fedpriv answers.
    """
    return sorted(
        (_make_silo(*item) for item in control.fetch_presence()["silos"].items()), key=lambda silo: silo.silo
    )


def _make_silo(name: str, entry: Mapping[str, Any]) -> FederationSilo:
    last_seen, refused, ahead = entry.get("seen"), entry.get("refused"), entry.get("ahead")
    is_refused = refused is not None and time.time() - refused < 2 * _AWAY_SECONDS
    return FederationSilo(
        silo=int(name.removeprefix("silo-")),
        connected=last_seen is not None
        and not (is_refused or entry.get("revoked"))
        and time.time() - last_seen < _AWAY_SECONDS,
        seen=last_seen,
        fedpriv=entry.get("fedpriv"),
        clock_ahead=ahead,
        refused="its key is revoked, and it has no other"
        if entry.get("revoked")
        else format_clock_refusal(ahead)
        if is_refused and ahead is not None
        else None,
    )


def list_runs(control: ControlClient) -> list[FederationRun]:
    """List the last hundred runs, the newest first.

    Raises:
        RunError: No SuperLink of fedpriv answers.
    """
    presence = control.fetch_presence()
    return [_make_run(run, presence) for run in presence["runs"][: -_MAX_SHOWN_RUNS - 1 : -1]]


def _make_run(run: Mapping[str, Any], presence: Mapping[str, Any]) -> FederationRun:
    folder, followed = str(run["folder"]), presence["followed"].get(run["run"], presence["since"])
    return FederationRun(
        **{name: str(run.get(name, "")) for name in ("run", "state", "started", "finished", "details")},
        rounds=read_report(folder).rounds,
        folder=sanitize_line(folder),
        orphan=not RunStatus(run["state"]).is_over and time.time() - followed > _AWAY_SECONDS,
    )
