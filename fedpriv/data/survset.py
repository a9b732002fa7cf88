"""Dialysis out of the package SurvSet: 67 centres, and whether a patient lived a year after the first treatment.

The package holds a pickled data frame.  It is read by an unpickler that knows NumPy arrays and nothing else: a
class of pandas that the file names becomes an inert record of what the file gave it, and none of its code runs.

What the table is, and what censoring does to it:

| column of the package | here |
|---|---|
| `fac_center` | the silo |
| `fac_disease`, `num_age` | features |
| `num_begin`, months from the start of the study to the first treatment | a feature, and who is left out |
| `time` in months, `event` | the target: died within `HORIZON` months of the first treatment, or lived longer |

The study ended after `END` months.  1,665 patients came in the last year of it and cannot be seen for a year,
whatever happens; they are left out by the calendar, which looks at no outcome.  915 whom the centre lost from
sight before a year without a death (a transplant, a move) have no known target and are left out, too: that
looks at what happened.  So the share of deaths here, 978 of 4,225, is that of patients who died or stayed a
year, above that of all patients, and a model of it is no estimate of survival.  A survival model would keep
them all, as `read_survival` does: months and whether a death was seen then, of all 6,805.
"""

import io
import pickle
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.data.formats import admitted_array
from fedpriv.data.schema import Column, Survival, TableSchema

FRAME = "SurvSet/resources/pickles/Dialysis.pickle"
HORIZON, END = 12, 45
"""Months."""
DEAD, ALIVE, CENSORED = "died", "lived", "censored"
_INTS, _CENTRES, _DISEASES, _NUMBERS = range(4)
"""The blocks of the frame."""


class _Inert:
    """What a pickle says of an object of a class that is not loaded: arguments and state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> "_Inert":
        made = object.__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _from_buffer(buffer: bytearray, kind: np.dtype[Any], shape: tuple[int, ...], order: str) -> NDArray[Any]:
    return np.frombuffer(buffer, kind).reshape(shape, order="F" if order == "F" else "C")


_PANDAS = frozenset(
    {
        ("pandas.core.frame", "DataFrame"),
        ("pandas.core.internals.managers", "BlockManager"),
        ("pandas._libs.internals", "_unpickle_block"),
        ("pandas._libs.arrays", "__pyx_unpickle_NDArrayBacked"),
        ("pandas.core.arrays.categorical", "Categorical"),
        ("pandas.core.dtypes.dtypes", "CategoricalDtype"),
        ("pandas.core.indexes.base", "_new_Index"),
        ("pandas.core.indexes.base", "Index"),
        ("pandas.core.indexes.range", "RangeIndex"),
        ("pandas.core.arrays.integer", "IntegerArray"),
        ("pandas.core.arrays.integer", "Int32Dtype"),
    }
)


class _FrameUnpickler(pickle.Unpickler):
    """Arrays, slices, and inert records in place of pandas' classes; InputError for any other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PANDAS:
            return type(name, (_Inert,), {})
        if (module, name) == ("builtins", "slice"):
            return slice
        if (module, name) == ("numpy.core.numeric", "_frombuffer"):
            return _from_buffer
        return admitted_array(module, name)


def read_dialysis(wheel: zipfile.ZipFile) -> list[dict[str, str]]:
    """The 4,225 patients whose first year is known, in the order of the package.

    InputError for a frame that is not laid out as that of SurvSet 0.2.11.
    """
    return patients(wheel.read(FRAME))


def read_survival(wheel: zipfile.ZipFile) -> list[dict[str, str]]:
    """All 6,805 patients with their months and whether they died then; InputError as for `read_dialysis`."""
    event, time, age, begin, centre, disease = _columns(wheel.read(FRAME))
    return [
        {
            "centre": centre[row],
            "age": str(age[row]),
            "begin": str(begin[row]),
            "disease": disease[row],
            "months": str(time[row]),
            "seen": DEAD if event[row] == 1 else CENSORED,
        }
        for row in range(len(time))
    ]


def patients(frame: bytes) -> list[dict[str, str]]:
    """The rows of a pickled frame; see `read_dialysis`."""
    event, time, age, begin, centre, disease = _columns(frame)
    died = (event == 1) & (time <= HORIZON)
    known = (begin <= END - HORIZON) & (died | (time >= HORIZON))
    return [
        {
            "centre": centre[row],
            "age": str(age[row]),
            "begin": str(begin[row]),
            "disease": disease[row],
            "first_year": DEAD if died[row] else ALIVE,
        }
        for row in np.flatnonzero(known).tolist()
    ]


def _columns(frame: bytes) -> tuple[Any, Any, Any, Any, list[str], list[str]]:
    """Event, time, age, begin, centre and disease of every row; InputError for a frame of another layout."""
    try:
        found = _FrameUnpickler(io.BytesIO(frame)).load()
        blocks = [block.args[0] for block in found.state["_mgr"].args[0]]
        _, event, time = blocks[_INTS]
        age, begin = blocks[_NUMBERS]
        centre, disease = (_words(blocks[place].state) for place in (_CENTRES, _DISEASES))
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
    ) as error:
        raise InputError(f"{FRAME}: not laid out as that of SurvSet 0.2.11 ({error})") from None
    return event, time, age, begin, centre, disease


def _words(state: Any) -> list[str]:
    """The words of a categorical column, row by row."""
    kind, codes = state[:2]
    data = kind.state["categories"].args[1]["data"]
    names = data if isinstance(data, np.ndarray) else data.state["_data"]
    return [str(names[code]) for code in codes]


CENTRES = (
    "120", "128", "184", "217", "344", "561", "562", "641", "741", "743", "917", "918", "936", "954", "983", "984",
    "1029", "1039", "1048", "1051", "1053", "1061", "1064", "1070", "1071", "1072", "1093", "1100", "1159", "1372",
    "1437", "1654", "1692", "1699", "2026", "2210", "2211", "2242", "2320", "2351", "2611", "2632", "2811", "2844",
    "2987", "3064", "3596", "3675", "4122", "4157", "4163", "4779", "4825", "5089", "5135", "5419", "5423", "5432",
    "5481", "5495", "5513", "5514", "5543", "5653", "5681", "5692", "5768",
)  # fmt: skip

SCHEMA = TableSchema(
    public=True,
    target="first_year",
    classes=(ALIVE, DEAD),
    site="centre",
    sites=CENTRES,
    test_share=0.25,
    columns={
        "age": Column(range=(0.0, 100.0)),
        "begin": Column(range=(0.0, 45.0)),
        "disease": Column(values=("congen", "diabetes", "hypert", "other", "renal")),
    },
)

SURVIVAL_SCHEMA = TableSchema(
    public=True,
    target="seen",
    classes=(CENSORED, DEAD),
    site="centre",
    sites=CENTRES,
    test_share=0.0,
    columns={**SCHEMA.columns, "months": Column(range=(0.0, 45.0))},
)
"""Every patient, for curves of survival: nobody is put aside for testing."""

TIMES_SCHEMA = SURVIVAL_SCHEMA.model_copy(
    update={
        "test_share": 0.25,
        "columns": SCHEMA.columns,
        "survival": Survival(time="months", edges=(0.0, 3.0, 6.0, 12.0, 18.0, 24.0, 36.0)),
    }
)
"""Every patient, for models of the hazard in six bins of months."""
