"""A coordinator and silos of different versions: refused in words before anything reaches a guard."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from fedpriv.clients import app as silo
from fedpriv.protocol.frames import drain_connection, send_frame
from fedpriv.protocol.messages import (
    ADMISSION_QUERY,
    PROTOCOL_VERSION,
    PUBLIC_KEY_QUERY,
    TRAIN,
    clock_offset,
    format_clock_offset,
    is_clock_tolerated,
    read_refusal,
)

NEWER = {"protocol": PROTOCOL_VERSION + 1, "fedpriv": "0.9\x1b[2J"}


def context_of(**config: Any) -> Context:
    return Context(1, 7, {"partition-id": 1}, RecordDict(), config)


@pytest.mark.usefixtures("flower_task")
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({}, r"silo 1 runs fedpriv .* \(protocol 4\), the coordinator an older one: install the same version"),
        (NEWER, r"the coordinator 0\.9\\x1b\[2J \(protocol 5\): "),
        ({"protocol": "2", "fedpriv": "0.9"}, "the coordinator an older one"),
    ],
)
def test_a_coordinator_with_another_protocol_version_is_refused_before_the_guard_is_contacted(
    theirs: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: KeyError 'query' at the server, and nothing at the silo."""
    monkeypatch.setattr(silo, "_exchange_frames", lambda *_: pytest.fail("the guard was asked"))
    context = context_of(**{"run-token": "run", "cell-json": "{}"}, **theirs)
    for kind, forward in (
        (TRAIN, silo.forward_query),
        (PUBLIC_KEY_QUERY, silo.forward_key),
        (ADMISSION_QUERY, silo.forward_admission_query),
    ):
        reply = forward(Message(RecordDict(), 7, kind), context, Path("/nowhere"))
        refusal = read_refusal(reply.content)
        assert refusal is not None
        assert refusal.is_final
        assert re.search(words, refusal.reason), refusal.reason


def test_a_clock_may_be_behind_by_305_seconds_or_ahead_by_5() -> None:
    """Measured on Flower: beyond them a SuperLink refuses a SuperNode without a reason."""
    offsets = {-305.0: False, -304.999: True, 0.0: True, 4.999: True, 5.0: False}
    assert {offset: is_clock_tolerated(offset) for offset in offsets} == offsets
    assert [clock_offset(remote, 10.0, 12.0) for remote in (7.0, 10.0, 11.0, 12.0, 15.0)] == [-3.0, 0, 0, 0, 3.0]
    assert [format_clock_offset(offset) for offset in (2.6, -2.6)] == ["3 s ahead of", "3 s behind"]


def test_another_fedpriv_version_with_the_same_protocol_is_accepted() -> None:
    assert silo.find_protocol_mismatch(context_of(protocol=PROTOCOL_VERSION, fedpriv="0.9")) is None


def test_a_reply_of_deeply_nested_json_is_a_refusal_that_is_not_final(tmp_path: Path) -> None:
    """Before: RecursionError in the SuperNode."""
    listener = socket.socket(socket.AF_UNIX)
    with listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(tmp_path / "guard"))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                send_frame(connection, b'{"a": ' + b"[" * 200_000)
                drain_connection(connection, 5.0)

        answered = pool.submit(answer)
        refusal = silo.ask_admission(tmp_path / "guard", "run", "{}")
        answered.result()
    assert refusal is not None
    assert not refusal.is_final
