"""The vectorized engine's releases, seen by an optimizer that only watches, under the audit's own statistics.

A simulation protects nobody; what is shown here is that its figures come of the noise that is claimed.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.addons.audit.canaries import CanaryLayout, make_audit_cell, make_canary_objective, rows_by_round
from fedpriv.addons.audit.families import CANARY_COUNT, HEAVIEST_ROUND_COUNT
from fedpriv.addons.audit.statistics import find_best_bound, heaviest_round
from fedpriv.addons.audit.transcripts import Trials
from fedpriv.core.random import public_generator
from fedpriv.data.partition import partition_iid
from fedpriv.engines.vectorized import engine as vectorized
from fedpriv.engines.vectorized import noise as noise_feed
from fedpriv.engines.vectorized import silos as grouping
from fedpriv.loss.estimators import Round
from fedpriv.noise.trust import Noise
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import Recorder

MakeCell = Callable[..., Cell]
ROUNDS, RUNS = 4, 8


class Watcher:
    """Asks at 0 for ever; each replicate's releases as (1, d)."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def start(self, initial: Tensor) -> Tensor:
        return torch.zeros_like(initial)

    def query(self, state: Tensor) -> Tensor:
        return state

    def update(self, state: Tensor, released: Tensor, current: Round) -> Tensor:
        self.seen.append(released[0].clone())
        return state

    output = query


def canaries_of(small: Cell, layout: CanaryLayout, folder: Path, seed: int) -> tuple[Cell, np.ndarray]:
    """The cell over a data set in which silo 0 gets the layout's canaries, and their coins."""
    present = public_generator(seed, "coins").random(CANARY_COUNT) < 0.5
    shard = layout.make_shard(present, small.privacy.relation)
    records = layout.row_count * small.federation.silos
    images, labels = np.zeros((records, CANARY_COUNT), np.float32), np.zeros(records, np.int64)
    mine = partition_iid(labels, [layout.row_count] * small.federation.silos, seed)[
        0
    ]  # where the partition puts silo 0's rows
    images[mine], labels[mine] = shard.images, shard.labels
    path = folder / f"{seed}.npz"
    parts = {"train_images": images, "train_labels": labels, "test_images": images[:2], "test_labels": labels[:2]}
    np.savez(path, **parts, classes=2)
    return small.model_copy(
        update={"seed": seed, "data": small.data.model_copy(update={"name": str(path)})}
    ), present


def shown(small: Cell, folder: Path, patch: pytest.MonkeyPatch) -> float:
    passes = rows_by_round(small)
    plan = make_plan(small, make_canary_objective(small, CANARY_COUNT))
    layout = CanaryLayout.from_rows(passes, heaviest_round(plan), CANARY_COUNT, HEAVIEST_ROUND_COUNT)
    count = len(layout.rounds)
    seen, coins = [], []
    for seed in range(RUNS):
        cell, present = canaries_of(small, layout, folder, seed)
        watcher = Watcher()

        def watched(cell: Cell, objective: Any, watcher: Watcher = watcher) -> Plan:
            return dataclasses.replace(make_plan(cell, objective), optimizer=watcher)

        patch.setattr(grouping, "make_plan", watched)
        list(vectorized.run_vectorized([cell], Recorder()))
        classes = torch.stack(watcher.seen).double().view(ROUNDS, 2, -1)[..., :-1]
        seen.append(((classes[:, 1] - classes[:, 0]) / 2**0.5).T.numpy()[:count])
        coins.append(present[:count])
    n = RUNS * count
    none = np.empty((n, 0))
    trials = Trials(
        np.concatenate(seen),
        none,
        none,
        np.concatenate(coins),
        np.tile(layout.rounds, RUNS),
    )
    return find_best_bound(plan, trials, 0.01)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("trust", "noise"), [("trusted", "per-silo"), ("trusted", "aggregate")])
def test_vectorized_releases_have_the_claimed_noise_and_half_of_it_is_refuted(
    small_cell: MakeCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str, noise: str
) -> None:
    """The seeds are fixed; for others, a false refutation has probability at most 1 %."""
    cell = small_cell(algorithm__trust=trust, federation__rounds=ROUNDS, run__dtype="float32")
    small = make_audit_cell(cell, 1.0, ROUNDS, 2, HEAVIEST_ROUND_COUNT)
    small = small.model_copy(update={"run": small.run.model_copy(update={"noise": noise})})
    assert 0.5 <= shown(small, tmp_path, monkeypatch) <= 1.0
    honest = noise_feed._amplitude  # 52: half of the noise
    monkeypatch.setattr(noise_feed, "_amplitude", lambda noise: honest(noise) / 2)
    assert shown(small, tmp_path, monkeypatch) > 1.0


def test_aggregate_noise_has_the_variance_of_the_silos_mean(small_cell: MakeCell) -> None:
    """52, at `aggregate_noise` itself: the variance of 40,000 values is right within 6 errors (2e-9)."""
    plan = make_plan(small_cell(), make_canary_objective(make_audit_cell(small_cell(), 1.0, 2, 3, 1), 4))
    together = noise_feed.aggregate_noise(plan.noise)
    expected = sum((source.weight * float(source.std)) ** 2 for source in plan.noise.sources)
    feed = noise_feed.NoiseFeed([together], [5], 4, 10_000, torch.float64, lambda _: None)
    drawn = torch.stack(list(feed.rounds_from(1)))
    assert abs(float(drawn.var()) / expected - 1.0) < 6.0 * (2.0 / drawn.numel()) ** 0.5
    assert noise_feed.aggregate_noise(Noise()) == Noise()
