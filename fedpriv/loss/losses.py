"""Losses of a model's outputs, with their derivatives by the outputs."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Loss(Protocol):
    """A loss of one record's outputs; all methods take outputs (..., B, outputs) and labels (..., B).

    Axes of the outputs that the labels lack are broadcast: several models may be judged on one batch.
    """

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each record, (..., B)."""
        ...

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Its derivative by the outputs, (..., B, outputs)."""
        ...

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """The share of right predictions, (...); None where predictions are not right or wrong."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """-log softmax(outputs)[label], natural logarithm; labels are integers 0 … outputs-1."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        right = labels.expand(outputs.shape[:-1]).unsqueeze(-1)
        return outputs.logsumexp(-1) - outputs.gather(-1, right).squeeze(-1)

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        right = labels.expand(outputs.shape[:-1]).unsqueeze(-1)
        return outputs.softmax(-1).scatter_add(-1, right, outputs.new_full((), -1.0).expand(right.shape))

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        right = outputs.max(-1).indices == labels  # argmax takes five times as long
        return right.to(outputs.dtype).mean(-1)


@dataclass(frozen=True)
class SquaredError:
    """(output - label)² / 2 of one output; labels are floats."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.slope(outputs, labels).squeeze(-1).square() / 2.0

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels)

    def accuracy(self, outputs: Tensor, labels: Tensor) -> None:
        """None: a prediction is near, not right."""


@dataclass(frozen=True)
class AbsoluteError:
    """|output - label| of one output; labels are floats.  Its slope is the sign, 0 where the two are equal."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels).squeeze(-1).abs()

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels).sign()

    def accuracy(self, outputs: Tensor, labels: Tensor) -> None:
        """None: a prediction is near, not right."""


@dataclass(frozen=True)
class Logistic:
    """log(1 + exp(output)) - label · output of one output; labels are 0.0 or 1.0."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        score = outputs.squeeze(-1)
        return functional.softplus(score) - labels * score

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.sigmoid() - labels.unsqueeze(-1)

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return ((outputs.squeeze(-1) > 0) == (labels > 0.5)).to(outputs.dtype).mean(-1)


@dataclass(frozen=True)
class Sigmoid:
    """1 / (1 + exp(m)) with the margin m = ±output of one output; labels are 0.0 or 1.0.  It is never above 1."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (-self._signs(labels) * outputs).sigmoid().squeeze(-1)

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -self._signs(labels) * outputs.sigmoid() * (-outputs).sigmoid()

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return Logistic().accuracy(outputs, labels)

    def _signs(self, labels: Tensor) -> Tensor:
        return (2.0 * labels - 1.0).unsqueeze(-1)


@dataclass(frozen=True)
class SizeError:
    """| |output|^power - label^power | of one output; labels are sizes.  Its slope is 0 at a kink."""

    power: Literal[1, 2]

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._residual(outputs, labels).squeeze(-1).abs()

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        by_size = outputs.sign() if self.power == 1 else 2.0 * outputs
        return self._residual(outputs, labels).sign() * by_size

    def accuracy(self, outputs: Tensor, labels: Tensor) -> None:
        """None: a size is near, not right."""

    def _residual(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.abs() ** self.power - labels.to(outputs.dtype).unsqueeze(-1) ** self.power


@dataclass(frozen=True)
class Reward:
    """-output of one output, whatever the label is."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -outputs.squeeze(-1)

    def slope(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -torch.ones_like(outputs)

    def accuracy(self, outputs: Tensor, labels: Tensor) -> None:
        """None: nothing is predicted."""


def _residual(outputs: Tensor, labels: Tensor) -> Tensor:
    """(..., B, 1): what the one output is above its label."""
    if outputs.shape[-1] != 1:
        raise ValueError(f"an error of regression is of one output, not {outputs.shape[-1]}")
    return outputs - labels.unsqueeze(-1)
