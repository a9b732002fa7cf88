"""Linear models: of features that the settings name, scaled, and a constant 1."""

import math
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.models.backbone import DIGEST, frozen_features
from fedpriv.models.features import IMAGES, orientation_histograms, pixels, scaled
from fedpriv.models.imported import is_import_path
from fedpriv.models.row import ModelSettings
from fedpriv.objectives import LeastSquares, LogisticRegression, SoftmaxRegression


class SoftmaxSettings(ModelSettings):
    """Softmax regression: G = √2 · max‖z‖ and L = max‖z‖²/2, so a smaller `feature_norm` lowers both."""

    features: Literal["pixels", "orientations"] = Field(
        "pixels", description="pixels / 255, or how much edge there is in 8 directions in cells of 4 x 4 pixels"
    )
    centre: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="a public constant that is subtracted from every pixel / 255"
    )
    feature_norm: Annotated[float, Field(ge=1e-9, le=1e12, allow_inf_nan=False)] | None = Field(
        None, description="images whose features have a larger norm are scaled down to it; the bias stays 1"
    )
    scaling: Literal["at-most", "exactly"] = Field(
        "at-most", description="whether images with a smaller norm are scaled up to `feature_norm` as well"
    )
    backbone: str | None = Field(
        None, description='"package.module:Name": a frozen torch module that maps a record to its features'
    )
    backbone_arguments: dict[str, Any] = Field({}, description="what the backbone is called with to be built")
    backbone_weights: str | None = Field(
        None, description='"sha256:…" of its state_dict, which lies as HEX.pt in $FEDPRIV_WEIGHTS'
    )
    backbone_shape: tuple[int, ...] = Field(
        (), strict=False, description="how the backbone sees a record, such as [3, 32, 32]; flat otherwise"
    )

    @property
    def code(self) -> tuple[str, ...]:
        return () if self.backbone is None else (self.backbone,)

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        if self.backbone is not None:
            if not is_import_path(self.backbone):
                raise ValueError(f"backbone = {self.backbone!r}: expected an import path, package.module:Name")
            if self.backbone_weights is None or DIGEST.fullmatch(self.backbone_weights) is None:
                raise ValueError('backbone needs backbone_weights = "sha256:…", of the file with its state_dict')
            if self.feature_norm is None or self.features != "pixels":
                raise ValueError('backbone needs feature_norm, and features = "pixels"')
        elif self.backbone_weights is not None or self.backbone_arguments or self.backbone_shape:
            raise ValueError("backbone_weights, backbone_arguments and backbone_shape belong to backbone")
        if self.features == "orientations" and self.centre:
            raise ValueError('centre is for features = "pixels"')
        if self.feature_norm is None and (self.features == "orientations" or self.scaling == "exactly"):
            raise ValueError('feature_norm is needed with features = "orientations" and with scaling = "exactly"')
        return self


class LinearSettings(SoftmaxSettings):
    """A linear score of the features and a constant 1."""

    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="of ‖x‖²/2 in every record's loss, the constant's weight included; clipped with it"
    )


class RidgeSettings(SoftmaxSettings):
    penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        description="of ‖x‖²/2 in every record's loss, the constant's weight included; clipped with it"
    )


def features_and_bias(images: NDArray[Any], dtype: torch.dtype, settings: SoftmaxSettings) -> Tensor:
    """The features that the settings name, scaled, and a constant 1: (n, features + 1).

    Each record is mapped by itself, so the features are no release about the others.  InputError for features that
    are numbers and have no `feature_norm`: nothing else bounds them.
    """
    if images.dtype != np.uint8 and settings.feature_norm is None:
        raise InputError("model.feature_norm: needed for features that are numbers, to bound a record's norm")
    at_once = len(images) if settings.backbone is not None else IMAGES
    whole: Tensor | None = None
    for start in range(0, max(1, len(images)), max(1, at_once)):
        values = _features(images[start : start + at_once], dtype, settings)
        if whole is None:  # formed once: copies of a million clients' records would not fit
            whole = torch.ones(len(images), values.shape[1] + 1, dtype=dtype)
        whole[start : start + len(values), :-1] = values
    assert whole is not None
    return whole


def _features(images: NDArray[Any], dtype: torch.dtype, settings: SoftmaxSettings) -> Tensor:
    if settings.backbone is not None:
        assert settings.backbone_weights is not None
        shown = pixels(images, dtype).sub(settings.centre)
        keys = (settings.backbone, settings.backbone_arguments, settings.backbone_weights, settings.backbone_shape)
        values = frozen_features(shown, *keys)
    elif settings.features == "orientations":
        values = orientation_histograms(images, dtype)
    else:
        values = pixels(images, dtype).sub(settings.centre)
    if settings.feature_norm is None:
        return values
    return scaled(values, settings.feature_norm, exactly=settings.scaling == "exactly")


def softmax_regression(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: SoftmaxSettings
) -> SoftmaxRegression:
    norm = _norm_of(shape, settings)
    plain = settings.feature_norm is None and settings.centre == 0.0
    levels = 255 if plain else grid_levels(shape[0], norm)
    return SoftmaxRegression(shape[0], classes, norm, dtype, levels=levels)


def grid_levels(features: int, norm: float) -> int | None:
    """How finely exact releases round features of norms up to `norm`: to multiples of 1/levels, a power of 2.

    So that integers of them stay below 2^16 and a record moves by at most 2^-10 of `norm`; None where it cannot.
    """
    levels = 2 ** math.floor(math.log2((2**16 - 1) / norm))
    return levels if levels >= 1 and 0.5 * math.sqrt(features) / levels <= norm * 2.0**-10 else None


def _norm_of(shape: tuple[int, ...], settings: SoftmaxSettings) -> float:
    """A bound on the norm of a record's features and its constant 1."""
    largest = settings.feature_norm
    if largest is None:
        largest = math.sqrt(shape[0] - 1) * max(settings.centre, 1.0 - settings.centre)
    return math.hypot(largest, 1.0)


def logistic_regression(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: LinearSettings
) -> LogisticRegression:
    if classes != 2:
        raise InputError(
            f'model.name = "logistic-regression" is for two classes, not {classes}; use "softmax-regression"'
        )
    norm = _norm_of(shape, settings)
    bounded = settings.penalty == 0.0
    return LogisticRegression(shape[0], norm, dtype=dtype, penalty=settings.penalty, convex=bounded)


def least_squares_of_scores(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: LinearSettings | RidgeSettings
) -> LeastSquares:
    """For any data: the model may be anywhere, so no bound on the gradients is known beside the clip."""
    norm = _norm_of(shape, settings)
    return LeastSquares(shape[0], norm, dtype=dtype, penalty=settings.penalty, radius=math.inf)
