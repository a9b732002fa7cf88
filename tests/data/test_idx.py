"""IDX files: what is written is read back, and nothing that is not whole is read."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.data.formats import read_idx, write_idx

byte_arrays = arrays.arrays(np.uint8, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx") / "values"


@given(values=byte_arrays)
def test_what_is_written_is_read_back(path: Path, values: NDArray[np.uint8]) -> None:
    write_idx(path, values)
    read = read_idx(path)
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, values, strict=True)


@given(values=byte_arrays, data=st.data())
def test_a_file_cut_short_is_refused(path: Path, values: NDArray[np.uint8], data: st.DataObject) -> None:
    write_idx(path, values)
    content = path.read_bytes()
    kept = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:kept])
    with pytest.raises(InputError, match=str(path)):
        read_idx(path)


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    write_idx(tmp_path / "values", np.array([[1, 2, 3], [4, 5, 6]], np.uint8).T)
    content = (tmp_path / "values").read_bytes()
    assert content == bytes.fromhex("00000802 00000003 00000002 01 04 02 05 03 06")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not an IDX file"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00\x00\x00\x00", "is not an IDX file of unsigned bytes"),
        (b"\x00\x00\x08\x03\x00\x00\x00\x02", "header is cut short: 8 of 16 bytes"),
        (b"\x00\x00\x08\x02" + struct.pack(">2I", 2, 3) + b"12345", "5 bytes of data.* 2 x 3 = 6"),
        (b"\x00\x00\x08\x01" + struct.pack(">I", 2) + b"123", "3 bytes of data.* 2 = 2"),
        (b"\x00\x00\x08\x03" + struct.pack(">3I", 2**31, 2**31, 4), f"0 bytes of data.* = {2**64}"),
    ],
)
def test_the_error_says_what_is_wrong_with_the_file(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "values").write_bytes(content)
    with pytest.raises(InputError, match=f"values: .*{said}"):
        read_idx(tmp_path / "values")


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent: cannot be read \(No such file"):
        read_idx(tmp_path / "absent")


def test_only_bytes_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="from uint8, not int64"):
        write_idx(tmp_path / "values", np.arange(3))  # type: ignore[arg-type]
    assert not (tmp_path / "values").exists()
