"""Statistics under audit: which of the two records that lie furthest apart was counted?

A release of statistics is charged for the distance of two indicators (`apart`, √2 clips of plain counts), not for
two clips.  Here real guards of a table count one of two raw records whose increments differ the most, a fair coin
says which, and the matched filter on what the trust setting's adversary sees has to guess.  Every trial is another
plan by its title, and so another charge with noise of its own.
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
"""So many canaries of another audit take as long as a release of statistics, of which each is one trial."""
_ROW_COUNT, _MAX_SILOS, _CANDIDATE_COUNT, _MAX_VALUES = 2, 3, 400, 2**24
_RELEASES_PER_LEDGER = 32
"""Releases of a guard: with every charge in its ledger the next one takes longer."""


def make_counts_cell(cell: Cell, mu: float) -> Cell:
    """The plan over two places in each of at most three silos, recalibrated to `mu` by the same code."""
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
    """Raw records (2, columns), whether each is there, and their increments (2, d)."""

    raw: NDArray[np.float64]
    is_present: tuple[bool, bool]
    increments: Tensor


def find_furthest_pair(cell: Cell, plan: Plan, seed: int) -> _WorldPair:
    """The two worlds of the relation that lie furthest apart, of a few hundred records in cells of all kinds.

    What is missed costs the audit power, and nothing else.
    """
    settings = cell.model.settings
    assert isinstance(settings, StatisticsSettings)
    draw = public_generator(seed, "audit cells")
    raw = np.zeros(
        (min(_CANDIDATE_COUNT, max(8, _MAX_VALUES // plan.objective.dimension)), len(_schema(cell).raw_columns))
    )
    for axis in (axis for table in settings.tables for axis in table.axes):
        kinds = _axis_values(axis)
        raw[:, axis.column] = draw.choice(kinds, len(raw))
        raw[: len(kinds), axis.column] = kinds[: len(raw)]
    records = ModelInputs.from_cell(cell).make_records(raw, np.zeros(len(raw), np.int64))
    batch, rows = Batch(records, torch.ones(len(raw)).double()), torch.arange(len(raw))
    found = plan.objective.per_record(Query((plan.objective.initial(),)), batch, rows, UNCLIPPED).double()
    if plan.relation == "zero-out":
        one = int(found.norm(dim=1).argmax())
        return _WorldPair(raw[[one, one]], (True, False), torch.stack([found[one], 0.0 * found[one]]))
    one, other = divmod(int(torch.cdist(found, found).argmax()), len(raw))
    return _WorldPair(raw[[one, other]], (True, True), found[[one, other]])


def _axis_values(axis: Axis) -> NDArray[np.float64]:
    """A value of every cell, extreme ones first."""
    if axis.edges is None:
        return np.array([0.0, *range((axis.words or 1) - 1, 0, -1), np.nan])
    edges = np.array(axis.edges)
    inside = (edges[1:] + edges[:-1]) / 2.0
    return np.array([edges[0], edges[-1], edges[0] - 1.0, edges[-1] + 1.0, np.nan, *inside])


class _CountingSilo(GuardedSilo):
    """A silo's guard over raw records, asked for one plan after another."""

    def __init__(
        self, folder: Path, number: int, cell: Cell, raw: NDArray[np.float64], *, is_present: bool
    ) -> None:
        schema, cells = _schema(cell), np.zeros((_ROW_COUNT, len(raw)))
        labels = np.full(_ROW_COUNT, -1) if schema.class_count else np.full(_ROW_COUNT, np.nan)
        if is_present:
            cells[0], labels[0] = raw, 0
        allow = {
            "trust": cell.algorithm.trust, "relation": cell.privacy.relation, "clip": 1.0, "rounds": 1,
            "budget": 1e6, "statistics": list(schema.raw_columns),
            "silos": cell.federation.silos if cell.federation.silos > 1 else None,
        }  # fmt: skip
        policy = Policy(
            silo=number, shard=folder / f"{number}.csv", table=schema, ledger=folder / f"{number}.sqlite",
            socket=folder / f"{number}.sock", allow=RunLimits.model_validate(allow),
        )  # fmt: skip
        super().__init__(policy, cell, Shard(np.zeros((_ROW_COUNT, schema.width)), labels, cells=cells))
        self._tree, self._run_name = cell.canonical_data(), ""

    def select_plan(self, number: int) -> None:
        """From now on it is plan `number` that is asked for."""
        self._run_name = f"run-{number}"
        self._cell = json.dumps({**self._tree, "title": self._run_name}, sort_keys=True)

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        return super().answer(self._run_name, t, query, keys)

    def public_key(self, run: str) -> bytes:
        return super().public_key(self._run_name)


def audit_counts(
    cell: Cell, mu: float, trials: int, failure: float, seed: int, steps: StepCounter
) -> FamilyResult:
    """The bound on μ that so many releases of a plan's tables show, against the claim `mu`."""
    small = make_counts_cell(cell, mu)
    plan = make_plan(small, make_schema_task(small, _schema(small)).objective, for_release=True)
    pair, (weight, std) = find_furthest_pair(small, plan, seed), canary_weight_and_std(plan, 1)
    apart = pair.increments[0] - pair.increments[1]
    middle = weight * float(pair.increments.mean(0) @ apart)
    present = public_generator(seed, "audit coins").random(trials) < 0.5
    scores, query = np.empty(trials), plan.objective.initial()
    with temporary_folder() as name:
        for first in range(0, trials, _RELEASES_PER_LEDGER):
            of_ledger, folder = range(first, min(trials, first + _RELEASES_PER_LEDGER)), Path(name) / f"{first}"
            folder.mkdir()
            worlds = [_open_world(folder / f"world-{world}", small, pair, world) for world in (0, 1)]
            for number in of_ledger:
                silos, run = worlds[0 if present[number] else 1], folder / f"run-{number}"
                for silo in silos:
                    silo.select_plan(number)
                run.mkdir()
                (released,) = collect_transcript(plan, run, silos, [query])
                scores[number] = float(released.double() @ apart) - middle
                steps()
            for silo in (each for world in worlds for each in world):
                silo.close()
    bound = max(
        mu_lower_bound(scores, present, failure / 2.0), bound_at_threshold(0.0, scores, present, failure / 2.0)
    )
    distance = float(apart.norm())
    would_see = detectable_noise_share(weight * distance / std, mu, trials, failure)
    return FamilyResult(bound, f"the two worlds that lie furthest apart, {distance:.4f} clips", mu, would_see)


def _open_world(folder: Path, cell: Cell, pair: _WorldPair, world: int) -> list[_CountingSilo]:
    """The guards of all silos, where silo 0 counts one of the two records, and nobody anything else."""
    folder.mkdir()
    return [
        _CountingSilo(folder, number, cell, pair.raw[world], is_present=number == 0 and pair.is_present[world])
        for number in range(cell.federation.silos)
    ]
