"""The Control API of a SuperLink that is not there, or not the one that was meant: one line at once."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from fedpriv.addons.services.certificates import make_server_keys
from fedpriv.addons.services.flower_private.control import ControlClient, parse_refusal
from fedpriv.core.errors import RunError


@pytest.mark.parametrize("address", ["unix:/nowhere/control.sock", "127.0.0.1:1"])
def test_an_unreachable_superlink_is_reported_in_one_line_at_once(address: str) -> None:
    with pytest.raises(RunError, match=f"the SuperLink at {address} cannot be reached: "):
        ControlClient(address).run_status(1)


@pytest.mark.parametrize("address", ["[::zz]:80", "é..x:1"])
def test_a_superlink_address_that_is_none_is_reported_in_one_line(address: str) -> None:
    """Before: a traceback of httpx."""
    with pytest.raises(RunError, match=f"the SuperLink at {re.escape(address)} cannot be reached: "):
        ControlClient(address).run_status(1)


@pytest.mark.parametrize("content", ["no certificate", None])
def test_root_certificates_that_cannot_be_read_are_reported_in_one_line(
    content: str | None, tmp_path: Path
) -> None:
    """Before: a traceback of ssl."""
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RunError, match="cannot be reached: its root certificates cannot be read") as raised:
        ControlClient("127.0.0.1:1", path).run_status(1)
    assert "nothing listens" not in str(raised.value)


@pytest.mark.parametrize(
    "body", ["hello", "[1, 2]", '"text"', "7", "null", pytest.param("[" * 100_000, id="deep")]
)
def test_another_program_at_the_superlink_address_is_reported_in_one_line(body: str) -> None:
    command = [
        *(sys.executable, "-c"),
        "import socket, sys\n"
        "listening = socket.create_server(('127.0.0.1', 0))\n"
        "print(listening.getsockname()[1], flush=True)\n"
        "connection = listening.accept()[0]\n"
        "connection.recv(65536)\n"
        "head = f'HTTP/1.1 200 OK\\r\\nContent-Length: {len(sys.argv[1])}\\r\\n\\r\\n'\n"
        "connection.sendall((head + sys.argv[1]).encode())\n",
        body,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        with pytest.raises(RunError, match="cannot be reached: "):
            ControlClient(f"127.0.0.1:{int(server.stdout.readline())}").fetch_presence()


def test_a_refusal_that_is_nested_too_deeply_to_parse_has_its_text_as_reason() -> None:
    """Before: a RecursionError, which ended a silo's node."""
    code, reason = parse_refusal(httpx.Response(500, text="[" * 100_000))
    assert (code, reason[:3]) == (0, "[[[")


def test_an_untrusted_superlink_certificate_is_reported_in_one_line_at_once(tmp_path: Path) -> None:
    make_server_keys(tmp_path)
    program = """if True:
        import ssl, socket, sys
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(sys.argv[1] + "/server.pem", sys.argv[1] + "/server.key")
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        try: context.wrap_socket(listening.accept()[0], server_side=True)
        except OSError: pass"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        other = tmp_path / "other"
        other.mkdir()
        make_server_keys(other)
        with pytest.raises(RunError, match=r"cannot be reached: .*CERTIFICATE_VERIFY_FAILED"):
            ControlClient(f"127.0.0.1:{port}", other / "ca.crt").run_status(1)
        server.kill()
