"""Dialysis out of a pickled data frame, read without pandas: rows, censoring, frames that ask for other things."""

import hashlib
import io
import os
import pickle
import sys
import zipfile
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.data import public
from fedpriv.data.fetch import default_data_root


class Held:
    """Stands for a class of pandas while a frame is pickled: arguments, then state."""

    def __init__(self, args: tuple[Any, ...], state: Any) -> None:
        self.given = args, state

    def __reduce__(self) -> tuple[Any, ...]:
        args, state = self.given
        return (type(self), args, state) if state is not None else (type(self), args)


@pytest.fixture
def pandas_names(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Held]]:
    made = {}
    for module, name in (
        ("pandas.core.frame", "DataFrame"), ("pandas.core.internals.managers", "BlockManager"),
        ("pandas._libs.internals", "_unpickle_block"), ("pandas.core.arrays.categorical", "Categorical"),
        ("pandas.core.dtypes.dtypes", "CategoricalDtype"), ("pandas.core.indexes.base", "_new_Index"),
    ):  # fmt: skip
        kind = type(name, (Held,), {"__module__": module, "__qualname__": name})
        for part in [module[:place] for place, letter in enumerate(module) if letter == "."] + [module]:
            if part not in sys.modules:
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        monkeypatch.setattr(sys.modules[module], name, kind, raising=False)
        made[name] = kind
    return made


def frame_of(kinds: dict[str, type[Held]], rows: list[tuple[int, int, int, int]]) -> bytes:
    """A pickled frame with (event, time, age, begin) of every patient, all of centre 120."""
    event, time, age, begin = np.array(rows, np.int64).T

    def block(values: Any) -> Held:
        return kinds["_unpickle_block"]((values, 0, 2), None)

    def words(names: list[str]) -> Held:
        index = kinds["_new_Index"]((None, {"data": np.array(names, object)}), None)
        kind = kinds["CategoricalDtype"]((), {"categories": index})
        return kinds["Categorical"]((), (kind, np.zeros(len(rows), np.int8)))

    blocks = (
        block(np.array([np.arange(len(rows)), event, time])), block(words(["120"])), block(words(["renal"])),
        block(np.array([age, begin])),
    )  # fmt: skip
    manager = kinds["BlockManager"]((blocks, []), None)
    return pickle.dumps(kinds["DataFrame"]((), {"_mgr": manager}))


def test_dialysis_patients_are_kept_only_if_their_first_year_is_known(pandas_names: dict[str, type[Held]]) -> None:
    frame = frame_of(
        pandas_names,
        [
            (1, 3, 50, 10),  # died in month 3
            (1, 12, 51, 33),  # died in month 12
            (1, 13, 52, 10),  # died later
            (0, 12, 53, 33),  # seen for a year, until the study ended
            (0, 11, 54, 10),  # lost from sight
            (1, 2, 55, 34),  # came in the last year: left out whatever happened
            (0, 11, 56, 34),
        ],
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr(public.DIALYSIS_FRAME, frame)
    rows = public.read_dialysis(zipfile.ZipFile(packed))
    kept = [(row["age"], row["first_year"]) for row in rows]
    assert kept == [("50", public.DEAD), ("51", public.DEAD), ("52", public.ALIVE), ("53", public.ALIVE)]
    assert rows[0] == {"centre": "120", "age": "50", "begin": "10", "disease": "renal", "first_year": public.DEAD}


class Hostile:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, getattr, __import__])
def test_a_pickled_frame_that_calls_other_functions_is_refused(function: Any) -> None:
    with pytest.raises(InputError, match="only NumPy arrays are read"):
        public.read_patients(pickle.dumps(Hostile(function, "1")))


@pytest.mark.parametrize("frame", [b"", b"\x80\x05", pickle.dumps([]), pickle.dumps({"_mgr": 1})])
def test_a_pickled_frame_of_another_layout_is_refused_in_one_line(frame: bytes) -> None:
    with pytest.raises(InputError, match=r"not laid out as that of SurvSet 0\.2\.11") as refused:
        public.read_patients(frame)
    assert "\n" not in str(refused.value)


def test_the_cached_dialysis_table_matches_its_hash_and_expected_counts() -> None:
    path = default_data_root() / public.DIALYSIS / public.TABLE_FILE
    if not path.is_file():
        pytest.skip("dialysis is not in the cache")
    content = path.read_bytes()
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == public.PUBLIC_TABLES[public.DIALYSIS].sha256
    lines = content.decode().splitlines()
    assert len(lines) == 4226
    assert {line.split(",")[0] for line in lines[1:]} == set(public.CENTRES)
    assert sum(line.endswith(public.DEAD) for line in lines[1:]) == 978
