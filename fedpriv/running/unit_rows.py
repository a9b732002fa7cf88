"""Records as units: persons or clients with several records each, and units that are not there."""

import numpy as np
import torch
from torch import Tensor

from fedpriv.data.dataset import Sites
from fedpriv.data.placing import Table
from fedpriv.objectives import Records
from fedpriv.objectives.per_unit import absent, is_absent


def rows_of(records: Records, units: Table) -> Records:
    """`records` (n, ...) as units: (units, most, ...), or (units, ...) where a unit is one record.

    Units in the order of the records are a view of them.
    """
    count, most = units.shape
    if np.array_equal(units.ravel(), np.arange(units.size)):
        shape = (count, most) if most > 1 else (count,)
        return Records(*(column[: units.size].view(*shape, *column.shape[1:]) for column in records))
    index = torch.from_numpy(units if most > 1 else units[:, 0])
    there = index >= 0
    features, labels = (column[index.clamp(min=0)] for column in records)
    features = features.where(there.view(*there.shape, *[1] * (features.dim() - there.dim())), 0)
    return Records(features, labels.where(there, absent(labels)))


def counting(records: Records) -> tuple[Records, Tensor]:
    """Rows of single records with labels for all of them, and which of them are there, both (..., B).

    Guarantee: with weight 0 where it is not there, a row adds nothing to a sum, whatever the loss is.
    """
    missing = is_absent(records.labels)
    return Records(records.features, records.labels.masked_fill(missing, 0)), ~missing


def silo_by_silo(test: Records, sites: Sites | None) -> tuple[Records, tuple[tuple[str, int], ...]]:
    """The test records in the order of their sites, and how many each has; as they are without sites."""
    if sites is None:
        return test, ()
    order = torch.from_numpy(np.argsort(sites.test, kind="stable"))
    counts = np.bincount(sites.test, minlength=len(sites.names)).tolist()
    return Records(*(column[order] for column in test)), tuple(zip(sites.names, counts, strict=True))
