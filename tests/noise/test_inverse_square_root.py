"""The banded inverse square root: C by inverting the matrix of its definition, sensitivities by brute force."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedSquareRoot
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Schedule, Separated

Matrix = NDArray[np.float64]

decays = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 0.99))


def workload_of(rounds: int, decay: float = 1.0, rounds_per_epoch: int | None = None) -> Workload:
    return Workload(Schedule(rounds, rounds_per_epoch or rounds), decay, np.ones(rounds))


def inverse_strategy(rounds: int, decay: float, bands: int) -> Matrix:
    """Coefficients of (1 - decay x)^(1/2): binom(1/2, j) (-decay)^j."""
    rows, coefficient = np.zeros((rounds, rounds)), 1.0
    for j in range(min(bands, rounds)):
        rows += coefficient * np.eye(rounds, k=-j)
        coefficient *= -decay * (0.5 - j) / (j + 1)
    return rows


@given(rounds=st.integers(1, 30), decay=decays, bands=st.integers(1, 34))
@settings(deadline=None)
def test_it_factors_the_workload(rounds: int, decay: float, bands: int) -> None:
    mechanism, state, rows = BandedInverseSquareRoot(decay, bands), (), []
    most = 0
    for fresh in torch.eye(rounds, dtype=torch.float64):
        row, state = mechanism.noise(state, len(rows) + 1, fresh)
        rows.append(row)
        most = max(most, len(state))
    b, c_inverse = torch.stack(rows).numpy(), inverse_strategy(rounds, decay, bands)
    a = np.tril(np.power(decay, np.maximum(np.subtract.outer(np.arange(rounds), np.arange(rounds)), 0)))
    np.testing.assert_allclose(b, a @ c_inverse, atol=1e-13)
    workload = workload_of(rounds, decay)
    np.testing.assert_allclose(mechanism.variance(workload), np.sum(b**2, axis=1), rtol=1e-10)
    largest = np.max(np.linalg.norm(np.linalg.inv(c_inverse), axis=0))
    assert mechanism.sensitivity(workload) == pytest.approx(largest, rel=1e-10)
    assert mechanism.memory_vectors(workload) == most


@given(data=st.data(), rounds=st.integers(1, 11), decay=decays, bands=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_no_allowed_pattern_moves_it_farther(data: st.DataObject, rounds: int, decay: float, bands: int) -> None:
    clips = np.array(data.draw(st.lists(st.floats(0.1, 5.0), min_size=rounds, max_size=rounds)))
    if data.draw(st.booleans()):
        clips = np.ones(rounds)
    max_participations, gap = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    c = np.linalg.inv(inverse_strategy(rounds, decay, bands))
    moved = max(
        float(np.linalg.norm(c[:, chosen] @ clips[list(chosen)]))
        for count in range(1, max_participations + 1)
        for chosen in itertools.combinations(range(rounds), count)
        if all(b - a >= gap for a, b in itertools.pairwise(chosen))
    )
    found = BandedInverseSquareRoot(decay, bands).certified(
        Workload(Separated(rounds, max_participations, gap), decay, clips)
    )
    assert found.value >= moved * (1 - 1e-12)
    if found.exact:
        assert found.value == pytest.approx(moved, rel=1e-10)


@pytest.mark.parametrize("decay", [1.0, 0.98, 0.6])
@pytest.mark.parametrize("bands", [1, 2, 3, 4, 8, 16, 64])
def test_its_coefficients_fall(decay: float, bands: int) -> None:
    """Checked, not proved: `certified` refuses where it should not hold."""
    found = BandedInverseSquareRoot(decay, bands).certified(Workload(Separated(900, 5, 60), decay, np.ones(900)))
    assert found.exact


def test_a_strategy_that_rises_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """c = 1, .1, .1, .9: the earliest pattern is charged 2.0100, and another moves it by 2.1564."""
    c = np.array([1.0, 0.1, 0.1, 0.9, 0.0, 0.0])
    inverse = np.linalg.inv(sum(value * np.eye(6, k=-lag) for lag, value in enumerate(c)))[:, 0].tolist()
    monkeypatch.setattr(BandedInverseSquareRoot, "_inverse", inverse)
    with pytest.raises(InputError, match="increase"):
        BandedInverseSquareRoot(1.0, 6).certified(Workload(Separated(6, 2, 2), 1.0, np.ones(6)))


def test_golden_numbers() -> None:
    four, sixteen = BandedInverseSquareRoot(1.0, 4), BandedInverseSquareRoot(1.0, 16)
    last = np.sqrt(four.variance(workload_of(128))[-1])
    assert four.sensitivity(workload_of(128)) == pytest.approx(1.273735591928, rel=1e-11)
    assert four.sensitivity(workload_of(128)) * last == pytest.approx(4.696899995233, rel=1e-11)
    epochs = workload_of(600, rounds_per_epoch=60)
    assert sixteen.sensitivity(epochs) == pytest.approx(4.685847069026, rel=1e-11)
    error = sixteen.sensitivity(epochs) * np.sqrt(sixteen.variance(epochs)[-1])
    assert error == pytest.approx(17.615261067582, rel=1e-11)
    decayed = BandedInverseSquareRoot(0.9, 4).variance(workload_of(60, 0.9))
    assert decayed[-1] == pytest.approx(1.567912587764, rel=1e-11)
    assert np.mean(decayed) == pytest.approx(1.528398347999, rel=1e-11)


def test_with_all_bands_it_is_the_square_root() -> None:
    workload, bands = workload_of(40, 0.95), 40
    ours, theirs = BandedInverseSquareRoot(0.95, bands), BandedSquareRoot(0.95, bands)
    np.testing.assert_allclose(ours.variance(workload), theirs.variance(workload), rtol=1e-11)
    assert ours.sensitivity(workload) == pytest.approx(theirs.sensitivity(workload), rel=1e-12)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: BandedInverseSquareRoot(1.5).certified(workload_of(3)), "decay = 1.5"),
        (lambda: BandedInverseSquareRoot(1.0, 0), "bands = 0"),
        (lambda: BandedInverseSquareRoot(0.5).variance(workload_of(3)), "decay = 0.5"),
    ],
)
def test_what_cannot_be_is_refused(build, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=named):
        build()
