"""Modules, batches and sums that tests of losses start from."""

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedpriv.loss.layered import LayeredObjective
from fedpriv.loss.models import find_model
from fedpriv.loss.module import ModuleObjective, unflatten_parameters
from fedpriv.loss.objective import Batch, BatchLayout, Increment, Objective, Query, Records
from fedpriv.noise.integers.increments import sum_integer_increments

F32, F64 = torch.float32, torch.float64
Patch = pytest.MonkeyPatch
UNCLIPPED = 1e9
NORM = 2**36
"""Integers of a clip, in tests of lattices."""


class Net(nn.Module):
    """A module by a function of itself and a batch."""

    def __init__(self, call: Callable[..., Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, values: Tensor) -> Tensor:
        return self.call(self, values)


def measure_calls(patch: Patch, owner: Any, name: str, measure: Callable[..., Any]) -> list[Any]:
    """Measures of each call of a function from now on, by its result and its arguments."""
    measures, function = list[Any](), getattr(owner, name)

    def call(*given: Any) -> Any:
        result = function(*given)
        measures.append(measure(result, *given))
        return result

    patch.setattr(owner, name, call)
    return measures


def first_rows(t: int, silos: Sequence[tuple[int, int]]) -> BatchLayout:
    """The slots of round t for rows 0, 1, … of each silo; `silos` has (number, records)."""
    rows = [np.arange(count, dtype=np.int64) for _, count in silos]
    return BatchLayout(t, tuple(silos), np.concatenate([np.empty(0, np.int64), *rows]))


def pick(records: Records, rows: Any) -> Records:
    """The records at these rows: a slice, numbers or a mask; one row number takes the axis away."""
    return Records(*(column[rows] for column in records))


def pick_one(records: Records, row: int) -> Records:
    return pick(records, slice(row, row + 1))


def split(records: Records) -> list[Records]:
    """Each record by itself, with its axis."""
    return [pick_one(records, row) for row in range(len(records.labels))]


def random_records(count: int, features: int, classes: int = 3, seed: int = 0) -> Records:
    """Normal features and uniform classes, by numpy."""
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.standard_normal((count, features)))
    return Records(values, torch.from_numpy(generator.integers(0, classes, count)))


def ones(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def all_but(count: int, row: int, dtype: torch.dtype = F64) -> Tensor:
    """Weights of 1 for all records but this one, which is absent."""
    return (torch.arange(count) != row).to(dtype)


def sum_increments(
    objective: Objective, query: Query | Tensor, records: Records, clip: Any = UNCLIPPED, weights: Any = None
) -> Increment:
    """Add up increments for a query, or gradients at one point; without weights each record counts once."""
    query = Query((query,)) if isinstance(query, Tensor) else query
    weights = ones(len(records.labels)) if weights is None else weights
    return objective.increment(query, Batch(records, weights), clip)


def list_increments(objective: Objective, query: Query | Tensor, records: Records, clip: float) -> Tensor:
    """Clipped increments of each record or unit, (B, d)."""
    query, count = Query((query,)) if isinstance(query, Tensor) else query, len(records.labels)
    return objective.per_record(query, Batch(records, ones(count)), torch.arange(count), clip)


def list_integers(
    objective: Objective, query: Query | Tensor, records: Records, clip: float = 1.0, norm: int = NORM
) -> NDArray[np.int64]:
    """Increments of each record alone on the lattice, of `norm` integers for a clip; (B, d)."""
    query = Query((query,)) if isinstance(query, Tensor) else query
    alone = [sum_integer_increments(objective, query, clip, one, norm, norm / clip) for one in split(records)]
    return np.array(alone, np.int64)


def find_extent_by_force(vectors: NDArray[np.int64]) -> tuple[float, float]:
    """The largest norm, and the largest distance of two vectors or of one and none, by `NORM`."""
    vectors = np.vstack([vectors, np.zeros_like(vectors[:1])])
    floats = vectors.astype(float)
    farthest = [int(np.linalg.norm(floats - row, axis=1).argmax()) for row in floats]

    def length(vector: NDArray[np.int64]) -> float:
        return math.sqrt(sum(value**2 for value in vector.tolist())) / NORM

    return max(map(length, vectors)), max(map(length, vectors - vectors[farthest]))


def autograd_increments(module: nn.Module, query: Query | Tensor, records: Records) -> Tensor:
    """Unclipped increments of the cross-entropy, (B, d): each record by itself, in a copy of the module."""
    query, rows = Query((query,)) if isinstance(query, Tensor) else query, []
    for features, label in zip(*records, strict=True):
        row = torch.zeros_like(query.points[0])
        for point, coefficient in zip(query.points, query.coefficients, strict=True):
            net = copy.deepcopy(module)
            leaves = {key: part.clone().requires_grad_() for key, part in unflatten_parameters(net, point).items()}
            outputs = functional_call(net, leaves, (features.unsqueeze(0),))
            loss = functional.cross_entropy(outputs, label.unsqueeze(0))
            parts = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True)
            row += coefficient * torch.cat([part.to_dense().flatten() for part in parts])
        rows.append(row)
    return torch.stack(rows)


def save_weights(folder: Path, state: dict[str, Any]) -> str:
    """Store a module's state as a folder of FEDPRIV_WEIGHTS has it; its digest."""
    torch.save(state, folder / "w.pt")
    digest = hashlib.sha256((folder / "w.pt").read_bytes()).hexdigest()
    (folder / "w.pt").rename(folder / f"{digest}.pt")
    return f"sha256:{digest}"


def make_imported(name: str, features: int = 6, **settings: Any) -> ModuleObjective | LayeredObjective:
    """The objective of a module by its import path, for 3 classes."""
    row = find_model(name)
    objective = row.objective((features,), 3, F64, row.settings.model_validate(settings))
    assert isinstance(objective, ModuleObjective | LayeredObjective)
    return objective
