"""What a fit makes small: the noise that one release guarantee leaves in a run's output and in its queries.

    J = V_output / LB_output² + mean_t V_t / mean_t LB_t²

V is the variance in what is published for noise sized to sensitivity 1; both terms are 1 at best.  A row without
an output in its `Response` (theorems that ask for the mean noise of the rows) has the second term alone.
"""

from dataclasses import dataclass

import numpy as np

from fedpriv.errors import InputError
from fedpriv.fitting.bounds import lower_bounds
from fedpriv.fitting.response import Response
from fedpriv.fitting.spread import spread
from fedpriv.mechanisms import Mechanism, Workload
from fedpriv.mechanisms.workload import Floats


@dataclass(frozen=True)
class Objective:
    """J of one row's response under one workload, all of it public before round 1."""

    workload: Workload
    rows: Floats
    """Responses, weighted so that J is the square of sensitivity · ‖rows B‖; (n, T)."""

    def value(self, mechanism: Mechanism) -> float:
        """J, with the mechanism's certified sensitivity."""
        variances = spread(mechanism, self.rows, self.workload)
        return float(mechanism.sensitivity(self.workload) ** 2 * np.sum(variances))


def objective_of(response: Response, workload: Workload) -> Objective:
    """InputError for sums that restart, and where the lower bounds are not known."""
    if response.rounds != workload.rounds:
        raise InputError(f"the response is for {response.rounds} rounds, the workload has {workload.rounds}")
    if workload.period is not None:
        raise InputError("noise is not fitted to sums that restart")
    least = float(np.mean(lower_bounds(response.queries, workload) ** 2))
    rows = response.queries / np.sqrt(len(response.queries) * least)
    if response.output is not None:
        output = response.output[None]
        rows = np.concatenate([rows, output / lower_bounds(output, workload)])
    return Objective(workload, rows)
