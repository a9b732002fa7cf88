"""What silos answered to messages that all of them got: each in its place, or why not."""

from collections.abc import Iterable, Mapping

from flwr.app import Message, RecordDict

from fedpriv.errors import RunError, printable
from fedpriv.protocol.messages import refusal_in


def answers_of(
    asked: Mapping[int, Message], replies: Iterable[Message], what: str
) -> tuple[dict[int, RecordDict], str]:
    """What every silo answered to its message in `asked`, and why others did not; RunError for a failure."""
    # A grid numbers messages when it sends them; an error reply names the message, not always the node.
    numbered = {message.metadata.message_id: silo for silo, message in asked.items()}
    answers: dict[int, RecordDict] = {}
    reasons = ""
    for reply in replies:
        silo = numbered[reply.metadata.reply_to_message_id]
        if reply.has_error():
            raise RunError(f"silo {silo} failed in {what}: {printable(str(reply.error.reason))}")
        refusal = refusal_in(reply.content)
        if refusal is None:
            answers[silo] = reply.content
        elif refusal.final:
            raise RunError(f"{what}: {refusal.reason}")
        else:
            reasons += f"; {refusal.reason}"
    return answers, reasons


def missing(asked: Mapping[int, Message], answers: Mapping[int, object]) -> list[int]:
    return sorted(set(asked) - set(answers))


def all_answers(asked: Mapping[int, Message], replies: Iterable[Message], what: str) -> list[RecordDict]:
    """The answers of silo 0, 1, …; RunError unless every silo gave one."""
    answers, reasons = answers_of(asked, replies, what)
    if without := missing(asked, answers):
        raise RunError(f"{what}: no reply from silo {listed(without)}{reasons}")
    return [answers[silo] for silo in sorted(asked)]


def listed(silos: Iterable[int]) -> str:
    return ", ".join(map(str, silos))
