"""A row of the table of models: how raw records become features, and which loss they get."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.models.features import pixels
from fedpriv.objectives import Objective


class ModelSettings(BaseModel):
    """A model's own keys of the scenario's [model] section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @property
    def regression(self) -> bool | None:
        """Whether labels are real numbers; None where the row of the table says it."""
        return None

    @property
    def code(self) -> tuple[str, ...]:
        """Import paths of code that is none of fedpriv's: a guard runs it only if its policy names it."""
        return ()


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
    evaluated: bool = True
    """Whether test records say anything about it; the server of one that they do not needs none."""

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


def flat_pixels(images: NDArray[Any], dtype: torch.dtype, _settings: ModelSettings) -> Tensor:
    """Pixels divided by 255, and features that are numbers as they are: (n, features)."""
    return pixels(images, dtype)
