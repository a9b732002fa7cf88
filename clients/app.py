"""The Flower ClientApp: messages in, messages out; the protocol itself is in clients/silo.py."""

from functools import lru_cache

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.silo import Silo, SimulatedFederation
from clients.state import load_state, save_state
from fedpriv.run_config import cell_of
from fedpriv.wire import number_in, release_content, roster_content, vector_in

torch.set_num_threads(1)  # the order of sums, and with it the last bit, must not depend on the machine's cores

app = ClientApp()


@app.query("roster")
def roster(message: Message, context: Context) -> Message:
    """Tell the server which silo this node is."""
    return Message(roster_content(_number(context)), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one query and remember having done so."""
    silo = _silo(context)
    t = number_in(message.content, "config", "t")
    release, state = silo.answer(load_state(context.state, silo), t, vector_in(message.content, "query"))
    save_state(context.state, state)
    return Message(release_content(release.vector, release.clipped), reply_to=message)


def _number(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _silo(context: Context) -> Silo:
    return _cached_silo(tuple(sorted(context.run_config.items())), _number(context))


@lru_cache(maxsize=4096)
def _cached_silo(run_config: tuple[tuple[str, str | int | float | bool], ...], number: int) -> Silo:
    """A silo is built once a process: reading its records costs far more than a round."""
    return _cached_federation(run_config).silo(number)


@lru_cache(maxsize=8)
def _cached_federation(run_config: tuple[tuple[str, str | int | float | bool], ...]) -> SimulatedFederation:
    return SimulatedFederation.of(cell_of(dict(run_config)))
