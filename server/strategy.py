"""The server's side of a round as a Flower Strategy: broadcast x_t, collect every silo's running sum, move.

    q~_t = Σ_i p_i · release_i  (+ row t of the mechanism's noise, where the trust setting puts it at the server)
    x_{t+1} from the optimizer

One strategy serves every trust setting and algorithm: a trusted server's plan gives the server a standard
deviation, an untrusted one's gives it none.  The mean has fixed weights; a missing, failed, malformed or
non-finite reply ends the run with the silo's number and the round, never with a mean over fewer.  A silo that is
late may, where the scenario says so, count with its last release: its weight stays, and the round is on record.
"""

from collections.abc import Callable, Iterable
from logging import INFO
from typing import Protocol

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.plan import Plan
from fedpriv.randomness import SERVER, KeyedNormal
from fedpriv.records import TRAIN, refusal_in
from fedpriv.wire import Counts, counts_in, is_finite, one_array, query_content, vector_in
from server.roster import learn_roster

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Roster = Callable[[Grid, int, float], list[int]]
"""(grid, silos, seconds to wait) -> the node id of silo 0, 1, …"""


Missed = dict[int, list[int]]
"""Silo -> the rounds in which it did not answer in time."""


class Journal(Protocol):
    """What was released round by round, for a run that goes on after a crash."""

    def released(self, t: int) -> Tensor | None:
        """q~_t, shape (d,), if round t is over."""
        ...

    def record(self, t: int, released: Tensor, missed: Missed, last: Tensor | None) -> None:
        """Keep q~_t for good, before anything that depends on it leaves the server.

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
    q~_t with its own noise, whose sequence keeps what `plan.releases` claims for each silo's records (trusted
    server).
    """

    def __init__(
        self,
        plan: Plan,
        initial: Tensor,
        noise: KeyedNormal,
        journal: Journal | None = None,
        roster: Roster = learn_roster,
        *,
        without_missing: bool = False,
    ) -> None:
        """With `without_missing`, a silo that does not answer in time counts with its last release."""
        self.plan = plan
        self.counts: Counts | None = Counts(0, 0)  # None once a silo did not tell, as silos with a guard do not
        self.rounds_done = 0
        self._noise = noise
        self._journal = journal
        self._roster = roster
        self.missed: Missed = journal.missed() if journal else {}
        kept = journal.last() if journal else None
        self._without_missing = without_missing
        self._last = torch.zeros(len(plan.weights), len(initial), dtype=initial.dtype) if kept is None else kept
        self._initial = initial
        self._weights = torch.tensor(plan.weights, dtype=initial.dtype)
        self._optimizer_state = plan.optimizer.start(initial)
        self._mechanism_state = plan.mechanism.start()
        self._nodes: list[int] = []  # the node id of silo 0, 1, …
        self._asked: list[Message] = []  # the messages to silo 0, 1, … of the round that is under way

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
            released = self._journal.released(t) if self._journal else None
            if released is None:
                self._nodes = self._nodes or self._roster(grid, len(self._weights), timeout)
                query = one_array(self.plan.optimizer.query(self._optimizer_state))
                replies = grid.send_and_receive(self.configure_train(t, query, config, grid), timeout=timeout)
                self.aggregate_train(t, replies)
            else:
                self._server_noise(t)  # the same as then: its state is what later rounds need
                self._move(t, released)
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
        # A grid numbers messages when it sends them; an error reply names the message, not always the node.
        asked = {message.metadata.message_id: silo for silo, message in enumerate(self._asked)}
        releases: dict[int, Tensor] = {}
        reasons = ""
        for reply in replies:
            silo = asked[reply.metadata.reply_to_message_id]
            refusal = None if reply.has_error() else refusal_in(reply.content)
            if refusal is not None and not refusal.final:
                reasons += f"; {refusal.reason}"
            else:
                releases[silo] = self._release_in(reply, silo, server_round)
        missing = sorted(set(range(len(self._nodes))) - set(releases))
        if missing and not (self._without_missing and releases):
            raise RunError(f"round {server_round}: no reply from silo {', '.join(map(str, missing))}{reasons}")
        for silo in missing:
            self.missed.setdefault(silo, []).append(server_round)
            releases[silo] = self._last[silo] * self.plan.estimator.round(server_round).keep
        # Sorted by silo before any sum, so that the order of arrival cannot change the last bit.
        self._last = torch.stack([releases[silo] for silo in range(len(self._nodes))])
        mean = self._weights @ self._last
        if not is_finite(mean):  # weights are positive, so a value that is not finite shows in the mean
            wrong = ", ".join(str(silo) for silo, release in releases.items() if not is_finite(release))
            raise RunError(f"silo {wrong}, round {server_round}: the release has values that are not finite")
        released = mean + self._server_noise(server_round)
        if self._journal:
            last = self._last if self._without_missing else None
            self._journal.record(server_round, released, self.missed, last)
        self._move(server_round, released)
        return one_array(self.plan.optimizer.query(self._optimizer_state)), None

    def _move(self, t: int, released: Tensor) -> None:
        current = self.plan.estimator.round(t)
        self._optimizer_state = self.plan.optimizer.update(self._optimizer_state, released, current)
        self.rounds_done = t

    def _server_noise(self, t: int) -> Tensor | float:
        std = float(self.plan.noise.std_of(SERVER))
        if not std:
            return 0.0
        mechanism, size, count = self.plan.mechanism, len(self.model), self.plan.mechanism.draws(t)
        drawn = self._noise.vector(size, SERVER, t) if count is None else self._noise.nodes(size, SERVER, t, count)
        fresh = torch.from_numpy(drawn).mul_(std)
        noise, self._mechanism_state = mechanism.noise(self._mechanism_state, t, fresh)
        return noise

    def _release_in(self, reply: Message, silo: int, t: int) -> Tensor:
        if reply.has_error():
            raise RunError(f"silo {silo} failed in round {t}: {reply.error.reason}")
        if (refusal := refusal_in(reply.content)) is not None:
            raise RunError(f"round {t}: {refusal.reason}")
        try:
            release = vector_in(reply.content, "release")
            told = counts_in(reply.content)
            if told is None or self.counts is None:
                self.counts = None
            else:
                self.counts = Counts(self.counts.drawn + told.drawn, self.counts.clipped + told.clipped)
        except ValueError as error:
            raise RunError(f"silo {silo}, round {t}: {error}") from None
        expected = self._initial
        if release.shape != expected.shape or release.dtype != expected.dtype:
            raise RunError(
                f"silo {silo}, round {t}: a release of shape {tuple(release.shape)} and type {release.dtype}, "
                f"expected {tuple(expected.shape)} and {expected.dtype}"
            )
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
