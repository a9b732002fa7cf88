"""Keys and certificates: those of the processes of one machine, and those between machines.

A certificate is read, checked, told of before it ends, and renewed by its authority.  A SuperNode's public key is
registered as long as keys/nodes/silo-N.pub has it: it is shown by its fingerprint, and revoked.  A SuperLink takes
up either without a restart, and its sites, which trust the authority, do nothing.
"""

import datetime
import hashlib
import ipaddress
import logging
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.core.files import PRIVATE_MODE, sync_folder, write_bytes, write_text
from fedpriv.silo.metrics import ServiceMetric

_log = logging.getLogger("fedpriv.certificates")
EXPIRY_WARNING = datetime.timedelta(days=30)
"""Time before the end of a certificate at which it is told of."""
_DAY_SECONDS, _DATE_FORMAT = 86_400.0, "%Y-%m-%d %H:%M UTC"
AUTHORITY_KEY = "ca.key"
AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, NODE_KEY_FILE = "ca.crt", "server.pem", "server.key", "node.key"
SECRET_FILE = "superexec.secret"


def make_server_keys(folder: Path) -> None:
    """Write ca.crt, server.pem and server.key (0600) for 127.0.0.1 into `folder`.

    The certificate lasts for ever, like the service that made it for itself, and whatever a clock says.

    Guarantee: ca.crt vouches for server.pem and for nothing else: it is the same certificate, and no authority's.
    Whoever takes over a port of a process that ended cannot answer in its place.
    """
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")
    own = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([name]))
        .issuer_name(x509.Name([name]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))  # RFC 5280: no end
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(own), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    for path in (folder / AUTHORITY_FILE, folder / CERTIFICATE_FILE):
        path.write_bytes(certificate.public_bytes(pem))
    write_bytes(folder / KEY_FILE, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), PRIVATE_MODE)


def make_node_key(private: Path, public: Path) -> None:
    """A SuperNode's own key (OpenSSH, 0600) and its public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    write_bytes(private, key.private_bytes(serialization.Encoding.PEM, ssh, plain), PRIVATE_MODE)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_bytes(line + b"\n")


def node_public_key(path: Path) -> bytes:
    """The public key in `path`, one line as ssh-keygen writes it, as Flower knows it (PEM); InputError if none."""
    with convert_key_errors(path, "public"):
        key = serialization.load_ssh_public_key(path.read_bytes())
        if isinstance(key, ec.EllipticCurvePublicKey):
            return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        raise ValueError("it is no ECDSA key")


@contextmanager
def convert_key_errors(path: Path, half: str) -> Iterator[None]:
    """InputError, with the reason, for a file that has no such half of a SuperNode's key."""
    try:
        yield
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"{path}: expected a {half} key as `ssh-keygen -t ecdsa -b 384` makes ({error})"
        ) from None


def tls_options(keys: Path) -> list[str]:
    """Options of Flower's servers for the certificate and the key in `keys`."""
    return [
        f"--ssl-ca-certfile={keys / AUTHORITY_FILE}",
        f"--ssl-certfile={keys / CERTIFICATE_FILE}",
        f"--ssl-keyfile={keys / KEY_FILE}",
    ]


def prepare_isolation(folder: Path) -> list[str]:
    """Make keys in `folder` for a server whose tasks are processes of their own; its options for them."""
    make_server_keys(folder)
    write_bytes(folder / SECRET_FILE, secrets.token_bytes(32), PRIVATE_MODE)
    return ["--isolation=process", f"--superexec-auth-secret-file={folder / SECRET_FILE}"]


class Certificate(NamedTuple):
    """A certificate, and the file that has it."""

    path: Path
    content: x509.Certificate

    @property
    def remaining_time(self) -> datetime.timedelta:
        return self.content.not_valid_after_utc - _now()

    @property
    def expires_soon(self) -> bool:
        return self.remaining_time < EXPIRY_WARNING

    def format_line(self) -> str:
        """Its file, its owner, its end, and how long that is from now."""
        last, name = self.content.not_valid_after_utc, sanitize_line(self.content.subject.rfc4514_string())
        how = f"{self.remaining_time.days} days left" if self.remaining_time > datetime.timedelta() else "EXPIRED"
        return f"{self.path}: {name}, until {last:{_DATE_FORMAT}}, {how}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def read_certificates(path: Path) -> list[Certificate]:
    """The certificates in a file (PEM); InputError if there is none."""
    try:
        return [Certificate(path, found) for found in x509.load_pem_x509_certificates(path.read_bytes())]
    except FileNotFoundError:
        raise InputError(f"{path}: expected a certificate (PEM), and there is no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a certificate (PEM): {error}") from None


def find_certificates(places: Sequence[Path]) -> Iterator[Certificate]:
    """Those of files, and of every ca.crt and server.pem below folders; InputError where there is none."""
    for place in places:
        files = [place] if not place.is_dir() else sorted([*place.rglob("*.crt"), *place.rglob("*.pem")])
        refuse({f"{place}: no .crt and no .pem file in it or below it": not files})
        for path in files:
            yield from read_certificates(path)


def check_certificates(*paths: Path) -> None:
    """InputError, with file and date, if a certificate in one of `paths` (PEM) cannot be used today."""
    for certificate in (each for path in paths for each in read_certificates(path)):
        first, last = certificate.content.not_valid_before_utc, certificate.content.not_valid_after_utc
        refuse(
            {
                f"{certificate.path}: the certificate expired on {last:{_DATE_FORMAT}}; make a new one": _now()
                > last,
                f"{certificate.path}: the certificate is valid from {first:{_DATE_FORMAT}} on only": _now()
                < first,
            }
        )


class ExpiryMonitor:
    """When the certificates in these files end."""

    def __init__(self, *paths: Path) -> None:
        self._paths, self._last_report = paths, float("-inf")

    def poll(self) -> None:
        """Log once a day each certificate that ends within 30 days, and each file that has none."""
        if time.monotonic() - self._last_report < _DAY_SECONDS:
            return
        self._last_report = time.monotonic()
        for path in self._paths:
            try:
                for certificate in read_certificates(path):
                    if certificate.expires_soon:
                        _log.warning(
                            "a certificate ends soon: %s; see `fedpriv certificates`", certificate.format_line()
                        )
            except InputError as error:
                _log.warning("%s", error)

    def metrics(self) -> list[ServiceMetric]:
        """For Prometheus; 0 for a file that has none."""
        return [
            ServiceMetric(
                "fedpriv_certificate_end_seconds", "When it ends, since 1970.", _end_of(path), {"file": path.name}
            )
            for path in self._paths
        ]


def _end_of(path: Path) -> float:
    try:
        return min(each.content.not_valid_after_utc.timestamp() for each in read_certificates(path))
    except (InputError, ValueError):
        return 0.0


def renew_certificate(key_folder: Path, authority_folder: Path) -> Certificate:
    """Let the authority whose ca.key is in folder `authority` sign keys/server.pem anew: same key, same names.

    InputError if the authority is another one than that of the certificate, or ends soon itself.
    """
    old, root = (
        read_certificates(key_folder / CERTIFICATE_FILE)[0],
        read_certificates(authority_folder / AUTHORITY_FILE)[0],
    )
    try:
        key = serialization.load_pem_private_key((authority_folder / AUTHORITY_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{authority_folder / AUTHORITY_KEY}: expected the authority's private key: {error}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != root.content.public_key():
        raise InputError(f"{authority_folder / AUTHORITY_KEY}: expected the EC key of {root.path}")
    other = f"{old.path}: signed by another authority than {root.path}"
    soon = f"{root.path} ends soon itself: make a new authority, and give its ca.crt to every silo"
    refuse({other: old.content.issuer != root.content.subject, soon: root.expires_soon})
    made = (
        x509.CertificateBuilder()
        .subject_name(old.content.subject)
        .issuer_name(root.content.subject)
        .public_key(old.content.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - datetime.timedelta(hours=1))
        .not_valid_after(min(_now() + datetime.timedelta(days=365), root.content.not_valid_after_utc))
    )
    for extension in old.content.extensions:
        made = made.add_extension(extension.value, extension.critical)
    signed = made.sign(key, hashes.SHA256())
    write_text(old.path, signed.public_bytes(serialization.Encoding.PEM).decode())
    return Certificate(old.path, signed)


def file_stamps(*paths: Path) -> list[tuple[int, int]]:
    """What is another list once one of these files is replaced, written or taken away."""
    stamps = []
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            stamps.append((status.st_ino, status.st_mtime_ns))
    return stamps


def read_registered_keys(keys: Path) -> dict[str, bytes]:
    """The keys (PEM) in keys/nodes by their silos' names, such as silo-0; InputError for any that is none."""
    found = sorted((keys / "nodes").glob("*.pub"))
    wrong = [path for path in found if not re.fullmatch(r"silo-(0|[1-9][0-9]*)\.pub", path.name)]
    refuse(
        {
            f"{keys / 'nodes'}: no public key of a SuperNode; run deploy/make-keys.sh": not found,
            **{f"{path}: expected silo-N.pub, which says whose key it is": True for path in wrong},
        }
    )
    nodes = {path.stem: node_public_key(path) for path in found}
    refuse({f"{keys / 'nodes'}: two silos have one key; each needs its own": len({*nodes.values()}) < len(nodes)})
    return nodes


def key_fingerprint(key: bytes) -> str:
    """What `ssh-keygen -l` shows of a key (PEM): SHA256: and 43 digits of base 64."""
    line = serialization.load_pem_public_key(key).public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return "SHA256:" + b64encode(hashlib.sha256(b64decode(line.split()[1])).digest()).decode().rstrip("=")


def revoke_key(key_folder: Path, silo: int) -> str:
    """Take the key of silo `silo` out of keys/nodes, for good when this returns; its fingerprint.

    InputError, and nothing is taken, if the silo has no key there or its file has none.
    """
    path = key_folder / "nodes" / f"silo-{silo}.pub"
    if not path.exists():
        raise InputError(
            f"{path}: silo {silo} has no key here; registered are "
            f"{', '.join(other.stem for other in sorted(path.parent.glob('*.pub'))) or 'none'}"
        )
    told = key_fingerprint(node_public_key(path))
    try:
        path.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be taken away: {error.strerror}") from None
    return told


class RevocationMonitor:
    """Notices that keys which were registered are there no more.

    Guarantee: a key whose file was taken away, or has another key now, is revoked for as long as this SuperLink
    runs, whatever becomes of the file.  A file that cannot be read, or a folder that is away, revokes nothing: a
    disk that fails is no revocation.
    """

    def __init__(self, keys: Path, nodes: Mapping[str, bytes]) -> None:
        """`nodes`: what `registered` found."""
        self._valid_keys = {keys / "nodes" / f"{name}.pub": key for name, key in nodes.items()}
        self._stamps: list[tuple[int, int]] | None = None

    def poll(self) -> list[str]:
        """Names whose key is revoked since the last look, each once; the files are read if one has changed."""
        before, self._stamps = self._stamps, file_stamps(*self._valid_keys)
        if self._stamps == before:
            return []
        revoked = [path for path, key in self._valid_keys.items() if _is_revoked(path, key)]
        for path in revoked:
            _log.warning("%s: the key %s is revoked", path.stem, key_fingerprint(self._valid_keys.pop(path)))
        return [path.stem for path in revoked]


def _is_revoked(path: Path, key: bytes) -> bool:
    try:
        path.stat()
        return node_public_key(path) != key
    except FileNotFoundError:
        return path.parent.is_dir()
    except (OSError, InputError) as error:
        _log.warning("a key that changed revokes nothing: %s", error)
        return False
