"""Scenarios that ask for a theorem's own parameters."""

from typing import Any

import pytest

from fedpriv.core.errors import InputError
from fedpriv.papers.choquette_choo import non_realizable_parameters
from fedpriv.plan.plan import make_plan, make_problem
from fedpriv.plan.task import load_task
from tests.engines.builders import plan_cell, small_cell


def asking(theorem: str, rounds: int, **algorithm: Any) -> dict[str, Any]:
    return {
        "algorithm": {
            "name": "accelerated-dp-srgd",
            "trust": "trusted",
            "parameters": theorem,
            "radius": 3.0,
            **algorithm,
        },
        "privacy": {"relation": "zero-out", "epsilon": 8.0},
        "federation": {"silos": 2, "samples": 6000, "rounds": rounds},
    }


def test_the_realizable_theorem_cannot_be_run_here_and_says_why() -> None:
    cell = small_cell(**asking("theorem-realizable", 60))
    with pytest.raises(InputError, match=r"the realizable theorem asks for [\d,]+ rounds of B = 0\.\d+ examples"):
        plan_cell(cell)


def test_the_non_realizable_theorem_gives_clip_and_beta() -> None:
    """√6000 = 77.5: 77 rounds of 77 records, and another number of rounds is refused with that."""
    wrong = small_cell(**asking("theorem-non-realizable", 60))
    objective = load_task(wrong).objective
    with pytest.raises(
        InputError, match="asks for 77 rounds of 77 records at n = 6000; the scenario has 60 rounds"
    ):
        make_plan(wrong, objective)
    cell = small_cell(**asking("theorem-non-realizable", 77))
    plan: Any = make_plan(cell, objective)
    problem = make_problem(cell, objective)
    assert problem.records == 77 * 76
    asked = non_realizable_parameters(problem, 3.0)
    assert plan.estimator.round(2).clip == pytest.approx(asked.clip)
    assert plan.optimizer.beta == pytest.approx(asked.beta)


def test_explicit_numbers_and_a_theorem_exclude_each_other() -> None:
    with pytest.raises(InputError, match='clip is needed with parameters = "explicit", and only there'):
        small_cell(**asking("theorem-realizable", 60, clip=1.0))
    with pytest.raises(InputError, match='clip is needed with parameters = "explicit", and only there'):
        small_cell(**asking("explicit", 60, beta=1.0))
