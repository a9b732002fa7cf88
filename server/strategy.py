"""The server's side of a round as a Flower Strategy: broadcast x_t, collect every silo's running sum, move.

    q~_t = Σ_i p_i · release_i  (+ row t of the mechanism's noise, where the trust setting puts it at the server)
    x_{t+1} from the optimizer

One strategy serves every trust setting and algorithm: a trusted server's plan gives the server a standard
deviation, an untrusted one's gives it none; a plan with a lattice has the mean decoded from the sum of masked
messages, which say nothing else.  The mean has fixed weights; a missing, failed, malformed or
non-finite reply ends the run with the silo's number and the round, never with a mean over fewer.  A silo that is
late may, where the scenario says so, count with its last release: its weight stays, and the round is on record.

What a deployed server releases with noise of its own is float64 until one rounding at the end
(fedpriv/running/release.py); a simulation's noise has the run's type, and protects nobody.
"""

from collections.abc import Callable, Iterable, Mapping
from logging import INFO
from typing import Protocol

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedpriv.errors import RunError, printable
from fedpriv.protocol.arrays import Counts, counts_in, is_finite, one_array, query_content, vector_in
from fedpriv.protocol.messages import KEY, TRAIN, bytes_in, refusal_in
from fedpriv.randomness import KeyedNormal
from fedpriv.running.plan import Plan
from fedpriv.secure_aggregation.identity import CARD_BYTES
from fedpriv.secure_aggregation.masks import KEY_BYTES
from fedpriv.server.noise import Released, ServerNoise, SumBound
from fedpriv.server.noise_chain import NoiseChain
from fedpriv.server.roster import learn_roster

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Roster = Callable[[Grid, int, float], list[int]]
"""(grid, silos, seconds to wait) -> the node id of silo 0, 1, …"""


Missed = dict[int, list[int]]
"""Silo -> the rounds in which it did not answer in time."""


class Journal(Protocol):
    """What was released round by round, for a run that goes on after a crash."""

    def released(self, t: int) -> Released | None:
        """What round t released, if it is over."""
        ...

    def record(self, t: int, released: Released, missed: Missed, last: Tensor | None) -> None:
        """Keep it for good, before anything that depends on it leaves the server.

        With it the rounds that silos missed, and every silo's last release, (silos, d), if that can be needed.
        """
        ...

    def missed(self) -> Missed:
        """The rounds that silos missed until now."""
        ...

    def last(self) -> Tensor | None:
        """Every silo's last release, (silos, d), if it was kept."""
        ...


class ReleaseStrategy(Strategy):
    """Noisy means of running sums, handed to the plan's optimizer.

    Guarantee: what it broadcasts is post-processing of the releases it received (untrusted server), or of the
    q~_t with its own noise, or of the sums of masked messages, whose sequence keeps what `plan.releases` claims
    for each silo's records (trusted server, secure aggregation).  Masked messages are added up all or none.
    A server that adds noise refuses sums beyond what clipped records can add up to: a silo that sent one could
    otherwise drown the noise in the arithmetic.
    """

    def __init__(
        self,
        plan: Plan,
        initial: Tensor,
        noise: KeyedNormal | NoiseChain,
        journal: Journal | None = None,
        roster: Roster = learn_roster,
        *,
        without_missing: bool = False,
    ) -> None:
        """`noise` is a simulation's, or the chain of a server whose noise is really released.

        With `without_missing`, a silo that does not answer in time counts with its last release.
        """
        self.plan = plan
        self.counts: Counts | None = Counts(0, 0)  # None once a silo did not tell, as silos with a guard do not
        self.rounds_done = 0
        self._journal = journal
        self._roster = roster
        self.missed: Missed = journal.missed() if journal else {}
        kept = journal.last() if journal else None
        self._without_missing = without_missing
        self._last = torch.zeros(len(plan.weights), len(initial), dtype=initial.dtype) if kept is None else kept
        self._initial = initial
        self._noise = ServerNoise(plan, initial, noise)
        self._bound = SumBound(plan)
        self._optimizer_state = plan.optimizer.start(initial)
        self._nodes: list[int] = []  # the node id of silo 0, 1, …
        self._asked: list[Message] = []  # the messages to silo 0, 1, … of the round that is under way
        self._keys = b""  # the silos' public keys in a row, where they mask what they send

    @property
    def model(self) -> Tensor:
        """The model a run that stopped now would publish, shape (d,)."""
        return self.plan.optimizer.output(self._optimizer_state)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 0,
        timeout: float = 3600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the plan's rounds (num_rounds = 0) or the first `num_rounds` of them.

        `evaluate_fn(t, arrays)` is called after round t with the model, which is not the query.  Flower's own
        loop is not used: it exchanges evaluation messages every round, and broadcasts what it evaluates.
        Rounds that the journal has are not asked for again: everything follows from what they released.
        """
        self.summary()
        result = Result(arrays=initial_arrays)
        config = train_config or ConfigRecord()
        for t in range(1, (num_rounds or self.plan.schedule.rounds) + 1):
            known = self._journal.released(t) if self._journal else None
            if known is None:
                self._nodes = self._nodes or self._roster(grid, len(self.plan.weights), timeout)
                if self.plan.lattice is not None:
                    self._keys = self._keys or self._public_keys(grid, timeout)
                    config["keys"] = self._keys
                query = one_array(self.plan.optimizer.query(self._optimizer_state))
                replies = grid.send_and_receive(self.configure_train(t, query, config, grid), timeout=timeout)
                self.aggregate_train(t, replies)
            else:
                self._noise.repeat(known, t)
                self._move(t, known.vector)
            metrics = evaluate_fn(t, one_array(self.model)) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[t] = metrics
        result.arrays = one_array(self.model)
        return result

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """One message a silo, in the order of silos, all with the same query and round number."""
        content = query_content(arrays, server_round, config)
        self._asked = [Message(content, node, TRAIN) for node in self._nodes]
        return self._asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Move the optimizer by the noisy mean; RunError if any silo's release is missing or unusable."""
        answers, reasons = self._answers(replies, f"round {server_round}")
        releases = {silo: self._release_in(content, silo, server_round) for silo, content in answers.items()}
        missing = self._missing(releases)
        if missing and not (self._without_missing and releases):
            raise RunError(f"round {server_round}: no reply from silo {_listed(missing)}{reasons}")
        for silo in missing:
            self.missed.setdefault(silo, []).append(server_round)
            releases[silo] = self._last[silo] * self.plan.estimator.round(server_round).decay
        # Sorted by silo before any sum, so that the order of arrival cannot change the last bit.
        mean = self._mean([releases[silo] for silo in range(len(self._nodes))])
        if not is_finite(mean):  # weights are positive, so a value that is not finite shows in the mean
            wrong = ", ".join(str(silo) for silo, release in releases.items() if not is_finite(release))
            raise RunError(f"silo {wrong}, round {server_round}: the release has values that are not finite")
        released = self._noise.released(mean, server_round)
        if self._journal:
            last = self._last if self._without_missing else None
            self._journal.record(server_round, released, self.missed, last)
        self._move(server_round, released.vector)
        return one_array(self.plan.optimizer.query(self._optimizer_state)), None

    def _mean(self, releases: list[Tensor]) -> Tensor:
        """Σ_i p_i · release_i (d,), from the messages of all silos."""
        if self.plan.lattice is not None:
            total = self.plan.lattice.decode_sum([message.numpy() for message in releases])
            return torch.from_numpy(total).to(self._initial.dtype)
        self._last = torch.stack(releases)
        return torch.tensor(self.plan.weights, dtype=self._last.dtype) @ self._last

    def _public_keys(self, grid: Grid, timeout: float) -> bytes:
        """The public keys of silo 0, 1, … in a row; RunError unless every silo gives one."""
        self._asked = [Message(RecordDict(), node, KEY) for node in self._nodes]
        answers, reasons = self._answers(grid.send_and_receive(self._asked, timeout=timeout), "public keys")
        if missing := self._missing(answers):
            raise RunError(f"public keys: no reply from silo {_listed(missing)}{reasons}")
        keys = b""
        for silo in range(len(self._nodes)):
            try:
                key = bytes_in(answers[silo], "key", "public")
            except ValueError as error:
                raise RunError(f"silo {silo}, public keys: {error}") from None
            if len(key) not in (KEY_BYTES, CARD_BYTES):
                raise RunError(
                    f"silo {silo}, public keys: {len(key)} bytes, expected {KEY_BYTES}, or {CARD_BYTES} if signed"
                )
            keys += key
        return keys

    def _answers(self, replies: Iterable[Message], what: str) -> tuple[dict[int, RecordDict], str]:
        """What every silo answered to the messages under way, and why others did not; RunError for a failure."""
        # A grid numbers messages when it sends them; an error reply names the message, not always the node.
        asked = {message.metadata.message_id: silo for silo, message in enumerate(self._asked)}
        answers: dict[int, RecordDict] = {}
        reasons = ""
        for reply in replies:
            silo = asked[reply.metadata.reply_to_message_id]
            if reply.has_error():
                raise RunError(f"silo {silo} failed in {what}: {printable(str(reply.error.reason))}")
            refusal = refusal_in(reply.content)
            if refusal is None:
                answers[silo] = reply.content
            elif refusal.final:
                raise RunError(f"{what}: {refusal.reason}")
            else:
                reasons += f"; {refusal.reason}"
        return answers, reasons

    def _missing(self, answers: Mapping[int, object]) -> list[int]:
        return sorted(set(range(len(self._nodes))) - set(answers))

    def _move(self, t: int, released: Tensor) -> None:
        current = self.plan.estimator.round(t)
        self._optimizer_state = self.plan.optimizer.update(self._optimizer_state, released, current)
        self._bound.move(t)
        self.rounds_done = t

    def _release_in(self, content: RecordDict, silo: int, t: int) -> Tensor:
        try:
            release = vector_in(content, "release")
            told = counts_in(content)
            if told is None or self.counts is None:
                self.counts = None
            else:
                self.counts = Counts(self.counts.drawn + told.drawn, self.counts.clipped + told.clipped)
        except ValueError as error:
            raise RunError(f"silo {silo}, round {t}: {error}") from None
        if told is None and self._noise.simulated:
            raise RunError(
                f"silo {silo}, round {t}: it answers as silos with guards do, and this server's noise is a "
                "simulation's, drawn from the scenario's seed, which protects nobody; use --engine deployment"
            )
        shape, dtype = self._initial.shape, self.plan.message_dtype
        if release.shape != shape or release.dtype != dtype:
            raise RunError(
                f"silo {silo}, round {t}: a release of shape {tuple(release.shape)} and type {release.dtype}, "
                f"expected {tuple(shape)} and {dtype}"
            )
        if self._noise.std and is_finite(release):
            self._bound.check(release, silo, t)
        return release

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """None: the silos' records are spent on training, and evaluation is the server's, on public data."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        log(INFO, "fedpriv: %d silos, %d rounds", len(self.plan.weights), self.plan.schedule.rounds)


def _listed(silos: Iterable[int]) -> str:
    return ", ".join(map(str, silos))
