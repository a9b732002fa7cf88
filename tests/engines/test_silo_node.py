"""A silo's node: what it runs, whom it trusts, and how it comes back."""

import asyncio
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from fedpriv.addons.services import service
from fedpriv.addons.services.certificates import make_node_key, node_public_key, read_node_key
from fedpriv.addons.services.flower_private import front, silo_node
from fedpriv.addons.services.flower_private.names import ACTIVATE_NODE, NODE_HEARTBEAT, PULL_MESSAGES
from fedpriv.addons.services.flower_private.silo_node import FleetClient, LostError, SiloNode, read_configuration
from fedpriv.addons.services.service import SUPERNODE, read_heartbeat
from tests.engines.builders import Clock, refusal
from tests.engines.flower_link import Link, silo_bundle


def test_the_configuration_of_a_flower_app_bundle_is_read_with_dotted_keys() -> None:
    pyproject = silo_bundle("fedpriv.clients.app:app")[0]
    expected = {"out": "", "protocol": 0, "fedpriv": "x", "run-token": "", "cell-json": ""}
    assert read_configuration(pyproject) == expected
    nested = zipped(nested='[tool.flwr.app.config.a]\nb.c = 1\n"d" = "e"\n')
    assert read_configuration(nested) == {"a.b.c": 1, "a.d": "e"}


def zipped(clientapp: str = "fedpriv.clients.app:app", nested: str = "", name: str = "pyproject.toml") -> bytes:
    text = f'[tool.flwr.app.components]\nclientapp = "{clientapp}"\n{nested}'
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as files:
        files.writestr(name, text)
    return file.getvalue()


def damaged(compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A bundle whose compressed file has bytes that no compression gives."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as files:
        files.writestr("pyproject.toml", "x" * 1000)
    content, start = bytearray(file.getvalue()), 30 + len("pyproject.toml")
    content[start : start + 3] = b"\xff\xff\xff"
    return bytes(content)


def cut_short() -> bytes:
    """A bundle whose list of files promises more bytes than it has."""
    content = bytearray(zipped())
    start = content.rindex(b"PK\x01\x02")
    content[start + 20 : start + 28] = struct.pack("<II", 2**16, 2**16)  # sizes of pyproject.toml, packed and not
    return bytes(content)


BUNDLES = {
    "damaged": damaged(),
    "cut short": cut_short(),
    "damaged bzip2": damaged(zipfile.ZIP_BZIP2),
    "damaged lzma": damaged(zipfile.ZIP_LZMA),
    "empty": b"",
    "none": b"no archive",
    "without": zipped(name="setup.py"),
    "another": zipped("theirs.app:app"),
    "close": zipped("fedpriv.clients.app:application"),
    "no table": zipped(nested="[tool.flwr.app]\nconfig = 7"),
    "no toml": zipped(nested="broken ="),
    "huge": zipped(nested=f'[tool.flwr.app.config]\nx = "{"y" * 2**21}"'),
}


@pytest.mark.parametrize("bundle", BUNDLES.values(), ids=BUNDLES)
def test_a_damaged_or_foreign_app_bundle_has_no_configuration(bundle: bytes) -> None:
    """Would gain: code of the SuperLink's owner at the silo, or a node that fails."""
    assert read_configuration(bundle) is None


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(front, "_HOLD_SECONDS", 0.0)
    (tmp_path / "link").mkdir()
    monkeypatch.setenv(service.HEARTBEAT_FOLDER_VARIABLE, str(tmp_path))
    return Link(tmp_path / "link")


@pytest.fixture
def fleet(link: Link) -> FleetClient:
    """Connection of silo 0."""
    return link.fleet(0)


def answer_by(fleet: FleetClient, answer: Callable[[httpx.Request], httpx.Response]) -> None:
    """Let requests be answered by this function."""
    fleet._client.client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://link")


def last_error(folder: Path) -> str:
    """The error of the last heartbeat."""
    heartbeat = read_heartbeat(folder, SUPERNODE)
    assert heartbeat is not None
    return heartbeat.error


def test_a_killed_node_can_reconnect_at_once_under_its_node_id(link: Link) -> None:
    """Was: refused for a minute, until its heartbeats were missed."""
    number = link.fleet(0).connect(None, registers_itself=False)
    with pytest.raises(LostError, match="heard of another with it within a minute"):
        link.fleet(0).connect(None, registers_itself=False)
    assert link.fleet(0).connect(number, registers_itself=False) == number
    assert link.fleet(1).connect(number, registers_itself=False) == link.nodes[1], "another's id is of no use"
    assert link.fleet(0).ask(NODE_HEARTBEAT, node={"node_id": number}, heartbeat_interval=15.0).success


def test_a_restarted_superlink_and_an_unknown_key_are_reported_as_lost_connections(
    fleet: FleetClient, tmp_path: Path
) -> None:
    with pytest.raises(LostError, match="it was started again, or its key was revoked"):
        fleet.ask(PULL_MESSAGES, node={"node_id": 12345})
    assert "it was started again, or its key was revoked" in last_error(tmp_path)
    make_node_key(tmp_path / "other.key", tmp_path / "other.pub")
    fleet._key = read_node_key(tmp_path / "other.key")
    with pytest.raises(LostError):
        fleet.connect(None, registers_itself=False)


def test_a_wrong_clock_of_a_silo_node_is_reported_with_its_offset(
    fleet: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: 401, and no word of a clock in any log."""
    answer_by(fleet, lambda _: httpx.Response(401, headers={"date": "Mon, 23 Nov 2026 07:00:00 GMT"}))
    monkeypatch.setattr(silo_node.time, "time", lambda: 1_795_417_220.0)
    with pytest.raises(LostError, match="this machine's clock is 20 s ahead of the SuperLink's; set it by NTP"):
        fleet.ask(ACTIVATE_NODE, public_key=fleet.public_key, heartbeat_interval=15.0)


@pytest.mark.parametrize("failures", [1, 3])
def test_a_silo_node_repeats_a_request_without_a_reply(
    fleet: FleetClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    refused, pauses = httpx.ConnectError("Connection refused"), list[float]()
    answers = [*[refused] * (failures - 1), httpx.Response(503), httpx.Response(200)]
    answer_by(fleet, Mock(side_effect=answers))
    monkeypatch.setattr(silo_node.time, "sleep", pauses.append)
    assert not fleet.ask(PULL_MESSAGES, node={"node_id": 1}).messages_list
    assert pauses == [0.1, 0.2, 0.4][:failures]
    assert not last_error(tmp_path)


def test_a_proxy_that_answers_for_the_superlink_is_reported_by_heartbeats(
    fleet: FleetClient, tmp_path: Path
) -> None:
    """Before: none was written, and the silo counted as stuck while its SuperLink was away."""
    answer_by(fleet, lambda _: httpx.Response(503))
    with pytest.raises(httpx.HTTPStatusError):
        fleet.ask(PULL_MESSAGES, patience=0.0, node={"node_id": 1})
    assert last_error(tmp_path) == "a proxy answers for the SuperLink: HTTP 503"


def test_a_goodbye_without_an_answer_does_not_change_how_a_node_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a node that was asked to end while its SuperLink was away ended as one that had lost it."""
    for name in ("configure_service_logging", "exit_on_signals", "_exit_with_parent"):
        monkeypatch.setattr(silo_node, name, Mock())
    monkeypatch.setenv(service.HEARTBEAT_FOLDER_VARIABLE, str(tmp_path))
    fleet = Mock(connect=Mock(return_value=7), ask=Mock(side_effect=LostError("away")))
    monkeypatch.setattr(silo_node, "FleetClient", Mock(return_value=fleet))
    node = Mock(serve=Mock(side_effect=SystemExit(143)), node_id=7)
    monkeypatch.setattr(silo_node, "SiloNode", Mock(return_value=node))
    with pytest.raises(SystemExit) as ended:
        silo_node.main("127.0.0.1:1", "0", "guard", "-")
    assert ended.value.code == 143


def test_an_unreachable_superlink_is_reported_as_lost_after_twenty_seconds(
    fleet: FleetClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    answer_by(fleet, Mock(side_effect=httpx.ConnectError("Connection refused")))
    monkeypatch.setattr(silo_node.time, "sleep", clock.sleep)
    monkeypatch.setattr(silo_node.time, "monotonic", clock.monotonic)
    with pytest.raises(LostError, match="Connection refused"):
        fleet.ask(PULL_MESSAGES, node={"node_id": 1})
    assert 20.0 < clock.now < 25.0
    assert last_error(tmp_path) == "Connection refused"


def test_a_silo_node_whose_heartbeats_fail_exits(fleet: FleetClient, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Mock(side_effect=SystemExit)
    monkeypatch.setattr(silo_node.os, "_exit", end)
    monkeypatch.setattr(silo_node.time, "sleep", lambda _: None)
    with monkeypatch.context() as patches:
        patches.setattr(silo_node, "threading", Mock())
        node = SiloNode(fleet, 12345, 0, "guard.sock")
    with pytest.raises(SystemExit):
        node._send_heartbeats()
    end.assert_called_once_with(service.LOST_EXIT_CODE)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN OPENSSH PRIVATE KEY-----\nx\n"])
def test_a_malformed_node_key_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """Was: `its SuperNode ended with exit code 1` and a traceback."""
    (tmp_path / "node.key").write_bytes(content)
    with refusal(r"node\.key: expected a private key as `ssh-keygen -t ecdsa -b 384` makes"):
        FleetClient("127.0.0.1:1", tmp_path)


def test_a_node_key_that_is_not_ecdsa_is_refused(tmp_path: Path) -> None:
    form: Any = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    (tmp_path / "node.key").write_bytes(ed25519.Ed25519PrivateKey.generate().private_bytes(*form))
    with refusal("no ECDSA key"):
        FleetClient("127.0.0.1:1", tmp_path)


def test_a_silo_with_a_key_registered_at_runtime_can_connect(link: Link, tmp_path: Path) -> None:
    """Was: a new silo, or a new key of one whose key was revoked, needed a restart of the SuperLink."""
    for number, private in enumerate(("first.key", "second.key")):
        folder = link.folder / f"node-{number + 2}"
        folder.mkdir()
        make_node_key(folder / "node.key", tmp_path / f"{private}.pub")
        (folder / "ca.crt").write_bytes((link.folder / "ca.crt").read_bytes())
        asyncio.run(link.link.register_nodes({"silo-2": node_public_key(tmp_path / f"{private}.pub")}))
        assert link.fleet(number + 2).connect(None, registers_itself=False) == link.link._nodes["silo-2"]
        asyncio.run(link.link.unregister_node("silo-2"))
        with pytest.raises(LostError):
            link.fleet(number + 2).connect(None, registers_itself=False)
