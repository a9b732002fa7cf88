"""Silos of a simulation, whose records and seeded noise are in the ClientApp's process.

A query is the vector that the server sends in round t, and a release is the silo's answer.  The state is what a
silo keeps from one round to the next, such as a digest of the queries so far (`query_chain`).  `answer_query`
stores it in Flower's Context.  `make_client_app` makes a ClientApp over silos in this process, without
SuperNodes and sockets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedpriv.clients.app import runs_in_supernode
from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedNormal, integer_noise_key, simulation_noise
from fedpriv.loss.objective import Records
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.protocol.cell_folder import cell_from_run_config
from fedpriv.protocol.messages import (
    build_reply,
    key_content,
    read_bytes_field,
    read_int_field,
    read_public_keys,
    read_shared_tensor,
    read_tensor,
    record_values,
    release_content,
    roster_content,
)
from fedpriv.rounds.floats import SimulatedEvaluation, evaluation_integers_key
from fedpriv.rounds.round import RoundState
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo, pack_state, unpack_state

_STATE_RECORD, _STATE_KEY = "fedpriv-silo", "state"


@dataclass(frozen=True)
class SimulatedFederation:
    """Records, plan and noise source of all silos of a simulation.

    The keys of the rounds' noise are derived from the cell's noise seed.
    """

    cell: Cell
    plan: Plan
    silo_rows: list[Tensor]
    """Row indices of each silo's records in the training part of the data set."""
    noise: KeyedNormal

    @staticmethod
    def from_cell(cell: Cell) -> "SimulatedFederation":
        plan = make_plan(cell, load_task(cell).objective)
        return SimulatedFederation(
            cell, plan, partition_records(cell), simulation_noise(cell.noise_seed, cell.run.dtype)
        )

    def silo(self, number: int) -> Silo:
        task, shard = load_task(self.cell), self.silo_rows[number]
        records = Records(task.train.features[shard], task.train.labels[shard])
        key, may_miss = integer_noise_key(self.cell.noise_seed), self.cell.absence_key is not None
        return Silo.for_simulation(number, self.plan, records, self.noise, key, may_miss_rounds=may_miss)

    def evaluation_silo(self, number: int) -> Silo:
        """Build silo `number` for evaluations, with its test records.

        Raises:
            RunError: The scenario has no evaluation by silos.
        """
        if self.evaluation is None:
            raise RunError(f"silo {number}: the scenario has no [evaluation]")
        plan, key = self.evaluation.evaluation_plan.plan, evaluation_integers_key(self.cell)
        return Silo.for_simulation(number, plan, self.evaluation.test_records[number], self.evaluation.noise, key)

    @cached_property
    def evaluation(self) -> SimulatedEvaluation | None:
        """Evaluations of the simulation, or None if silos do not evaluate."""
        return SimulatedEvaluation.from_cell(self.cell)


class _LiveState(ConfigRecord):
    """Record of a silo's state as an object, packed into bytes by `pickle` and `copy`."""

    def __init__(self, state: RoundState) -> None:
        super().__init__()
        self.__dict__["live"] = state

    def __reduce__(self) -> tuple[type[ConfigRecord], tuple[dict[str, bytes]]]:
        return ConfigRecord, ({_STATE_KEY: pack_state(self.__dict__["live"])},)


class ContextStore:
    """Store of a silo's state in Flower's Context."""

    def __init__(self, records: RecordDict, name: str = _STATE_RECORD) -> None:
        """Open the store, in which `name` distinguishes the states of several runs of one silo."""
        self._records, self._name = records, name

    def load(self, silo: Silo) -> RoundState:
        """Load the state of a silo, or its initial state if none is stored.

        A stored state is an object, or bytes after the Context was pickled or copied.
        """
        record = record_values(self._records).get(self._name)
        if record is None:
            return silo.initial_state()
        if isinstance(record, _LiveState):
            state: RoundState = record.__dict__["live"]
            return state
        return unpack_state(read_bytes_field(self._records, self._name, _STATE_KEY), silo)

    def save(self, state: RoundState) -> None:
        """Store the state."""
        record = record_values(self._records).get(self._name)
        if isinstance(record, _LiveState):
            record.__dict__["live"] = state
        else:
            self._records[self._name] = _LiveState(state)


torch.set_num_threads(1)  # The order of sums, and with it the last bit, must not depend on the number of cores.

MessageHandler = Callable[[Message, Context], Message]
RunConfig = tuple[tuple[str, str | int | float | bool], ...]


def _in_inference_mode(handler: MessageHandler) -> MessageHandler:
    """Make a handler run in torch's inference mode, which is not entered twice."""

    def run_handler(message: Message, context: Context) -> Message:
        if torch.is_inference_mode_enabled():
            return handler(message, context)
        with torch.inference_mode():
            return handler(message, context)

    return run_handler


@_in_inference_mode
def answer_query(message: Message, context: Context) -> Message:
    """Answer one query from the silo's state in the Context."""
    return _make_reply(message, _find_silo(context), ContextStore(context.state))


@_in_inference_mode
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate a model on the silo's test records, from a separate state in the Context."""
    silo = _cached_silo(tuple(context.run_config.items()), int(context.node_config["partition-id"]), True)
    return _make_reply(message, silo, ContextStore(context.state, "fedpriv-tests"))


def _make_reply(message: Message, silo: Silo, store: ContextStore) -> Message:
    """Answer one query with this silo, and store its next state.

    The reply has the silo's release, masked if the run masks messages, and its counts (`RecordCounts`).  In an
    evaluation the query is a model, and t the number of the evaluation.

    Raises:
        RunError: The silo refuses the query.  The stored state stays as it was.
    """
    t, query = read_int_field(message.content, "config", "t"), read_shared_tensor(message.content, "query")
    release, state = silo.answer(store.load(silo), t, query)
    reply = silo.make_message(release.vector, t, read_public_keys(message.content), state.query_chain)
    store.save(state)
    counts = release.counts
    del release, query  # They may be long, and are not needed while the message is built.
    return build_reply(message, release_content(reply, counts))


def public_key(message: Message, context: Context) -> Message:
    """Return a message with the silo's public key for the masks of this run."""
    return Message(key_content(_find_silo(context).masker.public_key), reply_to=message)


def _find_silo(context: Context) -> Silo:
    return _cached_silo(tuple(context.run_config.items()), int(context.node_config["partition-id"]))


def _refuse_unguarded() -> None:
    """Refuse to simulate a silo in a SuperNode, by a RunError."""
    if runs_in_supernode():
        raise RunError(
            "this SuperNode has no guard, and a simulation's seeded noise protects nobody: start `fedpriv silo "
            "POLICY` and give the SuperNode --node-config \"partition-id=N guard='SOCKET'\""
        )


@lru_cache(maxsize=4096)
def _cached_silo(run_config: RunConfig, number: int, is_evaluation: bool = False) -> Silo:
    """Build a silo with its records, or return it from the cache, so that not every query reads them.

    Raises:
        InputError: The run configuration names no cell that can be run.
        RunError: The process belongs to a SuperNode, or the scenario has no evaluation by silos.
    """
    _refuse_unguarded()
    federation = _cached_federation(run_config)
    return federation.evaluation_silo(number) if is_evaluation else federation.silo(number)


@lru_cache(maxsize=8)
def _cached_federation(run_config: RunConfig) -> SimulatedFederation:
    return SimulatedFederation.from_cell(cell_from_run_config(dict(run_config)))


class SiloEndpoint(Protocol):
    """Silo with the interface of a guard."""

    def public_key(self, run: str) -> bytes: ...

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """Return the release of round t of a run, or of evaluation t.

        Args:
            run: Name of the run.
            t: Round, or number of the evaluation.
            query: Query, (d,).
            keys: Public keys of all silos, or b"" if messages are not masked.

        Raises:
            RunError: If the silo refuses.
        """
        ...


def make_client_app(silos: Sequence[SiloEndpoint], run: str, tests: Sequence[SiloEndpoint] = ()) -> ClientApp:
    """Make a ClientApp that passes queries of one run to `silos`, and its evaluations to `tests`.

    The number of a node's silo is its "partition-id".  The app also answers a server that asks for this number,
    for the silo's agreement to the run, and for its public key.  Its releases come without numbers of records.

    Args:
        silos: Silos for queries, in the order of their numbers.
        run: Name of the run.
        tests: Silos for evaluations, in the same order, or none in a run without evaluations by silos.
    """
    app = ClientApp()

    def find_silo(context: Context) -> SiloEndpoint:
        return silos[int(context.node_config["partition-id"])]

    @app.query("roster")
    def roster(message: Message, context: Context) -> Message:
        return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)

    @app.query("agreement")
    def agreement(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)  # An empty reply agrees to the run.

    @app.query("key")
    def key(message: Message, context: Context) -> Message:
        return Message(key_content(find_silo(context).public_key(run)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        t, query = read_int_field(message.content, "config", "t"), read_tensor(message.content, "query")
        release = find_silo(context).answer(run, t, query, read_public_keys(message.content))
        return Message(release_content(release, None), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        silo = tests[int(context.node_config["partition-id"])]
        number, model = read_int_field(message.content, "config", "t"), read_tensor(message.content, "query")
        return Message(release_content(silo.answer(run, number, model), None), reply_to=message)

    return app
