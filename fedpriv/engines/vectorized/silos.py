"""What all silos of a group release in a round, as their weighted mean (replicates, d).

Where silos take their gradients at the query, sums and noise are linear, and only the means of both are kept
(`Together`).  Where they step by themselves each one is kept, with the noise that it added (`Apart`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedpriv.engines.vectorized.noise_feed import NoiseFeed
from fedpriv.errors import InputError
from fedpriv.estimators.local_steps import point_of, remembered
from fedpriv.estimators.round import Round
from fedpriv.estimators.running_sum import RunningSum, empty_sum
from fedpriv.mechanisms import MechanismState
from fedpriv.objectives import Records
from fedpriv.privacy.trust import Noise, NoiseSource
from fedpriv.running.plan import Plan
from fedpriv.running.round_step import Read, RoundStep
from fedpriv.scenario import Cell


class Mean(NamedTuple):
    """A round's mean over silos, (replicates, d), how many records were clipped, (replicates,), what is kept."""

    noisy: Tensor
    clipped: Tensor
    total: RunningSum
    hidden: MechanismState


class Silos(Protocol):
    """All silos of a group, round after round; `total` and `hidden` are what the round before kept."""

    def released(
        self, t: int, current: Round, query: Tensor, read: Read, total: RunningSum, hidden: MechanismState
    ) -> Mean: ...


class Together:
    """Silos whose sums and noise are added up as they come.

    `fresh` gives the mean of the silos' vectors, but for an `amplitude`, and `missing` what absent silos change of
    the mean of their noise.
    """

    def __init__(
        self, step: RoundStep, fresh: Iterator[Tensor], amplitude: Tensor | None, missing: Iterator[Tensor] | None
    ) -> None:
        self._step, self._fresh, self._amplitude, self._missing = step, fresh, amplitude, missing

    def released(
        self, t: int, current: Round, query: Tensor, read: Read, total: RunningSum, hidden: MechanismState
    ) -> Mean:
        self._step.check_moved(total.past, t, query, f"round {t}")
        total, clipped = self._step.summed(total, current, query, read)
        noisy, hidden = self._step.noisy(total.total, hidden, t, next(self._fresh), self._amplitude)
        if self._missing is not None:
            noisy = noisy + next(self._missing)
        return Mean(noisy, clipped, total, hidden)


class Apart:
    """Silos that step by themselves, each from its own point; every round's noise is fresh.

    A round's rows are told silo by silo; what silos remember is kept as one vector, (silos, replicates, d).
    """

    def __init__(
        self,
        step: RoundStep,
        plans: Sequence[Plan],
        seeds: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        first: int,
    ) -> None:
        """From round `first` on."""
        self._step, self._weights = step, plans[0].weights
        self._fresh = _noise_of_each(plans, seeds, dtype, device, first) if plans[0].noise.sources else None

    def released(
        self, t: int, current: Round, query: Tensor, read: Read, total: RunningSum, hidden: MechanismState
    ) -> Mean:
        mean, start = torch.zeros_like(query), 0
        clipped = query.new_zeros(query.shape[:-1], dtype=torch.int64)
        fresh = None if self._fresh is None else next(self._fresh)
        walked: list[Tensor] = []
        for silo, rows in read.rows:
            share, past = self._weights[silo], tuple(of_all[silo] for of_all in total.past)
            point, own = point_of(current, query, past), _of_one(read, silo, start, rows)
            (_, summed), found = self._step.summed(empty_sum(query), current, point, own)
            released = summed / share if fresh is None else summed / share + fresh[silo]
            walked += remembered(current, past, (), released)
            mean, clipped, start = mean + share * released, clipped + found, start + rows
        return Mean(mean, clipped, RunningSum((torch.stack(walked),), total.total), hidden)


def check_apart(cell: Cell, plan: Plan) -> None:
    """InputError for a run whose silos step by themselves without noise of their own."""
    if plan.estimator.round(1).local is not None and cell.run.noise == "aggregate":
        raise InputError(
            f'run.noise = "aggregate": silos of {cell.algorithm.name} step by themselves, each with noise of its '
            'own; use "per-silo"'
        )


def _of_one(read: Read, silo: int, start: int, rows: int) -> Read:
    """One silo's part of a round."""
    axis = read.weights.dim() - 1
    weights, records = read.weights.narrow(axis, start, rows), read.records
    if records is not None:
        behind = records.labels.dim() - 1
        records = Records(*(column.narrow(behind, start, rows) for column in records)) if rows else None
    return Read(records, weights, ((silo, rows),))


def _noise_of_each(
    plans: Sequence[Plan], seeds: Sequence[int], dtype: torch.dtype, device: torch.device, first: int
) -> Iterator[Tensor]:
    """The noise of every silo, from round `first` on: (silos, replicates, d)."""
    silos, size = len(plans[0].weights), plans[0].objective.dimension
    noises = [Noise((NoiseSource(silo, plan.noise.std_of(silo), 1.0),)) for silo in range(silos) for plan in plans]
    feed = NoiseFeed(noises, list(seeds) * silos, plans[0].schedule.rounds, size, dtype, lambda _: None, device)
    return (fresh.view(silos, len(plans), size) for fresh in feed.rounds_from(first))
