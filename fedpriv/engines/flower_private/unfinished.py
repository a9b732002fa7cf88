"""Replies of which a part is missing for good, since the SuperNode that was sending them has ended.

Measured on Flower 1.41: a reply is announced before its objects are there.  A server that asked for it waits in
one call, for no other silo meanwhile, until 180 s have passed without another object.  Once the SuperLink has
forgotten the reply, the server is told that it is lost, and asks the silo again, whose guard repeats it.
"""

from datetime import datetime, timedelta

from flwr.server.superlink.linkstate import InMemoryLinkState, LinkState
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS
from flwr.supercore.corestate.in_memory_corestate import ObjectPushSession
from flwr.supercore.date import now


def forget_unfinished(state: LinkState) -> None:
    """Forget the replies that nobody is sending any more; cheap where there are none."""
    assert isinstance(state, InMemoryLinkState)
    if not state._object_push_sessions:
        return
    with state.lock, state._lock_object_push_sessions:  # in the order in which Flower takes them
        for number, session in list(state._object_push_sessions.items()):
            if _sender_ended(state, session):
                state._cleanup_push_session(number, cleanup_messages=True)


def _sender_ended(state: InMemoryLinkState, session: ObjectPushSession) -> bool:
    """Whether its SuperNode is gone, or was started again since it sent the last object."""
    last_object = session.expires_at - timedelta(seconds=OBJECT_PUSH_SESSION_TTL_SECONDS)
    for root in session.root_object_ids & state.message_res_store.keys():
        node = state.nodes.get(state.message_res_store[root].metadata.src_node_id)
        if node is None or node.online_until < now().timestamp():
            return True
        if datetime.fromisoformat(node.last_activated_at) > last_object:
            return True
    return False
