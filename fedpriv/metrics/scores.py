"""What a field expects beside loss and accuracy, from a model's outputs: pure functions, many models at once.

Outputs are (..., n, classes) for a classification, (..., n, 1) for two classes by one logit or for a regression;
labels are (n,).  Every score is (...).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Score = Literal["auc", "balanced_accuracy", "calibration_error", "r2", "mae"]
BINS = 15


@dataclass(frozen=True)
class ScoreKind:
    """A score by name: of which labels it is one, which are too few for it, and how it is computed."""

    regression: bool
    undefined: Callable[[Tensor], str | None]
    """Why these labels (n,) have no such score; None if they have one.  No model's outputs enter."""
    of: Callable[[Tensor, Tensor], Tensor]


def auc(outputs: Tensor, labels: Tensor) -> Tensor:
    """Area under the ROC curve, ties counted half; for several classes the mean of each one against the others.

    Classes that occur among all labels or none of them have no curve and are left out of the mean.
    """
    scores = logits_of(outputs)
    if scores.shape[-1] == 2:
        return _auc(scores[..., 1] - scores[..., 0], labels == 1)
    shares = scores.softmax(-1)
    curves = [
        _auc(shares[..., each], labels == each)
        for each in range(scores.shape[-1])
        if 0 < int((labels == each).sum()) < len(labels)
    ]
    return torch.stack(curves).mean(0)


def _auc(scores: Tensor, positive: Tensor) -> Tensor:
    """The Mann-Whitney statistic of scores (..., n) by their mean ranks."""
    ordered = scores.sort(dim=-1).values.contiguous()
    own = scores.contiguous()
    below, upto = (torch.searchsorted(ordered, own, right=right).double() for right in (False, True))
    ranks = (below + upto + 1.0) / 2.0
    count = int(positive.sum())
    wins = ranks[..., positive].sum(-1) - count * (count + 1) / 2.0
    return (wins / (count * (len(positive) - count))).to(scores.dtype)


def balanced_accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean, over the classes that occur, of the share of their records that are predicted right."""
    right = (logits_of(outputs).argmax(-1) == labels).to(outputs.dtype)
    return torch.stack([right[..., labels == each].mean(-1) for each in torch.unique(labels)]).mean(0)


def calibration_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Expected calibration error (Guo et al. 2017): |share right - confidence| over 15 bins of equal width."""
    confidence, predicted = logits_of(outputs).softmax(-1).max(-1)
    gap = (predicted == labels).to(outputs.dtype) - confidence
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    sums = torch.zeros(*gap.shape[:-1], BINS, dtype=gap.dtype, device=gap.device).scatter_add_(-1, place, gap)
    return sums.abs().sum(-1) / len(labels)


def r2(outputs: Tensor, labels: Tensor) -> Tensor:
    """1 - (squared errors) / (squared deviations from the labels' mean)."""
    return 1.0 - (outputs.squeeze(-1) - labels).square().sum(-1) / (labels - labels.mean()).square().sum()


def mae(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean absolute error."""
    return (outputs.squeeze(-1) - labels).abs().mean(-1)


def logits_of(outputs: Tensor) -> Tensor:
    """(..., n, classes): one logit is that of class 1 against 0."""
    if outputs.shape[-1] > 1:
        return outputs
    return torch.cat([torch.zeros_like(outputs), outputs], dim=-1)


def _one_class(labels: Tensor) -> str | None:
    return "all of one class" if len(torch.unique(labels)) < 2 else None


def _one_value(labels: Tensor) -> str | None:
    return "all of one value" if float(labels.min()) == float(labels.max()) else None


def _never(labels: Tensor) -> str | None:
    return None


SCORES: Mapping[Score, ScoreKind] = {
    "auc": ScoreKind(False, _one_class, auc),
    "balanced_accuracy": ScoreKind(False, _never, balanced_accuracy),
    "calibration_error": ScoreKind(False, _never, calibration_error),
    "r2": ScoreKind(True, _one_value, r2),
    "mae": ScoreKind(True, _never, mae),
}
