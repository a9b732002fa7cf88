"""Batches in a secret order for many replicates at once: padded to one width, with weight 0 where nothing is."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.participation.base import Participation
from fedpriv.randomness import KeyedCoins, simulation_noise
from fedpriv.running.round_step import record_weight


class Sampled(NamedTuple):
    """What a round draws: training records and their weights, both (replicates, width)."""

    records: Tensor
    weights: Tensor
    rows: tuple[tuple[int, int], ...]
    """The places of each silo's records, (silo, how many) in a row; none where silos are not kept apart."""


class SampledBatches:
    """Iterates over rounds 1 … T: which training records are drawn, and their weights.

    The decisions are those of the simulated silos: replicates with the same seed share them.
    """

    def __init__(
        self,
        schedule: Participation,
        seeds: Sequence[int],
        shares: Mapping[int, Sequence[Tensor]],
        silo_weights: Sequence[float],
        batch_sizes: Sequence[int],
        *,
        by_silo: bool,
    ) -> None:
        """`shares` has each seed's records of every silo in the silo's order.

        `by_silo` gives every silo places of its own, as many as in the replicate where it draws most: for
        objectives that ask whose a record is.
        """
        self._schedule, self._silo_weights, self._sizes = schedule, silo_weights, batch_sizes
        self._coins = [simulation_noise(seed, "float32").coins() for seed in shares]
        self._shares = list(shares.values())
        self._pick = torch.tensor([list(shares).index(seed) for seed in seeds])
        silos = range(len(batch_sizes))
        self._pieces = [[silo] for silo in silos] if by_silo else [list(silos)]
        self._by_silo = by_silo

    def __iter__(self) -> Iterator[Sampled]:
        return self.rounds_from(1)

    def rounds_from(self, first: int) -> Iterator[Sampled]:
        """What iterating gives from round `first` on."""
        for t in range(first, self._schedule.rounds + 1):
            drawn = [self._drawn(coins, share, t) for coins, share in zip(self._coins, self._shares, strict=True)]
            sizes = torch.tensor([[len(records) for records in silos] for silos in drawn])
            widths = [int(sizes[:, piece].sum(1).max()) for piece in self._pieces]
            index = torch.zeros(len(drawn), sum(widths), dtype=torch.int64)
            weights = torch.zeros(len(drawn), sum(widths), dtype=torch.float64)
            starts = [0, *itertools.accumulate(widths)]
            batches = self._schedule.expected_batches(t)
            of_record = [
                record_weight(*each, batches) for each in zip(self._silo_weights, self._sizes, strict=True)
            ]
            for place, silos in enumerate(drawn):
                for start, piece in zip(starts, self._pieces, strict=False):
                    for silo in piece:
                        stop = start + len(silos[silo])
                        index[place, start:stop] = silos[silo]
                        weights[place, start:stop] = of_record[silo]
                        start = stop
            rows = tuple(enumerate(widths)) if self._by_silo else ()
            yield Sampled(index[self._pick], weights[self._pick], rows)

    def _drawn(self, coins: KeyedCoins, shares: Sequence[Tensor], t: int) -> list[Tensor]:
        """The records of every silo that take part in round t."""
        return [
            share[self._schedule.rows(t, size, silo, lambda: coins)]
            for silo, (share, size) in enumerate(zip(shares, self._sizes, strict=True))
        ]
