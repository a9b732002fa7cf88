"""All silos of a group at once: the weighted mean of their releases of a round, (replicates, d).

Where silos take their gradients at the query, sums and noise are linear, and only the means of both are kept
(`AveragedSilos`).  Where they step by themselves each one is kept, with the noise that it added (`LocalSilos`).
Records and noise of silos that do not answer are left out.

Cells that differ in nothing but seeds and numbers make a group (`groups_of`).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, KeyedNormal, simulation_noise
from fedpriv.core.replicates import signature
from fedpriv.engines.vectorized.noise import NoiseFeed
from fedpriv.loss.estimators import Estimator, Round
from fedpriv.loss.objective import Records
from fedpriv.loss.running_sums import RunningSum, point_of, remembered
from fedpriv.noise.mechanism import Mechanism, MechanismState
from fedpriv.noise.trust import Noise, NoiseSource
from fedpriv.rounds.plan import Plan, plan_of
from fedpriv.rounds.round import Absences, FloatArithmetic, Read, State, check_moved
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.schema import Cell


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


class AveragedSilos:
    """Silos whose sums and noise are added up as they come.

    `missing` gives what absent silos change of the mean of their noise.
    """

    def __init__(self, step: FloatArithmetic, missing: Iterator[Tensor] | None) -> None:
        self._step, self._missing = step, missing

    def released(
        self, t: int, current: Round, query: Tensor, read: Read, total: RunningSum, hidden: MechanismState
    ) -> Mean:
        check_moved(self._step.plan.mechanism, total.past, t, query, f"round {t}")
        state = State(t - 1, total.past, (total.total,), hidden)
        summed = self._step.sums(state, current, query, read)
        noisy, state = self._step.noisy(state, t, summed.values, SERVER, query)
        if self._missing is not None:
            noisy = noisy + next(self._missing)
        assert summed.clipped is not None
        return Mean(noisy, summed.clipped, RunningSum(summed.past, summed.values), state.hidden)


class LocalSilos:
    """Silos that step by themselves, each from its own point; every round's noise is fresh.

    A round's rows are told silo by silo; what silos remember is kept as one vector, (silos, replicates, d).
    """

    def __init__(
        self,
        step: FloatArithmetic,
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
            summed = self._step.sums(State(sums=(torch.zeros_like(query),)), current, point, own)
            assert summed.clipped is not None
            released = summed.values / share if fresh is None else summed.values / share + fresh[silo]
            walked += remembered(current, past, (), released)
            mean, clipped, start = mean + share * released, clipped + summed.clipped, start + rows
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


def check_away(cell: Cell, plan: Plan) -> None:
    """InputError for a run with silos that drop out which this engine cannot compute."""
    if (key := cell.without_silos) is None:
        return
    if plan.estimator.memory > 1:
        raise InputError(
            f"{key}: {cell.algorithm.name} looks back at the query that each silo answered last, and engine "
            "vectorized keeps one for all silos; use --engine inprocess"
        )
    if cell.run.noise == "aggregate" and not plan.trust.draws(SERVER):
        raise InputError(
            f'run.noise = "aggregate" draws the mean of all silos\' noise, and with {key} some have none; use '
            '"per-silo"'
        )


class Away:
    """Silos that are away in rounds 1 … T of every replicate."""

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


_ROUND_VALUES = 2**26


def groups_of(cells: Sequence[Cell]) -> list[list[int]]:
    """The places of the cells that run together, group by group; each group alone computes the same bits."""
    return list(grouped(cells, plans_of(cells)))


def plans_of(cells: Sequence[Cell]) -> list[Plan]:
    """The plan of every cell; InputError for one that this engine cannot compute."""
    if any(cell.run.arithmetic == "integers" for cell in cells):
        raise InputError(
            'run.arithmetic = "integers": engine vectorized adds all silos up at once, in floating point; use '
            "--engine inprocess"
        )
    plans = [plan_of(cell, task_of_cell(cell).objective) for cell in cells]
    for cell, plan in zip(cells, plans, strict=True):
        check_away(cell, plan)
        check_apart(cell, plan)
    return plans


def grouped(cells: Sequence[Cell], plans: Sequence[Plan]) -> Iterator[list[int]]:
    """The places of the cells that run together."""
    groups: dict[object, list[int]] = {}
    for index, (cell, plan) in enumerate(zip(cells, plans, strict=True)):
        groups.setdefault(_group_key(cell, plan), []).append(index)
    return itertools.chain.from_iterable(
        _pieces(members, cells[members[0]], plans[members[0]]) for members in groups.values()
    )


def _pieces(members: list[int], cell: Cell, plan: Plan) -> Iterator[list[int]]:
    """A group cut so that one round's records of all its replicates fit comfortably into memory."""
    record = task_of_cell(cell).train.features[0].numel()
    size = max(1, _ROUND_VALUES // (sum(plan.batch_sizes) * record))
    return (members[start : start + size] for start in range(0, len(members), size))


def _group_key(cell: Cell, plan: Plan) -> object:
    parts = tuple(signature(part) for part in (plan.estimator, plan.mechanism, plan.optimizer, plan.objective))
    shape = (plan.schedule, plan.batch_sizes, plan.weights, bool(plan.noise.sources))
    return shape, parts, cell.data, cell.model, cell.run, cell.evaluation
