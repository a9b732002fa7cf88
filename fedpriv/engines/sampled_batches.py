"""Poisson-sampled batches for many replicates at once: padded to one width, with weight 0 where nothing is."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedpriv.randomness import KeyedCoins, simulation_noise
from fedpriv.rounds import Poisson


class SampledBatches:
    """Iterates over rounds 1 … T: which training records are drawn, and their weights, both (replicates, width).

    The decisions are those of the simulated silos: replicates with the same seed share them.
    """

    def __init__(
        self,
        schedule: Poisson,
        seeds: Sequence[int],
        shares: Mapping[int, Sequence[Tensor]],
        weights: Sequence[float],
    ) -> None:
        """`shares` has each seed's records of every silo in the silo's order, `weights` one a silo's record."""
        self._schedule = schedule
        self._coins = {seed: simulation_noise(seed, "float32").coins() for seed in shares}
        self._sizes = [len(share) for share in shares[seeds[0]]]
        self._records = {seed: torch.cat(list(of_silos)) for seed, of_silos in shares.items()}
        self._weights = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(self._sizes))
        self._pick = torch.tensor([list(shares).index(seed) for seed in seeds])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for t in range(1, self._schedule.rounds + 1):
            drawn = [self._rows(coins, t) for coins in self._coins.values()]
            width = max(map(len, drawn))
            index = torch.zeros(len(drawn), width, dtype=torch.int64)
            weights = torch.zeros(len(drawn), width, dtype=torch.float64)
            for place, (rows, records) in enumerate(zip(drawn, self._records.values(), strict=True)):
                index[place, : len(rows)] = records[rows]
                weights[place, : len(rows)] = self._weights[rows]
            yield index[self._pick], weights[self._pick]

    def _rows(self, coins: KeyedCoins, t: int) -> Tensor:
        """Which of all silos' records, silo after silo, take part in round t."""
        heads = [
            torch.from_numpy(coins.heads(size, self._schedule.rate, silo, t))
            for silo, size in enumerate(self._sizes)
        ]
        return torch.cat(heads).nonzero().squeeze(-1)
