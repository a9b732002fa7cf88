"""What an operator sees of a coordinator: health, log lines and metrics of runs, and refusals in words."""

import json
import logging
import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fedpriv.addons.services import deployment, service, superlink_process, supernode_process
from fedpriv.addons.services.certificates import load_key_pair, make_node_key, make_server_keys, prepare_isolation
from fedpriv.addons.services.flower_private import presence
from fedpriv.addons.services.flower_private.control import RunStatus
from fedpriv.addons.services.flower_private.presence import Presence, RunHistory
from fedpriv.addons.services.service import SUPERNODE
from fedpriv.addons.services.superlink_process import _why_unhealthy
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import InputError, RunError
from fedpriv.protocol.cell_folder import FolderReader, report_waiting
from fedpriv.scenario.load import load_scenario
from fedpriv.silo.metrics import format_metrics, open_private_socket, watch_socket
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.engines.builders import Clock, refusal, superlink_of

EXPIRED = Path(__file__).with_name("expired.crt")


@pytest.mark.parametrize("name", ["ca.crt", "server.pem", "server.key", "superexec.secret"])
def test_a_superlink_that_has_lost_one_of_its_files_is_unhealthy(tmp_path: Path, name: str) -> None:
    """Was: "at work", while no task could start, since a host had deleted what was ten days old."""
    prepare_isolation(tmp_path)
    healthy = partial(_why_unhealthy, tmp_path, [], [lambda: None])
    assert healthy() is None
    (tmp_path / name).unlink()
    assert name in str(healthy())


def test_a_superlink_with_an_expired_certificate_or_a_lost_socket_is_unhealthy(tmp_path: Path) -> None:
    prepare_isolation(tmp_path)
    assert "expired.crt: the certificate expired on" in str(_why_unhealthy(tmp_path, [EXPIRED], []))
    path = tmp_path / "control.sock"
    with open_private_socket(path, "--control"):
        checks = [watch_socket(path)]
        assert _why_unhealthy(tmp_path, [], checks) is None
        path.unlink()
        assert "this service's socket is gone" in str(_why_unhealthy(tmp_path, [], checks))
        with open_private_socket(path, "--control"):
            assert "this service's socket is gone" in str(_why_unhealthy(tmp_path, [], checks))


def test_a_supernode_with_a_missing_key_or_an_expired_certificate_is_unhealthy(tmp_path: Path) -> None:
    make_server_keys(tmp_path)
    make_node_key(tmp_path / "node.key", tmp_path / "node.pub")
    monitor = supernode_process.SupernodeMonitor("127.0.0.1:1", tmp_path, tmp_path)
    (tmp_path / SUPERNODE).write_text(f"{time.monotonic()} {time.monotonic()}\n")
    assert monitor.why_unhealthy() is None
    (tmp_path / "node.key").rename(tmp_path / "away")
    assert "node.key: expected a private key" in str(monitor.why_unhealthy())
    (tmp_path / "away").rename(tmp_path / "node.key")
    (tmp_path / "ca.crt").write_bytes(EXPIRED.read_bytes())
    assert "ca.crt: the certificate expired on" in str(monitor.why_unhealthy())


def test_a_second_supernode_with_the_same_key_is_refused_before_connecting(tmp_path: Path) -> None:
    """Was: both asked the SuperLink, and each was turned away in turns."""
    make_server_keys(tmp_path)
    make_node_key(tmp_path / "node.key", tmp_path / "node.pub")
    lock, second = supernode_process._lock_key, supernode_process._lock_key(tmp_path)
    with lock(tmp_path), refusal(r"node\.key: another SuperNode runs with this key"), second:
        pass
    with lock(tmp_path), lock(None):
        pass


def test_a_supernode_whose_key_folder_is_named_dash_connects_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node took the name "-" for no TLS and a new key."""
    monkeypatch.chdir(tmp_path)
    Path("-").mkdir()
    make_server_keys(Path("-"))
    make_node_key(Path("-/node.key"), Path("-/node.pub"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(service.HEARTBEAT_FOLDER_VARIABLE, "")
    for name in ("configure_service_logging", "exit_on_signals"):
        monkeypatch.setattr(supernode_process, name, lambda **_: None)
    run = Mock(return_value=(SUPERNODE, 2))
    monkeypatch.setattr(supernode_process, "_run_parts", run)
    with refusal("exit code 2", RunError):
        supernode_process.run_supernode("127.0.0.1:1", 0, tmp_path / "guard.sock", Path("-"))
    assert run.call_args[0][0][SUPERNODE][-1] == str(tmp_path / "-")


@pytest.mark.parametrize("kind", ["broken", "another type", "missing"])
def test_an_unusable_supernode_key_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """Was: "its SuperNode ended with exit code 1"."""
    make_server_keys(tmp_path)
    if kind == "another type":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "node.key"], check=True)
    elif kind == "broken":
        (tmp_path / "node.key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")
    started = supernode_process._lock_key(tmp_path)
    with refusal(r"node\.key: expected a private key as `ssh-keygen -t ecdsa -b 384` makes \("), started:
        pass


@pytest.mark.parametrize("kind", ["broken", "another's", "missing", "with a password"])
def test_an_unusable_superlink_key_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """Was: a traceback of ssl."""
    make_server_keys(tmp_path)
    load_key_pair(tmp_path)
    key = tmp_path / "server.key"
    if kind == "another's":
        certificate = (tmp_path / "server.pem").read_bytes()
        make_server_keys(tmp_path)
        (tmp_path / "server.pem").write_bytes(certificate)
    elif kind == "with a password":
        command = ["openssl", "pkey", "-aes256", "-passout", "pass:word", "-in", key, "-out", tmp_path / "locked"]
        subprocess.run(command, check=True, capture_output=True)
        (tmp_path / "locked").replace(key)
    elif kind == "broken":
        key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n")
    else:
        key.unlink()
    with refusal(r"server\.key: expected the private key of server\.pem, without a password \("):
        load_key_pair(tmp_path)
    (tmp_path / "nodes").mkdir()
    make_node_key(tmp_path / "node.key", tmp_path / "nodes" / "silo-0.pub")
    with refusal(r"server\.key: expected the private key"):
        superlink_process.serve_superlink(tmp_path / "c.sock", tmp_path, host="127.0.0.1", port=1)
    assert not (tmp_path / "c.sock").exists()


def test_a_too_low_limit_of_open_files_is_refused_or_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: a traceback of whatever could not be opened."""
    limits: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    monkeypatch.setattr(resource, "setrlimit", lambda *words: limits.append(words))
    with refusal("fedpriv superlink: 16 open files are allowed, and 256 are needed; raise LimitNOFILE="):
        service.raise_file_limit("fedpriv superlink")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 4096))
    service.raise_file_limit("fedpriv superlink")
    assert limits == [(resource.RLIMIT_NOFILE, (4096, 4096))]


def flower_run(folder: Path, status: str = "running", sub: str = "", details: str = "") -> Any:
    """A run as Flower lists it."""
    return SimpleNamespace(
        run_id=7,
        status=SimpleNamespace(status=status, sub_status=sub, details=details),
        running_at="2026-11-30T04:00:00+00:00",
        finished_at="",
        override_config={"out": SimpleNamespace(string=str(folder))},
    )


def test_a_run_is_logged_from_its_start_to_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: three lines in three runs, none of them fedpriv's."""
    caplog.set_level(logging.INFO, "fedpriv")
    clock = Clock(1000.0)
    monkeypatch.setattr(presence.time, "monotonic", clock.monotonic)
    runs = RunHistory(None)

    def look(*words: str, seconds: float = 61.0) -> None:
        clock.now += seconds
        runs.update([flower_run(tmp_path, *words)])

    look("pending")
    look()
    (tmp_path / "progress").write_text("3")
    look()
    (tmp_path / "progress").write_text("4")
    look(seconds=2.0)  # a line a minute
    report_waiting(tmp_path, [1, 4], time.time())
    look()
    look()
    report_waiting(tmp_path, [], time.time())
    look()
    (tmp_path / "failure.json").write_text(
        json.dumps({"message": "2 of 3 silos do not take part", "exit_code": 1})
    )
    look("finished", "failed", "Flower's words")
    look("finished", "failed", "Flower's words")
    told = [(record.levelname, vars(record)["event"], vars(record)["round"]) for record in caplog.records]
    assert told == [
        ("INFO", "started", 0),
        ("INFO", "round", 3),
        ("WARNING", "waiting", 4),
        ("INFO", "round", 4),
        ("INFO", "waiting", 4),
        ("WARNING", "ended", 4),
    ]
    assert {vars(record)["run"] for record in caplog.records} == {"7"}
    assert caplog.messages[2] == "waits for silo 1, 4"
    assert caplog.messages[-1] == "finished:failed: 2 of 3 silos do not take part"
    assert runs._reports == {}, "nothing is kept of a run that is over"


def test_superlink_metrics_report_runs_and_silos_by_number(tmp_path: Path) -> None:
    """Was: silo="silo-0" here and silo="0" at a guard, and no run."""
    (tmp_path / "progress").write_text("5")
    report_waiting(tmp_path, [2], time.time())
    runs = RunHistory(None)
    runs.update([flower_run(tmp_path)])
    link = Presence(lambda *_: None, {"silo-0": b"a", "silo-11": b"b"})  # type: ignore[arg-type,return-value]
    text = format_metrics([*link.metrics(), *runs.metrics()])
    for line in (
        'fedpriv_superlink_silo_seen_seconds{silo="0"} 0',
        'fedpriv_superlink_silo_seen_seconds{silo="11"} 0',
        'fedpriv_superlink_runs{state="running"} 1',
        'fedpriv_superlink_run_rounds{run="7"} 5',
        'fedpriv_superlink_run_waits{run="7"} 1',
    ):
        assert line in text.splitlines()
    assert 'fedpriv_superlink_run_disk_free_bytes{run="7"} ' in text
    runs.update([flower_run(tmp_path, "finished", "completed")])
    assert "run_rounds" not in format_metrics(runs.metrics())


def test_a_run_without_a_folder_does_not_break_the_metrics() -> None:
    """Was: no metric of the SuperLink, as long as an app of somebody's own was running."""
    runs, run = RunHistory(None), flower_run(Path())
    run.override_config = {}
    runs.update([run])
    text = format_metrics(runs.metrics())
    assert 'fedpriv_superlink_run_rounds{run="7"} 0' in text
    assert "disk_free" not in text


@pytest.mark.parametrize("text", ['{"silos": [1e999]}', "[" * 100_000])
def test_a_damaged_report_of_a_run_counts_as_none(tmp_path: Path, text: str) -> None:
    """Was: the end of the SuperLink, which reads the reports of its runs."""
    (tmp_path / "waiting.json").write_text(text)
    (tmp_path / "progress").write_text("5")
    assert presence.read_report(str(tmp_path)) == presence.RunReport(rounds=5)


def test_a_run_that_is_not_started_for_minutes_makes_the_superlink_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: "starting" for ever, and "at work"."""
    clock, runs = Clock(1000.0), RunHistory(None)
    monkeypatch.setattr(presence.time, "monotonic", clock.monotonic)
    runs.update([flower_run(tmp_path, "starting")])
    clock.now += 359.0
    runs.update([flower_run(tmp_path, "starting")])
    assert runs.why_stuck() is None
    clock.now += 2.0
    assert runs.why_stuck() == "run 7 is not started after 361 s"
    runs.update([flower_run(tmp_path)])
    assert runs.why_stuck() is None


def test_a_run_that_the_superlink_does_not_start_ends_with_an_error_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: "starting" for 240 s, until somebody stopped waiting."""
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_MAX_START_SECONDS", 0.2)
    progress = deployment.RunProgress(RunObserver(), 0, 6)
    link = superlink_of(RunStatus("starting") for _ in iter(int, 1))
    with refusal("the SuperLink has not started the run in 0 s; its log says why", RunError):
        deployment.follow_run(link, 1, FolderReader(tmp_path), lambda: None, progress)


def test_a_second_superlink_on_the_same_run_history_is_refused(tmp_path: Path) -> None:
    """Was: each wrote its own over the other's, and marked its runs as failed."""
    path = tmp_path / "runs.json"
    first = RunHistory(path)
    with refusal(r"runs\.json: another SuperLink keeps its runs there; end it first"):
        RunHistory(path)
    first._lock.close()
    RunHistory(path)


def test_listing_silos_imports_neither_flower_nor_torch() -> None:
    """Was: 3.7 s of processor for each look."""
    code = (
        "import sys\nimport fedpriv.addons.services.flower_private.presence\n"
        "print(sorted({'torch', 'flwr', 'fastapi', 'grpc'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_service_does_not_replace_a_folder_with_unrelated_files(tmp_path: Path) -> None:
    """Gains: nothing but a folder of the wrong name, and all that was in it."""
    folder = tmp_path / "c.sock.d"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    made = service.fresh_folder(folder)
    with refusal(r"thesis\.tex: is no file of a service, and its folder would be replaced"), made:
        pass
    assert (folder / "thesis.tex").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone is refused")
def test_a_deployment_refused_as_root_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: runs/deployment with a results.json without cells."""
    monkeypatch.delenv("FEDPRIV_ALLOW_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    scenario = Path(__file__).resolve().parents[2] / "scenarios" / "containers.toml"
    with pytest.raises(InputError, match="as root here"):
        run_sweep(load_scenario(scenario), RunOptions(engine="deployment"))
    assert list(tmp_path.iterdir()) == []
