"""Terms of an app's run: a scenario made from keywords, and the message keys that carry it to silos.

Every message of a strategy has the terms in `config`, beside the keys of the app's own `train_config`.

Named arrays of a model, and the flat vector of the same numbers in the order of a state_dict.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.core.errors import InputError, RunError, printable
from fedpriv.loss.frozen import frozen_of, trained_of
from fedpriv.noise.trust import CURATOR, RECORD
from fedpriv.papers.table import algorithm_named
from fedpriv.plan.calibration import fitted
from fedpriv.plan.task import DTYPES
from fedpriv.protocol.messages import CONFIG, array_of, number_in, tensor_of, values_in
from fedpriv.scenario.load import load_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.sections import FederationSection, PrivacySection

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


ARRAYS = "arrays"
ROUND = "server-round"
CELL = "fedpriv-cell"
SEEDED = "fedpriv-seeded"


class Terms(NamedTuple):
    """Terms of a run, as one message carries them."""

    t: int
    """Number of the round, or 0 before round 1, when silos say who they are."""
    cell_json: str
    seeded: bool
    """Whether noise follows from the scenario's seed, as in a simulation."""


def terms_in(content: RecordDict) -> Terms:
    """Read the terms of a message.  RunError if another strategy sent it."""
    config = values_in(content).get(CONFIG)
    values = values_in(config) if isinstance(config, ConfigRecord) else {}
    cell_json, seeded = values.get(CELL), values.get(SEEDED)
    if not isinstance(cell_json, str) or not isinstance(seeded, bool):
        raise RunError(
            "the server's strategy is none of fedpriv.flower: PrivateClient answers DPMu2FL and its sisters; "
            "for a strategy of Flower's use guard_of"
        )
    return Terms(number_in(content, CONFIG, ROUND), cell_json, seeded)


def terms_config(cell: Cell, *, seeded: bool) -> ConfigRecord:
    """Make the keys by which a strategy sends the terms."""
    return ConfigRecord({CELL: json.dumps(cell.canonical()), SEEDED: seeded})


def cell_of_scenario(path: Path, row: str | None, seed: int | None) -> Cell:
    """Resolve the single run of a scenario file.  InputError for another row, and for a sweep."""
    points = load_scenario(path, [] if seed is None else [f"seed={seed}"]).points
    if len(points) != 1:
        raise InputError(f"{path}: sweep: an app is one run, and this stands for {len(points)}")
    cell = points[0].cell
    if row not in (None, cell.algorithm.name):
        raise InputError(f"{path}: algorithm.name = {cell.algorithm.name!r}: this strategy is {row!r}")
    return _checked(cell, str(path))


def cell_of_keywords(row: str, keywords: Mapping[str, Any], seed: int | None) -> Cell:
    """Resolve the run that keywords describe.

    A keyword is a key of [federation] or [privacy], or else one of the row's own keys.  `model` is a section.
    """
    row_keys = algorithm_named(row).settings.model_fields
    tree: dict[str, Any] = {
        "name": row,
        "seed": seed or 0,
        "data": {"name": "synthetic"},  # ignored: silos have their own records
        "federation": {},
        "privacy": {},
        "algorithm": {"name": row},
    }
    for key, value in keywords.items():
        sections = {"federation": FederationSection.model_fields, "privacy": PrivacySection.model_fields}
        section_names = [name for name, fields in sections.items() if key in fields and key not in row_keys]
        if key == "model":
            tree["model"] = {"name": value} if isinstance(value, str) else value
        else:
            tree[(*section_names, "algorithm")[0]][key] = value
    return _checked(resolve_cell(tree, row), row)


def with_dtype(cell: Cell, dtype: str) -> Cell:
    """Return the same run in the type of the app's arrays, with its noise mechanism fitted."""
    tree = cell.canonical()
    return fitted(resolve_cell({**tree, "run": {**tree["run"], "dtype": dtype}}, cell.name))


def _checked(cell: Cell, source: str) -> Cell:
    """Return `cell`, or refuse a run that an app's own module and records cannot do."""
    algorithm = cell.algorithm
    reason = ""
    if algorithm.row.model is not None:
        reason = f"algorithm.name = {algorithm.name!r}: asks silos for more than gradients of a module"
    elif algorithm.trust == CURATOR.name:
        reason = f"algorithm.trust = {algorithm.trust!r}: a curator has all records, and no silos"
    elif cell.privacy.unit != RECORD.name:
        reason = f"privacy.unit = {cell.privacy.unit!r}: an app's records are protected one by one"
    elif cell.data.scale is not None:
        reason = "data.scale: an app scales its records by itself, with public numbers"
    elif not cell.model.row.evaluated:
        reason = f"model.name = {cell.model.name!r}: no module can be this model"
    elif cell.evaluation is not None:
        reason = "evaluation: the silos of an app evaluate by its own @app.evaluate()"
    if reason:
        raise InputError(f"{source}: {reason}; use fedpriv run")
    return cell
