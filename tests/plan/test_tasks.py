"""Tasks: what a data set, a model and a run need of each other, and which records are held out."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.loss.models import MODELS, add_model
from fedpriv.papers.base import NoiseSettings
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.orders import FixedOrder
from fedpriv.participation.secret import RandomAllocation
from fedpriv.plan.calibration import response_and_workload
from fedpriv.plan.evaluation import train_indices_of_silos
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_public_task, load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.data.tables import rows, table_tree, write_csv

MakeCell = Callable[..., Cell]


@pytest.mark.parametrize(
    ("load", "data", "reason"),
    [
        (
            load_task,
            {"validation": 6000},
            r"data\.validation = 6000: synthetic has 6000 training records; hold out",
        ),
        (load_public_task, {"validation": 10}, r"data\.validation: the server of a deployment has no training"),
        (load_public_task, {"split": 1}, r"data\.split, data\.spared: the records of a deployment are what its"),
        (
            load_public_task,
            {"spared": 0.5},
            r"data\.split, data\.spared: the records of a deployment are what its",
        ),
    ],
)
def test_validation_and_split_settings_are_refused_where_no_training_records_are_available(
    small_cell: MakeCell, load: Callable[[Cell], object], data: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        load(small_cell(data={"name": "synthetic", **data}))


@pytest.fixture
def models() -> Iterator[None]:
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


@pytest.mark.parametrize(
    ("scale", "is_refused"),
    [
        (lambda values: (values - values.mean(0)) / (values.std(0) + 1e-6), True),
        (lambda values: values / (values.norm(dim=1).max() + 1e-6), True),
        (lambda values: (values - values.amin()) / (values.amax() - values.amin()), True),
        (lambda values: values[torch.randperm(len(values), generator=torch.Generator().manual_seed(2))], True),
        (lambda values: values / (values.norm(dim=1, keepdim=True) + 1e-6), False),
        (lambda values: values / 0.0, False),
    ],
)
def test_features_that_are_scaled_by_other_records_are_refused_before_any_is_read(
    small_cell: MakeCell, models: None, scale: Callable[[Tensor], Tensor], is_refused: bool
) -> None:
    """One record moved the features of all others, and with them every increment, at the price of one clip."""
    plain = MODELS["mlp"]
    add_model("own-features", dataclasses.replace(plain, features=lambda *given: scale(plain.features(*given))))
    cell = small_cell(
        model={"name": "own-features", "hidden": 4},
        algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "mu": 1.0},
    )
    for load in (load_task, load_public_task):
        if is_refused:
            with pytest.raises(InputError, match="a record's features follow from other records"):
                load(cell)
        else:
            assert load(cell).objective.dimension


def test_a_server_refuses_a_model_that_belongs_to_another_data_set(small_cell: MakeCell) -> None:
    model, algorithm = {"name": "least-squares"}, {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1}
    sections = {"model": model, "algorithm": algorithm, "privacy": {"relation": "zero-out", "mu": 1.0}}
    task = load_public_task(small_cell(data={"name": "linear-regression"}, **sections))
    assert (task.objective.dimension, len(task.test.labels)) == (256, 1000)
    with pytest.raises(InputError, match=r"model\.name = 'least-squares' is for data\.name = 'linear-regression'"):
        load_public_task(small_cell(data={"name": "phase-retrieval"}, **sections))


@pytest.mark.parametrize("load", [load_task, load_public_task])
@pytest.mark.parametrize(
    ("data", "model", "labels"),
    [("phase-retrieval", "mlp", "real numbers"), ("synthetic", "linear-regression", "classes")],
)
def test_a_server_and_a_simulation_refuse_labels_of_another_kind_than_the_models(
    small_cell: MakeCell, load: Callable[[Cell], object], data: str, model: str, labels: str
) -> None:
    algorithm = {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1}
    privacy = {"relation": "zero-out", "mu": 1.0}
    cell = small_cell(data={"name": data}, model={"name": model}, algorithm=algorithm, privacy=privacy)
    with pytest.raises(
        InputError, match=rf"{model}' does not fit data\.name = '{data}', whose labels are {labels}"
    ):
        load(cell)


def test_the_last_training_records_are_held_out_for_validation(small_cell: MakeCell) -> None:
    whole = load_task(small_cell())
    for count in (1, 1000):
        task = load_task(small_cell(data={"name": "synthetic", "validation": count}))
        for part, expected in ((task.train, slice(-count)), (task.test, slice(-count, None))):
            assert torch.equal(part.features, whole.train.features[expected])
            assert torch.equal(part.labels, whole.train.labels[expected])


def test_a_table_that_was_corrected_is_read_again(tmp_path: Path) -> None:
    """In one process, as in a notebook."""
    counts = list[int]()
    for length in (60, 90):
        tree = table_tree(write_csv(tmp_path / "t.csv", rows(length)))
        counts.append(len(load_task(resolve_cell(tree, "test")).train.features))
    assert counts[0] < counts[1]


def test_a_table_without_test_records_is_refused(tmp_path: Path) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()), split=None, test_share=0.0)
    with pytest.raises(InputError, match=r"t\.csv: has no test records; look at `split` and `test_share`"):
        load_task(resolve_cell(tree, "test"))


def test_held_out_training_records_take_the_place_of_test_records_only_if_one_of_them_counts(
    tmp_path: Path,
) -> None:
    whole = table_tree(write_csv(tmp_path / "whole.csv", rows()), split=None, test_share=0.0)
    whole["data"]["validation"] = 20
    assert len(load_task(resolve_cell(whole, "test")).test.labels) == 20  # a file without test records
    few = [{**row, "part": "train" if number < 3 else "test"} for number, row in enumerate(rows())]
    tree = table_tree(write_csv(tmp_path / "few.csv", few))
    tree["data"]["validation"] = 1
    with pytest.raises(
        InputError, match=r"data\.validation = 1: none of these training records counts; hold out more"
    ):
        load_task(resolve_cell(tree, "test"))


def test_a_plan_with_floating_point_noise_cannot_be_released(small_cell: MakeCell) -> None:
    def plan_of(released: bool = False, **overrides: Any) -> Plan:
        cell = small_cell(**overrides)
        return make_plan(cell, load_task(cell).objective, for_release=released)

    with pytest.raises(ValueError, match="floating point has no lattice of integers"):
        _ = plan_of().required_exact_plan
    with pytest.raises(ValueError, match="noise in floating point protects no one"):
        plan_of().check_release_noise()
    plan_of(released=True).check_release_noise()
    plan_of(privacy={"relation": "zero-out", "mode": "none"}).check_release_noise()  # which has no noise


def test_clients_of_a_pool_have_disjoint_records_of_their_own_units(small_cell: MakeCell) -> None:
    """Row indices in the data, unit by unit, of which no record is in two clients."""
    cell = small_cell(
        federation={"silos": 1, "clients": 40, "cohort": 10, "rounds": 4},
        privacy={"unit": "client", "records": 5, "relation": "zero-out", "mu": 1.0},
        algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
    )
    task = load_task(cell)
    assert task.unit_indices is not None
    (rows_of_pool,), (units,) = train_indices_of_silos(cell), partition_records(cell)
    assert rows_of_pool.tolist() == task.unit_indices[units.numpy()].ravel().tolist()
    assert len(set(rows_of_pool.tolist())) == len(rows_of_pool) == 5 * len(units)


def test_noise_fitting_needs_published_points_and_a_public_schedule() -> None:
    row, settings = ALGORITHMS["dp-ftrl"], NoiseSettings.model_validate({"mechanism": "blt"})
    order = FixedOrder(8, 8)
    with pytest.raises(InputError, match="noise cannot be fitted to what dp-ftrl publishes"):
        response_and_workload(dataclasses.replace(row, published=None), settings, order)
    with pytest.raises(InputError, match="nobody may know in which rounds a record takes part"):
        response_and_workload(row, settings, RandomAllocation(8, 8))
