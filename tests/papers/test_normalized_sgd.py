"""Normalized SGD: the length of a step, no step at 0, and which iterate is published."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.loss.estimators import Round
from fedpriv.papers.base import Problem
from fedpriv.papers.table import algorithm_named
from fedpriv.papers.tran_cutkosky import NormalizedSGD, movement_bound
from fedpriv.participation.orders import Schedule


def current(t: int) -> Round:
    return Round(t, (1.0,), 0.0, 1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_step_has_the_length_of_the_bound(dtype: torch.dtype) -> None:
    optimizer, generator = NormalizedSGD(0.3), torch.Generator().manual_seed(1)
    state = optimizer.start(torch.zeros(3, 50_000, dtype=dtype))
    for t in range(1, 8):
        before = optimizer.query(state)
        released = torch.randn(before.shape, generator=generator, dtype=dtype) * 10.0 ** (t - 4)
        state = optimizer.update(state, released, current(t))
        moved = (optimizer.query(state).double() - before.double()).norm(dim=-1)
        assert bool((moved <= movement_bound(0.3)).all())
        assert moved.tolist() == pytest.approx([0.3] * 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    size=st.integers(1, 30),
    step=st.floats(-12.0, 2.0).map(lambda exponent: 10.0**exponent),
    scale=st.floats(-3.0, 6.0).map(lambda exponent: 10.0**exponent),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_rounded_step_is_longer_than_the_bound(
    dtype: torch.dtype, size: int, step: float, scale: float, seed: int
) -> None:
    """Noise is sized for steps of η (1 + 1e-6): far from 0, where a step is rounded to its type, too."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = NormalizedSGD(step)
    start = scale * torch.randn(3, size, generator=generator, dtype=torch.float64)
    state = optimizer.start(start.to(dtype))
    for t in range(1, 20):
        before = optimizer.query(state)
        released = torch.randn(3, size, generator=generator, dtype=torch.float64).to(dtype)
        state = optimizer.update(state, released, current(t))
        moved = (optimizer.query(state).double() - before.double()).norm(dim=-1)
        assert bool((moved <= movement_bound(step)).all())


def test_a_momentum_of_zero_moves_nothing() -> None:
    optimizer = NormalizedSGD(0.3)
    start = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    state = optimizer.update(optimizer.start(start), torch.tensor([[0.0, 0.0], [0.0, 5.0]]), current(1))
    assert optimizer.query(state).tolist() == [[1.0, 2.0], [3.0, pytest.approx(3.7)]]


@pytest.mark.parametrize("output_round", [1.0, 3.0, math.inf])
def test_the_output_is_the_chosen_iterate_or_the_last(output_round: float) -> None:
    optimizer = NormalizedSGD(1.0, output_round)
    state = optimizer.start(torch.zeros(1))
    for t in range(1, 6):
        state = optimizer.update(state, torch.ones(1), current(t))
    assert float(optimizer.output(state)) == -(min(output_round, 6.0) - 1.0)


def test_replicates_may_publish_different_iterates() -> None:
    optimizer = NormalizedSGD(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [math.inf]]))
    state = optimizer.start(torch.zeros(2, 1))
    for t in range(1, 5):
        state = optimizer.update(state, torch.ones(2, 1), current(t))
    assert optimizer.output(state).tolist() == [[-1.0], [-4.0]]


def test_the_random_iterate_is_public_and_one_of_the_theorems() -> None:
    row = algorithm_named("momentum-tree")
    settings = row.settings.model_validate({"clip": 1.0, "output": "random"})
    chosen = set()
    for seed in range(40):
        problem = Problem(
            2, lipschitz=1.0, smoothness=1.0, batch=1, schedule=Schedule(8, 4), seed=seed, convex=False
        )
        optimizer = row.optimizer(settings, problem, 0.0)
        assert optimizer == row.optimizer(settings, problem, 1.0)
        chosen.add(optimizer.output_round)
    assert chosen <= set(map(float, range(1, 9)))
    assert {1.0, 8.0} <= chosen
