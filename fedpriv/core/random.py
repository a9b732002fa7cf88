"""The source of every random number of fedpriv.

Four kinds of stream, and nothing else in the project draws:

* `KeyedNormal`: Gaussian noise as a pure function of (key, owner, round, node).  AES-256 in counter mode (NIST SP
  800-38A; OpenSSL through `cryptography`) yields the bits, the Box-Muller transform (Box & Muller 1958) the
  normals, in memory that is kept (`Workspace`).  The same code serves the two noise regimes; only the key differs:
  derived from the scenario's seed in a simulation, drawn from the operating system in a deployment.
* `KeyedCoins`: coins that fall alike for nobody without the key, for sampling that has to stay secret.
* `KeyedNormal.secret`: an owner's secret for agreeing on keys with others.
* `public_generator`: a NumPy generator for choices that are no secret (which record goes to which silo).

Why not a ready-made generator: keyed streams need a key of at least 128 bits (torch's CPU generator keeps
32 bits of its seed), and this one is also the fastest measured in batches: see benchmarks/noise.py.
"""

import hashlib
import math
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

BLOCK_BYTES = 16


class Workspace:
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
        self._radius_bits, self._angle_words = words[:, :pairs], words[:, angles : angles + pairs]
        self._radius, self._angle, self._rotated = np.empty((3, count, pairs), dtype)
        self._counter_start: tuple[int, int] | None = None

    def set_counters(self, radius: int, angle: int) -> None:
        """Set the lower halves of the counters: blocks `radius`, … of a stream, and blocks `angle`, …"""
        if self._counter_start != (radius, angle):
            radii, angles = self.counters[:, : self._radius_blocks, 1], self.counters[:, self._radius_blocks :, 1]
            radii[:] = np.arange(radius, radius + radii.shape[1], dtype=np.uint64)
            angles[:] = np.arange(angle, angle + angles.shape[1], dtype=np.uint64)
            self._counter_start = radius, angle

    def shift_to_nodes(self, nodes: NDArray[np.uint64]) -> None:
        """Move each stream's numbered counters, of node 0, to its own of `nodes` (count,)."""
        self.counters[:, :, 1] += nodes[:, None] * np.uint64(_UINT32_RANGE)
        self._counter_start = None

    def fill_normals(self, cosines: NDArray[np.floating], sines: NDArray[np.floating]) -> None:
        """Fill rows by Box-Muller, radius · cos(angle) and radius · sin(angle), as far as they go."""
        radius, angle, turned = self._radius, self._angle, self._rotated
        width = self._radius_bits.dtype.itemsize * 8
        # The radius word loses its sign and gains half a unit: never log(0), full precision in the tail.
        np.bitwise_and(self._radius_bits, 2 ** (width - 1) - 1, out=self._radius_bits)
        np.copyto(radius, self._radius_bits, casting="unsafe")
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


SERVER = 0xFFFF_FFFF
"""The owner number under which the server draws its own noise; silos are numbered from 0."""

_UINT32_RANGE = 2**32
MAX_VALUES_PER_DRAW = 65_536
"""Values that are drawn at a time, in one piece: Box-Muller temporaries stay in the second-level cache."""
_MAX_WORKSPACES = 4


def derive_key(secret: bytes, *purpose: str) -> bytes:
    """A 256-bit key for one purpose, from a secret of any length (SHA-256 of the length-prefixed parts)."""
    digest = hashlib.sha256()
    for part in (b"fedpriv", secret, *(text.encode() for text in purpose)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def seed_key(seed: int, *purpose: str) -> bytes:
    """The simulation's key: public, reproducible, any non-negative integer seed gives its own key."""
    if seed < 0:
        raise ValueError(f"seed = {seed}: a seed is a non-negative integer")
    return derive_key(str(seed).encode(), "seed", *purpose)


def system_key() -> bytes:
    """A fresh 256-bit secret from the operating system, for noise that is really released."""
    return secrets.token_bytes(32)


def public_generator(seed: int, *purpose: str) -> np.random.Generator:
    """A generator for public choices; Philox with a 128-bit key, one stream per (seed, purpose)."""
    key = int.from_bytes(seed_key(seed, *purpose)[:16], "big")
    return np.random.Generator(np.random.Philox(key=key))


class KeyedNormal:
    """Standard normal vectors, each a pure function of (key, owner, round, node).

    Guarantee: distinct (owner, round, node) read disjoint AES counter ranges, so the vectors are independent
    for anyone who does not hold the key, and asking twice returns the same bytes.  float32 draws carry 31-bit
    radii (|z| <= 6.6), float64 draws 63-bit radii (|z| <= 9.4); both are ordinary floating-point numbers, not
    a defence against attacks on the lowest bits of a float.  One object serves one thread at a time.
    """

    def __init__(self, key: bytes, dtype: DTypeLike = np.float32) -> None:
        if len(key) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(key)}")
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"noise is drawn in float32 or float64, not {self.dtype}")
        self._encrypt = _block_cipher(key)
        self._sampling_key, self._secrets_key = derive_key(key, "coins"), derive_key(key, "key agreement")
        self._workspaces: OrderedDict[tuple[int, int, int], Workspace] = OrderedDict()

    def sampling_randomness(self) -> "SamplingRandomness":
        """Secret coins for the holder of this key, under a key of their own derived from it."""
        return SamplingRandomness(self._sampling_key)

    def derive_secret(self, owner: int) -> bytes:
        """256 bits that only who holds this key knows, one secret an owner, unrelated to any noise."""
        return derive_key(self._secrets_key, str(owner))

    def vector(self, size: int, owner: int, t: int, node: int = 0) -> NDArray[np.floating]:
        """The vector of shape (size,) that belongs to (owner, round t, node)."""
        return self.vectors(size, [owner], [t], node).reshape(size)

    def vector_slice(
        self, size: int, first: int, last: int, owner: int, t: int, node: int = 0
    ) -> NDArray[np.floating]:
        """Values `first` … `last`-1 of `vector(size, owner, t, node)`, in memory for no more than these."""
        out, (half, _) = np.empty(last - first, self.dtype), self._chunks(1, size)
        per_block, streams = BLOCK_BYTES // self.dtype.itemsize, _stream_counters([owner], [t])
        for turn, begins in enumerate((0, half)):  # cosines come first, then the sines of the same pairs
            start, stop = max(first - begins, 0), min(last - begins, half)
            while start < stop:
                aligned = start // per_block * per_block
                end = min(stop, aligned + MAX_VALUES_PER_DRAW)
                drawn = np.empty((2, 1, end - aligned), self.dtype)
                self._draw_pairs(drawn[0], drawn[1], streams, node, (aligned, half))
                place = begins + start - first
                out[place : place + end - start] = drawn[turn, 0, start - aligned :]
                start = end
        return out

    def vectors(
        self, size: int, owners: Sequence[int], rounds: Sequence[int], node: int = 0
    ) -> NDArray[np.floating]:
        """One vector for each pair of `owners` and `rounds` (equally long): shape (len(owners), size)."""
        out = np.empty((len(owners), size), self.dtype)
        rows = max(1, MAX_VALUES_PER_DRAW // max(size, 1))
        for start in range(0, len(owners), rows):
            stop = start + rows
            self._fill(out[start:stop], owners[start:stop], rounds[start:stop], node)
        return out

    def node_vectors(self, size: int, owner: int, t: int, count: int) -> NDArray[np.floating]:
        """The vectors of nodes 0 … count-1 of (owner, round t): shape (count, size)."""
        return np.stack([self.vector(size, owner, t, node) for node in range(count)])

    def row_vectors(
        self, size: int, owners: NDArray[np.int64], t: int, rows: NDArray[np.int64]
    ) -> NDArray[np.floating]:
        """`vector(size, owners[b], t, node=rows[b])` for every b, side by side: (len(rows), size)."""
        out = np.empty((len(rows), size), self.dtype)
        together = max(1, MAX_VALUES_PER_DRAW // max(size, 1))
        for start in range(0, len(rows), together):
            some = slice(start, start + together)
            of_round = [t] * len(out[some])
            self._fill(out[some], owners[some].tolist(), of_round, rows[some].astype(np.uint64))
        return out

    def weighted_sum(
        self,
        size: int,
        owners: Sequence[int],
        weights: Sequence[float],
        t: int,
        node: int = 0,
        out: NDArray[np.floating] | None = None,
    ) -> NDArray[np.floating]:
        """Σ_k weights[k] · vector(size, owners[k], t, node), written into `out` if it is given.

        Short vectors are drawn several at a time, and long ones piece by piece, owner after owner.
        """
        total = np.empty(size, self.dtype) if out is None else out
        total[:] = 0.0
        half, pieces = self._chunks(1, size)
        if len(pieces) > 1:
            for start, pairs in pieces:
                parts = total[start:half], total[half + start :]
                part = np.empty((2, 1, pairs), self.dtype)
                for owner, weight in zip(owners, weights, strict=True):
                    self._draw_pairs(part[0], part[1], _stream_counters([owner], [t]), node, (start, half))
                    for into, drawn in zip(parts, part, strict=True):
                        into = into[:pairs]
                        _add_scaled(into, weight, drawn[0, : len(into)])
            return total
        rows = max(1, MAX_VALUES_PER_DRAW // max(size, 1))
        several = np.empty((min(rows, len(owners)), size), self.dtype)  # once: fresh pages cost as much as draws
        for start in range(0, len(owners), rows):
            chunk = owners[start : start + rows]
            drawn = several[: len(chunk)]
            self._fill(drawn, chunk, [t] * len(chunk), node)
            for weight, vector in zip(weights[start : start + rows], drawn, strict=True):
                _add_scaled(total, weight, vector)
        return total

    def _fill(
        self,
        out: NDArray[np.floating],
        owners: Sequence[int],
        rounds: Sequence[int],
        node: int | NDArray[np.uint64],
    ) -> None:
        if not out.size:  # of a round into which no client was drawn
            return
        half, pieces = self._chunks(*out.shape)
        for start, pairs in pieces:
            cosines, sines = out[:, start : min(half, start + pairs)], out[:, half + start : half + start + pairs]
            self._draw_pairs(cosines, sines, _stream_counters(owners, rounds), node, (start, half))

    def _chunks(self, count: int, size: int) -> tuple[int, list[tuple[int, int]]]:
        """Number of pairs of normals in a vector, and the pieces they are drawn in, (first, how many)."""
        per_block = BLOCK_BYTES // self.dtype.itemsize
        half = -(-size // per_block) * per_block // 2
        most = max(1, MAX_VALUES_PER_DRAW // (2 * count * per_block)) * per_block
        if count * size <= MAX_VALUES_PER_DRAW:
            most = max(half, 1)
        return half, [(start, min(most, half - start)) for start in range(0, half, most)]

    def _draw_pairs(
        self,
        cosines: NDArray[np.floating],
        sines: NDArray[np.floating],
        streams: NDArray[np.uint64],
        node: int | NDArray[np.uint64],
        place: tuple[int, int],
    ) -> None:
        """The pairs from `place` on, (first, half of all), each row of a stream, as far as the two parts go.

        `node` is that of all streams, or has one for each.
        """
        (start, half), per_block = place, BLOCK_BYTES // self.dtype.itemsize
        single, nodes = (node, None) if isinstance(node, int) else (int(node.max()), node)
        if not 0 <= single < _UINT32_RANGE or 2 * half >= _UINT32_RANGE * per_block:
            raise ValueError(f"node {single} or vector length {2 * half} is outside what one stream can number")
        desk = self._find_workspace(len(streams), cosines.shape[1], (half + start) % per_block)
        desk.counters[:, :, 0] = streams[:, None]
        base = single * _UINT32_RANGE if nodes is None else 0
        desk.set_counters(base + start // per_block, base + (half + start) // per_block)
        if nodes is not None:
            desk.shift_to_nodes(nodes)
        self._encrypt.update_into(desk.counters.data.cast("B"), desk.bits)
        desk.fill_normals(cosines, sines)

    def _find_workspace(self, count: int, pairs: int, skipped: int) -> Workspace:
        """The desk of this shape; few are kept, for the long and the short pieces of what is drawn in turns."""
        shape = (count, pairs, skipped)
        desk = self._workspaces.pop(shape, None) or Workspace(count, pairs, skipped, self.dtype)
        if len(self._workspaces) >= _MAX_WORKSPACES:
            self._workspaces.popitem(last=False)
        self._workspaces[shape] = desk
        return desk


class SamplingRandomness:
    """Independent coins, each a pure function of (key, owner, round, place).

    Guarantee: for anyone who does not hold the key the coins are independent, and each falls on heads with at
    most the probability asked for, and less by at most 2^-63.  Numbers are independent of coins and of each
    other, and exactly uniform.
    """

    def __init__(self, key: bytes) -> None:
        self._encrypt, self._encrypt_numbers = _block_cipher(key), _block_cipher(derive_key(key, "numbers"))

    def bernoulli(self, count: int, probability: float, owner: int, t: int) -> NDArray[np.bool_]:
        """Toss the coins of places 0 … count-1; True for heads, shape (count,); 0 ≤ `probability` ≤ 1."""
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"probability = {probability}: it lies between 0 and 1")
        words = _random_bits(self._encrypt, count, owner, t, 0)
        fallen: NDArray[np.bool_] = (words >> np.uint64(1)) < np.uint64(int(probability * 2.0**63))
        return fallen

    def numbers(self, count: int, choices: int, owner: int, t: int) -> NDArray[np.int64]:
        """A number of 0 … choices-1 for each of the places 0 … count-1, shape (count,); 1 ≤ `choices` ≤ 2^32.

        Words at the end of the range of 64 bits, where some numbers would be likelier, are drawn again.
        """
        if not 1 <= choices <= _UINT32_RANGE:
            raise ValueError(f"choices = {choices}: a number is drawn among 1 to {_UINT32_RANGE}")
        last = np.uint64(2**64 - 2**64 % choices - 1)
        words = _random_bits(self._encrypt_numbers, count, owner, t, 0)
        attempt = 0
        while (again := words > last).any():
            attempt += 1
            words = np.where(again, _random_bits(self._encrypt_numbers, count, owner, t, attempt), words)
        return (words % np.uint64(choices)).astype(np.int64)


def _add_scaled(total: NDArray[np.floating], weight: float, vector: NDArray[np.floating]) -> None:
    """Add weight · vector, which is scaled in place."""
    if weight != 1.0:
        vector *= weight
    total += vector


def _block_cipher(key: bytes) -> "CipherContext":
    """AES that encrypts counters one by one: one block a counter value."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # no query draws anything

    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()


def _stream_counters(owners: Sequence[int], rounds: Sequence[int]) -> NDArray[np.uint64]:
    """The upper halves of the counters that belong to pairs of owners and rounds."""
    upper: NDArray[np.uint64] = np.asarray(owners, np.uint64) * np.uint64(_UINT32_RANGE) + np.asarray(
        rounds, np.uint64
    )
    return upper


def integer_noise_key(seed: int) -> bytes:
    """The key of a simulation's exact releases: a function of the scenario's seed, and no secret."""
    return seed_key(seed, "integers")


class RowRandomIntegers:
    """Public numbers for rows of a silo, each a pure function of (key, silo, round, row).

    Guarantee: the numbers of a row do not depend on which other rows are asked for, and asking for a row takes the
    same calls whichever it is.
    """

    def __init__(self, key: bytes) -> None:
        self._encrypt = _block_cipher(key)

    def draw(
        self, rows: NDArray[np.int64], choices: NDArray[np.int64], owners: NDArray[np.int64], t: int
    ) -> NDArray[np.int64]:
        """Draw one number of 0 … choices[k]-1 for each row and every k: (*rows.shape, len(choices)).

        Numbers are words of 64 bits modulo `choices`, off uniform by less than choices / 2^64.

        Args:
            rows: Row indices, (..., B).
            choices: Numbers to choose from, (k,).
            owners: The silo of each row, (B,).
            t: The round.
        """
        blocks = -(-len(choices) * 8 // BLOCK_BYTES)
        counters = np.empty((*rows.shape, blocks, 2), np.uint64)
        counters[..., 0] = (owners.astype(np.uint64) * np.uint64(_UINT32_RANGE) + np.uint64(t))[:, None]
        counters[..., 1] = rows.astype(np.uint64)[..., None] * np.uint64(blocks) + np.arange(
            blocks, dtype=np.uint64
        )
        words = np.frombuffer(self._encrypt.update(counters.tobytes()), np.uint64)
        drawn = words.reshape(*rows.shape, -1)[..., : len(choices)] % choices.astype(np.uint64)
        return drawn.astype(np.int64)


def _random_bits(encrypt: "CipherContext", count: int, owner: int, t: int, attempt: int) -> NDArray[np.uint64]:
    """64 secret bits for each of the places 0 … count-1 of (owner, round t), others every attempt; (count,)."""
    counters = np.empty((-(-count * 8 // BLOCK_BYTES), 2), np.uint64)
    counters[:, 0] = _stream_counters([owner], [t])
    counters[:, 1] = np.arange(attempt * _UINT32_RANGE, attempt * _UINT32_RANGE + len(counters), dtype=np.uint64)
    return np.frombuffer(encrypt.update(counters.tobytes()), np.uint64)[:count]


def simulation_noise(seed: int, dtype: DTypeLike) -> KeyedNormal:
    """The noise of a simulation: every owner's streams from the scenario's seed, reproducible and no secret."""
    return KeyedNormal(seed_key(seed, "noise"), dtype)
