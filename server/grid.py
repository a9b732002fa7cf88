"""Grid for silos that disconnect and return, which polls often and follows a silo to its new node.

A node is a connected SuperNode, known by its id.  Flower's own `send_and_receive` sleeps 3 s between polls, and a
SuperNode that was killed can return under another node id.  `PatientGrid` therefore polls more often, repeats
queries, and sends them to a silo's new node.  Repeating a query costs no privacy, because a silo's guard answers a
repeated round with the same bytes, or refuses it.
"""

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message, Metadata, RecordDict
from flwr.app.message.message import make_message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedpriv.core.errors import RunError, refuse, sanitize_line
from fedpriv.protocol.messages import (
    REFUSED_SILOS_VARIABLE,
    ROSTER_QUERY,
    Refusal,
    read_int_field,
    read_refusal,
    refusal_content,
)

_POLL_SECONDS = 0.1  # between polls for nodes, and after an empty reply that came at once


def learn_roster(grid: Grid, silos: int, timeout: float) -> list[int]:
    """Return the node ids of silo 0, 1, ….

    The arguments, which lack `make_query`, and the errors are those of `ask_roster`.
    """
    replies = ask_roster(grid, silos, timeout, lambda node: Message(RecordDict(), node, ROSTER_QUERY))
    return [reply.metadata.src_node_id for reply in replies]


def ask_roster(grid: Grid, silos: int, timeout: float, make_query: Callable[[int], Message]) -> list[Message]:
    """Ask every node for its silo number, and return the replies of silo 0, 1, ….

    Args:
        grid: Grid with a node for each silo.
        silos: Number of silos.
        timeout: Longest wait for the nodes, and again for their replies, in seconds.
        make_query: Function that makes the query to a node from its id.

    Raises:
        RunError: If there are more nodes than silos, a silo has no node, or two, or a node refuses, fails or says
            no number of a silo.
    """
    nodes = _wait_for_nodes(grid, silos, timeout)
    reply_by_silo: dict[int, Message] = {}
    for reply in grid.send_and_receive([make_query(node) for node in nodes], timeout=timeout):
        if reply.has_error():
            raise RunError(f"a node failed to say which silo it is: {sanitize_line(str(reply.error.reason))}")
        if (refusal := read_refusal(reply.content)) is not None:
            raise RunError(refusal.reason)
        try:
            silo = read_int_field(reply.content, "metrics", "silo")
        except ValueError as error:
            raise RunError(f"a node does not say which silo it is: {error}") from None
        assign_node(reply_by_silo, silos, silo, reply)
    if missing := sorted(set(range(silos)) - set(reply_by_silo)):
        raise RunError(f"no node says it is silo {', '.join(map(str, missing))}")
    return [reply_by_silo[silo] for silo in range(silos)]


def assign_node(node_by_silo: dict[int, Any], silos: int, silo: int, node: int | Message) -> None:
    """Store the node of a silo by its id, or by its reply.

    Raises:
        RunError: If the silo does not exist or has a node already.
    """
    if silo in node_by_silo or not 0 <= silo < silos:
        raise RunError(f"a node says it is silo {silo}: expected each of 0 … {silos - 1} once")
    node_by_silo[silo] = node


def _wait_for_nodes(grid: Grid, silos: int, timeout: float) -> list[int]:
    """Wait until there are as many nodes as silos, and return the node ids.

    Raises:
        RunError: If there are fewer nodes after `timeout` seconds, or more nodes than silos.
    """
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < silos:
        if time.monotonic() > deadline:
            raise RunError(f"{len(nodes)} of {silos} silos were connected after {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)
    if len(nodes) > silos:
        raise RunError(f"{len(nodes)} nodes are connected, the scenario has {silos} silos")
    return nodes


_MIN_HOLD_SECONDS = 0.5  # An empty reply after more seconds needs no pause: the SuperLink waited for a message.
_NODE_POLL_SECONDS = 1.0  # seconds between polls for new nodes
_RETRY_SECONDS = 2.0  # seconds before a message is sent again after a transient error
_SILENCE_SECONDS = 30.0  # seconds without a reply before a message is sent again, doubled each time
_LOST_MESSAGE = "its message was lost; a SuperLink or a SuperNode that is started again does that"
_TRANSIENT_ERRORS = {
    ErrorCode.MESSAGE_UNAVAILABLE: _LOST_MESSAGE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: _LOST_MESSAGE,
    ErrorCode.NODE_UNAVAILABLE: "the SuperLink hears nothing of its SuperNode: network, machine or service",
    ErrorCode.CLIENT_APP_CRASHED: "its app ended without an answer; a machine that has no memory left does that",
}
"""Error codes that may pass, each with its probable cause."""
# A longer time between two polls counts as a stop of this process or of the SuperLink, and not of a silo.
_MIN_PAUSE_SECONDS = 5.0
_MAX_PAUSE_SECONDS = 900.0  # most seconds by which such pauses extend the timeout


WaitCallback = Callable[[Sequence[int], float], None]
"""Callback with the silos that a server waits for, and the start of the wait.

The start is in seconds since 1970.  After a reported wait that ends without an error, the callback is called once
more, without silos, and the time then means nothing.
"""
_MIN_REPORTED_SECONDS = 5.0  # shortest wait that is reported


class _WaitReporter:
    """Reporter of one wait, after five seconds, then at a change of the silos, and in `finish`."""

    def __init__(self, callback: WaitCallback) -> None:
        self._callback, self._start_time = callback, time.monotonic()
        self._last_silos: list[int] = []

    def report(self, silos: Iterable[int]) -> None:
        waiting_seconds = time.monotonic() - self._start_time
        if waiting_seconds > _MIN_REPORTED_SECONDS and (current_silos := sorted(silos)) != self._last_silos:
            self._last_silos = current_silos
            self._callback(current_silos, time.time() - waiting_seconds)

    def finish(self) -> None:
        if self._last_silos:
            self._callback([], time.time())


@dataclass
class _PendingMessage:
    """Message that waits for its reply, with the ids of its copies and the time of the next copy."""

    message: Message
    node: int
    retry_time: float
    message_ids: set[str] = field(default_factory=set)
    refusal: Message | None = None
    silence_seconds: float = field(default_factory=lambda: _SILENCE_SECONDS)


class PatientGrid(Grid):
    """Grid around another Grid, on which a silo keeps its first node id, wherever the silo is now.

    Guarantee: if `has_registered_nodes`, a silo is the node whose key the SuperLink's owner registered as
    `silo-N`.  Nodes are not asked for their silo numbers, nodes with other names are no silos, and silos that the
    run does not have take no part.
    """

    def __init__(
        self, grid: Grid, *, has_registered_nodes: bool = False, on_wait: WaitCallback = lambda silos, since: None
    ) -> None:
        """Wrap a grid.

        Args:
            grid: Grid of Flower, which sends the messages.
            has_registered_nodes: Whether the names of nodes say which silos they are.
            on_wait: Callback with the silos, and the start of the wait in seconds since 1970 (`WaitCallback`).
        """
        self._grid, self._on_wait, self._has_registered_nodes = grid, on_wait, has_registered_nodes
        self._silo_by_node: dict[int, int] = {}  # node -> silo, as reported or registered
        self._moved_nodes: dict[int, int] = {}  # first node of a silo -> its current node
        self._roster_queries: dict[str, int] = {}  # roster queries under way: message id -> node
        self._last_poll = 0.0
        self._message_numbers = itertools.count(1)

    def roster(self, silos: int, timeout: float) -> list[int]:
        """Wait for all silos and return the node ids of silo 0, 1, ….

        Raises:
            RunError: If silos are missing after `timeout` seconds, or if, without registered nodes, two nodes are
                the same silo, or a node says no silo number or one that does not exist.
        """
        deadline, reporter = time.monotonic() + timeout, _WaitReporter(self._on_wait)
        while len(node_by_silo := self._find_nodes(silos)) < silos:
            missing = [silo for silo in range(silos) if silo not in node_by_silo]
            if time.monotonic() > deadline:
                raise RunError(
                    f"silo {', '.join(map(str, missing))} was not connected after {timeout:.0f} s"
                    f"{_format_superlink_refusals(missing)}"
                )
            reporter.report(missing)
            self._poll_nodes()
            time.sleep(_POLL_SECONDS)
        reporter.finish()
        return [node_by_silo[silo] for silo in range(silos)]

    def _find_nodes(self, silos: int) -> dict[int, int]:
        """Return the known nodes of the run's silos, by silo.

        The SuperLink's owner may register further silos or replace a silo's key at any time: registered nodes of
        other silos are left out, and of two registered nodes of a silo the one noted last is returned.

        Raises:
            RunError: If two unregistered nodes say the same silo number, or one says a number that does not exist.
        """
        if self._has_registered_nodes:
            return {silo: node for node, silo in self._silo_by_node.items() if silo < silos}
        node_by_silo: dict[int, int] = {}
        for node, silo in self._silo_by_node.items():
            assign_node(node_by_silo, silos, silo, node)
        return node_by_silo

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the replies that arrive within `timeout` seconds, each as the reply to the original message.

        A message is sent again, to the current node of its silo, after a time without a reply, after an error or a
        refusal that may pass, and once the silo has another node.  Times of more than 5 s between two polls, up to
        15 minutes in all, do not count, because this process or the SuperLink may have been stopped.

        A silo that refused or failed in a way that may pass, and did not reply later, has a refusal among the
        replies, which is not final.

        Args:
            messages: Messages, whose ids are set here.
            timeout: Longest wait in seconds, or None for no limit.

        Raises:
            RunError: If a new node's reply does not say which silo it is, or the SuperLink refuses the messages.
        """
        start, reporter = time.monotonic(), _WaitReporter(self._on_wait)
        pending_messages = [
            _PendingMessage(self._number_message(message), self._current_node(message), start)
            for message in messages
        ]
        replies: list[Message] = []
        last_poll, paused_seconds = start, 0.0
        while pending_messages and (
            timeout is None or time.monotonic() - start - min(paused_seconds, _MAX_PAUSE_SECONDS) < timeout
        ):
            self._send([pending for pending in pending_messages if time.monotonic() >= pending.retry_time])
            by_id = {number: pending for pending in pending_messages for number in pending.message_ids}
            poll_start = time.monotonic()
            arrivals = list(self._grid.pull_messages(set(by_id))) if by_id else []
            if not arrivals and time.monotonic() - poll_start < _MIN_HOLD_SECONDS:
                time.sleep(_POLL_SECONDS)
            for reply in arrivals:
                pending = by_id[reply.metadata.reply_to_message_id]
                if _is_transient(reply):
                    pending.message_ids.discard(reply.metadata.reply_to_message_id)
                    pending.refusal = reply
                    pending.retry_time = min(pending.retry_time, time.monotonic() + _RETRY_SECONDS)
                elif pending in pending_messages:  # Copies get equal replies, of which the first one counts.
                    pending_messages.remove(pending)
                    replies.append(_readdress_reply(pending.message, reply))
            self._redirect_messages(pending_messages)
            elapsed, last_poll = time.monotonic() - last_poll, time.monotonic()
            paused_seconds += elapsed if elapsed > _MIN_PAUSE_SECONDS else 0.0
            reporter.report(  # -1 stands for a node whose silo is not known.
                self._silo_by_node.get(pending.message.metadata.dst_node_id, -1) for pending in pending_messages
            )
        reporter.finish()
        return replies + [
            _make_refusal_reply(pending.message, pending.refusal)
            for pending in pending_messages
            if pending.refusal
        ]

    def _send(self, pending_messages: list[_PendingMessage]) -> None:
        """Send a copy of each message to its silo's current node, and set the time of the next copy.

        Raises:
            RunError: The SuperLink refuses the messages.
        """
        if not pending_messages:
            return
        copies = [
            Message(
                pending_message.message.content,
                pending_message.node,
                pending_message.message.metadata.message_type,
            )
            for pending_message in pending_messages
        ]
        refuse(
            {
                # Flower gives no ids at all then.
                "the SuperLink refuses the messages, which are too long for it": (
                    len(message_ids := list(self._grid.push_messages(copies))) < len(copies)
                )
            },
            RunError,
        )
        for pending, message_id in zip(pending_messages, message_ids, strict=True):
            now = time.monotonic()
            if message_id:
                pending.message_ids.add(message_id)
                pending.retry_time, pending.silence_seconds = (
                    now + pending.silence_seconds,
                    2.0 * pending.silence_seconds,
                )
            else:  # The SuperLink does not know the node any more.
                pending.retry_time = now + _RETRY_SECONDS

    def _redirect_messages(self, pending_messages: list[_PendingMessage]) -> None:
        """Direct messages without a reply to the new nodes of their silos, to be sent there at once."""
        if pending_messages:
            self._poll_nodes()
        for pending in pending_messages:
            if (node := self._current_node(pending.message)) != pending.node:
                pending.node, pending.retry_time = node, 0.0

    def _poll_nodes(self) -> None:
        """Ask new nodes for their silo numbers, and note the newest node of each silo.

        Names of registered nodes have the numbers.  New nodes are looked for at most once a second.

        Raises:
            RunError: If a node's reply does not say which silo it is.
        """
        now = time.monotonic()
        if now - self._last_poll > _NODE_POLL_SECONDS:
            self._last_poll = now
            if self._has_registered_nodes:
                self._note_nodes(_registered_silos(self._grid.get_nodes()))
                return
            known_nodes = {*self._silo_by_node, *self._roster_queries.values()}
            new_nodes = [node for node in self._grid.get_node_ids() if node not in known_nodes]
            numbers = (
                self._grid.push_messages([Message(RecordDict(), node, ROSTER_QUERY) for node in new_nodes])
                if new_nodes
                else ()
            )
            self._roster_queries.update(
                {number: node for number, node in zip(numbers, new_nodes, strict=True) if number}
            )
        for reply in self._grid.pull_messages(list(self._roster_queries)) if self._roster_queries else ():
            node = self._roster_queries.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                continue  # The node is asked again while it is connected.
            try:
                silo = read_int_field(reply.content, "metrics", "silo")
            except ValueError as error:
                raise RunError(f"a node does not say which silo it is: {error}") from None
            self._note_nodes({node: silo})

    def _note_nodes(self, silo_by_node: Mapping[int, int]) -> None:
        """Note the silos of nodes, and redirect a silo's messages from its earlier nodes to a new node.

        Messages are addressed to the first node of a silo, so that each earlier node maps to the newest one.
        """
        self._moved_nodes.update(
            {
                first: node
                for node, silo in silo_by_node.items()
                if node not in self._silo_by_node
                for first, number in self._silo_by_node.items()
                if number == silo
            }
        )
        self._silo_by_node.update(silo_by_node)

    def _number_message(self, message: Message) -> Message:
        """Set an id on a message, whose copies are sent under other ids."""
        message.metadata.__dict__["_message_id"] = f"question {next(self._message_numbers)}"
        return message

    def _current_node(self, message: Message) -> int:
        node = message.metadata.dst_node_id
        return self._moved_nodes.get(node, node)

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(  # pragma: no cover - abstract in Flower, deprecated there, called by nobody
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)


def _registered_silos(nodes: Iterable[Any]) -> dict[int, int]:
    """Return silo numbers by node id, for the nodes that are registered as silo-N."""
    return {node.node_id: int(match[1]) for node in nodes if (match := re.fullmatch(r"silo-([0-9]+)", node.name))}


def _format_superlink_refusals(silos: Iterable[int]) -> str:
    """Format the reasons for which the SuperLink refuses some of these silos, as far as it reports them."""
    try:
        reasons = json.loads(Path(os.environ[REFUSED_SILOS_VARIABLE]).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return ""
    return "".join(f"; silo {silo}: {reasons[f'silo-{silo}']}" for silo in silos if f"silo-{silo}" in reasons)


def _is_transient(reply: Message) -> bool:
    """Whether a repeated query may have another reply."""
    if reply.has_error():
        return reply.error.code in _TRANSIENT_ERRORS
    return (refusal := read_refusal(reply.content)) is not None and not refusal.is_final


def _make_refusal_reply(message: Message, reply: Message) -> Message:
    """Return a silo's refusal as the reply to `message`, or its error as such a refusal."""
    if not reply.has_error():
        return _readdress_reply(message, reply)
    return make_message(
        metadata=_readdress_reply(message, reply).metadata,
        content=refusal_content(
            Refusal(
                f"{_TRANSIENT_ERRORS.get(reply.error.code, 'it is not known why')} "
                f"({sanitize_line(str(reply.error.reason))})",
                is_final=False,
            )
        ),
    )


def _readdress_reply(message: Message, reply: Message) -> Message:
    """Return a reply to a copy of `message` as the reply to `message`."""
    original = reply.metadata
    metadata = Metadata(
        run_id=original.run_id,
        message_id=original.message_id,
        src_node_id=original.src_node_id,
        dst_node_id=original.dst_node_id,
        reply_to_message_id=message.metadata.message_id,
        group_id=original.group_id,
        created_at=original.created_at,
        ttl=original.ttl,
        message_type=original.message_type,
    )
    if reply.has_error():
        return make_message(metadata=metadata, error=reply.error)
    return make_message(metadata=metadata, content=reply.content)
