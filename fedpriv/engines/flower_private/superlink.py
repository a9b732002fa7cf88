"""The SuperLink: it knows SuperNodes, believes a reply only who sends it, and answers when there is an answer."""

import sys
from collections.abc import Mapping, Sequence
from unittest import mock

from flwr.app import Message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.error import FlowerError
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from fedpriv.engines.flower_private import FLEET, RUNTIME
from fedpriv.engines.flower_private.middleware import hand_on_whole_answers
from fedpriv.engines.flower_private.patience import wait_for_slow_starts
from fedpriv.engines.held_answers import Bells, Held, HeldAnswers

PULL, REPLIES = f"{FLEET}pull-messages", f"{RUNTIME}pull-messages"
_HOLD_SECONDS = 2.0  # a SuperNode takes an answer for lost after 5
_HOLD_SERVER_SECONDS = 1.0  # a server has other things to look for


def superlink_app(options: Sequence[str], nodes: Mapping[str, bytes]) -> ASGIApp:
    """Flower's SuperLink with all its APIs, as `flower-superlink OPTIONS` serves it, that knows SuperNodes.

    `nodes`: a SuperNode's name -> its public key (PEM).  A name can be given here and through the Control API
    only, so that it says who a node is, whatever the node says.
    """
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    wait_for_slow_starts()
    hand_on_whole_answers()
    _refuse_replies_of_others()
    with mock.patch.object(sys, "argv", ["flower-superlink", *options]):
        config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    state = app.state.linkstate_factory.state()
    for name, public_key in nodes.items():
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key, 0, name=name)
    held = {PULL: Held(node_of_pull, _HOLD_SECONDS), REPLIES: Held(server_of_pull, _HOLD_SERVER_SECONDS)}
    return HeldAnswers(app, held, bells_of(state))


def bells_of(state: LinkState) -> Bells:
    """The bells of nodes, rung when a message for them is stored: `state` is the SuperLink's one and only."""
    bells = Bells()
    store = state.store_message_and_object_tree

    def ringing(message: Message, object_tree: ObjectTree, session_id: str) -> tuple[bool, list[str]]:
        stored = store(message, object_tree, session_id)
        bells.ring(message.metadata.dst_node_id)
        return stored

    mock.patch.object(state, "store_message_and_object_tree", ringing).start()
    return bells


def node_of_pull(request: bytes) -> int:
    """Who asks for messages; ValueError for anything else."""
    try:
        return int(PullMessagesRequest.FromString(request).node.node_id)
    except DecodeError as error:
        raise ValueError(str(error)) from None


def server_of_pull(request: bytes) -> int:
    """The node to which replies are sent, for a server that asks for some; ValueError for anything else."""
    try:
        asked = PullAppMessagesRequest.FromString(request)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    if not asked.message_ids:
        raise ValueError("no reply is asked for")
    return SUPERLINK_NODE_ID


def _refuse_replies_of_others() -> None:
    """Check who a reply says it is from, where Flower checks only who sends it.

    Guarantee: a SuperNode's reply counts as that SuperNode's, whatever it is told to say.
    """
    from flwr.supercore.error import ApiErrorCode
    from flwr.superlink.servicer.fleet import fleet_handlers

    push_messages = fleet_handlers.push_messages

    def checked(request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
        node = request.node.node_id
        if any(message.metadata.src_node_id != node for message in request.messages_list):
            raise FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"node {node} replies as another node")
        return push_messages(request=request, state=state)

    mock.patch.object(fleet_handlers, "push_messages", checked).start()
