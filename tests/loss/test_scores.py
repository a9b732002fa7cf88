"""Scores against literal transcriptions of their definitions, for many models at once."""

import math

import pytest
import torch
from torch import Tensor

from fedpriv.loss.linear import LogisticRegression, SoftmaxRegression
from fedpriv.loss.objective import Records
from fedpriv.loss.scores import SCORES, ScoreView, auc, balanced_accuracy, calibration_error, mae, r2

GENERATOR = torch.Generator().manual_seed(16)
LABELS = torch.tensor([0, 1, 1, 0, 2, 2, 1, 0, 1, 2, 0, 1])
BINARY = LABELS.clamp(max=1)
MANY = torch.randn(4, 12, 3, generator=GENERATOR, dtype=torch.float64).round(decimals=1)  # ties among them


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


def test_auc_of_tied_scores_is_a_half() -> None:
    assert auc(torch.zeros(12, 2), BINARY).item() == 0.5


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
            bins.setdefault(math.ceil(confidence * 15), []).append(
                (shares.index(confidence) == label) - confidence
            )
        expected.append(sum(abs(sum(gaps)) for gaps in bins.values()) / 12)
    assert calibration_error(MANY, LABELS).tolist() == pytest.approx(expected)


def test_r2_and_mae() -> None:
    outputs, labels = MANY[..., :1], MANY[0, :, 2]
    for row, found, error in zip(outputs[..., 0], r2(outputs, labels), mae(outputs, labels), strict=True):
        residual = sum((a - b) ** 2 for a, b in zip(row.tolist(), labels.tolist(), strict=True))
        spread = sum((b - labels.mean().item()) ** 2 for b in labels.tolist())
        assert found.item() == pytest.approx(1 - residual / spread)
        assert error.item() == pytest.approx((row - labels).abs().mean().item())
    assert r2(labels.unsqueeze(-1), labels).item() == 1.0


RECORDS = Records(torch.randn(12, 4, generator=GENERATOR, dtype=torch.float64), BINARY)


@pytest.mark.parametrize(
    "objective",
    [SoftmaxRegression(4, 2, 1.0, torch.float64), LogisticRegression(4, 1.0)],
    ids=lambda each: type(each).__name__,
)
def test_every_silo_is_scored_on_its_own_records(objective: SoftmaxRegression | LogisticRegression) -> None:
    silos = (("a", 5), ("b", 4), ("c", 3))
    points = torch.randn(3, objective.dimension, generator=GENERATOR, dtype=torch.float64)
    scored = ScoreView(objective, ("auc", "calibration_error"), silos).evaluate(points, RECORDS).to_metrics()
    start = 0
    accuracies, losses = [], []
    for name, count in silos:
        own = Records(*(column[start : start + count] for column in RECORDS))
        alone = ScoreView(objective, ("auc", "calibration_error")).evaluate(points, own).to_metrics()
        for key, values in alone.items():
            torch.testing.assert_close(scored[f"{key}_at_{name}"], values)
        accuracies.append(alone["test_accuracy"])
        losses.append(alone["test_loss"])
        start += count
    torch.testing.assert_close(scored["test_accuracy_mean_of_silos"], torch.stack(accuracies).mean(0))
    torch.testing.assert_close(scored["test_accuracy_worst_silo"], torch.stack(accuracies).amin(0))
    torch.testing.assert_close(scored["test_loss_worst_silo"], torch.stack(losses).amax(0))


def test_every_score_is_tested_here() -> None:
    of_times = {"concordance", "integrated_brier"}  # in test_survival.py
    assert set(SCORES) - of_times == {"auc", "balanced_accuracy", "calibration_error", "r2", "mae"}
