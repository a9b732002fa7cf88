"""Frames on a Unix socket: four bytes of length, network order, then as many bytes.

The other end may send anything, or nothing: a frame has a largest length and a time by which it is there.
"""

import json
import socket
import struct
import time
from typing import Any

_LENGTH_FORMAT = struct.Struct("!I")
_CHUNK_BYTES = 2**20


def send_frame(connection: socket.socket, content: bytes) -> None:
    """OSError if the other end does not take it."""
    connection.sendall(_LENGTH_FORMAT.pack(len(content)))
    connection.sendall(content)


def receive_frame(connection: socket.socket, max_bytes: int, seconds: float | None = None) -> bytearray:
    """The next frame; ValueError if it is longer than `longest`, OSError if it is not there in so many seconds."""
    deadline = None if seconds is None else time.monotonic() + seconds
    return _receive(connection, _receive_length(connection, max_bytes, deadline), deadline)


def receive_length(connection: socket.socket, max_bytes: int, seconds: float) -> int:
    """Receive the length of the next frame, for `receive_content`; errors as those of `receive_frame`."""
    return _receive_length(connection, max_bytes, time.monotonic() + seconds)


def receive_content(connection: socket.socket, length: int, seconds: float) -> bytearray:
    """A frame's content after its length; OSError if it is not there in so many seconds."""
    return _receive(connection, length, time.monotonic() + seconds)


def receive_json(connection: socket.socket, max_bytes: int, seconds: float | None = None) -> dict[str, Any]:
    """A frame that is a JSON object; ValueError if it is none."""
    value = json.loads(receive_frame(connection, max_bytes, seconds))
    if not isinstance(value, dict):
        raise ValueError("a header is a JSON object")
    return value


def drain_connection(connection: socket.socket, seconds: float) -> None:
    """Say that nothing more comes, and read on until the other end has gone, for so many seconds at most."""
    connection.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0.0:
        connection.settimeout(left)
        if not connection.recv(_CHUNK_BYTES):
            return


def _receive_length(connection: socket.socket, longest: int, deadline: float | None) -> int:
    (length,) = _LENGTH_FORMAT.unpack(_receive(connection, _LENGTH_FORMAT.size, deadline))
    if length > longest:
        raise ValueError(f"a frame of {length} bytes, allowed are {longest}")
    return int(length)


def _receive(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    """Memory grows with what has come, not with what was announced."""
    received = bytearray()
    while len(received) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0.0:
                raise TimeoutError("the other end is silent")
            connection.settimeout(left)
        piece = connection.recv(min(_CHUNK_BYTES, size - len(received)))
        if not piece:
            raise ConnectionError("the other end is gone")
        received += piece
    return received
