"""The anytime-averaging server against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.loss.estimators import RecursiveGradient
from fedpriv.papers.base import project_to_ball
from fedpriv.papers.reshef_levy import AnytimeSGD

ESTIMATOR = RecursiveGradient(clip=1.0)


@given(rounds=st.integers(1, 30), seed=st.integers(0, 10**6), radius=st.floats(0.01, 10.0))
@settings(max_examples=40, deadline=None)
def test_output_is_the_weighted_average_of_iterates(rounds: int, seed: int, radius: float) -> None:
    """x_T = Σ_{t≤T} α_t w_t / α_{1:T} with α_t = t: the update of round T moves nothing that is published."""
    torch.manual_seed(seed)
    optimizer = AnytimeSGD(step=0.3, radius=radius)
    state = optimizer.start(torch.zeros(4, dtype=torch.float64))
    iterate, iterates = torch.zeros(4, dtype=torch.float64), []
    for t in range(1, rounds + 1):
        iterates.append(iterate)
        released = torch.randn(4, dtype=torch.float64)
        state = optimizer.update(state, released, ESTIMATOR.round(t))
        iterate = project_to_ball(iterate - 0.3 * released, radius)
        weights = torch.arange(1, t + 1, dtype=torch.float64)
        average = (weights[:, None] * torch.stack(iterates)).sum(0) / weights.sum()
        torch.testing.assert_close(optimizer.output(state), average, rtol=1e-10, atol=1e-12)
        assert float(iterate.norm()) <= radius * (1 + 1e-12)


def test_query_moves_by_two_over_t_plus_two() -> None:
    optimizer = AnytimeSGD(step=1.0, radius=1e9)
    state = optimizer.start(torch.zeros(1))
    state = optimizer.update(state, torch.tensor([-3.0]), ESTIMATOR.round(1))
    assert float(optimizer.query(state)) == pytest.approx(3.0 * 2 / 3)
    assert float(optimizer.output(state)) == 0.0


@given(seed=st.integers(0, 10**6), radius=st.floats(0.01, 5.0))
@settings(max_examples=50, deadline=None)
def test_consecutive_queries_are_close(seed: int, radius: float) -> None:
    """(t-1) ‖x_t - x_{t-1}‖ ≤ 2D whatever is released: the fact behind S = G + 2LD."""
    torch.manual_seed(seed)
    optimizer = AnytimeSGD(step=10.0, radius=radius)
    state = optimizer.start(torch.zeros(3, dtype=torch.float64))
    before = optimizer.query(state)
    for t in range(1, 40):
        state = optimizer.update(state, torch.randn(3, dtype=torch.float64), ESTIMATOR.round(t))
        query = optimizer.query(state)
        assert t * float((query - before).norm()) <= 2 * (2 * radius) * (1 + 1e-9)
        before = query


def test_projection_leaves_the_inside_and_zero_alone() -> None:
    inside = torch.tensor([[0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(project_to_ball(inside, 0.5), inside)
    torch.testing.assert_close(project_to_ball(torch.tensor([3.0, 4.0]), 0.5), torch.tensor([0.3, 0.4]))
