"""A silo's records as they lie on its disk."""

import hashlib
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedpriv.data.own import check_records
from fedpriv.errors import InputError


@dataclass(frozen=True)
class Shard:
    """Records in the order in which they are read."""

    images: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    labels: np.ndarray[tuple[int, ...], np.dtype[np.int64]]

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 of the arrays: which records, in which order."""
        digest = hashlib.sha256()
        for values in (self.images, self.labels):
            digest.update(f"{values.dtype.str} {values.shape} ".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.digest()


def load_shard(path: Path, classes: int) -> Shard:
    """Read and check a silo's records; InputError if they are not what `data.own` takes."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: expected an .npz file with `images` and `labels` ({error})") from None
    check_records(images, labels, classes, str(path))
    shard = Shard(images, labels.astype(np.int64 if classes else np.float64))
    for values in (shard.images, shard.labels):
        values.flags.writeable = False  # what was fingerprinted is what is read
    return shard
