"""A trained model as a torch module, and what it says of records."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.objectives import LayeredObjective, ModuleObjective, Objective, SoftmaxRegression, View
from fedpriv.objectives.alone import rows_apart
from fedpriv.objectives.linear import LinearScore
from fedpriv.objectives.module import parameters_of


@dataclass(frozen=True)
class Trained:
    """A module with the trained parameters, of features as the scenario's model maps records to them."""

    module: nn.Module
    width: int | None
    """It takes so many features, the first ones; None: all."""

    @torch.inference_mode()
    def outputs(self, features: Tensor) -> Tensor:
        """(n, f) -> (n, outputs); no record looks at another."""
        return rows_apart(self.module, features[:, : self.width])


def trained(objective: Objective, vector: NDArray[Any]) -> Trained:
    """The model whose flat parameters (d,) are `vector`; InputError for an objective that is no module."""
    while isinstance(objective, View):
        objective = objective.base
    point = torch.from_numpy(np.array(vector)).to(objective.initial().dtype)
    match objective:
        case LayeredObjective() | ModuleObjective():
            return Trained(with_parameters(objective.module, point), None)
        case SoftmaxRegression():
            weights = point.view(objective.classes, objective.features)
            layer = nn.Linear(objective.features - 1, objective.classes, dtype=point.dtype)
            return Trained(_loaded(layer, {"weight": weights[:, :-1], "bias": weights[:, -1]}), layer.in_features)
        case LinearScore():
            layer = nn.Linear(objective.dimension, 1, bias=False, dtype=point.dtype)
            return Trained(_loaded(layer, {"weight": point.view(1, -1)}), None)
    raise InputError(f"{type(objective).__name__} is no torch module; cell.model() gives its parameters")


def shapes_of(objective: Objective) -> list[tuple[int, ...]]:
    """The shapes of the arrays that its flat parameters (d,) are, one behind the other.

    Those of a torch module are in the order of its `state_dict`; an objective that is no module has one of (d,).
    """
    while isinstance(objective, View):
        objective = objective.base
    if isinstance(objective, LayeredObjective | ModuleObjective):
        return [tuple(parameter.shape) for parameter in objective.module.parameters()]
    return [(objective.dimension,)]


def with_parameters(module: nn.Module, point: Tensor) -> nn.Module:
    """A copy of the module, in evaluation mode, with these flat parameters (d,) in the order of its own."""
    values = parameters_of(module, point)
    return _loaded(copy.deepcopy(module).to(point.dtype), values)


def _loaded(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    module.load_state_dict(values)
    return module.eval()
