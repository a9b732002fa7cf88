"""Rows for torch modules by their import path."""

from typing import Any, Literal

import torch
from pydantic import Field

from fedpriv.models.imported import build, with_group_norm
from fedpriv.models.probes import check_outputs, check_shape, reshaped
from fedpriv.models.row import Model, ModuleSettings, flat_pixels
from fedpriv.objectives import AbsoluteError, CrossEntropy, Loss, Objective, SquaredError, objective_of


class ImportedSettings(ModuleSettings):
    """A torch module by its import path: called with (features, outputs) and `arguments` it gives the module."""

    arguments: dict[str, Any] = Field({}, description="further arguments of the class or function, by name")
    loss: Literal["cross-entropy", "squared-error", "absolute-error"] = Field(
        "cross-entropy", description="of the outputs: one a class, or one number for a regression"
    )
    shape: tuple[int, ...] = Field(
        (), strict=False, description="how the module sees a record, such as [1, 28, 28]; flat otherwise"
    )
    group_norm: bool = Field(False, description="GroupNorm in place of every BatchNorm, which mixes records")

    @property
    def regression(self) -> bool:
        return self.loss != "cross-entropy"


_LOSSES: dict[str, Loss] = {
    "cross-entropy": CrossEntropy(),
    "squared-error": SquaredError(),
    "absolute-error": AbsoluteError(),
}


def model_at(path: str) -> Model:
    """A row for the torch module at an import path; nothing is imported before its objective is asked for."""

    def objective(
        shape: tuple[int, ...], classes: int, dtype: torch.dtype, settings: ImportedSettings
    ) -> Objective:
        (features,) = shape
        outputs = 1 if settings.regression else classes
        module = build(path, "model.name", (features, outputs), settings.arguments)
        if settings.group_norm:
            module = with_group_norm(module)
        record = settings.shape or shape
        check_shape(record, shape, path)
        module = reshaped(module, record)
        check_outputs(module, features, outputs, path)
        return objective_of(module, features, _LOSSES[settings.loss], settings.initial_seed, dtype)

    return Model(ImportedSettings, flat_pixels, objective)
