"""The ClientApp's answer in a simulation, where silo, records and seeded noise live in its own process."""

import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message

from fedpriv.clients.federation import SimulatedFederation
from fedpriv.clients.silo import Silo
from fedpriv.clients.state import ContextStore
from fedpriv.errors import RunError
from fedpriv.protocol.arrays import release_content, shared_vector_in
from fedpriv.protocol.messages import key_content, keys_in, number_in
from fedpriv.protocol.run_config import cell_of
from fedpriv.protocol.unchecked import answer_to

torch.set_num_threads(1)  # the order of sums, and with it the last bit, must not depend on the machine's cores

Answering = Callable[[Message, Context], Message]
RunConfig = tuple[tuple[str, str | int | float | bool], ...]


def _inferring(answer: Answering) -> Answering:
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
    return answer_to(message, release_content(leaving, simulated.counts))


def public_key(message: Message, context: Context) -> Message:
    """The silo's public key for the masks of this run."""
    return Message(key_content(_silo_of(context).masker.public), reply_to=message)


def _silo_of(context: Context) -> Silo:
    return _cached_silo(tuple(context.run_config.items()), int(context.node_config["partition-id"]))


def _refuse_unguarded() -> None:
    """A SuperNode starts a process `flwr-clientapp` for each message; a simulation never does."""
    if Path(sys.argv[0]).name.startswith("flwr-clientapp"):
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
