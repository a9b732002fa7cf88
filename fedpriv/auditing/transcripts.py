"""What an adversary sees of many canaries, produced by the code that is audited.

The worst case, built: queries stay at 0, every canary's increment is far above the clip, and the two worlds'
clipped increments differ by exactly as much as the neighbouring relation allows.  The canaries of one run point in
orthogonal directions, each in a world of its own coin: since noise is independent between coordinates, one run is
as many independent trials (Steinke, Nasr & Jagielski 2023, "Privacy auditing with one training run").
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor

from clients.silo import Silo
from clients.state import ContextStore
from fedpriv.engines.inprocess import flower_quiet
from fedpriv.engines.inprocess_grid import InProcessGrid
from fedpriv.objectives import Records, SoftmaxRegression
from fedpriv.plan import Plan, plan_of
from fedpriv.randomness import KeyedNormal, public_generator, seed_key
from fedpriv.records import key_content, keys_in, number_in, roster_content
from fedpriv.rounds import Round, Schedule
from fedpriv.scenario import Cell
from fedpriv.wire import one_array, release_content, vector_in
from server.strategy import ReleaseStrategy

CANARIES = 200
_FAR = 1e4  # how many clips long an unclipped canary is: a missing clip cannot go unseen


class Trials(NamedTuple):
    """Canaries as rows: what was seen along each one's direction (n, rounds), its coin (n,), its round (n,).

    `apart` is silo 0's releases minus silo 1's (n, rounds), (n, 0) where nobody who is an adversary sees both.
    """

    seen: NDArray[np.float64]
    apart: NDArray[np.float64]
    present: NDArray[np.bool_]
    round: NDArray[np.int64]


@dataclass(frozen=True)
class _Watching:
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


def auditable(cell: Cell, mu: float, rounds: int, silos: int) -> tuple[Cell, SoftmaxRegression]:
    """The cell cut to a size that can be repeated, recalibrated to `mu` by the same code, and its small model."""
    federation = cell.federation.model_copy(
        update={"rounds": rounds, "samples": None, "size_skew": None, "silos": silos, "batch": CANARIES}
    )
    privacy = cell.privacy.model_copy(update={"mu": mu, "rho": None, "zcdp": None, "epsilon": None})
    run = cell.run.model_copy(update={"dtype": "float64", "device": "cpu", "noise": "per-silo"})
    small = cell.model_copy(update={"federation": federation, "privacy": privacy, "run": run})
    return small, SoftmaxRegression(CANARIES, classes=2, feature_norm=1.0, dtype=torch.float64)


def run_trials(cell: Cell, objective: SoftmaxRegression, seed: int) -> Trials:
    """One run with `CANARIES` canaries in silo 0, spread over its rounds, each present or not by a fair coin.

    Guarantee: what is returned is what the trust setting shows its adversary: the silos' messages, or noisy
    means: of a server that adds noise, or decoded from the sum of masked messages.
    """
    means: list[Tensor] = []
    plan = dataclasses.replace(plan_of(cell, objective), optimizer=_Watching(means))
    present = public_generator(seed, "audit coins").random(CANARIES) < 0.5
    in_round = 1 + np.arange(CANARIES) % plan.schedule.rounds
    noise = KeyedNormal(seed_key(seed, "audit noise"), np.float64)
    canaries, nothing = _canaries(cell, plan, in_round, present), _nothing(plan)
    silos = [
        Silo(number, plan, objective, nothing if number else canaries, noise)
        for number in range(len(plan.weights))
    ]
    messages: list[list[Tensor]] = [[] for _ in silos]
    grid = InProcessGrid(_listening(silos, messages), len(silos), {})
    with flower_quiet():
        ReleaseStrategy(plan, objective.initial(), noise).start(grid, one_array(objective.initial()))
    if not cell.algorithm.setting.private_messages:
        return Trials(_along(means), np.empty((CANARIES, 0)), present, in_round)
    seen, others = _along(messages[0]), messages[1:]
    return Trials(seen, seen - _along(others[0]) if others else np.empty((CANARIES, 0)), present, in_round)


def _along(vectors: list[Tensor]) -> NDArray[np.float64]:
    """Every canary's coordinate (n, rounds): its direction is its feature, class 1 against class 0."""
    classes = torch.stack(vectors).view(len(vectors), 2, CANARIES)
    along: NDArray[np.float64] = ((classes[:, 1] - classes[:, 0]) / 2**0.5).T.numpy().copy()
    return along


def _nothing(plan: Plan) -> Records:
    """Records of zeros, which contribute nothing, enough for every round."""
    held = plan.schedule.held * CANARIES
    features = torch.zeros(held, CANARIES, dtype=torch.float64)
    return Records(features, torch.zeros(held, dtype=torch.int64))


def _canaries(cell: Cell, plan: Plan, in_round: NDArray[np.int64], present: NDArray[np.bool_]) -> Records:
    """Zeros, and each canary in the batch of its round: its own feature, far longer than the clip.

    An absent one is zero under zero-out, and under replace-one a record whose increment points the other way.
    """
    features, labels = _nothing(plan)
    for canary, (t, there) in enumerate(zip(in_round.tolist(), present.tolist(), strict=True)):
        assert isinstance(plan.schedule, Schedule)  # `audit` takes a single pass without empty rounds
        row = plan.schedule.batches(t).start * CANARIES + canary
        if there or cell.privacy.relation == "replace-one":
            features[row, canary] = _FAR * float(plan.estimator.round(t).clip)
        labels[row] = 0 if there else 1
    return Records(features, labels)


def _listening(silos: list[Silo], messages: list[list[Tensor]]) -> ClientApp:
    """A ClientApp of these silos that keeps what each of them sends."""
    app = ClientApp()

    @app.query("roster")
    def roster(message: Message, context: Context) -> Message:
        return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)

    @app.query("key")
    def key(message: Message, context: Context) -> Message:
        public = silos[int(context.node_config["partition-id"])].masker.public
        return Message(key_content(public), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        silo, store = silos[int(context.node_config["partition-id"])], ContextStore(context.state)
        t = number_in(message.content, "config", "t")
        release, state = silo.answer(store.load(silo), t, vector_in(message.content, "query"))
        store.save(state)
        messages[silo.number].append(release.vector)
        leaving = silo.message(release.vector, t, keys_in(message.content))
        return Message(release_content(leaving, release.counts), reply_to=message)

    return app
