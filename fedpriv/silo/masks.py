"""Pairwise masks, and the signed public keys from which they are agreed.

Each pair of silos shares a key stream, which one adds and the other subtracts.  Source: Bonawitz et al. 2017,
"Masking with one-time pads": silo i sends

    x_i + Σ_{j > i} PRG(s_ij, t, c_t) - Σ_{j < i} PRG(s_ij, t, c_t)   (mod 2^64),

so that the masks cancel in the sum of all M messages, and in no sum of fewer.  c_t stands for what the silos were
asked until round t: a mask is good for one message, and a silo that is put back to an earlier state and asked
something else takes another one.

| symbol | here |
|---|---|
| s_ij | X25519 (RFC 7748) between keys made for one run, by HKDF-SHA256 (RFC 5869) with both and the scenario |
| PRG(s, t, c) | AES-256 in counter mode, under a key derived from s, t and c |

All of it from `cryptography`.

Silos that know each other need not believe what the server relays: a silo signs the key it made for a run with its
long-lived Ed25519 key (RFC 8032), and a silo that has the public halves of all silos on file takes no key that its
owner did not sign for this very run of this very scenario (the paper assumes such a public-key infrastructure
where the server may deviate).  What travels is a *card*: the public key, 32 bytes, and the signature, 64 bytes,
zeros from a silo that has no identity.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import derive_key
from fedpriv.core.signed import parse_public_key, read_file_bytes, read_private_key
from fedpriv.plan.calibration import EncodedMessage

KEY_BYTES = 32
"""Of a public key."""
_PRIME = 2**255 - 19


class Masker:
    """Silo `number`'s side of the masks of one run.

    Guarantee: whoever does not hold a private key of the pair sees the mask of every round as uniform and
    independent words (X25519 and AES are assumed to be what they are taken for), so that of the messages of
    silos that follow the protocol, between which this silo's is one of two or more, only the sum is learned.
    It rests on every public key being the one that its silo made: a server that relays others learns messages.
    Silos that hold different scenarios, or were asked different things, have masks that do not cancel: the sum of
    their messages is uniform too.  A mask is good for one message of its round and chain.
    """

    def __init__(self, secret: bytes, number: int, scenario: bytes = b"") -> None:
        """`secret`: 32 bytes that nobody else has, for this run and silo alone; `scenario`: its digest."""
        self._private, self._number = X25519PrivateKey.from_private_bytes(secret), number
        self._scenario = scenario
        self._cached_keys: tuple[bytes, list[bytes | None]] | None = None

    @property
    def public_key(self) -> bytes:
        return self._private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)

    def agree_keys(self, public_keys: bytes, silos: int) -> list[bytes | None]:
        """The key shared with each silo, None in the own place, given the public keys of silo 0, 1, … in a row.

        RunError unless they are `silos` different ones and this silo's own is in its place.
        """
        if self._cached_keys is None or self._cached_keys[0] != public_keys:
            self._cached_keys = (public_keys, self._derive_shared_keys(public_keys, silos))
        return self._cached_keys[1]

    def mask(
        self, public_keys: bytes, silos: int, t: int, length: int, query_chain: bytes = b""
    ) -> EncodedMessage:
        """What is added to this silo's words (size,) of round t after the queries in `chain`; see `agree`."""
        total, nothing = np.zeros(length, np.uint64), bytes(8 * length)
        for other, key in enumerate(self.agree_keys(public_keys, silos)):
            if key is not None:
                once = derive_key(key, "mask of a round", str(t), query_chain.hex())
                stream = Cipher(algorithms.AES(once), modes.CTR(bytes(16))).encryptor().update(nothing)
                added = np.add if other > self._number else np.subtract
                added(total, np.frombuffer(stream, "<u8"), out=total)
        return total

    def _derive_shared_keys(self, keys: bytes, silos: int) -> list[bytes | None]:
        public = [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
        if len(keys) != silos * KEY_BYTES or len(set(public)) != silos:
            raise RunError(f"silo {self._number}: expected {silos} different public keys of {KEY_BYTES} bytes")
        if public[self._number] != self.public_key:
            raise RunError(f"silo {self._number}: the server relays another public key as this silo's")
        return [
            None if other == self._number else self._derive_shared_key(key) for other, key in enumerate(public)
        ]

    def _derive_shared_key(self, other: bytes) -> bytes:
        try:
            if (
                int.from_bytes(other, "little") >= _PRIME
            ):  # X25519 takes it for a smaller one: the same point twice
                raise ValueError
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:  # a point of low order
            raise RunError(f"silo {self._number}: a public key that was relayed is none") from None
        pair = b"".join(sorted((self.public_key, other)))
        return HKDF(
            hashes.SHA256(), KEY_BYTES, salt=None, info=b"fedpriv pairwise mask" + pair + self._scenario
        ).derive(secret)


SIGNED_KEY_BYTES = KEY_BYTES + 64


@dataclass(frozen=True)
class Identity:
    """Silo `number`'s own signing key, and every silo's public one, if it has them."""

    number: int
    signing_key: Ed25519PrivateKey | None
    peers: tuple[Ed25519PublicKey, ...]

    def sign_key(self, run: str, scenario: bytes, public: bytes) -> bytes:
        """This silo's public key for a run of the scenario with this digest, signed."""
        signed = (
            bytes(64)
            if self.signing_key is None
            else self.signing_key.sign(_key_statement(run, scenario, self.number, public))
        )
        return public + signed

    def verify_keys(self, run: str, scenario: bytes, signed_keys: bytes, silos: int) -> bytes:
        """The public keys of silo 0, 1, … in a row, from their cards in a row.

        Guarantee: with `peers`, every key was signed by its silo for this run and scenario; RunError otherwise.
        """
        if len(signed_keys) != silos * SIGNED_KEY_BYTES:
            raise RunError(f"silo {self.number}: expected {silos} signed public keys of {SIGNED_KEY_BYTES} bytes")
        if self.peers and len(self.peers) != silos:
            raise RunError(f"silo {self.number} knows {len(self.peers)} silos, and the scenario has {silos}")
        split = [
            signed_keys[start : start + SIGNED_KEY_BYTES] for start in range(0, len(signed_keys), SIGNED_KEY_BYTES)
        ]
        for silo, (peer, card) in enumerate(zip(self.peers, split, strict=bool(self.peers))):
            try:
                peer.verify(card[KEY_BYTES:], _key_statement(run, scenario, silo, card[:KEY_BYTES]))
            except InvalidSignature:
                raise RunError(
                    f"silo {self.number}: the public key relayed as silo {silo}'s is not signed by it for "
                    "this run and scenario"
                ) from None
        return b"".join(card[:KEY_BYTES] for card in split)


def load_identity(number: int, own: Path | None, peers: Path | None) -> Identity:
    """The identity in files as `ssh-keygen -t ed25519` writes them; InputError if one cannot be used.

    `own` is the private key, without a passphrase, mode 0600; `peers` has one public key a line, silo 0 first.

    Guarantee: no silo stands for two, and `own` is what the others know this silo by.
    """
    lines = [] if peers is None else [line for line in read_file_bytes(peers).splitlines() if line.strip()]
    if peers is not None and not lines:
        raise InputError(f"{peers}: expected a public key for each silo, silo 0 first")
    key = None if own is None else read_private_key(own)
    known = [parse_public_key(line, f"{peers}, line {place}") for place, line in enumerate(lines, start=1)]
    raw = [each.public_bytes_raw() for each in known]
    for silo, content in enumerate(raw):
        if (first := raw.index(content)) < silo:
            raise InputError(f"{peers}: silos {first} and {silo} have one key; each has its own")
    if key is not None and known and raw[number : number + 1] != [key.public_key().public_bytes_raw()]:
        raise InputError(f"{own}: its public half is not the one that {peers} has for silo {number}")
    return Identity(number, key, tuple(known))


def _key_statement(run: str, scenario: bytes, silo: int, public: bytes) -> bytes:
    parts = b"fedpriv masks", run.encode(), scenario, silo.to_bytes(8, "big"), public
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
