"""Batches for many replicates at once.

In a public order every replicate reads as many records; in a secret order rounds are padded to one width, with
weight 0 where nothing is.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.random import KeyedCoins, simulation_noise
from fedpriv.loss.objective import Records
from fedpriv.loss.softmax import Block
from fedpriv.participation.orders import Participation, PublicOrder, row_indices
from fedpriv.rounds.round import Read, record_weight

_GATHER_VALUES = 2**20
NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)
"""Row indices where nothing is keyed by them."""


class _Gathered(NamedTuple):
    """The records of the last round that filled a block: the next round reads them where it reads the same."""

    read: list[list[int]] = []  # noqa: RUF012 - never written to
    places: Tensor = torch.empty(0)
    records: Sequence[Records] = ()


class OrderedBatches:
    """The records of every round, gathered block by block and once for all replicates that read the same."""

    def __init__(
        self,
        schedule: PublicOrder,
        shares: Sequence[Sequence[Tensor]],
        silo_weights: Sequence[float],
        batch_sizes: Sequence[int],
        train: Records,
        dtype: torch.dtype,
        there: Tensor | None = None,
        *,
        keyed: bool = False,
    ) -> None:
        """`shares` has each replicate's records of every silo in the silo's order; `dtype` is that of weights.

        Replicates that read the same have the same object there.  `there` says which of the records of `train`
        count, None: all.  `keyed` is for objectives that ask for row indices.
        """
        self._keyed = keyed
        self._schedule, self._silo_weights, self._sizes = schedule, silo_weights, batch_sizes
        self._train, self._dtype, device = train, dtype, train.features.device
        self._there = there
        orders = {  # (places, records of all silos): a row is one batch of their orders
            id(of_silos): torch.cat([share.view(schedule.batches_held, -1) for share in of_silos], dim=1)
            for of_silos in shares
        }
        self._places = torch.stack(list(orders.values()), dim=1).to(device)
        numbered = list(orders)
        self._orders = [numbered.index(id(of_silos)) for of_silos in shares]
        self._pick = torch.tensor(self._orders, device=device)

    def rounds_from(self, first: int) -> Iterator[Read]:
        """The rounds from `first` on; blocks do not depend on it, so that records lie in memory as they would."""
        features, labels = self._train
        block = max(1, _GATHER_VALUES // (self._places[0].numel() * features[0].numel()))
        device = features.device
        spans = [list(self._schedule.batches(t)) for t in range(1, self._schedule.rounds + 1)]
        alike = {count: self._read(count) for count in set(map(len, spans))}
        columns = {count: self._silo_by_silo(count).to(device) for count in alike}
        t, kept = 1, _Gathered()
        for count, members in itertools.groupby(spans, key=len):
            equal, column = list(members), columns[count]
            for start in range(0, len(equal), block):
                read = equal[start : start + block]
                over, t = max(0, first - t), t + len(read)
                if over >= len(read):
                    continue
                if count == 0:
                    yield from itertools.repeat(alike[0], len(read) - over)
                    continue
                if block > 1 or read != kept.read:
                    index = self._places[torch.tensor(read, device=device)]  # (rounds, count, orders, records)
                    index = index.movedim(1, 2).flatten(2)[..., column]
                    gathered: Iterable[Records] = self._of_replicates(Records(features[index], labels[index]))
                    if block == 1:
                        kept = _Gathered(read, index, gathered := list(gathered))
                else:
                    _, index, gathered = kept
                weights = self._weights(alike[count].weights, index)
                rounds = zip(gathered, weights, read, strict=False)
                for records, weight, batches in itertools.islice(rounds, over, None):
                    yield Read(records, weight, alike[count].silos, self._rows(batches))

    def _weights(self, alike: Tensor, index: Tensor) -> Iterable[Tensor]:
        """Round after round, of the records of `index` (rounds, orders, records): 0 where one does not count."""
        if self._there is None:
            return itertools.repeat(alike)
        return (alike * self._there[of_round[self._pick]] for of_round in index)

    def _of_replicates(self, records: Records) -> Iterator[Records]:
        """(rounds, orders, ...) round after round as (replicates, ...)."""
        if records.labels.shape[1] == 1:
            yield from Block(Records(*(column.squeeze(1) for column in records)), len(self._orders)).rounds()
            return
        alike = self._orders == list(range(records.labels.shape[1]))
        for columns in zip(*records, strict=True):
            yield Records(*(columns if alike else (column.index_select(0, self._pick) for column in columns)))

    def _read(self, batches: int) -> Read:
        """A round that reads so many batches of every silo, still without its records."""
        silos = tuple((silo, batches * size) for silo, size in enumerate(self._sizes))
        shares = zip(self._silo_weights, self._sizes, strict=True)
        weights = torch.tensor([record_weight(share, size, batches) for share, size in shares], dtype=self._dtype)
        each = weights.repeat_interleave(torch.tensor([count for _, count in silos]))
        return Read(None, each.to(self._train.features.device), silos, NO_ROWS)

    def _rows(self, batches: Sequence[int]) -> NDArray[np.int64]:
        """Row indices of the records of these batches, silo after silo."""
        if not self._keyed:
            return NO_ROWS
        first, count = batches[0], len(batches)  # batches of a round follow one another
        return np.concatenate([np.arange(first * size, (first + count) * size) for size in self._sizes])

    def _silo_by_silo(self, count: int) -> Tensor:
        """Where to find the records of `count` batches, one batch after another, silo after silo."""
        silos = torch.arange(len(self._sizes)).repeat_interleave(torch.tensor(self._sizes)).repeat(count)
        return silos.argsort(stable=True)


class Sampled(NamedTuple):
    """A round's draw: training records and their weights, both (replicates, width)."""

    records: Tensor
    weights: Tensor
    silos: tuple[tuple[int, int], ...]
    """Silos in the order of their records, (silo, records); none where silos are not kept apart."""
    rows: NDArray[np.int64]
    """Row index of each record in its silo, (replicates, width); 0 where a row is filled up."""


class SampledBatches:
    """Draws, for rounds 1 … T, which training records take part, and their weights.

    The decisions are those of the simulated silos: replicates with the same seeds share them.
    """

    def __init__(
        self,
        schedule: Participation,
        seeds: Sequence[tuple[int, int]],
        shares: Mapping[int, Sequence[Tensor]],
        silo_weights: Sequence[float],
        batch_sizes: Sequence[int],
        *,
        by_silo: bool,
    ) -> None:
        """`seeds` are those of each replicate's records and of its noise, whose key tosses the coins.

        `shares` has the records of every silo in the silo's order, by the seed of records.  `by_silo` gives every
        silo places of its own, as many as in the replicate where it draws most: for objectives that ask whose a
        record is.
        """
        self._schedule, self._silo_weights, self._sizes = schedule, silo_weights, batch_sizes
        distinct = list(dict.fromkeys(seeds))
        self._coins = [simulation_noise(noise, "float32").coins() for _, noise in distinct]
        self._shares = [shares[seed] for seed, _ in distinct]
        self._pick = torch.tensor([distinct.index(pair) for pair in seeds])
        silos = range(len(batch_sizes))
        self._pieces = [[silo] for silo in silos] if by_silo else [list(silos)]
        self._by_silo = by_silo

    def rounds_from(self, first: int) -> Iterator[Sampled]:
        """Iterate over rounds from `first` on."""
        for t in range(first, self._schedule.rounds + 1):
            drawn = [self._drawn(coins, t) for coins in self._coins]
            sizes = torch.tensor([[len(records) for records in silos] for silos in drawn])
            widths = [int(sizes[:, piece].sum(1).max()) for piece in self._pieces]
            index = torch.zeros(len(drawn), sum(widths), dtype=torch.int64)
            weights = torch.zeros(len(drawn), sum(widths), dtype=torch.float64)
            numbers = np.zeros((len(drawn), sum(widths)), np.int64)
            starts = [0, *itertools.accumulate(widths)]
            batches = self._schedule.expected_batches(t)
            of_record = [
                record_weight(*each, batches) for each in zip(self._silo_weights, self._sizes, strict=True)
            ]
            for place, silos in enumerate(drawn):
                for start, piece in zip(starts, self._pieces, strict=False):
                    for silo in piece:
                        stop = start + len(silos[silo])
                        index[place, start:stop] = self._shares[place][silo][silos[silo]]
                        numbers[place, start:stop] = silos[silo]
                        weights[place, start:stop] = of_record[silo]
                        start = stop
            of_silos = tuple(enumerate(widths)) if self._by_silo else ()
            yield Sampled(index[self._pick], weights[self._pick], of_silos, numbers[self._pick])

    def _drawn(self, coins: KeyedCoins, t: int) -> list[NDArray[np.int64]]:
        """The rows of every silo that take part in round t."""
        drawn = (self._schedule.rows(t, size, silo, lambda: coins) for silo, size in enumerate(self._sizes))
        return [row_indices(rows) for rows in drawn]
