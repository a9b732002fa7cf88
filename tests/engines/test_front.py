"""The front before Flower's SuperLink, asked by Flower's grid, our node and strangers."""

import asyncio
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from starlette.testclient import TestClient

from fedpriv.addons.services.flower_private import front, silo_node
from fedpriv.addons.services.flower_private.control import MEDIA_TYPE
from fedpriv.addons.services.flower_private.names import (
    FLEET_PREFIX,
    LIST_RUNS,
    PULL_MESSAGES,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    UNREGISTER_NODE,
)
from fedpriv.addons.services.superlink_process import PathFilter
from fedpriv.core.errors import RunError
from tests.engines.builders import refusal
from tests.engines.flower_link import Link, send

QUERY = RecordDict({"config": ConfigRecord({"x": b"1" * 3000, "t": 1})})
Nodes = list[silo_node.SiloNode]
REPLY = RecordDict({"config": ConfigRecord({"x": b"2" * 3000, "t": 1})})


@pytest.fixture
def link(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(front, "_HOLD_SECONDS", 0.0)
    monkeypatch.setattr(front, "_HOLD_SERVER_SECONDS", 0.0)
    monkeypatch.setattr(silo_node.SiloNode, "_send_heartbeats", lambda self: None)
    return Link(tmp_path, getattr(request, "param", "fedpriv.clients.app:app"))


@pytest.fixture
def grid(link: Link, monkeypatch: pytest.MonkeyPatch) -> HttpGrid:
    grid = link.grid(link.token())
    for name, value in (("_run_id", link.run), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    return grid


@pytest.fixture
def nodes(link: Link, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """The silos' nodes, whose app replies with REPLY."""
    monkeypatch.setattr(silo_node, "app", lambda query, context: Message(REPLY, reply_to=query))
    return [connect(link, silo) for silo in range(2)]


def connect(link: Link, silo: int) -> silo_node.SiloNode:
    fleet = link.fleet(silo)
    return silo_node.SiloNode(fleet, fleet.connect(None, registers_itself=False), silo, "guard.sock")


def pull_query(node: silo_node.SiloNode) -> Any:
    return node._fleet.ask(PULL_MESSAGES, node=node._node_field)


def answer_query(node: silo_node.SiloNode) -> None:
    """Answer the next query."""
    answer = pull_query(node)
    node._answer(answer.messages_list[0].metadata.run_id, answer.message_object_trees[0])


def test_queries_and_replies_pass_unchanged_between_the_flower_grid_and_a_silo_node(
    link: Link, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Mock(side_effect=lambda query, context: Message(REPLY, reply_to=query))
    monkeypatch.setattr(silo_node, "app", app)
    node = connect(link, 0)
    assert node.node_id == link.nodes[0]
    numbers = send(grid, QUERY, link.nodes[0])
    answer_query(node)
    (reply,) = grid.pull_messages(numbers)
    ((query, context),) = (call.args for call in app.call_args_list)
    assert query.content == QUERY
    assert reply.content == REPLY
    assert reply.metadata.reply_to_message_id == numbers[0]
    assert context.node_config == {"partition-id": 0, "guard": "guard.sock"}
    assert context.run_config["protocol"] == 0
    assert [path.removeprefix(FLEET_PREFIX) for path in link.requests] == [
        *("activate-node", "pull-messages", *["pull-object"] * 3, "get-run", "get-fab"),
        *("push-messages", *["push-object"] * 3, "confirm-message-received"),
    ]


@pytest.mark.slow
def test_a_failing_client_app_gives_an_error_reply_without_the_exception_text(
    link: Link, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would tell the server of a record by the text of an exception."""
    monkeypatch.setattr(silo_node, "app", Mock(side_effect=ValueError("patient 7 is 143 years old")))
    node = connect(link, 0)
    numbers = send(grid, QUERY, link.nodes[0])
    answer_query(node)
    (reply,) = grid.pull_messages(numbers)
    assert reply.error.reason == "the SuperNode of silo 0 failed (ValueError); its log says why"
    assert "patient 7" in caplog.text


@pytest.mark.slow
def test_a_malformed_query_is_skipped_and_the_next_query_is_answered(
    link: Link, grid: HttpGrid, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would gain: a silo's service that ends whenever its SuperLink sends nonsense."""

    class StoppedError(Exception):
        pass

    def stop(_node: Any, _run: Any, query: Message) -> Message:
        raise StoppedError(query.metadata.message_type)

    inflate = silo_node.inflate_object_from_contents
    inflations = iter(
        [
            lambda *_: int("nonsense"),
            lambda *_: QUERY,
            lambda *_: inflate("0", {"0": b"Message  0\0"}),
            lambda *_: LIST_RUNS.answer_type().ParseFromString(b"\xff"),
        ]
    )
    monkeypatch.setattr(silo_node, inflate.__name__, lambda *words: next(inflations, inflate)(*words))
    monkeypatch.setattr(silo_node.SiloNode, "_call_app", stop)
    node = connect(link, 0)
    for _ in range(5):
        send(grid, QUERY, link.nodes[0])
    with pytest.raises(StoppedError, match="train"):
        node.serve()
    said = [text for text in caplog.messages if "left unanswered" in text]
    assert said[:2] == [
        "a message is left unanswered, since it is no query: invalid literal for int() with base 10: 'nonsense'",
        "a message is left unanswered, since it is no query: it is a RecordDict",
    ]
    assert len(said) == 4


@pytest.mark.parametrize("link", ["theirs.app:app"], indirect=True)
def test_a_silo_node_refuses_a_run_of_another_app_with_an_error_reply(
    link: Link, grid: HttpGrid, nodes: Nodes
) -> None:
    numbers = send(grid, QUERY, link.nodes[0])
    answer_query(nodes[0])
    (reply,) = grid.pull_messages(numbers)
    reason = "silo 0 runs no app but fedpriv's; `fedpriv supernode --apps` runs those of others"
    assert reply.error.reason == reason


def announce(node: silo_node.SiloNode, query: Any, **metadata: Any) -> tuple[Any, dict[str, bytes]]:
    """The announcement of a reply to `query`, and the reply's objects."""
    sent = query.messages_list[0].metadata
    request, contents = PUSH_MESSAGES.request_type(), dict[str, bytes]()
    request.node.node_id = node.node_id
    message = request.messages_list.add()
    message.metadata.CopyFrom(sent)
    message.metadata.src_node_id, message.metadata.dst_node_id = node.node_id, 1
    message.metadata.reply_to_message_id, message.metadata.ttl = sent.message_id, 1000.0
    reply = Message(REPLY, 1, "train")
    silo_node._add_objects(request.message_object_trees.add(), reply, contents)
    message.metadata.message_id = request.message_object_trees[0].object_id
    message.content.SetInParent()
    for key, value in metadata.items():
        setattr(message.metadata, key, value)
    return request, contents


def push(node: silo_node.SiloNode, request: Any) -> Any:
    fields = {"messages_list": request.messages_list, "message_object_trees": request.message_object_trees}
    return node._fleet.ask(PUSH_MESSAGES, node=request.node, patience=0.0, **fields)


def push_object(node: silo_node.SiloNode, run: int, session: str, name: str, content: bytes) -> bool:
    fields = {"run_id": run, "session_id": session, "object_id": name, "object_content": content}
    return bool(node._fleet.ask(PUSH_OBJECT, node=node._node_field, **fields).stored)


def test_guarantee_a_node_cannot_reply_in_the_name_of_another_node(
    link: Link, grid: HttpGrid, nodes: Nodes
) -> None:
    """Would gain: a release of its making in another silo's name, if it learnt what that silo was sent."""
    one, two = nodes
    numbers = send(grid, QUERY, *link.nodes)
    query = pull_query(two)
    request, _ = announce(one, query, src_node_id=two.node_id)
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        push(one, request)
    for second in (0, 1):  # wherever in the list it stands
        both, _ = announce(one, query)
        forged = both.messages_list.add()
        forged.CopyFrom(request.messages_list[0])
        if second == 0:
            both.messages_list.reverse()
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            push(one, both)
    request.node.node_id = two.node_id  # nor does it help to be the other one: the key says who signs
    with pytest.raises(silo_node.LostError):
        push(one, request)
    assert list(grid.pull_messages(numbers)) == []
    assert not [session for session in link.link.app._sessions.values() if session.reply_id]


@pytest.mark.slow
def test_an_incomplete_reply_is_withheld_without_delaying_other_replies(
    link: Link, grid: HttpGrid, nodes: Nodes
) -> None:
    """Was: the server waits up to 180 s for a dead sender, for no other silo meanwhile."""
    one, two = nodes
    numbers = send(grid, QUERY, *link.nodes)
    query = pull_query(one)
    request, contents = announce(one, query)
    session = push(one, request)
    assert set(session.objects_to_push) == set(contents)
    answer_query(two)
    start = time.monotonic()
    (reply,) = grid.pull_messages(numbers)
    assert reply.metadata.src_node_id == two.node_id
    assert time.monotonic() - start < 100.0
    for name, content in contents.items():
        assert list(grid.pull_messages(numbers[:1])) == []
        assert push_object(one, link.run, session.session_id, name, content)
    (reply,) = grid.pull_messages(numbers[:1])
    assert reply.content == REPLY
    assert not link.link.app._node_by_query


@pytest.mark.slow
def test_a_false_announcement_of_one_silo_does_not_hide_the_reply_of_another(
    link: Link, grid: HttpGrid, nodes: Nodes
) -> None:
    """Would gain: another silo is missing in every round, if it announces replies to that silo's queries."""
    one, two = nodes
    numbers = send(grid, QUERY, link.nodes[1])
    query = pull_query(two)
    push(one, announce(one, query)[0])
    two._answer(link.run, query.message_object_trees[0])
    (reply,) = grid.pull_messages(numbers)
    assert reply.metadata.src_node_id == two.node_id


@pytest.mark.slow
def test_repeated_announcements_and_uploads_of_a_reply_count_once(
    link: Link, grid: HttpGrid, nodes: Nodes
) -> None:
    """The answer was lost.  Was: no object was asked for, or an object refused, and the reply never came."""
    one, two = nodes
    numbers = send(grid, QUERY, link.nodes[0])
    query = pull_query(one)
    request, contents = announce(one, query)
    session = push(one, request)
    (first, content), *others = contents.items()
    assert push_object(one, link.run, session.session_id, first, content)
    again = push(one, request)
    assert (again.session_id, set(again.objects_to_push)) == (session.session_id, {name for name, _ in others})
    assert push_object(one, link.run, session.session_id, first, content)
    assert not push_object(one, link.run, session.session_id, first, content + b"x"), "another one in its name"
    assert not push_object(two, link.run, session.session_id, first, content), "another node's"
    for name, content in others:
        assert push_object(one, link.run, session.session_id, name, content)
    assert push_object(one, link.run, session.session_id, *others[-1]), "the last one, after which all is there"
    (reply,) = grid.pull_messages(numbers)
    assert reply.content == REPLY


def test_a_replayed_announcement_without_a_valid_signature_reveals_no_session(
    link: Link, grid: HttpGrid, nodes: Nodes
) -> None:
    """Would gain: the session in which a silo sends."""
    one, two = nodes
    send(grid, QUERY, link.nodes[0])
    request, _ = announce(one, pull_query(one))
    session = push(one, request).session_id
    for headers in ({}, dict(two._fleet._headers(PUSH_MESSAGES, request))):
        headers["content-type"] = headers["accept"] = MEDIA_TYPE
        content = request.SerializeToString()
        answer = link.client(FLEET_PREFIX).post(PUSH_MESSAGES.path, content=content, headers=headers)
        assert answer.status_code == 401
        assert session.encode() not in answer.content


def test_guarantee_a_revoked_node_key_gives_no_access(link: Link) -> None:
    """Flower answers with an error for a node that never came."""
    link.link._nodes = {"silo-0": link.nodes[0], "silo-1": link.nodes[1]}
    node = connect(link, 0)
    for name in ("silo-0", "silo-1"):
        asyncio.run(link.link.unregister_node(name))
    for silo in range(2):
        with pytest.raises(silo_node.LostError, match="does not know this SuperNode's key"):
            connect(link, silo)
    with pytest.raises(silo_node.LostError):
        pull_query(node)


def test_a_key_that_flower_refused_to_register_is_revoked_without_an_error(link: Link) -> None:
    """Before: a KeyError, which ended the SuperLink when the file of such a key was removed."""
    link.link._nodes = {"silo-0": link.nodes[0]}
    asyncio.run(link.link.unregister_node("silo-7"))
    assert connect(link, 0).node_id == link.nodes[0]


def test_a_node_key_that_cannot_be_revoked_ends_the_service(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would let in a key that its owner has revoked."""
    link.link._nodes = {"silo-0": link.nodes[0]}
    failure = httpx.Response(500, json={"detail": "An internal error."})
    monkeypatch.setattr(link.link, "post", AsyncMock(return_value=failure))
    with refusal(r"the key of silo-0 cannot be revoked \(An internal error\.\)", RunError):
        asyncio.run(link.link.unregister_node("silo-0"))
    assert UNREGISTER_NODE.path.endswith("unregister-node")


@pytest.mark.slow
def test_no_path_encoding_lets_a_forged_reply_bypass_the_sender_check(
    link: Link, grid: HttpGrid, nodes: Nodes
) -> None:
    """Would gain: what Flower routes as an announcement and the front does not see as one."""
    one, two = nodes
    numbers = send(grid, QUERY, link.nodes[1])
    request, _ = announce(one, pull_query(two), src_node_id=two.node_id)
    headers = dict(one._fleet._headers(PUSH_MESSAGES, request))
    client = TestClient(PathFilter(link.link.app, FLEET_PREFIX), follow_redirects=False)
    content = request.SerializeToString()
    for path in ("push-messages/", "/push-messages", "%70ush-messages", "push-messages?x=1", "./push-messages"):
        for kind in ("application/protobuf", "Application/Protobuf; q=1"):
            headers |= {"content-type": kind, "accept": kind}
            assert not client.post(f"{FLEET_PREFIX}{path}", content=content, headers=headers).is_success, path
    assert list(grid.pull_messages(numbers)) == []
