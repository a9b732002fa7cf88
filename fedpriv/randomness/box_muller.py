"""From blocks of AES to normals: the transform of Box & Muller 1958, in memory that is kept."""

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

BLOCK_BYTES = 16


class Desk:
    """Working memory for `pairs` normals of each of two parts of `count` streams.

    Fresh pages would cost more than the draws.  A stream's bits are radii first, then angles: the counters here
    are those of the blocks with the radii, and of those with the angles; the first `skipped` words of these are
    left out.
    """

    def __init__(self, count: int, pairs: int, skipped: int, dtype: np.dtype[Any]) -> None:
        per_block = BLOCK_BYTES // dtype.itemsize
        self._radius_blocks, angle_blocks = -(-pairs // per_block), -(-(skipped + pairs) // per_block)
        self.counters = np.empty((count, self._radius_blocks + angle_blocks, 2), np.uint64)
        self.bits = bytearray(self.counters.nbytes + BLOCK_BYTES)  # update_into wants one block to spare
        signed: DTypeLike = np.int32 if dtype.itemsize == 4 else np.int64  # converts faster than unsigned
        words = np.frombuffer(self.bits, signed, count=self.counters.nbytes // dtype.itemsize).reshape(count, -1)
        angles = self._radius_blocks * per_block + skipped
        self._radius_words, self._angle_words = words[:, :pairs], words[:, angles : angles + pairs]
        self._radius, self._angle, self._turned = np.empty((3, count, pairs), dtype)
        self._numbered: tuple[int, int] | None = None

    def number(self, radius: int, angle: int) -> None:
        """Set the lower halves of the counters: blocks `radius`, … of a stream, and blocks `angle`, …"""
        if self._numbered != (radius, angle):
            radii, angles = self.counters[:, : self._radius_blocks, 1], self.counters[:, self._radius_blocks :, 1]
            radii[:] = np.arange(radius, radius + radii.shape[1], dtype=np.uint64)
            angles[:] = np.arange(angle, angle + angles.shape[1], dtype=np.uint64)
            self._numbered = radius, angle

    def normals(self, cosines: NDArray[np.floating], sines: NDArray[np.floating]) -> None:
        """Fill rows by Box-Muller, radius · cos(angle) and radius · sin(angle), as far as they go."""
        radius, angle, turned = self._radius, self._angle, self._turned
        width = self._radius_words.dtype.itemsize * 8
        # The radius word loses its sign and gains half a unit: never log(0), full precision in the tail.
        np.bitwise_and(self._radius_words, 2 ** (width - 1) - 1, out=self._radius_words)
        np.copyto(radius, self._radius_words, casting="unsafe")
        radius += 0.5
        radius *= 2.0 ** (1 - width)
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        np.copyto(angle, self._angle_words, casting="unsafe")
        angle *= 2.0 * math.pi * 2.0**-width
        for turn, out in ((np.cos, cosines), (np.sin, sines)):
            wanted = min(radius.shape[1], out.shape[1])
            np.multiply(turn(angle, out=turned)[:, :wanted], radius[:, :wanted], out=out[:, :wanted])
