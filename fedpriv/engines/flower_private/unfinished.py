"""Replies on their way to the SuperLink: what is sent again counts once, and what nobody sends any more is lost.

Measured on Flower 1.41: a reply is announced before its objects are there, and a server that was told of it waits
for them in one call, for no other silo meanwhile, until 180 s have passed without another object.  That comes
about in three ways, of which each is mended here:

| what happens | Flower | here |
|---|---|---|
| a SuperNode ends while it sends | the server waits | the reply is forgotten, the silo asked again |
| an announcement is repeated: its answer was lost | wants no object | wants those that are missing |
| an object is repeated: its answer was lost | refuses it, and gets no other | has it |
"""

from datetime import datetime, timedelta
from unittest import mock

from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse, Reconnect
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.server.superlink.linkstate import InMemoryLinkState, LinkState
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS
from flwr.supercore.date import now
from flwr.superlink.servicer.fleet import fleet_handlers


class Pushes:
    """The SuperNodes that are sending replies."""

    def __init__(self) -> None:
        self._senders: dict[str, int] = {}  # the node of a push session

    def watch(self) -> None:
        """See every reply that is announced, for as long as this process lives."""
        self._push_messages, self._push_object = fleet_handlers.push_messages, fleet_handlers.push_object
        mock.patch.object(fleet_handlers, "push_messages", self.push_messages).start()
        mock.patch.object(fleet_handlers, "push_object", self.push_object).start()

    def push_messages(self, request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
        """Announce a reply; the same one again is that one."""
        if (before := self._announced(request, state)) is not None:
            return before
        answer = self._push_messages(request=request, state=state)
        self._senders[answer.session_id] = request.node.node_id
        return answer

    def push_object(self, request: PushObjectRequest, state: LinkState) -> PushObjectResponse:
        """Take an object; one that is there with the same content is stored already."""
        assert isinstance(state, InMemoryLinkState)
        if request.object_content and state.object_store.get(request.object_id) == request.object_content:
            return PushObjectResponse(stored=True)
        return self._push_object(request=request, state=state)

    def _announced(self, request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse | None:
        assert isinstance(state, InMemoryLinkState)
        if not request.messages_list:
            return None
        reply = request.messages_list[0].metadata.message_id
        with state._lock_object_push_sessions:
            number = state._object_push_session_by_root.get(reply, "")
            session = state._object_push_sessions.get(number)
            if session is None or self._senders.get(number) != request.node.node_id:
                return None
            missing = list(session.pending_object_ids)
        again = Reconnect(reconnect=5)
        return PushMessagesResponse(
            reconnect=again, results={reply: 0}, objects_to_push=missing, session_id=number
        )

    def forget(self, state: LinkState) -> None:
        """Forget the replies whose SuperNode is gone, or was started again since it sent the last object."""
        if not self._senders:
            return
        assert isinstance(state, InMemoryLinkState)
        with state.lock, state._lock_object_push_sessions:  # in the order in which Flower takes them
            for number, sender in list(self._senders.items()):
                session = state._object_push_sessions.get(number)
                if session is None or not session.pending_object_ids:
                    del self._senders[number]
                elif _ended(state, sender, session.expires_at):
                    state._cleanup_push_session(number, cleanup_messages=True)


def _ended(state: InMemoryLinkState, sender: int, expires: datetime) -> bool:
    node = state.nodes.get(sender)
    if node is None or node.online_until < now().timestamp():
        return True
    last_object = expires - timedelta(seconds=OBJECT_PUSH_SESSION_TTL_SECONDS)
    return datetime.fromisoformat(node.last_activated_at) > last_object
