"""The silos of a simulation: their records and the noise of the scenario's seed live in the ClientApp's process.

A silo's state is kept in Flower's Context.  `client_app_of` makes a ClientApp over silos of this very process that
answer as guards do: no SuperNode, no socket.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedpriv.clients.app import in_supernode
from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedNormal, integers_key, simulation_noise
from fedpriv.loss.objective import Records
from fedpriv.plan.plan import Plan, plan_of
from fedpriv.plan.task import spread, task_of_cell
from fedpriv.protocol.cell_folder import cell_of
from fedpriv.protocol.messages import (
    answer_to,
    bytes_in,
    key_content,
    keys_in,
    number_in,
    release_content,
    roster_content,
    shared_vector_in,
    values_in,
    vector_in,
)
from fedpriv.rounds.floats import SimulatedEvaluation, evaluation_integers_key
from fedpriv.rounds.round import State
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo, pack, unpack

_RECORD, _KEY = "fedpriv-silo", "state"


@dataclass(frozen=True)
class SimulatedFederation:
    """Records, plan and the one source of noise of all silos of a simulation, built once a process.

    The noise is keyed by the scenario's seed; each silo draws its own streams of it, one silo at a time.
    """

    cell: Cell
    plan: Plan
    order: list[Tensor]
    noise: KeyedNormal

    @staticmethod
    def of(cell: Cell) -> "SimulatedFederation":
        plan = plan_of(cell, task_of_cell(cell).objective)
        return SimulatedFederation(cell, plan, spread(cell), simulation_noise(cell.noise_seed, cell.run.dtype))

    def silo(self, number: int) -> Silo:
        task, shard = task_of_cell(self.cell), self.order[number]
        records = Records(task.train.features[shard], task.train.labels[shard])
        key, gaps = integers_key(self.cell.noise_seed), self.cell.without_silos is not None
        return Silo.seeded(number, self.plan, records, self.noise, key, gaps=gaps)

    def evaluated(self, number: int) -> Silo:
        """Silo `number` as it evaluates: its test records, which train nothing."""
        if self.tests is None:
            raise RunError(f"silo {number}: the scenario has no [evaluation]")
        plan, key = self.tests.asked.plan, evaluation_integers_key(self.cell)
        return Silo.seeded(number, plan, self.tests.shares[number], self.tests.noise, key)

    @cached_property
    def tests(self) -> SimulatedEvaluation | None:
        """The evaluations; None where silos do not evaluate."""
        return SimulatedEvaluation.of(self.cell)


class _LiveState(ConfigRecord):
    """A record that packs its state only when it leaves the process, as it does after every round under Ray."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.__dict__["live"] = state

    def __reduce__(self) -> tuple[type[ConfigRecord], tuple[dict[str, bytes]]]:
        return ConfigRecord, ({_KEY: pack(self.__dict__["live"])},)


class ContextStore:
    """Flower's Context: for simulations, where nothing has to survive the process."""

    def __init__(self, records: RecordDict, name: str = _RECORD) -> None:
        """`name` tells the states of several runs of one silo apart."""
        self._records, self._name = records, name

    def load(self, silo: Silo) -> State:
        kept = values_in(self._records).get(self._name)
        if kept is None:
            return silo.start()
        if isinstance(kept, _LiveState):
            state: State = kept.__dict__["live"]
            return state
        return unpack(bytes_in(self._records, self._name, _KEY), silo)

    def save(self, state: State) -> None:
        """Called last, so that a client that failed half-way has changed nothing."""
        kept = values_in(self._records).get(self._name)
        if isinstance(kept, _LiveState):
            kept.__dict__["live"] = state
        else:
            self._records[self._name] = _LiveState(state)


torch.set_num_threads(1)  # the order of sums, and with it the last bit, must not depend on the machine's cores

Answer = Callable[[Message, Context], Message]
RunConfig = tuple[tuple[str, str | int | float | bool], ...]


def _inferring(answer: Answer) -> Answer:
    """`answer` in inference mode; where its caller is in it already, 10 µs for a way in and out are saved."""

    def inferring(message: Message, context: Context) -> Message:
        if torch.is_inference_mode_enabled():
            return answer(message, context)
        with torch.inference_mode():
            return answer(message, context)

    return inferring


@_inferring
def answer(message: Message, context: Context) -> Message:
    """Answer one query from the silo's state in the Context; its state is changed last."""
    return _answered(message, _silo_of(context), ContextStore(context.state))


@_inferring
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate a model on the silo's test records, from a state of their own in the Context."""
    silo = _cached_silo(tuple(context.run_config.items()), int(context.node_config["partition-id"]), True)
    return _answered(message, silo, ContextStore(context.state, "fedpriv-tests"))


def _answered(message: Message, silo: Silo, store: ContextStore) -> Message:
    t, query = number_in(message.content, "config", "t"), shared_vector_in(message.content, "query")
    simulated, state = silo.answer(store.load(silo), t, query)
    leaving = silo.message(simulated.vector, t, keys_in(message.content), state.chain)
    store.save(state)
    counts = simulated.counts
    del simulated, query  # long vectors that the message need not wait beside
    return answer_to(message, release_content(leaving, counts))


def public_key(message: Message, context: Context) -> Message:
    """The silo's public key for the masks of this run."""
    return Message(key_content(_silo_of(context).masker.public), reply_to=message)


def _silo_of(context: Context) -> Silo:
    return _cached_silo(tuple(context.run_config.items()), int(context.node_config["partition-id"]))


def _refuse_unguarded() -> None:
    if in_supernode():
        raise RunError(
            "this SuperNode has no guard, and a simulation's seeded noise protects nobody: start `fedpriv silo "
            "POLICY` and give the SuperNode --node-config \"partition-id=N guard='SOCKET'\""
        )


@lru_cache(maxsize=4096)
def _cached_silo(run_config: RunConfig, number: int, tests: bool = False) -> Silo:
    """A silo is built once a process: reading its records costs far more than a round."""
    _refuse_unguarded()
    federation = _cached_federation(run_config)
    return federation.evaluated(number) if tests else federation.silo(number)


@lru_cache(maxsize=8)
def _cached_federation(run_config: RunConfig) -> SimulatedFederation:
    return SimulatedFederation.of(cell_of(dict(run_config)))


class Answering(Protocol):
    """A silo, asked as a guard is."""

    def public_key(self, run: str) -> bytes: ...

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """Answer round t of a run; RunError for a refusal."""
        ...


def client_app_of(silos: Sequence[Answering], run: str, tests: Sequence[Answering] = ()) -> ClientApp:
    """A ClientApp that passes messages of one run on to `silos`, by their number, as the deployed one does.

    Evaluations go to `tests`.
    """
    app = ClientApp()

    def silo_of(context: Context) -> Answering:
        return silos[int(context.node_config["partition-id"])]

    @app.query("roster")
    def roster(message: Message, context: Context) -> Message:
        return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)

    @app.query("agreement")
    def agreement(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    @app.query("key")
    def key(message: Message, context: Context) -> Message:
        return Message(key_content(silo_of(context).public_key(run)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        t, query = number_in(message.content, "config", "t"), vector_in(message.content, "query")
        leaving = silo_of(context).answer(run, t, query, keys_in(message.content))
        return Message(release_content(leaving, None), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        silo = tests[int(context.node_config["partition-id"])]
        place, model = number_in(message.content, "config", "t"), vector_in(message.content, "query")
        return Message(release_content(silo.answer(run, place, model), None), reply_to=message)

    return app
