"""Public keys of SuperNodes: shown as ssh-keygen shows them, and revoked while a SuperLink runs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpriv.addons.services.certificates import (
    RevocationMonitor,
    key_fingerprint,
    make_node_key,
    node_public_key,
    read_registered_keys,
    revoke_key,
)
from fedpriv.cli.app import app
from tests.engines.builders import refusal

SILOS = 3


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "superlink"
    (folder / "nodes").mkdir(parents=True)
    for silo in range(SILOS):
        make_node_key(tmp_path / f"node-{silo}.key", public(folder, silo))
    return folder


def public(keys: Path, silo: int) -> Path:
    return keys / "nodes" / f"silo-{silo}.pub"


def revoking(keys: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["certificates", str(keys), *options])
    return done.exit_code, done.output if done.exception is None else str(done.exception)


def watch_keys(keys: Path) -> RevocationMonitor:
    """The monitor of a SuperLink that has registered these keys."""
    return RevocationMonitor(keys, read_registered_keys(keys))


def test_the_fingerprint_is_the_one_that_ssh_keygen_shows(keys: Path) -> None:
    shown = subprocess.run(["ssh-keygen", "-l", "-f", public(keys, 1)], capture_output=True, text=True, check=True)
    assert key_fingerprint(node_public_key(public(keys, 1))) == shown.stdout.split()[1]


def test_a_key_is_revoked_in_one_line_that_names_silo_and_fingerprint(keys: Path) -> None:
    own = key_fingerprint(node_public_key(public(keys, 1)))
    code, said = revoking(keys, "--revoke", "1")
    assert (code, said.count("\n")) == (0, 1)
    assert said.startswith(f"silo 1: the key {own} is revoked; ")
    assert sorted(read_registered_keys(keys)) == ["silo-0", "silo-2"]


def test_an_unknown_silo_or_key_is_refused_in_one_line_and_nothing_is_taken(keys: Path) -> None:
    with refusal(r"silo 7 has no key here; registered are silo-0, silo-1, silo-2$"):
        revoke_key(keys, 7)
    with refusal(r"silo-0\.pub: silo 0 has no key here; registered are none$"):
        revoke_key(keys / "elsewhere", 0)
    public(keys, 2).write_text("no key")
    with refusal(r"silo-2\.pub: expected a public key"):
        revoke_key(keys, 2)
    for options in (["--revoke", "1", "--renew", str(keys)], [str(keys), "--revoke", "1"]):
        code, said = revoking(keys, *options)
        assert code
        assert "expected one FOLDER" in said
    assert len(list((keys / "nodes").iterdir())) == SILOS


def test_guarantee_a_superlink_that_runs_forgets_a_revoked_key_once_and_no_other(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = key_fingerprint(node_public_key(public(keys, 1)))
    monitor = watch_keys(keys)
    assert monitor.poll() == []
    kept = public(keys, 1).read_bytes()
    revoke_key(keys, 1)
    assert monitor.poll() == ["silo-1"]
    assert f"silo-1: the key {own} is revoked" in caplog.text
    public(keys, 1).write_bytes(kept)
    assert monitor.poll() == []
    revoke_key(keys, 1)
    assert monitor.poll() == [], "it is forgotten for as long as the SuperLink runs"


def test_guarantee_a_key_whose_place_another_has_taken_is_forgotten(keys: Path, tmp_path: Path) -> None:
    monitor = watch_keys(keys)
    assert monitor.poll() == []
    draft = tmp_path / "silo-2.pub"
    make_node_key(tmp_path / "another.key", draft)
    os.replace(draft, public(keys, 2))
    assert monitor.poll() == ["silo-2"]


def test_guarantee_a_key_that_went_while_the_superlink_started_is_forgotten(keys: Path) -> None:
    monitor = watch_keys(keys)
    revoke_key(keys, 0)
    assert monitor.poll() == ["silo-0"]


def test_guarantee_a_key_that_changes_under_the_old_times_is_forgotten(keys: Path, tmp_path: Path) -> None:
    """Gains: another key at the place of a revoked one, copied there with `cp -p`."""
    monitor = watch_keys(keys)
    assert monitor.poll() == []
    times = public(keys, 2).stat()
    make_node_key(tmp_path / "another.key", public(keys, 2))
    os.utime(public(keys, 2), ns=(times.st_atime_ns, times.st_mtime_ns))
    assert monitor.poll() == ["silo-2"]


def test_guarantee_keys_are_forgotten_that_a_returning_folder_lacks(keys: Path) -> None:
    monitor = watch_keys(keys)
    assert monitor.poll() == []
    shutil.move(keys / "nodes", keys / "away")
    assert monitor.poll() == []
    (keys / "nodes").mkdir()
    assert monitor.poll() == ["silo-0", "silo-1", "silo-2"]


def test_a_disk_that_fails_is_no_revocation(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = watch_keys(keys)
    assert monitor.poll() == []
    public(keys, 0).write_text("half a k")
    assert monitor.poll() == []
    assert "a key that changed revokes nothing" in caplog.text
    shutil.move(keys / "nodes", keys / "away")
    assert monitor.poll() == []
