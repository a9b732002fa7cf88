"""Describe the features of one record by public shapes and types, and their layout in a flat row.

| records | input of a module |
|---|---|
| bytes (uint8) | pixels / 255 |
| floats | numbers |
| other integers | tokens: int64 |
| booleans, among several inputs | a mask: bool |

Several inputs of a record are the fields of one structured array, in the order in which a module takes them.  A
single label of a record is in `Records.labels`.  Several labels, (n, …), stand behind the inputs in the row of
features.  Integers are exact among float32, since the absolute value of none exceeds 2^24 (`check_records`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError

MAX_INTEGER = 2**24
"""Largest absolute value of a record's integer, since float32 represents all integers up to this one."""
IGNORED_CLASS = -100
"""Class that is left out of the loss of a record with several labels."""

InputKind = Literal["numbers", "tokens", "mask"]


class InputLayout(NamedTuple):
    """Shape and kind of one input of a module, for one record."""

    shape: tuple[int, ...]
    """Shape of one record's input, without the axis of the records."""
    kind: InputKind
    """Numbers (bytes among them), tokens, or a mask of booleans."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class FeatureLayout(tuple[int, ...]):
    """Shape (width,) of one record's features in a model, with the layouts of its inputs and labels."""

    inputs: tuple[InputLayout, ...]
    """Layouts of the inputs, in a model of torch layers one after another from index 0 on."""
    label_shape: tuple[int, ...]
    """Shape of a record's labels behind the inputs, or () for one label, which is not in the row."""
    labels_are_classes: bool
    """Whether labels are classes, and not numbers."""

    def __new__(
        cls,
        width: int,
        inputs: tuple[InputLayout, ...],
        label_shape: tuple[int, ...] = (),
        *,
        labels_are_classes: bool = True,
    ) -> Self:
        layout = super().__new__(cls, (width,))
        layout.inputs, layout.label_shape, layout.labels_are_classes = inputs, label_shape, labels_are_classes
        return layout

    @property
    def input_width(self) -> int:
        """Number of features before the labels, which for a model of torch layers are the inputs."""
        return self[0] - (math.prod(self.label_shape) if self.label_shape else 0)


def as_layout(shape: tuple[int, ...]) -> FeatureLayout:
    """Return `shape` itself if it is a layout, else the layout of one input of numbers with one label."""
    return (
        shape
        if isinstance(shape, FeatureLayout)
        else FeatureLayout(math.prod(shape), (InputLayout(tuple(shape), "numbers"),))
    )


def describe_inputs(records: NDArray[Any]) -> tuple[InputLayout, ...]:
    """Return the layouts of the inputs of records (n, …), or of a structured array (n,) of several inputs."""
    return tuple(
        InputLayout(values.shape[1:], _input_kind(values.dtype)) for values in split_inputs(records).values()
    )


def split_inputs(records: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Split records into inputs by name, (n, …) each, with the name '' for a single input."""
    names = records.dtype.names
    return {"": records} if names is None else {name: records[name] for name in names}


def combine_inputs(inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Combine inputs, (n, …) each, to one structured array (n,).

    Args:
        inputs: One input or more, of the same n, by names that are not empty.

    Example:
        >>> combined = combine_inputs({"age": np.array([[1.0], [2.0]]), "sex": np.array([[0], [1]])})
        >>> combined.shape, combined.dtype.names
        ((2,), ('age', 'sex'))
    """
    combined = np.zeros(
        len(next(iter(inputs.values()))),
        np.dtype([(name, values.dtype, values.shape[1:]) for name, values in inputs.items()]),
    )
    for name, values in inputs.items():
        combined[name] = values
    return combined


def combine_unnamed_inputs(inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Combine several inputs (n, …) without names, in the order in which a module takes them.

    Raises:
        InputError: There is no input, an input has no axis, or inputs differ in their number of records.
    """
    if len(lengths := {column.shape[:1] for column in inputs}) != 1 or () in lengths:
        raise InputError(
            f"records: the inputs of a tuple have the shapes {', '.join(str(column.shape) for column in inputs)}; "
            "give as many records of each"
        )
    return combine_inputs({f"input{index}": values for index, values in enumerate(inputs)})


def _input_kind(dtype: np.dtype[Any]) -> InputKind:
    if dtype.kind == "b":
        return "mask"
    return "tokens" if dtype.kind in "iu" and dtype != np.uint8 else "numbers"
