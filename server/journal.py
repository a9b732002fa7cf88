"""Journal of a run at the server, from which a killed server continues.

| file | content |
|---|---|
| noise.key | key of the server's noise, drawn once a run and wiped after its last round |
| released.bin | an entry a round: the release or the noisy integers behind it, the query chain, a checksum |
| sums-T.bin | if the server adds noise to integers: its state of the sums after round T, as secret as the key |
| last.npy | if a substitute for a missing silo can need them: every silo's last message or its substitute |
| missed.json | once a silo has missed a round: the rounds that each silo missed |

The query chain is the digest of all queries so far.  An entry of released.bin is on the disk before a query that
depends on it is sent.

Guarantee: a resumed server sends the query of the interrupted round again byte for byte, and adds the same noise
to the same sums, so that no sums are released with two noises.  An entry that the disk has damaged is not used.
Whoever reads the key can remove a trusted server's noise: the folder is private to the server (mode 0700, files
0600), and a key or a released.bin on which others have permissions is refused.
"""

import bisect
import hashlib
import itertools
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.errors import RunError, refuse
from fedpriv.core.files import PRIVATE_MODE, acquire_lock, sync_folder, write_bytes, write_json, write_vector
from fedpriv.core.random import system_key
from fedpriv.noise.integers.gaussian import QUERY_CHAIN_BYTES
from fedpriv.plan.plan import Plan
from fedpriv.server.strategy import JournalEntry, MissedRounds

_KEY_BYTES = 32
_CHECKSUM_BYTES = 16
_MAX_ENTRY_BYTES = 2**31 - 4096
"""Most bytes that one call of pwrite or pread transfers on Linux."""


class EntrySizes(NamedTuple):
    """Sizes of the entries of a run in its journal."""

    dtype: torch.dtype
    lengths: tuple[int, ...]
    """Number of values in each round's entry."""
    has_secret_state: bool = False
    """Whether the server has a state that contains silos' sums."""

    @staticmethod
    def from_plan(plan: Plan) -> "EntrySizes":
        return EntrySizes(
            plan.stored_dtype, tuple(round_plan.stored_length for round_plan in plan.rounds), plan.sends_round_sums
        )


class ServerJournal(AbstractContextManager["ServerJournal"]):
    """Journal of one run, for one server at a time."""

    def __init__(self, folder: Path, entry_sizes: EntrySizes) -> None:
        """Open the journal in `folder`, and create it if it is new.

        Args:
            folder: Folder of the journal, which gets mode 0700.
            entry_sizes: Type of the entries' values, and their number in each round.

        Raises:
            RunError: If an entry is longer than the system writes at a time, another server has the journal open,
                the folder cannot be used, or others have permissions on the key or the entries.
        """
        self._folder, self._dtype, self._has_secret_state = folder, entry_sizes.dtype, entry_sizes.has_secret_state
        self._last_round = len(entry_sizes.lengths)
        self._entry_ends = [
            0,
            *itertools.accumulate(
                count * self._dtype.itemsize + QUERY_CHAIN_BYTES + _CHECKSUM_BYTES for count in entry_sizes.lengths
            ),
        ]
        """End of the entry of round t in released.bin, in bytes."""
        refuse(
            {
                f"round {t}: its release takes {end - start} bytes, and a server writes {_MAX_ENTRY_BYTES} at "
                'most at a time; take a smaller model, or run.dtype = "float32"': end - start > _MAX_ENTRY_BYTES
                for t, (start, end) in enumerate(itertools.pairwise(self._entry_ends), start=1)
            },
            RunError,
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            for name in ("noise.key", "released.bin"):
                _refuse_shared(folder / name)
            self._file = os.open(folder / "released.bin", os.O_CREAT | os.O_RDWR, PRIVATE_MODE)
            acquire_lock(self._file)
            sync_folder(folder)
        except BlockingIOError:
            raise RunError(f"{folder}: another server is working on this run") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be used as the server's journal: {error}") from None
        # An incomplete last entry does not count.  Its round is repeated: no query that depends on it was sent.
        self._round_count = bisect.bisect_right(self._entry_ends, os.fstat(self._file).st_size) - 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load_noise_key(self) -> bytes:
        """Return the noise key of the run, 32 bytes, which the first call draws and stores.

        A run has one key, because a reader could average the noise of two keys on the same sums.  After the last
        round the result is zeros.

        Raises:
            RunError: If the key was lost after a finished round, was wiped before the last one, has another
                length, or cannot be read or stored.
        """
        path = self._folder / "noise.key"
        if self._round_count >= self._last_round:
            return bytes(_KEY_BYTES)
        if self._round_count and not path.exists():
            raise RunError(
                f"{path}: lost, so that the noise of {self._round_count} rounds cannot go on: start a new run"
            )
        try:
            if not path.exists():
                write_bytes(path, system_key(), PRIVATE_MODE)
                sync_folder(self._folder)
            key = path.read_bytes()
        except OSError as error:
            raise RunError(f"{path}: the noise key cannot be kept, so nothing is released: {error}") from None
        if len(key) != _KEY_BYTES or not any(key):
            fault = f"{len(key)} bytes" if any(key) else "wiped"
            raise RunError(f"{path}: {fault}, a noise key has {_KEY_BYTES} secret ones: start a new run")
        return key

    def close(self) -> None:
        """Close the file, so that another server can open the journal."""
        os.close(self._file)

    def read_entry(self, t: int) -> JournalEntry | None:
        """Return the entry of round t, or None if the round is not finished.

        Raises:
            RunError: If the entry cannot be read, or its checksum is wrong.
        """
        if t > self._round_count:
            return None
        path = self._folder / "released.bin"
        try:
            entry = os.pread(self._file, self._entry_ends[t] - self._entry_ends[t - 1], self._entry_ends[t - 1])
        except OSError as error:
            raise RunError(f"{path}, round {t}: cannot be read: {error}") from None
        body, checksum = entry[:-_CHECKSUM_BYTES], entry[-_CHECKSUM_BYTES:]
        if checksum != _checksum(t, body):
            raise RunError(f"{path}, round {t}: the entry is damaged, so the run cannot go on: start a new run")
        return JournalEntry(
            torch.frombuffer(bytearray(body[:-QUERY_CHAIN_BYTES]), dtype=self._dtype), body[-QUERY_CHAIN_BYTES:]
        )

    def load_secret_state(self) -> bytes:
        """Return the packed secret state after the last finished round, or b"" without one.

        The secret state has sums of silos without noise, from which the server continues.

        Raises:
            RunError: If the state is lost or cannot be read, or its checksum is wrong.
        """
        if not self._round_count or not self._has_secret_state:
            return b""
        path = self._sums_path(self._round_count)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunError(f"{path}: cannot be read, so the run cannot go on: {error}") from None
        checksum, secret_state = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if checksum != _checksum(self._round_count, secret_state):
            raise RunError(f"{path}: damaged, so the run cannot go on: start a new run")
        return secret_state

    def _sums_path(self, t: int) -> Path:
        return self._folder / f"sums-{t}.bin"

    def missed_rounds(self) -> MissedRounds:
        """Return the rounds that silos missed, up to the last round in the journal, by silo.

        Raises:
            RunError: If the file is damaged or cannot be read.
        """
        # The file is written before a round's entry, and can name a round without an entry.
        path = self._folder / "missed.json"
        if not path.exists():
            return {}
        try:
            rounds_by_silo = json.loads(path.read_text(encoding="utf-8"))
            return {
                int(silo): [t for t in rounds if t <= self._round_count] for silo, rounds in rounds_by_silo.items()
            }
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(f"{path}: damaged, so the run cannot go on: {error}") from None

    def last_releases(self) -> Tensor | None:
        """Return each silo's last message, or its substitute, (silos, d), or None if they are not stored.

        If the server died before it stored a round's entry, the messages may be those of that round.

        Raises:
            RunError: If the file is damaged or cannot be read.
        """
        path = self._folder / "last.npy"
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False)) if path.exists() else None
        except (OSError, ValueError, EOFError) as error:
            raise RunError(f"{path}: damaged, so the run cannot go on: {error}") from None

    def record(
        self,
        t: int,
        entry: JournalEntry,
        missed_rounds: MissedRounds,
        last_releases: Tensor | None,
        secret_state: bytes = b"",
    ) -> None:
        """Store the entry of round t durably, before anything that depends on it leaves.

        Args:
            t: Round, the one after the last finished round.
            entry: Values of the round from which its release can be computed again, and the query chain.
            missed_rounds: Rounds that silos missed until now, by silo.
            last_releases: Each silo's last message, or its substitute, (silos, d), or None if no later round can
                need them.
            secret_state: Packed sums of silos for the next round, secret outside the server, or b"".

        Raises:
            RunError: If the journal cannot be written, or the round is out of order.
        """
        if t != self._round_count + 1:
            raise RunError(
                f"round {t} follows round {self._round_count} in the server's journal: rounds come in order"
            )
        # Without a query chain, as in a run in floating point, its bytes are zeros.
        body = entry.noisy_values.contiguous().numpy().tobytes() + entry.query_chain.ljust(
            QUERY_CHAIN_BYTES, b"\0"
        )
        try:
            if last_releases is not None:
                write_vector(self._folder / "last.npy", last_releases.numpy(), PRIVATE_MODE)
            if missed_rounds:
                write_json(
                    self._folder / "missed.json",
                    {str(silo): rounds for silo, rounds in missed_rounds.items()},
                    PRIVATE_MODE,
                )
            # Sums before the entry: a run cannot continue from an entry without the sums to which noise was added.
            if self._has_secret_state:
                self._wipe_sums(except_round=t - 1)  # states and drafts of a server that died before its entry
                write_bytes(self._sums_path(t), _checksum(t, secret_state) + secret_state, PRIVATE_MODE)
                sync_folder(self._folder)
            byte_count = os.pwrite(self._file, body + _checksum(t, body), self._entry_ends[t - 1])
            if byte_count != self._entry_ends[t] - self._entry_ends[t - 1]:
                raise OSError("the disk took only a part of the entry")
            os.fsync(self._file)
            self._wipe_sums(except_round=t)
        except OSError as error:
            raise RunError(
                f"round {t}: the server's journal in {self._folder} could not be written, so nothing is released: "
                f"{error}; make room there, and run the same command with --resume"
            ) from None
        self._round_count = t

    def wipe_key(self) -> None:
        """Wipe the noise key and the silos' sums, which are not needed after the last round.

        The files are overwritten in place and synced before they are removed.  A disk or file system that keeps
        old blocks (copy on write, wear levelling, backups) may keep the contents all the same.

        Raises:
            RunError: If the disk refuses.
        """
        try:
            for path in (self._folder / "noise.key", *self._folder.glob(".noise.key.*")):
                _wipe(path)
            self._wipe_sums()
            sync_folder(self._folder)
        except OSError as error:
            raise RunError(f"{self._folder}: what is secret could not be wiped: {error}") from None

    def _wipe_sums(self, except_round: int = 0) -> None:
        """Wipe the states of the silos' sums, and drafts that a killed server left.

        The state after round `except_round` stays, and with 0 none.
        """
        for path in (*self._folder.glob("sums-*.bin"), *self._folder.glob(".sums-*.bin.*")):
            if path != self._sums_path(except_round):
                _wipe(path)


def _wipe(path: Path) -> None:
    """Overwrite a file with zeros on the disk, and remove it.  A missing file is no error."""
    if path.exists():
        # In place: a new file would leave the old blocks on the disk.
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            # Without a sync, zeros of a removed file need never reach the disk.
            os.fsync(file.fileno())
        path.unlink()


def _checksum(t: int, body: bytes) -> bytes:
    return hashlib.sha256(t.to_bytes(8, "big") + body).digest()[:_CHECKSUM_BYTES]


def _refuse_shared(path: Path) -> None:
    """Refuse a file on which other users have permissions, by a RunError."""
    if path.exists() and path.stat().st_mode & 0o077:
        raise RunError(
            f"{path}: others have permissions on it, and could read or change the run's noise; start a new run"
        )
