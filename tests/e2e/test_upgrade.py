"""A federation whose parties are upgraded one after the other while a run goes on; versions that cannot talk."""

import io
import signal
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedpriv.addons.services.deployment import GUARD_SOCKET, LocalSilo, start_superlink
from fedpriv.addons.services.service import flower_environment, script_path
from tests.e2e.federation import Federation, federation, finish, kill_process, say

pytestmark = pytest.mark.deployment
ROOT = Path(__file__).resolve().parents[2]
LAST, ITS_VERSION = "307834ea99", "0.3.1.dev0"
"""A commit before this one that speaks this protocol, and what it calls itself here."""
OLDER, OLDER_VERSION = "7a4039a3", "0.3.0"
"""The last commit that spoke the protocol before."""


def package(commit: str, version: str, folder: Path) -> str:
    """PYTHONPATH with fedpriv as it was; skips where this checkout does not go back so far."""
    made = subprocess.run(
        ["git", "archive", commit, "fedpriv", "clients", "server", "scenarios"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"this checkout has no commit {commit}")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as files:
        files.extractall(folder, filter="data")
    (told := folder / f"fedpriv-{version}.dist-info").mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fedpriv\nVersion: {version}\n")
    return str(folder)


def start(silo: LocalSilo, *names: str) -> None:
    """Guard, SuperNode, by the commands that administrators type, which are the same in all versions."""
    node = ["--superlink", silo.superlink, "--silo", str(silo.number), "--guard", str(silo.home / GUARD_SOCKET)]
    words = {
        "guard": ["silo", "run", str(silo.policy)],
        "supernode": ["supernode", *node, "--keys", str(silo.key_folder)],
    }
    for name in names:
        with (silo.home / f"{name}.log").open("ab") as log:
            silo.processes[name] = subprocess.Popen(
                [script_path("fedpriv"), *words[name]],
                cwd=silo.home,
                env=flower_environment(silo.home),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def upgrade(fed: Federation, number: int, wanted: int, running: "subprocess.Popen[str]") -> None:
    """Stop a site's services, start those of this version, and wait for rounds."""
    silo = fed.silos[number]
    for name in ("supernode", "guard"):
        kill_process(silo, name)
    start(silo, "guard", "supernode")
    say(f"silo {number} is upgraded after round {fed.rounds_done()}")
    fed.wait_for_round(wanted, running)


def test_upgrading_sites_and_coordinator_during_a_run_does_not_change_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: each round is released once, at the run's one price, with the bytes of a run without upgrades."""
    monkeypatch.setenv("PYTHONPATH", package(LAST, ITS_VERSION, tmp_path / "last"))
    with federation(tmp_path, "federation.rounds=20", "federation.batch=100") as fed:
        for silo in fed.silos:
            start(silo, "guard", "supernode")
        running = fed.run()
        fed.wait_for_round(2, running)
        token = fed.token()
        keys = fed.silo_keys(token), fed.server_key()
        monkeypatch.delenv("PYTHONPATH")
        for number in range(3):
            upgrade(fed, number, fed.rounds_done() + 2, running)
        running.send_signal(signal.SIGINT)
        finish(running, code=130)
        assert fed.link.process is not None
        assert fed.link.address is not None
        fed.link.process.kill()
        fed.link.process.wait()
        port = int(fed.link.address.rpartition(":")[2])
        options = ["--keys", str(fed.home / "keys"), "--state", str(fed.home / "runs.json")]
        fed.link = start_superlink(fed.home, options, port)
        say(f"SuperLink and `fedpriv run` are upgraded after round {fed.rounds_done()}")
        finish(fed.run("--resume"))
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(*keys))


def test_a_site_with_another_protocol_version_is_refused_before_anything_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = package(OLDER, OLDER_VERSION, tmp_path / "older")
    with federation(tmp_path) as fed:
        for silo in fed.silos:
            if silo.number == 1:
                monkeypatch.setenv("PYTHONPATH", older)
            start(silo, "guard", "supernode")
            monkeypatch.delenv("PYTHONPATH", raising=False)
        output = finish(fed.run(out="refused"), code=1)
        say(output.strip().splitlines()[-1])
        assert "silo 1" in output
        assert "protocol 3" in output
        assert "Traceback" not in output
        assert all(fed.ledger(silo, "SELECT count(*) FROM runs") == [(0,)] for silo in range(3))
        for name in ("supernode", "guard"):
            kill_process(fed.silos[1], name)
        start(fed.silos[1], "guard", "supernode")
        finish(fed.run())
        fed.assert_each_round_was_released_once(fed.token())
