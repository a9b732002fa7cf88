"""What we take of Flower without its leave is still there and still does what we count on."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.superlink.grid import http_grid
from flwr.superlink.main import create_app
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedpriv.core.errors import RunError
from fedpriv.engines.flower_private import CONTROL, FLEET, RUNTIME, SOON
from fedpriv.engines.flower_private.control import Control
from fedpriv.engines.flower_private.executor import Bell, end, launch_process, words_of
from fedpriv.engines.flower_private.superlink import (
    PULL,
    REPLIES,
    bells_of,
    node_of_pull,
    server_of_pull,
    wait_for_slow_starts,
)
from fedpriv.engines.flower_private.supernode import Waits
from fedpriv.engines.processes import make_server_keys


def test_the_version_whose_private_names_are_used() -> None:
    """A new Flower: read flower_private/ against it, run `make e2e`, then change this line."""
    assert metadata.version("flwr").startswith("1.41.")


def test_every_route_of_the_superlink_is_known() -> None:
    """A new API would be on no listener; one that moved would be on the wrong one."""
    prefixes = {"/" + "/".join(path.split("/")[1:3]) + "/" for path in create_app().openapi()["paths"]}
    assert prefixes == {CONTROL, FLEET, RUNTIME, "/health/"}
    assert {PULL, REPLIES} < set(create_app().openapi()["paths"])


SPEC = ExecutionSpec(
    task_type=TaskType.SIMULATION,
    runtime_api_address="127.0.0.1:1",
    token="5ec4e7",
    insecure=False,
    root_certificates_path="ca.crt",
    runtime_dependency_install=False,
    parent_pid=1,
    suppress_output=False,
    task_id=1,
)


def test_a_tasks_token_is_on_no_command_line(tmp_path: Path) -> None:
    """Would give whoever lists processes the task's messages."""
    seen = tmp_path / "seen.json"
    program = tmp_path / str(TaskType.SIMULATION)
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\n"
        "held = sys.argv[sys.argv.index('--token-file') + 1]\n"
        "told = [Path('/proc/self/cmdline').read_text(), Path(held).read_text()]\n"
        f"Path({str(seen)!r}).write_text(json.dumps(told))\n"
    )
    program.chmod(0o755)
    with mock.patch.object(sys, "executable", str(tmp_path / "python")):
        task = launch_process(SPEC)
    assert task.wait(timeout=30) == 0
    line, token = json.loads(seen.read_text())
    assert token == "5ec4e7"
    assert "5ec4e7" not in line


@pytest.mark.parametrize("kind", [TaskType.SERVER_APP, TaskType.CLIENT_APP])
def test_no_tasks_command_line_has_its_token(kind: TaskType) -> None:
    assert "5ec4e7" not in " ".join(words_of(replace(SPEC, task_type=kind)))


@pytest.mark.slow
def test_a_forked_clientapp_imports_the_app_that_the_run_names(tmp_path: Path) -> None:
    """Guarantee: a bundle with a fedpriv and a clients of its own runs those, not what started it has."""
    code = (
        "import sys\n"
        "from unittest import mock\n"
        "import fedpriv.engines.flower_private.executor as executor\n"
        "import flwr.supernode.cli\n"
        "def program():\n"
        "    sys.path.insert(0, 'bundle')\n"
        "    import clients, fedpriv\n"
        "    print(clients.__file__, fedpriv.__file__, *sys.argv)\n"
        "with mock.patch.object(flwr.supernode.cli, 'flwr_clientapp', program):\n"
        "    executor.run_clientapp(['/bin/flwr-clientapp', '--x'], 7)\n"
    )
    for package in ("fedpriv", "clients"):
        (tmp_path / "bundle" / package).mkdir(parents=True)
        (tmp_path / "bundle" / package / "__init__.py").touch()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    modules = ("bundle/clients/__init__.py", "bundle/fedpriv/__init__.py")
    assert [Path(word).name if word.startswith("/bin") else word for word in done.stdout.split()] == [
        *(str(tmp_path / module) for module in modules),
        *("flwr-clientapp", "--x", "--token-file", "/dev/fd/7"),
    ]


@pytest.mark.slow
def test_a_task_that_does_not_end_when_told_is_ended_with_its_executor() -> None:
    """A server that waits for a SuperLink that was killed would keep the journal, and no run could be resumed."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    task = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert task.stdout is not None
    with task.stdout:
        task.stdout.readline()
        end([task])
        assert task.wait(timeout=10) == -signal.SIGKILL


def test_a_task_may_take_minutes_to_start_and_is_missed_after_one() -> None:
    """At load 30 a process needs more than the 30 s after which Flower takes its token back."""
    try:
        wait_for_slow_starts()
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


def test_where_flower_waits_and_what_its_waits_are_called() -> None:
    """What is patched has to be what the loops look up, or rounds last seconds again, without a word."""
    assert sleeps(start_client_internal) == ["time.sleep(3)", "time.sleep(0.5)", "time.sleep(0.5)"]
    assert sleeps(run_superexec) == ["time.sleep(task_poll_interval)"]
    for module in (start_client_internal, http_grid):
        assert "pull_objects" in vars(module)
        assert "pull_objects(" in inspect.getsource(module)
    assert "initial_backoff" in inspect.signature(inflatable_utils.pull_objects).parameters
    loop = inspect.getsource(start_client_internal.start_client_internal)
    assert "run_id = _pull_and_store_message(" in loop
    assert "if run_id is None:" in loop
    assert isinstance(NodeStateFactory(ObjectStoreFactory()).state(), InMemoryNodeState)
    assert isinstance(ObjectStoreFactory().store(), InMemoryObjectStore)


def sleeps(module: ModuleType) -> list[str]:
    return re.findall(r"time\.sleep\([^)]*\)", inspect.getsource(module))


def test_a_supernode_asks_a_superlink_that_does_not_hold_its_answers_ever_more_rarely() -> None:
    """At most a little more often than Flower asks: such a SuperLink has other SuperNodes too."""
    slept: list[float] = []
    clock = [0.0]

    class Sleeping:
        def wait(self, seconds: float) -> None:
            slept.append(seconds)
            clock[0] += seconds

    waits = Waits(lambda: clock[0])
    with mock.patch.object(threading, "Event", Sleeping):
        for _ in range(10):
            waits.sleep(3)
        assert slept[:3] == [2 * SOON, 4 * SOON, 8 * SOON]
        assert slept[-2:] == [3.0, 3.0]
        clock[0] += 2.0  # the answer was held
        waits.sleep(3)
        assert slept[-1] == SOON
        for _ in range(10):
            waits.sleep(3)
        waits.message()
        waits.sleep(3)
        assert slept[-1] == 2 * SOON


def test_a_supernode_that_waits_for_a_reply_wakes_when_it_comes() -> None:
    waits = Waits()
    started = time.monotonic()
    threading.Timer(0.05, waits.happened).start()
    waits.sleep(60 / 21)  # below 3 s: not what follows an empty answer
    assert time.monotonic() - started < 60 / 21


def test_an_executor_wakes_for_each_byte_of_its_bell() -> None:
    heard, bell = os.pipe()
    try:
        os.write(bell, b"\n\n")
        for _ in range(2):
            Bell(heard).sleep(1.0)
        with mock.patch("fedpriv.engines.flower_private.executor._LOOK_SECONDS", 0.0):
            Bell(heard).sleep(1.0)  # nothing is left, and a look comes all the same
    finally:
        os.close(heard)
        os.close(bell)


def test_a_message_that_is_stored_rings_the_bell_of_its_node() -> None:
    state = mock.Mock()
    state.store_message_and_object_tree.return_value = (True, ["object"])
    bells = bells_of(state)
    assert state.store_message_and_object_tree(mock.Mock(metadata=mock.Mock(dst_node_id=7)), None, "s") == (
        True,
        ["object"],
    )
    assert (bells.rung(7), bells.rung(8)) == (1, 0)
    for sender in (runtime_handlers, fleet_handlers):
        assert "state.store_message_and_object_tree(" in inspect.getsource(sender)
    mock.patch.stopall()


def test_who_asks_for_messages_is_read_from_the_request() -> None:
    assert node_of_pull(PullMessagesRequest(node=Node(node_id=2**63 + 1)).SerializeToString()) == 2**63 + 1
    with pytest.raises(ValueError):
        node_of_pull(b"\xff\xff")


def test_a_server_that_waits_for_replies_is_told_from_others_that_ask() -> None:
    """Replies are messages to node 1; who names none (a ClientApp, say) is not held."""
    assert server_of_pull(PullAppMessagesRequest(message_ids=["a"]).SerializeToString()) == SUPERLINK_NODE_ID
    for other in (b"", b"\xff\xff"):
        with pytest.raises(ValueError):
            server_of_pull(other)
