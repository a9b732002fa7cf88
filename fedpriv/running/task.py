"""The records of a federation: loaded once, turned into features, spread over the silos."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.data.datasets import load, load_test
from fedpriv.data.partition import dirichlet, iid, shards
from fedpriv.errors import InputError
from fedpriv.metrics.measured import Measured
from fedpriv.objectives import Objective, Records
from fedpriv.scenario import Cell
from fedpriv.scenario.schema import ModelSection

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class PublicTask:
    """A data set seen through a model, as a server needs it: without a training record."""

    objective: Objective
    test: Records


@dataclass(frozen=True)
class Task(PublicTask):
    """With the training records, which only silos and simulations have."""

    train: Records


@lru_cache(maxsize=2)
def public_task_of(data: str, model: ModelSection, dtype: str) -> PublicTask:
    """The public part of a task, loaded on first use."""
    model.row.check_data(model.name, data)
    part, row, settings, torch_dtype = load_test(data), model.row, model.settings, DTYPES[dtype]
    test = Records(row.features(part.images, torch_dtype, settings), _labels(part.labels, torch_dtype))
    return PublicTask(row.objective(tuple(test.features.shape[1:]), part.classes, torch_dtype, settings), test)


def public_task_of_cell(cell: Cell) -> PublicTask:
    """InputError if the scenario holds out training records, of which a deployment's server has none."""
    if cell.data.validation is not None:
        raise InputError("data.validation: the server of a deployment has no training records to hold out")
    task = public_task_of(cell.data.name, cell.model, cell.run.dtype)
    return dataclasses.replace(task, objective=_measured(task.objective, cell))


@lru_cache(maxsize=2)
def task_of(data: str, model: ModelSection, dtype: str, validation: int | None = None) -> Task:
    """The task, loaded on first use; the cache holds what is never written to."""
    dataset, row, settings, torch_dtype = load(data), model.row, model.settings, DTYPES[dtype]
    if row.regression != (dataset.classes == 0):
        labels = "real numbers" if dataset.classes == 0 else "classes"
        raise InputError(
            f"model.name = {model.name!r} does not fit data.name = {data!r}, whose labels are {labels}"
        )
    row.check_data(model.name, data)
    train, test = (
        Records(row.features(images, torch_dtype, settings), _labels(labels, torch_dtype))
        for images, labels in (
            (dataset.train_images, dataset.train_labels),
            (dataset.test_images, dataset.test_labels),
        )
    )
    if validation is not None:
        if validation >= len(train.labels):
            raise InputError(f"data.validation = {validation}: {data} has {len(train.labels)} training records")
        train, test = (
            Records(*(column[part] for column in train)) for part in (slice(-validation), slice(-validation, None))
        )
    objective = row.objective(tuple(train.features.shape[1:]), dataset.classes, torch_dtype, settings)
    return Task(objective, test, train)


def _labels(labels: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Classes as they are, numbers of a regression as the features are."""
    tensor = torch.from_numpy(labels)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def task_of_cell(cell: Cell) -> Task:
    task = task_of(cell.data.name, cell.model, cell.run.dtype, cell.data.validation)
    return dataclasses.replace(task, objective=_measured(task.objective, cell))


def _measured(objective: Objective, cell: Cell) -> Objective:
    radius = cell.run.goldstein_radius
    return objective if radius is None else Measured(objective, radius)


def check_records(cell: Cell) -> None:
    """InputError if the cell asks for more training records than its data set has."""
    records, batches, batch = (
        len(task_of_cell(cell).train.labels),
        cell.schedule.batches_held,
        sum(cell.batch_sizes),
    )
    if batches * batch > records:
        raise InputError(
            f"federation: one pass is {batches} batches of {batch} records of all silos, {batches} * {batch} = "
            f"{batches * batch}, but {cell.data.name} has {records} training records: enough for "
            f"{records // batch} batches of {batch}, or {batches} of {records // batches}"
        )


def spread(cell: Cell) -> list[Tensor]:
    """Which training records each silo holds, in the order it reads them: (batches * its batch,) for each silo.

    Guarantee: no record is held twice, so one record of one silo is one record of the federation.  InputError
    if the scenario asks for more records than there are.
    """
    check_records(cell)
    labels = task_of_cell(cell).train.labels.numpy()
    batches = cell.schedule.batches_held
    sizes = [batches * batch for batch in cell.batch_sizes]
    data = cell.data
    match data.partition:
        case "iid":
            shares = iid(labels, sizes, cell.seed)
        case "dirichlet":
            assert data.concentration is not None
            shares = dirichlet(labels, sizes, cell.seed, data.concentration)
        case "shards":
            assert data.shards is not None
            shares = shards(labels, sizes, cell.seed, data.shards)
    return [torch.from_numpy(share) for share in shares]
