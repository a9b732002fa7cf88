"""An app's list of arrays and the guard's flat vector: the same numbers, in the order of a state_dict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Shapes of the arrays of a model, in the order of its state_dict, and the type of the guard's vector."""

    shapes: tuple[Shape, ...]
    dtype: str

    @staticmethod
    def of(arrays: Sequence[NDArray[Any]], names: Sequence[str], dtype: str, asked: Sequence[Shape]) -> "Layout":
        """The layout of `arrays`; InputError in one line unless they are floats of the guard's shapes, `asked`.

        Names are for messages only: the guard's model may call its arrays otherwise.
        """
        if len(arrays) != len(asked):
            raise InputError(
                f"the app's model has {len(arrays)} arrays, the guard's has {len(asked)}: allow.models and "
                "model.name have to name the same network (buffers, as BatchNorm keeps them, are arrays too)"
            )
        for number, (array, name, shape) in enumerate(zip(arrays, names, asked, strict=True)):
            if array.shape != shape:
                raise InputError(
                    f"array {number}, {name!r}, has shape {array.shape} in the app's model and {shape} in the "
                    "guard's: model.name has to name the same network, its layers in the same order"
                )
            if array.dtype.kind != "f":
                raise InputError(
                    f"array {number}, {name!r}, is {array.dtype}: parameters are floating-point numbers"
                )
        return Layout(tuple(asked), dtype)

    def flat(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The arrays one behind the other: (d,), of the guard's type.

        A server's optimizer may have made other floats of them: Flower's FedAdam sends float64.
        """
        with np.errstate(over="ignore"):  # what does not fit is infinite, and refused by the guard
            return np.concatenate([np.ravel(array).astype(self.dtype) for array in arrays])

    def split(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        """`flat`, undone."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [piece.reshape(shape) for piece, shape in zip(np.split(vector, ends), self.shapes, strict=True)]
