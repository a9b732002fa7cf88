"""A shard as a scenario sees it, and what is kept of that between answers, which changes none of them."""

import json
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedpriv.data.partition import secret_order
from fedpriv.loss.objective import Records
from fedpriv.noise.trust import USER
from fedpriv.scenario.schema import Cell
from fedpriv.silo.shard import Shard

_KEPT = 4
Kept = TypeVar("Kept")


def kept(things: dict[str, Kept], name: str, build: Callable[[], Kept]) -> Kept:
    """`things[name]`, built if it is not there; the oldest of too many is let go."""
    if name not in things:
        things[name] = build()
        while len(things) > _KEPT:
            del things[next(iter(things))]
    return things[name]


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
        cells = None if shard.cells is None else np.zeros_like(shard.cells[:1])
        one = Shard(image, label, persons=None if persons is None else persons[:1], cells=cells)
        return one.seen(cell)

    def records(self, cell: Cell) -> Records:
        """All records, each by itself and by public constants alone."""
        model, unit = cell.model.model_dump(mode="json"), cell.privacy.protected.as_data()
        name = json.dumps([cell.run.dtype, model, unit, cell.data.model_dump(mode="json")], sort_keys=True)
        return kept(self._seen, name, lambda: self._shard.seen(cell))

    def order(self, cell: Cell, key: bytes) -> Tensor | None:
        """The person read at each place in the run of this key, (persons,); None where rows have the places.

        Guarantee: names place nobody, see `secret_order`.
        """
        unit = cell.privacy.protected
        return torch.from_numpy(secret_order(key, self._shard.count(unit))) if unit.name == USER.name else None

    def clear(self) -> None:
        """Keep no rows for models: they are made again."""
        self._seen.clear()
