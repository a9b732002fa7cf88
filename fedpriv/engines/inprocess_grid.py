"""A Flower Grid that calls a ClientApp in this process: the apps that are deployed, without the network.

The identity of the running task is a private name of Flower (1.41), covered by tests; what is inside of containers
is in fedpriv/protocol/unchecked.py.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedpriv.protocol.unchecked import message_with, number_message, own_copy

_RUN_ID = 1
_FIRST_NODE = 1000


class InProcessGrid(Grid):
    """Every node a Context; a message is answered while it is being pushed."""

    def __init__(self, client_app: ClientApp, silos: int, run_config: Mapping[str, Any]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _RUN_ID, SUPERLINK_NODE_ID, 1
        self._run = Run.create_empty(_RUN_ID)
        self._client_app = client_app
        self._numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self._contexts = {
            _FIRST_NODE + silo: Context(
                run_id=_RUN_ID,
                node_id=_FIRST_NODE + silo,
                node_config={"partition-id": silo, "num-partitions": silos},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for silo in range(silos)
        }

    def server_context(self, run_config: Mapping[str, Any]) -> Context:
        return Context(
            run_id=_RUN_ID,
            node_id=SUPERLINK_NODE_ID,
            node_config={},
            state=RecordDict(),
            run_config=dict(run_config),
        )

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(  # pragma: no cover - abstract in Flower, deprecated there, called by nobody
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def get_nodes(self) -> Iterable[Any]:
        raise NotImplementedError("an in-process grid knows node ids only")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _push(self, message: Message) -> str:
        number = f"m{next(self._numbers)}"
        number_message(message, number)
        reply = self._call(message)
        number_message(reply, f"m{next(self._numbers)}")
        self._replies[number] = reply
        return number

    def _call(self, message: Message) -> Message:
        # Each client gets its own containers, as over a network.
        own = message_with(message.metadata, own_copy(message.content))
        try:
            return self._client_app(own, self._contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)
