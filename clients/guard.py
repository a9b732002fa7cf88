"""The silo's guard: it answers what its own policy allows, whatever the server sends.

It runs in the silo's own process and installation (clients/daemon.py), because the app that a server ships could
replace any guard inside it.  Records, keys, ledger and policy never leave that process.
"""

import hashlib
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clients.ledger import Answer, Run, SiloLedger
from clients.policy import Policy, unaccountable
from clients.silo import Silo
from clients.state import pack, unpack
from fedpriv.data.own import check_records
from fedpriv.errors import InputError, RunError
from fedpriv.federation import DTYPES
from fedpriv.objectives import Objective, Records
from fedpriv.plan import plan_of
from fedpriv.randomness import KeyedNormal, system_key
from fedpriv.scenario import Cell, resolve_cell
from fedpriv.secure_aggregation.identity import identity_of
from fedpriv.trust import trust_named

_ROUNDING = 1 + 1e-9
_MOST_SILOS = 1_000_000  # a plan holds a weight for each, and a server may claim any number


@dataclass(frozen=True)
class Shard:
    """A silo's records as they lie on its disk, in the order in which they are read."""

    images: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    labels: np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Guard:
    """Answers queries for one silo.

    Guarantee: over the lifetime of the ledger, everything that leaves through `answer` is `allow.budget`-GDP for
    each record of the shard under `allow.relation`, against a server that may send anything: increments are
    clipped here, every round is answered once (a repetition gets the same bytes), the noise is drawn here from
    a key of the operating system, and a run whose price, composed with all runs before, exceeds the budget is
    never opened.  Refusals depend on the query, the policy and the ledger, never on the records.
    With `allow.trust = "trusted"` sums may leave without noise, and `budget` bounds what the server publishes if
    it adds the noise that the scenario says: the silo trusts the server for that, and for nothing else.
    With `allow.trust = "secure-aggregation"` sums may leave masked and with this silo's share of the noise, and
    `budget` bounds what their sum over silos gives away, if all other silos add their shares and the public keys
    that the server relays are theirs, which is checked where the policy has `peers`.  Without that permission such
    a run is charged for this silo's share alone.
    With `allow.noise_free` nothing is guaranteed; a run without noise is entered at its price, which is infinite,
    so that a policy which takes the permission back opens no further run.
    """

    def __init__(self, policy: Policy, ledger: SiloLedger, shard: Shard) -> None:
        self._policy, self._ledger, self._shard = policy, ledger, shard
        self._identity = identity_of(policy.silo, policy.identity, policy.peers)
        self._open: dict[str, Silo] = {}

    def public_key(self, run_id: str, cell_json: str) -> bytes:
        """This silo's signed public key for the masks of a run, on record as its answer to round 0.

        RunError as below.
        """
        with self._ledger.transaction():
            run = self._opened(run_id, _sorted(cell_json))
            if (known := self._ledger.answer(run_id, 0)) is not None:
                return known.reply
            if run.key is None:
                raise self._refusal("a public key: this run is over")
            silo = self._silo(run_id, run.cell, run.key)
            if silo.plan.grid is None:
                raise self._refusal("a public key: this run has no masks")
            card = self._identity.card(run_id, silo.masker.public)
            self._ledger.record(run_id, 0, Answer(b"", card), run.state or pack(silo.start()))
        return card

    def answer(self, run_id: str, cell_json: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """What leaves in round t of a run; RunError, with the reason, for what is not allowed.

        `keys` are the signed public keys of all silos, for a run whose messages are masked.
        """
        with self._ledger.transaction():
            run = self._opened(run_id, _sorted(cell_json))
            digest = _digest(query, keys)
            if (known := self._ledger.answer(run_id, t)) is not None:
                if known.query != digest:
                    raise self._refusal(f"round {t} was answered already, for another query")
                masked = _cell(run.cell).algorithm.setting.masked
                return _vector(known.reply, torch.uint64 if masked else query.dtype)
            if run.key is None:
                raise self._refusal(f"round {t}: this run is over")
            silo = self._silo(run_id, run.cell, run.key)
            state = silo.start() if run.state is None else unpack(run.state, silo)
            release, after = silo.answer(state, t, query)
            public = self._identity.keys(run_id, keys, len(silo.plan.weights)) if silo.plan.grid else b""
            leaving = silo.message(release.vector, t, public)
            self._ledger.record(run_id, t, Answer(digest, leaving.numpy().tobytes()), pack(after))
            if t == silo.plan.schedule.rounds:
                self._ledger.wipe_key(run_id)
        return leaving

    def _opened(self, run_id: str, cell_json: str) -> Run:
        run = self._ledger.run(run_id) or self._new_run(run_id, cell_json)
        if run.cell != cell_json:
            raise self._refusal("the scenario is not the one this run was opened with")
        return run

    def _new_run(self, run_id: str, cell_json: str) -> Run:
        """Open a run: its whole price is charged before its first release."""
        price = self._price(_cell(cell_json))
        total, budget = math.hypot(*self._ledger.prices(), price), self._policy.allow.budget
        if total > budget * _ROUNDING and not self._policy.allow.noise_free:
            raise self._refusal(
                f"the run costs mu = {price:.4g}, with all before {total:.4g}; the budget is {budget:g}"
            )
        key = system_key()
        self._ledger.open_run(run_id, cell_json, price, key)
        return Run(cell_json, price, key, None)

    def _price(self, cell: Cell) -> float:
        """μ of this silo's whole stream, by this installation's accounting; RunError if the policy is exceeded."""
        allow, number, federation = self._policy.allow, self._policy.silo, cell.federation
        if not number < federation.silos <= _MOST_SILOS:
            raise self._refusal(f"the scenario has {federation.silos} silos, and this is number {number}")
        if (reason := unaccountable(cell)) is not None:
            raise self._refusal(reason)
        asked, allowed = cell.algorithm.setting, trust_named(allow.trust)
        rounds = cell.schedule.rounds
        if rounds > allow.rounds:
            raise self._refusal(f"the scenario has {rounds} rounds, allowed are {allow.rounds}")
        needed = cell.schedule.held * cell.batch_sizes[number]
        if needed > len(self._shard.labels):
            raise self._refusal(f"the scenario needs {needed} records of this silo, here are fewer")
        if cell.privacy.relation != allow.relation:
            raise self._refusal(f"the scenario's relation is {cell.privacy.relation}, allowed is {allow.relation}")
        plan = plan_of(cell, self._objective(cell))
        stream = plan.stream_of(number, rounds)
        if not asked.private_messages and asked.confides <= allowed.confides:
            (stream,) = plan.releases(rounds)  # what is left of the silos' messages: noisy means, or their sums
        if stream.std == 0.0 and not allow.noise_free:
            nobody = allowed.noise_at_server
            raise self._refusal(
                f"the scenario has {'nobody add noise' if nobody else 'this silo release its sums without noise'}"
            )
        if max(stream.clips) > allow.clip * _ROUNDING:
            raise self._refusal(f"the scenario clips at {max(stream.clips):.4g}, allowed is {allow.clip:g}")
        return stream.mu

    def _silo(self, run_id: str, cell_json: str, key: bytes) -> Silo:
        """The silo of an open run: built from the ledger's cell and key, not from what was sent."""
        if run_id not in self._open:
            cell = _cell(cell_json)
            objective = self._objective(cell)
            dtype = DTYPES[cell.run.dtype]
            features = cell.model.row.features(self._shard.images, dtype, cell.model.settings)
            records = Records(features, torch.from_numpy(self._shard.labels))
            noise, plan = KeyedNormal(key, cell.run.dtype), plan_of(cell, objective)
            gaps = cell.deployment.missing == "continue"
            self._open = {run_id: Silo(self._policy.silo, plan, plan.objective, records, noise, gaps)}
        return self._open[run_id]

    def _objective(self, cell: Cell) -> Objective:
        model, settings, dtype = cell.model.row, cell.model.settings, DTYPES[cell.run.dtype]
        shape = tuple(model.features(self._shard.images[:1], dtype, settings).shape[1:])
        return model.objective(shape, self._policy.classes, dtype, settings)

    def _refusal(self, reason: str) -> RunError:
        return RunError(f"silo {self._policy.silo} refuses: {reason}")


def load_shard(path: Path, classes: int) -> Shard:
    """Read and check a silo's records; InputError if they are not what `data.own` takes."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: expected an .npz file with `images` and `labels` ({error})") from None
    check_records(images, labels, classes, str(path))
    return Shard(images, labels.astype(np.int64 if classes else np.float64))


def _sorted(cell_json: str) -> str:
    """The same JSON in one spelling."""
    try:
        return json.dumps(json.loads(cell_json), sort_keys=True)
    except json.JSONDecodeError as error:
        raise RunError(f"the scenario that was sent cannot be used: {error}") from None


def _cell(cell_json: str) -> Cell:
    try:
        return resolve_cell(json.loads(cell_json), "the server's scenario")
    except InputError as error:
        raise RunError(f"the scenario that was sent cannot be used: {error}") from None


def _digest(query: Tensor, keys: bytes) -> bytes:
    described = f"{query.dtype} {tuple(query.shape)} ".encode()
    return hashlib.sha256(described + query.contiguous().numpy().tobytes() + keys).digest()


def _vector(reply: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(reply), dtype=dtype)
