"""The rows that noise is fitted to, with unit steps, and workloads of them."""

import numpy as np

from fedpriv.loss.estimators import Estimator, PlainGradient, PowerWeights, RecursiveGradient
from fedpriv.noise.fitting.cost import NoiseCost, NoiseResponse, increment_weights, make_noise_cost
from fedpriv.noise.series import Floats, Workload
from fedpriv.papers.base import Optimizer
from fedpriv.papers.choquette_choo import NesterovCoupling
from fedpriv.papers.ftrl import FollowTheRegularizedLeader
from fedpriv.papers.reshef_levy import AnytimeSGD
from fedpriv.papers.sgd import ProjectedSGD
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.calibration import compute_response

SUMMED, PLAIN = RecursiveGradient(1.0), PlainGradient(1.0, decay=1.0)

ROWS: dict[str, tuple[Optimizer, Estimator]] = {
    "dp-mu2-fl": (AnytimeSGD(1.0, 5.0), SUMMED),
    "online-to-batch": (AnytimeSGD(1.0, 5.0), RecursiveGradient(1.0, weights=PowerWeights(2), clip_growth=1)),
    "accelerated": (NesterovCoupling(1.0, 5.0), SUMMED),
    "unaccelerated": (ProjectedSGD(1.0, 5.0), SUMMED),
    "unaccelerated, average": (ProjectedSGD(1.0, 5.0, averaged=True), SUMMED),
    "dp-ftrl": (FollowTheRegularizedLeader(1.0, 5.0), PLAIN),
    "dp-ftrl, momentum": (FollowTheRegularizedLeader(1.0, 5.0, 0.9), PLAIN),
    "dp-sgd": (ProjectedSGD(1.0, 5.0), PlainGradient(1.0)),
    "dp-sgd, momentum": (ProjectedSGD(1.0, 5.0, 0.8), PlainGradient(1.0)),
    "dp-sgd, average": (ProjectedSGD(1.0, 5.0, 0.8, averaged=True), PlainGradient(1.0)),
}


def response(row: str, rounds: int, queries: int | None = None) -> NoiseResponse:
    optimizer, estimator = ROWS[row]
    return compute_response(optimizer, estimator.round, rounds, queries)


def workload(row: str, rounds: int, rounds_per_epoch: int | None = None) -> Workload:
    estimator = ROWS[row][1]
    clips = np.array([float(estimator.round(t).clip) for t in range(1, rounds + 1)])
    return Workload(FixedOrder(rounds, rounds_per_epoch or rounds), estimator.decay, clips)


def objective(row: str, rounds: int, rounds_per_epoch: int | None = None) -> NoiseCost:
    return make_noise_cost(response(row, rounds), workload(row, rounds, rounds_per_epoch))


def sharper_mean_bound(rows: Floats, workload: Workload, steps: int = 300) -> float:
    """A bound of the root mean square over the rows, sharper than that of their `lower_bounds`; one pass.

    For v > 0 with sum 1 every mechanism has mean variance ≥ [tr (V^½ M V^½)^½]², M the mean of a^T a with clips;
    v <- diag (V^½ M V^½)^½ climbs.  O(T³) a step.
    """
    assert workload.schedule.single_pass
    moved = increment_weights(rows, workload.decay) * workload.clips
    second = moved.T @ moved / len(rows)
    weights = np.full(workload.rounds, 1.0 / workload.rounds)
    best = 0.0
    for _ in range(steps):
        root = np.sqrt(weights)
        values, vectors = np.linalg.eigh(second * np.outer(root, root))
        singular = np.sqrt(np.maximum(values, 0.0))
        best = max(best, float(np.sum(singular) / np.sqrt(np.sum(weights))))
        weights = np.maximum((vectors**2) @ singular, 0.0)
    return best
