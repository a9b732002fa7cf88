"""Which test records each silo of a simulation, or of a demonstration, evaluates on."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.data.datasets import load
from fedpriv.data.partition import alike, iid
from fedpriv.errors import InputError
from fedpriv.objectives import Records
from fedpriv.running.task import Task, labels_of_rows, spread, task_of_cell
from fedpriv.scenario import Cell


def spread_test(cell: Cell) -> list[Tensor]:
    """Which test records each silo evaluates on, by their place in the task's: (evaluation.records,) for each.

    By site, a site's first ones; otherwise no silo's twice, of labels as its training records have them.
    InputError if the scenario asks for more than there are.
    """
    assert cell.evaluation is not None
    task, sizes = task_of_cell(cell), cell.evaluation.of_silos(cell.federation.silos)
    if cell.data.partition == "site":
        return [torch.from_numpy(own) for own in _first_of_sites(task, sizes)]
    labels = task.test.labels.numpy()
    if sum(sizes) > len(labels):
        raise InputError(
            f"evaluation.records: {sum(sizes)} test records of all silos, and {cell.data.name} has {len(labels)}"
        )
    if cell.data.partition == "iid":
        shares = iid(labels, sizes, cell.seed)
    else:
        shares = alike(labels, sizes, cell.seed, [labels_of_rows(task)[share.numpy()] for share in spread(cell)])
    return [torch.from_numpy(share) for share in shares]


def _first_of_sites(task: Task, sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """Test records lie silo by silo; InputError, naming the site, for one that has too few."""
    shares, start = [], 0
    for (name, has), size in zip(task.silos, sizes, strict=True):
        if size > has:
            raise InputError(f"evaluation.records: {name!r} has {has} test records, and {size} are asked for")
        shares.append(np.arange(start, start + size))
        start += has
    return shares


def held_out_of_silos(cell: Cell) -> list[NDArray[np.int64]]:
    """The numbers, in the data set, of each silo's test records; none where silos do not evaluate."""
    if cell.evaluation is None:
        return [np.empty(0, np.int64)] * cell.federation.silos
    shares = [share.numpy() for share in spread_test(cell)]
    sites = load(cell.data.name, table=cell.data.table).sites
    return shares if sites is None else [np.argsort(sites.test, kind="stable")[share] for share in shares]


def held_out_shares(cell: Cell) -> list[Records]:
    """The test records of silo 0, 1, … as the cell's model sees them."""
    test = task_of_cell(cell).test
    return [Records(*(column[share] for column in test)) for share in spread_test(cell)]
