"""Real guards with ledgers in a folder, which the audit asks as a server would."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fedpriv.addons.audit.canaries import CLASSES
from fedpriv.clients.simulated import Answering
from fedpriv.plan.plan import Plan
from fedpriv.scenario.schema import Cell
from fedpriv.silo.fingerprint import begin_ledger
from fedpriv.silo.guard import Guard
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import Allowed, Policy
from fedpriv.silo.shard import Shard
from fedpriv.silo.views import Views

_RUNS = 8  # that a policy of the audit pays for


class Restartable(Answering, Protocol):
    """A silo, asked as a guard is, whose process can end."""

    def restart(self) -> None:
        """The process ends, and another one goes on."""

    def keep(self) -> Callable[[], None]:
        """Copy all that it keeps, as a backup of its disk does; the result puts it back."""

    def close(self) -> None: ...


class InFileOrder(Views):
    """A shard whose persons are read in the order of their names, which is public.

    A guard's own order follows from the key of the run and is told to nobody.  What it releases is a mixture over
    orders, each as likely for a file as for its neighbour, and who knows which one was drawn sees all that others
    see, and more: a claim that stands in every one of them stands with a secret one, too.  So an adversary is
    given more here, and the audit knows in which rounds its canaries are.
    """

    def order(self, cell: Cell, key: bytes) -> None:
        """Every place has the person of its number."""


class PublicGuard(Guard):
    """A guard whose order is public.  No policy and no scenario leads here: only the audit builds it."""

    def __init__(self, policy: Policy, ledger: SiloLedger, shard: Shard) -> None:
        super().__init__(policy, ledger, shard)
        self._views = InFileOrder(shard)


class GuardedSilo:
    """One silo's `PublicGuard`, its ledger and its policy; `shard` is what it protects."""

    def __init__(self, folder: Path, number: int, cell: Cell, plan: Plan, shard: Shard) -> None:
        self._cell = json.dumps(cell.canonical(), sort_keys=True)
        self._shard = shard
        self._policy = Policy(
            silo=number,
            shard=folder / f"{number}.npz",
            classes=CLASSES,
            ledger=folder / f"{number}.sqlite",
            socket=folder / f"{number}.sock",
            allow=_allowed(cell, plan),
        )
        begin_ledger(self._policy, shard)
        self._ledger, self._guard = self._opened()

    def restart(self) -> None:
        """The guard's process ends, and another one goes on from the ledger."""
        self._ledger.close()
        self._ledger, self._guard = self._opened()

    def keep(self) -> Callable[[], None]:
        """Ledger, mark and key: a machine that is restored from its backup has all of them restored."""
        self._ledger.close()
        kept = {path: path.read_bytes() for path in self._files()}
        self._ledger, self._guard = self._opened()

        def put_back() -> None:
            self._ledger.close()
            for path in self._files() - kept.keys():
                path.unlink()
            for path, content in kept.items():
                path.write_bytes(content)
            self._ledger, self._guard = self._opened()

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

    def _opened(self) -> tuple[SiloLedger, Guard]:
        ledger = SiloLedger(self._policy.ledger)
        return ledger, PublicGuard(self._policy, ledger, self._shard)


def guarded(folder: Path, cell: Cell, plan: Plan, shards: Sequence[Shard]) -> list[GuardedSilo]:
    """The guards of silos 0, 1, … with these shards."""
    return [GuardedSilo(folder, number, cell, plan, shard) for number, shard in enumerate(shards)]


def _allowed(cell: Cell, plan: Plan) -> Allowed:
    """A policy no narrower than the scenario: the audit is of what guards answer, not of their refusals."""
    rounds = plan.schedule.rounds
    target = cell.target
    assert target is not None  # a cell without noise claims nothing
    largest = max(plan.estimator.round(t).largest for t in range(1, rounds + 1))
    return Allowed.model_validate(
        {
            "trust": cell.algorithm.trust,
            "relation": cell.privacy.relation,
            "unit": cell.privacy.unit,
            **_slack(cell, target),
            "clip": largest,
            "rounds": rounds,
            "query": sys.float_info.max,  # of what is asked, nothing is refused for its size
            "silos": len(plan.weights) if len(plan.weights) > 1 else None,
        }
    )


def _slack(cell: Cell, target: float) -> dict[str, float]:
    """Slack that pays for a few runs; secret rounds are paid for as if they were known, and more."""
    if not cell.schedule.secret:
        return {"budget": target * _RUNS}
    return {"budget": 1e6, "slack": 0.1, "slack_per_run": 1e-5}
