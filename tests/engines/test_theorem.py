"""Scenarios that ask for a theorem's own parameters."""

from typing import Any

import pytest

from fedpriv.papers.choquette_choo import non_realizable_parameters
from fedpriv.plan.plan import make_problem
from fedpriv.scenario.schema import Cell
from tests.engines.builders import plan_cell, refusal, small_cell


def theorem_cell(theorem: str, rounds: int, **changes: Any) -> Cell:
    return small_cell(
        algorithm={"name": "accelerated-dp-srgd", "trust": "trusted", "parameters": theorem, "radius": 3.0},
        privacy={"relation": "zero-out", "epsilon": 8.0},
        federation={"silos": 2, "samples": 6000, "rounds": rounds},
        **changes,
    )


def test_the_realizable_theorem_is_refused_with_the_batch_size_that_would_be_needed() -> None:
    with refusal(r"the realizable theorem asks for [\d,]+ rounds of B = 0\.\d+ examples"):
        plan_cell(theorem_cell("theorem-realizable", 60))


def test_the_non_realizable_theorem_gives_clip_and_beta() -> None:
    """√6000 = 77.5: 77 rounds of 77 records, and another number of rounds is refused with that."""
    with refusal("asks for 77 rounds of 77 records at n = 6000; the scenario has 60 rounds"):
        plan_cell(theorem_cell("theorem-non-realizable", 60))
    cell = theorem_cell("theorem-non-realizable", 77)
    plan: Any = plan_cell(cell)
    problem = make_problem(cell, plan.objective)
    assert problem.records == 77 * 76
    parameters = non_realizable_parameters(problem, 3.0)
    assert plan.estimator.round(2).clip == pytest.approx(parameters.clip)
    assert plan.optimizer.beta == pytest.approx(parameters.beta)


def test_explicit_parameters_and_parameters_of_a_theorem_exclude_each_other() -> None:
    for theorem, key in (("theorem-realizable", "clip"), ("explicit", "beta")):
        with refusal('clip is needed with parameters = "explicit", and only there'):
            theorem_cell(theorem, 60, **{f"algorithm__{key}": 1.0})
