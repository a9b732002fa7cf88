"""Arrays of a model with their names, shapes and type, and the flat vector that they are.

Both hold the same numbers, in the order of a state_dict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.core.errors import InputError, printable
from fedpriv.loss.frozen import frozen_of, trained_of
from fedpriv.protocol.arrays import tensor_of
from fedpriv.protocol.messages import array_of
from fedpriv.rounds.task import DTYPES

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelLayout:
    """Shapes of the arrays of a model, in the order of its state_dict, and the type of the guard's vector."""

    shapes: tuple[Shape, ...]
    dtype: str

    @staticmethod
    def of(
        arrays: Sequence[NDArray[Any]], names: Sequence[str], dtype: str, asked: Sequence[Shape]
    ) -> "ModelLayout":
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
        return ModelLayout(tuple(asked), dtype)

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


@dataclass(frozen=True)
class NamedArrays:
    """Names of the arrays of a model, and their layout in a flat vector."""

    names: tuple[str, ...]
    layout: ModelLayout

    @staticmethod
    def of(arrays: ArrayRecord) -> "NamedArrays":
        """Read off names, shapes and type.  InputError in one line for arrays that are no parameters."""
        if not arrays:
            raise InputError("initial_arrays: there are none; give ArrayRecord(net.state_dict())")
        for name, array in arrays.items():
            if array.dtype not in DTYPES:
                raise InputError(
                    f"array {printable(name)!r} is {array.dtype}, and parameters are float32 or float64: buffers, "
                    "as BatchNorm keeps them, would leave a silo without noise; GroupNorm has none"
                )
        dtypes = sorted({array.dtype for array in arrays.values()})
        if len(dtypes) > 1:
            raise InputError(f"initial_arrays: {' and '.join(dtypes)} are mixed; give all parameters one type")
        shapes = tuple(tuple(array.shape) for array in arrays.values())
        return NamedArrays(tuple(arrays), ModelLayout(shapes, dtypes[0]))

    def vector(self, arrays: ArrayRecord) -> Tensor:
        """The arrays one behind the other, (d,)."""
        parts = [tensor_of(array).flatten() for array in arrays.values()]
        return torch.cat(parts)

    def record(self, vector: Tensor) -> ArrayRecord:
        """`vector` (d,) as arrays with their names."""
        record = ArrayRecord()  # filling it afterwards skips a copy of every array
        for name, values in zip(self.names, self.layout.split(vector.numpy()), strict=True):
            record[name] = array_of(values)
        return record

    def check_module(self, module: nn.Module) -> None:
        """InputError unless these are the parameters that are trained in `module`, in its order."""
        trained = trained_of(module)
        own_arrays = list(zip(trained, (tuple(parameter.shape) for parameter in trained.values()), strict=True))
        server_arrays = list(zip(self.names, self.layout.shapes, strict=True))
        if own_arrays == server_arrays:
            return
        pairs = [pair for pair, other in zip(server_arrays, own_arrays, strict=False) if pair != other]
        name, shape = (*pairs, *server_arrays[len(own_arrays) :], *own_arrays[len(server_arrays) :])[0]
        reason = "its requires_grad is False" if name in frozen_of(module) else "it is none that is trained here"
        if name in trained:
            reason = f"here it has shape {tuple(trained[name].shape)}, or another place in the order"
        raise InputError(
            f"array {printable(name)!r} {shape} of the server: {reason}; server and clients need the same module, "
            "and the server sends its trained parameters and nothing else"
        )
