"""Evaluations by the silos of a simulation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.core.random import SERVER, KeyedNormal, derive_key, integers_key, seed_key
from fedpriv.loss.objective import Records
from fedpriv.plan.evaluation import EvaluationPlan, evaluation_plan_of, held_out_shares
from fedpriv.plan.task import counting, task_of_cell
from fedpriv.scenario.schema import Cell


def evaluation_noise(cell: Cell) -> KeyedNormal:
    """A simulation's: a stream of its own from the scenario's seed, and no secret."""
    return KeyedNormal(seed_key(cell.seed, "evaluation"), cell.run.dtype)


def evaluation_integers_key(cell: Cell) -> bytes:
    """As `evaluation_noise`, for evaluations whose releases are integers."""
    return derive_key(integers_key(cell.seed), "evaluation")


@dataclass(frozen=True)
class SimulatedEvaluation:
    """The evaluations of all silos of a simulation; in floating point `metrics` computes them at once."""

    asked: EvaluationPlan
    shares: list[Records]
    noise: KeyedNormal

    @staticmethod
    def of(cell: Cell) -> "SimulatedEvaluation | None":
        """None where silos do not evaluate."""
        asked = evaluation_plan_of(cell, task_of_cell(cell).objective)
        return None if asked is None else SimulatedEvaluation(asked, held_out_shares(cell), evaluation_noise(cell))

    def metrics(self, place: int, model: Tensor) -> dict[str, float]:
        """Of evaluation number `place`, from 1, of `model` (d,)."""
        means = torch.stack(
            [self._noisy(self._mean(model, own), silo, place) for silo, own in enumerate(self.shares)]
        )
        if self.asked.apart:
            return self.asked.metrics(means)
        weights = torch.tensor(self.asked.plan.weights, dtype=means.dtype)
        return self.asked.metrics(self._noisy(weights @ means, SERVER, place).unsqueeze(0))

    def _mean(self, model: Tensor, own: Records) -> Tensor:
        """Over all places, whether they count or not: a public denominator."""
        records, there = counting(own)
        return self.asked.scores.contributions(model, records).masked_fill(~there.unsqueeze(-1), 0.0).mean(0)

    def _noisy(self, mean: Tensor, owner: int, place: int) -> Tensor:
        std = float(self.asked.plan.noise.std_of(owner))
        return mean + std * torch.from_numpy(self.noise.vector(len(mean), owner, place)).double() if std else mean
