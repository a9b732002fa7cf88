"""Certificates and keys that the engines make, read, tell of and renew."""

import datetime
import logging
import re
import ssl
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from fedpriv.addons.services import certificates, superlink_process
from fedpriv.addons.services.deployment import RunProgress, SuperLink, _open_federation, follow_run
from fedpriv.addons.services.flower_private.control import ControlClient
from fedpriv.claims.outcome import RunObserver
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.engines.table import Connection
from fedpriv.protocol.cell_folder import FolderReader
from tests.cli.command import answer_of
from tests.engines.builders import small_cell


def test_an_expired_certificate_is_reported_with_its_date_before_any_connection(tmp_path: Path) -> None:
    """Was: 93 s, and "unavailable"."""
    certificates.make_server_keys(tmp_path)
    certificates.check_certificates(tmp_path / "ca.crt", tmp_path / "server.pem")
    old = Path(__file__).with_name("expired.crt")
    words = r"expired.crt: the certificate expired on 20\d\d-\d\d-\d\d \d\d:\d\d UTC"
    remote = _open_federation(small_cell(), Connection("127.0.0.1:1", old), "token")
    with pytest.raises(InputError, match=words), remote:
        pass


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_file_without_a_certificate_is_refused_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"ca.crt: expected a certificate \(PEM\)"):
        certificates.check_certificates(path)


def verifies(folder: Path, *options: str, name: str = "server.pem") -> bool:
    """Whether openssl verifies the certificate of that name by the folder's authority."""
    command = ["openssl", "verify", *options, "-CAfile", folder / "ca.crt", folder / name]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def in_days(days: int) -> str:
    """A time, in seconds of the epoch."""
    return str(int(time.time()) + 86_400 * days)


FOR_SERVERS = ("-x509_strict", "-purpose", "sslserver")


def test_generated_server_certificates_verify_and_their_private_key_is_owner_only(tmp_path: Path) -> None:
    certificates.make_server_keys(tmp_path)
    assert verifies(tmp_path, *FOR_SERVERS, "-verify_ip", "127.0.0.1")
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "server.key", "server.pem"]


@pytest.mark.parametrize("days", [-3650, 0, 8, 400, 36500])
def test_generated_server_certificates_verify_at_dates_decades_apart(tmp_path: Path, days: int) -> None:
    """Was: seven days, after which everything stopped."""
    certificates.make_server_keys(tmp_path)
    assert verifies(tmp_path, *FOR_SERVERS, "-attime", in_days(days))


def test_guarantee_the_generated_authority_vouches_only_for_the_certificate_of_the_server(tmp_path: Path) -> None:
    """Would gain, with a key that signed kept: another certificate for the port of a process that ended."""
    certificates.make_server_keys(tmp_path)
    (own,) = certificates.read_certificates(tmp_path / "ca.crt")
    signing = serialization.load_pem_private_key((tmp_path / "server.key").read_bytes(), None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    other = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    forged = x509.CertificateBuilder().subject_name(name).issuer_name(own.content.subject)
    forged = forged.public_key(other.public_key()).serial_number(7)
    forged = forged.not_valid_before(own.content.not_valid_before_utc)
    forged = forged.not_valid_after(own.content.not_valid_after_utc)
    signed = forged.sign(signing, hashes.SHA256())
    (tmp_path / "forged.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    for options in ([], ["-partial_chain"]):
        assert verifies(tmp_path, *options)
        assert not verifies(tmp_path, *options, name="forged.pem")


def keys_between_machines(folder: Path) -> tuple[Path, Path]:
    script = Path(__file__).resolve().parents[2] / "deploy" / "make-keys.sh"
    subprocess.run([str(script), str(folder), "1", "fl.example.org"], check=True, capture_output=True)
    return folder / "superlink", folder / "authority"


def pass_days(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(certificates, "_now", lambda: then)


def test_an_expiring_certificate_is_reported_and_renewed_with_the_same_key_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys, authority = keys_between_machines(tmp_path)
    paths = keys / "ca.crt", keys / "server.pem"
    certificates.ExpiryMonitor(*paths).poll()
    assert not caplog.messages
    listing = CliRunner().invoke(app, ["certificates", str(keys)])
    assert (listing.exit_code, listing.output.count(" days left")) == (0, 2)
    entries = answer_of("certificates", keys)
    assert [(Path(entry["file"]), entry["expires_soon"]) for entry in entries] == [(path, False) for path in paths]
    assert [f"{entry['subject']}, until" in listing.output for entry in entries] == [True, True]
    assert all(f"{entry['days_left']} days left" in listing.output for entry in entries)
    pass_days(monkeypatch, 340)
    certificates.ExpiryMonitor(*paths).poll()
    (line,) = caplog.messages
    assert re.fullmatch(
        r"a certificate has ended or ends soon: .*server.pem: CN=superlink, until .* UTC, 24 days left; .*", line
    )
    assert CliRunner().invoke(app, ["certificates", str(keys)]).exit_code == 1
    before = certificates.read_certificates(keys / "server.pem")[0].content
    assert CliRunner().invoke(app, ["certificates", str(keys), "--renew", str(authority)]).exit_code == 0
    after = certificates.read_certificates(keys / "server.pem")[0].content
    assert after.not_valid_after_utc > before.not_valid_after_utc
    assert after.public_key() == before.public_key()
    assert after.serial_number != before.serial_number
    assert list(after.extensions) == list(before.extensions)
    assert verifies(keys, "-attime", in_days(340))


def test_a_certificate_cannot_be_renewed_by_another_or_expiring_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, authority = keys_between_machines(tmp_path / "one")
    _, other = keys_between_machines(tmp_path / "two")
    served = (keys / "server.pem").read_bytes()
    with pytest.raises(InputError, match=r"ca\.crt: lacks the key of .*, so silos would refuse"):
        certificates.renew_certificate(keys, other)
    own_key = (authority / "ca.key").read_bytes()
    (authority / "ca.key").write_bytes((other / "ca.key").read_bytes())
    with pytest.raises(InputError, match="expected the EC key of"):
        certificates.renew_certificate(keys, authority)
    (authority / "ca.key").write_bytes(own_key)
    pass_days(monkeypatch, 3640)
    with pytest.raises(InputError, match="ends soon itself: make a new authority"):
        certificates.renew_certificate(keys, authority)
    assert (keys / "server.pem").read_bytes() == served


def test_an_authority_with_a_key_of_an_unknown_type_is_refused_in_one_line(tmp_path: Path) -> None:
    """Before: an error of the cryptography package ended the command."""
    keys, authority = keys_between_machines(tmp_path / "one")
    content = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes()).public_bytes(
        serialization.Encoding.DER
    )
    known, unknown = bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex("06072a8648ce3d0209")  # types of keys
    for file in (authority / "ca.crt", keys / "ca.crt"):
        before = file.read_bytes()
        file.write_text(ssl.DER_cert_to_PEM_cert(content.replace(known, unknown)))
        with pytest.raises(InputError, match=r"ca\.crt: expected a certificate for a key of a known type \("):
            certificates.renew_certificate(keys, authority)
        file.write_bytes(before)


def test_a_certificate_renewed_by_a_new_authority_verifies_by_the_certificates_of_both(tmp_path: Path) -> None:
    """Before: it named the key of the old authority, and silos refused it."""
    keys, old = keys_between_machines(tmp_path / "one")
    _, new = keys_between_machines(tmp_path / "two")
    (keys / "ca.crt").write_bytes((old / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes())
    certificates.renew_certificate(keys, new)
    assert verifies(keys, *FOR_SERVERS, "-verify_hostname", "fl.example.org")


def test_a_renewed_certificate_is_served_without_a_restart_and_a_damaged_one_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedpriv")
    keys, authority = keys_between_machines(tmp_path)
    served = uvicorn.Config(None, ssl_certfile=keys / "server.pem", ssl_keyfile=keys / "server.key")
    served.load()
    fleet = superlink_process._CertificateReloader(served, keys)
    first = serial(served)
    certificates.renew_certificate(keys, authority)
    fleet.poll()
    assert serial(served) == certificates.read_certificates(keys / "server.pem")[0].content.serial_number != first
    (keys / "server.pem").write_text("half of a")
    fleet.poll()
    assert "is not taken up" in caplog.messages[-2] + caplog.messages[-1]
    assert serial(served) != first


def serial(config: uvicorn.Config) -> int:
    """The certificate that a client is shown."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    assert config.ssl is not None
    asking, answering = client.wrap_bio(ours, theirs), config.ssl.wrap_bio(theirs, ours, server_side=True)
    for _ in range(4):
        for side in (asking, answering):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    shown = asking.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_the_public_key_file_of_a_node_matches_its_private_key(tmp_path: Path) -> None:
    private, public = tmp_path / "node.key", tmp_path / "silo-0.pub"
    certificates.make_node_key(private, public)
    assert certificates.node_public_key(public)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    derived = subprocess.run(["ssh-keygen", "-y", "-f", private], capture_output=True, check=True).stdout
    assert derived.split()[:2] == public.read_bytes().split()[:2]


@pytest.mark.parametrize("content", ["", "no key", "ssh-rsa nonsense", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI"])
def test_a_malformed_public_key_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "silo-0.pub"
    path.write_text(content)
    with pytest.raises(InputError, match=r"silo-0\.pub: expected a"):
        certificates.node_public_key(path)


def test_a_run_ends_in_one_line_when_the_supernode_of_a_silo_ended(tmp_path: Path) -> None:
    link, progress = SuperLink(ControlClient("127.0.0.1:1")), RunProgress(RunObserver(), 0, 3)
    with pytest.raises(RunError, match="silo 2's supernode ended with exit code 1"):
        follow_run(link, 1, FolderReader(tmp_path), lambda: "silo 2's supernode ended with exit code 1", progress)
