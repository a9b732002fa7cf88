"""Every loss of the table has its derivative and torch's values; scores are as they are defined."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.core.errors import InputError
from fedpriv.data.layout import IGNORED_CLASS
from fedpriv.loss.linear import LogisticRegression, SoftmaxRegression
from fedpriv.loss.losses import LOSSES, LossChoice
from fedpriv.loss.objective import ModelEvaluation, Records
from fedpriv.loss.scores import SCORES, ScoreView, auc, balanced_accuracy, calibration_error, mae, r2
from fedpriv.show.summary import find_metric, summarize
from tests.loss.builders import F64, pick

CLASSES = 3
CHOICES = [
    *(LossChoice(name) for name in LOSSES),
    LossChoice("cross-entropy", None, (1.0, 0.5, 3.0), 0.2),
    LossChoice("binary", None, (1.0, 4.0)),
    LossChoice("mine", lambda output, label: (output.sum() - label.sum()).square()),
]


def sample(choice: LossChoice, label: tuple[int, ...]) -> tuple[Any, Tensor, Tensor, int]:
    """The loss, outputs and labels of 5 records, and how many classes there are."""
    generator = torch.Generator().manual_seed(0)
    kind = LOSSES.get(choice.name)
    classes = 0 if kind is None or kind.takes_classes is False else 2 if kind.takes_classes is None else CLASSES
    loss, needed = choice.make_loss(label, classes)
    outputs = torch.randn(5, *(needed or (4,)), generator=generator, dtype=F64)
    labels = torch.randint(0, max(classes, 2), (5, *label), generator=generator)
    return loss, outputs, labels if classes else labels.double() + 0.25, classes


@pytest.mark.parametrize("label", [(), (4,), (2, 3)])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.name}{len(choice.class_weights)}")
def test_slopes_are_derivatives_of_each_record_alone(choice: LossChoice, label: tuple[int, ...]) -> None:
    loss, outputs, labels, classes = sample(choice, label)
    if classes and label:
        labels[0] = labels[1, ..., :1] = IGNORED_CLASS
    outputs.requires_grad_()
    values = loss.value(outputs, labels)
    assert values.shape == (5,)
    (expected,) = torch.autograd.grad(values.sum(), outputs)
    assert torch.allclose(loss.output_gradient(outputs.detach(), labels), expected, atol=1e-12)
    assert loss.output_gradient(outputs, labels).shape == outputs.shape
    for place in range(5):
        alone = loss.value(outputs[place : place + 1], labels[place : place + 1])
        assert torch.allclose(alone, values[place], rtol=1e-14)
    several = torch.stack([outputs, outputs + 1.0])  # two models on the same records
    assert torch.allclose(loss.value(several, labels)[0], values)
    accuracy = loss.accuracy(several, labels)
    assert accuracy is None or accuracy.shape == (2,)
    turned, both = (
        torch.stack([part, part.flip(0)]) for part in (outputs.detach(), labels)
    )  # records of each model
    assert torch.allclose(loss.value(turned, both), torch.stack([values, values.flip(0)]))
    assert torch.allclose(
        loss.output_gradient(turned, both), torch.stack([expected, expected.flip(0)]), atol=1e-12
    )
    one = loss.accuracy(outputs, labels)
    assert one is None or loss.accuracy(turned, both).tolist() == pytest.approx([float(one)] * 2)


@pytest.mark.parametrize(
    ("name", "classes", "label", "outputs"),
    [
        ("cross-entropy", 9, (), (9,)), ("cross-entropy", 9, (2, 3), (2, 3, 9)), ("hazard", 9, (), (4,)),
        ("hazard", 9, (2,), (2, 4)), ("binary", 2, (), (1,)), ("binary", 2, (5,), (5,)), ("huber", 0, (), (1,)),
        ("squared-error", 0, (5,), (5,)),
    ],
)  # fmt: skip
def test_a_loss_needs_so_many_outputs(
    name: str, classes: int, label: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    kind = LOSSES[name]
    assert LossChoice(name).make_loss(label, classes)[1] == outputs
    assert kind.has_single_output or kind.class_count(outputs[-1]) == classes


@pytest.mark.parametrize(("weights", "smoothing"), [((1.0, 2.0), 0.0), ((), 0.1)])
def test_settings_of_a_loss_by_name_are_refused_beside_a_function(
    weights: tuple[float, ...], smoothing: float
) -> None:
    choice = LossChoice("cross-entropy", lambda output, label: output.sum(), weights, smoothing)
    with pytest.raises(InputError, match="'cross-entropy'"):
        choice.make_loss((), 2)


def test_values_are_those_of_torch() -> None:
    outputs, numbers = torch.randn(5, 4, dtype=F64), torch.rand(5, 4, dtype=F64)
    result = {
        name: LossChoice(name).make_loss((4,), 0)[0].value(outputs, numbers)
        for name, kind in LOSSES.items()
        if kind.has_single_output
    }
    of_torch: dict[str, Any] = {
        "binary": functional.binary_cross_entropy_with_logits,
        "squared-error": lambda *given, **keys: functional.mse_loss(*given, **keys) / 2.0,
        "absolute-error": functional.l1_loss, "huber": functional.huber_loss,
        "poisson": functional.poisson_nll_loss,
    }  # fmt: skip
    expected = {name: function(outputs, numbers, reduction="none") for name, function in of_torch.items()}
    assert result.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.allclose(result[name], each.mean(-1)), name


def test_the_cross_entropy_is_that_of_torch_with_weights_smoothing_and_ignored_labels() -> None:
    outputs, labels = torch.randn(5, 6, CLASSES, dtype=F64), torch.randint(0, CLASSES, (5, 6))
    labels[:, 1::2] = IGNORED_CLASS
    weights = (0.5, 1.0, 2.0)
    for choice, given in (
        (LossChoice("cross-entropy", None, weights), {"weight": torch.tensor(weights, dtype=F64)}),
        (LossChoice("cross-entropy", None, (), 0.3), {"label_smoothing": 0.3}),
    ):
        each = functional.cross_entropy(outputs.movedim(-1, 1), labels, reduction="none", **given)
        loss, needed = choice.make_loss((6,), CLASSES)
        assert needed == (6, CLASSES)
        assert torch.allclose(loss.value(outputs, labels), each.sum(-1) / 3.0)
    accuracy = LossChoice("cross-entropy").make_loss((6,), CLASSES)[0].accuracy(outputs, labels)
    right = (outputs.argmax(-1) == labels)[:, ::2]
    assert accuracy == pytest.approx(float(right.double().mean()))


def test_a_record_without_labels_has_no_loss_and_no_slope() -> None:
    loss, _ = LossChoice("cross-entropy").make_loss((2,), CLASSES)
    outputs, labels = torch.randn(1, 2, CLASSES), torch.full((1, 2), IGNORED_CLASS)
    assert float(loss.value(outputs, labels)) == 0.0
    assert not loss.output_gradient(outputs, labels).any()


# Scores, against literal transcriptions of their definitions


GENERATOR = torch.Generator().manual_seed(16)
LABELS = torch.tensor([0, 1, 1, 0, 2, 2, 1, 0, 1, 2, 0, 1])
BINARY = LABELS.clamp(max=1)
MANY = torch.randn(4, 12, 3, generator=GENERATOR, dtype=F64).round(decimals=1)  # ties among them


def wins(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs in which the positive record has the higher score; half for a tie."""
    pairs = [(p, q) for p in scores[positive].tolist() for q in scores[~positive].tolist()]
    return sum((p > q) + 0.5 * (p == q) for p, q in pairs) / len(pairs)


def test_auc_of_two_classes_counts_the_pairs_that_are_in_order() -> None:
    two = MANY[..., :2]
    expected = [wins(row[:, 1] - row[:, 0], BINARY == 1) for row in two]
    assert auc(two, BINARY).tolist() == pytest.approx(expected, abs=1e-12)
    one = (two[..., 1] - two[..., 0]).unsqueeze(-1)
    assert auc(one, BINARY).tolist() == pytest.approx(expected, abs=1e-12)
    assert auc(torch.zeros(12, 2), BINARY).item() == 0.5
    whole = two.round()  # exact in bfloat16, whose area has 8 bits
    assert auc(whole.bfloat16(), BINARY).tolist() == pytest.approx(auc(whole, BINARY).tolist(), abs=2**-8)


@pytest.mark.parametrize(("name", "width"), [("binary", 1), ("cross-entropy", 2)])
def test_accuracies_of_a_diverged_model_are_not_numbers(name: str, width: int) -> None:
    """Before: the first class was the prediction, and its share a plausible accuracy."""
    outputs, labels = torch.randn(3, 8, width, dtype=F64), torch.arange(8) % 2
    outputs[1, 7, 0] = math.nan
    loss = LOSSES[name].base
    evaluation = ModelEvaluation(loss.value(outputs, labels).mean(-1), loss.accuracy(outputs, labels))
    scores = [compute(outputs, labels) for compute in (balanced_accuracy, calibration_error)]
    for score in (evaluation.to_metrics()["test_accuracy"], *scores):
        assert score.isnan().tolist() == [False, True, False]


def test_auc_is_nan_if_a_score_is_nan() -> None:
    """Positions of NaN in a sorted row would make an area of more than 1."""
    for classes, labels in ((2, BINARY), (3, LABELS)):
        outputs = MANY[..., :classes].clone()
        outputs[0] = math.nan
        outputs[1, 4] = math.nan
        assert auc(outputs, labels).isnan().tolist() == [True, True, *[False] * (len(MANY) - 2)]


def test_auc_of_several_classes_is_the_mean_of_each_against_the_rest() -> None:
    expected = [sum(wins(row.softmax(-1)[:, each], each == LABELS) for each in range(3)) / 3 for row in MANY]
    assert auc(MANY, LABELS).tolist() == pytest.approx(expected, abs=1e-12)


def test_balanced_accuracy_is_the_mean_recall_of_the_classes_that_occur() -> None:
    expected = []
    for row in MANY:
        right = row.argmax(-1) == LABELS
        expected.append(sum(right[each == LABELS].double().mean().item() for each in (0, 1, 2)) / 3)
    assert balanced_accuracy(MANY, LABELS).tolist() == pytest.approx(expected)
    only = torch.zeros(5, dtype=torch.int64)
    assert balanced_accuracy(torch.tensor([[1.0, 0.0]]).expand(5, 2), only).item() == 1.0


def test_calibration_error_is_the_gap_in_each_bin_by_its_share() -> None:
    expected = []
    for row in MANY:
        bins: dict[int, list[float]] = {}
        for shares, label in zip(row.softmax(-1).tolist(), LABELS.tolist(), strict=True):
            confidence = max(shares)
            gap = (shares.index(confidence) == label) - confidence
            bins.setdefault(math.ceil(confidence * 15), []).append(gap)
        expected.append(sum(abs(sum(gaps)) for gaps in bins.values()) / 12)
    assert calibration_error(MANY, LABELS).tolist() == pytest.approx(expected)


def test_r2_and_mae() -> None:
    outputs, labels = MANY[..., :1], MANY[0, :, 2]
    for row, result, error in zip(outputs[..., 0], r2(outputs, labels), mae(outputs, labels), strict=True):
        residual = sum((a - b) ** 2 for a, b in zip(row.tolist(), labels.tolist(), strict=True))
        spread = sum((b - labels.mean().item()) ** 2 for b in labels.tolist())
        assert result.item() == pytest.approx(1 - residual / spread)
        assert error.item() == pytest.approx((row - labels).abs().mean().item())
    assert r2(labels.unsqueeze(-1), labels).item() == 1.0


RECORDS = Records(torch.randn(12, 4, generator=GENERATOR, dtype=F64), BINARY)


@pytest.mark.parametrize(
    "objective",
    [SoftmaxRegression(4, 2, 1.0, F64), LogisticRegression(4, 1.0)],
    ids=lambda each: type(each).__name__,
)
def test_every_silo_is_scored_on_its_own_records(objective: SoftmaxRegression | LogisticRegression) -> None:
    silos = (("a", 5), ("b", 4), ("c", 3))
    points = torch.randn(3, objective.dimension, generator=GENERATOR, dtype=F64)
    names = ("auc", "calibration_error")
    scored = ScoreView(objective, names, silos).evaluate(points, RECORDS).to_metrics()
    metrics = []
    for name, rows in zip("abc", (slice(0, 5), slice(5, 9), slice(9, 12)), strict=True):
        metrics.append(ScoreView(objective, names).evaluate(points, pick(RECORDS, rows)).to_metrics())
        for key, values in metrics[-1].items():
            torch.testing.assert_close(scored[f"{key}_at_{name}"], values)
    accuracies, losses = (torch.stack([silo[key] for silo in metrics]) for key in ("test_accuracy", "test_loss"))
    torch.testing.assert_close(scored["test_accuracy_mean_of_silos"], accuracies.mean(0))
    torch.testing.assert_close(scored["test_accuracy_worst_silo"], accuracies.amin(0))
    torch.testing.assert_close(scored["test_loss_worst_silo"], losses.amax(0))


def test_a_score_that_a_silo_does_not_define_is_of_the_others() -> None:
    """With the number of silos that have it; a silo of one class has no area under the curve, and an accuracy."""
    labels = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0])
    records, silos = Records(RECORDS.features, labels), (("a", 4), ("b", 3), ("c", 5))
    objective = LogisticRegression(4, 1.0)
    points = torch.randn(3, objective.dimension, generator=GENERATOR, dtype=F64)
    scored = ScoreView(objective, ("auc",), silos).evaluate(points, records).to_metrics()
    assert "test_auc_at_b" not in scored
    assert "test_accuracy_silos" not in scored
    assert scored["test_auc_silos"].tolist() == [2.0] * 3
    of_others = torch.stack([scored["test_auc_at_a"], scored["test_auc_at_c"]])
    torch.testing.assert_close(scored["test_auc_mean_of_silos"], of_others.mean(0))
    torch.testing.assert_close(scored["test_auc_worst_silo"], of_others.amin(0))
    assert "test_accuracy_at_b" in scored
    metric = find_metric("test_auc_silos")
    assert metric is not None
    assert metric.title == "silos that have AUC; the others have one class or value"
    summary = summarize([{"test_auc_silos": 2.0}], metric)
    assert summary is not None
    assert summary.mean == 2.0


def test_every_score_is_tested_here() -> None:
    of_times = {"concordance", "integrated_brier"}  # in test_survival.py
    assert set(SCORES) - of_times == {"auc", "balanced_accuracy", "calibration_error", "r2", "mae"}
