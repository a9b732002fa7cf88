"""What a coordinator remembers of silos' ledgers: the last commit that each reply was in.

It is sent again with the next query, in this run and in the next ones, so that a silo whose ledger and mark were
put back together notices.  A file a silo; what is in it is public, and whoever removes it takes a hint away.
"""

from logging import WARNING
from pathlib import Path

from flwr.app import RecordDict
from flwr.common.logger import log

from fedpriv.core.files import OWN, write_bytes
from fedpriv.protocol.commits import LONGEST, commits_in, remembered
from fedpriv.protocol.messages import COMMIT, SEEN, also_in, with_also


class SeenCommits:
    """The commits of silo 0, 1, … in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[int, bytes]()

    def told_to(self, silo: int, content: RecordDict) -> RecordDict:
        """A query with what is remembered of this silo; `content` is left as it is."""
        known = self._known.get(silo) or self._read(silo)
        return with_also(content, SEEN, known) if known else content

    def note(self, silo: int, content: RecordDict) -> None:
        """Remember what a reply tells; whatever a silo sends, no more than a few hundred bytes of each."""
        told = also_in(content, COMMIT)
        try:
            known = remembered(self._known.get(silo) or self._read(silo), told)
        except ValueError:  # none, as in a simulation, or nonsense
            return
        self._known[silo] = known
        try:
            write_bytes(self._path(silo), known, OWN, durable=False)
        except OSError as error:
            log(WARNING, "%s: cannot be written (%s); an older ledger may go unnoticed", self._path(silo), error)

    def _read(self, silo: int) -> bytes:
        try:
            with self._path(silo).open("rb") as file:
                known = file.read(LONGEST + 1)
            commits_in(known)
        except (OSError, ValueError):
            return b""
        return known

    def _path(self, silo: int) -> Path:
        return self._folder / f"silo-{silo}"
