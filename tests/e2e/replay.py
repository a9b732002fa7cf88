"""What a federation should have computed: its run in one process, uninterrupted, with the keys that it used.

    python -m tests.e2e.replay SCENARIO OUT SERVER_KEY SILO_KEY...

writes the model to OUT, an .npy file; keys are in hexadecimal digits.  For containers, whose torch is
another.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpriv.clients.simulated import ContextStore
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.loss.objective import Records
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import (
    key_content,
    read_int_field,
    read_public_keys,
    read_tensor,
    release_content,
    roster_content,
)
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.server.strategy import ReleaseStrategy, ServerAggregator
from fedpriv.silo.silo import Silo


def replayed(cell: Cell, silo_keys: list[bytes], server_key: bytes) -> np.ndarray:
    """The model of a run of `cell` with these noise keys of silos and server."""
    task, order = load_task(cell), partition_records(cell)
    plan = make_plan(cell, task.objective, for_release=True)
    scenario = sha256(json.dumps(cell.canonical_data(), sort_keys=True).encode()).digest()
    app = ClientApp()

    def silo_of(context: Context) -> Silo:
        number = int(context.node_config["partition-id"])
        shard = order[number]
        records = Records(task.train.features[shard], task.train.labels[shard])
        return Silo.for_release(number, plan, records, silo_keys[number], scenario)

    @app.query("roster")
    def roster(message: Message, context: Context) -> Message:
        return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)

    @app.query("key")
    def key(message: Message, context: Context) -> Message:
        return Message(key_content(silo_of(context).masker.public_key), reply_to=message)

    @app.train()
    @torch.inference_mode()
    def train(message: Message, context: Context) -> Message:
        silo, store = silo_of(context), ContextStore(context.state)
        t, query = read_int_field(message.content, "config", "t"), read_tensor(message.content, "query")
        release, state = silo.answer(store.load(silo), t, query)
        store.save(state)
        leaving = silo.make_message(release.vector, t, read_public_keys(message.content), state.query_chain)
        return Message(release_content(leaving, None), reply_to=message)

    grid = InProcessGrid(app, cell.federation.silos, make_run_config(cell, Path()))
    initial = task.objective.initial()
    strategy = ReleaseStrategy(plan, initial, ServerAggregator(plan, initial, server_key))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        strategy.run(grid)
    finally:
        torch.set_num_threads(threads)
    return strategy.model.numpy()


if __name__ == "__main__":
    scenario, out, *keys = sys.argv[1:]
    server, *silos = map(bytes.fromhex, keys)
    np.save(out, replayed(load_scenario(Path(scenario), []).points[0].cell, silos, server))
