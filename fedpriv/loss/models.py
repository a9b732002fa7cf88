"""The table of models: features that a model makes of raw records, and its loss.

`MODELS` has rows by name.  Linear models for any data (rows with `compute_features_and_bias`) take the features
that their settings name and a constant 1.  `add_module` adds a torch module of the user as a row.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedpriv.core.errors import InputError, suggest_name_or_import
from fedpriv.core.extensions import ADD_ON_PARTS, load_add_on_part, load_extensions, note_table_change
from fedpriv.data.fetch import LINEAR_REGRESSION, PHASE_RETRIEVAL
from fedpriv.data.layout import as_layout
from fedpriv.data.synthetic import power_law
from fedpriv.loss.features import (
    IMAGES_PER_CHUNK,
    compute_frozen_features,
    orientation_histograms,
    pixel_features,
    scale_to_norm,
)
from fedpriv.loss.imported import DIGEST_PATTERN, InitializedView, is_import_path
from fedpriv.loss.inputs import make_layout_objective
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.linear import (
    LeastSquares,
    LogisticRegression,
    PhaseRetrieval,
    SigmoidRegression,
    SoftmaxRegression,
    quadratic_in_ball,
)
from fedpriv.loss.losses import (
    LOSSES,
    AbsoluteError,
    CrossEntropy,
    HazardLoss,
    Loss,
    LossChoice,
    SquaredError,
    bin_count,
)
from fedpriv.loss.objective import Objective
from fedpriv.loss.ridge import MAX_FEATURES, RIDGE_STATISTICS, RidgeStatistics
from fedpriv.loss.rows import (
    COLUMN_MOMENTS,
    Model,
    ModelSettings,
    ModuleSettings,
    MomentSettings,
    column_moments,
    flat_pixels,
    make_imported_model,
    moment_features,
)


class SoftmaxSettings(ModelSettings):
    """Settings of softmax regression.

    For features z with the constant 1, the loss of softmax regression has Lipschitz constant √2 · max‖z‖ and
    smoothness max‖z‖²/2.  A smaller `feature_norm` lowers both.
    """

    features: Literal["pixels", "orientations"] = Field(
        "pixels",
        description="pixels / 255 (numbers as they are), or how much edge there is in 8 directions in cells of "
        "4 x 4 pixels",
    )
    centre: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="a public constant that is subtracted from every pixel / 255, or from every number"
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
        """Check that the keys of features, backbone and scaling fit each other.

        Raises:
            ValueError: A key is missing, does not go with another one, or is no import path or digest.
        """
        if self.backbone is not None:
            if not is_import_path(self.backbone):
                raise ValueError(f"backbone = {self.backbone!r}: expected an import path, package.module:Name")
            if self.backbone_weights is None or DIGEST_PATTERN.fullmatch(self.backbone_weights) is None:
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
    """Settings of a linear score of the features and a constant 1."""

    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="of ‖x‖²/2 in every record's loss, the constant's weight included; clipped with it"
    )


class RidgeSettings(SoftmaxSettings):
    """Settings of least squares with a penalty, which is required."""

    penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        description="of ‖x‖²/2 in every record's loss, the constant's weight included; clipped with it"
    )


def compute_features_and_bias(images: NDArray[Any], dtype: torch.dtype, settings: SoftmaxSettings) -> Tensor:
    """Compute the features that the settings name, scaled, and a constant 1, (n, features + 1).

    Each record is mapped by itself.

    Args:
        images: Raw records, (n, ...), bytes or numbers.
        dtype: Type of the features.
        settings: Settings of the features.

    Returns:
        The features, whose last column is 1.  If `feature_norm` is set, it bounds the norm of a row of finite
        values without this column, up to rounding.

    Raises:
        InputError: Features have no bound, because records are not bytes and `feature_norm` is missing, or the
            records do not fit the settings, or the backbone cannot be used.
    """
    if images.dtype != np.uint8 and settings.feature_norm is None:
        raise InputError("model.feature_norm: needed for features that are numbers, to bound a record's norm")
    # One call of `compute_frozen_features`, which copies the backbone and maps a record of zeros each time.
    chunk_size = len(images) if settings.backbone is not None else IMAGES_PER_CHUNK
    features: Tensor | None = None
    for start in range(0, max(1, len(images)), max(1, chunk_size)):
        values = _compute_features(images[start : start + chunk_size], dtype, settings)
        if features is None:  # allocated once, so that chunks need not be joined
            features = torch.empty(len(images), values.shape[1] + 1, dtype=dtype)
            features[:, -1] = 1.0
        features[start : start + len(values), :-1] = values
    assert features is not None
    return features


def _compute_features(images: NDArray[Any], dtype: torch.dtype, settings: SoftmaxSettings) -> Tensor:
    """Compute the features that the settings name, scaled, without the constant 1, (n, features).

    The features are pixels / 255 (or numbers) minus `centre`, or histograms of oriented gradients.  They are then
    mapped by the backbone, a frozen module, if there is one.  If `feature_norm` is set, longer rows are scaled
    down to this norm, and with `scaling` = "exactly" shorter rows, except for zeros, are scaled up to it, too.

    Raises:
        InputError: The images do not fit the settings, or the backbone cannot be used.
    """
    values = (
        orientation_histograms(images, dtype)
        if settings.features == "orientations"
        else pixel_features(images, dtype).sub(settings.centre)
    )
    if settings.backbone is not None:
        assert settings.backbone_weights is not None
        backbone_arguments = (
            settings.backbone,
            settings.backbone_arguments,
            settings.backbone_weights,
            settings.backbone_shape,
        )
        values = compute_frozen_features(values, *backbone_arguments)
    return (
        values
        if settings.feature_norm is None
        else scale_to_norm(values, settings.feature_norm, exactly=settings.scaling == "exactly")
    )


def softmax_regression(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: SoftmaxSettings
) -> SoftmaxRegression:
    """Make softmax regression, with the denominator of the features in exact releases.

    Bytes without scaling and without `centre` are multiples of 1/255.  Other features are rounded to the grid of
    `grid_denominator` if there is one.
    """
    norm = _max_feature_norm(shape, settings)
    is_bytes = settings.feature_norm is None and settings.centre == 0.0
    return SoftmaxRegression(
        shape[0], classes, norm, dtype, denominator=255 if is_bytes else grid_denominator(shape[0], norm)
    )


def grid_denominator(features: int, norm: float) -> int | None:
    """Find the denominator, a power of 2, for features of norms up to `norm` in exact releases.

    Exact releases round features to multiples of 1/denominator.  The norm times the denominator lies between
    2^15 - 1 and 2^16 - 1, up to rounding.

    Args:
        features: Number of features.
        norm: Largest norm of a record's features, above 0.

    Returns:
        The denominator, or None if `norm` is above 2^16 - 1 or rounding could move a record by more than 2^-10 of
        `norm`.

    Example:
        >>> grid_denominator(features=785, norm=1.0)
        32768
    """
    denominator = 2 ** math.floor(math.log2((2**16 - 1) / norm))
    return denominator if denominator >= 1 and 0.5 * math.sqrt(features) / denominator <= norm * 2.0**-10 else None


def _max_feature_norm(shape: tuple[int, ...], settings: SoftmaxSettings) -> float:
    """Upper bound on the norm of a record's features and its constant 1, up to rounding."""
    norm = settings.feature_norm
    if norm is None:
        norm = math.sqrt(shape[0] - 1) * max(settings.centre, 1.0 - settings.centre)
    return math.hypot(norm, 1.0)


def logistic_regression(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: LinearSettings
) -> LogisticRegression:
    """Make logistic regression for two classes.

    Raises:
        InputError: There are more or fewer classes.
    """
    _check_two_classes("logistic-regression", classes)
    return LogisticRegression(
        shape[0],
        _max_feature_norm(shape, settings),
        dtype=dtype,
        penalty=settings.penalty,
        convex=settings.penalty == 0.0,
    )


def sigmoid_regression(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: SoftmaxSettings
) -> SigmoidRegression:
    """Make sigmoid regression for two classes.

    Raises:
        InputError: There are more or fewer classes.
    """
    _check_two_classes("sigmoid-regression", classes)
    return SigmoidRegression(shape[0], _max_feature_norm(shape, settings), dtype=dtype)


def _check_two_classes(name: str, classes: int) -> None:
    """Raise InputError for a model of two classes if there are more or fewer."""
    if classes != 2:
        raise InputError(f'model.name = "{name}" is for two classes, not {classes}; use "softmax-regression"')


def least_squares_of_scores(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: LinearSettings | RidgeSettings
) -> LeastSquares:
    """Make least squares for any data.

    The model is not kept in a ball, so `lipschitz` is inf.
    """
    return LeastSquares(
        shape[0], _max_feature_norm(shape, settings), dtype=dtype, penalty=settings.penalty, radius=math.inf
    )


class RidgeStatisticsSettings(SoftmaxSettings):
    """Settings of ridge regression from released second moments."""

    penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        description="λ of the second moments + λ I, in the unit of features squared: about the noise's largest "
        "eigenvalue, √(2 · features) times its deviation"
    )
    real: bool = Field(False, description="whether labels are real numbers; otherwise there are two classes")

    @property
    def regression(self) -> bool:
        return self.real


def ridge_statistics(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: RidgeStatisticsSettings
) -> RidgeStatistics:
    """Make the statistics of ridge regression, for two classes or real labels.

    Raises:
        InputError: There are more than `MAX_FEATURES` features with the constant, or labels are classes and not
            two.
    """
    if not settings.real:
        _check_two_classes(RIDGE_STATISTICS, classes)
    if shape[0] > MAX_FEATURES:
        raise InputError(f"model.name = {RIDGE_STATISTICS!r}: {shape[0]} features, at most {MAX_FEATURES}")
    return RidgeStatistics(
        shape[0], math.hypot(_max_feature_norm(shape, settings), 1.0), not settings.real, settings.penalty, dtype
    )


class PerceptronSettings(ModuleSettings):
    """Settings of a network with one hidden layer."""

    hidden: Annotated[int, Field(ge=1, le=10_000_000)] = Field(64, description="width of the hidden layer")


def perceptron(activation: type[nn.Module], loss: Loss | None = None) -> Model:
    """Make a row of the table of models for a network with one hidden layer: features - hidden - outputs.

    Without a `loss` the network has an output for each class and the cross-entropy, with `HazardLoss` one for each
    bin of time, and with any other loss a single one.
    """

    def objective(
        shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: PerceptronSettings
    ) -> Objective:
        (width,) = shape
        outputs = classes if loss is None else bin_count(classes) if isinstance(loss, HazardLoss) else 1
        network = nn.Sequential(
            nn.Linear(width, settings.hidden), activation(), nn.Linear(settings.hidden, outputs)
        )
        return make_module_objective(network, width, loss or CrossEntropy(), settings.initial_seed, dtype)

    is_survival = isinstance(loss, HazardLoss)
    return Model(
        PerceptronSettings,
        flat_pixels,
        objective,
        regression=loss is not None and not is_survival,
        survival=is_survival,
    )


def hazard_regression(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: SoftmaxSettings
) -> Objective:
    """Make discrete hazards whose logits are linear in the features, with x_1 drawn from seed 0."""
    layer = nn.Linear(shape[0], bin_count(classes), bias=False)  # the features contain a constant
    return make_module_objective(layer, shape[0], HazardLoss(), 0, dtype)


def convolutional_net(classes: int) -> nn.Sequential:
    """Make the network of Papernot et al. 2021 ("Tempered sigmoid activations") with tanh.

    The network has 26,010 parameters for 10 classes.
    """
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
    """Make the CNN for gray images of 28 x 28 pixels under the cross-entropy.

    Raises:
        InputError: Records do not have 784 values.
    """
    if shape != (784,):
        raise InputError(
            f'model.name = "cnn" takes gray images of 28 x 28 = 784 pixels, not {math.prod(shape)} values'
        )
    return make_module_objective(convolutional_net(classes), 784, CrossEntropy(), settings.initial_seed, dtype)


def keep_numbers(features: NDArray[Any], dtype: torch.dtype, _settings: ModelSettings) -> Tensor:
    """Convert features that are numbers to a tensor."""
    return torch.from_numpy(features).to(dtype)


class PhaseSettings(ModelSettings):
    """Settings of phase retrieval."""

    start: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="norm of the first model; close to 0 there is a saddle"
    )


def phase_retrieval(power: Literal[1, 2]) -> Model:
    """Make a row for phase retrieval from unit measurement vectors."""

    def objective(
        shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: PhaseSettings
    ) -> PhaseRetrieval:
        (width,) = shape
        return PhaseRetrieval(width, power, feature_norm=1.0, start_norm=settings.start, dtype=dtype)

    return Model(PhaseSettings, keep_numbers, objective, regression=True, only_for=PHASE_RETRIEVAL)


class LeastSquaresSettings(ModelSettings):
    """Settings of least squares for the data set linear-regression."""

    ball: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="radius the model stays in: excess risk is counted from the best point there"
    )


def linear_regression(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: LeastSquaresSettings
) -> LeastSquares:
    """Make least squares for the data set linear-regression.

    The population is known, so evaluations have the exact excess risk.
    """
    (width,) = shape
    curvature, minimizer = (torch.from_numpy(values).to(dtype) for values in power_law(width))
    population = quadratic_in_ball(curvature, minimizer, settings.ball)
    norm = math.sqrt(float(curvature.sum()))
    return LeastSquares(width, norm, population, dtype, label_bound=1.2 * norm, radius=settings.ball)


MODELS = {
    "softmax-regression": Model(SoftmaxSettings, compute_features_and_bias, softmax_regression),
    "logistic-regression": Model(LinearSettings, compute_features_and_bias, logistic_regression),
    "sigmoid-regression": Model(SoftmaxSettings, compute_features_and_bias, sigmoid_regression),
    "linear-regression": Model(
        LinearSettings, compute_features_and_bias, least_squares_of_scores, regression=True
    ),
    "ridge-regression": Model(RidgeSettings, compute_features_and_bias, least_squares_of_scores, regression=True),
    RIDGE_STATISTICS: Model(RidgeStatisticsSettings, compute_features_and_bias, ridge_statistics, gradients=False),
    "mlp-regression": perceptron(nn.Tanh, SquaredError()),
    "mlp": perceptron(nn.Tanh),
    "mlp-relu": perceptron(nn.ReLU),
    "hazard-regression": Model(SoftmaxSettings, compute_features_and_bias, hazard_regression, survival=True),
    "hazard-mlp": perceptron(nn.Tanh, HazardLoss()),
    "cnn": Model(ModuleSettings, flat_pixels, convolutional),
    "relu-regression": perceptron(nn.ReLU, AbsoluteError()),
    "least-squares": Model(
        LeastSquaresSettings, keep_numbers, linear_regression, regression=True, only_for=LINEAR_REGRESSION
    ),
    "amplitude-phase-retrieval": phase_retrieval(1),
    "robust-phase-retrieval": phase_retrieval(2),
    COLUMN_MOMENTS: Model(MomentSettings, moment_features, column_moments, evaluated=False, gradients=False),
}


SHIPPED = frozenset({*MODELS, *ADD_ON_PARTS["model"]})


def add_model(name: str, model: Model) -> None:
    """Add a row of the user to the table, or replace the user's row of that name.

    Args:
        name: Name of the model in scenarios, not an import path.
        model: Row of the table.

    Raises:
        InputError: fedpriv ships a row of that name.
    """
    if name in SHIPPED:
        raise InputError(f"add_model: {name!r} is a model of fedpriv; give yours another name")
    MODELS[name] = model
    note_table_change()


def find_model(name: str) -> Model:
    """Find the row of a model by its name, or make one for an import path.

    Rows of add-ons (optional parts of fedpriv) and of extensions (the user's own code) are loaded on demand.

    Args:
        name: Name of the model in scenarios, or "package.module:Name".

    Raises:
        InputError: There is no such row, its add-on is not installed, or an extension cannot be imported.
    """
    if is_import_path(name):
        return make_imported_model(name)
    if name not in MODELS and name in ADD_ON_PARTS["model"]:
        return cast(Model, load_add_on_part("model", name))
    if name not in MODELS:
        load_extensions()
    if name not in MODELS:
        raise InputError(
            f"model.name = {name!r}: known models are {', '.join(map(repr, (*MODELS, *ADD_ON_PARTS['model'])))}, "
            f"or package.module:Name{suggest_name_or_import(name, MODELS)}"
        )
    return MODELS[name]


Factory = Callable[[tuple[int, ...], int], nn.Module]
"""Function from the shape of one record and the number of classes to an untrained module.

The number of classes is 0 for a regression.
"""

LossArgument = str | Mapping[str, Any] | Callable[[Tensor, Tensor], Tensor] | None
"""Loss by name, as a mapping, or as a function of one record's output and label, or None.

None stands for the default loss.  Keys of a mapping are "name", "class_weights" and "label_smoothing".
"""


def make_loss_choice(loss: LossArgument, *, real: bool) -> LossChoice:
    """Make the choice of a loss from an argument of the user.

    Without a loss the choice is the cross-entropy, or the squared error of `real` labels.  "squared" and
    "absolute" are short for "squared-error" and "absolute-error".

    Args:
        loss: Loss of the user: a name, a mapping of settings, a function of one record's outputs and label, or
            None.
        real: Whether labels are real numbers.

    Raises:
        InputError: The argument is no loss, or a setting is invalid.
    """
    if loss is None:
        return LossChoice("squared-error" if real else "cross-entropy")
    if callable(loss):
        return LossChoice(getattr(loss, "__qualname__", "function"), loss)
    try:
        choice = LossChoice(loss, None) if isinstance(loss, str) else LossChoice(function=None, **loss)
        name = f"{choice.name}-error" if f"{choice.name}-error" in LOSSES else str(choice.name)
        choice = LossChoice(name, None, tuple(map(float, choice.class_weights)), float(choice.label_smoothing))
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"loss = {loss!r}: accepted keys are name, class_weights and label_smoothing, the last two of numbers"
        ) from None
    choice.check()
    return choice


def add_module(
    name: str,
    factory: Factory,
    *,
    shape: tuple[int, ...] | None = None,
    regression: bool = False,
    loss: LossArgument = None,
) -> None:
    """Make `model.name = name` mean the module that `factory(shape, classes)` returns.

    The module maps (records, *shape) to the outputs that the loss takes: (records, classes) for the cross-entropy,
    and (records, 1) for most losses of a regression.  If records have several inputs, it takes each of them as an
    argument, in the input's own shape.  Bytes are passed as pixels / 255, other integers as int64.

    The initial model is drawn from the scenario's `model.initial_seed`, except for values that it keeps from the
    module, such as the scales of a normalization.

    A record's gradient must depend on this record only.  A module with a layer that mixes records (BatchNorm that
    trains), draws random numbers (Dropout with p above 0) or changes buffers is therefore refused when the model
    is used.

    Args:
        name: Name of the model in scenarios.
        factory: Function from the shape of one record and the number of classes (0 for a regression) to an
            untrained module.  torch's CPU generator starts from seed 0 in each call.
        shape: Shape of one record, such as (1, 28, 28).  By default records are flat.  For records with several
            inputs it is only passed to `factory`.
        regression: Whether labels are real numbers.
        loss: Loss by name, as a mapping of settings, or as a function of one record's output and label.  By
            default the cross-entropy, or the squared error for a regression.

    Raises:
        InputError: fedpriv ships a model of that name, or `loss` is no loss or has an invalid setting.
    """
    choice = make_loss_choice(loss, real=regression)

    def objective(flat: tuple[int, ...], classes: int, dtype: torch.dtype, settings: ModuleSettings) -> Objective:
        layout = as_layout(flat)
        record = (layout.input_width,) if shape is None else shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # so that values that the initial model x_1 keeps are the same in every run
            return make_layout_objective(
                factory(record, classes), layout, record, choice, classes, settings.initial_seed, dtype, name
            )[0]

    add_model(name, Model(ModuleSettings, flat_pixels, objective, regression=regression, several_labels=True))


def add_module_instance(
    name: str, module: nn.Module, record: tuple[int, ...], *, regression: bool, choice: LossChoice
) -> None:
    """Make `model.name = name` mean one module, whose trainable parameters are x_1.

    The module is copied.  Frozen parameters keep their values, rounded to the type of the run.

    Args:
        name: Name of the model in scenarios.
        module: Module that maps (records, *record) to outputs.
        record: Shape of one record.
        regression: Whether labels are real numbers.
        choice: Choice of the loss.
    """
    module_copy = copy.deepcopy(module).to("cpu")

    def objective(flat: tuple[int, ...], classes: int, dtype: torch.dtype, _settings: ModuleSettings) -> Objective:
        return InitializedView(
            *make_layout_objective(
                copy.deepcopy(module_copy).to(dtype), as_layout(flat), record, choice, classes, 0, dtype, name
            )
        )

    add_model(name, Model(ModuleSettings, flat_pixels, objective, regression=regression, several_labels=True))
