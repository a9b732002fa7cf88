"""The server's own record of a run, from which a killed server goes on: its noise key and every q~_t.

    noise.key      256 bits of the operating system, drawn once a run, wiped after its last round
    released.bin   an entry a round: q~_t as its bytes, or the noisy integers it is made of, the link of its noise,
                   a check of both; each is on the disk before a query that depends on it is sent
    sums-T.bin     where the server adds noise: what it keeps of the sums after round T, as secret as the key,
                   wiped when round T + 1 is on the disk
    last.npy, missed.json   where silos may be missing: every silo's last noisy release, if it is needed, and who
                   missed what

Guarantee: a resumed server asks every round's query again byte for byte, and adds the same noise to the same
sums, so that nothing is released that an uninterrupted one would not have released.  An entry that changed on the
disk is never used.  Whoever reads the key can remove a trusted server's noise: the folder is the server's own
(mode 0700, files 0600), and others' permissions on it are refused.
"""

import bisect
import fcntl
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

from fedpriv.core.errors import RunError
from fedpriv.core.files import PRIVATE_MODE, sync_folder, write_bytes, write_json, write_vector
from fedpriv.core.random import system_key
from fedpriv.noise.integers.gaussian import QUERY_CHAIN_BYTES
from fedpriv.plan.plan import Plan
from fedpriv.server.strategy import JournalEntry, MissedRounds

_KEY_BYTES = 32
_CHECKSUM_BYTES = 16


class EntrySizes(NamedTuple):
    """The sizes of a run's entries in its journal."""

    dtype: torch.dtype
    lengths: tuple[int, ...]
    """How many numbers every round has."""
    has_secret_state: bool = False
    """Whether the server keeps something of the silos' sums from round to round."""

    @staticmethod
    def from_plan(plan: Plan) -> "EntrySizes":
        lengths = tuple(planned.stored_length for planned in plan.rounds)
        return EntrySizes(plan.stored_dtype, lengths, plan.sends_round_sums)


class ServerJournal(AbstractContextManager["ServerJournal"]):
    """The journal of one run; one server at a time."""

    def __init__(self, folder: Path, entry_sizes: EntrySizes) -> None:
        """RunError if another server has it, or the folder cannot be used."""
        self._folder, self._dtype, self._has_secret_state = folder, entry_sizes.dtype, entry_sizes.has_secret_state
        self._last_round = len(entry_sizes.lengths)
        sizes = (
            count * self._dtype.itemsize + QUERY_CHAIN_BYTES + _CHECKSUM_BYTES for count in entry_sizes.lengths
        )
        self._entry_ends = [0, *itertools.accumulate(sizes)]
        """Where the entry of round t ends."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            for name in ("noise.key", "released.bin"):
                _refuse_shared(folder / name)
            self._file = os.open(folder / "released.bin", os.O_CREAT | os.O_RDWR, PRIVATE_MODE)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sync_folder(folder)
        except BlockingIOError:
            raise RunError(f"{folder}: another server is working on this run") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be used as the server's journal: {error}") from None
        written = os.fstat(self._file).st_size
        self._round_count = (
            bisect.bisect_right(self._entry_ends, written) - 1
        )  # an entry cut short was never acted on

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load_noise_key(self) -> bytes:
        """The noise key of the run, drawn before its first round; RunError if it is lost after that.

        A tree's noise hangs together over rounds: rows of two keys over the same sums would cancel it.  When all
        rounds are over the key is wiped, nothing is drawn any more, and zeros stand for it.
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
            what = f"{len(key)} bytes" if any(key) else "wiped"
            raise RunError(f"{path}: {what}, a noise key has {_KEY_BYTES} secret ones: start a new run")
        return key

    def close(self) -> None:
        """Let another server have it."""
        os.close(self._file)

    def read_entry(self, t: int) -> JournalEntry | None:
        """RunError if the entry is not what was written."""
        if t > self._round_count:
            return None
        path = self._folder / "released.bin"
        try:
            entry = os.pread(self._file, self._entry_ends[t] - self._entry_ends[t - 1], self._entry_ends[t - 1])
        except OSError as error:
            raise RunError(f"{path}, round {t}: cannot be read: {error}") from None
        body, check = entry[:-_CHECKSUM_BYTES], entry[-_CHECKSUM_BYTES:]
        if check != _checksum(t, body):
            raise RunError(f"{path}, round {t}: the entry is damaged, so the run cannot go on: start a new run")
        return JournalEntry(
            torch.frombuffer(bytearray(body[:-QUERY_CHAIN_BYTES]), dtype=self._dtype), body[-QUERY_CHAIN_BYTES:]
        )

    def load_secret_state(self) -> bytes:
        """Read what the last round kept of the silos' sums, b"" before the first; RunError if it is lost."""
        if not self._round_count or not self._has_secret_state:
            return b""
        path = self._sums_path(self._round_count)
        try:
            whole = path.read_bytes()
        except OSError as error:
            raise RunError(f"{path}: cannot be read, so the run cannot go on: {error}") from None
        check, kept = whole[:_CHECKSUM_BYTES], whole[_CHECKSUM_BYTES:]
        if check != _checksum(self._round_count, kept):
            raise RunError(f"{path}: damaged, so the run cannot go on: start a new run")
        return kept

    def _sums_path(self, t: int) -> Path:
        return self._folder / f"sums-{t}.bin"

    def missed_rounds(self) -> MissedRounds:
        path = self._folder / "missed.json"
        if not path.exists():
            return {}
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return {int(silo): [t for t in rounds if t <= self._round_count] for silo, rounds in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(f"{path}: damaged, so the run cannot go on: {error}") from None

    def last_releases(self) -> Tensor | None:
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
        """RunError if the disk refuses: then nothing that depends on `kept` may leave."""
        if t != self._round_count + 1:
            raise RunError(
                f"round {t} follows round {self._round_count} in the server's journal: rounds come in order"
            )
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
            if self._has_secret_state:  # first: an entry without what it was added to could not be gone on from
                self._wipe_sums(
                    except_round=t - 1
                )  # a server that died before its entry left them, or a draft of them
                write_bytes(self._sums_path(t), _checksum(t, secret_state) + secret_state, PRIVATE_MODE)
                sync_folder(self._folder)
            written = os.pwrite(self._file, body + _checksum(t, body), self._entry_ends[t - 1])
            if written != self._entry_ends[t] - self._entry_ends[t - 1]:
                raise OSError("the disk is full")
            os.fsync(self._file)
            self._wipe_sums(except_round=t)
        except OSError as error:
            raise RunError(
                f"round {t}: the server's journal in {self._folder} could not be written, so nothing is released: "
                f"{error}; make room there, and run the same command with --resume"
            ) from None
        self._round_count = t

    def wipe_key(self) -> None:
        """Forget the noise key and the silos' sums: after the last round nobody needs them.

        Overwritten where they lie and synced before their names go.  A disk or file system that keeps old blocks
        (copy on write, wear levelling, backups) may keep them all the same.
        """
        try:
            for path in (self._folder / "noise.key", *self._folder.glob(".noise.key.*")):
                _wipe(path)
            self._wipe_sums()
            sync_folder(self._folder)
        except OSError as error:
            raise RunError(f"{self._folder}: what is secret could not be wiped: {error}") from None

    def _wipe_sums(self, except_round: int = 0) -> None:
        """Every state of the silos' sums but that of one round, drafts that a killed server left included."""
        for path in (*self._folder.glob("sums-*.bin"), *self._folder.glob(".sums-*.bin.*")):
            if path != self._sums_path(except_round):
                _wipe(path)


def _wipe(path: Path) -> None:
    if path.exists():
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()


def _checksum(t: int, body: bytes) -> bytes:
    return hashlib.sha256(t.to_bytes(8, "big") + body).digest()[:_CHECKSUM_BYTES]


def _refuse_shared(path: Path) -> None:
    if path.exists() and path.stat().st_mode & 0o077:
        raise RunError(f"{path}: others can read it, and with it remove the noise; start a new run")
