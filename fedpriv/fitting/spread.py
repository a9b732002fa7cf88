"""The variance that a mechanism's noise leaves in weighted sums of released rows."""

import numpy as np

from fedpriv.mechanisms import Mechanism, Workload
from fedpriv.mechanisms.workload import Floats


def spread(mechanism: Mechanism, rows: Floats, workload: Workload) -> Floats:
    """The variance in every row of `rows`, for fresh vectors of variance 1; (n, T) -> (n,).

    Rows that look at one release each need no more than the mechanism's own `variance`, and no torch.
    """
    if np.all(np.count_nonzero(rows, axis=1) == 1):
        return np.asarray(rows**2 @ mechanism.variance(workload), np.float64)
    from fedpriv.fitting.adjoint import NoiseStream, pulled_back

    return np.asarray(np.sum(pulled_back(NoiseStream(mechanism), rows) ** 2, axis=1), np.float64)
