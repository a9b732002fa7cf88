"""One record adds at most its weight times the clip: whatever the query, the record, the clip and the type."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedpriv.loss.clipping import compute_clipping
from fedpriv.loss.goldstein import RandomSmoothing, SeededDirections
from fedpriv.loss.layered import LayeredObjective, make_module_objective
from fedpriv.loss.layers import DenseTerms
from fedpriv.loss.linear import (
    LeastSquares,
    LogisticRegression,
    PhaseRetrieval,
    SigmoidRegression,
    SoftmaxRegression,
)
from fedpriv.loss.losses import AbsoluteError, CrossEntropy, Loss
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Objective, Query, Records, View
from tests.loss.builders import F32, F64, all_but, first_rows, ones, pick, pick_one, sum_increments

BATCH, CLASSES = 4, 3
SLACK = 1.0 + 1e-6


class Case(NamedTuple):
    """An objective for a type, how many features a record has, and whether labels are classes."""

    make: Callable[[torch.dtype], Objective]
    features: int = 5
    classes: bool = True


def net(activation: type[nn.Module], outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, outputs))


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2),
        nn.Flatten(), nn.Linear(2, CLASSES),
    )  # fmt: skip


def layered(module: nn.Module, features: int, loss: Loss) -> Callable[[torch.dtype], Objective]:
    def make(dtype: torch.dtype) -> Objective:
        objective = make_module_objective(module, features, loss, 0, dtype)
        assert isinstance(objective, LayeredObjective)
        return objective

    return make


def softmax(dtype: torch.dtype) -> Objective:
    return SoftmaxRegression(5, CLASSES, feature_norm=2.0, dtype=dtype)


def retrieval(dtype: torch.dtype) -> Objective:
    return PhaseRetrieval(5, 2, 2.0, dtype=dtype)


def smoothed(base: Callable[[torch.dtype], Objective], order: Any) -> Callable[[torch.dtype], Objective]:
    row = first_rows(1, ((0, BATCH),))
    directions = SeededDirections((1,))
    return lambda dtype: RandomSmoothing(base(dtype), 0.1, order, 3, 2, True, directions).for_batch(row)


perceptron = layered(net(nn.ReLU), 5, CrossEntropy())
CASES = {
    "softmax regression": Case(softmax),
    "a view": Case(lambda dtype: View(softmax(dtype))),
    "least squares": Case(lambda dtype: LeastSquares(5, 2.0, dtype=dtype), classes=False),
    "logistic": Case(lambda dtype: LogisticRegression(5, 2.0, dtype=dtype), classes=False),
    "sigmoid": Case(lambda dtype: SigmoidRegression(5, 2.0, dtype=dtype), classes=False),
    "phase retrieval 1": Case(lambda dtype: PhaseRetrieval(5, 1, 2.0, dtype=dtype), classes=False),
    "phase retrieval 2": Case(retrieval, classes=False),
    "perceptron": Case(perceptron),
    "perceptron, tanh": Case(layered(net(nn.Tanh), 5, CrossEntropy())),
    "relu-regression": Case(layered(net(nn.ReLU, 1), 5, AbsoluteError()), classes=False),
    "CNN": Case(layered(small_cnn(), 36, CrossEntropy()), features=36),
    "perceptron by torch.func": Case(lambda dtype: ModuleObjective(net(nn.ReLU), CrossEntropy(), 0, dtype)),
    "first order, softmax": Case(smoothed(softmax, "first")),
    "first order, perceptron": Case(smoothed(perceptron, "first")),
    "zeroth order, softmax": Case(smoothed(softmax, "zeroth")),
    "zeroth order, phase retrieval": Case(smoothed(retrieval, "zeroth"), classes=False),
}

POINTS = (
    "random", "huge", "largest", "cancelling", "same weights, other biases", "denormal", "equal", "one coordinate",
    "next", "all scales",
)  # fmt: skip
RECORDS = ("ordinary", "ordinary", "zero", "huge", "tiny", "all scales", "one coordinate", "not finite")


def wide(generator: np.random.Generator, size: int, lowest: float, highest: float) -> Tensor:
    """Normals times powers of ten, each with its own exponent."""
    scales = 10.0 ** generator.uniform(lowest, highest, size)
    return torch.from_numpy(np.clip(generator.standard_normal(size), -8.0, 8.0)) * torch.from_numpy(scales)


def held(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As `dtype`, with what is too large for it at its largest number: queries are finite, guards see to that."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def biases_of(objective: Any) -> Tensor:
    """Which coordinates are biases; the last one where the objective has none."""
    module = getattr(objective, "module", None) or getattr(getattr(objective, "base", None), "module", None)
    if module is None:
        return torch.arange(objective.dimension) == objective.dimension - 1
    return torch.cat([torch.full((p.numel(),), name.endswith("bias")) for name, p in module.named_parameters()])


def pair_of(pattern: str, objective: Objective, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator, size = np.random.default_rng(seed), objective.dimension
    top = math.log10(torch.finfo(dtype).max)
    one, other = (torch.from_numpy(generator.standard_normal(size)) for _ in range(2))
    match pattern:
        case "huge":
            one, other = wide(generator, size, top - 9, top), wide(generator, size, top - 9, top)
        case "largest":
            one, other = 1e400 * one, 1e400 * other
        case "cancelling":
            one = one * 10.0 ** generator.uniform(0.0, top)
            other = -one
        case "same weights, other biases":
            where = biases_of(objective)
            scale = 10.0 ** generator.uniform(0.0, top)
            one = torch.where(where, one, scale * one.abs())
            other = torch.where(where, other, one)
        case "denormal":
            tiny = torch.finfo(dtype).smallest_normal
            one, other = tiny / 8 * one, tiny / 8 * other
        case "equal":
            other = one = one * 10.0 ** generator.uniform(-9, 9)
        case "one coordinate":
            one[generator.integers(size)] = 10.0 ** generator.uniform(10, top)
        case "next":
            one = held(one * 10.0 ** generator.uniform(-3, 9), dtype)
            other = torch.nextafter(one, torch.full_like(one, math.inf))
        case "all scales":
            one, other = wide(generator, size, -top, top), wide(generator, size, -top, top)
    return held(one, dtype), held(other, dtype)


def records_of(case: Case, patterns: list[str], dtype: torch.dtype, seed: int) -> Records:
    generator = np.random.default_rng(seed + 1)
    top = math.log10(torch.finfo(dtype).max)
    rows = []
    for pattern in patterns:
        row = torch.from_numpy(generator.standard_normal(case.features))
        match pattern:
            case "zero":
                row = 0.0 * row
            case "huge":
                row = row * 10.0 ** generator.uniform(9, top)
            case "tiny":
                row = row * 10.0 ** -generator.uniform(9, top + 6)
            case "all scales":
                row = wide(generator, case.features, -top, top)
            case "one coordinate":
                row[generator.integers(case.features)] = 10.0 ** generator.uniform(5, top)
        row = held(row, dtype)
        if pattern == "not finite":
            row[generator.integers(case.features)] = (math.inf, -math.inf, math.nan)[generator.integers(3)]
        rows.append(row)
    labels: Tensor = torch.from_numpy(generator.integers(0, CLASSES, len(patterns)))
    if not case.classes:
        labels = held(wide(generator, len(patterns), -3, 3).abs(), dtype)
    return Records(torch.stack(rows), labels)


def only(objective: Any, place: int) -> Any:
    """The objective of the batch that holds this one of the records alone; directions are keyed by the row."""
    row = first_rows(1, ((place, 1),))
    return objective.for_batch(row) if isinstance(objective, RandomSmoothing) else objective


@pytest.mark.every(35)
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "wider"),
    [
        pytest.param(F32, False, id="float32", marks=pytest.mark.slow),  # what no guard releases
        pytest.param(F32, True, id="float32, summed in float64"),
        pytest.param(F64, True, id="float64"),
    ],
)
@pytest.mark.parametrize("name", CASES)
@given(
    pattern=st.sampled_from(POINTS),
    coefficients=st.one_of(
        st.sampled_from([(1.0,), (1.0, -1.0)]), st.integers(2, 10**5).map(lambda t: (float(t), -float(t - 1)))
    ),
    clip=st.one_of(st.floats(-40.0, 40.0), st.sampled_from([-40.0, 40.0])).map(lambda exponent: 2.0**exponent),
    kinds=st.lists(st.sampled_from(RECORDS), min_size=BATCH, max_size=BATCH),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, derandomize=True)
def test_no_contribution_is_beyond_its_clip(
    name: str,
    dtype: torch.dtype,
    wider: bool,
    pattern: str,
    coefficients: tuple[float, ...],
    clip: float,
    kinds: list[str],
    seed: int,
) -> None:
    """A server would learn from one release what the noise was calibrated to hide; alone, and within a sum."""
    case = CASES[name]
    objective: Any = case.make(dtype)
    query = Query(pair_of(pattern, objective, dtype, seed)[: len(coefficients)], coefficients)
    records = records_of(case, kinds, dtype, seed)
    weights = torch.from_numpy(np.random.default_rng(seed + 2).uniform(0.1, 1.0, BATCH))
    weights = weights.to(F64 if wider else dtype)
    together = sum_increments(objective, query, records, clip, weights).total
    assert together.dtype == weights.dtype
    assert bool(together.isfinite().all())
    for place in range(BATCH):
        limit = float(weights[place]) * clip * SLACK
        own = weights[place : place + 1]
        alone = sum_increments(only(objective, place), query, pick_one(records, place), clip, own)
        norm = float(alone.total.double().norm())
        assert norm <= limit, f"{norm / limit} times its clip, alone"
        if kinds[place] == "not finite":
            assert not alone.total.any()
            assert int(alone.clipped_count) == 1
        if weights.dtype == F32:  # its sum is rounded by what else is in it: simulations only
            continue
        without = sum_increments(objective, query, records, clip, weights * all_but(BATCH, place)).total
        moved = float((together.double() - without.double()).norm())
        assert moved <= limit, f"{moved / limit} times its clip, in the batch"


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("wider", [False, True])
def test_a_record_whose_logits_overflow_adds_nothing(dtype: torch.dtype, wider: bool) -> None:
    """A NaN in a release would say that a certain record is there, whatever the noise."""
    objective = softmax(dtype)
    point = torch.zeros(objective.dimension, dtype=dtype)
    point[:2] = torch.finfo(dtype).max
    rows = torch.tensor([[1.0, 1.0, 0, 0, 0], [0, 0, 0, 0, 1.0]], dtype=dtype)
    records, weights = Records(rows, torch.tensor([0, 1])), ones(2, dtype=F64 if wider else dtype)
    both = sum_increments(objective, point, records, 1.0, weights)
    alone = sum_increments(objective, point, pick(records, [1]), 1.0, weights[:1])
    assert torch.equal(both.total, alone.total)
    assert (int(both.clipped_count), int(alone.clipped_count)) == (1, 0)


def test_points_whose_weights_cancel_keep_the_biases_norm() -> None:
    """With activations of 1e9 the weight part of a norm swallows the bias part, which is added nonetheless."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    objective = make_module_objective(module, 2, CrossEntropy(), 0, F32)
    point = torch.zeros(objective.dimension)
    point[:4], point[-2:] = 1e9, torch.tensor([1.0, -1.0])
    other = point.clone()
    other[-2:] = torch.tensor([-1.0, 1.0])
    records = Records(torch.ones(1, 2), torch.tensor([0]))
    for dtype in (F32, F64):
        query, weights = Query([point, other], [1.0, -1.0]), ones(1, dtype=dtype)
        result = sum_increments(objective, query, records, 0.01, weights)
        assert 0.0 < float(result.total.double().norm()) <= 0.01 * SLACK
        assert int(result.clipped_count) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@given(
    apart=st.floats(-16.0, 0.0).map(lambda exponent: 10.0**exponent),
    scale=st.floats(-3.0, 9.0).map(lambda exponent: 10.0**exponent),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=300, derandomize=True)
def test_terms_that_cancel_stay_below_the_clip_with_their_rounding(
    dtype: torch.dtype, apart: float, scale: float, seed: int
) -> None:
    """u ⊗ v - u' ⊗ v' with u' near u and v' near v: their rounding, of a server's choice, is not unclipped."""
    generator = np.random.default_rng(seed)
    u, v, du, dv = (torch.from_numpy(generator.standard_normal((1, size))) for size in (6, 9, 6, 9))
    slopes = [(scale * u).to(dtype), (-scale * (u + apart * du)).to(dtype)]
    terms = DenseTerms(slopes, [v.to(dtype), (v + apart * dv).to(dtype)], has_bias=True)
    factor = compute_clipping(terms.norm_bounds(), ones(1, dtype=dtype), 1e-3).factor
    added = torch.cat(terms.weighted_sum(factor), dim=-1)
    assert float(added.double().norm()) <= 1e-3
