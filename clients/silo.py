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
from fedpriv.randomness import DrawAhead, KeyedCoins, KeyedNormal, simulation_noise
from fedpriv.rounds import Poisson
from fedpriv.running_sum import RunningSum, absorb, empty_sum
from fedpriv.scenario import Cell
from fedpriv.wire import Counts, is_finite


class SiloState(NamedTuple):
    """What a silo keeps between rounds: the last round answered, its running sum, its mechanism's state."""

    answered: int
    sum: RunningSum
    hidden: MechanismState


class Release(NamedTuple):
    """A silo's answer to one query: the vector (d,), and what only a simulation tells with it."""

    vector: Tensor
    counts: Counts


@dataclass(frozen=True)
class Silo:
    """A silo's records, in the order it reads them, its plan and its source of noise."""

    number: int
    plan: Plan
    objective: Objective
    records: Records
    noise: KeyedNormal

    def start(self) -> SiloState:
        return SiloState(0, empty_sum(self.objective.initial()), self.plan.mechanism.start())

    def answer(self, state: SiloState, t: int, query: Tensor) -> tuple[Release, SiloState]:
        """The release of round t and the next state.

        RunError if rounds do not come in order or the query is not a finite vector of the model's length: an
        answer to anything else would not be the running sum that the noise was calibrated for.

        Guarantee: under an untrusted server the sequence of releases over the whole run keeps what
        `plan.stream_of` claims for each record of this silo; under a trusted server releases are exact, and only
        the server may see them.  Which records a round draws by Poisson sampling never leaves this object, and
        nothing but the release depends on it, the counts of a simulation apart.
        """
        self._check(state, t, query)
        current, records = self.plan.estimator.round(t), self._batch(t)
        drawn = 0 if records is None else len(records.labels)
        total, clipped = absorb(
            state.sum,
            current,
            query,
            self.objective,
            records,
            self._weight.expand(drawn),
            self.plan.estimator.memory,
        )
        vector, hidden = total.total, state.hidden
        if std := float(self.plan.noise.std_of(self.number)):
            fresh = torch.from_numpy(self._noise_ahead.vector(t)) * std
            noise, hidden = self.plan.mechanism.noise(hidden, t, fresh)
            vector = vector + noise
        return Release(vector, Counts(drawn, int(clipped))), SiloState(t, total, hidden)

    def _check(self, state: SiloState, t: int, query: Tensor) -> None:
        if t != state.answered + 1 or t > self.plan.schedule.rounds:
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

    def _batch(self, t: int) -> Records | None:
        """The records of round t, None if there are none."""
        batch, schedule = self.plan.batch_sizes[self.number], self.plan.schedule
        rows: slice | Tensor
        if isinstance(schedule, Poisson):
            heads = self._coins.heads(schedule.places * batch, schedule.rate, self.number, t)
            rows = torch.from_numpy(heads).nonzero().squeeze(-1)
            if not len(rows):
                return None
        else:
            place = schedule.place(t)
            if place is None:
                return None
            rows = slice(place * batch, (place + 1) * batch)
        return Records(*(column[rows] for column in self.records))

    @cached_property
    def _coins(self) -> KeyedCoins:
        return self.noise.coins()

    @cached_property
    def _noise_ahead(self) -> DrawAhead:
        return DrawAhead(self.noise, self.objective.dimension, self.number, self.plan.schedule.rounds)

    @cached_property
    def _weight(self) -> Tensor:
        """Of one record in the silo's mean: the denominator is public, however many records take part."""
        return torch.tensor(1.0 / self.plan.batch_sizes[self.number], dtype=self.records.features.dtype)


@dataclass(frozen=True)
class SimulatedFederation:
    """What all silos of a simulation share, built once a process: records, plan, one source of noise.

    The noise is keyed by the scenario's seed; each silo draws its own streams of it, one silo at a time.
    """

    cell: Cell
    plan: Plan
    order: list[Tensor]
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
