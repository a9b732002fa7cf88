"""Clients of a SuperLink's APIs over HTTP, and of the Control API, which starts, lists and stops runs.

A route is a path of the SuperLink with the types of its request and its answer.  A bundle is the packed files of a
Flower app, which a run is started with.  A follower of a run is a command that asks for the run's status until it
ends.  Modules of Flower are imported in functions, since that takes seconds.
"""

import hashlib
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from google.protobuf.message import DecodeError

from fedpriv.addons.services.flower_private import FOLLOWED_RUN_HEADER, STATUS_PATH
from fedpriv.addons.services.flower_private.names import LIST_RUNS, START_RUN, STOP_RUN, Route
from fedpriv.core.errors import RunError, refuse, sanitize_line

UNIX_PREFIX = "unix:"
MEDIA_TYPE = "application/protobuf"


@dataclass
class ApiClient:
    """Client of one of a SuperLink's APIs, over an HTTP client whose base URL is that of the SuperLink."""

    client: httpx.Client
    headers: Callable[[Route, Any], Mapping[str, str]] = lambda _route, _request: {}
    """Function that returns headers about the sender of a request."""

    def ask(self, route: Route, request: Any, timeout: float | None = None) -> Any:
        """Return the SuperLink's answer, of the route's answer type.

        Args:
            route: Route of the request.
            request: Request, of the route's request type.
            timeout: Longest wait in seconds, or None for that of the HTTP client.

        Raises:
            httpx.HTTPError: If there is no answer, or the answer is a refusal or cannot be read.
        """
        headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, **self.headers(route, request)}
        answer = self.client.post(
            route.path,
            content=request.SerializeToString(deterministic=True),
            headers=headers,
            timeout=self.client.timeout if timeout is None else timeout,
        ).raise_for_status()
        try:
            return route.answer_type.FromString(answer.content)
        except DecodeError as error:
            raise httpx.DecodingError(f"the answer of {route.path} cannot be read ({error})") from None


def open_client(address: str, authority: Path | None, *, connect_seconds: float = 30.0) -> httpx.Client:
    """Return a client of `unix:SOCKET`, or of host:port, over TLS if an authority is given.

    The client ignores proxies of the environment.
    """
    socket = address.removeprefix(UNIX_PREFIX) if address.startswith(UNIX_PREFIX) else None
    scheme, host = "http" if authority is None else "https", address if socket is None else "superlink"
    return httpx.Client(
        base_url=f"{scheme}://{host}",
        transport=httpx.HTTPTransport(
            uds=socket,
            verify=True if authority is None else ssl.create_default_context(cafile=str(authority)),
            trust_env=False,
        ),
        timeout=httpx.Timeout(30.0, connect=connect_seconds),
    )


def parse_refusal(response: httpx.Response) -> tuple[int, str]:
    """Return the code that Flower gives to a refusal, or 0 without one, and the reason in one line."""
    try:
        error = json.loads(response.text)
        code, text = error.get("code", 0), f"{error['detail']} {error.get('extra', '')}".strip()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        code, text = 0, response.text or response.reason_phrase
    return code if isinstance(code, int) else 0, sanitize_line(text)


_CONNECT_SECONDS = 5.0


class UnreachableError(RunError):
    """Missing answer of a SuperLink, which may answer the next request."""


class LostRunError(RunError):
    """Loss of a run by the SuperLink, for example in a restart."""


@dataclass(frozen=True)
class RunStatus:
    """State of a run as Flower names it, such as `finished:failed`, and Flower's details."""

    state: str
    details: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, by success, failure or a stop."""
        return self.state.startswith("finished")

    @staticmethod
    def from_run(run: Any) -> "RunStatus":
        """Return the status of a run that the Control API lists."""
        return RunStatus(
            ":".join(filter(None, (run.status.status, run.status.sub_status))), sanitize_line(run.status.details)
        )


@dataclass(frozen=True)
class ControlClient:
    """Client of the Control API at `unix:SOCKET` or host:port, over TLS if there are root certificates.

    Requests raise RunError for a refusal, and its subclass UnreachableError if no readable answer comes in time.
    """

    address: str
    root_certificates: Path | None = None

    def start_run(self, pyproject: str, out: str, simulation: Mapping[str, int] | None = None) -> int:
        """Submit an app that is a pyproject.toml alone, and so sends no code, and return the run's id.

        Args:
            pyproject: Text of the file.
            out: Folder of the run, which lists of runs show.
            simulation: Settings of Flower's simulation, or None for a deployment.

        Raises:
            RunError: The SuperLink does not answer, refuses, or starts no run.
        """
        from flwr.cli.build import build_fab_from_files
        from google.protobuf.json_format import ParseDict

        # Flower names a bundle by its SHA-256.
        content, _ = build_fab_from_files({"pyproject.toml": pyproject.encode()})
        request = START_RUN.request_type()
        request.fab.content, request.fab.hash_str = content, hashlib.sha256(content).hexdigest()
        request.override_config["out"].string = out
        if simulation is not None:
            ParseDict(dict(simulation), request.override_federation_config)
        answer = self._answer(lambda client: ApiClient(client).ask(START_RUN, request))
        refuse({f"the SuperLink at {self.address} did not start the run": not answer.HasField("run_id")}, RunError)
        return int(answer.run_id)

    def run_status(self, run_id: int) -> RunStatus:
        """Return the status of a run, and mark the caller as a follower of the run.

        Raises:
            LostRunError: The SuperLink does not know the run, such as one from before its restart.
        """
        request, headers = LIST_RUNS.request_type(run_id=run_id), {FOLLOWED_RUN_HEADER: str(run_id)}
        answer = self._answer(lambda client: ApiClient(client, lambda *_: headers).ask(LIST_RUNS, request))
        return RunStatus.from_run(answer.run_dict[run_id])

    def stop_run(self, run_id: int) -> None:
        """Stop a run.

        Raises:
            RunError: The SuperLink does not answer, refuses, or does not know the run (LostRunError).
        """
        self._answer(lambda client: ApiClient(client).ask(STOP_RUN, STOP_RUN.request_type(run_id=run_id)))

    def fetch_presence(self) -> dict[str, Any]:
        """Return the SuperLink's data on silos, runs and followers of runs, from `STATUS_PATH`.

        Raises:
            RunError: There is no answer, or it is a refusal or no JSON object.
        """
        return dict(self._answer(lambda client: dict(client.get(STATUS_PATH).raise_for_status().json())))

    def _answer(self, ask: Callable[[httpx.Client], Any]) -> Any:
        """Call `ask` with an HTTP client of the SuperLink, and return its result.

        Args:
            ask: Function that sends a request, and raises httpx.HTTPStatusError for a refusal.

        Raises:
            LostRunError: If the SuperLink does not know the run.
            UnreachableError: If there is no answer, or none that can be read, the address is none, or the root
                certificates cannot be read.
            RunError: If the answer is a refusal.
        """
        try:
            with open_client(self.address, self.root_certificates, connect_seconds=_CONNECT_SECONDS) as client:
                return ask(client)
        except httpx.HTTPStatusError as error:
            from flwr.supercore.error import ApiErrorCode

            code, reason = parse_refusal(error.response)
            if code == ApiErrorCode.RUN_ID_NOT_FOUND:
                raise LostRunError(f"the SuperLink at {self.address} does not know this run") from None
            raise RunError(f"the SuperLink at {self.address} refuses: {reason}") from None
        except (httpx.RequestError, httpx.InvalidURL, OSError, ValueError, TypeError, RecursionError) as error:
            raise UnreachableError(
                f"the SuperLink at {self.address} cannot be reached: {_explain_unreachable(error)}"
            ) from None


def _explain_unreachable(error: Exception) -> str:
    """Return the error's text or type, with advice for an expired certificate or a missing listener.

    On Linux a missing socket is errno 2, and a port without a listener is errno 111.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, OSError):  # errors of the connection are httpx's
        return f"its root certificates cannot be read ({text})"
    if "certificate has expired" in text:
        return f"its certificate has expired; the server's owner has to make a new one ({text})"
    if "[Errno 2]" in text or "[Errno 111]" in text:
        return f"nothing listens there ({text}); start `fedpriv superlink`, or give where it is by --superlink"
    return text
