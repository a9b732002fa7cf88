"""Arrays on the wire are Flower's own, byte for byte."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedpriv.protocol.arrays import array_of, is_finite, tensor_of, vector_in
from fedpriv.protocol.messages import bytes_in, number_in


@pytest.mark.parametrize("values", [np.zeros(0), np.arange(5.0), np.ones((2, 3), np.float32)])
def test_encoding_is_byte_identical_to_flowers(values: np.ndarray) -> None:
    ours, theirs = array_of(values), Array(values)
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (
        theirs.dtype,
        theirs.shape,
        theirs.stype,
        theirs.data,
    )
    assert torch.equal(tensor_of(theirs), torch.from_numpy(values))


def test_decoding_falls_back_to_numpy_for_other_layouts() -> None:
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert torch.equal(tensor_of(Array(fortran)), torch.from_numpy(fortran.copy()))


def test_decoding_copies_nothing_and_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    array = array_of(torch.arange(3.0))
    decoded = tensor_of(array)
    assert decoded.data_ptr() == np.frombuffer(array.data, np.float32, offset=len(array.data) - 12).ctypes.data
    assert not recwarn.list


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_finiteness(bad: float) -> None:
    vector = torch.randn(7850)
    assert is_finite(vector)
    vector[17] = bad
    assert not is_finite(vector)
    vector[18] = -bad
    assert not is_finite(vector)


def test_missing_or_mistyped_content_is_named() -> None:
    content = RecordDict({"query": ArrayRecord(), "config": ConfigRecord({"t": True, "b": b"x"})})
    with pytest.raises(ValueError, match="no 'query' vector"):
        vector_in(content, "query")
    with pytest.raises(ValueError, match=r"no whole number config\.t"):
        number_in(content, "config", "t")
    with pytest.raises(ValueError, match=r"no bytes config\.t"):
        bytes_in(content, "config", "t")
    assert bytes_in(content, "config", "b") == b"x"
