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

The key of a round's noise is derived from the key of the silo or the server, the party, the round, the digest of
all queries so far (the query chain) and the integers to which the noise is added.  So a ledger that is rolled back
cannot give the same noise to another sum.
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

    The weights exp(-(m 2^k)² / 2σ²), m = 0 … 511, are computed in integers.

    Args:
        sigma: σ, 16 ≤ σ < 2^48.

    Raises:
        InputError: σ is not in this range.
    """
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
    remaining = [weight * count for weight in weights]  # so that the mean is the integer `total`
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
_MIN_COMPILED_VALUES = 1 << 12  # fewest values for which compiled code is worth its import
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
        self.row = np.arange(_CHUNK)
        self.indices, self.retries = np.empty((2, _CHUNK), np.int64)
        self._integers = np.empty((5, _CHUNK), np.int64)
        self._floats = np.empty((2, _CHUNK))
        self._booleans = np.empty((2, _CHUNK), np.bool_)

    def set_counters(self, counters: UnsignedInts, places: Ints, first: int) -> None:
        """Set counters like `fixed_point.set_counters`."""
        blocks = np.left_shift(places, 1, out=self._integers[0, : len(places)]).view(np.uint64)
        np.add(blocks, _U64(first), out=counters[::2, 1])
        np.add(blocks, _U64(first + 1), out=counters[1::2, 1])

    def attempt_values(
        self,
        random_words: UnsignedInts,
        places: Ints,
        high: UnsignedInts,
        alias: Ints,
        low_bits: int,
        quotient: float,
        band: float,
        out: Ints,
        retries: Ints,
    ) -> int:
        """Make one attempt to draw a value of D(σ) at each of n places, with NumPy.

        This is `fixed_point.attempt_values` without compiled code.  An attempt proposes a sign and a magnitude m
        2^k + j, and is accepted with probability exp(-x), x = j (2 m 2^k + j) / 2σ².

        Args:
            random_words: Random words of 64 bits of each place, (n, 4).
            places: Indices of values in `out`, (n,), ascending, 1 to 4,096 of them.
            high: Upper 64 bits of the columns' thresholds, (512,).
            alias: Alias of each column, (512,).
            low_bits: k, bits of the lower part j of a magnitude.
            quotient: 1 / 2σ².
            band: Distance of the uniform from exp(-x) below which floating point cannot decide.
            out: Values.  Each place gets a proposal, accepted or not.
            retries: Buffer of n places or more, which gets refused places, and ~place for undecided ones: within
                `band`, or with word 0 equal to the threshold's upper bits.

        Returns:
            Number of places written to `retries`.
        """
        # Names of working memory: a row serves several quantities, one after the other.
        count = len(places)
        column, threshold_row, magnitude_column, low, base = (row[:count] for row in self._integers)
        exponent, uniform = (row[:count] for row in self._floats)
        is_sure, mask = (row[:count] for row in self._booleans)
        picks, thresholds = random_words[:, 1], threshold_row.view(np.uint64)
        # The magnitude m 2^k + j, from the column, its threshold and alias, and the lowest k bits.
        np.right_shift(picks, _U64(55), out=column.view(np.uint64))
        high.take(column, out=thresholds, mode="clip")
        alias.take(column, out=magnitude_column, mode="clip")
        np.copyto(magnitude_column, column, where=np.less(random_words[:, 0], thresholds, out=is_sure))
        np.not_equal(random_words[:, 0], thresholds, out=is_sure)
        np.bitwise_and(picks, _U64((1 << low_bits) - 1), out=low.view(np.uint64))
        np.left_shift(magnitude_column, low_bits, out=base)
        magnitude = np.add(base, low, out=magnitude_column)
        is_sure &= np.not_equal(magnitude, 0, out=mask)
        # Sure acceptance: u + x < 1 - band, since 1 - x ≤ exp(-x).
        base += magnitude
        np.copyto(exponent, low)
        exponent *= base  # each factor is below 2^53 and exact
        exponent *= quotient
        np.copyto(uniform, random_words[:, 2])
        uniform *= 2.0**-64
        is_sure &= np.less(np.add(uniform, exponent, out=base.view(np.float64)), 1.0 - band, out=mask)
        # The sign, bit 54, and the signed value.
        np.left_shift(picks, _U64(9), out=column.view(np.uint64))
        column >>= 63  # 0 or -1
        np.bitwise_xor(magnitude, column, out=low)
        low -= column
        if places[-1] - places[0] == count - 1:
            out[places[0] : places[-1] + 1] = low
        else:
            out[places] = low
        # The few others: compare with exp(-x).
        uncertain = np.flatnonzero(np.logical_not(is_sure, out=is_sure))
        margin = uniform[uncertain] - np.exp(-exponent[uncertain])
        is_undecided = (np.abs(margin) < band) | (random_words[uncertain, 0] == thresholds[uncertain])
        # (0, minus) is refused, so that 0 counts once.
        is_refused = (margin >= 0.0) | ((magnitude[uncertain] | ~column[uncertain]) == 0)
        retry_places = np.where(is_undecided, ~places[uncertain], places[uncertain])[is_undecided | is_refused]
        retries[: len(retry_places)] = retry_places
        return len(retry_places)


_DESK = _ChunkWorkspace()


class KeyedDiscreteGaussian:
    """Vectors of D(σ)^d of one party and round, each a pure function of (key, party, round, node, d, σ).

    A node is the number of a vector of the round, and d its length.

    Guarantee: under one key distinct (party, round, node, value) read disjoint AES blocks, so that without the key
    all values are independent, but for the distance of distinct from random blocks (AES-256 is assumed to be a
    pseudorandom permutation).  The number of values and the set of nodes that are drawn together change none of
    the values, nor does it matter whether loops are compiled.  One object serves one thread at a time.
    """

    def __init__(self, key: bytes, party: int, t: int, band: float = BAND) -> None:
        """Start the stream of a party's round, whose random words are AES blocks under a key.

        Args:
            key: Key of the round, 32 bytes.
            party: Silo number or `SERVER`.
            t: Round.
            band: Distance of a prediction's two sides below which integers decide.  Bands above the default are
                for tests, since they give the same values, only slower.

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

        Each place gets attempts until one is accepted, at most 255.  Attempts that floating point leaves undecided
        are decided in integers.  Another call with the same arguments draws the same vector.

        Args:
            size: Number of values, at most 2^39.
            sigma: σ, 16 ≤ σ < 2^48.
            node: Number of the vector, from 0 to 2^16 - 1.

        Raises:
            InputError: σ is not in this range.
            ValueError: `node` or `size` is not in its range.
            RunError: A value is refused 255 times, as only a broken key stream does.
        """
        if not (0 <= node < _MAX_NODES and 0 <= size <= _MAX_VALUES):
            raise ValueError(f"node {node}, {size} values: outside of what one stream can number")
        # A first attempt at every place.
        table, out, workspace = make_alias_table(sigma), np.empty(size, np.int64), _DESK
        workspace.counters[: 2 * size, 0] = self._stream
        starts, retries, attempt = range(0, size, _CHUNK), np.empty(0, np.int64), 0
        chunks = (
            np.add(workspace.row[: size - start], start, out=workspace.indices[: size - start]) for start in starts
        )
        retries_by_chunk = [self._attempt(workspace, table, places, (node, 0), out) for places in chunks]
        # Exact decisions, and further attempts at refused places.
        while len(waiting_places := np.concatenate([retries, *retries_by_chunk])):
            refused = [
                place
                for place in (~waiting_places[waiting_places < 0]).tolist()
                if not self._decide_exactly(table, place, node, attempt, out)
            ]
            # Ascending, since an attempt takes places whose ends are count - 1 apart for a slice.
            retries = np.sort(np.concatenate([waiting_places[waiting_places >= 0], np.array(refused, np.int64)]))
            attempt += 1
            # Practically impossible, unless the key stream is broken.
            if attempt == _TIE_ATTEMPT and len(retries):
                raise RunError("the noise generator refused 255 draws in a row")
            retries_by_chunk = [
                self._attempt(workspace, table, retries[start : start + _CHUNK], (node, attempt), out)
                for start in range(0, len(retries), _CHUNK)
            ]
            retries = retries[:0]  # those that are still refused are in `retries_by_chunk`
        return out

    def _attempt(
        self, workspace: _ChunkWorkspace, table: AliasTable, places: Ints, stream: tuple[int, int], out: Ints
    ) -> Ints:
        """Make one attempt at each of these places, and write the proposals into `out`.

        Random words are AES blocks of the places' counters.  For vectors of 4,096 values or more, the loops are
        compiled if numba is installed.

        Args:
            workspace: Working memory of this thread.
            table: Alias table of σ.
            places: Indices of values in `out`, ascending, 1 to 4,096 of them.
            stream: Node and number of the attempt, which select the blocks.
            out: Values, which are changed.

        Returns:
            Places whose attempt is refused, and ~place for each one that only integers can decide.
        """
        fill_counters, attempt = workspace.set_counters, workspace.attempt_values
        if len(out) >= _MIN_COMPILED_VALUES:
            fill_counters, attempt = (
                compile_function(set_counters) or fill_counters,
                compile_function(attempt_values) or attempt,
            )
        counters = workspace.counters[: 2 * len(places)]
        fill_counters(counters, places, _first_block(*stream))
        self._encrypt.update_into(counters.data.cast("B"), workspace.bits)
        random_words = np.frombuffer(workspace.bits, _LITTLE, count=4 * len(places)).reshape(-1, 4)
        random_words = random_words.astype(np.uint64, copy=False)
        retry_count = attempt(
            random_words,
            places,
            table.high,
            table.alias,
            table.low_bits,
            table.quotient,
            self._band,
            out,
            workspace.retries,
        )
        return workspace.retries[:retry_count].copy()

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
    """Draw one vector, to load the code that draws, and to compile its loops if numba is installed."""
    KeyedDiscreteGaussian(bytes(KEY_BYTES), 0, 0).vector(_MIN_COMPILED_VALUES, 2.0**20)


QUERY_CHAIN_BYTES = 32
INITIAL_QUERY_CHAIN = bytes(QUERY_CHAIN_BYTES)
"""Query chain before round 1."""

_ANSWERED_TAG, _MISSED_TAG = b"answered", b"missed"


def extend_query_chain(chain: bytes, query: bytes | memoryview) -> bytes:
    """Return the query chain (32 bytes) after a round with this query.

    The chain covers the query's bytes as received, and not the silos' public keys for masks.

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
    round, all queries up to then and the sums are the same; then the whole release is the same (HMAC-SHA-256 is
    assumed to be a pseudorandom function, and SHA-256 to be free of collisions).

    Args:
        key: Key of the silo or the server.
        party: Silo number or `SERVER`.
        t: Round.
        chain: Query chain, which includes round t's query.
        sums: Integers to which the noise is added, (d,) or (draws, d): (C s)_t, for the mechanism's matrix C and
            the sums s of increments.

    Raises:
        ValueError: The chain has another length than `QUERY_CHAIN_BYTES`, or `party` or `t` is 2^32 or more.
        OverflowError: `party` or `t` is negative.
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

    Raises:
        ValueError: The chain has another length than `QUERY_CHAIN_BYTES`.
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
