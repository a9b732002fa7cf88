"""The noise of a simulation in floating point, and the lattice on which masked messages of it are added."""

import numpy as np

from fedpriv.estimators.gradients import Estimator, rounds_of
from fedpriv.mechanisms import Mechanism, Workload
from fedpriv.participation.base import Participation
from fedpriv.privacy.ledger import RunningSums
from fedpriv.privacy.trust import Noise
from fedpriv.scenario import Cell
from fedpriv.secure_aggregation.grid import Grid, grid_for


def lattice_of(cell: Cell, schedule: Participation, estimator: Estimator, noise: Noise) -> Grid:
    """The lattice for sums of masked messages; InputError for sums that do not fit."""
    share = min(source.weight * float(source.std) for source in noise.sources)
    digits = np.finfo(cell.run.dtype).nmant + 1
    return grid_for(share, digits, largest_sum(schedule, estimator))


def workload_of(estimator: Estimator, schedule: Participation) -> Workload:
    """What the running sums of an estimator are made of, for a mean over one batch."""
    return Workload(schedule, estimator.decay, np.array(batch_clips(estimator, schedule)), estimator.period)


def batch_clips(estimator: Estimator, schedule: Participation) -> tuple[float, ...]:
    """The norm bound of every round's increments, for a mean over one batch: where a round reads k, 1/k of it."""
    return tuple(
        float(current.clip) / max(1, schedule.expected_batches(current.t))
        for current in rounds_of(estimator, schedule.rounds)
    )


def largest_sum(schedule: Participation, estimator: Estimator) -> float:
    """A bound on the norm of the silos' mean running sum in every round, whatever the records are."""
    largest = total = 0.0
    for current in rounds_of(estimator, schedule.rounds):
        # a round that reads k batches divides by k
        most = schedule.most_batches(current.t) / max(1, schedule.expected_batches(current.t))
        total = float(current.decay) * total + most * current.largest
        largest = max(largest, total)
    return largest


def float_noise_of(
    cell: Cell, schedule: Participation, workload: Workload, mechanism: Mechanism, weights: tuple[float, ...]
) -> Noise:
    """The noise of every owner that reaches the cell's target; none if it has none.

    Guarantee: a public order gets its μ exactly; sampling gets the (ε, δ) of that μ at the cell's δ.  InputError
    for sampling that cannot be accounted for.
    """
    target, relation, delta = cell.target, cell.privacy.relation, cell.privacy.delta
    if target is None:
        return Noise()
    distance = schedule.distance(RunningSums(mechanism, workload, relation))
    mu = schedule.charged(relation, target, delta)
    return cell.algorithm.trust_setting.noise(
        distance, cell.batch_sizes, weights, relation, mu, cell.privacy.protected
    )
