"""Chain of a ledger's commits, and the rollback mark that remembers its last commit.

A commit adds entries: a run is opened, a query is recorded, a reply is recorded, or a run ends.  The head after
commit n is a digest of the previous head, of n and of the commit's entries.  The rows of a ledger name their
commits, so that the heads can be computed again from the rows.

Guarantee: heads leave the silo and reveal nothing about its records, if HMAC-SHA256 is a pseudorandom function.
Replies and states enter by digests under keys that follow from the run's own key, which is wiped with the run.  A
reply that the ledger keeps (fedpriv/silo/rows.py) has the key of its digest beside it.  So a server cannot test a
guess at exact sums on these digests, nor can a thief of the disk after the run, except on digests of kept replies.

The rollback mark of a ledger is a separate file that names the ledger's last commit, and so reveals an older copy
of the ledger.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fedpriv.core.errors import InputError
from fedpriv.core.files import PRIVATE_MODE, sync_folder, write_bytes

RUN_OPENED, QUERY_RECORDED, REPLY_RECORDED, RUN_ENDED = range(4)


class ChainEntry(NamedTuple):
    """Entry that a commit adds."""

    kind: int
    """`RUN_OPENED`, `QUERY_RECORDED`, `REPLY_RECORDED` or `RUN_ENDED`."""
    digest: bytes


def first_head(name: str, fingerprint: bytes) -> bytes:
    """Head before the first commit of a ledger, from its first name and the fingerprint of its records."""
    return _digest(b"fedpriv ledger", name.encode(), fingerprint)


def next_head(head: bytes, number: int, entries: Iterable[ChainEntry]) -> bytes:
    """Head after commit `number`, from the head before it and the entries that it adds."""
    return _digest(
        b"commit", head, str(number).encode(), *(bytes([entry.kind]) + entry.digest for entry in sorted(entries))
    )


def opening_entry(run_id: str, cell: str, mu: float, slack: float, seal: bytes) -> ChainEntry:
    """Entry of a new run: its name, scenario, price, and the seal of its key."""
    return ChainEntry(
        RUN_OPENED,
        _digest(b"opened", run_id.encode(), cell.encode(), repr(mu).encode(), repr(slack).encode(), seal),
    )


def query_entry(run_id: str, t: int, query: bytes) -> ChainEntry:
    """Entry of a query: the run, the round, and the digest of the query."""
    return ChainEntry(QUERY_RECORDED, _digest(b"asked", run_id.encode(), str(t).encode(), query))


def reply_entry(run_id: str, t: int, reply_digest: bytes, state_digest: bytes) -> ChainEntry:
    """Entry of a reply: the run, the round, and the digests of the reply and of the next state."""
    return ChainEntry(
        REPLY_RECORDED, _digest(b"answered", run_id.encode(), str(t).encode(), reply_digest, state_digest)
    )


def ending_entry(run_id: str) -> ChainEntry:
    """Entry of the end of a run."""
    return ChainEntry(RUN_ENDED, _digest(b"over", run_id.encode()))


def make_seal(key: bytes) -> bytes:
    """Seal of a run: a digest of the run's key that is kept after the key is wiped."""
    return _digest(b"key", key)


def is_seal_of(seal: bytes, key: bytes) -> bool:
    """Whether a seal belongs to this run key, before or after a change of the chain's origin (`reseal`)."""
    return seal in (make_seal(key), _make_second_seal(key))


def reseal(seal: bytes, run_key: bytes | None, key: bytes) -> bytes:
    """Seal of a run after a change of the chain's origin, the fingerprint in its first head.

    Args:
        seal: Former seal of the run.
        run_key: Key of a run under way, from which its new seal follows, or None if the run is over or the ledger
            is a backup.
        key: Key of the records' fingerprint, under which the new seal follows from the former one without
            `run_key`.
    """
    return hmac.digest(key, b"seal" + seal, "sha256") if run_key is None else _make_second_seal(run_key)


def _make_second_seal(key: bytes) -> bytes:
    return _digest(b"key, in a chain of another origin", key)


def converted_name(name: str) -> str:
    """Name of a ledger that was converted from fedpriv 0.3.0, by its name from before."""
    return _digest(b"converted", name.encode()).hex()[:32]


def derive_blind(key: bytes, t: int) -> bytes:
    """Key of the digest of round t's reply, its blind, which is stored and wiped with the reply."""
    return hmac.digest(key, b"reply %d" % t, "sha256")


def digest_reply(blind: bytes, reply: bytes) -> bytes:
    """Digest of a reply under its blind."""
    return hmac.digest(blind, reply, "sha256")


def digest_state(key: bytes, state: bytes | None) -> bytes:
    """Digest of a run's state, or b"" for None, as before the first reply and after the last."""
    return b"" if state is None else hmac.digest(hmac.digest(key, b"state", "sha256"), state, "sha256")


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


_MARK_TITLE = "fedpriv ledger mark 2"


class Commit(NamedTuple):
    """Number of a ledger's commits, and the head of their chain."""

    number: int
    head: bytes


class MarkContent(NamedTuple):
    """Content of a mark: name of its ledger, last finished commit, and the commit in progress."""

    ledger_name: str
    last_commit: Commit
    """Last commit that is certainly on the disk."""
    pending_commit: Commit
    """Commit in progress, or the last commit again if none is in progress."""
    file_digest: str = ""
    """SHA-256 of the ledger's file in hexadecimal digits, or "" if the mark has none."""

    @property
    def file_bytes(self) -> bytes:
        """Bytes of the mark's file: a title, a line for each value, and a checksum."""
        commits = (f"{commit.number} {commit.head.hex()}" for commit in (self.last_commit, self.pending_commit))
        lines = "\n".join((_MARK_TITLE, self.ledger_name, *commits, self.file_digest or "-", ""))
        return f"{lines}{hashlib.sha256(lines.encode()).hexdigest()}\n".encode()


class RollbackMark:
    """Rollback mark of a ledger as a file, or as a link to a file, which stays a link."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    def read(self) -> MarkContent:
        """Read the mark from its file.

        Raises:
            InputError: If the file is missing, cannot be read, is no mark of this version, or is damaged.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            raise self._unusable_error("no such mark of the ledger") from None
        except OSError as error:
            raise self._unusable_error(f"cannot be read as a ledger's mark: {error}") from None
        try:
            # The six parts are title, ledger, two commits, digest of the file, and checksum.
            _, ledger, last_commit, pending_commit, file_digest, _ = content.decode("ascii").split("\n", 5)
            reading = MarkContent(
                ledger,
                _parse_commit(last_commit),
                _parse_commit(pending_commit),
                "" if file_digest == "-" else file_digest,
            )
        except ValueError:
            raise self._unusable_error("is no mark of a ledger of this version, or is damaged") from None
        # This comparison checks the title and the checksum, too.
        if reading.file_bytes != content:
            raise self._unusable_error("is damaged, its check does not match")
        return reading

    def write(self, content: MarkContent) -> None:
        """Write the mark to the disk, whole or not at all.

        Raises:
            OSError: If the disk refuses.
        """
        write_bytes(self.path, content.file_bytes, PRIVATE_MODE)
        sync_folder(self.path.parent)

    def _unusable_error(self, fault: str) -> InputError:
        return InputError(
            f"{self.path}: {fault}; without it nobody knows whether the ledger is an older copy, so nothing is "
            "released: move the ledger into a folder of its own, and `fedpriv silo restore POLICY FOLDER` begins "
            "again from it, with the budget counted as spent"
        )


def _parse_commit(line: str) -> Commit:
    number, head = line.split(" ")
    return Commit(int(number), bytes.fromhex(head))
