"""Signed documents: canonical JSON, Ed25519 keys in OpenSSH's files, and lists of trusted signers.

Canonical JSON is byte for byte unique: sorted keys, one space of indentation for each level, ASCII, and floats as
the shortest decimal that reads back the same.  A signature covers the type of the document together with its
canonical JSON, so that no signature is valid for another type.  The signed bytes are those of a DSSE envelope
(Dead Simple Signing Envelope 1.0.0), but for types of fedpriv 0.3.1.

Source: https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md .
"""

import base64
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.core.files import PRIVATE_MODE, refuse_pipe

_MAX_BYTES = 2**24
"""Largest size of a document in bytes."""
_OLD_TYPE = "fedpriv certificate 2"
"""Beginning of the types of fedpriv 0.3.1, signed as type and JSON behind their lengths in 8 bytes."""
_MAX_INTEGER = 2**63
"""Largest absolute value of an integer in a document."""


def canonical_json(value: Any) -> bytes:
    """Encode plain data as canonical JSON.

    Raises:
        ValueError: A number is not finite.
    """
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


def read_canonical_json(content: bytes, source: object) -> dict[str, Any]:
    """Decode a document that is a canonical JSON object.

    Guarantee: two different files never decode to the same data, where 1, 1.0 and true differ, as 0.0 and -0.0
    do, and no file has two meanings: everything that a decoder would forgive (spaces, key order, a key given
    twice, 1e400, NaN) is refused.

    Args:
        content: Bytes of the document.
        source: Its path or another name, for the error message.

    Raises:
        InputError: The bytes are no canonical JSON object, an integer in it is beyond 2^63, or there are more than
            2^24 bytes.
    """
    refuse(
        {
            f"{source}: has {len(content)} bytes, and a signed document at most {_MAX_BYTES}": len(content)
            > _MAX_BYTES
        }
    )
    try:
        tree = json.loads(content.decode("ascii"), parse_int=parse_bounded_int, parse_constant=refuse_non_finite)
        if isinstance(tree, dict) and canonical_json(tree) == content:
            return tree
        reason = "it is not spelled as fedpriv writes such documents"
    except (ValueError, RecursionError) as error:
        reason = sanitize_line(str(error), 100)
    raise InputError(f"{source}: cannot be read as a signed document: {reason}")


def parse_bounded_int(digits: str) -> int:
    """Parse an integer of absolute value at most 2^63.

    Raises:
        ValueError: It is larger, or spelled with more than 20 characters.
    """
    if len(digits) > 20 or abs(number := int(digits)) > _MAX_INTEGER:
        raise ValueError("it has a whole number beyond 2^63")
    return number


def refuse_non_finite(name: str) -> NoReturn:
    """Refuse Infinity and NaN, which JSON does not have.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"it has {name}, which is no number")


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest of bytes in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def sign_data(key: Ed25519PrivateKey, says: str, value: Any) -> dict[str, str]:
    """Sign plain data as a document of a type.

    Args:
        key: Private key.
        says: Type, such as "application/vnd.fedpriv.certificate.3+json".
        value: The data.

    Returns:
        Mapping of "key" to the public key as OpenSSH writes it, and of "signature" to hexadecimal digits.
    """
    return {"key": format_public_key(key.public_key()), "signature": key.sign(_signed_bytes(says, value)).hex()}


def make_envelope(says: str, value: Any, signature_data: Mapping[str, str]) -> dict[str, Any]:
    """Return signed data as a DSSE envelope, the form in which other programs verify it.

    Args:
        says: Type of the document, later than fedpriv 0.3.1.
        value: Signed data.
        signature_data: Public key and signature, as `sign_data` returns them.
    """
    signature = base64.b64encode(bytes.fromhex(signature_data["signature"])).decode()
    return {
        "payload": base64.b64encode(canonical_json(value)).decode(),
        "payloadType": says,
        "signatures": [{"keyid": signature_data["key"], "sig": signature}],
    }


def check_signature(signature_data: Any, says: str, value: Any, trusted: Ed25519PublicKey, signer: str) -> None:
    """Check that a signature by the key `trusted` covers this data as a document of this type.

    Guarantee: the signature is verified by `trusted` only.  The key that the document states is compared with
    `trusted`, and a document that states another key is refused.

    Args:
        signature_data: Public key and signature, as `sign_data` returns them.
        says: Type of the document.
        value: Signed data.
        trusted: Public key of the expected signer.
        signer: Name of the expected signer, for the error message.

    Raises:
        InputError: The signature is missing or malformed, by another key, or not of this type and data.
    """
    if not isinstance(signature_data, Mapping) or set(signature_data) != {"key", "signature"}:
        raise InputError(f"{signer} has not signed this")
    if signature_data["key"] != format_public_key(trusted):
        raise InputError(f"signed for {signer} by another key than the one that you trust as {signer}'s")
    try:
        raw = bytes.fromhex(str(signature_data["signature"]))
        # Capitals or spaces would be another spelling of the same signature.
        if raw.hex() != signature_data["signature"]:
            raise ValueError
        trusted.verify(raw, _signed_bytes(says, value))
    except (ValueError, InvalidSignature):
        raise InputError(f"the signature of {signer} is not of this content: it was edited") from None


def _signed_bytes(says: str, value: Any) -> bytes:
    parts = says.encode(), canonical_json(value)
    if says.startswith(_OLD_TYPE):
        return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return b" ".join([b"DSSEv1", *(b"%d %b" % (len(part), part) for part in parts)])


def format_public_key(key: Ed25519PublicKey) -> str:
    """Format a public key as OpenSSH does: "ssh-ed25519 AAAA…"."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def read_signers(path: Path) -> dict[str, Ed25519PublicKey]:
    """Read the trusted signers of a file, one in each line: "coordinator ssh-ed25519 AAAA…".

    Empty lines, and lines that begin with #, are skipped.

    Guarantee: no two names have one key, so that no key signs for two names.

    Returns:
        Public key of each signer by name, where a name of more than 40 characters is cut.

    Raises:
        InputError: The file cannot be read, has no signer, or a line is malformed or repeats a name or a key.
    """
    keys, lines = dict[str, Ed25519PublicKey](), read_file_bytes(path).splitlines()
    for line_number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith(b"#"):
            continue
        name, _, rest = line.strip().partition(b" ")
        signer, key = (
            sanitize_line(name.decode(errors="replace"), 40),
            parse_public_key(rest, f"{path}, line {line_number}"),
        )
        if signer in keys or any(format_public_key(key) == format_public_key(other) for other in keys.values()):
            raise InputError(f"{path}, line {line_number}: {signer} or its key is there already; each has its own")
        keys[signer] = key
    refuse({f'{path}: expected lines such as "coordinator ssh-ed25519 AAAA…"': not keys})
    return keys


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 private key without a passphrase from a file of OpenSSH.

    Raises:
        InputError: The file cannot be read or has no such key, or gives its group or others a right.
    """
    content = read_file_bytes(path)
    refuse({f"{path}: others can read this key; chmod 600 it": stat.S_IMODE(path.stat().st_mode) & 0o077})
    try:
        key = load_ssh_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path}: cannot be used as an Ed25519 private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path}: expected an Ed25519 private key, as `ssh-keygen -t ed25519` makes")
    return key


def load_or_create_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in the file at `path`, or a new key, stored there, if there is no file.

    The new file has the mode 0600.

    Raises:
        InputError: The key cannot be used, or cannot be created.
    """
    if path.exists():
        return read_private_key(path)
    key = Ed25519PrivateKey.generate()
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE_MODE), "wb") as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"{path}: no key can be made there: {error}") from None
    return key


def parse_public_key(line: bytes, source: str) -> Ed25519PublicKey:
    """Parse an Ed25519 public key, a line as OpenSSH writes it.

    Raises:
        InputError: The line is no Ed25519 public key.
    """
    try:
        key = load_ssh_public_key(line)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{source}: cannot be used as an Ed25519 public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{source}: expected an Ed25519 public key, as `ssh-keygen -t ed25519` makes")
    return key


def read_file_bytes(path: Path) -> bytes:
    """Read a file.

    Raises:
        InputError: The file cannot be read, or is a named pipe.
    """
    try:
        return refuse_pipe(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
