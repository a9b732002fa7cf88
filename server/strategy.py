"""The server's side of a round as a Flower Strategy: broadcast x_t, collect every silo's running sum, move.

    q~_t = Σ_i p_i · release_i  (+ row t of the mechanism's noise, where the trust setting puts it at the server)
    x_{t+1} from the optimizer

One strategy serves every trust setting and algorithm: a trusted server's plan gives the server a standard
deviation, an untrusted one's gives it none.  The mean has fixed weights; a missing, failed, malformed or
non-finite reply ends the run with the silo's number and the round, never with a mean over fewer.
"""

import time
from collections.abc import Callable, Iterable
from logging import INFO

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.plan import Plan
from fedpriv.randomness import SERVER, KeyedNormal
from fedpriv.wire import (
    ROSTER,
    TRAIN,
    Counts,
    counts_in,
    is_finite,
    number_in,
    one_array,
    query_content,
    vector_in,
)

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
_ROSTER_POLL = 0.1  # seconds between looks for nodes that have not connected yet


class ReleaseStrategy(Strategy):
    """Noisy means of running sums, handed to the plan's optimizer.

    Guarantee: what it broadcasts is post-processing of the releases it received (untrusted server), or of the
    q~_t with its own noise, whose sequence keeps what `plan.releases` claims for each silo's records (trusted
    server).
    """

    def __init__(self, plan: Plan, initial: Tensor, noise: KeyedNormal) -> None:
        self.plan = plan
        self.counts: Counts | None = Counts(0, 0)  # None once a silo did not tell, as silos with a guard do not
        self.rounds_done = 0
        self._noise = noise
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
        """
        self.summary()
        self.learn_roster(grid, timeout)
        result = Result(arrays=initial_arrays)
        config = train_config or ConfigRecord()
        for t in range(1, (num_rounds or self.plan.schedule.rounds) + 1):
            query = one_array(self.plan.optimizer.query(self._optimizer_state))
            replies = grid.send_and_receive(self.configure_train(t, query, config, grid), timeout=timeout)
            self.aggregate_train(t, replies)
            metrics = evaluate_fn(t, one_array(self.model)) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[t] = metrics
        result.arrays = one_array(self.model)
        return result

    def learn_roster(self, grid: Grid, timeout: float) -> None:
        """Wait for a node for every silo and learn which is which; RunError if one is missing or there twice."""
        silos = len(self._weights)
        nodes = self._wait_for_nodes(grid, silos, timeout)
        found: dict[int, int] = {}
        for reply in grid.send_and_receive(
            [Message(RecordDict(), node, ROSTER) for node in nodes], timeout=timeout
        ):
            if reply.has_error():
                raise RunError(f"a node failed to say which silo it is: {reply.error.reason}")
            silo = number_in(reply.content, "metrics", "silo")
            if silo in found or not 0 <= silo < silos:
                raise RunError(f"a node says it is silo {silo}: expected each of 0 … {silos - 1} once")
            found[silo] = reply.metadata.src_node_id
        missing = sorted(set(range(silos)) - set(found))
        if missing:
            raise RunError(f"no node says it is silo {', '.join(map(str, missing))}")
        self._nodes = [found[silo] for silo in range(silos)]

    def _wait_for_nodes(self, grid: Grid, silos: int, timeout: float) -> list[int]:
        deadline = time.monotonic() + timeout
        while len(nodes := list(grid.get_node_ids())) < silos:
            if time.monotonic() > deadline:
                raise RunError(f"{len(nodes)} of {silos} silos were connected after {timeout:.0f} s")
            time.sleep(_ROSTER_POLL)
        if len(nodes) > silos:
            raise RunError(f"{len(nodes)} nodes are connected, the scenario has {silos} silos")
        return nodes

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
        for reply in replies:
            silo = asked[reply.metadata.reply_to_message_id]
            releases[silo] = self._release_in(reply, silo, server_round)
        missing = sorted(set(range(len(self._nodes))) - set(releases))
        if missing:
            raise RunError(f"round {server_round}: no reply from silo {', '.join(map(str, missing))}")
        # Sorted by silo before any sum, so that the order of arrival cannot change the last bit.
        mean = self._weights @ torch.stack([releases[silo] for silo in range(len(self._nodes))])
        if not is_finite(mean):  # weights are positive, so a value that is not finite shows in the mean
            wrong = ", ".join(str(silo) for silo, release in releases.items() if not is_finite(release))
            raise RunError(f"silo {wrong}, round {server_round}: the release has values that are not finite")
        released = mean + self._server_noise(server_round)
        current = self.plan.estimator.round(server_round)
        self._optimizer_state = self.plan.optimizer.update(self._optimizer_state, released, current)
        self.rounds_done = server_round
        return one_array(self.plan.optimizer.query(self._optimizer_state)), None

    def _server_noise(self, t: int) -> Tensor | float:
        std = float(self.plan.noise.std_of(SERVER))
        if not std:
            return 0.0
        fresh = torch.from_numpy(self._noise.vector(len(self.model), SERVER, t)).mul_(std)
        noise, self._mechanism_state = self.plan.mechanism.noise(self._mechanism_state, t, fresh)
        return noise

    def _release_in(self, reply: Message, silo: int, t: int) -> Tensor:
        if reply.has_error():
            raise RunError(f"silo {silo} failed in round {t}: {reply.error.reason}")
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
