"""Silo folders for a demonstration: to each its own records and a policy, cut from a public data set.

A silo of a real deployment has its records already, and its administrator writes the policy.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.budget import exact_decimal
from fedpriv.core.errors import InputError
from fedpriv.core.extensions import load_add_on_part
from fedpriv.core.limits import MIB
from fedpriv.data.cells import write_rows
from fedpriv.data.named import Dataset, load, table_path
from fedpriv.data.partition import counted_mask
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import format_schema_toml, read_raw_table
from fedpriv.noise.trust import RECORD
from fedpriv.plan.evaluation import (
    assume_scaling,
    evaluation_count,
    first_step_cell,
    make_evaluation_plan,
    test_indices_of_silos,
    train_indices_of_silos,
)
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import PublicTask, load_task
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import Cell
from fedpriv.silo.memory import DEFAULT_MEMORY, round_memory
from fedpriv.silo.policy import (
    SLACK_PER_RUN,
    charged_stream,
    make_own_folder,
    price_curve,
    private_umask,
    revoke_write_access,
    why_assumption_refused,
    why_unaccountable,
)
from fedpriv.silo.shard import key_path, load_or_create_key


def prepare_silos(scenario: Scenario, folder: Path, run_count: int) -> list[Path]:
    """Write folder/silo-N/guard/shard.npz, or shard.csv, and policy.toml for every silo; the folders written.

    A table that says itself which records are for testing stays one: each silo gets its own rows as a CSV file.

    The shards are those of the simulation, in the order it reads them, so that a deployment without noise equals
    it.  A policy allows `runs` runs of the whole scenario and nothing wider.  InputError if the scenario is not
    one federation throughout, or if a shard is there already: its ledger belongs to those very records.
    """
    cells = [point.cell for point in scenario.points]
    first = cells[0]
    if any(_federation_key(cell) != _federation_key(first) for cell in cells):
        raise InputError(
            f"{scenario.name}: its cells differ in data, silos, rounds, batch, seed, trust or relation; a "
            "deployment has one federation: narrow them with --set"
        )
    asked = [*map(assume_scaling, cells), *filter(None, map(first_step_cell, cells))]
    allowances = [run_allowance(cell, load_task(cell)) for cell in asked]

    def budget(each: Iterable[Mapping[str, Any]]) -> float:
        return math.sqrt(run_count) * math.hypot(*(allowance["budget"] for allowance in each))

    allow = {
        **allowances[0],
        "clip": max(each["clip"] for each in allowances),
        "dimension": max(each["dimension"] for each in allowances),
        "budget": budget(allowances),
    }
    if memory := max(each.get("memory", 0) for each in allowances):
        allow["memory"] = memory
    if slack := run_count * sum(exact_decimal(each.get("slack", 0.0)) for each in allowances):
        allow["slack"] = float(slack)
    if code := sorted({path for each in allowances for path in each.get("models", [])}):
        allow["models"] = code
    folders = [folder / f"silo-{silo}" / "guard" for silo in range(first.federation.silos)]
    for file in (guard / name for guard in folders for name in ("shard.npz", "shard.csv")):
        if file.exists():
            raise InputError(f"{file} exists, and a ledger may belong to it; give another --out")
    dataset = load(first.data.name, table=first.data.table)
    order, tests, schema = train_indices_of_silos(first), test_indices_of_silos(first), first.data.table_schema
    evaluated = [evaluation_allowance(assume_scaling(cell), run_count) for cell in cells]
    evaluation = (
        {}
        if not evaluated[0]
        else {
            "budget": math.hypot(*(each["budget"] for each in evaluated)),
            "evaluations": max(each["evaluations"] for each in evaluated),
        }
    )
    for silo, guard in enumerate(folders):
        for name in ("ledger", "mark", "socket"):
            make_own_folder(guard / name)
            revoke_write_access(guard / name)
        revoke_write_access(guard)
        state = {"ledger": "ledger/ledger.sqlite", "mark": "mark/ledger.mark", "socket": "socket/guard.sock"}
        if schema is not None and (schema.split is not None or first.model.row.of_cells):
            write_table_shard(guard / "shard.csv", first, dataset, silo, order[silo])
            keys, table = {"silo": silo, "shard": "shard.csv"}, schema
        else:
            write_shard(guard / "shard.npz", dataset, order[silo], tests[silo])
            keys, table = {"silo": silo, "classes": dataset.class_count, "shard": "shard.npz"}, None
        if any(cell.privacy.shares for cell in asked):
            allow["budget"] = budget(run_allowance(cell, load_task(cell), silo) for cell in asked)
        write_policy(guard / "policy.toml", format_policy({**keys, **state}, allow, table, evaluation))
    return folders


def run_allowance(cell: Cell, task: PublicTask, silo: int | None = None) -> dict[str, Any]:
    """The narrowest [allow] of a policy under which one run of `cell` is answered by `silo`, or by every silo.

    InputError if it is answered under none.
    """
    if (reason := why_unaccountable(cell)) is not None:
        raise InputError(f"a deployment's silos refuse this scenario: {reason}")
    plan = make_plan(cell, task.objective, for_release=True)
    if (reason := why_assumption_refused(plan)) is not None:
        raise InputError(f"a deployment's silos refuse this scenario: {reason}")
    if (targets := cell.target_mus) is None:
        raise InputError('privacy.mode = "none": silos of a deployment release nothing without noise')
    return {
        "trust": cell.algorithm.trust,
        "relation": cell.privacy.relation,
        "clip": plan.max_clip,
        "rounds": cell.schedule.rounds,
        **_needed_budget(cell, plan, range(len(targets)) if silo is None else [silo]),
        "dimension": plan.objective.dimension,
        **({} if (memory := _needed_memory(cell, plan, task)) <= DEFAULT_MEMORY else {"memory": memory}),
        **({"silos": cell.federation.silos} if plan.masked else {}),
        **({} if cell.privacy.unit == RECORD.name else {"unit": cell.privacy.unit}),
        **({"models": sorted(cell.model.import_paths)} if cell.model.import_paths else {}),
        **({} if (guard := cell.model.row.guard) is None else load_add_on_part("guard", guard).allowance(cell)),
    }


def _needed_memory(cell: Cell, plan: Plan, task: PublicTask) -> int:
    """Bytes that a round takes of the silo that needs most, training or evaluating; see `taken_by`."""
    silos, features = range(cell.federation.silos), math.prod(task.test.features.shape[1:])
    held = [
        size * cell.schedule.batches_per_silo * cell.privacy.protected_unit.max_records
        for size in plan.batch_sizes
    ]
    needs = [round_memory(plan, silo, held[silo], features) for silo in silos]
    if (
        asked := make_evaluation_plan(cell, task.objective, for_release=True)
    ) is not None and cell.evaluation is not None:
        tests = cell.evaluation.records_per_silo(cell.federation.silos)
        needs += [round_memory(asked.plan, silo, tests[silo], features) for silo in silos]
    return -(-max(needs) // MIB) * MIB


def _needed_budget(cell: Cell, plan: Plan, silos: Sequence[int]) -> dict[str, float]:
    """The largest target of `silos`; for records that take part in secret the most that one of them is charged."""
    targets = cell.target_mus or ()
    if not cell.schedule.secret:
        return {"budget": max(targets[silo] for silo in silos)}
    trust = cell.algorithm.trust_setting
    streams = {silo: charged_stream(plan, silo, trust, trust) for silo in silos}
    prices = [
        price_curve(plan, stream.guarantee, silo).price_at(SLACK_PER_RUN) for silo, stream in streams.items()
    ]
    return {"budget": max(each.mu for each in prices if each is not None), "slack": SLACK_PER_RUN}


def evaluation_allowance(cell: Cell, run_count: int = 1) -> dict[str, Any]:
    """The narrowest [evaluation] of a policy under which `runs` runs of `cell` evaluate; empty if none does.

    InputError if no policy allows it.
    """
    if make_evaluation_plan(cell, load_task(cell).objective, for_release=True) is None:
        return {}
    assert cell.evaluation is not None
    if cell.evaluation.mu is None:
        raise InputError(
            "evaluation.mu: this key is missing; silos of a deployment evaluate nothing without noise"
        )
    return {"budget": math.sqrt(run_count) * cell.evaluation.mu, "evaluations": evaluation_count(cell)}


def write_shard(
    path: Path, dataset: Dataset, records: NDArray[np.int64], test_records: NDArray[np.int64] | None = None
) -> None:
    """Training records of these numbers, in this order, and `tests`, as a shard that its owner alone may read."""
    arrays = _shard_arrays("", dataset.train_images[records], dataset.train_labels[records])
    if dataset.persons is not None:
        arrays["persons"] = dataset.persons[records]
    if test_records is not None and len(test_records):
        arrays |= _shard_arrays("test_", dataset.test_images[test_records], dataset.test_labels[test_records])
    with private_umask():
        np.savez(path, **arrays)
    load_or_create_key(key_path(path))


def _shard_arrays(part: str, images: NDArray[Any], labels: NDArray[Any]) -> dict[str, Any]:
    """The arrays of a part of a shard; `counts` where some records only keep a place."""
    kind, counts = "images" if images.dtype == np.uint8 else "features", counted_mask(labels)
    known = labels.copy()
    known[~counts] = 0
    told = {} if counts.all() else {f"{part}counts": counts}
    return {f"{part}{kind}": images, f"{part}labels": known, **told}


def write_table_shard(path: Path, cell: Cell, dataset: Dataset, silo: int, records: NDArray[np.int64]) -> None:
    """The training records of these numbers as rows of a CSV file, in this order, then the site's other rows."""
    assert dataset.row_indices is not None
    (train, test), sites = dataset.row_indices, dataset.sites if cell.data.partition == "site" else None
    own = test[:0] if sites is None else test[sites.test == silo]
    others = np.setdiff1d(own, train[records])
    with private_umask():
        write_rows(read_raw_table(table_path(cell.data.name)), [*train[records].tolist(), *others.tolist()], path)
    load_or_create_key(key_path(path))


def write_policy(path: Path, text: str) -> None:
    """A policy file that its owner alone may write: a guard refuses any other."""
    path.write_text(text, encoding="utf-8")
    revoke_write_access(path)


def format_policy(
    keys: Mapping[str, object],
    allow: Mapping[str, object],
    table: TableSchema | None = None,
    evaluation: Mapping[str, object] | None = None,
) -> str:
    """A policy file of these keys, this [allow], for a table what is public about it, and an [evaluation]."""
    described = "" if table is None else f"{format_schema_toml(table, 'table')}\n"
    evaluated = f"\n[evaluation]\n{format_toml(evaluation)}" if evaluation else ""
    return f"{format_toml(keys)}\n{described}[allow]\n{format_toml(allow)}{evaluated}"


def format_toml(keys: Mapping[str, object]) -> str:
    """Write a line for every key: JSON of numbers, texts, truth values and lists is TOML."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


def _federation_key(cell: Cell) -> tuple[object, ...]:
    of_tests = cell.evaluation and cell.evaluation.records
    return cell.data, cell.federation, cell.seed, cell.algorithm.trust, cell.privacy.relation, of_tests
