"""The records of a federation: loaded once, turned into features, spread over the silos."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedpriv.data.datasets import load, load_test
from fedpriv.data.partition import PARTITIONS
from fedpriv.errors import InputError
from fedpriv.models import model_named
from fedpriv.objectives import Objective, Records
from fedpriv.scenario import Cell

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Task:
    """A data set seen through a model: what every silo and the evaluation share."""

    objective: Objective
    train: Records
    test: Records


@dataclass(frozen=True)
class PublicTask:
    """What a server needs of a task, without a training record."""

    objective: Objective
    test: Records


@lru_cache(maxsize=2)
def public_task_of(data: str, model: str, dtype: str) -> PublicTask:
    """The public part of a task, loaded on first use."""
    part, row, torch_dtype = load_test(data), model_named(model), DTYPES[dtype]
    test = Records(row.features(part.images, torch_dtype), torch.from_numpy(part.labels))
    return PublicTask(row.objective(test.features.shape[1], part.classes, torch_dtype), test)


def public_task_of_cell(cell: Cell) -> PublicTask:
    return public_task_of(cell.data.name, cell.model.name, cell.run.dtype)


@lru_cache(maxsize=2)
def task_of(data: str, model: str, dtype: str) -> Task:
    """The task, loaded on first use; the cache holds what is never written to."""
    dataset, row, torch_dtype = load(data), model_named(model), DTYPES[dtype]
    train, test = (
        Records(row.features(images, torch_dtype), torch.from_numpy(labels))
        for images, labels in (
            (dataset.train_images, dataset.train_labels),
            (dataset.test_images, dataset.test_labels),
        )
    )
    return Task(row.objective(train.features.shape[1], dataset.classes, torch_dtype), train, test)


def task_of_cell(cell: Cell) -> Task:
    return task_of(cell.data.name, cell.model.name, cell.run.dtype)


def check_records(cell: Cell) -> None:
    """InputError if the cell asks for more training records than its data set has."""
    federation, records = cell.federation, len(task_of_cell(cell).train.labels)
    needed = federation.silos * federation.records_per_silo
    if needed > records:
        raise InputError(
            f"federation: silos * rounds * batch = {federation.silos} * {federation.total_rounds} * "
            f"{federation.batch} = {needed}, but {cell.data.name} has {records} training records; "
            f"a single pass needs a product of at most {records}"
        )


def spread(cell: Cell) -> Tensor:
    """Which training records each silo holds, in the order it reads them: (silos, records per silo).

    Guarantee: no record is held twice, so one record of one silo is one record of the federation.  InputError
    if the scenario asks for more records than there are.
    """
    check_records(cell)
    federation, records = cell.federation, len(task_of_cell(cell).train.labels)
    partition = PARTITIONS[cell.data.partition]
    return torch.from_numpy(partition(records, federation.silos, federation.records_per_silo, cell.seed))
