"""The chain over a ledger's commits: digests of what a commit adds, each bound to all before.

A commit adds entries: a run is opened, a round is asked, answered, a run is over.  The head after commit n is the
digest of the head before, of n and of its entries, so that the rows of a ledger, which tell their commits, give
all heads again.

Guarantee: heads leave the silo, and tell nothing of its records, if HMAC-SHA256 is a pseudorandom function.
Replies and states enter by digests under keys that follow from the run's own key, which is wiped with the run:
neither a server nor a thief of the disk, after the run, can try whether a guess at exact sums has this digest.

The mark of a ledger: a file of its own that says how far the ledger has come.

It has the ledger's name and two commits, by number and head of the chain: the one that is on the disk for sure,
and the one that is being made; and, while no run is under way, a digest of the ledger's whole file.  It is written
before and after each commit, and a reply leaves after that.
"""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fedpriv.core.errors import InputError
from fedpriv.core.files import sync_folder

RUN_OPENED, QUERY_RECORDED, REPLY_RECORDED, RUN_ENDED = range(4)


class ChainEntry(NamedTuple):
    """What a commit adds, in the order in which entries of one commit are chained."""

    kind: int
    digest: bytes


def first_head(name: str, fingerprint: bytes) -> bytes:
    """The head before the first commit of a ledger, by the name it was begun with and its records' fingerprint."""
    return _digest(b"fedpriv ledger", name.encode(), fingerprint)


def next_head(head: bytes, number: int, entries: Iterable[ChainEntry]) -> bytes:
    """The head after commit `number`."""
    added = (bytes([entry.kind]) + entry.digest for entry in sorted(entries))
    return _digest(b"commit", head, str(number).encode(), *added)


def opening_entry(run_id: str, cell: str, mu: float, slack: float, seal: bytes) -> ChainEntry:
    numbers = (repr(mu).encode(), repr(slack).encode())
    return ChainEntry(RUN_OPENED, _digest(b"opened", run_id.encode(), cell.encode(), *numbers, seal))


def query_entry(run_id: str, t: int, query: bytes) -> ChainEntry:
    return ChainEntry(QUERY_RECORDED, _digest(b"asked", run_id.encode(), str(t).encode(), query))


def reply_entry(run_id: str, t: int, reply_digest: bytes, state_digest: bytes) -> ChainEntry:
    return ChainEntry(
        REPLY_RECORDED, _digest(b"answered", run_id.encode(), str(t).encode(), reply_digest, state_digest)
    )


def ending_entry(run_id: str) -> ChainEntry:
    return ChainEntry(RUN_ENDED, _digest(b"over", run_id.encode()))


def make_seal(key: bytes) -> bytes:
    """A digest of a run's key, which outlives it."""
    return _digest(b"key", key)


def is_seal_of(seal: bytes, key: bytes) -> bool:
    """Whether it is the seal of a run with this key, as it was opened or once the chain has another origin."""
    return seal in (make_seal(key), _make_second_seal(key))


def reseal(seal: bytes, run_key: bytes | None, key: bytes) -> bytes:
    """The seal of a run once the chain has another origin: no head from before can be given again.

    Of a run under way it follows from the run's own key alone, which is wiped with the run; without that key from
    the seal before, under the `key` of the records.
    """
    return hmac.digest(key, b"seal" + seal, "sha256") if run_key is None else _make_second_seal(run_key)


def _make_second_seal(key: bytes) -> bytes:
    return _digest(b"key, in a chain of another origin", key)


def converted_name(name: str) -> str:
    """The name of a ledger once its chain has another origin, whose heads are no heads of the old name."""
    return _digest(b"converted", name.encode()).hex()[:32]


def derive_blind(key: bytes, t: int) -> bytes:
    """The key of the digest of round t's reply: kept and wiped with it."""
    return hmac.digest(key, b"reply %d" % t, "sha256")


def digest_reply(blind: bytes, reply: bytes) -> bytes:
    return hmac.digest(blind, reply, "sha256")


def digest_state(key: bytes, state: bytes | None) -> bytes:
    """A digest of the state after a round, b"" where nobody needs one."""
    return b"" if state is None else hmac.digest(hmac.digest(key, b"state", "sha256"), state, "sha256")


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


_MARK_TITLE = "fedpriv ledger mark 2"


class Commit(NamedTuple):
    """How many commits a ledger has had, and the head of their chain."""

    number: int
    head: bytes


class MarkContent(NamedTuple):
    """What a mark says: whose it is, the last commit that is done, and the one after it that may be."""

    ledger_name: str
    last_commit: Commit
    pending_commit: Commit
    file_digest: str = ""
    """SHA-256 of the ledger's file, while no run is under way."""

    @property
    def file_bytes(self) -> bytes:
        """The file: a line each, and a check of all."""
        commits = (f"{commit.number} {commit.head.hex()}" for commit in (self.last_commit, self.pending_commit))
        lines = "\n".join((_MARK_TITLE, self.ledger_name, *commits, self.file_digest or "-", ""))
        return f"{lines}{hashlib.sha256(lines.encode()).hexdigest()}\n".encode()


class RollbackMark:
    """The file; OSError where the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> MarkContent:
        """InputError if it is not there, is no mark, or is not byte for byte what was written."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            raise self._unusable_error("no such mark of the ledger") from None
        except OSError as error:
            raise self._unusable_error(f"cannot be read as a ledger's mark: {error}") from None
        try:
            _, ledger, done, begun, whole, _ = content.decode("ascii").split("\n", 5)
            reading = MarkContent(ledger, _parse_commit(done), _parse_commit(begun), "" if whole == "-" else whole)
        except ValueError:
            raise self._unusable_error("is no mark of a ledger of this version, or is damaged") from None
        if reading.file_bytes != content:
            raise self._unusable_error("is damaged, its check does not match")
        return reading

    def write(self, content: MarkContent) -> None:
        """On the disk, whole or not at all, when this returns."""
        draft = self.path.with_name(self.path.name + ".new")
        draft.unlink(missing_ok=True)  # whoever made it: a link would lead elsewhere
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(content.file_bytes)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        sync_folder(self.path.parent)

    def _unusable_error(self, what: str) -> InputError:
        return InputError(
            f"{self.path}: {what}; without it nobody knows whether the ledger is an older copy, so nothing is "
            "released: move the ledger into a folder of its own, and `fedpriv silo restore POLICY FOLDER` begins "
            "again from it, with the budget counted as spent"
        )


def _parse_commit(line: str) -> Commit:
    number, head = line.split(" ")
    return Commit(int(number), bytes.fromhex(head))
