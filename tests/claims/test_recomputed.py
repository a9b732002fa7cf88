"""Releases that are planned again from a scenario, and how a record's differ from them."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedpriv.claims.claim import EXTERNAL_PARTY
from fedpriv.claims.ledger import FIRST_STEP, make_release_streams, stream_to_data
from fedpriv.claims.recomputed import (
    RunPlans,
    first_step_before,
    format_silos,
    make_objective,
    recompute_plans,
    recompute_sums,
    shapes_to_data,
)
from fedpriv.core.errors import InputError
from fedpriv.data.encode import Scaling
from fedpriv.data.layout import FeatureLayout, InputLayout
from fedpriv.plan.evaluation import apply_scaling, first_step_cell
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.schema import Cell
from tests.plan.test_first_step import cell_of

MakeCell = Callable[..., Cell]
Record = dict[str, Any]


def plan_of(cell: Cell) -> Plan:
    return make_plan(cell, load_task(cell).objective, for_release=True)


def plans_of(cell: Cell, *releases: Mapping[str, Any]) -> RunPlans:
    return recompute_plans(cell, load_task(cell).objective, releases, plan_of)


def record_of(plans: RunPlans) -> Record:
    releases, tests = ([stream_to_data(stream) for stream in part] for part in (plans.releases, plans.evaluations))
    dimension = plans.plans["the rounds"].objective.dimension
    record = {"dimension": dimension, "releases": releases, "evaluation": {"releases": tests} if tests else None}
    return dict(json.loads(json.dumps(record)))


def set_in(key: str, value: Any, *, tests: bool = False) -> Callable[[Record], object]:
    """Write a value under a dotted key of the first stream."""

    def edit(record: Record) -> None:
        place = (record["evaluation"] if tests else record)["releases"][0]
        *path, last = key.split(".")
        for part in path:
            place = place[part]
        place[last] = value(place.get(last)) if callable(value) else value

    return edit


EDITS: dict[str, tuple[Callable[[Record], object], str]] = {
    "dimension": (
        lambda record: record.update(dimension=1),
        r"record\.dimension is 1, and its scenario gives \d+",
    ),
    "nobody": (
        lambda record: record["releases"].clear(),
        r"record\.releases: released by nobody, and by its scenario by 'silos 0-2'",
    ),
    "one silo": (set_in("owner", "silo 0"), "released by 'silo 0', and by its scenario by 'silos 0-2'"),
    "less noise": (
        set_in("std", lambda std: std * (1.0 - 2e-9)),
        r"std of silos 0-2 is .*, and its scenario gives",
    ),
    "more noise": (
        set_in("std", lambda std: std * (1.0 + 2e-9)),
        r"std of silos 0-2 is .*, and its scenario gives",
    ),
    "rounds": (
        set_in("participation.rounds", 7),
        r"participation\.rounds of silos 0-2 is 7, and its scenario gives 8",
    ),
    "clips": (set_in("clips", lambda clips: clips[:-1]), "clips of silos 0-2 is"),
    "relation": (set_in("relation", "zero-out"), 'relation of silos 0-2 is "zero-out", .* gives "replace-one"'),
    "weight": (set_in("per_record", lambda weight: weight / 2.0), "per_record of silos 0-2 is"),
    "type": (set_in("decay", 1), r"decay of silos 0-2 is 1, and its scenario gives 1\.0"),
    "unknown key": (set_in("apart", 1.5), r"apart of silos 0-2 is 1\.5, and its scenario gives null"),
    "evaluations": (
        set_in("std", lambda std: std / 2.0, tests=True),
        r"record\.evaluation\.releases: std of silos 0-2 is",
    ),
    "no evaluations": (
        lambda record: record.update(evaluation=None),
        r"record\.evaluation\.releases: released by nobody, and by its scenario by 'silos 0-2'",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_results_whose_releases_differ_from_their_scenario_are_refused(small_cell: MakeCell, edit: str) -> None:
    change, reason = EDITS[edit]
    plans = plans_of(small_cell(evaluation={"records": 50, "mu": 0.5}))
    honest = record_of(plans)
    plans.check(honest)
    edited = copy.deepcopy(honest)
    change(edited)
    with pytest.raises(InputError, match=reason) as refusal:
        plans.check(edited)
    assert "\n" not in str(refusal.value)


def test_noise_in_results_may_differ_from_the_recomputed_noise_by_rounding(small_cell: MakeCell) -> None:
    plans = plans_of(small_cell())
    record = record_of(plans)
    set_in("std", lambda std: std * (1.0 + 5e-10))(record)
    plans.check(record)


def test_releases_of_private_feature_scaling_are_recomputed_and_precede_training_releases(tmp_path: Path) -> None:
    """Its releases are of one round about the same records, whether the run took it or it was taken elsewhere."""
    asked = cell_of(tmp_path)
    first = first_step_cell(asked)
    assert first is not None
    cell = apply_scaling(asked, Scaling((0, 6), (0.1, -0.2), (0.5, 0.25)))
    assert first_step_before(cell) == first
    step = [stream_to_data(stream) for stream in make_release_streams(plan_of(first), 1)]
    taken = plans_of(cell, *({**stream, "step": FIRST_STEP} for stream in step))
    streams = taken.releases
    assert [stream.step for stream in streams[: len(step)]] == [FIRST_STEP] * len(step)
    assert [{**stream_to_data(stream), "step": "rounds"} for stream in streams[: len(step)]] == [
        {**stream, "step": "rounds"} for stream in step
    ]
    elsewhere = plans_of(cell, {"step": FIRST_STEP, "owner": EXTERNAL_PARTY}).releases
    assert elsewhere[0].party_name == EXTERNAL_PARTY
    assert elsewhere[1:] == streams[len(step) :]
    assert {stream.schedule.rounds for stream in elsewhere[1:]} == {8}


def test_a_feature_scaling_release_is_refused_if_the_scenario_scales_no_table(
    small_cell: MakeCell, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"has a first step, and its scenario has no \[data\.scale\]"):
        first_step_before(small_cell())
    scaled = cell_of(tmp_path)
    without_table = scaled.model_copy(
        update={"data": scaled.data.model_copy(update={"name": "synthetic", "table": None})}
    )
    with pytest.raises(InputError, match="has a first step, and its scenario's data are no table"):
        first_step_before(without_table)


SHAPES: dict[str, Any] = {"width": 4, "inputs": [[[2, 2], "numbers"]], "labels": [], "classes": 3}


def test_a_feature_layout_is_written_as_input_and_label_shapes() -> None:
    layout = FeatureLayout(6, (InputLayout((2, 3), "tokens"),), (5,), labels_are_classes=True)
    assert shapes_to_data(layout, 3) == {"width": 6, "inputs": [[[2, 3], "tokens"]], "labels": [5], "classes": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 0},
        {"width": 2**31 + 1},
        {"width": 4.0},
        {"width": True},
        {"labels": [-1]},
        {"inputs": [[[0, 2], "numbers"]]},
        {"inputs": [[[1] * 64, "numbers"]]},
    ],
)
def test_invalid_record_shapes_are_refused(small_cell: MakeCell, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="the shapes of the silos' records are none"):
        make_objective(small_cell(), {**SHAPES, **changes})


def test_an_objective_is_built_from_record_shapes_without_records(small_cell: MakeCell) -> None:
    """Softmax regression has a weight for each class and feature, and the largest shapes take no memory."""
    cell = small_cell(model={"name": "softmax-regression", "feature_norm": 1.0})
    for width in (4, 2**31):
        objective = make_objective(cell, {**SHAPES, "width": width, "inputs": [[[width], "numbers"]]})
        assert objective.dimension == 3 * width


def test_clip_norms_are_recomputed_unless_they_depend_on_the_records(small_cell: MakeCell) -> None:
    """Momentum of weight α has clips of α times its own clip, which otherwise follows from the model."""
    privacy = {"relation": "replace-one", "mu": 1.0}
    momentum = {"name": "momentum-tree", "trust": "trusted", "alpha": 0.5, "step": 0.1}
    sgd = {"name": "dp-sgd", "trust": "trusted", "clip": 3.0, "step": 0.1}
    assert recompute_sums(small_cell(privacy=privacy, algorithm=sgd)) == ((3.0,) * 8, (0.0, None, "independent"))
    assert recompute_sums(small_cell(privacy=privacy, algorithm=momentum)) == (None, (0.5, None, "tree"))
    clipped = {**momentum, "clip": 3.0}
    assert recompute_sums(small_cell(privacy=privacy, algorithm=clipped)) == ((1.5,) * 8, (0.5, None, "tree"))


def test_a_long_list_of_silos_is_shortened_to_eight_numbers() -> None:
    assert [format_silos(numbers) for numbers in ([2], [0, 3], range(8), range(9), range(20))] == [
        "silo 2",
        "silos 0, 3",
        "silos 0, 1, 2, 3, 4, 5, 6, 7",
        "silos 0, 1, 2, 3, 4, 5, 6, 7 and 1 other",
        "silos 0, 1, 2, 3, 4, 5, 6, 7 and 12 others",
    ]
