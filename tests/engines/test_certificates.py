"""Certificates and keys that the engines make and read."""

import stat
import subprocess
from pathlib import Path

import pytest

from fedpriv.core.errors import InputError
from fedpriv.engines import processes as certificates
from fedpriv.engines.superlink import remote_superlink


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
