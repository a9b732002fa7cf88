"""Rows of the table of models: features that a model makes of raw records, and its loss.

`Model` is a row and `ModelSettings` its keys.  Two kinds of rows are defined here:

* column moments, the first step of a run with [data.scale], whose model has the noisy means of `bounded_moments`;
* torch modules by their import path.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.data.encode import MOMENTS_DIAMETER, MOMENTS_RADIUS, bounded_moments
from fedpriv.data.layout import as_layout
from fedpriv.loss.features import Augmentation, pixel_features
from fedpriv.loss.imported import (
    DIGEST_PATTERN,
    InitializedView,
    build_module,
    import_callable,
    is_import_path,
    load_constants,
    replace_batch_norm,
)
from fedpriv.loss.inputs import make_layout_objective
from fedpriv.loss.linear import LinearScore
from fedpriv.loss.losses import LOSSES, LossChoice, Reward
from fedpriv.loss.objective import ModelEvaluation, Objective, Records


class ModelSettings(BaseModel):
    """A model's own keys of the scenario's [model] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @property
    def regression(self) -> bool | None:
        """Kind of labels, True for real numbers, or None if the row of the table says it."""
        return None

    @property
    def survival(self) -> bool:
        """Whether labels are times and events, if the row of the table does not say it."""
        return False

    @property
    def code(self) -> tuple[str, ...]:
        """Import paths of code from outside of fedpriv."""
        return ()


@dataclass(frozen=True)
class Model:
    """One row of the table of models."""

    settings: type[ModelSettings]
    """Type of the row's own keys."""
    features: Callable[[NDArray[Any], torch.dtype, Any], Tensor]
    """Function from raw records (n, ...), a type and the settings to features (n, f) of this type."""
    objective: Callable[[tuple[int, ...], int, torch.dtype, Any], Objective]
    """Function that makes the objective.

    Its arguments are the shape of one record's features (a `FeatureLayout` for records of a data set or schema),
    the number of classes (0 for real numbers), the type of the parameters, and the settings.
    """
    regression: bool = False
    """Whether labels are real numbers, if the settings do not say it."""
    only_for: str | None = None
    """Name of the only data set for which the objective's constants hold, or None.

    The name is None if the constants hold for the features of any data set.  Noise may depend on the constants,
    and would be too little for records of another data set.
    """
    evaluated: bool = True
    """Whether the model can be evaluated on test records."""
    gradients: bool = True
    """Whether increments are gradients of a model's loss, and not statistics of records."""
    survival: bool = False
    """Whether labels are bins survived and events, of a table with `survival`, and outputs are hazards."""
    of_cells: bool = False
    """Whether `features` maps the raw cells of a table, (n, columns), and not the encoded ones."""
    check: Callable[[Any], None] = lambda _: None
    """Check of a whole cell, which raises ValueError for sections that do not fit the row."""
    guard: str | None = None
    """Name in `ADD_ON_PARTS["guard"]` of the part that answers a guard's questions about the row, or None."""
    several_labels: bool = False
    """Whether a record may have labels of any shape, which lie behind its features (see `FeatureLayout`)."""

    def check_data(self, name: str, data: str) -> None:
        """Check that the constants of this row hold for a data set.

        Args:
            name: Name of the row.
            data: Name of the data set.

        Raises:
            InputError: The row is for another data set only.
        """
        if self.only_for is not None and data != self.only_for:
            raise InputError(
                f"model.name = {name!r} is for data.name = {self.only_for!r} alone, not {data!r}: its smoothness "
                "and optimum are those of that data"
            )


class ModuleSettings(ModelSettings):
    """Settings of models of torch layers."""

    initial_seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of the first model's random values")
    augment: Augmentation | None = Field(
        None, description="copies, shift and flip: copies of a picture inside of one clip"
    )


def flat_pixels(images: NDArray[Any], dtype: torch.dtype, _settings: ModelSettings) -> Tensor:
    """Convert pixels to features in [0, 1], and flatten numbers and tokens, (n, features)."""
    return pixel_features(images, dtype)


COLUMN_MOMENTS = "column-moments"
MOMENT_CLIP = 1.0
"""Upper bound on the norm of one record's moments, which `bounded_moments` keeps."""


class MomentSettings(ModelSettings):
    """Settings of column moments, which name the features whose moments are released."""

    columns: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)] = Field(
        description="indices of the features whose means and mean squares are released; each is in -1 … 1"
    )
    real: bool = Field(False, description="whether labels are real numbers; they are not looked at")

    @field_validator("columns")
    @classmethod
    def _each_once(cls, columns: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(columns)) < len(columns):
            raise ValueError("a column is named twice; its mean is released once")
        return columns

    @property
    def regression(self) -> bool:
        return self.real


def moment_features(features: NDArray[Any], dtype: torch.dtype, settings: MomentSettings) -> Tensor:
    """Compute the bounded moments of k columns (`bounded_moments`): (n, width) -> (n, 2k).

    Raises:
        InputError: A record has no such columns, or they are not floats.
    """
    if features.ndim != 2 or features.dtype.kind != "f" or max(settings.columns) >= features.shape[1]:
        raise InputError(
            f"model.columns = {list(settings.columns)}: a record here has features of shape {features.shape[1:]} "
            f"and type {features.dtype}; columns are indices of features that are numbers"
        )
    return torch.from_numpy(bounded_moments(features[:, list(settings.columns)])).to(dtype)


@dataclass(frozen=True)
class ColumnMoments(LinearScore):
    """Objective -⟨x, z⟩ of a record's moments z.

    The released mean of the moments is the model after one step of size 1 from 0.

    Guarantee: a gradient is -z at every point, so that no model that a server sends changes what a record adds.
    """

    loss = Reward()

    @property
    def lipschitz(self) -> float:
        return self.feature_norm

    smoothness = 0.0
    diameter = MOMENTS_DIAMETER / MOMENTS_RADIUS
    """Largest distance of two increments, or of an increment and zeros (`bounded_moments`)."""

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Evaluate the mean loss, which is 0 without records."""
        return ModelEvaluation(
            -((records.features.sum(-2) / max(1, records.features.shape[-2])) * point).sum(-1), None
        )


def column_moments(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, _settings: MomentSettings
) -> ColumnMoments:
    """Make the objective of column moments."""
    return ColumnMoments(math.prod(shape), MOMENT_CLIP, dtype=dtype)


class ImportedSettings(ModuleSettings):
    """Settings of a torch module by its import path.

    The class or function at the path is called with (features, outputs) and `arguments`.
    """

    arguments: dict[str, Any] = Field({}, description="further arguments of the class or function, by name")
    loss: str = Field(
        "cross-entropy",
        description='of the outputs: "cross-entropy" (one a class); "binary", "squared-error", "absolute-error", '
        '"huber", "poisson" (one a label); "hazard" (one a bin of time); or "package.module:function" of one '
        "record's output and label",
    )
    real: bool | None = Field(None, description="whether labels are real numbers; by default what the loss is for")
    class_weights: tuple[float, ...] = Field(
        (), strict=False, description="what a label's loss is multiplied with, by its class"
    )
    label_smoothing: float = Field(0.0, description="share of a label that is spread evenly over all classes")
    shape: tuple[int, ...] = Field(
        (), strict=False, description="how the module sees a record, such as [1, 28, 28]; flat otherwise"
    )
    weights: Annotated[str, Field(pattern=f"^{DIGEST_PATTERN.pattern}$")] | None = Field(
        None,
        description='"sha256:…" of a state_dict, which lies as HEX.pt in $FEDPRIV_WEIGHTS: all that is not '
        "trained, and where the rest begins",
    )
    group_norm: bool = Field(False, description="GroupNorm in place of every BatchNorm, which mixes records")

    @property
    def regression(self) -> bool:
        return (
            self.real
            if self.real is not None
            else self.loss in LOSSES and LOSSES[self.loss].takes_classes is False
        )

    @property
    def survival(self) -> bool:
        return self.loss == "hazard"

    @property
    def code(self) -> tuple[str, ...]:
        return (self.loss,) if is_import_path(self.loss) else ()

    def loss_choice(self) -> LossChoice:
        """Make the choice of the loss, and import it if it is an import path.

        Raises:
            InputError: The path cannot be imported, or is not callable.
        """
        return LossChoice(
            self.loss,
            import_callable(self.loss, "model.loss") if self.code else None,
            self.class_weights,
            self.label_smoothing,
        )


def make_imported_model(path: str) -> Model:
    """Make a row of the table of models for the torch module at an import path.

    The module is imported when its objective is made.  It is built with the numbers of features and outputs and
    the settings' `arguments`.  If the settings name a file of weights by its digest, the initial model has the
    file's values for the parameters that the file names, and drawn values for the others.
    """

    def objective(
        shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: ImportedSettings
    ) -> Objective:
        """Build the module, load its weights, and make the objective of a loss on it."""
        layout, choice = as_layout(shape), settings.loss_choice()
        _, needed_shape = choice.make_loss(layout.label_shape, classes)
        # Length of the last axis of outputs.  For a loss of the user it is that of one for each class or label.
        outputs = (needed_shape or (classes or math.prod(layout.label_shape),))[-1]
        module = build_module(path, "model.name", (layout.input_width, outputs), settings.arguments)
        if settings.group_norm:
            module = replace_batch_norm(module)
        seeded_names = load_constants(module, settings.weights, path)
        module_objective, wrapped = make_layout_objective(
            module,
            layout,
            settings.shape or (layout.input_width,),
            choice,
            classes,
            settings.initial_seed,
            dtype,
            path,
        )
        if settings.weights is None:
            return module_objective
        # Inside of the wrapped module, names of parameters begin with the name of the module.
        (prefix,) = (name for name, layer in wrapped.named_modules() if layer is module)
        return InitializedView(
            module_objective, wrapped, frozenset(f"{prefix}.{name}".removeprefix(".") for name in seeded_names)
        )

    return Model(ImportedSettings, flat_pixels, objective, several_labels=True)
