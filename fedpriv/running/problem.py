"""What a row's parameters follow from."""

from fedpriv.accounting.gdp import epsilon_of
from fedpriv.algorithms import Problem
from fedpriv.objectives import Objective
from fedpriv.scenario import Cell


def problem_of(cell: Cell, objective: Objective) -> Problem:
    """The public numbers of a cell, from which its parameters follow."""
    return Problem(
        dimension=objective.dimension,
        lipschitz=objective.lipschitz,
        smoothness=objective.smoothness,
        convex=objective.convex,
        convex_within=objective.convex_within,
        batch=sum(cell.batch_sizes),
        schedule=cell.schedule,
        epsilon=None if cell.target is None else epsilon_of(cell.target, cell.privacy.delta),
        delta=cell.privacy.delta,
        seed=cell.seed,
        silos=len(cell.batch_sizes),
        relation=cell.privacy.relation,
        unit=cell.privacy.protected,
    )
