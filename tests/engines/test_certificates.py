"""Certificates and keys that the engines make and read; a SuperNode's process that does not stay."""

import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedpriv.core.errors import InputError, RunError
from fedpriv.engines import processes as certificates
from fedpriv.engines import supernode_process
from fedpriv.engines.deployment import follow
from fedpriv.engines.flower_private.control import Control
from fedpriv.engines.processes import free_ports
from fedpriv.engines.superlink import SubmittedRun, SuperLink, remote_superlink
from fedpriv.protocol.cell_folder import FolderReader
from fedpriv.rounds.outcome import RunObserver


def test_a_certificate_that_has_expired_is_named_with_its_date_before_anything_is_asked(tmp_path: Path) -> None:
    """Was: 93 s, and "unavailable"."""
    certificates.make_server_keys(tmp_path)
    certificates.check_certificates(tmp_path / "ca.crt", tmp_path / "server.pem")
    old = Path(__file__).with_name("expired.crt")
    with pytest.raises(
        InputError, match=r"expired.crt: the certificate expired on 20\d\d-\d\d-\d\d \d\d:\d\d UTC"
    ):
        remote_superlink("127.0.0.1:1", old)


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_file_without_a_certificate_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"ca.crt: expected a certificate \(PEM\)"):
        certificates.check_certificates(path)


def test_keys_of_a_run_verify_and_nobody_else_can_read_the_private_ones(tmp_path: Path) -> None:
    certificates.make_server_keys(tmp_path)
    verify = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_ip", "127.0.0.1"]
    verify += ["-CAfile", str(tmp_path / "ca.crt"), str(tmp_path / "server.pem")]
    assert "OK" in subprocess.run(verify, capture_output=True, text=True, check=True).stdout
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "server.key", "server.pem"]


def test_a_node_key_is_kept_and_its_public_half_is_the_one_that_is_registered(tmp_path: Path) -> None:
    private, public = tmp_path / "node.key", tmp_path / "silo-0.pub"
    certificates.make_node_key(private, public)
    first, kept = certificates.node_public_key(public), private.read_bytes()
    certificates.make_node_key(private, public)
    assert private.read_bytes() == kept
    assert certificates.node_public_key(public) == first
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    derived = subprocess.run(["ssh-keygen", "-y", "-f", private], capture_output=True, check=True).stdout
    assert derived.split()[:2] == public.read_bytes().split()[:2]


@pytest.mark.parametrize("content", ["", "ssh-rsa nonsense", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI"])
def test_a_public_key_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "silo-0.pub"
    path.write_text(content)
    with pytest.raises(InputError, match=r"silo-0\.pub: expected a"):
        certificates.node_public_key(path)


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
