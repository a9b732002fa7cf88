"""What all silos of a group release in a round, as their weighted mean (replicates, d).

Where silos take their gradients at the query, sums and noise are linear, and only the means of both are kept
(`Together`).  Where they step by themselves each one is kept, with the noise that it added (`Apart`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedpriv.engines.vectorized.noise_feed import NoiseFeed
from fedpriv.estimators.local_steps import Past, point_of, remembered
from fedpriv.estimators.round import Round
from fedpriv.estimators.running_sum import empty_sum
from fedpriv.objectives import Records
from fedpriv.privacy.trust import Noise, NoiseSource
from fedpriv.running.plan import Plan
from fedpriv.running.round_step import Read, RoundStep


class Mean(NamedTuple):
    """A round's mean over silos, (replicates, d), and how many records were clipped, (replicates,)."""

    noisy: Tensor
    clipped: Tensor


class Silos(Protocol):
    """All silos of a group, round after round."""

    def released(self, t: int, current: Round, query: Tensor, read: Read) -> Mean: ...


class Together:
    """Silos whose sums and noise are added up as they come; `fresh` gives the mean of the silos' vectors."""

    def __init__(self, step: RoundStep, query: Tensor, fresh: Iterator[Tensor]) -> None:
        self._step, self._fresh = step, fresh
        self._total, self._hidden = empty_sum(query), step.mechanism.start()

    def released(self, t: int, current: Round, query: Tensor, read: Read) -> Mean:
        self._step.check_moved(self._total.past, t, query, f"round {t}")
        self._total, clipped = self._step.summed(self._total, current, query, read)
        fresh = next(self._fresh).to(query.device)
        noisy, self._hidden = self._step.noisy(self._total.total, self._hidden, t, fresh)
        return Mean(noisy, clipped)


class Apart:
    """Silos that step by themselves, each from its own point; every round's noise is fresh.

    A round's rows are told silo by silo.
    """

    def __init__(self, step: RoundStep, query: Tensor, plans: Sequence[Plan], seeds: Sequence[int]) -> None:
        self._step, self._weights = step, plans[0].weights
        self._past: list[Past] = [() for _ in self._weights]
        self._fresh = _noise_of_each(plans, seeds, query) if plans[0].noise.sources else None

    def released(self, t: int, current: Round, query: Tensor, read: Read) -> Mean:
        mean, clipped, start = torch.zeros_like(query), query.new_zeros(query.shape[:-1]), 0
        fresh = None if self._fresh is None else next(self._fresh).to(query.device)
        for silo, rows in read.rows:
            share = self._weights[silo]
            own = _of_one(read, silo, start, rows)
            point = point_of(current, query, self._past[silo])
            (_, total), found = self._step.summed(empty_sum(query), current, point, own)
            released = total / share if fresh is None else total / share + fresh[silo]
            self._past[silo] = remembered(current, self._past[silo], (), released)
            mean, clipped, start = mean + share * released, clipped + found, start + rows
        return Mean(mean, clipped)


def _of_one(read: Read, silo: int, start: int, rows: int) -> Read:
    """One silo's part of a round."""
    axis = read.weights.dim() - 1
    weights, records = read.weights.narrow(axis, start, rows), read.records
    if records is not None:
        behind = records.labels.dim() - 1
        records = Records(*(column.narrow(behind, start, rows) for column in records)) if rows else None
    return Read(records, weights, ((silo, rows),))


def _noise_of_each(plans: Sequence[Plan], seeds: Sequence[int], query: Tensor) -> Iterator[Tensor]:
    """The noise of every silo, round after round: (silos, replicates, d)."""
    silos, (replicates, size) = len(plans[0].weights), query.shape
    noises = [Noise((NoiseSource(silo, plan.noise.std_of(silo), 1.0),)) for silo in range(silos) for plan in plans]
    feed = NoiseFeed(noises, list(seeds) * silos, plans[0].schedule.rounds, size, query.dtype, lambda _: None)
    return (fresh.view(silos, replicates, size) for fresh in feed)
