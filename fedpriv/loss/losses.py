"""Losses of a model's outputs, with their derivatives by the outputs.

Discrete hazards: the time until an event, in K public bins, as a loss of K outputs, and its measures.

A label is one class of 2K + 1: (m, δ) ↦ m + (K + 1) δ, m the bins survived, δ = 1 if the event was seen in bin m
(`TableSchema.survival` makes it of a time and an event).  With h the outputs, sigmoid(h_i) is the hazard of bin i:

    loss = Σ_{i<m} softplus(h_i) + δ softplus(-h_m)

S(k) = Π_{i ≤ k} (1 - sigmoid(h_i)) is survival to the end of bin k.  Antolini's index (`concordance`) is, of pairs
of one with an event in bin m and one who survived it, the share in which the first has the smaller S(m), ties
counted half.  The integrated Brier score is the mean over bins k of the squared error of S(k), weighted by 1/G
against censoring: G is Kaplan and Meier's estimate of not being censored, from the records that are scored; an
event comes before a censoring of the same bin.

Source: Gensheimer & Narasimhan 2019, whose outputs are 1 - hazard; Antolini et al. 2005; Graf et al. 1999.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from fedpriv.core.errors import InputError
from fedpriv.data.layout import IGNORED_CLASS


def bin_count(classes: int) -> int:
    """K of 2K + 1 classes."""
    return (classes - 1) // 2


def decode_labels(labels: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(m, δ) of labels, each (...): bins survived, and whether the event was seen; others are held to one."""
    held = labels.long().clamp(0, 2 * bins)
    return held % (bins + 1), held > bins


class Unjudged:
    """Base of losses whose predictions are neither right nor wrong: a number is near, a hazard is a chance."""

    def accuracy(self, outputs: Tensor, labels: Tensor) -> None:
        """None: nothing is right or wrong."""


@dataclass(frozen=True)
class HazardLoss(Unjudged):
    """Σ_{i<m} softplus(h_i) + δ softplus(-h_m); outputs are h, (..., B, K)."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        survived, died = self._survived_and_event(outputs, labels)
        return (survived * functional.softplus(outputs) + died * functional.softplus(-outputs)).sum(-1)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        survived, died = self._survived_and_event(outputs, labels)
        return survived * outputs.sigmoid() - died * (-outputs).sigmoid()

    def _survived_and_event(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which bins (..., B, K) a record survived, and in which it had its event, as numbers."""
        bins = outputs.shape[-1]
        last, seen = decode_labels(labels, bins)
        place = torch.arange(bins, device=outputs.device)
        survived = place < last.unsqueeze(-1)
        return survived.to(outputs.dtype), ((place == last.unsqueeze(-1)) & seen.unsqueeze(-1)).to(outputs.dtype)


def survival_curve(outputs: Tensor) -> Tensor:
    """S(0) … S(K-1), (..., n, K)."""
    return functional.logsigmoid(-outputs).cumsum(-1).exp()


def concordance(outputs: Tensor, labels: Tensor) -> Tensor:
    bins = outputs.shape[-1]
    (last, seen), alive = decode_labels(labels, bins), survival_curve(outputs)
    won, pairs = torch.zeros(outputs.shape[:-2], dtype=torch.float64), 0
    for each in range(bins):
        died, lived = seen & (last == each), last > each
        if not (count := int(died.sum()) * int(lived.sum())):
            continue
        ordered = alive[..., lived, each].sort(dim=-1).values.contiguous()
        own = alive[..., died, each].contiguous()
        below, upto = (torch.searchsorted(ordered, own, right=right).double() for right in (False, True))
        won = won + (int(lived.sum()) - (below + upto) / 2.0).sum(-1)
        pairs += count
    return (won / max(1, pairs)).to(outputs.dtype)


def integrated_brier(outputs: Tensor, labels: Tensor) -> Tensor:
    bins = outputs.shape[-1]
    (last, seen), alive = decode_labels(labels, bins), survival_curve(outputs)
    kept = _censoring_survival(last, seen, bins)
    total, count = torch.zeros(outputs.shape[:-2], dtype=outputs.dtype), 0
    for each in range(bins):
        if not float(kept[each + 1]):
            break
        died, lived = seen & (last <= each), last > each
        squared = (died * alive[..., each].square() / kept[last.clamp(max=each)].to(outputs.dtype)).sum(-1)
        squared = squared + (lived * (1.0 - alive[..., each]).square()).sum(-1) / float(kept[each + 1])
        total, count = total + squared / len(labels), count + 1
    return total / max(1, count)


def _censoring_survival(last: Tensor, seen: Tensor, bins: int) -> Tensor:
    """G: kept[k] is the chance of not being censored in bins 0 … k-1, (K + 1,)."""
    kept = torch.ones(bins + 1, dtype=torch.float64)
    for each in range(bins):
        here = last == each
        at_risk = int((last >= each).sum()) - int((here & seen).sum())
        kept[each + 1] = kept[each] * (1.0 - int((here & ~seen).sum()) / at_risk if at_risk else 0.0)
    return kept


def why_no_pairs(labels: Tensor) -> str | None:
    """Why these labels have no pairs to be ordered; None if they have."""
    return None if len(torch.unique(labels)) > 1 else "all alike"


class Loss(Protocol):
    """A loss of one record's outputs; all methods take outputs (..., B, outputs) and labels (..., B).

    Axes of the outputs that the labels lack are broadcast: several models may be judged on one batch.
    """

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each record, (..., B)."""
        ...

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
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

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        right = labels.expand(outputs.shape[:-1]).unsqueeze(-1)
        return outputs.softmax(-1).scatter_add(-1, right, outputs.new_full((), -1.0).expand(right.shape))

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        right = outputs.max(-1).indices == labels  # argmax takes five times as long
        return right.to(outputs.dtype).mean(-1)


@dataclass(frozen=True)
class SquaredError(Unjudged):
    """(output - label)² / 2 of one output; labels are floats."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.output_gradient(outputs, labels).squeeze(-1).square() / 2.0

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels)


@dataclass(frozen=True)
class AbsoluteError(Unjudged):
    """|output - label| of one output; labels are floats.  Its slope is the sign, 0 where the two are equal."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels).squeeze(-1).abs()

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels).sign()


@dataclass(frozen=True)
class LogisticLoss:
    """log(1 + exp(output)) - label · output of one output; labels are 0.0 or 1.0."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        score = outputs.squeeze(-1)
        return functional.softplus(score) - labels * score

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.sigmoid() - labels.unsqueeze(-1)

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return ((outputs.squeeze(-1) > 0) == (labels > 0.5)).to(outputs.dtype).mean(-1)


@dataclass(frozen=True)
class SigmoidLoss:
    """1 / (1 + exp(m)) with the margin m = ±output of one output; labels are 0.0 or 1.0.  It is never above 1."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (-self._signs(labels) * outputs).sigmoid().squeeze(-1)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -self._signs(labels) * outputs.sigmoid() * (-outputs).sigmoid()

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return LogisticLoss().accuracy(outputs, labels)

    def _signs(self, labels: Tensor) -> Tensor:
        return (2.0 * labels - 1.0).unsqueeze(-1)


@dataclass(frozen=True)
class SizeError(Unjudged):
    """| |output|^power - label^power | of one output; labels are sizes.  Its slope is 0 at a kink."""

    power: Literal[1, 2]

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._residual(outputs, labels).squeeze(-1).abs()

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._residual(outputs, labels).sign() * (outputs.sign() if self.power == 1 else 2.0 * outputs)

    def _residual(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.abs() ** self.power - labels.to(outputs.dtype).unsqueeze(-1) ** self.power


@dataclass(frozen=True)
class Reward(Unjudged):
    """-output of one output, whatever the label is."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -outputs.squeeze(-1)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -torch.ones_like(outputs)


def _residual(outputs: Tensor, labels: Tensor) -> Tensor:
    """(..., B, 1): what the one output is above its label."""
    if outputs.shape[-1] != 1:
        raise ValueError(f"an error of regression is of one output, not {outputs.shape[-1]}")
    return outputs - labels.unsqueeze(-1)


@dataclass(frozen=True)
class HuberLoss(Unjudged):
    """(output - label)² / 2 of one output where the two differ by at most 1, beyond it |output - label| - 1/2."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        apart = _residual(outputs, labels).squeeze(-1).abs()
        near = apart.clamp(max=1.0)
        return near.square() / 2.0 + (apart - near)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels).clamp(-1.0, 1.0)


@dataclass(frozen=True)
class PoissonLoss(Unjudged):
    """exp(output) - label · output of one output, the logarithm of a rate; labels are counts."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        score = outputs.squeeze(-1)
        return score.exp() - labels * score

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.exp() - labels.unsqueeze(-1)


@dataclass(frozen=True)
class LabelSmoothing:
    """The cross-entropy with a `share` of the label spread evenly over all classes (Szegedy et al. 2016)."""

    share: float

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (1.0 - self.share) * CrossEntropy().value(outputs, labels) + self.share * (
            outputs.logsumexp(-1) - outputs.mean(-1)
        )

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (1.0 - self.share) * CrossEntropy().output_gradient(outputs, labels) + self.share * (
            outputs.softmax(-1) - 1.0 / outputs.shape[-1]
        )

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return CrossEntropy().accuracy(outputs, labels)


@dataclass(frozen=True)
class ClassWeighting:
    """`base` times the weight of the label's class: by public weights, so that no record's depends on others."""

    base: Loss
    weights: tuple[float, ...]

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._label_weights(outputs, labels) * self.base.value(outputs, labels)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._label_weights(outputs, labels).unsqueeze(-1) * self.base.output_gradient(outputs, labels)

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        return self.base.accuracy(outputs, labels)

    def _label_weights(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.new_tensor(self.weights)[labels.long()]


@dataclass(frozen=True)
class MeanOverLabels:
    """The mean of `base` over the `axes` last axes of a record's labels, (..., B, *shape).

    Outputs are (..., B, *shape) where `single`, and (..., B, *shape, classes) otherwise.  Labels of classes that
    are `IGNORED` are left out; a record all of whose are has loss 0.
    """

    base: Loss
    label_axes: int
    has_single_output: bool
    ignores_missing: bool

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        given, known, there = self._flatten_labels(outputs, labels)
        return (self.base.value(given, known) * there).sum(-1) / there.sum(-1).clamp(min=1.0)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        given, known, there = self._flatten_labels(outputs, labels)
        share = there / there.sum(-1, keepdim=True).clamp(min=1.0)
        return (self.base.output_gradient(given, known) * share.unsqueeze(-1)).reshape(outputs.shape)

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Of all labels that count."""
        given, known, there = self._flatten_labels(outputs, labels)
        right = self.base.accuracy(given.unsqueeze(-2), known.unsqueeze(-1))  # the share of one label each
        return None if right is None else (right * there).sum((-2, -1)) / there.sum((-2, -1)).clamp(min=1.0)

    def _flatten_labels(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs (..., B, n, classes), labels (..., B, n) that are classes, and 1 where a label counts."""
        given = outputs.unsqueeze(-1) if self.has_single_output else outputs
        given, known = given.flatten(-1 - self.label_axes, -2), labels.flatten(-self.label_axes)
        there = (known != IGNORED_CLASS) if self.ignores_missing else torch.ones_like(known, dtype=torch.bool)
        return given, known.where(there, 0), there.to(outputs.dtype)


@dataclass(frozen=True)
class FunctionLoss(Unjudged):
    """A function of one record's output and label that gives its loss, with the slope by torch.func.

    `label` is the shape of a record's labels.  The function is trusted to keep nothing between calls.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    label_shape: tuple[int, ...]
    output_axes: int
    """Of one record's output."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._map_records(self.function, outputs, labels)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._map_records(grad(self.function), outputs, labels)

    def _map_records(self, of_one: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, labels: Tensor) -> Tensor:
        leading = outputs.dim() - self.output_axes
        of_all = of_one
        for _ in range(leading):
            of_all = vmap(of_all)
        return of_all(outputs, labels.expand(*outputs.shape[:leading], *self.label_shape))


def predict_labels(loss: Loss, outputs: Tensor) -> Tensor:
    """What outputs (n, *outputs) say: the class of each label, or its value, (n, *labels)."""
    several = isinstance(loss, MeanOverLabels)
    while isinstance(loss, MeanOverLabels | ClassWeighting):
        loss = loss.base
    if isinstance(loss, CrossEntropy | LabelSmoothing):
        return outputs.argmax(-1)
    values = outputs if several or outputs.shape[-1] != 1 else outputs.squeeze(-1)
    return (values > 0).long() if isinstance(loss, LogisticLoss | SigmoidLoss) else values


class LossKind(NamedTuple):
    """A loss by name."""

    base: Loss
    """Of one label."""
    takes_classes: bool | None
    """Whether labels are classes, or numbers; None: classes 0 and 1, or numbers between them."""
    has_single_output: bool
    """Whether a label has one output; otherwise as many as `outputs` gives."""
    output_count: Callable[[int], int] = int
    """From the number of classes."""


LOSSES: Mapping[str, LossKind] = {
    "cross-entropy": LossKind(CrossEntropy(), True, False),
    "binary": LossKind(LogisticLoss(), None, True),
    "squared-error": LossKind(SquaredError(), False, True),
    "absolute-error": LossKind(AbsoluteError(), False, True),
    "huber": LossKind(HuberLoss(), False, True),
    "poisson": LossKind(PoissonLoss(), False, True),
    "hazard": LossKind(HazardLoss(), True, False, bin_count),
}


@dataclass(frozen=True)
class LossChoice:
    """A loss as it is asked for: by a name in `LOSSES`, or as a function of one record's output and label."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor] | None = None
    class_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def check(self) -> None:
        """InputError unless there is such a loss, with such settings."""
        if self.function is None and self.name not in LOSSES:
            raise InputError(
                f"loss = {self.name!r}: accepted are {', '.join(map(repr, LOSSES))}, or a function of one "
                "record's output and label"
            )
        if self.label_smoothing and self.name != "cross-entropy":
            raise InputError("label_smoothing: is of the cross-entropy")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise InputError(f"label_smoothing = {self.label_smoothing}: expected 0 or more, and less than 1")
        if self.class_weights and self.name not in ("cross-entropy", "binary"):
            raise InputError("class_weights: are of the losses of classes, 'cross-entropy' and 'binary'")
        if not all(0.0 <= weight < math.inf for weight in self.class_weights):
            raise InputError(f"class_weights = {list(self.class_weights)}: expected finite numbers, 0 or more")

    def make_loss(self, label: tuple[int, ...], classes: int) -> tuple[Loss, tuple[int, ...] | None]:
        """The loss for a record's labels of this shape, and the outputs (*shape) that it needs; None: any.

        InputError where the labels are others than it is for; `classes` is 0 of numbers.
        """
        self.check()
        if self.function is not None:
            return FunctionLoss(self.function, label, 1), None
        kind = LOSSES[self.name]
        if kind.takes_classes is not None and kind.takes_classes != (classes > 0):
            held = f"classes 0 … {classes - 1}" if classes else "numbers"
            raise InputError(
                f"loss = {self.name!r}: is for labels that are {_describe_labels(kind)}, and they are {held}"
            )
        if kind.takes_classes is None and classes > 2:
            raise InputError(
                f"loss = {self.name!r}: is for labels that are {_describe_labels(kind)}, not 0 … {classes - 1}"
            )
        if self.class_weights and len(self.class_weights) != (each := 2 if kind.has_single_output else classes):
            raise InputError(f"class_weights: expected {each} of them, one a class, not {len(self.class_weights)}")
        base = LabelSmoothing(self.label_smoothing) if self.label_smoothing else kind.base
        loss = ClassWeighting(base, self.class_weights) if self.class_weights else base
        outputs = () if kind.has_single_output else (kind.output_count(classes),)
        return (
            (loss, outputs or (1,))
            if not label
            else (MeanOverLabels(loss, len(label), kind.has_single_output, classes > 0), (*label, *outputs))
        )


def _describe_labels(kind: LossKind) -> str:
    if kind.takes_classes is None:
        return "0 or 1"
    return "classes" if kind.takes_classes else "numbers (floats)"
