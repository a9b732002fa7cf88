"""All names of Flower 1.41 that Flower does not promise to keep: tests/engines/test_flower_private.py tells.

What they are needed for, measured on Flower 1.41: its SuperLink serves the Control API (whoever reaches it runs
code there), the Fleet API and the Runtime API on one port, asks nobody on the Control API who he is, and hands a
task to whoever asks first; its executors put a task's token on a command line, which every user of the machine can
read.

    python -P -m fedpriv.engines.flower_private superexec|supernode ARGUMENT...   Flower's programs, mended
"""

import hashlib
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from unittest import mock

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
from flwr.proto.federation_config_pb2 import SimulationConfig
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from starlette.types import ASGIApp

from fedpriv.errors import RunError, printable

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor.types import ExecutionSpec

CONTROL, FLEET, RUNTIME = "/v1/control/", "/v1/fleet/", "/v1/runtime/"
UNIX = "unix:"
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 30.0
_CLAIM_SECONDS, _BEAT_SECONDS = 300.0, 60.0
_END_SECONDS = 2.0  # Flower itself ends a process hard after 5
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Control:
    """The Control API at `address`: `unix:SOCKET`, or host:port, over TLS if there are root certificates.

    Every method raises RunError, within seconds, if nobody answers there or the answer is a refusal.
    """

    address: str
    root_certificates: Path | None = None

    def start_run(self, pyproject: str, simulation: Mapping[str, int] | None = None) -> int:
        """Submit an app that is nothing but its pyproject.toml; the run's id."""
        content, _ = build_fab_from_files({"pyproject.toml": pyproject.encode()})
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})),
            override_federation_config=None if simulation is None else _simulation(simulation),
        )
        answer = self._ask(lambda client: client.StartRun(request))
        if not answer.HasField("run_id"):
            raise RunError(f"the SuperLink at {self.address} did not start the run")
        return answer.run_id

    def status(self, run_id: int) -> str:
        """Flower's word for a run, such as `running` or `finished:failed`."""
        answer = self._ask(lambda client: client.ListRuns(ListRunsRequest(run_id=run_id)))
        if run_id not in answer.run_dict:
            raise RunError(f"the SuperLink at {self.address} does not know run {run_id}: was it started again?")
        status = answer.run_dict[run_id].status
        return ":".join(filter(None, (status.status, status.sub_status)))

    def stop_run(self, run_id: int) -> None:
        self._ask(lambda client: client.StopRun(StopRunRequest(run_id=run_id)))

    def _ask(self, question: Callable[[ControlHttpClient], Answer]) -> Answer:
        try:
            with self._client() as client:
                return question(client)
        except httpx.HTTPStatusError as error:
            told = FlowerError.from_json(error.response.text)
            reason = printable(str(told or error.response.text or error))
            raise RunError(f"the SuperLink at {self.address} refuses: {reason}") from None
        except httpx.RequestError as error:
            raise RunError(f"the SuperLink at {self.address} cannot be reached: {_reason(error)}") from None

    def _client(self) -> ControlHttpClient:
        socket, verify = None, True if self.root_certificates is None else _trusting(self.root_certificates)
        scheme, host = "http" if self.root_certificates is None else "https", self.address
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


def _trusting(certificates: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates))


def _simulation(keys: Mapping[str, int]) -> SimulationConfig:
    config = SimulationConfig()
    for key, value in keys.items():
        setattr(config, key, value)
    return config


def _reason(error: httpx.RequestError) -> str:
    text = str(error) or type(error).__name__
    if "certificate has expired" in text:
        return f"its certificate has expired; the server's owner has to make a new one ({text})"
    return text


def superlink_app(options: Sequence[str], nodes: Mapping[str, bytes]) -> ASGIApp:
    """Flower's SuperLink with all its APIs, as `flower-superlink OPTIONS` serves it, that knows SuperNodes.

    `nodes`: a SuperNode's name -> its public key (PEM).  A name can be given here and through the Control API
    only, so that it says who a node is, whatever the node says.
    """
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    _wait_for_slow_starts()
    _refuse_replies_of_others()
    with mock.patch.object(sys, "argv", ["flower-superlink", *options]):
        config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    state = app.state.linkstate_factory.state()
    for name, public_key in nodes.items():
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key, 0, name=name)
    return app


def _refuse_replies_of_others() -> None:
    """Check who a reply says it is from, where Flower checks only who sends it.

    Guarantee: a SuperNode's reply counts as that SuperNode's, whatever it is told to say.
    """
    from flwr.supercore.error import ApiErrorCode
    from flwr.superlink.servicer.fleet import fleet_handlers

    push_messages = fleet_handlers.push_messages

    def checked(request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
        node = request.node.node_id
        if any(message.metadata.src_node_id != node for message in request.messages_list):
            raise FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"node {node} replies as another node")
        return push_messages(request=request, state=state)

    mock.patch.object(fleet_handlers, "push_messages", checked).start()


def _wait_for_slow_starts() -> None:
    """Let a task's process take minutes to start, where Flower takes its token back after 30 s.

    A process that runs sends heartbeats, and is missed after a minute, as always.
    """
    from flwr.supercore.corestate import in_memory_corestate

    patience = _BEAT_SECONDS / _CLAIM_SECONDS  # a heartbeat counts for PATIENCE * INTERVAL, a claim for INTERVAL
    mock.patch.object(in_memory_corestate, "HEARTBEAT_PATIENCE", patience).start()  # for as long as this process
    mock.patch.object(in_memory_corestate, "HEARTBEAT_DEFAULT_INTERVAL", _CLAIM_SECONDS).start()


def superexec_command(address: str, certificate: Path, secret: Path, parent: int) -> list[str]:
    """The executor that starts tasks for the Runtime API at `address`, and ends when process `parent` does."""
    return [
        *(sys.executable, "-P", "-m", __name__, "superexec", "--runtime-api-address", address),
        *("--root-certificates", str(certificate), "--superexec-auth-secret-file", str(secret)),
        *("--parent-pid", str(parent)),
    ]


def supernode_command(options: Sequence[str]) -> list[str]:
    """`flower-supernode OPTIONS` that ends when the process that starts it does."""
    return [sys.executable, "-P", "-m", __name__, "supernode", *options]


def _superexec(options: Sequence[str]) -> None:
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
    from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

    tasks: list[subprocess.Popen[bytes]] = []

    def launch(_executor: SubprocessExecutor, spec: ExecutionSpec) -> LaunchResult:
        tasks[:] = [task for task in tasks if task.poll() is None]
        tasks.append(_launch(spec))
        return LaunchResult.accepted()

    with (
        mock.patch.object(SubprocessExecutor, "launch", launch),
        mock.patch.object(sys, "argv", ["flower-superexec", *options]),
    ):
        try:
            flower_superexec()
        finally:
            _end(tasks)


def _end(tasks: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End tasks with their executor: one that waits for a SuperLink that is gone may never see that it should."""
    for task in tasks:
        task.terminate()
    deadline = time.monotonic() + _END_SECONDS
    while any(task.poll() is None for task in tasks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for task in tasks:
        task.kill()


def _launch(spec: "ExecutionSpec") -> "subprocess.Popen[bytes]":
    """Start a task's process with its token in a file without a name, where Flower writes it on the command line.

    Guarantee: no command line says the token; who has it may read and answer the task's messages.
    """
    from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND

    command = Path(sys.executable).with_name(TASK_TYPE_TO_COMMAND[spec.task_type])
    with tempfile.TemporaryFile() as token:
        token.write(spec.token.encode())
        token.flush()
        return subprocess.Popen(
            [
                *(str(command), TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address),
                *("--token-file", f"/dev/fd/{token.fileno()}"),
                *("--root-certificates", str(spec.root_certificates_path), "--parent-pid", str(spec.parent_pid)),
            ],
            pass_fds=[token.fileno()],
            stdout=subprocess.DEVNULL if spec.suppress_output else None,
            stderr=subprocess.DEVNULL if spec.suppress_output else None,
        )


def _supernode(options: Sequence[str]) -> None:
    from flwr.supernode.cli import flower_supernode

    start_parent_process_monitor(os.getppid())
    _wait_for_slow_starts()
    with mock.patch.object(sys, "argv", ["flower-supernode", *options]):
        flower_supernode()


if __name__ == "__main__":
    {"superexec": _superexec, "supernode": _supernode}[sys.argv[1]](sys.argv[2:])
