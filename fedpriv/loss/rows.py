"""Rows of the table of models: how raw records become features, and which loss they get.

`Model` is a row and `ModelSettings` its keys.  Two kinds of rows are here: that of column moments, the first step
of a run with [data.scale], whose model is the mean and the mean square of columns of numbers; and rows for torch
modules by their import path.
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
        """Whether labels are real numbers; None where the row of the table says it."""
        return None

    @property
    def survival(self) -> bool:
        """Whether labels are times and events, where the row of the table does not say it."""
        return False

    @property
    def code(self) -> tuple[str, ...]:
        """Import paths of code that is none of fedpriv's: a guard runs it only if its policy names it."""
        return ()


@dataclass(frozen=True)
class Model:
    """One row of the table; `settings` is the type of the row's own keys.

    `features` maps images (n, ...) of bytes to (n, f); `objective` takes the shape of one record's features (a
    `Layout` where data are at hand), the number of classes, the dtype and the settings.
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
    evaluated: bool = True
    """Whether test records say anything about it; the server of one that they do not needs none."""
    survival: bool = False
    """Whether labels are bins survived and events, of a table with `survival`, and outputs hazards."""
    of_cells: bool = False
    """Whether `features` maps the raw cells of a table, (n, columns), in place of what they are encoded to."""
    check: Callable[[Any], None] = lambda _: None
    """Check of a whole cell, which raises ValueError for sections that the row cannot be with."""
    guard: str | None = None
    """Name of what a guard asks about the row, in `ADDED["guard"]`: `of_cells` without one is refused."""
    several_labels: bool = False
    """Whether a record may have labels of any shape, which lie behind its features: see `Layout`."""

    def check_data(self, name: str, data: str) -> None:
        """InputError if `data` is not what the constants of this row, called `name`, were derived from."""
        if self.only_for is not None and data != self.only_for:
            raise InputError(
                f"model.name = {name!r} is for data.name = {self.only_for!r} alone, not {data!r}: its smoothness "
                "and optimum are those of that data"
            )


class ModuleSettings(ModelSettings):
    """Models of torch layers."""

    initial_seed: Annotated[int, Field(ge=0)] = Field(0, description="the first model follows from it alone")
    augment: Augmentation | None = Field(
        None, description="copies, shift and flip: copies of a picture inside of one clip"
    )


def flat_pixels(images: NDArray[Any], dtype: torch.dtype, _settings: ModelSettings) -> Tensor:
    """Pixels divided by 255, and features that are numbers as they are: (n, features)."""
    return pixel_features(images, dtype)


COLUMN_MOMENTS = "column-moments"
MOMENT_CLIP = 1.0
"""The norm of one record's moments, at most: `moments_of`."""


class MomentSettings(ModelSettings):
    """Which features of a record are released."""

    columns: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)] = Field(
        description="places of the features whose means and squares are released; each in -1 … 1"
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
    """(n, width) -> (n, 2k): `moments_of` the columns; InputError where there are none such."""
    if features.ndim != 2 or features.dtype.kind != "f" or max(settings.columns) >= features.shape[1]:
        raise InputError(
            f"model.columns = {list(settings.columns)}: a record here has features of shape {features.shape[1:]} "
            f"and type {features.dtype}; columns are places among numbers"
        )
    return torch.from_numpy(bounded_moments(features[:, list(settings.columns)])).to(dtype)


@dataclass(frozen=True)
class ColumnMoments(LinearScore):
    """-⟨x, z⟩ of a record's moments z: one step of size 1 from 0 gives their mean, whatever was asked.

    Guarantee: an increment is -z at every point, so that nothing a server asks changes what a record adds.
    """

    loss = Reward()

    @property
    def lipschitz(self) -> float:
        return self.feature_norm

    smoothness = 0.0
    diameter = MOMENTS_DIAMETER / MOMENTS_RADIUS
    """The largest distance of two increments, or of one and zeros: that of `moments_of`."""

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """The mean loss, 0 without records: a server that has no test records has nothing to evaluate."""
        return ModelEvaluation(
            -((records.features.sum(-2) / max(1, records.features.shape[-2])) * point).sum(-1), None
        )


def column_moments(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, _settings: MomentSettings
) -> ColumnMoments:
    return ColumnMoments(math.prod(shape), MOMENT_CLIP, dtype=dtype)


class ImportedSettings(ModuleSettings):
    """A torch module by its import path: called with (features, outputs) and `arguments` it gives the module."""

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
        """The loss; InputError if there is none such."""
        return LossChoice(
            self.loss,
            import_callable(self.loss, "model.loss") if self.code else None,
            self.class_weights,
            self.label_smoothing,
        )


def make_imported_model(path: str) -> Model:
    """A row for the torch module at an import path; nothing is imported before its objective is asked for."""

    def objective(
        shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: ImportedSettings
    ) -> Objective:
        layout, choice = as_layout(shape), settings.loss_choice()
        _, needed = choice.make_loss(layout.label_shape, classes)
        outputs = (needed or (classes or math.prod(layout.label_shape),))[-1]
        module = build_module(path, "model.name", (layout.input_width, outputs), settings.arguments)
        if settings.group_norm:
            module = replace_batch_norm(module)
        without = load_constants(module, settings.weights, path)
        made, whole = make_layout_objective(
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
            return made
        (inside,) = (name for name, layer in whole.named_modules() if layer is module)
        return InitializedView(made, whole, frozenset(f"{inside}.{name}".removeprefix(".") for name in without))

    return Model(ImportedSettings, flat_pixels, objective, several_labels=True)
