"""Silos that fail for a while, move to other nodes or answer twice, on a grid without a network."""

import itertools
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

import fedpriv.server.grid
from fedpriv.core.errors import RunError
from fedpriv.protocol.messages import ROSTER_QUERY, TRAIN, Refusal, read_refusal, refusal_content, roster_content
from fedpriv.server.grid import PatientGrid

Answer = Callable[[Message, int], list[Message]]


class ScriptedGrid(Grid):
    """Nodes and the silos they are; `answer(message, times asked)` gives the replies to a train message."""

    def __init__(self, silo_of: dict[int, int], answer: Answer) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
        self.silo_of, self.answer = silo_of, answer
        self.numbers, self.replies = itertools.count(1), list[Message]()
        self.asked: list[int] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            ids.append(f"m{next(self.numbers)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            if message.metadata.message_type == ROSTER_QUERY:
                self.replies.append(Message(roster_content(self.silo_of[node]), reply_to=message))
            else:
                self.asked.append(node)
                self.replies += self.answer(message, len(self.asked))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ids = set(message_ids)
        pulled = [reply for reply in self.replies if reply.metadata.reply_to_message_id in ids]
        self.replies = [reply for reply in self.replies if reply not in pulled]
        return pulled

    def get_node_ids(self) -> list[int]:
        return list(self.silo_of)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise AssertionError("Flower's own exchange is too slow")

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_nodes(self) -> Iterable[Any]:
        raise NotImplementedError

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        return Run.create_empty(1)


class RegisteredGrid(ScriptedGrid):
    """Nodes with the names that their keys were registered with."""

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, name=f"silo-{silo}") for node, silo in self.silo_of.items()]


def release(message: Message, times: int) -> list[Message]:
    return [Message(RecordDict({"release": ArrayRecord()}), reply_to=message)]


def lost(message: Message, times: int) -> list[Message]:
    return []


def without_node_8(message: Message, times: int) -> list[Message]:
    return [] if message.metadata.dst_node_id == 8 else release(message, times)


def until(times: int, first: Answer) -> Answer:
    """`first` so many times, then a release."""
    return lambda message, asked: first(message, asked) if asked <= times else release(message, asked)


def failing(code: int, reason: str = "gone") -> Answer:
    return lambda message, _: [Message(Error(code=code, reason=reason), reply_to=message)]


def refusing(*, final: bool) -> Answer:
    return lambda message, _: [Message(refusal_content(Refusal("no", final)), reply_to=message)]


DEPLOYED = {name: value for name, value in vars(fedpriv.server.grid).items() if name.endswith("_SECONDS")}
"""Times of a real server, which most of these tests shorten."""


@pytest.fixture
def deployed_times(impatience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DEPLOYED.items():
        monkeypatch.setattr(fedpriv.server.grid, name, value)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_SECONDS", "_NODE_POLL_SECONDS", "_RETRY_SECONDS"):
        monkeypatch.setattr(fedpriv.server.grid, name, 0.001)
    monkeypatch.setattr(fedpriv.server.grid, "_SILENCE_SECONDS", 0.05)


def ask(grid: ScriptedGrid, nodes: list[int], timeout: float = 10.0) -> list[Message]:
    messages = [Message(RecordDict(), node, TRAIN) for node in nodes]
    patient = PatientGrid(grid)
    assert patient.roster(len(nodes), 5.0) == nodes
    replies = patient.send_and_receive(messages, timeout=timeout)
    numbers = [message.metadata.message_id for message in messages]
    assert len(set(numbers)) == len(numbers)
    assert {reply.metadata.reply_to_message_id for reply in replies} <= set(numbers)
    return replies


PASSING = ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.REPLY_MESSAGE_UNAVAILABLE


@pytest.mark.parametrize("fault", [*map(failing, PASSING), refusing(final=False), lost])
def test_a_query_is_repeated_after_a_transient_failure(fault: Answer) -> None:
    grid = ScriptedGrid({7: 0}, until(3, fault))
    (reply,) = ask(grid, [7])
    assert "release" in reply.content
    assert grid.asked == [7] * 4


@pytest.mark.parametrize("fault", [failing(ErrorCode.CLIENT_APP_RAISED_EXCEPTION), refusing(final=True)])
def test_a_query_is_not_repeated_after_a_final_failure(fault: Answer) -> None:
    grid = ScriptedGrid({7: 0}, until(1, fault))
    (reply,) = ask(grid, [7])
    assert reply.has_error() or read_refusal(reply.content) == Refusal("no", is_final=True)
    assert grid.asked == [7]


def test_messages_that_the_superlink_refuses_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower gives no ids for messages that are too long."""
    grid = ScriptedGrid({7: 0}, release)
    monkeypatch.setattr(PatientGrid, "_poll_nodes", lambda _: None)
    monkeypatch.setattr(grid, "push_messages", lambda _: [])
    with pytest.raises(RunError, match="too long for it"):
        PatientGrid(grid).send_and_receive([Message(RecordDict(), 7, TRAIN)], timeout=50.0)


def test_a_node_that_the_superlink_does_not_know_is_asked_again_after_a_while(
    clock: "Clock", monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unknown(ScriptedGrid):
        pushed = 0

        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            self.pushed += 1
            return super().push_messages(messages) if self.pushed > 3 else [""] * len(list(messages))

    monkeypatch.setattr(fedpriv.server.grid, "_RETRY_SECONDS", 2.0)
    grid = Unknown({7: 0}, release)
    monkeypatch.setattr(PatientGrid, "_poll_nodes", lambda _: None)
    assert len(PatientGrid(grid).send_and_receive([Message(RecordDict(), 7, TRAIN)], timeout=50.0)) == 1
    assert grid.pushed == 4
    assert 6.0 <= clock.now < 7.0


def test_what_the_grid_of_flower_does_itself_is_left_to_it() -> None:
    run, message = Run.create_empty(3), Message(RecordDict(), 7, TRAIN)
    grid = Mock(run=run)
    patient = PatientGrid(grid)
    patient.set_run(run)
    grid.set_run.assert_called_once_with(run)
    assert patient.run is run
    assert patient.get_node_ids() is grid.get_node_ids.return_value
    assert patient.get_nodes() is grid.get_nodes.return_value
    assert patient.push_messages([message]) is grid.push_messages.return_value
    grid.push_messages.assert_called_once_with([message])
    assert patient.pull_messages(["m1"]) is grid.pull_messages.return_value
    grid.pull_messages.assert_called_once_with(["m1"])


def test_two_replies_to_one_query_count_once() -> None:
    grid = ScriptedGrid({7: 0, 8: 1}, lambda message, times: release(message, times) * 2)
    assert len(ask(grid, [7, 8])) == 2


def test_queries_follow_a_silo_to_its_new_node() -> None:
    grid = ScriptedGrid({7: 0, 8: 1}, without_node_8)
    patient = PatientGrid(grid)
    assert patient.roster(2, 5.0) == [7, 8]
    grid.silo_of[9] = 1  # silo 1 was killed and came back; node 8 is still listed
    for _ in range(2):
        messages = [Message(RecordDict(), node, TRAIN) for node in (7, 8)]
        replies = patient.send_and_receive(messages, timeout=10.0)
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        assert sorted(asked[reply.metadata.reply_to_message_id] for reply in replies) == [7, 8]
    assert grid.asked[-2:] == [7, 9]


@pytest.mark.parametrize("number", [0, 1])
def test_queries_follow_a_silo_with_a_replaced_key_to_its_new_node(number: int) -> None:
    """Was: asked at the node of the revoked key until patience ended, while its new one was connected."""

    def replace(message: Message, times: int) -> list[Message]:
        if message.metadata.dst_node_id == nodes[number]:
            grid.silo_of.pop(nodes[number], None)
            grid.silo_of[17] = number
            return []
        return release(message, times)

    nodes = [7, 8]
    grid = RegisteredGrid({7: 0, 8: 1}, replace)
    patient = PatientGrid(grid, has_registered_nodes=True)
    assert patient.roster(2, 5.0) == nodes
    for _ in range(2):
        replies = patient.send_and_receive([Message(RecordDict(), node, TRAIN) for node in nodes], timeout=5.0)
        assert sorted(reply.metadata.src_node_id for reply in replies) == sorted({17, *nodes} - {nodes[number]})
    assert grid.asked.count(nodes[number]) < 4
    assert grid.asked[-2:].count(17) == 1, "it stays there"


def test_a_registered_silo_outside_the_run_gets_no_query() -> None:
    """Was: a silo added during a run ended it after a restart of the SuperLink: "a node says it is silo 3"."""
    grid = RegisteredGrid({6: 3, 9: 2, 7: 0, 8: 1}, release)
    patient = PatientGrid(grid, has_registered_nodes=True)
    assert patient.roster(3, 5.0) == [7, 8, 9]
    replies = patient.send_and_receive([Message(RecordDict(), node, TRAIN) for node in (7, 8, 9)], timeout=5.0)
    assert len(replies) == 3
    assert sorted(grid.asked) == [7, 8, 9]


def test_replacing_a_key_while_the_run_waits_for_another_silo_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Was: "a node says it is silo 0: expected each of 0 … 1 once"."""

    def replace_key(missing: Iterable[int], _: float) -> None:
        if list(missing) == [1]:
            grid.silo_of = {17: 0, 8: 1}

    monkeypatch.setattr(fedpriv.server.grid, "_MIN_REPORTED_SECONDS", 0.01)
    grid = RegisteredGrid({7: 0}, release)
    patient = PatientGrid(grid, has_registered_nodes=True, on_wait=replace_key)
    assert patient.roster(2, 5.0) == [17, 8]


def test_the_last_refusal_is_returned_when_the_timeout_ends() -> None:
    assert ask(ScriptedGrid({7: 0}, lost), [7], timeout=0.2) == []
    (reply,) = ask(ScriptedGrid({7: 0}, refusing(final=False)), [7], timeout=0.2)
    assert read_refusal(reply.content) == Refusal("no", is_final=False)


def test_a_roster_with_missing_duplicate_or_unknown_silos_is_refused() -> None:
    with pytest.raises(RunError, match="silo 1, 2 was not connected after 0 s"):
        PatientGrid(ScriptedGrid({7: 0}, lost)).roster(3, 0.1)
    with pytest.raises(RunError, match="a node says it is silo 0"):
        PatientGrid(ScriptedGrid({7: 0, 8: 0}, lost)).roster(2, 5.0)
    with pytest.raises(RunError, match="a node says it is silo 5"):
        PatientGrid(ScriptedGrid({7: 5}, lost)).roster(2, 5.0)


class Clock:
    """What `patient_grid` has for the module `time`: sleeping is what moves it."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        assert seconds > 0.0, "a server that never pauses takes a core"
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fedpriv.server.grid, "time", clock)
    return clock


class TimedGrid(ScriptedGrid):
    """Notes when a message is sent, and counts the looks for new nodes."""

    def __init__(self, clock: Clock, answer: Answer) -> None:
        super().__init__({7: 0}, answer)
        self.clock, self.times, self.looks = clock, list[float](), 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        self.times += [self.clock.now] * sum(message.metadata.message_type == TRAIN for message in messages)
        return super().push_messages(messages)

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return super().get_node_ids()


@pytest.mark.usefixtures("deployed_times")
@pytest.mark.parametrize(
    ("answer", "times"),
    [
        (lost, [0.0, 30.0, 90.0, 210.0]),
        (refusing(final=False), [2.0 * number for number in range(150)]),
        (failing(ErrorCode.NODE_UNAVAILABLE), [2.0 * number for number in range(150)]),
    ],
    ids=["silent", "refusing", "failing"],
)
def test_a_silo_is_asked_again_after_two_seconds_or_if_it_is_silent_after_thirty_and_twice_as_long(
    clock: Clock, answer: Answer, times: list[float]
) -> None:
    grid = TimedGrid(clock, answer)
    PatientGrid(grid).send_and_receive([Message(RecordDict(), 7, TRAIN)], timeout=300.0)
    # Each pause between two looks is a tenth of a second, which adds up.
    assert grid.times[:4] == pytest.approx(times[:4], abs=0.5)
    assert len(grid.times) == pytest.approx(len(times), rel=0.06)
    assert set(clock.slept) == {0.1}
    assert grid.looks == pytest.approx(300, rel=0.1), "one look for new nodes a second"
    assert clock.now == pytest.approx(300.0, abs=0.2)


@pytest.mark.usefixtures("deployed_times")
def test_a_wait_is_told_after_five_seconds(clock: Clock) -> None:
    waits: list[tuple[list[int], float]] = []
    patient = PatientGrid(TimedGrid(clock, lost), on_wait=lambda silos, now: waits.append((list(silos), now)))
    for seconds in (4.8, 5.3):
        with pytest.raises(RunError, match=f"silo 1 was not connected after {seconds:.0f} s"):
            patient.roster(2, seconds)
        assert len(waits) == (seconds > 5.0)
    assert waits[0] == ([1], pytest.approx(4.8, abs=0.2)), "with the start of the wait"


@pytest.mark.parametrize("held", [0.0, 1.0])
def test_the_server_sleeps_between_polls_only_if_the_superlink_answers_immediately(
    held: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink of ours holds an empty answer until a reply has come; another one would be asked without end."""

    class Holding(ScriptedGrid):
        asked_for_replies = 0

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.asked_for_replies += 1
            if self.asked_for_replies < 5:
                clock.now += held
                return []
            return super().pull_messages(message_ids)

    grid = Holding({7: 0}, release)
    monkeypatch.setattr(fedpriv.server.grid, "_SILENCE_SECONDS", 100.0)
    assert len(PatientGrid(grid).send_and_receive([Message(RecordDict(), 7, TRAIN)], timeout=50.0)) == 1
    assert len(clock.slept) >= 3 if held == 0.0 else not clock.slept


def test_waiting_is_reported_with_the_missing_silos_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedpriv.server.grid, "_MIN_REPORTED_SECONDS", 0.01)
    waits: list[list[int]] = []
    grid = ScriptedGrid({7: 0, 8: 1}, without_node_8)
    patient = PatientGrid(grid, on_wait=lambda silos, since: waits.append(list(silos)))
    with pytest.raises(RunError, match="silo 2 was not connected"):
        patient.roster(3, 0.1)
    assert waits in ([[0, 1, 2], [2]], [[2]])
    patient.roster(2, 5.0)
    waits.clear()
    patient.send_and_receive([Message(RecordDict(), node, TRAIN) for node in (7, 8)], timeout=0.2)
    assert waits[-2:] == [[1], []]


def test_time_in_which_the_server_was_suspended_does_not_count_toward_the_timeout(clock: Clock) -> None:
    """Was: a server that stood still for 45 s blamed every hospital."""

    class Stopping(ScriptedGrid):
        """Stands still for 45 s at its third look."""

        looks = 0

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            ids = set(message_ids)
            if any(reply.metadata.message_type == TRAIN for reply in self.replies) or "m2" in ids:
                self.looks += 1
                clock.now += 1.0 if self.looks != 3 else 45.0
                if self.looks < 6:
                    return []
            return super().pull_messages(ids)

    (reply,) = ask(Stopping({7: 0}, release), [7], timeout=15.0)
    assert not reply.has_error()
    assert ask(ScriptedGrid({7: 0}, lost), [7], timeout=15.0) == []

    class Slow(ScriptedGrid):
        """A SuperLink whose every answer takes ten seconds."""

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            clock.now += 10.0
            return super().pull_messages(message_ids)

    start = clock.now
    assert ask(Slow({7: 0}, lost), [7], timeout=15.0) == []
    assert clock.now - start < 1000.0


@pytest.mark.usefixtures("deployed_times")
@pytest.mark.parametrize(
    ("gap", "timeout", "end"),
    [(4.5, 50.0, 54.0), (5.5, 51.2, 951.5), (5.5, 46.2, 951.5)],
)
def test_gaps_of_more_than_five_seconds_are_no_silos_fault_and_count_for_900_at_most(
    clock: Clock, gap: float, timeout: float, end: float
) -> None:
    class Gaps(ScriptedGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            clock.now += gap
            return []

    patient = PatientGrid(Gaps({}, lost))
    assert patient.send_and_receive([Message(RecordDict(), 7, TRAIN)], timeout=timeout) == []
    assert clock.now == pytest.approx(end)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ErrorCode.NODE_UNAVAILABLE, r"hears nothing of its SuperNode: network, machine or service \(gone\\x1b\)"),
        (ErrorCode.CLIENT_APP_CRASHED, "its app ended without an answer; a machine that has no memory left"),
        (ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "its message was lost; a SuperLink or a SuperNode that is started"),
    ],
)
def test_the_final_refusal_after_a_timeout_names_the_cause(code: int, words: str) -> None:
    """Was: a network that was cut was called a machine that is overloaded."""
    (reply,) = ask(ScriptedGrid({7: 0}, failing(code, "gone\x1b")), [7], timeout=0.1)
    refusal = read_refusal(reply.content)
    assert refusal is not None
    assert re.search(words, refusal.reason), refusal.reason
