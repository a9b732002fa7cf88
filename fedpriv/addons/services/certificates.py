"""Keys and certificates of services, on one machine and between machines.

An authority is a key and its certificate (ca.key, ca.crt), with which a SuperLink's certificate (server.pem) is
signed.  A SuperLink's folder `nodes` has the public keys of the registered SuperNodes, as silo-N.pub.  To revoke a
key is to remove its file.  A SuperLink notices renewed certificates, new keys and revoked keys while it runs.  PEM
is the text form of certificates and keys.
"""

import datetime
import hashlib
import ipaddress
import logging
import re
import secrets
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, types
from cryptography.x509.oid import NameOID

from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.core.files import PRIVATE_MODE, sync_folder, write_bytes, write_text
from fedpriv.silo.metrics import ServiceMetric

_log = logging.getLogger("fedpriv.certificates")
EXPIRY_WARNING = datetime.timedelta(days=30)
"""Time before the end of a certificate from which on warnings are logged."""
_DAY_SECONDS, _DATE_FORMAT = 86_400.0, "%Y-%m-%d %H:%M UTC"
AUTHORITY_KEY = "ca.key"
AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, NODE_KEY_FILE = "ca.crt", "server.pem", "server.key", "node.key"
SECRET_FILE = "superexec.secret"
_SILO_FILE = re.compile(r"silo-(0|[1-9][0-9]*)\.pub")


def make_server_keys(folder: Path) -> None:
    """Write ca.crt, server.pem and server.key (0600) for 127.0.0.1 and localhost into `folder`.

    The certificate is valid from 1970 to 9999, since a wrong clock must not matter.

    Guarantee: ca.crt vouches for server.pem and for nothing else: it is the same certificate, and no authority's.
    A process that takes over a port of a process that ended cannot answer in its place without server.key.
    """
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")
    alternative_names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([name]))
        .issuer_name(x509.Name([name]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))  # the date without an end in RFC 5280
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternative_names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    for path in (folder / AUTHORITY_FILE, folder / CERTIFICATE_FILE):
        path.write_bytes(certificate.public_bytes(pem))
    write_bytes(folder / KEY_FILE, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), PRIVATE_MODE)


def make_node_key(private: Path, public: Path) -> None:
    """Write a SuperNode's private key (OpenSSH, 0600) and its public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh_format, no_encryption = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    write_bytes(private, key.private_bytes(serialization.Encoding.PEM, ssh_format, no_encryption), PRIVATE_MODE)
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    )


def node_public_key(path: Path) -> bytes:
    """Read a public key, a line as ssh-keygen writes it, and return the PEM that Flower uses.

    Raises:
        InputError: If the file cannot be read, or has no ECDSA public key.
    """
    with convert_key_errors(path, "a public key as `ssh-keygen -t ecdsa -b 384` makes"):
        key = serialization.load_ssh_public_key(path.read_bytes())
        if isinstance(key, ec.EllipticCurvePublicKey):
            return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        raise ValueError("it is no ECDSA key")


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a SuperNode's private key, or raise InputError without an ECDSA key that needs no password."""
    with convert_key_errors(path, "a private key as `ssh-keygen -t ecdsa -b 384` makes"):
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
        raise ValueError("it is no ECDSA key")


@contextmanager
def convert_key_errors(path: Path, expected: str) -> Iterator[None]:
    """Convert errors of reading a key to InputError, with a phrase for the expected key."""
    try:
        yield
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path}: expected {expected} ({error})") from None


def tls_options(keys: Path) -> list[str]:
    """Return options of Flower's servers for the certificate and the key in `keys`."""
    return [
        f"--ssl-ca-certfile={keys / AUTHORITY_FILE}",
        f"--ssl-certfile={keys / CERTIFICATE_FILE}",
        f"--ssl-keyfile={keys / KEY_FILE}",
    ]


def prepare_isolation(folder: Path) -> list[str]:
    """Make keys in `folder` for a server that runs tasks in separate processes.

    Returns:
        Options with which Flower's programs leave tasks to an executor that proves itself by a secret in `folder`.
    """
    make_server_keys(folder)
    write_bytes(folder / SECRET_FILE, secrets.token_bytes(32), PRIVATE_MODE)
    return ["--isolation=process", f"--superexec-auth-secret-file={folder / SECRET_FILE}"]


class Certificate(NamedTuple):
    """Certificate with its file."""

    path: Path
    content: x509.Certificate

    @property
    def remaining_time(self) -> datetime.timedelta:
        return self.content.not_valid_after_utc - _now()

    @property
    def public_key(self) -> types.CertificatePublicKeyTypes:
        """Public key of the certificate's subject.

        Raises:
            InputError: The key is of an unknown type.
        """
        with convert_key_errors(self.path, "a certificate for a key of a known type"):
            return self.content.public_key()

    @property
    def expires_soon(self) -> bool:
        return self.remaining_time < EXPIRY_WARNING

    def format_line(self) -> str:
        """Format a line with the certificate's file, subject, end, and remaining days or EXPIRED."""
        end, name = self.content.not_valid_after_utc, sanitize_line(self.content.subject.rfc4514_string())
        status = (
            f"{self.remaining_time.days} days left" if self.remaining_time > datetime.timedelta() else "EXPIRED"
        )
        return f"{self.path}: {name}, until {end:{_DATE_FORMAT}}, {status}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def read_certificates(path: Path) -> list[Certificate]:
    """Read the certificates in a file (PEM).

    Raises:
        InputError: The file cannot be read, or has no certificate.
    """
    try:
        return [Certificate(path, content) for content in x509.load_pem_x509_certificates(path.read_bytes())]
    except FileNotFoundError:
        raise InputError(f"{path}: expected a certificate (PEM), and there is no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a certificate (PEM): {error}") from None


def find_certificates(paths: Sequence[Path]) -> Iterator[Certificate]:
    """Yield the certificates of files, and of all .crt and .pem files below folders.

    Raises:
        InputError: A folder has no such file, or a file cannot be read or has no certificate.
    """
    for path in paths:
        files = [path] if not path.is_dir() else sorted([*path.rglob("*.crt"), *path.rglob("*.pem")])
        refuse({f"{path}: no .crt and no .pem file in it or below it": not files})
        for file in files:
            yield from read_certificates(file)


def check_certificates(*paths: Path) -> None:
    """Check that all certificates in files (PEM) are valid now.

    Raises:
        InputError: A certificate is not valid yet or has expired, or a file cannot be read or has none.
    """
    for certificate in (opened_certificate for path in paths for opened_certificate in read_certificates(path)):
        start, end = certificate.content.not_valid_before_utc, certificate.content.not_valid_after_utc
        refuse(
            {
                f"{certificate.path}: the certificate expired on {end:{_DATE_FORMAT}}; make a new one": _now()
                > end,
                f"{certificate.path}: the certificate is valid from {start:{_DATE_FORMAT}} on only": _now()
                < start,
            }
        )


def load_key_pair(keys: Path, *contexts: ssl.SSLContext) -> None:
    """Load server.pem and server.key of a folder into TLS contexts.

    A context that is thrown away comes first, so that an error leaves the others unchanged.

    Raises:
        InputError: The certificate is not valid now, or the key is not the certificate's or cannot be read.
    """
    check_certificates(keys / CERTIFICATE_FILE)
    try:
        for context in (ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), *contexts):
            # Without `password` OpenSSL would ask at the terminal for that of an encrypted key.
            context.load_cert_chain(keys / CERTIFICATE_FILE, keys / KEY_FILE, password="")
    except OSError as error:
        raise InputError(
            f"{keys / KEY_FILE}: expected the private key of {CERTIFICATE_FILE}, without a password ({error})"
        ) from None


class ExpiryMonitor:
    """Monitor of the ends of the certificates in files."""

    def __init__(self, *paths: Path) -> None:
        self._paths, self._last_report = paths, float("-inf")

    def poll(self) -> None:
        """Log certificates that have ended or end within 30 days, and files without a readable one.

        A call within a day of the last report does nothing.
        """
        if time.monotonic() - self._last_report < _DAY_SECONDS:
            return
        self._last_report = time.monotonic()
        for path in self._paths:
            try:
                for certificate in read_certificates(path):
                    if certificate.expires_soon:
                        _log.warning(
                            "a certificate has ended or ends soon: %s; see `fedpriv certificates`",
                            certificate.format_line(),
                        )
            except InputError as error:
                _log.warning("%s", error)

    def metrics(self) -> list[ServiceMetric]:
        """Return the earliest end of each file's certificates for Prometheus, or 0 without a readable one."""
        return [
            ServiceMetric(
                "fedpriv_certificate_end_seconds", "When it ends, since 1970.", _end_of(path), {"file": path.name}
            )
            for path in self._paths
        ]


def _end_of(path: Path) -> float:
    """Return the earliest end of a file's certificates in seconds since 1970, or 0 without a readable one."""
    try:
        return min(certificate.content.not_valid_after_utc.timestamp() for certificate in read_certificates(path))
    except (InputError, ValueError):
        return 0.0


def renew_certificate(key_folder: Path, authority_folder: Path) -> Certificate:
    """Renew server.pem in `key_folder` for at most a year from now, with the same key and names.

    The new certificate, which is returned, replaces the old one.  It ends no later than the authority's own, and
    is valid from an hour ago, for clocks that are late.

    Args:
        key_folder: Folder of a SuperLink with server.pem, and with the ca.crt that silos trust.
        authority_folder: Folder of the authority, with ca.key and ca.crt.

    Raises:
        InputError: The certificate's issuer has another name than the authority, the silos' ca.crt lacks the
            authority's key, the authority's own certificate ends within 30 days, its key is no EC key or not that
            of its certificate, or a file cannot be read.
        OSError: The new certificate cannot be written.
    """
    old_certificate, authority = (
        read_certificates(key_folder / CERTIFICATE_FILE)[0],
        read_certificates(authority_folder / AUTHORITY_FILE)[0],
    )
    with convert_key_errors(authority_folder / AUTHORITY_KEY, "the authority's private key"):
        key = serialization.load_pem_private_key((authority_folder / AUTHORITY_KEY).read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key:
        raise InputError(f"{authority_folder / AUTHORITY_KEY}: expected the EC key of {authority.path}")
    other_authority_reason, expiry_reason = (
        f"{old_certificate.path}: signed by another authority than {authority.path}",
        f"{authority.path} ends soon itself: make a new authority, and give its ca.crt to every silo",
    )
    refuse(
        {
            other_authority_reason: old_certificate.content.issuer != authority.content.subject,
            # Authorities may have equal names: ca.crt, which silos trust, has to have this authority's key.
            f"{key_folder / AUTHORITY_FILE}: lacks the key of {authority.path}, so silos would refuse the new "
            "certificate": authority.public_key
            not in [trusted.public_key for trusted in read_certificates(key_folder / AUTHORITY_FILE)],
            expiry_reason: authority.expires_soon,
        }
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(old_certificate.content.subject)
        .issuer_name(authority.content.subject)
        .public_key(old_certificate.public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - datetime.timedelta(hours=1))
        .not_valid_after(min(_now() + datetime.timedelta(days=365), authority.content.not_valid_after_utc))
    )
    identifiers = [
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(extension.value)
        for extension in authority.content.extensions
        if isinstance(extension.value, x509.SubjectKeyIdentifier)
    ]
    for extension in old_certificate.content.extensions:
        # An identifier of another authority's key would let silos refuse the certificate.
        builder = builder.add_extension(
            identifiers[0]
            if identifiers and isinstance(extension.value, x509.AuthorityKeyIdentifier)
            else extension.value,
            extension.critical,
        )
    new_certificate = builder.sign(key, hashes.SHA256())
    write_text(old_certificate.path, new_certificate.public_bytes(serialization.Encoding.PEM).decode())
    return Certificate(old_certificate.path, new_certificate)


def file_stamps(*paths: Path) -> list[tuple[int, int]]:
    """Return (inode, change time in ns) of each file or folder, to detect that it was changed or removed.

    A file that is missing or cannot be looked at has no stamp.
    """
    stamps = []
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            stamps.append((status.st_ino, status.st_ctime_ns))
    return stamps


def read_registered_keys(keys: Path) -> dict[str, bytes]:
    """Read the registered public keys of SuperNodes (PEM) in keys/nodes, by names of silos such as silo-0.

    A .pub file without a readable key is left out with a warning, so that it stops no other silo.

    Raises:
        InputError: There is no key, a .pub file has another name, or two silos have the same key.
    """
    paths = sorted((keys / "nodes").glob("*.pub"))
    refuse(
        {
            f"{path}: expected silo-N.pub, which says whose key it is": not _SILO_FILE.fullmatch(path.name)
            for path in paths
        }
    )
    key_by_name = {path.stem: key for path in paths if (key := _try_key(path)) is not None}
    refuse(
        {
            f"{keys / 'nodes'}: no public key of a SuperNode; run deploy/make-keys.sh": not key_by_name,
            f"{keys / 'nodes'}: two silos have one key; each needs its own": len({*key_by_name.values()})
            < len(key_by_name),
        }
    )
    return key_by_name


def _try_key(path: Path) -> bytes | None:
    """Return the public key in a file (PEM), or None with a warning for a file without a readable one."""
    try:
        return node_public_key(path)
    except InputError as error:
        _log.warning("%s is not registered, and others are: %s", path.stem, error)
        return None


def key_fingerprint(key: bytes) -> str:
    """Return the fingerprint of a key (PEM) as `ssh-keygen -l` does, SHA256: and 43 base64 digits."""
    public_line = serialization.load_pem_public_key(key).public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return "SHA256:" + b64encode(hashlib.sha256(b64decode(public_line.split()[1])).digest()).decode().rstrip("=")


def revoke_key(key_folder: Path, silo: int) -> str:
    """Remove a silo's key from the folder `nodes` durably, and return its fingerprint.

    Raises:
        InputError: The silo has no file there, the file holds no key, or the file cannot be removed.
    """
    path = key_folder / "nodes" / f"silo-{silo}.pub"
    refuse(
        {
            f"{path}: silo {silo} has no key here; registered are "
            f"{', '.join(other.stem for other in sorted(path.parent.glob('*.pub'))) or 'none'}": not path.exists()
        }
    )
    fingerprint = key_fingerprint(node_public_key(path))
    try:
        path.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be taken away: {error.strerror}") from None
    return fingerprint


class KeyMonitor:
    """Monitor that detects new registered keys, and the revocation of others.

    Guarantee: a key whose file is absent, or has another key, in a call of `poll` is revoked for as long as this
    SuperLink runs, whatever becomes of the file.  A file that cannot be read as a key, or a folder that is absent,
    revokes nothing: a disk that fails is no revocation.
    """

    def __init__(self, keys: Path, nodes: Mapping[str, bytes]) -> None:
        """Monitor the keys that `read_registered_keys` returned as `nodes`."""
        self._folder, self._known_keys = keys / "nodes", {*nodes.values()}
        self._valid_keys = {self._folder / f"{name}.pub": key for name, key in nodes.items()}
        self._stamps: list[tuple[int, int]] | None = None

    def poll(self) -> tuple[list[str], dict[str, bytes]]:
        """Return the names of silos whose keys were revoked since the last call, and new keys (PEM) by name.

        A key that this SuperLink has known before is not new.  After the first call, keys are read only if a file
        or the folder changed.
        """
        paths = [path for path in sorted(self._folder.glob("*.pub")) if _SILO_FILE.fullmatch(path.name)]
        last_stamps, self._stamps = self._stamps, file_stamps(self._folder, *self._valid_keys, *paths)
        if self._stamps == last_stamps:
            return [], {}
        revoked = [path for path, key in self._valid_keys.items() if _is_revoked(path, key)]
        for path in revoked:
            _log.warning("%s: the key %s is revoked", path.stem, key_fingerprint(self._valid_keys.pop(path)))
        new_keys = {path: _try_key(path) for path in paths if path not in self._valid_keys}
        for path, key in new_keys.items():
            if key is not None and key in self._known_keys:
                _log.warning("%s: its key was another silo's or was revoked, and is not registered", path.stem)
            elif key is not None:
                self._known_keys.add(key)
                self._valid_keys[path] = key
        return (
            [path.stem for path in revoked],
            {path.stem: key for path, key in self._valid_keys.items() if path in new_keys},
        )


def _is_revoked(path: Path, key: bytes) -> bool:
    """Whether a key's file has another key than `key` (PEM), or is missing in an existing folder.

    A file that cannot be read as a key revokes nothing.
    """
    try:
        path.stat()
        return node_public_key(path) != key
    except FileNotFoundError:
        return path.parent.is_dir()
    except (OSError, InputError) as error:
        _log.warning("a key that changed revokes nothing: %s", error)
        return False
