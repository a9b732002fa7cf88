"""Frames on a Unix socket: four bytes of length in network order, then as many bytes of content.

The other end may send anything, or nothing.  So a receiver limits the length of every frame, and a guard also the
time in which a frame has to arrive.
"""

import json
import socket
import struct
import time
from typing import Any

_LENGTH_FORMAT = struct.Struct("!I")
_CHUNK_BYTES = 2**20


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send a frame with this content.

    Raises:
        OSError: The other end does not take the frame.
        struct.error: The content has 2^32 bytes or more.
    """
    connection.sendall(_LENGTH_FORMAT.pack(len(content)))
    connection.sendall(content)


def receive_frame(connection: socket.socket, max_bytes: int, seconds: float | None = None) -> bytearray:
    """Receive the content of the next frame.

    Args:
        connection: Connected socket.
        max_bytes: Largest length of the content.
        seconds: Time in which the whole frame has to arrive.  With None there is no limit for the frame, but a
            timeout that the socket already has applies to every wait for bytes.

    Raises:
        ValueError: The frame is longer than `max_bytes`.
        OSError: The frame does not arrive in time, or the connection is closed or broken.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    return _receive(connection, _receive_length(connection, max_bytes, deadline), deadline)


def receive_length(connection: socket.socket, max_bytes: int, seconds: float) -> int:
    """Receive the length of the next frame, whose content `receive_content` receives.

    Raises:
        ValueError: The frame is longer than `max_bytes`.
        OSError: The length does not arrive in `seconds`, or the connection is closed or broken.
    """
    return _receive_length(connection, max_bytes, time.monotonic() + seconds)


def receive_content(connection: socket.socket, length: int, seconds: float) -> bytearray:
    """Receive a frame's content after its length.

    Raises:
        OSError: The content does not arrive in `seconds`, or the connection is closed or broken.
    """
    return _receive(connection, length, time.monotonic() + seconds)


def receive_json(connection: socket.socket, max_bytes: int, seconds: float | None = None) -> dict[str, Any]:
    """Receive a frame that is a JSON object.

    Args:
        connection: Connected socket.
        max_bytes: Largest length of the frame's content.
        seconds: Time in which the whole frame has to arrive, or None as in `receive_frame`.

    Raises:
        ValueError: The frame is no JSON object, or longer than `max_bytes`.
        RecursionError: The JSON is nested too deeply.
        OSError: The frame does not arrive in time, or the connection is closed or broken.
    """
    value = json.loads(receive_frame(connection, max_bytes, seconds))
    if not isinstance(value, dict):
        raise ValueError("a frame whose content is no JSON object")
    return value


def drain_connection(connection: socket.socket, seconds: float) -> None:
    """Shut down the sending side and discard what arrives until the other end closes the connection.

    So the other end can read what was sent to it before the connection is gone.  An end that keeps sending is left
    after `seconds`, with or without an error.  The call changes the socket's timeout.

    Raises:
        OSError: The connection broke, or no bytes arrived in the rest of `seconds` (TimeoutError).
    """
    connection.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + seconds
    while (remaining_seconds := deadline - time.monotonic()) > 0.0:
        connection.settimeout(remaining_seconds)
        if not connection.recv(_CHUNK_BYTES):
            return


def _receive_length(connection: socket.socket, max_bytes: int, deadline: float | None) -> int:
    (length,) = _LENGTH_FORMAT.unpack(_receive(connection, _LENGTH_FORMAT.size, deadline))
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes, allowed are {max_bytes}")
    return int(length)


def _receive(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    """Receive `size` bytes.

    Memory grows with the bytes received, not with the length that was announced.

    Args:
        connection: Connected socket, whose timeout is changed if there is a deadline.
        size: Number of bytes.
        deadline: Time of the monotonic clock, in seconds, or None for no limit beyond the socket's own timeout.

    Raises:
        OSError: The bytes do not arrive before the deadline or in the socket's own timeout, or the connection is
            closed or broken.
    """
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0.0:
                raise TimeoutError("the other end is silent")
            connection.settimeout(remaining_seconds)
        piece = connection.recv(min(_CHUNK_BYTES, size - len(content)))
        if not piece:
            raise ConnectionError("the other end is gone")
        content += piece
    return content
