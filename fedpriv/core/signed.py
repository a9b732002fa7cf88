"""Documents that are signed: one spelling of plain data, Ed25519 keys in OpenSSH's files, and whose they are.

A document is JSON in one spelling, byte for byte: sorted keys, a space of indentation a level, ASCII, floats as
the shortest decimal that reads back the same.  What is signed is that spelling behind the name of what it says, so
that no signature is good for anything else.  Torch is not needed here.
"""

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

from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.files import PRIVATE_MODE

_MAX_BYTES = 2**24
"""Bytes of a document."""
_MAX_INTEGER = 2**63
"""Of whole numbers: nothing that is certified counts further."""


def canonical_json(value: Any) -> bytes:
    """Write plain data in the one spelling; ValueError for numbers that are not finite."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


def read_canonical_json(content: bytes, where: object) -> dict[str, Any]:
    """Read a document; InputError, in one line, for anything that is not a JSON object in the one spelling.

    Guarantee: two different files never read as the same data, and no file is read in two ways: whatever a
    decoder would forgive (spaces, key order, a key given twice, 1e400, NaN) is refused.
    """
    if len(content) > _MAX_BYTES:
        raise InputError(f"{where}: has {len(content)} bytes, and a signed document at most {_MAX_BYTES}")
    try:
        tree = json.loads(content.decode("ascii"), parse_int=parse_bounded_int, parse_constant=refuse_non_finite)
        if isinstance(tree, dict) and canonical_json(tree) == content:
            return tree
        reason = "it is not spelled as fedpriv writes such documents, so it was edited"
    except (ValueError, RecursionError) as error:
        reason = sanitize_line(str(error), 100)
    raise InputError(f"{where}: cannot be read as a signed document: {reason}")


def parse_bounded_int(digits: str) -> int:
    """ValueError for a number beyond 2^63, or whose digits alone would take long."""
    if len(digits) > 20 or abs(number := int(digits)) > _MAX_INTEGER:
        raise ValueError("it has a whole number beyond 2^63")
    return number


def refuse_non_finite(name: str) -> NoReturn:
    """ValueError: for Infinity and NaN, which JSON does not have."""
    raise ValueError(f"it has {name}, which is no number")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sign_data(key: Ed25519PrivateKey, says: str, value: Any) -> dict[str, str]:
    """Sign plain data as `says`, such as "fedpriv certificate": the public key, and the signature."""
    return {"key": format_public_key(key.public_key()), "signature": key.sign(_signed_bytes(says, value)).hex()}


def check_signature(given: Any, says: str, value: Any, trusted: Ed25519PublicKey, of: str) -> None:
    """InputError unless `given` is the signature by `trusted` of this value as `says`.

    Guarantee: what the document itself says of its key decides nothing.
    """
    if not isinstance(given, Mapping) or set(given) != {"key", "signature"}:
        raise InputError(f"{of} has not signed this")
    if given["key"] != format_public_key(trusted):
        raise InputError(f"signed for {of} by another key than the one that you trust as {of}'s")
    try:
        raw = bytes.fromhex(str(given["signature"]))
        if raw.hex() != given["signature"]:
            raise ValueError
        trusted.verify(raw, _signed_bytes(says, value))
    except (ValueError, InvalidSignature):
        raise InputError(f"the signature of {of} is not of this content: it was edited") from None


def _signed_bytes(says: str, value: Any) -> bytes:
    parts = says.encode(), canonical_json(value)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def format_public_key(key: Ed25519PublicKey) -> str:
    """The key as OpenSSH writes it: "ssh-ed25519 AAAA…"."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def read_signers(path: Path) -> dict[str, Ed25519PublicKey]:
    """Read whom to trust as whom: a line each, "coordinator ssh-ed25519 AAAA…", "silo-0 ssh-ed25519 AAAA…".

    Guarantee: no two names have one key, so that nobody signs for two.
    """
    found, lines = dict[str, Ed25519PublicKey](), read_file_bytes(path).splitlines()
    for place, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith(b"#"):
            continue
        name, _, rest = line.strip().partition(b" ")
        said, key = (
            sanitize_line(name.decode(errors="replace"), 40),
            parse_public_key(rest, f"{path}, line {place}"),
        )
        if said in found or any(format_public_key(key) == format_public_key(other) for other in found.values()):
            raise InputError(f"{path}, line {place}: {said} or its key is there already; each has its own")
        found[said] = key
    if not found:
        raise InputError(f'{path}: expected lines such as "coordinator ssh-ed25519 AAAA…"')
    return found


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key without a passphrase; InputError if it cannot be used, or others can read it."""
    content = read_file_bytes(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InputError(f"{path}: others can read this key; chmod 600 it")
    try:
        key = load_ssh_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path}: cannot be used as an Ed25519 private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path}: expected an Ed25519 private key, as `ssh-keygen -t ed25519` makes")
    return key


def load_or_create_key(path: Path) -> Ed25519PrivateKey:
    """Read the private key at `path`; where there is none, make one, for its owner alone (mode 0600)."""
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


def parse_public_key(line: bytes, where: str) -> Ed25519PublicKey:
    """Read a public key, a line as OpenSSH writes it; InputError if it cannot be used."""
    try:
        key = load_ssh_public_key(line)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{where}: cannot be used as an Ed25519 public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{where}: expected an Ed25519 public key, as `ssh-keygen -t ed25519` makes")
    return key


def read_file_bytes(path: Path) -> bytes:
    """Read a file; InputError if it cannot be."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
