"""The table of models: how raw images become features, and which loss they get."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.objectives import Objective, SoftmaxRegression


@dataclass(frozen=True)
class Model:
    """One row: `features` maps images (n, ...) of bytes to (n, f); `objective` takes (f, classes, dtype)."""

    features: Callable[[NDArray[np.uint8], torch.dtype], Tensor]
    objective: Callable[[int, int, torch.dtype], Objective]


def pixels_and_bias(images: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Pixels divided by 255 and a constant 1: (n, pixels + 1), every norm at most √(pixels + 1)."""
    pixels = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)).to(dtype) / 255.0
    return torch.cat([pixels, torch.ones(len(pixels), 1, dtype=dtype)], dim=1)


SOFTMAX_REGRESSION = Model(
    features=pixels_and_bias,
    objective=lambda features, classes, dtype: SoftmaxRegression(
        features, classes, feature_norm=math.sqrt(features), dtype=dtype
    ),
)

MODELS = {"softmax-regression": SOFTMAX_REGRESSION}


def model_named(name: str) -> Model:
    if name not in MODELS:
        raise InputError(f"model.name = {name!r}: known models are {', '.join(map(repr, MODELS))}")
    return MODELS[name]
