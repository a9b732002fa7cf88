"""The table of a plan's rounds says what its parts say."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.core.errors import InputError
from fedpriv.core.random import KeyedNormal, public_generator
from fedpriv.noise.trust import TRUSTED
from fedpriv.plan.plan import Plan, draw_absences, excess_risk_bound, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo
from tests.data.tables import rows, table_tree, write_csv

MakeCell = Callable[..., Cell]


def plan_with(cell: Cell, *, released: bool) -> Plan:
    return make_plan(cell, load_task(cell).objective, for_release=released)


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_a_silo_batch_has_the_rows_of_its_participation_schedule(small_cell: MakeCell, epochs: int) -> None:
    """Else a record is read more often than it is charged for."""
    cell = small_cell(federation__epochs=epochs)
    plan = plan_with(cell, released=True)
    records = load_task(cell).train
    silo = Silo.for_release(0, plan, records, bytes(32))
    for planned in plan.rounds:
        t, size = planned.step.t, plan.batch_sizes[0]
        rows = plan.schedule.select_rows(t, size, 0, KeyedNormal(bytes(32)).sampling_randomness)
        assert np.array_equal(silo._read_batch(planned).row_indices, np.arange(len(records.labels))[rows])
        assert planned.batch_count == max(1, plan.schedule.expected_batches(t))


def test_a_plan_copied_by_dataclass_replace_recomputes_its_derived_fields(small_cell: MakeCell) -> None:
    """A release under another trust setting, as an audit makes it, has that setting's messages."""
    plan = plan_with(small_cell(algorithm__trust="secure-aggregation"), released=True)
    trusted = dataclasses.replace(plan, trust=TRUSTED)
    assert (plan.masked, trusted.masked) == (True, False)
    assert plan.rounds[0].message_length > trusted.rounds[0].message_length
    assert dataclasses.replace(plan, model_length=5).query_length == 5


def test_cells_that_differ_in_their_noise_share_one_table_of_rounds(small_cell: MakeCell) -> None:
    """A table of a single pass has a row for each record; with other rounds or lengths it is another one."""
    plans = [plan_with(small_cell(privacy__rho=rho), released=False) for rho in (4.0, 8.0)]
    assert plans[0].noise != plans[1].noise
    assert plans[0].rounds is plans[1].rounds
    assert plan_with(small_cell(federation__epochs=2), released=False).rounds != plans[0].rounds
    assert plan_with(small_cell(), released=True).rounds[0].integer_round is not None


@pytest.mark.parametrize(
    ("trust", "released", "message", "bytes_per_number", "stored"),
    [
        ("untrusted", False, torch.float32, 4, torch.float32),
        ("untrusted", True, torch.float32, 4, torch.float32),
        ("trusted", False, torch.float64, 8, torch.float32),
        ("trusted", True, torch.int64, 8, torch.int64),
        ("secure-aggregation", False, torch.uint64, 8, torch.float32),
        ("secure-aggregation", True, torch.uint8, 5, torch.int64),
    ],
)
def test_message_types_and_sizes_follow_the_trust_setting_and_arithmetic(
    small_cell: MakeCell,
    trust: str,
    released: bool,
    message: torch.dtype,
    bytes_per_number: int,
    stored: torch.dtype,
) -> None:
    """Of two silos: masked integers are words of `run.word` bits, and all others are a number for each value."""
    run = {"dtype": "float32", "word": 40}
    plan = plan_with(small_cell(algorithm__trust=trust, federation__silos=2, run=run), released=released)
    assert (plan.message_dtype, plan.stored_dtype) == (message, stored)
    length = plan.objective.dimension
    for planned in plan.rounds:
        assert planned.message_length * message.itemsize == bytes_per_number * length
        assert planned.stored_length == length


SGD = {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
PRIVACY = {"relation": "replace-one", "mu": 1.0}


@pytest.mark.parametrize("away", [{"drop_out": 0.35}, {"away": {"1": [2]}}])
def test_a_plan_with_absent_silos_is_refused_if_the_algorithm_needs_all_silos(
    small_cell: MakeCell, away: dict[str, Any]
) -> None:
    federation = {"silos": 3, "rounds": 8, **away}
    plan = plan_with(small_cell(algorithm=SGD, privacy=PRIVACY, federation=federation), released=True)
    assert plan.schedule.rounds == 8
    momentum = {"name": "momentum-tree-reduced", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    refused = small_cell(algorithm=momentum, privacy=PRIVACY, federation=federation)
    with pytest.raises(InputError, match=r"^federation\..*: momentum-tree-reduced cannot go on without a silo"):
        plan_with(refused, released=True)


def test_silos_are_absent_in_the_rounds_that_are_listed_or_drawn(small_cell: MakeCell) -> None:
    """Round t is row t - 1 of the public draw, and every silo has a column."""
    federation = {"silos": 3, "rounds": 8, "drop_out": 0.35, "away": {"2": [8, 1]}}
    cell = small_cell(algorithm=SGD, privacy=PRIVACY, federation=federation)
    is_away = public_generator(cell.seed, "drop-outs").random((8, 3)) < 0.35
    is_away[[0, 7], 2] = True
    absences = draw_absences(cell)
    for t in range(1, 9):
        assert absences.absent_silos(t) == set(np.flatnonzero(is_away[t - 1]))
    assert all(list(rounds) == sorted(rounds) for rounds in absences.rounds.values())


def test_a_noisy_newton_point_has_the_weights_and_a_symmetric_matrix(tmp_path: Path) -> None:
    """A point of Newton's method has weights, and the numbers of a symmetric matrix of them."""
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["model"]["name"] = "logistic-regression"
    newton = {"name": "noisy-newton", "trust": "untrusted", "clip": 1.0, "curvature_clip": 0.5, "penalty": 0.1}
    weights, point = (
        load_task(resolve_cell({**tree, "algorithm": algorithm}, "test")).objective.dimension
        for algorithm in (SGD, newton)
    )
    assert point == weights + weights * (weights + 1) // 2


@pytest.mark.slow
def test_the_excess_risk_bound_follows_from_batch_size_dimension_and_noise(small_cell: MakeCell) -> None:
    """Fresh gradients with errors of s² = clip²/B + d·std²: R²/(2ηT) + s²/(2(1/η - M))."""
    cell = small_cell(
        data={"name": "linear-regression"},
        model={"name": "least-squares"},
        federation={"silos": 2, "rounds": 8, "batches": [3, 5]},
        algorithm={**SGD, "step": 0.25, "radius": 1.0, "output": "average"},
        privacy={"relation": "zero-out", "mu": 1.0},
    )
    objective = load_task(cell).objective
    plan = make_plan(cell, objective)
    bound = excess_risk_bound(cell, plan)
    assert bound is not None
    error = 1.0 / 8 + objective.dimension * plan.noise.std_in_mean**2
    expected = 1.0 / (2 * 0.25 * 8) + error / (2 * (4.0 - objective.smoothness))
    assert bound.value == pytest.approx(expected)


def test_clients_that_come_by_themselves_have_no_excess_risk_bound(small_cell: MakeCell) -> None:
    """A round's sum has a fixed denominator, however many clients come: its mean is no gradient."""
    cell = small_cell(
        data={"name": "linear-regression"},
        model={"name": "least-squares"},
        federation={"clients": 40, "cohort": 5, "rounds": 8, "sampling": "available", "min_separation": 8},
        algorithm={**SGD, "step": 0.25, "radius": 1.0, "output": "average", "trust": "trusted"},
        privacy={"relation": "zero-out", "mu": 1.0, "unit": "client", "records": 2},
    )
    plan = plan_with(cell, released=False)
    assert plan.schedule.single_pass
    assert excess_risk_bound(cell, plan) is None


@pytest.mark.parametrize(
    "absence",
    [
        {"federation": {"silos": 2, "rounds": 8, "batches": [3, 5], "drop_out": 0.5}},
        {"federation": {"silos": 2, "rounds": 8, "batches": [3, 5], "away": {"0": [1, 2]}}},
        {"deployment": {"missing": "continue"}},
    ],
)
def test_a_run_without_some_silos_has_no_excess_risk_bound(small_cell: MakeCell, absence: dict[str, Any]) -> None:
    """An absent silo's gradient counts as 0, so that the mean over silos is no estimate of the gradient."""
    tree: dict[str, Any] = {
        "data": {"name": "linear-regression"},
        "model": {"name": "least-squares"},
        "federation": {"silos": 2, "rounds": 8, "batches": [3, 5]},
        "algorithm": {**SGD, "step": 0.25, "radius": 1.0, "output": "average"},
        "privacy": {"relation": "zero-out", "mu": 1.0},
    }
    cell = small_cell(**(tree | absence))
    assert excess_risk_bound(cell, make_plan(cell, load_task(cell).objective)) is None


def test_a_plan_counts_the_extra_memory_values_of_its_largest_round(small_cell: MakeCell) -> None:
    """An anchor round has a direction a record, and another round has eight at each of two points."""
    smoothing = {"smoothing": 0.1, "radius": 0.02, "period": 3, "anchor_clip": 20.0, "clip": 5.0, "step": 0.0005}
    algorithm = {"name": "goldstein-single-pass", "trust": "trusted", "window": 2, "output": "last", **smoothing}
    cell = small_cell(algorithm=algorithm, privacy=PRIVACY)
    plan = plan_with(cell, released=False)
    rows_of_round = sum(plan.batch_sizes) * plan.max_batches
    assert {planned.step.gradient_count for planned in plan.rounds} == {1, 2}
    assert plan.extra_values == max(plan.objective.extra_values(points, rows_of_round) for points in (1, 2))
    assert len({plan.objective.extra_values(points, rows_of_round) for points in (1, 2)}) == 2
