"""The Flower ClientApp: messages in, messages out; the protocol itself is in clients/silo.py.

In a deployment it is a thin proxy: the silo's guard (clients/daemon.py), a process of the silo's own installation,
has the records and decides.  In a simulation it is the silo.  A SuperNode starts a process for each message, so
that torch, which only a simulation needs here, is imported when it is needed.
"""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpriv.clients.proxy import forward, forward_key
from fedpriv.protocol.messages import roster_content

app = ClientApp()


@app.query("roster")
def roster(message: Message, context: Context) -> Message:
    """Tell the server which silo this node is."""
    return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)


@app.query("key")
def key(message: Message, context: Context) -> Message:
    """Give the server this silo's public key for the masks of this run, which it relays to the other silos."""
    if guard := context.node_config.get("guard"):
        return forward_key(message, context, Path(str(guard)))
    from fedpriv.clients.simulated import public_key

    return public_key(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Sum a model's scores over the silo's own test records."""
    if guard := context.node_config.get("guard"):
        return forward(message, context, Path(str(guard)), tests=True)
    from fedpriv.clients.simulated import evaluate

    return evaluate(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one query."""
    if guard := context.node_config.get("guard"):
        return forward(message, context, Path(str(guard)))
    from fedpriv.clients.simulated import answer

    return answer(message, context)
