"""Signed public keys: silos that know each other need not believe what the server relays.

A silo signs the key it made for a run with its long-lived Ed25519 key (RFC 8032); whoever has the public halves of
all silos on file takes no key that its silo did not sign for this very run of this very scenario.  What travels is
a
*card*: the public key, 32 bytes, and the signature, 64 bytes, zeros from a silo that has no identity.

Source: Bonawitz et al. 2017, which assumes such a public-key infrastructure where the server may deviate.
"""

import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedpriv.errors import InputError, RunError
from fedpriv.secure_aggregation.masks import KEY_BYTES

CARD_BYTES = KEY_BYTES + 64


@dataclass(frozen=True)
class Identity:
    """Silo `number`'s own signing key, and every silo's public one, if it has them."""

    number: int
    own: Ed25519PrivateKey | None
    peers: tuple[Ed25519PublicKey, ...]

    def card(self, run: str, scenario: bytes, public: bytes) -> bytes:
        """This silo's public key for a run of the scenario with this digest, signed."""
        signed = bytes(64) if self.own is None else self.own.sign(_statement(run, scenario, self.number, public))
        return public + signed

    def keys(self, run: str, scenario: bytes, cards: bytes, silos: int) -> bytes:
        """The public keys of silo 0, 1, … in a row, from their cards in a row.

        Guarantee: with `peers`, every key was signed by its silo for this run and scenario; RunError otherwise.
        """
        if len(cards) != silos * CARD_BYTES:
            raise RunError(f"silo {self.number}: expected {silos} signed public keys of {CARD_BYTES} bytes")
        if self.peers and len(self.peers) != silos:
            raise RunError(f"silo {self.number} knows {len(self.peers)} silos, and the scenario has {silos}")
        split = [cards[start : start + CARD_BYTES] for start in range(0, len(cards), CARD_BYTES)]
        for silo, (peer, card) in enumerate(zip(self.peers, split, strict=bool(self.peers))):
            try:
                peer.verify(card[KEY_BYTES:], _statement(run, scenario, silo, card[:KEY_BYTES]))
            except InvalidSignature:
                raise RunError(
                    f"silo {self.number}: the public key relayed as silo {silo}'s is not signed by it for "
                    "this run and scenario"
                ) from None
        return b"".join(card[:KEY_BYTES] for card in split)


def identity_of(number: int, own: Path | None, peers: Path | None) -> Identity:
    """The identity in files as `ssh-keygen -t ed25519` writes them; InputError if one cannot be used.

    `own` is the private key, without a passphrase, mode 0600; `peers` has one public key a line, silo 0 first.

    Guarantee: no silo stands for two, and `own` is what the others know this silo by.
    """
    lines = [] if peers is None else [line for line in _bytes_of(peers).splitlines() if line.strip()]
    if peers is not None and not lines:
        raise InputError(f"{peers}: expected a public key for each silo, silo 0 first")
    key = None if own is None else _private(own)
    known = [_public(line, f"{peers}, line {place}") for place, line in enumerate(lines, start=1)]
    raw = [each.public_bytes_raw() for each in known]
    for silo, content in enumerate(raw):
        if (first := raw.index(content)) < silo:
            raise InputError(f"{peers}: silos {first} and {silo} have one key; each has its own")
    if key is not None and known and raw[number : number + 1] != [key.public_key().public_bytes_raw()]:
        raise InputError(f"{own}: its public half is not the one that {peers} has for silo {number}")
    return Identity(number, key, tuple(known))


def _private(path: Path) -> Ed25519PrivateKey:
    content = _bytes_of(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InputError(f"{path}: others can read this key; chmod 600 it")
    try:
        key = load_ssh_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path}: cannot be used as an Ed25519 private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path}: expected an Ed25519 private key, as `ssh-keygen -t ed25519` makes")
    return key


def _public(line: bytes, where: str) -> Ed25519PublicKey:
    try:
        key = load_ssh_public_key(line)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{where}: cannot be used as an Ed25519 public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{where}: expected an Ed25519 public key, as `ssh-keygen -t ed25519` makes")
    return key


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _statement(run: str, scenario: bytes, silo: int, public: bytes) -> bytes:
    parts = b"fedpriv masks", run.encode(), scenario, silo.to_bytes(8, "big"), public
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
