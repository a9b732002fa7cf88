"""Messages between server and silos over Flower, without torch: a silo's proxy has to start fast.

| message | server -> silo | silo -> server |
|---|---|---|
| query.roster | nothing | metrics: `silo` |
| query.key | nothing | `key`: `public`, the silo's public key for the masks of this run |
| train | `query` (x_t), config `t` | `release` (q_t with the silo's noise), metrics: `clipped` if simulated |
| train, masked | the same, config `keys`: every silo's public key in a row | `release`: words modulo 2^64 |
| evaluate | `query` (a model), config `t`: the number of the evaluation | `release`: sums over test records |
| both, refused by a guard | the same | `refusal`: `reason`, and whether it is `final` or worth another try |

A silo with a guard sends `seal` in `config`, under which the bytes of its `release` are padded.  `query` and
`release` are values of `config` too, as .npy bytes, and records of their own where they are long; see `vectors`.

Flower's containers are filled and read from the inside, without the checks of their constructors and the layers of
their methods: a constructor takes 2 to 40 µs, in which it looks at types that mypy has looked at; a silo's
arithmetic takes 30.  Containers are filled with our own values; where a value that somebody else sent is read, its
type is looked at.  The inside of a record, a message and its metadata are private names of Flower 1.41:
tests/protocol/test_unchecked.py compares each container with the one that the constructor makes.

On a Unix socket a frame is four bytes of length, network order, then as many bytes.  The other end may send
anything, or nothing: a frame has a largest length and a time by which it is there.
"""

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata

from fedpriv.core.errors import printable

Record = ArrayRecord | ConfigRecord | MetricRecord | RecordDict
Container = TypeVar("Container", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

_EMPTY: dict[type, Any] = {kind: kind() for kind in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)}


def values_in(record: Record) -> Mapping[str, Any]:
    """Return the values of a record, or of a dictionary of records, to be looked at."""
    values: Mapping[str, Any] = record.__dict__["_data"]
    return values


def holding(kind: type[Container], values: dict[str, Any]) -> Container:
    """A record, or a dictionary of records, with these values; it keeps the dictionary."""
    empty: Container = _EMPTY[kind]
    return _another(empty, values)


def _another(record: Container, values: dict[str, Any]) -> Container:
    """A record like `record`, with other values."""
    made: Container = record.__class__.__new__(record.__class__)
    made.__dict__.update(record.__dict__, _data=values)
    return made


def array_over(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """An array of these bytes."""
    made: Array = Array.__new__(Array)
    made.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return made


def own_copy(content: RecordDict) -> RecordDict:
    """The same records in containers of their own; the bytes of arrays are immutable and shared."""
    return holding(
        RecordDict, {name: _another(record, {**values_in(record)}) for name, record in values_in(content).items()}
    )


def message_with(metadata: Metadata, content: RecordDict) -> Message:
    """A message of this metadata, which it shares."""
    made: Message = Message.__new__(Message)
    made.__dict__.update(_metadata=metadata, _content=content, _error=None)
    return made


def messages_to(nodes: Sequence[int], content: RecordDict, kind: str) -> list[Message]:
    """The same message, `Message(content, node, kind)`, to each node; the content is shared."""
    if not nodes:
        return []
    first, messages = Message(content, nodes[0], kind), []
    for node in nodes:
        metadata = Metadata.__new__(Metadata)
        metadata.__dict__.update(first.metadata.__dict__, _dst_node_id=node)
        messages.append(message_with(metadata, content))
    return messages


def answer_to(message: Message, content: RecordDict) -> Message:
    """Make what `Message(content, reply_to=message)` makes."""
    asked, metadata = message.metadata.__dict__, Metadata.__new__(Metadata)
    now = time.time()
    metadata.__dict__.update(
        asked,
        _message_id="",
        _src_node_id=asked["_dst_node_id"],
        _dst_node_id=asked["_src_node_id"],
        _src_task_id=asked["_dst_task_id"],
        _dst_task_id=asked["_src_task_id"],
        _reply_to_message_id=asked["_message_id"],
        _created_at=now,
        _ttl=asked["_created_at"] + asked["_ttl"] - now,
        _delivered_at="",
    )
    return message_with(metadata, content)


def number_message(message: Message, number: str) -> None:
    """Give a message the number that a grid gives it when it is sent."""
    message.metadata.__dict__["_message_id"] = number


REGISTERED = "FEDPRIV_NODES_ARE_REGISTERED"
"""The server's environment variable that is 1 where a SuperNode's key was registered under its silo's name."""

CONFIG = "config"
ROSTER = "query.roster"
KEY = "query.key"
TRAIN = "train"
EVALUATE = "evaluate"


class Refusal(NamedTuple):
    """Why a silo released nothing; `final` if asking again cannot help."""

    reason: str
    final: bool


def roster_content(silo: int) -> RecordDict:
    return RecordDict({"metrics": MetricRecord({"silo": silo})})


def key_content(public: bytes) -> RecordDict:
    return RecordDict({"key": ConfigRecord({"public": public})})


def keys_in(content: RecordDict) -> bytes:
    """The public keys that a query comes with, none where messages are not masked."""
    values = values_in(content).get(CONFIG)
    return (
        bytes_in(content, CONFIG, "keys")
        if isinstance(values, ConfigRecord) and "keys" in values_in(values)
        else b""
    )


def refusal_content(refusal: Refusal) -> RecordDict:
    return RecordDict({"refusal": ConfigRecord({"reason": refusal.reason, "final": refusal.final})})


def refusal_in(content: RecordDict) -> Refusal | None:
    """The refusal that a reply carries, if any, with a reason that can be shown to a person."""
    values = values_in(content).get("refusal")
    if not isinstance(values, ConfigRecord):
        return None
    return Refusal(printable(str(values.get("reason", "no reason given"))), bool(values.get("final", True)))


def number_in(content: RecordDict, record: str, key: str) -> int:
    """A whole number in a metric or config record; ValueError if there is none."""
    values = values_in(content).get(record)
    value = values_in(values).get(key) if isinstance(values, MetricRecord | ConfigRecord) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the message carries no whole number {record}.{key}")
    return value


def bytes_in(content: RecordDict, record: str, key: str) -> bytes:
    """A byte string in a config record; ValueError if there is none."""
    values = values_in(content).get(record)
    value = values_in(values).get(key) if isinstance(values, ConfigRecord) else None
    if not isinstance(value, bytes):
        raise ValueError(f"the message carries no bytes {record}.{key}")
    return value


_LENGTH = struct.Struct("!I")
_PIECE = 2**20


def send_frame(connection: socket.socket, content: bytes) -> None:
    """OSError if the other end does not take it."""
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def receive_frame(connection: socket.socket, longest: int, seconds: float | None = None) -> bytearray:
    """The next frame; ValueError if it is longer than `longest`, OSError if it is not there in so many seconds."""
    deadline = None if seconds is None else time.monotonic() + seconds
    return _receive(connection, _length(connection, longest, deadline), deadline)


def receive_length(connection: socket.socket, longest: int, seconds: float) -> int:
    """Receive the length of the next frame, for `receive_content`; errors as those of `receive_frame`."""
    return _length(connection, longest, time.monotonic() + seconds)


def receive_content(connection: socket.socket, length: int, seconds: float) -> bytearray:
    """A frame's content after its length; OSError if it is not there in so many seconds."""
    return _receive(connection, length, time.monotonic() + seconds)


def receive_json(connection: socket.socket, longest: int, seconds: float | None = None) -> dict[str, Any]:
    """A frame that is a JSON object; ValueError if it is none."""
    value = json.loads(receive_frame(connection, longest, seconds))
    if not isinstance(value, dict):
        raise ValueError("a header is a JSON object")
    return value


def discard(connection: socket.socket, seconds: float) -> None:
    """Say that nothing more comes, and read on until the other end has gone, for so many seconds at most."""
    connection.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0.0:
        connection.settimeout(left)
        if not connection.recv(_PIECE):
            return


def _length(connection: socket.socket, longest: int, deadline: float | None) -> int:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
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
        piece = connection.recv(min(_PIECE, size - len(received)))
        if not piece:
            raise ConnectionError("the other end is gone")
        received += piece
    return received
