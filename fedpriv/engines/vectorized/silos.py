"""All silos of a group at once: the weighted mean of their releases of a round, (replicates, d).

Where silos take their gradients at the query, sums and noise are linear, and only the means of both are kept
(`AveragedSilos`).  Where they step by themselves each one is kept, with the noise that it added (`LocalSilos`).
Records and noise of silos that do not answer are left out.

Cells that differ in nothing but seeds and numbers make a group (`group_cells`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, KeyedNormal, simulation_noise
from fedpriv.core.replicates import stack, stack_signature
from fedpriv.engines.vectorized.noise import NoiseFeed
from fedpriv.loss.objective import Records
from fedpriv.noise.mechanism import MechanismState
from fedpriv.noise.trust import Noise, NoiseSource
from fedpriv.plan.plan import Absences, Plan, PlannedRound, make_plan
from fedpriv.plan.task import load_task
from fedpriv.rounds.floats import FloatSteps, RunningSum
from fedpriv.rounds.round import RoundBatch, RoundState, check_query_distance, gradient_point, next_past_vectors
from fedpriv.scenario.schema import Cell


class Replicates(NamedTuple):
    """Cells that run in step; in `plan` the numbers in which they differ are columns."""

    plan: Plan
    plans: Sequence[Plan]
    noise_seeds: Sequence[int]
    """Of the cells' noise."""
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def from_plans(
        plans: Sequence[Plan], seeds: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> "Replicates":
        parts = "estimator", "mechanism", "optimizer", "objective"
        stacked = {name: stack([getattr(plan, name) for plan in plans], dtype, device) for name in parts}
        return Replicates(replace(plans[0], **stacked), plans, seeds, dtype, device)


class MeanRelease(NamedTuple):
    """A round's mean over silos, (replicates, d), how many records were clipped, (replicates,), what is kept."""

    release: Tensor
    clipped_count: Tensor
    running_sum: RunningSum
    mechanism_state: MechanismState


class Silos(Protocol):
    """All silos of a group, round after round; `total` and `hidden` are what the round before kept."""

    def release_mean(
        self,
        t: int,
        planned: PlannedRound,
        query: Tensor,
        read: RoundBatch,
        total: RunningSum,
        hidden: MechanismState,
    ) -> MeanRelease: ...


class AveragedSilos:
    """Silos whose sums and noise are added up as they come.

    `missing` gives what absent silos change of the mean of their noise.
    """

    def __init__(self, step: FloatSteps, missing: Iterator[Tensor] | None) -> None:
        self._step, self._absence_corrections = step, missing

    def release_mean(
        self,
        t: int,
        planned: PlannedRound,
        query: Tensor,
        read: RoundBatch,
        total: RunningSum,
        hidden: MechanismState,
    ) -> MeanRelease:
        check_query_distance(self._step.plan.mechanism, total.past_vectors, t, query, f"round {t}")
        state = RoundState(t - 1, total.past_vectors, (total.total,), hidden)
        summed = self._step.sum_increments(state, planned, query, read)
        noisy, state = self._step.add_noise(state, t, summed.values, SERVER, query)
        if self._absence_corrections is not None:
            noisy = noisy + next(self._absence_corrections)
        assert summed.clipped_count is not None
        return MeanRelease(
            noisy, summed.clipped_count, RunningSum(summed.past_vectors, summed.values), state.mechanism_state
        )


class LocalSilos:
    """Silos that step by themselves, each from its own point; every round's noise is fresh.

    A round's rows are told silo by silo; what silos remember is kept as one vector, (silos, replicates, d).
    """

    def __init__(self, group: Replicates, first: int) -> None:
        """From round `first` on."""
        self._step, self._weights = FloatSteps(group.plan), group.plan.weights
        self._axis = -1 if group.plan.unit.max_records == 1 else -2  # of the rows, in front of a unit's records
        self._fresh = _draw_silo_noise(group, first) if group.plan.noise.sources else None

    def release_mean(
        self,
        t: int,
        planned: PlannedRound,
        query: Tensor,
        read: RoundBatch,
        total: RunningSum,
        hidden: MechanismState,
    ) -> MeanRelease:
        mean, start = torch.zeros_like(query), 0
        clipped = query.new_zeros(query.shape[:-1], dtype=torch.int64)
        fresh = None if self._fresh is None else next(self._fresh)
        walked: list[Tensor] = []
        for silo, rows in read.silo_sizes:
            share, past = self._weights[silo], tuple(of_all[silo] for of_all in total.past_vectors)
            point, own = gradient_point(planned.step, query, past), self._select_silo(read, silo, start, rows)
            summed = self._step.sum_increments(
                RoundState(accumulator=(torch.zeros_like(query),)), planned, point, own
            )
            assert summed.clipped_count is not None
            released = summed.values / share if fresh is None else summed.values / share + fresh[silo]
            walked += next_past_vectors(planned.step, past, (), released)
            mean, clipped, start = mean + share * released, clipped + summed.clipped_count, start + rows
        return MeanRelease(mean, clipped, RunningSum((torch.stack(walked),), total.total), hidden)

    def _select_silo(self, read: RoundBatch, silo: int, start: int, rows: int) -> RoundBatch:
        """One silo's part of a round."""
        weights, records = read.weights.narrow(-1, start, rows), None
        if read.records is not None and rows:
            axis = read.records.labels.dim() + self._axis
            records = Records(*(column.narrow(axis, start, rows) for column in read.records))
        return RoundBatch(records, weights, ((silo, rows),), read.row_indices[..., start : start + rows])


def _check_cell(cell: Cell, plan: Plan) -> None:
    """InputError for a run that this engine cannot compute."""
    if plan.rounds[0].step.local is not None and cell.run.noise == "aggregate":
        raise InputError(
            f'run.noise = "aggregate": silos of {cell.algorithm.name} step by themselves, each with noise of its '
            'own; use "per-silo"'
        )
    if (key := cell.absence_key) is None:
        return
    if plan.estimator.memory > 1:
        raise InputError(
            f"{key}: {cell.algorithm.name} looks back at the query that each silo answered last, and engine "
            "vectorized keeps one for all silos; use --engine inprocess"
        )
    if cell.run.noise == "aggregate" and not plan.trust.adds_noise(SERVER):
        raise InputError(
            f'run.noise = "aggregate" draws the mean of all silos\' noise, and with {key} some have none; use '
            '"per-silo"'
        )


def _draw_silo_noise(group: Replicates, first: int) -> Iterator[Tensor]:
    """The noise of every silo, from round `first` on: (silos, replicates, d)."""
    plans, rounds = group.plans, group.plan.schedule.rounds
    silos, size = len(group.plan.weights), group.plan.objective.dimension
    noises = [Noise((NoiseSource(silo, plan.noise.std_of(silo), 1.0),)) for silo in range(silos) for plan in plans]
    feed = NoiseFeed(
        noises, list(group.noise_seeds) * silos, rounds, size, group.dtype, lambda _: None, group.device
    )
    return (fresh.view(silos, len(plans), size) for fresh in feed.rounds_from(first))


class ReplicateAbsences:
    """Silos that are away in rounds 1 … T of every replicate."""

    def __init__(self, absences: Sequence[Absences], silos: int, device: torch.device) -> None:
        self._absences, self._silo_count, self._device = absences, silos, device

    def __bool__(self) -> bool:
        return any(self._absences)

    def presence_mask(self, t: int) -> Tensor:
        """1 for each silo that answers in round t, else 0; (replicates, silos)."""
        marks = torch.ones(len(self._absences), self._silo_count, dtype=torch.float64)
        for place, absences in enumerate(self._absences):
            marks[place, list(absences.absent_silos(t))] = 0.0
        return marks.to(self._device)

    @property
    def ever_absent(self) -> list[int]:
        """The silos that are away in some round of some replicate."""
        return sorted(set().union(*(absences.rounds for absences in self._absences)))


def absence_corrections(group: Replicates, away: ReplicateAbsences) -> Iterator[Tensor]:
    """For rounds 1 … T what has to be added to the mean of all silos' noise, (replicates, d).

    A silo that is away counts with its last release, decayed: its noise of this round is not there, that of the
    round before is.
    """
    plan, dtype = group.plan, str(group.dtype).removeprefix("torch.")
    zeros = torch.zeros(len(group.plans), plan.objective.dimension, dtype=group.dtype, device=group.device)
    sources = [simulation_noise(seed, dtype) for seed in group.noise_seeds]
    states = {silo: plan.mechanism.start() for silo in away.ever_absent}
    counted = dict.fromkeys(states, zeros)
    for t in range(1, plan.schedule.rounds + 1):
        there, total = away.presence_mask(t).to(group.dtype), zeros.clone()
        for silo, state in states.items():
            fresh = [
                _draw_fresh_vector(source, own, silo, t) for source, own in zip(sources, group.plans, strict=True)
            ]
            row, states[silo] = plan.mechanism.noise(state, t, torch.stack(fresh).to(group.device))
            here = there[:, silo, None]
            counts = here * row + (1.0 - here) * plan.rounds[t - 1].step.decay * counted[silo]
            total += counts - row
            counted[silo] = counts
        yield total


def _draw_fresh_vector(source: KeyedNormal, plan: Plan, silo: int, t: int) -> Tensor:
    """Silo's fresh vector of round t as it enters the mean, (d,)."""
    scale = plan.weights[silo] * float(plan.noise.std_of(silo))
    return torch.from_numpy(source.vector(plan.objective.dimension, silo, t)) * scale


_MAX_ROUND_VALUES = 2**26
NUMBERS_PER_EXTRA_VALUE = 8
"""Numbers for each value of a direction or a copy: drawn, scaled, moved either way, seen, and what came of it."""


def group_cells(cells: Sequence[Cell]) -> list[list[int]]:
    """The places of the cells that run together, group by group; each group alone computes the same bits."""
    return list(group_by_plan(cells, make_plans(cells)))


def make_plans(cells: Sequence[Cell]) -> list[Plan]:
    """The plan of every cell; InputError for one that this engine cannot compute."""
    if any(cell.run.arithmetic == "integers" for cell in cells):
        raise InputError(
            'run.arithmetic = "integers": engine vectorized adds all silos up at once, in floating point; use '
            "--engine inprocess"
        )
    plans = [make_plan(cell, load_task(cell).objective) for cell in cells]
    for cell, plan in zip(cells, plans, strict=True):
        _check_cell(cell, plan)
    return plans


def group_by_plan(cells: Sequence[Cell], plans: Sequence[Plan]) -> Iterator[list[int]]:
    """The places of the cells that run together."""
    groups: dict[object, list[int]] = {}
    for index, (cell, plan) in enumerate(zip(cells, plans, strict=True)):
        groups.setdefault(_group_key(cell, plan), []).append(index)
    return itertools.chain.from_iterable(
        _split_group(members, cells[members[0]], plans[members[0]]) for members in groups.values()
    )


def _split_group(members: list[int], cell: Cell, plan: Plan) -> Iterator[list[int]]:
    """A group cut so that what one round reads and draws for all its replicates fits comfortably into memory."""
    read = sum(plan.batch_sizes) * load_task(cell).train.features[0].numel()
    size = max(1, _MAX_ROUND_VALUES // max(read, NUMBERS_PER_EXTRA_VALUE * plan.extra_values))
    return (members[start : start + size] for start in range(0, len(members), size))


def _group_key(cell: Cell, plan: Plan) -> object:
    shape = plan.schedule, plan.batch_sizes, plan.weights, bool(plan.noise.sources)
    parts = plan.estimator, plan.mechanism, plan.optimizer, plan.objective
    return shape, tuple(map(stack_signature, parts)), cell.data, cell.model, cell.run, cell.evaluation
