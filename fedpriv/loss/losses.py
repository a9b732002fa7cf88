"""Losses of a model's outputs, their derivatives by the outputs, and measures of survival models.

A loss has a value, an output gradient and an accuracy for a batch of records (`Loss`).  `LOSSES` has the losses
that users name, and `LossChoice` makes one for labels of a known shape.

`HazardLoss` is for the time until an event, in K public bins.  A label is one of 2K + 1 classes, m + (K + 1) δ.
There m is the number of bins survived, and δ = 1 if the event was observed, in bin m.  With outputs h (K,),
sigmoid(h_i) is the hazard of bin i (Gensheimer & Narasimhan 2019, whose outputs are 1 - hazard):

    loss = Σ_{i<m} softplus(h_i) + δ softplus(-h_m)

S(k) = Π_{i ≤ k} (1 - sigmoid(h_i)) is the probability of survival to the end of bin k.  Two measures use it:

* `concordance`, Antolini's index (Antolini et al. 2005): the share of comparable pairs of records whose order is
  predicted right.
* `integrated_brier` (Graf et al. 1999): the squared error of S(k), averaged over bins.  Errors are weighted by
  1/G to make up for censored records.  G(k) is the Kaplan-Meier estimate of the probability of no censoring in
  bins 0 … k-1.  An event comes before a censoring of the same bin.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from fedpriv.core.errors import InputError, refuse
from fedpriv.data.layout import IGNORED_CLASS


def bin_count(classes: int) -> int:
    """Number of bins K of 2K + 1 classes."""
    return (classes - 1) // 2


def decode_labels(labels: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Decode labels (...) into bins survived and whether the event was observed, (m, δ), each (...).

    Labels outside of 0 … 2K are clamped to that range.
    """
    clamped = labels.long().clamp(0, 2 * bins)
    return clamped % (bins + 1), clamped > bins


class Unjudged:
    """Base of losses whose predictions are neither right nor wrong, such as those of a regression."""

    def accuracy(self, outputs: Tensor, labels: Tensor) -> None:
        """Return None: no prediction is right or wrong."""


@dataclass(frozen=True)
class HazardLoss(Unjudged):
    """Negative log-likelihood Σ_{i<m} softplus(h_i) + δ softplus(-h_m) of outputs h, (..., B, K)."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        is_survived, is_event = self._survived_and_event(outputs, labels)
        return (is_survived * functional.softplus(outputs) + is_event * functional.softplus(-outputs)).sum(-1)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        is_survived, is_event = self._survived_and_event(outputs, labels)
        return is_survived * outputs.sigmoid() - is_event * (-outputs).sigmoid()

    def _survived_and_event(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Indicators of the bins that a record survived, and of the bin of its event, (..., B, K) each.

        A record without an observed event has no bin of an event.
        """
        bins = outputs.shape[-1]
        survived_count, is_observed = decode_labels(labels, bins)
        bin_index = torch.arange(bins, device=outputs.device)
        is_survived = bin_index < survived_count.unsqueeze(-1)
        return is_survived.to(outputs.dtype), (
            (bin_index == survived_count.unsqueeze(-1)) & is_observed.unsqueeze(-1)
        ).to(outputs.dtype)


def survival_curve(outputs: Tensor) -> Tensor:
    """Survival probabilities S(0) … S(K-1), (..., n, K), of outputs (..., n, K)."""
    return functional.logsigmoid(-outputs).cumsum(-1).exp()


def concordance(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute Antolini's concordance index, 1 for a perfect order and 1/2 on average for a random one.

    A pair is a record with an event in a bin m, and a record that survived bin m.  The index is the share of pairs
    in which the first record has the smaller S(m), its predicted probability to survive bins 0 … m.  Ties count
    half.

    Args:
        outputs: Outputs h of all records, (..., n, K), whose leading axes are models.
        labels: Labels (n,), integers 0 … 2K that `decode_labels` decodes.

    Returns:
        The index of each model, (...), 0 if there are no pairs, or NaN if one of its outputs is NaN.
    """
    bins = outputs.shape[-1]
    (survived_counts, is_observed), survival = decode_labels(labels, bins), survival_curve(outputs)
    wins, pair_count = outputs.new_zeros(outputs.shape[:-2], dtype=torch.float64), 0
    for bin_index in range(bins):
        has_event, survives = is_observed & (survived_counts == bin_index), survived_counts > bin_index
        if not (bin_pairs := int(has_event.sum()) * int(survives.sum())):
            continue
        # For each event, survivors with a smaller S(m), and with one that is not larger.
        sorted_survivors = survival[..., survives, bin_index].sort(dim=-1).values.contiguous()
        event_survival = survival[..., has_event, bin_index].contiguous()
        below_counts, up_to_counts = (
            torch.searchsorted(sorted_survivors, event_survival, right=right).double() for right in (False, True)
        )
        wins = wins + (int(survives.sum()) - (below_counts + up_to_counts) / 2.0).sum(-1)
        pair_count += bin_pairs
    return (wins / max(1, pair_count)).to(outputs.dtype).where(~outputs.isnan().any(-1).any(-1), torch.nan)


def integrated_brier(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the integrated Brier score, the mean squared error of S(k) over bins, the lower the better.

    S(k) is the predicted probability to survive bin k, and G(k) the probability of no censoring before bin k,
    which is estimated from the labels (`_censoring_survival`).  The error of bin k for n records is

        1/n (Σ_{event in bin m ≤ k} S(k)²/G(m) + Σ_{m > k} (1 - S(k))²/G(k+1))

    Args:
        outputs: Outputs h of all records, (..., n, K), whose leading axes are models.
        labels: Labels (n,), integers 0 … 2K that `decode_labels` decodes.

    Returns:
        The mean over the bins k before the first one with G(k+1) = 0, (...), or 0 if there are none.
    """
    bins = outputs.shape[-1]
    (survived_counts, is_observed), survival = decode_labels(labels, bins), survival_curve(outputs)
    uncensored = _censoring_survival(survived_counts, is_observed, bins)
    total, scored_bins = outputs.new_zeros(outputs.shape[:-2]), 0
    for bin_index in range(bins):
        if not float(uncensored[bin_index + 1]):
            break
        has_event, survives = is_observed & (survived_counts <= bin_index), survived_counts > bin_index
        # `has_event` masks all other records, whose G at a clamped index does not count.
        squared_errors = (
            has_event
            * survival[..., bin_index].square()
            / uncensored[survived_counts.clamp(max=bin_index)].to(outputs.dtype)
        ).sum(-1)
        squared_errors = squared_errors + (survives * (1.0 - survival[..., bin_index]).square()).sum(-1) / float(
            uncensored[bin_index + 1]
        )
        total, scored_bins = total + squared_errors / len(labels), scored_bins + 1
    return total / max(1, scored_bins)


def _censoring_survival(survived_counts: Tensor, is_observed: Tensor, bins: int) -> Tensor:
    """Kaplan-Meier estimate G, (K + 1,): entry k is the probability of no censoring in bins 0 … k-1.

    G(0) = 1 and G(k+1) = G(k) (1 - (censored in bin k) / (at risk in bin k)), or 0 without records at risk.
    Records at risk survived all bins before k, and have no event in bin k.  The arguments are the number of bins
    that each record survived and whether its event was observed, (n,) each, and K.
    """
    uncensored = torch.ones(bins + 1, dtype=torch.float64, device=survived_counts.device)
    for bin_index in range(bins):
        is_in_bin = survived_counts == bin_index
        at_risk = int((survived_counts >= bin_index).sum()) - int((is_in_bin & is_observed).sum())
        uncensored[bin_index + 1] = uncensored[bin_index] * (
            1.0 - int((is_in_bin & ~is_observed).sum()) / at_risk if at_risk else 0.0
        )
    return uncensored


def why_no_pairs(labels: Tensor, bins: int) -> str | None:
    """Return the reason why `concordance` has no pairs for labels (n,) of K bins, or None."""
    survived_counts, is_observed = decode_labels(labels, bins)
    has_pair = is_observed.any() and survived_counts[is_observed].min() < survived_counts.max()
    return None if has_pair else "without an event in a bin that another record survived"


def why_no_scored_bin(labels: Tensor, bins: int) -> str | None:
    """Return the reason why `integrated_brier` has no bin for labels (n,) of K bins, or None."""
    return None if decode_labels(labels, bins)[0].any() else "all seen no longer than the first bin"


class Loss(Protocol):
    """A loss of one record's outputs, for batches of outputs (..., B, outputs) and labels (..., B).

    Labels are broadcast to leading axes that only the outputs have.  Losses of several labels take labels
    (..., B, *shape), and may take outputs of several axes.
    """

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each record, (..., B)."""
        ...

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Derivative of each record's loss by the outputs, (..., B, outputs)."""
        ...

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Share of right predictions, (...), or None if predictions are neither right nor wrong."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy -log softmax(outputs)[label], with the natural logarithm.

    Labels are integers 0 … outputs-1.
    """

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        label_index = labels.expand(outputs.shape[:-1]).unsqueeze(-1)
        return outputs.logsumexp(-1) - outputs.gather(-1, label_index).squeeze(-1)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        label_index = labels.expand(outputs.shape[:-1]).unsqueeze(-1)
        return outputs.softmax(-1).scatter_add(
            -1, label_index, outputs.new_full((), -1.0).expand(label_index.shape)
        )

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.max(-1).indices == labels).to(outputs.dtype).mean(-1)


@dataclass(frozen=True)
class SquaredError(Unjudged):
    """Squared error (output - label)² / 2 of one output and a float label."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.output_gradient(outputs, labels).squeeze(-1).square() / 2.0

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels)


@dataclass(frozen=True)
class AbsoluteError(Unjudged):
    """Absolute error |output - label| of one output and a float label.

    The derivative is the sign of output - label, and 0 where the two are equal.
    """

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels).squeeze(-1).abs()

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels).sign()


@dataclass(frozen=True)
class LogisticLoss:
    """Logistic loss log(1 + exp(output)) - label · output of one output and a label in [0, 1]."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        score = outputs.squeeze(-1)
        return functional.softplus(score) - labels * score

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.sigmoid() - labels.unsqueeze(-1)

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return ((outputs.squeeze(-1) > 0) == (labels > 0.5)).to(outputs.dtype).mean(-1)


@dataclass(frozen=True)
class SigmoidLoss:
    """Sigmoid loss 1 / (1 + exp(m)) of the margin m = ±output of one output and a label 0 or 1.

    The loss is never above 1.
    """

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
    """Error | |output|^power - label^power | of one output whose label is a size.

    A size is a number of 0 or more.  The derivative is 0 at a kink.
    """

    power: Literal[1, 2]
    """Power of output and label in the error."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._residual(outputs, labels).squeeze(-1).abs()

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._residual(outputs, labels).sign() * (outputs.sign() if self.power == 1 else 2.0 * outputs)

    def _residual(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.abs() ** self.power - labels.to(outputs.dtype).unsqueeze(-1) ** self.power


@dataclass(frozen=True)
class Reward(Unjudged):
    """Loss -output of one output, for any label."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -outputs.squeeze(-1)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -torch.ones_like(outputs)


def _residual(outputs: Tensor, labels: Tensor) -> Tensor:
    """Difference of the one output and its label, (..., B, 1).

    Raises:
        ValueError: The number of outputs is not 1.
    """
    if outputs.shape[-1] != 1:
        raise ValueError(f"a loss of regression takes one output, not {outputs.shape[-1]}")
    return outputs - labels.unsqueeze(-1)


@dataclass(frozen=True)
class HuberLoss(Unjudged):
    """Huber loss of one output and a float label, with the residual r = output - label.

    The loss is r² / 2 for |r| at most 1, and |r| - 1/2 beyond.
    """

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        distance = _residual(outputs, labels).squeeze(-1).abs()
        quadratic_part = distance.clamp(max=1.0)
        return quadratic_part.square() / 2.0 + (distance - quadratic_part)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return _residual(outputs, labels).clamp(-1.0, 1.0)


@dataclass(frozen=True)
class PoissonLoss(Unjudged):
    """Poisson loss exp(output) - label · output of one output and a count.

    The output is the logarithm of the rate.
    """

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        score = outputs.squeeze(-1)
        return score.exp() - labels * score

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.exp() - labels.unsqueeze(-1)


@dataclass(frozen=True)
class LabelSmoothing:
    """Cross-entropy with a `share` of the label spread evenly over all classes (Szegedy et al. 2016)."""

    share: float
    """Share of the label that is spread, in [0, 1)."""

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
    """`base` times the weight of the label's class.

    A label between 0 and 1 has the weight of class 0.  Weights are public.
    """

    base: Loss
    """Loss that is multiplied."""
    weights: tuple[float, ...]
    """Factor of the loss by class, 0 or more."""

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
    """Mean of `base` over the labels of a record, (..., B, *shape).

    Outputs are (..., B, *shape) if `has_single_output`, and (..., B, *shape, classes) otherwise.  If
    `ignores_missing`, labels `IGNORED_CLASS` do not count; a record without other labels has loss 0.
    """

    base: Loss
    """Loss of one label."""
    label_axes: int
    """Number of axes of one record's labels."""
    has_single_output: bool
    """Whether a label has one output, without an axis of outputs."""
    ignores_missing: bool
    """Whether labels `IGNORED_CLASS` are missing."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        flat_outputs, classes, is_counted = self._flatten_labels(outputs, labels)
        return (self.base.value(flat_outputs, classes) * is_counted).sum(-1) / is_counted.sum(-1).clamp(min=1.0)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        flat_outputs, classes, is_counted = self._flatten_labels(outputs, labels)
        label_weights = is_counted / is_counted.sum(-1, keepdim=True).clamp(min=1.0)
        return (self.base.output_gradient(flat_outputs, classes) * label_weights.unsqueeze(-1)).reshape(
            outputs.shape
        )

    def accuracy(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Share of right predictions among all records' labels that count, (...), or 0 if none counts.

        The result is None if `base` has no accuracy.
        """
        flat_outputs, classes, is_counted = self._flatten_labels(outputs, labels)
        is_right = self.base.accuracy(flat_outputs.unsqueeze(-2), classes.unsqueeze(-1))  # share of a single label
        return (
            None
            if is_right is None
            else (is_right * is_counted).sum((-2, -1)) / is_counted.sum((-2, -1)).clamp(min=1.0)
        )

    def _flatten_labels(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs (..., B, n, classes), labels (..., B, n), and 1 where a label counts, (..., B, n).

        A missing label is replaced by 0.
        """
        flat_outputs = outputs.unsqueeze(-1) if self.has_single_output else outputs
        flat_outputs, classes = flat_outputs.flatten(-1 - self.label_axes, -2), labels.flatten(-self.label_axes)
        is_counted = (
            (classes != IGNORED_CLASS) if self.ignores_missing else torch.ones_like(classes, dtype=torch.bool)
        )
        return flat_outputs, classes.where(is_counted, 0), is_counted.to(outputs.dtype)


@dataclass(frozen=True)
class FunctionLoss(Unjudged):
    """Loss by a function of one record's outputs and labels, differentiated by torch.func.

    The function is trusted to keep no state between calls.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    """Function of one record's outputs and all of its labels that returns the loss, ()."""
    label_shape: tuple[int, ...]
    """Shape of one record's labels."""
    output_axes: int
    """Number of axes of one record's outputs."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._map_records(self.function, outputs, labels)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._map_records(grad(self.function), outputs, labels)

    def _map_records(
        self, record_function: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, labels: Tensor
    ) -> Tensor:
        leading = outputs.dim() - self.output_axes  # axes before those of one record's outputs, each with a vmap
        batch_function = record_function
        for _ in range(leading):
            batch_function = vmap(batch_function)
        return batch_function(outputs, labels.expand(*outputs.shape[:leading], *self.label_shape))


def predict_labels(loss: Loss, outputs: Tensor) -> Tensor:
    """Predict the class of each label, or its value, from outputs (n, *outputs).

    For the cross-entropy the class is that of the largest output.  For losses of a single logit the class is 1 if
    the logit is above 0, else 0.  For other losses the result is the outputs.

    Args:
        loss: Loss that the model was trained with.
        outputs: Outputs of n records.

    Returns:
        Classes, (n,) for one label and (n, *labels) for several, or outputs, in which a single output of a label
        has no axis.
    """
    has_label_axes = isinstance(loss, MeanOverLabels)
    while isinstance(loss, MeanOverLabels | ClassWeighting):
        loss = loss.base
    if isinstance(loss, CrossEntropy | LabelSmoothing):
        return outputs.argmax(-1)
    # Outputs (n, 1) of a single label lose their last axis.  Outputs of several labels have no such axis.
    is_kept = has_label_axes or outputs.dim() < 2 or outputs.shape[-1] != 1
    values = outputs if is_kept else outputs.squeeze(-1)
    return (values > 0).long() if isinstance(loss, LogisticLoss | SigmoidLoss) else values


class LossKind(NamedTuple):
    """A loss with a name, and the labels and outputs that it takes."""

    base: Loss
    """Loss of one label."""
    takes_classes: bool | None
    """Labels that the loss is for: classes (True), numbers (False), or 0, 1 and numbers between (None)."""
    has_single_output: bool
    """Whether a label has one output instead of `output_count` outputs."""
    output_count: Callable[[int], int] = int
    """Number of outputs of a label for a number of classes, not used if `has_single_output`."""
    class_count: Callable[[int], int] = int
    """Number of classes for a number of outputs of a label, not used if `has_single_output`."""


LOSSES: Mapping[str, LossKind] = {
    "cross-entropy": LossKind(CrossEntropy(), True, False),
    "binary": LossKind(LogisticLoss(), None, True),
    "squared-error": LossKind(SquaredError(), False, True),
    "absolute-error": LossKind(AbsoluteError(), False, True),
    "huber": LossKind(HuberLoss(), False, True),
    "poisson": LossKind(PoissonLoss(), False, True),
    "hazard": LossKind(HazardLoss(), True, False, bin_count, lambda bins: 2 * bins + 1),
}


@dataclass(frozen=True)
class LossChoice:
    """Loss that a caller chooses: a name in `LOSSES`, or a function of one record's output and label."""

    name: str
    """Name in `LOSSES`, or any name if there is a function."""
    function: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function of one record's output and label that returns its loss, (), or None for a loss by name."""
    class_weights: tuple[float, ...] = ()
    """Factor of a label's loss by class, or empty for a factor of 1."""
    label_smoothing: float = 0.0
    """Share of a label that is spread evenly over all classes, in [0, 1)."""

    def check(self) -> None:
        """Check that the name is known, if there is no function, and that the settings fit the loss.

        Raises:
            InputError: There is no function and the name is unknown, or a setting is invalid or of another loss.
        """
        refuse(
            {
                f"loss = {self.name!r}: accepted are {', '.join(map(repr, LOSSES))}, or a function of one "
                "record's output and label": self.function is None and self.name not in LOSSES,
                "label_smoothing: goes with the loss 'cross-entropy' only": (
                    self.label_smoothing and (self.function is not None or self.name != "cross-entropy")
                ),
                f"label_smoothing = {self.label_smoothing}: expected 0 or more, and less than 1": (
                    not 0.0 <= self.label_smoothing < 1.0
                ),
                "class_weights: go with the losses 'cross-entropy' and 'binary' only": (
                    self.class_weights
                    and (self.function is not None or self.name not in ("cross-entropy", "binary"))
                ),
                f"class_weights = {list(self.class_weights)}: expected finite numbers, 0 or more": not all(
                    0.0 <= weight < math.inf for weight in self.class_weights
                ),
            }
        )

    def make_loss(self, label: tuple[int, ...], classes: int) -> tuple[Loss, tuple[int, ...] | None]:
        """Make the loss for labels of a shape, and find the shape of the outputs that it needs.

        A loss by name is the mean over the labels of a record if they are an array (`MeanOverLabels`).  A function
        gets all labels of a record in one call.

        Args:
            label: Shape of one record's labels, or () for a single label.
            classes: Number of classes, or 0 if labels are numbers.

        Returns:
            The loss, and the shape of one record's outputs, or None for a function, which takes any number.

        Raises:
            InputError: The choice is invalid, the loss is for other labels, or the class weights are not one for
                each class.
        """
        self.check()
        if self.function is not None:
            return FunctionLoss(self.function, label, 1), None
        kind = LOSSES[self.name]
        if kind.takes_classes is not None and kind.takes_classes != (classes > 0):
            actual = f"classes 0 … {classes - 1}" if classes else "numbers"
            raise InputError(
                f"loss = {self.name!r}: is for labels that are {_describe_labels(kind)}, and they are {actual}"
            )
        # Losses of 0, 1 and numbers between (None) take two classes at most.
        if kind.takes_classes is None and classes > 2:
            raise InputError(
                f"loss = {self.name!r}: is for labels that are {_describe_labels(kind)}, not 0 … {classes - 1}"
            )
        # Only some numbers of classes have outputs, such as 2K + 1 classes for K bins.
        if not kind.has_single_output and kind.class_count(kind.output_count(classes) or 1) != classes:
            raise InputError(
                f"loss = {self.name!r}: is for {', '.join(str(kind.class_count(bins)) for bins in (1, 2, 3))}, … "
                f"classes, and here are {classes}"
            )
        if self.class_weights and len(self.class_weights) != (
            weight_count := 2 if kind.has_single_output else classes
        ):
            raise InputError(
                f"class_weights: expected {weight_count} numbers, one for each class, and there are "
                f"{len(self.class_weights)}"
            )
        # The outputs of one label are repeated for every label of a record.
        base = LabelSmoothing(self.label_smoothing) if self.label_smoothing else kind.base
        loss = ClassWeighting(base, self.class_weights) if self.class_weights else base
        # A single output of a label has no axis, but the output of a record with one label has one of length 1.
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
