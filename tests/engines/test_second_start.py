"""A service that is started twice, killed, or runs for weeks: its sockets, its files and its helpers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from fedpriv.addons.services.service import fresh_folder, script_path, service_folder
from fedpriv.core.errors import InputError
from fedpriv.engines.children import reap_processes
from fedpriv.silo.metrics import open_private_socket
from tests.engines.builders import refusal


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_guarantee_a_second_service_does_not_take_over_the_socket_of_a_running_one(tmp_path: Path) -> None:
    """Was: a second start by mistake took the first one's control socket away, and then failed at the port."""
    path = tmp_path / "control.sock"
    with open_private_socket(path, "--control") as first:
        with refusal(r"--control .*control\.sock: a service answers there already; end it"):
            open_private_socket(path, "--control")
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
            connection, _ = first.accept()
            connection.close()
    with open_private_socket(path, "--control"):  # the one that ended left it
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_guarantee_a_file_at_the_socket_path_is_never_deleted(tmp_path: Path, kind: str) -> None:
    """Was: `--control FILE` deleted a file and put a socket there."""
    path = tmp_path / "notes.txt"
    if kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "own").write_text("mine")
        path.symlink_to("own") if kind == "link" else path.write_text("mine")
    with refusal(r"--control .*notes\.txt: is a file, and no socket; name a path"):
        open_private_socket(path, "--control")
    assert path.is_dir() if kind == "folder" else path.read_text() == "mine"


def test_exactly_one_of_several_concurrently_started_services_gets_the_socket(tmp_path: Path) -> None:
    """Each would see the socket that a third one left, and take it away."""
    path = tmp_path / "control.sock"
    open_private_socket(path, "--control").close()
    begin = threading.Barrier(8)

    def start(_: int) -> socket.socket | None:
        begin.wait()
        with suppress(InputError):
            return open_private_socket(path, "--control")
        return None

    with ThreadPoolExecutor(8) as threads:
        (own,) = [opened for opened in threads.map(start, range(8)) if opened is not None]
    with own, socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
        own.accept()[0].close()


def test_service_files_lie_beside_the_socket_or_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    beside = service_folder("superlink", tmp_path / "run" / "control.sock")
    assert beside == tmp_path / "run" / "control.sock.d"
    assert service_folder("supernode-0", None).parent == tmp_path / "state" / "fedpriv"
    beside.parent.mkdir()
    beside.mkdir()
    (beside / "executor.17").write_text("of a service that was killed")
    with fresh_folder(beside):
        assert list(beside.iterdir()) == []
        assert beside.stat().st_mode & 0o777 == 0o700
    assert not beside.exists()
    beside.write_text("no folder")
    with refusal("the service's own files cannot be there"), fresh_folder(beside):
        pass
    assert beside.read_text() == "no folder"


@pytest.mark.slow
def test_drafts_of_a_killed_service_do_not_stop_its_next_start(tmp_path: Path) -> None:
    """Was: "is no file of a service", after a kill while the key or the secret was written."""
    for name in (".server.key.71", ".superexec.secret.71"):
        (tmp_path / name).touch()
    with fresh_folder(tmp_path) as folder:
        assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_second_superlink_is_refused_and_the_first_runs_on_without_temporary_files(
    tmp_path: Path,
) -> None:
    """Was: the second cut the first off; the first's certificates were in /tmp, and gone after ten days."""
    control, temporary = tmp_path / "control.sock", tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "empty").mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "FLWR_HOME": str(tmp_path / "flower")}
    command = [script_path("fedpriv"), "superlink", "--control", str(control), "--simulation"]

    def start() -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, cwd=tmp_path / "empty", stderr=pipe, text=True)

    def healthy() -> bool:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(control))) as client:
                return client.get("http://superlink/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    with start() as first:
        try:
            wait_for(lambda: healthy() or first.poll() is not None)
            with start() as second:
                _, words = second.communicate(timeout=60)
            assert second.returncode == 2
            assert "a service answers there already" in words
            assert healthy()
            assert [path for path in temporary.rglob("*") if path.is_file()] == []
            files = {path.name for path in (tmp_path / "control.sock.d").iterdir()}
            assert files >= {"ca.crt", "superexec.secret"}
        finally:
            first.send_signal(signal.SIGTERM)
            first.communicate(timeout=60)
    assert not control.exists()
    assert not (tmp_path / "control.sock.d").exists()


def test_a_killed_cleanup_helper_process_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: what ends processes after their owner is there again.  Was: nobody noticed that it was gone."""
    monkeypatch.setattr("fedpriv.engines.children._CHECK_SECONDS", 0.05)

    def list_helpers() -> list[psutil.Process]:
        helpers = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # also a zombie, which nobody has waited for yet
                helpers += [child] if "fedpriv.engines.children" in child.cmdline() else []
        return helpers

    with reap_processes(tmp_path):
        wait_for(lambda: len(list_helpers()) == 1)
        (first,) = list_helpers()
        first.kill()
        wait_for(lambda: any(helper.pid != first.pid for helper in list_helpers()))
    assert list_helpers() == []


def test_guarantee_a_replaced_cleanup_helper_is_none_of_the_processes_that_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: started when its owner had FLWR_HOME itself, as with --workers, it ended itself before the others."""
    monkeypatch.setattr("fedpriv.engines.children._CHECK_SECONDS", 0.05)

    def helpers() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]

    others = helpers()
    with reap_processes(tmp_path):
        monkeypatch.setenv("FLWR_HOME", str(tmp_path))
        (first,) = (helper for helper in helpers() if helper not in others)
        first.kill()
        wait_for(lambda: any(helper not in (first, *others) for helper in helpers()))
        (second,) = (helper for helper in helpers() if helper not in (first, *others))
        wait_for(lambda: "fedpriv.engines.children" in second.cmdline())  # after exec
        assert "FLWR_HOME" not in second.environ()


@pytest.mark.slow
def test_a_replaced_cleanup_helper_ends_the_processes_of_a_killed_owner(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\nfrom pathlib import Path\nimport psutil\n"
        "from fedpriv.engines.children import reap_processes\n"
        "home = Path(sys.argv[1])\n"
        "with reap_processes(home):\n"
        "    own = {**os.environ, 'FLWR_HOME': str(home)}\n"
        "    subprocess.Popen(['sleep', '600'], env=own, start_new_session=True)\n"
        "    (helper,) = [each for each in psutil.Process().children() if 'sleep' not in each.cmdline()]\n"
        "    helper.kill()\n    time.sleep(3.0)\n    print('killed', flush=True)\n    time.sleep(600)\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    with subprocess.Popen([sys.executable, "-c", code, str(home)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "killed\n"
        (left,) = [each for each in psutil.Process(owner.pid).children() if "sleep" in each.cmdline()]
        owner.kill()
    wait_for(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)
    wait_for(lambda: not home.exists())
