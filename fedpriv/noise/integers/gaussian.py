"""Discrete Gaussian noise on the integers, D(σ): P(z) proportional to exp(-z² / 2σ²), exact but for 2^-120.

A value is a magnitude a = m · 2^k + j and a sign, with 16 ≤ σ / 2^k < 32 (k = 0 below σ = 32).  An attempt reads
two AES blocks, four words of 64 bits:

1. word 1 picks one of 512 columns (9 bits), the sign (1 bit) and j (the lowest k bits); word 0 against the
   column's threshold of 128 bits gives m from an alias table of exp(-(m 2^k)² / 2σ²);
2. (0, minus) is refused; any other is accepted with probability exp(-j (2 m 2^k + j) / 2σ²), words 2 and 3 being
   a uniform of 128 bits.

Floating point only predicts the second comparison, with an error below 2^-49; where the two sides are within 2^-44
integers decide.  So no libm, no instruction set and no platform can change a bit (cf. interval refining in Haney
et al. 2022, "Precision-based attacks and interval refining").

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
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.integers.fixed_point import Ints

Words = NDArray[np.uint64]

COLUMNS = 512
LEAST_SIGMA, MOST_SIGMA = 16.0, 2.0**48
_WEIGHT_BITS = 192
_THRESHOLD_BITS = 128
_GUARD_BITS = 96
_WORD = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Table:
    """Magnitudes are m · step + j, m the number of a column: step = 2^low_bits with 16 ≤ σ / step < 32.

    Vose's alias table of the weights exp(-(m step)² / 2σ²): column c stands for itself where a uniform of 128
    bits is below its threshold, in two words, and for `alias[c]` elsewhere.
    """

    sigma: Fraction
    low_bits: int
    high: Words
    low: Words
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
def table_of(sigma: float) -> Table:
    """The table for 16 ≤ σ < 2^48; InputError for another σ.  A float is a rational: σ is not rounded."""
    if not LEAST_SIGMA <= sigma < MOST_SIGMA:
        raise InputError(f"sigma = {sigma}: discrete Gaussian noise takes 16 ≤ sigma < 2^48 units of the lattice")
    low_bits = max(0, math.frexp(sigma)[1] - 5)
    exact = Fraction(sigma)
    variances = 2 * exact**2
    weights = [exp_fixed(Fraction((m << low_bits) ** 2) / variances, _WEIGHT_BITS) for m in range(COLUMNS)]
    thresholds, alias = _alias(weights)
    high = np.array([threshold >> 64 for threshold in thresholds], np.uint64)
    low = np.array([threshold & _WORD for threshold in thresholds], np.uint64)
    return Table(exact, low_bits, high, low, np.array(alias, np.int64), 1.0 / float(variances))


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


def _alias(weights: list[int]) -> tuple[list[int], list[int]]:
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

_CHUNK = 8192  # values at a time: what they need stays in the second-level cache
_TIES = 255  # the attempt whose blocks decide ties with a threshold's upper word
_MOST_NODES, _MOST_VALUES = 1 << 16, 1 << 39
_U64 = np.uint64
_LITTLE = np.dtype("<u8")


class KeyedIntegers:
    """Vectors of D(σ)^d of one owner and round, each a pure function of (key, owner, round, node).

    Guarantee: distinct (owner, round, node, value) read disjoint AES blocks, so that without the key all values
    are independent (AES-256 is assumed to be a pseudorandom permutation); how many values and which nodes are
    drawn together changes none of them.  One object serves one thread at a time.
    """

    def __init__(self, key: bytes, owner: int, t: int, band: float = BAND) -> None:
        """`band` other than the default is for tests: any ≥ 2^-44 gives the same values, only slower."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        if not (0 <= owner < 1 << 32 and 0 <= t < 1 << 32):
            raise ValueError(f"owner {owner}, round {t}: both are numbers of 32 bits")
        self._encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        self._stream, self._band = _U64(owner << 32 | t), band
        self._counters = np.empty((0, 2, 2), _LITTLE)
        self._bits = bytearray()

    def vector(self, size: int, sigma: float, node: int = 0) -> Ints:
        """D(σ)^size, 16 ≤ σ < 2^48; InputError for another σ."""
        if not (0 <= node < _MOST_NODES and 0 <= size <= _MOST_VALUES):
            raise ValueError(f"node {node}, {size} values: outside of what one stream can number")
        table, out = table_of(sigma), np.empty(size, np.int64)
        for start in range(0, size, _CHUNK):
            places = np.arange(start, min(start + _CHUNK, size), dtype=np.uint64)
            values, accepted = self._attempt(table, places, node, 0)
            out[start : start + len(places)] = values
            waiting, attempt = np.flatnonzero(~accepted), 0
            while len(waiting):
                attempt += 1
                if attempt == _TIES:  # after 0.025^255: the key stream is broken
                    raise RunError("the noise generator refused 255 draws in a row")
                values, accepted = self._attempt(table, places[waiting], node, attempt)
                out[start + waiting] = values
                waiting = waiting[~accepted]
        return out

    def _attempt(self, table: Table, places: Words, node: int, attempt: int) -> tuple[Ints, NDArray[np.bool_]]:
        words = self._words(places, node, attempt)
        picks = words[:, 1]
        column = (picks >> _U64(55)).view(np.int64)
        sign = -((picks >> _U64(54)) & _U64(1)).view(np.int64)  # 0 or -1
        low_part = (picks & _U64(table.step - 1)).view(np.int64)
        limit = table.high.take(column)
        tied = np.flatnonzero(words[:, 0] == limit)
        column = np.where(words[:, 0] < limit, column, table.alias.take(column))
        if len(tied):  # 2^-64 a value: read before the desk is used again
            picked = (picks[tied] >> _U64(55)).tolist()
            column[tied] = self._untied(table, places[tied], picked, node)
            words = self._words(places, node, attempt)
        base = column << table.low_bits
        magnitude = base + low_part
        values = (magnitude ^ sign) - sign
        allowed = (magnitude | ~sign) != 0  # not (0, minus)
        if table.low_bits == 0:
            return values, allowed
        base += magnitude
        predicted = low_part.astype(np.float64)
        predicted *= base  # below 2^53 each: the factors are exact
        predicted *= -table.quotient
        np.exp(predicted, out=predicted)
        margin = words[:, 2].astype(np.float64)
        margin *= 2.0**-64
        margin -= predicted
        accepted = margin < 0.0
        for i in np.flatnonzero(np.abs(margin) < self._band).tolist():
            uniform = int(words[i, 2]) << 64 | int(words[i, 3])
            accepted[i] = table.accepts(int(column[i]), int(low_part[i]), uniform)
        return values, accepted & allowed

    def _untied(self, table: Table, places: Words, columns: list[int], node: int) -> list[int]:
        """m where word 0 equals the upper word of the column's threshold: 64 more bits against the lower one."""
        more = self._words(places, node, _TIES)[:, 0].tolist()
        return [
            column if word < int(table.low[column]) else int(table.alias[column])
            for word, column in zip(more, columns, strict=True)
        ]

    def _words(self, places: Words, node: int, attempt: int) -> Words:
        """Four words for every place, (n, 4), on the desk: blocks (owner, t | node, attempt, place, half)."""
        count = len(places)
        if count > len(self._counters):
            self._counters = np.empty((count, 2, 2), _LITTLE)
            self._bits = bytearray(self._counters.nbytes + 16)  # update_into wants one block to spare
        counters = self._counters[:count]
        counters[:, :, 0] = self._stream
        base = (places << _U64(1)) + _U64(node << 48 | attempt << 40)
        counters[:, 0, 1] = base
        counters[:, 1, 1] = base + _U64(1)
        self._encrypt.update_into(counters.data.cast("B"), self._bits)
        return np.frombuffer(self._bits, _LITTLE, count=4 * count).reshape(count, 4).astype(np.uint64, copy=False)


CHAIN_BYTES = 32
START = bytes(CHAIN_BYTES)
"""The chain before round 1."""

_ANSWERED, _MISSED = b"answered", b"missed"


def linked(chain: bytes, query: bytes) -> bytes:
    """The chain (32 bytes) after a round with this query: its bytes as they came, not the cards of the run."""
    return _link(chain, _ANSWERED, query)


def linked_missed(chain: bytes) -> bytes:
    """The chain after a round that was missed."""
    return _link(chain, _MISSED, b"")


def round_noise(key: bytes, owner: int, t: int, chain: bytes, sums: Ints) -> KeyedIntegers:
    """The noise of (owner, round t), for `sums` (d,) or (draws, d): (C s)_t, to which it is added.

    `chain` already holds round t's query.

    Guarantee: two rounds, of whatever rolled-back states of a ledger with this key, share noise only if owner,
    round, all queries up to then and the sums are the same; then the whole release is the same (HMAC-SHA-256 is
    assumed to be a pseudorandom function).
    """
    _check_chain(chain)
    shape = ",".join(map(str, sums.shape)).encode()
    digest = hashlib.sha256(shape + b"|" + sums.astype("<i8").tobytes()).digest()
    message = b"fedpriv exact noise" + owner.to_bytes(8, "big") + t.to_bytes(8, "big") + chain + digest
    return KeyedIntegers(hmac.digest(key, message, "sha256"), owner, t)


def _link(chain: bytes, kind: bytes, query: bytes) -> bytes:
    _check_chain(chain)
    digest = hashlib.sha256(chain)
    for part in (kind, query):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _check_chain(chain: bytes) -> None:
    if len(chain) != CHAIN_BYTES:
        raise ValueError(f"a chain has {CHAIN_BYTES} bytes, not {len(chain)}")
