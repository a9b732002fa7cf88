"""Flower strategy of the server: broadcast x_t, aggregate the silos' messages, update the optimizer.

In round t, from 1, the query x_t goes to the silos, silo i answers with its message, and the server makes the
release q~_t, (d,), of the messages.  The optimizer, the algorithm's rule, makes the next query x_{t+1} and the
published model from the releases q~_1, …, q~_t.

Messages that are masked, or to which a trusted server adds noise, are integers in real releases.  Then q~_t is
unit / (Σ_i b_i) · (B y)_t, with the unit of the integers, the batch size b_i of silo i, and y_t the sum of the
masked messages, or (C Σ_i s_i)_t with the server's noise for messages s_i.  B and C are the matrices of the noise
mechanism.  In floating point q~_t is the mean of the silos' releases with fixed weights, plus a server's noise in
a simulation.  In evaluations that publish each silo's figures it is the silos' vectors in a row.

If the scenario lets a silo be missing, a substitute message, with an increment of 0, takes the place of its reply.
A query chain is a digest of the queries so far.  The journal is the server's store of releases, from which a run
continues after a crash.  A checkpoint is a position in a silo's ledger, by which the silo recognizes that an older
copy of the ledger was restored.  A node is a SuperNode of Flower.
"""

from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedpriv.core.errors import RunError, sanitize_line
from fedpriv.core.files import PRIVATE_MODE, write_bytes
from fedpriv.core.random import SERVER, KeyedNormal
from fedpriv.noise.integers.strategies import pack_state, unpack_state
from fedpriv.plan.plan import NO_ABSENCES, Absences, Plan
from fedpriv.protocol.messages import (
    MAX_CHECKPOINT_BYTES,
    PUBLIC_KEY_QUERY,
    REPLY_CHECKPOINT,
    SERVER_CHECKPOINTS,
    TRAIN,
    RecordCounts,
    add_bytes,
    build_messages,
    query_content,
    read_bytes_field,
    read_counts,
    read_optional_bytes,
    read_refusal,
    read_tensor,
    to_array_record,
    unpack_checkpoints,
    update_checkpoints,
)
from fedpriv.rounds.floats import FloatSteps, SeededNoise
from fedpriv.rounds.integers import IntegerSteps, as_tensors
from fedpriv.rounds.round import RoundState, RoundSteps, is_finite, substitute_message
from fedpriv.server.grid import learn_roster
from fedpriv.silo.masks import KEY_BYTES, SIGNED_KEY_BYTES


class CheckpointStore:
    """Ledger checkpoints of silo 0, 1, …, one file for each silo in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._cached_checkpoints = folder, dict[int, bytes]()

    def add_checkpoints(self, silo: int, content: RecordDict) -> RecordDict:
        """Return a copy of a query with this silo's checkpoints, and leave `content` unchanged.

        A silo without checkpoints gets `content` itself.
        """
        checkpoints = self._cached_checkpoints.get(silo) or self._read(silo)
        return add_bytes(content, SERVER_CHECKPOINTS, checkpoints) if checkpoints else content

    def record_checkpoint(self, silo: int, content: RecordDict) -> None:
        """Store the checkpoint in a silo's reply, and drop the earlier checkpoint of the same ledger.

        A reply without a checkpoint, or with a malformed one, changes nothing.  A failed write is logged.
        """
        try:
            checkpoints = update_checkpoints(
                self._cached_checkpoints.get(silo) or self._read(silo),
                read_optional_bytes(content, REPLY_CHECKPOINT),
            )
        except ValueError:  # no checkpoint, or a malformed one
            return
        self._cached_checkpoints[silo] = checkpoints
        try:
            # Not durable: a lost checkpoint is a check less, and a sync would cost time in every round.
            write_bytes(self._path(silo), checkpoints, PRIVATE_MODE, durable=False)
        except OSError as error:
            log(WARNING, "%s: cannot be written (%s); an older ledger may go unnoticed", self._path(silo), error)

    def _read(self, silo: int) -> bytes:
        """Read a silo's checkpoints, or return b"" if its file is missing or cannot be used."""
        try:
            with self._path(silo).open("rb") as file:
                # One byte more than allowed is enough to refuse the file.
                checkpoints = file.read(MAX_CHECKPOINT_BYTES + 1)
            unpack_checkpoints(checkpoints)
        except (OSError, ValueError):
            return b""
        return checkpoints

    def _path(self, silo: int) -> Path:
        return self._folder / f"silo-{silo}"


class JournalEntry(NamedTuple):
    """Journal entry of a finished round, from which its release can be computed again."""

    noisy_values: Tensor
    """q~_t, (d,), the silos' vectors in a row if each silo's are published, or integers y_t, flattened."""
    query_chain: bytes = b""
    """Query chain if the server adds up integers, else b"" or zeros."""


class ServerRelease(NamedTuple):
    """Release of a round, with what the journal stores of the round."""

    vector: Tensor
    """q~_t, (d,), in the run's type, or the silos' vectors in a row if each silo's are published."""
    entry: JournalEntry
    """Values from which `vector` can be computed again."""
    secret_state: bytes = b""
    """Packed sums of silos for later rounds, secret outside the server.

    The value is b"" unless the server adds noise to integers.
    """


class ServerAggregator:
    """Aggregator of the messages of one run, called round by round in order.

    Guarantee: outside a simulation the server adds no noise in floating point.

    Guarantee: each release is a function of the plan and of the journal's entries (`JournalEntry`), y_t or q~_t of
    the rounds so far.  The noise that a trusted server adds to integers is keyed by the run's key, by all queries
    so far and by the sums to which the noise is added, so that under one key a round that is rolled back and
    repeated with other queries or sums has other noise, and a round repeated with the same queries and sums has
    the same noise.
    """

    def __init__(
        self,
        plan: Plan,
        initial: Tensor,
        key: bytes,
        load_secret_state: Callable[[], bytes] = bytes,
        *,
        simulated_noise: KeyedNormal | None = None,
        publishes_each_silo: bool = False,
    ) -> None:
        """Set up the aggregation of a plan.

        Guarantee: with `publishes_each_silo`, and a plan without masks whose server adds no noise, the release is
        what the silos released, and the aggregator draws no noise.

        Args:
            plan: Plan of the run.
            initial: Start vector, (d,), in the run's type.
            key: Key of the noise that a server adds to integers.
            load_secret_state: Function that returns the secret state, which is packed sums of silos, after the
                last finished round, or b"" if there is none.
            simulated_noise: Source of floating-point noise in a simulation, or None for real releases.
            publishes_each_silo: Whether the release is the silos' vectors in a row, instead of their mean.

        Raises:
            ValueError: The server would add floating-point noise outside a simulation.
        """
        self._plan, self._dtype, self._load_secret_state, self._publishes_each_silo = (
            plan,
            initial.dtype,
            load_secret_state,
            publishes_each_silo,
        )
        self._steps: RoundSteps = (
            IntegerSteps(plan, key)
            if plan.integers_at_server
            else _make_float_steps(plan, initial.dtype, simulated_noise)
        )
        self._state = self._steps.initial_state(SERVER)
        self._secret_state: bytes | None = None
        self.has_seeded_noise = simulated_noise is not None and bool(float(plan.noise.std_of(SERVER)))
        """True if the server adds noise that can be removed with the scenario's seed."""

    def make_release(self, messages: list[Tensor], t: int, query: Tensor) -> ServerRelease:
        """Aggregate the messages of a round, add the server's noise if there is any, and return the release.

        Args:
            messages: Message of silo 0, 1, …, each of the round's `message_length` in the plan's `message_dtype`.
            t: Round, from 1, the one after the last round that was released or repeated.
            query: Query x_t of the round, (d,), by which the noise of a trusted server is keyed.

        Raises:
            RunError: The messages or their sum are not finite, malformed, or beyond the bounds of the plan.
        """
        total = torch.cat(messages) if self._publishes_each_silo else self._steps.aggregate(messages, t)
        if not is_finite(total):
            bad_silos = ", ".join(str(silo) for silo, message in enumerate(messages) if not is_finite(message))
            raise RunError(
                f"silo {bad_silos or '0, 1, …'}, round {t}: the release has values that are not finite, or too "
                "large to add"
            )
        noisy, state = self._steps.add_noise(self._load_state(), t, total, SERVER, query)
        noisy = noisy.to(self._plan.stored_dtype)  # as the journal stores it, for `repeat_release`
        vector, self._state = self._steps.release(state, t, noisy, SERVER)
        if self._plan.sends_round_sums:  # then the server, not the silos, keeps the sums over rounds
            self._secret_state = pack_state(tuple(vector.numpy() for vector in state.accumulator))
        return ServerRelease(
            vector.to(self._dtype), JournalEntry(noisy.reshape(-1), state.query_chain), self._secret_state or b""
        )

    def repeat_release(self, entry: JournalEntry, t: int) -> Tensor:
        """Compute the release of a finished round from its journal entry, without messages and new noise.

        The call takes the place of `make_release` for this round.
        """
        state = self._state._replace(query_chain=entry.query_chain)
        vector, self._state = self._steps.release(state, t, entry.noisy_values, SERVER)
        return vector.to(self._dtype)

    def _load_state(self) -> RoundState:
        """Return the state before a round, with the secret accumulator from the journal after a restart."""
        if not self._plan.sends_round_sums:
            return self._state
        before = self._secret_state if self._secret_state is not None else self._load_secret_state()
        return self._state._replace(accumulator=as_tensors(unpack_state(before))) if before else self._state


def _make_float_steps(plan: Plan, dtype: torch.dtype, simulated_noise: KeyedNormal | None) -> FloatSteps:
    """Make the server's round steps in floating point, with the noise of a simulation or without noise.

    Raises:
        ValueError: The server has noise, and `simulated_noise` is None.
    """
    if simulated_noise is not None:
        return FloatSteps(plan, SeededNoise(plan, simulated_noise, dtype))
    if float(plan.noise.std_of(SERVER)):
        raise ValueError("a server's noise is floating point in simulations only")
    return FloatSteps(plan)


def answers_by_silo(
    messages: Mapping[int, Message], replies: Iterable[Message], step: str
) -> tuple[dict[int, RecordDict], str]:
    """Return the replies to `messages` by silo, and the reasons of refusals that are not final.

    A refusal is final if a repeated query is refused, too.

    Args:
        messages: Message to each silo, by silo number.
        replies: Replies in any order, at most one of each silo.
        step: Name of the step, such as "round 3", for errors.

    Returns:
        The content of each reply that is not a refusal, by silo, and a text with "; " before each reason.

    Raises:
        RunError: A silo failed, or refused for good.
    """
    # By message, because an error reply may lack the node.
    silo_by_message = {message.metadata.message_id: silo for silo, message in messages.items()}
    answers: dict[int, RecordDict] = {}
    reasons = ""
    for reply in replies:
        silo = silo_by_message[reply.metadata.reply_to_message_id]
        if reply.has_error():
            raise RunError(f"silo {silo} failed in {step}: {sanitize_line(str(reply.error.reason))}")
        refusal = read_refusal(reply.content)
        if refusal is None:
            answers[silo] = reply.content
        elif refusal.is_final:
            raise RunError(f"{step}: {refusal.reason}")
        else:
            reasons += f"; {refusal.reason}"
    return answers, reasons


def require_all_answers(
    messages: Mapping[int, Message], replies: Iterable[Message], step: str
) -> list[RecordDict]:
    """Return the contents of the replies of silo 0, 1, … in order.

    The arguments are those of `answers_by_silo`.

    Raises:
        RunError: A silo failed, refused or did not reply.
    """
    answers, reasons = answers_by_silo(messages, replies, step)
    if absent_silos := sorted(set(messages) - set(answers)):
        raise RunError(f"{step}: no reply from silo {', '.join(map(str, absent_silos))}{reasons}")
    return [answers[silo] for silo in sorted(messages)]


def read_release(
    content: RecordDict, location: str, length: int, dtype: torch.dtype, has_seeded_noise: bool
) -> tuple[Tensor, RecordCounts | None]:
    """Read a silo's release, (length,), and its numbers of records and clipped records.

    Args:
        content: Content of the reply.
        location: Silo, and round or evaluation, for errors.
        length: Expected length of the release.
        dtype: Expected type of the release.
        has_seeded_noise: Whether the server adds a simulation's noise, which protects no silo with a guard.

    Returns:
        The release, and the numbers, or None if the silo sends none, as with a guard.

    Raises:
        RunError: The release is missing, malformed or of another shape or type, the counts are malformed, or
            simulated noise would be added to the sums of a silo with a guard.
    """
    try:
        release, counts = read_tensor(content, "release"), read_counts(content)
    except ValueError as error:
        raise RunError(f"{location}: {error}") from None
    if counts is None and has_seeded_noise:
        raise RunError(
            f"{location}: it answers as silos with guards do, and this server's noise is a simulation's, "
            "drawn from the scenario's seed, which protects nobody; use --engine deployment"
        )
    if release.shape != (length,) or release.dtype != dtype:
        raise RunError(
            f"{location}: a release of shape {tuple(release.shape)} and type {release.dtype}, "
            f"expected ({length},) and {dtype}"
        )
    return release, counts


EvaluateFn = Callable[[int, ArrayRecord], None]
"""(round, model) -> nothing, called after the round."""
RosterFinder = Callable[[Grid, int, float], list[int]]
"""(grid, silo count, timeout in seconds) -> the node id of silo 0, 1, …"""


MissedRounds = dict[int, list[int]]
"""Silo -> rounds in which a substitute message took the place of its reply."""


class Journal(Protocol):
    """Store of a run's releases by round, from which the run continues after a crash."""

    def read_entry(self, t: int) -> JournalEntry | None:
        """Return the entry of round t, or None if the round is not finished."""
        ...

    def record(
        self,
        t: int,
        entry: JournalEntry,
        missed_rounds: MissedRounds,
        last_releases: Tensor | None,
        secret_state: bytes = b"",
    ) -> None:
        """Store the release of round t durably, as in `ServerJournal.record`."""
        ...

    def missed_rounds(self) -> MissedRounds:
        """Return the rounds that silos missed until now."""
        ...

    def last_releases(self) -> Tensor | None:
        """Return each silo's last message, or its substitute, (silos, d), or None if it is not stored."""
        ...


class ReleaseStrategy:
    """Rounds of one run: broadcast a query, aggregate the replies, hand the release to the optimizer.

    Guarantee: every query is post-processing of the silos' absences and of one of three sequences: the releases
    that the strategy received (untrusted server), the q~_t with the server's own noise (trusted server), or the
    sums of masked messages (secure aggregation).  In a run with noise that no seed decides, the sequence keeps
    what `make_release_streams` claims for each silo's records.  Masked messages are added up all or none.
    """

    def __init__(
        self,
        plan: Plan,
        initial: Tensor,
        aggregator: ServerAggregator,
        journal: Journal | None = None,
        find_roster: RosterFinder = learn_roster,
        *,
        min_replies: int | None = None,
        absences: Absences = NO_ABSENCES,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        """Set up a run, and resume it from the journal if there is one.

        Args:
            plan: Plan of the run.
            initial: Start vector, (d,), in the run's type.
            aggregator: Aggregator of the silos' messages.
            journal: Store of the run's releases, or None for a run that cannot resume.
            find_roster: Function that finds the node ids of the silos.
            min_replies: Least number of replies with which a round continues, with a substitute message for each
                silo that does not reply, or None if a missing reply ends the run.
            absences: Absences that the scenario sets.  Absent silos are not queried, and have substitute messages.
            checkpoints: Ledger checkpoints of the silos, or None to store and send none.

        Raises:
            RunError: The journal is damaged or cannot be read.
        """
        self.plan = plan
        # Numbers of records and clipped records so far, or None if they are not known of all replies.
        self.counts: RecordCounts | None = RecordCounts(0, 0) if journal is None else None
        self.rounds_done = 0
        self._journal, self._checkpoints, self._find_roster, self._aggregator = (
            journal,
            checkpoints,
            find_roster,
            aggregator,
        )
        self.missed_rounds: MissedRounds = journal.missed_rounds() if journal else {}
        stored_releases = journal.last_releases() if journal else None
        self._absent_by_round = (
            {t: absences.absent_silos(t) for t in range(1, plan.schedule.rounds + 1)} if absences else {}
        )
        self._substitutes_messages = min_replies is not None or bool(absences)
        self._min_replies = min_replies
        # A substitute message may need a silo's last message, and a run without them stores none.
        silos = len(plan.weights) if self._substitutes_messages else 0
        self._last_releases = (
            torch.zeros(silos, len(initial), dtype=plan.message_dtype)
            if stored_releases is None
            else stored_releases
        )
        self._message_lengths = tuple(round_plan.message_length for round_plan in plan.rounds)
        self._optimizer_state = plan.optimizer.start(initial)
        self._nodes: list[int] = []  # the node id of silo 0, 1, …
        self._pending_messages: dict[int, Message] = {}  # message to each silo in the current round
        self._silo_keys = b""  # concatenated public keys of the silos, if their messages are masked
        self._encoded_vector: tuple[Tensor, ArrayRecord] | None = None  # vector and its encoding

    @property
    def model(self) -> Tensor:
        """Model that the run would publish if it stopped now, (d,)."""
        return self.plan.optimizer.output(self._optimizer_state)

    def run(
        self, grid: Grid, num_rounds: int = 0, timeout: float = 3600.0, evaluate: EvaluateFn | None = None
    ) -> None:
        """Run the plan's rounds, or the first `num_rounds` of them, from the journal if it has them.

        Args:
            grid: Grid with the silos' nodes.
            num_rounds: Number of rounds, or 0 for all rounds of the plan.
            timeout: Longest wait in seconds, for the silos to connect, for their public keys, and for the replies
                of each round.
            evaluate: Function (t, arrays) that is called after each round t, also one that the journal has, with
                the arrays of the model.

        Raises:
            RunError: A silo is not connected, does not reply although the run needs it, fails, refuses for good,
                or sends an unusable message, or the journal cannot be read or written.
        """
        log(INFO, "fedpriv: %d silos, %d rounds", len(self.plan.weights), self.plan.schedule.rounds)
        config = ConfigRecord()
        for t in range(1, (num_rounds or self.plan.schedule.rounds) + 1):
            entry = self._journal.read_entry(t) if self._journal else None
            if entry is None:
                self.nodes(grid, timeout)
                if self.plan.masked:
                    self._silo_keys = self._silo_keys or self._fetch_public_keys(grid, timeout)
                    config["keys"] = self._silo_keys
                messages = self.configure_train(t, self.query(), config, grid)
                self.aggregate_train(t, grid.send_and_receive(messages, timeout=timeout))
            else:
                self._update_optimizer(t, self._aggregator.repeat_release(entry, t))
            if evaluate is not None:
                evaluate(t, self.model_arrays())

    def nodes(self, grid: Grid, timeout: float) -> list[int]:
        """Return the node id of silo 0, 1, …, after waiting for the silos on the first call.

        Raises:
            RunError: A silo is not connected within `timeout` seconds, or `find_roster` fails in another way.
        """
        self._nodes = self._nodes or self._find_roster(grid, len(self.plan.weights), timeout)
        return self._nodes

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Make one query message for each silo, in order, but for those that the scenario sets as absent.

        Args:
            server_round: Round t.
            arrays: Query, as `query` returns it.
            config: Further values of the messages, such as the silos' public keys.
            grid: Ignored.  The nodes are those that `nodes` has found.
        """
        content = self.make_content(arrays, server_round, config)
        absent_silos = self._absent_by_round.get(server_round, frozenset())
        silo_ids = [silo for silo in range(len(self._nodes)) if silo not in absent_silos]
        if (checkpoints := self._checkpoints) is None:
            messages = build_messages([self._nodes[silo] for silo in silo_ids], content, TRAIN)
        else:
            messages = [
                Message(checkpoints.add_checkpoints(silo, content), self._nodes[silo], TRAIN) for silo in silo_ids
            ]
        self._pending_messages = dict(zip(silo_ids, messages, strict=True))
        return self._pending_messages.values()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> None:
        """Form q~_t from the replies to `configure_train`, store it in the journal, and update the optimizer.

        A missing reply is replaced by the silo's substitute message if the run may continue without it.

        Args:
            server_round: Round t, the one of the last call of `configure_train`.
            replies: Replies in any order.

        Raises:
            RunError: A silo failed, refused for good or sent an unusable release, a reply is missing and the run
                may not continue without it, or the journal cannot be written.
        """
        answers, reasons = answers_by_silo(self._pending_messages, replies, f"round {server_round}")
        releases = {silo: self._read_release(content, silo, server_round) for silo, content in answers.items()}
        if self._checkpoints is not None:
            for silo, content in answers.items():
                self._checkpoints.record_checkpoint(silo, content)
        missing_silos = sorted(set(self._pending_messages) - set(releases))
        if missing_silos and len(releases) < (self._min_replies or len(self._nodes)):
            too_few = f"; {self._min_replies} replies are needed" if releases and self._min_replies else ""
            raise RunError(
                f"round {server_round}: no reply from silo {', '.join(map(str, missing_silos))}{reasons}{too_few}"
            )
        for silo in sorted(set(range(len(self._nodes))) - set(releases)):
            self.missed_rounds.setdefault(silo, []).append(server_round)
            releases[silo] = substitute_message(self.plan, self._last_releases[silo], server_round)
        # Sorted by silo before summation, so that the order of arrival cannot change a rounding.
        messages = [releases[silo] for silo in range(len(self._nodes))]
        query = self.plan.optimizer.query(self._optimizer_state)
        server_release = self._aggregator.make_release(messages, server_round, query)
        # Free the long vectors of this round before new ones are allocated.
        self._pending_messages, self._encoded_vector = {}, None
        del answers, releases, replies, query
        # For an absent silo's exact sums zeros are the substitute, whatever the silo sent before.
        keeps_releases = self._substitutes_messages and not self.plan.sends_round_sums
        if keeps_releases:
            self._last_releases = torch.stack(messages)
        del messages
        if self._journal:
            self._journal.record(
                server_round,
                server_release.entry,
                self.missed_rounds,
                self._last_releases if keeps_releases else None,
                server_release.secret_state,
            )
        self._update_optimizer(server_round, server_release.vector)

    def query(self) -> ArrayRecord:
        """Return the query of the next round."""
        return self._encode_cached(self.plan.optimizer.query(self._optimizer_state))

    def model_arrays(self) -> ArrayRecord:
        """Return the model that the run would publish if it stopped now, as arrays."""
        return self._encode_cached(self.model)

    def _encode_cached(self, vector: Tensor) -> ArrayRecord:
        """Encode a vector, (d,), or return the cached arrays if they are of the same tensor.

        The model and the next query are often the same tensor.
        """
        if self._encoded_vector is None or self._encoded_vector[0] is not vector:
            self._encoded_vector = vector, self.encode_vector(vector)
        return self._encoded_vector[1]

    def encode_vector(self, vector: Tensor) -> ArrayRecord:
        """Encode a vector, (d,), as the arrays that are sent and published."""
        return to_array_record(vector)

    def make_content(self, arrays: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
        """Make the content of the query message of round t, from the query and further values."""
        return query_content(arrays, t, config)

    def _fetch_public_keys(self, grid: Grid, timeout: float) -> bytes:
        """Fetch the public keys with which silos agree on masks, concatenated in the order of silos.

        A key has 32 bytes, and 64 more if it comes with a signature.

        Raises:
            RunError: A silo does not reply, fails or refuses, or sends no key, or one of another length.
        """
        self._pending_messages = {
            silo: Message(RecordDict(), node, PUBLIC_KEY_QUERY) for silo, node in enumerate(self._nodes)
        }
        replies = grid.send_and_receive(self._pending_messages.values(), timeout=timeout)
        keys = b""
        for silo, content in enumerate(require_all_answers(self._pending_messages, replies, "public keys")):
            try:
                key = read_bytes_field(content, "key", "public")
            except ValueError as error:
                raise RunError(f"silo {silo}, public keys: {error}") from None
            if len(key) not in (KEY_BYTES, SIGNED_KEY_BYTES):
                raise RunError(
                    f"silo {silo}, public keys: {len(key)} bytes, expected {KEY_BYTES}, or {SIGNED_KEY_BYTES} if "
                    "signed"
                )
            keys += key
        return keys

    def _update_optimizer(self, t: int, release: Tensor) -> None:
        planned_step = self.plan.rounds[t - 1].step
        self._optimizer_state = self.plan.optimizer.update(self._optimizer_state, release, planned_step)
        self.rounds_done = t

    def _read_release(self, content: RecordDict, silo: int, t: int) -> Tensor:
        location, length = f"silo {silo}, round {t}", self._message_lengths[t - 1]
        release, counts = read_release(
            content, location, length, self.plan.message_dtype, self._aggregator.has_seeded_noise
        )
        self.counts = None if counts is None or self.counts is None else self.counts.add(counts)
        return release
