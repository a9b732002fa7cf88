"""What is forked from the warm process is a process like any other, and knows nothing of those before it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedpriv.engines.fork_server import ForkServer

_PROGRAM = """
import json, os, random, sys, threading, time
from pathlib import Path
import numpy.random
import psutil
from fedpriv.engines import fork_server

seen = []

def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

def facts(file):
    own = [descriptor for descriptor in range(256) if is_open(descriptor)]
    return {
        "own file": Path(f"/dev/fd/{file}").read_text(),
        "descriptors": own,
        "file": file,
        "seen": list(seen),
        "imported": "this_was_imported" in sys.modules,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": os.umask(0o77),
        "user": [os.getuid(), os.getgid(), os.getgroups()],
        "random": [random.random(), numpy.random.random()],
        "signals": [
            signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        ],
        "threads": threading.active_count(),
        "parent": os.getppid(),
    }

import signal

def program(words, file):
    out = Path(words[0])
    if words[1:] == ["wait"]:
        out.with_suffix(".new").write_text(str(os.getpid()))
        out.with_suffix(".new").rename(out)
        time.sleep(600)
    if words[1:] == ["raise"]:
        raise ValueError("it went wrong")
    if words[1:] == ["exit"]:
        sys.exit("a reason")
    found = facts(file)
    seen.append(words)
    sys.modules["this_was_imported"] = sys
    os.environ["LEFT"] = "by another"
    os.chdir("/")
    out.with_suffix(".new").write_text(json.dumps(found))
    out.with_suffix(".new").rename(out)
"""


def run(folder: Path, body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process that asks for programs, with `server`, `ask` and `wait_for` at hand."""
    script = folder / "asking.py"
    script.write_text(
        _PROGRAM
        + textwrap.dedent("""
        import tempfile

        def ask(path, *words, text="a token", quiet=False):
            with tempfile.TemporaryFile() as file:
                file.write(text.encode())
                file.flush()
                server.launch([os.path.abspath(path), *words], file.fileno(), quiet=quiet)

        def wait_for(path):
            while not Path(path).exists():
                time.sleep(0.01)
            return Path(path).read_text()

        held_by_who_asks = open(os.devnull)
        server = fork_server.ForkServer.start(program)
        """)
        + textwrap.dedent(body)
    )
    command = [sys.executable, str(script)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=False, **options)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two programs and a process like the asking one found."""
    folder = tmp_path_factory.mktemp("programs")
    body = """
    secret = open("secret", "w+")
    for number in (1, 2):
        ask(f"{number}.json", text=f"token {number}")
        wait_for(f"{number}.json")
    print(json.dumps(dict(os.environ)))
    server.close()
    """
    done = run(folder, body, umask=0o027)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads((folder / f"{number}.json").read_text()) for number in (1, 2)] + [
        {"environment": json.loads(done.stdout), "folder": str(folder)}
    ]


def test_a_program_sees_nothing_of_the_one_before(told: list[dict[str, Any]]) -> None:
    """Guarantee: whatever one program reads, writes or imports, another never sees."""
    first, second, _ = told
    for found in (first, second):
        assert (found["seen"], found["imported"], "LEFT" in found["environment"]) == ([], False, False)
    assert [found["own file"] for found in (first, second)] == ["token 1", "token 2"]


def test_a_program_has_random_numbers_of_its_own(told: list[dict[str, Any]]) -> None:
    first, second, _ = told
    assert not set(first["random"]) & set(second["random"])


def test_a_program_has_the_user_environment_and_folder_of_who_asks(told: list[dict[str, Any]]) -> None:
    *programs, asking = told
    for found in programs:
        assert found["environment"] == asking["environment"]
        assert (found["folder"], found["umask"]) == (asking["folder"], 0o027)
        assert found["user"] == [os.getuid(), os.getgid(), os.getgroups()]


def test_a_program_has_no_open_file_but_its_own_and_no_signal_of_the_server(told: list[dict[str, Any]]) -> None:
    """A bundle's code could otherwise ask the server, in the place of the one that may."""
    for found in told[:2]:
        assert found["descriptors"] == [0, 1, 2, found["file"]]
        assert found["signals"] == [True, True, True]
        assert found["threads"] == 1


def test_what_a_program_prints_and_how_it_ends_is_seen(tmp_path: Path) -> None:
    body = """
    ask("x", "raise")
    ask("x", "raise", quiet=True)
    ask("x", "exit")
    ask("last.json")
    wait_for("last.json")
    server.close()
    """
    done = run(tmp_path, body)
    assert done.returncode == 0
    assert done.stderr.count("ValueError: it went wrong") == 1


def test_no_program_outlives_who_asked_for_it(tmp_path: Path) -> None:
    """Guarantee: gone, with all that was forked, however its process ends."""
    for ending in ("server.close()", "os.kill(os.getpid(), signal.SIGKILL)"):
        pid = tmp_path / "pid"
        pid.unlink(missing_ok=True)
        run(tmp_path, f"ask('pid', 'wait')\nwait_for('pid')\n{ending}\n")
        deadline = time.monotonic() + 20
        while psutil.pid_exists(int(pid.read_text())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(int(pid.read_text())), ending


def test_programs_that_ended_are_forgotten(tmp_path: Path) -> None:
    """A server that kept them would fill the machine's table of processes."""
    body = """
    for number in range(5):
        ask(f"{number}.json")
        wait_for(f"{number}.json")
    time.sleep(0.5)
    (own,) = psutil.Process().children()
    print([child.pid for child in own.children()])
    """
    done = run(tmp_path, body)
    assert done.stdout == "[]\n", done.stderr


def test_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    body = """
    os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)
    time.sleep(0.5)
    try:
        ask("x")
    except OSError:
        print("gone")
    """
    done = run(tmp_path, body)
    assert done.stdout == "gone\n", done.stderr


def test_a_process_with_threads_becomes_no_server() -> None:
    """A fork would copy locks that threads hold, and no thread that lets them go."""
    import threading

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="threads"):
            ForkServer.start(lambda words, file: os.kill(os.getpid(), signal.SIGKILL))
    finally:
        done.set()
        thread.join()
