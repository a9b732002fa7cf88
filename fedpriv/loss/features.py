"""Maps from one image to its features; none of them looks at another image.

A map of one record by itself, with public constants, releases nothing: the record's increment is clipped, whatever
its features are.  Statistics of the training set, such as its mean image, would have to be paid for.

Frozen features of a pre-trained module are such a map too.  Its weights are named by their SHA-256 (weights.py),
so silo and server have the same map or none.
"""

import copy
import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.core.errors import CodeError, InputError
from fedpriv.data.layout import parts_of
from fedpriv.loss.alone import each_alone, own, reason_of
from fedpriv.loss.clipping import upper_norm
from fedpriv.loss.imported import build, misfit, state_of

DIRECTIONS = 8
CELL = 4
IMAGES = 512
"""How many are handled at a time."""


def pixels(images: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Pixels divided by 255, numbers and tokens as they are: (n, ...) -> (n, features), inputs in a row."""
    if images.dtype.names is not None:
        return torch.cat([pixels(np.ascontiguousarray(part), dtype) for part in parts_of(images).values()], dim=1)
    if images.dtype != np.uint8:
        given = images.astype(np.int64) if images.dtype.kind == "u" else images  # torch has no arithmetic of those
        return torch.from_numpy(given.reshape(len(given), -1)).to(dtype)
    return torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)).to(dtype) / 255.0


def orientation_histograms(images: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """How much edge there is in 8 directions, in cells of 4 x 4 pixels: (n, h, w) -> (n, 8 · h/4 · w/4).

    Central differences, an edge's length shared in proportion between the two nearest directions, and averaged
    over the cell: the histograms of oriented gradients of Dalal & Triggs 2005, section 6, without their
    overlapping blocks.  Every number is at most 1/√2.  InputError for images that are no bytes, are not gray or
    do not divide into cells.
    """
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1] % CELL or images.shape[2] % CELL:
        raise InputError(
            f'model.features = "orientations" takes gray images whose sides are multiples of {CELL}, not of '
            f"shape {images.shape[1:]}"
        )
    gray = pixels(images, dtype).view(images.shape)
    nothing = torch.zeros(1, DIRECTIONS * math.prod(side // CELL for side in images.shape[1:]), dtype=dtype)
    rows = torch.empty(len(images), nothing.shape[1], dtype=dtype)
    for place, row in enumerate(each_alone(_histograms, (gray,), nothing)):
        rows[place] = row
    return rows


def _histograms(gray: Tensor) -> Tensor:
    """(1, h, w) -> (1, 8 · h/4 · w/4)."""
    padded = functional.pad(gray, (1, 1, 1, 1))
    across = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) / 2.0
    down = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) / 2.0
    length, angle = torch.hypot(across, down), torch.atan2(down, across) * (DIRECTIONS / (2.0 * math.pi))
    half, directions = DIRECTIONS / 2, torch.arange(DIRECTIONS, dtype=gray.dtype).view(-1, 1, 1)
    edges = length * (1.0 - ((angle - directions + half) % DIRECTIONS - half).abs()).clamp(min=0.0)
    return functional.avg_pool2d(edges, CELL).view(1, -1)


def scaled(features: Tensor, norm: float, *, exactly: bool) -> Tensor:
    """Each row scaled to Euclidean norm at most `norm`, or exactly; zeros stay zeros.  (n, f) -> (n, f).

    Guarantee: a row of the result is a function of its own row, bit for bit.  A length is taken of one row by
    itself; where a bound in any order of additions shows that a row is short enough, its factor is 1 without it.
    """
    longer = torch.ones(len(features), dtype=torch.bool) if exactly else ~_certainly_within(features, norm)
    if not longer.any():
        return features
    rows = longer.nonzero()[:, 0]
    each = (own(features[row : row + 1]) for row in rows.tolist())
    lengths = torch.cat([torch.linalg.vector_norm(row, dim=1, keepdim=True) for row in each])
    factors = norm / lengths.clamp(min=torch.finfo(features.dtype).tiny)
    every = features.new_ones(len(features), 1)
    every[rows] = factors if exactly else factors.clamp(max=1.0)
    return features * every


def _certainly_within(features: Tensor, norm: float) -> Tensor:
    """Find the rows whose lengths come out at most `norm`, in whatever order they add up; none with a NaN."""
    roundings = (features.shape[1] + 16.0) * torch.finfo(features.dtype).eps
    return upper_norm(features) * (1.0 + roundings) <= norm


def frozen_features(
    values: Tensor, path: str, arguments: dict[str, Any], weights: str, shape: tuple[int, ...]
) -> Tensor:
    """(n, f) -> (n, features) by the module at `path` with these weights, one record after another.

    Guarantee: a record's features are a function of it and the weights, bit for bit, whatever the module does with
    a batch: each record is one of its own.  A record on which the module raises has zeros for features, and no
    other record's change; buffers are what they were before every record.  The code is trusted to keep nothing
    else between calls.  InputError if the weights are not here, or the module fails or draws random numbers on a
    record of zeros.
    """
    module = copy.deepcopy(_loaded(path, json.dumps(arguments, sort_keys=True), weights)).to(values.dtype)
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def of_one(record: Tensor) -> Tensor:
        for buffer, before in kept:
            buffer.copy_(before)
        given: Tensor = module(record.view(1, *shape) if shape else record)
        return given.reshape(1, -1)

    nothing = _of_zeros(of_one, values.new_zeros(1, values.shape[1]), path)
    rows = values.new_empty(len(values), nothing.shape[1])
    for place, row in enumerate(each_alone(of_one, (values,), nothing)):
        rows[place] = row
    return rows


def _of_zeros(of_one: Callable[[Tensor], Tensor], record: Tensor, path: str) -> Tensor:
    """Zeros of the shape and the type of a record's features."""
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            given = of_one(record)
    except Exception as error:  # whatever a stranger's module does
        raise CodeError(
            f"model.backbone = {path!r}: fails on records of {record.shape[1]} values", reason_of(error)
        ) from None
    if not torch.equal(before, torch.get_rng_state()):
        raise InputError(f"model.backbone = {path!r}: draws random numbers; features are a record's own")
    return record.new_zeros(given.shape)


@lru_cache(maxsize=2)
def _loaded(path: str, arguments: str, weights: str) -> nn.Module:
    state = state_of(weights, "model.backbone_weights", path)
    with torch.device("cpu"):
        module = build(path, "model.backbone", (), json.loads(arguments))
        try:
            module.load_state_dict(state)
        except Exception as error:  # of another module
            raise misfit(weights, "model.backbone_weights", path, error) from None
    return module.eval().requires_grad_(False)
