"""Evaluate a model beyond loss and accuracy.

* `SCORES`: pure functions of outputs and labels, many models at once.  Outputs are (..., n, classes) for a
  classification, (..., n, 1) for two classes by one logit or for a regression; labels are (n,), a score is (...).
* `Scored`: an objective whose evaluation has the scores that a scenario asks for, of all test records and silo by
  silo.
* `SummedScores`: scores as sums over test records, which silos send of records that nobody else sees:

      record b gives   (right_b - 1/2,  loss_b / bound - 1/2)     of a classification, loss_b held to [0, bound];
                                                                  right_b is a share where it has several labels
                       (loss_b / bound - 1/2)                     of a regression

  Every coordinate lies in ±1/2, so that one record has norm √2/2, or 1/2, whatever the model is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.inputs import find_labelled_view
from fedpriv.loss.losses import CrossEntropy, concordance, integrated_brier, why_no_pairs
from fedpriv.loss.objective import (
    Batch,
    BatchLayout,
    Deterministic,
    EvaluationView,
    Increment,
    ModelEvaluation,
    Objective,
    Query,
    Records,
    View,
)
from fedpriv.participation.orders import Dependence

Score = Literal["auc", "balanced_accuracy", "calibration_error", "r2", "mae", "concordance", "integrated_brier"]
CALIBRATION_BINS = 15


@dataclass(frozen=True)
class ScoreKind:
    """A score by name: of which labels it is one, which are too few for it, and how it is computed."""

    regression: bool
    why_undefined: Callable[[Tensor], str | None]
    """Why these labels (n,) have no such score; None if they have one.  No model's outputs enter."""
    compute: Callable[[Tensor, Tensor], Tensor]
    survival: bool = False
    """Whether labels are bins survived and events."""


def auc(outputs: Tensor, labels: Tensor) -> Tensor:
    """Area under the ROC curve, ties counted half; for several classes the mean of each one against the others.

    Classes that occur among all labels or none of them have no curve and are left out of the mean.
    """
    scores = to_logits(outputs)
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
    """The Mann-Whitney statistic of scores (..., n) by the mean ranks of positive ones."""
    ordered, own = _sorted(scores), _sorted(scores[..., positive])  # in order each is found near the one before
    below, upto = (torch.searchsorted(ordered, own, right=right).double() for right in (False, True))
    count = own.shape[-1]
    wins = ((below + upto + 1.0) / 2.0).sum(-1) - count * (count + 1) / 2.0
    return (wins / (count * (len(positive) - count))).to(scores.dtype)


def _sorted(scores: Tensor) -> Tensor:
    """Along the last axis; numpy sorts without an index beside each value, in a small part of the time."""
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.float64):
        return scores.sort(dim=-1).values.contiguous()
    return torch.from_numpy(np.sort(np.ascontiguousarray(scores.detach()), axis=-1))


def balanced_accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean, over the classes that occur, of the share of their records that are predicted right."""
    right = (to_logits(outputs).max(-1).indices == labels).to(outputs.dtype)
    counts = torch.bincount(labels)
    sums = right.new_zeros(*right.shape[:-1], len(counts)).index_add_(-1, labels, right)
    return (sums / counts)[..., counts > 0].mean(-1)


def calibration_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Expected calibration error (Guo et al. 2017): |share right - confidence| over 15 bins of equal width."""
    confidence, predicted = to_logits(outputs).softmax(-1).max(-1)
    gap = (predicted == labels).to(outputs.dtype) - confidence
    place = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    sums = torch.zeros(*gap.shape[:-1], CALIBRATION_BINS, dtype=gap.dtype, device=gap.device).scatter_add_(
        -1, place, gap
    )
    return sums.abs().sum(-1) / len(labels)


def r2(outputs: Tensor, labels: Tensor) -> Tensor:
    """1 - (squared errors) / (squared deviations from the labels' mean)."""
    return 1.0 - (outputs.squeeze(-1) - labels).square().sum(-1) / (labels - labels.mean()).square().sum()


def mae(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean absolute error."""
    return (outputs.squeeze(-1) - labels).abs().mean(-1)


def to_logits(outputs: Tensor) -> Tensor:
    """(..., n, classes): one logit is that of class 1 against 0."""
    return outputs if outputs.shape[-1] > 1 else torch.cat([torch.zeros_like(outputs), outputs], dim=-1)


def _one_class(labels: Tensor) -> str | None:
    return "all of one class" if len(torch.unique(labels)) < 2 else None


def _one_value(labels: Tensor) -> str | None:
    return "all of one value" if float(labels.min()) == float(labels.max()) else None


def _always_defined(labels: Tensor) -> str | None:
    return None


SCORES: Mapping[Score, ScoreKind] = {
    "auc": ScoreKind(False, _one_class, auc),
    "balanced_accuracy": ScoreKind(False, _always_defined, balanced_accuracy),
    "calibration_error": ScoreKind(False, _always_defined, calibration_error),
    "r2": ScoreKind(True, _one_value, r2),
    "mae": ScoreKind(True, _always_defined, mae),
    "concordance": ScoreKind(False, why_no_pairs, concordance, survival=True),
    "integrated_brier": ScoreKind(False, _always_defined, integrated_brier, survival=True),
}


MEAN_SUFFIX, WORST_SUFFIX = "mean_of_silos", "worst_silo"
"""Behind a metric's name: over the silos' own test records, every silo counting the same."""
LOWER_IS_BETTER = frozenset({"test_loss", "test_mae", "test_calibration_error", "test_integrated_brier"})


@dataclass(frozen=True)
class ScoreView(EvaluationView):
    """`base`, with `scores` as metrics test_NAME; with `silos` each metric at each silo too, their mean and worst.

    `silos` says how many test records of each silo there are; records come silo by silo, in that order.  `unit` is
    how much of a real target's own unit 1 of a label is: mae is given in that.
    """

    scores: tuple[Score, ...]
    silos: tuple[tuple[str, int], ...] = ()
    label_unit: int | float = 1

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        whole = self._evaluate_part(point, records)
        if not self.silos:
            return whole
        metrics = dict(whole.metrics)
        sizes = [count for _, count in self.silos]
        parts = [
            self._evaluate_part(point, Records(features, labels)).to_metrics()
            for features, labels in zip(
                torch.split(records.features, sizes), torch.split(records.labels, sizes), strict=True
            )
        ]
        for name in parts[0]:
            values = torch.stack([part[name] for part in parts])
            metrics |= {f"{name}_at_{silo}": value for (silo, _), value in zip(self.silos, values, strict=True)}
            metrics[f"{name}_{MEAN_SUFFIX}"] = values.mean(0)
            metrics[f"{name}_{WORST_SUFFIX}"] = values.amax(0) if name in LOWER_IS_BETTER else values.amin(0)
        return whole._replace(metrics=metrics)

    def _evaluate_part(self, point: Tensor, records: Records) -> ModelEvaluation:
        evaluation = self.base.evaluate(point, records)
        if not self.scores:
            return evaluation
        outputs = self.base.outputs(point, records)
        scored = {f"test_{name}": SCORES[name].compute(outputs, records.labels) for name in self.scores}
        if "test_mae" in scored:
            scored["test_mae"] = scored["test_mae"] * self.label_unit
        return evaluation._replace(metrics={**evaluation.metrics, **scored})


def check_scores(
    scores: Sequence[Score],
    labels: Tensor,
    silos: Sequence[tuple[str, int]],
    *,
    regression: bool,
    survival: bool = False,
) -> None:
    """InputError unless all test records, and those of each silo, have these scores."""
    for name in scores:
        kind = SCORES[name]
        if (kind.regression, kind.survival) != (regression, survival):
            asked = (regression, survival)
            known = ", ".join(each for each, it in SCORES.items() if (it.regression, it.survival) == asked)
            labelled = "real numbers" if regression else "times and events" if survival else "classes"
            raise InputError(f"run.metrics: {name} is not for labels that are {labelled}; there are {known}")
        whose = [("all", len(labels)), *silos]
        parts = [labels, *torch.split(labels, [count for _, count in silos])] if silos else [labels]
        for (silo, _), part in zip(whose, parts, strict=False):
            if (reason := kind.why_undefined(part)) is not None:
                where = "the test records" if silo == "all" else f"the test records of {silo!r}"
                remedy = "leave it out" if silo == "all" else "leave it out, or run.per_silo = false"
                raise InputError(f"run.metrics: {name} is not defined, since {where} are {reason}; {remedy}")


@dataclass(frozen=True)
class SummedScores(View):
    """`base`, whose increments are what its test records say about a model: points are models (..., d).

    `dimension` is that of an increment, 2 of a classification and 1 of a regression, not that of a model.

    Guarantee: an increment is a function of its own record and the model, and its norm is at most `norm`, whatever
    the model is: a loss that is not finite counts as `loss_bound`.
    """

    loss_bound: float
    classes: bool

    dependence = Dependence.RECORD
    convex = False

    @property
    def dimension(self) -> int:
        return 2 if self.classes else 1

    @property
    def norm(self) -> float:
        """Of one record's increment, at most."""
        return math.sqrt(self.dimension) / 2.0

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.base.initial().dtype)

    def for_batch(self, slots: BatchLayout) -> Self:
        return self

    def evaluations(self, points: int) -> int:
        """As a gradient has: a forward pass of a model holds about as many values as it has parameters."""
        return points * self.base.dimension

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        total = (self.contributions(query.points[0], batch.records) * batch.weights.double().unsqueeze(-1)).sum(-2)
        return Increment(total, total.new_zeros(total.shape[:-1]))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.contributions(query.points[0], batch.records) * batch.weights.double().unsqueeze(-1)

    def extra_figures(self, mean: Tensor, std: float, places: int, *, groups: bool = True) -> dict[str, float]:
        """Return more figures than `named`, by name, of a mean over so many places with noise of `std`."""
        return {}

    def contributions(self, model: Tensor, records: Records) -> Tensor:
        """(..., B, `dimension`), float64, of `model` (..., d)."""
        if not self.classes:
            return self._scale_losses(self.base.losses(model, records)).unsqueeze(-1)
        if (several := find_labelled_view(self.base)) is not None:
            shares, losses = several.accuracies_and_losses(model, records)
            return torch.stack([shares.double() - 0.5, self._scale_losses(losses)], -1)
        logits = to_logits(self.base.outputs(model, records))
        right = (logits.max(-1).indices == records.labels).double() - 0.5
        return torch.stack([right, self._scale_losses(CrossEntropy().value(logits, records.labels.long()))], -1)

    def _scale_losses(self, losses: Tensor) -> Tensor:
        shares = losses.double() / self.loss_bound
        return shares.nan_to_num(nan=1.0, posinf=1.0, neginf=0.0).clamp(0.0, 1.0) - 0.5

    def to_metrics(self, mean: Tensor) -> dict[str, Tensor]:
        """Means of increments (..., `dimension`) as metrics by name, each (...)."""
        return scores_to_metrics(mean, self.loss_bound, classes=self.classes)


def scores_to_metrics(mean: Tensor, loss_bound: float, *, classes: bool) -> dict[str, Tensor]:
    """Means of increments (..., 2), or (..., 1) of a regression, as metrics by name, each (...)."""
    loss = {"test_loss": (mean[..., -1] + 0.5) * loss_bound}
    return {**loss, "test_accuracy": mean[..., 0] + 0.5} if classes else loss


def make_summed_scores(base: Objective, loss_bound: float, *, classes: bool) -> SummedScores:
    """InputError for a model whose predictions, or losses, cannot be told record by record."""
    name = "outputs" if classes else "losses"
    if getattr(type(base), name, None) is getattr(Deterministic, name):
        raise InputError(
            f"evaluation: {type(base).__name__} gives no {name} record by record; take another model, or "
            "leave the section out"
        )
    if classes and (several := find_labelled_view(base)) is not None and not several.has_accuracy:
        raise InputError("evaluation: a loss of your own does not say what is right; leave the section out")
    return SummedScores(base, loss_bound, classes)
