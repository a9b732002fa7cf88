"""Data sets of one's own by name: what a Python program or an imported file adds."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpriv.data.dataset import Dataset
from fedpriv.data.fetch import COMPUTED, ORIGINS
from fedpriv.data.own import check_records
from fedpriv.errors import InputError
from fedpriv.extensions import changed, load_extensions

Part = tuple[ArrayLike, ArrayLike]
"""Records (n, ...), bytes or numbers, and labels (n,)."""

_ADDED: dict[str, tuple[Callable[[], tuple[Part, Part]], int | None]] = {}


def add_data(name: str, load: Callable[[], tuple[Part, Part]], classes: int | None = None) -> None:
    """Make `data.name = name` mean what `load()` returns: (records, labels) for training, and for the test.

    `classes` is 0 for a regression.  Left out, it is one more than the largest label where labels are whole
    numbers, which is public from then on, and 0 where they are not.  One's own data set of that name is replaced.

    InputError for a name that fedpriv has already, or that is not made of lower-case letters, digits and dashes.
    """
    if name in (*ORIGINS, *COMPUTED):
        raise InputError(f"add_data: {name!r} is a data set of fedpriv; give yours another name")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InputError(f"add_data: name = {name!r}: expected lower-case letters, digits and dashes")
    _ADDED[name] = (load, classes)
    changed()


def added() -> list[str]:
    """The names that were added."""
    return list(_ADDED)


def is_added(name: str) -> bool:
    """Whether somebody added a data set of this name; imports extensions if it is not known here."""
    if name not in _ADDED and name not in (*ORIGINS, *COMPUTED):
        load_extensions()
    return name in _ADDED


def load_added(name: str) -> Dataset:
    """The data set, checked; InputError if something in it cannot be used."""
    load, classes = _ADDED[name]
    train, test = load()
    return dataset_of(name, train, test, classes)


def dataset_of(name: str, train: Part, test: Part, classes: int | None) -> Dataset:
    """Arrays as a data set; see `add_data` for `classes`.  InputError if they cannot be used."""
    (records, labels), (test_records, test_labels) = (
        (_records(part[0]), np.asarray(part[1])) for part in (train, test)
    )
    if classes is None:
        classes = _classes(labels, test_labels)
    key = name if name == ARGUMENTS else f"data.name = {name!r}"
    for part, images, targets in (("train", records, labels), ("test", test_records, test_labels)):
        check_records(images, targets, classes, part if name == ARGUMENTS else f"{key}, {part} part")
    kinds = {array.dtype == np.uint8 for array in (records, test_records)}
    if records.shape[1:] != test_records.shape[1:] or len(kinds) > 1:
        raise InputError(
            f"{key}: training and test records must be alike, found {records.dtype} {records.shape} and "
            f"{test_records.dtype} {test_records.shape}"
        )
    kind = np.int64 if classes else np.float64
    return Dataset(name, records, labels.astype(kind), test_records, test_labels.astype(kind), classes)


ARGUMENTS = "train, test"
"""The name of such arrays while they are checked."""
GIVEN = "given-"
"""How the names of arrays begin that a program gave; nobody typed such a name."""


def called(name: str) -> str:
    """What an error calls a data set: its name, or the argument that it was given as."""
    return "train" if name.startswith(GIVEN) else name


def _records(values: ArrayLike) -> NDArray[Any]:
    """Whole numbers that are no bytes are numbers like any other."""
    array = np.asarray(values)
    whole = np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_
    return array.astype(np.float32) if whole and array.dtype != np.uint8 else array


def _classes(*labels: NDArray[Any]) -> int:
    whole = all(np.issubdtype(each.dtype, np.integer) or each.dtype == np.bool_ for each in labels)
    return max((int(each.max(initial=0)) for each in labels), default=0) + 1 if whole else 0
