"""quickstart: the app whose sites evaluate, too: guards score the model on test records that they alone have."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedpriv.flower import guard_of

from .task import Net

app = ClientApp()
SCENARIO = Path(__file__).with_name("evaluated.toml")


@app.train()
def train(msg: Message, context: Context):
    """As client_app.py does."""
    guard = guard_of(context, SCENARIO, int(context.run_config["local-steps"]))
    arrays = guard.train(msg.content["arrays"], msg.content["config"]["server-round"])
    metrics = MetricRecord({"num-examples": guard.examples})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Score the model on the silo's test records, which only its guard has."""
    guard = guard_of(context, SCENARIO, int(context.run_config["local-steps"]))
    scores = guard.evaluate(msg.content["arrays"], msg.content["config"]["server-round"])
    metrics = MetricRecord({**scores, "num-examples": guard.test_examples})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The template's ServerApp without an `evaluate_fn`: it needs no public records."""
    torch.manual_seed(0)
    result = FedAvg(fraction_evaluate=1.0).start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    told = {str(t): dict(metrics) for t, metrics in result.evaluate_metrics_clientapp.items()}
    torch.save({"model": result.arrays.to_torch_state_dict(), "told": told}, context.run_config["model"])
