"""A SuperNode's process that does not stay is started again, and one that is gone is noticed."""

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedpriv.core.errors import RunError
from fedpriv.engines import supernode_process
from fedpriv.engines.deployment import follow
from fedpriv.engines.flower_private.control import Control
from fedpriv.engines.processes import free_ports
from fedpriv.engines.superlink import SubmittedRun, SuperLink
from fedpriv.protocol.cell_folder import FolderReader
from fedpriv.rounds.outcome import RunObserver

LISTEN = "import socket, sys; socket.socket().bind(('127.0.0.1', int(sys.argv[1]))); print('listening')"


def test_a_port_that_is_anothers_by_now_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twenty SuperNodes that start at once pick the same free port now and then."""
    (free,) = free_ports(1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        ports = iter([other.getsockname()[1], free])
        executors: list[str] = []

        def node(options: Sequence[str], _bell: int) -> list[str]:
            (port,) = [option.partition("=")[2] for option in options if option.startswith("--port=")]
            return [sys.executable, "-c", LISTEN, port]

        def executor(runtime: str, *_: object) -> list[str]:
            executors.append(runtime)
            return [sys.executable, "-c", ""]

        monkeypatch.setattr(supernode_process, "free_ports", lambda _: [next(ports)])
        monkeypatch.setattr(supernode_process, "supernode_command", node)
        monkeypatch.setattr(supernode_process, "superexec_command", executor)
        monkeypatch.setattr(supernode_process, "_PAUSE_SECONDS", 0.0)
        assert supernode_process.run_supernode("127.0.0.1:1", 0, tmp_path / "guard.sock", None) == 0
    said = capfd.readouterr()
    assert "Address already in use" in said.err
    assert said.out == "listening\n"
    assert executors[1] == f"127.0.0.1:{free}"


def test_a_node_that_never_stays_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 10_000, 20))
    monkeypatch.setattr(supernode_process.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(supernode_process.time, "sleep", lambda _: None)
    started: list[int] = []

    def refused() -> int:
        started.append(1)
        return 7

    assert supernode_process.until_it_stays(refused) == 7
    assert 1 < len(started) < 10


def test_a_run_whose_silo_has_ended_ends_in_one_line(tmp_path: Path) -> None:
    run = SubmittedRun(SuperLink(Control("127.0.0.1:1")), 1)
    with pytest.raises(RunError, match="silo 2's supernode ended with exit code 1"):
        follow(
            run, FolderReader(tmp_path), 0, 3, RunObserver(), lambda: "silo 2's supernode ended with exit code 1"
        )
