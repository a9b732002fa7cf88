"""quickstart: the same client in Flower's older way, a NumPyClient, and the ServerApp that goes with it."""

from pathlib import Path

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from fedpriv.flower import SiloGuard, guard_of

from .task import Net, load_centralized_dataset, test

SCENARIO = Path(__file__).with_name("guard.toml")


class GuardedClient(NumPyClient):
    """Parameters in, parameters out; the records stay with the guard."""

    def __init__(self, guard: SiloGuard) -> None:
        self.guard = guard

    def fit(self, parameters, config):
        return self.guard.steps(parameters, config["server-round"]), self.guard.examples, {}


def client_fn(context: Context):
    return GuardedClient(guard_of(context, SCENARIO, int(context.run_config["local-steps"]))).to_client()


app = ClientApp(client_fn)


def server_fn(context: Context) -> ServerAppComponents:
    torch.manual_seed(0)
    config = context.run_config
    initial = [value.numpy() for value in Net().state_dict().values()]

    def evaluate(server_round: int, parameters, _config):
        model = Net()
        model.load_state_dict(dict(zip(model.state_dict(), map(torch.from_numpy, parameters), strict=True)))
        loss, accuracy = test(model, load_centralized_dataset())
        torch.save(model.state_dict(), config["model"])
        return loss, {"accuracy": accuracy}

    strategy = FedAvg(
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters(initial),
        on_fit_config_fn=lambda t: {"server-round": t},
        evaluate_fn=evaluate,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=config["num-server-rounds"]))


server = ServerApp(server_fn=server_fn)
