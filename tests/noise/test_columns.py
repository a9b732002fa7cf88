"""Column scale: what records cost before and after, and how far clips go."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.noise import series
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.mechanism import InnerProducts, Mechanism, column_scale, fixed_order_scale, toeplitz_inner
from fedpriv.noise.series import Workload
from fedpriv.noise.tree import BinaryTree, column_squared_norms
from fedpriv.participation.orders import FixedOrder, MinSeparation

Matrix = NDArray[np.float64]

ROUNDS, PLACES = 60, 6
CGD = BufferedToeplitz(1.0, (0.96,), (0.0,))


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
def test_every_record_of_a_fixed_order_costs_what_the_worst_did(name: str) -> None:
    mechanism, inner, lowest = MEMBERS[name]
    plain = Workload(FixedOrder(ROUNDS, PLACES), 1.0, np.ones(ROUNDS))
    scale = fixed_order_scale(inner, plain)
    scaled = Workload(FixedOrder(ROUNDS, PLACES), 1.0, scale)
    assert mechanism.sensitivity(scaled) == pytest.approx(mechanism.sensitivity(plain), rel=1e-9)
    for place in range(PLACES):
        held = np.arange(place, ROUNDS, PLACES)
        squared_norm = scale[held] @ inner(held) @ scale[held]
        assert squared_norm == pytest.approx(mechanism.sensitivity(plain) ** 2, rel=1e-9)
    assert np.min(scale) == pytest.approx(lowest, abs=0.006)
    assert np.sum(np.log(scale)) > 0.0


def test_no_other_scale_of_the_same_cost_is_larger_on_the_whole() -> None:
    mechanism, inner, _ = MEMBERS["λ-CGD"]
    plain = Workload(FixedOrder(ROUNDS, PLACES), 1.0, np.ones(ROUNDS))
    best = fixed_order_scale(inner, plain)
    generator = np.random.default_rng(0)
    for _ in range(20):
        other = best * np.exp(0.1 * generator.normal(size=ROUNDS))
        for place in range(PLACES):
            held = np.arange(place, ROUNDS, PLACES)
            other[held] *= mechanism.sensitivity(plain) / np.sqrt(other[held] @ inner(held) @ other[held])
        assert np.sum(np.log(other)) < np.sum(np.log(best))


def test_toeplitz_columns() -> None:
    generator = np.random.default_rng(2)
    coefficients = generator.uniform(size=5)
    c = sum(value * np.eye(12, k=-lag) for lag, value in enumerate(coefficients))
    for held in (np.array([0, 3, 6, 9]), np.array([2, 5, 8, 11])):
        np.testing.assert_allclose(toeplitz_inner(coefficients, 12)(held), inner_of(c)(held), rtol=1e-13)


@pytest.mark.parametrize("clips", [np.ones(40), np.arange(1.0, 41.0), np.geomspace(1.0, 0.1, 40)])
def test_in_one_pass_clips_are_raised_for_nothing(clips: Matrix) -> None:
    plain = Workload(FixedOrder(40, 40), 1.0, clips)
    strategy = CGD.strategy_series(40)
    members = ((CGD, series.column_squared_norms(strategy, 40)), (BinaryTree(), column_squared_norms(40, 1.0)))
    for mechanism, squared_norms in members:
        scale = column_scale(squared_norms, plain)
        raised = Workload(FixedOrder(40, 40), 1.0, clips * scale)
        assert np.min(scale) == 1.0
        assert np.max(scale) > 1.2
        assert mechanism.sensitivity(raised) == pytest.approx(mechanism.sensitivity(plain), rel=1e-12)


def test_lambda_cgds_scale_has_a_closed_form_and_independents_is_balanced() -> None:
    plain, t = Workload(FixedOrder(60, 60), 1.0, np.ones(60)), np.arange(1, 61)
    scale = column_scale(series.column_squared_norms(CGD.strategy_series(60), 60), plain)
    np.testing.assert_allclose(scale**2, (1 - 0.96**120) / (1 - 0.96 ** (2 * (60 - t + 1.0))), rtol=1e-12)
    balanced = column_scale(np.arange(60.0, 0.0, -1.0), plain)
    np.testing.assert_allclose(balanced, np.sqrt(60 / (60 - t + 1)), rtol=1e-14)


def test_other_participations_are_refused() -> None:
    inner = inner_of(np.tri(6))
    with pytest.raises(InputError, match="more than once"):
        column_scale(np.ones(6), Workload(FixedOrder(6, 3), 1.0, np.ones(6)))
    for refused in (
        Workload(MinSeparation(6, 2, 3), 1.0, np.ones(6)),
        Workload(FixedOrder(6, 3), 1.0, np.arange(1.0, 7.0)),
    ):
        with pytest.raises(InputError, match="fixed order and the same clip"):
            fixed_order_scale(inner, refused)
