"""Buffered Toeplitz noise in numbers: jax-privacy's mechanisms, and λ-CGD's closed forms."""

import numpy as np
import pytest

from fedpriv.noise import series
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Schedule, Separated


def workload_of(rounds: int, decay: float = 1.0, rounds_per_epoch: int | None = None) -> Workload:
    return Workload(Schedule(rounds, rounds_per_epoch or rounds), decay, np.ones(rounds))


THETA, OMEGA = (0.9999528892, 0.9857068667), (0.0122853238, 0.1878393665)
"""A fit of jax-privacy (n = 1e5), published as poles and weights."""

PHI = (0.9991333338233, 0.7864017317767)


def test_jax_privacys_mechanism_has_interlacing_roots() -> None:
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
def test_jax_privacys_mechanism_in_numbers(rounds: int, squared_norm: float, variance: float) -> None:
    mechanism = BufferedToeplitz(1.0, THETA, PHI)
    assert mechanism.sensitivity(workload_of(rounds)) ** 2 == pytest.approx(squared_norm, rel=1e-9)
    assert mechanism.variance(workload_of(rounds))[-1] == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize(
    ("rounds", "min_separation", "max_participations", "squared_norm"),
    [
        (600, 60, 10, 34.1410921634),
        (128, 8, 4, 22.2454965657),
        (33, 2, 99, 190.979341677),
        (100, 7, 5, 32.2731030912),
    ],
)
def test_separated_participation_in_numbers(
    rounds: int, min_separation: int, max_participations: int, squared_norm: float
) -> None:
    workload = Workload(Separated(rounds, max_participations, min_separation), 1.0, np.ones(rounds))
    found = BufferedToeplitz(1.0, (0.98, 0.7), (0.9, 0.3)).certified(workload)
    assert found.exact
    assert found.value**2 == pytest.approx(squared_norm, rel=1e-10)


def test_lambda_cgd_in_numbers() -> None:
    mechanism = BufferedToeplitz(1.0, (0.96,), (0.0,))
    assert mechanism.sensitivity(workload_of(60)) == pytest.approx(3.558088080423, rel=1e-12)
    assert mechanism.variance(workload_of(60))[-1] == pytest.approx(1.046135746450**2, rel=1e-11)
    assert mechanism.variance(workload_of(60))[-1] == pytest.approx(1 + 59 * 0.04**2, rel=1e-13)
    assert mechanism.sensitivity(workload_of(60, rounds_per_epoch=6)) == pytest.approx(22.845543045804, rel=1e-12)
    clips = np.sqrt((1 - 0.96**120) / (1 - 0.96 ** (2 * (60.0 - np.arange(60)))))
    with_columns = Workload(Schedule(60, 6), 1.0, clips)
    assert mechanism.sensitivity(with_columns) == pytest.approx(24.580195976483, rel=1e-12)


def test_roots_for_a_decay_are_roots_for_one_times_the_decay() -> None:
    mechanism = BufferedToeplitz(0.9, (0.9 * 0.95, 0.9 * 0.5), (0.9 * 0.8, 0.9 * 0.1))
    assert mechanism.variance(workload_of(60, 0.9))[-1] == pytest.approx(1.397445280669, rel=1e-11)
    workload = Workload(Separated(60, 5, 12), 0.9, np.ones(60))
    assert mechanism.sensitivity(workload) ** 2 == pytest.approx(8.434140896455, rel=1e-11)
    one = BufferedToeplitz(1.0, (0.95, 0.5), (0.8, 0.1))
    np.testing.assert_allclose(mechanism.strategy(9), one.strategy(9) * 0.9 ** np.arange(9), rtol=1e-12)
