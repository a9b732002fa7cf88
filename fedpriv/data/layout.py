"""Describe one record by public shapes and types: its inputs, its labels, and how they lie in one flat row.

| records | a module gets |
|---|---|
| bytes (uint8) | pixels / 255 |
| floats | numbers |
| other whole numbers | tokens: int64 |
| booleans, of several inputs | a mask: bool |

Several inputs of a record are the fields of one structured array, in the order in which a module takes them.  One
label a record is what `Records.labels` holds; several, (n, …), lie behind the inputs in the row of features, and
`Records.labels` says then only whether the record counts.  Whole numbers lie among floats exactly, since none is
beyond 2^24 (`check_records`).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

LARGEST = 2**24
"""The largest whole number of a record: float32 holds all up to it."""
IGNORED = -100
"""A class among several labels of a record that is left out of its loss."""

Kind = Literal["numbers", "tokens", "mask"]


class Input(NamedTuple):
    """One input of a module, of one record."""

    shape: tuple[int, ...]
    kind: Kind

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout(tuple[int, ...]):
    """Shape (width,) of one record's features as a model gets them, and what lies there."""

    inputs: tuple[Input, ...]
    """One behind the other, from the first place on."""
    labels: tuple[int, ...]
    """Shape of a record's labels, which lie behind the inputs; () of one label, which does not."""
    classes: bool
    """Whether labels are classes; numbers otherwise."""

    def __new__(
        cls, width: int, inputs: tuple[Input, ...], labels: tuple[int, ...] = (), *, classes: bool = True
    ) -> Self:
        made = super().__new__(cls, (width,))
        made.inputs, made.labels, made.classes = inputs, labels, classes
        return made

    @property
    def width(self) -> int:
        """How many values the inputs have."""
        return self[0] - (math.prod(self.labels) if self.labels else 0)


def layout_of(shape: tuple[int, ...]) -> Layout:
    """`shape`, or if it says no more, that of so many numbers with one label."""
    return shape if isinstance(shape, Layout) else Layout(math.prod(shape), (Input(tuple(shape), "numbers"),))


def inputs_of(records: NDArray[Any]) -> tuple[Input, ...]:
    """The inputs of records (n, …), or of a structured array (n,) of several inputs."""
    return tuple(Input(part.shape[1:], _kind(part.dtype)) for part in parts_of(records).values())


def parts_of(records: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The inputs by name, (n, …) each; one that has no name is ''."""
    names = records.dtype.names
    return {"": records} if names is None else {name: records[name] for name in names}


def together(inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Several inputs, (n, …) each, as one structured array (n,)."""
    made = np.zeros(
        len(next(iter(inputs.values()))),
        np.dtype([(name, each.dtype, each.shape[1:]) for name, each in inputs.items()]),
    )
    for name, each in inputs.items():
        made[name] = each
    return made


def in_order(inputs: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Several inputs without names, in the order in which a module takes them."""
    return together({f"input{place}": each for place, each in enumerate(inputs)})


def _kind(dtype: np.dtype[Any]) -> Kind:
    if dtype.kind == "b":
        return "mask"
    return "tokens" if dtype.kind in "iu" and dtype != np.uint8 else "numbers"
