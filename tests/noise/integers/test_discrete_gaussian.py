"""The discrete Gaussian: its law, the same bits everywhere, and nothing that depends on what is drawn together.

Fixed keys: a false alarm can occur only when a key is chosen, with 1e-6 a test.
"""

import dataclasses
import hashlib
import itertools
import math
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import mpmath
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import binom, chi2, norm

from fedpriv.noise.integers import fixed_point
from fedpriv.noise.integers import gaussian as discrete_gaussian
from fedpriv.noise.integers.fixed_point import attempt_values, compile_function, set_counters
from fedpriv.noise.integers.gaussian import (
    BAND,
    COLUMN_COUNT,
    INITIAL_QUERY_CHAIN,
    AliasTable,
    KeyedDiscreteGaussian,
    exp_fixed,
    extend_missed_query_chain,
    extend_query_chain,
    make_alias_table,
    round_noise,
    warm_up,
)

FALSE_ALARM = 1e-6
KEY = bytes(range(32))


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def drawn(
    count: int, sigma: float, node: int = 0, *, key: bytes = KEY, party: int = 3, t: int = 5, band: float = BAND
) -> list[int]:
    values: list[int] = KeyedDiscreteGaussian(key, party, t, band).vector(count, sigma, node).tolist()
    return values


def fits(seen: np.ndarray, expected: np.ndarray | float, false_alarm: float = FALSE_ALARM) -> bool:
    """Whether a chi-square statistic of counts is below its quantile."""
    return bool(chi2.sf(float(np.sum((seen - expected) ** 2 / expected)), len(seen) - 1) > false_alarm)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw without compiled loops."""
    monkeypatch.setattr(fixed_point, "compile_function", lambda *_: None)


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("sigma", "first", "sha"),
    [
        (16.0, [9, -1, -13, -3], "73d478655986e6cd"),
        (1000.5, [491, -31, -762, -148], "3af913a73dbe662a"),
        (2.0**40, [635223934123, -112209383647], "32fdee7e7e91f324"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_discrete_gaussian_draws_match_golden_vectors(
    sigma: float, first: list[int], sha: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        interpret(monkeypatch)
    elif compile_function(attempt_values) is None:
        pytest.skip("needs pip install 'fedpriv[fast]'")
    values = KeyedDiscreteGaussian(KEY, 3, 5).vector(10_000, sigma, node=1)
    assert values[: len(first)].tolist() == first
    assert digest(values) == sha


def pmf(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    values = np.arange(-math.ceil(9 * sigma), math.ceil(9 * sigma) + 1)
    weights = np.exp(-(values**2) / (2 * sigma**2))
    return values, weights / weights.sum()


@pytest.mark.parametrize("sigma", [16.0, 17.3, 31.99, 32.0, 40.0, 100.5, 1000.5])
def test_the_law_is_the_discrete_gaussian(sigma: float) -> None:
    count = 2**20
    found = KeyedDiscreteGaussian(key_of(f"law {sigma}"), 0, 1).vector(count, sigma)
    values, probabilities = pmf(sigma)
    seen = np.bincount(found - values[0], minlength=len(values))
    enough = probabilities * count >= 20
    observed = np.append(seen[enough], seen[~enough].sum())
    expected = np.append(probabilities[enough], probabilities[~enough].sum()) * count
    assert fits(observed, expected)
    assert observed.sum() == count  # nothing beyond 9 σ


@pytest.mark.parametrize("sigma", [2.0**18 + 0.25, 2.0**30 * 1.7, 2.0**42, 2.0**48 * (1 - 2**-53)])
def test_large_noise_is_normal_with_uniform_low_bits_and_fair_signs(sigma: float) -> None:
    count = 2**20
    found = KeyedDiscreteGaussian(key_of(f"large {sigma}"), 0, 1).vector(count, sigma)
    bins = np.histogram(norm.cdf(found / sigma), 1024, (0.0, 1.0))[0]
    low = np.bincount(found & 255, minlength=256)
    signs = np.array([np.sum(found > 0), np.sum(found < 0)])
    for seen in (bins, low, signs):
        assert fits(seen, seen.sum() / len(seen), FALSE_ALARM / 3)


@pytest.mark.parametrize("sigma", [16.0, 1000.5, 2.0**40])
def test_tail_frequencies_beyond_four_sigma_match_the_distribution(sigma: float) -> None:
    count = 2**22
    found = np.abs(KeyedDiscreteGaussian(key_of(f"tail {sigma}"), 7, 9).vector(count, sigma)) / sigma
    values, probabilities = pmf(min(sigma, 1000.5))
    for bound in (4.0, 4.5, 5.0):
        beyond = float(np.sum(probabilities[np.abs(values) > bound * min(sigma, 1000.5)]))
        if sigma > 1000.5:
            beyond = 2.0 * float(norm.sf(bound))
        seen = int(np.sum(found > bound))
        assert binom.sf(seen - 1, count, beyond) > FALSE_ALARM / 6
        assert binom.cdf(seen, count, beyond) > FALSE_ALARM / 6
    assert np.max(found) < 32.0


@pytest.mark.parametrize("sigma", [33.7, 1000.5, 2.0**40])
@pytest.mark.parametrize("band", [2.0**-9, 2.0**-3])
def test_exact_integer_decisions_draw_the_same_values_as_float_predictions(sigma: float, band: float) -> None:
    assert drawn(3000, sigma, band=band) == drawn(3000, sigma)


def test_draws_rejected_by_exact_integer_decisions_are_retried_in_order() -> None:
    """At this key the retries, with those of integers behind the others, have ends like those of a slice."""
    key = (374).to_bytes(32, "big")
    assert drawn(3000, 1000.0, key=key, party=0, t=1, band=0.05) == drawn(3000, 1000.0, key=key, party=0, t=1)


def test_float_prediction_errors_within_the_band_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another libm, with errors within the band, gives the same values: this is what the band is for."""
    ordinary, exact = drawn(5000, 2.0**40), np.exp
    interpret(monkeypatch)
    for error in (2.0**-8, -(2.0**-8)):
        with monkeypatch.context() as patched:
            patched.setattr(np, "exp", lambda g, error=error: exact(g) + error)
            assert drawn(5000, 2.0**40, band=2.0**-7) == ordinary
            assert drawn(5000, 2.0**40, band=2.0**-12) != ordinary  # control


def test_float_predictions_are_accurate_to_a_thirtieth_of_the_band() -> None:
    """Columns, low parts and σ at random: the prediction of `attempts` against 40 digits."""
    generator = np.random.default_rng(9)
    with mpmath.workdps(40):
        for sigma in (33.7, 1000.5, 2.0**40, 2.0**48 * (1 - 2**-53)):
            table = make_alias_table(sigma)
            columns, low_parts = generator.integers(0, 512, 200), generator.integers(0, table.step, 200)
            base = columns << table.low_bits
            predicted = np.exp(low_parts.astype(np.float64) * (2 * base + low_parts) * -table.quotient)
            for m, j, found in zip(base.tolist(), low_parts.tolist(), predicted.tolist(), strict=True):
                exact = mpmath.exp(-mpmath.mpf(j * (2 * m + j)) / (2 * mpmath.mpf(sigma) ** 2))
                assert abs(exact - found) < 2.0**-49
    assert BAND == 2.0**-44


def words_at(place: int, attempt: int, node: int = 0, owner: int = 3, t: int = 5) -> list[int]:
    """The four words of an attempt, from the definition of the counters."""
    counters = [node << 48 | attempt << 40 | place << 1 | half for half in (0, 1)]
    blocks = b"".join(word.to_bytes(8, "little") for counter in counters for word in (owner << 32 | t, counter))
    bits = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor().update(blocks)
    return [int.from_bytes(bits[8 * k : 8 * k + 8], "little") for k in range(4)]


def refused_at(place: int, column: int, sigma: float) -> bool:
    """Whether the first attempt is refused, in integers."""
    table, (_, picks, high, low) = make_alias_table(sigma), words_at(place, 0)
    return not table.accepts(column, picks & (table.step - 1), high << 64 | low)


def test_ties_with_a_threshold_are_decided_by_64_more_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is changed so that the first word of ten places is exactly the upper word of its threshold."""
    sigma, ties = 2.0**20, {}
    high, low = make_alias_table(sigma).high.copy(), make_alias_table(sigma).low.copy()
    for place in range(200):
        word, picks, *_ = words_at(place, 0)
        column = picks >> 55
        if column not in ties and len(ties) < 10:
            ties[column] = place
            high[column] = word
            low[column] = words_at(place, 255)[0] + len(ties) % 2  # just below it, and not
    crafted = dataclasses.replace(make_alias_table(sigma), high=high, low=low)
    monkeypatch.setattr(discrete_gaussian, "make_alias_table", lambda _: crafted)
    values = drawn(200, sigma)
    with patch.object(
        KeyedDiscreteGaussian, "_decide_exactly", autospec=True, side_effect=KeyedDiscreteGaussian._decide_exactly
    ) as decide:
        assert drawn(200, sigma) == values
    decided = [call.args[2:5] for call in decide.call_args_list]
    assert [place for place, _, attempt in decided if attempt == 0] == sorted(ties.values())
    for column, place in ties.items():
        more = words_at(place, 255)[0]
        expected = column if more < int(low[column]) else int(crafted.alias[column])
        assert refused_at(place, expected, sigma) or abs(values[place]) >> crafted.low_bits == expected
    assert drawn(120, sigma) == values[:120]
    uniforms: list[int] = []
    monkeypatch.setattr(AliasTable, "accepts", lambda self, m, j, uniform: uniforms.append(uniform) or True)
    drawn(200, sigma, band=2.0)
    first = [words_at(place, 0)[2:] for place in range(200)]
    assert uniforms[:200] == [high << 64 | low for high, low in first]  # ties left the other words alone


def test_drawn_values_do_not_depend_on_the_length_of_the_vector() -> None:
    source = KeyedDiscreteGaussian(KEY, 3, 5)
    whole = source.vector(20_000, 1000.5, 1).tolist()
    assert drawn(8193, 1000.5, 1) == whole[:8193]
    for count in (8191, 1, 0):
        assert source.vector(count, 1000.5, 1).tolist() == whole[:count]


@pytest.mark.parametrize("sigma", [16.0, 31.99, 32.0, 1000.5, 2.0**30 * 1.7, 2.0**48 * (1 - 2**-53)])
@pytest.mark.parametrize("size", [4096, 4097, 30_000])
def test_compiled_loops_draw_the_same_values(sigma: float, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of σ, at the edge of a chunk, beside it, and over several."""
    if compile_function(attempt_values) is None:
        pytest.skip("needs pip install 'fedpriv[fast]'")
    compiled = drawn(size, sigma, 2)
    interpret(monkeypatch)
    assert drawn(size, sigma, 2) == compiled


@pytest.mark.parametrize("sigma", [16.0, 1000.5, 2.0**40])
@pytest.mark.parametrize("band", [BAND, 2.0**-5])
def test_plain_loops_and_numpy_passes_decide_every_attempt_alike(sigma: float, band: float) -> None:
    """Plain Python, not compiled: values, refusals, what is left to integers."""
    table, generator = make_alias_table(sigma), np.random.default_rng(5)
    words = generator.integers(0, 2**64, (1500, 4), np.uint64)
    column = (words[:, 1] >> np.uint64(55)).astype(np.int64)
    words[::50, 0] = table.high[column[::50]]  # ties
    words[1::50, 0], words[1::50, 1] = (
        0,
        np.arange(30, dtype=np.uint64) % 2 << np.uint64(54),
    )  # zeros of both signs
    found = []
    for attempt in (attempt_values, discrete_gaussian._attempt_values):
        values, again = np.zeros(1500, np.int64), np.zeros(1500, np.int64)
        columns = table.high, table.alias, table.low_bits, table.quotient
        with np.errstate(over="ignore"):
            count = attempt(words, *columns, band, 8192, values, again)
        found.append((values.tolist(), again[:count].tolist()))
    assert found[0] == found[1]
    assert {~place for place in found[0][1] if place < 0} >= set(range(8192, 9692, 50))
    assert len([place for place in found[0][1] if place >= 0]) >= 10


def test_loop_and_numpy_number_the_cipher_counters_alike() -> None:
    places = np.array([7, 0, 2**38, 5])
    wanted = [2**40 + 2 * place + half for place in places.tolist() for half in (0, 1)]
    for number in (set_counters, discrete_gaussian._set_counters):
        counters = np.zeros((8, 2), np.uint64)
        number(counters, places, 2**40)
        assert counters[:, 1].tolist() == wanted
        assert not counters[:, 0].any()


def test_noise_draws_depend_on_key_party_round_and_node() -> None:
    base = drawn(64, 1000.5, 1)
    changed: tuple[dict[str, Any], ...] = (
        {"key": bytes(32)},
        {"party": 4},
        {"t": 6},
        {"node": 2},
        {"node": 2**16 - 1},
    )
    others = [drawn(64, 1000.5, **{"node": 1, **change}) for change in changed]
    assert all(np.mean(np.array(other) == base) < 0.2 for other in others)


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(7), Fraction(1, 2**60), Fraction(130)])
def test_fixed_point_exponentials_are_rounded_down_by_less_than_one(exponent: Fraction) -> None:
    with mpmath.workdps(120):
        exact = mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator) * mpmath.mpf(2) ** 192
        assert -1e-15 <= exact - exp_fixed(exponent, 192) < 1 + 1e-15


@pytest.mark.parametrize("sigma", [16.0, 1000.5, 2.0**40])
def test_the_alias_table_has_the_right_masses(sigma: float) -> None:
    """Σ over columns of what they give to m, against exp(-(m step)² / 2σ²) in high precision: 2^-124 in all."""
    table = make_alias_table(sigma)
    masses = [Fraction(0)] * COLUMN_COUNT
    for column in range(COLUMN_COUNT):
        threshold = Fraction((int(table.high[column]) << 64) + int(table.low[column]), 2**128)
        masses[column] += threshold / COLUMN_COUNT
        masses[int(table.alias[column])] += (1 - threshold) / COLUMN_COUNT
    with mpmath.workdps(80):
        variance = mpmath.mpf(sigma) ** 2
        weights = [mpmath.exp(-((m * table.step) ** 2) / (2 * variance)) for m in range(COLUMN_COUNT)]
        given = [mpmath.mpf(mass.numerator) / mass.denominator for mass in masses]
        total = mpmath.fsum(weights)
        gaps = [abs(weight / total - mass) for weight, mass in zip(weights, given, strict=True)]
        assert mpmath.fsum(gaps) / 2 < mpmath.mpf(2) ** -124


@pytest.mark.parametrize("modulus", [2, 2**8, 2**12, 2**26])
def test_residues_of_a_noisy_integer_are_uniform(modulus: int) -> None:
    """What the attacker would gain: the low bits of a sum, if noise did not reach them.  2^26 is the step 2^k."""
    count, sigma = 2**20, 2.0**30
    moved = KeyedDiscreteGaussian(key_of(f"residues {modulus}"), 1, 1).vector(count, sigma) + 12_345
    bins = min(modulus, 4096)
    assert fits(np.bincount((moved % modulus) * bins // modulus, minlength=bins), count / bins)


SUMS = np.arange(-3, 5)


def chain_of(*queries: bytes | None) -> bytes:
    """Digest of the queries so far; None is a round that was missed."""
    chain = INITIAL_QUERY_CHAIN
    for query in queries:
        chain = extend_missed_query_chain(chain) if query is None else extend_query_chain(chain, query)
    return chain


def test_draws_with_round_subkeys_match_golden_vectors() -> None:
    chain = chain_of(b"first", None, b"third")
    assert chain.hex()[:16] == "54e75fe69c83c4bd"
    values = round_noise(KEY, 3, 3, chain, SUMS).vector(10_000, 2.0**40, node=1)
    assert (values[:2].tolist(), digest(values)) == ([470262187642, -414449396899], "438c8e3a3fca47ef")


def test_noise_subkey_depends_on_key_party_round_queries_and_sums() -> None:
    """What the attacker would gain: noise that cancels, from a ledger that was rolled back with its key."""
    chain = chain_of(b"query")
    noises = [
        round_noise(KEY, 3, 5, chain, SUMS),
        round_noise(bytes(32), 3, 5, chain, SUMS),
        round_noise(KEY, 4, 5, chain, SUMS),
        round_noise(KEY, 3, 6, chain, SUMS),
        round_noise(KEY, 3, 5, chain_of(b"other"), SUMS),
        round_noise(KEY, 3, 5, chain_of(b"other", b"query"), SUMS),
        round_noise(KEY, 3, 5, chain_of(None, b"query"), SUMS),
        round_noise(KEY, 3, 5, chain, SUMS + 1),
        round_noise(KEY, 3, 5, chain, SUMS.reshape(2, 4)),
    ]
    vectors = [noise.vector(64, 1000.5).tolist() for noise in noises]
    assert vectors[0] == round_noise(KEY, 3, 5, chain, SUMS.copy()).vector(64, 1000.5).tolist()
    assert all(np.mean(np.array(one) == other) < 0.2 for one, other in itertools.combinations(vectors, 2))


def test_missed_round_has_a_query_digest_of_its_own() -> None:
    assert len({chain_of(None), chain_of(b""), chain_of(b"missed"), chain_of()}) == 4


def test_warm_up_compiles_the_loops_of_long_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard is held to its limit afterwards: a first round must not load a compiler."""
    asked: list[object] = []
    monkeypatch.setattr(fixed_point, "compile_function", lambda function, *_: asked.append(function))
    warm_up()
    assert {getattr(function, "__name__", "") for function in asked} == {
        "set_counters",
        "attempt_values",
        "are_moderate",
        "sum_truncated_squares",
        "add_scaled",
    }
