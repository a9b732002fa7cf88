"""Buffered Toeplitz noise: C from its definition as a product of polynomials, brute force, and others' numbers."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.noise import series
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from tests.noise.matrices import (
    Matrix,
    clip_norms,
    farthest,
    separated,
    stream,
    streamed_matrix,
    workload_matrix,
    workload_of,
)

decays = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.05, 0.999))


def strategy(mechanism: BufferedToeplitz, rounds: int) -> Matrix:
    """C diag(D): Π (I - φ S) Π (I - θ S)^-1 with the shift S."""
    shift = np.eye(rounds, k=-1)
    c = np.eye(rounds)
    for zero in mechanism.phi:
        c = c @ (np.eye(rounds) - zero * shift)
    for pole in mechanism.theta:
        c = np.linalg.solve(np.eye(rounds) - pole * shift, c)
    return c * np.array(mechanism.column_scale[:rounds] or [1.0] * rounds)


@st.composite
def mechanisms(draw: st.DrawFn, rounds: int, decay: float) -> BufferedToeplitz:
    """Members of every kind: none to three pairs, θ_1 = decay, φ_m = 0, with and without scale."""
    pairs = draw(st.integers(0, 3))
    nonincreasing = [draw(st.sampled_from([1.0, draw(st.floats(0.3, 0.999))]))] if pairs else []
    while len(nonincreasing) < 2 * pairs:
        nonincreasing.append(nonincreasing[-1] * draw(st.floats(0.2, 0.97)))
    if pairs and draw(st.booleans()):
        nonincreasing[-1] = 0.0
    largest = decay or 1.0
    scaled = [root * largest for root in nonincreasing]
    scale: tuple[float, ...] = ()
    if draw(st.booleans()):
        scale = tuple(draw(st.lists(st.floats(0.2, 5.0), min_size=rounds, max_size=rounds + 2)))
    return BufferedToeplitz(decay, tuple(scaled[0::2]), tuple(scaled[1::2]), scale)


@given(data=st.data(), rounds=st.integers(1, 30), decay=decays)
@settings(max_examples=70)
def test_buffered_toeplitz_noise_factors_the_workload(data: st.DataObject, rounds: int, decay: float) -> None:
    mechanism = data.draw(mechanisms(rounds, decay))
    b, c = streamed_matrix(mechanism, rounds), strategy(mechanism, rounds)
    np.testing.assert_allclose(b @ c, workload_matrix(rounds, decay), atol=1e-11)
    workload = workload_of(rounds, decay)
    lengths = {len(state) for _, state in stream(mechanism, torch.zeros(rounds, 1))}
    assert lengths == {mechanism.memory_vectors(workload)}
    np.testing.assert_allclose(mechanism.variance(workload), np.sum(b**2, axis=1), rtol=1e-9, atol=1e-14)
    largest = np.sqrt(np.max(np.sum(c**2, axis=0)))
    assert mechanism.sensitivity(workload) == pytest.approx(largest, rel=1e-11)
    assert mechanism.fresh_std <= np.min(np.diag(b)) * (1 + 1e-12)


@given(data=st.data(), rounds=st.integers(1, 40), decay=decays)
@settings(max_examples=70)
def test_strategy_coefficients_never_increase_and_are_never_negative(
    data: st.DataObject, rounds: int, decay: float
) -> None:
    """The property that the certificates rest on."""
    series = data.draw(mechanisms(rounds, decay)).strategy_series(rounds)
    assert series[0] == 1.0
    assert np.all(series >= 0.0)
    assert np.all(series[1:] <= series[:-1] * (1.0 + 1e-15))


@pytest.mark.slow
@given(data=st.data(), rounds=st.integers(1, 20), decay=decays)
@settings(max_examples=70)
def test_sensitivity_of_every_fixed_order_is_exact(data: st.DataObject, rounds: int, decay: float) -> None:
    mechanism = data.draw(mechanisms(rounds, decay))
    rounds_per_epoch = data.draw(st.integers(max(1, rounds // 8), 24))
    workload = workload_of(rounds, decay, rounds_per_epoch, clips=data.draw(clip_norms(rounds)))
    found = mechanism.certified(workload)
    assert found.exact
    assert found.value == pytest.approx(farthest(strategy(mechanism, rounds), workload), rel=1e-10)


@pytest.mark.slow
@given(data=st.data(), rounds=st.integers(1, 12), decay=decays)
@settings(max_examples=100)
def test_sensitivity_of_separated_rounds_is_exact_or_marked_as_a_bound(
    data: st.DataObject, rounds: int, decay: float
) -> None:
    mechanism = data.draw(mechanisms(rounds, decay))
    most, gap, clips = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 14)), data.draw(clip_norms(rounds))
    workload = separated(rounds, most, gap, decay, clips=clips)
    found, moved = mechanism.certified(workload), farthest(strategy(mechanism, rounds), workload)
    assert found.value >= moved * (1.0 - 1e-12)
    if found.exact:
        assert found.value == pytest.approx(moved, rel=1e-10)


def test_special_roots_reproduce_independent_leaf_and_lambda_cgd_noise() -> None:
    workload = workload_of(17, 0.9)
    independent, leaf = BufferedToeplitz(0.9, (0.9,), (0.0,)), BufferedToeplitz(0.9)
    for ours, theirs in ((independent, IndependentGaussian()), (leaf, LeafGaussian(0.9))):
        np.testing.assert_allclose(ours.variance(workload), theirs.variance(workload), rtol=1e-14)
        assert ours.sensitivity(workload) == pytest.approx(theirs.sensitivity(workload), rel=1e-14)
        assert ours.memory_vectors(workload) == theirs.memory_vectors(workload)
    b = streamed_matrix(BufferedToeplitz(1.0, (0.8,), (0.0,)), 9)
    increments = b - np.vstack([np.zeros(9), b[:-1]])
    np.testing.assert_allclose(increments, np.eye(9) - 0.8 * np.eye(9, k=-1), atol=1e-15)


@pytest.mark.parametrize(
    ("mechanism", "vectors"),
    [
        (BufferedToeplitz(1.0, (0.9,), (0.0,)), 1),
        (BufferedToeplitz(1.0, (0.9,), (0.3,)), 2),
        (BufferedToeplitz(1.0, (0.9, 0.5), (0.7, 0.0)), 2),
        (BufferedToeplitz(1.0, (0.9, 0.5), (0.7, 0.2)), 3),
        (BufferedToeplitz(1.0, (0.9, 0.5, 0.3), (0.7, 0.4, 0.2)), 4),
        (BufferedToeplitz(0.0, (0.9, 0.5), (0.7, 0.2)), 2),
        (BufferedToeplitz(0.0, (0.9, 0.5), (0.7, 0.0)), 2),
    ],
)
def test_memory_vectors_match_the_expected_number_for_given_roots(
    mechanism: BufferedToeplitz, vectors: int
) -> None:
    assert mechanism.memory_vectors(workload_of(9, mechanism.decay)) == vectors


def test_sensitivity_of_separated_rounds_with_unequal_clips_is_the_exact_worst_pattern() -> None:
    """Unequal clips, separated: the worst pattern; by rows up to 5 % above it, others were 30 % above."""
    generator = np.random.default_rng(5)
    mechanism = BufferedToeplitz(1.0, (0.95, 0.6), (0.8, 0.2))
    for _ in range(20):
        workload = separated(12, 3, 3, clips=generator.uniform(0.2, 2.0, 12))
        found, moved = mechanism.certified(workload), farthest(strategy(mechanism, 12), workload)
        assert found.exact
        assert found.value == pytest.approx(moved, rel=1e-12)


def test_column_scale_has_the_same_sensitivity_as_scaled_clips() -> None:
    """C diag(D) with clips s is C with clips s D."""
    scale = (1.0, 1.2, 0.7, 2.0, 1.5, 3.0)
    plain, scaled = BufferedToeplitz(1.0, (0.9,), (0.4,)), BufferedToeplitz(1.0, (0.9,), (0.4,), scale)
    for workload in (workload_of(6, clips=2.0), workload_of(6, 1.0, 2, clips=2.0), separated(6, 2, 2, clips=2.0)):
        longer = dataclasses.replace(workload, clips=2.0 * np.array(scale))
        assert scaled.certified(workload) == plain.certified(longer)


def test_scaled_variance_is_the_same_for_whole_numbers_of_either_type() -> None:
    scale = (1.0, 1.2, 0.7, 2.0)
    whole, real = BufferedToeplitz(1, (0.5,), (0,), scale), BufferedToeplitz(1.0, (0.5,), (0.0,), scale)
    assert whole.variance(workload_of(4)).tolist() == real.variance(workload_of(4)).tolist()


def test_a_run_that_stops_early_keeps_its_strategy() -> None:
    mechanism = BufferedToeplitz(1.0, (0.9,), (0.4,), (1.0, 1.5, 2.0, 4.0))
    short = mechanism.sensitivity(workload_of(2))
    assert short == pytest.approx(np.max(np.linalg.norm(strategy(mechanism, 2), axis=0)))


def test_long_streams_stay_accurate_in_float64() -> None:
    """A pole at 1 adds up all fresh vectors: after 20,000 rounds the noise is what the series says."""
    rounds, mechanism = 20_000, BufferedToeplitz(1.0, (0.9999, 0.98), (0.999, 0.7))
    fresh = torch.randn((rounds, 1), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    *_, (row, _) = stream(mechanism, fresh)
    b = np.cumsum(series.series_from_roots(mechanism.phi, mechanism.theta, rounds))
    assert float(row) == pytest.approx(float(b[::-1] @ fresh[:, 0].numpy()), abs=1e-11)


THETA, OMEGA = (0.9999528892, 0.9857068667), (0.0122853238, 0.1878393665)
"""A fit of jax-privacy (n = 1e5), published as poles and weights."""

PHI = (0.9991333338233, 0.7864017317767)


def test_residues_of_jax_privacys_roots_match_its_published_weights() -> None:
    np.testing.assert_allclose(series.residues(THETA, PHI), OMEGA, rtol=1e-9)
    np.testing.assert_allclose(series.residues(PHI, THETA), (-5.17258988e-5, -0.2000729644), rtol=1e-8)


@pytest.mark.parametrize(
    ("rounds", "squared_norm", "variance"),
    [
        (16, 1.500959212135, 2.903667678452),
        (1000, 2.708936433047, 4.849722161935),
        (100_000, 4.166791846703, 6.733124995039),
        (1_000_000, 4.166921440855, 18.64113540934),
    ],
)
def test_sensitivity_and_variance_of_jax_privacys_mechanism_match_golden_values(
    rounds: int, squared_norm: float, variance: float
) -> None:
    mechanism = BufferedToeplitz(1.0, THETA, PHI)
    assert mechanism.sensitivity(workload_of(rounds)) ** 2 == pytest.approx(squared_norm, rel=1e-9)
    assert mechanism.variance(workload_of(rounds))[-1] == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize(
    ("rounds", "gap", "most", "squared_norm"),
    [
        (600, 60, 10, 34.1410921634),
        (128, 8, 4, 22.2454965657),
        (33, 2, 99, 190.979341677),
        (100, 7, 5, 32.2731030912),
    ],
)
def test_sensitivity_of_separated_participation_matches_golden_values(
    rounds: int, gap: int, most: int, squared_norm: float
) -> None:
    found = BufferedToeplitz(1.0, (0.98, 0.7), (0.9, 0.3)).certified(separated(rounds, most, gap))
    assert found.exact
    assert found.value**2 == pytest.approx(squared_norm, rel=1e-10)


def test_sensitivity_and_variance_of_lambda_cgd_match_golden_values() -> None:
    mechanism = BufferedToeplitz(1.0, (0.96,), (0.0,))
    assert mechanism.sensitivity(workload_of(60)) == pytest.approx(3.558088080423, rel=1e-12)
    assert mechanism.variance(workload_of(60))[-1] == pytest.approx(1.046135746450**2, rel=1e-11)
    assert mechanism.variance(workload_of(60))[-1] == pytest.approx(1 + 59 * 0.04**2, rel=1e-13)
    assert mechanism.sensitivity(workload_of(60, rounds_per_epoch=6)) == pytest.approx(22.845543045804, rel=1e-12)
    clips = np.sqrt((1 - 0.96**120) / (1 - 0.96 ** (2 * (60.0 - np.arange(60)))))
    assert mechanism.sensitivity(workload_of(60, 1.0, 6, clips=clips)) == pytest.approx(24.580195976483, rel=1e-12)


def test_roots_for_a_decay_are_the_roots_for_decay_one_times_that_decay() -> None:
    mechanism = BufferedToeplitz(0.9, (0.9 * 0.95, 0.9 * 0.5), (0.9 * 0.8, 0.9 * 0.1))
    assert mechanism.variance(workload_of(60, 0.9))[-1] == pytest.approx(1.397445280669, rel=1e-11)
    assert mechanism.sensitivity(separated(60, 5, 12, 0.9)) ** 2 == pytest.approx(8.434140896455, rel=1e-11)
    one = BufferedToeplitz(1.0, (0.95, 0.5), (0.8, 0.1))
    np.testing.assert_allclose(
        mechanism.strategy_series(9), one.strategy_series(9) * 0.9 ** np.arange(9), rtol=1e-12
    )
