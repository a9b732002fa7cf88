"""Frames of a Unix socket, between a guard and whoever connects to it."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fedpriv.protocol.frames import (
    drain_connection,
    receive_content,
    receive_frame,
    receive_json,
    receive_length,
    send_frame,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(1.0)
        yield ours, theirs


def test_a_frame_is_its_length_in_network_order_and_its_content(pair: Pair) -> None:
    ours, theirs = pair
    content = bytes(range(256)) * 8192  # two pieces and more
    sender = threading.Thread(target=send_frame, args=(ours, content), daemon=True)
    sender.start()
    assert receive_frame(theirs, len(content), 10.0) == content
    sender.join(10.0)
    send_frame(ours, b"{}")
    assert theirs.recv(100) == b"\x00\x00\x00\x02{}"
    for text, value in ((b'{"t": 1}', {"t": 1}), (b"{}", {})):
        send_frame(ours, text)
        assert receive_json(theirs, len(text)) == value


@pytest.mark.parametrize("content", [b"[1]", b"1", b"null", b"nonsense"])
def test_a_frame_that_is_no_json_object_is_refused(pair: Pair, content: bytes) -> None:
    send_frame(pair[0], content)
    with pytest.raises(ValueError, match=r"no JSON object|Expecting value"):
        receive_json(pair[1], 100, 10.0)


def test_a_frame_that_is_too_long_is_refused_before_its_content_is_read(pair: Pair) -> None:
    send_frame(pair[0], bytes(9))
    with pytest.raises(ValueError, match="a frame of 9 bytes, allowed are 8"):
        receive_length(pair[1], 8, 10.0)
    assert pair[1].recv(100) == bytes(9)


def test_an_end_that_is_silent_or_gone_is_an_error(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(b"\x00\x00")
    for seconds in (0.0, 0.01):
        with pytest.raises(TimeoutError):
            receive_length(theirs, 8, seconds)
        with pytest.raises(TimeoutError):
            receive_frame(theirs, 8, seconds)
    ours.close()
    with pytest.raises(ConnectionError, match="the other end is gone"):
        receive_content(theirs, 3, 10.0)


class Clock:
    """A connection to an end that sends a byte a second, and its clock."""

    def __init__(self, *pieces: bytes) -> None:
        self.now, self.pieces, self.timeouts, self.is_shut = 100.0, list(pieces), list[float](), False

    def monotonic(self) -> float:
        return self.now

    def settimeout(self, seconds: float) -> None:
        self.timeouts.append(seconds)

    def shutdown(self, how: int) -> None:
        self.is_shut = how == socket.SHUT_WR

    def recv(self, size: int) -> bytes:
        self.now += 1.0
        return self.pieces.pop(0)


def test_the_time_of_a_frame_is_for_all_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    end: Any = Clock(b"\x00", b"\x00", b"\x00", b"\x02", b"{", b"}")
    monkeypatch.setattr("fedpriv.protocol.frames.time", end)
    assert receive_frame(end, 2, 6.5) == b"{}"
    assert end.timeouts == [6.5, 5.5, 4.5, 3.5, 2.5, 1.5]
    slow: Any = Clock(b"{", b"}", b"}")
    monkeypatch.setattr("fedpriv.protocol.frames.time", slow)
    with pytest.raises(TimeoutError, match="the other end is silent"):
        receive_content(slow, 3, 2.0)
    assert slow.timeouts == [2.0, 1.0]


def test_a_connection_is_drained_to_its_end_or_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for pieces, seconds in (([b"x", b"y", b"", b"never"], 5.0), ([b"x"] * 9, 3.0)):
        end: Any = Clock(*pieces)
        monkeypatch.setattr("fedpriv.protocol.frames.time", end)
        drain_connection(end, seconds)
        assert end.is_shut
        assert end.timeouts == [seconds, seconds - 1.0, seconds - 2.0]


def test_the_other_end_can_read_all_of_a_reply_that_is_drained(pair: Pair) -> None:
    """Unread bytes at a close would take the reply away."""
    ours, theirs = pair
    theirs.sendall(b"a question that nobody reads")
    send_frame(ours, b"reply")
    drained = threading.Thread(target=drain_connection, args=(ours, 10.0), daemon=True)
    drained.start()
    assert receive_frame(theirs, 5, 10.0) == b"reply"
    assert theirs.recv(1) == b""
    theirs.close()
    drained.join(5.0)
    assert not drained.is_alive()
