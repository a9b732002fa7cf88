"""Audit of statistics, by two records whose increments lie furthest apart.

A plan of statistics has tables of counts, of sums of counts, or of moments.  An axis of a table divides the values
of a column into cells.  A *run* of such a plan is one release of all its tables.  Its scenario, with every key
resolved, is a `Cell`.  A *guard* is the process of a silo that answers its query and charges its ledger.

The increment of a record is its clipped contribution to a release, (d,) with a norm of at most 1 clip.  Under
replace-one a release is charged for the largest distance of two increments.

The audit looks for the two raw records whose increments differ most: one world has the first record, the other
world the second.  Under zero-out the second world has none.  In each trial a fair coin selects the world that real
guards of a table count, and the matched filter on the adversary's view guesses the coin.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.addons.audit.canaries import GuardedSilo
from fedpriv.addons.audit.families import FamilyResult, StepCounter, detectable_noise_share
from fedpriv.addons.audit.statistics import bound_at_threshold, canary_weight_and_std, mu_lower_bound
from fedpriv.addons.audit.transcripts import collect_transcript, temporary_folder
from fedpriv.addons.statistics.indicators import Axis, StatisticsSettings
from fedpriv.core.random import public_generator
from fedpriv.data.schema import TableSchema
from fedpriv.loss.objective import UNCLIPPED, Batch, Query
from fedpriv.noise.trust import RECORD
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import ModelInputs, make_schema_task
from fedpriv.scenario.schema import Cell
from fedpriv.silo.policy import Policy, RunLimits
from fedpriv.silo.shard import Shard

COUNTS = "counts"
CANARIES_PER_RELEASE = 16
"""Canaries of another audit that take about as long as one release of statistics, which is one trial."""
_ROW_COUNT, _MAX_SILOS, _CANDIDATE_COUNT, _MAX_VALUES = 2, 3, 400, 2**24
_RELEASES_PER_LEDGER = 32
"""Largest number of releases of a guard, because every charge in a ledger slows down the next one."""


def make_counts_cell(cell: Cell, mu: float) -> Cell:
    """Cut a plan to two rows in each of at most three silos, recalibrated to `mu` by the code under audit.

    The unit of protection is a record.  The tables of the plan, and so the length d of a release, stay the same.
    """
    schema, silos = _schema(cell), min(cell.federation.silos, _MAX_SILOS)
    table = schema.model_copy(update={"sites": schema.sites[:silos]}) if schema.sites else schema
    federation = cell.federation.model_copy(
        update={
            "silos": silos,
            "batches": (_ROW_COUNT,) * silos,
            "batch": None,
            "samples": None,
            "size_skew": None,
        }
    )
    target = {"mu": mu, "rho": None, "zcdp": None, "epsilon": None, "unit": RECORD.name, "records": None}
    data = cell.data.model_copy(update={"name": "audit.csv", "table": table})
    run = cell.run.model_copy(update={"arithmetic": "float", "noise": "per-silo", "device": "cpu"})
    return cell.derive_cell(
        cell.privacy.model_copy(update=target), federation, cell.algorithm, data=data, model=cell.model, run=run
    )


def _schema(cell: Cell) -> TableSchema:
    schema = cell.data.table_schema
    assert schema is not None  # a cell of statistics has one
    return schema


class _WorldPair(NamedTuple):
    """Two worlds, each with one raw record or without a record."""

    raw: NDArray[np.float64]
    """Raw record of each world, (2, columns of the table)."""
    is_present: tuple[bool, bool]
    """Flags, one a world, False for a world without its record."""
    increments: Tensor
    """Increment of each world in clips, (2, d), zeros without a record."""


def find_furthest_pair(cell: Cell, plan: Plan, seed: int) -> _WorldPair:
    """Find the two worlds of the relation that lie furthest apart, among up to 400 candidate records.

    Distance is the l2 distance of increments, in clips.  Under zero-out the second world is the absence of the
    record with the longest increment.  In the column of an axis the first candidates have the values of
    `_axis_values` in turn, as far as there are enough candidates, and the others have random ones of them.  If
    axes share a column, the last one decides.  A pair that is further apart may be missed, which costs power only.
    """
    settings = cell.model.settings
    assert isinstance(settings, StatisticsSettings)
    draw = public_generator(seed, "audit cells")
    raw = np.zeros(
        (min(_CANDIDATE_COUNT, max(8, _MAX_VALUES // plan.objective.dimension)), len(_schema(cell).raw_columns))
    )
    for axis in (axis for table in settings.tables for axis in table.axes):
        cell_values = _axis_values(axis)
        raw[:, axis.column] = draw.choice(cell_values, len(raw))
        raw[: len(cell_values), axis.column] = cell_values[: len(raw)]
    records = ModelInputs.from_cell(cell).make_records(raw, np.zeros(len(raw), np.int64))
    batch, rows = Batch(records, torch.ones(len(raw)).double()), torch.arange(len(raw))
    increments = plan.objective.per_record(Query((plan.objective.initial(),)), batch, rows, UNCLIPPED).double()
    if plan.relation == "zero-out":
        first_row = int(increments.norm(dim=1).argmax())
        return _WorldPair(
            raw[[first_row, first_row]],
            (True, False),
            torch.stack([increments[first_row], 0.0 * increments[first_row]]),
        )
    first_row, second_row = divmod(int(torch.cdist(increments, increments).argmax()), len(raw))
    return _WorldPair(raw[[first_row, second_row]], (True, True), increments[[first_row, second_row]])


def _axis_values(axis: Axis) -> NDArray[np.float64]:
    """Return raw values in the cells of an axis, the outermost edges or codes first.

    NaN is in the cell of missing values.  An axis without edges has the codes 0 … words - 1 of a vocabulary.
    """
    if axis.edges is None:
        return np.array([0.0, *range((axis.words or 1) - 1, 0, -1), np.nan])
    edges = np.array(axis.edges)
    return np.array(
        [edges[0], edges[-1], edges[0] - 1.0, edges[-1] + 1.0, np.nan, *(edges[1:] + edges[:-1]) / 2.0]
    )


class _CountingSilo(GuardedSilo):
    """Silo whose guard counts raw records, in one run after another."""

    def __init__(
        self, folder: Path, silo_id: int, cell: Cell, raw: NDArray[np.float64], *, is_present: bool
    ) -> None:
        """Open the guard of a silo whose table has the record `raw`, (columns,), in row 0 if `is_present`.

        The label -1, or NaN in a regression, marks rows that do not count.  Statistics read the raw record, so
        that the features of the shard are zeros.
        """
        schema, cells = _schema(cell), np.zeros((_ROW_COUNT, len(raw)))
        labels = np.full(_ROW_COUNT, -1) if schema.class_count else np.full(_ROW_COUNT, np.nan)
        if is_present:
            cells[0], labels[0] = raw, 0
        limits = {
            "trust": cell.algorithm.trust, "relation": cell.privacy.relation, "clip": 1.0, "rounds": 1,
            "budget": 1e6, "statistics": list(schema.raw_columns),
            "silos": cell.federation.silos if cell.federation.silos > 1 else None,
        }  # fmt: skip
        policy = Policy(
            silo=silo_id, shard=folder / f"{silo_id}.csv", table=schema, ledger=folder / f"{silo_id}.sqlite",
            socket=folder / f"{silo_id}.sock", allow=RunLimits.model_validate(limits),
        )  # fmt: skip
        super().__init__(policy, cell, Shard(np.zeros((_ROW_COUNT, schema.width)), labels, cells=cells))
        self._tree, self._run_name = cell.canonical_data(), ""

    def select_plan(self, number: int) -> None:
        """Select the run of all later calls by its number."""
        self._run_name = f"run-{number}"
        self._cell = json.dumps({**self._tree, "title": self._run_name}, sort_keys=True)

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        return super().answer(self._run_name, t, query, keys)

    def public_key(self, run: str) -> bytes:
        return super().public_key(self._run_name)


def audit_counts(
    cell: Cell, mu: float, trials: int, failure: float, seed: int, steps: StepCounter
) -> FamilyResult:
    """Return the lower bound on μ that `trials` releases of a plan's tables show, with the claim `mu`.

    In each trial a fair coin selects world 0 or 1 of the furthest pair, with increments x₀ and x₁.  The score of a
    release r (d,) is ⟨r - weight · (x₀ + x₁)/2, x₀ - x₁⟩, with the weight of a record in the release.  But for the
    noise it is positive in world 0 and negative in world 1.  The bound is the larger one of those at threshold 0
    and at a threshold that a quarter of the trials chooses, with half of `failure` each.  The result also has the
    largest share of the noise at which as many trials would refute the claim with probability 95 %.
    """
    small_cell = make_counts_cell(cell, mu)
    plan = make_plan(small_cell, make_schema_task(small_cell, _schema(small_cell)).objective, for_release=True)
    pair, (weight, std) = find_furthest_pair(small_cell, plan, seed), canary_weight_and_std(plan, 1)
    difference = pair.increments[0] - pair.increments[1]
    midpoint = weight * float(pair.increments.mean(0) @ difference)
    present = public_generator(seed, "audit coins").random(trials) < 0.5
    scores, query = np.empty(trials), plan.objective.initial()
    with temporary_folder() as name:
        # The guards of both worlds are opened anew, with empty ledgers, after every 32 releases.
        for first_number in range(0, trials, _RELEASES_PER_LEDGER):
            numbers, folder = (
                range(first_number, min(trials, first_number + _RELEASES_PER_LEDGER)),
                Path(name) / f"{first_number}",
            )
            folder.mkdir()
            worlds = [_open_world(folder / f"world-{world}", small_cell, pair, world) for world in (0, 1)]
            for plan_number in numbers:
                silos, run = worlds[0 if present[plan_number] else 1], folder / f"run-{plan_number}"
                for silo in silos:
                    silo.select_plan(plan_number)
                run.mkdir()
                (released,) = collect_transcript(plan, run, silos, [query])
                scores[plan_number] = float(released.double() @ difference) - midpoint
                steps()
            for silo in (opened_silo for world in worlds for opened_silo in world):
                silo.close()
    bound = max(
        mu_lower_bound(scores, present, failure / 2.0), bound_at_threshold(0.0, scores, present, failure / 2.0)
    )
    distance = float(difference.norm())
    would_see = detectable_noise_share(np.array([weight * distance / std / 2.0]), mu, trials, failure)
    return FamilyResult(bound, f"the two worlds that lie furthest apart, {distance:.4f} clips", mu, would_see)


def _open_world(folder: Path, cell: Cell, pair: _WorldPair, world: int) -> list[_CountingSilo]:
    """Open the guards of all silos, where silo 0 counts a world's record, if it has one.

    The other silos count nothing.
    """
    folder.mkdir()
    return [
        _CountingSilo(folder, silo_id, cell, pair.raw[world], is_present=silo_id == 0 and pair.is_present[world])
        for silo_id in range(cell.federation.silos)
    ]
