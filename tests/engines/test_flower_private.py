"""What we take of Flower without its leave is still there and still does what we count on."""

import json
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.superlink.main import create_app
from flwr.supernode.nodestate import NodeStateFactory

from fedpriv.engines import flower_private
from fedpriv.engines.certificates import make_server_keys
from fedpriv.engines.flower_private import CONTROL, FLEET, RUNTIME, Control
from fedpriv.errors import RunError


def test_the_version_whose_private_names_are_used() -> None:
    """A new Flower: read flower_private.py against it, run `make e2e`, then change this line."""
    assert metadata.version("flwr").startswith("1.41.")


def test_every_route_of_the_superlink_is_known() -> None:
    """A new API would be on no listener; one that moved would be on the wrong one."""
    prefixes = {"/" + "/".join(path.split("/")[1:3]) + "/" for path in create_app().openapi()["paths"]}
    assert prefixes == {CONTROL, FLEET, RUNTIME, "/health/"}


def test_a_tasks_token_is_on_no_command_line(tmp_path: Path) -> None:
    """Would give whoever lists processes the task's messages."""
    seen = tmp_path / "seen.json"
    program = tmp_path / str(TaskType.SERVER_APP)
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\n"
        "held = sys.argv[sys.argv.index('--token-file') + 1]\n"
        "told = [Path('/proc/self/cmdline').read_text(), Path(held).read_text()]\n"
        f"Path({str(seen)!r}).write_text(json.dumps(told))\n"
    )
    program.chmod(0o755)
    spec = ExecutionSpec(
        task_type=TaskType.SERVER_APP,
        runtime_api_address="127.0.0.1:1",
        token="5ec4e7",
        insecure=False,
        root_certificates_path="ca.crt",
        runtime_dependency_install=False,
        parent_pid=1,
        suppress_output=False,
        task_id=1,
    )
    with mock.patch.object(sys, "executable", str(tmp_path / "python")):
        task = flower_private._launch(spec)
    assert task.wait(timeout=30) == 0
    line, token = json.loads(seen.read_text())
    assert token == "5ec4e7"
    assert "5ec4e7" not in line


def test_a_task_that_does_not_end_when_told_is_ended_with_its_executor() -> None:
    """A server that waits for a SuperLink that was killed would keep the journal, and no run could be resumed."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    task = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert task.stdout is not None
    with task.stdout:
        task.stdout.readline()
        flower_private._end([task])
        assert task.wait(timeout=10) == -signal.SIGKILL


def test_a_task_may_take_minutes_to_start_and_is_missed_after_one() -> None:
    """At load 30 a process needs more than the 30 s after which Flower takes its token back."""
    try:
        flower_private._wait_for_slow_starts()
        state = NodeStateFactory(ObjectStoreFactory()).state()
        task = state.create_task(task_type=TaskType.CLIENT_APP, run_id=1)
        assert task is not None
        token = state.claim_task(task)
        assert token is not None
        start = datetime.now().astimezone()
        for seconds, there in ((120, True), (299, True), (301, False)):
            with mock.patch.object(in_memory_corestate, "now", return_value=start + timedelta(seconds=seconds)):
                assert (state.get_task_by_token(token) is not None) == there, seconds
        task = state.create_task(task_type=TaskType.CLIENT_APP, run_id=1)
        assert task is not None
        token = state.claim_task(task)
        assert token is not None
        assert state.activate_task(task)
        start = datetime.now().astimezone()
        for seconds, there in ((59, True), (61, False)):
            with mock.patch.object(in_memory_corestate, "now", return_value=start + timedelta(seconds=seconds)):
                assert (state.get_task_by_token(token) is not None) == there, seconds
    finally:
        mock.patch.stopall()


@pytest.mark.parametrize("address", ["unix:/nowhere/control.sock", "127.0.0.1:1"])
def test_a_superlink_that_is_not_there_is_one_line_at_once(address: str) -> None:
    with pytest.raises(RunError, match=f"the SuperLink at {address} cannot be reached: "):
        Control(address).status(1)


def test_a_certificate_that_nobody_vouches_for_is_one_line_at_once(tmp_path: Path) -> None:
    make_server_keys(tmp_path)
    command = [
        *(sys.executable, "-c"),
        "import ssl, socket, sys\n"
        "context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)\n"
        "context.load_cert_chain(sys.argv[1] + '/server.pem', sys.argv[1] + '/server.key')\n"
        "listening = socket.create_server(('127.0.0.1', 0))\n"
        "print(listening.getsockname()[1], flush=True)\n"
        "try: context.wrap_socket(listening.accept()[0], server_side=True)\n"
        "except OSError: pass\n",
    ]
    with subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        other = tmp_path / "other"
        other.mkdir()
        make_server_keys(other)
        with pytest.raises(RunError, match=r"cannot be reached: .*CERTIFICATE_VERIFY_FAILED"):
            Control(f"127.0.0.1:{port}", other / "ca.crt").status(1)
        server.kill()
