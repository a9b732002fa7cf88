"""Records as units: persons or clients with several records each."""

import numpy as np
import torch

from fedpriv.data.units import Table
from fedpriv.objectives import Records
from fedpriv.objectives.per_unit import absent


def rows_of(records: Records, units: Table) -> Records:
    """`records` (n, ...) as units: (units, most, ...), or (units, ...) where a unit is one record.

    Units in the order of the records are a view of them.
    """
    count, most = units.shape
    if np.array_equal(units.ravel(), np.arange(units.size)):
        shape = (count, most) if most > 1 else (count,)
        return Records(*(column[: units.size].view(*shape, *column.shape[1:]) for column in records))
    if most == 1:
        return Records(*(column[torch.from_numpy(units[:, 0])] for column in records))
    index = torch.from_numpy(units)
    there = index >= 0
    features, labels = (column[index.clamp(min=0)] for column in records)
    features = features.where(there.view(*there.shape, *[1] * (features.dim() - 2)), 0)
    return Records(features, labels.where(there, absent(labels)))
