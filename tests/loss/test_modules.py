"""Both routes of a module's increments against automatic differentiation, record by record, in float64."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.loss import layered, module
from fedpriv.loss.ghost import GhostObjective
from fedpriv.loss.layered import LayeredObjective, make_module_objective
from fedpriv.loss.losses import AbsoluteError, CrossEntropy, FunctionLoss, Loss, SquaredError, predict_labels
from fedpriv.loss.module import ModuleObjective, draw_initial_point, unflatten_parameters
from fedpriv.loss.objective import Objective, Query, Records
from fedpriv.loss.unrolled import UNROLLED_FUNCTIONS, make_vmap_module
from tests.loss.builders import (
    F32,
    F64,
    Net,
    Patch,
    autograd_increments,
    list_increments,
    ones,
    pick,
    sum_increments,
)
from tests.loss.test_ghost import objective as ghost_objective


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(2, 3, 2, bias=False), nn.Sequential(nn.ReLU(), nn.Flatten()), nn.Linear(3, 3),
    )  # fmt: skip


def test_pooling_without_an_axis_of_channels_is_computed_by_torch() -> None:
    net = nn.Sequential(nn.Unflatten(1, (4, 4)), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3))
    assert isinstance(make_module_objective(net, 16, CrossEntropy(), 0, F64), ModuleObjective)


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "dense": (dense, 6),
    "convolutional": (convolutional, 36),
}


def sample(features: int, batch: int, dimension: int, points: int, seed: int) -> tuple[list[Tensor], Records]:
    generator = np.random.default_rng(seed)
    at = [torch.from_numpy(generator.standard_normal(dimension)) for _ in range(points)]
    values = torch.from_numpy(generator.standard_normal((batch, features)))
    return at, Records(values, torch.from_numpy(generator.integers(0, 3, batch)))


def both_routes(name: str, loss: Loss | None = None) -> tuple[LayeredObjective, ModuleObjective]:
    make, features = MODULES[name]
    net, loss = make(), loss or CrossEntropy()
    fast = make_module_objective(net, features, loss, 0, F64)
    assert isinstance(fast, LayeredObjective)
    return fast, ModuleObjective(net, loss, 0, F64)


@pytest.mark.parametrize("name", MODULES)
@given(batch=st.integers(1, 5), points=st.integers(1, 3), clip=st.floats(0.01, 20.0), seed=st.integers(0, 10**6))
@settings(max_examples=12)
def test_increments_equal_autograd(name: str, batch: int, points: int, clip: float, seed: int) -> None:
    fast, general = both_routes(name)
    at, records = sample(MODULES[name][1], batch, fast.dimension, points, seed)
    generator = np.random.default_rng(seed + 1)
    query = Query(at, [float(value) for value in generator.standard_normal(points)])
    weights = torch.from_numpy(generator.uniform(0.1, 1.0, batch))
    increments = autograd_increments(fast.module, query, records)
    norms = increments.norm(dim=1)
    expected = (weights * (clip / norms).clamp(max=1.0)) @ increments
    for objective in (fast, general):
        measured = sum_increments(objective, query, records, clip, weights)
        torch.testing.assert_close(measured.total, expected, rtol=1e-10, atol=1e-10)
        assert int(measured.clipped_count) == int((norms > clip).sum())


@pytest.mark.parametrize("name", MODULES)
def test_one_record_moves_the_sum_by_at_most_the_clip(name: str) -> None:
    clip = 0.05
    for objective in both_routes(name):
        at, records = sample(MODULES[name][1], 5, objective.dimension, 2, 3)
        records, query = Records(30.0 * records.features, records.labels), Query(at, [7.0, -6.0])
        rows = [*itertools.combinations(range(5), 4), *itertools.combinations(range(4), 3)]
        sums = {some: sum_increments(objective, query, pick(records, list(some)), clip).total for some in rows}
        distances = {some: float((sums[0, 1, 2, 3] - total).norm()) for some, total in sums.items()}
        assert max(distances[some] for some in rows if len(some) == 3) == pytest.approx(clip, rel=1e-9)
        assert clip < max(distances[some] for some in rows if 4 in some) <= 2.0 * clip * (1 + 1e-9)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", [ModuleObjective, GhostObjective])
def test_a_parameter_without_axes_is_one_coordinate(kind: type[ModuleObjective], count: int) -> None:
    """Such as a learned temperature."""
    net = Net(
        lambda net, values: net.layer(values) * net.scale,
        layer=nn.Linear(4, 3),
        scale=nn.Parameter(torch.ones(())),
    )
    objective = kind(net, CrossEntropy(), 0, F64)
    (at,), records = sample(4, count, objective.dimension, 1, 2)
    expected = autograd_increments(net, at, records)
    torch.testing.assert_close(list_increments(objective, at, records, 1e9), expected)
    torch.testing.assert_close(sum_increments(objective, at, records).total, expected.sum(0))
    assert objective.outputs(at, records).shape == (count, 3)


def test_many_parameters_with_small_gradients_add_up_in_the_norm() -> None:
    """A sum of their squares in floating point would lose each of them beside the square 1 of another one."""
    small, clip, names = 2.0**-27, 0.5, [f"small{index}" for index in range(1024)]
    net = Net(
        lambda net, values: values[:, :1] * net.first + values[:, 1:] * sum(getattr(net, name) for name in names),
        **{name: nn.Parameter(torch.zeros(1)) for name in ("first", *names)},
    )
    objective = ModuleObjective(net, AbsoluteError(), 0, F64)
    records = Records(torch.tensor([[1.0, small]] * 2, dtype=F64), torch.full((2,), -1.0, dtype=F64))
    for row in list_increments(objective, torch.zeros(objective.dimension, dtype=F64), records, clip):
        assert sum(Fraction(value) ** 2 for value in row.tolist()) <= Fraction(clip) ** 2


@pytest.mark.parametrize(
    ("name", "seed"), [*(("dense", seed) for seed in range(8)), *(("attention", seed) for seed in range(4))]
)
def test_clip_holds_in_float32_late_in_a_run(name: str, seed: int) -> None:
    """c = (t, -(t-1)) at points 1/t apart: products of the full gradients would leave no digit of the norm."""
    net = nn.Sequential(nn.Linear(12, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    dense: Objective = make_module_objective(net, 12, CrossEntropy(), 0)
    objective, t, clip = dense if name == "dense" else ghost_objective(name, F32), 60_000, 0.02
    (at, shift), records = sample(12, 1, objective.dimension, 2, seed)
    points = [(0.3 * at).float(), (0.3 * at + shift / t).float()]
    records = Records(records.features.float(), records.labels)
    increment = sum_increments(objective, Query(points, [float(t), -float(t - 1)]), records, clip, torch.ones(1))
    assert int(increment.clipped_count) == 1
    assert float(increment.total.norm()) == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("name", MODULES)
def test_leading_axes_are_independent_replicates(name: str) -> None:
    generator = np.random.default_rng(0)
    for objective in both_routes(name):
        features, dimension = MODULES[name][1], objective.dimension
        points = [torch.from_numpy(generator.standard_normal((2, 3, dimension))) for _ in range(2)]
        values = torch.from_numpy(generator.standard_normal((2, 3, 4, features)))
        records = Records(values, torch.from_numpy(generator.integers(0, 3, (2, 3, 4))))
        weights = ones(4) / 4
        clip = torch.linspace(0.1, 2.0, 6, dtype=F64).view(2, 3, 1)
        together = sum_increments(objective, Query(points, [2.0, -1.0]), records, clip, weights)
        whole = pick(records, (0, 0))
        evaluated = objective.evaluate(points[0], whole)
        for place in np.ndindex(2, 3):
            query, own = Query([point[place] for point in points], [2.0, -1.0]), pick(records, place)
            alone = sum_increments(objective, query, own, float(clip[place]), weights)
            torch.testing.assert_close(together.total[place], alone.total)
            assert together.clipped_count[place] == alone.clipped_count
            single = objective.evaluate(points[0][place], whole)
            torch.testing.assert_close(evaluated.loss[place], single.loss)
            assert evaluated.accuracy is not None
            assert evaluated.accuracy[place] == single.accuracy


@pytest.mark.parametrize("name", MODULES)
def test_chunks_change_nothing(name: str, monkeypatch: Patch) -> None:
    objectives = both_routes(name)
    at, records = sample(MODULES[name][1], 7, objectives[0].dimension, 2, 9)
    weights = torch.linspace(0.1, 1.0, 7, dtype=F64)

    def results() -> list[tuple[Tensor, ...]]:
        query = Query(at, [3.0, -2.0])
        summed = [sum_increments(one, query, records, 0.7, weights) for one in objectives]
        return [(*sums, one.evaluate(at[0], records).loss) for sums, one in zip(summed, objectives, strict=True)]

    whole = results()
    for owner in (layered, module):
        monkeypatch.setattr(owner, "_CHUNK_VALUES", 5 * max(one.dimension for one in objectives))
        monkeypatch.setattr(layered, "_VALUES_PER_PARAMETER", 0)
    for before, after in zip(whole, results(), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "features"), [("dense", 6), ("convolutional", 36), ("attention", 12)])
def test_a_record_that_is_not_finite_adds_nothing(name: str, features: int) -> None:
    for objective in both_routes(name) if name in MODULES else (ghost_objective(name),):
        at, records = sample(features, 3, objective.dimension, 2, 1)
        query = Query(at, [2.0, -1.0])
        expected = sum_increments(objective, query, pick(records, slice(1, None)), 1.0)
        records.features[0, 0] = torch.nan
        measured = sum_increments(objective, query, records, 1.0)
        torch.testing.assert_close(measured.total, expected.total)
        assert measured.clipped_count == expected.clipped_count + 1


@pytest.mark.parametrize("several", [1, 3])
def test_inference_mode_changes_nothing(several: int) -> None:
    for objective in both_routes("dense"):
        at, records = sample(6, several, objective.dimension, 2, 1)
        expected = sum_increments(objective, Query(at, [2.0, -1.0]), records, 1.0).total
        with torch.inference_mode():
            points, inside = [point.clone() for point in at], Records(*(column.clone() for column in records))
            measured = sum_increments(objective, Query(points, [2.0, -1.0]), inside, 1.0)
        torch.testing.assert_close(measured.total, expected)


@pytest.mark.parametrize(
    ("regression", "value"),
    [(SquaredError(), lambda residual: 0.5 * residual**2), (AbsoluteError(), torch.abs)],
    ids=["squared", "absolute"],
)
def test_regression_loss(regression: Loss, value: Callable[[Tensor], Tensor]) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    generator = np.random.default_rng(4)
    features = torch.from_numpy(generator.standard_normal((5, 3)))
    records = Records(features, torch.from_numpy(generator.standard_normal(5)))
    point = torch.from_numpy(generator.standard_normal(21)).requires_grad_()
    outputs = functional_call(net, unflatten_parameters(net, point), (records.features,)).squeeze(-1)
    loss = value(outputs - records.labels).mean()
    (expected,) = torch.autograd.grad(loss, point)
    for objective in (make_module_objective(net, 3, regression, 0, F64), ModuleObjective(net, regression, 0, F64)):
        measured = sum_increments(objective, point.detach(), records, weights=0.2 * ones(5))
        torch.testing.assert_close(measured.total, expected, rtol=1e-10, atol=1e-12)
        evaluation = objective.evaluate(point.detach(), records)
        torch.testing.assert_close(evaluation.loss, loss.detach())
        assert evaluation.accuracy is None


def test_a_long_initial_point_is_drawn_in_pieces_with_the_same_bits() -> None:
    """Guarantee of a published start: memory that is saved changes no value."""
    module = nn.Sequential(nn.Linear(300, 250), nn.Linear(250, 2))
    bound = 1.0 / math.sqrt(300)
    drawn = public_generator(5, "initial model").uniform(-bound, bound, 300 * 250)
    first = draw_initial_point(module, 5, torch.float32)[: 300 * 250]
    assert torch.equal(first, torch.from_numpy(drawn).to(torch.float32))


def test_one_record_without_an_axis_of_outputs_keeps_its_axis() -> None:
    loss = FunctionLoss(lambda output, label: output, (), 0)
    assert predict_labels(loss, torch.zeros(1)).shape == (1,)
    assert predict_labels(loss, torch.zeros(1, 1)).shape == (1,)


def test_a_layer_whose_weight_is_none_begins_at_its_values() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = None
            self.bias = nn.Parameter(torch.ones(3))

    assert draw_initial_point(Shift(), 0, torch.float64).tolist() == [1.0, 1.0, 1.0]


def test_initial_point_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = make_module_objective(dense(), 6, CrossEntropy(), 3).initial()
    torch.manual_seed(2)
    assert torch.equal(first, make_module_objective(dense(), 6, CrossEntropy(), 3).initial())
    assert not torch.equal(first, make_module_objective(dense(), 6, CrossEntropy(), 4).initial())
    wide = nn.Sequential(nn.Linear(400, 50), nn.GroupNorm(5, 50), nn.Linear(50, 2))
    parts = unflatten_parameters(wide, ModuleObjective(wide, CrossEntropy(), 0).initial())
    assert 0.95 / 20 < float(parts["0.weight"].abs().max()) <= 1 / 20
    assert float(parts["0.bias"].abs().max()) <= 1 / 20
    assert torch.equal(parts["1.weight"], torch.ones(50))


class Noisy(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(values, 0.5))


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.BatchNorm1d(5, track_running_stats=False), "layer 1 \\(BatchNorm1d\\) mixes"),
        (nn.Dropout(0.1), "layer 1 \\(Dropout\\) draws"),
        (nn.AlphaDropout(0.1), "layer 1 \\(AlphaDropout\\) draws random numbers; .* with p = 0, can be used"),
        (nn.TransformerEncoderLayer(5, 1, 4, dropout=0.1), "layer 1.self_attn .*draws random numbers"),
        (nn.InstanceNorm1d(5, track_running_stats=True), "layer 1 \\(InstanceNorm1d\\) remembers"),
    ],
)
def test_layers_whose_gradient_is_not_the_records_own_are_refused(layer: nn.Module, named: str) -> None:
    with pytest.raises(InputError, match=named):
        make_module_objective(nn.Sequential(nn.Linear(6, 5), layer, nn.Linear(5, 3)), 6, CrossEntropy(), 0)


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_backward_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
    ],
)
def test_a_layer_with_a_backward_hook_is_refused(register: Callable[..., object]) -> None:
    """A hook ran on a record alone, as a guard trains, and not on several: two gradients of one record."""
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    register(network[2], lambda *arguments: None)
    with pytest.raises(InputError, match=r"layer 2 \(Linear\) has a backward hook.*torch\.autograd\.Function$"):
        make_module_objective(network, 6, CrossEntropy(), 0)


@pytest.mark.parametrize("several", [1, 2])
def test_hidden_randomness_is_refused(several: int) -> None:
    objective = make_module_objective(Noisy(6, 3), 6, CrossEntropy(), 0, F64)
    (at,), records = sample(6, several, objective.dimension, 1, 0)
    with pytest.raises(InputError, match="Noisy"):
        sum_increments(objective, at, records, 1.0)


# Layers that vmap cannot run, in operations that it can


RECURRENT: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (kind, {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first})
    for kind, layers, both, bias, first in itertools.product(
        (nn.GRU, nn.RNN, nn.LSTM), (1, 2), (False, True), (False, True), (False, True)
    )
] + [(nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}), (nn.RNN, {"nonlinearity": "relu"})]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one.shape == other.shape and torch.allclose(one, other, atol=1e-12))


@pytest.mark.parametrize(("kind", "settings"), RECURRENT)
def test_a_recurrent_layer_is_torchs(kind: type[nn.RNNBase], settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = kind(3, 4, **settings).double()
    copied = make_vmap_module(layer)
    assert copied is not layer
    assert type(layer) is kind
    assert [id(each) for each in copied.parameters()] == [id(each) for each in layer.parameters()]
    values = torch.randn(5, 2, 3, dtype=F64)
    assert same(copied(values), layer(values))
    assert same(copied(values[:, 0]), layer(values[:, 0]))  # one record without an axis for it
    start = layer(values)[1]
    assert same(copied(values, start), layer(values, start))
    moved = {name: torch.randn_like(each) for name, each in layer.named_parameters()}
    assert same(functional_call(copied, moved, (values,)), functional_call(layer, moved, (values,)))


FUNCTIONS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": nn.RNN,
}


@pytest.mark.parametrize(("layers", "both", "bias", "first"), [(1, False, True, False), (2, True, False, True)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_recurrent_function_without_its_layer_is_torchs(
    name: str, layers: int, both: bool, bias: bool, first: bool
) -> None:
    """Subclasses of layers call these, which no other forward pass replaces."""
    torch.manual_seed(0)
    layer = FUNCTIONS[name](3, 4, layers, bias=bias, bidirectional=both).double()
    states = [torch.randn(layers * (1 + both), 2, 4, dtype=F64) for _ in range(1 + (name == "lstm"))]
    state: Any = states if name == "lstm" else states[0]
    values, weights, function = torch.randn(2, 2, 3, dtype=F64), list(layer.parameters()), getattr(torch, name)
    for train in (False, True):  # a dropout of 1 leaves only biases and state for a second layer
        settings = bias, layers, float(layers > 1 and train), train, both, first
        expected = function(values, state, weights, *settings)
        assert same(UNROLLED_FUNCTIONS[function](values, state, weights, *settings), expected)
    packed = nn.utils.rnn.pack_sequence([values[0], values[1, :1]])
    with pytest.raises(RuntimeError, match="a packed sequence"):
        UNROLLED_FUNCTIONS[function](
            packed.data, packed.batch_sizes, state, weights, bias, layers, 0.0, False, both
        )


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("layers", "both", "bias"), [(1, False, True), (2, True, False)])
def test_a_recurrent_function_with_a_projection_is_torchs(steps: int, layers: int, both: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, layers, bias=bias, bidirectional=both, proj_size=2).double()
    state = [torch.randn(layers * (1 + both), 2, width, dtype=F64) for width in (2, 4)]
    values, settings = torch.randn(steps, 2, 3, dtype=F64), (bias, layers, 0.0, False, both, False)
    expected = torch.lstm(values, state, list(layer.parameters()), *settings)
    assert same(UNROLLED_FUNCTIONS[torch.lstm](values, state, list(layer.parameters()), *settings), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_one_step_is_torchs(name: str) -> None:
    torch.manual_seed(0)
    weights = list(FUNCTIONS[name](3, 4).double().parameters())
    states = [torch.randn(2, 4, dtype=F64) for _ in range(1 + (name == "lstm"))]
    state: Any = states if name == "lstm" else states[0]
    function, values = getattr(torch, f"{name}_cell"), torch.randn(2, 3, dtype=F64)
    for parameters in (weights, weights[:2]):
        expected = function(values, state, *parameters)
        assert same(UNROLLED_FUNCTIONS[function](values, state, *parameters), expected)


@pytest.mark.parametrize("make", [nn.GRUCell, nn.RNNCell, nn.LSTMCell])
def test_a_cell_is_torchs(make: Callable[..., nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        cell = make(3, 4, bias=bias).double()
        values = torch.randn(2, 3, dtype=F64)
        state = cell(values)
        assert same(make_vmap_module(cell)(values), state)
        assert same(make_vmap_module(cell)(values, state), cell(values, state))
        assert same(make_vmap_module(cell)(hx=state, input=values), cell(values, state))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_a_bag_is_torchs(mode: Any, padding: int | None) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=padding).double()
    words = torch.tensor([[0, 2, 2, 6], [2, 2, 2, 2], [1, 1, 3, 2]])
    weights: list[Tensor | None] = [None, torch.randn(3, 4, dtype=F64)] if mode == "sum" else [None]
    for each in weights:
        assert same(make_vmap_module(bag)(words, None, each), bag(words, None, each))
        assert same(make_vmap_module(bag)(input=words, per_sample_weights=each), bag(words, None, each))


def test_tables_and_recurrent_layers_take_the_keywords_of_torch() -> None:
    torch.manual_seed(0)
    table, layer = nn.Embedding(3, 2), nn.LSTM(2, 2)
    words, values = torch.tensor([1, 0]), torch.randn(4, 1, 2)
    assert same(make_vmap_module(table)(input=words), table(words))
    assert same(make_vmap_module(layer)(input=values, hx=None)[0], layer(values)[0])
