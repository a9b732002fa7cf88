"""What a coordinator is link of silos and runs, and that nobody else can say it."""

import json
import re
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from click.testing import Result
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode import node_auth_http_interceptor as signing
from starlette.testclient import TestClient
from typer.testing import CliRunner

from fedpriv.addons.services.flower_private import FOLLOWED_RUN_HEADER, STATUS_PATH, VERSION_HEADER, presence
from fedpriv.addons.services.flower_private import control as control_module
from fedpriv.addons.services.flower_private.control import ControlClient, RunStatus
from fedpriv.addons.services.flower_private.front import SuperLinkApp
from fedpriv.addons.services.flower_private.names import CONTROL_PREFIX, FLEET_PREFIX
from fedpriv.addons.services.flower_private.presence import Presence, RunHistory, list_runs, list_silos
from fedpriv.addons.services.superlink_process import PathFilter
from fedpriv.cli.app import app as command
from fedpriv.core.errors import InputError, RunError
from fedpriv.protocol.messages import REFUSED_SILOS_VARIABLE
from fedpriv.server import grid
from tests.attacks.test_hostile_silo import Keys, fleet
from tests.attacks.test_hostile_silo import app as app
from tests.attacks.test_hostile_silo import keys as keys
from tests.engines.builders import refusal
from tests.engines.flower_link import PYPROJECT


@pytest.fixture
def link(app: Any, keys: Mapping[str, Keys], tmp_path: Path) -> Presence:
    nodes = {name: public_key_to_bytes(public) for name, (_, public) in keys.items()}
    return Presence(app, nodes, tmp_path / "refused.json")


@pytest.fixture
def control(app: Any, link: Presence, monkeypatch: pytest.MonkeyPatch) -> ControlClient:
    """The Control API over `link`, without a network."""
    superlink, known = SuperLinkApp(app, long_polling=False), RunHistory(None)

    async def status() -> object:
        known.update(await superlink.list_runs())
        return {**link.snapshot(), "runs": known.runs()}

    listening = PathFilter(link, CONTROL_PREFIX, status=status)
    make = control_module.open_client

    def client(*words: Any, **options: Any) -> Any:
        make(*words, **options).close()
        return TestClient(listening, raise_server_exceptions=False)

    monkeypatch.setattr(control_module, "open_client", client)
    return ControlClient("unix:/control.sock")


@pytest.fixture
def late() -> Iterator[Any]:
    """A SuperNode's clock that a test moves, in seconds."""
    moved, now = [0.0], signing.now
    with mock.patch.object(signing, "now", side_effect=lambda: now() + timedelta(seconds=moved[0])):
        yield moved


def connect(app: Presence, pair: Keys, version: str = "0.2.0 (protocol 3)") -> None:
    client = fleet(app, pair)
    client._client.headers[VERSION_HEADER] = version
    key = public_key_to_bytes(pair[1])
    client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30.0))


@pytest.mark.slow
def test_the_silo_list_shows_version_clock_offset_and_last_contact(
    link: Presence, keys: Mapping[str, Keys], control: ControlClient, late: list[float], tmp_path: Path
) -> None:
    assert [silo.format_line() for silo in list_silos(control)] == [
        f"silo {silo}: not connected since the SuperLink was started" for silo in range(2)
    ]
    connect(link, keys["silo-0"], "0.2.0\x1b[2J (protocol 3)" + "x" * 100)
    late[0] = 20.0
    with pytest.raises(httpx.HTTPStatusError):
        connect(link, keys["silo-1"])
    assert [silo.connected for silo in list_silos(control)] == [True, False]
    one, two = (silo.format_line() for silo in list_silos(control))
    pattern = r"silo 0: connected, last seen \d+ s ago, fedpriv 0\.2\.0\\x1b\[2J \(protocol 3\)x.*clock as here"
    assert re.fullmatch(pattern, one)
    assert "silo 1: not let in (last connected: never): its clock is 20 s ahead of the SuperLink's" in two
    assert "its clock is 20 s ahead" in json.loads((tmp_path / "refused.json").read_text())["silo-1"]
    late[0] = -100.0
    connect(link, keys["silo-1"])
    _, silo = list_silos(control)
    assert silo.connected
    assert "clock 100 s behind the coordinator's" in silo.format_line()
    assert json.loads((tmp_path / "refused.json").read_text()) == {}


def test_a_silo_with_a_new_key_is_no_longer_reported_as_refused(
    link: Presence, keys: Mapping[str, Keys], late: list[float], tmp_path: Path
) -> None:
    """Was: the clock of the former key's machine, in every message of a run's server about the silo."""
    late[0] = 20.0
    with pytest.raises(httpx.HTTPStatusError):
        connect(link, keys["silo-1"])
    assert list(json.loads((tmp_path / "refused.json").read_text())) == ["silo-1"]
    link.add_nodes({"silo-1": public_key_to_bytes(generate_key_pairs()[1])})
    assert json.loads((tmp_path / "refused.json").read_text()) == {}


def test_a_silo_whose_key_is_revoked_is_not_listed_as_connected(
    link: Presence, keys: Mapping[str, Keys], control: ControlClient
) -> None:
    """Was: connected for a minute, then away, as if it could come back by itself."""
    connect(link, keys["silo-1"])
    link.add_nodes({}, revoked=["silo-1"])
    _, silo = list_silos(control)
    assert not silo.connected
    line = r"silo 1: not let in \(last connected: \d+ s ago\): its key is revoked, and it has no other"
    assert re.fullmatch(line, silo.format_line())
    link.add_nodes({}, revoked=["silo-7"])  # a new key that Flower did not register, and that was revoked then
    assert "never): its key is revoked" in list_silos(control)[-1].format_line()
    link.add_nodes({"silo-1": public_key_to_bytes(generate_key_pairs()[1])})
    assert list_silos(control)[1].format_line() == "silo 1: not connected since the SuperLink was started"


def test_requests_without_a_valid_signature_do_not_change_the_silo_list(
    link: Presence, keys: Mapping[str, Keys], control: ControlClient, late: list[float]
) -> None:
    """Would gain: an operator who looks for a clock that is right; whoever knows a public key can name it."""
    late[0] = 1000.0
    stranger = generate_key_pairs()[0]
    for pair in ((stranger, keys["silo-1"][1]), generate_key_pairs()):
        with pytest.raises(httpx.HTTPStatusError):
            connect(link, pair)
    client = TestClient(PathFilter(link, FLEET_PREFIX))
    for headers in ({}, {"flwr-public-key": "?"}, {"flwr-timestamp": "yesterday"}):
        client.post(f"{FLEET_PREFIX}activate-node", headers=headers)
    assert link.snapshot()["silos"] == {"silo-0": {}, "silo-1": {}}
    assert client.get(STATUS_PATH).status_code == 404  # a silo does not see the others
    client.get(f"{FLEET_PREFIX}activate-node", headers={FOLLOWED_RUN_HEADER: "7"})
    assert link.snapshot()["followed"] == {}


def test_a_duplicate_public_key_header_does_not_show_another_silo_as_connected(
    link: Presence, keys: Mapping[str, Keys], control: ControlClient
) -> None:
    """Would gain: a silo that is away is shown as connected, with a version and a clock of another's choice."""
    client = fleet(link, keys["silo-0"])
    send = client._client.send

    def twice(request: httpx.Request, **named: Any) -> httpx.Response:
        other = b64encode(public_key_to_bytes(keys["silo-1"][1]))
        request.headers = httpx.Headers([*request.headers.raw, (b"flwr-public-key", other)])
        return send(request, **named)

    with mock.patch.object(client._client, "send", twice):
        key = public_key_to_bytes(keys["silo-0"][1])
        client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30.0))
    assert [silo.connected for silo in list_silos(control)] == [True, False]


def test_a_silo_without_contact_for_a_minute_is_listed_as_away(
    link: Presence, keys: Mapping[str, Keys], control: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(link, keys["silo-0"])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61.0)
    assert list_silos(control)[0].format_line().startswith("silo 0: away, last seen 61 s ago")


@pytest.mark.slow
def test_the_run_list_shows_rounds_and_orphans_and_runs_can_be_stopped(
    control: ControlClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert list_runs(control) == []
    (tmp_path / "progress").write_text("5")
    run = control.start_run(PYPROJECT.format(app="a:b"), str(tmp_path))
    assert control.run_status(run) == RunStatus("pending")
    (listed,) = list_runs(control)
    assert (listed.run, listed.state, listed.rounds) == (str(run), "pending", 5)
    assert (listed.folder, listed.orphan) == (str(tmp_path), False)
    assert listed.format_line() == f"run {run}: pending, 5 rounds done, in {tmp_path}"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61.0)
    (listed,) = list_runs(control)
    assert listed.orphan
    assert "no `fedpriv run` follows it" in listed.format_line()
    control.stop_run(run)
    (listed,) = list_runs(control)
    assert listed.state == "finished:stopped"
    assert not listed.orphan
    with refusal("refuses: Run is already finished", RunError):
        control.stop_run(run)
    with refusal("does not know this run", RunError):
        control.stop_run(run + 1)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(command, ["federation", *words])


@pytest.mark.slow
def test_federation_commands_print_text_or_json_and_fail_unless_all_silos_are_connected(
    link: Presence, keys: Mapping[str, Keys], control: ControlClient
) -> None:
    for silo in range(2):
        assert isinstance(invoke("status").exception, SystemExit)
        connect(link, keys[f"silo-{silo}"])
    result = invoke("status")
    assert (result.exit_code, len(result.output.splitlines())) == (0, 2)
    assert [silo["connected"] for silo in json.loads(invoke("status", "--json").output)] == [True, True]
    assert invoke("runs").output == "no run was started since the SuperLink began its records\n"
    assert json.loads(invoke("runs", "--json").output) == []


def test_federation_commands_without_a_superlink_fail_in_one_line(tmp_path: Path) -> None:
    for words in (["status"], ["runs"], ["stop", "7"]):
        error = invoke(*words, "--superlink", f"unix:{tmp_path}/none.sock").exception
        assert isinstance(error, RunError)
        assert "cannot be reached: nothing listens there ([Errno 2] No such file" in str(error)
        assert str(error).endswith("start `fedpriv superlink`, or give where it is by --superlink")
    for words in (["stop", "all"], ["stop", "9" * 5000], ["status", "--superlink", "nonsense"]):
        assert isinstance(invoke(*words).exception, InputError)


def test_a_server_reports_why_the_superlink_refuses_a_silo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: `silo 1 was not connected after 45 s`, and the word clock in no log."""
    assert grid._format_superlink_refusals([1]) == ""
    monkeypatch.setenv(REFUSED_SILOS_VARIABLE, str(tmp_path / "refused.json"))
    assert grid._format_superlink_refusals([1]) == ""
    (tmp_path / "refused.json").write_text(json.dumps({"silo-1": presence.format_clock_refusal(20.0)}))
    assert grid._format_superlink_refusals([0]) == ""
    assert grid._format_superlink_refusals([0, 1]) == (
        "; silo 1: its clock is 20 s ahead of the SuperLink's, which refuses it; set both by NTP"
    )
