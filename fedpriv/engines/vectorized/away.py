"""Silos that do not answer, in the engine that keeps the mean alone: their records and noise are left out."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.estimators.gradients import Estimator
from fedpriv.mechanisms import Mechanism
from fedpriv.randomness import KeyedNormal, simulation_noise
from fedpriv.running.absences import Absences
from fedpriv.running.plan import Plan
from fedpriv.scenario import Cell


def check_away(cell: Cell, plan: Plan) -> None:
    """InputError for a run with silos that drop out which this engine cannot compute."""
    if (key := cell.without_silos) is None:
        return
    if plan.estimator.memory > 1:
        raise InputError(
            f"{key}: {cell.algorithm.name} looks back at the query that each silo answered last, and engine "
            "vectorized keeps one for all silos; use --engine inprocess"
        )
    if cell.run.noise == "aggregate" and plan.trust.private_messages:
        raise InputError(
            f'run.noise = "aggregate" draws the mean of all silos\' noise, and with {key} some have none; use '
            '"per-silo"'
        )


class Away:
    """Which silos are away in rounds 1 … T of every replicate, and what that does to the mean."""

    def __init__(self, absences: Sequence[Absences], silos: int, device: torch.device) -> None:
        self._absences, self._silos, self._device = absences, silos, device

    def __bool__(self) -> bool:
        return any(self._absences)

    def there(self, t: int) -> Tensor:
        """1 for each silo that answers in round t, else 0; (replicates, silos)."""
        marks = torch.ones(len(self._absences), self._silos, dtype=torch.float64)
        for place, absences in enumerate(self._absences):
            marks[place, list(absences.away(t))] = 0.0
        return marks.to(self._device)

    @property
    def ever(self) -> list[int]:
        """The silos that are away in some round of some replicate."""
        return sorted(set().union(*(absences.rounds for absences in self._absences)))


def missing_noise(
    plans: Sequence[Plan],
    seeds: Sequence[int],
    away: Away,
    estimator: Estimator,
    mechanism: Mechanism,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Tensor]:
    """For rounds 1 … T what has to be added to the mean of all silos' noise, (replicates, d).

    A silo that is away counts with its last release, decayed: its noise of this round is not there, that of the
    round before is.  `estimator` and `mechanism` are those of all replicates.
    """
    size = plans[0].objective.dimension
    sources = [simulation_noise(seed, np.dtype(str(dtype).removeprefix("torch."))) for seed in seeds]
    states = {silo: mechanism.start() for silo in away.ever}
    counted = {silo: torch.zeros(len(plans), size, dtype=dtype, device=device) for silo in states}
    for t in range(1, plans[0].schedule.rounds + 1):
        there, total = away.there(t).to(dtype), torch.zeros(len(plans), size, dtype=dtype, device=device)
        for silo, state in states.items():
            fresh = torch.stack(
                [_fresh(source, plan, silo, t) for source, plan in zip(sources, plans, strict=True)]
            )
            row, states[silo] = mechanism.noise(state, t, fresh.to(device))
            here = there[:, silo, None]
            counts = here * row + (1.0 - here) * estimator.round(t).decay * counted[silo]
            total += counts - row
            counted[silo] = counts
        yield total


def _fresh(source: KeyedNormal, plan: Plan, silo: int, t: int) -> Tensor:
    """Silo's fresh vector of round t as it enters the mean, (d,)."""
    scale = plan.weights[silo] * float(plan.noise.std_of(silo))
    return torch.from_numpy(source.vector(plan.objective.dimension, silo, t)) * scale
