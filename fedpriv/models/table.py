"""The table of models: how raw images become features, and which loss they get."""

import math
from typing import Annotated, Any, Literal

import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedpriv.data.fetch import LINEAR_REGRESSION, PHASE_RETRIEVAL
from fedpriv.data.synthetic import power_law
from fedpriv.errors import InputError, own_or_close
from fedpriv.extensions import changed, load_extensions
from fedpriv.models.by_path import model_at
from fedpriv.models.imported import is_import_path
from fedpriv.models.linear import (
    LinearSettings,
    RidgeSettings,
    SoftmaxSettings,
    features_and_bias,
    least_squares_of_scores,
    logistic_regression,
    softmax_regression,
)
from fedpriv.models.moments import COLUMN_MOMENTS, MomentSettings, column_moments, moments
from fedpriv.models.row import Model, ModelSettings, ModuleSettings, flat_pixels
from fedpriv.objectives import (
    AbsoluteError,
    CrossEntropy,
    LeastSquares,
    Objective,
    PhaseRetrieval,
    SquaredError,
    objective_of,
)
from fedpriv.objectives.population import quadratic_in_ball


class PerceptronSettings(ModuleSettings):
    hidden: Annotated[int, Field(ge=1)] = Field(64, description="width of the hidden layer")


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
    COLUMN_MOMENTS: Model(MomentSettings, moments, column_moments, evaluated=False),
}


SHIPPED = frozenset(MODELS)


def add_model(name: str, model: Model) -> None:
    """Put a row of one's own into the table; one's own row of that name is replaced.

    InputError for the name of a shipped row: a scenario must mean the same everywhere.
    """
    if name in SHIPPED:
        raise InputError(f"add_model: {name!r} is a model of fedpriv; give yours another name")
    MODELS[name] = model
    changed()


def model_named(name: str) -> Model:
    """A row by name, one's own included, or one for an import path; InputError if there is none."""
    if is_import_path(name):
        return model_at(name)
    if name not in MODELS:
        load_extensions()
    if name not in MODELS:
        raise InputError(
            f"model.name = {name!r}: known models are {', '.join(map(repr, MODELS))}, or package.module:Name"
            f"{own_or_close(name, MODELS)}"
        )
    return MODELS[name]
