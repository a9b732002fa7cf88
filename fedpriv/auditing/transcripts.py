"""What an adversary sees of many canaries, by the path that a deployment takes.

| trust | whose code runs | what is seen |
|---|---|---|
| untrusted | the guards of two silos, each with its ledger, restarted half-way | their replies, of two runs |
| secure-aggregation | the guards of all silos, likewise | the sum of their masked words |
| trusted | the deployed server with its journal, and guards, all restarted half-way | what it broadcasts |

Nothing is recomputed in another type: replies are those of the scenario's own `run.dtype`.
"""

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.auditing.canaries import FAR, Layout, nothing, objective_for
from fedpriv.auditing.guarded import GuardedSilo, guarded
from fedpriv.clients.answering import client_app_of
from fedpriv.clients.shard import Shard
from fedpriv.engines.inprocess import flower_quiet
from fedpriv.engines.inprocess_grid import InProcessGrid
from fedpriv.estimators.round import Round
from fedpriv.objectives import Objective
from fedpriv.protocol.arrays import one_array
from fedpriv.randomness import KeyedNormal, public_generator, simulation_noise
from fedpriv.running.plan import Plan, plan_of
from fedpriv.scenario import Cell
from fedpriv.server.app import deployed_strategy
from fedpriv.server.journal import ServerJournal

_PUSH = 1e2 / FAR  # a weight that makes the model sure of a canary's class

_MEMORY = "/dev/shm"
"""Ledgers of an audit need not survive a power cut, and waiting for a disk takes most of its time."""


class Trials(NamedTuple):
    """Canaries as rows: what was seen along each one's direction (n, rounds), its coin (n,), its round (n,).

    `apart` is silo 0's releases minus silo 1's, `twice` its releases minus those of another run of the same
    records under other queries: (n, rounds), and (n, 0) where nobody who is an adversary sees both.
    `guessed` is what the scenario's public seed would make of the noise, (n, rounds, types).
    """

    seen: NDArray[np.float64]
    apart: NDArray[np.float64]
    twice: NDArray[np.float64]
    guessed: NDArray[np.float64]
    present: NDArray[np.bool_]
    round: NDArray[np.int64]

    def of_round(self, t: int) -> "Trials":
        """The canaries of one round."""
        chosen = self.round == t
        return Trials(*(column[chosen] for column in self))


@dataclasses.dataclass(frozen=True)
class Watching:
    """An optimizer that asks at 0 for ever and notes what it is given: the server's releases, unprocessed."""

    seen: list[Tensor]

    def start(self, initial: Tensor) -> Tensor:
        return torch.zeros_like(initial)

    def query(self, state: Tensor) -> Tensor:
        return state

    def update(self, state: Tensor, released: Tensor, current: Round) -> Tensor:
        self.seen.append(released)
        return state

    def output(self, state: Tensor) -> Tensor:
        return state


def run_trials(cell: Cell, layout: Layout, seed: int) -> Trials:
    """One run with the layout's canaries in silo 0, each present or not by a fair coin.

    Guarantee: what is returned is what the trust setting shows its adversary, and nothing else.
    """
    count = len(layout.round)
    objective = objective_for(cell, count)
    plan = plan_of(cell, objective)
    present = public_generator(seed, "audit coins").random(count) < 0.5
    canaries = layout.shard(present, cell.privacy.relation)
    idle = [nothing(layout.rows, count)] * (len(plan.weights) - 1)
    guess = np.stack([_along(noise) for noise in _of_the_seed(cell, plan, objective)], axis=-1)
    none = np.empty((count, 0))
    with folder_of_silos(cell, plan, [canaries, *idle]) as (folder, silos):
        if cell.algorithm.trust_setting.noise_at_server:
            seen = _along(broadcasts(plan, objective, folder, silos))
            return Trials(seen, none, none, guess, present, layout.round)
        if cell.algorithm.trust_setting.masked:
            return Trials(_along(_sums(plan, objective, silos)), none, none, guess, present, layout.round)
        first, again, other = _two_runs(objective, plan.schedule.rounds, silos)
    seen = _along(first)
    apart = seen - _along(other) if other else none
    return Trials(seen, apart, seen - _along(again), guess, present, layout.round)


@contextmanager
def folder_of_silos(cell: Cell, plan: Plan, shards: Sequence[Shard]) -> Iterator[tuple[Path, list[GuardedSilo]]]:
    """Guards with these shards, in a folder that is gone afterwards."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fedpriv-audit-", dir=memory) as name:
        silos = guarded(Path(name), cell, plan, shards)
        try:
            yield Path(name), silos
        finally:
            for silo in silos:
                silo.close()


def _two_runs(
    objective: Objective, rounds: int, silos: Sequence[GuardedSilo]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Silo 0's replies in two runs at a time, and those of silo 1, if there is one, in the first."""
    zero, pushed = objective.initial(), objective.initial()
    pushed.view(2, -1)[0, :-1], pushed.view(2, -1)[1, :-1] = _PUSH, -_PUSH
    first, again, other = [], [], []
    for t in range(1, rounds + 1):
        first.append(silos[0].answer("first", t, zero))
        again.append(silos[0].answer("second", t, pushed))
        other += [silo.answer("first", t, zero) for silo in silos[1:2]]
        if t == rounds // 2:
            silos[0].restart()
    return first, again, other


def _sums(plan: Plan, objective: Objective, silos: Sequence[GuardedSilo]) -> list[Tensor]:
    """The sums of the masked words, as whoever gets all of them decodes them."""
    assert plan.lattice is not None
    keys, sums = b"".join(silo.public_key("run") for silo in silos), []
    for t in range(1, plan.schedule.rounds + 1):
        words = [silo.answer("run", t, objective.initial(), keys).numpy() for silo in silos]
        sums.append(torch.from_numpy(plan.lattice.decode_sum(words)))
        if t == plan.schedule.rounds // 2:
            silos[0].restart()
    return sums


def replies(plan: Plan, objective: Objective, silo: GuardedSilo) -> list[Tensor]:
    """What one silo sends in a run that asks at 0."""
    return [silo.answer("run", t, objective.initial()) for t in range(1, plan.schedule.rounds + 1)]


def broadcasts(plan: Plan, objective: Objective, folder: Path, silos: Sequence[GuardedSilo]) -> list[Tensor]:
    """What a deployed server with noise of its own releases; it is killed half-way and goes on."""
    grid, initial = InProcessGrid(client_app_of(silos, "run"), len(silos), {}), objective.initial()
    broadcast: list[Tensor] = []
    for rounds in (plan.schedule.rounds // 2, plan.schedule.rounds):
        broadcast.clear()
        watched = dataclasses.replace(plan, optimizer=Watching(broadcast))
        with flower_quiet(), ServerJournal(folder / "journal", len(initial), initial.dtype) as journal:
            if rounds:
                deployed_strategy(watched, initial, journal).start(grid, one_array(initial), num_rounds=rounds)
        silos[0].restart()
    return broadcast


def _of_the_seed(cell: Cell, plan: Plan, objective: Objective) -> Iterator[list[Tensor]]:
    """The noise in what is seen, were it drawn from the scenario's seed in float32, or float64: (d,) a round."""
    alone = cell.algorithm.trust_setting.private_messages
    for dtype in ("float32", "float64"):
        total = [torch.zeros(objective.dimension, dtype=torch.float64) for _ in range(plan.schedule.rounds)]
        source = simulation_noise(cell.seed, dtype)
        for owner, std, weight in plan.noise.sources[:1] if alone else plan.noise.sources:
            scale = float(std) * (1.0 if alone else weight)
            for t, row in enumerate(_rows(plan, source, owner, objective.dimension)):
                total[t] += scale * row
        yield total


def _rows(plan: Plan, source: KeyedNormal, owner: int, size: int) -> Iterator[Tensor]:
    state = plan.mechanism.start()
    for t in range(1, plan.schedule.rounds + 1):
        count = plan.mechanism.draws(t)
        drawn = source.vector(size, owner, t) if count is None else source.nodes(size, owner, t, count)
        row, state = plan.mechanism.noise(state, t, torch.from_numpy(drawn).double())
        yield row


def _along(vectors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Every canary's coordinate (n, rounds): its direction is its feature, class 0 against class 1."""
    classes = torch.stack([vector.double() for vector in vectors]).view(len(vectors), 2, -1)[..., :-1]
    along: NDArray[np.float64] = ((classes[:, 1] - classes[:, 0]) / 2**0.5).T.numpy().copy()
    return along
