"""Both routes of a module's increments against automatic differentiation, record by record, in float64."""

import math
from collections.abc import Callable
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
from fedpriv.loss.imported import check_outputs
from fedpriv.loss.layered import LayeredObjective, make_module_objective
from fedpriv.loss.losses import AbsoluteError, CrossEntropy, Loss, SquaredError
from fedpriv.loss.module import ModuleObjective, draw_initial_point, unflatten_parameters
from fedpriv.loss.objective import Batch, Query, Records

F64 = torch.float64


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 2, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(2, 3, 2, bias=False),
        nn.Sequential(nn.ReLU(), nn.Flatten()),
        nn.Linear(3, 3),
    )


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "dense": (dense, 6),
    "convolutional": (convolutional, 36),
}


def sample(features: int, batch: int, dimension: int, points: int, seed: int) -> tuple[list[Tensor], Records]:
    generator = np.random.default_rng(seed)
    at = [torch.from_numpy(generator.standard_normal(dimension)) for _ in range(points)]
    values = torch.from_numpy(generator.standard_normal((batch, features)))
    return at, Records(values, torch.from_numpy(generator.integers(0, 3, batch)))


def by_autograd(net: nn.Module, points: list[Tensor], coefficients: list[float], records: Records) -> list[Tensor]:
    """The unclipped increment of each record."""
    increments = []
    for feature, label in zip(*records, strict=True):
        increment = torch.zeros_like(points[0])
        for point, coefficient in zip(points, coefficients, strict=True):
            leaf = point.clone().requires_grad_()
            outputs = functional_call(net, unflatten_parameters(net, leaf), (feature.unsqueeze(0),))
            loss = nn.functional.cross_entropy(outputs, label.unsqueeze(0))
            increment += coefficient * torch.autograd.grad(loss, leaf)[0]
        increments.append(increment)
    return increments


def both_routes(name: str, loss: Loss | None = None) -> tuple[LayeredObjective, ModuleObjective]:
    make, features = MODULES[name]
    net, loss = make(), loss or CrossEntropy()
    fast = make_module_objective(net, features, loss, 0, F64)
    assert isinstance(fast, LayeredObjective)
    return fast, ModuleObjective(net, loss, 0, F64)


@pytest.mark.parametrize("name", MODULES)
@given(batch=st.integers(1, 5), points=st.integers(1, 3), clip=st.floats(0.01, 20.0), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_increments_equal_autograd(name: str, batch: int, points: int, clip: float, seed: int) -> None:
    fast, general = both_routes(name)
    at, records = sample(MODULES[name][1], batch, fast.dimension, points, seed)
    generator = np.random.default_rng(seed + 1)
    coefficients = [float(value) for value in generator.standard_normal(points)]
    weights = torch.from_numpy(generator.uniform(0.1, 1.0, batch))
    increments = by_autograd(fast.module, at, coefficients, records)
    expected = sum(
        weight * increment * min(1.0, clip / float(increment.norm()))
        for weight, increment in zip(weights, increments, strict=True)
    )
    for objective in (fast, general):
        measured = objective.increment(Query(at, coefficients), Batch(records, weights), clip)
        torch.testing.assert_close(measured.total, expected, rtol=1e-10, atol=1e-10)
        assert int(measured.clipped_count) == sum(float(increment.norm()) > clip for increment in increments)


@pytest.mark.parametrize("name", MODULES)
def test_one_record_moves_the_sum_by_at_most_the_clip(name: str) -> None:
    clip, weights = 0.05, torch.ones(4, dtype=F64)
    for objective in both_routes(name):
        at, records = sample(MODULES[name][1], 5, objective.dimension, 2, 3)
        records = Records(30.0 * records.features, records.labels)

        def total(chosen: list[int], objective: Any = objective, at: Any = at, records: Any = records) -> Tensor:
            part = Records(records.features[chosen], records.labels[chosen])
            result: Tensor = objective.increment(
                Query(at, [7.0, -6.0]), Batch(part, weights[: len(chosen)]), clip
            ).total
            return result

        together = total([0, 1, 2, 3])
        moved_out = [float((together - total([k for k in range(4) if k != left])).norm()) for left in range(4)]
        replaced = [
            float((together - total([k if k != left else 4 for k in range(4)])).norm()) for left in range(4)
        ]
        assert max(moved_out) == pytest.approx(clip, rel=1e-9)
        assert clip < max(replaced) <= 2.0 * clip * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_clip_holds_in_float32_late_in_a_run(seed: int) -> None:
    """c = (t, -(t-1)) at points 1/t apart: products of the full gradients would leave no digit of the norm."""
    net = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    objective, t, clip = make_module_objective(net, 6, CrossEntropy(), 0), 60_000, 0.02
    (at, shift), records = sample(6, 1, objective.dimension, 2, seed)
    points = [(0.3 * at).float(), (0.3 * at + shift / t).float()]
    records = Records(records.features.float(), records.labels)
    increment = objective.increment(Query(points, [float(t), -float(t - 1)]), Batch(records, torch.ones(1)), clip)
    assert int(increment.clipped_count) == 1
    assert float(increment.total.norm()) == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("name", MODULES)
def test_leading_axes_are_independent_replicates(name: str) -> None:
    generator = np.random.default_rng(0)
    for objective in both_routes(name):
        features, dimension = MODULES[name][1], objective.dimension
        points = [torch.from_numpy(generator.standard_normal((2, 3, dimension))) for _ in range(2)]
        records = Records(
            torch.from_numpy(generator.standard_normal((2, 3, 4, features))),
            torch.from_numpy(generator.integers(0, 3, (2, 3, 4))),
        )
        weights = torch.full((4,), 0.25, dtype=F64)
        clip = torch.linspace(0.1, 2.0, 6, dtype=F64).view(2, 3, 1)
        together = objective.increment(Query(points, [2.0, -1.0]), Batch(records, weights), clip)
        whole = Records(records.features[0, 0], records.labels[0, 0])
        evaluated = objective.evaluate(points[0], whole)
        for place in np.ndindex(2, 3):
            alone = objective.increment(
                Query([point[place] for point in points], [2.0, -1.0]),
                Batch(Records(records.features[place], records.labels[place]), weights),
                float(clip[place]),
            )
            torch.testing.assert_close(together.total[place], alone.total)
            assert together.clipped_count[place] == alone.clipped_count
            single = objective.evaluate(points[0][place], whole)
            torch.testing.assert_close(evaluated.loss[place], single.loss)
            assert evaluated.accuracy is not None
            assert single.accuracy is not None
            assert evaluated.accuracy[place] == single.accuracy


@pytest.mark.parametrize("name", MODULES)
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objectives = both_routes(name)
    at, records = sample(MODULES[name][1], 7, objectives[0].dimension, 2, 9)
    weights = torch.linspace(0.1, 1.0, 7, dtype=F64)

    def results() -> list[tuple[Tensor, ...]]:
        return [
            (
                *one.increment(Query(at, [3.0, -2.0]), Batch(records, weights), 0.7),
                one.evaluate(at[0], records).loss,
            )
            for one in objectives
        ]

    whole = results()
    for owner in (layered, module):
        monkeypatch.setattr(owner, "_CHUNK_VALUES", 5 * max(one.dimension for one in objectives))
        monkeypatch.setattr(layered, "_VALUES_PER_PARAMETER", 0)
    for before, after in zip(whole, results(), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODULES)
def test_a_record_that_is_not_finite_adds_nothing(name: str) -> None:
    for objective in both_routes(name):
        at, records = sample(MODULES[name][1], 3, objective.dimension, 2, 1)
        weights = torch.ones(3, dtype=F64)
        rest = Records(records.features[1:], records.labels[1:])
        expected = objective.increment(Query(at, [2.0, -1.0]), Batch(rest, weights[1:]), 1.0)
        records.features[0, 0] = torch.nan
        measured = objective.increment(Query(at, [2.0, -1.0]), Batch(records, weights), 1.0)
        torch.testing.assert_close(measured.total, expected.total)
        assert measured.clipped_count == expected.clipped_count + 1


@pytest.mark.parametrize("several", [1, 3])
def test_inference_mode_changes_nothing(several: int) -> None:
    for objective in both_routes("dense"):
        at, records = sample(6, several, objective.dimension, 2, 1)
        weights = torch.ones(several, dtype=F64)
        expected = objective.increment(Query(at, [2.0, -1.0]), Batch(records, weights), 1.0).total
        with torch.inference_mode():
            points = [point.clone() for point in at]
            measured = objective.increment(
                Query(points, [2.0, -1.0]), Batch(Records(*(p.clone() for p in records)), weights), 1.0
            )
        torch.testing.assert_close(measured.total, expected)


@pytest.mark.parametrize(
    ("regression", "value"),
    [(SquaredError(), lambda residual: 0.5 * residual**2), (AbsoluteError(), torch.abs)],
    ids=["squared", "absolute"],
)
def test_regression_loss(regression: Loss, value: Callable[[Tensor], Tensor]) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    generator = np.random.default_rng(4)
    records = Records(
        torch.from_numpy(generator.standard_normal((5, 3))), torch.from_numpy(generator.standard_normal(5))
    )
    point = torch.from_numpy(generator.standard_normal(21)).requires_grad_()
    outputs = functional_call(net, unflatten_parameters(net, point), (records.features,)).squeeze(-1)
    loss = value(outputs - records.labels).mean()
    (expected,) = torch.autograd.grad(loss, point)
    for objective in (make_module_objective(net, 3, regression, 0, F64), ModuleObjective(net, regression, 0, F64)):
        weights = torch.full((5,), 0.2, dtype=F64)
        measured = objective.increment(Query([point.detach()]), Batch(records, weights), 1e9)
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


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(values, 0.5))


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


class Attending(nn.Module):
    """torch's own transformer over six words of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(1, 4), nn.Linear(4, 3)
        self.mixed = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(self.mixed(self.wide(values.unsqueeze(-1))).mean(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("net", [nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.0), nn.Linear(4, 3)), Attending()])
def test_dropout_that_drops_nothing_is_trained(net: nn.Module) -> None:
    net = net.double()
    check_outputs(net, 6, 3, "test")
    objective = make_module_objective(net, 6, CrossEntropy(), 0, F64)
    at, records = sample(6, 3, objective.dimension, 2, 2)
    expected = sum(by_autograd(net, at, [2.0, -1.0], records))
    for batch in (records, Records(records.features[:1], records.labels[:1])):
        weights = torch.ones(len(batch.labels), dtype=F64)
        measured = objective.increment(Query(at, [2.0, -1.0]), Batch(batch, weights), 1e9).total
        if batch is not records:
            expected = by_autograd(net, at, [2.0, -1.0], batch)[0]
        torch.testing.assert_close(measured, expected, rtol=1e-9, atol=1e-9)
    assert objective.outputs(at[0], records).shape == (3, 3)


@pytest.mark.parametrize("several", [1, 2])
def test_hidden_randomness_is_refused(several: int) -> None:
    objective = make_module_objective(Noisy(), 6, CrossEntropy(), 0, F64)
    at, records = sample(6, several, objective.dimension, 1, 0)
    with pytest.raises(InputError, match="Noisy"):
        objective.increment(Query(at), Batch(records, torch.ones(several, dtype=F64)), 1.0)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(6, 6), shared := nn.Linear(6, 6), nn.Tanh(), shared, nn.Linear(6, 3)),
        nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
    ],
    ids=["shared", "layer norm", "conv1d"],
)
def test_other_modules_take_the_general_route(net: nn.Module) -> None:
    objective = make_module_objective(net, 6, CrossEntropy(), 0, F64)
    assert isinstance(objective, ModuleObjective)
    at, records = sample(6, 3, objective.dimension, 2, 2)
    expected = sum(by_autograd(net, at, [2.0, -1.0], records))
    measured = objective.increment(Query(at, [2.0, -1.0]), Batch(records, torch.ones(3, dtype=F64)), 1e9)
    torch.testing.assert_close(measured.total, expected, rtol=1e-10, atol=1e-10)
