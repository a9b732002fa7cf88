"""Transcripts: what an adversary sees of many canaries, by the path that a deployment takes.

| trust | whose code runs | what is seen |
|---|---|---|
| untrusted | the guards of two silos, each with its ledger, restarted half-way | their replies, of two runs |
| secure-aggregation | the guards of all silos, likewise | the sum of their masked words |
| trusted | the deployed server with its journal, and guards, all restarted half-way | what it broadcasts |
| trusted, with clients | the same server, and the pool of clients that it keeps | what it broadcasts |

Of a machine that is restored from its backup, `run_rollback` has what is seen before and after.

Nothing is recomputed in another type: replies are those of the scenario's own `run.dtype`.

No guard has clients: the trusted server keeps their pool and draws their cohorts.  So the pool's own code answers,
cut to the size of an audit, and draws with a key of the operating system, as everything does that is really
released.
"""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
    make_canary_objective,
    open_guarded_silos,
    unit_records,
    zero_shard,
)
from fedpriv.clients.simulated import make_client_app
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, public_generator, system_key
from fedpriv.engines.inprocess import InProcessGrid, quiet_flower_logs
from fedpriv.loss.estimators import Round
from fedpriv.noise.integers.fixed_point import unpack_sum
from fedpriv.participation.registry import DrawnOrder
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import deployed_strategy
from fedpriv.server.journal import EntrySizes, ServerJournal
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo

MAX_PASSES = 3
"""Of cyclic cohorts, and evaluations of the same test records."""
_CLIP_MARGIN = 10.0
_FIRST_GRADIENT = FAR_NORM * 0.5**0.5
"""The gradient of a canary where the model is 0, with probabilities ½ and ½ of its two classes."""


def count_passes(cell: Cell) -> int:
    """Number of turns of a client; of records as often as the scenario says."""
    if cell.federation.clients is None:
        return cell.federation.epochs
    return -(-cell.federation.total_rounds // cell.federation.rounds_per_epoch)


def public_run_size(cell: Cell, max_rounds: int) -> tuple[int, int]:
    """Rounds and passes of a run of at most `most` rounds whose order is no secret."""
    passes = min(MAX_PASSES, count_passes(cell))
    each = cell.schedule.rounds if passes == 1 else cell.federation.rounds_per_epoch
    return passes * min(each, max_rounds // passes), passes


def check_clients(cell: Cell) -> None:
    """InputError, in one line, for clients whom canaries cannot stand for."""
    if cell.federation.clients is None:
        raise InputError('privacy.unit = "client": no guard has clients, and the audit is of pools: give clients')
    if isinstance(cell.schedule, DrawnOrder):
        raise InputError(
            f'federation.sampling = "{cell.schedule.name}": canaries have rounds of their own here, and tests are '
            'made for cohorts that come in turn; audit a copy with sampling = "fixed" and neither '
            "min_separation nor max_participations"
        )
    settings = cell.algorithm.settings
    if getattr(settings, "clip_quantile", None) is not None:
        raise InputError(
            "algorithm.clip_quantile: the clip of the moment is a coordinate of queries and releases, in which "
            "canaries have no direction; audit without it"
        )
    step, clip = getattr(settings, "local_step", None), getattr(settings, "clip", None)
    if step is not None and isinstance(clip, float) and step * _FIRST_GRADIENT < _CLIP_MARGIN * clip:
        raise InputError(
            f"algorithm.local_step = {step:g}: steps so short do not lead a canary beyond clip = {clip:g}; audit "
            f"with --set algorithm.local_step={_CLIP_MARGIN * clip / _FIRST_GRADIENT:.3g} or more"
        )


class ClientPool:
    """Silo 0 of a plan whose rows are clients; each of `shard` holds as many alike records as count."""

    def __init__(self, cell: Cell, plan: Plan, shard: Shard) -> None:
        self._plan, self._records, self._key = plan, unit_records(shard, cell), system_key()
        self._silo = self._make_silo()
        self._state = self._silo.initial_state()

    def restart(self) -> None:
        """It is built again from its key, and goes on from its state."""
        self._silo = self._make_silo()

    def back_up(self) -> Callable[[], None]:
        """Its state: its key is the same for good."""
        state = self._state

        def put_back() -> None:
            self._state = state

        return put_back

    def close(self) -> None:
        """It holds nothing open."""

    def public_key(self, run: str) -> bytes:
        """Nothing: a trusted server gets no masked messages."""
        return b""

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """Return the sum to which the server adds its noise in round t."""
        release, self._state = self._silo.answer(self._state, t, query)
        return self._silo.make_message(release.vector, t, keys, self._state.query_chain)

    def _make_silo(self) -> Silo:
        return Silo.for_release(0, self._plan, self._records, self._key, b"")


_CONFIDENT_WEIGHT = 1e2 / FAR_NORM  # a weight that makes the model sure of a canary's class

_MEMORY_FOLDER = "/dev/shm"
"""Ledgers of an audit need not survive a power cut, and waiting for a disk takes most of its time."""


class Trials(NamedTuple):
    """Canaries as rows: what was seen along each one's direction (n, rounds), its coin (n,), its round (n,).

    `apart` is silo 0's releases minus silo 1's, `twice` its releases minus those of another run of the same
    records under other queries: (n, rounds), and (n, 0) where no adversary sees both.
    """

    releases: NDArray[np.float64]
    silo_differences: NDArray[np.float64]
    run_differences: NDArray[np.float64]
    present: NDArray[np.bool_]
    rounds: NDArray[np.int64]

    def select_round(self, t: int) -> "Trials":
        """The canaries of one round."""
        chosen = self.rounds == t
        return Trials(*(column[chosen] for column in self))


@dataclasses.dataclass(frozen=True)
class RecordingOptimizer:
    """An optimizer that asks what it is told to and notes what it is given: the server's releases, unprocessed."""

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
    """Queries at which every canary's increment is known."""
    return [torch.zeros_like(plan.objective.initial())] * plan.schedule.rounds


def run_trials(cell: Cell, layout: CanaryLayout, seed: int, queries: Sequence[Tensor] | None = None) -> Trials:
    """One run with the layout's canaries in silo 0, each present or not by a fair coin.

    `queries` are asked in place of zeros; then there is this one run of this one silo.

    Guarantee: what is returned is what the trust setting shows its adversary, and nothing else.
    """
    count = len(layout.rounds)
    plan = make_plan(cell, make_canary_objective(cell, count), for_release=True)
    present, shards = _draw_shards(cell, plan, layout, seed)
    asked, none = queries or zero_queries(plan), np.empty((count, 0))
    with open_silos(cell, plan, shards) as (folder, silos):
        if queries is not None or plan.trust.publishes_sums(SERVER):
            seen = _project_on_canaries(collect_transcript(plan, folder, silos, asked))
            return Trials(seen, none, none, present, layout.rounds)
        first, again, other = _run_twice(plan, silos, asked)
    seen = _project_on_canaries(first)
    apart = seen - _project_on_canaries(other) if other else none
    return Trials(seen, apart, seen - _project_on_canaries(again), present, layout.rounds)


def run_rollback(cell: Cell, layout: CanaryLayout, seed: int, t: int) -> Trials:
    """A run that is put back to before round t, silos and server, and asked something else in this round.

    `twice` are its releases of rounds t, t + 1, … minus those of before, which were asked the same but for t.
    """
    count = len(layout.rounds)
    plan = make_plan(cell, make_canary_objective(cell, count), for_release=True)
    present, shards = _draw_shards(cell, plan, layout, seed)
    before = zero_queries(plan)
    after = [*before[: t - 1], _confident_query(before[0]), *before[t:]]
    with open_silos(cell, plan, shards) as (folder, silos):
        if t > 1:
            collect_transcript(plan, folder, silos, before[: t - 1])
        backup = {path: path.read_bytes() for path in _journal_files(folder)}
        put_back = [silo.back_up() for silo in silos]
        first = _project_on_canaries(collect_transcript(plan, folder, silos, before))
        for path in _journal_files(folder) - backup.keys():
            path.unlink()
        for path, content in backup.items():
            path.write_bytes(content)
            path.chmod(0o600)
        for silo in put_back:
            silo()
        again = _project_on_canaries(collect_transcript(plan, folder, silos, after))
    return Trials(first, np.empty((count, 0)), first[:, t - 1 :] - again[:, t - 1 :], present, layout.rounds)


def _journal_files(folder: Path) -> set[Path]:
    """Make the journal that the server keeps of the run."""
    return set((folder / "journal").glob("*"))


def _draw_shards(cell: Cell, plan: Plan, layout: CanaryLayout, seed: int) -> tuple[NDArray[np.bool_], list[Shard]]:
    """Fair coins of a run, of which longer runs have more, and its silos' records: canaries are silo 0's."""
    present = public_generator(seed, "audit coins").random(len(layout.rounds)) < 0.5
    idle = [zero_shard(layout.row_count, len(layout.rounds))] * (len(plan.weights) - 1)
    return present, [layout.make_shard(present, cell.privacy.relation), *idle]


def collect_transcript(
    plan: Plan, folder: Path, silos: Sequence[RestartableSilo], queries: Sequence[Tensor]
) -> list[Tensor]:
    """Collect what this trust setting's adversary sees of the rounds that have `queries`; some may be over."""
    if plan.trust.adds_noise(SERVER):
        return collect_broadcasts(plan, folder, silos, queries)
    return (
        _decode_means(plan, collect_masked_sums(plan, silos, queries))
        if plan.masked
        else collect_replies(silos[0], queries)
    )


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for ledgers, in memory where there is room."""
    memory = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="fedpriv-audit-", dir=memory)


@contextmanager
def open_silos(
    cell: Cell, plan: Plan, shards: Sequence[Shard]
) -> Iterator[tuple[Path, Sequence[RestartableSilo]]]:
    """Guards with these shards, or a pool of clients, in a folder that is gone afterwards."""
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
    """Silo 0's replies in two runs at a time, and those of silo 1, if there is one, in the first."""
    pushed = _confident_query(queries[0])
    first, again, other = [], [], []
    for t, query in enumerate(queries, start=1):
        first.append(silos[0].answer("first", t, query))
        again.append(silos[0].answer("second", t, pushed))
        other += [silo.answer("first", t, query) for silo in silos[1:2]]
        if t == plan.schedule.rounds // 2:
            silos[0].restart()
    return first, again, other


def _confident_query(query: Tensor) -> Tensor:
    """A model that is sure of a canary's class, so that one of its two worlds adds next to nothing."""
    pushed = torch.zeros_like(query)
    pushed.view(2, -1)[0, :-1], pushed.view(2, -1)[1, :-1] = _CONFIDENT_WEIGHT, -_CONFIDENT_WEIGHT
    return pushed


def collect_masked_sums(
    plan: Plan, silos: Sequence[RestartableSilo], queries: Sequence[Tensor]
) -> NDArray[np.int64]:
    """The sums of the masked words (T, d), as the receiver of all of them decodes them."""
    keys, sums = b"".join(silo.public_key("run") for silo in silos), []
    for t, query in enumerate(queries, start=1):
        words = [silo.answer("run", t, query, keys).numpy().tobytes() for silo in silos]
        sums.append(unpack_sum(words, plan.required_exact_plan.inputs.word_bits, query.shape))
        if t == len(queries) // 2:
            silos[0].restart()
    return np.stack(sums)


def _decode_means(plan: Plan, noisy: NDArray[np.int64]) -> list[Tensor]:
    """The noisy running sums that follow from noisy integers."""
    step, means = IntegerSteps(plan, b""), list[Tensor]()
    state = step.initial_state(SERVER)
    for t, row in enumerate(noisy, start=1):
        mean, state = step.release(state, t, torch.from_numpy(row), SERVER)
        means.append(mean)
    return means


def collect_replies(silo: RestartableSilo, queries: Sequence[Tensor]) -> list[Tensor]:
    """Collect the messages of one silo in a run."""
    return [silo.answer("run", t, query) for t, query in enumerate(queries, start=1)]


def collect_broadcasts(
    plan: Plan, folder: Path, silos: Sequence[RestartableSilo], queries: Sequence[Tensor]
) -> list[Tensor]:
    """Collect what a deployed server with noise of its own releases in the rounds that have `queries`.

    It is killed half-way and goes on.
    """
    grid, initial = InProcessGrid(make_client_app(silos, "run"), len(silos), {}), queries[0]
    broadcast: list[Tensor] = []
    for rounds in (len(queries) // 2, len(queries)):
        broadcast.clear()
        watched = dataclasses.replace(plan, optimizer=RecordingOptimizer(queries, broadcast))
        with quiet_flower_logs(), ServerJournal(folder / "journal", EntrySizes.from_plan(plan)) as journal:
            if rounds:
                deployed_strategy(watched, initial, journal).run(grid, rounds)
        silos[0].restart()
    return broadcast


def _project_on_canaries(vectors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Every canary's coordinate (n, rounds): its direction is its feature, class 0 against class 1."""
    classes = torch.stack([vector.double() for vector in vectors]).view(len(vectors), 2, -1)[..., :-1]
    return np.asarray(((classes[:, 1] - classes[:, 0]) / 2**0.5).T.numpy().copy())
