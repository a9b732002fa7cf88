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
from fedpriv.data.layout import Input, Layout
from fedpriv.loss.alone import reason_of
from fedpriv.loss.imported import check_outputs, check_shape
from fedpriv.loss.layered import objective_of
from fedpriv.loss.losses import Choice, Loss, OfFunction
from fedpriv.loss.module import ModuleObjective, OfModule
from fedpriv.loss.objective import Batch, Evaluation, Increment, Objective, Query, Records, RecordView, Slots, View


class Tokens(nn.Module):
    """Whole numbers among floats as int64."""

    def forward(self, values: Tensor) -> Tensor:
        return values.long()


class Apart(nn.Module):
    """Gives `module` its inputs, cut out of flat rows, in their shapes and types."""

    def __init__(self, module: nn.Module, inputs: Sequence[Input]) -> None:
        super().__init__()
        self.module, self.inputs = module, tuple(inputs)

    def forward(self, rows: Tensor) -> Tensor:
        given = [
            _typed(part, each).reshape(len(rows), *each.shape)
            for part, each in zip(
                torch.split(rows, [each.size for each in self.inputs], dim=1), self.inputs, strict=True
            )
        ]
        outputs: Tensor = self.module(*given)
        return outputs


def _typed(values: Tensor, of: Input) -> Tensor:
    if of.kind == "numbers":
        return values
    return values.long() if of.kind == "tokens" else values != 0


def shown(module: nn.Module, inputs: Sequence[Input], record: tuple[int, ...]) -> nn.Module:
    """The module behind what gives flat rows their shapes and types back; `record` is that of a single input."""
    if len(inputs) > 1:
        return Apart(module, inputs)
    before: list[nn.Module] = [Tokens()] if inputs[0].kind == "tokens" else []
    if len(record) != 1:
        before.append(nn.Unflatten(1, record))
    return nn.Sequential(*before, module) if before else module


@dataclass(frozen=True)
class Labelled(RecordView):
    """`base`, for records whose labels lie behind their features; `base` sees them as (..., B, *shape).

    Guarantee: none of its own; each record's labels are its own row's.
    """

    layout: Layout

    def at(self, slots: Slots) -> Self:
        return replace(self, base=self.base.at(slots))

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        return self.base.increment(query, self._apart(batch), clip)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.base.per_record(query, self._apart(batch), rows, clip)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        return self.base.gradient(point, self._apart(batch))

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self.base.losses(point, self.labelled(records))

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self.base.outputs(point, self.labelled(records))

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        return self.base.evaluate(point, self.labelled(records))

    @property
    def judges(self) -> bool:
        """Whether the loss says what is right."""
        return not isinstance(_of_module(self.base).loss, OfFunction)

    def told(self, point: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The share of its labels that each record's outputs say right, and its loss, (..., B) both."""
        own, base = self.labelled(records), _of_module(self.base)
        outputs = self.base.outputs(point, own)
        each = own.labels.unsqueeze(-1 - len(self.layout.labels))  # every record a batch of one
        right = base.loss.accuracy(outputs.unsqueeze(point.dim()), each)
        assert right is not None  # `judges`
        return right, base.loss.value(outputs, own.labels)

    def labelled(self, records: Records) -> Records:
        """The records with all of their labels, (..., B, *shape)."""
        features, behind = torch.split(records.features, [self.layout.width, prod(self.layout.labels)], dim=-1)
        labels = behind.long() if self.layout.classes else behind
        return Records(features, labels.reshape(*labels.shape[:-1], *self.layout.labels))

    def _apart(self, batch: Batch) -> Batch:
        return Batch(self.labelled(batch.records), batch.weights)


def labelled_of(objective: Objective) -> Labelled | None:
    """The objective of several labels a record behind views; None if there is none."""
    while isinstance(objective, View) and not isinstance(objective, Labelled):
        objective = objective.base
    return objective if isinstance(objective, Labelled) else None


def _of_module(objective: Objective) -> OfModule:
    while isinstance(objective, View):
        objective = objective.base
    assert isinstance(objective, OfModule)  # `objective_over` makes no other
    return objective


def objective_over(
    module: nn.Module,
    layout: Layout,
    record: tuple[int, ...],
    choice: Choice,
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
        check_shape(record, (layout.width,), name)
        inputs = (Input(record, inputs[0].kind),)
    whole = shown(module, inputs, record).to(dtype)
    loss, needed = choice.of(layout.labels, classes)
    given = check_outputs(whole, layout.width, needed, name, inputs=inputs, why=_why(layout, classes))
    if isinstance(loss, OfFunction) and not any(each.is_meta for each in whole.parameters()):
        loss = _checked(replace(loss, axes=len(given)), given, classes, dtype)
    if isinstance(loss, OfFunction) or (needed is not None and len(needed) > 1):
        base: Objective = ModuleObjective(whole, loss, seed, dtype)
    else:
        base = objective_of(whole, layout.width, loss, seed, dtype)
    return Labelled(base, layout) if layout.labels else base, whole


def _why(layout: Layout, classes: int) -> str:
    several = f" for each of its labels {layout.labels}" if layout.labels else ""
    if classes:
        return (
            f": an output for each of {classes} classes{several}, since labels are 0 … {classes - 1} (labels that "
            "begin with 1 are labels - 1 here)"
        )
    return (
        f": one output{several}, since labels are floats and so real numbers (classes are whole numbers: "
        "labels.astype(int))"
    )


def _checked(loss: OfFunction, given: tuple[int, ...], classes: int, dtype: torch.dtype) -> Loss:
    """InputError unless the function gives one number for the outputs and the label of one record."""
    label = torch.zeros(loss.label, dtype=torch.int64 if classes else dtype)
    try:
        found = loss.function(torch.zeros(given, dtype=dtype), label)
    except Exception as error:  # whatever somebody's function does
        raise CodeError(
            f"loss: the function fails on outputs {given} and a label of shape {loss.label}", reason_of(error)
        ) from None
    if not isinstance(found, Tensor) or found.shape != ():
        raise InputError(
            f"loss: the function must give one number, a tensor of shape (), for outputs {given} and a label of "
            f"shape {loss.label} of one record"
        )
    return loss
