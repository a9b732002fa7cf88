"""The server's own record of a run, from which a killed server goes on: its noise key and every q~_t.

    noise.key      256 bits of the operating system, drawn once a run, wiped after its last round
    released.bin   q~_1, q~_2, … as their bytes, each on the disk before a query that depends on it is sent
    last.npy, missed.json   where silos may be missing: every silo's last noisy release, and who missed what

Guarantee: a resumed server asks every round's query again byte for byte, and adds the same noise to the same
sums, so that nothing is released that an uninterrupted one would not have released.  Whoever reads the key can
remove a trusted server's noise: the folder is the server's own (mode 0700, files 0600).
"""

import fcntl
import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.files import write_json, write_vector
from fedpriv.randomness import system_key
from server.strategy import Missed

_OWN = 0o600


class ServerJournal:
    """The journal of one run, for vectors of `dimension` values of type `dtype`; one server at a time."""

    def __init__(self, folder: Path, dimension: int, dtype: torch.dtype) -> None:
        """RunError if another server has it, or the folder cannot be used."""
        self._folder, self._dtype = folder, dtype
        self._bytes = dimension * dtype.itemsize
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(folder / "released.bin", os.O_CREAT | os.O_RDWR, _OWN)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder}: another server is working on this run") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be used as the server's journal: {error}") from None
        self._rounds = os.fstat(self._file).st_size // self._bytes  # a last entry cut short was never acted on

    def key(self, rounds: int) -> bytes:
        """The noise key of a run of so many rounds, drawn before the first; RunError if it is lost after that.

        A tree's noise hangs together over rounds: rows of two keys over the same sums would cancel it.  When all
        rounds are over the key is wiped, nothing is drawn any more, and zeros stand for it.
        """
        path = self._folder / "noise.key"
        if self._rounds >= rounds:
            return bytes(32)
        if self._rounds and not path.exists():
            raise RunError(
                f"{path}: lost, so that the noise of {self._rounds} rounds cannot go on: start a new run"
            )
        try:
            if not path.exists():
                draft = path.with_suffix(".draft")
                draft.unlink(missing_ok=True)
                descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _OWN)
                os.write(descriptor, system_key())
                os.fsync(descriptor)
                os.close(descriptor)
                draft.replace(path)
            return path.read_bytes()
        except OSError as error:
            raise RunError(f"{path}: the noise key cannot be kept, so nothing is released: {error}") from None

    def close(self) -> None:
        """Let another server have it."""
        os.close(self._file)

    def released(self, t: int) -> Tensor | None:
        if t > self._rounds:
            return None
        return torch.frombuffer(
            bytearray(os.pread(self._file, self._bytes, (t - 1) * self._bytes)), dtype=self._dtype
        )

    def missed(self) -> Missed:
        path = self._folder / "missed.json"
        if not path.exists():
            return {}
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {int(silo): [t for t in rounds if t <= self._rounds] for silo, rounds in kept.items()}

    def last(self) -> Tensor | None:
        path = self._folder / "last.npy"
        return torch.from_numpy(np.load(path, allow_pickle=False)) if path.exists() else None

    def record(self, t: int, released: Tensor, missed: Missed, last: Tensor | None) -> None:
        """RunError if the disk refuses: then nothing that depends on `released` may leave."""
        if t != self._rounds + 1:
            raise RunError(f"round {t} follows round {self._rounds} in the server's journal: rounds come in order")
        try:
            if last is not None:
                write_vector(self._folder / "last.npy", last.numpy())
                write_json(self._folder / "missed.json", {str(silo): rounds for silo, rounds in missed.items()})
            written = os.pwrite(self._file, released.contiguous().numpy().tobytes(), (t - 1) * self._bytes)
            if written != self._bytes:
                raise OSError("the disk is full")
            os.fsync(self._file)
        except OSError as error:
            raise RunError(
                f"round {t}: the server's journal could not be written, so nothing is released: {error}"
            ) from None
        self._rounds = t

    def wipe_key(self) -> None:
        """Forget the noise key: after the last round nobody needs it."""
        path = self._folder / "noise.key"
        if path.exists():
            path.write_bytes(bytes(32))
            path.unlink()
