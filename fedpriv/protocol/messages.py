"""What server and silos say to each other over Flower, without torch: a silo's proxy has to start fast.

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
"""

from typing import NamedTuple

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedpriv.errors import printable
from fedpriv.protocol.unchecked import values_in

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
