"""The server's side of a round, in steps of a Flower Strategy: broadcast x_t, collect every silo's sum, move.

    masked     y_t = Σ_i y_{i,t}, of which it knows nothing else
    trusted    y_t = (C Σ_i s_{i,t}) + z_t, keyed by (key, server, round, chain of the queries, C s)
    both       q~_t = unit / ΣB · (B y)_t
    else       q~_t = Σ_i p_i · release_i, and in a simulation of a trusted server its noise, in the run's type
    then       x_{t+1} from the optimizer

One strategy serves every trust setting and algorithm: `ServerSums` makes q~_t of the messages of a round.
The mean has fixed weights; a missing, failed, malformed or non-finite reply ends the run with the silo's number
and the round, never with a mean over fewer.  A silo that does not answer may, where the scenario says so, count
with an increment of 0: its weight stays, and the round is on record.

What a coordinator remembers of silos' ledgers: the last commit that each reply was in.

It is sent again with the next query, in this run and in the next ones, so that a silo whose ledger and mark were
put back together notices.  A file a silo; what is in it is public, and whoever removes it takes a hint away.
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
    """The commits of silo 0, 1, … in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._cached_checkpoints = folder, dict[int, bytes]()

    def add_checkpoints(self, silo: int, content: RecordDict) -> RecordDict:
        """A query with what is remembered of this silo; `content` is left as it is."""
        known = self._cached_checkpoints.get(silo) or self._read(silo)
        return add_bytes(content, SERVER_CHECKPOINTS, known) if known else content

    def record_checkpoint(self, silo: int, content: RecordDict) -> None:
        """Remember what a reply tells; whatever a silo sends, no more than a few hundred bytes of each."""
        told = read_optional_bytes(content, REPLY_CHECKPOINT)
        try:
            known = update_checkpoints(self._cached_checkpoints.get(silo) or self._read(silo), told)
        except ValueError:  # none, as in a simulation, or nonsense
            return
        self._cached_checkpoints[silo] = known
        try:
            write_bytes(self._path(silo), known, PRIVATE_MODE, durable=False)
        except OSError as error:
            log(WARNING, "%s: cannot be written (%s); an older ledger may go unnoticed", self._path(silo), error)

    def _read(self, silo: int) -> bytes:
        try:
            with self._path(silo).open("rb") as file:
                known = file.read(MAX_CHECKPOINT_BYTES + 1)
            unpack_checkpoints(known)
        except (OSError, ValueError):
            return b""
        return known

    def _path(self, silo: int) -> Path:
        return self._folder / f"silo-{silo}"


class JournalEntry(NamedTuple):
    """A journal's entry of a round that is over: enough to make what it released again."""

    noisy_values: Tensor
    """q~_t (d,), or the noisy integers y_t in a row."""
    query_chain: bytes = b""
    """The chain of the queries, where noise depends on them."""


class ServerRelease(NamedTuple):
    """A round's release: q~_t, shape (d,), of the run's type."""

    vector: Tensor
    entry: JournalEntry
    secret_state: bytes = b""
    """State that later rounds need and nobody else may see."""


class ServerAggregator:
    """The server's side of every round of one run, in order.

    Guarantee: a server that really releases adds no noise in floating point; see `integer_sums`.

    Guarantee: what is released is a function of y_t alone, which a journal keeps; the noise of a trusted server
    is keyed by all that was asked and by what it is added to, so that a round which is put back and comes with
    other sums has other noise, and the same round the same.
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
        """`initial` (d,) has the run's type, and `key` is that of the noise which is added to integers.

        `secret` gives what the last round that is over kept, b"" before the first, and `simulated` a simulation's
        source of noise in floating point; None where releases are meant.  With `apart`, what is published is each
        silo's vector by itself, in a row.

        Guarantee: it is what the silos released, and no noise is drawn here.
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
        """Whether there is noise here that anybody can take away who knows the scenario's seed."""

    def make_release(self, messages: list[Tensor], t: int, query: Tensor) -> ServerRelease:
        """From the messages of silo 0, 1, … to the answers to `query`; RunError for one that cannot be used."""
        total = torch.cat(messages) if self._publishes_each_silo else self._steps.aggregate(messages, t)
        if not is_finite(total):  # weights are positive, so a value that is not finite shows in the mean
            wrong = ", ".join(str(silo) for silo, message in enumerate(messages) if not is_finite(message))
            raise RunError(f"silo {wrong}, round {t}: the release has values that are not finite")
        noisy, state = self._steps.add_noise(self._load_state(), t, total, SERVER, query)
        noisy = noisy.to(self._plan.stored_dtype)
        vector, self._state = self._steps.release(state, t, noisy, SERVER)
        if self._plan.sends_round_sums:
            self._secret_state = pack_state(tuple(vector.numpy() for vector in state.accumulator))
        return ServerRelease(
            vector.to(self._dtype), JournalEntry(noisy.reshape(-1), state.query_chain), self._secret_state or b""
        )

    def repeat_release(self, entry: JournalEntry, t: int) -> Tensor:
        """q~_t of a round that is over, (d,)."""
        state = self._state._replace(query_chain=entry.query_chain)
        vector, self._state = self._steps.release(state, t, entry.noisy_values, SERVER)
        return vector.to(self._dtype)

    def _load_state(self) -> RoundState:
        """The state before a round: sums that nobody else may see are the journal's after a restart."""
        if not self._plan.sends_round_sums:
            return self._state
        before = self._secret_state if self._secret_state is not None else self._load_secret_state()
        return self._state._replace(accumulator=as_tensors(unpack_state(before))) if before else self._state


def _make_float_steps(plan: Plan, dtype: torch.dtype, simulated_noise: KeyedNormal | None) -> FloatSteps:
    if simulated_noise is not None:
        return FloatSteps(plan, SeededNoise(plan, simulated_noise, dtype))
    if float(plan.noise.std_of(SERVER)):
        raise ValueError("a server's noise is floating point in simulations only")
    return FloatSteps(plan)


def answers_by_silo(
    messages: Mapping[int, Message], replies: Iterable[Message], what: str
) -> tuple[dict[int, RecordDict], str]:
    """Sort replies to `asked` by silo, with the reasons of those that refused; RunError for a failure."""
    # A grid numbers messages when it sends them; an error reply names the message, not always the node.
    numbered = {message.metadata.message_id: silo for silo, message in messages.items()}
    answers: dict[int, RecordDict] = {}
    reasons = ""
    for reply in replies:
        silo = numbered[reply.metadata.reply_to_message_id]
        if reply.has_error():
            raise RunError(f"silo {silo} failed in {what}: {sanitize_line(str(reply.error.reason))}")
        refusal = read_refusal(reply.content)
        if refusal is None:
            answers[silo] = reply.content
        elif refusal.is_final:
            raise RunError(f"{what}: {refusal.reason}")
        else:
            reasons += f"; {refusal.reason}"
    return answers, reasons


def require_all_answers(
    messages: Mapping[int, Message], replies: Iterable[Message], what: str
) -> list[RecordDict]:
    """The answers of silo 0, 1, …; RunError unless every silo gave one."""
    answers, reasons = answers_by_silo(messages, replies, what)
    if without := sorted(set(messages) - set(answers)):
        raise RunError(f"{what}: no reply from silo {', '.join(map(str, without))}{reasons}")
    return [answers[silo] for silo in sorted(messages)]


def read_release(
    content: RecordDict, location: str, length: int, dtype: torch.dtype, has_seeded_noise: bool
) -> tuple[Tensor, RecordCounts | None]:
    """The release of a reply, (length,), and what a simulation's silo tells with it.

    RunError, with `where`, for anything else, and where `simulated` noise would be added to a guard's sums.
    """
    try:
        release, told = read_tensor(content, "release"), read_counts(content)
    except ValueError as error:
        raise RunError(f"{location}: {error}") from None
    if told is None and has_seeded_noise:
        raise RunError(
            f"{location}: it answers as silos with guards do, and this server's noise is a simulation's, drawn "
            "from "
            "the scenario's seed, which protects nobody; use --engine deployment"
        )
    if release.shape != (length,) or release.dtype != dtype:
        raise RunError(
            f"{location}: a release of shape {tuple(release.shape)} and type {release.dtype}, expected "
            f"({length},) "
            f"and {dtype}"
        )
    return release, told


EvaluateFn = Callable[[int, ArrayRecord], None]
RosterFinder = Callable[[Grid, int, float], list[int]]
"""(grid, silos, seconds to wait) -> the node id of silo 0, 1, …"""


MissedRounds = dict[int, list[int]]
"""Silo -> the rounds in which it did not answer in time."""


class Journal(Protocol):
    """The releases of a run round by round, from which it goes on after a crash."""

    def read_entry(self, t: int) -> JournalEntry | None:
        """The entry of round t, if it is over."""
        ...

    def record(
        self,
        t: int,
        entry: JournalEntry,
        missed_rounds: MissedRounds,
        last_releases: Tensor | None,
        secret_state: bytes = b"",
    ) -> None:
        """Keep what round t released for good, before anything that depends on it leaves the server.

        `secret` is what the next round needs and nobody else may see.  With it the rounds that silos missed, and
        every silo's last release, (silos, d), if that can be needed.
        """
        ...

    def missed_rounds(self) -> MissedRounds:
        """The rounds that silos missed until now."""
        ...

    def last_releases(self) -> Tensor | None:
        """Every silo's last release, (silos, d), if it was kept."""
        ...


class ReleaseStrategy:
    """Noisy means of running sums, handed to the plan's optimizer.

    Guarantee: what it broadcasts is post-processing of the releases it received (untrusted server), or of the
    q~_t with its own noise, or of the sums of masked messages, whose sequence keeps what `releases_of` claims
    for each silo's records (trusted server, secure aggregation).  Masked messages are added up all or none.
    """

    def __init__(
        self,
        plan: Plan,
        initial: Tensor,
        aggregator: ServerAggregator,
        journal: Journal | None = None,
        find_roster: RosterFinder = learn_roster,
        *,
        continue_without_missing: bool = False,
        absences: Absences = NO_ABSENCES,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        """With `without_missing`, a run goes on without a silo that does not answer (`substitute_message`).

        In a simulation `absences` says which silos those are: they are not asked.  `commits` of silos' ledgers
        are remembered where silos have some.
        """
        self.plan = plan
        self.counts: RecordCounts | None = RecordCounts(
            0, 0
        )  # None once a silo did not tell, as silos with a guard do not
        self.rounds_done = 0
        self._journal, self._checkpoints, self._find_roster, self._aggregator = (
            journal,
            checkpoints,
            find_roster,
            aggregator,
        )
        self.missed_rounds: MissedRounds = journal.missed_rounds() if journal else {}
        kept = journal.last_releases() if journal else None
        self._absent_by_round = (
            {t: absences.absent_silos(t) for t in range(1, plan.schedule.rounds + 1)} if absences else {}
        )
        self._substitutes_messages = continue_without_missing or bool(absences)
        self._continue_without_missing = continue_without_missing
        silos = len(plan.weights) if self._substitutes_messages else 0
        self._last_releases = torch.zeros(silos, len(initial), dtype=initial.dtype) if kept is None else kept
        self._message_lengths = tuple(planned.message_length for planned in plan.rounds)
        self._optimizer_state = plan.optimizer.start(initial)
        self._nodes: list[int] = []  # the node id of silo 0, 1, …
        self._pending_messages: dict[
            int, Message
        ] = {}  # the message to each silo that is asked in the round under way
        self._silo_keys = b""  # the silos' public keys in a row, where they mask what they send
        self._encoded_vector: tuple[Tensor, ArrayRecord] | None = (
            None  # a vector, and the bytes of it that are on their way
        )

    @property
    def model(self) -> Tensor:
        """The model a run that stopped now would publish, shape (d,)."""
        return self.plan.optimizer.output(self._optimizer_state)

    def run(
        self, grid: Grid, num_rounds: int = 0, timeout: float = 3600.0, evaluate: EvaluateFn | None = None
    ) -> None:
        """Run the plan's rounds (num_rounds = 0) or the first `num_rounds` of them.

        `evaluate(t, arrays)` is called after round t with the model, which is not the query.  Flower's own
        loop is not used: it exchanges evaluation messages every round, and broadcasts what it evaluates.
        Rounds that the journal has are not asked for again: everything follows from what they released.
        """
        log(INFO, "fedpriv: %d silos, %d rounds", len(self.plan.weights), self.plan.schedule.rounds)
        config = ConfigRecord()
        for t in range(1, (num_rounds or self.plan.schedule.rounds) + 1):
            known = self._journal.read_entry(t) if self._journal else None
            if known is None:
                self.nodes(grid, timeout)
                if self.plan.masked:
                    self._silo_keys = self._silo_keys or self._fetch_public_keys(grid, timeout)
                    config["keys"] = self._silo_keys
                messages = self.configure_train(t, self.query(), config, grid)
                self.aggregate_train(t, grid.send_and_receive(messages, timeout=timeout))
            else:
                self._update_optimizer(t, self._aggregator.repeat_release(known, t))
            if evaluate is not None:
                evaluate(t, self.model_arrays())

    def nodes(self, grid: Grid, timeout: float) -> list[int]:
        """The node id of silo 0, 1, …; RunError if one is not there in so many seconds."""
        self._nodes = self._nodes or self._find_roster(grid, len(self.plan.weights), timeout)
        return self._nodes

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """One message a silo that is there, in the order of silos, all with the same query and round number."""
        content = self.make_content(arrays, server_round, config)
        away = self._absent_by_round.get(server_round, frozenset())
        asked = [silo for silo in range(len(self._nodes)) if silo not in away]
        if (commits := self._checkpoints) is None:
            messages = build_messages([self._nodes[silo] for silo in asked], content, TRAIN)
        else:
            messages = [
                Message(commits.add_checkpoints(silo, content), self._nodes[silo], TRAIN) for silo in asked
            ]
        self._pending_messages = dict(zip(asked, messages, strict=True))
        return self._pending_messages.values()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> None:
        """Move the optimizer by the noisy mean; RunError if any silo's release is missing or unusable."""
        answers, reasons = answers_by_silo(self._pending_messages, replies, f"round {server_round}")
        releases = {silo: self._read_release(content, silo, server_round) for silo, content in answers.items()}
        if self._checkpoints is not None:
            for silo, content in answers.items():
                self._checkpoints.record_checkpoint(silo, content)
        unknown = sorted(set(self._pending_messages) - set(releases))
        if unknown and not (self._continue_without_missing and releases):
            raise RunError(f"round {server_round}: no reply from silo {', '.join(map(str, unknown))}{reasons}")
        for silo in sorted(set(range(len(self._nodes))) - set(releases)):
            self.missed_rounds.setdefault(silo, []).append(server_round)
            releases[silo] = substitute_message(self.plan, self._last_releases[silo], server_round)
        # Sorted by silo before any sum, so that the order of arrival cannot change the last bit.
        messages = [releases[silo] for silo in range(len(self._nodes))]
        query = self.plan.optimizer.query(self._optimizer_state)
        released = self._aggregator.make_release(messages, server_round, query)
        # Long vectors of the round that is over go before others are made.
        self._pending_messages, self._encoded_vector = {}, None
        del answers, releases, replies, query
        keeps = self._substitutes_messages and not self.plan.sends_round_sums
        if keeps:
            self._last_releases = torch.stack(messages)
        del messages
        if self._journal:
            self._journal.record(
                server_round,
                released.entry,
                self.missed_rounds,
                self._last_releases if keeps else None,
                released.secret_state,
            )
        self._update_optimizer(server_round, released.vector)

    def query(self) -> ArrayRecord:
        """The query of the next round."""
        return self._encode_cached(self.plan.optimizer.query(self._optimizer_state))

    def model_arrays(self) -> ArrayRecord:
        """The model that a run which stopped now would publish, as arrays."""
        return self._encode_cached(self.model)

    def _encode_cached(self, vector: Tensor) -> ArrayRecord:
        """`vector` (d,) in bytes: those of the last if it is the same, as a model that is asked about next is."""
        if self._encoded_vector is None or self._encoded_vector[0] is not vector:
            self._encoded_vector = vector, self.encode_vector(vector)
        return self._encoded_vector[1]

    def encode_vector(self, vector: Tensor) -> ArrayRecord:
        """The arrays that a vector (d,) is sent and published as."""
        return to_array_record(vector)

    def make_content(self, arrays: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
        """The content of the message that asks silos at the query in `arrays`."""
        return query_content(arrays, t, config)

    def _fetch_public_keys(self, grid: Grid, timeout: float) -> bytes:
        """The public keys of silo 0, 1, … in a row; RunError unless every silo gives one."""
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

    def _update_optimizer(self, t: int, released: Tensor) -> None:
        current = self.plan.rounds[t - 1].step
        self._optimizer_state = self.plan.optimizer.update(self._optimizer_state, released, current)
        self.rounds_done = t

    def _read_release(self, content: RecordDict, silo: int, t: int) -> Tensor:
        where, length = f"silo {silo}, round {t}", self._message_lengths[t - 1]
        release, told = read_release(
            content, where, length, self.plan.message_dtype, self._aggregator.has_seeded_noise
        )
        self.counts = None if told is None or self.counts is None else self.counts.add(told)
        return release
