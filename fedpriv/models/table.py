"""The table of models: how raw images become features, and which loss they get."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from fedpriv.data.fetch import LINEAR_REGRESSION, PHASE_RETRIEVAL
from fedpriv.data.synthetic import power_law
from fedpriv.errors import InputError, suggestion
from fedpriv.extensions import changed, load_extensions
from fedpriv.models.features import orientation_histograms, pixels, scaled
from fedpriv.objectives import (
    AbsoluteError,
    CrossEntropy,
    LeastSquares,
    LogisticRegression,
    Objective,
    PhaseRetrieval,
    SoftmaxRegression,
    SquaredError,
    objective_of,
)
from fedpriv.objectives.population import quadratic_in_ball


class ModelSettings(BaseModel):
    """A model's own keys of the scenario's [model] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class Model:
    """One row of the table; `settings` is the type of the row's own keys.

    `features` maps images (n, ...) of bytes to (n, f); `objective` takes the shape of one record's features,
    the number of classes, the dtype and the settings.
    """

    settings: type[ModelSettings]
    features: Callable[[NDArray[Any], torch.dtype, Any], Tensor]
    objective: Callable[[tuple[int, ...], int, torch.dtype, Any], Objective]
    regression: bool = False
    """Whether the labels are real numbers, as those of a data set without classes are."""
    only_for: str | None = None
    """The one data set that the objective's constants hold for; None if the features keep to them by themselves.

    Noise may rest on the smoothness: with other records it would be too little.
    """

    def check_data(self, name: str, data: str) -> None:
        """InputError if `data` is not what the constants of this row, called `name`, were derived from."""
        if self.only_for is not None and data != self.only_for:
            raise InputError(
                f"model.name = {name!r} is for data.name = {self.only_for!r} alone, not {data!r}: its smoothness "
                "and optimum are those of that data"
            )


class SoftmaxSettings(ModelSettings):
    """Softmax regression: G = √2 · max‖z‖ and L = max‖z‖²/2, so a smaller `feature_norm` lowers both."""

    features: Literal["pixels", "orientations"] = Field(
        "pixels", description="pixels / 255, or how much edge there is in 8 directions in cells of 4 x 4 pixels"
    )
    centre: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="a public constant that is subtracted from every pixel / 255"
    )
    feature_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="images whose features have a larger norm are scaled down to it; the bias stays 1"
    )
    scaling: Literal["at-most", "exactly"] = Field(
        "at-most", description="whether images with a smaller norm are scaled up to `feature_norm` as well"
    )

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        if self.features == "orientations" and self.centre:
            raise ValueError('centre is for features = "pixels"')
        if self.feature_norm is None and (self.features == "orientations" or self.scaling == "exactly"):
            raise ValueError('feature_norm is needed with features = "orientations" and with scaling = "exactly"')
        return self


class ModuleSettings(ModelSettings):
    """Models of torch layers."""

    initial_seed: Annotated[int, Field(ge=0)] = Field(0, description="the first model follows from it alone")


class PerceptronSettings(ModuleSettings):
    hidden: Annotated[int, Field(ge=1)] = Field(64, description="width of the hidden layer")


class LinearSettings(SoftmaxSettings):
    """A linear score of the features and a constant 1."""

    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="of ‖x‖²/2 in every record's loss, the constant's weight included; clipped with it"
    )


class RidgeSettings(SoftmaxSettings):
    penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        description="of ‖x‖²/2 in every record's loss, the constant's weight included; clipped with it"
    )


def flat_pixels(images: NDArray[Any], dtype: torch.dtype, _settings: ModelSettings) -> Tensor:
    """Pixels divided by 255, and features that are numbers as they are: (n, features)."""
    return pixels(images, dtype)


def features_and_bias(images: NDArray[Any], dtype: torch.dtype, settings: SoftmaxSettings) -> Tensor:
    """The features that the settings name, scaled, and a constant 1: (n, features + 1).

    Each record is mapped by itself, so the features are no release about the others.  InputError for features that
    are numbers and have no `feature_norm`: nothing else bounds them.
    """
    if images.dtype != np.uint8 and settings.feature_norm is None:
        raise InputError("model.feature_norm: needed for features that are numbers, to bound a record's norm")
    if settings.features == "orientations":
        values = orientation_histograms(images, dtype)
    else:
        values = pixels(images, dtype).sub(settings.centre)
    if settings.feature_norm is not None:
        values = scaled(values, settings.feature_norm, exactly=settings.scaling == "exactly")
    return torch.cat([values, torch.ones(len(values), 1, dtype=dtype)], dim=1)


def softmax_regression(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: SoftmaxSettings
) -> SoftmaxRegression:
    levels = 255 if settings.feature_norm is None and settings.centre == 0.0 else None  # else no bytes are left
    return SoftmaxRegression(shape[0], classes, _norm_of(shape, settings), dtype, levels=levels)


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


def perceptron(activation: type[nn.Module]) -> Model:
    """One hidden layer: features - hidden - classes."""

    def objective(
        shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: PerceptronSettings
    ) -> Objective:
        (features,) = shape
        net = nn.Sequential(
            nn.Linear(features, settings.hidden), activation(), nn.Linear(settings.hidden, classes)
        )
        return objective_of(net, features, CrossEntropy(), settings.initial_seed, dtype)

    return Model(PerceptronSettings, flat_pixels, objective)


def perceptron_regression(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: PerceptronSettings
) -> Objective:
    """One hidden layer with tanh and one output, under the squared error."""
    (features,) = shape
    net = nn.Sequential(nn.Linear(features, settings.hidden), nn.Tanh(), nn.Linear(settings.hidden, 1))
    return objective_of(net, features, SquaredError(), settings.initial_seed, dtype)


def rectified_regression(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: PerceptronSettings
) -> Objective:
    """One hidden layer of rectifiers and one output, under the absolute error: neither smooth nor convex.

    |⟨x, z⟩| is the sum of two rectifiers, so the sizes of phase retrieval are within its reach.
    """
    (features,) = shape
    net = nn.Sequential(nn.Linear(features, settings.hidden), nn.ReLU(), nn.Linear(settings.hidden, 1))
    return objective_of(net, features, AbsoluteError(), settings.initial_seed, dtype)


def convolutional_net(classes: int) -> nn.Sequential:
    """The network of Papernot et al. 2021 ("Tempered sigmoid activations") with tanh; 26,010 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def convolutional(shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: ModuleSettings) -> Objective:
    if shape != (784,):
        raise InputError(
            f'model.name = "cnn" takes gray images of 28 x 28 = 784 pixels, not {math.prod(shape)} values'
        )
    return objective_of(convolutional_net(classes), 784, CrossEntropy(), settings.initial_seed, dtype)


def numbers(features: NDArray[Any], dtype: torch.dtype, _settings: ModelSettings) -> Tensor:
    """Features that are numbers already, as they are."""
    return torch.from_numpy(features).to(dtype)


class PhaseSettings(ModelSettings):
    start: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="norm of the first model; close to 0 there is a saddle"
    )


def phase_retrieval(power: Literal[1, 2]) -> Model:
    """Unit measurement vectors as they are."""

    def objective(
        shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: PhaseSettings
    ) -> PhaseRetrieval:
        (width,) = shape
        return PhaseRetrieval(width, power, feature_norm=1.0, start=settings.start, dtype=dtype)

    return Model(PhaseSettings, numbers, objective, regression=True, only_for=PHASE_RETRIEVAL)


class LeastSquaresSettings(ModelSettings):
    ball: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="radius the model stays in: excess risk is counted from the best point there"
    )


def linear_regression(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: LeastSquaresSettings
) -> LeastSquares:
    """For the data set linear-regression, whose population is known: evaluations have the exact excess risk."""
    (width,) = shape
    curvature, minimizer = (torch.from_numpy(values).to(dtype) for values in power_law(width))
    population = quadratic_in_ball(curvature, minimizer, settings.ball)
    norm = math.sqrt(float(curvature.sum()))
    return LeastSquares(width, norm, population, dtype, label_bound=1.2 * norm, radius=settings.ball)


MODELS = {
    "softmax-regression": Model(SoftmaxSettings, features_and_bias, softmax_regression),
    "logistic-regression": Model(LinearSettings, features_and_bias, logistic_regression),
    "linear-regression": Model(LinearSettings, features_and_bias, least_squares_of_scores, regression=True),
    "ridge-regression": Model(RidgeSettings, features_and_bias, least_squares_of_scores, regression=True),
    "mlp-regression": Model(PerceptronSettings, flat_pixels, perceptron_regression, regression=True),
    "mlp": perceptron(nn.Tanh),
    "mlp-relu": perceptron(nn.ReLU),
    "cnn": Model(ModuleSettings, flat_pixels, convolutional),
    "relu-regression": Model(PerceptronSettings, numbers, rectified_regression, regression=True),
    "least-squares": Model(
        LeastSquaresSettings, numbers, linear_regression, regression=True, only_for=LINEAR_REGRESSION
    ),
    "amplitude-phase-retrieval": phase_retrieval(1),
    "robust-phase-retrieval": phase_retrieval(2),
}


_SHIPPED = frozenset(MODELS)


def add_model(name: str, model: Model) -> None:
    """Put a row of one's own into the table; one's own row of that name is replaced.

    InputError for the name of a shipped row: a scenario must mean the same everywhere.
    """
    if name in _SHIPPED:
        raise InputError(f"add_model: {name!r} is a model of fedpriv; give yours another name")
    MODELS[name] = model
    changed()


def model_named(name: str) -> Model:
    """A row by name, one's own included; InputError if there is none."""
    if name not in MODELS:
        load_extensions()
    if name not in MODELS:
        raise InputError(
            f"model.name = {name!r}: known models are {', '.join(map(repr, MODELS))}{suggestion(name, MODELS)}"
        )
    return MODELS[name]
