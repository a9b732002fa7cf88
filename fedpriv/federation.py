"""The records of a federation: loaded once, turned into features, spread over the silos."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedpriv.data.datasets import load
from fedpriv.data.partition import dirichlet, iid, shards
from fedpriv.errors import InputError
from fedpriv.objectives import Objective, Records
from fedpriv.scenario import Cell
from fedpriv.scenario.schema import ModelSection

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Task:
    """A data set seen through a model: what every silo and the evaluation share."""

    objective: Objective
    train: Records
    test: Records


@lru_cache(maxsize=2)
def task_of(data: str, model: ModelSection, dtype: str, validation: int | None = None) -> Task:
    """The task, loaded on first use; the cache holds what is never written to."""
    dataset, row, settings, torch_dtype = load(data), model.row, model.settings, DTYPES[dtype]
    train, test = (
        Records(row.features(images, torch_dtype, settings), torch.from_numpy(labels))
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
    return Task(
        row.objective(tuple(train.features.shape[1:]), dataset.classes, torch_dtype, settings), train, test
    )


def task_of_cell(cell: Cell) -> Task:
    return task_of(cell.data.name, cell.model, cell.run.dtype, cell.data.validation)


def check_records(cell: Cell) -> None:
    """InputError if the cell asks for more training records than its data set has."""
    records, places, batch = len(task_of_cell(cell).train.labels), cell.federation.places, sum(cell.batch_sizes)
    if places * batch > records:
        raise InputError(
            f"federation: one pass is {places} rounds of {batch} records of all silos, {places} * {batch} = "
            f"{places * batch}, but {cell.data.name} has {records} training records"
        )


def spread(cell: Cell) -> list[Tensor]:
    """Which training records each silo holds, in the order it reads them: (places * its batch,) for each silo.

    Guarantee: no record is held twice, so one record of one silo is one record of the federation.  InputError
    if the scenario asks for more records than there are.
    """
    check_records(cell)
    labels = task_of_cell(cell).train.labels.numpy()
    sizes = [cell.federation.places * batch for batch in cell.batch_sizes]
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
