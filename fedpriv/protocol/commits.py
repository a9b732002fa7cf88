"""Commits of silos' ledgers, as a coordinator remembers them and tells them again.

A silo's guard sends the commit that a reply is in along with it; the coordinator keeps the last one and sends it
with its next query.  A guard whose ledger and mark were both put back to an older copy has not made that commit,
and refuses.
"""

import struct
from typing import NamedTuple

_ENTRY = struct.Struct("!16sQ32s")
MOST = 8
"""Ledgers of one silo that a coordinator remembers."""
LONGEST = MOST * _ENTRY.size


class Told(NamedTuple):
    """A ledger's name in hexadecimal digits, and a commit of it: its number, and the head of the chain with it.

    Guarantee: the head tells nothing of records, see fedpriv/silo/chain.py.
    """

    ledger: str
    number: int
    head: bytes

    @property
    def packed(self) -> bytes:
        return _ENTRY.pack(bytes.fromhex(self.ledger), self.number, self.head)


def commits_in(packed: bytes) -> list[Told]:
    """The commits that somebody claims to have seen; ValueError for anything else, and for too many."""
    if len(packed) > LONGEST or len(packed) % _ENTRY.size:
        raise ValueError(f"{len(packed)} bytes are no commits")
    return [Told(name.hex(), number, head) for name, number, head in _ENTRY.iter_unpack(packed)]


def remembered(known: bytes, told: bytes) -> bytes:
    """What is known of a silo's ledgers, with one more commit; the ledgers that were heard of last are kept."""
    (new,) = commits_in(told)
    others = [each for each in commits_in(known) if each.ledger != new.ledger]
    return b"".join(each.packed for each in [*others[-(MOST - 1) :], new])
