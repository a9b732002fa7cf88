"""The unpickler: arrays and plain values come out, everything else is refused before it runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.data.formats import unpickle_arrays


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def test_arrays_and_plain_values_come_out() -> None:
    values = {
        "data": np.arange(6, dtype=np.float32).reshape(2, 3),
        "labels": [1, 2],
        "pair": (7, "x"),
    }
    read = unpickle_arrays(pickle.dumps(values, protocol=4))
    np.testing.assert_array_equal(read["data"], values["data"], strict=True)
    assert read["labels"] == [1, 2]
    assert read["pair"] == (7, "x")


def test_numpys_older_name_is_read_too() -> None:
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
def test_a_command_is_refused_and_not_run(tmp_path: Path, protocol: int, wrap: Any) -> None:
    content = pickle.dumps(wrap(Calls(os.system, f"touch {tmp_path}/ran")), protocol=protocol)
    with pytest.raises(InputError, match=r"only NumPy arrays are read|asks for"):
        unpickle_arrays(content)
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)  # the plain unpickler does run it: the pickle above is a real attack
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("bad", [eval, getattr, np.load, np.memmap, pickle.loads])
def test_other_functions_are_refused_by_name(bad: Any) -> None:
    with pytest.raises(InputError, match=f"asks for .*{bad.__name__}: only NumPy arrays"):
        unpickle_arrays(pickle.dumps(bad))


def test_an_array_of_objects_carries_nothing_in(tmp_path: Path) -> None:
    objects = np.array([Calls(os.system, f"touch {tmp_path}/ran")], dtype=object)
    with pytest.raises(InputError, match="only NumPy arrays"):
        unpickle_arrays(pickle.dumps(objects, protocol=4))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(np.arange(9), protocol=4)[:40]])
def test_half_a_pickle_is_an_input_error(content: bytes) -> None:
    with pytest.raises(InputError, match="not a whole pickle"):
        unpickle_arrays(content)
