"""Softmax regression: its loss at zero, and its constants."""

import math

import numpy as np
import pytest
import torch

from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.softmax import SoftmaxRegression


def test_evaluation_at_zero_is_ln_classes() -> None:
    objective = SoftmaxRegression(3, 10, feature_norm=1.0, dtype=torch.float64)
    records = Records(torch.randn(20, 3, dtype=torch.float64), torch.zeros(20, dtype=torch.int64))
    evaluation = objective.evaluate(objective.initial(), records)
    assert float(evaluation.loss) == pytest.approx(math.log(10.0))
    assert float(evaluation.accuracy) == 1.0  # argmax of equal logits is the first class


def test_constants_bound_gradients_and_their_changes() -> None:
    """G = √2·max‖z‖ and L = max‖z‖²/2 (spec: 39.6 and 392.5 for MNIST with a bias)."""
    mnist = SoftmaxRegression(785, 10, feature_norm=math.sqrt(785.0))
    assert mnist.lipschitz == pytest.approx(39.62, abs=0.01)
    assert mnist.smoothness == 392.5
    generator = np.random.default_rng(1)
    objective = SoftmaxRegression(4, 3, feature_norm=2.0, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    for _ in range(200):
        feature = torch.from_numpy(generator.standard_normal((1, 4)))
        feature *= 2.0 / feature.norm()
        records = Records(feature, torch.from_numpy(generator.integers(0, 3, 1)))
        x, y = (torch.from_numpy(generator.standard_normal(12) * scale) for scale in (3.0, 0.1))
        at_x, at_y = (objective.increment(Query([p]), Batch(records, one), 1e9).total for p in (x, y))
        assert float(at_x.norm()) <= objective.lipschitz
        assert float((at_x - at_y).norm()) <= objective.smoothness * float((x - y).norm())
