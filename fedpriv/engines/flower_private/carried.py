"""A message's objects travel with it: one request brings all of it, and one answer.

Measured on Flower 1.41: a message is announced, then each of its three objects is a request of its own, and so is
the word that it came, on each of its ways: server, SuperLink, SuperNode, ClientApp and back.  Here an object's
content is a field of its node in the tree that announces it, under a number that Flower does not use: who does not
know it passes over it, and asks for objects, or for the sending of them, one by one.  So do both sides with
what is not carried: long objects, and those that are not there yet.

sender ── announcement, tree with contents ──▶ stored, all or some ── what is missing ──▶ sender sends it
who asks ── I take contents ──▶ message, tree with contents, and which messages were let go ──▶ nothing more

Guarantee: who asks gets, and who sends stores, what he would have got and stored object by object: contents are
given out and taken by Flower's own functions, for the node or task whose request was let in, and no others than
those of the messages that it is about.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PullTaskInputRequest,
    PullTaskInputResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.proto.task_pb2 import Task
from flwr.supercore.corestate import CoreState
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.runtime import RuntimeHttpClient
from google.protobuf.message import Message as Protobuf
from google.protobuf.unknown_fields import UnknownFieldSet

CONTENT, WANTED, LET_GO, INPUT = 15_001, 15_002, 15_003, 15_004
"""Fields: of a tree's node, of a question for messages, and of an answer to one."""
_MOST = 2**23
"""Bytes of contents in one request or answer; a message's vector is one of its objects up to 4 MiB."""

Pulled = PullMessagesResponse | PullAppMessagesResponse


def with_field(message: Protobuf, number: int, content: bytes) -> None:
    """Add a field that the message's type does not have, one of bytes."""
    message.MergeFromString(_varint(number << 3 | 2) + _varint(len(content)) + content)


def field_in(message: Protobuf, number: int) -> list[bytes]:
    """What the message has in such a field."""
    return [
        bytes(field.data)
        for field in UnknownFieldSet(message)
        if field.field_number == number and field.wire_type == 2
    ]


def _varint(value: int) -> bytes:
    low, more = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(more) if more else bytes([low])


class Load:
    """The contents of one request or answer: each object once, and not more than it should have."""

    def __init__(self) -> None:
        self._left, self._names = _MOST, set[str]()

    def onto(self, tree: ObjectTree, content_of: Callable[[str], bytes | None]) -> bool:
        """Lay the contents of a message's objects onto its tree; whether all of them are in this load now."""
        whole = True
        for node in iterate_object_tree(tree):
            if node.object_id in self._names:
                continue
            content = content_of(node.object_id)
            if not content or len(content) > self._left:
                whole = False
                continue
            self._left -= len(content)
            self._names.add(node.object_id)
            with_field(node, CONTENT, content)
        return whole


def taken(tree: ObjectTree) -> dict[str, bytes]:
    """Take the contents off a tree: by the object's name, as its sender says."""
    contents = {
        node.object_id: content[0] for node in iterate_object_tree(tree) if (content := field_in(node, CONTENT))
    }
    tree.DiscardUnknownFields()
    return contents


def _stored(
    state: CoreState, run: int, session: str, missing: Iterable[str], contents: Mapping[str, bytes]
) -> list[str]:
    """Store what is missing and came; what is missing still.

    Guarantee: an object is stored as one that is sent by itself is: if its session waits for it, and its name is
    that of its content.
    """
    return [
        name
        for name in missing
        if name not in contents or not state.store_object(run, session, name, contents[name])
    ]


def store_what_supernodes_send() -> None:
    """Store a reply's objects with it, for as long as this process lives; nobody sees it without them."""
    from flwr.server.superlink.linkstate import InMemoryLinkState

    store = InMemoryLinkState.store_message_and_object_tree

    def stored(
        own: InMemoryLinkState, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        contents = taken(object_tree)
        with own.lock:
            kept, missing = store(own, message, object_tree, session_id)
            return kept, _stored(own, message.metadata.run_id, session_id, missing, contents)

    mock.patch.object(InMemoryLinkState, "store_message_and_object_tree", stored).start()


def store_what_tasks_send(handlers: ModuleType, locks: Callable[[Any], AbstractContextManager[Any]]) -> None:
    """The same for the messages of tasks, of a SuperLink or a SuperNode; some of one request share objects.

    `locks` are those under which messages are seen; Flower's function takes no other that is taken before them.
    """
    push = handlers.push_messages

    def pushed(request: PushAppMessagesRequest, state: CoreState, task: Task) -> PushAppMessagesResponse:
        contents = dict[str, bytes]()
        for tree in request.message_object_trees:
            contents.update(taken(tree))
        with locks(state):
            answer: PushAppMessagesResponse = push(request, state, task)
            missing = _stored(state, task.run_id, answer.session_id, answer.objects_to_push, contents)
        del answer.objects_to_push[:]
        answer.objects_to_push.extend(missing)
        return answer

    mock.patch.object(handlers, "push_messages", pushed).start()


def _fill(
    request: Protobuf,
    answer: Pulled,
    node: Node,
    pull_object: Callable[[PullObjectRequest], PullObjectResponse],
    confirm: Callable[[ConfirmMessageReceivedRequest], object],
) -> None:
    """Put into an answer what is there of its messages, if its request says so; what all is in it is let go."""
    if not field_in(request, WANTED):
        return
    load = Load()
    for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
        run = message.metadata.run_id

        def content_of(name: str, run: int = run) -> bytes:
            return bytes(pull_object(PullObjectRequest(node=node, run_id=run, object_id=name)).object_content)

        with suppress(FlowerError):  # who asks object by object is told of it then
            if load.onto(tree, content_of):
                confirm(ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=tree.object_id))
                with_field(answer, LET_GO, tree.object_id.encode())


def give_contents_to_supernodes() -> None:
    """Answer a SuperNode's question for messages with their contents, for as long as this process lives."""
    from flwr.superlink.servicer.fleet import fleet_handlers

    pull = fleet_handlers.pull_messages

    def pulled(request: PullMessagesRequest, state: Any, store: ObjectStore) -> PullMessagesResponse:
        answer = pull(request=request, state=state, store=store)
        pull_object = partial(fleet_handlers.pull_object, state=state)
        confirm = partial(fleet_handlers.confirm_message_received, state=state, store=store)
        _fill(request, answer, request.node, pull_object, confirm)
        return answer

    mock.patch.object(fleet_handlers, "pull_messages", pulled).start()


def give_contents_to_tasks(handlers: ModuleType) -> None:
    """The same for tasks, of a SuperLink or a SuperNode; and a ClientApp's message comes with its input."""
    pull, pull_input = handlers.pull_messages, handlers.pull_task_input

    def pulled(request: PullAppMessagesRequest, state: CoreState, task: Task) -> PullAppMessagesResponse:
        answer: PullAppMessagesResponse = pull(request, state, task)
        pull_object = partial(handlers.pull_object, state=state, task=task)
        confirm = partial(handlers.confirm_message_received, state=state, task=task)
        _fill(request, answer, Node(node_id=SUPERLINK_NODE_ID), pull_object, confirm)
        return answer

    def input_pulled(request: PullTaskInputRequest, state: CoreState, task: Task) -> PullTaskInputResponse:
        answer: PullTaskInputResponse = pull_input(request, state, task)
        if field_in(request, WANTED):
            with_field(answer, INPUT, pulled(_wanting(PullAppMessagesRequest()), state, task).SerializeToString())
        return answer

    mock.patch.object(handlers, "pull_messages", pulled).start()
    mock.patch.object(handlers, "pull_task_input", input_pulled).start()


Asking = TypeVar("Asking", bound=Protobuf)


def _wanting(request: Asking) -> Asking:
    with_field(request, WANTED, b"")
    return request


def take_contents(client: type[Any]) -> None:
    """Ask for contents, and for no object that came with its message, for as long as this process lives.

    `client` is `FleetHttpClient` or `RuntimeHttpClient`, of which the process has one.
    """
    pull, pull_object, confirm = client.PullMessages, client.PullObject, client.ConfirmMessageReceived
    held, let_go = dict[str, bytes](), set[str]()

    def pulled(own: Any, request: Any) -> Any:
        answer = pull(own, _wanting(request))
        held.clear()
        let_go.clear()
        for tree in answer.message_object_trees:
            held.update(taken(tree))
        let_go.update(name.decode() for name in field_in(answer, LET_GO))
        return answer

    def object_pulled(own: Any, request: PullObjectRequest) -> Any:
        if (content := held.get(request.object_id)) is None:
            return pull_object(own, request)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def confirmed(own: Any, request: ConfirmMessageReceivedRequest) -> Any:
        if request.message_object_id in let_go:
            return ConfirmMessageReceivedResponse()
        return confirm(own, request)

    mock.patch.object(client, "PullMessages", pulled).start()
    mock.patch.object(client, "PullObject", object_pulled).start()
    mock.patch.object(client, "ConfirmMessageReceived", confirmed).start()


def take_message_with_input() -> None:
    """Let a ClientApp ask for its message with its input, for as long as this process lives."""
    pull, pull_input = RuntimeHttpClient.PullMessages, RuntimeHttpClient.PullTaskInput
    came = list[bytes]()

    def input_pulled(own: RuntimeHttpClient, request: PullTaskInputRequest) -> PullTaskInputResponse:
        answer = pull_input(own, _wanting(request))
        came.extend(field_in(answer, INPUT))
        return answer

    def pulled(own: RuntimeHttpClient, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        return PullAppMessagesResponse.FromString(came.pop()) if came else pull(own, request)

    mock.patch.object(RuntimeHttpClient, "PullTaskInput", input_pulled).start()
    mock.patch.object(RuntimeHttpClient, "PullMessages", pulled).start()


def send_contents(app: ModuleType) -> None:
    """Let `app`, which announces messages, say their contents in the same request, while this process lives."""
    push = RuntimeHttpClient.PushMessages
    loads = [Load()]

    def tree_of(message: Message) -> ObjectTree:
        tree, objects = get_object_tree(message), get_all_nested_objects(message)
        loads[0].onto(tree, lambda name: objects[name].deflate())
        return tree

    def pushed(own: RuntimeHttpClient, request: PushAppMessagesRequest) -> PushAppMessagesResponse:
        loads[0] = Load()
        return push(own, request)

    mock.patch.object(app, "get_object_tree", tree_of).start()
    mock.patch.object(RuntimeHttpClient, "PushMessages", pushed).start()


def sending_contents(send: Callable[..., Any], store: ObjectStore) -> Callable[..., Any]:
    """A SuperNode's `send` that lays onto a reply's tree what is there of its objects."""

    def sent(reply: Message, object_tree: ObjectTree, *given: Any) -> Any:
        Load().onto(object_tree, store.get)
        return send(reply, object_tree, *given)

    return sent
