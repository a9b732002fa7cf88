"""Modules over records of any public layout: tokens stay whole numbers, several inputs and labels come apart.

| | |
|---|---|
| `shown` | a module that takes flat rows (B, width) in place of what it takes itself |
| `Labelled` | an objective whose records have several labels each, behind their features |
| `objective_over` | a module's objective for records of a layout and a loss that is chosen |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor, nn

from fedpriv.core.errors import CodeError, InputError
from fedpriv.core.replicates import Scalar
from fedpriv.data.layout import FeatureLayout, InputLayout
from fedpriv.loss.alone import reason_of
from fedpriv.loss.imported import check_outputs, check_record_shape
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import FunctionLoss, Loss, LossChoice
from fedpriv.loss.module import BaseModuleObjective, ModuleObjective
from fedpriv.loss.objective import (
    Batch,
    BatchLayout,
    Increment,
    ModelEvaluation,
    Objective,
    Query,
    Records,
    RecordView,
    View,
)


class TokenCast(nn.Module):
    """Whole numbers among floats as int64."""

    def forward(self, values: Tensor) -> Tensor:
        return values.long()


class InputSplitter(nn.Module):
    """Gives `module` its inputs, cut out of flat rows, in their shapes and types."""

    def __init__(self, module: nn.Module, inputs: Sequence[InputLayout]) -> None:
        super().__init__()
        self.module, self.inputs = module, tuple(inputs)

    def forward(self, rows: Tensor) -> Tensor:
        given = [
            _cast_input(part, each).reshape(len(rows), *each.shape)
            for part, each in zip(
                torch.split(rows, [each.size for each in self.inputs], dim=1), self.inputs, strict=True
            )
        ]
        outputs: Tensor = self.module(*given)
        return outputs


def _cast_input(values: Tensor, of: InputLayout) -> Tensor:
    if of.kind == "numbers":
        return values
    return values.long() if of.kind == "tokens" else values != 0


def wrap_module(module: nn.Module, inputs: Sequence[InputLayout], record: tuple[int, ...]) -> nn.Module:
    """The module behind what gives flat rows their shapes and types back; `record` is that of a single input."""
    if len(inputs) > 1:
        return InputSplitter(module, inputs)
    before: list[nn.Module] = [TokenCast()] if inputs[0].kind == "tokens" else []
    if len(record) != 1:
        before.append(nn.Unflatten(1, record))
    return nn.Sequential(*before, module) if before else module


@dataclass(frozen=True)
class LabelledView(RecordView):
    """`base`, for records whose labels lie behind their features; `base` sees them as (..., B, *shape).

    Guarantee: none of its own; each record's labels are its own row's.
    """

    layout: FeatureLayout

    def for_batch(self, slots: BatchLayout) -> Self:
        return replace(self, base=self.base.for_batch(slots))

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        return self.base.increment(query, self._labelled_batch(batch), clip)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.base.per_record(query, self._labelled_batch(batch), rows, clip)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        return self.base.gradient(point, self._labelled_batch(batch))

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self.base.losses(point, self.with_labels(records))

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self.base.outputs(point, self.with_labels(records))

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        return self.base.evaluate(point, self.with_labels(records))

    @property
    def has_accuracy(self) -> bool:
        """Whether the loss says what is right."""
        return not isinstance(_find_module_objective(self.base).loss, FunctionLoss)

    def accuracies_and_losses(self, point: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The share of its labels that each record's outputs say right, and its loss, (..., B) both."""
        own, base = self.with_labels(records), _find_module_objective(self.base)
        outputs = self.base.outputs(point, own)
        each = own.labels.unsqueeze(-1 - len(self.layout.label_shape))  # every record a batch of one
        right = base.loss.accuracy(outputs.unsqueeze(point.dim()), each)
        assert right is not None  # `judges`
        return right, base.loss.value(outputs, own.labels)

    def with_labels(self, records: Records) -> Records:
        """The records with all of their labels, (..., B, *shape)."""
        features, behind = torch.split(
            records.features, [self.layout.input_width, prod(self.layout.label_shape)], dim=-1
        )
        labels = behind.long() if self.layout.labels_are_classes else behind
        return Records(features, labels.reshape(*labels.shape[:-1], *self.layout.label_shape))

    def _labelled_batch(self, batch: Batch) -> Batch:
        return Batch(self.with_labels(batch.records), batch.weights)


def find_labelled_view(objective: Objective) -> LabelledView | None:
    """The objective of several labels a record behind views; None if there is none."""
    while isinstance(objective, View) and not isinstance(objective, LabelledView):
        objective = objective.base
    return objective if isinstance(objective, LabelledView) else None


def _find_module_objective(objective: Objective) -> BaseModuleObjective:
    while isinstance(objective, View):
        objective = objective.base
    assert isinstance(objective, BaseModuleObjective)  # `objective_over` makes no other
    return objective


def make_layout_objective(
    module: nn.Module,
    layout: FeatureLayout,
    record: tuple[int, ...],
    choice: LossChoice,
    classes: int,
    seed: int,
    dtype: torch.dtype,
    name: str,
) -> tuple[Objective, nn.Module]:
    """The objective of `module` and what it is computed with; InputError if module, loss and records do not fit.

    `record` is the shape in which the module takes a single input.
    """
    inputs = layout.inputs
    if len(inputs) == 1:
        check_record_shape(record, (layout.input_width,), name)
        inputs = (InputLayout(record, inputs[0].kind),)
    whole = wrap_module(module, inputs, record).to(dtype)
    loss, needed = choice.make_loss(layout.label_shape, classes)
    given = check_outputs(
        whole,
        layout.input_width,
        needed,
        name,
        inputs=inputs,
        why_needed=_describe_needed_outputs(layout, classes),
    )
    if isinstance(loss, FunctionLoss) and not any(each.is_meta for each in whole.parameters()):
        loss = _check_loss_function(replace(loss, output_axes=len(given)), given, classes, dtype)
    if isinstance(loss, FunctionLoss) or (needed is not None and len(needed) > 1):
        base: Objective = ModuleObjective(whole, loss, seed, dtype)
    else:
        base = make_module_objective(whole, layout.input_width, loss, seed, dtype)
    return LabelledView(base, layout) if layout.label_shape else base, whole


def _describe_needed_outputs(layout: FeatureLayout, classes: int) -> str:
    several = f" for each of its labels {layout.label_shape}" if layout.label_shape else ""
    if classes:
        return (
            f": an output for each of {classes} classes{several}, since labels are 0 … {classes - 1} (labels that "
            "begin with 1 are labels - 1 here)"
        )
    return (
        f": one output{several}, since labels are floats and so real numbers (classes are whole numbers: "
        "labels.astype(int))"
    )


def _check_loss_function(loss: FunctionLoss, given: tuple[int, ...], classes: int, dtype: torch.dtype) -> Loss:
    """InputError unless the function gives one number for the outputs and the label of one record."""
    label = torch.zeros(loss.label_shape, dtype=torch.int64 if classes else dtype)
    try:
        found = loss.function(torch.zeros(given, dtype=dtype), label)
    except Exception as error:  # whatever somebody's function does
        raise CodeError(
            f"loss: the function fails on outputs {given} and a label of shape {loss.label_shape}",
            reason_of(error),
        ) from None
    if not isinstance(found, Tensor) or found.shape != ():
        raise InputError(
            f"loss: the function must give one number, a tensor of shape (), for outputs {given} and a label of "
            f"shape {loss.label_shape} of one record"
        )
    return loss
