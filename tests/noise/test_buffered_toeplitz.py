"""Buffered Toeplitz noise: C from its definition as a product of polynomials, sensitivities by brute force."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.noise import series
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Schedule, Separated

Matrix = NDArray[np.float64]

decays = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.05, 0.999))


def workload_of(
    rounds: int, decay: float = 1.0, rounds_per_epoch: int | None = None, period: int | None = None
) -> Workload:
    return Workload(Schedule(rounds, rounds_per_epoch or rounds), decay, np.ones(rounds), period)


def workload_matrix(rounds: int, decay: float, period: int | None) -> Matrix:
    """Row t adds the decayed increments since the last restart, by the recursion that defines the sums."""
    rows = np.zeros((rounds, rounds))
    for t in range(rounds):
        restarts = t == 0 or (period is not None and t % period == 0)
        rows[t] = np.eye(rounds)[t] + (0.0 if restarts else decay * rows[t - 1])
    return rows


def strategy(mechanism: BufferedToeplitz, rounds: int) -> Matrix:
    """C diag(D): Π (I - φ S) Π (I - θ S)^-1 with the shift S, cut at restarts."""
    shift = np.eye(rounds, k=-1)
    c = np.eye(rounds)
    for zero in mechanism.phi:
        c = c @ (np.eye(rounds) - zero * shift)
    for pole in mechanism.theta:
        c = np.linalg.solve(np.eye(rounds) - pole * shift, c)
    if mechanism.period is not None:
        block = np.arange(rounds) // mechanism.period
        c = np.where(np.equal.outer(block, block), c, 0.0)
    return c * np.array(mechanism.column_scale[:rounds] or [1.0] * rounds)


def streamed_matrix(mechanism: BufferedToeplitz, rounds: int) -> Matrix:
    state, rows = mechanism.start(), []
    for t in range(1, rounds + 1):
        row, state = mechanism.noise(state, t, torch.eye(rounds, dtype=torch.float64)[t - 1])
        rows.append(row.clone())
        assert len(state) == mechanism.memory_vectors(
            workload_of(rounds, mechanism.decay, period=mechanism.period)
        )
    return torch.stack(rows).numpy()


@st.composite
def mechanisms(draw: st.DrawFn, rounds: int, decay: float, period: int | None = None) -> BufferedToeplitz:
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
    return BufferedToeplitz(decay, tuple(scaled[0::2]), tuple(scaled[1::2]), scale, period)


@given(data=st.data(), rounds=st.integers(1, 30), decay=decays, period=st.one_of(st.none(), st.integers(1, 32)))
@settings(max_examples=200, deadline=None)
def test_it_factors_the_workload(data: st.DataObject, rounds: int, decay: float, period: int | None) -> None:
    mechanism = data.draw(mechanisms(rounds, decay, period))
    b, c = streamed_matrix(mechanism, rounds), strategy(mechanism, rounds)
    np.testing.assert_allclose(b @ c, workload_matrix(rounds, decay, period), atol=1e-11)
    workload = workload_of(rounds, decay, period=period)
    np.testing.assert_allclose(mechanism.variance(workload), np.sum(b**2, axis=1), rtol=1e-9, atol=1e-14)
    largest = np.sqrt(np.max(np.sum(c**2, axis=0)))
    assert mechanism.sensitivity(workload) == pytest.approx(largest, rel=1e-11)
    assert mechanism.fresh_std <= np.min(np.diag(b)) * (1 + 1e-12)


@given(data=st.data(), rounds=st.integers(1, 40), decay=decays)
@settings(max_examples=200, deadline=None)
def test_its_coefficients_never_increase_and_are_never_negative(
    data: st.DataObject, rounds: int, decay: float
) -> None:
    """The property that the certificates rest on."""
    series = data.draw(mechanisms(rounds, decay)).strategy(rounds)
    assert series[0] == 1.0
    assert np.all(series >= 0.0)
    assert np.all(series[1:] <= series[:-1] * (1.0 + 1e-15))


def patterns(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Every set of rounds (from 0) in which one record may take part."""
    schedule, rounds = workload.schedule, workload.rounds
    if isinstance(schedule, Schedule):
        yield from (
            tuple(range(p, rounds, schedule.rounds_per_epoch))
            for p in range(min(schedule.rounds_per_epoch, rounds))
        )
        return
    assert isinstance(schedule, Separated)
    for max_participations in range(1, schedule.max_participations + 1):
        for chosen in itertools.combinations(range(rounds), max_participations):
            if all(b - a >= schedule.min_separation for a, b in itertools.pairwise(chosen)):
                yield chosen


def farthest(c: Matrix, workload: Workload) -> float:
    """Over all patterns and signs of increments ±clip."""
    moved = 0.0
    for chosen in patterns(workload):
        for signs in itertools.product((1.0, -1.0), repeat=len(chosen) - 1):
            step = c[:, chosen] @ (workload.clips[list(chosen)] * np.array([1.0, *signs]))
            moved = max(moved, float(np.linalg.norm(step)))
    return moved


@st.composite
def clip_norms(draw: st.DrawFn, rounds: int) -> Matrix:
    if draw(st.booleans()):
        return np.full(rounds, draw(st.floats(0.1, 10.0)))
    return np.array(draw(st.lists(st.floats(0.1, 10.0), min_size=rounds, max_size=rounds)))


@given(data=st.data(), rounds=st.integers(1, 20), decay=decays)
@settings(max_examples=200, deadline=None)
def test_every_fixed_order_is_exact(data: st.DataObject, rounds: int, decay: float) -> None:
    period = data.draw(st.one_of(st.none(), st.integers(1, 24)))
    mechanism = data.draw(mechanisms(rounds, decay, period))
    rounds_per_epoch = data.draw(st.integers(max(1, rounds // 8), 24))
    workload = Workload(Schedule(rounds, rounds_per_epoch), decay, data.draw(clip_norms(rounds)), period)
    found = mechanism.certified(workload)
    assert found.exact
    assert found.value == pytest.approx(farthest(strategy(mechanism, rounds), workload), rel=1e-10)


@given(data=st.data(), rounds=st.integers(1, 12), decay=decays)
@settings(max_examples=300, deadline=None)
def test_separated_patterns_are_exact_or_say_that_they_are_bounds(
    data: st.DataObject, rounds: int, decay: float
) -> None:
    period = data.draw(st.one_of(st.none(), st.integers(1, 14)))
    mechanism = data.draw(mechanisms(rounds, decay, period))
    pattern = Separated(rounds, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 14)))
    workload = Workload(pattern, decay, data.draw(clip_norms(rounds)), period)
    found, moved = mechanism.certified(workload), farthest(strategy(mechanism, rounds), workload)
    assert found.value >= moved * (1.0 - 1e-12)
    if found.exact:
        assert found.value == pytest.approx(moved, rel=1e-10)


def test_members_are_the_mechanisms_that_they_are_named_after() -> None:
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
    ("theta", "phi", "decay", "vectors"),
    [
        ((0.9,), (0.0,), 1.0, 1),
        ((0.9,), (0.3,), 1.0, 2),
        ((0.9, 0.5), (0.7, 0.0), 1.0, 2),
        ((0.9, 0.5), (0.7, 0.2), 1.0, 3),
        ((0.9, 0.5, 0.3), (0.7, 0.4, 0.2), 1.0, 4),
        ((0.9, 0.5), (0.7, 0.2), 0.0, 2),
        ((0.9, 0.5), (0.7, 0.0), 0.0, 2),
    ],
)
def test_memory_counts_the_poles_above_zero(
    theta: tuple[float, ...], phi: tuple[float, ...], decay: float, vectors: int
) -> None:
    assert BufferedToeplitz(decay, theta, phi).memory_vectors(workload_of(9, decay)) == vectors


def test_the_row_wise_bound_is_tighter_than_what_there_was() -> None:
    """Unequal clips, separated: certified bounds stay within 5 % of the worst pattern; others were 30 % above."""
    generator = np.random.default_rng(5)
    for _ in range(20):
        mechanism = BufferedToeplitz(1.0, (0.95, 0.6), (0.8, 0.2))
        workload = Workload(Separated(12, 3, 3), 1.0, generator.uniform(0.2, 2.0, 12))
        found, moved = mechanism.certified(workload), farthest(strategy(mechanism, 12), workload)
        assert not found.exact
        assert moved * (1 - 1e-12) <= found.value <= 1.05 * moved


def test_a_column_scale_is_the_same_as_clips() -> None:
    """C diag(D) with clips s is C with clips s D."""
    scale = (1.0, 1.2, 0.7, 2.0, 1.5, 3.0)
    plain, scaled = BufferedToeplitz(1.0, (0.9,), (0.4,)), BufferedToeplitz(1.0, (0.9,), (0.4,), scale)
    for schedule in (Schedule(6, 6), Schedule(6, 2), Separated(6, 2, 2)):
        ours = scaled.certified(Workload(schedule, 1.0, np.full(6, 2.0)))
        theirs = plain.certified(Workload(schedule, 1.0, 2.0 * np.array(scale)))
        assert ours == theirs


def test_a_run_that_stops_early_keeps_its_strategy_and_a_longer_one_is_refused() -> None:
    mechanism = BufferedToeplitz(1.0, (0.9,), (0.4,), (1.0, 1.5, 2.0, 4.0))
    short = mechanism.sensitivity(workload_of(2))
    assert short == pytest.approx(np.max(np.linalg.norm(strategy(mechanism, 2), axis=0)))
    for ask in (mechanism.sensitivity, mechanism.variance):
        with pytest.raises(InputError, match="planned for 4 rounds"):
            ask(workload_of(5))
    with pytest.raises(InputError, match="round 5"):
        mechanism.noise((torch.zeros(1), torch.zeros(1)), 5, torch.zeros(1))


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: BufferedToeplitz(1.0, (0.5,), ()), "theta has 1 roots and phi 0"),
        (lambda: BufferedToeplitz(1.0, (0.5,), (0.5,)), "θ_1 > φ_1"),
        (lambda: BufferedToeplitz(1.0, (0.5,), (0.6,)), "θ_1 > φ_1"),
        (lambda: BufferedToeplitz(1.0, (0.5,), (-0.1,)), "θ_1 > φ_1"),
        (lambda: BufferedToeplitz(1.0, (1.1,), (0.5,)), "1 ≥ θ_1"),
        (lambda: BufferedToeplitz(0.9, (0.95,), (0.5,)), "0.9 ≥ θ_1"),
        (lambda: BufferedToeplitz(1.0, (0.9, 0.8), (0.7, 0.6)), "θ_1 > φ_1"),
        (lambda: BufferedToeplitz(1.0, (math.nan,), (0.5,)), "θ_1 > φ_1"),
        (lambda: BufferedToeplitz(1.0, (0.9,), (math.nan,)), "θ_1 > φ_1"),
        (lambda: BufferedToeplitz(1.5).certified(workload_of(3, 1.0)), "decay = 1.5"),
        (lambda: BufferedToeplitz(1.0, period=0).certified(workload_of(3, 1.0)), "period = 0"),
        (lambda: BufferedToeplitz(1.0, column_scale=(1.0, 0.0)), "column_scale"),
        (lambda: BufferedToeplitz(1.0, column_scale=(math.inf,)), "column_scale"),
        (lambda: BufferedToeplitz(0.5, (0.4,), (0.1,)).sensitivity(workload_of(3, 1.0)), "decay = 0.5"),
        (lambda: BufferedToeplitz(1.0).variance(workload_of(3, 1.0, period=2)), "period = None"),
    ],
)
def test_what_no_certificate_covers_is_refused(build, named: str) -> None:  # type: ignore[no-untyped-def]
    """A server that names the roots would gain noise that costs less than it hides: a guard builds them too."""
    with pytest.raises(InputError, match=named):
        build()


@pytest.mark.parametrize("scale", [(), tuple(1.0 + 0.1 * t for t in range(20))])
def test_streaming_leaves_fresh_vectors_and_old_states_alone(scale: tuple[float, ...]) -> None:
    mechanism, state = BufferedToeplitz(0.9, (0.9, 0.4), (0.6, 0.0), scale, period=7), ()
    for t in range(1, 20):
        fresh = torch.full((3,), float(t))
        before = [vector.clone() for vector in state]
        _, following = mechanism.noise(state, t, fresh)
        assert torch.equal(fresh, torch.full((3,), float(t)))
        assert all(map(torch.equal, before, state))
        state = following


def test_long_streams_stay_accurate_in_float64() -> None:
    """A pole at 1 adds up all fresh vectors: after 20,000 rounds the noise is what the series says."""
    rounds, mechanism = 20_000, BufferedToeplitz(1.0, (0.9999, 0.98), (0.999, 0.7))
    fresh = torch.randn((rounds, 1), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    row, state = fresh[0], mechanism.start()
    for t in range(1, rounds + 1):
        row, state = mechanism.noise(state, t, fresh[t - 1])
    inverse = series.of_roots(mechanism.phi, mechanism.theta, rounds)
    b = np.cumsum(inverse)
    assert float(row) == pytest.approx(float(b[::-1] @ fresh[:, 0].numpy()), abs=1e-11)
