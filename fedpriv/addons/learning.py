"""Findings on runs: models no better than a constant, rising losses, records that no round reads.

The cells of a sweep point are runs that differ in their seeds.  `measure_learning` returns facts that are stored
with a cell, such as the loss of the best constant outputs on its test records.  `describe_findings` compares the
cells' scores with these facts, in sentences.

| finding | rule, mostly about the mean over the seeds of a sweep point |
|---|---|
| R² | below 0, that of predicting the mean of the test targets |
| accuracy | at most two standard errors or 2 points, the smaller, above the share of the commonest class |
| balanced accuracy | at most 2 points above 1 / classes |
| test loss | not below the loss of the best constant outputs |
| start | test loss of sampled records at most half a percent below that before round 1, a positive number |
| rising loss | after the last round more than 1 % above that after the first evaluated one, a positive number |
| outputs | of sampled records all in 0 … 1 and not all equal, where the loss takes logits |
| records | some of the training records are read in no round, where every row of training is one |
| clipping | of 99.9 % of increments or more in each cell that counts it, beside another finding on the point |

Without these facts, scores are compared with those of guessing among the classes of a table's public description.

Imports: the core, which is fedpriv without its add-ons.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.claims.outcome import CellOutcome
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_count_range
from fedpriv.data.layout import IGNORED_CLASS
from fedpriv.data.named import find_schema
from fedpriv.loss.imported import make_trained_model
from fedpriv.loss.inputs import find_labelled_view
from fedpriv.loss.losses import ClassWeighting, CrossEntropy, LabelSmoothing, LogisticLoss, Loss, MeanOverLabels
from fedpriv.loss.scores import balanced_accuracy
from fedpriv.noise.trust import RECORD
from fedpriv.plan.task import Task, load_public_task, load_task, mask_absent_records
from fedpriv.scenario.schema import Cell
from fedpriv.show.summary import cells_at_point, format_point, sweep_points
from fedpriv.study.results import Results

_MAX_RECORDS = 10_000
"""Largest number of test records whose outputs are looked at."""
_MARGIN = 0.02
"""Largest distance above chance at which an accuracy counts as chance."""
_RISE = 1.01
"""Ratio of the last to the first loss above which a loss rises."""
_FALL = 0.995
"""Ratio of the last loss to that before round 1 from which nothing was learnt."""
_ALL_CLIPPED = 0.999


def measure_learning(cell: Cell, outcome: CellOutcome, first: tuple[int, float] | None) -> dict[str, Any]:
    """Measure what constant predictions, the untrained and the trained model reach on the test records.

    The result is empty if silos evaluate, if there is no test loss or no test record, or if the records cannot be
    loaded or the model cannot be rebuilt here.  A key is left out where its figure is not known.  Outputs are
    those of *sampled* records, every k-th test record and at most 10,000.

    | key | meaning |
    |---|---|
    | `first` | round and test loss of the first evaluation |
    | `tests` | number of test records |
    | `train` | number of training records, if they are units of protection, were loaded here and all count |
    | `start_and_end` | mean loss of sampled records before round 1, and by the trained model |
    | `loss` | mean loss of the test records for the best constant outputs |
    | `commonest`, `classes` | accuracy of always naming a label's commonest class, number of classes that occur |
    | `balanced` | balanced accuracy of the trained model on sampled records |
    | `has_unit_outputs` | whether sampled outputs are in 0 … 1 and not all equal, and the loss takes logits |

    Args:
        cell: Scenario of the cell.
        outcome: Outcome of the cell, with the trained parameters.
        first: Round and test loss of the first evaluation, or None.
    """
    if cell.evaluation is not None or not cell.model.row.evaluated or "test_loss" not in outcome.metrics:
        return {}
    try:
        task = load_task(cell) if outcome.noise == "simulation" else load_public_task(cell)
        if task.objective.dimension > outcome.model.size or not len(task.test.labels):
            return {}
        model = make_trained_model(task.objective, outcome.model)
    except InputError:  # for example, the records are elsewhere
        return {}
    # Records with several labels have them as further features, which a view of the objective splits off.
    view = find_labelled_view(task.objective)
    features, labels = task.test if view is None else view.with_labels(task.test)
    facts: dict[str, Any] = {"tests": len(labels)} | ({} if first is None else {"first": list(first)})
    if (
        isinstance(task, Task)
        and cell.privacy.protected_unit.name == RECORD.name
        and bool(mask_absent_records(task.train)[1].all())
    ):
        facts["train"] = len(task.train.labels)
    stride = -(-len(labels) // _MAX_RECORDS)
    start = make_trained_model(task.objective, task.objective.initial().numpy())
    with torch.inference_mode():
        outputs, start_outputs = (predictor.outputs(features[::stride]) for predictor in (model, start))
        facts["start_and_end"] = [
            # Rounded, since engines add up in other orders.
            round(float(model.loss.value(values, labels[::stride]).double().mean()), 6)
            for values in (start_outputs, outputs)
        ]
    constant_loss = _constant_loss(model.loss, outputs[:1], labels)
    if constant_loss is not None:
        facts["loss"] = constant_loss
    is_counted = labels != IGNORED_CLASS
    # Classes, of a model whose metrics have an accuracy.
    if "test_accuracy" in outcome.metrics and is_counted.any():
        class_counts = torch.stack([(labels == label).sum(0) for label in torch.unique(labels[is_counted])])
        facts["commonest"] = float(class_counts.max(0).values.sum() / is_counted.sum())
        facts["has_unit_outputs"] = _takes_logits(model.loss) and _are_shares(outputs)
        if labels.dim() == 1:
            facts["classes"] = len(class_counts)
            facts["balanced"] = float(balanced_accuracy(outputs, labels.long()[::stride]))
    return facts


def _constant_loss(loss: Loss, output: Tensor, labels: Tensor) -> float | None:
    """Return the least mean loss of constant outputs, or None if it is not finite.

    For cross-entropy with one label a record it is computed from the shares of the classes.  For any other loss it
    is the minimum that L-BFGS finds from outputs of 0, which may be a local one.

    Args:
        loss: Loss of the model.
        output: Outputs of one record, (1, …), of which only shape and type count.
        labels: Labels of all test records, (n, …).
    """
    if isinstance(loss, CrossEntropy) and labels.dim() == 1:  # the best outputs give the shares of the classes
        class_shares = labels[labels != IGNORED_CLASS].long().bincount().double() / len(labels)
        # The second term is 0 if no label is ignored.
        return float(torch.special.entr(class_shares).sum() - torch.special.entr(class_shares.sum()))

    from scipy.optimize import minimize  # a third of a second of processor

    def value_and_gradient(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        constant = torch.from_numpy(values).to(output.dtype).view(output.shape).requires_grad_()
        mean = loss.value(constant.expand(len(labels), *output.shape[1:]), labels).mean()
        (gradient,) = (
            torch.autograd.grad(mean, [constant]) if mean.requires_grad else (torch.zeros_like(constant),)
        )
        return float(mean.detach()), gradient.double().flatten().numpy()

    with torch.inference_mode(False), torch.enable_grad():
        labels = labels.clone()  # tensors of inference mode are no inputs of a gradient
        minimum = minimize(value_and_gradient, np.zeros(output.numel()), jac=True, method="L-BFGS-B")
    return float(minimum.fun) if math.isfinite(minimum.fun) else None


def _takes_logits(loss: Loss) -> bool:
    while isinstance(loss, MeanOverLabels | ClassWeighting):
        loss = loss.base
    return isinstance(loss, CrossEntropy | LabelSmoothing | LogisticLoss)


def _are_shares(outputs: Tensor) -> bool:
    """Whether outputs lie in 0 … 1, and are not all the same."""
    return bool(0.0 <= outputs.min() < outputs.max() <= 1.0)


def describe_findings(results: Results) -> list[str]:
    """Describe a run's findings (table of this module) in sentences, or return [] without any.

    Equal sentences of several sweep points become one that names up to three of them.
    """
    points_by_sentence = dict[str, list[str]]()
    for point in sweep_points(results):
        if cells := cells_at_point(results, point):
            for sentence in _find_faults(cells):
                points_by_sentence.setdefault(sentence, []).append(format_point(results, point))
    # `_PLACE` stands in a sentence for the names of its sweep points.
    return [
        sentence.replace(_PLACE, _format_points(points)) for sentence, points in points_by_sentence.items()
    ] + _describe_unread(results)


_PLACE = "{}"
"""Place of the sweep points in a sentence."""
_MAX_LISTED_POINTS = 3


def _format_points(points: Sequence[str]) -> str:
    examples = "; ".join(filter(None, points[:_MAX_LISTED_POINTS]))
    more = f" and {len(points) - _MAX_LISTED_POINTS} more" if len(points) > _MAX_LISTED_POINTS else ""
    return f" ({examples}{more})" if examples else ""


def _find_faults(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on a sweep point's failure to learn, with `_PLACE` for the point's name.

    Args:
        cells: Finished cells of the point, one for each seed, over which scores are averaged.
    """
    means = {
        key: statistics.fmean(cell[key] for cell in cells if key in cell)
        for key in ("test_r2", "test_loss", "test_accuracy", "test_balanced_accuracy")
        if any(key in cell for cell in cells)
    }
    # Facts that are not averaged over the seeds are those of the first cell.
    facts: Mapping[str, Any] = cells[0].get("learning") or {}
    reasons = ["R² is below 0"] if means.get("test_r2", 1.0) < 0.0 else []
    reasons += _compare_with_constant(cells, means, facts) if facts else _compare_with_guessing(cells[0], means)
    sentences = [f"The model is no better than a constant prediction{_PLACE}: {reason}." for reason in reasons]
    if facts.get("has_unit_outputs"):
        sentences.append(
            f"All outputs of the model lie in 0 … 1{_PLACE}, as those of a last Sigmoid or Softmax do, but its "
            "loss takes logits: leave that layer out."
        )
    # Without facts on the start, the pair (1, 0) makes no sentence.
    losses = [cell["learning"]["start_and_end"] for cell in cells if "start_and_end" in cell.get("learning", {})]
    start, end = (statistics.fmean(values) for values in zip(*losses, strict=True)) if losses else (1.0, 0.0)
    if end >= _FALL * start > 0.0:
        sentences.append(
            f"By its test loss the model is no better than at its start{_PLACE}: {start:.4g} before round 1, and "
            f"{end:.4g} at the end."
        )
    firsts = [cell["learning"]["first"] for cell in cells if "first" in cell.get("learning", {})]
    last_loss = means.get("test_loss", math.nan)
    if firsts and last_loss > _RISE * (first_loss := statistics.fmean(loss for _, loss in firsts)) > 0.0:
        sentences.append(
            f"The test loss rises{_PLACE}: it is {first_loss:.4g} after round {firsts[0][0]}, and "
            f"{last_loss:.4g} at the end. A shorter step may do better."
        )
    clipped_shares = [share for cell in cells if (share := cell["fraction_clipped"]) is not None]
    if sentences and min(clipped_shares, default=0.0) >= _ALL_CLIPPED:
        sentences.append(
            f"At least 99.9 % of the increments were clipped{_PLACE}, so that these have the norm of the clip, "
            "however large the gradients are: look at clip and step first."
        )
    return sentences


def _compare_with_constant(
    cells: Sequence[Mapping[str, Any]], means: Mapping[str, float], facts: Mapping[str, Any]
) -> list[str]:
    """Return reasons why the cells' mean scores are no better than those of a constant prediction.

    Args:
        cells: Cells of a sweep point.
        means: Mean scores by name.
        facts: Facts of `measure_learning` on the first cell.
    """
    reasons, losses = (
        list[str](),
        [cell["learning"]["loss"] for cell in cells if "loss" in cell.get("learning", {})],
    )
    if (share := facts.get("commonest")) is not None:
        # Standard error of a share of the test records.
        error = math.sqrt(share * (1.0 - share) / facts.get("tests", 1))
        if means.get("test_accuracy", math.nan) <= share + min(2.0 * error, _MARGIN):
            reasons.append(
                f"accuracy is not clearly above the {100.0 * share:.1f} % of always naming the commonest class"
            )
    balanced = [cell["learning"]["balanced"] for cell in cells if "balanced" in cell.get("learning", {})]
    if balanced and "classes" in facts and statistics.fmean(balanced) <= 1.0 / facts["classes"] + _MARGIN:
        reasons.append(
            f"balanced accuracy, the mean over {facts['classes']} classes, is "
            f"{100.0 * statistics.fmean(balanced):.1f} %, and naming any one class has "
            f"{100.0 / facts['classes']:.1f} %"
        )
    if losses and means.get("test_loss", math.nan) >= statistics.fmean(losses):
        caveat = ", whatever the accuracy" if "test_accuracy" in means else ""
        reasons.append(
            f"test loss is not below {statistics.fmean(losses):.4g}, that of the best constant outputs{caveat}"
        )
    return reasons


def _compare_with_guessing(cell: Mapping[str, Any], means: Mapping[str, float]) -> list[str]:
    """Return reasons why mean scores, by name, are no better than guessing among a table's classes.

    The list is empty if the table has no public description with classes.
    """
    scenario = cell["scenario"]
    classes = _class_count(scenario.get("data", {}))
    if classes == 0:
        return []
    reasons = [
        f"{noun} is not above that of guessing among {classes} classes"
        for key, noun in (("test_accuracy", "accuracy"), ("test_balanced_accuracy", "balanced accuracy"))
        if means.get(key, 1.0) <= 1.0 / classes
    ]
    # The test loss of this model is the cross-entropy alone.
    if scenario["model"]["name"] == "softmax-regression" and means.get("test_loss", 0.0) >= math.log(classes):
        reasons.append(
            f"test loss is not below ln {classes} = {math.log(classes):.3f}, which calling all classes equally "
            "likely has, whatever the accuracy"
        )
    return reasons


def _class_count(data: Mapping[str, Any]) -> int:
    """Return the number of classes in a table's public description.

    The count is 0 for a target that is a number, and for data without such a description.
    """
    if (schema := data.get("table")) is not None:
        return len(schema.get("classes") or ())
    # The name of a file has a dot, and no description.
    public_schema = None if "." in data.get("name", "") else find_schema(data.get("name", ""), None)
    return 0 if public_schema is None else public_schema.class_count


def _describe_unread(results: Results) -> list[str]:
    """Describe in sentences how many training records no round reads, if the number is known.

    The number is known of cells with `federation.samples`, and of others by `measure_learning`.
    """
    sentences = []
    if unread_counts := [cell["unread"] for cell in results.cells if cell.get("unread")]:
        sentences.append(
            f"Of the samples asked for, {format_count_range(unread_counts)} are never read: they do not fill a "
            "round of every silo."
        )
    counts = {
        (cell["records"], total)
        for cell in results.cells
        if cell["scenario"].get("federation", {}).get("samples") is None
        and cell.get("records", 0) < (total := (cell.get("learning") or {}).get("train", 0))
    }
    sentences += [
        f"Of {total:,} training records {read:,} are read, and the others in no round: silos, batch sizes and the "
        "rounds of a pass decide how many."
        for read, total in sorted(counts)
    ]
    return sentences
