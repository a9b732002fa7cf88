"""Public keys of SuperNodes: shown as ssh-keygen shows them, added and revoked while a SuperLink runs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpriv.addons.services.certificates import (
    KeyMonitor,
    key_fingerprint,
    make_node_key,
    node_public_key,
    read_registered_keys,
    revoke_key,
)
from fedpriv.cli.app import app
from tests.engines.builders import refusal

SILOS = 3
NOTHING: tuple[list[str], dict[str, bytes]] = ([], {})
"""What a monitor says of keys that are as before."""


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


def watch_keys(keys: Path) -> KeyMonitor:
    """The monitor of a SuperLink that has registered these keys."""
    return KeyMonitor(keys, read_registered_keys(keys))


def test_the_key_fingerprint_equals_that_of_ssh_keygen(keys: Path) -> None:
    shown = subprocess.run(["ssh-keygen", "-l", "-f", public(keys, 1)], capture_output=True, text=True, check=True)
    assert key_fingerprint(node_public_key(public(keys, 1))) == shown.stdout.split()[1]


def test_revoking_a_key_prints_one_line_with_silo_and_fingerprint(keys: Path) -> None:
    own = key_fingerprint(node_public_key(public(keys, 1)))
    code, said = revoking(keys, "--revoke", "1")
    assert (code, said.count("\n")) == (0, 1)
    assert said.startswith(f"silo 1: the key {own} is revoked; ")
    assert sorted(read_registered_keys(keys)) == ["silo-0", "silo-2"]


def test_revoking_an_unknown_silo_or_key_is_refused_and_changes_nothing(keys: Path) -> None:
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


def test_guarantee_a_running_superlink_unregisters_a_revoked_key_once_and_no_other(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = key_fingerprint(node_public_key(public(keys, 1)))
    monitor = watch_keys(keys)
    assert monitor.poll() == NOTHING
    kept = public(keys, 1).read_bytes()
    revoke_key(keys, 1)
    assert monitor.poll() == (["silo-1"], {})
    assert f"silo-1: the key {own} is revoked" in caplog.text
    public(keys, 1).write_bytes(kept)
    assert monitor.poll() == NOTHING
    revoke_key(keys, 1)
    assert monitor.poll() == NOTHING, "it is forgotten for as long as the SuperLink runs"


def test_guarantee_a_replaced_node_key_is_unregistered(keys: Path, tmp_path: Path) -> None:
    monitor = watch_keys(keys)
    assert monitor.poll() == NOTHING
    draft = tmp_path / "silo-2.pub"
    make_node_key(tmp_path / "another.key", draft)
    os.replace(draft, public(keys, 2))
    assert monitor.poll() == (["silo-2"], {"silo-2": node_public_key(public(keys, 2))})


def test_guarantee_a_key_revoked_during_startup_is_unregistered(keys: Path) -> None:
    monitor = watch_keys(keys)
    revoke_key(keys, 0)
    assert monitor.poll() == (["silo-0"], {})


def test_guarantee_a_key_replaced_with_unchanged_file_times_is_unregistered(keys: Path, tmp_path: Path) -> None:
    """Gains: another key at the place of a revoked one, copied there with `cp -p`."""
    monitor = watch_keys(keys)
    assert monitor.poll() == NOTHING
    times = public(keys, 2).stat()
    make_node_key(tmp_path / "another.key", public(keys, 2))
    os.utime(public(keys, 2), ns=(times.st_atime_ns, times.st_mtime_ns))
    assert monitor.poll() == (["silo-2"], {"silo-2": node_public_key(public(keys, 2))})


def test_guarantee_keys_missing_from_a_restored_key_folder_are_unregistered(keys: Path) -> None:
    monitor = watch_keys(keys)
    assert monitor.poll() == NOTHING
    shutil.move(keys / "nodes", keys / "away")
    assert monitor.poll() == NOTHING
    (keys / "nodes").mkdir()
    assert monitor.poll() == (["silo-0", "silo-1", "silo-2"], {})


def test_an_unreadable_key_file_or_folder_revokes_no_key(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = watch_keys(keys)
    assert monitor.poll() == NOTHING
    public(keys, 0).write_text("half a k")
    assert monitor.poll() == NOTHING
    assert "a key that changed revokes nothing" in caplog.text
    shutil.move(keys / "nodes", keys / "away")
    assert monitor.poll() == NOTHING


def test_a_new_silos_key_is_registered_without_a_restart(keys: Path, tmp_path: Path) -> None:
    """Was: a restart of the SuperLink, which ends the runs of all others."""
    monitor = watch_keys(keys)
    assert monitor.poll() == NOTHING
    make_node_key(tmp_path / "new.key", public(keys, 3))
    assert monitor.poll() == ([], {"silo-3": node_public_key(public(keys, 3))})
    assert monitor.poll() == NOTHING
    revoke_key(keys, 3)
    assert monitor.poll() == (["silo-3"], {})


def test_a_second_key_of_a_silo_is_registered_after_a_revocation(keys: Path, tmp_path: Path) -> None:
    monitor = watch_keys(keys)
    revoke_key(keys, 1)
    assert monitor.poll() == (["silo-1"], {})
    make_node_key(tmp_path / "second.key", public(keys, 1))
    assert monitor.poll() == ([], {"silo-1": node_public_key(public(keys, 1))})


@pytest.mark.parametrize("damage", ["unreadable", "no key", "another silo's", "another name"])
def test_an_unusable_new_key_does_not_affect_the_registered_keys(
    keys: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Was: a key that root had left unreadable ended the SuperLink at its next start, again and again."""
    monitor = watch_keys(keys)
    assert monitor.poll() == NOTHING
    new, read_bytes = public(keys, 3), Path.read_bytes
    new.write_bytes(public(keys, 0).read_bytes() if damage == "another silo's" else b"no key")
    if damage == "another name":
        new.rename(keys / "nodes" / "silo-03.pub")
    if damage == "unreadable":

        def read(path: Path) -> bytes:
            if path == new:
                raise PermissionError(13, "Permission denied")
            return read_bytes(path)

        monkeypatch.setattr(Path, "read_bytes", read)
    assert monitor.poll() == NOTHING
    assert ("silo-3" in caplog.text) == (damage != "another name")
    if damage in ("unreadable", "no key"):
        assert sorted(read_registered_keys(keys)) == ["silo-0", "silo-1", "silo-2"]
    monkeypatch.undo()
    make_node_key(tmp_path / "new.key", new)
    assert monitor.poll() == ([], {"silo-3": node_public_key(new)})


def test_a_key_folder_without_any_readable_key_is_refused(keys: Path) -> None:
    for silo in range(SILOS):
        public(keys, silo).write_text("no key")
    with refusal(r"nodes: no public key of a SuperNode; run deploy/make-keys\.sh"):
        read_registered_keys(keys)
