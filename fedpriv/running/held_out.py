"""Which records of the data each silo of a simulation, or of a demonstration, trains and evaluates on."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.data.partition import alike, iid
from fedpriv.data.placing import roster
from fedpriv.errors import InputError
from fedpriv.objectives import Records
from fedpriv.privacy.unit import USER
from fedpriv.running.task import Task, labels_of_rows, spread, task_of_cell
from fedpriv.scenario import Cell


def spread_test(cell: Cell) -> list[Tensor]:
    """Which places of `tests` each silo evaluates on: (evaluation.records,) of the task's for each.

    By site, a site's first ones; otherwise no silo's twice, of labels as its training records have them.  Where
    cells say which rows are for testing, a silo's rows are the same in both parts, in the order it reads them.
    InputError if the scenario asks for more than there are.
    """
    assert cell.evaluation is not None
    task, sizes = task_of_cell(cell), cell.evaluation.of_silos(cell.federation.silos)
    if (held := _rows_held(cell, task)) is not None:
        return [torch.from_numpy(own) for own in _first(cell, held, sizes)]
    labels = task.tests.labels.numpy()
    if sum(sizes) > len(labels):
        raise InputError(
            f"evaluation.records: {sum(sizes)} test records of all silos, and {cell.data.name} has {len(labels)}"
        )
    if cell.data.partition == "iid":
        shares = iid(labels, sizes, cell.seed)
    else:
        shares = alike(labels, sizes, cell.seed, [labels_of_rows(task)[share.numpy()] for share in spread(cell)])
    return [torch.from_numpy(share) for share in shares]


def _rows_held(cell: Cell, task: Task) -> list[NDArray[np.int64]] | None:
    """The places of `tests` that are at each silo, in the order it reads them; None where any may be anybody's."""
    by_site, shared = cell.data.partition == "site", task.rows is not None and task.units is None
    if not (by_site or shared):
        return None
    read = [task.rows[share.numpy()] for share in spread(cell)] if shared and task.rows is not None else []
    if not by_site:
        return read
    assert task.test_sites is not None
    sites = [np.flatnonzero(task.test_sites == silo) for silo in range(cell.federation.silos)]
    if not read:
        return sites
    return [np.concatenate([own, np.setdiff1d(site, own)]) for own, site in zip(read, sites, strict=True)]


def _first(cell: Cell, held: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """InputError, naming the silo, for one that has too few."""
    schema = cell.data.table_schema
    names = schema.sites if schema is not None and cell.data.partition == "site" else ()
    what = "rows" if schema is not None and schema.by_content else "test records"
    for silo, (own, size) in enumerate(zip(held, sizes, strict=True)):
        if size > len(own):
            name = repr(names[silo]) if names else f"silo {silo}"
            raise InputError(f"evaluation.records: {name} has {len(own)} {what}, and {size} are asked for")
    return [own[:size] for own, size in zip(held, sizes, strict=True)]


def held_out_of_silos(cell: Cell) -> list[NDArray[np.int64]]:
    """The numbers, in the data set, of each silo's test records; none where silos do not evaluate."""
    if cell.evaluation is None:
        return [np.empty(0, np.int64)] * cell.federation.silos
    return [share.numpy() for share in spread_test(cell)]


def held_out_shares(cell: Cell) -> list[Records]:
    """The test records of silo 0, 1, … as the cell's model sees them."""
    test = task_of_cell(cell).tests
    return [Records(*(column[share] for column in test)) for share in spread_test(cell)]


def records_of_silos(cell: Cell) -> list[NDArray[np.int64]]:
    """The numbers, in the data set, of each silo's training records, in the order it reads them.

    Of persons all records, whether they count or not, in the order of the data; of clients unit by unit.
    """
    task, shares = task_of_cell(cell), [share.numpy() for share in spread(cell)]
    if task.units is None:
        return shares
    if cell.privacy.protected.name == USER.name and task.persons is not None:
        whose = roster(task.persons)[1]
        return [np.flatnonzero(np.isin(whose, share)) for share in shares]
    return [task.units[share].ravel() for share in shares]
