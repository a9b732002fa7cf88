"""The first step of a run with [data.scale]: its model is the mean and the mean square of columns of numbers."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from fedpriv.data.scaling import moments_of
from fedpriv.errors import InputError
from fedpriv.models.row import ModelSettings
from fedpriv.objectives.base import Evaluation, Records
from fedpriv.objectives.linear import LinearScore

COLUMN_MOMENTS = "column-moments"
CLIP = 1.0
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


def moments(features: NDArray[Any], dtype: torch.dtype, settings: MomentSettings) -> Tensor:
    """(n, width) -> (n, 2k): `moments_of` the columns; InputError where there are none such."""
    if features.ndim != 2 or features.dtype.kind != "f" or max(settings.columns) >= features.shape[1]:
        raise InputError(
            f"model.columns = {list(settings.columns)}: a record here has features of shape {features.shape[1:]} "
            f"and type {features.dtype}; columns are places among numbers"
        )
    return torch.from_numpy(moments_of(features[:, list(settings.columns)])).to(dtype)


@dataclass(frozen=True)
class ColumnMoments(LinearScore):
    """-⟨x, z⟩ of a record's moments z: one step of size 1 from 0 gives their mean, whatever was asked.

    Guarantee: an increment is -z at every point, so that nothing a server asks changes what a record adds.
    """

    @property
    def lipschitz(self) -> float:
        return self.feature_norm

    @property
    def smoothness(self) -> float:
        return 0.0

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        """The mean loss, 0 without records: a server that has no test records has nothing to evaluate."""
        mean = records.features.sum(-2) / max(1, records.features.shape[-2])
        return Evaluation(-(mean * point).sum(-1), None)

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return -scores

    def _slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        return -torch.ones_like(scores)

    def _accuracy(self, scores: Tensor, labels: Tensor) -> None:
        """None: nothing is predicted."""


def column_moments(
    shape: tuple[int, ...], _classes: int, dtype: torch.dtype, _settings: MomentSettings
) -> ColumnMoments:
    return ColumnMoments(math.prod(shape), CLIP, dtype=dtype)
