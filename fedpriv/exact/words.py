"""Masked sums in words of w bits: the low w/8 bytes of every word travel, and the server adds modulo 2^w."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import RunError
from fedpriv.exact.fixed_point import Ints

Words = NDArray[np.uint64]
_LITTLE = np.dtype("<u8")


def packed(noisy: Ints, mask: Words, word: int) -> bytes:
    """A silo's y (any shape), plus its mask of that shape, as words of `word` bits (8 to 64), little-endian."""
    words = (noisy.view(np.uint64) + mask).astype(_LITTLE)
    return words.reshape(-1, 1).view(np.uint8)[:, : word // 8].tobytes()


def sum_of(messages: Sequence[bytes], word: int, shape: tuple[int, ...]) -> Ints:
    """The sum of all silos' y, exact if it lies within ±2^(word-1); RunError for a message of another length.

    Beyond, it wraps: the model is wrong then, not the noise smaller, since the residue is a function of the sum.
    """
    width, count = word // 8, int(np.prod(shape))
    total = np.zeros(count, np.uint64)
    for silo, message in enumerate(messages):
        if len(message) != width * count:
            raise RunError(f"message {silo} has {len(message)} bytes, expected {width * count}")
        padded = np.zeros((count, 8), np.uint8)
        padded[:, :width] = np.frombuffer(message, np.uint8).reshape(count, width)
        total += padded.view(_LITTLE).ravel().astype(np.uint64)
    unused = 64 - word
    signed: Ints = (total << np.uint64(unused)).view(np.int64) >> np.int64(unused)
    return signed.reshape(shape)
