"""Passes in bfloat16: what is clipped and summed is wide, what cannot be told apart in 8 bits is refused."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.client_models import Transformer, convolutional
from fedpriv.core.errors import InputError
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.linear import LogisticRegression, SoftmaxRegression
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Batch, Objective, Query, Records, make_bfloat16_view
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.conftest import small_tree
from tests.engines.test_engines import run
from tests.loss.builders import Net, ones, pick_one, sum_increments

OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "softmax": lambda: SoftmaxRegression(784, 10, feature_norm=28.0),
    "layered": lambda: make_module_objective(convolutional(2, 4), 784, CrossEntropy(), 0),
    "ghost": lambda: make_module_objective(Transformer(8, 8), 784, CrossEntropy(), 0),
}
SGD = {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1}
MOMENTUM = {"name": "dp-mu2-fl", "trust": "untrusted", "diameter": 0.1, "clip": 1.0, "step": 0.1}
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
MU = {"relation": "zero-out", "mu": 2.0}


def pictures(count: int, scale: float = 1.0, seed: int = 0) -> Records:
    draw = np.random.default_rng(seed)
    features = torch.from_numpy(scale * draw.random((count, 784), np.float32))
    return Records(features, torch.from_numpy(draw.integers(0, 10, count)))


def point_of(objective: Objective) -> torch.Tensor:
    return objective.initial() + 0.1 * torch.randn(objective.dimension, generator=torch.Generator().manual_seed(1))


@pytest.mark.every(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OBJECTIVES)
@given(
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e18, 3e38]),
    clip=st.sampled_from([2.0**-20, 0.01, 1.0, 50.0]),
    short=st.booleans(),
)
@settings(max_examples=24, derandomize=True)
def test_no_record_moves_a_sum_by_more_than_the_clip(
    name: str, device: str, scale: float, clip: float, short: bool
) -> None:
    """Each record's part is what the sum has of it, in float32, measured in float64."""
    objective, records = OBJECTIVES[name](), pictures(3, scale)
    view = make_bfloat16_view(objective, pictures(3)) if short else objective
    point = point_of(objective).to(device)
    for row in range(3):
        one = Records(*(column.to(device) for column in pick_one(records, row)))
        total = sum_increments(view, point, one, clip, torch.ones(1, device=device)).total
        assert total.dtype == torch.float32
        assert total.double().norm() <= clip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_sums_are_near_those_of_whole_passes_and_in_the_type_of_the_weights(name: str) -> None:
    objective, records = OBJECTIVES[name](), pictures(40)
    short, point = make_bfloat16_view(objective, records), point_of(objective)
    for kind in (torch.float32, torch.float64):
        weights = ones(40, dtype=kind)
        wanted, result = (sum_increments(one, point, records, 1.0, weights).total for one in (objective, short))
        assert result.dtype == kind
        assert 1e-5 < float((result - wanted).norm() / wanted.norm()) < 0.1
    batch = Batch(records, torch.ones(40))
    assert torch.equal(short.gradient(point, batch), short.increment(Query((point,)), batch, 1e30).total)
    assert short.evaluate(point, records).loss == objective.evaluate(point, records).loss


def test_whole_numbers_up_to_256_are_taken() -> None:
    records = pictures(5)
    records.features[:, 3] = torch.tensor([1.0, 256.0, 3.0, 0.0, 9.0])
    make_bfloat16_view(OBJECTIVES["softmax"](), records)


@pytest.mark.parametrize("error", [KeyError, AssertionError, AttributeError])
def test_a_module_that_refuses_bfloat16_by_any_usual_error_is_refused(error: type[Exception]) -> None:
    def call(net: Any, values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.bfloat16:
            raise error("no rule for this type")
        outputs: torch.Tensor = net.layer(values)
        return outputs

    objective = ModuleObjective(Net(call, layer=nn.Linear(784, 10)), CrossEntropy(), 0)
    with pytest.raises(InputError, match="cannot compute in it"):
        make_bfloat16_view(objective, pictures(3))


def cell(*, momentum: bool = False, **overrides: Any) -> Cell:
    tree = small_tree(**({"algorithm": MOMENTUM} if momentum else {"algorithm": SGD, "privacy": MU} | overrides))
    return resolve_cell({**tree, "run": {**tree["run"], "passes": "bfloat16"}}, "test")


@pytest.mark.slow
def test_a_run_has_other_bits_and_nearly_the_same_model() -> None:
    (short,), _ = run("vectorized", cell())
    (plain,), _ = run("vectorized", resolve_cell(small_tree(algorithm=SGD, privacy=MU), "test"))
    assert not np.array_equal(short.cell_outcome.model, plain.cell_outcome.model)
    np.testing.assert_allclose(short.cell_outcome.model, plain.cell_outcome.model, atol=0.01)


def test_units_of_several_records_take_short_passes_too() -> None:
    privacy = {"relation": "zero-out", "mu": 2.0, "unit": "client", "records": 2}
    objective = load_task(cell(privacy=privacy)).objective
    assert type(objective).__name__ == "Bfloat16View"
    (one,), _ = run("vectorized", cell(privacy=privacy))
    assert np.isfinite(one.cell_outcome.model).all()


def test_noise_that_rests_on_contraction_is_refused_in_short_passes() -> None:
    """Gains: μ of phased-sgd, which rests on steps that move no two models apart, and rounded ones do.

    Steps of a tenth of 2 / smoothness, from models around a jump of bfloat16.
    """
    whole, records = LogisticRegression(1, 8.0), Records(torch.tensor([[8.0]]).double(), torch.tensor([1]))
    short, step = make_bfloat16_view(whole, records), 0.2 / whole.smoothness
    models = torch.tensor([[1.0 + 2.0**-8 - 1e-7], [1.0 + 2.0**-8 + 1e-7]], dtype=torch.float64) / 8.0
    for objective, low, high in ((whole, 0.8, 0.9), (short, 1e4, 1e5)):
        moved = torch.stack([one - step * objective.gradient(one, Batch(records, ones(1))) for one in models])
        assert low < abs(float((moved[1] - moved[0]) / (models[1] - models[0]))) < high
    phased = {"name": "phased-sgd", "trust": "curator", "step": 1e-4, "radius": 1.0}
    refused = cell(algorithm=phased, federation={"silos": 1, "rounds": 8, "batch": 4})
    with pytest.raises(InputError, match="the privacy of phased-sgd rests on a convex loss"):
        make_plan(refused, load_task(refused).objective)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inprocess", "ray"])
def test_an_engine_that_computes_as_silos_do_refuses(engine: str) -> None:
    with pytest.raises(InputError, match=f"engine {engine} computes as silos do"):
        run(engine, cell())


@pytest.mark.parametrize("name", ["momentum-tree-reduced", "momentum-tree-aligned"])
def test_noise_that_rests_on_smoothness_is_refused_in_short_passes(name: str) -> None:
    """Gains: μ of trees that bound differences of gradients by how far queries move, and rounded models jump.

    Two models at a jump of bfloat16, 1e-6 apart.
    """
    whole, records = LogisticRegression(1, 8.0), Records(torch.tensor([[8.0]]).double(), torch.tensor([1]))
    short = make_bfloat16_view(whole, records)
    models = torch.tensor([[1.0 + 2.0**-8 - 5e-7], [1.0 + 2.0**-8 + 5e-7]], dtype=torch.float64) / 8.0
    for objective, low, high in ((whole, 0.1, 1.0), (short, 1e3, math.inf)):
        first, second = (objective.gradient(one, Batch(records, ones(1))) for one in models)
        assert low < abs(float((second - first) / (models[1] - models[0]))) / whole.smoothness < high
    federation = {"silos": 1, "rounds": 8, "epochs": 2, "batch": 4}
    trees = {"name": name, "trust": "trusted", "step": 1e-4, "alpha": 0.5, "gamma": 0.25}
    refused = cell(algorithm=trees, federation=federation)
    with pytest.raises(InputError, match="the noise rests on a bound of the loss's smoothness, and none is known"):
        make_plan(refused, load_task(refused).objective)
