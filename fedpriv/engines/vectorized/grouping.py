"""Which cells run together: those that differ in nothing but seeds and numbers."""

import itertools
from collections.abc import Iterator, Sequence

from fedpriv.engines.vectorized.away import check_away
from fedpriv.engines.vectorized.silos import check_apart
from fedpriv.errors import InputError
from fedpriv.replicates.stacking import signature
from fedpriv.running.plan import Plan, plan_of
from fedpriv.running.task import task_of_cell
from fedpriv.scenario import Cell

_ROUND_VALUES = 2**26


def groups_of(cells: Sequence[Cell]) -> list[list[int]]:
    """The places of the cells that run together, group by group; each group alone computes the same bits."""
    return list(grouped(cells, plans_of(cells)))


def plans_of(cells: Sequence[Cell]) -> list[Plan]:
    """The plan of every cell; InputError for one that this engine cannot compute."""
    if any(cell.run.arithmetic == "integers" for cell in cells):
        raise InputError(
            'run.arithmetic = "integers": engine vectorized adds all silos up at once, in floating point; use '
            "--engine inprocess"
        )
    plans = [plan_of(cell, task_of_cell(cell).objective) for cell in cells]
    for cell, plan in zip(cells, plans, strict=True):
        check_away(cell, plan)
        check_apart(cell, plan)
    return plans


def grouped(cells: Sequence[Cell], plans: Sequence[Plan]) -> Iterator[list[int]]:
    """The places of the cells that run together."""
    groups: dict[object, list[int]] = {}
    for index, (cell, plan) in enumerate(zip(cells, plans, strict=True)):
        groups.setdefault(_group_key(cell, plan), []).append(index)
    return itertools.chain.from_iterable(
        _pieces(members, cells[members[0]], plans[members[0]]) for members in groups.values()
    )


def _pieces(members: list[int], cell: Cell, plan: Plan) -> Iterator[list[int]]:
    """A group cut so that one round's records of all its replicates fit comfortably into memory."""
    record = task_of_cell(cell).train.features[0].numel()
    size = max(1, _ROUND_VALUES // (sum(plan.batch_sizes) * record))
    return (members[start : start + size] for start in range(0, len(members), size))


def _group_key(cell: Cell, plan: Plan) -> object:
    parts = tuple(signature(part) for part in (plan.estimator, plan.mechanism, plan.optimizer, plan.objective))
    shape = (plan.schedule, plan.batch_sizes, plan.weights, bool(plan.noise.sources))
    return shape, parts, cell.data, cell.model, cell.run, cell.evaluation
