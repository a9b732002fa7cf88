"""Replies of which the SuperLink has only a part: its SuperNode ends, or sends again what was taken."""

from collections.abc import Iterator
from unittest import mock

import flwr.app
import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import InMemoryLinkState, LinkState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedpriv.engines.flower_private.kept import create_nodes, node_id_of
from fedpriv.engines.flower_private.supernode import Question, Waits
from fedpriv.engines.flower_private.unfinished import Pushes

RUN, REPLY, PART = 7, "a" * 64, "b" * 64


class Link:
    """A SuperLink with two silos, of which the first announced a reply and sent its head, not its part.

    Flower's handlers are those of a run that goes on; the server has been told of the reply.
    """

    def __init__(self) -> None:
        self.state = InMemoryLinkState(NoOpFederationManager(), InMemoryObjectStore(verify=False))
        keys = {f"silo-{silo}": public_key_to_bytes(generate_key_pairs()[1]) for silo in range(2)}
        create_nodes(self.state, keys)
        self.node, self.other = (node_id_of(name, key) for name, key in keys.items())
        assert self.state.activate_node(self.node, 30.0)
        assert self.state.activate_node(self.other, 30.0)
        self.answered = 0

    def announce(self, node: int) -> PushMessagesResponse:
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[Message(metadata=Metadata(message_id=REPLY, src_node_id=node))],
        )
        answer = fleet_handlers.push_messages(request=request, state=self.state)
        assert isinstance(answer, PushMessagesResponse)
        return answer

    def push(self, session: str, name: str, content: bytes) -> bool:
        request = PushObjectRequest(run_id=RUN, session_id=session, object_id=name, object_content=content)
        return bool(fleet_handlers.push_object(request=request, state=self.state).stored)

    def announced(self, request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
        """Flower's own handler: the first announcement counts, a second one finds that the question is gone."""
        self.answered += 1
        session = self.state.start_session(RUN)
        tree = ObjectTree(object_id=REPLY, children=[ObjectTree(object_id=PART)])
        missing = self.state.preregister_object_tree(tree, session) if self.answered == 1 else []
        return PushMessagesResponse(objects_to_push=missing, session_id=session)


def pushed(request: PushObjectRequest, state: LinkState) -> PushObjectResponse:
    stored = state.store_object(request.run_id, request.session_id, request.object_id, request.object_content)
    return PushObjectResponse(stored=stored)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    with (
        mock.patch.object(fleet_handlers, "push_messages", made.announced),
        mock.patch.object(fleet_handlers, "push_object", pushed),
    ):
        yield made


@pytest.fixture
def pushes(link: Link) -> Pushes:
    watching = Pushes()
    watching.watch()
    first = link.announce(link.node)
    assert set(first.objects_to_push) == {REPLY, PART}
    assert link.push(first.session_id, REPLY, b"head")
    return watching


def test_a_reply_is_forgotten_once_its_supernode_was_started_again(link: Link, pushes: Pushes) -> None:
    """Was: the server waited for 180 s, for no other silo meanwhile, and told nobody."""
    pushes.forget(link.state)
    assert link.state.get_object(RUN, PART) == b"", "it may come: the node is there"
    assert link.state.deactivate_node(link.node)
    assert link.state.activate_node(link.node, 30.0)
    pushes.forget(link.state)
    assert link.state.get_object(RUN, PART) is None, "asked for, it is lost"
    pushes.forget(link.state)
    assert not pushes._senders


def test_a_reply_is_forgotten_once_its_supernode_is_gone_and_no_other_one(link: Link, pushes: Pushes) -> None:
    assert link.state.deactivate_node(link.other)
    pushes.forget(link.state)
    assert link.state.get_object(RUN, PART) == b""
    assert link.state.deactivate_node(link.node)
    pushes.forget(link.state)
    assert link.state.get_object(RUN, PART) is None


def test_an_announcement_that_is_repeated_asks_for_what_is_missing(link: Link, pushes: Pushes) -> None:
    """Its answer was lost.  Was: nothing was asked for, so that the rest of the reply never came."""
    again = link.announce(link.node)
    assert list(again.objects_to_push) == [PART]
    assert link.push(again.session_id, PART, b"part")
    assert link.state.get_object(RUN, PART) == b"part"
    assert link.answered == 1


def test_an_announcement_of_another_node_is_not_taken_for_a_repeated_one(link: Link, pushes: Pushes) -> None:
    """Would gain: a session in which to send objects of another silo's reply."""
    assert not link.announce(link.other).objects_to_push
    assert link.answered == 2


def test_an_object_that_is_sent_again_is_stored_and_another_one_in_its_name_is_not(
    link: Link, pushes: Pushes
) -> None:
    """Its answer was lost.  Was: it was refused, and the SuperNode sent none of the others."""
    session = link.announce(link.node).session_id
    assert link.push(session, REPLY, b"head")
    assert not link.push(session, REPLY, b"other")
    assert link.push(session, PART, b"part")
    assert link.push(session, PART, b"part"), "the last one, after which the session is over"
    assert not link.push(session, PART, b"")
    assert link.state.get_object(RUN, REPLY) == b"head"


def test_a_supernode_whose_clientapp_ended_without_a_reply_ends_and_says_so() -> None:
    """Its clock jumped ahead, and the ClientApp's token expired.  Was: it waited for ever, and was healthy."""
    clock, working = [0.0], [True]
    waits = Waits(lambda: clock[0])
    with waits.for_reply(lambda: working[0]):
        for clock[0] in (100.0, 1000.0):
            waits.sleep(0.0)
        working[0] = False
        clock[0] += 1000.0
        waits.sleep(0.0)  # the loop looks for its reply now
        clock[0] += 29.0
        waits.sleep(0.0)
        working[0] = True
        waits.sleep(0.0)
        working[0] = False
        clock[0] += 29.0
        waits.sleep(0.0)
        clock[0] += 31.0
        with pytest.raises(RuntimeError, match="a ClientApp ended without a reply"):
            waits.sleep(0.0)
    clock[0] += 1000.0
    waits.sleep(0.0)


def a_message(number: int) -> flwr.app.Message:
    message = flwr.app.Message(flwr.app.RecordDict(), dst_node_id=1, message_type="train")
    message.metadata.__dict__.update(_run_id=RUN, _message_id=f"{number}")
    return message


def test_a_reply_that_is_left_over_does_not_take_the_place_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that ended while its question came.  Was: one behind for ever, with 31 s for each round."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    objects, question, sent = InMemoryObjectStore(verify=False), Question(), list[str]()
    state = InMemoryNodeState(objects)
    old, new = a_message(1), a_message(2)

    def reply_to(message: flwr.app.Message) -> None:
        reply = flwr.app.Message(flwr.app.Error(0), reply_to=message)
        reply.metadata.__dict__["_message_id"] = message.metadata.message_id * 64
        tree = ObjectTree(object_id=reply.metadata.message_id)
        objects.preregister(RUN, tree)
        assert state.store_message(reply) is not None

    def send(reply: flwr.app.Message, *_: object) -> tuple[set[str], str]:
        sent.append(reply.metadata.message_id)
        if len(sent) == 1:
            raise RunNotRunningException
        return set(), ""

    reply_to(old)  # the loop has gone on without it
    assert question.received(lambda: (new, ObjectTree())) is not None
    monkeypatch.setattr(loop.time, "sleep", lambda _: reply_to(new))
    question.push(loop._push_messages, state, objects, send=send, push_object=lambda *_: None)
    assert sent == ["1" * 64, "2" * 64]
    assert question.received(lambda: None) is None
    assert not state.get_messages_legacy(is_reply=True)
