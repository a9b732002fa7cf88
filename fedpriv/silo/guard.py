"""The silo's guard: it answers what its own policy allows, whatever the server sends.

It runs in the silo's own process and installation (fedpriv/silo/daemon.py), because the app that a server ships
could replace any guard inside it.  Records, keys, ledger and policy never leave that process.

An answer to round t takes these steps:

    opened       the run by its name, admitted and priced when it is opened       `Admission`, `SiloLedger`
    checked      order, query, missed rounds, and a known query for a known t     `Silo.check`, `Admission`
    intended     the query's digest on file: nothing is refused from here on      `SiloLedger.intend`
    answered     records read, sums, noise                                        `Silo.answer`
    recorded     the reply and the next state on file, then it leaves             `SiloLedger.record`

What is kept in memory between answers (scenarios in one spelling, admitted runs, prices that fit, silos, views of
the shard) is bounded, can be built again, and changes no answer: a guard that keeps nothing, or starts again
between two rounds, gives the same bytes.
"""

import hashlib
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.accounting.budget import LifetimeBudget, Price
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import SERVER, system_key
from fedpriv.loss.imported import shapes_of
from fedpriv.rounds.round import State
from fedpriv.scenario.schema import Cell
from fedpriv.silo.admission import ROUNDING, Admission, Admitted, Charge, InTime, refusal, spent, words
from fedpriv.silo.ledger import AnswerRow, LedgerError, Run, SiloLedger
from fedpriv.silo.masks import identity_of
from fedpriv.silo.memory import Room
from fedpriv.silo.policy import Policy
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo, pack, unpack, without_denormals
from fedpriv.silo.views import Views, kept

_log = logging.getLogger("fedpriv.guard")


class _Question(NamedTuple):
    """A round whose query is on file, and what it takes to answer it."""

    silo: Silo
    """Without its records."""
    cell: Cell
    state: State
    query: Tensor
    keys: bytes


class Guard:
    """Answers queries for one silo.

    Guarantee: over the lifetime of the ledger, everything that leaves through `answer` is `allow.budget`-GDP, but
    for a probability of `allow.slack`, for each record of the shard under `allow.relation`, against a server that
    may send anything: increments are clipped here, every round is answered for one query (a repetition gets the
    same bytes), the noise and, where they are secret, the rounds of every record are drawn here from a key of the
    operating system, and a run whose price, composed with all runs before, exceeds budget or slack is never
    opened.  Servers may choose runs after having seen the releases of others.  It holds for the bytes
    that leave, up to 2^-60 a run in total variation, if AES-256 is a pseudorandom permutation (docs/privacy.md).
    Neighbours are files of as many rows, or persons, that differ in one (`data/placing`).
    Records are read for a query only after it is on file as the one that its round is answered for, and nothing is
    refused after that: refusals depend on what was sent, on policy, ledger and that number, never on the records.
    With `allow.trust = "trusted"` sums may leave without noise, and `budget` bounds what the server publishes if
    it adds the noise that the scenario says: the silo trusts the server for that, and for nothing else.
    With `allow.trust = "secure-aggregation"` sums may leave masked and with this silo's share of the noise, one of
    `allow.silos`, and `budget` bounds what their sum over silos gives away, if all other silos add their shares
    and the public keys that the server relays are theirs, which is checked where the policy has `peers`.  Without
    that permission such a run is charged for this silo's share alone. With `allow.noise_free` nothing is
    guaranteed; a run without noise is entered at its price, which is infinite, so that a policy which takes the
    permission back answers no more.
    """

    def __init__(
        self,
        policy: Policy,
        ledger: SiloLedger,
        shard: Shard,
        in_time: InTime = nullcontext,
        admission: Admission | None = None,
        room: Room | None = None,
    ) -> None:
        """InputError if the ledger is another shard's; `in_time` bounds how long a scenario's plan may take.

        `admission` says what is allowed of these records, by default training; a silo's guards share their `room`.
        """
        if ledger.shard != shard.fingerprint:
            raise InputError(
                f"{policy.shard}: these are not the records, in the order, that {policy.ledger} was begun for; "
                "what was released of those is no account of these"
            )
        self._policy, self._ledger, self._shard = policy, ledger, shard
        self._admission = admission or Admission(policy, shard, in_time)
        self._identity = identity_of(policy.silo, policy.identity, policy.peers)
        if self.peers and policy.allow.silos not in (None, self.peers):
            raise InputError(f"allow.silos = {policy.allow.silos}, and {policy.peers} has {self.peers} silos")
        self._open, self._reading, self._admitted = dict[str, Silo](), dict[str, Silo](), dict[str, Admitted]()
        self._spelled, self._affordable = dict[str, str](), dict[str, bool]()
        self._least = dict[Charge, float]()
        self._views, self._room = Views(shard), room or Room(policy.allow.memory)

    @property
    def shard(self) -> Shard:
        """The records that it answers for."""
        return self._shard

    def under(self, policy: Policy, room: Room) -> "Guard":
        """The guard of the same records and ledger by another policy; nothing that was admitted before counts."""
        admission = replace(self._admission, policy=policy)
        return Guard(policy, self._ledger, self._shard, admission=admission, room=room)

    @property
    def peers(self) -> int:
        """How many silos it knows by their keys."""
        return len(self._identity.peers)

    def shapes(self, cell_json: str) -> list[tuple[int, ...]]:
        """The arrays that a query of this scenario consists of; RunError if the policy does not allow it.

        Nothing is opened or charged: shapes follow from the scenario, the policy and the shape of a record.
        """
        return shapes_of(self._admitted_as(self._canonical(cell_json)).plan.objective)

    def agree(self, run_id: str, cell_json: str) -> Cell:
        """The scenario of a run of which no question would be refused by its policy now; RunError if one would.

        Guarantee: nothing is opened, charged or written, and no record is looked at.  A server that asks for ever
        learns what refusals tell: bounds of the policy, how many records a scenario may read, and what is spent.
        """
        with self._ledger.alone(), self._ledger.transaction():
            run_id = self._filed_as(run_id, cell_json)
            run, admitted = self._known(run_id, cell_json)
            self._check_open(run_id, run, admitted) if run else self._price_of_new(admitted)
            return admitted.cell

    def public_key(self, run_id: str, cell_json: str) -> bytes:
        """This silo's signed public key for the masks of a run, on record as its answer to round 0.

        RunError as below.
        """
        with self._ledger.alone(), self._ledger.transaction():
            run_id = self._filed_as(run_id, cell_json)
            run, admitted = self._opened(run_id, cell_json)
            if (known := self._ledger.answer(run_id, 0)) is not None and known.reply is not None:
                return known.reply
            if run.key is None:
                raise self._refusal("a public key: this run is over")
            if not admitted.plan.masked:
                raise self._refusal("a public key: this run has no masks")
            silo = self._silo(run_id, run, admitted)
            card = self._identity.card(run_id, admitted.digest, silo.masker.public)
            self._ledger.intend(run_id, 0, b"")
            self._ledger.record(run_id, 0, card, run.state or pack(silo.start()))
        return card

    def answer(
        self, run_id: str, cell_json: str, t: int, query: Tensor, keys: bytes = b"", *, seen: bytes = b""
    ) -> Tensor:
        """Answer round t of a run; RunError, with the reason, for what is not allowed.

        `keys` are the signed public keys of all silos, for a run whose messages are masked.  `seen` are commits of
        this silo's ledgers that the server remembers: one that the ledger does not have is a reason to refuse.
        LedgerError where the disk refuses: the same query may be asked again.
        """
        with self._ledger.alone():
            with self._ledger.transaction():
                self._check_seen(seen)
                run_id = self._filed_as(run_id, cell_json)
                asked = self._asked(run_id, cell_json, t, query, keys)
            return asked if isinstance(asked, Tensor) else self._answered(run_id, t, asked)

    def told(self, run_id: str, cell_json: str, t: int) -> bytes:
        """What the server may remember of the reply to round t: its commit, which is no function of records."""
        return self._ledger.told(self._filed_as(run_id, cell_json), t).packed

    def _check_seen(self, seen: bytes) -> None:
        try:
            self._ledger.check_seen(seen)
        except (ValueError, RunError) as error:
            raise self._refusal(str(error)) from None

    def _asked(self, run_id: str, cell_json: str, t: int, query: Tensor, keys: bytes) -> Tensor | _Question:
        """The reply on file, or the question once it is on file: what can be refused is refused here."""
        (run, admitted), digest = self._opened(run_id, cell_json), _digest(query, keys)
        plan = admitted.plan
        known = self._ledger.answer(run_id, t) if 0 < t <= plan.schedule.rounds else None
        if known is not None and known.answered:
            self._check_same(known, digest, t)
            if known.reply is None:
                raise self._refusal(f"round {t} was answered, and this run is over: of its reply a digest is kept")
            return torch.frombuffer(bytearray(known.reply), dtype=plan.message_dtype)
        if run.key is None:
            raise self._refusal(f"round {t}: this run is over")
        silo = self._silo(run_id, run, admitted)
        state = silo.start() if run.state is None else unpack(run.state, silo)
        silo.check(state, t, query)
        self._admission.check_missed(plan, t, t - state.answered - 1)
        if not float(query.abs().max()) <= self._policy.allow.query:
            raise self._refusal(
                f"round {t}: the query has values beyond {self._policy.allow.query:g}, the largest allowed"
            )
        if known is not None:
            self._check_same(known, digest, t)
        public, silos = b"", len(plan.weights)
        if plan.masked:
            public = self._identity.keys(run_id, admitted.digest, keys, silos)
            silo.masker.agree(public, silos)
        if known is None:
            self._ledger.intend(run_id, t, digest)
        return _Question(silo, admitted.cell, state, query, public)

    def _answered(self, run_id: str, t: int, asked: _Question) -> Tensor:
        """Read the records, and commit the reply before it is returned; the last round's wipes key and state."""
        last = t == asked.silo.plan.schedule.rounds
        try:
            with without_denormals():
                silo = self._with_records(run_id, asked)
                release, after = silo.answer(asked.state, t, asked.query)
            leaving = silo.message(release.vector, t, asked.keys, after.chain)
            with self._ledger.transaction():
                self._ledger.record(run_id, t, leaving.numpy().tobytes(), None if last else pack(after))
                if last:
                    self._ledger.finish(run_id)
        except LedgerError:
            raise
        except Exception:
            _log.exception("silo %d, run %r, round %d", self._policy.silo, run_id, t)
            if last:
                self.finish(run_id)
            raise RunError(
                f"silo {self._policy.silo}, round {t}: its guard failed, and its own log says why"
            ) from None
        if last:
            self._forget(run_id)
            self._ledger.tidy()
        return leaving

    def finish(self, run_id: str) -> None:
        """End a run: its key and its state are forgotten, and nothing new is released in it."""
        with self._ledger.transaction():
            self._ledger.finish(run_id)
        self._forget(run_id)

    def _forget(self, run_id: str) -> None:
        self._open.pop(run_id, None)
        self._reading.pop(run_id, None)

    def _filed_as(self, run_id: str, cell_json: str) -> str:
        """The name of a run in the ledger: of statistics the digest of what is asked.

        Guarantee: the same statistics asked again get the bytes that are on file, or a refusal once the ledger has
        dropped them, and are charged once.  Not where a server adds the noise: it would draw another one, which is
        another release.
        """
        self._admission.check_name(run_id)
        if self._ledger.run(run_id) is not None:
            return run_id
        admitted = self._admitted_as(self._canonical(cell_json))
        if not admitted.cell.model.row.of_cells or admitted.plan.trust.draws(SERVER):
            return run_id
        return f"statistics-{admitted.digest.hex()}"

    def _opened(self, run_id: str, cell_json: str) -> tuple[Run, Admitted]:
        """A run, opened if it is new, and its scenario."""
        run, admitted = self._known(run_id, cell_json)
        run = run or self._new_run(run_id, self._canonical(cell_json), admitted)
        self._check_open(run_id, run, admitted)
        return run, admitted

    def _known(self, run_id: str, cell_json: str) -> tuple[Run | None, Admitted]:
        """A run if it is on file, and its scenario by this policy: a narrowed one holds for open runs too."""
        canonical, run = self._canonical(cell_json), self._ledger.run(run_id)
        if run is not None and run.cell != canonical:
            raise self._refusal("the scenario is not the one this run was opened with")
        admitted = self._admitted_as(canonical)
        if admitted.plan.masked and self.peers not in (0, len(admitted.plan.weights)):
            raise self._refusal(f"it knows {self.peers} silos, and the scenario has {len(admitted.plan.weights)}")
        return run, admitted

    def _check_open(self, run_id: str, run: Run, admitted: Admitted) -> None:
        """RunError for a run that is not over and does not fit the budget, by its charge and beside the others."""
        if run.key is not None:
            charged, others = Charge(run.cell, run.mu, run.slack), self._ledger.charges(run_id)
            on_file = hashlib.sha256(repr([charged, *others]).encode()).hexdigest()  # of all that it depends on
            kept(self._affordable, on_file, lambda: self._check_price(admitted, charged, others))

    def _check_price(self, admitted: Admitted, charged: Charge, others: Sequence[Charge]) -> bool:
        """True for an open run that fits beside `others` and was charged enough; RunError for any other."""
        self._check_budget(self._repriced(others), self._spent([charged])[0])
        asked = self._admission.price(admitted, charged.slack)
        if (math.inf if asked is None else asked.mu) > charged.mu * ROUNDING:
            raise self._refusal(f"by its policy this run costs {words(asked)}, and {charged.words}")
        return True

    def _canonical(self, cell_json: str) -> str:
        return kept(self._spelled, cell_json, lambda: self._admission.canonical(cell_json))

    def _admitted_as(self, canonical: str) -> Admitted:
        admitted = kept(self._admitted, canonical, lambda: self._admission.admit(canonical))
        things = (  # all can be built again
            *(self._spelled, self._affordable, self._admitted, self._open, self._reading),
            self._views,
        )
        self._room.make_way(f"{id(self)} {canonical}", admitted.taken, lambda: [each.clear() for each in things])
        return admitted

    def _new_run(self, run_id: str, canonical: str, admitted: Admitted) -> Run:
        """Open a run: its whole price is charged before its first release."""
        asked = self._price_of_new(admitted)
        mu, slack = (math.inf, 0.0) if asked is None else (asked.mu, asked.slack)
        key = system_key()
        self._ledger.open_run(run_id, Charge(canonical, mu, slack), key)
        return Run(canonical, mu, key, None, slack)

    def _price_of_new(self, admitted: Admitted) -> Price:
        """What a run costs that may be opened now; RunError if it may not."""
        self._ledger.check()
        allow, before = self._policy.allow, self._repriced(self._ledger.charges())
        if len(before) >= allow.runs:
            raise self._refusal(f"{len(before)} runs were opened, allowed are {allow.runs}")
        if (underway := self._ledger.open_runs()) >= allow.open_runs:
            raise self._refusal(f"{underway} runs are under way, allowed are {allow.open_runs}")
        asked = self._admission.price(admitted, allow.slack_per_run)
        self._check_budget(before, asked)
        return asked

    def _check_budget(self, before: Sequence[Charge], asked: Price) -> None:
        allow = self._policy.allow
        reason = refusal(LifetimeBudget(allow.budget * ROUNDING, allow.slack), self._spent(before), asked)
        if reason is not None and not allow.noise_free:
            raise self._refusal(reason)

    def past_prices(self) -> list[tuple[str, float, float]]:
        """Every run by name: the μ that it was charged, and what its scenario costs today, 0 if unknown."""
        rows = [(row.run_id, Charge(row.cell, row.mu, row.slack)) for row in self._ledger.overview()]
        return [(name, charge.mu, self._admission.least_mu(charge)) for name, charge in rows]

    def _repriced(self, charges: Sequence[Charge]) -> list[Charge]:
        """What earlier runs were charged, or what their scenarios cost by today's accounting if that is more."""
        for charge in charges:
            if charge not in self._least:
                self._least[charge] = self._admission.least_mu(charge)
        return [charge._replace(mu=max(charge.mu, self._least[charge])) for charge in charges]

    def _spent(self, charges: Sequence[Charge]) -> list[Price]:
        return spent(charges, self._policy.allow.relation, self._policy.allow.unit)

    def _check_same(self, known: AnswerRow, digest: bytes, t: int) -> None:
        if known.query != digest:
            done = "answered" if known.answered else "asked"
            raise self._refusal(f"round {t} was {done} already, for another query")

    def _silo(self, run_id: str, run: Run, admitted: Admitted) -> Silo:
        """The silo of an open run, with the ledger's key and without its records."""
        key, cell, own = run.key, admitted.cell, (self._policy.silo, admitted.plan)
        assert key is not None
        if run_id in self._open and self._open[run_id].key != key:
            self._forget(run_id)
        gaps = cell.deployment.missing == "continue"
        return kept(
            self._open,
            run_id,
            lambda: Silo.of(*own, self._views.blank(cell), key, admitted.digest, gaps=gaps),
        )

    def _with_records(self, run_id: str, asked: _Question) -> Silo:
        if run_id in self._reading and self._reading[run_id].key != asked.silo.key:
            del self._reading[run_id]
        views, key = self._views, asked.silo.key
        return kept(
            self._reading,
            run_id,
            lambda: replace(asked.silo, records=views.records(asked.cell), order=views.order(asked.cell, key)),
        )

    def _refusal(self, reason: str) -> RunError:
        return self._admission.refusal(reason)


def open_guard(policy: Policy, in_time: InTime = nullcontext, room: Room | None = None) -> Guard:
    """The guard of a policy; InputError if extensions, shard or ledger cannot be used."""
    policy.import_extensions()
    shard = policy.load_shard()
    return Guard(policy, SiloLedger(policy.ledger, policy.marked), shard, in_time, room=room)


def _digest(query: Tensor, keys: bytes) -> bytes:
    described = f"{query.dtype} {tuple(query.shape)} ".encode()
    return hashlib.sha256(described + query.contiguous().numpy().tobytes() + keys).digest()
