"""Certificates between machines: read, checked, told of before they end, and renewed by their authority.

A SuperLink takes up a renewed certificate without a restart, and its sites, which trust the authority, do nothing.
"""

import datetime
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedpriv.core.errors import InputError, printable
from fedpriv.core.files import write_text
from fedpriv.engines.processes import CERTIFICATE
from fedpriv.protocol.metrics import Figure

_log = logging.getLogger("fedpriv.certificates")
SOON = datetime.timedelta(days=30)
"""Time before the end of a certificate at which it is told of."""
_DAY = 86_400.0
_LASTS = datetime.timedelta(days=365)
AUTHORITY_KEY = "ca.key"


class Certificate(NamedTuple):
    """A certificate, and the file that has it."""

    path: Path
    content: x509.Certificate

    @property
    def left(self) -> datetime.timedelta:
        return self.content.not_valid_after_utc - _now()

    @property
    def ends_soon(self) -> bool:
        return self.left < SOON

    def line(self) -> str:
        """Its file, its owner, its end, and how long that is from now."""
        last, name = self.content.not_valid_after_utc, printable(self.content.subject.rfc4514_string())
        how = f"{self.left.days} days left" if self.left > datetime.timedelta() else "EXPIRED"
        return f"{self.path}: {name}, until {last:%Y-%m-%d %H:%M} UTC, {how}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def certificates_of(path: Path) -> list[Certificate]:
    """The certificates in a file (PEM); InputError if there is none."""
    try:
        return [Certificate(path, found) for found in x509.load_pem_x509_certificates(path.read_bytes())]
    except FileNotFoundError:
        raise InputError(f"{path}: expected a certificate (PEM), and there is no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a certificate (PEM): {error}") from None


def certificates_below(places: Sequence[Path]) -> Iterator[Certificate]:
    """Those of files, and of every ca.crt and server.pem below folders; InputError where there is none."""
    for place in places:
        files = [place] if not place.is_dir() else sorted([*place.rglob("*.crt"), *place.rglob("*.pem")])
        if not files:
            raise InputError(f"{place}: no .crt and no .pem file in it or below it")
        for path in files:
            yield from certificates_of(path)


def check_certificates(*paths: Path) -> None:
    """InputError, with file and date, if a certificate in one of `paths` (PEM) cannot be used today."""
    for certificate in (each for path in paths for each in certificates_of(path)):
        first, last = certificate.content.not_valid_before_utc, certificate.content.not_valid_after_utc
        if _now() > last:
            raise InputError(
                f"{certificate.path}: the certificate expired on {last:%Y-%m-%d %H:%M} UTC; make a new one"
            )
        if _now() < first:
            raise InputError(
                f"{certificate.path}: the certificate is valid from {first:%Y-%m-%d %H:%M} UTC on only"
            )


class Ends:
    """Logs once a day each certificate in these files that ends within 30 days, and each file that has none."""

    def __init__(self, *paths: Path) -> None:
        self._paths, self._told = paths, float("-inf")

    def look(self) -> None:
        if time.monotonic() - self._told < _DAY:
            return
        self._told = time.monotonic()
        for path in self._paths:
            try:
                ending = [certificate for certificate in certificates_of(path) if certificate.ends_soon]
            except InputError as error:
                _log.warning("%s", error)
                continue
            for certificate in ending:
                _log.warning("a certificate ends soon: %s; see `fedpriv certificates`", certificate.line())


def ends_of(*paths: Path) -> list[Figure]:
    """When the certificates in `paths` end, for Prometheus; 0 for a file that has none."""
    found = []
    for path in paths:
        try:
            end = min(each.content.not_valid_after_utc.timestamp() for each in certificates_of(path))
        except (InputError, ValueError):
            end = 0.0
        about = {"file": path.name}
        found.append(Figure("fedpriv_certificate_end_seconds", "When it ends, since 1970.", end, about))
    return found


def renew(keys: Path, authority: Path) -> Certificate:
    """Let the authority whose ca.key is in folder `authority` sign keys/server.pem anew: same key, same names.

    InputError if the authority is another one than that of the certificate, or ends soon itself.
    """
    (old,) = certificates_of(keys / CERTIFICATE)[:1]
    (root,) = certificates_of(authority / "ca.crt")[:1]
    try:
        key = serialization.load_pem_private_key((authority / AUTHORITY_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{authority / AUTHORITY_KEY}: expected the authority's private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != root.content.public_key():
        raise InputError(f"{authority / AUTHORITY_KEY}: expected the EC key of {root.path}")
    if old.content.issuer != root.content.subject:
        raise InputError(f"{old.path}: signed by another authority than {root.path}")
    if root.ends_soon:
        raise InputError(f"{root.path} ends soon itself: make a new authority, and give its ca.crt to every silo")
    made = (
        x509.CertificateBuilder()
        .subject_name(old.content.subject)
        .issuer_name(root.content.subject)
        .public_key(old.content.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - datetime.timedelta(hours=1))
        .not_valid_after(min(_now() + _LASTS, root.content.not_valid_after_utc))
    )
    for extension in old.content.extensions:
        made = made.add_extension(extension.value, extension.critical)
    signed = made.sign(key, hashes.SHA256())
    write_text(old.path, signed.public_bytes(serialization.Encoding.PEM).decode())
    return Certificate(old.path, signed)


class Renewed:
    """Notices that the files of a certificate have changed, at most once every `every` seconds."""

    def __init__(self, *paths: Path, every: float = 10.0) -> None:
        self._paths, self._every = paths, every
        self._state, self._looked = self._now(), time.monotonic()

    def changed(self) -> bool:
        if time.monotonic() - self._looked < self._every:
            return False
        self._looked, before = time.monotonic(), self._state
        self._state = self._now()
        return self._state != before

    def _now(self) -> list[tuple[int, int]]:
        found = []
        for path in self._paths:
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_ino, status.st_mtime_ns))
        return found
