"""log J of a buffered Toeplitz mechanism as a function of its roots, with its exact gradient.

    log J = log ‖C u‖² + log ‖R B‖²    R the objective's rows, u the worst record

With x the delay, ∂c/∂θ = x/(1 - θx) c, ∂b/∂θ = -x/(1 - θx) b, and for φ the signs change.  Both norms are those of
filtered signals, so every derivative is one more filter.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from fedpriv.fitting.filters import delayed, dot, ratio
from fedpriv.fitting.objective import Objective
from fedpriv.fitting.worst import worst_record
from fedpriv.mechanisms import Workload
from fedpriv.mechanisms.roots import Roots
from fedpriv.mechanisms.workload import Floats


class Loss(Protocol):
    """Of the roots θ_1, φ_1, θ_2, φ_2, … in falling order."""

    @property
    def workload(self) -> Workload: ...

    @property
    def size(self) -> int:
        """How many numbers are filtered for a value: rows times rounds."""
        ...

    def at(self, roots: Floats) -> tuple[float, Floats]:
        """log J and its gradient by the roots."""
        ...


@dataclass(frozen=True)
class PlainLoss:
    """Noise as it is, without `column_scale`."""

    objective: Objective

    @property
    def workload(self) -> Workload:
        return self.objective.workload

    @property
    def size(self) -> int:
        return self.objective.rows.size

    def at(self, roots: Floats) -> tuple[float, Floats]:
        theta, phi = roots[0::2].tolist(), roots[1::2].tolist()
        impulse = np.eye(1, self.workload.rounds)[0]
        moved = ratio(worst_record(ratio(impulse, phi, theta), self.workload), phi, theta)
        spread = ratio(self.summed, theta, phi)
        squared_norm, variance = dot(moved, moved), dot(spread, spread)
        gradient = np.empty(len(roots))
        for place, root in enumerate(roots):
            sign = 1.0 if place % 2 == 0 else -1.0
            by_squared_norm = dot(moved, delayed(moved, root)) / squared_norm
            by_variance = dot(spread, delayed(spread, root)) / variance
            gradient[place] = 2.0 * sign * (by_squared_norm - by_variance)
        return float(np.log(squared_norm) + np.log(variance)), gradient

    def spread(self, theta: Roots, phi: Roots) -> float:
        """‖R B‖²: J of a mechanism of sensitivity 1."""
        return float(np.sum(ratio(self.summed, theta, phi) ** 2))

    @cached_property
    def summed(self) -> Floats:
        """The rows times A, last round first: noise enters a row backwards in time."""
        return ratio(self.objective.rows[:, ::-1], (), (self.workload.decay,))


@dataclass(frozen=True)
class ScaledLoss:
    """Noise of increment t divided by D_t = ‖C_1‖ / ‖C_t‖; one pass with equal clips.

    Sensitivity and scale together leave the column norms n_t: log J = log ‖R A diag(n) C^-1‖², clips of 1.
    """

    objective: Objective

    @property
    def workload(self) -> Workload:
        return self.objective.workload

    @property
    def size(self) -> int:
        return self.objective.rows.size

    def at(self, roots: Floats) -> tuple[float, Floats]:
        theta, phi = roots[0::2].tolist(), roots[1::2].tolist()
        series = ratio(np.eye(1, self.workload.rounds)[0], phi, theta)
        norms = np.sqrt(np.cumsum(series**2))  # of the columns, last round first, as the rows are
        summed = self._unscaled.summed * self.workload.clips[0]
        spread = ratio(summed * norms, theta, phi)
        variance = dot(spread, spread)
        back = ratio(spread[:, ::-1], theta, phi)[:, ::-1]
        by_norms = np.sum(back * summed, axis=0) / norms
        gradient = np.empty(len(roots))
        for place, root in enumerate(roots):
            sign = 1.0 if place % 2 == 0 else -1.0
            grown = np.cumsum(series * delayed(series, root))
            change = dot(by_norms, grown) - dot(spread, delayed(spread, root))
            gradient[place] = 2.0 * sign * change / variance
        return float(np.log(variance)), gradient

    @cached_property
    def _unscaled(self) -> PlainLoss:
        return PlainLoss(self.objective)
