"""Every seed and every noise level of a sweep in one program, all silos at once.

The parts are the ones a silo and a server run; here their leading axis is the replicate.  Because the running sum
and every mechanism are linear, the engine keeps the weighted mean over silos of both: the increments of all
silos' records in one batched call, and the mean of the silos' noise vectors (`noise_feed`).
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fedpriv.engines.base import Outcome
from fedpriv.engines.vectorized.noise_feed import NoiseFeed, aggregate
from fedpriv.engines.vectorized.sampled_batches import SampledBatches
from fedpriv.errors import InputError, RunError
from fedpriv.estimators.gradients import Estimator
from fedpriv.estimators.running_sum import empty_sum
from fedpriv.mechanisms import Mechanism
from fedpriv.objectives import Objective, Records, Slots
from fedpriv.optimizers import Optimizer
from fedpriv.participation.base import Participation
from fedpriv.participation.public_order import PublicOrder
from fedpriv.replicates.stacking import Part, signature, stack
from fedpriv.running.observer import RunObserver
from fedpriv.running.outcome import evaluation_rounds, finished_after, measured
from fedpriv.running.plan import Plan, plan_of
from fedpriv.running.round_step import Read, RoundStep, record_weight
from fedpriv.running.task import Task, spread, task_of_cell
from fedpriv.scenario import Cell

_PROGRESS_EVERY = 0.1  # seconds
_GATHER_VALUES = 2**20
_ROUND_VALUES = 2**26


def run_vectorized(cells: Sequence[Cell], observer: RunObserver) -> Iterator[Outcome]:
    """Run cells in groups that differ only in seeds and numbers; see `Engine`."""
    plans = _plans(cells)
    with _one_torch_thread():
        for members in _groups(cells, plans):
            yield from _Group(members, [cells[i] for i in members], [plans[i] for i in members], observer).run()


def groups_of(cells: Sequence[Cell]) -> list[list[int]]:
    """The places of the cells that run together, group by group; each group alone computes the same bits."""
    return list(_groups(cells, _plans(cells)))


def _plans(cells: Sequence[Cell]) -> list[Plan]:
    if any(cell.run.arithmetic == "integers" for cell in cells):
        raise InputError(
            'run.arithmetic = "integers": engine vectorized adds all silos up at once, in floating point; use '
            "--engine inprocess"
        )
    return [plan_of(cell, task_of_cell(cell).objective) for cell in cells]


def _groups(cells: Sequence[Cell], plans: Sequence[Plan]) -> Iterator[list[int]]:
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


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The cores draw noise meanwhile; torch's threads, waiting for each other in a busy loop, would stop both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _group_key(cell: Cell, plan: Plan) -> object:
    parts = tuple(signature(part) for part in (plan.estimator, plan.mechanism, plan.optimizer, plan.objective))
    shape = (plan.schedule, plan.batch_sizes, plan.weights, bool(plan.noise.sources))
    return shape, parts, cell.data, cell.model, cell.run


class _Group:
    """Replicates that run in step: tensors have shape (replicates, d)."""

    def __init__(
        self, indices: Sequence[int], cells: Sequence[Cell], plans: Sequence[Plan], observer: RunObserver
    ) -> None:
        first = plans[0]
        self._indices, self._cells, self._plans, self._observer = indices, cells, plans, observer
        self._schedule, self._run = first.schedule, cells[0].run
        self._task: Task = task_of_cell(cells[0])
        self._device = _device(self._run.device)
        self._dtype = self._task.train.features.dtype
        self._estimator: Estimator = self._stacked([plan.estimator for plan in plans])
        self._mechanism: Mechanism = self._stacked([plan.mechanism for plan in plans])
        self._optimizer: Optimizer = self._stacked([plan.optimizer for plan in plans])
        self._objective: Objective = self._stacked([plan.objective for plan in plans])
        noises = [aggregate(plan.noise) if self._run.noise == "aggregate" else plan.noise for plan in plans]
        dimension, rounds = self._task.objective.dimension, self._schedule.rounds
        draws = first.mechanism.draws
        self._fresh: Iterator[Tensor] = (
            iter(NoiseFeed(noises, [cell.seed for cell in cells], rounds, dimension, self._dtype, draws))
            if first.noise.sources
            else (torch.zeros(draws(t) or 1, 1, dtype=self._dtype) for t in range(1, rounds + 1))
        )
        self._sizes, self._silo_weights = first.batch_sizes, first.weights

    def _read(self, batches: int) -> Read:
        """A round that reads so many batches of every silo, still without its records."""
        rows = tuple((silo, batches * size) for silo, size in enumerate(self._sizes))
        weights = [
            record_weight(share, size, batches)
            for share, size in zip(self._silo_weights, self._sizes, strict=True)
            for _ in range(batches * size)
        ]
        return Read(None, torch.tensor(weights, dtype=self._dtype, device=self._device), rows)

    def _stacked(self, parts: Sequence[Part]) -> Part:
        return stack(parts, self._dtype, self._device)

    @torch.inference_mode()
    def run(self) -> list[Outcome]:
        started = last = time.perf_counter()
        evaluated_at = evaluation_rounds(self._schedule.rounds, self._run.evaluations)
        optimizer, count = self._optimizer, len(self._cells)
        step = RoundStep(self._estimator, self._mechanism, self._objective)
        state = optimizer.start(self._objective.initial().to(self._device).expand(count, -1))
        total = empty_sum(optimizer.query(state))
        hidden = self._mechanism.start()
        clipped, drawn = torch.zeros(2, count, dtype=torch.int64, device=self._device)
        weighed, of_weighed = None, drawn
        unreported = 0
        for t, read in enumerate(self._batches(), start=1):
            current, query = self._estimator.round(t), optimizer.query(state)
            step.check_moved(total.past, t, query, f"round {t}")
            total, clips = step.summed(total, current, query, read)
            noisy, hidden = step.noisy(total.total, hidden, t, next(self._fresh).to(self._device))
            state = optimizer.update(state, noisy, current)
            clipped += clips
            if weighed is not read.weights:  # in a public order most rounds have the same
                weighed, of_weighed = read.weights, read.weights.count_nonzero(-1)
            drawn += of_weighed
            unreported += count
            if (now := time.perf_counter()) - last > _PROGRESS_EVERY or t == self._schedule.rounds:
                self._observer.advanced(unreported)
                unreported, last = 0, now
            if t in evaluated_at:
                metrics = self._evaluate(t, optimizer.output(state))
        wall = (time.perf_counter() - started) / count
        models = optimizer.output(state).cpu().numpy()
        shares = (clipped.double() / drawn.clamp(min=1)).tolist()
        return [
            Outcome(index, finished_after(plan, self._schedule.rounds, model.copy(), of_cell, share, wall))
            for index, plan, model, of_cell, share in zip(
                self._indices, self._plans, models, metrics, shares, strict=True
            )
        ]

    def _batches(self) -> Iterator[Read]:
        train = self._task.train
        on_device = Records(train.features.to(self._device), train.labels.to(self._device))
        shares = {cell.seed: spread(cell) for cell in self._cells}
        if isinstance(self._schedule, PublicOrder):
            return self._in_order(self._schedule, on_device, shares)
        return self._sampled(self._schedule, on_device, shares)

    def _sampled(self, schedule: Participation, train: Records, shares: dict[int, list[Tensor]]) -> Iterator[Read]:
        """Whose a record is, is told only to an objective that asks; it must not key anything by how many."""
        seeds = [cell.seed for cell in self._cells]
        asks = self._objective.at(Slots(1, ())) is not self._objective
        sampled = SampledBatches(schedule, seeds, shares, self._silo_weights, self._sizes, by_silo=asks)
        for index, weights, rows in sampled:
            on_device = index.to(self._device)
            records = Records(train.features[on_device], train.labels[on_device]) if index.numel() else None
            yield Read(records, weights.to(self._device, self._dtype), rows)

    def _in_order(self, schedule: PublicOrder, train: Records, shares: dict[int, list[Tensor]]) -> Iterator[Read]:
        """Gathered block by block, once for all replicates of a seed."""
        features, labels = train
        orders = [_by_place(of_silos, schedule.batches_held) for of_silos in shares.values()]
        places = torch.stack(orders, dim=1).to(self._device)
        of_replicates = _spread_over([list(shares).index(cell.seed) for cell in self._cells], self._device)
        block = max(1, _GATHER_VALUES // (places[0].numel() * features[0].numel()))
        spans = [list(schedule.batches(t)) for t in range(1, schedule.rounds + 1)]
        alike = {count: self._read(count) for count in set(map(len, spans))}
        for count, members in itertools.groupby(spans, key=len):
            equal = list(members)
            if count == 0:
                yield from itertools.repeat(alike[0], len(equal))
                continue
            read, column = torch.tensor(equal), self._silo_by_silo(count)
            for start in range(0, len(read), block):
                index = places[read[start : start + block]]  # (rounds, count, seeds, records)
                index = index.movedim(1, 2).flatten(2)[..., column]
                for columns in zip(features[index], labels[index], strict=True):
                    yield alike[count]._replace(records=Records(*map(of_replicates, columns)))

    def _silo_by_silo(self, count: int) -> Tensor:
        """Where to find the records of `count` batches, one batch after another, silo after silo."""
        silos = torch.arange(len(self._sizes)).repeat_interleave(torch.tensor(self._sizes)).repeat(count)
        return silos.argsort(stable=True)

    def _evaluate(self, t: int, model: Tensor) -> list[dict[str, float]]:
        test = Records(*(column.to(self._device) for column in self._task.test))
        names = [f"{cell.name} (seed {cell.seed}), round {t}" for cell in self._cells]
        metrics = measured(self._task.objective, model, test, names)
        for index, of_cell in zip(self._indices, metrics, strict=True):
            self._observer.evaluated(index, t, of_cell)
        return metrics


def _by_place(shares: Sequence[Tensor], places: int) -> Tensor:
    """The records of all silos that are one batch of their orders: (places, records of all silos)."""
    return torch.cat([share.view(places, -1) for share in shares], dim=1)


def _spread_over(seeds: Sequence[int], device: torch.device) -> Callable[[Tensor], Tensor]:
    """From a column (seeds, ...) of records to that of the replicates, whose seeds have these places."""
    if len(set(seeds)) == 1:
        return lambda column: column.expand(len(seeds), *column.shape[1:])
    if seeds == list(range(len(seeds))):
        return lambda column: column
    pick = torch.tensor(seeds, device=device)
    return lambda column: column.index_select(0, pick)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f'run.device = {name!r} cannot be used here: {reason}; try "cpu"') from None
    return device
