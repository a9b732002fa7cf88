"""The game day's own parts; ten minutes of it are in `make test-all`."""

import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gameday import supervisor
from tests.gameday.game import _clocks
from tests.gameday.network import Proxy, Weather
from tests.gameday.supervisor import Journal, Service, Supervisor


@pytest.fixture
def echo() -> Iterator[int]:
    """A port that says again what it is told."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while said := connection.recv(100):
                    connection.sendall(said)

    threading.Thread(target=serve, daemon=True).start()
    yield int(listener.getsockname()[1])
    listener.close()


def test_the_fault_proxy_forwards_delays_withholds_and_disconnects(echo: int) -> None:
    proxy = Proxy(echo, random.Random(0))
    with socket.create_connection(("127.0.0.1", proxy.port), 5.0) as site:
        site.sendall(b"one")
        assert site.recv(100) == b"one"
        proxy.change(Weather(delay=0.2))
        began = time.monotonic()
        site.sendall(b"two")
        assert site.recv(100) == b"two"
        assert time.monotonic() - began >= 0.4, "each way"
        proxy.change(Weather(swallowed=True))
        site.sendall(b"three")
        site.settimeout(0.3)
        with pytest.raises(TimeoutError):
            site.recv(100)
        proxy.change(Weather())
        site.settimeout(5.0)
        assert site.recv(100) == b"three", "late, and not lost"
        proxy.change(Weather(cut=True))
        assert gone(site)
    with socket.create_connection(("127.0.0.1", proxy.port), 5.0) as another:
        assert gone(another)
    proxy.close()


def gone(site: socket.socket) -> bool:
    try:
        return site.recv(100) == b""
    except ConnectionError:
        return True


@pytest.mark.slow
def test_the_supervisor_restarts_a_killed_service_but_not_a_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RESTART", 0.1)
    journal = Journal(tmp_path / "journal.log")
    manager = Supervisor(journal)
    words = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    service = manager.add(Service("guard-0", words, tmp_path / "home"))
    wait_for(lambda: said(journal, "here") == 1)
    assert service.process is not None
    service.process.kill()
    wait_for(lambda: said(journal, "here") == 2)
    assert said(journal, "guard-0: main process was ended by SIGKILL") == 1
    manager.stop("guard-0")
    time.sleep(0.5)
    assert not service.running
    manager.close()


def said(journal: Journal, words: str) -> int:
    return sum(words in line.text for line in journal.since(0.0))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_the_fault_injector_shifts_the_wall_clock_of_a_running_process(tmp_path: Path) -> None:
    library, clock = _clocks(tmp_path), tmp_path / "clock"
    clock.write_bytes(bytes(8))
    code = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    told = {**os.environ, "LD_PRELOAD": str(library), "GAMEDAY_CLOCK": str(clock)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for ahead in (0.0, 86_400.0, -600.0):
            with clock.open("r+b") as file:
                file.write(struct.pack("d", ahead))
            process.stdin.write("\n")
            process.stdin.flush()
            shown, steady = map(float, process.stdout.readline().split())
            assert abs(shown - time.time() - ahead) < 5.0
            assert abs(steady - time.monotonic()) < 5.0
        process.stdin.close()
