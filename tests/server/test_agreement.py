"""Every silo is asked whether it would refuse a run before any is asked for a round."""

import time
from collections.abc import Iterable

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from fedpriv.core.errors import RunError
from fedpriv.protocol.messages import ADMISSION_QUERY, Refusal, refusal_content
from fedpriv.server.app import check_admission
from tests.server.test_patient_grid import Answer, ScriptedGrid


class Asked(ScriptedGrid):
    """Silos that answer the question at once, each in its own way; None stays silent."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__({node: node for node in range(len(answers))}, answers[0])
        self.answers = answers

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for node, message in enumerate(messages):
            assert message.metadata.message_type == ADMISSION_QUERY
            message.metadata.__dict__["_message_id"] = f"m{node}"
            replies += self.answers[node](message, 1)
        return replies


def check(*answers: Answer, all_needed: bool = True) -> None:
    check_admission(Asked(list(answers)), range(len(answers)), 1.0, require_all=all_needed)


def yes(message: Message, _: int) -> list[Message]:
    return [Message(RecordDict(), reply_to=message)]


def no(reason: str, *, final: bool = True) -> Answer:
    return lambda message, _: [Message(refusal_content(Refusal(reason, final)), reply_to=message)]


def silent(message: Message, _: int) -> list[Message]:
    return []


def broken(message: Message, _: int) -> list[Message]:
    return [Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no such\x1b[2J query"), reply_to=message)]


def late(ahead: float) -> Answer:
    def answer(message: Message, _: int) -> list[Message]:
        (reply,) = yes(message, 1)
        reply.metadata.__dict__["_created_at"] = time.time() + ahead
        return [reply]

    return answer


def test_the_refusals_of_all_silos_are_reported_together() -> None:
    refusing = no("silo 0 refuses: too many rounds"), yes, no("the scenario that was sent cannot be used")
    down = no("the silo's guard does not answer", final=False)
    with pytest.raises(RunError) as error:
        check(*refusing, broken, late(20.0), late(-1000.0), silent, down)
    assert str(error.value).splitlines() == [
        "7 of 8 silos do not take part, so none is asked for a round:",
        "  silo 0 refuses: too many rounds",
        "  silo 2: the scenario that was sent cannot be used",
        "  silo 3 cannot be asked whether it agrees: its app is not of protocol 4, as this coordinator's fedpriv "
        "is, or failed: no such\\x1b[2J query",
        "  silo 4: its clock is 20 s ahead of the coordinator's; set both by NTP",
        "  silo 5: its clock is 1000 s behind the coordinator's; set both by NTP",
        "  no reply from silo 6",
        "  no reply from silo 7; the silo's guard does not answer",
    ]


def test_admission_by_all_silos_with_small_clock_offsets_starts_the_run() -> None:
    check(yes, late(4.0), late(-300.0))


def test_a_run_that_allows_missing_silos_starts_without_replies_but_not_after_a_refusal() -> None:
    check(yes, silent, no("not now", final=False), all_needed=False)
    with pytest.raises(RunError, match="1 of 2 silos"):
        check(yes, no("never"), all_needed=False)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
