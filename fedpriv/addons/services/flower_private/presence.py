"""What a SuperLink knows of silos and of runs.

SuperNodes, by the keys that were registered, and commands that follow runs were there at some time.  A SuperNode's
requests say when it signed them and which fedpriv it runs; a command's say which run it follows.  Nothing of it is
in a message, and nothing of it is stored.

Runs are known after a restart, too.  They are in one file, without a message, a token or an array; messages are in
memory only, and so is all that a trusted server could be asked for.
"""

import datetime
import json
import os
import time
from base64 import b64decode
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpriv.addons.services.flower_private import FOLLOWED_RUN_HEADER, RESTART_REASON, VERSION_HEADER
from fedpriv.addons.services.flower_private.control import ControlClient, RunStatus
from fedpriv.addons.services.flower_private.names import CONTROL_PREFIX, FLEET_PREFIX
from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.core.files import PRIVATE_MODE, write_bytes
from fedpriv.protocol.messages import format_clock_offset, is_clock_tolerated

_MAX_RUNS, _POLL_SECONDS = 1000, 2.0


class Presence:
    """An ASGI app that notes who its requests are from, by silo and by run.

    Guarantee: a silo's entry is changed by requests that its registered key has signed, and by no others.  What is
    noted of it is when it was there, what it says it runs, and by how much its clock differs.
    """

    def __init__(self, app: ASGIApp, nodes: Mapping[str, bytes], refusals_path: Path | None = None) -> None:
        """`nodes`: name -> public key (PEM); in the file `refused` the server finds why a silo is not let in."""
        self.app = app
        self._name_by_key = {key.strip(): name for name, key in nodes.items()}
        self._silos: dict[str, dict[str, Any]] = {name: {} for name in nodes}
        self._followed_runs: dict[str, float] = {}
        self._refusals_path, self._start_time = refusals_path, time.time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()  # the first of two, as for Flower
        if scope["type"] == "http" and scope["path"].startswith(CONTROL_PREFIX) and FOLLOWED_RUN_HEADER in headers:
            self._note_follower(headers[FOLLOWED_RUN_HEADER])
        if scope["type"] != "http" or not scope["path"].startswith(FLEET_PREFIX) or not self._name_by_key:
            await self.app(scope, receive, send)
            return
        came = time.time()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (200, 401):
                with suppress(ValueError, KeyError, TypeError, InvalidSignature):  # a stranger's are no silo's
                    self._note_silo(headers, came, is_admitted=message["status"] == 200)
            await send(message)

        await self.app(scope, receive, noting)

    def snapshot(self) -> dict[str, Any]:
        """Silos by name and runs by id, with the times (seconds of the epoch) at which they were heard of."""
        return {"since": self._start_time, "silos": self._silos, "followed": self._followed_runs}

    def _note_follower(self, run: str) -> None:
        if run.isascii() and run.isdigit() and len(run) <= 20:
            others = [item for item in self._followed_runs.items() if item[0] != run]
            self._followed_runs = dict([*others, (run, time.time())][-_MAX_RUNS:])

    def _note_silo(self, headers: Headers, came: float, *, is_admitted: bool) -> None:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        silo = self._silos[self._name_by_key[key.strip()]]
        signed = headers[TIMESTAMP_HEADER]
        ahead = datetime.datetime.fromisoformat(signed).timestamp() - came
        was_refused = "refused" in silo
        if is_admitted:
            silo.update(
                seen=came,
                ahead=ahead,
                fedpriv=sanitize_line(headers.get(VERSION_HEADER, "an unknown version"), 40),
            )
            silo.pop("refused", None)
        elif not is_clock_tolerated(ahead) and isinstance(
            public := serialization.load_pem_public_key(key), ec.EllipticCurvePublicKey
        ):
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            public.verify(signature, signed.encode(), ec.ECDSA(hashes.SHA256()))
            silo.update(refused=came, ahead=ahead)
        if was_refused != ("refused" in silo):
            self._write_refusals()

    def _write_refusals(self) -> None:
        if self._refusals_path is not None:
            told = {
                name: format_clock_refusal(silo["ahead"])
                for name, silo in self._silos.items()
                if "refused" in silo
            }
            with suppress(OSError):  # the folder goes with the service
                self._refusals_path.write_text(json.dumps(told), encoding="utf-8")


def format_clock_refusal(ahead: float) -> str:
    """Say of a silo why its clock keeps it out."""
    return f"its clock is {format_clock_offset(ahead)} the SuperLink's, which refuses it; set both by NTP"


class RunHistory:
    """The last thousand runs, in a file of mode 0600, if there is one."""

    def __init__(self, path: Path | None) -> None:
        """InputError for a file that cannot be used; runs that were not over in it have ended by now."""
        self._path, self._next_poll = path, 0.0
        self._runs: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        ended = {
            "state": f"finished:failed ({RESTART_REASON})",
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        }
        try:
            there = path.exists()
            refuse(
                {
                    f"--state {path}: others can read it; chmod 600 {path}": there and path.stat().st_mode & 0o077,
                    f"--state {path}: cannot be written there": not (there or os.access(path.parent, os.W_OK)),
                }
            )
            if there:
                self._runs = {
                    str(run["run"]): dict(run) if run.get("finished") else {**run, **ended}
                    for run in json.loads(path.read_text(encoding="utf-8"))
                }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"--state {path}: cannot be used ({error}); move it away to begin another") from None

    def is_due(self) -> bool:
        """Whether it is time to look at the runs again."""
        if self._path is None or time.monotonic() < self._next_poll:
            return False
        self._next_poll = time.monotonic() + _POLL_SECONDS
        return True

    def update(self, runs: Iterable[Any]) -> None:
        """Note these runs; a full disk leaves this for another time."""
        before = self.runs()
        self._runs |= {str(run.run_id): _run_data(run) for run in runs}
        self._runs = dict(list(self._runs.items())[-_MAX_RUNS:])
        if self._path is not None and (self.runs() != before or not self._path.exists()):
            told = [{key: value for key, value in run.items() if key != "details"} for run in self.runs()]
            with suppress(OSError):
                write_bytes(self._path, json.dumps(told).encode(), PRIVATE_MODE)

    def runs(self) -> list[dict[str, Any]]:
        """Runs, the oldest first."""
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
"""Seconds without a word after which a silo is not connected, and a run is followed by nobody."""


@dataclass(frozen=True)
class FederationSilo:
    """A silo whose key is registered; times in seconds of the epoch, None for what never happened."""

    silo: int
    connected: bool
    seen: float | None
    fedpriv: str | None
    clock_ahead: float | None
    """Seconds by which its clock was ahead of the coordinator's, the way of the request included."""
    refused: str | None

    def format_line(self) -> str:
        """One line for a person."""
        ago = "never" if self.seen is None else f"{time.time() - self.seen:.0f} s ago"
        if self.refused:
            return f"silo {self.silo}: not let in (last connected: {ago}): {self.refused}"
        if self.seen is None or self.clock_ahead is None:
            return f"silo {self.silo}: not connected since the SuperLink was started"
        clock = (
            "as here"
            if abs(self.clock_ahead) < 1.0
            else f"{format_clock_offset(self.clock_ahead)} the coordinator's"
        )
        state = f"{'connected' if self.connected else 'away'}, last seen {ago}"
        return f"silo {self.silo}: {state}, fedpriv {self.fedpriv}, clock {clock}"


@dataclass(frozen=True)
class FederationRun:
    """A run; times as Flower writes them, "" for what has not happened."""

    run: str
    state: str
    started: str
    finished: str
    rounds: int
    """Number of rounds that its server has reported."""
    folder: str
    orphan: bool
    """Whether it is not over, and no `fedpriv run` has asked for it for a minute."""
    details: str = ""
    """Details that Flower gives of its end, "" if there are none."""

    def format_line(self) -> str:
        """One line for a person."""
        done = f"{self.rounds} round{'' if self.rounds == 1 else 's'} done"
        said = f" ({self.details})" if self.details else ""
        at = f", started {self.started[:19]}Z" if self.started else ""
        orphan = (
            f"; no `fedpriv run` follows it: `fedpriv federation stop {self.run}` ends it" if self.orphan else ""
        )
        return f"run {self.run}: {self.state}{at}, {done}, in {self.folder or 'an unknown folder'}{said}{orphan}"


def list_silos(control: ControlClient) -> list[FederationSilo]:
    """List the silos whose keys are registered.  RunError if no SuperLink of fedpriv answers."""
    return sorted(
        (_make_silo(*item) for item in control.fetch_presence()["silos"].items()), key=lambda silo: silo.silo
    )


def _make_silo(name: str, entry: Mapping[str, Any]) -> FederationSilo:
    seen, refused, ahead = entry.get("seen"), entry.get("refused"), entry.get("ahead")
    out = refused is not None and time.time() - refused < 2 * _AWAY_SECONDS
    return FederationSilo(
        silo=int(name.removeprefix("silo-")),
        connected=seen is not None and not out and time.time() - seen < _AWAY_SECONDS,
        seen=seen,
        fedpriv=entry.get("fedpriv"),
        clock_ahead=ahead,
        refused=format_clock_refusal(ahead) if out and ahead is not None else None,
    )


def list_runs(control: ControlClient) -> list[FederationRun]:
    """The last hundred runs, the newest first; RunError if no SuperLink of fedpriv answers."""
    told = control.fetch_presence()
    return [_make_run(run, told) for run in told["runs"][: -_MAX_SHOWN_RUNS - 1 : -1]]


def _make_run(run: Mapping[str, Any], told: Mapping[str, Any]) -> FederationRun:
    from fedpriv.protocol.cell_folder import FolderReader  # takes torch, which the SuperLink does not need

    folder, followed = str(run["folder"]), told["followed"].get(run["run"], told["since"])
    return FederationRun(
        **{name: str(run.get(name, "")) for name in ("run", "state", "started", "finished", "details")},
        rounds=FolderReader(Path(folder)).read_round() if folder else 0,
        folder=sanitize_line(folder),
        orphan=not RunStatus(run["state"]).is_over and time.time() - followed > _AWAY_SECONDS,
    )
