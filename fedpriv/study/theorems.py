"""The numbers of a scenario beside those that its algorithm's theorems ask for, as plain data.

The algorithm's row is asked (`Algorithm.theorems`, `Algorithm.excess_risk`): this module says at which numbers.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedpriv.accounting.gaussian import check_positive
from fedpriv.core.errors import InputError
from fedpriv.loss.objective import Objective
from fedpriv.papers.base import Condition, Prescription, Problem
from fedpriv.plan.plan import excess_risk_bound, plan_of, problem_of
from fedpriv.plan.task import task_of_cell
from fedpriv.scenario.load import Point
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import read_results


def beside_theorems(point: Point, gap: float | None, run: Path | None) -> dict[str, Any]:
    """Hold the numbers of one point beside each theorem's; a theorem that cannot be run says why.

    `gap` is how far the loss can fall from the start, for theorems whose bound needs it; `run` has the excess risk
    that was measured.
    """
    cell = point.cell
    objective = task_of_cell(cell).objective
    problem = problem_of(cell, objective)
    if gap is not None:
        problem = dataclasses.replace(problem, gap=check_positive("gap", gap))
    return {
        "point": dict(point.swept),
        "algorithm": cell.algorithm.name,
        "problem": {
            "records": problem.records,
            "dimension": problem.dimension,
            "silos": problem.silos,
            "epsilon": problem.epsilon,
            "delta": problem.delta,
            "relation": cell.privacy.relation,
            "lipschitz": _finite(problem.lipschitz),
            "smoothness": _finite(problem.smoothness),
        },
        "scenario": _used(cell, objective) | _measured(point, run),
        "theorems": [
            _as_data(asked, problem) for asked in cell.algorithm.row.theorems(cell.algorithm.settings, problem)
        ],
        "bound": _bound(cell, objective),
    }


def _bound(cell: Cell, objective: Objective) -> dict[str, Any] | None:
    """The proved bound of the excess risk at the scenario's own numbers; None where there is none."""
    try:
        found = excess_risk_bound(cell, plan_of(cell, objective))
    except InputError:
        return None  # it cannot be run, which is said elsewhere
    if found is None:
        return None
    return {
        "excess risk": _finite(found.value),
        "conditions": _conditions(found.conditions),
        "assumption": found.assumption,
    }


def _used(cell: Cell, objective: Objective) -> dict[str, Any]:
    """The numbers of a run of the cell; only the reason where it cannot be run."""
    try:
        plan = plan_of(cell, objective)
    except InputError as error:
        return {"refusal": str(error)}
    rounds = plan.schedule.rounds
    return {
        "rounds": rounds,
        "batch": sum(plan.batch_sizes),
        "clip": max(float(plan.estimator.round(t).clip) for t in range(1, rounds + 1)),
        "noise std": plan.noise.std_in_mean,
        **_numbers(cell.algorithm.settings.model_dump(exclude={"clip"})),
        **_numbers(vars(plan.optimizer)),
    }


def _measured(point: Point, run: Path | None) -> dict[str, float]:
    """The mean excess risk that the seeds of this point have in a run's results; nothing where none is known."""
    if run is None:
        return {}
    cells = [cell for cell in read_results(run).cells if cell["point"] == dict(point.swept)]
    found = [float(cell["excess_risk"]) for cell in cells if "excess_risk" in cell]
    return {"excess risk": sum(found) / len(found)} if found else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _as_data(asked: Prescription, problem: Problem) -> dict[str, Any]:
    refusal = asked.refusal or _refusal(asked.numbers, problem)
    told = {"numbers": dict(asked.numbers), "conditions": _conditions(asked.conditions), "refusal": refusal}
    return asked._asdict() | told


def _conditions(conditions: Iterable[Condition]) -> list[dict[str, Any]]:
    return [{**condition._asdict(), "holds": condition.holds} for condition in conditions]


def _refusal(numbers: Mapping[str, float], problem: Problem) -> str | None:
    """Why no scenario has such batches, on one line: what [federation] itself would refuse."""
    batch = math.floor(numbers["batch"] * (1.0 + 1e-12))
    if batch < problem.silos:
        return (
            f"a round of {batch} records is less than one of each of the {problem.silos} silos; run it with "
            f"federation.silos = {batch} or fewer"
        )
    return None


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None
