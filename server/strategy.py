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

from fedpriv.core.errors import RunError, printable
from fedpriv.core.files import OWN, write_bytes
from fedpriv.core.random import SERVER, KeyedNormal
from fedpriv.noise.integers.strategies import pack, unpack
from fedpriv.plan.plan import NOBODY, Absences, Plan
from fedpriv.protocol.messages import (
    COMMIT,
    KEY,
    LONGEST,
    SEEN,
    TRAIN,
    Counts,
    also_in,
    bytes_in,
    commits_in,
    counts_in,
    messages_to,
    one_array,
    query_content,
    refusal_in,
    remembered,
    vector_in,
    with_also,
)
from fedpriv.rounds.floats import FloatSteps, Seeded
from fedpriv.rounds.integers import IntegerSteps, tensors
from fedpriv.rounds.round import RoundSteps, State, is_finite, substitute_message
from fedpriv.server.grid import learn_roster
from fedpriv.silo.masks import CARD_BYTES, KEY_BYTES


class SeenCommits:
    """The commits of silo 0, 1, … in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[int, bytes]()

    def told_to(self, silo: int, content: RecordDict) -> RecordDict:
        """A query with what is remembered of this silo; `content` is left as it is."""
        known = self._known.get(silo) or self._read(silo)
        return with_also(content, SEEN, known) if known else content

    def note(self, silo: int, content: RecordDict) -> None:
        """Remember what a reply tells; whatever a silo sends, no more than a few hundred bytes of each."""
        told = also_in(content, COMMIT)
        try:
            known = remembered(self._known.get(silo) or self._read(silo), told)
        except ValueError:  # none, as in a simulation, or nonsense
            return
        self._known[silo] = known
        try:
            write_bytes(self._path(silo), known, OWN, durable=False)
        except OSError as error:
            log(WARNING, "%s: cannot be written (%s); an older ledger may go unnoticed", self._path(silo), error)

    def _read(self, silo: int) -> bytes:
        try:
            with self._path(silo).open("rb") as file:
                known = file.read(LONGEST + 1)
            commits_in(known)
        except (OSError, ValueError):
            return b""
        return known

    def _path(self, silo: int) -> Path:
        return self._folder / f"silo-{silo}"


class Kept(NamedTuple):
    """A journal's entry of a round that is over: enough to make what it released again."""

    values: Tensor
    """q~_t (d,), or the noisy integers y_t in a row."""
    link: bytes = b""
    """The chain of the queries, where noise depends on them."""


class Released(NamedTuple):
    """A round's release: q~_t, shape (d,), of the run's type."""

    vector: Tensor
    kept: Kept
    secret: bytes = b""
    """State that later rounds need and nobody else may see."""


class ServerSums:
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
        secret: Callable[[], bytes] = bytes,
        *,
        simulated: KeyedNormal | None = None,
        apart: bool = False,
    ) -> None:
        """`initial` (d,) has the run's type, and `key` is that of the noise which is added to integers.

        `secret` gives what the last round that is over kept, b"" before the first, and `simulated` a simulation's
        source of noise in floating point; None where releases are meant.  With `apart`, what is published is each
        silo's vector by itself, in a row.

        Guarantee: it is what the silos released, and no noise is drawn here.
        """
        self._plan, self._dtype, self._secret, self._apart = plan, initial.dtype, secret, apart
        self._steps: RoundSteps = (
            IntegerSteps(plan, key) if plan.integers_at_server else _float_steps(plan, initial.dtype, simulated)
        )
        self._state = self._steps.start(SERVER)
        self._kept: bytes | None = None
        self.simulated = simulated is not None and bool(float(plan.noise.std_of(SERVER)))
        """Whether there is noise here that anybody can take away who knows the scenario's seed."""

    def released(self, messages: list[Tensor], t: int, query: Tensor) -> Released:
        """From the messages of silo 0, 1, … to the answers to `query`; RunError for one that cannot be used."""
        total = torch.cat(messages) if self._apart else self._steps.added(messages, t)
        if not is_finite(total):  # weights are positive, so a value that is not finite shows in the mean
            wrong = ", ".join(str(silo) for silo, message in enumerate(messages) if not is_finite(message))
            raise RunError(f"silo {wrong}, round {t}: the release has values that are not finite")
        noisy, state = self._steps.noisy(self._before(), t, total, SERVER, query)
        noisy = noisy.to(self._plan.stored_dtype)
        vector, self._state = self._steps.leaving(state, t, noisy, SERVER)
        if self._plan.adds_to_earlier:
            self._kept = pack(tuple(vector.numpy() for vector in state.sums))
        return Released(vector.to(self._dtype), Kept(noisy.reshape(-1), state.chain), self._kept or b"")

    def repeat(self, known: Kept, t: int) -> Tensor:
        """q~_t of a round that is over, (d,)."""
        state = self._state._replace(chain=known.link)
        vector, self._state = self._steps.leaving(state, t, known.values, SERVER)
        return vector.to(self._dtype)

    def _before(self) -> State:
        """The state before a round: sums that nobody else may see are the journal's after a restart."""
        if not self._plan.adds_to_earlier:
            return self._state
        before = self._kept if self._kept is not None else self._secret()
        return self._state._replace(sums=tensors(unpack(before))) if before else self._state


def _float_steps(plan: Plan, dtype: torch.dtype, simulated: KeyedNormal | None) -> FloatSteps:
    if simulated is not None:
        return FloatSteps(plan, Seeded(plan, simulated, dtype))
    if float(plan.noise.std_of(SERVER)):
        raise ValueError("a server's noise is floating point in simulations only")
    return FloatSteps(plan)


def answers_of(
    asked: Mapping[int, Message], replies: Iterable[Message], what: str
) -> tuple[dict[int, RecordDict], str]:
    """Sort replies to `asked` by silo, with the reasons of those that refused; RunError for a failure."""
    # A grid numbers messages when it sends them; an error reply names the message, not always the node.
    numbered = {message.metadata.message_id: silo for silo, message in asked.items()}
    answers: dict[int, RecordDict] = {}
    reasons = ""
    for reply in replies:
        silo = numbered[reply.metadata.reply_to_message_id]
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


def all_answers(asked: Mapping[int, Message], replies: Iterable[Message], what: str) -> list[RecordDict]:
    """The answers of silo 0, 1, …; RunError unless every silo gave one."""
    answers, reasons = answers_of(asked, replies, what)
    if without := sorted(set(asked) - set(answers)):
        raise RunError(f"{what}: no reply from silo {', '.join(map(str, without))}{reasons}")
    return [answers[silo] for silo in sorted(asked)]


def release_in(
    content: RecordDict, where: str, length: int, dtype: torch.dtype, simulated: bool
) -> tuple[Tensor, Counts | None]:
    """The release of a reply, (length,), and what a simulation's silo tells with it.

    RunError, with `where`, for anything else, and where `simulated` noise would be added to a guard's sums.
    """
    try:
        release, told = vector_in(content, "release"), counts_in(content)
    except ValueError as error:
        raise RunError(f"{where}: {error}") from None
    if told is None and simulated:
        raise RunError(
            f"{where}: it answers as silos with guards do, and this server's noise is a simulation's, drawn from "
            "the scenario's seed, which protects nobody; use --engine deployment"
        )
    if release.shape != (length,) or release.dtype != dtype:
        raise RunError(
            f"{where}: a release of shape {tuple(release.shape)} and type {release.dtype}, expected ({length},) "
            f"and {dtype}"
        )
    return release, told


EvaluateFn = Callable[[int, ArrayRecord], None]
Roster = Callable[[Grid, int, float], list[int]]
"""(grid, silos, seconds to wait) -> the node id of silo 0, 1, …"""


Missed = dict[int, list[int]]
"""Silo -> the rounds in which it did not answer in time."""


class Journal(Protocol):
    """The releases of a run round by round, from which it goes on after a crash."""

    def released(self, t: int) -> Kept | None:
        """The entry of round t, if it is over."""
        ...

    def record(self, t: int, kept: Kept, missed: Missed, last: Tensor | None, secret: bytes = b"") -> None:
        """Keep what round t released for good, before anything that depends on it leaves the server.

        `secret` is what the next round needs and nobody else may see.  With it the rounds that silos missed, and
        every silo's last release, (silos, d), if that can be needed.
        """
        ...

    def missed(self) -> Missed:
        """The rounds that silos missed until now."""
        ...

    def last(self) -> Tensor | None:
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
        sums: ServerSums,
        journal: Journal | None = None,
        roster: Roster = learn_roster,
        *,
        without_missing: bool = False,
        absences: Absences = NOBODY,
        commits: SeenCommits | None = None,
    ) -> None:
        """With `without_missing`, a run goes on without a silo that does not answer (`substitute_message`).

        In a simulation `absences` says which silos those are: they are not asked.  `commits` of silos' ledgers
        are remembered where silos have some.
        """
        self.plan = plan
        self.counts: Counts | None = Counts(0, 0)  # None once a silo did not tell, as silos with a guard do not
        self.rounds_done = 0
        self._journal, self._commits, self._roster, self._sums = journal, commits, roster, sums
        self.missed: Missed = journal.missed() if journal else {}
        kept = journal.last() if journal else None
        self._absent = {t: absences.away(t) for t in range(1, plan.schedule.rounds + 1)} if absences else {}
        self._goes_on = without_missing or bool(absences)
        self._without_missing = without_missing
        silos = len(plan.weights) if self._goes_on else 0
        self._last = torch.zeros(silos, len(initial), dtype=initial.dtype) if kept is None else kept
        self._lengths = tuple(planned.message_length for planned in plan.rounds)
        self._optimizer_state = plan.optimizer.start(initial)
        self._nodes: list[int] = []  # the node id of silo 0, 1, …
        self._asked: dict[int, Message] = {}  # the message to each silo that is asked in the round under way
        self._keys = b""  # the silos' public keys in a row, where they mask what they send
        self._shown: tuple[Tensor, ArrayRecord] | None = (
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
            known = self._journal.released(t) if self._journal else None
            if known is None:
                self.nodes(grid, timeout)
                if self.plan.masked:
                    self._keys = self._keys or self._public_keys(grid, timeout)
                    config["keys"] = self._keys
                messages = self.configure_train(t, self.query(), config, grid)
                self.aggregate_train(t, grid.send_and_receive(messages, timeout=timeout))
            else:
                self._move(t, self._sums.repeat(known, t))
            if evaluate is not None:
                evaluate(t, self.published())

    def nodes(self, grid: Grid, timeout: float) -> list[int]:
        """The node id of silo 0, 1, …; RunError if one is not there in so many seconds."""
        self._nodes = self._nodes or self._roster(grid, len(self.plan.weights), timeout)
        return self._nodes

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """One message a silo that is there, in the order of silos, all with the same query and round number."""
        content = self.content_of(arrays, server_round, config)
        away = self._absent.get(server_round, frozenset())
        asked = [silo for silo in range(len(self._nodes)) if silo not in away]
        if (commits := self._commits) is None:
            messages = messages_to([self._nodes[silo] for silo in asked], content, TRAIN)
        else:
            messages = [Message(commits.told_to(silo, content), self._nodes[silo], TRAIN) for silo in asked]
        self._asked = dict(zip(asked, messages, strict=True))
        return self._asked.values()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> None:
        """Move the optimizer by the noisy mean; RunError if any silo's release is missing or unusable."""
        answers, reasons = answers_of(self._asked, replies, f"round {server_round}")
        releases = {silo: self._release_in(content, silo, server_round) for silo, content in answers.items()}
        if self._commits is not None:
            for silo, content in answers.items():
                self._commits.note(silo, content)
        unknown = sorted(set(self._asked) - set(releases))
        if unknown and not (self._without_missing and releases):
            raise RunError(f"round {server_round}: no reply from silo {', '.join(map(str, unknown))}{reasons}")
        for silo in sorted(set(range(len(self._nodes))) - set(releases)):
            self.missed.setdefault(silo, []).append(server_round)
            releases[silo] = substitute_message(self.plan, self._last[silo], server_round)
        # Sorted by silo before any sum, so that the order of arrival cannot change the last bit.
        messages = [releases[silo] for silo in range(len(self._nodes))]
        query = self.plan.optimizer.query(self._optimizer_state)
        released = self._sums.released(messages, server_round, query)
        # Long vectors of the round that is over go before others are made.
        self._asked, self._shown = {}, None
        del answers, releases, replies, query
        keeps = self._goes_on and not self.plan.adds_to_earlier
        if keeps:
            self._last = torch.stack(messages)
        del messages
        if self._journal:
            self._journal.record(
                server_round, released.kept, self.missed, self._last if keeps else None, released.secret
            )
        self._move(server_round, released.vector)

    def query(self) -> ArrayRecord:
        """The query of the next round."""
        return self._array(self.plan.optimizer.query(self._optimizer_state))

    def published(self) -> ArrayRecord:
        """The model that a run which stopped now would publish, as arrays."""
        return self._array(self.model)

    def _array(self, vector: Tensor) -> ArrayRecord:
        """`vector` (d,) in bytes: those of the last if it is the same, as a model that is asked about next is."""
        if self._shown is None or self._shown[0] is not vector:
            self._shown = vector, self.record_of(vector)
        return self._shown[1]

    def record_of(self, vector: Tensor) -> ArrayRecord:
        """The arrays that a vector (d,) is sent and published as."""
        return one_array(vector)

    def content_of(self, arrays: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
        """The content of the message that asks silos at the query in `arrays`."""
        return query_content(arrays, t, config)

    def _public_keys(self, grid: Grid, timeout: float) -> bytes:
        """The public keys of silo 0, 1, … in a row; RunError unless every silo gives one."""
        self._asked = {silo: Message(RecordDict(), node, KEY) for silo, node in enumerate(self._nodes)}
        replies = grid.send_and_receive(self._asked.values(), timeout=timeout)
        keys = b""
        for silo, content in enumerate(all_answers(self._asked, replies, "public keys")):
            try:
                key = bytes_in(content, "key", "public")
            except ValueError as error:
                raise RunError(f"silo {silo}, public keys: {error}") from None
            if len(key) not in (KEY_BYTES, CARD_BYTES):
                raise RunError(
                    f"silo {silo}, public keys: {len(key)} bytes, expected {KEY_BYTES}, or {CARD_BYTES} if signed"
                )
            keys += key
        return keys

    def _move(self, t: int, released: Tensor) -> None:
        current = self.plan.rounds[t - 1].step
        self._optimizer_state = self.plan.optimizer.update(self._optimizer_state, released, current)
        self.rounds_done = t

    def _release_in(self, content: RecordDict, silo: int, t: int) -> Tensor:
        where, length = f"silo {silo}, round {t}", self._lengths[t - 1]
        release, told = release_in(content, where, length, self.plan.message_dtype, self._sums.simulated)
        self.counts = None if told is None or self.counts is None else self.counts.with_those(told)
        return release
