"""Keys and certificates: made for one run on one machine, or read and checked before anybody waits for them."""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedpriv.errors import InputError

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "server.pem", "server.key"
_DAYS = 7  # longer than a run of one machine lasts


def make_server_keys(folder: Path) -> None:
    """Write ca.crt, server.pem and server.key (0600) for 127.0.0.1 into `folder`.

    Guarantee: the key that signed is not kept, so that nobody can make another certificate that ca.crt vouches
    for: whoever takes over a port of a process that ended cannot answer in its place.
    """
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer, name = _named("fedpriv, one run"), _named("127.0.0.1")
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = (
        _builder(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_certificates(), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA256())
    )
    own = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    leaf = (
        _builder(name, issuer, server.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(own, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / AUTHORITY).write_bytes(root.public_bytes(pem))
    (folder / CERTIFICATE).write_bytes(leaf.public_bytes(pem))
    plain = serialization.NoEncryption()
    write_secret(folder / KEY, server.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


def make_node_key(private: Path, public: Path) -> None:
    """A SuperNode's own key (OpenSSH, 0600) and its public half; kept if it is there."""
    if not private.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        ssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        write_secret(private, key.private_bytes(serialization.Encoding.PEM, ssh, plain))
    kept = serialization.load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(kept, ec.EllipticCurvePrivateKey)
    text = kept.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_bytes(text + b"\n")


def node_public_key(path: Path) -> bytes:
    """The public key in `path`, one line as ssh-keygen writes it, as Flower knows it (PEM); InputError if none."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: expected a public key as `ssh-keygen -t ecdsa -b 384` makes ({error})"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{path}: expected an ECDSA key, as `ssh-keygen -t ecdsa -b 384` makes")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def check_certificates(*paths: Path) -> None:
    """InputError, with file and date, if a certificate in one of `paths` (PEM) cannot be used today."""
    now = datetime.datetime.now(datetime.UTC)
    for path in paths:
        try:
            found = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: expected a certificate (PEM): {error}") from None
        for certificate in found:
            first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            if now > last:
                raise InputError(f"{path}: the certificate expired on {last:%Y-%m-%d %H:%M} UTC; make a new one")
            if now < first:
                raise InputError(f"{path}: the certificate is valid from {first:%Y-%m-%d %H:%M} UTC on only")


def write_secret(path: Path, secret: bytes) -> None:
    """A file that nobody else could read at any moment."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secret)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )


def _signs_certificates() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
