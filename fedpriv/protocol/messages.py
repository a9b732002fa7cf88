"""Messages between server and silos over Flower, and the checkpoints that they carry.

| message | server -> silo | silo -> server |
|---|---|---|
| query.roster | nothing | metrics: `silo` |
| query.agreement | nothing | nothing, or a refusal |
| query.key | nothing | `key`: `public`, the silo's public key for the masks of this run, or its card |
| train | `query` (x_t), config `t` | `release`: the silo's message, metrics: record counts if simulated |
| train, masked | the same, config `keys`: keys or cards of all silos, concatenated | `release`: masked integers |
| evaluate | `query` (a model), config `t`: number of the evaluation | `release`: test sums, metrics likewise |
| all but query.roster, of guards, refused | the same | `refusal`: `reason`, and whether it is `final` |
| train, evaluate, of guards | config `seen`: checkpoints of ledgers | config `commit`: the reply's checkpoint |

A guard is the process at a silo that has the records.  A card is the public key with a signature.

**Vectors.**  A vector is .npy bytes, equal to those of Flower's own `Array(ndarray)`.  A short one is a value of
the config record, and a longer one an array record, which costs Flower more requests.

**Seals.**  A SuperLink names an object by the SHA-256 of its bytes, and gives the object to every SuperNode that
requests the name.  A silo that guesses the message of another silo could thus learn whether it was sent.  So
vectors from silos with guards are XORed with a random pad, whose seed is the config's `seal` (`seal_vector`).

**Checkpoints.**  A guard's reply carries the position in its ledger at which the reply was stored.  The
coordinator sends the last positions with its next query.  A guard whose ledger was restored from an older copy
does not have that position, and refuses.

**Private names of Flower.**  Constructors of Flower's containers are slow.  So most containers are filled and read
through private names, and tests/protocol/test_unchecked.py compares them with those that the constructor makes.
"""

import hashlib
import io
import math
import re
import secrets
import struct
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedpriv.core.errors import sanitize_line

if TYPE_CHECKING:
    from torch import Tensor


_CLOCK_TOLERANCE = (-305.0, 5.0)
"""Range of seconds, exclusive, by which a SuperNode's clock may be ahead of the SuperLink's.

Source: measured on Flower 1.41.
"""


def is_clock_tolerated(ahead: float) -> bool:
    """Whether the SuperLink admits a SuperNode whose clock is `ahead` seconds ahead of the SuperLink's."""
    return _CLOCK_TOLERANCE[0] < ahead < _CLOCK_TOLERANCE[1]


def format_clock_offset(ahead: float) -> str:
    """Describe by how much one clock is ahead of, or behind, another one, for a person."""
    return f"{abs(ahead):.0f} s {'ahead of' if ahead > 0.0 else 'behind'}"


def clock_offset(remote_time: float, send_time: float, receive_time: float) -> float:
    """Return the offset of least absolute value that explains a remote clock's time, in seconds.

    Args:
        remote_time: Time of the remote clock, in a reply to this process.
        send_time: Time of this process's clock when it sent the request.
        receive_time: Time of this process's clock when it received the reply.

    Returns:
        Positive if the remote clock is ahead, and 0 if `remote_time` lies between the other two.
    """
    return remote_time - min(max(remote_time, send_time), receive_time)


_CHECKPOINT_FORMAT = struct.Struct("!16sQ32s")
MAX_CHECKPOINTS = 8
"""Largest number of ledgers of one silo that a coordinator remembers."""
MAX_CHECKPOINT_BYTES = MAX_CHECKPOINTS * _CHECKPOINT_FORMAT.size


class Checkpoint(NamedTuple):
    """Position in a ledger: the ledger's name, the number of a commit with a reply, and a head.

    The head is the one that the ledger's chain would have there if the reply were the only entry of the commit.
    The name has 32 hexadecimal digits, and the head 32 bytes.

    Guarantee: the head reveals nothing of records, if HMAC-SHA256 is a pseudorandom function.
    """

    ledger_name: str
    number: int
    head: bytes

    @property
    def wire_bytes(self) -> bytes:
        return _CHECKPOINT_FORMAT.pack(bytes.fromhex(self.ledger_name), self.number, self.head)


def unpack_checkpoints(packed: bytes) -> list[Checkpoint]:
    """Decode the checkpoints that another process sent.

    Raises:
        ValueError: The bytes are no checkpoints, or there are more than `MAX_CHECKPOINTS`.
    """
    if len(packed) > MAX_CHECKPOINT_BYTES or len(packed) % _CHECKPOINT_FORMAT.size:
        raise ValueError(f"{len(packed)} bytes are no checkpoints")
    return [Checkpoint(name.hex(), number, head) for name, number, head in _CHECKPOINT_FORMAT.iter_unpack(packed)]


def update_checkpoints(stored: bytes, packed_checkpoint: bytes) -> bytes:
    """Return a silo's stored checkpoints, updated by the one checkpoint of its latest reply.

    Checkpoints are ordered by their last update.  The oldest one is dropped beyond `MAX_CHECKPOINTS`.

    Args:
        stored: Packed checkpoints of the silo, b"" for none.
        packed_checkpoint: Packed checkpoint of the reply.

    Raises:
        ValueError: Bytes of an argument are malformed, or `packed_checkpoint` is not exactly one checkpoint.
    """
    (new,) = unpack_checkpoints(packed_checkpoint)
    older = [checkpoint for checkpoint in unpack_checkpoints(stored) if checkpoint.ledger_name != new.ledger_name]
    return b"".join(checkpoint.wire_bytes for checkpoint in [*older[-(MAX_CHECKPOINTS - 1) :], new])


Record = ArrayRecord | ConfigRecord | MetricRecord | RecordDict
Container = TypeVar("Container", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

_EMPTY_RECORDS: dict[type, Any] = {kind: kind() for kind in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)}


def record_values(record: Record) -> Mapping[str, Any]:
    """Return the values of a record, or of a dictionary of records, for reading only."""
    values: Mapping[str, Any] = record.__dict__["_data"]
    return values


def build_record(kind: type[Container], values: dict[str, Any]) -> Container:
    """Build a record, or a dictionary of records, around `values`."""
    return _copy_record(cast(Container, _EMPTY_RECORDS[kind]), values)


def _copy_record(record: Container, values: dict[str, Any]) -> Container:
    """Return a record like `record` with other values."""
    copy: Container = record.__class__.__new__(record.__class__)
    copy.__dict__.update(record.__dict__, _data=values)
    return copy


def build_array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Build an array around these bytes."""
    array: Array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return array


def copy_content(content: RecordDict) -> RecordDict:
    """Copy the records of a message to new containers.

    The copy and `content` share the arrays, whose bytes are immutable, and the values of other records.
    """
    return build_record(
        RecordDict,
        {name: _copy_record(record, {**record_values(record)}) for name, record in record_values(content).items()},
    )


def build_message(metadata: Metadata, content: RecordDict) -> Message:
    """Build a message around this metadata."""
    message: Message = Message.__new__(Message)
    message.__dict__.update(_metadata=metadata, _content=content, _error=None)
    return message


def build_messages(nodes: Sequence[int], content: RecordDict, kind: str) -> list[Message]:
    """Build the message `Message(content, node, kind)` for every node.

    All messages share the content.

    Args:
        nodes: Ids of the receiving nodes.
        content: Records of the message.
        kind: Type of the message, such as "train".

    Returns:
        One message for each node, in their order.
    """
    if not nodes:
        return []
    # Flower's constructor takes long, so that it makes a single message.
    first, messages = Message(content, nodes[0], kind), []
    for node in nodes:
        metadata = Metadata.__new__(Metadata)
        metadata.__dict__.update(first.metadata.__dict__, _dst_node_id=node)
        messages.append(build_message(metadata, content))
    return messages


def build_reply(message: Message, content: RecordDict) -> Message:
    """Build the reply `Message(content, reply_to=message)`."""
    query_fields, metadata = message.metadata.__dict__, Metadata.__new__(Metadata)
    # The time to live of a reply is what is left of its message's.
    now = time.time()
    metadata.__dict__.update(
        query_fields,
        _message_id="",
        _src_node_id=query_fields["_dst_node_id"],
        _dst_node_id=query_fields["_src_node_id"],
        _src_task_id=query_fields["_dst_task_id"],
        _dst_task_id=query_fields["_src_task_id"],
        _reply_to_message_id=query_fields["_message_id"],
        _created_at=now,
        _ttl=query_fields["_created_at"] + query_fields["_ttl"] - now,
        _delivered_at="",
    )
    return build_message(metadata, content)


def set_message_id(message: Message, number: str) -> None:
    """Set the identifier that a grid gives to a message when it sends the message."""
    message.metadata.__dict__["_message_id"] = number


REGISTERED_NODES_VARIABLE = "FEDPRIV_NODES_ARE_REGISTERED"
"""Environment variable of the server, 1 if SuperNodes' keys were registered under their silos' names."""
REFUSED_SILOS_VARIABLE = "FEDPRIV_REFUSED_SILOS"
"""Environment variable of the server, the file in which its SuperLink says why silos are refused."""

PROTOCOL_VERSION = 4
"""Version of the meaning of messages, scenarios and replies, which a coordinator sends with its run."""

CONFIG = "config"
ROSTER_QUERY = "query.roster"
PUBLIC_KEY_QUERY = "query.key"
ADMISSION_QUERY = "query.agreement"
TRAIN = "train"
EVALUATE = "evaluate"
SERVER_CHECKPOINTS, REPLY_CHECKPOINT, PREVIEW_ADMISSION = "seen", "commit", "agree"


class Refusal(NamedTuple):
    """Reason why a silo released nothing."""

    reason: str
    """Reason, for a person.  `read_refusal` makes it one line."""
    is_final: bool
    """Whether the silo refuses the query if it is repeated, too."""


def roster_content(silo: int) -> RecordDict:
    """Build a silo's reply to `ROSTER_QUERY`."""
    return RecordDict({"metrics": MetricRecord({"silo": silo})})


def key_content(public: bytes) -> RecordDict:
    """Build a silo's reply to `PUBLIC_KEY_QUERY`."""
    return RecordDict({"key": ConfigRecord({"public": public})})


def read_public_keys(content: RecordDict) -> bytes:
    """Return the public keys, or cards, that a query carries for masks, or b"" if there are none.

    Raises:
        ValueError: The value is no bytes.
    """
    return read_optional_bytes(content, "keys")


def read_optional_bytes(content: RecordDict, name: str) -> bytes:
    """Return the bytes of this name in a message's config, or b"" if there are none.

    Raises:
        ValueError: The value is no bytes.
    """
    return b"" if _value_in(content, CONFIG, name) is None else read_bytes_field(content, CONFIG, name)


def add_bytes(content: RecordDict, name: str, value: bytes) -> RecordDict:
    """Return the content with one more byte string in its config, sharing everything else with `content`."""
    records = record_values(content)
    config = build_record(
        ConfigRecord, {**record_values(records.get(CONFIG, _EMPTY_RECORDS[ConfigRecord])), name: value}
    )
    return build_record(RecordDict, {**records, CONFIG: config})


def refusal_content(refusal: Refusal) -> RecordDict:
    """Build the reply of a silo that refuses."""
    return RecordDict({"refusal": ConfigRecord({"reason": refusal.reason, "final": refusal.is_final})})


def read_refusal(content: RecordDict) -> Refusal | None:
    """Return the refusal that a reply carries, or None if it carries none.

    The reason is sanitized to one line that can be shown to a person.  A refusal that does not say whether it is
    final counts as final.
    """
    values = record_values(content).get("refusal")
    if not isinstance(values, ConfigRecord):
        return None
    return Refusal(sanitize_line(str(values.get("reason", "no reason given"))), bool(values.get("final", True)))


def _value_in(content: RecordDict, record: str, key: str) -> object:
    """Return a value of a metric or config record, or None if it is missing."""
    values = record_values(content).get(record)
    return record_values(values).get(key) if isinstance(values, ConfigRecord | MetricRecord) else None


def read_int_field(content: RecordDict, record: str, key: str) -> int:
    """Return an integer of a metric or config record.

    Raises:
        ValueError: The value is missing, or no integer.
    """
    value = _value_in(content, record, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the message carries no whole number {record}.{key}")
    return value


def read_bytes_field(content: RecordDict, record: str, key: str) -> bytes:
    """Return a byte string of a config record.

    Raises:
        ValueError: The value is missing, or no byte string.
    """
    value = _value_in(content, record, key)
    if not isinstance(value, bytes):
        raise ValueError(f"the message carries no bytes {record}.{key}")
    return value


_NUMPY_STYPE = "numpy.ndarray"
_SEAL, _SEAL_BYTES = "seal", 32
_MAX_CONFIG_BYTES = 2**22  # longer vectors are array records, which Flower sends in pieces
_VECTOR_HEADER = re.compile(
    rb"\x93NUMPY\x01\0..\{'descr': '([<>|]?[iuf][1248])', 'fortran_order': False, 'shape': \(([0-9]{1,15}),\), \}",
    re.DOTALL,
)
"""Header of a vector of numbers, at the start of its .npy bytes."""


class _VectorFormat(NamedTuple):
    """Format of a vector that an .npy header describes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    header: bytes
    """Bytes of the .npy header, before the values."""
    dtype_name: str
    """Name of `dtype`, cached because NumPy takes microseconds to make it."""

    @property
    def length(self) -> int:
        """Number of bytes of header and values."""
        return len(self.header) + math.prod(self.shape) * self.dtype.itemsize

    def decode(self, content: bytes) -> NDArray[Any]:
        return np.frombuffer(content, self.dtype, offset=len(self.header)).reshape(self.shape)


def encode_array(values: NDArray[Any]) -> Array:
    """Encode an array with axes as a Flower Array, with one copy of its values if they are contiguous."""
    values = np.ascontiguousarray(values)
    layout = _vector_format(values.dtype.str, values.shape)
    return build_array(layout.dtype_name, values.shape, _NUMPY_STYPE, b"".join((layout.header, values.data)))


def decode_vector(encoded: bytes | Array) -> NDArray[Any]:
    """Decode the .npy bytes of a vector, or a Flower Array.

    The result is a read-only array over these bytes, without a copy, if they have the header of `encode_array`.
    NumPy copies the values of a Flower Array with another header.

    Raises:
        ValueError: The array is malformed, or its values are no plain numbers.
    """
    values = _decode_bytes(encoded) if isinstance(encoded, bytes) else _decode_array(encoded)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":  # an archive, strings, dates
        raise ValueError("an array whose values are no plain numbers")
    return values


def _decode_array(array: Array) -> NDArray[Any]:
    """Return the values of a Flower Array, without a copy if their header is that of `encode_array`.

    Raises:
        ValueError: The array cannot be read.
    """
    try:
        layout = _vector_format(array.dtype, tuple(array.shape))
        if (
            array.stype == _NUMPY_STYPE
            and len(array.data) == layout.length
            and array.data.startswith(layout.header)
        ):
            return layout.decode(array.data)
        return array.numpy()  # another .npy version or memory order; NumPy itself refuses what is malformed
    except Exception as error:  # of NumPy, zipfile, tokenize, …: what a stranger sends decides
        raise ValueError(f"an array that cannot be read: {error}") from None


def seal_vector(name: str, values: NDArray[Any]) -> RecordDict:
    """Build a message's content: one vector under a random pad, and the pad's seed.

    The pad covers the values, and not the .npy header with their type and number.  `unseal_vector` removes it.

    Guarantee: whoever guesses the vector can compute no object of the message that has the padded values or the
    seed, and so not its name.  Without the seed, which is random, the padded values look random, whatever the
    vector is.  The pad hides nothing from the server.
    """
    seal = secrets.token_bytes(_SEAL_BYTES)
    return vector_content(name, encode_array(_xor_pad(np.ascontiguousarray(values), seal)), {_SEAL: seal})


def unseal_vector(content: RecordDict, name: str) -> NDArray[Any]:
    """Return the vector of this name, with the pad removed if it is sealed.

    A seal is the seed of a pad with which the values were XORed (`seal_vector`).

    Raises:
        ValueError: The vector is missing or malformed, or it has a malformed seal.
    """
    values = read_array(content, name)
    seal = _value_in(content, CONFIG, _SEAL)
    if seal is None:
        return values
    if not isinstance(seal, bytes) or len(seal) != _SEAL_BYTES:
        raise ValueError(f"the {name} is sealed with something else than {_SEAL_BYTES} bytes")
    return _xor_pad(values, seal)


def _xor_pad(values: NDArray[Any], seal: bytes) -> NDArray[Any]:
    """Return the array with its bytes XORed with as many bytes of SHAKE-256 of the seal.

    The result has the array's type and shape.  A second call with the same seal undoes the first.
    """
    pad = np.frombuffer(hashlib.shake_256(seal).digest(values.nbytes), np.uint8)
    padded: NDArray[Any] = (values.reshape(-1).view(np.uint8) ^ pad).view(values.dtype).reshape(values.shape)
    return padded


def vector_content(name: str, array: Array, config: Mapping[str, Any]) -> RecordDict:
    """Build a message's content: one vector, and further values of its config."""
    return build_record(RecordDict, vector_records(name, array, config))


def vector_records(name: str, array: Array, config: Mapping[str, Any]) -> dict[str, Any]:
    """Build the records of `vector_content`, by name."""
    if len(array.data) <= _MAX_CONFIG_BYTES:
        return {CONFIG: build_record(ConfigRecord, {**config, name: array.data})}
    return {name: build_record(ArrayRecord, {"vector": array}), CONFIG: build_record(ConfigRecord, {**config})}


def read_raw_vector(content: RecordDict, name: str) -> bytes | Array:
    """Return the encoded vector of this name, as .npy bytes or as a Flower Array.

    Bytes are a value of the config record.  An array is the only one of the array record with this name.

    Raises:
        ValueError: The message carries no such vector.
    """
    if isinstance(vector := _value_in(content, CONFIG, name), bytes):
        return vector
    arrays = record_values(content).get(name)
    if not isinstance(arrays, ArrayRecord) or len(record_values(arrays)) != 1:
        raise ValueError(f"the message carries no {name!r} vector")
    (array,) = record_values(arrays).values()
    return cast(Array, array)


def read_array(content: RecordDict, name: str) -> NDArray[Any]:
    """Return the vector of this name as an array (`decode_vector`), still sealed if it is sealed.

    Raises:
        ValueError: The vector is missing or malformed, or its values are no plain numbers.
    """
    return decode_vector(read_raw_vector(content, name))


def _decode_bytes(content: bytes) -> NDArray[Any]:
    """Return the vector (n,) of numbers in .npy bytes, whose header equals that of `encode_array`.

    Raises:
        ValueError: The header is another one, or the number of bytes differs from the one that the header
            announces.
    """
    # A pattern, since NumPy's parser would evaluate a header that another process sent.
    header = _VECTOR_HEADER.match(content)
    try:
        layout = None if header is None else _vector_format(header[1].decode(), (int(header[2]),))
    except TypeError:  # a type that NumPy does not have
        layout = None
    if layout is None or len(content) != layout.length or not content.startswith(layout.header):
        raise ValueError("a vector whose header is malformed, or announces another number of bytes")
    return layout.decode(content)


@lru_cache(maxsize=256)
def _vector_format(dtype: str, shape: tuple[int, ...]) -> _VectorFormat:
    kind, buffer = np.dtype(dtype), io.BytesIO()
    npy.write_array_header_1_0(buffer, {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": shape})
    return _VectorFormat(kind, shape, buffer.getvalue(), kind.name)


# Tensors.  torch is imported for the first of them.


class RecordCounts(NamedTuple):
    """Number of records that a round read, and of those that were clipped.

    If units of several records are protected, units are counted in place of records.
    """

    drawn: int
    """Number of records that the round read, with those that do not count."""
    clipped: int | None
    """Number of clipped records, or None if they are not counted, as in integer rounds."""

    def add(self, other: "RecordCounts") -> "RecordCounts":
        clipped = None if self.clipped is None or other.clipped is None else self.clipped + other.clipped
        return RecordCounts(self.drawn + other.drawn, clipped)

    @property
    def fraction_clipped(self) -> float | None:
        """Share of `drawn` that was clipped, 0 if `drawn` is 0, or None if clipped records are not counted."""
        return None if self.clipped is None else self.clipped / max(1, self.drawn)


def decode_tensor(array: Array) -> "Tensor":
    """Return a tensor over the bytes of a Flower Array, without a copy if `encode_array` made it.

    The bytes are immutable, so that nothing may write into the tensor.

    Raises:
        ValueError: The array is malformed.
    """
    return _to_tensor(decode_vector(array))


def to_array_record(vector: "Tensor") -> ArrayRecord:
    """Return an array record with one vector."""
    record = ArrayRecord()  # its constructor would copy the array
    record["vector"] = encode_array(vector.numpy())
    return record


def query_content(query: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
    """Build the content of a query from an array record of one vector.

    The content's config holds t and further values.
    """
    return vector_content("query", next(iter(query.values())), {**config, "t": t})


def release_content(release: "Tensor", counts: RecordCounts | None) -> RecordDict:
    """Build the content of a release (d,), with the counts of records in a simulation.

    Counts are a release that nothing charges, and None outside a simulation.
    """
    records: dict[str, Any] = vector_records("release", encode_array(release.numpy()), {})
    if counts is not None:
        fields = {name: count for name, count in counts._asdict().items() if count is not None}
        records["metrics"] = build_record(MetricRecord, fields)
    return build_record(RecordDict, records)


def read_counts(content: RecordDict) -> RecordCounts | None:
    """Return the counts of records that come with a release, or None if there are none.

    Raises:
        ValueError: The counts are malformed.
    """
    metrics = record_values(content).get("metrics")
    if metrics is None:
        return None
    record_count = read_int_field(content, "metrics", "drawn")
    return RecordCounts(
        record_count,
        read_int_field(content, "metrics", "clipped") if "clipped" in record_values(metrics) else None,
    )


def read_tensor(content: RecordDict, name: str) -> "Tensor":
    """Return the vector of this name as a tensor, with the pad removed if it is sealed.

    Raises:
        ValueError: The vector is missing or malformed.
    """
    return _to_tensor(unseal_vector(content, name))


def read_shared_tensor(content: RecordDict, name: str) -> "Tensor":
    """Return the vector of this name as a tensor that all silos of one process share.

    Successive calls with the same bytes return the same tensor, which no caller may write into.  Its memory is
    aligned.  A seal is not removed.

    Raises:
        ValueError: The vector is missing or malformed.
    """
    encoded = read_raw_vector(content, name)
    if isinstance(encoded, bytes):
        return _cached_tensor(encoded, None)
    return _cached_tensor(encoded.data, (encoded.dtype, tuple(encoded.shape), encoded.stype))


@lru_cache(maxsize=1)  # a larger cache would keep vectors of past rounds
def _cached_tensor(data: bytes, array_format: tuple[str, tuple[int, ...], str] | None) -> "Tensor":
    """Return the tensor of these bytes, from the cache if the last call had the same bytes."""
    # Python caches the hash of bytes, and compares two references to one object without reading its bytes.
    return _to_tensor(decode_vector(data if array_format is None else build_array(*array_format, data))).clone()


def _to_tensor(values: NDArray[Any]) -> "Tensor":
    try:
        return cast("Tensor", _load_torch().from_numpy(values))
    except TypeError as error:
        raise ValueError(f"an array that cannot be read: {error}") from None


@lru_cache(maxsize=1)
def _load_torch() -> Any:
    """Import torch, and trigger unseen its one warning about tensors over immutable bytes."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.from_numpy(np.frombuffer(bytes(8), np.float32))
    return torch
