"""The table of models: features, constants, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.data.named import load
from fedpriv.loss.layered import LayeredObjective
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.models import LinearSettings, PerceptronSettings, SoftmaxSettings, add_module, find_model
from fedpriv.loss.objective import Records
from fedpriv.loss.rows import ModuleSettings
from tests.loss.builders import F64, Net, ones, sum_increments

IMAGES = np.random.default_rng(0).integers(0, 256, (50, 28, 28)).astype(np.uint8)
IMAGES[0] = 0
IMAGES[1] //= 20


def test_feature_norm_scales_down_what_is_larger_and_nothing_else() -> None:
    row, settings = find_model("softmax-regression"), SoftmaxSettings(feature_norm=2.0)
    plain = row.features(IMAGES, F64, SoftmaxSettings())
    scaled = row.features(IMAGES, F64, settings)
    norms, before = scaled[:, :-1].norm(dim=1), plain[:, :-1].norm(dim=1)
    assert float(before[1]) < 2.0 < float(before[2])
    torch.testing.assert_close(scaled[:2], plain[:2])
    torch.testing.assert_close(norms[2:], torch.full((48,), 2.0, dtype=F64))
    torch.testing.assert_close(scaled[2, :-1] / norms[2], plain[2, :-1] / before[2])
    assert torch.equal(scaled[:, -1], torch.ones(50, dtype=F64))
    objective = row.objective(tuple(scaled.shape[1:]), 10, F64, settings)
    assert objective.lipschitz == pytest.approx(math.sqrt(2.0) * math.sqrt(5.0))
    assert objective.smoothness == pytest.approx(2.5)


def test_softmax_without_scaling_has_the_constants_of_the_pixels() -> None:
    objective = find_model("softmax-regression").objective((785,), 10, torch.float32, SoftmaxSettings())
    assert objective == SoftmaxRegression(785, 10, feature_norm=math.sqrt(785.0), denominator=255)


@pytest.mark.parametrize("settings", [{"centre": 0.25}, {"feature_norm": 2.0}, {"feature_norm": 1e-3}])
def test_features_that_are_not_bytes_any_more_are_rounded_finely(settings: dict[str, Any]) -> None:
    """Exact releases round them to integers of 15 or 16 bits, and 255ths of what is left would be too coarse."""
    objective = find_model("softmax-regression").objective((785,), 10, torch.float32, SoftmaxSettings(**settings))
    assert isinstance(objective, SoftmaxRegression)
    assert objective.denominator is not None
    assert 2**15 <= objective.denominator * objective.feature_norm < 2**16


def test_features_that_cannot_be_rounded_finely_are_not() -> None:
    row = find_model("softmax-regression")
    for features, norm in ((10**5, 2.0), (785, 1e5)):
        made = row.objective((features,), 10, torch.float32, SoftmaxSettings(feature_norm=norm))
        assert isinstance(made, SoftmaxRegression)
        assert made.denominator is None


def test_centred_pixels_have_a_constant_subtracted_before_they_are_scaled() -> None:
    row = find_model("softmax-regression")
    settings = SoftmaxSettings(centre=0.25, feature_norm=2.0, scaling="exactly")
    features = row.features(IMAGES, F64, settings)
    plain = row.features(IMAGES, F64, SoftmaxSettings())[:, :-1] - 0.25
    torch.testing.assert_close(features[:, :-1], 2.0 * plain / plain.norm(dim=1, keepdim=True))
    objective = row.objective((785,), 10, F64, SoftmaxSettings(centre=0.25))
    assert objective.lipschitz == pytest.approx(math.sqrt(2.0 * (784 * 0.75**2 + 1.0)))


def test_orientation_histograms_as_features() -> None:
    row, settings = find_model("softmax-regression"), SoftmaxSettings(features="orientations", feature_norm=3.0)
    features = row.features(IMAGES, F64, settings)
    assert features.shape == (50, 393)
    assert float(features[:, :-1].norm(dim=1).max()) <= 3.0 + 1e-12
    assert torch.equal(features[:, -1], torch.ones(50, dtype=F64))


@pytest.mark.parametrize(
    ("name", "settings", "dimension"),
    [
        ("mlp", PerceptronSettings(), 50_890),
        ("mlp-relu", PerceptronSettings(hidden=8), 6_370),
        ("cnn", ModuleSettings(), 26_010),
    ],
)
def test_networks_take_the_fast_route_and_learn_with_clipped_gradients(
    name: str, settings: ModuleSettings, dimension: int
) -> None:
    row = find_model(name)
    features = row.features(IMAGES, torch.float32, settings)
    objective = row.objective(tuple(features.shape[1:]), 10, torch.float32, settings)
    assert isinstance(objective, LayeredObjective)
    assert objective.dimension == dimension
    records = Records(features, torch.arange(50) % 10)
    point, weights = objective.initial(), ones(50, dtype=torch.float32) / 50
    before = objective.evaluate(point, records).loss
    for _ in range(10):
        point = point - 0.2 * sum_increments(objective, point, records, 1.0, weights).total
    assert objective.evaluate(point, records).loss < before


@pytest.mark.slow
def test_a_network_of_rectifiers_learns_to_retrieve_phases() -> None:
    """|⟨x*, z⟩| is within reach of its hidden layer: much less is left than of the best constant, the median."""
    row, data = find_model("relu-regression"), load("phase-retrieval")
    settings = PerceptronSettings(hidden=8)
    sizes = torch.from_numpy(data.train_labels[:1000])
    records = Records(row.features(data.train_images[:1000], F64, settings), sizes)
    objective = row.objective((8,), 0, F64, settings)
    point = objective.initial()
    for _ in range(800):
        point = point - 0.1 * sum_increments(objective, point, records, 5.0, ones(1000) / 1000).total
    assert float(objective.evaluate(point, records).loss) < 0.6 * float((sizes - sizes.median()).abs().mean())


def test_least_squares_without_a_ball_has_no_lipschitz_constant() -> None:
    for penalty in (0.0, 0.1):
        objective = find_model("linear-regression").objective(
            (5,), 0, F64, LinearSettings(feature_norm=1.0, penalty=penalty)
        )
        assert objective.lipschitz == math.inf


def test_a_factorys_module_has_the_same_first_model_in_every_run() -> None:
    """Biases of a GRU are vectors of a layer without `weight`, so that x_1 keeps the values of the module."""

    def recurrent(_shape: object, _classes: object) -> nn.Module:
        return Net(
            lambda net, x: net.last(net.layer(x)[0][:, -1]),
            layer=nn.GRU(1, 4, batch_first=True),
            last=nn.Linear(4, 2),
        )

    add_module("recurrent-of-a-factory", recurrent, shape=(6, 1))
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        row = find_model("recurrent-of-a-factory")
        starts.append(row.objective((6,), 2, torch.float32, ModuleSettings()).initial())
        assert torch.random.initial_seed() == seed  # torch's generator is left as it was
    assert torch.equal(*starts)
