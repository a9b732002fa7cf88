"""Worst-case canaries, small cells that hold them, and real guards that answer queries on them.

A *canary* is a planted unit with two worlds, chosen by a fair coin: present or absent under zero-out, and one
increment or its opposite under replace-one.  A *cell* is a run with every key of its scenario resolved.  A *guard*
is the process of a silo that has its records and answers queries within a policy.  It stores its replies in a
ledger.  A *shard* is the records of a silo.  A *unit* is what the claim protects: a record, all records of a
person, or those of a client.  An *increment* is a unit's contribution to a round, which is clipped.

At zero weights a canary's increment before the clip is far above usual clips, so that its two worlds are as far
apart as the relation allows.  An absent canary under zero-out has features of zeros, and moves only the bias,
which no test of canaries reads.

Each canary of a run has a feature that no other has, so that increments are orthogonal but for the bias.  Noise is
independent between coordinates.  So each canary of a run is an independent trial (Steinke, Nasr & Jagielski 2023,
"Privacy auditing with one training run").
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
from fedpriv.papers.base import Settings
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.plan import Plan
from fedpriv.plan.task import DTYPES, ModelInputs, group_records
from fedpriv.scenario.schema import Cell, ModelSection
from fedpriv.silo.fingerprint import begin_ledger
from fedpriv.silo.guard import Guard
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import Policy, RunLimits
from fedpriv.silo.shard import Shard, ShardViews

_RUN_COUNT = 8  # budget of an audit's policy, in multiples of the claimed μ, which is enough for this many runs


class RestartableSilo(SiloEndpoint, Protocol):
    """Silo that answers queries as a guard does, and that can be restarted and restored from a backup."""

    def restart(self) -> None:
        """Open the silo again from its stored state, as a new process does, and continue its runs."""

    def back_up(self) -> Callable[[], None]:
        """Copy the stored state that runs change, and return a function that restores the copy."""

    def close(self) -> None: ...


class PublicOrderViews(ShardViews):
    """Forms of a shard whose persons are read in the public order of their numbers.

    A deployed guard derives a secret order of persons from the key of the run.  Its releases are a mixture over
    orders, each as likely for a file as for its neighbour, so that a claim that holds for every order holds for
    the secret one.  The audit tests the stronger adversary, who knows the order, and with it the rounds of
    canaries.
    """

    def order(self, cell: Cell, key: bytes) -> None:
        """Leave persons in the order of their numbers."""


class PublicGuard(Guard):
    """Guard that reads persons in a public order.  No policy and no scenario selects it, only the audit."""

    def __init__(self, policy: Policy, ledger: SiloLedger, shard: Shard) -> None:
        super().__init__(policy, ledger, shard)
        self._views = PublicOrderViews(shard)


class GuardedSilo:
    """Silo with a guard (`PublicGuard`), a ledger and a policy, which protects the records of `shard`."""

    def __init__(self, policy: Policy, cell: Cell, shard: Shard) -> None:
        self._cell = json.dumps(cell.canonical_data(), sort_keys=True)
        self._policy, self._shard = policy, shard
        begin_ledger(policy, shard)
        self._ledger, self._guard = self._open()

    def restart(self) -> None:
        """Close the ledger, and open another guard from it, as a new process does."""
        self._ledger.close()
        self._ledger, self._guard = self._open()

    def back_up(self) -> Callable[[], None]:
        """Copy the ledger and its rollback mark, and return a function that restores the copies.

        The ledger is closed for the copy, and opened again by a new guard.
        """
        self._ledger.close()
        contents = {path: path.read_bytes() for path in self._files()}
        self._ledger, self._guard = self._open()

        def restore() -> None:
            """Restore the copied files, delete newer ones, and open a guard from the copies."""
            self._ledger.close()
            for path in self._files() - contents.keys():
                path.unlink()
            for path, content in contents.items():
                path.write_bytes(content)
            self._ledger, self._guard = self._open()

        return restore

    def _files(self) -> set[Path]:
        ledger = self._policy.ledger
        return set(ledger.parent.glob(f"{ledger.name}*"))

    def close(self) -> None:
        self._ledger.close()

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """Return the reply of round t of a run.

        Raises:
            RunError: If the guard refuses.
        """
        return self._guard.answer(run, self._cell, t, query, keys)

    def public_key(self, run: str) -> bytes:
        return self._guard.public_key(run, self._cell)

    def _open(self) -> tuple[SiloLedger, Guard]:
        ledger = SiloLedger(self._policy.ledger)
        return ledger, PublicGuard(self._policy, ledger, self._shard)


def open_guarded_silos(folder: Path, cell: Cell, plan: Plan, shards: Sequence[Shard]) -> list[GuardedSilo]:
    """Open the guards of silos 0, 1, … with these shards."""
    allow = _make_limits(cell, plan)
    policies = [
        Policy(
            silo=silo_id,
            shard=folder / f"{silo_id}.npz",
            classes=CLASS_COUNT,
            ledger=folder / f"{silo_id}.sqlite",
            socket=folder / f"{silo_id}.sock",
            allow=allow,
        )
        for silo_id in range(len(shards))
    ]
    return [GuardedSilo(policy, cell, shard) for policy, shard in zip(policies, shards, strict=True)]


def _make_limits(cell: Cell, plan: Plan) -> RunLimits:
    """Make limits of a policy that allow the scenario, because the audit tests replies."""
    rounds = plan.schedule.rounds
    target_mu = cell.target_mu
    assert target_mu is not None  # a cell without noise claims nothing
    public_limits, secret_limits = (
        {"budget": target_mu * _RUN_COUNT},
        {"budget": 1e6, "slack": 0.1, "slack_per_run": 1e-5},
    )
    return RunLimits.model_validate(
        {
            "trust": cell.algorithm.trust,
            "relation": cell.privacy.relation,
            "unit": cell.privacy.unit,
            # The charge of secret rounds needs a slack.
            **(secret_limits if cell.schedule.secret else public_limits),
            "clip": max(plan.estimator.round(t).max_contribution for t in range(1, rounds + 1)),
            "rounds": rounds,
            "query": sys.float_info.max,  # no query is refused for its size
            "silos": len(plan.weights) if len(plan.weights) > 1 else None,
        }
    )


FAR_NORM = 1e4
"""Norm of a canary's features, far above a clip of 1, so that a missing clip is detected."""
CLASS_COUNT = 2
_RECORDS_PER_PERSON, _EXCESS_FACTOR = 4, 3
"""Most records of a person or client that count, and records of a canary's person for each of them."""
_TINY_MOVE = 1e-2 / FAR_NORM  # a canary's score changes by at most 0.01 if the model moves by so much
_CLIP = 1.0  # replaces a clip from constants of the scenario's loss, which do not hold for canaries


def make_audit_cell(cell: Cell, mu: float, rounds: int, silos: int, batch: int, epochs: int = 1) -> Cell:
    """Cut a cell to a small size on a linear model, recalibrated to `mu` by the code under audit.

    The privacy target becomes `mu`, and the noise follows from it.  The model becomes softmax regression, for
    which the increments of canaries are known.  A clip that follows from constants of the scenario's loss
    ("lipschitz" or "growing"), or is not set, becomes 1.  Sizes of the noise by round are those of the first
    rounds.  Smoothing and silos' own steps become tiny (`_audit_settings`).  Silos become equal, in size and in
    target, and none is absent.  At most four records of a person or client count.  Settings of [run] on metrics
    and on how a simulation computes get plain values, but its `dtype`, `passes`, `word` and `evaluations` stay.

    Args:
        cell: Cell under audit.
        mu: μ of the claim.
        rounds: Number of rounds, of all epochs together.
        silos: Number of silos, without effect on a cell with clients.
        batch: Number of units of a silo's batch, or of clients of a cohort.
        epochs: Number of passes over the records, or of turns of every client.
    """
    size = {"rounds": rounds, "silos": silos, "batch": batch, "epochs": epochs}
    if cell.federation.clients is not None:  # with cohorts of `batch` clients, their number determines the passes
        size = {"rounds": rounds, "clients": rounds // epochs * batch, "cohort": batch}
    resets: dict[str, Any] = {"samples": None, "size_skew": None, "batches": None, "drop_out": 0.0, "away": {}}
    federation = cell.federation.model_copy(update={**size, **resets})
    max_records = None if cell.privacy.records is None else min(cell.privacy.records, _RECORDS_PER_PERSON)
    target = {"mu": mu, "rho": None, "zcdp": None, "epsilon": None, "records": max_records, "shares": None}
    privacy = cell.privacy.model_copy(update=target)
    run = cell.run.model_copy(
        update={
            "device": "cpu", "noise": "per-silo", "goldstein_radius": None, "per_silo": False, "metrics": (),
            "arithmetic": "float",
        }
    )  # fmt: skip
    algorithm = cell.algorithm.model_copy(update=_audit_settings(cell.algorithm.settings, rounds))
    model = ModelSection.model_validate({"name": "softmax-regression", "feature_norm": FAR_NORM})
    return cell.derive_cell(
        privacy,
        federation,
        algorithm,
        data=cell.data.model_copy(update={"partition": "iid", "concentration": None, "shards": None}),
        model=model,
        run=run,
    )


def find_audit_clip(settings: Settings) -> float:
    """Return the clip of an audit: the number that the settings have, or 1.

    A name, such as "lipschitz", stands for a formula of the loss's constants.
    """
    clip = getattr(settings, "clip", None)
    return clip if isinstance(clip, float) else _CLIP


def _audit_settings(settings: Settings, rounds: int) -> dict[str, Any]:
    """Return the keys of an algorithm that differ in an audit, with their values there.

    Canaries reach the clip only at queries where the model is undecided.  So smoothing and silos' own steps are
    tiny (`Settings.keys_at_rest`).
    """
    sizes = getattr(settings, "noise_sizes", ())
    return {
        **({"clip": find_audit_clip(settings)} if hasattr(settings, "clip") else {}),
        **({"noise_sizes": sizes[:rounds]} if sizes else {}),
        **settings.keys_at_rest(_TINY_MOVE),
    }


def make_canary_objective(cell: Cell, features: int) -> Objective:
    """Build the small model's loss on `features` features and a bias, by the silos' own code."""
    return cell.model.row.objective((features + 1,), CLASS_COUNT, DTYPES[cell.run.dtype], cell.model.settings)


def rows_by_round(cell: Cell) -> list[range]:
    """Return the rows of a silo's order that rounds 1, 2, … read, by the definition of a fixed order.

    A batch is a number of consecutive rows, and a round reads one batch or several, one after another.  Passes
    have the same order.

    Returns:
        One range of row indices, from 0, for each round, for batches of the size of silo 0's.

    Raises:
        InputError: If the scenario has another schedule than a fixed order.
    """
    schedule = cell.schedule
    if not isinstance(schedule, FixedOrder):
        raise InputError(
            "the audit's canaries are made for a fixed order with records in every round: "
            'sampling = "fixed", and order = "fixed" where an algorithm has this key'
        )
    (batch_size, *_), next_batch, federation = cell.batch_sizes, 0, cell.federation
    rows = []
    for t in range(1, schedule.rounds + 1):
        batches = schedule.batch_counts[t - 1] if schedule.batch_counts else 1
        rows.append(range(next_batch * batch_size, (next_batch + batches) * batch_size))
        next_batch += batches
        # Rounds of several batches are a single pass, in which no batch comes again.
        if not schedule.batch_counts:
            next_batch %= federation.rounds_per_epoch
    return rows


def why_misread(cell: Cell, rows: Sequence[range]) -> str | None:
    """Describe the first round in which the silos' schedule reads other rows, or return None if all agree.

    The schedule's `batches` are code under audit, and the expected rows are computed without them.
    """
    batch_size = cell.batch_sizes[0]
    for t, expected in enumerate(rows, start=1):
        batches = cell.schedule.batches(t) if isinstance(cell.schedule, FixedOrder) else range(0)
        actual = range(batches.start * batch_size, batches.stop * batch_size)
        if actual != expected:
            actual_rows = f"records {actual.start} to {actual.stop - 1}" if actual else "no records"
            return f"round {t} reads {actual_rows}, not {expected.start} to {expected.stop - 1}"
    return None


@dataclass(frozen=True)
class CanaryLayout:
    """Round and row index of each of n canaries in silo 0."""

    rounds: NDArray[np.int64]
    """(n,), the round for which the canary is planted, from 1, or 0 for a canary in secret rounds."""
    row_indices: NDArray[np.int64]
    """(n,), indices in the silo's order."""
    row_count: int
    """Number of rows of a silo, with a canary or without."""

    @staticmethod
    def from_rows(passes: Sequence[range], heaviest: int, canaries: int, batch: int) -> "CanaryLayout":
        """Put up to `batch` canaries into round `heaviest`, and spread the rest over the other rounds.

        The other rounds get canaries in turn, at most `batch` each, and none if they read the same rows as an
        earlier round.  The canaries of a round have its first rows.

        Args:
            passes: Rows of the silo's order that rounds 1, 2, … read.
            heaviest: Round that gets its canaries first, from 1.
            canaries: Number of canaries, of which fewer are made if the other rounds are full.
            batch: Largest number of canaries of a round, at most its number of rows.
        """
        other_rounds = [
            t
            for t, rows_of_round in enumerate(passes, 1)
            if t != heaviest and rows_of_round not in passes[: t - 1]
        ]
        spread_rounds = [
            other_rounds[index % len(other_rounds)]
            for index in range(min(canaries - batch, batch * len(other_rounds)))
        ]
        rounds = np.array([heaviest] * min(batch, canaries) + spread_rounds)
        # Number of earlier canaries of the same round.
        offsets = [int(np.sum(rounds[:canary] == t)) for canary, t in enumerate(rounds.tolist())]
        row_indices = [passes[t - 1].start + index for t, index in zip(rounds.tolist(), offsets, strict=True)]
        return CanaryLayout(rounds, np.array(row_indices), max(rows_of_round.stop for rows_of_round in passes))

    def make_shard(self, present: NDArray[np.bool_], relation: str) -> Shard:
        """Make a shard whose canaries have `FAR_NORM` in their feature, and whose other records are zero.

        Canary i has feature i, so that row `row_indices[i]` of the (rows, n) features is `FAR_NORM` in column i,
        with label 0.  An absent canary has label 1.  It is zero under zero-out, and under replace-one it keeps its
        feature, so that its increment at zero weights is the opposite.

        Args:
            present: (n,), whether each canary is present.
            relation: Neighbouring relation, "zero-out" or "replace-one".
        """
        canary_count = len(self.rounds)
        images: NDArray[Any] = np.zeros((self.row_count, canary_count), np.float32)
        labels = np.zeros(self.row_count, np.int64)
        nonzero = np.arange(canary_count) if relation == "replace-one" else np.flatnonzero(present)
        images[self.row_indices[nonzero], nonzero] = FAR_NORM
        labels[self.row_indices] = ~present
        return Shard(images, labels)


def expand_units(shard: Shard, unit: Unit) -> Shard:
    """Return a shard with one unit for each row of `shard`, which is `shard` itself if units are records.

    The person of a canary that is not zero has three times as many records as count, and any other person has
    one.  Records of a canary are equal and far beyond the clip, so that a clip of each record in place of each
    person would add them up.
    """
    if unit.name == RECORD.name:
        return shard
    is_canary = shard.images.reshape(len(shard.labels), -1).any(axis=1)
    rows = np.repeat(np.arange(len(shard.labels)), np.where(is_canary, _EXCESS_FACTOR * unit.max_records, 1))
    return Shard(shard.images[rows], shard.labels[rows], persons=rows)


def unit_records(shard: Shard, cell: Cell) -> Records:
    """Convert a shard of canaries to inputs of the cell's model, grouped by the unit of protection.

    A row of the shard becomes a record, a person (`expand_units`), or a client, who has the largest number of
    records that count, all equal.
    """
    unit = cell.privacy.protected_unit
    if unit.name != CLIENT.name:
        return expand_units(shard, unit).model_records(cell)
    images, labels = shard.images.repeat(unit.max_records, axis=0), shard.labels.repeat(unit.max_records)
    records = ModelInputs.from_cell(cell).make_records(images, labels)
    return group_records(records, group_consecutive(len(records.labels), unit.max_records))


def zero_shard(rows: int, features: int) -> Shard:
    """Make a shard of zeros, which move only the bias."""
    return Shard(np.zeros((rows, features), np.float32), np.zeros(rows, np.int64))
