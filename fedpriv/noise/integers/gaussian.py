"""Discrete Gaussian noise D(σ) on the integers, with P(z) proportional to exp(-z² / 2σ²).

A value is drawn by rejection sampling from the bits of AES-256 blocks.  It has a sign and a magnitude m · 2^k + j,
with k such that 16 ≤ σ / 2^k < 32.  An attempt reads four random words of 64 bits:

1. Word 1 picks one of 512 columns (9 bits), the sign (1 bit) and j (the lowest k bits).  Word 0 against the
  column's threshold gives m from an alias table of exp(-(m 2^k)² / 2σ²).
2. (0, minus) is refused.  Any other attempt is accepted with probability exp(-j (2 m 2^k + j) / 2σ²), where words
  2 and 3 are a uniform of 128 bits.

Floating point only predicts the acceptance.  Where a prediction is within 2^-44 of the limit, integers decide, so
that every platform draws the same values (cf. interval refining in Haney et al. 2022, "Precision-based attacks and
interval refining").

Each value is within 2^-120 of D(σ) in total variation for random words (docs/proofs/discrete-gaussian.md).  The
number of attempts is independent of the accepted value.

The key of a round's noise is derived from the run's key at the silo or the server, the party, the round, the
digest of all queries so far (the query chain) and the integers to which the noise is added (`round_noise`).
"""

import hashlib
import hmac
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.integers.fixed_point import (
    MIN_COMPILED_VALUES,
    Ints,
    attempt_values,
    compiled_or,
    set_counters,
)
from fedpriv.noise.integers.increments import add_truncated

UnsignedInts = NDArray[np.uint64]

COLUMN_COUNT = 512
"""Number of columns of an alias table."""
MIN_SIGMA, MAX_SIGMA = 16.0, 2.0**48
"""Range of σ, in units of the lattice, without its upper end."""
_WEIGHT_BITS = 192
_THRESHOLD_BITS = 128
_GUARD_BITS = 96
_WORD_MASK = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class AliasTable:
    """Vose's alias table of the weights exp(-(m step)² / 2σ²), m = 0 … 511.

    A draw picks a column c, and gives m = c if a uniform of 128 bits is below the column's threshold, and
    `alias[c]` otherwise.  A magnitude is m · step + j, with step = 2^low_bits and 16 ≤ σ / step < 32.
    """

    sigma: Fraction
    """σ, exactly."""
    low_bits: int
    """k, bits of the lower part j of a magnitude."""
    high: UnsignedInts
    """Upper 64 bits of the thresholds, (512,)."""
    low: UnsignedInts
    """Lower 64 bits of the thresholds, (512,)."""
    alias: NDArray[np.int64]
    """Value m of a column whose threshold is not above the uniform, (512,)."""
    quotient: float
    """1 / 2σ², rounded, for predictions."""

    @property
    def step(self) -> int:
        return 1 << self.low_bits

    def accepts(self, column: int, low_part: int, uniform: int) -> bool:
        """Whether `uniform` < 2^128 exp(-low_part (2 column step + low_part) / 2σ²), compared in integers.

        The right side is the integer of `exp_fixed`.

        Args:
            column: Column m of the table.
            low_part: j, the lower bits of the magnitude.
            uniform: Uniform integer below 2^128.
        """
        exponent = Fraction(low_part * (2 * column * self.step + low_part)) / (2 * self.sigma**2)
        return uniform < exp_fixed(exponent, _THRESHOLD_BITS)


@lru_cache(maxsize=64)  # a pure function
def make_alias_table(sigma: float) -> AliasTable:
    """Compute the alias table from which the upper parts m of magnitudes m · 2^k + j of D(σ) are drawn.

    Args:
        sigma: σ, 16 ≤ σ < 2^48.

    Raises:
        InputError: σ is not in this range.
    """
    if not MIN_SIGMA <= sigma < MAX_SIGMA:
        raise InputError(f"sigma = {sigma}: discrete Gaussian noise takes 16 ≤ sigma < 2^48 units of the lattice")
    low_bits = max(0, math.frexp(sigma)[1] - 5)  # so that 16 ≤ σ / 2^low_bits < 32
    exact = Fraction(sigma)
    variances = 2 * exact**2
    weights = [exp_fixed(Fraction((m << low_bits) ** 2) / variances, _WEIGHT_BITS) for m in range(COLUMN_COUNT)]
    thresholds, alias = _build_aliases(weights)
    high = np.array([threshold >> 64 for threshold in thresholds], np.uint64)
    low = np.array([threshold & _WORD_MASK for threshold in thresholds], np.uint64)
    return AliasTable(exact, low_bits, high, low, np.array(alias, np.int64), 1.0 / float(variances))


def exp_fixed(exponent: Fraction, bits: int) -> int:
    """Compute 2^bits exp(-exponent) for exponent ≥ 0, as an integer with an error below 1 + 2^-60.

    Taylor's series of exp(-exponent / 2^h) is summed in integers with 96 more bits, squared h times, and rounded
    down.

    Args:
        exponent: Exponent ≥ 0.
        bits: Bits behind the binary point, at most 1,000.

    Example:
        >>> exp_fixed(Fraction(1), 32) / 2**32
        0.36787944100797176
    """
    if exponent > 2 * bits:
        return 0
    halvings = math.ceil(exponent).bit_length() + 8
    scale = bits + _GUARD_BITS
    one = 1 << scale
    fraction = (exponent.numerator << scale) // (exponent.denominator << halvings)  # below 2^-7
    total = term = one
    order = 0
    while term:
        order += 1
        term = (term * fraction >> scale) // order
        total += -term if order & 1 else term
    for _ in range(halvings):
        total = total * total >> scale
    return total >> _GUARD_BITS


def _build_aliases(weights: list[int]) -> tuple[list[int], list[int]]:
    """Compute threshold and alias of every column by Vose's method (1991).

    A column gives its own value with probability q, and its alias otherwise.  Its threshold is ⌊2^128 q⌋.  A
    column of less than the mean weight is filled up by a donor with the mean weight or more, which becomes its
    alias.  A column without a donor keeps the threshold 2^128 - 1 and is its own alias.

    Args:
        weights: Weight of each value, (n,).

    Returns:
        Thresholds and aliases, (n,) each.
    """
    count, total = len(weights), sum(weights)
    remaining = [weight * count for weight in weights]  # their mean is the integer `total`
    small = [column for column in range(count) if remaining[column] < total]
    large = [column for column in range(count) if remaining[column] >= total]
    one = 1 << _THRESHOLD_BITS
    thresholds, alias = [one - 1] * count, list(range(count))
    while small and large:
        column, donor = small.pop(), large[-1]
        thresholds[column], alias[column] = (remaining[column] << _THRESHOLD_BITS) // total, donor
        remaining[donor] -= total - remaining[column]
        if remaining[donor] < total:
            small.append(large.pop())
    return thresholds, alias


KEY_BYTES = 32
BAND = 2.0**-44
"""Distance of a prediction's two sides below which integers decide.

The error of a prediction is below 2^-49.
"""

_CHUNK = 4096  # values at a time, so that their memory stays in the second-level cache
_TIE_ATTEMPT = 255  # attempt whose blocks decide ties with a threshold's upper word
_MAX_NODES, _MAX_VALUES = 1 << 16, 1 << 39
_U64 = np.uint64
_LITTLE = np.dtype("<u8")


class _ChunkWorkspace(threading.local):
    """Working memory of a thread for a chunk of values, which is used again for the next chunk."""

    def __init__(self) -> None:
        """Allocate memory for a chunk of 4,096 values, each from two AES blocks."""
        self.counters = np.empty((2 * _CHUNK, 2), _LITTLE)
        self.bits = bytearray(self.counters.nbytes + 16)  # update_into wants one block to spare
        # Views, since to make them for every chunk takes microseconds.
        self.counter_bytes = self.counters.data.cast("B")
        self.random_words = np.frombuffer(self.bits, _LITTLE, count=4 * _CHUNK).reshape(-1, 4)
        self.row = np.arange(_CHUNK)
        self.retries = np.empty(_CHUNK, np.int64)


_WORKSPACE = _ChunkWorkspace()


def _set_counters(counters: UnsignedInts, places: Ints, first: int) -> None:
    """Set counters like `fixed_point.set_counters`, with NumPy."""
    blocks = (places << 1).view(np.uint64) + _U64(first)
    counters[::2, 1] = blocks
    counters[1::2, 1] = blocks + _U64(1)


def _attempt_values(
    random_words: UnsignedInts,
    high: UnsignedInts,
    alias: Ints,
    low_bits: int,
    quotient: float,
    band: float,
    start: int,
    values: Ints,
    retries: Ints,
) -> int:
    """Make one attempt to draw each of n values of D(σ) like `fixed_point.attempt_values`, with NumPy.

    Arguments and result are those of the loop.
    """
    threshold_words, picks, uniform = random_words[:, 0], random_words[:, 1], random_words[:, 2] * 2.0**-64
    # The magnitude m 2^k + j, from the column, its threshold and alias, and the lowest k bits.
    column = (picks >> _U64(55)).view(np.int64)
    thresholds = high.take(column)
    magnitude_column = np.where(threshold_words < thresholds, column, alias.take(column))
    low = (picks & _U64((1 << low_bits) - 1)).view(np.int64)
    base = magnitude_column << low_bits
    magnitude = base + low
    # The sign, bit 54, as 0 or -1, and the signed value.
    sign = (picks << _U64(9)).view(np.int64) >> 63
    np.subtract(magnitude ^ sign, sign, out=values)
    # Sure acceptance: u + x < 1 - band, since 1 - x ≤ exp(-x).  Both factors of x are below 2^53 and exact.
    exponent = low.astype(np.float64) * (base + magnitude) * quotient
    is_sure = (uniform + exponent < 1.0 - band) & (magnitude != 0) & (threshold_words != thresholds)
    # The few others: compare with exp(-x).
    uncertain = np.flatnonzero(~is_sure)
    margin = uniform[uncertain] - np.exp(-exponent[uncertain])
    is_undecided = (np.abs(margin) < band) | (threshold_words[uncertain] == thresholds[uncertain])
    # (0, minus) is refused, so that 0 counts once.
    is_refused = (margin >= 0.0) | ((magnitude[uncertain] | ~sign[uncertain]) == 0)
    retry_indices = np.where(is_undecided, ~(uncertain + start), uncertain + start)[is_undecided | is_refused]
    retries[: len(retry_indices)] = retry_indices
    return len(retry_indices)


class KeyedDiscreteGaussian:
    """Vectors of D(σ)^d of one party and round, each a pure function of (key, party, round, node, d, σ).

    A node is the number of a vector of the round, and d its length.

    Guarantee: under one key distinct (party, round, node, value) read disjoint AES blocks, so that without the key
    all values are independent, but for the distance of distinct from random blocks (AES-256 is assumed to be a
    pseudorandom permutation).  The number of values that are drawn together changes none of them, nor does it
    matter whether loops are compiled.  One object serves one thread at a time.
    """

    def __init__(self, key: bytes, party: int, t: int, band: float = BAND) -> None:
        """Start the stream of a party's round, whose random words are AES blocks under a key.

        Args:
            key: Key of the round, 32 bytes.
            party: Silo number or `SERVER`.
            t: Round.
            band: Distance of a prediction's two sides below which integers decide.  Larger bands give the same
                values, only slower.

        Raises:
            ValueError: The key has another length, or a number is not from 0 to 2^32 - 1.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        if not (0 <= party < 1 << 32 and 0 <= t < 1 << 32):
            raise ValueError(f"party {party}, round {t}: both are numbers of 32 bits")
        self._encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        self._stream, self._band = _U64(party << 32 | t), band

    def vector(self, size: int, sigma: float, node: int = 0) -> Ints:
        """Draw a vector of independent values of D(σ), (size,), int64.

        Each place gets attempts until one is accepted.  Attempts that floating point leaves undecided are decided
        in integers.

        Args:
            size: Number of values, at most 2^39.
            sigma: σ, 16 ≤ σ < 2^48.
            node: Number of the vector, from 0 to 2^16 - 1.

        Raises:
            InputError: σ is not in this range.
            ValueError: `node` or `size` is not in its range.
            RunError: A value is refused 255 times.
        """
        if not (0 <= node < _MAX_NODES and 0 <= size <= _MAX_VALUES):
            raise ValueError(f"node {node}, {size} values: outside of what one stream can number")
        table, out, attempt = make_alias_table(sigma), np.empty(size, np.int64), 0
        loops = compiled_or(set_counters, _set_counters, size), compiled_or(attempt_values, _attempt_values, size)
        waiting_places = self._attempt(loops, table, None, (node, attempt), out)
        # A waiting place was refused, or is undecided and stands as ~place.  Undecided ones are decided exactly,
        # and refused ones get another attempt.
        while len(waiting_places):
            refused = [
                place
                for place in (~waiting_places[waiting_places < 0]).tolist()
                if not self._decide_exactly(table, place, node, attempt, out)
            ]
            retries = np.concatenate([waiting_places[waiting_places >= 0], np.array(refused, np.int64)])
            attempt += 1
            # Practically impossible, unless the key stream is broken.
            if attempt == _TIE_ATTEMPT and len(retries):
                raise RunError("the noise generator refused 255 draws in a row")
            values = np.empty(len(retries), np.int64)
            indices = self._attempt(loops, table, retries, (node, attempt), values)
            out[retries] = values
            waiting_places = np.where(indices < 0, ~retries[~indices], retries[indices])
        return out

    def _attempt(
        self,
        loops: tuple[Callable[..., None], Callable[..., int]],
        table: AliasTable,
        places: Ints | None,
        stream: tuple[int, int],
        values: Ints,
    ) -> Ints:
        """Make one attempt to draw each of n values, and write the proposals into `values`.

        Args:
            loops: Functions like `set_counters` and `attempt_values`.
            table: Alias table of σ.
            places: Place of each value in the vector, (n,), or None for the places 0 … n - 1.
            stream: Node and number of the attempt, which select the blocks.
            values: Proposals, (n,), which are written.

        Returns:
            Index of each value whose attempt is refused, and ~index of each one that only integers can decide.
        """
        workspace, first_block, retries_by_chunk = _WORKSPACE, _first_block(*stream), [np.empty(0, np.int64)]
        (fill_counters, attempt_chunk), columns = loops, (table.high, table.alias, table.low_bits, table.quotient)
        workspace.counters[: 2 * len(values), 0] = self._stream
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            count = len(chunk)
            # Without `places`, the places 0 … count - 1, whose blocks are shifted by 2 · start.
            chunk_places, offset = (
                (workspace.row[:count], 2 * start) if places is None else (places[start : start + count], 0)
            )
            fill_counters(workspace.counters[: 2 * count], chunk_places, first_block + offset)
            self._encrypt.update_into(workspace.counter_bytes[: 32 * count], workspace.bits)
            random_words = workspace.random_words[:count].astype(np.uint64, copy=False)
            retry_count = attempt_chunk(random_words, *columns, self._band, start, chunk, workspace.retries)
            retries_by_chunk.append(workspace.retries[:retry_count].copy())
        return np.concatenate(retries_by_chunk)

    def _decide_exactly(self, table: AliasTable, place: int, node: int, attempt: int, out: Ints) -> bool:
        """Decide one attempt in integers, write its proposal into `out`, and return whether it is accepted.

        The random words are those of the floating-point attempt, here with all 128 bits of threshold and uniform.

        Args:
            table: Alias table of σ.
            place: Index of the value in `out`.
            node: Number of the vector.
            attempt: Number of the attempt.
            out: Values, which are changed at `place`.
        """
        word, picks, *uniform = self._attempt_bits(place, node, attempt)
        column, is_negative = picks >> 55, picks >> 54 & 1
        threshold = int(table.high[column])
        if word == threshold:  # probability 2^-64 a value: 64 more bits decide, against the lower word
            word, threshold = self._attempt_bits(place, node, _TIE_ATTEMPT)[0], int(table.low[column])
        magnitude_column = column if word < threshold else int(table.alias[column])
        low = picks & (table.step - 1)
        magnitude = magnitude_column * table.step + low
        out[place] = -magnitude if is_negative else magnitude
        return table.accepts(magnitude_column, low, uniform[0] << 64 | uniform[1]) and not (
            is_negative and magnitude == 0
        )

    def _attempt_bits(self, place: int, node: int, attempt: int) -> list[int]:
        """Return the four words of one attempt: blocks (party, t | node, attempt, place, half)."""
        first = _first_block(node, attempt) + 2 * place
        counters = np.array([[self._stream, first], [self._stream, first + 1]], _LITTLE)
        return list(map(int, np.frombuffer(self._encrypt.update(counters.tobytes()), _LITTLE)))


def _first_block(node: int, attempt: int) -> int:
    """Number of the first block of an attempt, that of place 0."""
    return node << 48 | attempt << 40


def warm_up() -> None:
    """Draw a vector and add an increment, to load the code, and to compile loops if numba is installed."""
    KeyedDiscreteGaussian(bytes(KEY_BYTES), 0, 0).vector(MIN_COMPILED_VALUES, 2.0**20)
    add_truncated(np.zeros(MIN_COMPILED_VALUES, np.int64), np.zeros(MIN_COMPILED_VALUES), 1, 1.0, True)


QUERY_CHAIN_BYTES = 32
INITIAL_QUERY_CHAIN = bytes(QUERY_CHAIN_BYTES)
"""Query chain before round 1."""

_ANSWERED_TAG, _MISSED_TAG = b"answered", b"missed"


def extend_query_chain(chain: bytes, query: bytes | memoryview) -> bytes:
    """Return the query chain (32 bytes) after a round with this query.

    Args:
        chain: Query chain before the round, 32 bytes.
        query: Bytes of the query.

    Raises:
        ValueError: The chain has another length than `QUERY_CHAIN_BYTES`.
    """
    return _hash_link(chain, _ANSWERED_TAG, query)


def extend_missed_query_chain(chain: bytes) -> bytes:
    """Return the query chain after a missed round.

    Raises:
        ValueError: The chain has another length than `QUERY_CHAIN_BYTES`.
    """
    return _hash_link(chain, _MISSED_TAG, b"")


def round_noise(key: bytes, party: int, t: int, chain: bytes, sums: Ints) -> KeyedDiscreteGaussian:
    """Return the noise of a party's round, keyed by the sums to which it is added.

    Guarantee: two rounds, of whatever rolled-back states of a ledger with this key, share noise only if party,
    round, all queries up to then and the sums are the same; then sums plus noise are the same, too, since a run
    has one σ for each vector (HMAC-SHA-256 is assumed to be a pseudorandom function, and SHA-256 to be free of
    collisions).

    Args:
        key: Key of the run at the silo or the server.
        party: Silo number or `SERVER`.
        t: Round.
        chain: Query chain, which includes round t's query.
        sums: Integers to which the noise is added, (d,) or (draws, d): (C s)_t, for the mechanism's matrix C and
            the sums s of increments.

    Raises:
        ValueError: The chain has another length than `QUERY_CHAIN_BYTES`, or `party` or `t` is from 2^32 to
            2^64 - 1.
        OverflowError: `party` or `t` is negative, or 2^64 or more.
    """
    _check_chain(chain)
    sums_digest = hashlib.sha256(",".join(map(str, sums.shape)).encode() + b"|")
    # Contiguous memory is hashed without a copy.
    sums_digest.update(np.ascontiguousarray(sums, "<i8").data)
    message = (
        b"fedpriv exact noise" + party.to_bytes(8, "big") + t.to_bytes(8, "big") + chain + sums_digest.digest()
    )
    return KeyedDiscreteGaussian(hmac.digest(key, message, "sha256"), party, t)


def _hash_link(chain: bytes, tag: bytes, query: bytes | memoryview) -> bytes:
    """Compute SHA-256 of chain, tag and query, 32 bytes: the next query chain.

    Tag and query each follow their length, in 8 bytes, so that no two pairs give the same hashed bytes.
    """
    _check_chain(chain)
    digest = hashlib.sha256(chain)
    for part in (tag, memoryview(query).cast("B")):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _check_chain(chain: bytes) -> None:
    if len(chain) != QUERY_CHAIN_BYTES:
        raise ValueError(f"a chain has {QUERY_CHAIN_BYTES} bytes, not {len(chain)}")
