"""Vectorized engine: cells of a sweep with the same parts, computed together.

A cell is one run of a scenario: a value of each swept key, and a seed.  Its plan has the run's public numbers.
The replicates are the cells of a group.  Their data, model, rounds and silos are the same, and so are the kinds of
their estimators, mechanisms and optimizers.  They may differ in seeds, in numbers such as the clip, in trust
setting and neighbouring relation, and in absences.

In a round, silos form the clipped contributions of their records at a query (increments) and keep their running
sum, which is released with the noise of a mechanism.  A silo that does not reply in a round is absent.

The replicate is the leading axis.  Silos that take local steps are computed one after another.  Of other silos
only the weighted mean is kept, because running sum and mechanism are linear: the increments of all silos' records
are formed together, and the mean of the silos' noise vectors is drawn (`NoiseFeed`).

A group of replicates stores its state from time to time (`GroupCheckpoints`), and a killed run resumes from it.
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
from fedpriv.core.errors import InputError, RunError
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

_MIN_CHECKPOINT_SECONDS = 2.0  # shortest time between two checkpoints
_MAX_CHECKPOINT_SHARE = 0.005  # largest ratio of the time to write a checkpoint to the time until the next one


class GroupCheckpoints:
    """Checkpoints of one group of cells that are computed together."""

    def __init__(self, checkpoints: Checkpoints, cells: Sequence[Cell], observer: RunObserver) -> None:
        self._checkpoints, self._observer = checkpoints, observer
        self._cells = tuple(map(cell_digest, cells))
        self._name = checkpoint_name(self._cells)
        self._next_time: float | None = time.perf_counter() + _MIN_CHECKPOINT_SECONDS

    def latest(self, like: Any, device: torch.device) -> SimulationCheckpoint | None:
        """Load the group's latest checkpoint, or return None without a readable one.

        The observer is notified of a checkpoint that is damaged or has another format.  torch's error for a lack
        of memory is passed on, so that the checkpoint is kept.

        Args:
            like: State with the types of the checkpoint's state, such as the state before round 1.
            device: Device of the checkpoint's tensors.
        """
        if (content := self._checkpoints.latest(self._name)) is None:
            return None
        try:
            return unpack_checkpoint(content, like, device)
        except ValueError as error:
            self._observer.notified(f"a checkpoint is not used, and its rounds are run again: {error}")
            return None

    def is_due(self, now: float) -> bool:
        """Whether the next checkpoint is due at time `now` of `time.perf_counter`."""
        return self._next_time is not None and now >= self._next_time

    def keep(self, checkpoint: SimulationCheckpoint) -> None:
        """Store a checkpoint, and schedule the next one.

        If the state cannot be packed, the observer is notified, and the group continues without checkpoints.
        """
        start = time.perf_counter()
        try:
            self._checkpoints.keep(self._name, pack_checkpoint(checkpoint, self._cells))
        except TypeError as error:
            self._observer.notified(f"no checkpoints of cells that are in the middle: {error}")
            self._next_time = None
            return
        end = time.perf_counter()
        self._next_time = end + max(_MIN_CHECKPOINT_SECONDS, (end - start) / _MAX_CHECKPOINT_SHARE)

    def drop(self) -> None:
        """Delete the group's checkpoint."""
        self._checkpoints.drop(self._name)


def find_device(name: str) -> torch.device:
    """Return the torch device of this name, such as "cpu" or "cuda", after a test that it can be used.

    Raises:
        InputError: torch knows no device of this name.
        RunError: The device cannot be used here.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f'run.device = {name!r}: no device of torch; a GPU of NVIDIA is "cuda"') from None
    try:
        torch.zeros(1, device=device).tolist()  # Some errors of a device show only when a value is read.
    except (RuntimeError, AssertionError, ImportError) as error:
        raise RunError(
            f'run.device = {name!r} cannot be used here: {str(error).splitlines()[0]}; try "cpu"'
        ) from None
    return device


_PROGRESS_SECONDS = 0.1  # time without a report after that of a round, unless the last round ends


def run_vectorized(
    cells: Sequence[Cell], observer: RunObserver, checkpoints: Checkpoints = NO_CHECKPOINTS
) -> Iterator[IndexedOutcome]:
    """Run cells in groups, and yield each outcome with the index of its cell in `cells`.

    The cells of a group are computed together (`group_cells`).  A group resumes from its checkpoint, which is
    deleted when the caller asks for the next outcome after those of the group.

    Args:
        cells: Cells to run.
        observer: Observer of the events: progress, evaluations and notes.
        checkpoints: Store of checkpoints of unfinished groups, by default none.

    Raises:
        InputError: This engine cannot compute a cell, a cell cannot be planned, there are too few records for it,
            or torch knows no device of its name.
        RunError: The device cannot be used, a test loss is not finite, or a query moved too far.  Errors of a
            user's model are passed on.
    """
    plans = make_plans(cells)
    with limit_to_one_thread(), retain_freed_pages():  # a second thread may draw noise meanwhile
        for members in group_by_plan(cells, plans):
            group_cells = [cells[i] for i in members]
            group_checkpoints = GroupCheckpoints(checkpoints, group_cells, observer)
            yield from _ReplicateGroup(members, group_cells, [plans[i] for i in members], observer).run(
                group_checkpoints
            )
            group_checkpoints.drop()


class _GroupState(NamedTuple):
    """State of a group between rounds."""

    optimizer_state: Any
    """State of the replicates' optimizers, whose tensors have the replicate as leading axis."""
    running_sum: RunningSum
    """Mean of the silos' running sums, (replicates, d), with the past vectors of the estimator.

    The sum is unspecified if the next round has decay 0.  For silos that take local steps the sum stays 0, and the
    past vectors are those of `LocalSilos`.
    """
    mechanism_state: MechanismState
    """State of the noise mechanism, for the mean of the silos' noise."""
    clipped_count: Tensor
    """Number of clipped records so far, (replicates,)."""
    record_count: Tensor
    """Number of participations of weight above 0 so far, (replicates,)."""


class _ReplicateGroup:
    """Replicates that are computed together, with models as tensors (replicates, d)."""

    def __init__(
        self, indices: Sequence[int], cells: Sequence[Cell], plans: Sequence[Plan], observer: RunObserver
    ) -> None:
        """Stack the numbers in which the plans differ, and set up noise, absences and evaluations.

        Args:
            indices: Index of each cell among all cells of the run.
            cells: Cells of the group.
            plans: Plan of each cell.
            observer: Observer of progress and evaluations.

        Raises:
            InputError: The device is unknown, or the cells cannot be loaded.
            RunError: The device cannot be used.
        """
        self._indices, self._cells, self._observer = indices, cells, observer
        self._run_section, self._task = cells[0].run, load_task(cells[0])
        self._dtype, self._device = self._task.train.features.dtype, find_device(self._run_section.device)
        self._replicates = group = Replicates.from_plans(
            plans, [cell.noise_seed for cell in cells], self._dtype, self._device
        )
        self._plan = plan = group.plan
        self._noise_feed = None
        if plan.noise.sources:
            # With `aggregate` the mean of all silos' noise is drawn at once, from a single source.
            noises = [
                aggregate_noise(replicate_plan.noise)
                if self._run_section.noise == "aggregate"
                else replicate_plan.noise
                for replicate_plan in plans
            ]
            size, rounds, draws = plan.objective.dimension, plan.schedule.rounds, plan.mechanism.draws
            # Unscaled, since a round multiplies the vectors by `amplitude` when it adds them.
            self._noise_feed = NoiseFeed(
                noises, group.noise_seeds, rounds, size, self._dtype, draws, self._device, unscaled=True
            )
        self._absences = [draw_absences(cell) for cell in cells]
        self._steps_locally = plan.rounds[0].step.local is not None
        self._silo_evaluations = [SimulatedEvaluation.from_cell(cell) for cell in cells]
        self._replicate_absences = ReplicateAbsences(self._absences, len(plan.batch_sizes), self._device)
        # Increments that depend on nothing but the record and the batch need no row indices.
        self._needs_row_indices = bool(
            declared_dependence(plan.objective) & ~(Dependence.RECORD | Dependence.BATCH)
        )

    @torch.inference_mode()
    def run(self, group_checkpoints: GroupCheckpoints) -> list[IndexedOutcome]:
        """Run all rounds from the group's checkpoint or from round 1, and return the outcome of each cell.

        The observer receives progress and the metrics of evaluations.

        Raises:
            InputError: There are too few training records for a cell, or they cannot be partitioned.
            RunError: A test loss is not finite, or a query moved farther than the mechanism allows.  Errors of a
                user's model are passed on.
        """
        start_time, last_report = time.perf_counter(), -math.inf  # the first round is reported at once
        rounds = self._plan.schedule.rounds
        evaluation_numbers = {
            t: n for n, t in enumerate(sorted(evaluation_rounds(rounds, self._run_section.evaluations)), 1)
        }
        optimizer, count = self._plan.optimizer, len(self._cells)
        # Rounds, with reports, evaluations and checkpoints.
        checkpoint = self._restore_checkpoint(group_checkpoints)
        states, evaluations = checkpoint.states, list(checkpoint.evaluations)
        start_time, unreported_rounds = start_time - checkpoint.seconds, 0
        for t, states in enumerate(
            self.iterate_states(checkpoint.states, checkpoint.t + 1), start=checkpoint.t + 1
        ):
            unreported_rounds += count
            if (now := time.perf_counter()) - last_report > _PROGRESS_SECONDS or t == rounds:
                self._observer.advanced(unreported_rounds)
                unreported_rounds, last_report = 0, now
            if (number := evaluation_numbers.get(t)) is not None:
                evaluations.append((t, self._evaluate(t, number, optimizer.output(states.optimizer_state))))
            if group_checkpoints.is_due(now) and t < rounds:
                group_checkpoints.keep(SimulationCheckpoint(t, now - start_time, evaluations, states))
        # Outcomes, of the models and metrics after the last round.
        wall_seconds = (time.perf_counter() - start_time) / count  # each cell counts an equal share
        models = optimizer.output(states.optimizer_state).cpu().numpy()
        clipped_shares = (states.clipped_count.double() / states.record_count.clamp(min=1)).tolist()
        _, metrics = evaluations[-1]
        return [
            IndexedOutcome(
                index,
                make_outcome(
                    plan,
                    rounds,
                    model.copy(),
                    cell_metrics,
                    clipped_share,
                    wall_seconds,
                    absences.rounds,
                    make_evaluation_streams(silo_evaluation and silo_evaluation.evaluation_plan),
                ),
            )
            for index, plan, model, cell_metrics, clipped_share, absences, silo_evaluation in zip(
                self._indices,
                self._replicates.plans,
                models,
                metrics,
                clipped_shares,
                self._absences,
                self._silo_evaluations,
                strict=True,
            )
        ]

    def initial_state(self) -> _GroupState:
        """Return the state before round 1."""
        plan, count = self._plan, len(self._cells)
        state = plan.optimizer.start(plan.objective.initial().to(self._device).expand(count, -1))
        zeros = torch.zeros(count, dtype=torch.int64, device=self._device)
        return _GroupState(
            state, initial_running_sum(plan.optimizer.query(state)), plan.mechanism.start(), zeros, zeros
        )

    def iterate_states(self, states: _GroupState, first_round: int) -> Iterator[_GroupState]:
        """Compute rounds from `first_round` on, starting from `states`, and yield the state after each.

        Round t forms the mean of the silos' noisy releases for the query x_t, (replicates, d), from which the
        optimizer computes x_{t+1}.

        Raises:
            RunError: The query moved farther than the mechanism's sensitivity assumes.  Errors of a user's model
                are passed on.
        """
        optimizer_state, running_sum, mechanism_state, clipped_count, record_count = states
        optimizer, silos = self._plan.optimizer, self._make_silos(first_round)
        last_weights, weighted_count = None, record_count
        for t, batch in enumerate(self._round_batches(first_round), start=first_round):
            round_plan, query = self._plan.rounds[t - 1], optimizer.query(optimizer_state)
            mean = silos.release_mean(t, round_plan, query, batch, running_sum, mechanism_state)
            running_sum, mechanism_state = mean.running_sum, mean.mechanism_state
            optimizer_state = optimizer.update(optimizer_state, mean.release, round_plan.step)
            clipped_count = clipped_count + mean.clipped_count
            if last_weights is not batch.weights:  # rounds of a public order may share one weight tensor
                last_weights, weighted_count = batch.weights, batch.weights.count_nonzero(-1)
            record_count = record_count + weighted_count
            yield _GroupState(optimizer_state, running_sum, mechanism_state, clipped_count, record_count)

    def _make_silos(self, first_round: int) -> Silos:
        """Make the silos of the group, for rounds from `first_round` on.

        Silos that take local steps are simulated one by one (`LocalSilos`), and others by their mean
        (`AveragedSilos`).
        """
        if self._steps_locally:
            return LocalSilos(self._replicates, first_round)
        fresh, amplitude = (
            self._fresh_noise(first_round),
            None if self._noise_feed is None else self._noise_feed.amplitude,
        )
        step, corrections = FloatSteps(self._plan, lambda party, t: FreshNoise(next(fresh), amplitude)), None
        if (
            self._replicate_absences
            and self._plan.noise.sources
            and not all(plan.trust.adds_noise(SERVER) for plan in self._replicates.plans)
        ):
            # The mean noise is that of all silos, and is corrected for absent ones.  A correction depends on the
            # noise of earlier rounds, so that the corrections of rounds before the first are computed, too.
            corrections = itertools.islice(
                absence_corrections(self._replicates, self._replicate_absences), first_round - 1, None
            )
        return AveragedSilos(step, corrections)

    def _restore_checkpoint(self, group_checkpoints: GroupCheckpoints) -> SimulationCheckpoint:
        """Return the group's checkpoint, or a checkpoint of round 0 with the state before round 1.

        The observer receives the progress and evaluations of the rounds up to that of the checkpoint.
        """
        start = self.initial_state()
        if (checkpoint := group_checkpoints.latest(start, self._device)) is None:
            return SimulationCheckpoint(0, 0.0, (), start)
        self._observer.advanced(checkpoint.t * len(self._cells))
        for t, metrics in checkpoint.evaluations:
            self._report_evaluation(t, metrics)
        return checkpoint

    def _fresh_noise(self, first_round: int) -> Iterator[Tensor]:
        """Draw the fresh noise vectors of each round from `first_round` on, or zeros for a plan without noise.

        The vectors of a round have the shape that `NoiseFeed` documents, and the zeros (vectors, 1).
        """
        if self._noise_feed is not None:
            return self._noise_feed.rounds_from(first_round)
        counts = (round_plan.noise_vector_count or 1 for round_plan in self._plan.rounds[first_round - 1 :])
        return (torch.zeros(count, 1, dtype=self._dtype, device=self._device) for count in counts)

    def _round_batches(self, first_round: int) -> Iterator[RoundBatch]:
        """Gather the records and weights of each round from `first_round` on.

        A record's weight is the weight of its silo in the mean, divided by the number of the silo's records that
        the round reads (the expected number if records are sampled), or 0 if the record does not count or its silo
        is absent.  If units of protection have several records, units take the place of records.
        """
        (train, presence), plan = (self._task.train, None), self._plan
        if plan.unit.max_records == 1:  # for units of several records, `PerUnit` masks absent records
            train, is_present = mask_absent_records(train)
            presence = None if is_present.all() else is_present.to(self._device)
        on_device = Records(train.features.to(self._device), train.labels.to(self._device))
        cell_by_seed = {cell.seed: cell for cell in self._cells}
        rows_by_seed = {seed: partition_records(cell) for seed, cell in cell_by_seed.items()}
        if isinstance(plan.schedule, PublicOrder):
            batches = OrderedBatches(
                plan.schedule,
                [rows_by_seed[cell.seed] for cell in self._cells],
                *(plan.weights, plan.batch_sizes, on_device, self._dtype, presence),
                with_row_indices=self._needs_row_indices,
            ).rounds_from(first_round)
        else:
            batches = self._sampled_batches(on_device, rows_by_seed, first_round, presence)
        return self._mask_absent_silos(batches, first_round) if self._replicate_absences else batches

    def _mask_absent_silos(self, batches: Iterator[RoundBatch], first_round: int) -> Iterator[RoundBatch]:
        """Set the weights of records of absent silos to 0 in each batch."""
        for t, batch in enumerate(batches, start=first_round):
            silos, counts = torch.tensor(batch.silo_sizes, device=self._device).T
            silo_of_record = silos.repeat_interleave(counts)
            yield batch._replace(
                weights=batch.weights
                * self._replicate_absences.presence_mask(t).to(self._dtype)[:, silo_of_record]
            )

    def _sampled_batches(
        self, train: Records, rows_by_seed: dict[int, list[Tensor]], first_round: int, presence: Tensor | None
    ) -> Iterator[RoundBatch]:
        """Gather the batches of sampled rounds, padded with records of weight 0.

        The records of a batch are None if no replicate reads any in its round.  Records are sorted by silo if
        silos take local steps or may be absent, or if increments may depend on more than the batch's contents.

        Args:
            train: Training records on the device.
            rows_by_seed: Indices in `train` of each silo's records, by seed.
            first_round: First round to gather.
            presence: Whether each record of `train` counts, or None if all count.
        """
        plan, by_silo = (
            self._plan,
            self._steps_locally or self._needs_row_indices or bool(self._replicate_absences),
        )
        seeds = [(cell.seed, cell.noise_seed) for cell in self._cells]
        sampled = SampledBatches(
            plan.schedule, seeds, rows_by_seed, plan.weights, plan.batch_sizes, by_silo=by_silo
        )
        for index, weights, silos, rows in sampled.rounds_from(first_round):
            on_device = index.to(self._device)
            records = Records(train.features[on_device], train.labels[on_device]) if index.numel() else None
            weights = weights.to(self._device, self._dtype)
            yield RoundBatch(records, weights if presence is None else weights * presence[on_device], silos, rows)

    def _evaluate(self, t: int, number: int, model: Tensor) -> list[dict[str, float]]:
        """Evaluate the models after round t, report the metrics of each cell, and return them.

        Metrics are those of the silos' test records with federated evaluation, else those of the test set.

        Args:
            t: Round.
            number: Number of the evaluation in the run, from 1, for the noise of federated evaluation.
            model: Models, (replicates, d).

        Raises:
            RunError: The loss on the test set is not finite.  Errors of a user's model are passed on.
        """
        silo_metrics = [
            evaluation.metrics(number, replicate_model.cpu())
            for evaluation, replicate_model in zip(self._silo_evaluations, model, strict=True)
            if evaluation
        ]
        metrics = silo_metrics
        if not silo_metrics:
            test = Records(*(column.to(self._device) for column in self._task.test))
            names = [f"{cell.name} (seed {cell.seed}), round {t}" for cell in self._cells]
            metrics = evaluate_models(self._task.objective, model, test, names)
        self._report_evaluation(t, metrics)
        return metrics

    def _report_evaluation(self, t: int, metrics: Sequence[Metrics]) -> None:
        for index, cell_metrics in zip(self._indices, metrics, strict=True):
            self._observer.evaluated(index, t, cell_metrics)
