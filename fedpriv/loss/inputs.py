"""Modules over flat records of any public layout: tokens, several inputs, and several labels.

| | |
|---|---|
| `wrap_module` | a module that takes flat rows (B, width) and makes its inputs of them |
| `LabelledView` | an objective whose records have several labels each, behind their features |
| `make_layout_objective` | a module's objective for records of a layout and a chosen loss |

An objective is a loss over flat parameters, a view an objective that wraps another one, its `base`, and x_1 the
initial model of a run.
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
from fedpriv.loss.ghost import GhostObjective
from fedpriv.loss.imported import check_outputs, check_record_shape
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import FunctionLoss, Loss, LossChoice, Unjudged
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
    find_innermost_objective,
)


class TokenCast(nn.Module):
    """Cast of tokens, which are integers stored as floats, to int64."""

    def forward(self, values: Tensor) -> Tensor:
        return values.long()


class InputSplitter(nn.Module):
    """Module that cuts flat rows into the inputs of `module`, with their shapes and types."""

    def __init__(self, module: nn.Module, inputs: Sequence[InputLayout]) -> None:
        super().__init__()
        self.module, self.inputs = module, tuple(inputs)

    def forward(self, rows: Tensor) -> Tensor:
        input_values = [
            _cast_input(columns, layout).reshape(len(rows), *layout.shape)
            for columns, layout in zip(
                torch.split(rows, [layout.size for layout in self.inputs], dim=1), self.inputs, strict=True
            )
        ]
        outputs: Tensor = self.module(*input_values)
        return outputs


def _cast_input(values: Tensor, layout: InputLayout) -> Tensor:
    if layout.kind == "numbers":
        return values
    return values.long() if layout.kind == "tokens" else values != 0


def wrap_module(module: nn.Module, inputs: Sequence[InputLayout], record: tuple[int, ...]) -> nn.Module:
    """Put a module behind layers that make its inputs of flat rows.

    Args:
        module: Module to wrap, whose arguments are the inputs, (B, *shape) each.
        inputs: Layout of each input.
        record: Shape of a single input, which is not used for several inputs.

    Returns:
        A module that takes flat rows (B, width), with the values of all inputs of a record side by side.  It gives
        the inputs their shapes, and makes integers of tokens and, of several inputs, truth values of masks.
        For a single flat input other than tokens it is `module` itself.
    """
    if len(inputs) > 1:
        return InputSplitter(module, inputs)
    leading_layers: list[nn.Module] = [TokenCast()] if inputs[0].kind == "tokens" else []
    if len(record) != 1:
        leading_layers.append(nn.Unflatten(1, record))
    return nn.Sequential(*leading_layers, module) if leading_layers else module


@dataclass(frozen=True)
class LabelledView(RecordView):
    """`base` for records whose labels lie behind their features, in the same row.

    `base` gets labels (..., B, *shape), where `shape` is that of one record's labels.

    Guarantee: none of its own; each record's labels are its own row's.
    """

    layout: FeatureLayout
    """Layout of a record's features and labels."""

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
        """Whether the loss judges predictions as right or wrong.

        The losses that extend `Unjudged` do not, a user's function included.
        """
        return not isinstance(
            getattr(loss := _find_module_objective(self.base).loss, "base", loss),  # the loss of one label
            Unjudged,
        )

    def accuracies_and_losses(self, point: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Share of a record's labels that are predicted right, and the record's loss, (..., B) both.

        Missing labels are left out of the share, which is 0 if all labels are missing.

        Args:
            point: Models, (..., d).
            records: Records (B, …) with class labels, which lie behind the features.  `has_accuracy` has to be
                True.
        """
        labelled, base = self.with_labels(records), _find_module_objective(self.base)
        outputs = self.base.outputs(point, labelled)
        # Each record is a batch of one, since `accuracy` is a mean over the records of a batch.
        single_labels = labelled.labels.unsqueeze(-1 - len(self.layout.label_shape))
        accuracies = base.loss.accuracy(outputs.unsqueeze(point.dim()), single_labels)
        assert accuracies is not None  # see `has_accuracy`
        return accuracies, base.loss.value(outputs, labelled.labels)

    def with_labels(self, records: Records) -> Records:
        """Move all labels of the records from their features to `labels`, (..., B, *shape)."""
        features, label_columns = torch.split(
            records.features, [self.layout.input_width, prod(self.layout.label_shape)], dim=-1
        )
        labels = label_columns.long() if self.layout.labels_are_classes else label_columns
        return Records(features, labels.reshape(*labels.shape[:-1], *self.layout.label_shape))

    def _labelled_batch(self, batch: Batch) -> Batch:
        return Batch(self.with_labels(batch.records), batch.weights)


def find_labelled_view(objective: Objective) -> LabelledView | None:
    """Find the view of several labels behind other views, or return None."""
    while isinstance(objective, View) and not isinstance(objective, LabelledView):
        objective = objective.base
    return objective if isinstance(objective, LabelledView) else None


def _find_module_objective(objective: Objective) -> BaseModuleObjective:
    innermost = find_innermost_objective(objective)
    assert isinstance(innermost, BaseModuleObjective)  # `make_layout_objective` makes no other
    return innermost


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
    """Make the objective of a module for records of a layout, and return it with the wrapped module.

    The module is put behind layers that take flat rows (`wrap_module`), converted to `dtype` in place, and its
    outputs are checked against the loss.

    Args:
        module: Module that maps inputs of a batch to outputs.
        layout: Layout of a record's features and labels.
        record: Shape in which the module takes a single input, not used for several inputs.
        choice: Choice of the loss.
        classes: Number of classes, or 0 if labels are numbers.
        seed: Seed of x_1.
        dtype: Type of parameters and outputs.
        name: Name of the model in error messages.

    Returns:
        The objective, behind a `LabelledView` if a record's labels are an array, and the module in a form that
        takes flat rows.

    Raises:
        InputError: Module, loss and records do not fit each other.
    """
    inputs = layout.inputs if len(layout.inputs) > 1 else (InputLayout(record, layout.inputs[0].kind),)
    if len(inputs) == 1:
        check_record_shape(record, (layout.input_width,), name)
    wrapped = wrap_module(module, inputs, record).to(dtype)
    loss, needed_shape = choice.make_loss(layout.label_shape, classes)
    output_shape = check_outputs(
        wrapped,
        layout.input_width,
        needed_shape,
        name,
        inputs=inputs,
        why_needed=_describe_needed_outputs(layout, choice, classes),
    )
    # A module on the meta device cannot be run, so that the shape of its outputs is not known.
    if isinstance(loss, FunctionLoss) and not any(parameter.is_meta for parameter in wrapped.parameters()):
        loss = _check_loss_function(replace(loss, output_axes=len(output_shape)), output_shape, classes, dtype)
    # Closed forms and traces take outputs of one axis.  A user's function is differentiated with the module.
    if isinstance(loss, FunctionLoss) or (needed_shape is not None and len(needed_shape) > 1):
        base: Objective = (GhostObjective if len(output_shape) == 1 else ModuleObjective)(
            wrapped, loss, seed, dtype
        )
    else:
        base = make_module_objective(wrapped, layout.input_width, loss, seed, dtype)
    return LabelledView(base, layout) if layout.label_shape else base, wrapped


def _describe_needed_outputs(layout: FeatureLayout, choice: LossChoice, classes: int) -> str:
    suffix = f" for each of its labels {layout.label_shape}" if layout.label_shape else ""
    if classes and choice.name == "cross-entropy":
        return (
            f": an output for each of {classes} classes{suffix}, since labels are 0 … {classes - 1} (give "
            "labels - 1 if they begin with 1)"
        )
    return (
        f": the outputs of the loss {choice.name!r}{suffix}, for labels 0 … {classes - 1}"
        if classes
        else f": one output{suffix}, since labels are floats and so real numbers "
        "(classes are whole numbers: labels.astype(int))"
    )


def _check_loss_function(loss: FunctionLoss, outputs: tuple[int, ...], classes: int, dtype: torch.dtype) -> Loss:
    """Check that the function maps outputs and label of zeros to one number, and return the loss.

    `outputs` is the shape of one record's outputs, and `classes` is 0 if labels are numbers.

    Raises:
        InputError: The function fails, or returns anything but a tensor of shape ().
    """
    label = torch.zeros(loss.label_shape, dtype=torch.int64 if classes else dtype)
    try:
        value = loss.function(torch.zeros(outputs, dtype=dtype), label)
        if isinstance(value, Tensor):  # as a run calls it, under torch.func.vmap
            loss.value(torch.zeros(1, *outputs, dtype=dtype), label.unsqueeze(0))
    except Exception as error:  # a user's function may raise any error
        raise CodeError(
            f"loss: the function fails on outputs {outputs} and a label of shape {loss.label_shape}",
            reason_of(error),
        ) from None
    if not isinstance(value, Tensor) or value.shape != ():
        raise InputError(
            f"loss: the function must give one number, a tensor of shape (), for outputs {outputs} and a label of "
            f"shape {loss.label_shape} of one record"
        )
    return loss
