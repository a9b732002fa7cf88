"""quickstart: the ClientApp, with the silo's guard in place of its own training."""

from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedpriv.flower import guard_of

app = ClientApp()
SCENARIO = Path(__file__).with_name("guard.toml")


@app.train()
def train(msg: Message, context: Context):
    """Train the model on the silo's records, which only its guard has."""
    guard = guard_of(context, SCENARIO, int(context.run_config["local-steps"]))
    arrays = guard.train(msg.content["arrays"], msg.content["config"]["server-round"])
    metrics = MetricRecord({"num-examples": guard.examples})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
