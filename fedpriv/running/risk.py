"""The bound on a run's mean excess risk at its own numbers, read off its plan."""

import math

import numpy as np

from fedpriv.mechanisms import Workload
from fedpriv.running.plan import Plan, problem_of
from fedpriv.scenario import Cell
from fedpriv.theory.excess_risk import Bound, Released


def excess_risk_bound(cell: Cell, plan: Plan) -> Bound | None:
    """What the cell's row proves for its settings; None where it proves nothing.

    Nothing is proved for losses that are not known to be convex and smooth in the run's ball, for records that are
    read more than once or in secret, and for releases of integers, whose noise is of another form.
    """
    problem = problem_of(cell, plan.objective)
    schedule = plan.schedule
    if schedule.secret or not schedule.single_pass or plan.exact is not None:
        return None
    radius = float(getattr(cell.algorithm.settings, "radius", math.inf))
    if not (radius <= problem.convex_within and math.isfinite(radius) and math.isfinite(problem.smoothness)):
        return None
    rounds = range(1, schedule.rounds + 1)
    clips = np.array([float(plan.estimator.round(t).clip) / max(1, schedule.expected_batches(t)) for t in rounds])
    workload = Workload(schedule, plan.estimator.decay, clips, plan.estimator.period)
    stds = plan.noise.std_in_mean * np.sqrt(plan.mechanism.variance(workload))
    released = Released(problem.batch, problem.dimension, clips, stds)
    return cell.algorithm.row.excess_risk(cell.algorithm.settings, problem, released)
