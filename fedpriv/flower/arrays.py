"""Named arrays of a model, and the flat vector of the same numbers in the order of a state_dict."""

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
from fedpriv.plan.task import DTYPES
from fedpriv.protocol.messages import array_of, tensor_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelLayout:
    """Shapes of a model's arrays in the order of its state_dict, and the type of their flat vector."""

    shapes: tuple[Shape, ...]
    dtype: str

    @staticmethod
    def of(
        arrays: Sequence[NDArray[Any]], names: Sequence[str], dtype: str, guard_shapes: Sequence[Shape]
    ) -> "ModelLayout":
        """Check an app's arrays against the guard's model, and return their layout.

        Args:
            arrays: Arrays of the app's model.
            names: Names of these arrays, for messages only.  The guard's model may have other names.
            dtype: Type of the guard's vector.
            guard_shapes: Shapes of the arrays of the guard's model.

        Raises:
            InputError: `arrays` are not floats of these shapes.
        """
        if len(arrays) != len(guard_shapes):
            raise InputError(
                f"the app's model has {len(arrays)} arrays, the guard's has {len(guard_shapes)}: allow.models and "
                "model.name have to name the same network (buffers, as BatchNorm keeps them, are arrays too)"
            )
        for number, (array, name, shape) in enumerate(zip(arrays, names, guard_shapes, strict=True)):
            if array.shape != shape:
                raise InputError(
                    f"array {number}, {name!r}, has shape {array.shape} in the app's model and {shape} in the "
                    "guard's: model.name has to name the same network, its layers in the same order"
                )
            if array.dtype.kind != "f":
                raise InputError(
                    f"array {number}, {name!r}, is {array.dtype}: parameters are floating-point numbers"
                )
        return ModelLayout(tuple(guard_shapes), dtype)

    def flat(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Concatenate the arrays to a vector (d,) of the layout's type.

        The arrays may have another type: Flower's FedAdam sends float64.
        """
        with np.errstate(over="ignore"):  # a value that does not fit becomes infinite, and the guard refuses it
            return np.concatenate([np.ravel(array).astype(self.dtype) for array in arrays])

    def split(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        """Split a vector (d,) into the arrays, the inverse of `flat`."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [piece.reshape(shape) for piece, shape in zip(np.split(vector, ends), self.shapes, strict=True)]


@dataclass(frozen=True)
class NamedArrays:
    """Names of the arrays of a model, and their layout in a flat vector."""

    names: tuple[str, ...]
    layout: ModelLayout

    @staticmethod
    def of(arrays: ArrayRecord) -> "NamedArrays":
        """Take names, shapes and type from arrays.  InputError if these are no trainable parameters."""
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
        """Concatenate the arrays to a vector (d,)."""
        parts = [tensor_of(array).flatten() for array in arrays.values()]
        return torch.cat(parts)

    def record(self, vector: Tensor) -> ArrayRecord:
        """Split a vector (d,) into named arrays."""
        record = ArrayRecord()  # ArrayRecord(arrays) would copy every array
        for name, values in zip(self.names, self.layout.split(vector.numpy()), strict=True):
            record[name] = array_of(values)
        return record

    def check_module(self, module: nn.Module) -> None:
        """Check that the names and shapes are those of the module's trainable parameters, in its order.

        InputError names the first array that differs.
        """
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
