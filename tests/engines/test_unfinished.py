"""Replies of which the SuperLink has only a part when their SuperNode ends."""

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink.federation import NoOpFederationManager

from fedpriv.engines.flower_private.kept import create_nodes, node_id_of
from fedpriv.engines.flower_private.unfinished import forget_unfinished

RUN, ROOT, PART, DONE = 7, "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def link() -> tuple[InMemoryLinkState, int]:
    """A silo's node that announced a reply with one part, has sent the reply's head, and not its part."""
    state = InMemoryLinkState(NoOpFederationManager(), InMemoryObjectStore(verify=False))
    key = public_key_to_bytes(generate_key_pairs()[1])
    create_nodes(state, {"silo-0": key})
    node = node_id_of("silo-0", key)
    assert state.activate_node(node, 30.0)
    about: Any = SimpleNamespace(metadata=SimpleNamespace(src_node_id=node, reply_to_message_id="question"))
    state.message_res_store[ROOT] = about
    session = state.start_session(RUN)
    missing = state.preregister_object_tree(
        ObjectTree(object_id=ROOT, children=[ObjectTree(object_id=PART)]), session
    )
    assert set(missing) == {ROOT, PART}
    assert state.store_object(RUN, session, ROOT, b"head")
    return state, node


def test_a_reply_is_forgotten_once_its_supernode_was_started_again(link: tuple[InMemoryLinkState, int]) -> None:
    """Was: the server waited for 180 s, for no other silo meanwhile, and told nobody."""
    state, node = link
    forget_unfinished(state)
    assert state.get_object(RUN, PART) == b"", "it may come: the node is there"
    assert state.deactivate_node(node)
    assert state.activate_node(node, 30.0)
    forget_unfinished(state)
    assert state.get_object(RUN, PART) is None, "asked for, it is lost"
    assert not state.message_res_store


def test_a_reply_is_forgotten_once_its_supernode_is_gone(link: tuple[InMemoryLinkState, int]) -> None:
    state, node = link
    assert state.deactivate_node(node)
    forget_unfinished(state)
    assert state.get_object(RUN, PART) is None


def test_what_came_after_the_start_or_is_no_reply_is_kept(link: tuple[InMemoryLinkState, int]) -> None:
    state, node = link
    assert state.deactivate_node(node)
    assert state.activate_node(node, 30.0)
    (old,) = state._object_push_sessions
    session = state.start_session(RUN)
    state.preregister_object_tree(ObjectTree(object_id=ROOT, children=[ObjectTree(object_id=PART)]), session)
    question = state.start_session(RUN)
    state.preregister_object_tree(ObjectTree(object_id=DONE), question)
    forget_unfinished(state)
    assert old not in state._object_push_sessions
    assert state.store_object(RUN, session, PART, b"part"), "the reply that is sent anew"
    assert state.get_object(RUN, PART) == b"part"
    assert question in state._object_push_sessions
