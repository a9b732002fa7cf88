"""Schedules and units that break what is claimed of secret rounds and of persons: functions that plant them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.addons.audit import secret
from fedpriv.core.random import KeyedNormal, derive_key, simulation_noise
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.views import PerUnit
from fedpriv.noise.integers.plan import ExactPlan
from fedpriv.participation.secret import PoissonSampling, RandomAllocation
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.rounds.round import RoundBatch, RoundState, RoundSums
from fedpriv.silo.silo import Silo


def told(patch: pytest.MonkeyPatch) -> None:
    """Who was drawn is known to whoever looks: the guard's own coins are guessed."""
    key = derive_key(b"test", "told")
    patch.setattr("fedpriv.silo.guard.system_key", lambda: key)
    patch.setattr(secret, "simulated_randomness", lambda _: KeyedNormal(key, np.float64).sampling_randomness())


def coins_of_the_seed(patch: pytest.MonkeyPatch) -> None:
    """Noise with the silo's key, and rounds that anybody can draw again."""
    patch.setattr(
        Silo, "_sampling_randomness", property(lambda _: simulation_noise(1, "float32").sampling_randomness())
    )


def one_round_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Balls in bins that stay: what is claimed is a fresh round in every epoch."""

    def rows(self: RandomAllocation, t: int, batch: int, silo: int, coins: Any) -> Any:
        place = (t - 1) % self.rounds_per_epoch
        count = self.batches_per_silo * batch
        members = np.arange(count)[self.group_rows(t)]
        return members[coins().numbers(count, self.bins, silo, 0)[members] == place // self.groups]

    patch.setattr(RandomAllocation, "select_rows", rows)


def equal_batches(patch: pytest.MonkeyPatch) -> None:
    """A shuffled order in batches of one size: all others' places tell the last one's."""

    def rows(self: RandomAllocation, t: int, batch: int, silo: int, coins: Any) -> Any:
        epoch, place = divmod(t - 1, self.rounds_per_epoch)
        count = self.batches_per_silo * batch
        order = np.argsort(coins().numbers(count, 2**30, silo, epoch), kind="stable")
        return np.sort(order[place * batch : (place + 1) * batch])

    patch.setattr(RandomAllocation, "select_rows", rows)


def first_come(patch: pytest.MonkeyPatch) -> None:
    """Twice as many are drawn, and the first that fill a batch are kept: one row displaces another."""

    def rows(self: PoissonSampling, t: int, batch: int, silo: int, coins: Any) -> Any:
        count = self.batches_per_silo * batch
        return np.flatnonzero(coins().bernoulli(count, min(1.0, 2.0 * self.rate), silo, t))[:batch]

    patch.setattr(PoissonSampling, "select_rows", rows)


def over_those_drawn(patch: pytest.MonkeyPatch) -> None:
    """A mean over the records that a round drew, with the noise for a public number of them."""
    honest = IntegerSteps.sum_increments

    def dividing(
        self: IntegerSteps, state: RoundState, current: Any, query: Tensor, read: RoundBatch
    ) -> RoundSums:
        summed, batch = honest(self, state, current, query, read), self.plan.batch_sizes[read.silo_sizes[0][0]]
        return summed._replace(values=summed.values * batch // max(1, len(read.weights)))

    patch.setattr(IntegerSteps, "sum_increments", dividing)


def record_by_record(patch: pytest.MonkeyPatch) -> None:
    """A unit's records are clipped one by one and added up, and the check of norms lets that pass."""
    norms = ExactPlan.norms
    patch.setattr(ExactPlan, "norms", lambda self, t: tuple(8 * norm for norm in norms(self, t)))

    honest = PerUnit.per_record

    def summed(self: PerUnit, query: Query, batch: Batch, places: Tensor, clip: float) -> Tensor:
        units = batch.records
        total = torch.zeros(len(units.labels), self.dimension, dtype=torch.float64)
        for slot in range(self.max_records):
            one = Records(units.features[:, slot : slot + 1], units.labels[:, slot : slot + 1])
            total += honest(self, query, Batch(one, batch.weights), places, clip)
        return total

    patch.setattr(PerUnit, "per_record", summed)
