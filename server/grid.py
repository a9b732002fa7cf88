"""A Grid for silos that come and go: it looks often, asks again, and follows a silo to its new node.

Measured on Flower 1.41: its own `send_and_receive` sleeps 3 s between looks; a SuperNode that was killed keeps its
messages until a heartbeat is missed (up to 60 s) and comes back under another node id, unless it has a key.
Asking a silo twice is safe: its guard answers a repeated round with the same bytes.

In a simulation all nodes are there from the start and stay: `learn_roster` asks them once which silo they are.
"""

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message, Metadata, RecordDict
from flwr.app.message.message import make_message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedpriv.core.errors import RunError, sanitize_line
from fedpriv.protocol.messages import (
    REFUSED_SILOS_VARIABLE,
    ROSTER_QUERY,
    Refusal,
    read_int_field,
    read_refusal,
    refusal_content,
)

_POLL_SECONDS = 0.1  # between looks for nodes, and after an answer that says at once that nothing has come


def learn_roster(grid: Grid, silos: int, timeout: float) -> list[int]:
    """The node id of silo 0, 1, …; RunError if a silo has no node, or two, or the wait is over."""
    replies = ask_roster(grid, silos, timeout, lambda node: Message(RecordDict(), node, ROSTER_QUERY))
    return [reply.metadata.src_node_id for reply in replies]


def ask_roster(grid: Grid, silos: int, timeout: float, make_query: Callable[[int], Message]) -> list[Message]:
    """Ask every node which silo it is, and return the replies of silo 0, 1, ….

    RunError if a silo has no node, or two, if a node refuses, or the wait is over.
    """
    nodes = _wait_for_nodes(grid, silos, timeout)
    found: dict[int, int] = {}
    replies: dict[int, Message] = {}
    for reply in grid.send_and_receive([make_query(node) for node in nodes], timeout=timeout):
        if reply.has_error():
            raise RunError(f"a node failed to say which silo it is: {sanitize_line(str(reply.error.reason))}")
        if (refusal := read_refusal(reply.content)) is not None:
            raise RunError(refusal.reason)
        silo, node = read_int_field(reply.content, "metrics", "silo"), reply.metadata.src_node_id
        assign_node(found, silos, silo, node)
        replies[silo] = reply
    if missing := sorted(set(range(silos)) - set(found)):
        raise RunError(f"no node says it is silo {', '.join(map(str, missing))}")
    return [replies[silo] for silo in range(silos)]


def assign_node(node_by_silo: dict[int, int], silos: int, silo: int, node: int) -> None:
    """Note which node a silo is; RunError for a silo that does not exist or is there twice."""
    if silo in node_by_silo or not 0 <= silo < silos:
        raise RunError(f"a node says it is silo {silo}: expected each of 0 … {silos - 1} once")
    node_by_silo[silo] = node


def _wait_for_nodes(grid: Grid, silos: int, timeout: float) -> list[int]:
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < silos:
        if time.monotonic() > deadline:
            raise RunError(f"{len(nodes)} of {silos} silos were connected after {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)
    if len(nodes) > silos:
        raise RunError(f"{len(nodes)} nodes are connected, the scenario has {silos} silos")
    return nodes


_MIN_HOLD_SECONDS = (
    0.5  # after which such an answer was held back until something might have come: no need to wait
)
_NODE_POLL_SECONDS = 1.0  # between looks for nodes that are new
_RETRY_SECONDS = 2.0  # after an error that may pass
_SILENCE_SECONDS = 30.0  # before a message is sent again unasked; doubled each time
_LOST_MESSAGE = "its message was lost; a SuperLink or a SuperNode that is started again does that"
_TRANSIENT_ERRORS = {
    ErrorCode.MESSAGE_UNAVAILABLE: _LOST_MESSAGE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: _LOST_MESSAGE,
    ErrorCode.NODE_UNAVAILABLE: "the SuperLink hears nothing of its SuperNode: network, machine or service",
    ErrorCode.CLIENT_APP_CRASHED: "its app ended without an answer; a machine that has no memory left does that",
}
"""Errors that may pass, and what is known of their cause."""
_MIN_PAUSE_SECONDS = (
    5.0  # seconds between two looks: this process or the SuperLink was stopped, and no silo is at fault
)
_MAX_PAUSE_SECONDS = 900.0  # that are made up for


WaitCallback = Callable[[Sequence[int], float], None]
"""Told for which silos is waited, and since when (seconds of the epoch); for none once it is over."""
_MIN_REPORTED_SECONDS = 5.0  # seconds of waiting


class _WaitReporter:
    """One wait: told of after five seconds and again when other silos are waited for, and when it is over."""

    def __init__(self, tell: WaitCallback) -> None:
        self._callback, self._start_time = tell, time.monotonic()
        self._last_silos: list[int] = []

    def report(self, silos: Iterable[int]) -> None:
        waited = time.monotonic() - self._start_time
        if waited > _MIN_REPORTED_SECONDS and (now := sorted(silos)) != self._last_silos:
            self._last_silos = now
            self._callback(now, time.time() - waited)

    def finish(self) -> None:
        if self._last_silos:
            self._callback([], time.time())


@dataclass
class _PendingMessage:
    """A message that waits for its reply: the ids under which it was sent, and when it is sent again."""

    message: Message
    node: int
    retry_time: float
    message_ids: set[str] = field(default_factory=set)
    refusal: Message | None = None
    silence_seconds: float = field(default_factory=lambda: _SILENCE_SECONDS)


class PatientGrid(Grid):
    """Another Grid, on which a silo keeps the node id it had first, wherever it is now.

    Guarantee: where nodes are `registered`, a silo is the node whose key the SuperLink's owner registered as
    `silo-N`; what a node says of itself is not asked for, and nodes with other names are no silos.
    """

    def __init__(
        self, grid: Grid, *, has_registered_nodes: bool = False, on_wait: WaitCallback = lambda silos, since: None
    ) -> None:
        self._grid, self._on_wait, self._has_registered_nodes = grid, on_wait, has_registered_nodes
        self._silo_by_node: dict[int, int] = {}  # what nodes said they are, or were registered as
        self._moved_nodes: dict[int, int] = {}  # where a silo that was at the first node is now
        self._roster_queries: dict[str, int] = {}  # roster messages under way, by id: the node
        self._last_poll = 0.0
        self._message_numbers = itertools.count(1)

    def roster(self, silos: int, timeout: float) -> list[int]:
        """The node id of silo 0, 1, …, once all are there; RunError with the silos that are missing."""
        deadline, told = time.monotonic() + timeout, _WaitReporter(self._on_wait)
        while len(found := self._find_nodes(silos)) < silos:
            missing = [silo for silo in range(silos) if silo not in found]
            if time.monotonic() > deadline:
                raise RunError(
                    f"silo {', '.join(map(str, missing))} was not connected after {timeout:.0f} s"
                    f"{_format_superlink_refusals(missing)}"
                )
            told.report(missing)
            self._poll_nodes()
            time.sleep(_POLL_SECONDS)
        told.finish()
        return [found[silo] for silo in range(silos)]

    def _find_nodes(self, silos: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for node, silo in self._silo_by_node.items():
            assign_node(found, silos, silo, node)
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """The replies that came within `timeout` seconds, each as the reply to the message it was asked with.

        Seconds in which this process was stopped, or the SuperLink did not answer, are no silo's and do not count.

        Refusals that might have passed, and did not in that time, are among them.
        """
        started, told = time.monotonic(), _WaitReporter(self._on_wait)
        waiting = [
            _PendingMessage(self._number_message(message), self._current_node(message), started)
            for message in messages
        ]
        replies: list[Message] = []
        looked, asleep = started, 0.0
        while waiting and (
            timeout is None or time.monotonic() - started - min(asleep, _MAX_PAUSE_SECONDS) < timeout
        ):
            self._send([question for question in waiting if time.monotonic() >= question.retry_time])
            by_id = {number: question for question in waiting for number in question.message_ids}
            asked = time.monotonic()
            come = list(self._grid.pull_messages(set(by_id))) if by_id else []
            if not come and time.monotonic() - asked < _MIN_HOLD_SECONDS:
                time.sleep(_POLL_SECONDS)
            for reply in come:
                question = by_id[reply.metadata.reply_to_message_id]
                if _is_transient(reply):
                    question.message_ids.discard(reply.metadata.reply_to_message_id)
                    question.refusal = reply
                    question.retry_time = min(question.retry_time, time.monotonic() + _RETRY_SECONDS)
                elif question in waiting:  # a message that was sent twice has two replies, of the same bytes
                    waiting.remove(question)
                    replies.append(_readdress_reply(question.message, reply))
            self._redirect_messages(waiting)
            passed, looked = time.monotonic() - looked, time.monotonic()
            asleep += passed if passed > _MIN_PAUSE_SECONDS else 0.0
            told.report(self._silo_by_node.get(asked.message.metadata.dst_node_id, -1) for asked in waiting)
        told.finish()
        return replies + [_make_refusal_reply(asked.message, asked.refusal) for asked in waiting if asked.refusal]

    def _send(self, questions: list[_PendingMessage]) -> None:
        if not questions:
            return
        sent = [
            Message(asked.message.content, asked.node, asked.message.metadata.message_type) for asked in questions
        ]
        for question, number in zip(questions, self._grid.push_messages(sent), strict=True):
            now = time.monotonic()
            if number:
                question.message_ids.add(number)
                question.retry_time, question.silence_seconds = (
                    now + question.silence_seconds,
                    2.0 * question.silence_seconds,
                )
            else:  # the node is not known any more
                question.retry_time = now + _RETRY_SECONDS

    def _redirect_messages(self, waiting: list[_PendingMessage]) -> None:
        """Send what still waits to the new nodes of silos that have one."""
        if waiting:
            self._poll_nodes()
        for question in waiting:
            if (node := self._current_node(question.message)) != question.node:
                question.node, question.retry_time = node, 0.0

    def _poll_nodes(self) -> None:
        """Ask nodes that are new who they are, unless it is known; a silo is where it said so last."""
        now = time.monotonic()
        if now - self._last_poll > _NODE_POLL_SECONDS:
            self._last_poll = now
            if self._has_registered_nodes:
                self._silo_by_node.update(_registered_silos(self._grid.get_nodes()))
                return
            known = {*self._silo_by_node, *self._roster_queries.values()}
            new = [node for node in self._grid.get_node_ids() if node not in known]
            numbers = (
                self._grid.push_messages([Message(RecordDict(), node, ROSTER_QUERY) for node in new])
                if new
                else ()
            )
            self._roster_queries.update(
                {number: node for number, node in zip(numbers, new, strict=True) if number}
            )
        for reply in self._grid.pull_messages(list(self._roster_queries)) if self._roster_queries else ():
            node = self._roster_queries.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                continue  # it is asked again while it is connected
            try:
                silo = read_int_field(reply.content, "metrics", "silo")
            except ValueError as error:
                raise RunError(f"a node does not say which silo it is: {error}") from None
            self._moved_nodes.update(
                {first: node for first, number in self._silo_by_node.items() if number == silo}
            )
            self._silo_by_node[node] = silo

    def _number_message(self, message: Message) -> Message:
        """The number of the question: copies of it are sent, with numbers of their own."""
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
    """Node id -> silo, of the nodes with a name that says so."""
    named = {node.node_id: re.fullmatch(r"silo-([0-9]+)", node.name) for node in nodes}
    return {node: int(found[1]) for node, found in named.items() if found}


def _format_superlink_refusals(silos: Iterable[int]) -> str:
    """Why the SuperLink lets some of these silos not in, as far as it says so."""
    try:
        told = json.loads(Path(os.environ[REFUSED_SILOS_VARIABLE]).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return ""
    return "".join(f"; silo {silo}: {told[f'silo-{silo}']}" for silo in silos if f"silo-{silo}" in told)


def _is_transient(reply: Message) -> bool:
    """Whether asking again may help."""
    if reply.has_error():
        return reply.error.code in _TRANSIENT_ERRORS
    refusal = read_refusal(reply.content)
    return refusal is not None and not refusal.is_final


def _make_refusal_reply(message: Message, reply: Message) -> Message:
    """The last words of a silo that never answered: its refusal, or why it could not even refuse."""
    if not reply.has_error():
        return _readdress_reply(message, reply)
    cause = _TRANSIENT_ERRORS.get(reply.error.code, "it is not known why")
    refusal = Refusal(f"{cause} ({sanitize_line(str(reply.error.reason))})", is_final=False)
    return make_message(metadata=_readdress_reply(message, reply).metadata, content=refusal_content(refusal))


def _readdress_reply(message: Message, reply: Message) -> Message:
    told = reply.metadata
    metadata = Metadata(
        run_id=told.run_id,
        message_id=told.message_id,
        src_node_id=told.src_node_id,
        dst_node_id=told.dst_node_id,
        reply_to_message_id=message.metadata.message_id,
        group_id=told.group_id,
        created_at=told.created_at,
        ttl=told.ttl,
        message_type=told.message_type,
    )
    if reply.has_error():
        return make_message(metadata=metadata, error=reply.error)
    return make_message(metadata=metadata, content=reply.content)
