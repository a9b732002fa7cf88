"""Every row of the tables of docs/own-module.md: what runs gives the clipped gradients of records alone."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.core.errors import InputError
from fedpriv.data.layout import InputLayout
from fedpriv.loss.imported import check_outputs
from fedpriv.loss.inputs import wrap_module
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.objective import Objective, Query, Records
from tests.loss.bring import BESIDE, OUTPUTS, REFUSED, REVIEWED, RUNS, WORDS, Case
from tests.loss.builders import F64, all_but, autograd_increments, pick_one, sum_increments

PAGE = Path(__file__).parents[2] / "docs" / "own-module.md"
COUNT = 5
QUICK = ("MLP", "requires_grad = False", "tied weights", "BatchNorm in evaluation mode, as freeze leaves it")
CLIPS = (1e-3, 0.1, 1.0, 1e6)
TRIED = {**RUNS, **BESIDE}


def rows_below(heading: str) -> dict[str, str]:
    """The first cells of the table below a heading, without marks of code, with the rest of the line."""
    table = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ") for line in table.splitlines() if line.startswith("|")][2:]
    return {line.split(" | ")[0].replace("`", ""): line for line in lines}


def as_on_the_page(case: Case) -> nn.Module:
    return wrap_module(case.make(), (InputLayout(case.shape, "numbers"),), case.shape)


def example(case: Case) -> tuple[Objective, nn.Module, Records]:
    torch.manual_seed(0)
    module = as_on_the_page(case).to(F64)
    draw = np.random.default_rng(0)
    size = (COUNT, math.prod(case.shape))
    features = draw.integers(0, WORDS, size).astype(float) if case.words else draw.standard_normal(size)
    records = Records(torch.from_numpy(features), torch.arange(COUNT) % OUTPUTS)
    return make_module_objective(module, size[1], CrossEntropy(), 0, F64), module, records


def test_the_page_has_a_row_for_every_case_and_no_other() -> None:
    assert set(rows_below("What runs")) == set(RUNS)
    assert set(rows_below("What is refused, and what to put instead")) == set(REFUSED)


def test_the_modules_of_the_review_and_ten_others_are_tried() -> None:
    assert len(set(REVIEWED)) == 11
    assert set(REVIEWED) <= set(TRIED)
    assert len(set(TRIED) - set(REVIEWED)) >= 10


@pytest.mark.parametrize("name", TRIED)
def test_what_runs_gives_the_clipped_gradients_of_records_alone(name: str) -> None:
    objective, module, records = example(TRIED[name])
    point = torch.cat([part.detach().flatten() for part in module.parameters() if part.requires_grad])
    assert objective.dimension == len(point)
    rows = autograd_increments(module, point, records)
    norms = rows.norm(dim=1)
    weights = torch.linspace(0.5, 1.0, COUNT, dtype=F64)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    for clip in CLIPS:
        result = sum_increments(objective, point, records, clip, weights)
        expected = (rows * (weights * (clip / norms).clamp(max=1.0)).unsqueeze(1)).sum(0)
        assert float((result.total - expected).norm()) <= 1e-5 * float(expected.norm())
        assert int(result.clipped_count) == int((norms > clip).sum())
    one = pick_one(records, 0)  # as a guard takes it
    alone = sum_increments(objective, point, one, 1e6, weights[:1]).total
    assert float((alone - weights[0] * rows[0]).norm()) <= 1e-5 * float(rows[0].norm())
    assert torch.allclose(objective.outputs(point, records)[:1], objective.outputs(point, one))
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TRIED]
)
def test_hostile_queries_stay_within_the_clip(name: str) -> None:
    objective, _, records = example(TRIED[name])
    draw = np.random.default_rng(1)
    size = objective.dimension
    shown = Records(records.features.clone(), records.labels)
    if not TRIED[name].words:
        shown.features[1:] *= torch.tensor([1e-30, 1e9, 1e38, math.inf]).unsqueeze(1)
    for scale, other in ((1.0, 1.0), (1e6, 1e6 * (1 + 1e-12)), (1e38, -1e38), (1e-310, 1.0)):
        base = torch.from_numpy(draw.standard_normal(size))
        query = Query((scale * base, other * base), (3.0, -2.0))
        for row in range(COUNT):
            alone = sum_increments(objective, query, pick_one(shown, row), 0.5).total
            both = [sum_increments(objective, query, shown, 0.5, own).total for own in (None, all_but(COUNT, row))]
            assert bool(alone.isfinite().all())
            assert float(alone.norm()) <= 0.5 * (1 + 1e-6)
            assert float((both[0] - both[1]).norm()) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_line_that_names_the_layer(name: str) -> None:
    case = REFUSED[name]
    with pytest.raises(InputError, match=r"model: (layer \S+|the module itself) \(\w+\) ") as caught:
        check_outputs(as_on_the_page(case), math.prod(case.shape), OUTPUTS, "module-test")
    assert "\n" not in str(caught.value)
    instead = rows_below("What is refused, and what to put instead")[name].split(" | ")[2].strip(" |")
    word = re.findall(r"\w+", instead)[0]
    assert word.lower() in str(caught.value).lower(), f"{caught.value} does not say {instead}"
