"""The chain over a ledger's commits: digests of what a commit adds, each bound to all before.

A commit adds entries: a run is opened, a round is asked, answered, a run is over.  The head after commit n is the
digest of the head before, of n and of its entries, so that the rows of a ledger, which tell their commits, give
all heads again.

Guarantee: heads leave the silo, and tell nothing of its records, if HMAC-SHA256 is a pseudorandom function.
Replies and states enter by digests under keys that follow from the run's own key, which is wiped with the run:
neither a server nor a thief of the disk, after the run, can try whether a guess at exact sums has this digest.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

OPENED, ASKED, ANSWERED, OVER = range(4)


class Entry(NamedTuple):
    """What a commit adds, in the order in which entries of one commit are chained."""

    kind: int
    digest: bytes


def origin(name: str, shard: bytes) -> bytes:
    """The head before the first commit of a ledger, by the name it was begun with and its records' fingerprint."""
    return _digest(b"fedpriv ledger", name.encode(), shard)


def linked(head: bytes, number: int, entries: Iterable[Entry]) -> bytes:
    """The head after commit `number`."""
    added = (bytes([entry.kind]) + entry.digest for entry in sorted(entries))
    return _digest(b"commit", head, str(number).encode(), *added)


def opened(run_id: str, cell: str, mu: float, slack: float, seal: bytes) -> Entry:
    numbers = (repr(mu).encode(), repr(slack).encode())
    return Entry(OPENED, _digest(b"opened", run_id.encode(), cell.encode(), *numbers, seal))


def asked(run_id: str, t: int, query: bytes) -> Entry:
    return Entry(ASKED, _digest(b"asked", run_id.encode(), str(t).encode(), query))


def answered(run_id: str, t: int, replied: bytes, after: bytes) -> Entry:
    return Entry(ANSWERED, _digest(b"answered", run_id.encode(), str(t).encode(), replied, after))


def over(run_id: str) -> Entry:
    return Entry(OVER, _digest(b"over", run_id.encode()))


def seal_of(key: bytes) -> bytes:
    """A digest of a run's key, which outlives it."""
    return _digest(b"key", key)


def is_seal_of(seal: bytes, key: bytes) -> bool:
    """Whether it is the seal of a run with this key, as it was opened or once the chain has another origin."""
    return seal in (seal_of(key), _second_seal_of(key))


def resealed(seal: bytes, run_key: bytes | None, key: bytes) -> bytes:
    """The seal of a run once the chain has another origin: no head from before can be given again.

    Of a run under way it follows from the run's own key alone, which is wiped with the run; without that key from
    the seal before, under the `key` of the records.
    """
    return hmac.digest(key, b"seal" + seal, "sha256") if run_key is None else _second_seal_of(run_key)


def _second_seal_of(key: bytes) -> bytes:
    return _digest(b"key, in a chain of another origin", key)


def converted(name: str) -> str:
    """The name of a ledger once its chain has another origin, whose heads are no heads of the old name."""
    return _digest(b"converted", name.encode()).hex()[:32]


def blind_of(key: bytes, t: int) -> bytes:
    """The key of the digest of round t's reply: kept and wiped with it."""
    return hmac.digest(key, b"reply %d" % t, "sha256")


def replied(blind: bytes, reply: bytes) -> bytes:
    return hmac.digest(blind, reply, "sha256")


def after(key: bytes, state: bytes | None) -> bytes:
    """A digest of the state after a round, b"" where nobody needs one."""
    return b"" if state is None else hmac.digest(hmac.digest(key, b"state", "sha256"), state, "sha256")


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
