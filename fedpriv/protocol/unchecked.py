"""The inside of Flower's containers, without the checks of their constructors and the layers of their methods.

A constructor takes 2 to 40 µs, in which it looks at types that mypy has looked at; a silo's arithmetic takes 30.
What is filled here is our own; what came from somebody else is read here too, and its types are looked at.
What is inside of a record, a message and its metadata are private names of Flower 1.41:
tests/protocol/test_unchecked.py compares each container with the one that the constructor makes.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata

Record = ArrayRecord | ConfigRecord | MetricRecord | RecordDict
Container = TypeVar("Container", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

_EMPTY: dict[type, Any] = {kind: kind() for kind in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)}


def values_in(record: Record) -> Mapping[str, Any]:
    """What a record, or a dictionary of records, holds, to be looked at."""
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
    """What `Message(content, reply_to=message)` makes."""
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
