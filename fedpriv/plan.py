"""From a scenario's cell to everything that is fixed and public before round 1.

Silo, server, accountant and every engine build the same plan from the same cell; no number is sent around.
"""

from dataclasses import dataclass

import numpy as np

from fedpriv.algorithms import Problem
from fedpriv.estimators import Estimator
from fedpriv.mechanisms import Mechanism, Workload
from fedpriv.objectives import Objective
from fedpriv.optimizers import Optimizer
from fedpriv.rounds import Schedule
from fedpriv.scenario import Cell
from fedpriv.trust import Noise


@dataclass(frozen=True)
class Plan:
    """The parts of one run, calibrated."""

    schedule: Schedule
    batch_sizes: tuple[int, ...]
    """Records of each silo in a round; means have these fixed denominators."""
    weights: tuple[float, ...]
    """p_i: the weight of each silo's mean in the server's; they sum to 1."""
    estimator: Estimator
    mechanism: Mechanism
    noise: Noise
    optimizer: Optimizer
    mu: float | None
    """The exact Gaussian-DP parameter of what is protected; None if the run is not private."""


def plan_of(cell: Cell, objective: Objective) -> Plan:
    """Calibrate the noise to the cell's privacy target and derive the optimizer from it."""
    federation, row, settings = cell.federation, cell.algorithm.row, cell.algorithm.settings
    rounds = federation.total_rounds
    schedule = Schedule(rounds=rounds, places=rounds)
    batch_sizes = (federation.batch,) * federation.silos
    records = sum(batch_sizes)
    weights = tuple(batch / records for batch in batch_sizes)
    problem = Problem(rounds, objective.dimension, objective.lipschitz, objective.smoothness)
    estimator, mechanism = row.estimator(settings, problem), row.mechanism(settings, problem)
    target = cell.privacy.target
    noise = Noise()
    if target is not None:
        clips = np.array([float(estimator.round(t).clip) for t in range(1, rounds + 1)])
        sensitivity = mechanism.sensitivity(Workload(schedule, estimator.keep, clips))
        noise = cell.algorithm.setting.noise(sensitivity, batch_sizes, weights, cell.privacy.relation, target)
    optimizer = row.optimizer(settings, problem, noise.std_in_mean)
    return Plan(schedule, batch_sizes, weights, estimator, mechanism, noise, optimizer, target)
