"""Every seed and every noise level of a sweep in one program, all silos at once.

The parts are the ones a silo and a server run; here their leading axis is the replicate.  Because the running sum
and every mechanism are linear, the engine keeps the weighted mean over silos of both: the increments of all
silos' records in one batched call, and the mean of the silos' noise vectors (`noise_feed`).  Every few seconds a
group keeps its state (`keeper`), from which a run that was killed goes on with the same bits: noise and secret
participation are functions of the round.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpriv.claims.ledger import make_evaluation_streams
from fedpriv.claims.outcome import RunObserver, cell_digest, evaluate_models, evaluation_rounds, make_outcome
from fedpriv.core.errors import RunError
from fedpriv.core.random import SERVER
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.engines.table import IndexedOutcome, retain_freed_pages
from fedpriv.engines.vectorized.checkpoints import (
    NO_CHECKPOINTS,
    Checkpoints,
    Metrics,
    SimulationCheckpoint,
    checkpoint_name,
    pack_checkpoint,
    unpack_checkpoint,
)
from fedpriv.engines.vectorized.noise import NoiseFeed, OrderedBatches, SampledBatches, aggregate_noise
from fedpriv.engines.vectorized.silos import (
    AveragedSilos,
    LocalSilos,
    ReplicateAbsences,
    Replicates,
    Silos,
    absence_corrections,
    group_by_plan,
    make_plans,
)
from fedpriv.loss.objective import Records
from fedpriv.noise.mechanism import MechanismState
from fedpriv.participation.orders import Dependence, PublicOrder, declared_dependence
from fedpriv.plan.plan import Plan, draw_absences
from fedpriv.plan.task import load_task, mask_absent_records, partition_records
from fedpriv.rounds.floats import FloatSteps, FreshNoise, RunningSum, SimulatedEvaluation, initial_running_sum
from fedpriv.rounds.round import RoundBatch
from fedpriv.scenario.schema import Cell

_MIN_CHECKPOINT_SECONDS = 2.0  # seconds
_MAX_CHECKPOINT_SHARE = 0.005  # of the time; what takes long to write is written less often


class GroupCheckpoints:
    """The checkpoints of one group of cells."""

    def __init__(self, kept: Checkpoints, cells: Sequence[Cell], observer: RunObserver) -> None:
        self._checkpoints, self._observer = kept, observer
        self._cells = tuple(map(cell_digest, cells))
        self._name = checkpoint_name(self._cells)
        self._next_time: float | None = time.perf_counter() + _MIN_CHECKPOINT_SECONDS

    def latest(self, like: Any, device: torch.device) -> SimulationCheckpoint | None:
        """What the group goes on from, with states of the types of `like`; None where it starts anew."""
        content = self._checkpoints.latest(self._name)
        if content is None:
            return None
        try:
            return unpack_checkpoint(content, like, device)
        except ValueError as error:
            self._observer.notified(f"a checkpoint is not used, and its rounds are run again: {error}")
            return None

    def is_due(self, now: float) -> bool:
        """Whether it is time to keep the group; `now` is by `time.perf_counter`."""
        return self._next_time is not None and now >= self._next_time

    def keep(self, checkpoint: SimulationCheckpoint) -> None:
        """A state that cannot be kept is said once, and the group goes on without checkpoints."""
        began = time.perf_counter()
        try:
            self._checkpoints.keep(self._name, pack_checkpoint(checkpoint, self._cells))
        except TypeError as error:
            self._observer.notified(f"no checkpoints of cells that are in the middle: {error}")
            self._next_time = None
            return
        ended = time.perf_counter()
        self._next_time = ended + max(_MIN_CHECKPOINT_SECONDS, (ended - began) / _MAX_CHECKPOINT_SHARE)

    def drop(self) -> None:
        """What the group gave is written."""
        self._checkpoints.drop(self._name)


def find_device(name: str) -> torch.device:
    """The device as torch names it; RunError if it cannot be used here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        raise RunError(
            f'run.device = {name!r} cannot be used here: {str(error).splitlines()[0]}; try "cpu"'
        ) from None
    return device


_PROGRESS_SECONDS = 0.1  # seconds


def run_vectorized(
    cells: Sequence[Cell], observer: RunObserver, checkpoints: Checkpoints = NO_CHECKPOINTS
) -> Iterator[IndexedOutcome]:
    """Run cells in groups that differ only in seeds and numbers; see `Engine`.

    A group goes on from its checkpoint in `kept`, which is dropped when the last of its outcomes was taken.
    """
    plans = make_plans(cells)
    with limit_to_one_thread(), retain_freed_pages():  # the cores draw noise meanwhile
        for members in group_by_plan(cells, plans):
            of_group = [cells[i] for i in members]
            keeper = GroupCheckpoints(checkpoints, of_group, observer)
            yield from _ReplicateGroup(members, of_group, [plans[i] for i in members], observer).run(keeper)
            keeper.drop()


class _GroupState(NamedTuple):
    """What one round hands to the next."""

    optimizer_state: Any
    running_sum: RunningSum
    mechanism_state: MechanismState
    clipped_count: Tensor
    """How many records were clipped so far, (replicates,)."""
    record_count: Tensor
    """How many records took part so far, (replicates,)."""


class _ReplicateGroup:
    """Replicates that run in step: tensors have shape (replicates, d)."""

    def __init__(
        self, indices: Sequence[int], cells: Sequence[Cell], plans: Sequence[Plan], observer: RunObserver
    ) -> None:
        self._indices, self._cells, self._observer = indices, cells, observer
        self._run_section, self._task = cells[0].run, load_task(cells[0])
        self._dtype, self._device = self._task.train.features.dtype, find_device(self._run_section.device)
        self._replicates = group = Replicates.from_plans(
            plans, [cell.noise_seed for cell in cells], self._dtype, self._device
        )
        self._plan = plan = group.plan
        self._noise_feed = None
        if plan.noise.sources:
            noises = [
                aggregate_noise(own.noise) if self._run_section.noise == "aggregate" else own.noise
                for own in plans
            ]
            size, rounds, draws = plan.objective.dimension, plan.schedule.rounds, plan.mechanism.draws
            self._noise_feed = NoiseFeed(
                noises, group.noise_seeds, rounds, size, self._dtype, draws, self._device, unscaled=True
            )
        self._absences = [draw_absences(cell) for cell in cells]
        self._steps_locally = plan.rounds[0].step.local is not None
        self._silo_evaluations = [SimulatedEvaluation.from_cell(cell) for cell in cells]
        self._replicate_absences = ReplicateAbsences(self._absences, len(plan.batch_sizes), self._device)
        self._needs_row_indices = bool(
            declared_dependence(plan.objective) & ~(Dependence.RECORD | Dependence.BATCH)
        )

    @torch.inference_mode()
    def run(self, keeper: GroupCheckpoints) -> list[IndexedOutcome]:
        began, last = time.perf_counter(), -math.inf  # the first round is reported at once
        rounds = self._plan.schedule.rounds
        evaluated_at = {
            t: n for n, t in enumerate(sorted(evaluation_rounds(rounds, self._run_section.evaluations)), 1)
        }
        optimizer, count = self._plan.optimizer, len(self._cells)
        done = self._restore_checkpoint(keeper)
        states, evaluations = done.states, list(done.evaluations)
        began, unreported = began - done.seconds, 0
        for t, states in enumerate(self.iterate_states(done.states, done.t + 1), start=done.t + 1):
            unreported += count
            if (now := time.perf_counter()) - last > _PROGRESS_SECONDS or t == rounds:
                self._observer.advanced(unreported)
                unreported, last = 0, now
            if (place := evaluated_at.get(t)) is not None:
                evaluations.append((t, self._evaluate(t, place, optimizer.output(states.optimizer_state))))
            if keeper.is_due(now) and t < rounds:
                keeper.keep(SimulationCheckpoint(t, now - began, evaluations, states))
        wall = (time.perf_counter() - began) / count
        models = optimizer.output(states.optimizer_state).cpu().numpy()
        shares = (states.clipped_count.double() / states.record_count.clamp(min=1)).tolist()
        _, metrics = evaluations[-1]
        return [
            IndexedOutcome(
                index,
                make_outcome(
                    plan,
                    rounds,
                    model.copy(),
                    of_cell,
                    share,
                    wall,
                    away.rounds,
                    make_evaluation_streams(by and by.evaluation_plan),
                ),
            )
            for index, plan, model, of_cell, share, away, by in zip(
                self._indices,
                self._replicates.plans,
                models,
                metrics,
                shares,
                self._absences,
                self._silo_evaluations,
                strict=True,
            )
        ]

    def initial_state(self) -> _GroupState:
        """Before round 1."""
        plan, count = self._plan, len(self._cells)
        state = plan.optimizer.start(plan.objective.initial().to(self._device).expand(count, -1))
        zeros = torch.zeros(count, dtype=torch.int64, device=self._device)
        return _GroupState(
            state, initial_running_sum(plan.optimizer.query(state)), plan.mechanism.start(), zeros, zeros
        )

    def iterate_states(self, states: _GroupState, first: int) -> Iterator[_GroupState]:
        """What every round from `first` on hands to the next one, after `states`.

        On a device nothing goes back and forth between rounds of a public order, but where a mechanism's
        privacy rests on how far queries move: one number a round says that they did not move too far.
        """
        state, total, hidden, clipped, drawn = states
        optimizer, silos = self._plan.optimizer, self._make_silos(first)
        weighed, of_weighed = None, drawn
        for t, read in enumerate(self._round_batches(first), start=first):
            planned, query = self._plan.rounds[t - 1], optimizer.query(state)
            mean = silos.release_mean(t, planned, query, read, total, hidden)
            total, hidden = mean.running_sum, mean.mechanism_state
            state = optimizer.update(state, mean.release, planned.step)
            clipped = clipped + mean.clipped_count
            if weighed is not read.weights:  # in a public order most rounds have the same
                weighed, of_weighed = read.weights, read.weights.count_nonzero(-1)
            drawn = drawn + of_weighed
            yield _GroupState(state, total, hidden, clipped, drawn)

    def _make_silos(self, first_round: int) -> Silos:
        """All silos, from that round on."""
        if self._steps_locally:
            return LocalSilos(self._replicates, first_round)
        fresh, amplitude = (
            self._fresh_noise(first_round),
            None if self._noise_feed is None else self._noise_feed.amplitude,
        )
        step, missing = FloatSteps(self._plan, lambda owner, t: FreshNoise(next(fresh), amplitude)), None
        if self._replicate_absences and self._plan.noise.sources and not self._plan.trust.adds_noise(SERVER):
            missing = itertools.islice(
                absence_corrections(self._replicates, self._replicate_absences), first_round - 1, None
            )
        return AveragedSilos(step, missing)

    def _restore_checkpoint(self, keeper: GroupCheckpoints) -> SimulationCheckpoint:
        """Where the group goes on, or before round 1; observers hear what they would have heard until there."""
        start = self.initial_state()
        found = keeper.latest(start, self._device)
        if found is None:
            return SimulationCheckpoint(0, 0.0, (), start)
        self._observer.advanced(found.t * len(self._cells))
        for t, metrics in found.evaluations:
            self._report_evaluation(t, metrics)
        return found

    def _fresh_noise(self, first: int) -> Iterator[Tensor]:
        """The fresh vectors of the rounds from `first` on."""
        if self._noise_feed is not None:
            return self._noise_feed.rounds_from(first)
        counts = (planned.noise_vector_count or 1 for planned in self._plan.rounds[first - 1 :])
        return (torch.zeros(count, 1, dtype=self._dtype, device=self._device) for count in counts)

    def _round_batches(self, first: int) -> Iterator[RoundBatch]:
        """What the rounds from `first` on read."""
        (train, there), plan = (self._task.train, None), self._plan
        if plan.unit.max_records == 1:  # of several, `PerUnit` leaves out those that are not there
            train, present = mask_absent_records(train)
            there = None if present.all() else present.to(self._device)
        on_device = Records(train.features.to(self._device), train.labels.to(self._device))
        shares = {cell.seed: partition_records(cell) for cell in self._cells}
        if isinstance(plan.schedule, PublicOrder):
            reads = OrderedBatches(
                plan.schedule,
                [shares[cell.seed] for cell in self._cells],
                *(plan.weights, plan.batch_sizes, on_device, self._dtype, there),
                with_row_indices=self._needs_row_indices,
            ).rounds_from(first)
        else:
            reads = self._sampled_batches(on_device, shares, first, there)
        return self._mask_absent_silos(reads, first) if self._replicate_absences else reads

    def _mask_absent_silos(self, reads: Iterator[RoundBatch], first: int) -> Iterator[RoundBatch]:
        """The same with weight 0 for the records of silos that are away."""
        for t, read in enumerate(reads, start=first):
            silos, counts = torch.tensor(read.silo_sizes, device=self._device).T
            of_records = silos.repeat_interleave(counts)
            yield read._replace(
                weights=read.weights * self._replicate_absences.presence_mask(t).to(self._dtype)[:, of_records]
            )

    def _sampled_batches(
        self, train: Records, shares: dict[int, list[Tensor]], first: int, there: Tensor | None
    ) -> Iterator[RoundBatch]:
        """Pass silos and row indices to those objectives alone that key something by them."""
        plan, by_silo = (
            self._plan,
            self._steps_locally or self._needs_row_indices or bool(self._replicate_absences),
        )
        seeds = [(cell.seed, cell.noise_seed) for cell in self._cells]
        sampled = SampledBatches(plan.schedule, seeds, shares, plan.weights, plan.batch_sizes, by_silo=by_silo)
        for index, weights, silos, rows in sampled.rounds_from(first):
            on_device = index.to(self._device)
            records = Records(train.features[on_device], train.labels[on_device]) if index.numel() else None
            weights = weights.to(self._device, self._dtype)
            yield RoundBatch(records, weights if there is None else weights * there[on_device], silos, rows)

    def _evaluate(self, t: int, place: int, model: Tensor) -> list[dict[str, float]]:
        """After round t, in evaluation number `place`."""
        by_silos = [
            by.metrics(place, of_one.cpu()) for by, of_one in zip(self._silo_evaluations, model, strict=True) if by
        ]
        metrics = by_silos
        if not by_silos:
            test = Records(*(column.to(self._device) for column in self._task.test))
            names = [f"{cell.name} (seed {cell.seed}), round {t}" for cell in self._cells]
            metrics = evaluate_models(self._task.objective, model, test, names)
        self._report_evaluation(t, metrics)
        return metrics

    def _report_evaluation(self, t: int, metrics: Sequence[Metrics]) -> None:
        for index, of_cell in zip(self._indices, metrics, strict=True):
            self._observer.evaluated(index, t, of_cell)
