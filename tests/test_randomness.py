"""Keyed noise: a function of its key and place, Gaussian, independent."""

import math
import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import stats

from fedpriv.core.random import SERVER, KeyedNormal, public_generator, seed_key, simulation_noise, system_key
from fedpriv.rounds.floats import PrefetchedNoise

DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_keyed_noise_is_standard_normal_by_a_test_with_power(dtype: type) -> None:
    """Kolmogorov-Smirnov at level 1e-4 on 4e5 values of a fixed seed; rejected at 2/3 and 3/2 of the std."""
    values = simulation_noise(7, dtype).vectors(2000, range(10), [1] * 10).ravel()
    values = np.concatenate([values, simulation_noise(7, dtype).vectors(38_000, range(10), [2] * 10).ravel()])
    assert stats.kstest(values, "norm").pvalue > 1e-4
    assert stats.kstest(values * 2 / 3, "norm").pvalue < 1e-12
    assert stats.kstest(values * 3 / 2, "norm").pvalue < 1e-12
    assert abs(values.mean()) < 4 / np.sqrt(values.size)  # |z| < 4: false alarm 6e-5
    assert abs(values.var() - 1) < 4 * np.sqrt(2 / values.size)
    assert np.abs(values).max() < 6.7


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_streams_of_different_places_and_keys_are_uncorrelated(dtype: type) -> None:
    """Owners, rounds, nodes and seeds give different streams: all |correlation| < 5/√n of fixed draws."""
    size = 20_000
    noise = simulation_noise(3, dtype)
    places = (0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (SERVER, 1, 0)
    others = *(simulation_noise(seed, dtype) for seed in (4, 3 + 2**32)), KeyedNormal(system_key(), dtype)
    rows = [noise.vector(size, *place) for place in places] + [other.vector(size, 0, 1) for other in others]
    correlations = np.corrcoef(np.array(rows, np.float64)) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 / np.sqrt(size)
    halves = np.corrcoef(rows[0][: size // 2], rows[0][size // 2 :])  # the cosine and sine halves
    assert abs(halves[0, 1]) < 5 / np.sqrt(size / 2)


def transcribed(key: bytes, size: int, bits: int, owner: int, t: int, node: int) -> list[float]:
    """Normals by hand: AES-256 of (owner, round, node, block), radii of bits - 1 bits, then cosines and sines."""
    blocks = -(-size * bits // 128)
    encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    counters = [struct.pack("<QQ", owner * 2**32 + t, node * 2**32 + block) for block in range(blocks)]
    stream = b"".join(encrypt.update(counter) for counter in counters)
    words = struct.unpack(f"<{len(stream) * 8 // bits}{'i' if bits == 32 else 'q'}", stream)
    half = len(words) // 2
    uniforms = [((word % 2 ** (bits - 1)) + 0.5) / 2 ** (bits - 1) for word in words[:half]]
    radii = [math.sqrt(-2.0 * math.log(uniform)) for uniform in uniforms]
    angles = [2.0 * math.pi * word / 2**bits for word in words[half:]]
    cosines = [radius * math.cos(angle) for radius, angle in zip(radii, angles, strict=True)]
    sines = [radius * math.sin(angle) for radius, angle in zip(radii, angles, strict=True)]
    return (cosines[: min(half, size)] + sines)[:size]


@pytest.mark.parametrize(("dtype", "bits", "close"), [(np.float32, 32, 3e-6), (np.float64, 64, 1e-14)])
@pytest.mark.parametrize("size", [1, 7, 130])
def test_keyed_noise_matches_a_transcription_of_its_definition(
    dtype: type, bits: int, close: float, size: int
) -> None:
    """Counters, bits of radii and angles, order: anything else would be other noise than what was analysed."""
    key = bytes(range(32))
    source = KeyedNormal(key, dtype)
    for owner, t, node in ((0, 1, 0), (3, 9, 1), (SERVER, 2**20, 2**20)):
        expected = transcribed(key, size, bits, owner, t, node)
        np.testing.assert_allclose(source.vector(size, owner, t, node), expected, rtol=close, atol=close)


def halves(vector: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The uniforms that an even number of draws was made of: of radii in [0, 1], of angles in [-1/2, 1/2)."""
    cosines, sines = np.asarray(vector, np.float64).reshape(2, -1)
    return np.exp(-(cosines**2 + sines**2) / 2.0), np.arctan2(sines, cosines) / (2.0 * np.pi)


def test_noise_streams_share_no_random_word() -> None:
    """A word that serves two nodes, rounds or owners makes their noise dependent: whoever sees both could tell.

    Every word of a stream is recovered from the float64 draws, as a radius or as an angle, whatever place it has.
    2,048 words at a resolution of 1e-11: a false alarm with probability 2e-5, at a fixed seed.
    """
    noise, words = simulation_noise(11, np.float64), []
    for owner, t, node in ((0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3), (0, 2, 0), (0, 2, 1), (1, 1, 0), (1, 2, 1)):
        radii, angles = halves(noise.vector(256, owner, t, node))
        words.append(np.concatenate([radii, 2.0 * angles % 1.0]))  # a radius drops the sign of its word
    values = np.sort(np.concatenate(words))
    assert np.diff(values).min() > 1e-11


@pytest.mark.parametrize("dtype", DTYPES)
def test_box_muller_radii_have_many_random_bits(dtype: type) -> None:
    """Few radii tell noise from what it is added to: 15 bits fill 32,768 cells of 2^20, and their neighbours.

    Of 100,000 radii 95,400 are expected to be alone in theirs, with a standard deviation below 70.
    """
    radii, _ = halves(simulation_noise(1, dtype).vector(200_000, 0, 1))
    assert len(np.unique(np.asarray(radii * 2.0**20, np.int64))) > 95_000
    assert radii.min() < 1e-4  # P(no radius word that small among 100,000) = 5e-5, at a fixed seed


def test_a_system_key_has_256_random_bits() -> None:
    """2^18 keys from 32 bits of randomness would have 8 pairs alike, and be found by trying them all."""
    keys = [system_key() for _ in range(2**18)]
    assert len(set(keys)) == len(keys)
    several = np.frombuffer(b"".join(keys[:64]), np.uint8).reshape(64, 32)
    ones = np.unpackbits(several, axis=1).sum(axis=0)
    assert ones.shape == (256,)
    assert 0 < ones.min() <= ones.max() < 64  # a bit that never changes: false alarm 3e-17
    assert len(np.unique(several.view(np.uint32))) > 64 * 8 - 3  # words that repeat: false alarm below 1e-12


def test_a_noise_vector_does_not_depend_on_others_drawn_with_it() -> None:
    noise = simulation_noise(5, np.float32)
    alone = noise.vector(7850, 3, 9)
    together = noise.vectors(7850, [1, 3, 4] * 7, [9] * 21)
    assert np.array_equal(alone, together[1])
    assert np.array_equal(alone, together[-2])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, 785, 200_001])
def test_a_slice_of_a_noise_vector_equals_the_slice_of_the_whole(dtype: type, size: int) -> None:
    noise = simulation_noise(5, dtype)
    whole = noise.vector(size, 3, 9, 2)
    for first, last in {(0, size), (size // 3, size // 3 + 1), (size // 2, size), (size // 5, 4 * size // 5)}:
        np.testing.assert_allclose(noise.vector_slice(size, first, last, 3, 9, 2), whole[first:last], rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 785])
def test_noise_vectors_of_every_length_have_finite_and_distinct_values(size: int) -> None:
    vector = simulation_noise(0, np.float32).vector(size, 0, 1)
    assert vector.shape == (size,)
    assert np.all(np.isfinite(vector))
    assert len(np.unique(vector)) == size


def test_the_weighted_sum_of_noise_is_the_sum_of_weighted_vectors() -> None:
    noise = simulation_noise(2, np.float64)
    owners, weights = list(range(11)), np.linspace(0.1, 2.0, 11)
    expected = sum(weight * noise.vector(500, owner, 4) for owner, weight in zip(owners, weights, strict=True))
    np.testing.assert_allclose(noise.weighted_sum(500, owners, list(weights), 4), expected, rtol=1e-12)


def test_prefetched_noise_equals_noise_drawn_on_demand() -> None:
    noise = simulation_noise(6, np.float64)
    ahead = PrefetchedNoise(noise, 10, party=4, rounds=11, block_size=4)
    for t in [1, 2, 3, 4, 5, 5, 3, 11, 10, 12, 1]:
        assert np.array_equal(ahead.vector(t), noise.vector(10, 4, t))


def test_invalid_seeds_keys_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        seed_key(-1)
    with pytest.raises(ValueError, match="32 bytes"):
        KeyedNormal(b"short")
    with pytest.raises(ValueError, match="float32 or float64"):
        KeyedNormal(system_key(), np.float16)


def test_the_public_generator_is_reproducible_for_each_purpose() -> None:
    first, again, other = (public_generator(1, purpose).random(4) for purpose in ("a", "a", "b"))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
