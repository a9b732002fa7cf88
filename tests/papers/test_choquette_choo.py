"""The balanced clip of round 1: what it is, and what it saves."""

import math

import numpy as np
import pytest

from fedpriv.noise.series import Workload
from fedpriv.noise.tree import BinaryTree
from fedpriv.papers.base import Problem
from fedpriv.papers.table import find_algorithm
from fedpriv.participation.orders import FixedOrder


@pytest.mark.parametrize(("rounds", "saved"), [(16, 0.106), (60, 0.087), (240, 0.065)])
def test_a_balanced_first_clip_evens_out_the_nodes_of_round_1(rounds: int, saved: float) -> None:
    """Round 1 is in one released node more than any other; with its clip smaller all cost the same."""
    row = find_algorithm("accelerated-dp-srgd")
    problem = Problem(10, lipschitz=1.0, smoothness=1.0, convex=True, batch=1, schedule=FixedOrder(rounds, rounds))
    prices = []
    for first_clip in ("same", "balanced"):
        settings = row.settings.model_validate({"clip": 3.0, "beta": 1.0, "radius": 1.0, "first_clip": first_clip})
        estimator = row.estimator(settings, problem)
        clips = np.array([float(estimator.round(t).clip) for t in range(1, rounds + 1)])
        assert clips[1:].tolist() == [3.0] * (rounds - 1)
        prices.append(BinaryTree().sensitivity(Workload(problem.schedule, 1.0, clips)))
    most = math.floor(math.log2(rounds)) + 1
    assert prices == pytest.approx([3.0 * math.sqrt(most), 3.0 * math.sqrt(most - 1)])
    assert 1.0 - prices[1] / prices[0] == pytest.approx(saved, abs=5e-4)
