"""Random numbers: keyed noise, sampling randomness, secrets, and public choices.

Keyed numbers are pure functions of a key, a party (a silo's number or `SERVER`), a round and more.
AES-256 in counter mode (NIST SP 800-38A) gives the bits, and the Box-Muller transform (Box & Muller 1958) makes
normal numbers of them.

A stream is the vectors of one party and round, and the node numbers the vectors in a stream.  A block is the 16
bytes that AES makes of one counter, for 4 float32 or 2 float64 numbers.  A vector whose length, rounded up to
whole blocks, is 2 h is made of h pairs (radius · cos, radius · sin): the cosines come first and then the sines, as
many as the vector has room for.
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
    """Reused memory for `pairs` pairs of normals of each of `count` streams.

    The first h numbers of a vector's bits are for the radii of its h pairs, and the next h for the angles.  So a
    draw of some of the pairs reads two ranges of blocks, one of radii and one of angles.
    """

    def __init__(self, count: int, pairs: int, skipped: int, dtype: np.dtype[Any]) -> None:
        """Allocate AES counters and their bits, and views of the bits of radii and angles.

        Args:
            count: Number of streams.
            pairs: Number of pairs of normals of each stream.
            skipped: Number of values in the first block of the angles that come before the angles.  Angles begin h
                numbers behind their radii, so that they can begin inside a block.  Radii begin at a whole block.
            dtype: float32 or float64, the type of the normals.
        """
        per_block = BLOCK_BYTES // dtype.itemsize
        self._radius_blocks, angle_blocks = -(-pairs // per_block), -(-(skipped + pairs) // per_block)
        self.counters = np.empty((count, self._radius_blocks + angle_blocks, 2), np.uint64)
        self.bits = bytearray(self.counters.nbytes + BLOCK_BYTES)  # update_into asks for nearly a block more
        integer_type: DTypeLike = np.int32 if dtype.itemsize == 4 else np.int64  # converts faster than unsigned
        integers = np.frombuffer(self.bits, integer_type, count=self.counters.nbytes // dtype.itemsize).reshape(
            count, -1
        )
        angle_start = self._radius_blocks * per_block + skipped
        self._radius_bits, self._angle_bits = (
            integers[:, :pairs],
            integers[:, angle_start : angle_start + pairs],
        )
        self._radius, self._angle, self._rotated = np.empty((3, count, pairs), dtype)
        self._counter_start: tuple[int, int] | None = None

    def set_counters(self, radius: int, angle: int) -> None:
        """Set the lower halves of the counters, with `radius` and `angle` for the first blocks of both."""
        if self._counter_start != (radius, angle):
            radii, angles = self.counters[:, : self._radius_blocks, 1], self.counters[:, self._radius_blocks :, 1]
            radii[:] = np.arange(radius, radius + radii.shape[1], dtype=np.uint64)
            angles[:] = np.arange(angle, angle + angles.shape[1], dtype=np.uint64)
            self._counter_start = radius, angle

    def shift_to_nodes(self, nodes: NDArray[np.uint64]) -> None:
        """Shift each stream's counters from node 0 to its entry of `nodes`, (count,)."""
        self.counters[:, :, 1] += nodes[:, None] * np.uint64(_UINT32_RANGE)
        self._counter_start = None

    def fill_normals(self, cosines: NDArray[np.floating], sines: NDArray[np.floating]) -> None:
        """Fill rows with the Box-Muller normals radius · cos(angle) and radius · sin(angle).

        A pair is made of two random w-bit integers of `bits`, a and b, for w = 32 in float32 and 64 in float64.
        Up to rounding, its radius is √(-2 ln((a' + 1/2) / 2^(w-1))), where a' is a without its sign bit, and its
        angle is 2π b / 2^w.  The bits of the radii are overwritten.

        Args:
            cosines: First normal of each pair, (count, at most `pairs`), written.
            sines: Second normal of each pair, (count, at most `pairs`), written.
        """
        radius, angle, rotated = self._radius, self._angle, self._rotated
        width = self._radius_bits.dtype.itemsize * 8
        # A radius's integer loses its sign bit and gains 1/2, so that log(0) cannot occur and the tail is precise.
        np.bitwise_and(self._radius_bits, 2 ** (width - 1) - 1, out=self._radius_bits)
        np.copyto(radius, self._radius_bits, casting="unsafe")
        radius += 0.5
        radius *= 2.0 ** (1 - width)
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        np.copyto(angle, self._angle_bits, casting="unsafe")
        angle *= 2.0 * math.pi * 2.0**-width
        for function, normals in ((np.cos, cosines), (np.sin, sines)):
            pair_count = min(radius.shape[1], normals.shape[1])
            np.multiply(
                function(angle, out=rotated)[:, :pair_count], radius[:, :pair_count], out=normals[:, :pair_count]
            )


SERVER = 0xFFFF_FFFF
"""Party number of the server, while silos are numbered from 0."""

_UINT32_RANGE = 2**32
MAX_VALUES_PER_DRAW = 65_536
"""Approximate number of values drawn at once, so that temporaries stay in the second-level cache."""
_MAX_WORKSPACES = 4


def derive_key(secret: bytes, *purpose: str) -> bytes:
    """Derive a 256-bit key for one purpose from a secret of any length.

    The key is the SHA-256 digest of the length-prefixed parts.
    """
    digest = hashlib.sha256()
    for part in (b"fedpriv", secret, *(text.encode() for text in purpose)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def seed_key(seed: int, *purpose: str) -> bytes:
    """Derive a public and reproducible key from a seed, a non-negative integer.

    Raises:
        ValueError: The seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed = {seed}: a seed is a non-negative integer")
    return derive_key(str(seed).encode(), "seed", *purpose)


def system_key() -> bytes:
    """Draw a new 256-bit secret from the operating system."""
    return secrets.token_bytes(32)


def public_generator(seed: int, *purpose: str) -> np.random.Generator:
    """Return a Philox generator for public choices, with a 128-bit key for each (seed, purpose)."""
    key = int.from_bytes(seed_key(seed, *purpose)[:16], "big")
    return np.random.Generator(np.random.Philox(key=key))


class KeyedNormal:
    """Standard normal vectors, each a pure function of (key, party, round, node), its length and type.

    Party, round and node are integers from 0 to 2^32 - 1.  Vectors of two lengths or types for one (party, round,
    node) share bits, so that a caller must keep to one length and type.

    Guarantee: distinct (party, round, node) read disjoint AES counter ranges, so that the vectors are independent
    for everyone who does not hold the key, as far as AES-256 is a pseudorandom function.  A repeated call returns
    the same bytes.  float32 draws have 31-bit radii (|z| <= 6.67), float64 draws 63-bit radii (|z| <= 9.42).  Both
    are ordinary floating-point numbers, and no defence against attacks on the lowest bits of a float.  One object
    serves one thread at a time.
    """

    def __init__(self, key: bytes, dtype: DTypeLike = np.float32) -> None:
        """Derive the streams from a key of 32 bytes, for vectors in float32 or float64.

        Raises:
            ValueError: The key has another length, or the type is another one.
            TypeError: NumPy has no such type.
        """
        if len(key) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(key)}")
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"noise is drawn in float32 or float64, not {self.dtype}")
        self._encrypt = _block_cipher(key)
        # The keys depend on these names, which therefore stay as they are.
        self._sampling_key, self._secrets_key = derive_key(key, "coins"), derive_key(key, "key agreement")
        self._workspaces: OrderedDict[tuple[int, int, int], Workspace] = OrderedDict()

    def sampling_randomness(self) -> "SamplingRandomness":
        """Return the sampling randomness of this key's holder, under a separate derived key."""
        return SamplingRandomness(self._sampling_key)

    def derive_secret(self, party: int) -> bytes:
        """Derive a party's 256-bit secret, under a separate derived key."""
        return derive_key(self._secrets_key, str(party))

    def vector(self, size: int, party: int, t: int, node: int = 0) -> NDArray[np.floating]:
        """Return the vector (size,) of (party, round t, node)."""
        return self.vectors(size, [party], [t], node).reshape(size)

    def vector_slice(
        self, size: int, first: int, last: int, party: int, t: int, node: int = 0
    ) -> NDArray[np.floating]:
        """Return values `first` … `last`-1 of `vector(size, party, t, node)`, (last - first,).

        Args:
            size: Number of values of the whole vector.
            first: Index of the first value that is returned, 0 or more.
            last: Index behind the last one, at most `size`.
            party: Party of the vector.
            t: Round.
            node: Number of the vector in its stream.

        Raises:
            ValueError: The node is out of range, or the vector is too long.
        """
        out, (half, _) = np.empty(last - first, self.dtype), self._chunks(1, size)
        per_block, streams = BLOCK_BYTES // self.dtype.itemsize, _stream_counters([party], [t])
        # The first half of a vector has the cosines of its pairs, and the second half their sines.
        for half_index, half_start in enumerate((0, half)):
            start, stop = max(first - half_start, 0), min(last - half_start, half)
            while start < stop:
                aligned = start // per_block * per_block
                end = min(stop, aligned + MAX_VALUES_PER_DRAW)
                normals = np.empty((2, 1, end - aligned), self.dtype)
                self._draw_pairs(normals[0], normals[1], streams, node, (aligned, half))
                offset = half_start + start - first
                out[offset : offset + end - start] = normals[half_index, 0, start - aligned :]
                start = end
        return out

    def vectors(
        self, size: int, parties: Sequence[int], rounds: Sequence[int], node: int = 0
    ) -> NDArray[np.floating]:
        """Return `vector(size, parties[i], rounds[i], node)` for every i, stacked: (len(parties), size)."""
        out = np.empty((len(parties), size), self.dtype)
        rows_per_draw = max(1, MAX_VALUES_PER_DRAW // max(size, 1))
        for start in range(0, len(parties), rows_per_draw):
            stop = start + rows_per_draw
            self._fill(out[start:stop], parties[start:stop], rounds[start:stop], node)
        return out

    def node_vectors(self, size: int, party: int, t: int, count: int) -> NDArray[np.floating]:
        """Return the vectors of nodes 0 … count-1 of (party, round t), (count, size), for a count above 0."""
        return np.stack([self.vector(size, party, t, node) for node in range(count)])

    def row_vectors(
        self, size: int, parties: NDArray[np.int64], t: int, rows: NDArray[np.int64]
    ) -> NDArray[np.floating]:
        """Return `vector(size, parties[b], t, node=rows[b])` for every b, stacked: (len(rows), size)."""
        out = np.empty((len(rows), size), self.dtype)
        rows_per_draw = max(1, MAX_VALUES_PER_DRAW // max(size, 1))
        for start in range(0, len(rows), rows_per_draw):
            chunk = slice(start, start + rows_per_draw)
            self._fill(out[chunk], parties[chunk].tolist(), [t] * len(out[chunk]), rows[chunk].astype(np.uint64))
        return out

    def weighted_sum(
        self,
        size: int,
        parties: Sequence[int],
        weights: Sequence[float],
        t: int,
        node: int = 0,
        out: NDArray[np.floating] | None = None,
    ) -> NDArray[np.floating]:
        """Return Σ_k weights[k] · vector(size, parties[k], t, node), (size,).

        Long vectors are drawn in pieces, and each piece party by party, to save memory.

        Args:
            size: Number of values of a vector.
            parties: Party of each vector, as many as `weights`.
            weights: Weight of each vector.
            t: Round of all vectors.
            node: Number of each vector in its stream.
            out: Array (size,) that is overwritten with the sum and returned, or None for a new one.
        """
        total = np.empty(size, self.dtype) if out is None else out
        total[:] = 0.0
        half, pieces = self._chunks(1, size)
        if len(pieces) > 1:
            for start, pairs in pieces:
                halves = total[start:half], total[half + start :]
                normals = np.empty((2, 1, pairs), self.dtype)  # cosines and sines
                for party, weight in zip(parties, weights, strict=True):
                    self._draw_pairs(normals[0], normals[1], _stream_counters([party], [t]), node, (start, half))
                    for half_values, vectors in zip(halves, normals, strict=True):
                        half_values = half_values[:pairs]
                        _add_scaled(half_values, weight, vectors[0, : len(half_values)])
            return total
        rows_per_draw = max(1, MAX_VALUES_PER_DRAW // max(size, 1))
        buffer = np.empty((min(rows_per_draw, len(parties)), size), self.dtype)
        for start in range(0, len(parties), rows_per_draw):
            chunk = parties[start : start + rows_per_draw]
            vectors = buffer[: len(chunk)]
            self._fill(vectors, chunk, [t] * len(chunk), node)
            for weight, vector in zip(weights[start : start + rows_per_draw], vectors, strict=True):
                _add_scaled(total, weight, vector)
        return total

    def _fill(
        self,
        out: NDArray[np.floating],
        parties: Sequence[int],
        rounds: Sequence[int],
        node: int | NDArray[np.uint64],
    ) -> None:
        """Fill each row of `out`, (n, size), with the vector of its party, its round and its node.

        `node` is the node of all rows, or has one for each, (n,).
        """
        if not out.size:
            return
        half, pieces = self._chunks(*out.shape)
        for start, pairs in pieces:
            cosines, sines = out[:, start : min(half, start + pairs)], out[:, half + start : half + start + pairs]
            self._draw_pairs(cosines, sines, _stream_counters(parties, rounds), node, (start, half))

    def _chunks(self, count: int, size: int) -> tuple[int, list[tuple[int, int]]]:
        """Divide the pairs of normals of a vector into pieces that are drawn one after another.

        If all vectors have no more than `MAX_VALUES_PER_DRAW` values together, there is one piece, or none for
        vectors of size 0.  Otherwise a piece has at most this number of values in all vectors, or a block of radii
        and a block of angles of each vector if this is more.  All pieces but the last have whole blocks.

        Args:
            count: Number of vectors that are drawn together, 1 or more.
            size: Number of values of a vector.

        Returns:
            Number of pairs in a vector, half of its length after rounding up to whole blocks, and each piece as
            (index of its first pair, number of its pairs).
        """
        per_block = BLOCK_BYTES // self.dtype.itemsize
        half = -(-size // per_block) * per_block // 2
        max_pairs = max(1, MAX_VALUES_PER_DRAW // (2 * count * per_block)) * per_block
        if count * size <= MAX_VALUES_PER_DRAW:
            max_pairs = max(half, 1)
        return half, [(start, min(max_pairs, half - start)) for start in range(0, half, max_pairs)]

    def _draw_pairs(
        self,
        cosines: NDArray[np.floating],
        sines: NDArray[np.floating],
        streams: NDArray[np.uint64],
        node: int | NDArray[np.uint64],
        position: tuple[int, int],
    ) -> None:
        """Fill `cosines` and `sines` with pairs of normals, one row for each stream.

        Args:
            cosines: First normal of each pair, (streams, pairs), written.
            sines: Second normal of each pair, (streams, at most pairs), written.
            streams: Upper half of each stream's counters, for its party and its round, (streams,).
            node: Node of all streams, or one for each, (streams,).
            position: Index of the first pair that is drawn, a multiple of the numbers in a block, and number of
                pairs in a whole vector.

        Raises:
            ValueError: The node is out of range, or the vector is too long.
        """
        (start, half), per_block = position, BLOCK_BYTES // self.dtype.itemsize
        max_node, nodes = (node, None) if isinstance(node, int) else (int(node.max()), node)
        if not 0 <= max_node < _UINT32_RANGE or 2 * half >= _UINT32_RANGE * per_block:
            raise ValueError(f"node {max_node} or vector length {2 * half} is outside what one stream can number")
        workspace = self._find_workspace(len(streams), cosines.shape[1], (half + start) % per_block)
        workspace.counters[:, :, 0] = streams[:, None]
        # The lower half of a counter is 2^32 · node + block, without the node until the shift if streams differ.
        base = max_node * _UINT32_RANGE if nodes is None else 0
        workspace.set_counters(base + start // per_block, base + (half + start) // per_block)
        if nodes is not None:
            workspace.shift_to_nodes(nodes)
        self._encrypt.update_into(workspace.counters.data.cast("B"), workspace.bits)
        workspace.fill_normals(cosines, sines)

    def _find_workspace(self, count: int, pairs: int, skipped: int) -> Workspace:
        """Return a workspace of this shape, the cached one if there is one.

        The four shapes that were used last are cached, because long and short pieces of vectors alternate.  The
        arguments are those of `Workspace`.
        """
        shape = (count, pairs, skipped)
        workspace = self._workspaces.pop(shape, None) or Workspace(count, pairs, skipped, self.dtype)
        if len(self._workspaces) >= _MAX_WORKSPACES:
            self._workspaces.popitem(last=False)
        self._workspaces[shape] = workspace
        return workspace


class SamplingRandomness:
    """Random bits for sampling, each a pure function of (key, party, round, row).

    `bernoulli` compares them with a probability, and `numbers` reduces other bits to a range.

    Guarantee: for everyone who does not hold the key, and as far as AES-256 is a pseudorandom function, the draws
    of distinct (party, round, row) are independent, and each is True with at most the given probability, and less
    than it by at most 2^-63.  The numbers of distinct (party, round, row) are independent of all draws and of each
    other, and exactly uniform.
    """

    def __init__(self, key: bytes) -> None:
        self._encrypt, self._encrypt_numbers = _block_cipher(key), _block_cipher(derive_key(key, "numbers"))

    def bernoulli(self, count: int, probability: float, party: int, t: int) -> NDArray[np.bool_]:
        """Draw True with this probability, 0 to 1, for each of the rows 0 … count-1, (count,).

        Raises:
            ValueError: The probability is below 0, above 1 or NaN.
        """
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"probability = {probability}: it lies between 0 and 1")
        bits = _random_bits(self._encrypt, count, party, t, 0)
        is_drawn: NDArray[np.bool_] = (bits >> np.uint64(1)) < np.uint64(int(probability * 2.0**63))
        return is_drawn

    def numbers(self, count: int, choices: int, party: int, t: int) -> NDArray[np.int64]:
        """Draw a uniform number of 0 … choices-1 for each of the rows 0 … count-1, (count,).

        A result is a 64-bit number modulo `choices`.  The largest 64-bit numbers are drawn again where they would
        make some results likelier than others.

        Args:
            count: Number of rows.
            choices: Number of possible results, 1 to 2^32.
            party: Number of the party, such as the silo of the rows.
            t: Round, or another number of the draw.

        Raises:
            ValueError: `choices` is below 1 or above 2^32.
        """
        if not 1 <= choices <= _UINT32_RANGE:
            raise ValueError(f"choices = {choices}: a number is drawn among 1 to {_UINT32_RANGE}")
        last = np.uint64(2**64 - 2**64 % choices - 1)
        bits = _random_bits(self._encrypt_numbers, count, party, t, 0)
        attempt = 0
        while (is_rejected := bits > last).any():
            attempt += 1
            bits = np.where(is_rejected, _random_bits(self._encrypt_numbers, count, party, t, attempt), bits)
        return (bits % np.uint64(choices)).astype(np.int64)


def _add_scaled(total: NDArray[np.floating], weight: float, vector: NDArray[np.floating]) -> None:
    """Add weight · vector to `total`, and scale `vector` in place."""
    if weight != 1.0:
        vector *= weight
    total += vector


def _block_cipher(key: bytes) -> "CipherContext":
    """Return AES that encrypts each counter value to one block."""
    # Imported late, because programs that draw nothing start faster without it.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()


def _stream_counters(parties: Sequence[int], rounds: Sequence[int]) -> NDArray[np.uint64]:
    """Return the upper halves of the counters of n pairs (parties[i], rounds[i]), (n,)."""
    upper: NDArray[np.uint64] = np.asarray(parties, np.uint64) * np.uint64(_UINT32_RANGE) + np.asarray(
        rounds, np.uint64
    )
    return upper


def integer_noise_key(seed: int) -> bytes:
    """Derive the public key of the noise of a simulation's integer releases from the scenario's seed."""
    return seed_key(seed, "integers")


class RowRandomIntegers:
    """Public numbers for rows of a silo, each a pure function of (key, silo, round, row) and `choices`.

    Guarantee: the numbers of a row do not depend on which other rows are requested, and for one `choices` every
    row takes equally many blocks of AES.
    """

    def __init__(self, key: bytes) -> None:
        self._encrypt = _block_cipher(key)

    def draw(
        self, rows: NDArray[np.int64], choices: NDArray[np.int64], silos: NDArray[np.int64], t: int
    ) -> NDArray[np.int64]:
        """Draw one number of 0 … choices[k]-1 for each row and every k: (*rows.shape, len(choices)).

        A number is 64 bits modulo its entry of `choices`, so that each probability is within 2^-64 of uniform.

        Args:
            rows: Row indices, (..., B).
            choices: Number of possible results for each of the numbers of a row, 1 or more.
            silos: Silo of each row, (B,).
            t: Round.
        """
        blocks = -(-len(choices) * 8 // BLOCK_BYTES)
        counters = np.empty((*rows.shape, blocks, 2), np.uint64)
        counters[..., 0] = (silos.astype(np.uint64) * np.uint64(_UINT32_RANGE) + np.uint64(t))[:, None]
        counters[..., 1] = rows.astype(np.uint64)[..., None] * np.uint64(blocks) + np.arange(
            blocks, dtype=np.uint64
        )
        bits = np.frombuffer(self._encrypt.update(counters.tobytes()), np.uint64)
        return (bits.reshape(*rows.shape, 2 * blocks)[..., : len(choices)] % choices.astype(np.uint64)).astype(
            np.int64
        )


def _random_bits(encrypt: "CipherContext", count: int, party: int, t: int, attempt: int) -> NDArray[np.uint64]:
    """Return 64 secret bits for each of the rows 0 … count-1 of (party, round t, attempt), (count,)."""
    counters = np.empty((-(-count * 8 // BLOCK_BYTES), 2), np.uint64)
    counters[:, 0] = _stream_counters([party], [t])
    counters[:, 1] = np.arange(attempt * _UINT32_RANGE, attempt * _UINT32_RANGE + len(counters), dtype=np.uint64)
    return np.frombuffer(encrypt.update(counters.tobytes()), np.uint64)[:count]


def simulation_noise(seed: int, dtype: DTypeLike) -> KeyedNormal:
    """Return a simulation's noise source of all parties, reproducible and public by the scenario's seed."""
    return KeyedNormal(seed_key(seed, "noise"), dtype)
