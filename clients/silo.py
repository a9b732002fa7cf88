"""One silo's side of the protocol, without Flower: it turns a query into a release.

    q_t = keep · q_{t-1} + mean over its batch of clipped increments
    release = q_t + row t of the mechanism's noise, with the silo's own standard deviation

The noise is there only where the trust setting says that silos add it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.federation import spread, task_of_cell
from fedpriv.mechanisms import MechanismState
from fedpriv.objectives import Objective, Records
from fedpriv.plan import Plan, plan_of
from fedpriv.randomness import DrawAhead, KeyedNormal, simulation_noise
from fedpriv.rounds import Round
from fedpriv.running_sum import RunningSum, absorb, empty_sum
from fedpriv.scenario import Cell
from fedpriv.wire import is_finite


class SiloState(NamedTuple):
    """What a silo keeps between rounds: the last round answered, its running sum, its mechanism's state."""

    answered: int
    sum: RunningSum
    hidden: MechanismState


class Release(NamedTuple):
    """A silo's answer to one query: the vector (d,), and how many records were clipped (simulation only)."""

    vector: Tensor
    clipped: int


@dataclass(frozen=True)
class Silo:
    """A silo's records, in the order it reads them, its plan and its source of noise."""

    number: int
    plan: Plan
    objective: Objective
    records: Records
    noise: KeyedNormal
    gaps: bool = False
    """Whether rounds may be missing between two that are asked for."""

    def start(self) -> SiloState:
        return SiloState(0, empty_sum(self.objective.initial()), self.plan.mechanism.start())

    def answer(self, state: SiloState, t: int, query: Tensor) -> tuple[Release, SiloState]:
        """The release of round t and the next state.

        RunError if rounds do not come in order or the query is not a finite vector of the model's length: an
        answer to anything else would not be the running sum that the noise was calibrated for.

        Guarantee: under an untrusted server the sequence of releases over the whole run is plan.mu-GDP for each
        record of this silo; under a trusted server releases are exact, and only the server may see them.
        A round that is missing counts as one whose increment is zero, and its noise is drawn and not sent: what
        is released is a part of the stream that was accounted for.
        """
        self._check(state, t, query)
        state, current = self._after_gap(state, t)
        total, clipped = absorb(
            state.sum,
            current,
            query,
            self.objective,
            self._batch(t),
            self._weights,
            self.plan.estimator.memory,
        )
        vector, hidden = total.total, state.hidden
        if std := float(self.plan.noise.std_of(self.number)):
            fresh = torch.from_numpy(self._noise_ahead.vector(t)) * std
            noise, hidden = self.plan.mechanism.noise(hidden, t, fresh)
            vector = vector + noise
        return Release(vector, int(clipped)), SiloState(t, total, hidden)

    def _after_gap(self, state: SiloState, t: int) -> tuple[SiloState, Round]:
        """The state when round t begins, and round t with the weight of the query that was answered last."""
        current, estimator = self.plan.estimator.round(t), self.plan.estimator
        if t == state.answered + 1:
            return state, current
        total, hidden = state.sum.total, state.hidden
        for missed in range(state.answered + 1, t):
            total = total * estimator.round(missed).keep
            if std := float(self.plan.noise.std_of(self.number)):
                fresh = torch.from_numpy(self._noise_ahead.vector(missed)) * std
                _, hidden = self.plan.mechanism.noise(hidden, missed, fresh)
        past = estimator.round(state.answered + 1).coefficients[1:]
        current = current._replace(coefficients=(current.coefficients[0], *past))
        return SiloState(t - 1, RunningSum(state.sum.past, total), hidden), current

    def _check(self, state: SiloState, t: int, query: Tensor) -> None:
        in_order = t == state.answered + 1 or (self.gaps and t > state.answered)
        if not in_order or t > self.plan.schedule.rounds:
            raise RunError(
                f"silo {self.number} was asked for round {t} after round {state.answered} "
                f"of {self.plan.schedule.rounds}: rounds come in order, each once"
            )
        if query.shape != (self.objective.dimension,) or query.dtype != self.records.features.dtype:
            raise RunError(
                f"silo {self.number}, round {t}: the query has shape {tuple(query.shape)} and type {query.dtype}, "
                f"expected ({self.objective.dimension},) and {self.records.features.dtype}"
            )
        if not is_finite(query):
            raise RunError(f"silo {self.number}, round {t}: the query has values that are not finite")

    def _batch(self, t: int) -> Records:
        batch = self.plan.batch_sizes[self.number]
        start = self.plan.schedule.place(t) * batch
        return Records(*(column[start : start + batch] for column in self.records))

    @cached_property
    def _noise_ahead(self) -> DrawAhead:
        return DrawAhead(self.noise, self.objective.dimension, self.number, self.plan.schedule.rounds)

    @cached_property
    def _weights(self) -> Tensor:
        batch = self.plan.batch_sizes[self.number]
        return torch.full((batch,), 1.0 / batch, dtype=self.records.features.dtype)


@dataclass(frozen=True)
class SimulatedFederation:
    """What all silos of a simulation share, built once a process: records, plan, one source of noise.

    The noise is keyed by the scenario's seed; each silo draws its own streams of it, one silo at a time.
    """

    cell: Cell
    plan: Plan
    order: Tensor
    noise: KeyedNormal

    @staticmethod
    def of(cell: Cell) -> "SimulatedFederation":
        plan = plan_of(cell, task_of_cell(cell).objective)
        return SimulatedFederation(cell, plan, spread(cell), simulation_noise(cell.seed, cell.run.dtype))

    def silo(self, number: int) -> Silo:
        task, shard = task_of_cell(self.cell), self.order[number]
        records = Records(task.train.features[shard], task.train.labels[shard])
        return Silo(number, self.plan, task.objective, records, self.noise)


def simulated_silo(cell: Cell, number: int) -> Silo:
    """Silo `number` of a simulation."""
    return SimulatedFederation.of(cell).silo(number)
