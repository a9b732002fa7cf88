"""Start and stop runs over the SuperLink's Control API."""

import hashlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
from flwr.proto.federation_config_pb2 import SimulationConfig
from flwr.proto.run_pb2 import Run
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from google.protobuf.json_format import ParseDict

from fedpriv.core.errors import RunError, printable
from fedpriv.engines.flower_private import RESTARTED, UNIX
from fedpriv.engines.flower_private.presence import FOLLOWS, STATUS

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 30.0
Answer = TypeVar("Answer")


class UnreachableError(RunError):
    """No answer came; the next question may have one."""


class LostRunError(RunError):
    """The SuperLink was started again, with which the run's server has ended; its journal goes on with the run."""


@dataclass(frozen=True)
class Control:
    """The Control API at `address`: `unix:SOCKET`, or host:port, over TLS if there are root certificates.

    Every method raises RunError, within seconds, if no server answers there or the answer is a refusal.
    """

    address: str
    root_certificates: Path | None = None

    def start_run(self, pyproject: str, out: str, simulation: Mapping[str, int] | None = None) -> int:
        """Submit an app that is nothing but its pyproject.toml; the run's id.  `runs` show its folder, `out`."""
        content, _ = build_fab_from_files({"pyproject.toml": pyproject.encode()})
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})),
            override_config=user_config_to_proto({"out": out}),
            override_federation_config=None
            if simulation is None
            else ParseDict(dict(simulation), SimulationConfig()),
        )
        answer = self._ask(lambda client: client.StartRun(request))
        if not answer.HasField("run_id"):
            raise RunError(f"the SuperLink at {self.address} did not start the run")
        return answer.run_id

    def status(self, run_id: int) -> str:
        """Flower's word for a run, such as `running` or `finished:failed`; who asks this follows the run.

        LostRunError for a run that the SuperLink does not know, or that ended when it was started again.
        """
        answer = self._ask(lambda client: client.ListRuns(ListRunsRequest(run_id=run_id)), follows=run_id)
        status = answer.run_dict[run_id].status
        if status.details == RESTARTED:
            raise LostRunError(RESTARTED)
        return ":".join(filter(None, (status.status, status.sub_status)))

    def stop_run(self, run_id: int) -> None:
        self._ask(lambda client: client.StopRun(StopRunRequest(run_id=run_id)))

    def runs(self) -> list[Run]:
        """The last hundred, the newest first."""
        answer = self._ask(lambda client: client.ListRuns(ListRunsRequest(limit=100)))
        return sorted(answer.run_dict.values(), key=lambda run: run.pending_at, reverse=True)

    def seen(self) -> dict[str, Any]:
        """What the SuperLink has seen of silos and of commands that follow runs: `Presence.seen`."""

        def ask(client: ControlHttpClient) -> dict[str, Any]:
            answer = client._client.get(f"{client._base_url}{STATUS}")
            answer.raise_for_status()
            return dict(answer.json())

        return self._ask(ask)

    def _ask(self, question: Callable[[ControlHttpClient], Answer], *, follows: int | None = None) -> Answer:
        try:
            with self._client() as client:
                if follows is not None:
                    client._client.headers[FOLLOWS] = str(follows)
                return question(client)
        except httpx.HTTPStatusError as error:
            told = FlowerError.from_json(error.response.text)
            if told is not None and told.code == ApiErrorCode.RUN_ID_NOT_FOUND:
                raise LostRunError(f"the SuperLink at {self.address} does not know this run") from None
            reason = printable(str(told or error.response.text or error))
            raise RunError(f"the SuperLink at {self.address} refuses: {reason}") from None
        except httpx.RequestError as error:
            raise UnreachableError(
                f"the SuperLink at {self.address} cannot be reached: {_reason(error)}"
            ) from None

    def _client(self) -> ControlHttpClient:
        socket, scheme, host = None, "http", self.address
        verify: bool | ssl.SSLContext = True
        if self.root_certificates is not None:
            scheme, verify = "https", ssl.create_default_context(cafile=str(self.root_certificates))
        if self.address.startswith(UNIX):
            socket, host = self.address.removeprefix(UNIX), "superlink"
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        client = ControlHttpClient(f"{scheme}://{host}", interceptors=[version])
        client.close()
        client._client = httpx.Client(  # Flower's own has no Unix sockets, and looks for proxies
            transport=httpx.HTTPTransport(uds=socket, verify=verify, trust_env=False),
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
        )
        return client


def _reason(error: httpx.RequestError) -> str:
    text = str(error) or type(error).__name__
    if "certificate has expired" in text:
        return f"its certificate has expired; the server's owner has to make a new one ({text})"
    if "[Errno 2]" in text or "[Errno 111]" in text:
        return f"nothing listens there ({text}); start `fedpriv superlink`, or give where it is by --superlink"
    return text
