"""DP-μ²-FL: its theorems against numbers worked out by hand, its server against its definition."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.core.errors import InputError
from fedpriv.loss.estimators import RecursiveGradient
from fedpriv.papers.base import Problem, project_to_ball
from fedpriv.papers.reshef_levy import AnytimeSGD, mu2_parameters
from fedpriv.participation.orders import Schedule

MNIST = Problem(7850, math.sqrt(2 * 785), 785 / 2, True, 100, Schedule(600, 600), silos=100)
ASKED = 4.0, 0.1
"""Tables 1 and 2 at M = 100, ρ = 4 and D = 0.1."""


def test_the_numbers_of_the_papers_tables() -> None:
    """S = 118.1; σ = 2 S √T / ρ = 1446.7 a silo, of which the mean has a tenth, or 1/100 at the server."""
    untrusted, trusted = (mu2_parameters(MNIST, *ASKED, each) for each in (False, True))
    clip = math.sqrt(1570) + 785 * 0.1
    assert untrusted.clip == trusted.clip == pytest.approx(clip) == pytest.approx(118.1, abs=0.05)
    sigma = 2 * clip * math.sqrt(600) / 4
    assert untrusted.noise_in_mean == pytest.approx(sigma / 10)
    assert trusted.noise_in_mean == pytest.approx(sigma / 100)
    first = 4 * 0.1 * math.sqrt(100) / (2 * clip * 600 * math.sqrt(7850))
    assert untrusted.step == pytest.approx(min(first, 1 / (4 * 392.5 * 600)))
    assert trusted.step == pytest.approx(min(10 * first, 1 / (4 * 392.5 * 600)))


@pytest.mark.parametrize(("trusted", "share"), [(False, 10.0), (True, 100.0)])
def test_the_excess_risk_is_that_of_the_theorem(trusted: bool, share: float) -> None:
    """4D ((G + 2LD)/T + 2S√d/(ρ T √M) + σ~/√(TM)), M for √M if trusted."""
    clip = math.sqrt(1570) + 785 * 0.1
    terms = clip / 600 + 2 * clip * math.sqrt(7850) / (4 * 600 * share) + clip / math.sqrt(60_000)
    assert mu2_parameters(MNIST, *ASKED, trusted).excess_risk == pytest.approx(4 * 0.1 * terms)


def test_zero_out_takes_half_of_the_noise() -> None:
    half = mu2_parameters(replace(MNIST, relation="zero-out"), *ASKED, True).noise_in_mean
    assert half == pytest.approx(mu2_parameters(MNIST, *ASKED, True).noise_in_mean / 2)


def test_a_loss_without_bounds_is_refused() -> None:
    with pytest.raises(InputError, match="smoothness"):
        mu2_parameters(replace(MNIST, smoothness=math.inf), *ASKED, True)


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
