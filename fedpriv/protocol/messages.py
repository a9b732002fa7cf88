"""Messages between server and silos over Flower.  A silo's proxy has to start fast, and imports no torch for them.

| message | server -> silo | silo -> server |
|---|---|---|
| query.roster | nothing | metrics: `silo` |
| query.key | nothing | `key`: `public`, the silo's public key for the masks of this run |
| train | `query` (x_t), config `t` | `release` (q_t with the silo's noise), metrics: `clipped` if simulated |
| train, masked | the same, config `keys`: every silo's public key in a row | `release`: words modulo 2^64 |
| evaluate | `query` (a model), config `t`: the number of the evaluation | `release`: sums over test records |
| both, refused by a guard | the same | `refusal`: `reason`, and whether it is `final` or worth another try |
| both, of guards | config `seen`: commits of its ledgers | config `commit`: that of the reply |

A silo with a guard sends `seal` in `config`, under which the bytes of its `release` are padded.  `query` and
`release` are values of `config` too, as .npy bytes, and records of their own where they are long.

Flower's containers are filled and read from the inside, without the checks of their constructors and the layers of
their methods: a constructor takes 2 to 40 µs, in which it looks at types that mypy has looked at; a silo's
arithmetic takes 30.  Containers are filled with our own values; where a value that somebody else sent is read, its
type is looked at.  The inside of a record, a message and its metadata are private names of Flower 1.41:
tests/protocol/test_unchecked.py compares each container with the one that the constructor makes.

A vector is .npy bytes, byte for byte those of Flower's own `Array(ndarray)`; making an `Array` here costs 6 µs
instead of 37, and reading one 2 instead of 57 (d = 7,850).

Flower sends a message as a tree of objects, with a request for each of them on each of its ways, and an array
record is three.  A vector that is not long is a value of the config record instead, which is one.

A SuperLink names an object by the SHA-256 of its bytes, and gives it to every SuperNode that asks for the name: a
silo that guesses what another one sends could see whether it is there.  So what silos send is `sealed`.

Clocks of machines that work together, and the difference that Flower's SuperLink lets in.

Commits of silos' ledgers, as a coordinator remembers them and tells them again.

A silo's guard sends the commit that a reply is in along with it; the coordinator keeps the last one and sends it
with its next query.  A guard whose ledger and mark were both put back to an older copy has not made that commit,
and refuses.
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
"""Seconds by which a SuperNode's clock may be ahead of the SuperLink's; measured on Flower 1.41."""


def is_clock_tolerated(ahead: float) -> bool:
    """Whether a SuperNode whose clock is so many seconds ahead is let in."""
    return _CLOCK_TOLERANCE[0] < ahead < _CLOCK_TOLERANCE[1]


def format_clock_offset(ahead: float) -> str:
    """Say by how much one clock is ahead of, or behind, another one."""
    return f"{abs(ahead):.0f} s {'ahead of' if ahead > 0.0 else 'behind'}"


def clock_offset(told: float, asked: float, came: float) -> float:
    """Least difference that explains a clock's `told` time, in a reply between `asked` and `came` of one's own."""
    return told - min(max(told, asked), came)


_CHECKPOINT_FORMAT = struct.Struct("!16sQ32s")
MAX_CHECKPOINTS = 8
"""Ledgers of one silo that a coordinator remembers."""
MAX_CHECKPOINT_BYTES = MAX_CHECKPOINTS * _CHECKPOINT_FORMAT.size


class Checkpoint(NamedTuple):
    """A ledger's name in hexadecimal digits, and a commit of it: its number, and the head of the chain with it.

    Guarantee: the head tells nothing of records, see fedpriv/silo/chain.py.
    """

    ledger_name: str
    number: int
    head: bytes

    @property
    def wire_bytes(self) -> bytes:
        return _CHECKPOINT_FORMAT.pack(bytes.fromhex(self.ledger_name), self.number, self.head)


def unpack_checkpoints(packed: bytes) -> list[Checkpoint]:
    """The commits that somebody claims to have seen; ValueError for anything else, and for too many."""
    if len(packed) > MAX_CHECKPOINT_BYTES or len(packed) % _CHECKPOINT_FORMAT.size:
        raise ValueError(f"{len(packed)} bytes are no commits")
    return [Checkpoint(name.hex(), number, head) for name, number, head in _CHECKPOINT_FORMAT.iter_unpack(packed)]


def update_checkpoints(known: bytes, told: bytes) -> bytes:
    """What is known of a silo's ledgers, with one more commit; the ledgers that were heard of last are kept."""
    (new,) = unpack_checkpoints(told)
    others = [each for each in unpack_checkpoints(known) if each.ledger_name != new.ledger_name]
    return b"".join(each.wire_bytes for each in [*others[-(MAX_CHECKPOINTS - 1) :], new])


Record = ArrayRecord | ConfigRecord | MetricRecord | RecordDict
Container = TypeVar("Container", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

_EMPTY_RECORDS: dict[type, Any] = {kind: kind() for kind in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)}


def record_values(record: Record) -> Mapping[str, Any]:
    """Return the values of a record, or of a dictionary of records, to be looked at."""
    values: Mapping[str, Any] = record.__dict__["_data"]
    return values


def build_record(kind: type[Container], values: dict[str, Any]) -> Container:
    """A record, or a dictionary of records, with these values; it keeps the dictionary."""
    return _copy_record(cast(Container, _EMPTY_RECORDS[kind]), values)


def _copy_record(record: Container, values: dict[str, Any]) -> Container:
    """A record like `record`, with other values."""
    made: Container = record.__class__.__new__(record.__class__)
    made.__dict__.update(record.__dict__, _data=values)
    return made


def build_array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """An array of these bytes."""
    made: Array = Array.__new__(Array)
    made.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return made


def copy_content(content: RecordDict) -> RecordDict:
    """The same records in containers of their own; the bytes of arrays are immutable and shared."""
    return build_record(
        RecordDict,
        {name: _copy_record(record, {**record_values(record)}) for name, record in record_values(content).items()},
    )


def build_message(metadata: Metadata, content: RecordDict) -> Message:
    """A message of this metadata, which it shares."""
    made: Message = Message.__new__(Message)
    made.__dict__.update(_metadata=metadata, _content=content, _error=None)
    return made


def build_messages(nodes: Sequence[int], content: RecordDict, kind: str) -> list[Message]:
    """The same message, `Message(content, node, kind)`, to each node; the content is shared."""
    if not nodes:
        return []
    first, messages = Message(content, nodes[0], kind), []
    for node in nodes:
        metadata = Metadata.__new__(Metadata)
        metadata.__dict__.update(first.metadata.__dict__, _dst_node_id=node)
        messages.append(build_message(metadata, content))
    return messages


def build_reply(message: Message, content: RecordDict) -> Message:
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
    return build_message(metadata, content)


def set_message_id(message: Message, number: str) -> None:
    """Give a message the number that a grid gives it when it is sent."""
    message.metadata.__dict__["_message_id"] = number


REGISTERED_NODES_VARIABLE = "FEDPRIV_NODES_ARE_REGISTERED"
"""The server's environment variable that is 1 where a SuperNode's key was registered under its silo's name."""

REFUSED_SILOS_VARIABLE = "FEDPRIV_REFUSED_SILOS"
"""The server's environment variable that names the file in which its SuperLink says why it lets silos not in."""

PROTOCOL_VERSION = 4
"""Changes with what messages, scenarios or the answers to them mean; a coordinator sends it with its run.

Versions of fedpriv without such a number are older than 2.
"""

CONFIG = "config"
ROSTER_QUERY = "query.roster"
PUBLIC_KEY_QUERY = "query.key"
ADMISSION_QUERY = "query.agreement"
TRAIN = "train"
EVALUATE = "evaluate"
SERVER_CHECKPOINTS, REPLY_CHECKPOINT, PREVIEW_ADMISSION = "seen", "commit", "agree"


class Refusal(NamedTuple):
    """Why a silo released nothing; `final` if asking again cannot help."""

    reason: str
    is_final: bool


def roster_content(silo: int) -> RecordDict:
    return RecordDict({"metrics": MetricRecord({"silo": silo})})


def key_content(public: bytes) -> RecordDict:
    return RecordDict({"key": ConfigRecord({"public": public})})


def read_public_keys(content: RecordDict) -> bytes:
    """The public keys that a query comes with, none where messages are not masked."""
    return read_optional_bytes(content, "keys")


def read_optional_bytes(content: RecordDict, name: str) -> bytes:
    """The bytes of this name beside the vector of a message, b"" if there are none; ValueError for no bytes."""
    return b"" if _value_in(content, CONFIG, name) is None else read_bytes_field(content, CONFIG, name)


def add_bytes(content: RecordDict, name: str, value: bytes) -> RecordDict:
    """The message with bytes of this name in its config; everything else is shared with `content`."""
    records = record_values(content)
    config = build_record(
        ConfigRecord, {**record_values(records.get(CONFIG, _EMPTY_RECORDS[ConfigRecord])), name: value}
    )
    return build_record(RecordDict, {**records, CONFIG: config})


def refusal_content(refusal: Refusal) -> RecordDict:
    return RecordDict({"refusal": ConfigRecord({"reason": refusal.reason, "final": refusal.is_final})})


def read_refusal(content: RecordDict) -> Refusal | None:
    """The refusal that a reply carries, if any, with a reason that can be shown to a person."""
    values = record_values(content).get("refusal")
    if not isinstance(values, ConfigRecord):
        return None
    return Refusal(sanitize_line(str(values.get("reason", "no reason given"))), bool(values.get("final", True)))


def _value_in(content: RecordDict, record: str, key: str) -> object:
    """A value in a metric or config record, None if there is none."""
    values = record_values(content).get(record)
    return record_values(values).get(key) if isinstance(values, ConfigRecord | MetricRecord) else None


def read_int_field(content: RecordDict, record: str, key: str) -> int:
    """A whole number in a metric or config record; ValueError if there is none."""
    value = _value_in(content, record, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the message carries no whole number {record}.{key}")
    return value


def read_bytes_field(content: RecordDict, record: str, key: str) -> bytes:
    """A byte string in a config record; ValueError if there is none."""
    value = _value_in(content, record, key)
    if not isinstance(value, bytes):
        raise ValueError(f"the message carries no bytes {record}.{key}")
    return value


_NUMPY_STYPE = "numpy.ndarray"
_SEAL, _SEAL_BYTES = "seal", 32
_MAX_CONFIG_BYTES = 2**22  # bytes; what is longer goes in pieces, as Flower sends arrays
_VECTOR_HEADER = re.compile(
    rb"\x93NUMPY\x01\0..\{'descr': '([<>|]?[iuf][1248])', 'fortran_order': False, 'shape': \(([0-9]{1,15}),\), \}",
    re.DOTALL,
)
"""The header of a vector of numbers, at the beginning of its bytes."""


class _VectorFormat(NamedTuple):
    """Layout that a header describes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    header: bytes
    dtype_name: str
    """Of the type; NumPy takes 5 µs to make one."""

    @property
    def length(self) -> int:
        """Bytes of header and values."""
        return len(self.header) + math.prod(self.shape) * self.dtype.itemsize

    def decode(self, content: bytes) -> NDArray[Any]:
        return np.frombuffer(content, self.dtype, offset=len(self.header)).reshape(self.shape)


def encode_array(values: NDArray[Any]) -> Array:
    """A Flower Array."""
    values = np.ascontiguousarray(values)
    layout = _vector_format(values.dtype.str, values.shape)
    return build_array(
        layout.dtype_name, values.shape, _NUMPY_STYPE, b"".join((layout.header, values.data))
    )  # one copy


def decode_vector(given: bytes | Array) -> NDArray[Any]:
    """The numbers over the bytes of a vector or a Flower Array, without a copy; ValueError if it is malformed."""
    values = _decode_bytes(given) if isinstance(given, bytes) else _decode_array(given)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":  # an archive, words, dates
        raise ValueError("an array that is none of plain numbers")
    return values


def _decode_array(given: Array) -> NDArray[Any]:
    try:
        layout = _vector_format(given.dtype, tuple(given.shape))
        if (
            given.stype == _NUMPY_STYPE
            and len(given.data) == layout.length
            and given.data.startswith(layout.header)
        ):
            return layout.decode(given.data)
        return given.numpy()  # another .npy version or memory order; NumPy itself refuses what is malformed
    except Exception as error:  # of NumPy, zipfile, tokenize, …: what a stranger sends decides
        raise ValueError(f"an array that cannot be read: {error}") from None


def seal_vector(name: str, values: NDArray[Any]) -> RecordDict:
    """A message's content: one vector whose bytes cannot be guessed, under a pad that goes with them: `opened_in`.

    Guarantee: the objects of the message look random to whoever does not have all of it, whatever the vector is.
    The server has, and reads it: this hides nothing from it.
    """
    seal = secrets.token_bytes(_SEAL_BYTES)
    return vector_content(name, encode_array(_xor_pad(np.ascontiguousarray(values), seal)), {_SEAL: seal})


def unseal_vector(content: RecordDict, name: str) -> NDArray[Any]:
    """The one vector of this name, sealed or as simulations send it; ValueError if there is none."""
    values = read_array(content, name)
    seal = _value_in(content, CONFIG, _SEAL)
    if seal is None:
        return values
    if not isinstance(seal, bytes) or len(seal) != _SEAL_BYTES:
        raise ValueError(f"the {name} is sealed with something else than {_SEAL_BYTES} bytes")
    return _xor_pad(values, seal)


def _xor_pad(values: NDArray[Any], seal: bytes) -> NDArray[Any]:
    """The same type and shape, every byte with one of SHAKE-256 of the seal: twice is not at all."""
    pad = np.frombuffer(hashlib.shake_256(seal).digest(values.nbytes), np.uint8)
    padded: NDArray[Any] = (values.reshape(-1).view(np.uint8) ^ pad).view(values.dtype).reshape(values.shape)
    return padded


def vector_content(name: str, array: Array, config: Mapping[str, Any]) -> RecordDict:
    """A message's content: one vector, and values beside it."""
    return build_record(RecordDict, vector_records(name, array, config))


def vector_records(name: str, array: Array, config: Mapping[str, Any]) -> dict[str, Any]:
    """The records of `with_vector`."""
    if len(array.data) <= _MAX_CONFIG_BYTES:
        return {CONFIG: build_record(ConfigRecord, {**config, name: array.data})}
    return {name: build_record(ArrayRecord, {"vector": array}), CONFIG: build_record(ConfigRecord, {**config})}


def read_raw_vector(content: RecordDict, name: str) -> bytes | Array:
    """The one vector of this name, as it came; ValueError if there is none."""
    if isinstance(given := _value_in(content, CONFIG, name), bytes):
        return given
    arrays = record_values(content).get(name)
    if not isinstance(arrays, ArrayRecord) or len(record_values(arrays)) != 1:
        raise ValueError(f"the message carries no {name!r} vector")
    (array,) = record_values(arrays).values()
    return cast(Array, array)


def read_array(content: RecordDict, name: str) -> NDArray[Any]:
    """The one vector of this name, read-only, of plain numbers; ValueError if there is none."""
    return decode_vector(read_raw_vector(content, name))


def _decode_bytes(content: bytes) -> NDArray[Any]:
    """ValueError for anything but what `array_of` makes of a vector: nothing else of a header is looked at."""
    found = _VECTOR_HEADER.match(content)
    try:
        layout = None if found is None else _vector_format(found[1].decode(), (int(found[2]),))
    except TypeError:  # a type that NumPy does not have
        layout = None
    if layout is None or len(content) != layout.length or not content.startswith(layout.header):
        raise ValueError("a vector whose bytes are not what they announce")
    return layout.decode(content)


@lru_cache(maxsize=256)
def _vector_format(dtype: str, shape: tuple[int, ...]) -> _VectorFormat:
    kind, buffer = np.dtype(dtype), io.BytesIO()
    npy.write_array_header_1_0(buffer, {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": shape})
    return _VectorFormat(kind, shape, buffer.getvalue(), kind.name)


# Tensors: torch is imported when one is asked for


class RecordCounts(NamedTuple):
    """Number of records of a round that took part, and of those that were clipped."""

    drawn: int
    clipped: int | None
    """None if they are not counted: integers are not asked what became of their increments."""

    def add(self, others: "RecordCounts") -> "RecordCounts":
        clipped = None if self.clipped is None or others.clipped is None else self.clipped + others.clipped
        return RecordCounts(self.drawn + others.drawn, clipped)

    @property
    def fraction_clipped(self) -> float | None:
        """Share of records that were clipped, or None if they are not counted."""
        return None if self.clipped is None else self.clipped / max(1, self.drawn)


def decode_tensor(array: Array) -> "Tensor":
    """A tensor over the bytes of a Flower Array, without a copy; ValueError if the array is malformed.

    The bytes are immutable, so the tensor may not be written into.
    """
    return _to_tensor(decode_vector(array))


def to_array_record(vector: "Tensor") -> ArrayRecord:
    """An array record that holds one vector."""
    record = ArrayRecord()  # filling it afterwards skips a copy of every array
    record["vector"] = encode_array(vector.numpy())
    return record


def query_content(query: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
    """Make the content of a query: an array record of one vector, and values beside it."""
    return vector_content("query", next(iter(query.values())), {**config, "t": t})


def release_content(release: "Tensor", counts: RecordCounts | None) -> RecordDict:
    """Counts of records are a release that no accountant knows: simulations send them, silos do not."""
    records: dict[str, Any] = vector_records("release", encode_array(release.numpy()), {})
    if counts is not None:
        told = {name: count for name, count in counts._asdict().items() if count is not None}
        records["metrics"] = build_record(MetricRecord, told)
    return build_record(RecordDict, records)


def read_counts(content: RecordDict) -> RecordCounts | None:
    """The counts beside a release, None if there are none; ValueError if they are malformed."""
    metrics = record_values(content).get("metrics")
    if metrics is None:
        return None
    drawn = read_int_field(content, "metrics", "drawn")
    return RecordCounts(
        drawn, read_int_field(content, "metrics", "clipped") if "clipped" in record_values(metrics) else None
    )


def read_tensor(content: RecordDict, name: str) -> "Tensor":
    """The one vector of this name, sealed or not; ValueError if there is none."""
    return _to_tensor(unseal_vector(content, name))


def read_shared_tensor(content: RecordDict, name: str) -> "Tensor":
    """`vector_in` for what many silos of one process are sent: the same tensor wherever the bytes are the same.

    It lies where torch puts its own, so that no silo has to copy it there.
    """
    given = read_raw_vector(content, name)
    if isinstance(given, bytes):
        return _cached_tensor(given, None)
    return _cached_tensor(given.data, (given.dtype, tuple(given.shape), given.stype))


@lru_cache(maxsize=1)  # a second one would keep the vector of a round that is over
def _cached_tensor(data: bytes, described: tuple[str, tuple[int, ...], str] | None) -> "Tensor":
    """Python keeps the hash of immutable bytes, and compares two names of the same bytes without reading them."""
    return _to_tensor(decode_vector(data if described is None else build_array(*described, data))).clone()


def _to_tensor(values: NDArray[Any]) -> "Tensor":
    try:
        return cast("Tensor", _load_torch().from_numpy(values))
    except TypeError as error:
        raise ValueError(f"an array that cannot be read: {error}") from None


@lru_cache(maxsize=1)
def _load_torch() -> Any:
    """Return torch, after it has warned once that it makes tensors over immutable bytes."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.from_numpy(np.frombuffer(bytes(8), np.float32))
    return torch
