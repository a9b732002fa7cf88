"""Folders of silos for a demonstration: to each its own records and a policy, cut from a public data set.

A silo of a real deployment has its records already, and writes its policy itself.
"""

import math
from pathlib import Path

import numpy as np

from fedpriv.data.datasets import load
from fedpriv.errors import InputError
from fedpriv.federation import spread, task_of_cell
from fedpriv.plan import plan_of
from fedpriv.scenario import Cell, Scenario

_POLICY = """\
# Silo {silo} of the scenario {name}, for a demonstration.  A real silo writes its own: docs/privacy.md.
silo = {silo}
classes = {classes}
shard = "shard.npz"
ledger = "ledger/ledger.sqlite"
socket = "socket/guard.sock"

[allow]
relation = "{relation}"
clip = {clip!r}
rounds = {rounds}
budget = {budget!r}   # mu over the lifetime of the shard: {runs} runs of the scenario
"""


def prepare_silos(scenario: Scenario, folder: Path, runs: int) -> list[Path]:
    """Write folder/silo-N/guard/shard.npz and policy.toml for every silo; the folders written.

    The shards are those of the simulation, in the order it reads them, so that a deployment without noise equals
    it.  A policy allows `runs` runs of the whole scenario and nothing wider.  InputError if the scenario is not
    one federation throughout, or if a shard is there already: its ledger belongs to those very records.
    """
    cells = [point.cell for point in scenario.points]
    first = cells[0]
    if any(_federation(cell) != _federation(first) for cell in cells):
        raise InputError(
            f"{scenario.name}: its cells differ in data, silos, rounds, batch, seed or relation; a deployment has "
            "one federation: narrow them with --set"
        )
    streams = [
        plan_of(cell, task_of_cell(cell).objective).stream_of(0, first.federation.total_rounds) for cell in cells
    ]
    if any(stream.std == 0.0 for stream in streams):
        raise InputError(f"{scenario.name}: silos would release sums without noise; no policy is made for that")
    taken = [path for silo in range(first.federation.silos) if (path := _shard(folder, silo)).exists()]
    if taken:
        raise InputError(f"{taken[0]} exists, and a ledger may belong to it; give another --out, or remove both")
    dataset, order = load(first.data.name), spread(first).numpy()
    policy = {
        "name": scenario.name,
        "classes": dataset.classes,
        "relation": first.privacy.relation,
        "clip": max(clip for stream in streams for clip in stream.clips),
        "rounds": first.federation.total_rounds,
        "budget": math.sqrt(runs) * math.hypot(*(stream.mu for stream in streams)),
        "runs": runs,
    }
    folders = []
    for silo, records in enumerate(order):
        shard = _shard(folder, silo)
        for name in ("ledger", "socket"):
            (shard.parent / name).mkdir(parents=True, exist_ok=True)
        np.savez(shard, images=dataset.train_images[records], labels=dataset.train_labels[records])
        (shard.parent / "policy.toml").write_text(_POLICY.format(silo=silo, **policy), encoding="utf-8")
        folders.append(shard.parent)
    return folders


def _shard(folder: Path, silo: int) -> Path:
    return folder / f"silo-{silo}" / "guard" / "shard.npz"


def _federation(cell: Cell) -> tuple[object, ...]:
    return cell.data, cell.federation, cell.seed, cell.privacy.relation
