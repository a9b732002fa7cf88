"""What silos send over a SuperLink, which hands an object to every SuperNode that knows its bytes' SHA-256."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from numpy.typing import NDArray

from fedpriv.clients import app as proxy
from fedpriv.protocol.messages import (
    PROTOCOL_VERSION,
    decode_vector,
    encode_array,
    read_array,
    read_tensor,
    seal_vector,
    vector_content,
)

VECTORS = [
    np.arange(5.0),
    np.arange(7850, dtype=np.float32),
    np.arange(9, dtype=np.int64) - 4,
    np.array([np.nan, -0.0, np.inf]),
    np.frombuffer(bytes(range(250)), np.uint8),
    np.zeros(2**20),  # too long for a value of a record
    np.empty(0),
]


every_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.dtype}-{len(vector)}")


def objects(content: RecordDict) -> set[str]:
    return set(get_all_nested_objects(content))


@every_vector
def test_guarantee_sealed_releases_of_equal_vectors_share_no_message_object(vector: NDArray[Any]) -> None:
    """Gains: whether a guess of another silo's exact sum is right, by asking for the object that it would be."""
    first, second = seal_vector("release", vector), seal_vector("release", vector)
    assert not objects(first) & objects(second)
    assert not objects(first) & objects(vector_content("release", encode_array(vector), {}))


@pytest.mark.usefixtures("flower_task")
@pytest.mark.parametrize("tests", [False, True])
def test_guard_replies_with_the_same_release_share_no_message_object(
    monkeypatch: pytest.MonkeyPatch, tests: bool
) -> None:
    """Training and evaluation: two answers with the same release have no object in common."""
    answer = proxy.GuardReply(np.arange(5.0), b"commit")
    monkeypatch.setattr(proxy, "ask_reply", lambda *_, **__: answer)
    query = Message(vector_content("query", encode_array(np.zeros(3)), {"t": 1}), 7, "train")
    config: dict[str, Any] = {"run-token": "run", "cell-json": "{}", "protocol": PROTOCOL_VERSION}
    context = Context(1, 7, {}, RecordDict(), config)
    first, second = (proxy.forward_query(query, context, Path("socket"), tests=tests).content for _ in range(2))
    assert not objects(first) & objects(second)
    assert read_tensor(first, "release").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@every_vector
def test_unsealing_recovers_the_sealed_vector(vector: NDArray[Any]) -> None:
    content = seal_vector("release", vector)
    opened = read_tensor(content, "release").numpy()
    assert opened.dtype == vector.dtype
    assert opened.tobytes() == vector.tobytes()
    if vector.any():
        assert read_array(content, "release").tobytes() != vector.tobytes()


@pytest.mark.parametrize("seal", [b"", bytes(31), bytes(33), "a" * 32, 3, [1, 2]])
def test_a_release_with_a_malformed_seal_is_refused(seal: Any) -> None:
    content = vector_content("release", encode_array(np.arange(5.0)), {"seal": seal})
    with pytest.raises(ValueError, match="sealed with something else"):
        read_tensor(content, "release")


def npy(values: NDArray[Any], save: Callable[..., None] = np.save) -> bytes:
    file = io.BytesIO()
    save(file, values)
    return file.getvalue()


ODD = {
    "an archive": npy(np.zeros(4), np.savez),
    "words": npy(np.array(["a", "b"])),
    "dates": npy(np.array(["2026-01-01"], "M8[D]")),
    "a record": npy(np.zeros(2, [("a", "f8")])),
    "complex": npy(np.zeros(2, np.complex128)),
    "nothing a place": npy(np.zeros(2, "V0")),
}


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_array_bytes_that_are_not_plain_numbers_raise_a_value_error(name: str, sealed: bool) -> None:
    """An archive ended the server by an AttributeError that named no silo (S5)."""
    described = Array("float64", (4,), "numpy.ndarray", ODD[name])
    config = ConfigRecord({"seal": bytes(32)} if sealed else {})
    with pytest.raises(ValueError, match=r"array"):
        read_tensor(RecordDict({"release": ArrayRecord({"vector": described}), "config": config}), "release")


HEADER = b"\x93NUMPY\x01\0\x01\0("
SOUND = encode_array(np.zeros(1, np.float32)).data


MALFORMED = [SOUND.replace(b"<f4", b"<f1"), SOUND.replace(b"<f4", b"<i8"), SOUND[:-1], HEADER]


@pytest.mark.parametrize("data", [*MALFORMED, b"PK\x03\x04" + bytes(20), b""])
def test_malformed_array_bytes_raise_a_value_error(data: bytes) -> None:
    """A silo that sends them is named, and the server does not fail."""
    described = Array("float32", (1,), "numpy.ndarray", data)
    for content in (
        RecordDict({"config": ConfigRecord({"release": data})}),
        RecordDict({"release": ArrayRecord({"v": described}), "config": ConfigRecord()}),
    ):
        with pytest.raises(ValueError, match=r"array|vector|bytes|buffer|dtype"):
            read_tensor(content, "release")
    with pytest.raises(ValueError):
        decode_vector(Array("float32", (10**23,), "numpy.ndarray", data))
