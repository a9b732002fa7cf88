"""Transcripts: an adversary's view of many canaries on the path of a deployment.

| trust | code that runs | view |
|---|---|---|
| untrusted | guards of silo 0, and of silo 1 if it exists | their replies, and those of silo 0 in a second run |
| secure-aggregation | guards of all silos, each with its ledger | sum of their encoded messages |
| trusted | deployed server with its journal, and guards | releases of the server |
| trusted, with clients | the same server, and its pool of clients | releases of the server |

A *canary* is a planted unit, such as a record, that a fair coin makes present or absent, which is the opposite
increment under replace-one.  Canaries are in silo 0 and have one feature each, so that a vector can be projected
on each canary's direction.  A *guard* is the process of a silo that has its records, answers queries, and stores
its replies in a ledger.  A *release* is a vector (d,) of a round with its noise, and a *reply* is what a silo
sends to the server.  A *pass* is an epoch, or a turn of every client in a cohort.  A *cell* is one run of a
scenario, with all of its settings.

Some views are collected with a restart after half of the rounds, of a guard from its ledger or of the server from
its journal.
"""

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.addons.audit.canaries import (
    FAR_NORM,
    CanaryLayout,
    RestartableSilo,
    expand_units,
    find_audit_clip,
    make_canary_objective,
    open_guarded_silos,
    unit_records,
    zero_shard,
)
from fedpriv.clients.simulated import make_client_app
from fedpriv.core.errors import refuse
from fedpriv.core.figures import format_upper
from fedpriv.core.random import SERVER, KeyedNormal, public_generator, system_key
from fedpriv.engines.inprocess import InProcessGrid, quiet_flower_logs
from fedpriv.loss.estimators import Round
from fedpriv.noise.integers.fixed_point import unpack_sum
from fedpriv.noise.trust import CLIENT, Noise
from fedpriv.participation.registry import DrawnOrder
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import deployed_strategy
from fedpriv.server.journal import EntrySizes, ServerJournal
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo

MAX_PASSES = 3
"""Most passes of a small run in a public order.

A pass is an epoch, a turn of every client, or an evaluation of the test records.
"""
_CLIP_MARGIN = 10.0
_FIRST_GRADIENT = FAR_NORM * 0.5**0.5
"""Norm of a canary's gradient at the model 0, which has probability ½ for each of two classes."""


def count_passes(cell: Cell) -> int:
    """Return the number of epochs, or of a client's turns, where one that ends early counts as whole."""
    return -(-cell.federation.total_rounds // cell.federation.rounds_per_epoch)


def public_run_size(cell: Cell, max_rounds: int) -> tuple[int, int]:
    """Return the number of rounds, at most `max_rounds`, and of passes of a small run in a public order."""
    passes = min(MAX_PASSES, count_passes(cell))
    rounds_per_pass = cell.schedule.rounds if passes == 1 else cell.federation.rounds_per_epoch
    return passes * min(rounds_per_pass, max_rounds // passes), passes


def check_canary_units(cell: Cell) -> None:
    """Check that canaries can represent the units of protection of a cell, and refuse other cells.

    Refused are cells with one of these properties:

    * clients as units without a pool of clients, as guards of silos have no clients,
    * rounds that are drawn for each unit and public, because the tests need cohorts in turn,
    * a clip that follows a quantile, because it is a coordinate of its own in releases,
    * local steps so short that the first local step of a canary, from the model 0, is less than 10 clips long,
      because the tests assume that a canary's update reaches the clip.

    Raises:
        InputError: With the first reason, in one line.
    """
    settings = cell.algorithm.settings
    step, clip = getattr(settings, "local_step", None) or math.inf, find_audit_clip(settings)
    advised_step = format_upper(_CLIP_MARGIN * clip / _FIRST_GRADIENT, 3)
    refuse(
        {
            'privacy.unit = "client": no guard has clients, and the audit knows them in pools only; audit a copy '
            "with federation.clients and federation.cohort in place of silos": (
                cell.privacy.unit == CLIENT.name and cell.federation.clients is None
            ),
            f'federation.sampling = "{cell.schedule.name}": canaries have rounds of their own here, and tests are '
            'made for cohorts that come in turn; audit a copy with sampling = "fixed" and neither '
            "min_separation nor max_participations": isinstance(cell.schedule, DrawnOrder),
            "algorithm.clip_quantile: the clip of the moment is a coordinate of queries and releases, in which "
            "canaries have no direction; audit without it": getattr(settings, "clip_quantile", None) is not None,
            f"algorithm.local_step = {step:g}: steps so short do not lead a canary beyond clip = {clip:g}; audit "
            f"with --set algorithm.local_step={advised_step} or more": (
                step * _FIRST_GRADIENT < _CLIP_MARGIN * clip
            ),
        }
    )


class ClientPool:
    """Silo 0 of a plan whose rows are clients, each with equal records, as many as count."""

    def __init__(self, cell: Cell, plan: Plan, shard: Shard) -> None:
        self._plan, self._records, self._key = plan, unit_records(shard, cell), system_key()
        self._silo = self._make_silo()
        self._state = self._silo.initial_state()

    def restart(self) -> None:
        """Build the pool's code again from records and key, and continue from its state."""
        self._silo = self._make_silo()

    def back_up(self) -> Callable[[], None]:
        """Copy the state, because the key never changes, and return a function that restores the copy."""
        state = self._state

        def restore() -> None:
            self._state = state

        return restore

    def close(self) -> None:
        """Close nothing, as a pool has no open file."""

    def public_key(self, run: str) -> bytes:
        """Return no key, as a trusted server gets no masked messages."""
        return b""

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """Return the sum to which the server adds its noise in round t."""
        release, self._state = self._silo.answer(self._state, t, query)
        return self._silo.make_message(release.vector, t, keys, self._state.query_chain)

    def _make_silo(self) -> Silo:
        return Silo.for_release(0, self._plan, self._records, self._key, b"")


_CONFIDENT_WEIGHT = 1e2 / FAR_NORM  # weight at which the model is sure that a canary has label 0

_MEMORY_FOLDER = "/dev/shm"
"""Folder in memory for ledgers, which need not survive a power cut, and would mostly wait for a disk."""


class Trials(NamedTuple):
    """View of n canaries, projected on their directions.

    Differences are (n, 0) if the adversary does not see both terms, or if a run has queries of its own.  Those of
    silos are (n, 0) after a rollback, too.
    """

    releases: NDArray[np.float64]
    """Releases along each canary, (n, rounds)."""
    silo_differences: NDArray[np.float64]
    """Releases of silo 0 minus those of silo 1, (n, rounds)."""
    run_differences: NDArray[np.float64]
    """Releases of silo 0 minus those of another run of the same records under other queries, (n, rounds).

    After a rollback they are releases before it minus the repeated ones, for the repeated rounds only.
    """
    present: NDArray[np.bool_]
    """Coins, True for a canary that is present, (n,)."""
    rounds: NDArray[np.int64]
    """Round for which each canary is planted, from 1, (n,), or 0 for a canary in secret rounds."""

    def select_round(self, t: int) -> "Trials":
        """Return the canaries of one round."""
        return Trials(*(column[self.rounds == t] for column in self))


@dataclasses.dataclass(frozen=True)
class RecordingOptimizer:
    """Optimizer that sends fixed queries and records the server's releases without processing."""

    queries: Sequence[Tensor]
    releases: list[Tensor]

    def start(self, initial: Tensor) -> Tensor:
        return initial

    def query(self, state: Tensor) -> Tensor:
        return self.queries[min(len(self.releases), len(self.queries) - 1)]

    def update(self, state: Tensor, released: Tensor, current: Round) -> Tensor:
        self.releases.append(released)
        return state

    def output(self, state: Tensor) -> Tensor:
        return state


def zero_queries(plan: Plan) -> list[Tensor]:
    """Return queries of zeros, one for each round."""
    return [torch.zeros_like(plan.objective.initial())] * plan.schedule.rounds


def run_trials(cell: Cell, layout: CanaryLayout, seed: int, queries: Sequence[Tensor] | None = None) -> Trials:
    """Run the layout's canaries in silo 0, each present or absent by a fair coin.

    Guarantee: releases and differences are computed only from vectors that the trust setting shows its adversary.

    Args:
        cell: Small cell of the audit.
        layout: Rounds and rows of the canaries.
        seed: Seed of the coins.
        queries: Queries in place of zeros, or None.

    Returns:
        Trials with the releases of all rounds.  If the adversary sees single silos, and `queries` is None, they
        have differences, too: of two runs of silo 0, the second with other queries, and of silos 0 and 1 if there
        is a silo 1.
    """
    count = len(layout.rounds)
    plan = make_plan(cell, make_canary_objective(cell, count), for_release=True)
    present, shards = _draw_shards(cell, plan, layout, seed)
    sent_queries, no_differences = queries or zero_queries(plan), np.empty((count, 0))
    with open_silos(cell, plan, shards) as (folder, silos):
        # The adversary sees no silo alone if the server adds the noise or messages are masked.
        if queries is not None or plan.trust.publishes_sums(SERVER):
            releases = project_on_canaries(collect_transcript(plan, folder, silos, sent_queries))
            return Trials(releases, no_differences, no_differences, present, layout.rounds)
        first_run, second_run, other_silo = _run_twice(plan, silos, sent_queries)
    releases = project_on_canaries(first_run)
    silo_differences = releases - project_on_canaries(other_silo) if other_silo else no_differences
    return Trials(releases, silo_differences, releases - project_on_canaries(second_run), present, layout.rounds)


def collect_exact_trials(cell: Cell, layout: CanaryLayout, seed: int) -> Trials:
    """Compute the adversary's releases without noise, in a run with the coins of `run_trials`.

    The releases are those of silo 0, or its part in the mean over all silos if the adversary sees no silo alone.

    Returns:
        Trials with the releases of all rounds, without differences.
    """
    plan = make_plan(cell, make_canary_objective(cell, len(layout.rounds)), for_release=True)
    present, shards = _draw_shards(cell, plan, layout, seed)
    exact_plan = dataclasses.replace(plan, noise=Noise(), exact_plan=None)
    silo = Silo(0, exact_plan, unit_records(shards[0], cell), KeyedNormal(bytes(32), np.float64))
    weight = plan.weights[0] if plan.trust.publishes_sums(SERVER) else 1.0
    releases = weight * project_on_canaries(collect_silo_releases(silo, zero_queries(plan)))
    return Trials(releases, releases[:, :0], releases[:, :0], present, layout.rounds)


def collect_silo_releases(silo: Silo, queries: Iterable[Tensor]) -> list[Tensor]:
    """Collect the vectors (d,) that a silo releases in rounds 1, 2, … of a new run."""
    state, vectors = silo.initial_state(), list[Tensor]()
    for t, query in enumerate(queries, start=1):
        release, state = silo.answer(state, t, query)
        vectors.append(release.vector)
    return vectors


def run_rollback(cell: Cell, layout: CanaryLayout, seed: int, t: int) -> Trials:
    """Run canaries, restore all machines to the state before round t, and repeat from there.

    Machines are the silos, and the server if it keeps a journal.  The repetition has another query in round t.  If
    round t got the same noise both times, the noise would cancel in the difference of its two releases.

    Returns:
        Trials with the releases of all rounds before the restoration.  Their `run_differences` are the releases of
        rounds t, t + 1, … before the restoration minus those after it, (n, rounds - t + 1).
    """
    count = len(layout.rounds)
    plan = make_plan(cell, make_canary_objective(cell, count), for_release=True)
    present, shards = _draw_shards(cell, plan, layout, seed)
    before = zero_queries(plan)  # queries of the rounds before the restoration, and after it
    after = [*before[: t - 1], _confident_query(before[0]), *before[t:]]
    with open_silos(cell, plan, shards) as (folder, silos):
        if t > 1:
            collect_transcript(plan, folder, silos, before[: t - 1])
        backup = {path: path.read_bytes() for path in _journal_files(folder)}
        restores = [silo.back_up() for silo in silos]
        # The first t - 1 rounds are over, and asked for again they give the same releases.
        original = project_on_canaries(collect_transcript(plan, folder, silos, before))
        for path in _journal_files(folder) - backup.keys():
            path.unlink()
        for path, content in backup.items():
            path.write_bytes(content)
            path.chmod(0o600)  # The journal refuses files that others can read.
        for silo in restores:  # functions, each of which restores a silo
            silo()
        replayed = project_on_canaries(collect_transcript(plan, folder, silos, after))
    return Trials(
        original, np.empty((count, 0)), original[:, t - 1 :] - replayed[:, t - 1 :], present, layout.rounds
    )


def _journal_files(folder: Path) -> set[Path]:
    """Return the files of the server's journal."""
    return set((folder / "journal").glob("*"))


def _draw_shards(cell: Cell, plan: Plan, layout: CanaryLayout, seed: int) -> tuple[NDArray[np.bool_], list[Shard]]:
    """Draw the coins of a run, (n,), and make the shards of its silos, with all canaries in silo 0."""
    present = public_generator(seed, "audit coins").random(len(layout.rounds)) < 0.5
    idle = [zero_shard(layout.row_count, len(layout.rounds))] * (len(plan.weights) - 1)
    return present, [layout.make_shard(present, cell.privacy.relation), *idle]


def collect_transcript(
    plan: Plan, folder: Path, silos: Sequence[RestartableSilo], queries: Sequence[Tensor]
) -> list[Tensor]:
    """Collect the adversary's view of the rounds that have `queries`, one vector (d,) a round.

    The view is the server's releases if the server adds the noise, the noisy means of all silos if their messages
    are masked, and the replies of silo 0 else.  Some of these rounds may be over already.

    Args:
        plan: Plan of the run.
        folder: Folder for the journal of a server that adds the noise.
        silos: All silos of the run.
        queries: Queries of rounds 1, 2, …
    """
    if plan.trust.adds_noise(SERVER):
        return collect_broadcasts(plan, folder, silos, queries)
    return (
        _decode_means(plan, collect_masked_sums(plan, silos, queries))
        if plan.masked
        else collect_replies(silos[0], queries)
    )


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for ledgers, in memory if that folder is writable."""
    memory = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="fedpriv-audit-", dir=memory)


@contextmanager
def open_silos(
    cell: Cell, plan: Plan, shards: Sequence[Shard]
) -> Iterator[tuple[Path, Sequence[RestartableSilo]]]:
    """Yield a new folder, and a guard or pool of clients for each shard, and remove the folder afterwards.

    Each row of a shard becomes a unit of protection: a record, the records of a person, or a client.
    """
    with temporary_folder() as name:
        silos: Sequence[RestartableSilo]
        if cell.federation.clients is not None:
            silos = [ClientPool(cell, plan, shard) for shard in shards]
        else:
            silos = open_guarded_silos(
                Path(name), cell, plan, [expand_units(shard, cell.privacy.protected_unit) for shard in shards]
            )
        with ExitStack() as stack:
            for silo in silos:
                stack.callback(silo.close)
            yield Path(name), silos


def _run_twice(
    plan: Plan, silos: Sequence[RestartableSilo], queries: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return replies of silo 0 in two interleaved runs, and of silo 1, if it exists, in the first run.

    Both runs read the same records, and the second one has another query in all rounds, at which present canaries
    add almost nothing.  Silo 0 is restarted after half of the rounds, unless there is only one.

    Returns:
        Replies (d,) by round: of silo 0 in the first run, of silo 0 in the second run, and of silo 1, an empty
        list if there is a single silo.
    """
    confident_query = _confident_query(queries[0])
    first_replies, second_replies, other_silo_replies = [], [], []
    for t, query in enumerate(queries, start=1):
        first_replies.append(silos[0].answer("first", t, query))
        second_replies.append(silos[0].answer("second", t, confident_query))
        other_silo_replies += [silo.answer("first", t, query) for silo in silos[1:2]]
        if t == plan.schedule.rounds // 2:
            silos[0].restart()
    return first_replies, second_replies, other_silo_replies


def _confident_query(query: Tensor) -> Tensor:
    """Return a model that is sure of a present canary's label, so that this canary adds almost nothing."""
    confident_query = torch.zeros_like(query)
    confident_query.view(2, -1)[0, :-1], confident_query.view(2, -1)[1, :-1] = (
        _CONFIDENT_WEIGHT,
        -_CONFIDENT_WEIGHT,
    )
    return confident_query


def collect_masked_sums(
    plan: Plan, silos: Sequence[RestartableSilo], queries: Sequence[Tensor]
) -> NDArray[np.int64]:
    """Collect the noisy integer sums (T, d) that the receiver of all encoded messages decodes.

    A message has the noisy integers of a silo, plus a mask of integers modulo 2^`word_bits`.  The masks are made
    with the public keys of all silos, and cancel in the sum.  The guard of silo 0 is restarted after half of the
    queries, unless there is only one.
    """
    keys, sums = b"".join(silo.public_key("run") for silo in silos), []
    for t, query in enumerate(queries, start=1):
        messages = [silo.answer("run", t, query, keys).numpy().tobytes() for silo in silos]
        sums.append(unpack_sum(messages, plan.required_exact_plan.inputs.word_bits, query.shape))
        if t == len(queries) // 2:
            silos[0].restart()
    return np.stack(sums)


def _decode_means(plan: Plan, noisy_sums: NDArray[np.int64]) -> list[Tensor]:
    """Compute the release of each round, a noisy mean (d,), from noisy integers (T, d).

    The integers are the sums over all silos, as `collect_masked_sums` returns them.
    """
    integer_steps, means = IntegerSteps(plan, b""), list[Tensor]()  # no key, as no noise is drawn here
    state = integer_steps.initial_state(SERVER)
    for t, noisy_sum in enumerate(noisy_sums, start=1):
        mean, state = integer_steps.release(state, t, torch.from_numpy(noisy_sum), SERVER)
        means.append(mean)
    return means


def collect_replies(silo: RestartableSilo, queries: Sequence[Tensor]) -> list[Tensor]:
    """Collect the messages of one silo in a run."""
    return [silo.answer("run", t, query) for t, query in enumerate(queries, start=1)]


def collect_broadcasts(
    plan: Plan, folder: Path, silos: Sequence[RestartableSilo], queries: Sequence[Tensor]
) -> list[Tensor]:
    """Collect the releases of a deployed server that adds the noise, in the rounds that have `queries`.

    The server runs with the silos as its clients, and writes a journal.  It ends after half of the rounds, if
    there are several, and a second server continues from the journal.  Silo 0 is restarted after each half.

    Returns:
        Releases (d,) of rounds 1, 2, …
    """
    grid, initial = InProcessGrid(make_client_app(silos, "run"), len(silos), {}), queries[0]
    releases: list[Tensor] = []
    for rounds in (len(queries) // 2, len(queries)):
        releases.clear()  # The second server computes the releases of the first half again from the journal.
        recording_plan = dataclasses.replace(plan, optimizer=RecordingOptimizer(queries, releases))
        with quiet_flower_logs(), ServerJournal(folder / "journal", EntrySizes.from_plan(plan)) as journal:
            if rounds:
                deployed_strategy(recording_plan, initial, journal).run(grid, rounds)
        silos[0].restart()
    return releases


def project_on_canaries(vectors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Project one vector (d,) a round on the directions of n canaries, (n, rounds).

    The direction of a canary is its feature's weight of class 1 minus that of class 0, of norm 1.
    """
    classes = torch.stack([vector.double() for vector in vectors]).view(len(vectors), 2, -1)[..., :-1]
    return np.asarray(((classes[:, 1] - classes[:, 0]) / 2**0.5).T.numpy().copy())
