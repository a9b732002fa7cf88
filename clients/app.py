"""The Flower ClientApp: messages in, messages out; the protocol itself is in clients/silo.py.

In a deployment it is a thin proxy: the silo's guard (clients/daemon.py), a process of the silo's own installation,
has the records and decides.  In a simulation it is the silo.
"""

import json
import sys
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.daemon import ask
from clients.silo import Silo, SimulatedFederation
from clients.state import ContextStore
from fedpriv.errors import RunError
from fedpriv.run_config import cell_of
from fedpriv.wire import number_in, release_content, roster_content, vector_in

torch.set_num_threads(1)  # the order of sums, and with it the last bit, must not depend on the machine's cores

RunConfig = tuple[tuple[str, str | int | float | bool], ...]

app = ClientApp()


@app.query("roster")
def roster(message: Message, context: Context) -> Message:
    """Tell the server which silo this node is."""
    return Message(roster_content(_number(context)), reply_to=message)


@app.train()
@torch.inference_mode()
def train(message: Message, context: Context) -> Message:
    """Answer one query."""
    t, query = number_in(message.content, "config", "t"), vector_in(message.content, "query")
    run_config = tuple(context.run_config.items())
    if guard := context.node_config.get("guard"):
        release = ask(Path(str(guard)), str(context.run_id), _cached_cell_json(run_config), t, query)
        return Message(release_content(release, None), reply_to=message)
    silo, store = _cached_silo(run_config, _number(context)), ContextStore(context.state)
    simulated, state = silo.answer(store.load(silo), t, query)
    store.save(state)
    return Message(release_content(simulated.vector, simulated.counts), reply_to=message)


def _number(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _refuse_unguarded() -> None:
    """A SuperNode starts a process `flwr-clientapp` for each message; a simulation never does."""
    if Path(sys.argv[0]).name.startswith("flwr-clientapp"):
        raise RunError(
            "this SuperNode has no guard, and a simulation's seeded noise protects nobody: start `fedpriv silo "
            "POLICY` and give the SuperNode --node-config \"partition-id=N guard='SOCKET'\""
        )


@lru_cache(maxsize=4096)
def _cached_silo(run_config: RunConfig, number: int) -> Silo:
    """A silo is built once a process: reading its records costs far more than a round."""
    _refuse_unguarded()
    return _cached_federation(run_config).silo(number)


@lru_cache(maxsize=8)
def _cached_federation(run_config: RunConfig) -> SimulatedFederation:
    return SimulatedFederation.of(cell_of(dict(run_config)))


@lru_cache(maxsize=8)
def _cached_cell_json(run_config: RunConfig) -> str:
    return json.dumps(cell_of(dict(run_config)).canonical(), sort_keys=True)
