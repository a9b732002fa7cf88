"""Every row of the tables of docs/own-module.md: what runs gives the clipped gradients of records alone."""

import copy
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.core.errors import InputError
from fedpriv.data.layout import InputLayout
from fedpriv.loss.imported import check_outputs
from fedpriv.loss.inputs import wrap_module
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.module import unflatten_parameters
from fedpriv.loss.objective import Batch, Objective, Query, Records
from tests.loss.bring import BESIDE, OUTPUTS, REFUSED, REVIEWED, RUNS, WORDS, Case

PAGE = Path(__file__).parents[2] / "docs" / "own-module.md"
COUNT, F64 = 5, torch.float64
QUICK = ("MLP", "requires_grad = False", "tied weights", "BatchNorm in evaluation mode, as freeze leaves it")
CLIPS = (1e-3, 0.1, 1.0, 1e6)
TRIED = {**RUNS, **BESIDE}


def rows_below(heading: str) -> dict[str, str]:
    """The first cells of the table below a heading, without marks of code, with the rest of the line."""
    table = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ") for line in table.splitlines() if line.startswith("|")][2:]
    return {line.split(" | ")[0].replace("`", ""): line for line in lines}


def made(case: Case) -> tuple[Objective, nn.Module, Records]:
    torch.manual_seed(0)
    module = wrap_module(case.make().to(F64), (InputLayout(case.shape, "numbers"),), case.shape)
    draw = np.random.default_rng(0)
    size = (COUNT, math.prod(case.shape))
    features = draw.integers(0, WORDS, size).astype(float) if case.words else draw.standard_normal(size)
    records = Records(torch.from_numpy(features), torch.arange(COUNT) % OUTPUTS)
    return make_module_objective(module, size[1], CrossEntropy(), 0, F64), module, records


def gradients(module: nn.Module, point: Tensor, records: Records) -> Tensor:
    """Of every record, by a loop of autograd over batches of one and copies of the module."""
    rows = []
    for features, label in zip(*records, strict=True):
        alone = copy.deepcopy(module)
        named = {key: part.clone().requires_grad_() for key, part in unflatten_parameters(alone, point).items()}
        outputs = functional_call(alone, named, (features.unsqueeze(0),))
        loss = CrossEntropy().value(outputs, label.unsqueeze(0)).squeeze(0)
        parts = torch.autograd.grad(loss, list(named.values()), materialize_grads=True, allow_unused=True)
        rows.append(torch.cat([part.to_dense().flatten() for part in parts]))
    return torch.stack(rows)


def test_the_page_has_a_row_for_every_case_and_no_other() -> None:
    assert set(rows_below("What runs")) == set(RUNS)
    assert set(rows_below("What is refused, and what to put instead")) == set(REFUSED)


def test_the_modules_of_the_review_and_ten_others_are_tried() -> None:
    assert len(set(REVIEWED)) == 11
    assert set(REVIEWED) <= set(TRIED)
    assert len(set(TRIED) - set(REVIEWED)) >= 10


@pytest.mark.parametrize("name", TRIED)
def test_what_runs_gives_the_clipped_gradients_of_records_alone(name: str) -> None:
    objective, module, records = made(TRIED[name])
    point = torch.cat([part.detach().flatten() for part in module.parameters() if part.requires_grad])
    assert objective.dimension == len(point)
    rows = gradients(module, point, records)
    norms = rows.norm(dim=1)
    weights = torch.linspace(0.5, 1.0, COUNT, dtype=F64)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    for clip in CLIPS:
        found = objective.increment(Query((point,)), Batch(records, weights), clip)
        expected = (rows * (weights * (clip / norms).clamp(max=1.0)).unsqueeze(1)).sum(0)
        assert float((found.total - expected).norm()) <= 1e-5 * float(expected.norm())
        assert int(found.clipped_count) == int((norms > clip).sum())
    one = Records(records.features[:1], records.labels[:1])  # as a guard takes it
    alone = objective.increment(Query((point,)), Batch(one, weights[:1]), 1e6).total
    assert float((alone - weights[0] * rows[0]).norm()) <= 1e-5 * float(rows[0].norm())
    assert torch.allclose(objective.outputs(point, records)[:1], objective.outputs(point, one))
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TRIED]
)
def test_hostile_queries_stay_within_the_clip(name: str) -> None:
    objective, _, records = made(TRIED[name])
    draw = np.random.default_rng(1)
    size = objective.dimension
    shown = records.features.clone()
    if not TRIED[name].words:
        shown[1:] *= torch.tensor([1e-30, 1e9, 1e38, math.inf]).unsqueeze(1)
    for scale, other in ((1.0, 1.0), (1e6, 1e6 * (1 + 1e-12)), (1e38, -1e38), (1e-310, 1.0)):
        base = torch.from_numpy(draw.standard_normal(size))
        query = Query((scale * base, other * base), (3.0, -2.0))
        for place in range(COUNT):
            one = Records(shown[place : place + 1], records.labels[place : place + 1])
            weights = torch.ones(COUNT, dtype=F64)
            left_out = weights.clone()
            left_out[place] = 0.0
            alone = objective.increment(query, Batch(one, weights[:1]), 0.5).total
            both = [
                objective.increment(query, Batch(Records(shown, records.labels), own), 0.5).total
                for own in (weights, left_out)
            ]
            assert bool(alone.isfinite().all())
            assert float(alone.norm()) <= 0.5 * (1 + 1e-6)
            assert float((both[0] - both[1]).norm()) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_line_that_names_the_layer(name: str) -> None:
    case = REFUSED[name]
    with pytest.raises(InputError, match=r"model: (layer \S+|the module itself) \(\w+\) ") as caught:
        check_outputs(
            wrap_module(case.make(), (InputLayout(case.shape, "numbers"),), case.shape),
            math.prod(case.shape),
            OUTPUTS,
            "module-test",
        )
    assert "\n" not in str(caught.value)
    instead = rows_below("What is refused, and what to put instead")[name].split(" | ")[2].strip(" |")
    word = re.findall(r"\w+", instead)[0]
    assert word.lower() in str(caught.value).lower(), f"{caught.value} does not say {instead}"
