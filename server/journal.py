"""The server's own record of a run, from which a killed server goes on: its noise key and every q~_t.

    noise.key      256 bits of the operating system, drawn once a run, wiped after its last round
    released.bin   an entry a round: q~_t as its bytes, the link of its noise, a check of both; each is on the disk
                   before a query that depends on it is sent
    last.npy, missed.json   where silos may be missing: every silo's last noisy release, and who missed what

Guarantee: a resumed server asks every round's query again byte for byte, and adds the same noise to the same
sums, so that nothing is released that an uninterrupted one would not have released.  An entry that changed on the
disk is never used.  Whoever reads the key can remove a trusted server's noise: the folder is the server's own
(mode 0700, files 0600), and others' permissions on it are refused.
"""

import fcntl
import hashlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.files import OWN, sync_folder, write_bytes, write_json, write_vector
from fedpriv.randomness import system_key
from fedpriv.server.noise import Released
from fedpriv.server.noise_chain import LINK_BYTES
from fedpriv.server.strategy import Missed

_KEY_BYTES = 32
_CHECK_BYTES = 16


class ServerJournal(AbstractContextManager["ServerJournal"]):
    """The journal of one run, for vectors of `dimension` values of type `dtype`; one server at a time."""

    def __init__(self, folder: Path, dimension: int, dtype: torch.dtype) -> None:
        """RunError if another server has it, or the folder cannot be used."""
        self._folder, self._dtype = folder, dtype
        self._vector_bytes = dimension * dtype.itemsize
        self._entry_bytes = self._vector_bytes + LINK_BYTES + _CHECK_BYTES
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            for name in ("noise.key", "released.bin"):
                _refuse_shared(folder / name)
            self._file = os.open(folder / "released.bin", os.O_CREAT | os.O_RDWR, OWN)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sync_folder(folder)
        except BlockingIOError:
            raise RunError(f"{folder}: another server is working on this run") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be used as the server's journal: {error}") from None
        self._rounds = os.fstat(self._file).st_size // self._entry_bytes  # an entry cut short was never acted on

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def key(self, rounds: int) -> bytes:
        """The noise key of a run of so many rounds, drawn before the first; RunError if it is lost after that.

        A tree's noise hangs together over rounds: rows of two keys over the same sums would cancel it.  When all
        rounds are over the key is wiped, nothing is drawn any more, and zeros stand for it.
        """
        path = self._folder / "noise.key"
        if self._rounds >= rounds:
            return bytes(_KEY_BYTES)
        if self._rounds and not path.exists():
            raise RunError(
                f"{path}: lost, so that the noise of {self._rounds} rounds cannot go on: start a new run"
            )
        try:
            if not path.exists():
                write_bytes(path, system_key(), OWN)
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

    def released(self, t: int) -> Released | None:
        """RunError if the entry is not what was written."""
        if t > self._rounds:
            return None
        path = self._folder / "released.bin"
        try:
            entry = os.pread(self._file, self._entry_bytes, (t - 1) * self._entry_bytes)
        except OSError as error:
            raise RunError(f"{path}, round {t}: cannot be read: {error}") from None
        body, check = entry[:-_CHECK_BYTES], entry[-_CHECK_BYTES:]
        if len(entry) != self._entry_bytes or check != _check(t, body):
            raise RunError(f"{path}, round {t}: the entry is damaged, so the run cannot go on: start a new run")
        vector = torch.frombuffer(bytearray(body[: self._vector_bytes]), dtype=self._dtype)
        return Released(vector, body[self._vector_bytes :])

    def missed(self) -> Missed:
        path = self._folder / "missed.json"
        if not path.exists():
            return {}
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return {int(silo): [t for t in rounds if t <= self._rounds] for silo, rounds in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(f"{path}: damaged, so the run cannot go on: {error}") from None

    def last(self) -> Tensor | None:
        path = self._folder / "last.npy"
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False)) if path.exists() else None
        except (OSError, ValueError, EOFError) as error:
            raise RunError(f"{path}: damaged, so the run cannot go on: {error}") from None

    def record(self, t: int, released: Released, missed: Missed, last: Tensor | None) -> None:
        """RunError if the disk refuses: then nothing that depends on `released` may leave."""
        if t != self._rounds + 1:
            raise RunError(f"round {t} follows round {self._rounds} in the server's journal: rounds come in order")
        vector = released.vector.contiguous().numpy().tobytes()
        body = vector + released.link.ljust(LINK_BYTES, b"\0")
        try:
            if last is not None:
                write_vector(self._folder / "last.npy", last.numpy(), OWN)
                by_silo = {str(silo): rounds for silo, rounds in missed.items()}
                write_json(self._folder / "missed.json", by_silo, OWN)
            written = os.pwrite(self._file, body + _check(t, body), (t - 1) * self._entry_bytes)
            if written != self._entry_bytes:
                raise OSError("the disk is full")
            os.fsync(self._file)
        except OSError as error:
            raise RunError(
                f"round {t}: the server's journal could not be written, so nothing is released: {error}"
            ) from None
        self._rounds = t

    def wipe_key(self) -> None:
        """Forget the noise key: after the last round nobody needs it.

        Overwritten where it lies and synced before its name goes.  A disk or file system that keeps old blocks
        (copy on write, wear levelling, backups) may keep them all the same.
        """
        path = self._folder / "noise.key"
        try:
            if path.exists():
                with path.open("r+b") as file:
                    file.write(bytes(_KEY_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
                path.unlink()
                sync_folder(self._folder)
        except OSError as error:
            raise RunError(f"{path}: the noise key could not be wiped: {error}") from None


def _check(t: int, body: bytes) -> bytes:
    return hashlib.sha256(t.to_bytes(8, "big") + body).digest()[:_CHECK_BYTES]


def _refuse_shared(path: Path) -> None:
    if path.exists() and path.stat().st_mode & 0o077:
        raise RunError(f"{path}: others can read it, and with it remove the noise; start a new run")
