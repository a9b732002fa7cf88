"""Files of data sets: IDX and pickles, of which nothing is read that is not whole, nor run."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.data.formats import read_idx, unpickle_arrays, write_idx

byte_arrays = arrays.arrays(np.uint8, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx") / "values"


@given(values=byte_arrays)
def test_byte_arrays_survive_an_idx_round_trip(path: Path, values: NDArray[np.uint8]) -> None:
    write_idx(path, values)
    read = read_idx(path)
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, values, strict=True)


@given(values=byte_arrays, data=st.data())
def test_a_truncated_idx_file_is_refused(path: Path, values: NDArray[np.uint8], data: st.DataObject) -> None:
    write_idx(path, values)
    content = path.read_bytes()
    kept = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:kept])
    with pytest.raises(InputError, match=str(path)):
        read_idx(path)


def test_written_bytes_follow_the_idx_format(tmp_path: Path) -> None:
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
        (b"\x00\x00\x08\x41" + struct.pack(">65I", *[1] * 65) + b"1", "1 bytes of data.* = 1"),
        (b"\x00\x00\x08\x03" + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1), "0 bytes of data.* = 0"),
    ],
)
def test_the_error_tells_what_is_wrong_with_an_idx_file(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "values").write_bytes(content)
    with pytest.raises(InputError, match=f"values: .*{said}"):
        read_idx(tmp_path / "values")


def test_a_missing_idx_file_raises_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent: cannot be read \(No such file"):
        read_idx(tmp_path / "absent")


def test_idx_files_are_written_only_from_uint8_arrays(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="from uint8, not int64"):
        write_idx(tmp_path / "values", np.arange(3))  # type: ignore[arg-type]
    assert not (tmp_path / "values").exists()


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def test_arrays_and_plain_values_are_loaded_from_a_pickle() -> None:
    values = {"data": np.arange(6, dtype=np.float32).reshape(2, 3), "labels": [1, 2], "pair": (7, "x")}
    read = unpickle_arrays(pickle.dumps(values, protocol=4))
    np.testing.assert_array_equal(read["data"], values["data"], strict=True)
    assert read["labels"] == [1, 2]
    assert read["pair"] == (7, "x")


def test_pickles_with_the_older_numpy_module_name_are_loaded() -> None:
    content = pickle.dumps(np.arange(3), protocol=4)
    new = b"\x8c\x16numpy._core.multiarray"
    assert new in content
    older = content.replace(new, b"\x8c\x15numpy.core.multiarray")
    frame = older.index(b"\x95") + 1  # the length of the frame, now one byte less
    length = int.from_bytes(older[frame : frame + 8], "little") - 1
    older = older[:frame] + length.to_bytes(8, "little") + older[frame + 8 :]
    np.testing.assert_array_equal(unpickle_arrays(older), np.arange(3))


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("wrap", [lambda bad: bad, lambda bad: [np.arange(2), {"inner": bad}]])
def test_a_shell_command_in_a_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int, wrap: Any) -> None:
    content = pickle.dumps(wrap(Calls(os.system, f"touch {tmp_path}/ran")), protocol=protocol)
    with pytest.raises(InputError, match=r"only NumPy arrays are read|asks for"):
        unpickle_arrays(content)
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)  # the plain unpickler does run it: the pickle above is a real attack
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("bad", [eval, getattr, np.load, np.memmap, pickle.loads])
def test_pickles_of_other_functions_are_refused_by_function_name(bad: Any) -> None:
    with pytest.raises(InputError, match=f"asks for .*{bad.__name__}: only NumPy arrays"):
        unpickle_arrays(pickle.dumps(bad))


def test_a_pickled_array_of_objects_is_refused_without_running_code(tmp_path: Path) -> None:
    objects = np.array([Calls(os.system, f"touch {tmp_path}/ran")], dtype=object)
    with pytest.raises(InputError, match="only NumPy arrays"):
        unpickle_arrays(pickle.dumps(objects, protocol=4))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(np.arange(9), protocol=4)[:40]])
def test_an_incomplete_or_invalid_pickle_raises_an_input_error(content: bytes) -> None:
    with pytest.raises(InputError, match="not a whole pickle"):
        unpickle_arrays(content)
