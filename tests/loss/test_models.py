"""The table of models: features, constants, what they learn, and the networks of shipped scenarios."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from benchmarks import pretrain
from fedpriv.data.layout import combine_inputs
from fedpriv.data.named import load
from fedpriv.loss.features import orientation_histograms, scale_to_norm
from fedpriv.loss.layered import LayeredObjective
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.losses import AbsoluteError, CrossEntropy, HazardLoss, Loss, SquaredError
from fedpriv.loss.models import (
    LinearSettings,
    PerceptronSettings,
    SoftmaxSettings,
    add_module,
    convolutional_net,
    find_model,
    grid_denominator,
)
from fedpriv.loss.objective import Records
from fedpriv.loss.presets import Transformer, adapted
from fedpriv.loss.rows import ModuleSettings
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from tests.loss.builders import F32, F64, Net, Patch, ones, sum_increments

IMAGES = np.random.default_rng(0).integers(0, 256, (50, 28, 28)).astype(np.uint8)
IMAGES[0] = 0
IMAGES[1] //= 20


SOFTMAX = find_model("softmax-regression")


def softmax(features: int = 785, dtype: torch.dtype = F32, **settings: Any) -> SoftmaxRegression:
    objective = SOFTMAX.objective((features,), 10, dtype, SoftmaxSettings(**settings))
    assert isinstance(objective, SoftmaxRegression)
    return objective


def softmax_features(**settings: Any) -> torch.Tensor:
    """The features of `IMAGES`, and that a 1 stands behind them."""
    features = SOFTMAX.features(IMAGES, F64, SoftmaxSettings(**settings))
    assert torch.equal(features[:, -1], ones(50))
    return features[:, :-1]


def test_feature_norm_scales_down_what_is_larger_and_nothing_else() -> None:
    plain, scaled = softmax_features(), softmax_features(feature_norm=2.0)
    norms, before = scaled.norm(dim=1), plain.norm(dim=1)
    assert float(before[1]) < 2.0 < float(before[2])
    torch.testing.assert_close(scaled[:2], plain[:2])
    torch.testing.assert_close(norms[2:], 2.0 * ones(48))
    torch.testing.assert_close(scaled[2] / norms[2], plain[2] / before[2])
    objective = softmax(dtype=F64, feature_norm=2.0)
    assert objective.lipschitz == pytest.approx(math.sqrt(2.0) * math.sqrt(5.0))
    assert objective.smoothness == pytest.approx(2.5)


def test_softmax_without_scaling_has_the_constants_of_the_pixels() -> None:
    assert softmax() == SoftmaxRegression(785, 10, feature_norm=math.sqrt(785.0), denominator=255)


@pytest.mark.parametrize("settings", [{"centre": 0.25}, {"feature_norm": 2.0}, {"feature_norm": 1e-3}])
def test_features_that_are_not_bytes_any_more_are_rounded_finely(settings: dict[str, Any]) -> None:
    """Exact releases round them to integers of 15 or 16 bits, and 255ths of what is left would be too coarse."""
    objective = softmax(**settings)
    assert objective.denominator is not None
    assert 2**15 <= objective.denominator * objective.feature_norm < 2**16


@pytest.mark.parametrize(
    ("features", "norm", "denominator"),
    [(4096, 1.0, 2**15), (4097, 1.0, None), (4, 2.0**16 - 1, 1), (4, 2.0**16, None), (12000, 1.9, 2**15)],
)
def test_features_have_a_grid_up_to_a_rounding_of_2_to_the_minus_10(
    features: int, norm: float, denominator: int | None
) -> None:
    """Half a step in each of 4096 coordinates is 32 steps, and 2^-10 of a norm of 2^15 steps."""
    assert grid_denominator(features, norm) == denominator


@pytest.mark.parametrize(("features", "norm"), [(10**5, 2.0), (785, 1e5)])
def test_features_that_cannot_be_rounded_finely_are_not(features: int, norm: float) -> None:
    assert softmax(features, feature_norm=norm).denominator is None


def test_centred_pixels_have_a_constant_subtracted_before_they_are_scaled() -> None:
    centred = softmax_features() - 0.25
    expected = 2.0 * centred / centred.norm(dim=1, keepdim=True)
    torch.testing.assert_close(softmax_features(centre=0.25, feature_norm=2.0, scaling="exactly"), expected)
    assert softmax(centre=0.25).lipschitz == pytest.approx(math.sqrt(2.0 * (784 * 0.75**2 + 1.0)))


def test_orientation_histograms_as_features() -> None:
    features = softmax_features(features="orientations", feature_norm=3.0)
    assert features.shape == (50, 392)
    assert float(features.norm(dim=1).max()) <= 3.0 + 1e-12


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
    features = row.features(IMAGES, F32, settings)
    objective = row.objective(tuple(features.shape[1:]), 10, F32, settings)
    assert isinstance(objective, LayeredObjective)
    assert objective.dimension == dimension
    records = Records(features, torch.arange(50) % 10)
    point, weights = objective.initial(), ones(50, dtype=F32) / 50
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


def test_a_network_of_rectifiers_takes_pictures_and_several_inputs() -> None:
    """Numbers of more than one axis, and records of several inputs, ended in a traceback."""
    row = find_model("relu-regression")
    pictures, extra = np.arange(24.0).reshape(2, 3, 4), np.array([[0.5], [1.5]])
    flat = row.features(pictures, F64, row.settings())
    assert torch.equal(flat, torch.arange(24.0, dtype=F64).view(2, 12))
    several = row.features(combine_inputs({"picture": pictures, "extra": extra}), F64, row.settings())
    assert torch.equal(several, torch.cat([flat, torch.from_numpy(extra)], 1))


def test_least_squares_without_a_ball_has_no_lipschitz_constant() -> None:
    for penalty in (0.0, 0.1):
        objective = find_model("linear-regression").objective(
            (5,), 0, F64, LinearSettings(feature_norm=1.0, penalty=penalty)
        )
        assert objective.lipschitz == math.inf


@pytest.mark.parametrize(
    ("name", "classes", "outputs", "activation", "loss"),
    [
        ("mlp", 3, 3, torch.tanh, CrossEntropy()), ("mlp-relu", 3, 3, torch.relu, CrossEntropy()),
        ("mlp-regression", 0, 1, torch.tanh, SquaredError()), ("hazard-mlp", 9, 4, torch.tanh, HazardLoss()),
        ("relu-regression", 0, 1, torch.relu, AbsoluteError()),
    ],
)  # fmt: skip
def test_a_perceptron_is_two_layers_and_an_activation(
    name: str, classes: int, outputs: int, activation: Callable[[torch.Tensor], torch.Tensor], loss: Loss
) -> None:
    row = find_model(name)
    assert (row.regression, row.survival) == (classes == 0, name == "hazard-mlp")
    objective = row.objective((5,), classes, F64, row.settings.model_validate({"hidden": 6}))
    assert isinstance(objective, LayeredObjective)
    assert objective.loss == loss
    generator = torch.Generator().manual_seed(0)
    point = torch.randn(objective.dimension, generator=generator, dtype=F64)
    features = torch.randn(4, 5, generator=generator, dtype=F64)
    first, bias, second, second_bias = torch.split(point, [30, 6, 6 * outputs, outputs])
    expected = activation(features @ first.view(6, 5).T + bias) @ second.view(outputs, 6).T + second_bias
    result = objective.outputs(point, Records(features, torch.zeros(4, dtype=torch.int64)))
    torch.testing.assert_close(result, expected)


def test_a_factorys_module_has_the_same_first_model_in_every_run() -> None:
    """Biases of a GRU are vectors of a layer without `weight`, so that x_1 keeps the values of the module."""

    seeds = list[int]()

    def recurrent(_shape: object, _classes: object) -> nn.Module:
        seeds.append(torch.random.initial_seed())
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
        starts.append(row.objective((6,), 2, F32, ModuleSettings()).initial())
        assert torch.random.initial_seed() == seed  # torch's generator is left as it was
    assert torch.equal(*starts)
    assert seeds == [0, 0]


# Features of one image


def histogram(image: np.ndarray) -> torch.Tensor:
    """(8, h/4, w/4)."""
    height, width = image.shape
    return orientation_histograms(image[None], F64).view(8, height // 4, width // 4)


def test_an_upright_edge_counts_in_one_direction_of_its_cells() -> None:
    image = np.zeros((12, 12), dtype=np.uint8)
    image[:, 6:] = 255
    edges = histogram(image)
    # Half the step from 0 to 255 in columns 5 and 6: 2 of a cell's 4 columns, and 0.5 each.
    torch.testing.assert_close(edges[0, 1, 1], torch.tensor(0.25, dtype=F64))
    assert float(edges[1:, 1, 1].abs().sum()) == 0.0
    assert float(edges[:, 1, 0].abs().sum()) == 0.0


def test_a_quarter_turn_of_the_image_turns_the_directions() -> None:
    image = IMAGES[1]
    turned = histogram(np.rot90(image).copy())  # counterclockwise: to the right becomes up, against the rows
    expected = torch.rot90(histogram(image), dims=(1, 2)).roll(-2, dims=0)
    torch.testing.assert_close(turned, expected)


def test_all_of_an_edges_length_is_counted_and_no_feature_is_above_its_bound() -> None:
    values = orientation_histograms(IMAGES, F64)
    assert values.shape == (50, 392)
    assert float(values.min()) >= 0.0
    assert float(values.max()) <= math.sqrt(0.5)
    gray = np.pad(IMAGES / 255.0, ((0, 0), (1, 1), (1, 1)))
    length = np.hypot(gray[:, 1:-1, 2:] - gray[:, 1:-1, :-2], gray[:, 2:, 1:-1] - gray[:, :-2, 1:-1]) / 2.0
    np.testing.assert_allclose(values.sum(1).numpy(), length.sum((1, 2)) / 16.0)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("norm", [1.0, 2.0, 5.0, 1e6])
def test_scaled_to_at_most_a_norm_or_exactly(norm: float, dtype: torch.dtype) -> None:
    """A row of zeros stays zero: it became NaN for norms above 4, where norm / tiny is infinite."""
    rows = norm * torch.tensor([[0.0, 0.0], [1.5, 2.0], [0.15, 0.2]], dtype=dtype)
    at_most = norm * torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.15, 0.2]], dtype=dtype)
    exactly = norm * torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.6, 0.8]], dtype=dtype)
    torch.testing.assert_close(scale_to_norm(rows, norm, exactly=False), at_most)
    torch.testing.assert_close(scale_to_norm(rows, norm, exactly=True), exactly)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(F32, value) for value in (1e-44, 1e-25, 1e-23, 1e-17, 3e19, 1e22, 3e38)]
    + [(F64, value) for value in (1e-320, 1e-165, 1e160, 1e308)],
)
def test_rows_whose_squares_are_no_numbers_of_the_type_have_the_norm(dtype: torch.dtype, value: float) -> None:
    """Was: norms of 1e13 for rows of 1e-25, and of 0 for rows of 1e22."""
    rows = torch.tensor([[value] * 4, [0.0] * 4, [0.1] * 4], dtype=dtype)
    exactly, at_most = (scale_to_norm(rows, 1.0, exactly=choice).norm(dim=1).tolist() for choice in (True, False))
    assert exactly == pytest.approx([1.0, 0.0, 1.0], rel=1e-5)
    assert at_most == pytest.approx([1.0 if value > 1.0 else 0.0, 0.0, 0.2], rel=1e-5, abs=1e-15)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("width", [3, 39, 1030])
def test_a_glance_changes_no_bit_of_scaled_features(dtype: torch.dtype, width: int) -> None:
    """Guarantee of `scaled`: rows within a few roundings of the norm, tiny and hostile ones, each by itself."""
    drawn = torch.randn(600, width, dtype=dtype, generator=torch.Generator().manual_seed(width))
    lengths = 1.0 + torch.arange(-300, 300, dtype=dtype).view(-1, 1) * torch.finfo(dtype).eps / 2.0
    near = drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True) * lengths
    ends = torch.tensor([0.0, -0.0, 1e-45, 1e-30, 1e15, math.inf, -math.inf, math.nan], dtype=dtype).view(-1, 1)
    rows = torch.cat([near, drawn * 0.01, ends.expand(-1, width)])
    result, tiny = scale_to_norm(rows, 1.0, exactly=False), torch.finfo(dtype).tiny
    for row, values in zip(rows, result, strict=True):
        alone = row.clone().unsqueeze(0)
        length = torch.linalg.vector_norm(alone, dim=1, keepdim=True)
        expected = alone * (1.0 / length.clamp(min=tiny)).clamp(max=1.0)
        assert values.numpy().tobytes() == expected.numpy().tobytes()


# Networks of the shipped scenarios


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("train", "size"), [("all", 26_010), ("head", 330), ("lora", 8 * (512 + 32) + 330)])
def test_what_is_trained_of_the_network_that_is_adapted(train: str, size: int) -> None:
    module = adapted(784, 10, train)  # type: ignore[arg-type]
    assert sum(each.numel() for each in module.parameters() if each.requires_grad) == size
    assert set(convolutional_net(10).state_dict()) <= set(module.state_dict())


def test_the_transformer_sees_the_order_of_words() -> None:
    torch.manual_seed(0)
    module, tokens = Transformer(6, 3, words=9, width=8, heads=2), torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert not torch.allclose(module(tokens), module(tokens.flip(1)))


@pytest.mark.slow
def test_a_run_of_sentences_learns_more_than_which_words_there_are(tmp_path: Path) -> None:
    """79 % is what a bag of words gives."""
    one = {"seeds": [0], "federation.silos": [1], "privacy.epsilon": [8.0]}
    results = fedpriv.run("sentences", set=one, out=tmp_path / "run")
    assert results[0].model().shape == (10_724,)
    assert (results[0].test_accuracy or 0.0) > 0.93


def test_the_weights_that_are_shipped_are_those_that_the_scenario_names(monkeypatch: Patch) -> None:
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(ROOT / "examples" / "lora"))
    few = ["seeds=1", "privacy.epsilon=3.0", 'label.method="LoRA, rank 8"', "data.name=synthetic"]
    (point,) = load_scenario(ROOT / "scenarios" / "lora-mnist.toml", few).points
    task = load_task(point.cell)
    assert task.objective.dimension == 8 * (512 + 32) + 330
    named = point.cell.model.settings.model_dump()["weights"]
    kept = torch.load(ROOT / "examples" / "lora" / f"{named.removeprefix('sha256:')}.pt", weights_only=True)
    assert torch.equal(task.objective.initial()[-10:], kept["10.bias"])


def test_pretraining_is_written_by_its_digest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = convolutional_net(10)
    one, two = (pretrain.write(network, tmp_path / name) for name in "ab")
    assert one == two
    assert [path.stem for path in (tmp_path / "a").iterdir()] == [one.removeprefix("sha256:")]
