"""The key of one round's noise: from the silo's key, the chain of all it was asked, and the sums themselves.

A ledger that is rolled back together with its key must never give the same noise to another sum.  So the key of
round t depends on all queries up to round t, not on its own alone (a rollback, another query at t and the same one
at t + 1 would else repeat the noise of t + 1), and on the integers to which the noise is added.
"""

import hashlib
import hmac

from fedpriv.exact.discrete_gaussian import KeyedIntegers
from fedpriv.exact.fixed_point import Ints

CHAIN_BYTES = 32
START = bytes(CHAIN_BYTES)
"""The chain before round 1."""

_ANSWERED, _MISSED = b"answered", b"missed"


def linked(chain: bytes, query: bytes) -> bytes:
    """The chain (32 bytes) after a round with this query: its bytes as they came, not the cards of the run."""
    return _link(chain, _ANSWERED, query)


def linked_missed(chain: bytes) -> bytes:
    """The chain after a round that was missed."""
    return _link(chain, _MISSED, b"")


def round_noise(key: bytes, owner: int, t: int, chain: bytes, sums: Ints) -> KeyedIntegers:
    """The noise of (owner, round t), for `sums` (d,) or (draws, d): (C s)_t, to which it is added.

    `chain` already holds round t's query.

    Guarantee: two rounds, of whatever rolled-back states of a ledger with this key, share noise only if owner,
    round, all queries up to then and the sums are the same; then the whole release is the same (HMAC-SHA-256 is
    assumed to be a pseudorandom function).
    """
    _check_chain(chain)
    shape = ",".join(map(str, sums.shape)).encode()
    digest = hashlib.sha256(shape + b"|" + sums.astype("<i8").tobytes()).digest()
    message = b"fedpriv exact noise" + owner.to_bytes(8, "big") + t.to_bytes(8, "big") + chain + digest
    return KeyedIntegers(hmac.digest(key, message, "sha256"), owner, t)


def _link(chain: bytes, kind: bytes, query: bytes) -> bytes:
    _check_chain(chain)
    digest = hashlib.sha256(chain)
    for part in (kind, query):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _check_chain(chain: bytes) -> None:
    if len(chain) != CHAIN_BYTES:
        raise ValueError(f"a chain has {CHAIN_BYTES} bytes, not {len(chain)}")
