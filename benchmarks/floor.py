"""The floor of a run: what cannot be left out, each part alone, on one core, in seconds of the processor.

Gaussian draws (shared by cells that differ in how much noise they add only, since streams are keyed by the seed),
and one matrix-vector product a record and point.  Evaluations on the test set are apart: a run that asks for none
can leave them out.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fedpriv.core.random import simulation_noise
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.schema import Cell

_SAMPLE_ROUNDS = 300
_BATCH = 64


def draws(cell: Cell) -> float:
    """Seconds to draw every owner's vector of every round and add them up, and nothing else."""
    task = load_task(cell)
    sources = make_plan(cell, task.objective).noise.sources
    owners, weights = [source.party for source in sources], [1.0] * len(sources)
    noise, size, rounds = simulation_noise(0, np.float32), task.objective.dimension, cell.federation.total_rounds
    if len(owners) > 1:
        return _extrapolated(lambda t: _ignore(noise.weighted_sum(size, owners, weights, t)), rounds)
    return _extrapolated(lambda _: _ignore(noise.vectors(size, owners * _BATCH, range(_BATCH))), rounds) / _BATCH


def products(cells: Sequence[Cell], points: int) -> float:
    """Seconds for a softmax regression's logits of every record at so many points, for every replicate."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task, silos = load_task(cells[0]), cells[0].federation.silos
    order = partition_records(cells[0])
    columns = torch.stack([share[: cells[0].federation.rounds_per_epoch] for share in order], dim=1)
    width = task.train.features.shape[1]
    point = torch.randn(len(cells), task.objective.dimension // width, width)

    def one_round(t: int) -> None:
        features = task.train.features[columns[(t - 1) % len(columns)]].expand(len(cells), silos, width)
        for _ in range(points):
            torch.bmm(point, features.mT)

    seconds = _extrapolated(one_round, cells[0].federation.total_rounds)
    torch.set_num_threads(threads)
    return seconds


def evaluations(cells: Sequence[Cell]) -> float:
    """Seconds for a softmax regression's logits of the test set in all evaluations, for every replicate."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task = load_task(cells[0])
    features = task.test.features
    point = torch.randn(len(cells) * task.objective.dimension // features.shape[1], features.shape[1])
    count = min(cells[0].run.evaluations, cells[0].federation.total_rounds)
    seconds = _extrapolated(lambda _: _ignore(point @ features.mT), count)
    torch.set_num_threads(threads)
    return seconds


def _extrapolated(one_round: Callable[[int], None], rounds: int) -> float:
    sample = min(rounds, _SAMPLE_ROUNDS)
    one_round(1)
    started = time.thread_time()
    for t in range(1, sample + 1):
        one_round(t)
    return (time.thread_time() - started) * rounds / sample


def _ignore(_: object) -> None:
    """The result is not wanted, only the time."""
