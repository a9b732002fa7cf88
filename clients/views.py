"""A shard as models see it: one record of zeros before a query is on file, and then the records themselves."""

import json

import numpy as np
import torch
from torch import Tensor

from fedpriv.clients.kept import kept
from fedpriv.clients.shard import Shard
from fedpriv.data.placing import secret_order
from fedpriv.objectives import Records
from fedpriv.privacy.unit import USER
from fedpriv.scenario import Cell


class Views:
    """One shard, for any scenario."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._seen = shard, dict[str, Records]()

    def blank(self, cell: Cell) -> Records:
        """One record of zeros in place of all.

        InputError for a model that does not take records of this shape, and for units that these do not tell.

        Guarantee: features and labels of the records are not looked at, only how many persons they are of.
        """
        shard, persons = self._shard, self._shard.persons
        shard.count(cell.privacy.protected)
        image, label = np.zeros_like(shard.images[:1]), np.zeros_like(shard.labels[:1])
        return Shard(image, label, persons=None if persons is None else persons[:1]).seen(cell)

    def records(self, cell: Cell) -> Records:
        """All records, each by itself and by public constants alone."""
        model, unit = cell.model.model_dump(mode="json"), cell.privacy.protected.as_data()
        name = json.dumps([cell.run.dtype, model, unit, cell.data.model_dump(mode="json")], sort_keys=True)
        return kept(self._seen, name, lambda: self._shard.seen(cell))

    def order(self, cell: Cell, key: bytes) -> Tensor | None:
        """Which person is read at each place in the run of this key, (persons,); None where rows have the places.

        Guarantee: names place nobody, see `secret_order`.
        """
        unit = cell.privacy.protected
        return torch.from_numpy(secret_order(key, self._shard.count(unit))) if unit.name == USER.name else None

    def clear(self) -> None:
        """Keep no rows for models: they are made again."""
        self._seen.clear()
