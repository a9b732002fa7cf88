"""Column scale: what records cost before and after, and how far clips go."""

import numpy as np
import pytest

from fedpriv.noise import series
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.mechanism import InnerProducts, Mechanism, column_scale, fixed_order_scale, toeplitz_inner
from fedpriv.noise.tree import BinaryTree, column_squared_norms
from tests.noise.matrices import Matrix, workload_of

ROUNDS, PLACES = 60, 6
CGD, PLAIN = BufferedToeplitz(1.0, (0.96,), (0.0,)), workload_of(ROUNDS, 1.0, PLACES)


def tree_matrix(rounds: int) -> Matrix:
    rows = np.zeros((rounds, rounds))
    for t in range(1, rounds + 1):
        rows[t - 1, t - (t & -t) : t] = 1.0
    return rows


def inner_of(c: Matrix) -> InnerProducts:
    return lambda held: c[:, held].T @ c[:, held]


MEMBERS: dict[str, tuple[Mechanism, InnerProducts, float]] = {
    "tree": (BinaryTree(), inner_of(tree_matrix(ROUNDS)), 0.70),
    "independent": (IndependentGaussian(), inner_of(np.tri(ROUNDS)), 0.75),
    "λ-CGD": (CGD, toeplitz_inner(CGD.strategy_series(ROUNDS), ROUNDS), 0.85),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_fixed_order_scale_raises_every_record_to_the_cost_of_the_worst(name: str) -> None:
    mechanism, inner, lowest = MEMBERS[name]
    scale = fixed_order_scale(inner, PLAIN)
    scaled = workload_of(ROUNDS, 1.0, PLACES, clips=scale)
    assert mechanism.sensitivity(scaled) == pytest.approx(mechanism.sensitivity(PLAIN), rel=1e-9)
    for place in range(PLACES):
        held = np.arange(place, ROUNDS, PLACES)
        squared_norm = scale[held] @ inner(held) @ scale[held]
        assert squared_norm == pytest.approx(mechanism.sensitivity(PLAIN) ** 2, rel=1e-9)
    assert np.min(scale) == pytest.approx(lowest, abs=0.006)
    assert np.sum(np.log(scale)) > 0.0


def test_fixed_order_scale_has_the_largest_log_sum_among_scales_of_equal_cost() -> None:
    mechanism, inner, _ = MEMBERS["λ-CGD"]
    best = fixed_order_scale(inner, PLAIN)
    generator = np.random.default_rng(0)
    for _ in range(20):
        other = best * np.exp(0.1 * generator.normal(size=ROUNDS))
        for place in range(PLACES):
            held = np.arange(place, ROUNDS, PLACES)
            other[held] *= mechanism.sensitivity(PLAIN) / np.sqrt(other[held] @ inner(held) @ other[held])
        assert np.sum(np.log(other)) < np.sum(np.log(best))


def test_a_record_of_2000_rounds_has_a_scale() -> None:
    scale = fixed_order_scale(lambda held: np.eye(len(held)), workload_of(2000, 1.0, 1))
    assert scale == pytest.approx(np.ones(2000))


def test_toeplitz_inner_products_match_the_dense_matrix() -> None:
    generator = np.random.default_rng(2)
    coefficients = generator.uniform(size=5)
    c = sum(value * np.eye(12, k=-lag) for lag, value in enumerate(coefficients))
    for held in (np.array([0, 3, 6, 9]), np.array([2, 5, 8, 11])):
        np.testing.assert_allclose(toeplitz_inner(coefficients, 12)(held), inner_of(c)(held), rtol=1e-13)
        for block in (1, 4, 5, 12, 20):  # C restarts after each block
            in_block = np.equal.outer(np.arange(12) // block, np.arange(12) // block)
            blocks = toeplitz_inner(coefficients, 12, block)(held)
            np.testing.assert_allclose(blocks, inner_of(np.where(in_block, c, 0.0))(held), rtol=1e-13)


@pytest.mark.parametrize("clips", [np.ones(40), np.arange(1.0, 41.0), np.geomspace(1.0, 0.1, 40)])
def test_column_scale_raises_clips_in_one_pass_without_more_sensitivity(clips: Matrix) -> None:
    plain = workload_of(40, clips=clips)
    strategy = CGD.strategy_series(40)
    members = ((CGD, series.column_squared_norms(strategy, 40)), (BinaryTree(), column_squared_norms(40, 1.0)))
    for mechanism, squared_norms in members:
        scale = column_scale(squared_norms, plain)
        raised = workload_of(40, clips=clips * scale)
        assert np.min(scale) == 1.0
        assert np.max(scale) > 1.2
        assert mechanism.sensitivity(raised) == pytest.approx(mechanism.sensitivity(plain), rel=1e-12)


def test_column_scales_of_lambda_cgd_and_independent_noise_match_their_closed_forms() -> None:
    plain, t = workload_of(60), np.arange(1, 61)
    scale = column_scale(series.column_squared_norms(CGD.strategy_series(60), 60), plain)
    np.testing.assert_allclose(scale**2, (1 - 0.96**120) / (1 - 0.96 ** (2 * (60 - t + 1.0))), rtol=1e-12)
    balanced = column_scale(np.arange(60.0, 0.0, -1.0), plain)
    np.testing.assert_allclose(balanced, np.sqrt(60 / (60 - t + 1)), rtol=1e-14)
