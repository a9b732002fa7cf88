"""Worst-case canaries: a small run of the code under audit, and records that its claim is hardest for.

Queries stay at 0, a canary's increment is far above the clip, and in the two worlds it points in opposite
directions (replace-one), or is there or not (zero-out): as far apart as the neighbouring relation allows.
Canaries of one run have features of their own, so that their increments are orthogonal; noise is independent
between coordinates, so one run is as many independent trials (Steinke, Nasr & Jagielski 2023, "Privacy auditing
with one training run").

Where a canary takes part is written down from the definition of the order, not asked of the code under audit.

Real guards with ledgers in a folder, which the audit asks as a server would.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.clients.simulated import SiloEndpoint
from fedpriv.core.errors import InputError
from fedpriv.data.partition import group_consecutive
from fedpriv.loss.objective import Objective, Records
from fedpriv.noise.trust import CLIENT, RECORD, Unit
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.plan import Plan
from fedpriv.plan.task import DTYPES, ModelInputs, group_records
from fedpriv.scenario.schema import Cell, ModelSection
from fedpriv.silo.fingerprint import begin_ledger
from fedpriv.silo.guard import Guard
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import Policy, RunLimits
from fedpriv.silo.shard import Shard, ShardViews

_RUN_COUNT = 8  # that a policy of the audit pays for


class RestartableSilo(SiloEndpoint, Protocol):
    """A silo, asked as a guard is, whose process can end."""

    def restart(self) -> None:
        """The process ends, and another one goes on."""

    def back_up(self) -> Callable[[], None]:
        """Copy all that it keeps, as a backup of its disk does; the result puts it back."""

    def close(self) -> None: ...


class PublicOrderViews(ShardViews):
    """A shard whose persons are read in the order of their names, which is public.

    A guard's own order follows from the key of the run and is told to nobody.  What it releases is a mixture over
    orders, each as likely for a file as for its neighbour, and who knows which one was drawn sees all that others
    see, and more: a claim that stands in every one of them stands with a secret one, too.  So an adversary is
    given more here, and the audit knows in which rounds its canaries are.
    """

    def order(self, cell: Cell, key: bytes) -> None:
        """Leave persons in the order of their numbers."""


class PublicGuard(Guard):
    """A guard whose order is public.  No policy and no scenario leads here: only the audit builds it."""

    def __init__(self, policy: Policy, ledger: SiloLedger, shard: Shard) -> None:
        super().__init__(policy, ledger, shard)
        self._views = PublicOrderViews(shard)


class GuardedSilo:
    """One silo's `PublicGuard`, its ledger and its policy; `shard` is what it protects."""

    def __init__(self, policy: Policy, cell: Cell, shard: Shard) -> None:
        self._cell = json.dumps(cell.canonical_data(), sort_keys=True)
        self._policy, self._shard = policy, shard
        begin_ledger(policy, shard)
        self._ledger, self._guard = self._open()

    def restart(self) -> None:
        """The guard's process ends, and another one goes on from the ledger."""
        self._ledger.close()
        self._ledger, self._guard = self._open()

    def back_up(self) -> Callable[[], None]:
        """Ledger, mark and key: a machine that is restored from its backup has all of them restored."""
        self._ledger.close()
        kept = {path: path.read_bytes() for path in self._files()}
        self._ledger, self._guard = self._open()

        def put_back() -> None:
            self._ledger.close()
            for path in self._files() - kept.keys():
                path.unlink()
            for path, content in kept.items():
                path.write_bytes(content)
            self._ledger, self._guard = self._open()

        return put_back

    def _files(self) -> set[Path]:
        ledger = self._policy.ledger
        return set(ledger.parent.glob(f"{ledger.name}*"))

    def close(self) -> None:
        self._ledger.close()

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """Return what leaves in round t of a run; RunError for a refusal."""
        return self._guard.answer(run, self._cell, t, query, keys)

    def public_key(self, run: str) -> bytes:
        return self._guard.public_key(run, self._cell)

    def _open(self) -> tuple[SiloLedger, Guard]:
        ledger = SiloLedger(self._policy.ledger)
        return ledger, PublicGuard(self._policy, ledger, self._shard)


def open_guarded_silos(folder: Path, cell: Cell, plan: Plan, shards: Sequence[Shard]) -> list[GuardedSilo]:
    """The guards of silos 0, 1, … with these shards."""
    allow = _make_limits(cell, plan)
    policies = [
        Policy(
            silo=number,
            shard=folder / f"{number}.npz",
            classes=CLASS_COUNT,
            ledger=folder / f"{number}.sqlite",
            socket=folder / f"{number}.sock",
            allow=allow,
        )
        for number in range(len(shards))
    ]
    return [GuardedSilo(policy, cell, shard) for policy, shard in zip(policies, shards, strict=True)]


def _make_limits(cell: Cell, plan: Plan) -> RunLimits:
    """A policy no narrower than the scenario: the audit is of what guards answer, not of their refusals."""
    rounds = plan.schedule.rounds
    target = cell.target_mu
    assert target is not None  # a cell without noise claims nothing
    known, secret = {"budget": target * _RUN_COUNT}, {"budget": 1e6, "slack": 0.1, "slack_per_run": 1e-5}
    return RunLimits.model_validate(
        {
            "trust": cell.algorithm.trust,
            "relation": cell.privacy.relation,
            "unit": cell.privacy.unit,
            **(secret if cell.schedule.secret else known),  # paid for as if they were known, and more
            "clip": max(plan.estimator.round(t).max_contribution for t in range(1, rounds + 1)),
            "rounds": rounds,
            "query": sys.float_info.max,  # of what is asked, nothing is refused for its size
            "silos": len(plan.weights) if len(plan.weights) > 1 else None,
        }
    )


FAR_NORM = 1e4
"""The norm of a canary's features: far above a clip of 1, so that a missing clip cannot go unseen."""
CLASS_COUNT = 2
_RECORDS_PER_PERSON, _EXCESS_FACTOR = (
    4,
    3,
)  # of a person: at most so many count, and so many times as many are there
_CLIP = 1.0  # where a scenario takes its clip from the loss's constants, which are not the canaries'


def make_audit_cell(cell: Cell, mu: float, rounds: int, silos: int, batch: int, epochs: int = 1) -> Cell:
    """The cell cut to a size that can be repeated, on a linear model, recalibrated to `mu` by the same code.

    Persons and clients keep a few records each; where silos come from does not matter to who they are.
    """
    size = {"rounds": rounds, "silos": silos, "batch": batch, "epochs": epochs}
    if cell.federation.clients is not None:  # whose passes are said by how many there are
        size = {"rounds": rounds, "clients": rounds // epochs * batch, "cohort": batch}
    whole: dict[str, Any] = {"samples": None, "size_skew": None, "batches": None, "drop_out": 0.0, "away": {}}
    federation = cell.federation.model_copy(update={**size, **whole})
    few = None if cell.privacy.records is None else min(cell.privacy.records, _RECORDS_PER_PERSON)
    target = {"mu": mu, "rho": None, "zcdp": None, "epsilon": None, "records": few, "shares": None}
    privacy = cell.privacy.model_copy(update=target)
    run = cell.run.model_copy(
        update={
            "device": "cpu", "noise": "per-silo", "goldstein_radius": None, "per_silo": False, "metrics": (),
            "arithmetic": "float",
        }
    )  # fmt: skip
    data = cell.data.model_copy(update={"partition": "iid", "concentration": None, "shards": None})
    algorithm = cell.algorithm
    if getattr(algorithm.settings, "clip", _CLIP) in ("lipschitz", None):
        algorithm = algorithm.model_copy(update={"clip": _CLIP})
    model = ModelSection.model_validate({"name": "softmax-regression", "feature_norm": FAR_NORM})
    return cell.derive_cell(privacy, federation, algorithm, data=data, model=model, run=run)


def make_canary_objective(cell: Cell, features: int) -> Objective:
    """The small model's loss over records of so many features, as the silos' own code builds it; and a bias."""
    return cell.model.row.objective((features + 1,), CLASS_COUNT, DTYPES[cell.run.dtype], cell.model.settings)


def rows_by_round(cell: Cell) -> list[range]:
    """The rows of a silo's order that rounds 1, 2, … read, by definition: each batch once, one after another.

    Every pass has the same order, and so have the turns of cohorts of clients.  InputError for a scenario of no
    fixed order with records in every round.
    """
    schedule = cell.schedule
    if not isinstance(schedule, FixedOrder):
        raise InputError(
            'the audit\'s canaries are made for a fixed order with records in every round: sampling = "fixed"'
        )
    (size, *_), read, federation = cell.batch_sizes, 0, cell.federation
    rows = []
    for t in range(1, schedule.rounds + 1):
        batches = schedule.batch_counts[t - 1] if schedule.batch_counts else 1
        rows.append(range(read * size, (read + batches) * size))
        read += batches
        if not schedule.batch_counts:
            read %= federation.rounds_per_epoch
    return rows


def why_misread(cell: Cell, rows: Sequence[range]) -> str | None:
    """Where the schedule that silos follow is not the one that the claim is about; None if nowhere."""
    size = cell.batch_sizes[0]
    for t, defined in enumerate(rows, start=1):
        batches = cell.schedule.batches(t) if isinstance(cell.schedule, FixedOrder) else range(0)
        read = range(batches.start * size, batches.stop * size)
        if read != defined:
            wanted = f"{defined.start} to {defined.stop - 1}"
            return f"round {t} reads records {read.start} to {read.stop - 1}, not {wanted}"
    return None


@dataclass(frozen=True)
class CanaryLayout:
    """In which round each canary takes part, and in which row of the silo's order: (n,) each."""

    rounds: NDArray[np.int64]
    row_indices: NDArray[np.int64]
    row_count: int

    @staticmethod
    def from_rows(passes: Sequence[range], heaviest: int, canaries: int, batch: int) -> "CanaryLayout":
        """As many as fit in round `heaviest`, where one weighs most; the others spread over the other rounds.

        Of rounds that read the same rows, the first one stands for all.
        """
        others = [t for t, read in enumerate(passes, 1) if t != heaviest and read not in passes[: t - 1]]
        spread = [others[place % len(others)] for place in range(min(canaries - batch, batch * len(others)))]
        rounds = np.array([heaviest] * min(batch, canaries) + spread)
        places = [int(np.sum(rounds[:canary] == t)) for canary, t in enumerate(rounds.tolist())]
        row = [passes[t - 1].start + place for t, place in zip(rounds.tolist(), places, strict=True)]
        return CanaryLayout(rounds, np.array(row), max(read.stop for read in passes))

    def make_shard(self, present: NDArray[np.bool_], relation: str) -> Shard:
        """Zeros, and each canary in its row: its own feature, far longer than the clip.

        An absent one is zero under zero-out, and under replace-one a record whose increment points the other way.
        """
        count = len(self.rounds)
        images: NDArray[Any] = np.zeros((self.row_count, count), np.float32)
        labels = np.zeros(self.row_count, np.int64)
        there = np.arange(count) if relation == "replace-one" else np.flatnonzero(present)
        images[self.row_indices[there], there] = FAR_NORM
        labels[self.row_indices] = ~present
        return Shard(images, labels)


def expand_units(shard: Shard, unit: Unit) -> Shard:
    """The same with a unit for every row: where units are persons, each canary's has more records than count.

    All of them point one way, far beyond the clip, so that a clip of record by record adds them up.
    """
    if unit.name == RECORD.name:
        return shard
    there = shard.images.reshape(len(shard.labels), -1).any(axis=1)
    rows = np.repeat(np.arange(len(shard.labels)), np.where(there, _EXCESS_FACTOR * unit.max_records, 1))
    return Shard(shard.images[rows], shard.labels[rows], persons=rows)


def unit_records(shard: Shard, cell: Cell) -> Records:
    """A shard of canaries as the cell's model sees it, in its units; a client holds what counts, and all alike."""
    unit = cell.privacy.protected_unit
    if unit.name != CLIENT.name:
        return expand_units(shard, unit).model_records(cell)
    images, labels = shard.images.repeat(unit.max_records, axis=0), shard.labels.repeat(unit.max_records)
    records = ModelInputs.from_cell(cell).make_records(images, labels)
    return group_records(records, group_consecutive(len(records.labels), unit.max_records))


def zero_shard(rows: int, features: int) -> Shard:
    """Records of zeros, which move nothing but the bias."""
    return Shard(np.zeros((rows, features), np.float32), np.zeros(rows, np.int64))
