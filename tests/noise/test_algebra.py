"""B C is the workload, and streaming noise is B z, for every mechanism; C is built here from its definition."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Schedule

Matrix = NDArray[np.float64]

decays = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))
lengths = st.integers(1, 40)


def workload_of(rounds: int, decay: float, period: int | None = None) -> Workload:
    return Workload(Schedule(rounds, rounds), decay, np.ones(rounds), period)


def workload_matrix(rounds: int, decay: float, period: int | None = None) -> Matrix:
    """Row t adds the decayed increments since the last restart, by the recursion that defines the sums."""
    rows = np.zeros((rounds, rounds))
    for t in range(rounds):
        restarts = t == 0 or (period is not None and t % period == 0)
        rows[t] = np.eye(rounds)[t] + (0.0 if restarts else decay * rows[t - 1])
    return rows


def tree_matrix(rounds: int, decay: float, period: int | None = None) -> Matrix:
    """Row t is the released node that ends at t: lowbit(place) rounds, decayed towards its end."""
    rows = np.zeros((rounds, rounds))
    for t in range(rounds):
        place = t + 1 if period is None else t % period + 1
        for age in range(place & -place):
            rows[t, t - age] = decay**age
    return rows


def banded_matrix(rounds: int, decay: float, bands: int) -> Matrix:
    """binom(2j, j)/4^j decay^j on the j-th subdiagonal, for fewer than `bands` of them."""
    rows = np.zeros((rounds, rounds))
    coefficient = 1.0
    for j in range(min(bands, rounds)):
        rows += coefficient * decay**j * np.eye(rounds, k=-j)
        coefficient *= (2 * j + 1) / (2 * j + 2)
    return rows


def streamed_matrix(mechanism: Mechanism, rounds: int) -> Matrix:
    """B, by streaming the unit vectors: coordinate i of the fresh vector of round t is 1 if t = i."""
    state, rows = mechanism.start(), []
    for t in range(1, rounds + 1):
        row, state = mechanism.noise(state, t, torch.eye(rounds, dtype=torch.float64)[t - 1])
        rows.append(row.clone())
    return torch.stack(rows).numpy()


def check(mechanism: Mechanism, c: Matrix, decay: float, period: int | None = None) -> None:
    rounds = len(c)
    b = streamed_matrix(mechanism, rounds)
    np.testing.assert_allclose(b @ c, workload_matrix(rounds, decay, period), atol=1e-12)
    workload = workload_of(rounds, decay, period)
    np.testing.assert_allclose(mechanism.variance(workload), np.sum(b**2, axis=1), rtol=1e-9, atol=1e-14)
    assert mechanism.mean_variance(workload) == pytest.approx(np.mean(np.sum(b**2, axis=1)))
    largest = np.sqrt(np.max(np.sum(c**2, axis=0)))
    assert mechanism.sensitivity(workload) == pytest.approx(largest, rel=1e-12)


@given(rounds=lengths, decay=decays, period=st.one_of(st.none(), st.integers(1, 45)))
@settings(deadline=None)
def test_independent_noise_factors_the_workload_as_identity_times_itself(
    rounds: int, decay: float, period: int | None
) -> None:
    check(IndependentGaussian(), workload_matrix(rounds, decay, period), decay, period)


@given(rounds=lengths, decay=decays, period=st.one_of(st.none(), st.integers(1, 45)))
@settings(deadline=None)
def test_the_tree_factors_the_workload(rounds: int, decay: float, period: int | None) -> None:
    check(BinaryTree(decay, period), tree_matrix(rounds, decay, period), decay, period)


@given(
    rounds=lengths,
    decay=decays,
    period=st.one_of(st.none(), st.integers(1, 45)),
    first=st.floats(0.1, 10.0),
)
@settings(deadline=None)
def test_noise_on_the_leaves_factors_the_workload(
    rounds: int, decay: float, period: int | None, first: float
) -> None:
    anchors = np.arange(rounds) % (period or rounds) == 0
    check(LeafGaussian(decay, period, first), np.diag(np.where(anchors, 1.0 / first, 1.0)), decay, period)


@given(rounds=lengths, decay=decays, bands=st.integers(1, 45))
@example(rounds=6, decay=1.0, bands=5)
@settings(deadline=None)
def test_the_banded_square_root_factors_the_workload(rounds: int, decay: float, bands: int) -> None:
    check(BandedSquareRoot(decay, bands), banded_matrix(rounds, decay, bands), decay)


@given(rounds=lengths, decay=decays)
def test_with_all_bands_it_is_the_square_root(rounds: int, decay: float) -> None:
    c = banded_matrix(rounds, decay, rounds)
    np.testing.assert_allclose(c @ c, workload_matrix(rounds, decay), atol=1e-12)


@pytest.mark.parametrize(
    "mechanism",
    [
        IndependentGaussian(),
        BinaryTree(0.9),
        BinaryTree(1.0, period=6),
        BandedSquareRoot(0.9, 5),
        LeafGaussian(1.0, period=6),
    ],
    ids=str,
)
def test_memory_is_what_the_state_holds_at_most(mechanism: Mechanism) -> None:
    rounds = 40
    workload = workload_of(rounds, getattr(mechanism, "decay", 1.0), getattr(mechanism, "period", None))
    state, most = mechanism.start(), 0
    for t in range(1, rounds + 1):
        _, state = mechanism.noise(state, t, torch.zeros(2))
        most = max(most, len(state))
    assert mechanism.memory_vectors(workload) == most


@pytest.mark.parametrize(
    "mechanism",
    [IndependentGaussian(), BinaryTree(0.7), BandedSquareRoot(0.7, 3), LeafGaussian(0.7, 4, first=3.0)],
    ids=str,
)
def test_leading_axes_are_streams_of_their_own(mechanism: Mechanism) -> None:
    fresh = torch.randn((11, 2, 3, 4), generator=torch.Generator().manual_seed(5))
    together, alone = mechanism.start(), mechanism.start()
    for t in range(1, 12):
        all_rows, together = mechanism.noise(together, t, fresh[t - 1])
        one_row, alone = mechanism.noise(alone, t, fresh[t - 1, 1, 2])
        assert torch.equal(all_rows[1, 2], one_row)


@pytest.mark.parametrize(
    "mechanism",
    [IndependentGaussian(), BinaryTree(0.7), BandedSquareRoot(0.7, 3), LeafGaussian(0.7, 4, first=3.0)],
    ids=str,
)
def test_streaming_leaves_fresh_vectors_and_old_states_alone(mechanism: Mechanism) -> None:
    state = mechanism.start()
    for t in range(1, 20):
        fresh = torch.full((3,), float(t))
        before = [vector.clone() for vector in state]
        _, following = mechanism.noise(state, t, fresh)
        assert torch.equal(fresh, torch.full((3,), float(t)))
        assert all(map(torch.equal, before, state))
        state = following


@pytest.mark.parametrize(
    ("mechanism", "workload", "named"),
    [
        (BinaryTree(0.5), workload_of(4, 0.6), "decay = 0.5"),
        (BinaryTree(0.5), workload_of(4, 0.5, period=2), "period = None"),
        (BandedSquareRoot(0.5), workload_of(4, 0.5, period=2), "period = None"),
        (BandedSquareRoot(0.5), workload_of(4, 1.0), "decay = 0.5"),
        (LeafGaussian(0.5), workload_of(4, 0.5, period=2), "period = None"),
    ],
)
def test_a_mechanism_refuses_a_workload_that_it_does_not_factor(
    mechanism: Mechanism, workload: Workload, named: str
) -> None:
    for ask in (mechanism.sensitivity, mechanism.variance):
        with pytest.raises(InputError, match=named):
            ask(workload)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: BinaryTree(1.5).certified(workload_of(3, 1.0)), "decay = 1.5"),
        (lambda: BinaryTree(1.0, period=0).certified(workload_of(3, 1.0)), "period = 0"),
        (lambda: BandedSquareRoot(-0.1).certified(workload_of(3, 1.0)), "decay = -0.1"),
        (lambda: BandedSquareRoot(1.0, 0), "bands = 0"),
        (lambda: LeafGaussian(1.5).certified(workload_of(3, 1.0)), "decay = 1.5"),
        (lambda: LeafGaussian(1.0, period=0).certified(workload_of(3, 1.0)), "period = 0"),
        (lambda: LeafGaussian(1.0, first=0.0), "first = 0"),
        (lambda: workload_of(3, float("nan")), "decay = nan"),
        (lambda: workload_of(0, 1.0), "rounds = 0"),
        (lambda: workload_of(3, 1.0, period=0), "period = 0"),
        (lambda: Workload(Schedule(3, 3), 1.0, np.ones(2)), "clips"),
        (lambda: Workload(Schedule(2, 2), 1.0, np.array([1.0, -1.0])), "clips"),
        (lambda: Workload(Schedule(2, 2), 1.0, np.array([1.0, np.inf])), "clips"),
    ],
)
def test_what_cannot_be_a_mechanism_or_a_workload_is_refused(build, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=named):
        build()
