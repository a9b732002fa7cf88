"""A ClientApp over silos of this very process that answer as guards do: no SuperNode, no socket."""

from collections.abc import Sequence
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedpriv.protocol.arrays import release_content, vector_in
from fedpriv.protocol.messages import key_content, keys_in, number_in, roster_content


class Answering(Protocol):
    """A silo, asked as a guard is."""

    def public_key(self, run: str) -> bytes: ...

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """What leaves in round t of a run; RunError for a refusal."""
        ...


def client_app_of(silos: Sequence[Answering], run: str, tests: Sequence[Answering] = ()) -> ClientApp:
    """A ClientApp that passes messages of one run on to `silos`, by their number, as the deployed one does.

    Evaluations go to `tests`.
    """
    app = ClientApp()

    def silo_of(context: Context) -> Answering:
        return silos[int(context.node_config["partition-id"])]

    @app.query("roster")
    def roster(message: Message, context: Context) -> Message:
        return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)

    @app.query("key")
    def key(message: Message, context: Context) -> Message:
        return Message(key_content(silo_of(context).public_key(run)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        t, query = number_in(message.content, "config", "t"), vector_in(message.content, "query")
        leaving = silo_of(context).answer(run, t, query, keys_in(message.content))
        return Message(release_content(leaving, None), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        silo = tests[int(context.node_config["partition-id"])]
        place, model = number_in(message.content, "config", "t"), vector_in(message.content, "query")
        return Message(release_content(silo.answer(run, place, model), None), reply_to=message)

    return app
