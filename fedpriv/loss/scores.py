"""Scores of a model beyond loss and accuracy.

* `SCORES` has a row for each score, with a pure function of outputs and labels, for many models at once.  Outputs
  are (..., n, classes) for a classification, (..., n, 1) for two classes by one logit or for a regression, and
  (..., n, bins) for survival.  Labels are (n,), and a score is (...).
* `ScoreView` is an objective whose evaluation has the scores that a scenario names, of all test records and, if
  silos are given, silo by silo as well.
* `SummedScores` is an objective whose increments, the contributions of records to a noisy sum, are scores of test
  records.  Record b contributes

      (right_b - 1/2,  loss_b / bound - 1/2)     for a classification
      (loss_b / bound - 1/2)                     for another model, such as a regression

  where loss_b is clamped to [0, bound], and right_b is 1 for a right prediction and else 0, or the share of right
  predictions for several labels.  Every coordinate lies in ±1/2, so that one record has a norm of at most √2/2, or
  1/2, for any model.
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
from fedpriv.loss.losses import CrossEntropy, concordance, integrated_brier, why_no_pairs, why_no_scored_bin
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
    RecordView,
    find_innermost_objective,
)

Score = Literal["auc", "balanced_accuracy", "calibration_error", "r2", "mae", "concordance", "integrated_brier"]
CALIBRATION_BINS = 15


@dataclass(frozen=True)
class ScoreKind:
    """A score with the labels that it is for, and its function of outputs and labels."""

    regression: bool
    """Whether labels are real numbers."""
    why_undefined: Callable[[Tensor, int], str | None]
    """Reason why the score is undefined for labels (n,) and this number of outputs, or None.

    """
    compute: Callable[[Tensor, Tensor], Tensor]
    """Function from outputs and labels to the score, (...)."""
    survival: bool = False
    """Whether labels are bins survived and events."""


def auc(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the area under the ROC curve, with ties counted half.

    For two classes the area is the share of pairs of a record of class 1 and one of class 0 in which the first one
    has the larger score.  For several classes it is the mean over classes of the area of one class against the
    others.  Classes that no record has are left out of the mean.

    Args:
        outputs: Logits, (..., n, classes) or (..., n, 1).
        labels: Classes, (n,), of which at least two occur.

    Returns:
        The area in 0 … 1 for each model, (...), or NaN if the order of scores is not known because one is NaN.
    """
    scores = to_logits(outputs)
    if scores.shape[-1] == 2:
        return _auc(scores[..., 1] - scores[..., 0], labels == 1)
    probabilities = scores.softmax(-1)
    curves = [
        _auc(probabilities[..., label], labels == label)
        for label in range(scores.shape[-1])
        if 0 < int((labels == label).sum()) < len(labels)
    ]
    return torch.stack(curves).mean(0)


def _auc(scores: Tensor, positive: Tensor) -> Tensor:
    """Compute the Mann-Whitney statistic of scores (..., n), from the ranks of the positive records.

    With P positive records of n, the statistic is (Σ ranks - P (P + 1)/2) / (P (n - P)), shape (...), or NaN if a
    score is NaN.  Equal scores have the mean of their ranks.

    Args:
        scores: Scores of all records, (..., n).
        positive: Mask of the positive records, (n,).
    """
    # Positive scores are sorted, too, since successive searches then read the same part of memory.
    sorted_scores, positive_scores = (
        _sorted(scores),
        _sorted(scores[..., positive]),
    )
    below_counts, up_to_counts = (
        torch.searchsorted(sorted_scores, positive_scores, right=right).double() for right in (False, True)
    )
    count = positive_scores.shape[-1]
    wins = ((below_counts + up_to_counts + 1.0) / 2.0).sum(-1) - count * (count + 1) / 2.0
    # NaN is sorted to the end.
    return (
        (wins / (count * (len(positive) - count)))
        .to(scores.dtype)
        .where(~sorted_scores[..., -1].isnan(), torch.nan)
    )


def _sorted(scores: Tensor) -> Tensor:
    """Sort scores along the last axis.

    numpy sorts values on a CPU, without an index beside each value as in torch.
    """
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.float64):
        return scores.sort(dim=-1).values.contiguous()
    return torch.from_numpy(np.sort(np.ascontiguousarray(scores.detach()), axis=-1))


def balanced_accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean over classes of the share of right predictions among a class's records.

    Classes that no record has are left out.

    Args:
        outputs: Logits, (..., n, classes) or (..., n, 1).
        labels: Classes, (n,).

    Returns:
        The mean for each model, (...), or NaN if one of its outputs is NaN.
    """
    is_right = (to_logits(outputs).max(-1).indices == labels).to(outputs.dtype)
    counts = torch.bincount(labels)
    right_counts = is_right.new_zeros(*is_right.shape[:-1], len(counts)).index_add_(-1, labels, is_right)
    return (right_counts / counts)[..., counts > 0].mean(-1).where(~outputs.isnan().any(-1).any(-1), torch.nan)


def calibration_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the expected calibration error (Guo et al. 2017) over 15 bins of equal width.

    Bins are of the confidence, the probability of the predicted class.  The error is the mean over bins of |share
    of right predictions - mean confidence|, weighted by the number of a bin's records.

    Args:
        outputs: Logits, (..., n, classes) or (..., n, 1).
        labels: Classes, (n,).
    """
    confidence, predicted = to_logits(outputs).softmax(-1).max(-1)
    gaps = (predicted == labels).to(outputs.dtype) - confidence
    bin_index = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    sums = torch.zeros(*gaps.shape[:-1], CALIBRATION_BINS, dtype=gaps.dtype, device=gaps.device).scatter_add_(
        -1, bin_index, gaps
    )
    return sums.abs().sum(-1) / len(labels)


def r2(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute R² = 1 - (squared errors) / (squared deviations from the labels' mean)."""
    return 1.0 - (outputs.squeeze(-1) - labels).square().sum(-1) / (labels - labels.mean()).square().sum()


def mae(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean absolute error."""
    return (outputs.squeeze(-1) - labels).abs().mean(-1)


def to_logits(outputs: Tensor) -> Tensor:
    """Convert outputs to logits of all classes, (..., n, classes).

    A single logit is that of class 1 against class 0.
    """
    return outputs if outputs.shape[-1] > 1 else torch.cat([torch.zeros_like(outputs), outputs], dim=-1)


def _one_class(labels: Tensor, _: int) -> str | None:
    return "all of one class" if len(torch.unique(labels)) < 2 else None


def _one_value(labels: Tensor, _: int) -> str | None:
    return "all of one value" if float(labels.min()) == float(labels.max()) else None


def _always_defined(_labels: Tensor, _: int) -> str | None:
    return None


SCORES: Mapping[Score, ScoreKind] = {
    "auc": ScoreKind(False, _one_class, auc),
    "balanced_accuracy": ScoreKind(False, _always_defined, balanced_accuracy),
    "calibration_error": ScoreKind(False, _always_defined, calibration_error),
    "r2": ScoreKind(True, _one_value, r2),
    "mae": ScoreKind(True, _always_defined, mae),
    "concordance": ScoreKind(False, why_no_pairs, concordance, survival=True),
    "integrated_brier": ScoreKind(False, why_no_scored_bin, integrated_brier, survival=True),
}


MEAN_SUFFIX, WORST_SUFFIX = "mean_of_silos", "worst_silo"
"""Suffixes of metrics over the silos' own test records, with equal weight for every silo."""
DEFINED_SUFFIX = "silos"
"""Suffix of the number of silos whose test records define a metric, if it is not all of them."""
LOWER_IS_BETTER = frozenset({"test_loss", "test_mae", "test_calibration_error", "test_integrated_brier"})


@dataclass(frozen=True)
class ScoreView(EvaluationView):
    """`base` whose evaluations have the metric test_NAME for each NAME in `scores`.

    With `silos`, metrics are also evaluated at each silo, with the mean and the worst over silos.
    """

    scores: tuple[Score, ...]
    """Names of the scores in `SCORES`."""
    silos: tuple[tuple[str, int], ...] = ()
    """Silos in the order of their test records, as pairs (name, records)."""
    label_unit: int | float = 1
    """Size of a label of 1 in the target's own unit, a factor of mae."""

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Evaluate on all records, and with `silos` on the records of each silo as well.

        For each metric NAME of the silos there are then NAME_at_SILO, NAME_mean_of_silos, and NAME_worst_silo: the
        largest of the silos' values for `LOWER_IS_BETTER`, else the smallest.  A silo whose labels do not define a
        score is left out, and NAME_silos is then the number of the others.

        Args:
            point: Models, (..., d).
            records: Test records without leading axes, (n, …), those of a silo next to each other, in the order of
                `silos`.
        """
        evaluation = self._evaluate_part(point, records)
        if not self.silos:
            return evaluation
        metrics = dict(evaluation.metrics)
        record_counts = [count for _, count in self.silos]
        silo_metrics = [
            self._evaluate_part(point, Records(features, labels)).to_metrics()
            for features, labels in zip(
                torch.split(records.features, record_counts),
                torch.split(records.labels, record_counts),
                strict=True,
            )
        ]
        for name in dict.fromkeys(name for metrics_at_silo in silo_metrics for name in metrics_at_silo):
            silos = [silo for (silo, _), at_silo in zip(self.silos, silo_metrics, strict=True) if name in at_silo]
            values = torch.stack([at_silo[name] for at_silo in silo_metrics if name in at_silo])
            metrics |= {f"{name}_at_{silo}": value for silo, value in zip(silos, values, strict=True)}
            metrics[f"{name}_{MEAN_SUFFIX}"] = values.mean(0)
            if len(silos) < len(self.silos):
                metrics[f"{name}_{DEFINED_SUFFIX}"] = torch.full_like(values[0], len(silos))
            metrics[f"{name}_{WORST_SUFFIX}"] = values.amax(0) if name in LOWER_IS_BETTER else values.amin(0)
        return evaluation._replace(metrics=metrics)

    def _evaluate_part(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Evaluate `base` on some records, with the scores as further metrics test_NAME, (...) each.

        With `silos`, scores that these labels do not define are left out.
        """
        evaluation = self.base.evaluate(point, records)
        if not self.scores:
            return evaluation
        outputs = self.base.outputs(point, records)
        score_metrics = {
            f"test_{name}": SCORES[name].compute(outputs, records.labels)
            for name in self.scores
            if not self.silos or SCORES[name].why_undefined(records.labels, outputs.shape[-1]) is None
        }
        # Labels may be scaled.  Of the scores, the mean absolute error alone depends on their unit.
        if "test_mae" in score_metrics:
            score_metrics["test_mae"] = score_metrics["test_mae"] * self.label_unit
        return evaluation._replace(metrics={**evaluation.metrics, **score_metrics})


def check_scores(
    scores: Sequence[Score],
    labels: Tensor,
    silos: Sequence[tuple[str, int]],
    *,
    regression: bool,
    bins: int = 0,
) -> None:
    """Check that scores are for these labels, and defined for all together and at one silo or more.

    Args:
        scores: Names of the scores.
        labels: Labels of the test records, (n,).
        silos: Silos in the order of their test records, as pairs (name, records), or empty if silos are not
            evaluated.
        regression: Whether labels are real numbers.
        bins: Number of bins of time if labels are bins survived and events, else 0.

    Raises:
        InputError: A score is for other labels, is not defined for all of these together, or is defined at no
            silo.
    """
    for name in scores:
        kind = SCORES[name]
        label_kind = (regression, bins > 0)
        if (kind.regression, kind.survival) != label_kind:
            alternatives = ", ".join(
                score_name
                for score_name, score_kind in SCORES.items()
                if (score_kind.regression, score_kind.survival) == label_kind
            )
            label_text = "real numbers" if regression else "times and events" if bins else "classes"
            raise InputError(
                f"run.metrics: {name} is not for labels that are {label_text}; there are {alternatives}"
            )
        parts = torch.split(labels, [count for _, count in silos]) if silos else ()
        reasons = [kind.why_undefined(part, bins) for part in parts]
        if (reason := kind.why_undefined(labels, bins)) is not None:
            raise InputError(
                f"run.metrics: {name} is not defined, since the test records are {reason}; leave it out"
            )
        if silos and None not in reasons:
            raise InputError(
                f"run.metrics: {name} is not defined at any silo, since the test records of {silos[0][0]!r} are "
                f"{reasons[0]}; leave it out, or run.per_silo = false"
            )


@dataclass(frozen=True)
class SummedScores(RecordView):
    """`base` with increments that are scores of its test records, at points (..., d) that are models.

    Increments have the bound `norm` and are not clipped: the arguments `clip` and the query's coefficients are not
    used.

    Guarantee: before its weight is applied, an increment is a function of its own record and the model, but for
    rounding in `base`, and its norm is at most `norm`, whatever the model is: a loss of NaN or inf counts as
    `loss_bound`, and -inf as 0.
    """

    loss_bound: float
    """Largest loss of a record that counts."""
    classes: bool
    """Whether the model is a classification."""

    convex, convex_within = False, 0.0

    @property
    def dimension(self) -> int:
        """Dimension of an increment, and not of a model: 2 for a classification, else 1."""
        return 2 if self.classes else 1

    @property
    def norm(self) -> float:
        """Upper bound on the norm of one record's increment of weight 1."""
        return math.sqrt(self.dimension) / 2.0

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.base.initial().dtype)

    def for_batch(self, slots: BatchLayout) -> Self:
        return self

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        total = (self.contributions(query.points[0], batch.records) * batch.weights.double().unsqueeze(-1)).sum(-2)
        return Increment(total, total.new_zeros(total.shape[:-1]))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.contributions(query.points[0], batch.records) * batch.weights.double().unsqueeze(-1)

    def extra_figures(self, mean: Tensor, std: float, places: int, *, groups: bool = True) -> dict[str, float]:
        """Return further figures by name, besides those of `to_metrics`.  Here there are none.

        Args:
            mean: Mean of the increments, (d,) with d = `dimension`.
            std: Standard deviation of its noise, per coordinate.
            places: Number of row indices that the mean is over, those of absent records included.
            groups: Whether figures of groups of records are included.
        """
        return {}

    def contributions(self, model: Tensor, records: Records) -> Tensor:
        """Compute the contribution of each record in float64, (..., B, `dimension`).

        Columns are right_b - 1/2, for a classification, and loss_b / `loss_bound` - 1/2.  For a classification of
        single labels the loss is the cross-entropy, whichever loss the model is trained with.  For another model
        it is that of `losses`, which includes a penalty.

        Args:
            model: Models, (..., d).
            records: Records, (B, …), or (..., B, …) with the leading axes of `model`.
        """
        if not self.classes:
            return self._scale_losses(self.base.losses(model, records)).unsqueeze(-1)
        if (labelled_view := find_labelled_view(self.base)) is not None:
            accuracies, losses = labelled_view.accuracies_and_losses(model, records)
            return torch.stack([accuracies.double() - 0.5, self._scale_losses(losses)], -1)
        logits = to_logits(self.base.outputs(model, records))
        centered_accuracies = (logits.max(-1).indices == records.labels).double() - 0.5
        return torch.stack(
            [centered_accuracies, self._scale_losses(CrossEntropy().value(logits, records.labels.long()))], -1
        )

    def _scale_losses(self, losses: Tensor) -> Tensor:
        return (losses.double() / self.loss_bound).nan_to_num(nan=1.0, posinf=1.0, neginf=0.0).clamp(
            0.0, 1.0
        ) - 0.5

    def to_metrics(self, mean: Tensor) -> dict[str, Tensor]:
        """Convert means of increments (..., `dimension`) to metrics by name, (...) each."""
        return scores_to_metrics(mean, self.loss_bound, classes=self.classes)


def scores_to_metrics(mean: Tensor, loss_bound: float, *, classes: bool) -> dict[str, Tensor]:
    """Convert means of increments to metrics by name, (...) each.

    Args:
        mean: Means, (..., 2) for a classification, else (..., 1).
        loss_bound: Largest loss of a record that counts.
        classes: Whether the model is a classification.
    """
    loss = {"test_loss": (mean[..., -1] + 0.5) * loss_bound}
    return {**loss, "test_accuracy": mean[..., 0] + 0.5} if classes else loss


def make_summed_scores(base: Objective, loss_bound: float, *, classes: bool) -> SummedScores:
    """Make the objective whose increments are scores of test records, or refuse the model.

    Args:
        base: Objective of the model.
        loss_bound: Largest loss of a record that counts.
        classes: Whether the model is a classification.

    Raises:
        InputError: The objective behind the views takes its outputs, or without `classes` its losses, from
            `Deterministic`, which has none.  Or there are several class labels and a loss that does not say which
            predictions are right.
    """
    name, innermost_type = "outputs" if classes else "losses", type(find_innermost_objective(base))
    # The methods of `Deterministic` raise, so that a class without its own has no outputs or losses.
    if getattr(innermost_type, name, None) is getattr(Deterministic, name):
        raise InputError(
            f"evaluation: {innermost_type.__name__} gives no {name} record by record; "
            "take another model, or leave the section out"
        )
    if classes and (labelled_view := find_labelled_view(base)) is not None and not labelled_view.has_accuracy:
        raise InputError("evaluation: a loss of your own does not say what is right; leave the section out")
    return SummedScores(base, loss_bound, classes)
