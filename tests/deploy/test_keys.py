"""The key script: what it makes is signed, named and readable by nobody else."""

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


def test_keys_of_two_silos_then_of_three(tmp_path: Path) -> None:
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


def test_the_certificate_is_the_authoritys_for_the_names_that_were_given(tmp_path: Path) -> None:
    assert make_keys(tmp_path, 1, "fl.example.org", "192.0.2.7").returncode == 0
    server, authority = tmp_path / "superlink" / "server.pem", tmp_path / "silo-0" / "node" / "ca.crt"
    assert "OK" in openssl("verify", "-x509_strict", "-CAfile", authority, server)
    names = openssl("x509", "-in", server, "-noout", "-ext", "subjectAltName")
    for name in ("DNS:superlink", "DNS:localhost", "DNS:fl.example.org", "IP Address:192.0.2.7"):
        assert name in names


def test_nobody_else_can_read_them_and_each_role_has_its_own(tmp_path: Path) -> None:
    make_keys(tmp_path, 2)
    for path in tmp_path.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    private = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.key")}
    assert private == {"authority/ca.key", "superlink/server.key", "silo-0/node/node.key", "silo-1/node/node.key"}


@pytest.mark.parametrize("arguments", [[], ["folder"], ["folder", "three"]])
def test_wrong_arguments_are_one_line(arguments: list[str], tmp_path: Path) -> None:
    done = make_keys(*[tmp_path / word if word == "folder" else word for word in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("deploy/make-keys.sh: ")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
