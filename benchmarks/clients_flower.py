"""Run by benchmarks/clients.py; a plain Flower app on Flower's Ray engine, which imports nothing of fedpriv.

    python clients_flower.py mlp|cnn ROUNDS

Cohorts of 100 of 1,000 supernodes, five local steps on a client's ten records, the model's move clipped to norm 1,
noise added by Flower's server-side strategy.  Prints {"rounds_per_second": …}: no evaluation; the first rounds, in
which Ray starts its actors, are left out.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import torch
from client_models import CLIENTS, CLIP, COHORT, LOCAL_STEP, LOCAL_STEPS, MODELS, NOISE, RECORDS, records_of
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

WARM_UP = 2
MODEL, ROUNDS = sys.argv[1], int(sys.argv[2])
client, server = ClientApp(), ServerApp()
ended: list[float] = []


class Timed(FedAvg):
    """Notes when each round's training ended."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        aggregated = super().aggregate_train(server_round, replies)
        ended.append(time.perf_counter())
        return aggregated


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    module = MODELS[MODEL]()
    arrays: Any = message.content["arrays"]
    module.load_state_dict(arrays.to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=LOCAL_STEP)
    features, labels = records_of(int(context.node_config["partition-id"]))
    for _ in range(LOCAL_STEPS):
        optimizer.zero_grad()
        cross_entropy(module(features), labels).backward()
        optimizer.step()
    answer = RecordDict(
        {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": RECORDS})}
    )
    return Message(content=answer, reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    averaging = Timed(
        fraction_train=COHORT / CLIENTS,
        fraction_evaluate=0.0,
        min_train_nodes=COHORT,
        min_available_nodes=CLIENTS,
    )
    private = DifferentialPrivacyServerSideFixedClipping(averaging, NOISE, CLIP, COHORT)
    initial = ArrayRecord(MODELS[MODEL]().state_dict())
    private.start(grid, initial, num_rounds=ROUNDS + WARM_UP, train_config=ConfigRecord())


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cores = os.cpu_count() or 1
    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "log_to_driver": False},
    }
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config=backend)
    print(json.dumps({"rounds_per_second": ROUNDS / (ended[-1] - ended[WARM_UP - 1])}))


main()
