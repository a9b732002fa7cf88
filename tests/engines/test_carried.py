"""A message's objects travel with it: through Flower's own servers and clients, with both ends and with one."""

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest import mock

import flwr.supercore.protobuf.client as http
import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid
from flwr.superlink.main import create_app as create_superlink
from flwr.superlink.servicer.runtime import runtime_handlers as superlink_handlers
from flwr.supernode import fleet_http_connection
from flwr.supernode import start_client_internal as loop
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.main import create_app as create_supernode
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.runtime import run_clientapp
from flwr.supernode.servicer.runtime import runtime_handlers as supernode_handlers

from fedpriv.engines.flower_private import carried
from fedpriv.engines.flower_private.kept import create_nodes, node_id_of
from fedpriv.engines.flower_private.supernode import unseen

REQUESTS = {
    frozenset[str](): [
        "runtime/push-messages",
        *["runtime/push-object"] * 4,  # two messages that share what they say
        *["fleet/pull-messages", *["fleet/pull-object"] * 3, "fleet/confirm-message-received"],
        *["runtime/pull-task-input", "runtime/pull-messages"],
        *[*["runtime/pull-object"] * 3, "runtime/confirm-message-received"],
        *["runtime/push-messages", *["runtime/push-object"] * 3],
        *["fleet/push-messages", *["fleet/push-object"] * 3],
        *["runtime/pull-messages", *["runtime/pull-object"] * 3, "runtime/confirm-message-received"],
    ],
    frozenset({"superlink", "supernode"}): [
        *["runtime/push-messages", "fleet/pull-messages", "runtime/pull-task-input", "runtime/push-messages"],
        *["fleet/push-messages", "runtime/pull-messages"],
    ],
}
"""What is asked for a message to a silo and its reply, by who knows of contents: Flower's programs, or ours."""


class Both:
    """A SuperLink and the SuperNode of silo 0, of two silos; requests reach them without a network."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.carries = False  # whether the SuperNode's replies do
        superlink, factory = create_superlink(), NodeStateFactory(ObjectStoreFactory())
        self.link, self.node = superlink.state.linkstate_factory.state(), factory.state()
        assert isinstance(self.link, InMemoryLinkState)
        assert isinstance(self.node, InMemoryNodeState)
        self.requests = list[str]()
        apps = {"superlink": superlink, "supernode": create_supernode(factory)}

        async def sent(request: httpx.Request) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(apps[request.url.host])) as client:
                return await client.post(request.url, content=request.content, headers=request.headers)

        def send(_: httpx.Client, request: httpx.Request, **__: Any) -> httpx.Response:
            self.requests.append(request.url.path.removeprefix("/v1/"))
            return asyncio.run(sent(request))

        patches.setattr(http.httpx.Client, "send", send)
        patches.setattr(fleet_http_connection.HeartbeatSender, "start", lambda _: None)
        own_key, public = generate_key_pairs()
        keys = {
            f"silo-{silo}": public_key_to_bytes(key) for silo, key in enumerate((public, generate_key_pairs()[1]))
        }
        create_nodes(self.link, keys)
        self.nodes = [node_id_of(name, key) for name, key in keys.items()]
        assert self.link.activate_node(self.nodes[1], 30.0)
        self.keys = own_key, public
        self.run = self.link.create_run(
            "a/b", "1", "f" * 64, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP
        )
        (task,) = self.link.get_tasks()
        self.grid = http_grid.HttpGrid("superlink", insecure=True, token=str(self.link.claim_task(task.task_id)))
        assert self.link.activate_task(task.task_id)
        run = Run.create_empty(self.run)
        run.fab_hash = self.node.store_fab(Fab("", b"fab", {}))
        self.grid.set_run(run)
        self.node.store_run(run)
        self.node.set_run_series_context(
            run.series_id, Context(self.run, self.nodes[0], {}, RecordDict(), {}, run.series_id)
        )

    def identity(self, patches: pytest.MonkeyPatch, node: int) -> None:
        for name, value in (("_run_id", self.run), ("_node_id", node), ("_task_id", 1)):
            patches.setattr(TaskIdentity, name, value)

    def exchanged(
        self, patches: pytest.MonkeyPatch, query: RecordDict, release: RecordDict
    ) -> tuple[Message, Message]:
        """The message as silo 0's app has it, and its reply as the server has it."""
        self.identity(patches, SUPERLINK_NODE_ID)
        with fleet_http_connection.http_request_response("superlink", True, None, self.keys) as connection:
            node, receive, send, get_run, get_fab, pull_object, push_object, confirm = connection
            assert node == self.nodes[0]
            self.requests.clear()  # less its word that it is here
            numbers = list(self.grid.push_messages([Message(query, node, "train") for node in self.nodes]))
            self.node.set_node_id(node)
            run = loop._pull_and_store_message(
                self.node, self.node.object_store, {}, receive, get_run, get_fab, pull_object, confirm, None
            )
            assert run == self.run
            came = self.app_answers(patches, release)
            loop._push_messages(
                self.node,
                self.node.object_store,
                carried.sending_contents(send, self.node.object_store) if self.carries else send,
                push_object,
            )
            self.identity(patches, SUPERLINK_NODE_ID)
            (reply,) = self.grid.pull_messages(numbers)
        self.requests.remove("fleet/deactivate-node")
        assert reply.metadata.reply_to_message_id == numbers[0]
        return came, reply

    def app_answers(self, patches: pytest.MonkeyPatch, release: RecordDict) -> Message:
        (task,) = self.node.get_tasks()
        token = self.node.claim_task(task.task_id)
        client = RuntimeHttpClient.from_server_address(
            "supernode", True, None, [run_clientapp.RuntimeTokenHttpInterceptor(str(token))]
        )
        self.identity(patches, self.nodes[0])
        message, context, _, _ = run_clientapp.pull_task_input(client)
        run_clientapp.push_message(client, Message(release, reply_to=message), context)
        return message


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    yield Both(monkeypatch)
    mock.patch.stopall()


def of_superlink() -> None:
    carried.store_what_supernodes_send()
    carried.store_what_tasks_send(superlink_handlers, lambda state: state.lock)
    carried.give_contents_to_supernodes()
    carried.give_contents_to_tasks(superlink_handlers)


def of_supernode() -> None:
    carried.store_what_tasks_send(supernode_handlers, unseen)
    carried.give_contents_to_tasks(supernode_handlers)
    carried.take_contents(FleetHttpClient)
    carried.take_message_with_input()
    carried.take_contents(RuntimeHttpClient)
    carried.send_contents(http_grid)
    carried.send_contents(run_clientapp)


SIDES = {"superlink": of_superlink, "supernode": of_supernode}


@pytest.mark.parametrize("sides", [(), ("superlink",), ("supernode",), ("superlink", "supernode")])
def test_a_message_and_its_reply_are_the_same_whoever_knows_of_contents(
    both: Both, monkeypatch: pytest.MonkeyPatch, sides: tuple[str, ...]
) -> None:
    """A site's SuperNode may be of another version than its coordinator; both ours: 6 requests instead of 33."""
    for side in sides:
        SIDES[side]()
    both.carries = "supernode" in sides
    query, release = (RecordDict({"config": ConfigRecord({"x": bytes([n]) * 30_000, "t": n})}) for n in (1, 2))
    came, reply = both.exchanged(monkeypatch, query, release)
    assert came.content == query
    assert reply.content == release
    if (expected := REQUESTS.get(frozenset(sides))) is not None:
        assert sorted(both.requests) == sorted(expected)
    assert len(both.node.object_store) == 0
    assert both.link.object_store.get(reply.metadata.message_id) is None, "it was let go"


@pytest.mark.slow
def test_what_is_too_long_to_be_carried_comes_object_by_object(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in SIDES.values():
        side()
    both.carries = True
    query = RecordDict({"a": ArrayRecord([np.arange(2**21, dtype=np.float64)]), "b": ConfigRecord({"t": 1})})
    came, reply = both.exchanged(monkeypatch, query, query)
    assert came.content == query
    assert reply.content == query
    assert "fleet/pull-object" in both.requests
    assert "runtime/confirm-message-received" in both.requests
    assert len(both.node.object_store) == 0


def test_a_content_that_is_not_its_names_is_not_stored_and_asked_for(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would gain: a sender has another message in its place, or one that never comes is taken for whole."""
    of_superlink()
    both.identity(monkeypatch, SUPERLINK_NODE_ID)
    message = Message(RecordDict({"config": ConfigRecord({"x": b"own"})}), both.nodes[1], "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    tree = get_object_tree(message)
    names = [node.object_id for node in iterate_object_tree(tree)]
    carried.with_field(tree, carried.CONTENT, b"another")
    carried.with_field(tree.children[0], carried.CONTENT, get_all_nested_objects(message)[names[0]].deflate())
    stored, missing = both.link.store_message_and_object_tree(message, tree, both.link.start_session(both.run))
    assert stored
    assert sorted(missing) == sorted(names)
    assert not any(both.link.object_store.get(name) for name in names)
