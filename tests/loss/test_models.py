"""The table of models: features, constants, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.data.named import load
from fedpriv.loss.layered import LayeredObjective
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.models import (
    MODELS,
    LinearSettings,
    PerceptronSettings,
    SoftmaxSettings,
    add_module,
    find_model,
    make_loss_choice,
)
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.rows import ModuleSettings

IMAGES = np.random.default_rng(0).integers(0, 256, (50, 28, 28)).astype(np.uint8)
IMAGES[0] = 0
IMAGES[1] //= 20


def test_feature_norm_scales_down_what_is_larger_and_nothing_else() -> None:
    row, settings = find_model("softmax-regression"), SoftmaxSettings(feature_norm=2.0)
    plain = row.features(IMAGES, torch.float64, SoftmaxSettings())
    scaled = row.features(IMAGES, torch.float64, settings)
    norms, before = scaled[:, :-1].norm(dim=1), plain[:, :-1].norm(dim=1)
    assert float(before[1]) < 2.0 < float(before[2])
    torch.testing.assert_close(scaled[:2], plain[:2])
    torch.testing.assert_close(norms[2:], torch.full((48,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(scaled[2, :-1] / norms[2], plain[2, :-1] / before[2])
    assert torch.equal(scaled[:, -1], torch.ones(50, dtype=torch.float64))
    objective = row.objective(tuple(scaled.shape[1:]), 10, torch.float64, settings)
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
    features = row.features(IMAGES, torch.float64, settings)
    plain = row.features(IMAGES, torch.float64, SoftmaxSettings())[:, :-1] - 0.25
    torch.testing.assert_close(features[:, :-1], 2.0 * plain / plain.norm(dim=1, keepdim=True))
    objective = row.objective((785,), 10, torch.float64, SoftmaxSettings(centre=0.25))
    assert objective.lipschitz == pytest.approx(math.sqrt(2.0 * (784 * 0.75**2 + 1.0)))


def test_orientation_histograms_as_features() -> None:
    row, settings = find_model("softmax-regression"), SoftmaxSettings(features="orientations", feature_norm=3.0)
    features = row.features(IMAGES, torch.float64, settings)
    assert features.shape == (50, 393)
    assert float(features[:, :-1].norm(dim=1).max()) <= 3.0 + 1e-12
    assert torch.equal(features[:, -1], torch.ones(50, dtype=torch.float64))


@pytest.mark.parametrize(
    "keys",
    [
        {"features": "orientations"},
        {"scaling": "exactly"},
        {"features": "orientations", "feature_norm": 1.0, "centre": 0.1},
    ],
)
def test_keys_of_features_that_do_not_fit_are_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"feature_norm is needed|centre is for"):
        SoftmaxSettings.model_validate(keys)


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
    point, weights = objective.initial(), torch.full((50,), 1 / 50)
    before = objective.evaluate(point, records).loss
    for _ in range(10):
        point = point - 0.2 * objective.increment(Query([point]), Batch(records, weights), 1.0).total
    assert objective.evaluate(point, records).loss < before


@pytest.mark.slow
def test_a_network_of_rectifiers_learns_to_retrieve_phases() -> None:
    """|⟨x*, z⟩| is within reach of its hidden layer: much less is left than of the best constant, the median."""
    row, data = find_model("relu-regression"), load("phase-retrieval")
    settings = PerceptronSettings(hidden=8)
    sizes = torch.from_numpy(data.train_labels[:1000])
    records = Records(row.features(data.train_images[:1000], torch.float64, settings), sizes)
    objective = row.objective((8,), 0, torch.float64, settings)
    point, weights = objective.initial(), torch.full((1000,), 1e-3, dtype=torch.float64)
    for _ in range(800):
        point = point - 0.1 * objective.increment(Query([point]), Batch(records, weights), 5.0).total
    assert float(objective.evaluate(point, records).loss) < 0.6 * float((sizes - sizes.median()).abs().mean())


def test_least_squares_without_a_ball_has_no_lipschitz_constant() -> None:
    for penalty in (0.0, 0.1):
        objective = find_model("linear-regression").objective(
            (5,), 0, torch.float64, LinearSettings(feature_norm=1.0, penalty=penalty)
        )
        assert objective.lipschitz == math.inf


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "cross-entropy", "class_weights": ["a", "b"]},
        {"name": "cross-entropy", "class_weights": 3},
        {"name": "cross-entropy", "label_smoothing": "much"},
        {"name": "cross-entropy", "function": len},
        3,
    ],
)
def test_a_loss_with_other_settings_is_refused_in_one_line(loss: Any) -> None:
    with pytest.raises(InputError, match=r"^loss = .*: accepted keys are name, class_weights and label_smoothing"):
        make_loss_choice(loss, real=False)


class Recurrent(nn.Module):
    """Its biases are vectors of a layer without `weight`, so that x_1 keeps the values of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.layer(values)[0][:, -1])
        return outputs


def test_a_factorys_module_has_the_same_first_model_in_every_run() -> None:
    add_module("recurrent-of-a-factory", lambda _shape, _classes: Recurrent(), shape=(6, 1))
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        row = find_model("recurrent-of-a-factory")
        starts.append(row.objective((6,), 2, torch.float32, ModuleSettings()).initial())
        assert torch.random.initial_seed() == seed  # torch's generator is left as it was
    assert torch.equal(*starts)


def test_the_convolutional_net_refuses_other_images() -> None:
    with pytest.raises(InputError, match="28 x 28 = 784 pixels, not 3072"):
        find_model("cnn").objective((3072,), 10, torch.float32, ModuleSettings())


def test_settings_of_another_model_are_refused() -> None:
    for name in ("mlp", "mlp-relu", "cnn"):
        with pytest.raises(ValidationError, match="feature_norm"):
            MODELS[name].settings.model_validate({"feature_norm": 2.0})
    with pytest.raises(ValidationError, match="greater than or equal to"):
        SoftmaxSettings(feature_norm=0.0)
