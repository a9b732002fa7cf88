"""The table of models: how raw images become features, and which loss they get."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.objectives import Objective, PhaseRetrieval, SoftmaxRegression


class ModelSettings(BaseModel):
    """A model's own keys of the scenario's [model] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class Model:
    """One row of the table."""

    settings: type[ModelSettings]
    features: Callable[[NDArray[np.uint8], torch.dtype, Any], Tensor]
    """From images (n, ...) of bytes to features (n, ...), record by record."""
    objective: Callable[[Sequence[int], int, torch.dtype, Any], Objective]
    """From the shape of one record's features and the number of classes."""
    regression: bool = False
    """Whether the labels are real numbers, as those of a data set without classes are."""


class LinearSettings(ModelSettings):
    feature_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="images with a larger norm (of pixels / 255) are scaled down to it, each by itself"
    )


def pixels_and_bias(images: NDArray[np.uint8], dtype: torch.dtype, settings: LinearSettings) -> Tensor:
    """Pixels divided by 255, scaled to the norm allowed, and a constant 1: (n, pixels + 1)."""
    pixels = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)).to(dtype) / 255.0
    if settings.feature_norm is not None:
        norms = torch.linalg.vector_norm(pixels, dim=1, keepdim=True)
        pixels *= (settings.feature_norm / norms).clamp(max=1.0)
    return torch.cat([pixels, torch.ones(len(pixels), 1, dtype=dtype)], dim=1)


def _softmax_regression(
    shape: Sequence[int], classes: int, dtype: torch.dtype, settings: LinearSettings
) -> SoftmaxRegression:
    """max‖z‖ is √(pixels + 1) for pixels in [0, 1], or √(feature_norm² + 1)."""
    (features,) = shape
    largest = math.sqrt(features)
    if settings.feature_norm is not None:
        largest = min(largest, math.hypot(settings.feature_norm, 1.0))
    return SoftmaxRegression(features, classes, feature_norm=largest, dtype=dtype)


SOFTMAX_REGRESSION = Model(LinearSettings, pixels_and_bias, _softmax_regression)


def _phase_retrieval(power: Literal[1, 2]) -> Model:
    """Unit measurement vectors as they are."""

    def features(measurements: NDArray[Any], dtype: torch.dtype, _settings: ModelSettings) -> Tensor:
        return torch.from_numpy(measurements).to(dtype)

    def objective(
        shape: Sequence[int], _classes: int, dtype: torch.dtype, _settings: ModelSettings
    ) -> PhaseRetrieval:
        (width,) = shape
        return PhaseRetrieval(width, power, feature_norm=1.0, dtype=dtype)

    return Model(ModelSettings, features, objective, regression=True)


MODELS = {
    "softmax-regression": SOFTMAX_REGRESSION,
    "amplitude-phase-retrieval": _phase_retrieval(1),
    "robust-phase-retrieval": _phase_retrieval(2),
}


def model_named(name: str) -> Model:
    if name not in MODELS:
        raise InputError(f"model.name = {name!r}: known models are {', '.join(map(repr, MODELS))}")
    return MODELS[name]
