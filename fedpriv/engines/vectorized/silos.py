"""Silos of replicates, which are runs that the vectorized engine computes side by side.

A cell is one run of a scenario: a value of each swept key, and a seed.  Cells of a group (`group_cells`), its
replicates, have the same data, model, rounds and silos, and the same kinds of estimators, mechanisms and
optimizers.  Large groups are split.

In each round the server sends a vector, the query.  A silo sums the clipped contributions of its records
(increments), and releases the decayed sum of them over rounds (running sum), with noise if it adds any.  The
server needs the weighted mean of the silos' releases, (replicates, d).

If silos take gradients at the query, the mean of their running sums is kept, and no single one (`AveragedSilos`).
If silos take local steps, each has its own point (`LocalSilos`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedpriv.core.errors import InputError, refuse
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
    """Cells that run in step, with numbers in which they differ as columns of `plan`."""

    plan: Plan
    """Plan of the first cell, with columns (replicates, 1) for numbers that differ between cells.

    Estimator, mechanism, optimizer and objective have such columns.  Other parts, such as the standard deviations
    of the noise, are the first cell's, and `plans` has those of each cell.
    """
    plans: Sequence[Plan]
    """Plan of each cell."""
    noise_seeds: Sequence[int]
    """Seed of each cell's noise."""
    dtype: torch.dtype
    """Type of all vectors."""
    device: torch.device
    """Device of all vectors."""

    @staticmethod
    def from_plans(
        plans: Sequence[Plan], seeds: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> "Replicates":
        parts = "estimator", "mechanism", "optimizer", "objective"
        stacked = {name: stack([getattr(plan, name) for plan in plans], dtype, device) for name in parts}
        return Replicates(replace(plans[0], **stacked), plans, seeds, dtype, device)


class MeanRelease(NamedTuple):
    """Mean of the silos' releases in a round, and the state that the next round needs."""

    release: Tensor
    """Weighted mean of the releases, (replicates, d)."""
    clipped_count: Tensor
    """Number of clipped records of the round, (replicates,)."""
    running_sum: RunningSum
    """Running sum after the round, whose total is unspecified if the next round has decay 0."""
    mechanism_state: MechanismState
    """State of the noise mechanism after the round."""


class Silos(Protocol):
    """Silos of a group, called round by round.

    Each call gets the running sum and the mechanism state that the previous call returned.
    """

    def release_mean(
        self,
        t: int,
        round_plan: PlannedRound,
        query: Tensor,
        batch: RoundBatch,
        running_sum: RunningSum,
        mechanism_state: MechanismState,
    ) -> MeanRelease:
        """Return the mean of the silos' releases of round t, and the state of the next round.

        Args:
            t: Round, one more than in the previous call.
            round_plan: Plan of the round.
            query: Query of each replicate, (replicates, d).
            batch: Records and weights of the round.  A record's weight contains its silo's weight in the mean.
            running_sum: Running sum before the round.
            mechanism_state: State of the noise mechanism before the round.

        Raises:
            RunError: The query moved farther than the mechanism's sensitivity assumes.
        """
        ...


class AveragedSilos:
    """Silos that take gradients at the query, kept as the mean of their sums and noise.

    `corrections` yields for each round the correction of the mean noise for absent silos, (replicates, d).  It is
    None if absences change no noise.
    """

    def __init__(self, step: FloatSteps, corrections: Iterator[Tensor] | None) -> None:
        self._step, self._absence_corrections = step, corrections

    def release_mean(
        self,
        t: int,
        round_plan: PlannedRound,
        query: Tensor,
        batch: RoundBatch,
        running_sum: RunningSum,
        mechanism_state: MechanismState,
    ) -> MeanRelease:
        """Return the noisy mean of the silos' running sums after round t, and the state of the next round.

        A record's weight contains its silo's, so that one weighted sum over all records is the mean over silos.

        Args:
            t: Round, from 1.
            round_plan: Public numbers of the round.
            query: Query of each replicate, (replicates, d).
            batch: Records of the round with their weights.
            running_sum: Mean running sum before the round, (replicates, d), and vectors of past rounds.
            mechanism_state: State of the noise mechanism before the round.

        Raises:
            RunError: The query moved farther than the mechanism's sensitivity assumes.
        """
        check_query_distance(self._step.plan.mechanism, running_sum.past_vectors, t, query, f"round {t}")
        state = RoundState(t - 1, running_sum.past_vectors, (running_sum.total,), mechanism_state)
        increment_sum = self._step.sum_increments(state, round_plan, query, batch)
        # The step's noise is that of the mean, whichever party is named, as if no silo were absent.
        noisy, state = self._step.add_noise(state, t, increment_sum.values, SERVER, query)
        # An absent silo counts with its last release, decayed.  Its increments have weight 0 in the batch, and its
        # noise of this round is replaced here.
        if self._absence_corrections is not None:
            noisy = noisy + next(self._absence_corrections)
        assert increment_sum.clipped_count is not None
        return MeanRelease(
            noisy,
            increment_sum.clipped_count,
            RunningSum(increment_sum.past_vectors, increment_sum.values),
            state.mechanism_state,
        )


class LocalSilos:
    """Silos that take local steps, each from its own point.

    In each round every silo takes one step, with fresh noise if the run has noise.  A silo's past vector is the
    sum of its releases since the silos last started from their average.
    """

    def __init__(self, group: Replicates, first_round: int) -> None:
        """Set up the silos for rounds from `first_round` on."""
        self._step, self._weights = FloatSteps(group.plan), group.plan.weights
        self._axis = -1 if group.plan.unit.max_records == 1 else -2  # axis of rows, before a unit's records
        self._fresh = _draw_silo_noise(group, first_round) if group.plan.noise.sources else None

    def release_mean(
        self,
        t: int,
        round_plan: PlannedRound,
        query: Tensor,
        batch: RoundBatch,
        running_sum: RunningSum,
        mechanism_state: MechanismState,
    ) -> MeanRelease:
        """Compute each silo's release at its own point, and return the weighted mean of the releases.

        A silo's point is the query minus a step along the silo's past vector, or the query itself in a round in
        which silos start from their average.

        Args:
            t: Round, from 1.
            round_plan: Public numbers of the round.
            query: Query of each replicate, (replicates, d).
            batch: Records of the round with their weights, sorted by silo.
            running_sum: Past vectors of all silos, one tensor (silos, replicates, d), or none before round 1.  Its
                total is returned unchanged.
            mechanism_state: State of the noise mechanism, which is returned unchanged.
        """
        mean, start = torch.zeros_like(query), 0
        clipped_count = query.new_zeros(query.shape[:-1], dtype=torch.int64)
        fresh = None if self._fresh is None else next(self._fresh)
        next_vectors: list[Tensor] = []
        for silo, row_count in batch.silo_sizes:
            weight, past_vectors = (
                self._weights[silo],
                tuple(silo_vectors[silo] for silo_vectors in running_sum.past_vectors),
            )
            point, silo_batch = (
                gradient_point(round_plan.step, query, past_vectors),
                self._select_silo(batch, silo, start, row_count),
            )
            # A silo releases the increments of this round alone, so that its sum starts from 0 in every round.
            increment_sum = self._step.sum_increments(
                RoundState(accumulator=(torch.zeros_like(query),)), round_plan, point, silo_batch
            )
            assert increment_sum.clipped_count is not None
            # The weights of records contain the silo's weight in the mean, and its own release must not.
            release = (
                increment_sum.values / weight if fresh is None else increment_sum.values / weight + fresh[silo]
            )
            next_vectors += next_past_vectors(round_plan.step, past_vectors, (), release)
            mean, clipped_count, start = (
                mean + weight * release,
                clipped_count + increment_sum.clipped_count,
                start + row_count,
            )
        return MeanRelease(
            mean, clipped_count, RunningSum((torch.stack(next_vectors),), running_sum.total), mechanism_state
        )

    def _select_silo(self, batch: RoundBatch, silo: int, start: int, row_count: int) -> RoundBatch:
        """Select one silo's records of a round."""
        weights, records = batch.weights.narrow(-1, start, row_count), None
        if batch.records is not None and row_count:
            axis = batch.records.labels.dim() + self._axis
            records = Records(*(column.narrow(axis, start, row_count) for column in batch.records))
        return RoundBatch(
            records, weights, ((silo, row_count),), batch.row_indices[..., start : start + row_count]
        )


def _check_cell(cell: Cell, plan: Plan) -> None:
    """Refuse local steps and absent silos that this engine cannot compute.

    A single noise for the mean of silos (`run.noise = "aggregate"`) is refused if the silos take local steps.  If
    silos may be absent, these are refused:

    - an estimator that needs queries of earlier rounds, because silos that missed different rounds would remember
      different queries,
    - under a trust setting in which silos add the noise, a single noise for their mean, and in a run with noise
      any device but the CPU, because the correction for an absent silo needs that silo's own noise.

    Raises:
        InputError: The cell is refused.
    """
    if plan.rounds[0].step.local is not None and cell.run.noise == "aggregate":
        raise InputError(
            f'run.noise = "aggregate": silos of {cell.algorithm.name} step by themselves, each with noise of its '
            'own; use "per-silo"'
        )
    if (key := cell.absence_key) is None:
        return
    silos_add_noise = not plan.trust.adds_noise(SERVER)
    refuse(
        {
            f"{key}: {cell.algorithm.name} looks back at the query that each silo answered last, and engine "
            "vectorized keeps one for all silos; use --engine inprocess": plan.estimator.memory > 1,
            f'run.noise = "aggregate" draws the mean of all silos\' noise, and with {key} some have none; use '
            '"per-silo"': cell.run.noise == "aggregate" and silos_add_noise,
            f'run.device = "{cell.run.device}" draws the mean of all silos\' noise, and with {key} some have '
            'none; use "cpu"': cell.run.device != "cpu" and bool(plan.noise.sources) and silos_add_noise,
        }
    )


def _draw_silo_noise(group: Replicates, first_round: int) -> Iterator[Tensor]:
    """Yield the noise of all silos for `first_round` and each later round, (silos, replicates, d)."""
    plans, rounds = group.plans, group.plan.schedule.rounds
    silos, size = len(group.plan.weights), group.plan.objective.dimension
    noises = [Noise((NoiseSource(silo, plan.noise.std_of(silo), 1.0),)) for silo in range(silos) for plan in plans]
    feed = NoiseFeed(
        noises, list(group.noise_seeds) * silos, rounds, size, group.dtype, lambda _: None, group.device
    )
    return (fresh.view(silos, len(plans), size) for fresh in feed.rounds_from(first_round))


class ReplicateAbsences:
    """Absences of silos in rounds 1 … T of each replicate."""

    def __init__(self, absences: Sequence[Absences], silos: int, device: torch.device) -> None:
        self._absences, self._silo_count, self._device = absences, silos, device

    def __bool__(self) -> bool:
        """Whether a silo is absent in some round of some replicate."""
        return any(self._absences)

    def presence_mask(self, t: int) -> Tensor:
        """Presence of each silo in round t, 1 or 0, (replicates, silos)."""
        mask = torch.ones(len(self._absences), self._silo_count, dtype=torch.float64)
        for replicate, absences in enumerate(self._absences):
            mask[replicate, list(absences.absent_silos(t))] = 0.0
        return mask.to(self._device)

    @property
    def ever_absent(self) -> list[int]:
        """Silos that are absent in some round of some replicate, in increasing order."""
        return sorted(set().union(*(absences.rounds for absences in self._absences)))


def absence_corrections(group: Replicates, absences: ReplicateAbsences) -> Iterator[Tensor]:
    """Yield for rounds 1 … T the correction of the mean of all silos' noise, (replicates, d).

    The noise of the mean is drawn as if no silo were absent.  An absent silo counts with its last release,
    decayed, and so with the noise of that release.  With n_{i,t} the noise of silo i in round t, weighted as in
    the mean, and c_{i,t} the noise that should count in its place,

        correction_t = Σ_i (c_{i,t} - n_{i,t}),  c_{i,t} = n_{i,t} if silo i is present, else decay_t · c_{i,t-1}

    with c_{i,0} = 0.  Only silos that are absent in some round have terms other than 0.

    Args:
        group: Replicates, with their plans and seeds of noise.
        absences: Silos that are absent, by round and replicate.
    """
    plan, dtype = group.plan, str(group.dtype).removeprefix("torch.")
    zeros = torch.zeros(len(group.plans), plan.objective.dimension, dtype=group.dtype, device=group.device)
    sources = [simulation_noise(seed, dtype) for seed in group.noise_seeds]
    # By silo: the state of its mechanism, and its noise c_{i,t-1}, (replicates, d).
    states = {silo: plan.mechanism.start() for silo in absences.ever_absent}
    counted_noise = dict.fromkeys(states, zeros)
    for t in range(1, plan.schedule.rounds + 1):
        presence, total = absences.presence_mask(t).to(group.dtype), zeros.clone()
        for silo, state in states.items():
            fresh = [
                _draw_fresh_vector(source, replicate_plan, silo, t)
                for source, replicate_plan in zip(sources, group.plans, strict=True)
            ]
            noise, states[silo] = plan.mechanism.noise(state, t, torch.stack(fresh).to(group.device))
            present = presence[:, silo, None]
            counted_now = present * noise + (1.0 - present) * plan.rounds[t - 1].step.decay * counted_noise[silo]
            total += counted_now - noise
            counted_noise[silo] = counted_now
        yield total


def _draw_fresh_vector(source: KeyedNormal, plan: Plan, silo: int, t: int) -> Tensor:
    """Draw a silo's fresh vector of round t, scaled as it enters the mean, (d,)."""
    scale = plan.weights[silo] * float(plan.noise.std_of(silo))
    return torch.from_numpy(source.vector(plan.objective.dimension, silo, t)) * scale


_MAX_ROUND_VALUES = 2**26
NUMBERS_PER_EXTRA_VALUE = 8
"""Numbers for each value of a direction: drawn, scaled, two shifted, and four intermediate ones."""


def group_cells(cells: Sequence[Cell]) -> list[list[int]]:
    """Group cells that run together, by index.

    Raises:
        InputError: This engine cannot compute a cell, or a cell cannot be planned.
    """
    return list(group_by_plan(cells, make_plans(cells)))


def make_plans(cells: Sequence[Cell]) -> list[Plan]:
    """Make the plan of each cell, and check that this engine can compute it.

    Raises:
        InputError: This engine cannot compute a cell, such as one in integers, or a cell cannot be planned.
    """
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
    """Group cells that run together, by index, given the plan of each cell."""
    groups: dict[object, list[int]] = {}
    for index, (cell, plan) in enumerate(zip(cells, plans, strict=True)):
        groups.setdefault(_group_key(cell, plan), []).append(index)
    return itertools.chain.from_iterable(
        _split_group(members, cells[members[0]], plans[members[0]]) for members in groups.values()
    )


def _split_group(members: list[int], cell: Cell, plan: Plan) -> Iterator[list[int]]:
    """Split a group so that the values that one round reads and draws fit into memory.

    One batch of each silo has at most 2^26 feature values in all replicates, and directions and copies take at
    most 2^26 numbers, unless a single replicate needs more.
    """
    record_values = sum(plan.batch_sizes) * load_task(cell).train.features[0].numel()
    size = max(1, _MAX_ROUND_VALUES // max(record_values, NUMBERS_PER_EXTRA_VALUE * plan.extra_values))
    return (members[start : start + size] for start in range(0, len(members), size))


def _group_key(cell: Cell, plan: Plan) -> object:
    shape = plan.schedule, plan.batch_sizes, plan.weights, plan.unit.name, bool(plan.noise.sources)
    stacked_parts = plan.estimator, plan.mechanism, plan.optimizer, plan.objective
    return shape, tuple(map(stack_signature, stacked_parts)), cell.data, cell.model, cell.run, cell.evaluation
