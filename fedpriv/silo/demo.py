"""Silo folders for a demonstration, each with a part of a scenario's records and a policy.

* A cell is one run of a scenario, with a value for each key.
* A guard is the process with a silo's records, which answers queries within the silo's policy.  Its ledger is its
  account of answers and charges, and the mark a file that reveals an older copy of the ledger.
* A shard is the file of a silo's records.  The key of the records is a secret file beside it, under which ledgers
  have a fingerprint of the records.
* An allowance is a section [allow] or [evaluation] of a policy, as a dictionary.
* A budget is a μ of Gaussian differential privacy, which composes over runs to √Σμ².
* A slack is a probability with which μ may fail.  Runs whose records take part in secret need some.
"""

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
from fedpriv.data.tables import format_schema_toml, format_toml_value, read_raw_table
from fedpriv.noise.trust import RECORD
from fedpriv.plan.evaluation import (
    assume_scaling,
    evaluation_count,
    first_step_cell,
    held_out_indices_by_silo,
    make_evaluation_plan,
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
    """Write the records and the policy of every silo.

    The files are folder/silo-N/guard/shard.npz, or shard.csv, and beside it the key of the records, policy.toml,
    and folders for ledger, mark and socket.  A silo has the training records that it has in a simulation of the
    first cell that reads the most batches.  A table that says which records are for testing, or whose raw cells
    the model reads, stays a table.

    Args:
        scenario: Scenario whose cells have one data set, federation, seed, trust setting, relation, unit of
            protection and number of test records.
        folder: Folder in which the silos' folders are made.
        run_count: Number of runs of the whole scenario for which the budget of a policy suffices.

    Returns:
        Folders of the guards, by silo.

    Raises:
        InputError: If the scenario's cells differ in one of these, if its data cannot be used, if silos cannot
            answer one of its runs, or if a shard exists, since its ledger would not fit other records.
    """
    cells = [point.cell for point in scenario.points]
    first = cells[0]
    if any(_federation_key(cell) != _federation_key(first) for cell in cells):
        raise InputError(
            f"{scenario.name}: its cells differ in data, silos, rounds, batch, seed, trust, relation, unit or "
            "test records; a deployment has one federation: narrow them with --set"
        )
    # A first step, which releases means for the scaling of columns, is charged as well.
    run_cells = [*map(assume_scaling, cells), *filter(None, map(first_step_cell, cells))]
    allowances = [run_allowance(cell, load_task(cell)) for cell in run_cells]

    # Gaussian DP composes in squares: Σ μ² over all runs.
    def budget(run_allowances: Iterable[Mapping[str, Any]]) -> float:
        return math.sqrt(run_count) * math.hypot(*(allowance["budget"] for allowance in run_allowances))

    allow = {
        **allowances[0],
        "clip": max(cell_allowance["clip"] for cell_allowance in allowances),
        "dimension": max(cell_allowance["dimension"] for cell_allowance in allowances),
        "budget": budget(allowances),
        "memory": max(cell_allowance.get("memory", 0) for cell_allowance in allowances),
        "slack": float(run_count * sum(exact_decimal(allowance.get("slack", 0.0)) for allowance in allowances)),
        "models": sorted({path for cell_allowance in allowances for path in cell_allowance.get("models", [])}),
    }
    # Keys left out have their default in the policy.
    allow = {key: value for key, value in allow.items() if value or key not in ("memory", "slack", "models")}
    folders = [folder / f"silo-{silo}" / "guard" for silo in range(first.federation.silos)]
    for file in (guard / name for guard in folders for name in ("shard.npz", "shard.csv")):
        if file.exists():
            raise InputError(f"{file} exists, and a ledger may belong to it; give another --out")
    dataset = load(first.data.name, table=first.data.table)
    # By silo: indices of its records in the training part, and of its test records in the test part.
    order, tests, schema = (
        train_indices_of_silos(max(cells, key=lambda cell: cell.schedule.batches_per_silo)),
        held_out_indices_by_silo(first),
        first.data.table_schema,
    )
    evaluation_allowances = [evaluation_allowance(assume_scaling(cell), run_count) for cell in cells]
    evaluation = (
        {}
        if not evaluation_allowances[0]
        else {
            "budget": math.hypot(*(cell_allowance["budget"] for cell_allowance in evaluation_allowances)),
            "evaluations": max(cell_allowance["evaluations"] for cell_allowance in evaluation_allowances),
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
            keys, table = {"silo": silo, "shard": "shard.csv"}, schema and schema.without_format
        else:
            write_shard(guard / "shard.npz", dataset, order[silo], tests[silo])
            keys, table = {"silo": silo, "classes": dataset.class_count, "shard": "shard.npz"}, None
        # Targets differ by silo.
        if any(cell.privacy.shares for cell in run_cells):
            allow["budget"] = budget(run_allowance(cell, load_task(cell), silo) for cell in run_cells)
        write_policy(guard / "policy.toml", format_policy({**keys, **state}, allow, table, evaluation))
    return folders


def run_allowance(cell: Cell, task: PublicTask, silo: int | None = None) -> dict[str, Any]:
    """Return the section [allow] of a policy for one run of a cell.

    Its keys are trust, relation, clip, rounds, budget and dimension.  Further keys are there if the run needs
    others than the defaults: memory, slack, the number of silos that share masked noise, unit, models, and keys of
    the model's add-on, but not those that admit a user's algorithms and extensions.

    Args:
        cell: One run of a scenario, with all its settings.
        task: Public part of the cell's task.
        silo: Number of the silo, or None for the largest budget of all silos.

    Raises:
        InputError: If the run cannot be planned, has no noise, is refused by every guard, or needs more slack than
            `SLACK_PER_RUN`.
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
    """Return the memory of a round in bytes, rounded up to whole MiB, for the silo that needs most.

    The memory is that of a round of training or of an evaluation, whichever is larger, with the rows of a silo
    that a run reads.  A guard counts all rows of its shard, which can be more.
    """
    silos, features = range(cell.federation.silos), math.prod(task.test.features.shape[1:])
    # Records of each silo, where a person counts with the most records of a person.
    record_counts = [
        size * cell.schedule.batches_per_silo * cell.privacy.protected_unit.max_records
        for size in plan.batch_sizes
    ]
    byte_counts = [round_memory(plan, silo, record_counts[silo], features) for silo in silos]
    if (
        evaluation := make_evaluation_plan(cell, task.objective, for_release=True)
    ) is not None and cell.evaluation is not None:
        tests = cell.evaluation.records_per_silo(cell.federation.silos)
        byte_counts += [round_memory(evaluation.plan, silo, tests[silo], features) for silo in silos]
    return -(-max(byte_counts) // MIB) * MIB


def _needed_budget(cell: Cell, plan: Plan, silos: Sequence[int]) -> dict[str, float]:
    """Return the keys "budget" and, if needed, "slack" of a policy with which `silos` answer one run.

    Raises:
        InputError: If records take part in secret, and no μ can be certified at the slack `SLACK_PER_RUN`.
    """
    targets = cell.target_mus or ()
    if not cell.schedule.secret:
        return {"budget": max(targets[silo] for silo in silos)}
    trust = cell.algorithm.trust_setting  # of the run, and so of the policy that is made for it
    streams = {silo: charged_stream(plan, silo, trust, trust) for silo in silos}
    prices = [
        price_curve(plan, stream.guarantee, silo).price_at(SLACK_PER_RUN) for silo, stream in streams.items()
    ]
    return {"budget": max(price.mu for price in prices if price is not None), "slack": SLACK_PER_RUN}


def evaluation_allowance(cell: Cell, run_count: int = 1) -> dict[str, Any]:
    """Return the section [evaluation] for `run_count` runs of `cell`, or {} without evaluations.

    Its keys are "budget", the μ of all these evaluations together, and "evaluations", their number in one run.

    Raises:
        InputError: If the evaluations cannot be planned, or have no noise.
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
    """Write training and test records as a new shard of mode 0600, and the key of the records beside it.

    Args:
        path: File of the shard, .npz.
        dataset: Data set of the records.
        records: Indices into the data set's training part, in the order of the shard.
        test_records: Indices into its test part, or None or empty for a shard without test records.
    """
    arrays = _shard_arrays("", dataset.train_images[records], dataset.train_labels[records])
    if dataset.persons is not None:
        arrays["persons"] = dataset.persons[records]
    if test_records is not None and len(test_records):
        arrays |= _shard_arrays("test_", dataset.test_images[test_records], dataset.test_labels[test_records])
    with private_umask():
        np.savez(path, **arrays)
    load_or_create_key(key_path(path))


def _shard_arrays(prefix: str, images: NDArray[Any], labels: NDArray[Any]) -> dict[str, Any]:
    """Return the arrays of a split of a shard, with `counts` if some rows are dummy records.

    The label of a dummy record, which is -1 or NaN in `labels`, is 0 in the result.
    """
    kind, counts = "images" if images.dtype == np.uint8 else "features", counted_mask(labels)
    known_labels = labels.copy()
    known_labels[~counts] = 0
    return {
        f"{prefix}{kind}": images,
        f"{prefix}labels": known_labels,
        **({} if counts.all() else {f"{prefix}counts": counts}),
    }


def write_table_shard(path: Path, cell: Cell, dataset: Dataset, silo: int, records: NDArray[np.int64]) -> None:
    """Write training records of a silo, then the remaining test rows of the silo's site, as a CSV file.

    A row that is in the training and in the test part is written once.  Without a partition by site there are no
    remaining test rows.  The key of the records is made beside the file.

    Args:
        path: File of the shard, .csv.
        cell: Cell whose data section describes the table.
        dataset: Data set with the table's row indices of its training part and of its test part.
        silo: Number of the silo.
        records: Indices of the silo's records in the training part.
    """
    assert dataset.row_indices is not None
    (train, test), sites = dataset.row_indices, dataset.sites if cell.data.partition == "site" else None
    other_rows = np.setdiff1d(test[:0] if sites is None else test[sites.test == silo], train[records])
    with private_umask():
        write_rows(
            read_raw_table(table_path(cell.data.name), cell.data.cell_format),
            [*train[records].tolist(), *other_rows.tolist()],
            path,
        )
    load_or_create_key(key_path(path))


def write_policy(path: Path, text: str) -> None:
    """Write a policy file that only its owner may write."""
    path.write_text(text, encoding="utf-8")
    revoke_write_access(path)


def format_policy(
    keys: Mapping[str, object],
    allow: Mapping[str, object],
    table: TableSchema | None = None,
    evaluation: Mapping[str, object] | None = None,
) -> str:
    """Format a policy file of `keys`, [allow], the public description of a table, and [evaluation]."""
    return "".join(
        (
            f"{format_toml(keys)}\n",
            "" if table is None else f"{format_schema_toml(table, 'table')}\n",
            f"[allow]\n{format_toml(allow)}",
            f"\n[evaluation]\n{format_toml(evaluation)}" if evaluation else "",
        )
    )


def format_toml(keys: Mapping[str, object]) -> str:
    """Format a line of TOML for every key."""
    return "".join(f"{key} = {format_toml_value(value)}\n" for key, value in keys.items())


def _federation_key(cell: Cell) -> tuple[object, ...]:
    return (
        cell.data,
        cell.federation,
        cell.seed,
        cell.algorithm.trust,
        cell.privacy.relation,
        cell.privacy.unit,
        cell.evaluation and cell.evaluation.records,
    )
