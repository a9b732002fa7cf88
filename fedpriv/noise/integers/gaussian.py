"""Discrete Gaussian noise on the integers, D(σ): P(z) proportional to exp(-z² / 2σ²), exact but for 2^-120.

A value is a magnitude a = m · 2^k + j and a sign, with 16 ≤ σ / 2^k < 32 (k = 0 below σ = 32).  An attempt reads
two AES blocks, four words of 64 bits:

1. word 1 picks one of 512 columns (9 bits), the sign (1 bit) and j (the lowest k bits); word 0 against the
   column's threshold of 128 bits gives m from an alias table of exp(-(m 2^k)² / 2σ²);
2. (0, minus) is refused; any other is accepted with probability exp(-j (2 m 2^k + j) / 2σ²), words 2 and 3 being
   a uniform of 128 bits.

Floating point only predicts the second comparison, with an error below 2^-49; where the two sides are within 2^-44
integers decide.  So no libm, no instruction set and no platform can change a bit (cf. interval refining in Haney
et al. 2022, "Precision-based attacks and interval refining").  A first pass goes over all values, and accepts by
exp(-x) ≥ 1 - x those whose uniform is below 1 - x - 2^-44; the few others (2.4 % at large σ) are looked at again.

Total variation a value: the cut at 512 · 2^k ≥ 16 σ costs 2^-187, thresholds and the uniform 2^-124 together:
below 2^-120 (`claim` counts it).  How many attempts were needed is independent of the value that is accepted, so
retries tell nothing about it; not claimed is anything about who shares the processor's caches.

What the discrete Gaussian's sampler knows about one σ, computed in integers: the same on every platform.

The key of one round's noise: from the silo's key, the chain of all it was asked, and the sums themselves.

A ledger that is rolled back together with its key must never give the same noise to another sum.  So the key of
round t depends on all queries up to round t, not on its own alone (a rollback, another query at t and the same one
at t + 1 would else repeat the noise of t + 1), and on the integers to which the noise is added.
"""

import hashlib
import hmac
import math
import threading
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.integers.fixed_point import Ints, attempt_values, compile_function, set_counters

UnsignedInts = NDArray[np.uint64]

COLUMN_COUNT = 512
MIN_SIGMA, MAX_SIGMA = 16.0, 2.0**48
_WEIGHT_BITS = 192
_THRESHOLD_BITS = 128
_GUARD_BITS = 96
_WORD_MASK = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class AliasTable:
    """Magnitudes are m · step + j, m the number of a column: step = 2^low_bits with 16 ≤ σ / step < 32.

    Vose's alias table of the weights exp(-(m step)² / 2σ²): column c stands for itself where a uniform of 128
    bits is below its threshold, in two words, and for `alias[c]` elsewhere.
    """

    sigma: Fraction
    low_bits: int
    high: UnsignedInts
    low: UnsignedInts
    alias: NDArray[np.int64]
    quotient: float
    """1 / 2σ², rounded: for predictions."""

    @property
    def step(self) -> int:
        return 1 << self.low_bits

    def accepts(self, column: int, low_part: int, uniform: int) -> bool:
        """Whether `uniform` < 2^128 exp(-low_part (2 column step + low_part) / 2σ²), decided in integers."""
        exponent = Fraction(low_part * (2 * column * self.step + low_part)) / (2 * self.sigma**2)
        return uniform < exp_fixed(exponent, _THRESHOLD_BITS)


@lru_cache(maxsize=64)  # of a pure function: one table takes some ten milliseconds
def make_alias_table(sigma: float) -> AliasTable:
    """The table for 16 ≤ σ < 2^48; InputError for another σ.  A float is a rational: σ is not rounded."""
    if not MIN_SIGMA <= sigma < MAX_SIGMA:
        raise InputError(f"sigma = {sigma}: discrete Gaussian noise takes 16 ≤ sigma < 2^48 units of the lattice")
    low_bits = max(0, math.frexp(sigma)[1] - 5)
    exact = Fraction(sigma)
    variances = 2 * exact**2
    weights = [exp_fixed(Fraction((m << low_bits) ** 2) / variances, _WEIGHT_BITS) for m in range(COLUMN_COUNT)]
    thresholds, alias = _build_aliases(weights)
    high = np.array([threshold >> 64 for threshold in thresholds], np.uint64)
    low = np.array([threshold & _WORD_MASK for threshold in thresholds], np.uint64)
    return AliasTable(exact, low_bits, high, low, np.array(alias, np.int64), 1.0 / float(variances))


def exp_fixed(exponent: Fraction, bits: int) -> int:
    """2^bits exp(-exponent) for exponent ≥ 0, rounded down, off by less than 1 + 2^-60.

    Taylor's series of exp(-exponent / 2^h) in integers with 96 more bits, squared h times.
    """
    if exponent > 2 * bits:
        return 0
    halvings = math.ceil(exponent).bit_length() + 8
    scale = bits + _GUARD_BITS
    one = 1 << scale
    small = (exponent.numerator << scale) // (exponent.denominator << halvings)  # below 2^-7
    total = term = one
    order = 0
    while term:
        order += 1
        term = (term * small >> scale) // order
        total += -term if order & 1 else term
    for _ in range(halvings):
        total = total * total >> scale
    return total >> _GUARD_BITS


def _build_aliases(weights: list[int]) -> tuple[list[int], list[int]]:
    """Thresholds ⌊2^128 q⌋ and aliases of every column (Vose 1991); a full column is its own alias."""
    count, total = len(weights), sum(weights)
    left = [weight * count for weight in weights]
    small = [column for column in range(count) if left[column] < total]
    large = [column for column in range(count) if left[column] >= total]
    full = 1 << _THRESHOLD_BITS
    thresholds, alias = [full - 1] * count, list(range(count))
    while small and large:
        column, giver = small.pop(), large[-1]
        thresholds[column], alias[column] = (left[column] << _THRESHOLD_BITS) // total, giver
        left[giver] -= total - left[column]
        if left[giver] < total:
            small.append(large.pop())
    return thresholds, alias


KEY_BYTES = 32
BAND = 2.0**-44
"""Predictions closer than this are decided in integers; the true error of a prediction is below 2^-49."""

_CHUNK = 4096  # values at a time: what they need stays in the second-level cache
_MIN_COMPILED_VALUES = 1 << 12  # values from which compiled code is worth its import
_TIE_ATTEMPT = 255  # the attempt whose blocks decide ties with a threshold's upper word
_MAX_NODES, _MAX_VALUES = 1 << 16, 1 << 39
_U64 = np.uint64
_LITTLE = np.dtype("<u8")


class _ChunkWorkspace(threading.local):
    """Working memory for a chunk of values, a thread's own: fresh pages would cost more than the work."""

    def __init__(self) -> None:
        self.counters = np.empty((2 * _CHUNK, 2), _LITTLE)
        self.bits = bytearray(self.counters.nbytes + 16)  # update_into wants one block to spare
        self.row = np.arange(_CHUNK)
        self.indices, self.retries = np.empty((2, _CHUNK), np.int64)
        self._integers = np.empty((5, _CHUNK), np.int64)
        self._floats = np.empty((2, _CHUNK))
        self._booleans = np.empty((2, _CHUNK), np.bool_)

    def set_counters(self, counters: UnsignedInts, places: Ints, first: int) -> None:
        """What `numbered` of kernels.py does."""
        blocks = np.left_shift(places, 1, out=self._integers[0, : len(places)]).view(np.uint64)
        np.add(blocks, _U64(first), out=counters[::2, 1])
        np.add(blocks, _U64(first + 1), out=counters[1::2, 1])

    def attempt_values(
        self,
        words: UnsignedInts,
        places: Ints,
        high: UnsignedInts,
        alias: Ints,
        low_bits: int,
        quotient: float,
        band: float,
        out: Ints,
        again: Ints,
    ) -> int:
        """What `attempts` of kernels.py does, in some twenty passes of NumPy."""
        count = len(places)
        column, threshold, chosen, low, base = (row[:count] for row in self._integers)
        exponent, uniform = (row[:count] for row in self._floats)
        sure, other = (row[:count] for row in self._booleans)
        picks, limit = words[:, 1], threshold.view(np.uint64)
        np.right_shift(picks, _U64(55), out=column.view(np.uint64))
        high.take(column, out=limit, mode="clip")
        alias.take(column, out=chosen, mode="clip")
        np.copyto(chosen, column, where=np.less(words[:, 0], limit, out=sure))
        np.not_equal(words[:, 0], limit, out=sure)
        np.bitwise_and(picks, _U64((1 << low_bits) - 1), out=low.view(np.uint64))
        np.left_shift(chosen, low_bits, out=base)
        magnitude = np.add(base, low, out=chosen)
        sure &= np.not_equal(magnitude, 0, out=other)
        base += magnitude
        np.copyto(exponent, low)
        exponent *= base  # below 2^53 each: the factors are exact
        exponent *= quotient
        np.copyto(uniform, words[:, 2])
        uniform *= 2.0**-64
        sure &= np.less(np.add(uniform, exponent, out=base.view(np.float64)), 1.0 - band, out=other)
        np.left_shift(picks, _U64(9), out=column.view(np.uint64))
        column >>= 63  # 0 or -1
        np.bitwise_xor(magnitude, column, out=low)
        low -= column
        if places[-1] - places[0] == count - 1:
            out[places[0] : places[-1] + 1] = low
        else:
            out[places] = low
        odd = np.flatnonzero(np.logical_not(sure, out=sure))
        margin = uniform[odd] - np.exp(-exponent[odd])
        unsure = (np.abs(margin) < band) | (words[odd, 0] == limit[odd])
        refused = (margin >= 0.0) | ((magnitude[odd] | ~column[odd]) == 0)  # (0, minus) counts once
        left = np.where(unsure, ~places[odd], places[odd])[unsure | refused]
        again[: len(left)] = left
        return len(left)


_DESK = _ChunkWorkspace()


class KeyedDiscreteGaussian:
    """Vectors of D(σ)^d of one owner and round, each a pure function of (key, owner, round, node).

    Guarantee: distinct (owner, round, node, value) read disjoint AES blocks, so that without the key all values
    are independent (AES-256 is assumed to be a pseudorandom permutation); how many values and which nodes are
    drawn together changes none of them, nor does it whether loops are compiled.  One object serves one thread at a
    time.
    """

    def __init__(self, key: bytes, owner: int, t: int, band: float = BAND) -> None:
        """`band` other than the default is for tests: any ≥ 2^-44 gives the same values, only slower."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        if not (0 <= owner < 1 << 32 and 0 <= t < 1 << 32):
            raise ValueError(f"owner {owner}, round {t}: both are numbers of 32 bits")
        self._encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        self._stream, self._band = _U64(owner << 32 | t), band

    def vector(self, size: int, sigma: float, node: int = 0) -> Ints:
        """D(σ)^size, 16 ≤ σ < 2^48; InputError for another σ."""
        if not (0 <= node < _MAX_NODES and 0 <= size <= _MAX_VALUES):
            raise ValueError(f"node {node}, {size} values: outside of what one stream can number")
        table, out, desk = make_alias_table(sigma), np.empty(size, np.int64), _DESK
        desk.counters[: 2 * size, 0] = self._stream
        starts, rest, attempt = range(0, size, _CHUNK), np.empty(0, np.int64), 0
        chunks = (np.add(desk.row[: size - start], start, out=desk.indices[: size - start]) for start in starts)
        left = [self._attempt(desk, table, places, (node, 0), out) for places in chunks]
        while len(waiting := np.concatenate([rest, *left])):
            refused = [
                place
                for place in (~waiting[waiting < 0]).tolist()
                if not self._decide_exactly(table, place, node, attempt, out)
            ]
            rest = np.concatenate([waiting[waiting >= 0], np.array(refused, np.int64)])
            attempt += 1
            if attempt == _TIE_ATTEMPT and len(rest):  # after 0.025^255: the key stream is broken
                raise RunError("the noise generator refused 255 draws in a row")
            left = [
                self._attempt(desk, table, rest[start : start + _CHUNK], (node, attempt), out)
                for start in range(0, len(rest), _CHUNK)
            ]
            rest = rest[:0]
        return out

    def _attempt(
        self, desk: _ChunkWorkspace, table: AliasTable, places: Ints, stream: tuple[int, int], out: Ints
    ) -> Ints:
        """Write the (node, attempt)-th values at these places into `out`; see `attempts` for what comes back."""
        number, attempt = desk.set_counters, desk.attempt_values
        if len(out) >= _MIN_COMPILED_VALUES:
            number, attempt = compile_function(set_counters) or number, compile_function(attempt_values) or attempt
        counters = desk.counters[: 2 * len(places)]
        number(counters, places, _first_block(*stream))
        self._encrypt.update_into(counters.data.cast("B"), desk.bits)
        words = np.frombuffer(desk.bits, _LITTLE, count=4 * len(places)).reshape(-1, 4)
        words = words.astype(np.uint64, copy=False)
        found = attempt(
            words, places, table.high, table.alias, table.low_bits, table.quotient, self._band, out, desk.retries
        )
        return desk.retries[:found].copy()

    def _decide_exactly(self, table: AliasTable, place: int, node: int, attempt: int, out: Ints) -> bool:
        """Decide one attempt in integers: write its value into `out`, or say False where it is refused."""
        word, picks, *uniform = self._attempt_bits(place, node, attempt)
        column, minus = picks >> 55, picks >> 54 & 1
        threshold = int(table.high[column])
        if word == threshold:  # 2^-64 a value: 64 more bits against the lower word
            word, threshold = self._attempt_bits(place, node, _TIE_ATTEMPT)[0], int(table.low[column])
        chosen = column if word < threshold else int(table.alias[column])
        low = picks & (table.step - 1)
        magnitude = chosen * table.step + low
        out[place] = -magnitude if minus else magnitude
        return table.accepts(chosen, low, uniform[0] << 64 | uniform[1]) and not (minus and magnitude == 0)

    def _attempt_bits(self, place: int, node: int, attempt: int) -> list[int]:
        """The four words of one attempt: blocks (owner, t | node, attempt, place, half)."""
        first = _first_block(node, attempt) + 2 * place
        counters = np.array([[self._stream, first], [self._stream, first + 1]], _LITTLE)
        return list(map(int, np.frombuffer(self._encrypt.update(counters.tobytes()), _LITTLE)))


def _first_block(node: int, attempt: int) -> int:
    """The number of the first block of an attempt."""
    return node << 48 | attempt << 40


def warm_up() -> None:
    """Draw once, so that all code that draws is loaded, and compiled where numba is installed."""
    KeyedDiscreteGaussian(bytes(KEY_BYTES), 0, 0).vector(_MIN_COMPILED_VALUES, 2.0**20)


QUERY_CHAIN_BYTES = 32
INITIAL_QUERY_CHAIN = bytes(QUERY_CHAIN_BYTES)
"""The chain before round 1."""

_ANSWERED_TAG, _MISSED_TAG = b"answered", b"missed"


def extend_query_chain(chain: bytes, query: bytes | memoryview) -> bytes:
    """The chain (32 bytes) after a round with this query: its bytes as they came, not the cards of the run."""
    return _hash_link(chain, _ANSWERED_TAG, query)


def extend_missed_query_chain(chain: bytes) -> bytes:
    """The chain after a round that was missed."""
    return _hash_link(chain, _MISSED_TAG, b"")


def round_noise(key: bytes, owner: int, t: int, chain: bytes, sums: Ints) -> KeyedDiscreteGaussian:
    """The noise of (owner, round t), for `sums` (d,) or (draws, d): (C s)_t, to which it is added.

    `chain` already holds round t's query.

    Guarantee: two rounds, of whatever rolled-back states of a ledger with this key, share noise only if owner,
    round, all queries up to then and the sums are the same; then the whole release is the same (HMAC-SHA-256 is
    assumed to be a pseudorandom function).
    """
    _check_chain(chain)
    hashed = hashlib.sha256(",".join(map(str, sums.shape)).encode() + b"|")
    hashed.update(
        np.ascontiguousarray(sums, "<i8").data
    )  # the bytes where they lie: a copy costs more than the hash
    message = b"fedpriv exact noise" + owner.to_bytes(8, "big") + t.to_bytes(8, "big") + chain + hashed.digest()
    return KeyedDiscreteGaussian(hmac.digest(key, message, "sha256"), owner, t)


def _hash_link(chain: bytes, kind: bytes, query: bytes | memoryview) -> bytes:
    _check_chain(chain)
    digest = hashlib.sha256(chain)
    for part in (kind, memoryview(query).cast("B")):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _check_chain(chain: bytes) -> None:
    if len(chain) != QUERY_CHAIN_BYTES:
        raise ValueError(f"a chain has {QUERY_CHAIN_BYTES} bytes, not {len(chain)}")
