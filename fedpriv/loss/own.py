"""A torch module of one's own as a row of the table of models."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.data.layout import layout_of
from fedpriv.loss.inputs import objective_over
from fedpriv.loss.losses import LOSSES, Choice
from fedpriv.loss.models import add_model
from fedpriv.loss.objective import Objective
from fedpriv.loss.rows import Model, ModuleSettings, flat_pixels
from fedpriv.loss.weights import Started

Factory = Callable[[tuple[int, ...], int], nn.Module]
"""From the shape of one record and the number of classes (0: a regression) to an untrained module."""

LossGiven = str | Mapping[str, Any] | Callable[[Tensor, Tensor], Tensor] | None
"""A name, {"name": …, "class_weights": …, "label_smoothing": …}, or a function of a record's output and label."""


def choice_of(loss: LossGiven, *, real: bool) -> Choice:
    """The loss that is asked for; left out, the cross-entropy, or the squared error of `real` labels.

    "squared" and "absolute" are the errors of these names.  Named errors of numbers give way to the cross-entropy
    where labels are classes.  InputError for what is no loss.
    """
    if loss is None:
        return Choice("squared-error" if real else "cross-entropy")
    if callable(loss):
        return Choice(getattr(loss, "__qualname__", "function"), loss)
    try:
        chosen = Choice(loss) if isinstance(loss, str) else Choice(**loss)
    except TypeError:
        raise InputError(f"loss = {loss!r}: accepted keys are name, class_weights and label_smoothing") from None
    name = f"{chosen.name}-error" if f"{chosen.name}-error" in LOSSES else chosen.name
    weights = tuple(float(weight) for weight in chosen.class_weights)
    chosen = Choice(name, None, weights, chosen.label_smoothing)
    chosen.check()
    return chosen


def add_module(
    name: str,
    factory: Factory,
    *,
    shape: tuple[int, ...] | None = None,
    regression: bool = False,
    loss: LossGiven = None,
) -> None:
    """Make `model.name = name` mean the module that `factory(shape, classes)` returns.

    The module maps (records, *shape) to (records, classes), or to (records, 1) for a regression; bytes come as
    pixels / 255, other whole numbers as int64.  `shape` is that of one record, such as (1, 28, 28); left out,
    records come flat; several inputs keep theirs.  x_1 follows from the scenario's `model.initial_seed`.
    The loss is the cross-entropy, for a regression the squared error, or as for `fedpriv.run`.

    Each record's gradient is taken alone, so layers that mix records (BatchNorm), draw random numbers (Dropout) or
    change buffers are refused when the model is used.  InputError for the name of a shipped model.
    """
    choice = choice_of(loss, real=regression)

    def objective(flat: tuple[int, ...], classes: int, dtype: torch.dtype, settings: ModuleSettings) -> Objective:
        layout = layout_of(flat)
        record = (layout.width,) if shape is None else shape
        module = factory(record, classes)
        return objective_over(module, layout, record, choice, classes, settings.initial_seed, dtype, name)[0]

    add_model(name, Model(ModuleSettings, flat_pixels, objective, regression=regression, several_labels=True))


def add_given(name: str, module: nn.Module, record: tuple[int, ...], *, regression: bool, choice: Choice) -> None:
    """As `add_module`, for one module whose parameters are x_1; it is copied, and what is not trained stays."""
    held = copy.deepcopy(module).to("cpu")

    def objective(flat: tuple[int, ...], classes: int, dtype: torch.dtype, _settings: ModuleSettings) -> Objective:
        given = copy.deepcopy(held).to(dtype)
        made, whole = objective_over(given, layout_of(flat), record, choice, classes, 0, dtype, name)
        return Started(made, whole)

    add_model(name, Model(ModuleSettings, flat_pixels, objective, regression=regression, several_labels=True))
