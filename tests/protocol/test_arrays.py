"""Arrays on the wire are Flower's own, byte for byte."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedpriv.protocol import messages
from fedpriv.protocol.messages import (
    decode_tensor,
    encode_array,
    query_content,
    read_bytes_field,
    read_int_field,
    read_shared_tensor,
    read_tensor,
    to_array_record,
    vector_content,
)  # fmt: skip
from fedpriv.rounds.round import is_finite


@pytest.mark.parametrize("values", [np.zeros(0), np.arange(5.0), np.ones((2, 3), np.float32)])
def test_array_encoding_is_byte_identical_to_that_of_flower(values: NDArray[Any]) -> None:
    ours, theirs = encode_array(values), Array(values)
    for name in ("dtype", "shape", "stype", "data"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert torch.equal(decode_tensor(theirs), torch.from_numpy(values))


def test_decoding_falls_back_to_numpy_for_other_layouts() -> None:
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert torch.equal(decode_tensor(Array(fortran)), torch.from_numpy(fortran.copy()))


def test_array_decoding_copies_no_data_and_emits_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    array = encode_array(torch.arange(3.0))
    decoded = decode_tensor(array)
    assert decoded.data_ptr() == np.frombuffer(array.data, np.float32, offset=len(array.data) - 12).ctypes.data
    assert not recwarn.list


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_vectors_with_nan_or_infinite_values_are_detected(bad: float) -> None:
    vector = torch.randn(7850)
    assert is_finite(vector)
    vector[17] = bad
    assert not is_finite(vector)
    vector[18] = -bad
    assert not is_finite(vector)


@pytest.mark.parametrize("values", [np.arange(3.0), np.asfortranarray(np.ones((2, 3), np.float32))])
def test_a_query_is_one_tensor_for_all_silos_of_a_process(values: NDArray[Any]) -> None:
    first, same = (RecordDict({"query": ArrayRecord({"v": Array(values)})}) for _ in range(2))
    other = RecordDict({"query": ArrayRecord({"v": Array(values + 1)})})
    shared = read_shared_tensor(first, "query")
    assert np.array_equal(shared.numpy(), values)
    assert shared.numpy().dtype == values.dtype
    assert read_shared_tensor(same, "query") is shared
    assert np.array_equal(read_shared_tensor(other, "query").numpy(), values + 1)


@pytest.mark.parametrize(("length", "is_long"), [(2**22 - 128, False), (2**22 - 127, True)])
def test_a_vector_of_more_than_4_mib_is_an_array_that_flower_sends_in_pieces(length: int, is_long: bool) -> None:
    content = vector_content("query", encode_array(np.zeros(length, np.uint8)), {"t": 1})
    assert sorted(content) == (["config", "query"] if is_long else ["config"])
    assert len(read_tensor(content, "query")) == length


def test_missing_or_mistyped_content_is_named() -> None:
    content = RecordDict({"query": ArrayRecord(), "config": ConfigRecord({"t": True, "b": b"x"})})
    with pytest.raises(ValueError, match="no 'query' vector"):
        read_tensor(content, "query")
    with pytest.raises(ValueError, match=r"no whole number config\.t"):
        read_int_field(content, "config", "t")
    with pytest.raises(ValueError, match=r"no bytes config\.t"):
        read_bytes_field(content, "config", "t")
    assert read_bytes_field(content, "config", "b") == b"x"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("length", [0, 1, 1000])
def test_short_vectors_travel_in_the_config_record_and_long_ones_in_an_array_record(
    dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower asks for every object by itself, on each of a message's ways."""
    query = torch.arange(length).to(dtype)
    for longest, records in ((2**22, {"config"}), (1000, {"config", "query"} if length == 1000 else {"config"})):
        monkeypatch.setattr(messages, "_MAX_CONFIG_BYTES", longest)
        content = query_content(to_array_record(query), 3, ConfigRecord({"keys": b"k"}))
        assert set(content) == records
        read = read_tensor(content, "query")
        assert read.dtype == dtype
        assert torch.equal(read, query)
        assert read_int_field(content, "config", "t") == 3
        assert read_bytes_field(content, "config", "keys") == b"k"
