"""Transcripts: what an adversary sees of many canaries, by the path that a deployment takes.

| trust | whose code runs | what is seen |
|---|---|---|
| untrusted | the guards of two silos, each with its ledger, restarted half-way | their replies, of two runs |
| secure-aggregation | the guards of all silos, likewise | the sum of their masked words |
| trusted | the deployed server with its journal, and guards, all restarted half-way | what it broadcasts |
| trusted, with clients | the same server, and the pool of clients that it keeps | what it broadcasts |

Of a machine that is restored from its backup, `rolled_back` has what is seen before and after.

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
    FAR,
    CanaryLayout,
    Restartable,
    guarded,
    in_units,
    nothing,
    objective_for,
    units_of,
)
from fedpriv.clients.simulated import client_app_of
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, public_generator, system_key
from fedpriv.engines.inprocess import InProcessGrid, flower_quiet
from fedpriv.loss.estimators import Round
from fedpriv.noise.integers.fixed_point import sum_of
from fedpriv.participation.registry import DrawnOrder
from fedpriv.plan.plan import Plan, plan_of
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import deployed_strategy
from fedpriv.server.journal import Entries, ServerJournal
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo

MOST_PASSES = 3
"""Of cyclic cohorts, and evaluations of the same test records."""
_BEYOND = 10.0
_FIRST_MOVE = FAR * 0.5**0.5
"""The gradient of a canary where the model is 0, with probabilities ½ and ½ of its two classes."""


def passes_of(cell: Cell) -> int:
    """Number of turns of a client; of records as often as the scenario says."""
    if cell.federation.clients is None:
        return cell.federation.epochs
    return -(-cell.federation.total_rounds // cell.federation.rounds_per_epoch)


def known_rounds(cell: Cell, most: int) -> tuple[int, int]:
    """Rounds and passes of a run of at most `most` rounds whose order is no secret."""
    passes = min(MOST_PASSES, passes_of(cell))
    each = cell.schedule.rounds if passes == 1 else cell.federation.rounds_per_epoch
    return passes * min(each, most // passes), passes


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
    if step is not None and isinstance(clip, float) and step * _FIRST_MOVE < _BEYOND * clip:
        raise InputError(
            f"algorithm.local_step = {step:g}: steps so short do not lead a canary beyond clip = {clip:g}; audit "
            f"with --set algorithm.local_step={_BEYOND * clip / _FIRST_MOVE:.3g} or more"
        )


class Pool:
    """Silo 0 of a plan whose rows are clients; each of `shard` holds as many alike records as count."""

    def __init__(self, cell: Cell, plan: Plan, shard: Shard) -> None:
        self._plan, self._records, self._key = plan, units_of(shard, cell), system_key()
        self._silo = self._begun()
        self._state = self._silo.start()

    def restart(self) -> None:
        """It is built again from its key, and goes on from its state."""
        self._silo = self._begun()

    def keep(self) -> Callable[[], None]:
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
        return self._silo.message(release.vector, t, keys, self._state.chain)

    def _begun(self) -> Silo:
        return Silo.of(0, self._plan, self._records, self._key, b"")


_PUSH = 1e2 / FAR  # a weight that makes the model sure of a canary's class

_MEMORY = "/dev/shm"
"""Ledgers of an audit need not survive a power cut, and waiting for a disk takes most of its time."""


class Trials(NamedTuple):
    """Canaries as rows: what was seen along each one's direction (n, rounds), its coin (n,), its round (n,).

    `apart` is silo 0's releases minus silo 1's, `twice` its releases minus those of another run of the same
    records under other queries: (n, rounds), and (n, 0) where no adversary sees both.
    """

    seen: NDArray[np.float64]
    apart: NDArray[np.float64]
    twice: NDArray[np.float64]
    present: NDArray[np.bool_]
    round: NDArray[np.int64]

    def of_round(self, t: int) -> "Trials":
        """The canaries of one round."""
        chosen = self.round == t
        return Trials(*(column[chosen] for column in self))


@dataclasses.dataclass(frozen=True)
class Watching:
    """An optimizer that asks what it is told to and notes what it is given: the server's releases, unprocessed."""

    queries: Sequence[Tensor]
    seen: list[Tensor]

    def start(self, initial: Tensor) -> Tensor:
        return initial

    def query(self, state: Tensor) -> Tensor:
        return self.queries[min(len(self.seen), len(self.queries) - 1)]

    def update(self, state: Tensor, released: Tensor, current: Round) -> Tensor:
        self.seen.append(released)
        return state

    def output(self, state: Tensor) -> Tensor:
        return state


def zeros(plan: Plan) -> list[Tensor]:
    """Queries at which every canary's increment is known."""
    return [torch.zeros_like(plan.objective.initial())] * plan.schedule.rounds


def run_trials(cell: Cell, layout: CanaryLayout, seed: int, queries: Sequence[Tensor] | None = None) -> Trials:
    """One run with the layout's canaries in silo 0, each present or not by a fair coin.

    `queries` are asked in place of zeros; then there is this one run of this one silo.

    Guarantee: what is returned is what the trust setting shows its adversary, and nothing else.
    """
    count = len(layout.round)
    plan = plan_of(cell, objective_for(cell, count), released=True)
    present, shards = _shards(cell, plan, layout, seed)
    asked, none = queries or zeros(plan), np.empty((count, 0))
    with folder_of_silos(cell, plan, shards) as (folder, silos):
        if queries is not None or plan.trust.releases(SERVER):
            seen = _along(seen_of(plan, folder, silos, asked))
            return Trials(seen, none, none, present, layout.round)
        first, again, other = _two_runs(plan, silos, asked)
    seen = _along(first)
    apart = seen - _along(other) if other else none
    return Trials(seen, apart, seen - _along(again), present, layout.round)


def rolled_back(cell: Cell, layout: CanaryLayout, seed: int, t: int) -> Trials:
    """A run that is put back to before round t, silos and server, and asked something else in this round.

    `twice` are its releases of rounds t, t + 1, … minus those of before, which were asked the same but for t.
    """
    count = len(layout.round)
    plan = plan_of(cell, objective_for(cell, count), released=True)
    present, shards = _shards(cell, plan, layout, seed)
    before = zeros(plan)
    after = [*before[: t - 1], _pushed(before[0]), *before[t:]]
    with folder_of_silos(cell, plan, shards) as (folder, silos):
        if t > 1:
            seen_of(plan, folder, silos, before[: t - 1])
        backup = {path: path.read_bytes() for path in _journal(folder)}
        put_back = [silo.keep() for silo in silos]
        first = _along(seen_of(plan, folder, silos, before))
        for path in _journal(folder) - backup.keys():
            path.unlink()
        for path, content in backup.items():
            path.write_bytes(content)
            path.chmod(0o600)
        for silo in put_back:
            silo()
        again = _along(seen_of(plan, folder, silos, after))
    return Trials(first, np.empty((count, 0)), first[:, t - 1 :] - again[:, t - 1 :], present, layout.round)


def _journal(folder: Path) -> set[Path]:
    """Make the journal that the server keeps of the run."""
    return set((folder / "journal").glob("*"))


def _shards(cell: Cell, plan: Plan, layout: CanaryLayout, seed: int) -> tuple[NDArray[np.bool_], list[Shard]]:
    """Fair coins of a run, of which longer runs have more, and its silos' records: canaries are silo 0's."""
    present = public_generator(seed, "audit coins").random(len(layout.round)) < 0.5
    idle = [nothing(layout.rows, len(layout.round))] * (len(plan.weights) - 1)
    return present, [layout.shard(present, cell.privacy.relation), *idle]


def seen_of(plan: Plan, folder: Path, silos: Sequence[Restartable], queries: Sequence[Tensor]) -> list[Tensor]:
    """Collect what this trust setting's adversary sees of the rounds that have `queries`; some may be over."""
    if plan.trust.draws(SERVER):
        return broadcasts(plan, folder, silos, queries)
    return _means(plan, masked_sums(plan, silos, queries)) if plan.masked else replies(silos[0], queries)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for ledgers, in memory where there is room."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="fedpriv-audit-", dir=memory)


@contextmanager
def folder_of_silos(
    cell: Cell, plan: Plan, shards: Sequence[Shard]
) -> Iterator[tuple[Path, Sequence[Restartable]]]:
    """Guards with these shards, or a pool of clients, in a folder that is gone afterwards."""
    with temporary_folder() as name:
        silos: Sequence[Restartable]
        if cell.federation.clients is not None:
            silos = [Pool(cell, plan, shard) for shard in shards]
        else:
            silos = guarded(Path(name), cell, plan, [in_units(shard, cell.privacy.protected) for shard in shards])
        with ExitStack() as stack:
            for silo in silos:
                stack.callback(silo.close)
            yield Path(name), silos


def _two_runs(
    plan: Plan, silos: Sequence[Restartable], queries: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Silo 0's replies in two runs at a time, and those of silo 1, if there is one, in the first."""
    pushed = _pushed(queries[0])
    first, again, other = [], [], []
    for t, query in enumerate(queries, start=1):
        first.append(silos[0].answer("first", t, query))
        again.append(silos[0].answer("second", t, pushed))
        other += [silo.answer("first", t, query) for silo in silos[1:2]]
        if t == plan.schedule.rounds // 2:
            silos[0].restart()
    return first, again, other


def _pushed(query: Tensor) -> Tensor:
    """A model that is sure of a canary's class, so that one of its two worlds adds next to nothing."""
    pushed = torch.zeros_like(query)
    pushed.view(2, -1)[0, :-1], pushed.view(2, -1)[1, :-1] = _PUSH, -_PUSH
    return pushed


def masked_sums(plan: Plan, silos: Sequence[Restartable], queries: Sequence[Tensor]) -> NDArray[np.int64]:
    """The sums of the masked words (T, d), as the receiver of all of them decodes them."""
    keys, sums = b"".join(silo.public_key("run") for silo in silos), []
    for t, query in enumerate(queries, start=1):
        words = [silo.answer("run", t, query, keys).numpy().tobytes() for silo in silos]
        sums.append(sum_of(words, plan.exact.run.word, query.shape))
        if t == len(queries) // 2:
            silos[0].restart()
    return np.stack(sums)


def _means(plan: Plan, noisy: NDArray[np.int64]) -> list[Tensor]:
    """The noisy running sums that follow from noisy integers."""
    step, means = IntegerSteps(plan, b""), list[Tensor]()
    state = step.start(SERVER)
    for t, row in enumerate(noisy, start=1):
        mean, state = step.leaving(state, t, torch.from_numpy(row), SERVER)
        means.append(mean)
    return means


def replies(silo: Restartable, queries: Sequence[Tensor]) -> list[Tensor]:
    """Collect the messages of one silo in a run."""
    return [silo.answer("run", t, query) for t, query in enumerate(queries, start=1)]


def broadcasts(plan: Plan, folder: Path, silos: Sequence[Restartable], queries: Sequence[Tensor]) -> list[Tensor]:
    """Collect what a deployed server with noise of its own releases in the rounds that have `queries`.

    It is killed half-way and goes on.
    """
    grid, initial = InProcessGrid(client_app_of(silos, "run"), len(silos), {}), queries[0]
    broadcast: list[Tensor] = []
    for rounds in (len(queries) // 2, len(queries)):
        broadcast.clear()
        watched = dataclasses.replace(plan, optimizer=Watching(queries, broadcast))
        with flower_quiet(), ServerJournal(folder / "journal", Entries.of(plan)) as journal:
            if rounds:
                deployed_strategy(watched, initial, journal).run(grid, rounds)
        silos[0].restart()
    return broadcast


def _along(vectors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Every canary's coordinate (n, rounds): its direction is its feature, class 0 against class 1."""
    classes = torch.stack([vector.double() for vector in vectors]).view(len(vectors), 2, -1)[..., :-1]
    return np.asarray(((classes[:, 1] - classes[:, 0]) / 2**0.5).T.numpy().copy())
