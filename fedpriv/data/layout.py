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

MAX_INTEGER = 2**24
"""The largest whole number of a record: float32 holds all up to it."""
IGNORED_CLASS = -100
"""A class among several labels of a record that is left out of its loss."""

InputKind = Literal["numbers", "tokens", "mask"]


class InputLayout(NamedTuple):
    """One input of a module, of one record."""

    shape: tuple[int, ...]
    kind: InputKind

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class FeatureLayout(tuple[int, ...]):
    """Shape (width,) of one record's features as a model gets them, and what lies there."""

    inputs: tuple[InputLayout, ...]
    """One behind the other, from the first place on."""
    label_shape: tuple[int, ...]
    """Shape of a record's labels, which lie behind the inputs; () of one label, which does not."""
    labels_are_classes: bool
    """Whether labels are classes; numbers otherwise."""

    def __new__(
        cls,
        width: int,
        inputs: tuple[InputLayout, ...],
        label_shape: tuple[int, ...] = (),
        *,
        labels_are_classes: bool = True,
    ) -> Self:
        made = super().__new__(cls, (width,))
        made.inputs, made.label_shape, made.labels_are_classes = inputs, label_shape, labels_are_classes
        return made

    @property
    def input_width(self) -> int:
        """How many values the inputs have."""
        return self[0] - (math.prod(self.label_shape) if self.label_shape else 0)


def as_layout(shape: tuple[int, ...]) -> FeatureLayout:
    """`shape`, or if it says no more, that of so many numbers with one label."""
    return (
        shape
        if isinstance(shape, FeatureLayout)
        else FeatureLayout(math.prod(shape), (InputLayout(tuple(shape), "numbers"),))
    )


def describe_inputs(records: NDArray[Any]) -> tuple[InputLayout, ...]:
    """The inputs of records (n, …), or of a structured array (n,) of several inputs."""
    return tuple(InputLayout(part.shape[1:], _input_kind(part.dtype)) for part in split_inputs(records).values())


def split_inputs(records: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The inputs by name, (n, …) each; one that has no name is ''."""
    names = records.dtype.names
    return {"": records} if names is None else {name: records[name] for name in names}


def combine_inputs(inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Several inputs, (n, …) each, as one structured array (n,)."""
    made = np.zeros(
        len(next(iter(inputs.values()))),
        np.dtype([(name, each.dtype, each.shape[1:]) for name, each in inputs.items()]),
    )
    for name, each in inputs.items():
        made[name] = each
    return made


def combine_unnamed_inputs(inputs: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Several inputs without names, in the order in which a module takes them."""
    return combine_inputs({f"input{place}": each for place, each in enumerate(inputs)})


def _input_kind(dtype: np.dtype[Any]) -> InputKind:
    if dtype.kind == "b":
        return "mask"
    return "tokens" if dtype.kind in "iu" and dtype != np.uint8 else "numbers"
