"""Closed forms of any module's increments, against automatic differentiation record by record."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fedpriv.core.errors import InputError
from fedpriv.data.layout import FeatureLayout, InputLayout
from fedpriv.loss import functions, ghost
from fedpriv.loss.clipping import compute_clipping
from fedpriv.loss.functions import (
    ConvolutionFunction,
    EmbeddingTerms,
    LinearFunction,
    ParameterUse,
    PositionTerms,
    long_upper_norm,
    make_weight_terms,
)
from fedpriv.loss.ghost import GhostObjective
from fedpriv.loss.imported import check_outputs
from fedpriv.loss.inputs import make_layout_objective
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import CrossEntropy, LossChoice
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Increment, Query, Records
from tests.loss import test_hostile_queries as hostile
from tests.loss import zoo
from tests.loss.builders import (
    F32,
    F64,
    UNCLIPPED,
    Net,
    Patch,
    all_but,
    autograd_increments,
    measure_calls,
    pick_one,
    sum_increments,
)

FEATURES, CLASSES, RECORDS = 12, 3, 5


def words(values: Tensor) -> Any:
    """Six numbers of words, 0 to 4, some of them the same."""
    return (values[..., :6] * 3.0).long().abs() % 5


def attention(net: Any, values: Tensor) -> Any:
    seen = net.norm(net.wide(values.unflatten(-1, (6, 2))) + net.places)
    parts = [layer(seen).unflatten(-1, (2, 2)).transpose(-3, -2) for layer in (net.query, net.key, net.value)]
    mixed = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(-3, -2).flatten(-2)
    return net.out((seen + mixed).mean(-2))


def masked(net: Any, values: Tensor) -> Any:
    """Attention with a scale, with a mask, and with the keys of one head for all heads."""
    seen, mask = net.wide(values.unflatten(-1, (2, 3, 2))), torch.eye(3, dtype=values.dtype)
    seen = functional.scaled_dot_product_attention(seen, seen, seen, scale=0.3)
    seen = functional.scaled_dot_product_attention(seen, seen, seen, attn_mask=mask)
    key = seen[..., :1, :, :]
    return net.out(functional.scaled_dot_product_attention(seen, key, key).mean((-3, -2)))


def dropped(net: Any, values: Tensor) -> Any:
    seen = net.wide(values.unflatten(-1, (1, 6, 2)))
    return net.out(functional.scaled_dot_product_attention(seen, seen, seen, dropout_p=0.5).mean((-3, -2)))


def recurrent(net: Any, values: Tensor) -> Any:
    steps = values.unflatten(-1, (4, 3))
    state = steps.new_zeros(len(values), 4), steps.new_zeros(len(values), 4)
    for step in range(4):
        state = net.cell(steps[:, step], state)
    return net.out(state[0])


def layer_of(make: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    def call(net: Any, values: Tensor) -> Any:
        return net.out(net.cells(values.unflatten(-1, (4, 3)))[0].sum(1))

    width = 2 * (1 + settings.get("bidirectional", False))
    return Net(call, cells=make(3, 2, batch_first=True, **settings), out=nn.Linear(width, 3))


def changed(net: Any, values: Tensor) -> Any:
    inner = net.one(values)
    before = inner * 2.0
    inner[..., :2].mul_(3.0)
    return net.out(before + inner)


def by_keywords(net: Any, values: Tensor) -> Any:
    inner = functional.conv1d(input=values.unflatten(-1, (2, 6)), weight=net.conv.weight, bias=net.conv.bias)
    return functional.linear(input=inner.flatten(-2), weight=net.out.weight, bias=net.out.bias)


def pictures(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 6)), *layers, nn.Flatten(), nn.LazyLinear(CLASSES))


CASES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Net(
        attention, wide=nn.Linear(2, 4), norm=nn.LayerNorm(4), query=nn.Linear(4, 4),
        key=nn.Linear(4, 4, bias=False), value=nn.Linear(4, 4), out=nn.Linear(4, 3),
        places=nn.Parameter(torch.randn(6, 4))),
    "masked": lambda: Net(masked, wide=nn.Linear(2, 4), out=nn.Linear(4, 3)),
    "torch's transformer": lambda: Net(
        lambda net, x: net.out(net.mixed(net.wide(x.unflatten(-1, (6, 2)))).mean(1)), wide=nn.Linear(2, 4),
        mixed=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), out=nn.Linear(4, 3)),
    "words": lambda: Net(
        lambda net, x: net.out(net.norm(net.table(words(x))).flatten(1)),
        table=nn.Embedding(5, 3, padding_idx=1), norm=nn.LayerNorm((6, 3)), out=nn.Linear(18, 3)),
    "shifted": lambda: Net(
        lambda net, x: net.out(net.table(words(x + net.shift)).flatten(1)), shift=nn.Parameter(torch.randn(12)),
        table=nn.Embedding(5, 3), out=nn.Linear(18, 3)),
    "tied": lambda: Net(
        lambda net, x: net.out((net.table(words(x)) @ net.table.weight.T).mean(1)),
        table=nn.Embedding(5, 3), out=nn.Linear(5, 3)),
    "tied by linear": lambda: Net(
        lambda net, x: functional.linear(net.table(words(x)), net.table.weight).mean(1)[:, :3],
        table=nn.Embedding(5, 3)),
    "used twice": lambda: Net(
        lambda net, x: net.out(net.one(net.one(x).tanh())), one=nn.Linear(12, 12), out=nn.Linear(12, 3)),
    "twice in a Sequential": lambda: nn.Sequential(
        nn.Linear(12, 12), shared := nn.Linear(12, 12), nn.Tanh(), shared, nn.Linear(12, 3)),
    "a dropout of nothing": lambda: nn.Sequential(nn.Linear(12, 4), nn.Dropout(0.0), nn.Linear(4, 3)),
    "used outside": lambda: Net(
        lambda net, x: net.out(net.one(x).tanh()) * net.one.weight[0, :3], one=nn.Linear(12, 4),
        out=nn.Linear(4, 3)),
    "a bias used outside": lambda: Net(
        lambda net, x: net.out(net.one(x).tanh() + net.one.bias), one=nn.Linear(12, 4), out=nn.Linear(4, 3)),
    "in place": lambda: nn.Sequential(
        nn.Linear(12, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.ELU(inplace=True),
        nn.Linear(4, 3)),
    "in place, and before": lambda: Net(changed, one=nn.Linear(12, 4), out=nn.Linear(4, 3)),
    "unused": lambda: Net(lambda net, x: net.out(x.tanh()), out=nn.Linear(12, 3), other=nn.Linear(3, 3)),
    "conv1d": lambda: pictures(nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU()),
    "conv1d, same": lambda: pictures(
        nn.Conv1d(2, 4, 3, padding="same"), nn.GroupNorm(2, 4, affine=False), nn.ReLU()),
    "conv2d": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2, 3)), nn.Conv2d(2, 4, (2, 3), padding=(1, 2), dilation=(2, 1), groups=2),
        nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 2, 1, bias=False, padding_mode="circular", padding=1),
        nn.Flatten(), nn.LazyLinear(3)),
    "by keywords": lambda: Net(by_keywords, conv=nn.Conv1d(2, 2, 3), out=nn.Linear(8, 3)),
    "steps of one's own": lambda: Net(recurrent, cell=nn.LSTMCell(3, 4), out=nn.Linear(4, 3)),
    "lstm": lambda: layer_of(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": lambda: layer_of(nn.GRU),
    "rnn": lambda: layer_of(nn.RNN, bias=False, nonlinearity="relu"),
    "places of words": lambda: Net(
        lambda net, x: net.out((net.table(words(x)) + net.places(torch.arange(6))).flatten(1).tanh()),
        table=nn.Embedding(5, 3), places=nn.Embedding(6, 3), out=nn.Linear(18, 3)),
    "looks at others": lambda: zoo.Centred(FEATURES, CLASSES),
    "asks all": lambda: zoo.Finite(FEATURES, CLASSES),
}  # fmt: skip


def objective(name: str, dtype: torch.dtype = F64) -> GhostObjective:
    torch.manual_seed(3)
    net = CASES[name]()
    net(torch.randn(2, FEATURES))
    result = make_module_objective(net.to(dtype), FEATURES, CrossEntropy(), 0, dtype)
    assert isinstance(result, GhostObjective)
    return result


def sample(dimension: int, points: int, dtype: torch.dtype = F64, seed: int = 0) -> tuple[list[Tensor], Records]:
    generator = torch.Generator().manual_seed(seed)
    at = [torch.randn(dimension, generator=generator, dtype=F64).mul(0.5).to(dtype) for _ in range(points)]
    features = torch.randn(RECORDS, FEATURES, generator=generator, dtype=F64).to(dtype)
    return at, Records(features, torch.randint(0, CLASSES, (RECORDS,), generator=generator))


def closed(
    measured: GhostObjective, query: Query | Tensor, records: Records, clip: float = UNCLIPPED, weights: Any = None
) -> Increment:
    """An increment, and that no record of it took the way of ModuleObjective."""
    general: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleObjective, "_increment_of_replicate", lambda *args: general.append(args))
        result = sum_increments(measured, query, records, clip, weights)
    assert not general
    return result


@pytest.mark.parametrize("name", ["a dropout of nothing", "torch's transformer"])
def test_dropout_that_drops_nothing_is_let_in(name: str) -> None:
    check_outputs(objective(name).module, FEATURES, CLASSES, "test")


def test_dropout_of_attention_is_refused() -> None:
    measured = GhostObjective(Net(dropped, wide=nn.Linear(2, 4), out=nn.Linear(4, 3)), CrossEntropy(), 0, F64)
    (at,), records = sample(measured.dimension, 1)
    with pytest.raises(InputError, match="draws random numbers"):
        sum_increments(measured, at, records)


class Shapes(TorchDispatchMode):
    """Shapes of the first argument of functions with this word in their name."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.shapes = word, set[tuple[int, ...]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.word in str(function):
            self.shapes.add(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def test_attention_is_one_call_for_all_records() -> None:
    measured = objective("attention")
    (at,), records = sample(measured.dimension, 1)
    with Shapes("attention") as calls:
        sum_increments(measured, at, records)
    assert (RECORDS, 2, 6, 2) in calls.shapes


def test_attention_and_cells_with_keywords_have_the_increments_of_each_record() -> None:
    """Before: attention with keywords had no plan, and a cell with keywords raised a TypeError."""

    def call(net: Any, values: Tensor) -> Any:
        inner = net.wide(values.unflatten(-1, (1, 6, 2)))
        mixed = functional.scaled_dot_product_attention(query=inner, key=inner, value=inner).mean((-3, -2))
        cell = net.cell
        start = mixed.new_zeros(len(mixed), 2)
        state = torch.gru_cell(input=mixed, hx=start, w_ih=cell.weight_ih, w_hh=cell.weight_hh)
        return net.out(state)

    net = Net(call, wide=nn.Linear(2, 2), cell=nn.GRUCell(2, 2, bias=False), out=nn.Linear(2, 3))
    measured, general = (kind(net, CrossEntropy(), 0, F64) for kind in (GhostObjective, ModuleObjective))
    (at,), records = sample(measured.dimension, 1)
    torch.testing.assert_close(sum_increments(measured, at, records), sum_increments(general, at, records))
    (plan,) = measured.plans.values()
    assert plan is not None
    assert plan.materialized == {"cell.weight_ih", "cell.weight_hh"}


def prefer(monkeypatch: Patch, share: float | None) -> None:
    """Form products of places up to this share of a gradient, or as the code decides."""
    if share is not None:
        monkeypatch.setattr(functions, "_MAX_PRODUCT_SHARE", share)
        monkeypatch.setattr(functions, "_MAX_GRADIENT_SHARE", 0.0)


SHARES = [*((name, None) for name in CASES), *itertools.product(("attention", "used twice"), (0.0, 100.0))]


@pytest.mark.parametrize(("name", "share"), SHARES)
@pytest.mark.parametrize(
    ("points", "clips"), [(1, (0.3, 1e9)), (2, (1.0,)), pytest.param(3, (2.0,), marks=pytest.mark.slow)]
)
def test_increments_equal_autograd(
    name: str, share: float | None, points: int, clips: tuple[float, ...], monkeypatch: Patch
) -> None:
    """With gradients formed, with products of places, and with whichever is smaller."""
    prefer(monkeypatch, share)
    measured = objective(name)
    at, records = sample(measured.dimension, points)
    query, weights = Query(at, [3.0, -2.0, 0.5][:points]), torch.linspace(0.1, 1.0, RECORDS, dtype=F64)
    increments = autograd_increments(measured.module, query, records)
    norms = increments.norm(dim=1)
    for clip in clips:
        expected = (weights * (clip / norms).clamp(max=1.0)) @ increments
        result = closed(measured, query, records, clip, weights)
        torch.testing.assert_close(result.total, expected, rtol=1e-9, atol=1e-10)
        assert int(result.clipped_count) == int((norms > clip).sum())


WORDS = Net(
    lambda net, x: net.out(net.norm(net.wide(net.table(words(x))) + net.places).tanh().mean(1)),
    table=nn.Embedding(5, 3), wide=nn.Linear(3, 4), places=nn.Parameter(torch.randn(6, 4)), norm=nn.LayerNorm(4),
    out=nn.Linear(4, 3),
)  # fmt: skip
PICTURES = nn.Sequential(
    nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
)


@pytest.mark.parametrize(
    ("net", "share"),
    [(WORDS, 0.0), (WORDS, 100.0), (PICTURES, 0.0)],
    ids=["words, formed", "words, products of places", "pictures"],
)
@pytest.mark.parametrize("dtype", [F32, pytest.param(F64, marks=pytest.mark.slow)], ids=["float32", "float64"])
def test_no_contribution_is_beyond_its_clip(
    net: nn.Module, dtype: torch.dtype, share: float, monkeypatch: Patch
) -> None:
    """What a sum loses with a record's weight, for points, records and coefficients of every size."""
    prefer(monkeypatch, share)
    measured = make_module_objective(net.to(dtype), FEATURES, CrossEntropy(), 0, dtype)
    for seed, pattern in enumerate(hostile.POINTS):
        generator = np.random.default_rng(seed)
        kinds = list(generator.choice(hostile.RECORDS, hostile.BATCH))
        at = hostile.pair_of(pattern, measured, dtype, seed)
        records = hostile.records_of(hostile.Case(lambda _: measured, FEATURES), kinds, dtype, seed)
        late = float(generator.integers(2, 10**5))
        query = (Query(at, (late, 1.0 - late)), Query(at, (1.0, -1.0)), Query(at[:1]))[seed % 3]
        clip = 2.0 ** generator.uniform(-40.0, 40.0)
        whole = sum_increments(measured, query, records, clip).total
        assert bool(whole.isfinite().all())
        for place, kind in enumerate(kinds):
            moved = whole - sum_increments(measured, query, records, clip, all_but(hostile.BATCH, place)).total
            assert float(moved.norm()) <= clip * hostile.SLACK, (pattern, kinds)
            assert kind != "not finite" or not moved.any() or net is WORDS


@pytest.mark.parametrize("share", [0.0, 100.0], ids=["formed", "products of places"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_places_that_cancel_stay_below_the_clip_with_their_rounding(
    dtype: torch.dtype, share: float, monkeypatch: Patch
) -> None:
    prefer(monkeypatch, share)
    generator = np.random.default_rng(0)
    for _ in range(300):
        scale, apart = 10.0 ** generator.uniform(-3, 9), 10.0 ** generator.uniform(-16, 0)
        slope, seen, moved, shifted = (torch.from_numpy(generator.standard_normal((1, 3, n))) for n in (6, 9) * 2)
        slopes = scale * torch.cat([slope, -slope - apart * moved], 1)
        values = torch.cat([seen, seen + apart * shifted], 1)
        terms = make_weight_terms([ParameterUse(LinearFunction(), values.to(dtype), slopes.to(dtype))], (6, 9))
        assert isinstance(terms, PositionTerms)
        factor = compute_clipping(terms.norm_bounds(), torch.ones(1, dtype=dtype), 1e-3).factor
        assert float(terms.weighted_sum(factor)[0].double().norm()) <= 1e-3
        assert float(terms.per_record(factor)[0].double().norm()) <= 1e-3


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_places_that_cancel_to_zero_leave_the_rounding_of_their_sum(
    dtype: torch.dtype, monkeypatch: Patch
) -> None:
    """Count T + 2 roundings of a sum that is formed, or 3 + 3 + T² + 8 of its square in float64.

    Here ‖δ‖ = 5 and ‖a‖ = 13 at both of T = 2 places.
    """
    slopes = torch.tensor([[[3.0, 4.0, 0.0], [-3.0, -4.0, 0.0]]], dtype=dtype)
    terms = PositionTerms(slopes, torch.tensor([[[5.0, 0.0, 12.0]] * 2], dtype=dtype))
    for share, rounding in ((0.0, 4.0 * torch.finfo(dtype).eps), (100.0, math.sqrt(18.0 * 2.0**-52))):
        prefer(monkeypatch, share)
        bounds = terms.norm_bounds()
        assert float(bounds.norm) == pytest.approx(130.0 * rounding, rel=1e-5)
        assert float(bounds.rounding_scale) == pytest.approx(130.0, rel=1e-5)
        assert bounds.rounding_count == 6.0
        assert float(bounds.operand_norm) == pytest.approx(130.0 + 10.0 + 26.0, rel=1e-5)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1] * 7), (3 * 54 + 53, [3, 3, 1]), (2**18, [7])])
def test_norms_of_formed_gradients_hold_few_values_at_a_time(
    limit: int, sizes: list[int], monkeypatch: Patch
) -> None:
    prefer(monkeypatch, 0.0)
    generator = torch.Generator().manual_seed(0)
    slopes, values = (torch.randn(7, 2, size, generator=generator, dtype=F64) for size in (6, 9))
    exact = (slopes.mT @ values).flatten(1).norm(dim=1)
    monkeypatch.setattr(functions, "_CHUNK_VALUES", limit)
    counts = measure_calls(monkeypatch, functions, "long_upper_norm", lambda _, vectors: vectors.numel())
    torch.testing.assert_close(PositionTerms(slopes, values).norm_bounds().norm, exact)
    assert counts == [54 * size for size in sizes]


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1] * 10), (3 * 72 + 71, [3, 3, 3, 1]), (2**18, [10])])
def test_gradients_of_a_convolution_hold_few_values_at_a_time(
    limit: int, sizes: list[int], monkeypatch: Patch
) -> None:
    """Patches of one picture: 2 groups of 2 · 3 · 2 values at 3 places.  A record has two pictures."""
    function, generator = ConvolutionFunction(2, (1, 1), (0, 0), (1, 1), 2), torch.Generator().manual_seed(0)
    pictures, slopes = (
        torch.randn(5, 2, *shape, generator=generator, dtype=F64) for shape in ((4, 3, 4), (6, 1, 3))
    )
    monkeypatch.setattr(functions, "_CHUNK_VALUES", limit)
    counts = measure_calls(monkeypatch, functions, "extract_patches", lambda patches, *_: patches.numel())
    result = function.weight_gradient(pictures, slopes, (6, 2, 3, 2))
    assert counts == [72 * size for size in sizes]
    for row, images, row_slopes in zip(result, pictures, slopes, strict=True):
        weight = torch.zeros(6, 2, 3, 2, dtype=F64, requires_grad=True)
        (functional.conv2d(images, weight, groups=2) * row_slopes).sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(row, weight.grad.flatten())


@pytest.mark.parametrize("kind", [GhostObjective, ModuleObjective])
@pytest.mark.parametrize("name", ["looks at others", "asks all"])
def test_a_record_does_not_see_its_company(name: str, kind: type[ModuleObjective]) -> None:
    """Modules that the probe refuses are run: the way of the records rests on no probe."""
    measured = kind(objective(name).module, CrossEntropy(), 0, F64)
    add_up: Any = closed if kind is GhostObjective else sum_increments
    (at,), records = sample(measured.dimension, 1)
    for clip in (1.0, UNCLIPPED):
        before = add_up(measured, at, records, clip, 1.0 - all_but(RECORDS, 0)).total
        for value in (100.0, torch.inf):
            loud = Records(records.features.clone(), records.labels)
            loud.features[1:] = value
            after = add_up(measured, at, loud, clip, 1.0 - all_but(RECORDS, 0)).total
            torch.testing.assert_close(after, before, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "formed"),
    [
        ("attention", {"places"}),
        ("words", set()),
        ("tied by linear", set()),
        ("used twice", set()),
        ("used outside", {"one.weight", "one.bias"}),
        ("a bias used outside", {"one.weight", "one.bias"}),
        ("conv1d, same", {"1.weight", "1.bias"}),
    ],
)
def test_parameters_that_go_elsewhere_are_found(name: str, formed: set[str]) -> None:
    measured = objective(name)
    (at,), records = sample(measured.dimension, 1)
    sum_increments(measured, at, records, 1.0)
    (plan,) = measured.plans.values()
    assert plan is not None
    assert plan.materialized == formed


class Turning(nn.Module):
    """Uses its weight outside of the layer from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(FEATURES, CLASSES), 0

    def forward(self, values: Tensor) -> Any:
        self.calls += 1
        return self.inner(values) + (self.inner.weight.sum(-1) if self.calls > 1 else 0.0)


def test_another_use_than_planned_takes_the_general_way() -> None:
    """A gradient that lacks a part would be another one than is trained."""
    net = Turning().double()
    measured = GhostObjective(net, CrossEntropy(), 0, F64)
    (at,), records = sample(measured.dimension, 1)
    result = sum_increments(measured, at, records).total
    torch.testing.assert_close(result, autograd_increments(net, at, records).sum(0))


def test_what_a_function_saw_is_not_changed_behind_its_back() -> None:
    def call(net: Any, values: Tensor) -> Tensor:
        inner = values * 1.0
        outputs = net.out(inner)
        inner.zero_()
        return outputs + inner[..., :3]

    for kind in (GhostObjective, ModuleObjective):
        measured = kind(Net(call, out=nn.Linear(FEATURES, 3)).double(), CrossEntropy(), 0, F64)
        (at,), records = sample(measured.dimension, 1)
        with pytest.raises(RuntimeError, match="inplace"):
            sum_increments(measured, at, records)


def test_a_function_of_parameters_in_a_vmap_of_the_modules_own() -> None:
    net = Net(lambda net, x: vmap(net.out)(x.unflatten(-1, (2, 6))).sum(1), out=nn.Linear(6, 3))
    measured = make_module_objective(net.double(), FEATURES, CrossEntropy(), 0, F64)
    (at,), records = sample(measured.dimension, 1)
    result = sum_increments(measured, at, records).total
    torch.testing.assert_close(result, autograd_increments(measured.module, at, records).sum(0))


@pytest.mark.parametrize("name", ["attention", "words", "conv2d"])
def test_chunks_and_modes_change_nothing(name: str, monkeypatch: Patch) -> None:
    measured = objective(name)
    at, records = sample(measured.dimension, 2)
    query, weights = Query(at, (3.0, -2.0)), torch.linspace(0.1, 1.0, RECORDS, dtype=F64)
    whole = sum_increments(measured, query, records, 0.7, weights)
    monkeypatch.setattr(ghost, "_CHUNK_VALUES", 5 * measured.dimension)
    with torch.inference_mode():
        inside = Query([point.clone() for point in at], query.coefficients)
        parts = closed(measured, inside, Records(*(column.clone() for column in records)), 0.7, weights)
    torch.testing.assert_close(parts.total, whole.total, rtol=1e-12, atol=1e-12)
    assert parts.clipped_count == whole.clipped_count


def test_a_chunk_of_records_has_64_mebibytes_of_float32(monkeypatch: Patch) -> None:
    net = nn.Sequential(nn.Unflatten(1, (1, 64, 64)), nn.Conv2d(1, 2, 3), nn.Flatten(2), nn.AdaptiveAvgPool1d(1))
    measured = GhostObjective(net.append(nn.Flatten()), CrossEntropy(), 0, F32)
    features = torch.zeros(1, 64 * 64)
    plan = measured._find_plan(measured.initial(), Records(features, torch.zeros(1, dtype=torch.int64)))
    # 3 · (4,096 inputs + 7,688 outputs), half of it without the inputs, and patches, gradients and the features.
    other = 7688 // 2 * 9 + 18 + 4096
    assert plan.values_per_record == 3 * (4096 + 7688) + other
    assert plan.single_point_values == 3 * (4096 + 7688) // 2 + other
    count = 2**24 // plan.single_point_values + 1
    sizes = measure_calls(
        monkeypatch, GhostObjective, "_sum_increments", lambda _, view, query, chunk, *__: len(chunk.weights)
    )
    records = Records(features.expand(count, -1), torch.zeros(count, dtype=torch.int64))
    sum_increments(measured, measured.initial(), records, weights=torch.ones(count))
    assert sizes == [math.ceil(count / 2), count // 2]


def test_a_single_record_has_the_general_increment_and_needs_no_plan() -> None:
    measured = objective("attention")
    (at,), records = sample(measured.dimension, 1)
    one, general = pick_one(records, 2), ModuleObjective(measured.module, CrossEntropy(), 0, F64)
    assert torch.equal(sum_increments(measured, at, one).total, sum_increments(general, at, one).total)
    assert not measured.plans


def test_rows_of_an_embedding_are_added_up_before_their_norm() -> None:
    places = torch.tensor([[2, 0, 2, 2], [1, 1, 0, 3]])
    values = torch.randn(2, 4, 3, dtype=F64)
    terms = EmbeddingTerms.merge_rows(places, values, 5)
    dense = torch.zeros(2, 5, 3, dtype=F64)
    for record in range(2):
        for place, value in zip(places[record], values[record], strict=True):
            dense[record, place] += value
    torch.testing.assert_close(terms.norm_bounds().norm, dense.flatten(1).norm(dim=1))
    factor = torch.tensor([0.5, 2.0], dtype=F64)
    torch.testing.assert_close(terms.weighted_sum(factor)[0], factor @ dense.flatten(1))
    torch.testing.assert_close(terms.per_record(factor)[0], factor.unsqueeze(1) * dense.flatten(1))


def test_a_call_that_autograd_does_not_come_to_is_told_as_such() -> None:
    """Behind a leaf of the module's own nothing is asked for, so that no slope arrives there."""
    leaf = torch.zeros(12, dtype=F64, requires_grad=True)
    net = Net(lambda net, x: net.one(x) + net.two(x + leaf), one=nn.Linear(12, 3), two=nn.Linear(12, 3)).double()
    measured = GhostObjective(net, CrossEntropy(), 0, F64)
    at, records = sample(measured.dimension, 2)
    for query in (Query(at, (2.0, -1.0)), Query(at[:1])):
        result = sum_increments(measured, query, records).total
        torch.testing.assert_close(result, autograd_increments(net, query, records).sum(0))


def test_what_is_seen_is_kept_only_where_another_use_or_point_may_need_it() -> None:
    measured = objective("conv2d")
    (at, other), records = sample(measured.dimension, 2)
    one = measured._run_pass(at, records, 1.0, frozenset(), is_only_point=True)
    assert not one.call_gradients
    assert one.terms.keys() == measured.shapes.keys()
    assert len(measured._run_pass(other, records, 1.0, frozenset(), is_only_point=False).call_gradients) == 4
    twice = objective("used twice")
    (at,), records = sample(twice.dimension, 1)
    both = twice._run_pass(at, records, 1.0, frozenset(), is_only_point=True)
    assert [gradient.call.parameter_names[0] for gradient in both.call_gradients] == ["one.weight", "one.weight"]
    assert both.terms.keys() == {"out.weight", "out.bias"}


@pytest.mark.parametrize("count", [1, 127, 128, 129, 256, 1000, 1025])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_norm_of_a_long_gradient_has_all_of_it(count: int, dtype: torch.dtype) -> None:
    """Wherever its values lie, and never too small."""
    for place in {0, count // 2, count - 1}:
        vector = torch.zeros(2, count, dtype=dtype)
        vector[1, place] = -3.0
        assert 3.0 <= float(long_upper_norm(vector)[1]) <= 3.0 * (1.0 + 1e-5)
    vector = torch.rand(3, count, generator=torch.Generator().manual_seed(count), dtype=F64).to(dtype)
    exact = vector.double().norm(dim=1)
    assert bool((long_upper_norm(vector) >= exact).all())
    torch.testing.assert_close(long_upper_norm(vector), exact, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_attention_of_a_batch_takes_records_apart(wrong: float, dtype: torch.dtype) -> None:
    """What one record leaves in the kernel's memory reaches no other, wherever it stands."""
    measured = objective("attention", dtype)
    (at,), records = sample(measured.dimension, 1, dtype)
    for place in range(RECORDS):
        weights, hostile_records = all_but(RECORDS, place), Records(records.features.clone(), records.labels)
        hostile_records.features[place] = wrong
        result, without = (closed(measured, at, some, 1.0, weights).total for some in (hostile_records, records))
        torch.testing.assert_close(result, without, rtol=1e-6, atol=1e-7)


def indexed(outputs: Tensor, label: Tensor) -> Tensor:
    return -functional.log_softmax(outputs, -1)[label]


def test_a_function_of_ones_own_is_traced_and_has_the_increments_of_each_record_alone() -> None:
    """Before: every function went the general way, 7 times as long as per-record gradients by hooks."""
    torch.manual_seed(0)
    net, layout = (
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
        FeatureLayout(5, (InputLayout((5,), "numbers"),), ()),
    )
    made, wrapped = make_layout_objective(net, layout, (5,), LossChoice("own", indexed), 3, 0, F64, "mlp")
    assert isinstance(made, GhostObjective)
    general = ModuleObjective(wrapped, made.loss, 0, F64)
    records = Records(torch.randn(9, 5, dtype=F64), torch.arange(9) % 3)
    points = [made.initial() + 0.1 * torch.randn(made.dimension, dtype=F64) for _ in range(2)]
    query = Query(tuple(points), (1.0, -0.5))
    for clip in (0.3, UNCLIPPED):
        ours, theirs = (sum_increments(objective, query, records, clip) for objective in (made, general))
        torch.testing.assert_close(ours.total, theirs.total, atol=1e-12, rtol=0.0)
        assert int(ours.clipped_count) == int(theirs.clipped_count)
    assert made.plans[records.features.shape[1:]] is not None
