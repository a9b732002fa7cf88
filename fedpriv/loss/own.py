"""A torch module of one's own as a row of the table of models."""

import copy
import math
from collections.abc import Callable

import torch
from torch import nn

from fedpriv.core.errors import InputError
from fedpriv.loss.imported import check_outputs, check_shape, reshaped
from fedpriv.loss.layered import objective_of
from fedpriv.loss.losses import AbsoluteError, CrossEntropy, Loss, SquaredError
from fedpriv.loss.models import add_model
from fedpriv.loss.objective import Objective
from fedpriv.loss.rows import Model, ModuleSettings, flat_pixels
from fedpriv.loss.weights import Started

Factory = Callable[[tuple[int, ...], int], nn.Module]
"""From the shape of one record and the number of classes (0: a regression) to an untrained module."""

REGRESSION_LOSSES: dict[str, Loss] = {"squared": SquaredError(), "absolute": AbsoluteError()}


def add_module(
    name: str,
    factory: Factory,
    *,
    shape: tuple[int, ...] | None = None,
    regression: bool = False,
    loss: str = "squared",
) -> None:
    """Make `model.name = name` mean the module that `factory(shape, classes)` returns.

    The module maps (records, *shape) to (records, classes), or to (records, 1) for a regression; bytes come as
    pixels / 255.  `shape` is that of one record, such as (1, 28, 28); left out, records come flat.  x_1 follows
    from the scenario's `model.initial_seed`.  The loss is the cross-entropy, for a regression "squared" or
    "absolute".

    Each record's gradient is taken alone, so layers that mix records (BatchNorm), draw random numbers (Dropout) or
    change buffers are refused when the model is used.  InputError for the name of a shipped model.
    """
    if loss not in REGRESSION_LOSSES:
        raise InputError(f"add_model: loss = {loss!r}: accepted are {', '.join(map(repr, REGRESSION_LOSSES))}")

    def objective(flat: tuple[int, ...], classes: int, dtype: torch.dtype, settings: ModuleSettings) -> Objective:
        record = flat if shape is None else shape
        check_shape(record, flat, name)
        module = reshaped(factory(record, classes), record)
        check_outputs(module, math.prod(record), classes or 1, name)
        chosen = CrossEntropy() if classes else REGRESSION_LOSSES[loss]
        return objective_of(module.to(dtype), math.prod(record), chosen, settings.initial_seed, dtype)

    add_model(name, Model(ModuleSettings, flat_pixels, objective, regression=regression))


def add_given(name: str, module: nn.Module, record: tuple[int, ...], *, regression: bool, loss: str) -> None:
    """As `add_module`, for one module whose parameters are x_1; it is copied, and what is not trained stays."""
    held = copy.deepcopy(module).to("cpu")

    def objective(flat: tuple[int, ...], classes: int, dtype: torch.dtype, _settings: ModuleSettings) -> Objective:
        check_shape(record, flat, name)
        whole = reshaped(copy.deepcopy(held).to(dtype), record)
        check_outputs(whole, math.prod(record), classes or 1, name)
        chosen = CrossEntropy() if classes else REGRESSION_LOSSES[loss]
        return Started(objective_of(whole, math.prod(record), chosen, 0, dtype), whole)

    add_model(name, Model(ModuleSettings, flat_pixels, objective, regression=regression))
