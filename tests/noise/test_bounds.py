"""Lower bounds: their golden numbers, and that nothing falls below them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.core.errors import InputError
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.fitting.auto import least
from fedpriv.noise.fitting.cost import Response, lower_bounds, noise_cost_of, rows_response
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Phases, Schedule, Separated
from tests.noise.rows import objective, response, sharper_mean_bound, workload

MECHANISMS = (
    IndependentGaussian(),
    BinaryTree(),
    BandedSquareRoot(1.0, 4),
    BufferedToeplitz(1.0, (0.95, 0.6), (0.8, 0.1)),
    BufferedToeplitz(1.0),
)


@pytest.mark.parametrize(
    ("row", "bound"),
    [
        ("dp-mu2-fl", 2 * 59 / 3),
        ("accelerated", 39.849726776),
        ("unaccelerated", 4.679870),
        ("dp-ftrl, momentum", 9.982029897),
        ("dp-ftrl", 1.0),
    ],
)
def test_the_outputs_bound_at_60_rounds(row: str, bound: float) -> None:
    assert least(response(row, 60), workload(row, 60)).output == pytest.approx(bound, rel=1e-7)


def test_the_outputs_bound_in_ten_epochs() -> None:
    found = least(response("dp-mu2-fl", 600), workload("dp-mu2-fl", 600, 60)).output
    assert found == pytest.approx(1700.509706, rel=1e-9)


@pytest.mark.parametrize(("row", "bound"), [("dp-mu2-fl", 23.489131), ("accelerated", 24.327859)])
def test_the_sharper_bound_of_the_queries(row: str, bound: float) -> None:
    found = sharper_mean_bound(response(row, 60).queries, workload(row, 60), steps=500)
    assert found == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(("rounds", "best"), [(16, 1.68940369), (60, 2.08034753)])
def test_the_sharper_bound_is_the_dense_optimum_for_prefix_sums(rounds: int, best: float) -> None:
    """In one pass the bound is attained, by a C of T vectors: jax-privacy's optimizer finds it."""
    everyone = Response(np.eye(rounds))
    found = sharper_mean_bound(everyone.queries, workload("dp-ftrl", rounds), steps=2000)
    assert found == pytest.approx(best, rel=1e-6)


@given(data=st.data(), rounds=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_no_mechanism_falls_below(data: st.DataObject, rounds: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows, clips = generator.normal(size=(3, rounds)), generator.uniform(0.3, 3.0, rounds)
    rounds_per_epoch, max_participations = data.draw(st.integers(1, rounds)), data.draw(st.integers(1, 3))
    for schedule in (Schedule(rounds, rounds_per_epoch), Separated(rounds, max_participations, rounds_per_epoch)):
        asked = Workload(schedule, 1.0, clips)
        for row in rows:
            alone = noise_cost_of(Response(row[None]), asked)
            assert all(alone.value(mechanism) >= 1.0 - 1e-9 for mechanism in MECHANISMS)
    single = Workload(Schedule(rounds, rounds), 1.0, clips)
    sharper = sharper_mean_bound(rows, single)
    least_mean = np.mean(lower_bounds(rows, single) ** 2)
    for mechanism in MECHANISMS:
        assert noise_cost_of(Response(rows), single).value(mechanism) * least_mean >= sharper**2 * (1 - 1e-9)


def test_phases_are_refused() -> None:
    phased = Workload(Phases((3, 1)), 1.0, np.ones(6))
    with pytest.raises(InputError, match="phased"):
        lower_bounds(np.ones((1, 6)), phased)


def test_an_objective_refuses_what_it_is_not_for() -> None:
    with pytest.raises(InputError, match="8 rounds"):
        noise_cost_of(rows_response(8), workload("dp-ftrl", 9))
    restarts = Workload(Schedule(8, 8), 1.0, np.ones(8), period=4)
    with pytest.raises(InputError, match="restart"):
        noise_cost_of(rows_response(8), restarts)


def test_the_objective_is_one_a_term_at_its_bound() -> None:
    """One round: every mechanism is optimal in the output and in the only point."""
    assert objective("accelerated", 1).value(IndependentGaussian()) == pytest.approx(2.0)
