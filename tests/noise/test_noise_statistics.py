"""The noise that is released has the variance and the correlations that accounting charges for.

Fixed seeds.  Every assertion compares a chi-square or a normal statistic with its 1e-6 quantile, so that a correct
program with another seed would fail one run in about 10^5.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from fedpriv.core.random import simulation_noise
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from tests.noise.matrices import Matrix, stream, streamed_matrix, workload_of

ROUNDS, SIZE, FALSE_ALARM = 24, 20_000, 1e-6

MEMBERS = [
    IndependentGaussian(),
    BinaryTree(1.0),
    BinaryTree(0.8),
    BinaryTree(1.0, period=7),
    BandedSquareRoot(1.0, 6),
    BandedSquareRoot(0.8, 24),
    LeafGaussian(1.0, 7, first=2.0),
]


def released(mechanism: Mechanism, seed: int) -> Matrix:
    source = simulation_noise(seed, np.float64)
    fresh = (torch.from_numpy(source.vector(SIZE, 0, t)) for t in range(1, ROUNDS + 1))
    return torch.stack([row.clone() for row, _ in stream(mechanism, fresh)]).numpy()


@pytest.mark.parametrize("mechanism", MEMBERS, ids=str)
def test_the_variance_of_every_release_is_the_accounted_one(mechanism: Mechanism) -> None:
    decay, period = getattr(mechanism, "decay", 1.0), getattr(mechanism, "period", None)
    variance = mechanism.variance(workload_of(ROUNDS, decay, period=period))
    squared_norm = np.sum(released(mechanism, seed=11) ** 2, axis=1) / variance
    low, high = chi2.ppf([FALSE_ALARM / ROUNDS / 2, 1 - FALSE_ALARM / ROUNDS / 2], SIZE)
    assert np.all((low < squared_norm) & (squared_norm < high))


@pytest.mark.parametrize("mechanism", MEMBERS, ids=str)
def test_undoing_b_leaves_independent_standard_normals(mechanism: Mechanism) -> None:
    """B^-1 of the released noise is white: no round reuses a fresh vector, none forgets it."""
    white = np.linalg.solve(streamed_matrix(mechanism, ROUNDS), released(mechanism, seed=12))
    products = white @ white.T / np.sqrt(SIZE)
    bound = norm.ppf(1 - FALSE_ALARM / ROUNDS**2 / 2)
    assert np.all(np.abs(products[np.triu_indices(ROUNDS, 1)]) < 1.05 * bound)
    assert np.all(np.abs(np.diag(products) - np.sqrt(SIZE)) < 1.05 * np.sqrt(2) * bound)
