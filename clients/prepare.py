"""Folders of silos for a demonstration: to each its own records and a policy, cut from a public data set.

A silo of a real deployment has its records already, and writes its policy itself.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.policy import SLACK_PER_RUN, presuming, unaccountable
from clients.prices import cost_of, priced_stream
from fedpriv.accounting.slack import decimal
from fedpriv.data.datasets import Dataset, load
from fedpriv.errors import InputError
from fedpriv.running.plan import Plan, plan_of
from fedpriv.running.task import spread, task_of_cell
from fedpriv.scenario import Cell, Scenario


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
            f"{scenario.name}: its cells differ in data, silos, rounds, batch, seed, trust or relation; a "
            "deployment has one federation: narrow them with --set"
        )
    allowances = [allowance_of(cell) for cell in cells]
    allow = {
        **allowances[0],
        "clip": max(each["clip"] for each in allowances),
        "dimension": max(each["dimension"] for each in allowances),
        "budget": math.sqrt(runs) * math.hypot(*(each["budget"] for each in allowances)),
    }
    if slack := runs * sum(decimal(each.get("slack", 0.0)) for each in allowances):
        allow["slack"] = float(slack)
    folders = [folder / f"silo-{silo}" / "guard" for silo in range(first.federation.silos)]
    for guard in folders:
        if (guard / "shard.npz").exists():
            raise InputError(f"{guard / 'shard.npz'} exists, and a ledger may belong to it; give another --out")
    dataset, order = load(first.data.name), [share.numpy() for share in spread(first)]
    for silo, guard in enumerate(folders):
        for name in ("ledger", "socket"):
            (guard / name).mkdir(parents=True, exist_ok=True)
        write_shard(guard / "shard.npz", dataset, order[silo])
        keys = {"silo": silo, "classes": dataset.classes, "shard": "shard.npz"}
        rounds_per_epoch = {"ledger": "ledger/ledger.sqlite", "socket": "socket/guard.sock"}
        (guard / "policy.toml").write_text(policy_text({**keys, **rounds_per_epoch}, allow), encoding="utf-8")
    return folders


def allowance_of(cell: Cell) -> dict[str, Any]:
    """The narrowest [allow] of a policy under which one run of `cell` is answered; InputError if none is."""
    if (reason := unaccountable(cell)) is not None:
        raise InputError(f"a deployment's silos refuse this scenario: {reason}")
    plan = plan_of(cell, task_of_cell(cell).objective)
    if (reason := presuming(plan)) is not None:
        raise InputError(f"a deployment's silos refuse this scenario: {reason}")
    if (target := cell.privacy.target) is None:
        raise InputError('privacy.mode = "none": silos of a deployment release nothing without noise')
    return {
        "trust": cell.algorithm.trust,
        "relation": cell.privacy.relation,
        "clip": plan.largest_clip,
        "rounds": cell.schedule.rounds,
        **_budget(cell, plan, target),
        "dimension": plan.objective.dimension,
        **({"silos": cell.federation.silos} if plan.lattice is not None else {}),
    }


def _budget(cell: Cell, plan: Plan, target: float) -> dict[str, float]:
    """The target; for records that take part in secret what the silo that pays most is charged."""
    if not cell.schedule.secret:
        return {"budget": target}
    trust, prices = cell.algorithm.trust_setting, []
    for silo in range(cell.federation.silos):
        stream = priced_stream(plan, silo, trust, trust)
        prices.append(cost_of(plan, stream.guarantee, silo).at(SLACK_PER_RUN))
    return {"budget": max(each.mu for each in prices if each is not None), "slack": SLACK_PER_RUN}


def write_shard(path: Path, dataset: Dataset, records: NDArray[np.int64]) -> None:
    """The training records of these numbers, in this order, as a silo's shard."""
    np.savez(path, images=dataset.train_images[records], labels=dataset.train_labels[records])


def policy_text(keys: Mapping[str, object], allow: Mapping[str, object]) -> str:
    """A policy file of these keys and this [allow]."""
    return f"{_toml(keys)}\n[allow]\n{_toml(allow)}"


def _toml(keys: Mapping[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


def _federation(cell: Cell) -> tuple[object, ...]:
    return cell.data, cell.federation, cell.seed, cell.algorithm.trust, cell.privacy.relation
