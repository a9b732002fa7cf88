"""Keyed noise: a function of its key and place, Gaussian, independent."""

import numpy as np
import pytest
from scipy import stats

from fedpriv.randomness import (
    SERVER,
    DrawAhead,
    KeyedNormal,
    public_generator,
    seed_key,
    simulation_noise,
    system_key,
)

DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_are_standard_normal_and_the_test_has_power(dtype: type) -> None:
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
def test_streams_are_uncorrelated(dtype: type) -> None:
    """Owners, rounds, nodes and seeds give different streams: all |correlation| < 5/√n of fixed draws."""
    size = 20_000
    noise = simulation_noise(3, dtype)
    rows = [
        noise.vector(size, 0, 1),
        noise.vector(size, 1, 1),
        noise.vector(size, 0, 2),
        noise.vector(size, 0, 1, node=1),
        noise.vector(size, SERVER, 1),
        simulation_noise(4, dtype).vector(size, 0, 1),
        simulation_noise(3 + 2**32, dtype).vector(size, 0, 1),
        KeyedNormal(system_key(), dtype).vector(size, 0, 1),
    ]
    correlations = np.corrcoef(np.array(rows, np.float64)) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 / np.sqrt(size)
    halves = np.corrcoef(rows[0][: size // 2], rows[0][size // 2 :])  # the cosine and sine halves
    assert abs(halves[0, 1]) < 5 / np.sqrt(size / 2)


def test_a_vector_does_not_depend_on_what_else_is_drawn() -> None:
    noise = simulation_noise(5, np.float32)
    alone = noise.vector(7850, 3, 9)
    together = noise.vectors(7850, [1, 3, 4] * 7, [9] * 21)
    assert np.array_equal(alone, together[1])
    assert np.array_equal(alone, together[-2])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 785])
def test_every_length_is_filled(size: int) -> None:
    vector = simulation_noise(0, np.float32).vector(size, 0, 1)
    assert vector.shape == (size,)
    assert np.all(np.isfinite(vector))
    assert len(np.unique(vector)) == size


def test_weighted_sum_is_the_sum_of_weighted_vectors() -> None:
    noise = simulation_noise(2, np.float64)
    owners, weights = list(range(11)), np.linspace(0.1, 2.0, 11)
    expected = sum(weight * noise.vector(500, owner, 4) for owner, weight in zip(owners, weights, strict=True))
    np.testing.assert_allclose(noise.weighted_sum(500, owners, list(weights), 4), expected, rtol=1e-12)


def test_drawing_ahead_changes_nothing() -> None:
    noise = simulation_noise(6, np.float64)
    ahead = DrawAhead(noise, 10, owner=4, rounds=11, ahead=4)
    for t in [1, 2, 3, 4, 5, 5, 3, 11, 10, 12, 1]:
        assert np.array_equal(ahead.vector(t), noise.vector(10, 4, t))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        seed_key(-1)
    with pytest.raises(ValueError, match="32 bytes"):
        KeyedNormal(b"short")
    with pytest.raises(ValueError, match="float32 or float64"):
        KeyedNormal(system_key(), np.float16)


def test_public_generator_is_reproducible_per_purpose() -> None:
    first, again, other = (public_generator(1, purpose).random(4) for purpose in ("a", "a", "b"))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
