"""The key script: what it makes is signed, named and readable by nobody else."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "make-keys.sh"

pytestmark = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl or ssh-keygen is not installed"
)


def make_keys(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def openssl(*arguments: object) -> str:
    return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def test_adding_a_third_silo_keeps_all_existing_keys(tmp_path: Path) -> None:
    assert make_keys(tmp_path, 2).returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.key")}
    assert len(before) == 4  # the authority's, the SuperLink's, two SuperNodes'
    assert make_keys(tmp_path, 3).returncode == 0
    assert {path: path.read_bytes() for path in before} == before
    for silo in range(3):
        node = tmp_path / f"silo-{silo}" / "node"
        public = (tmp_path / "superlink" / "nodes" / f"silo-{silo}.pub").read_text().split()
        derived = subprocess.run(
            ["ssh-keygen", "-y", "-f", node / "node.key"], capture_output=True, text=True, check=True
        ).stdout.split()
        assert public[:2] == derived[:2]
    assert len({path.read_bytes() for path in tmp_path.glob("silo-*/node/node.key")}) == 3


def digests(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_guarantee_a_missing_authority_key_is_never_replaced_by_a_new_authority(tmp_path: Path) -> None:
    """Was: another authority, with exit code 0, so that no silo could connect any more."""
    make_keys(tmp_path, 2)
    (tmp_path / "authority" / "ca.key").rename(tmp_path / "on another machine")
    before = digests(tmp_path)
    done = make_keys(tmp_path, 3, "fl.example.org")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "ca.key is not there, and silos trust its" in done.stderr
    assert digests(tmp_path) == before


@pytest.mark.parametrize("away", ["authority/ca.key", "authority"])
def test_a_silo_is_added_without_the_authoritys_key_and_nothing_else_changes(tmp_path: Path, away: str) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, 2)
    (folder / away).rename(tmp_path / "away")
    before = digests(folder)
    assert make_keys(folder, 3).returncode == 0
    after = digests(folder)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {
        *("silo-2/node/ca.crt", "silo-2/node/node.key", "silo-2/node/node.key.pub", "superlink/nodes/silo-2.pub")
    }
    assert "OK" in openssl("verify", "-CAfile", folder / "silo-2/node/ca.crt", folder / "superlink/server.pem")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who gives files away")
def test_root_gives_a_new_key_the_owner_and_mode_of_the_existing_keys(tmp_path: Path) -> None:
    """Was: root's own, mode 0600, so that the SuperLink did not start any more."""
    make_keys(tmp_path, 2)
    nodes = tmp_path / "superlink" / "nodes"
    for path in (tmp_path / "superlink", nodes, *nodes.iterdir()):
        os.chown(path, 12345, 23456)
    (nodes / "silo-1.pub").chmod(0o640)
    assert make_keys(tmp_path, 3).returncode == 0
    status = (nodes / "silo-2.pub").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (12345, 23456, 0o640)


def test_the_server_certificate_is_signed_by_the_authority_for_the_given_names(tmp_path: Path) -> None:
    assert make_keys(tmp_path, 1, "fl.example.org", "192.0.2.7").returncode == 0
    server, authority = tmp_path / "superlink" / "server.pem", tmp_path / "silo-0" / "node" / "ca.crt"
    assert "OK" in openssl("verify", "-x509_strict", "-CAfile", authority, server)
    names = openssl("x509", "-in", server, "-noout", "-ext", "subjectAltName")
    for name in ("DNS:superlink", "DNS:localhost", "DNS:fl.example.org", "IP Address:192.0.2.7"):
        assert name in names


def test_keys_are_readable_by_their_owner_only_and_each_role_has_one(tmp_path: Path) -> None:
    make_keys(tmp_path, 2)
    for path in tmp_path.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    private = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.key")}
    assert private == {"authority/ca.key", "superlink/server.key", "silo-0/node/node.key", "silo-1/node/node.key"}


@pytest.mark.parametrize("arguments", [[], ["folder"], ["folder", "three"]])
def test_wrong_arguments_of_the_key_script_are_refused_in_one_line(arguments: list[str], tmp_path: Path) -> None:
    done = make_keys(*[tmp_path / word if word == "folder" else word for word in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("deploy/make-keys.sh: ")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
