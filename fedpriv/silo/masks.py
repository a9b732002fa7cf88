"""Pairwise masks of messages, and the signed public keys from which silos derive them.

Each pair of silos shares a key stream, which one adds and the other subtracts.  Source: Bonawitz et al. 2017,
"Masking with one-time pads".  Silo i sends

    x_i + Σ_{j > i} PRG(s_ij, t, c_t) - Σ_{j < i} PRG(s_ij, t, c_t)   (mod 2^w),

so that the masks cancel in the sum of all messages.  x_i are the integers of the silo's encoded message, and c_t
is the query chain: a digest of all queries up to round t, or b"" in floating point.  A mask consists of integers
modulo 2^64, of which a message of w-bit words, w ≤ 64, uses the low w bits.

| symbol | here |
|---|---|
| s_ij | X25519 secret (RFC 7748) of two keys made for one run, hashed by HKDF-SHA256 (RFC 5869) together with |
| | both public keys and the digest of the scenario |
| PRG(s, t, c) | AES-256 in counter mode, under a key that is derived from s, t and c by SHA-256 |

Silos that list each other's long-lived keys need not trust the server that relays the keys of a run: a silo signs
its key of a run with its Ed25519 key (RFC 8032), and accepts only keys that their silos signed for this very run
of this very scenario.  A silo sends a *card*: the public key, 32 bytes, and the signature, 64 bytes, zeros from a
silo without a signing key.
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
"""Size of a public key."""
_PRIME = 2**255 - 19


class Masker:
    """Masks of silo `number` in one run.

    Guarantee: whoever does not hold a private key of a pair of silos sees the pair's key stream of every round as
    uniform and independent integers modulo 2^64 (under the usual assumptions on X25519, HKDF, SHA-256 and AES).
    So of the messages of silos that follow the protocol, of which this silo's is one of two or more, only the sum
    is learned.  The guarantee assumes that every public key is the one that its silo made: a server that relays
    other keys learns messages.  Silos with different scenarios or query chains have masks that do not cancel: the
    sum of their messages is uniform, too.  A mask hides one message of its round and query chain.
    """

    def __init__(self, secret: bytes, number: int, scenario: bytes = b"") -> None:
        """Derive the silo's key of a run.

        Args:
            secret: 32 bytes that only this silo has, for this run alone.
            number: Number of the silo.
            scenario: Digest of the scenario.
        """
        self._private, self._number = X25519PrivateKey.from_private_bytes(secret), number
        self._scenario = scenario
        self._cached_keys: tuple[bytes, int, list[bytes | None]] | None = None

    @property
    def public_key(self) -> bytes:
        """Public key of the silo in this run, 32 bytes."""
        return self._private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)

    def agree_keys(self, public_keys: bytes, silos: int) -> list[bytes | None]:
        """Return the key shared with each silo, None for this silo.

        Args:
            public_keys: Public keys of silo 0, 1, …, 32 bytes each, concatenated.
            silos: Number of silos.

        Raises:
            RunError: Unless there are `silos` different keys, with this silo's own key at its number, and every
                other one is a usable public key of X25519.
        """
        if self._cached_keys is None or self._cached_keys[:2] != (public_keys, silos):
            self._cached_keys = (public_keys, silos, self._derive_shared_keys(public_keys, silos))
        return self._cached_keys[2]

    def mask(
        self, public_keys: bytes, silos: int, t: int, length: int, query_chain: bytes = b""
    ) -> EncodedMessage:
        """Return the mask of this silo's encoded message in round t, (length,), integers modulo 2^64.

        Args:
            public_keys: Public keys of silo 0, 1, …, concatenated.
            silos: Number of silos.
            t: Round.
            length: Number of integers of the message.
            query_chain: Query chain of this round.

        Raises:
            RunError: If `agree_keys` refuses the keys.
        """
        # Encrypted zeros are the key stream, 8 bytes for each integer.  Sums of uint64 are modulo 2^64.
        total, zeros = np.zeros(length, np.uint64), bytes(8 * length)
        for peer, key in enumerate(self.agree_keys(public_keys, silos)):
            if key is not None:
                mask_key = derive_key(key, "mask of a round", str(t), query_chain.hex())
                # The key is for this round alone, so that the counter may start at 0.
                stream = Cipher(algorithms.AES(mask_key), modes.CTR(bytes(16))).encryptor().update(zeros)
                combine = np.add if peer > self._number else np.subtract
                combine(total, np.frombuffer(stream, "<u8"), out=total)
        return total

    def _derive_shared_keys(self, public_keys: bytes, silos: int) -> list[bytes | None]:
        """Derive what `agree_keys` returns, without the cache."""
        key_list = [public_keys[start : start + KEY_BYTES] for start in range(0, len(public_keys), KEY_BYTES)]
        if len(public_keys) != silos * KEY_BYTES or len(set(key_list)) != silos:
            raise RunError(f"silo {self._number}: expected {silos} different public keys of {KEY_BYTES} bytes")
        if key_list[self._number : self._number + 1] != [self.public_key]:
            raise RunError(f"silo {self._number}: the server relays another public key as this silo's")
        return [
            None if peer == self._number else self._derive_shared_key(key) for peer, key in enumerate(key_list)
        ]

    def _derive_shared_key(self, peer_key: bytes) -> bytes:
        """Derive the key shared with the peer of this public key, each 32 bytes.

        Raises:
            RunError: If the peer's key is no number below 2^255 - 19, or a point of low order, which yields the
                same secret with every key.
        """
        try:
            # X25519 reduces a number modulo the prime p, so that p + n and n would be one key.
            if int.from_bytes(peer_key, "little") >= _PRIME:
                raise ValueError
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(peer_key))
        except ValueError:
            raise RunError(f"silo {self._number}: a relayed public key is no usable X25519 key") from None
        return HKDF(
            hashes.SHA256(),
            KEY_BYTES,
            salt=None,
            info=b"fedpriv pairwise mask" + b"".join(sorted((self.public_key, peer_key))) + self._scenario,
        ).derive(secret)


SIGNED_KEY_BYTES = KEY_BYTES + 64
"""Size of a card: a public key and its signature."""


@dataclass(frozen=True)
class Identity:
    """Long-lived signing key of silo `number`, and all silos' public keys, if the silo has them."""

    number: int
    signing_key: Ed25519PrivateKey | None
    """Private key, or None if the silo signs nothing."""
    peers: tuple[Ed25519PublicKey, ...]
    """Public key of every silo, in the order of their numbers, or empty if the silo has none."""

    def sign_key(self, run: str, scenario: bytes, public_key: bytes) -> bytes:
        """Return this silo's card for a run: its public key with a signature, or zeros without a signing key."""
        signature = (
            bytes(64)
            if self.signing_key is None
            else self.signing_key.sign(_key_statement(run, scenario, self.number, public_key))
        )
        return public_key + signature

    def verify_keys(self, run: str, scenario: bytes, signed_keys: bytes, silos: int) -> bytes:
        """Verify the cards (key and signature) of all silos, and return their public keys, concatenated.

        Guarantee: with `peers`, every key was signed by its silo for this run and scenario.  Without `peers` no
        signature is verified.

        Args:
            run: Name of the run.
            scenario: Digest of the scenario.
            signed_keys: Cards of silo 0, 1, …, concatenated.
            silos: Number of silos.

        Raises:
            RunError: If there are not `silos` cards, if `peers` has another number of silos, or if a card is not
                signed by its silo.
        """
        if len(signed_keys) != silos * SIGNED_KEY_BYTES:
            raise RunError(f"silo {self.number}: expected {silos} signed public keys of {SIGNED_KEY_BYTES} bytes")
        if self.peers and len(self.peers) != silos:
            raise RunError(f"silo {self.number} knows {len(self.peers)} silos, and the scenario has {silos}")
        cards = [
            signed_keys[start : start + SIGNED_KEY_BYTES] for start in range(0, len(signed_keys), SIGNED_KEY_BYTES)
        ]
        # Without `peers` the loop is empty.
        for silo, (peer, card) in enumerate(zip(self.peers, cards, strict=bool(self.peers))):
            try:
                peer.verify(card[KEY_BYTES:], _key_statement(run, scenario, silo, card[:KEY_BYTES]))
            except InvalidSignature:
                raise RunError(
                    f"silo {self.number}: the public key relayed as silo {silo}'s is not signed by it for "
                    "this run and scenario"
                ) from None
        return b"".join(card[:KEY_BYTES] for card in cards)


def load_identity(number: int, key_path: Path | None, peers: Path | None) -> Identity:
    """Load an identity from files as `ssh-keygen -t ed25519` writes them.

    Guarantee: no two silos have the same key in `peers`, and if both files are given, the private key belongs to
    this silo's line in `peers`.

    Args:
        number: Number of the silo.
        key_path: File of the private key, without a passphrase or permissions for others, or None.
        peers: File with one public key a line, silo 0 first, or None.  Empty lines do not count.

    Raises:
        InputError: If a file cannot be used, two silos have one key, or the private key is not this silo's.
    """
    lines = [] if peers is None else read_file_bytes(peers).splitlines()
    if peers is not None and not any(line.strip() for line in lines):
        raise InputError(f"{peers}: expected a public key for each silo, silo 0 first")
    key = None if key_path is None else read_private_key(key_path)
    public_keys = [
        parse_public_key(line, f"{peers}, line {line_number}")
        for line_number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    raw_keys = [public_key.public_bytes_raw() for public_key in public_keys]
    for silo, content in enumerate(raw_keys):
        if (first := raw_keys.index(content)) < silo:
            raise InputError(f"{peers}: silos {first} and {silo} have the same key; each needs its own")
    if key is not None and public_keys and raw_keys[number : number + 1] != [key.public_key().public_bytes_raw()]:
        raise InputError(f"{key_path}: its public half is not the one that {peers} has for silo {number}")
    return Identity(number, key, tuple(public_keys))


def _key_statement(run: str, scenario: bytes, silo: int, public_key: bytes) -> bytes:
    parts = b"fedpriv masks", run.encode(), scenario, silo.to_bytes(8, "big"), public_key
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
