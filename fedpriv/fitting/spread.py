"""The variance that a mechanism's noise leaves in weighted sums of released rows."""

import numpy as np

from fedpriv.mechanisms import Mechanism, Workload
from fedpriv.mechanisms.workload import Floats


def spread(mechanism: Mechanism, rows: Floats, workload: Workload) -> Floats:
    """The variance in every row of `rows`, for fresh vectors of variance 1; (n, T) -> (n,).

    Read off the mechanism's streaming where it has no series, which takes torch.
    """
    if np.all(np.count_nonzero(rows, axis=1) == 1):  # each looks at one release
        return np.asarray(np.sum(rows**2 * mechanism.variance(workload), axis=1), np.float64)
    series = mechanism.noise_series(workload)
    if series is not None:
        from scipy.signal import fftconvolve  # slow to import: only who fits pays for it

        backwards = fftconvolve(rows[:, ::-1], series[None], axes=1)[:, : workload.rounds]
        return np.asarray(np.sum(backwards**2, axis=1), np.float64)
    from fedpriv.fitting.adjoint import NoiseStream, pulled_back

    return np.asarray(np.sum(pulled_back(NoiseStream(mechanism), rows) ** 2, axis=1), np.float64)
