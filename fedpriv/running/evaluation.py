"""Evaluation by silos: a run of its own beside the training, over other records, planned and accounted alike.

Every evaluation reads all test records of every silo: a round of DP-SGD's releases, of bounded vectors of one or
two numbers (metrics/summed.py) in place of gradients.  So its plan, noise, integers, ledger entries and prices are
those of such a run, and nothing of it is written twice.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedpriv.metrics.scored import LOWER_IS_BETTER, MEAN, WORST
from fedpriv.metrics.summed import SummedScores, summed_scores
from fedpriv.objectives import Objective, Records
from fedpriv.privacy.ledger import ReleaseStream
from fedpriv.privacy.trust import TRUSTED, UNTRUSTED
from fedpriv.randomness import SERVER, KeyedNormal, derive_key, integers_key, seed_key
from fedpriv.running.held_out import held_out_shares
from fedpriv.running.plan import Plan, check_scaled, plan_of
from fedpriv.running.task import task_of_cell
from fedpriv.running.unit_rows import counting
from fedpriv.scenario import Cell
from fedpriv.scenario.federation import FederationSection
from fedpriv.scenario.privacy import PrivacySection
from fedpriv.scenario.schema import AlgorithmSection


@dataclass(frozen=True)
class EvaluationPlan:
    """The plan of a cell's evaluations, and who its silos are."""

    plan: Plan
    scores: SummedScores
    silos: tuple[str, ...]
    """Names of silo 0, 1, … for metrics of each; none where only all of them together are asked for."""
    counted: float = 1.0
    """The public share of the places read that count, where cells decide: means over places are divided by it."""

    @property
    def apart(self) -> bool:
        """Whether every silo's own means are published, and not those of all silos alone."""
        return not float(self.plan.noise.std_of(SERVER))

    def metrics(self, published: Tensor) -> dict[str, float]:
        """By name, of an evaluation's published means (silos, `dimension`), or (1, `dimension`)."""
        published = published.double() / self.counted
        shares = torch.tensor(self.plan.weights if self.apart else (1.0,), dtype=torch.float64)
        found = {name: float(value) for name, value in self.scores.named(shares @ published).items()}
        if not self.silos:
            return found
        for name, values in self.scores.named(published).items():
            found |= {f"{name}_at_{silo}": float(value) for silo, value in zip(self.silos, values, strict=True)}
            found[f"{name}_{MEAN}"] = float(values.mean())
            found[f"{name}_{WORST}"] = float(values.max() if name in LOWER_IS_BETTER else values.min())
        return found


def evaluations_of(cell: Cell) -> int:
    """How many rounds are evaluated."""
    return min(cell.schedule.rounds, cell.run.evaluations)


def evaluation_cell(cell: Cell) -> Cell:
    """The run that a cell's evaluations are: a round each, of all test records, with noise of their own target.

    Under secure aggregation every silo adds the whole noise: its message is private by itself.
    """
    asked, silos = cell.evaluation, cell.federation.silos
    assert asked is not None
    count = evaluations_of(cell)
    trust = TRUSTED if cell.algorithm.trust_setting.noise_at_server else UNTRUSTED
    target = {"mode": "none"} if asked.mu is None else {"mu": asked.mu}
    run = cell.run if asked.mu is not None else cell.run.model_copy(update={"arithmetic": "float"})
    return cell.derived(
        PrivacySection.model_validate({"relation": cell.privacy.relation, "delta": cell.privacy.delta, **target}),
        FederationSection(silos=silos, rounds=count, epochs=count, batches=asked.of_silos(silos)),
        AlgorithmSection.model_validate(
            {
                "name": "dp-sgd",
                "trust": trust.name,
                "clip": 0.5 * np.sqrt(1 if cell.model.regression else 2),
                "step": 1.0,
            }
        ),
        run=run,
    )


def evaluation_plan_of(cell: Cell, objective: Objective, *, released: bool = False) -> EvaluationPlan | None:
    """None where silos do not evaluate; `objective` is the model's own.  InputError as for `plan_of`.

    Guarantee: the releases of all evaluations together are `evaluation.mu`-GDP for each test record.
    """
    if cell.evaluation is None:
        return None
    check_scaled(cell)
    scores = summed_scores(objective, cell.evaluation.loss_bound, classes=not cell.model.regression)
    plan = replace(plan_of(evaluation_cell(cell), scores, released=released), model_length=objective.dimension)
    schema, tests = cell.data.table_schema, cell.data.validation is None
    counted = 1.0 if schema is None else schema.counted_share(tests=tests)
    return EvaluationPlan(plan, scores, _names(cell) if cell.run.per_silo else (), counted)


def released_by(asked: EvaluationPlan | None) -> tuple[ReleaseStream, ...]:
    """What a run that is over has released of test records: the ledger of its evaluations."""
    return () if asked is None else asked.plan.releases(asked.plan.schedule.rounds)


def _names(cell: Cell) -> tuple[str, ...]:
    schema = cell.data.table_schema
    if cell.data.partition == "site" and schema is not None:
        return schema.sites
    return tuple(f"silo_{silo}" for silo in range(cell.federation.silos))


def evaluation_noise(cell: Cell) -> KeyedNormal:
    """A simulation's: a stream of its own from the scenario's seed, and no secret."""
    return KeyedNormal(seed_key(cell.seed, "evaluation"), cell.run.dtype)


def evaluation_integers_key(cell: Cell) -> bytes:
    """As `evaluation_noise`, for evaluations whose releases are integers."""
    return derive_key(integers_key(cell.seed), "evaluation")


@dataclass(frozen=True)
class SimulatedEvaluation:
    """All silos of one cell at once, in floating point, as silos and server compute it one by one."""

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
