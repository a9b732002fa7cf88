"""The mean of the silos' noise for many replicates, drawn ahead of time on another core, or on the device.

Noise does not depend on the trajectory, so blocks of rounds are drawn in a thread (NumPy and OpenSSL release the
interpreter lock) while the current block is consumed.  Replicates that differ only in how much noise they add
share their draws, since a stream is keyed by the seed: the same vectors, scaled.

A device draws noise by its own generator, without copies: other numbers of the same distribution.

Batches for many replicates at once.

In a public order every replicate reads as many records; in a secret order rounds are padded to one width, with
weight 0 where nothing is.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fedpriv.core.random import KeyedCoins, seed_key, simulation_noise
from fedpriv.loss.linear import Block
from fedpriv.loss.objective import Records
from fedpriv.noise.trust import Noise, NoiseSource
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
        self._train, self._dtype, self._there, device = train, dtype, there, train.features.device
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
        sizes = torch.tensor(self._sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes).repeat(count).argsort(stable=True)


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
            starts, batches = [0, *itertools.accumulate(widths)], self._schedule.expected_batches(t)
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
            yield Sampled(
                index[self._pick],
                weights[self._pick],
                tuple(enumerate(widths)) if self._by_silo else (),
                numbers[self._pick],
            )

    def _drawn(self, coins: KeyedCoins, t: int) -> list[NDArray[np.int64]]:
        """The rows of every silo that take part in round t."""
        return [
            row_indices(self._schedule.rows(t, size, silo, lambda: coins)) for silo, size in enumerate(self._sizes)
        ]


_AGGREGATE = 0xFFFF_FFFE  # an owner number of its own: never the stream of a silo or of the server
_BLOCK_VALUES = 2**21
_LONGEST_BLOCK = 256
_DEVICE_VALUES = 2**22  # normals that a device holds at a time, beside their sum
_AHEAD = 2  # blocks; one thread draws them, since a second one would fight the first for the interpreter

_CPU = torch.device("cpu")


def aggregate(noise: Noise) -> Noise:
    """One source in place of all, equal in distribution in the mean only.

    Valid while no silo is missing and nobody looks at one silo's messages: variance Σ p_i² σ_i².
    """
    return Noise((NoiseSource(_AGGREGATE, noise.std_in_mean, 1.0),)) if noise.sources else noise


@dataclass(frozen=True)
class NoiseSum:
    """A seed and the owners whose vectors are summed with relative weights (the first has weight 1)."""

    seed: int
    owners: tuple[int, ...]
    relative: tuple[float, ...]


_Sums = Callable[[Sequence[int], int], Tensor]
"""(rounds, node) → the stream's vector of each round, (rounds, d)."""


class NoiseFeed:
    """Draws the noise of rounds 1 … T: for each the fresh vectors (replicates, d), summed over owners.

    Where `draws(t)`, of the mechanism, is a number, there are as many: (draws, replicates, d).  With `in_units`
    replicates that share all draws have them once, (1, d), still to be multiplied by `amplitude`.
    """

    def __init__(
        self,
        noises: Sequence[Noise],
        seeds: Sequence[int],
        rounds: int,
        size: int,
        dtype: torch.dtype,
        draws: Callable[[int], int | None],
        device: torch.device = _CPU,
        *,
        in_units: bool = False,
    ) -> None:
        if not all(noise.sources for noise in noises):
            raise ValueError("every replicate of a feed must have a noise source")
        streams = [_stream(noise, seed) for noise, seed in zip(noises, seeds, strict=True)]
        self._streams = list(dict.fromkeys(streams))
        self._pick = [self._streams.index(stream) for stream in streams]
        self._picked = torch.tensor(self._pick).to(device)
        self._scale = torch.tensor([[_amplitude(noise)] for noise in noises], dtype=dtype).to(device)
        self._in_units = in_units and len(self._streams) == 1 < len(noises)
        self._on_cpu = device.type == "cpu"
        self._sums = [
            _host_sums(one, size, dtype) if self._on_cpu else DeviceSums(one, size, dtype, device)
            for one in self._streams
        ]
        self._rounds, self._size, self._draws = rounds, size, draws
        most = max(draws(t) or 1 for t in range(1, rounds + 1))
        longest = min(_LONGEST_BLOCK, _BLOCK_VALUES // (size * len(streams) * most))
        self._block = max(1, min(longest, rounds // (2 * _AHEAD)))

    @property
    def amplitude(self) -> Tensor | None:
        """The factor of the vectors, (replicates, 1); None where replicates add them as they are."""
        return self._scale if self._in_units else None

    def rounds_from(self, first: int) -> Iterator[Tensor]:
        """Iterate over rounds from `first` on, in the same blocks: its block is drawn from its start.

        Round 1 is a block of its own, and nothing is drawn ahead until it is over: a clock that starts then sees
        all draws of the rounds after it.
        """
        over = 0 if first == 1 else (first - 2) % self._block
        return itertools.islice(self._drawn_ahead(first - over), over, None)

    def _drawn_ahead(self, first: int) -> Iterator[Tensor]:
        if first == 1:
            yield from self._draw(range(1, 2))
            first = 2
        blocks = (
            range(start, min(start + self._block, self._rounds + 1))
            for start in range(first, self._rounds + 1, self._block)
        )
        if not self._on_cpu:  # a device queues what it is asked for, and works ahead by itself
            for block in blocks:
                yield from self._draw(block)
            return
        with ThreadPoolExecutor(max_workers=1) as pool:
            ahead: deque[Future[list[Tensor]]] = deque()
            for block in blocks:
                ahead.append(pool.submit(self._draw, block))
                if len(ahead) > _AHEAD:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()

    def _draw(self, rounds: range) -> list[Tensor]:
        """For each round of a block the vectors of all replicates."""
        if self._draws(rounds.start) is None:
            return list(self._scaled(self._vectors(rounds, node=0)))
        counts = {t: self._draws(t) or 0 for t in rounds}
        drawn: dict[int, list[Tensor]] = {t: [] for t in rounds}
        for node in range(max(counts.values())):
            needed = [t for t in rounds if counts[t] > node]
            for t, vectors in zip(needed, self._vectors(needed, node), strict=True):
                drawn[t].append(vectors)
        return [self._scaled(torch.stack(nodes)) for nodes in drawn.values()]

    def _scaled(self, vectors: Tensor) -> Tensor:
        """(…, streams, d) as every replicate adds it, (…, replicates, d), but for `amplitude`."""
        if self._in_units:
            return vectors
        if self._pick == list(range(len(self._streams))):
            return vectors.mul_(self._scale)
        if len(self._streams) == 1:
            return vectors * self._scale
        return vectors.index_select(-2, self._picked).mul_(self._scale)

    def _vectors(self, rounds: Sequence[int], node: int) -> Tensor:
        """One vector a round and stream: (rounds, streams, d)."""
        return (
            self._sums[0](rounds, node).unsqueeze(1)
            if len(self._sums) == 1
            else torch.stack([sums(rounds, node) for sums in self._sums], dim=1)
        )


def _host_sums(stream: NoiseSum, size: int, dtype: torch.dtype) -> _Sums:
    kind = np.dtype(np.float32 if dtype == torch.float32 else np.float64)
    source = simulation_noise(stream.seed, kind)

    def sums(rounds: Sequence[int], node: int) -> Tensor:
        if len(stream.owners) == 1:
            return torch.from_numpy(source.vectors(size, stream.owners * len(rounds), rounds, node))
        out = np.empty((len(rounds), size), kind)
        for row, t in zip(out, rounds, strict=True):
            source.weighted_sum(size, stream.owners, stream.relative, t, node, row)
        return torch.from_numpy(out)

    return sums


class DeviceSums:
    """A stream's noise, drawn by the generator of a device.

    Each vector is a function of seed, owners, round and node, so that a run can be resumed.  The generator is
    torch's and no cipher: simulations alone draw here, and nothing that leaves a silo or a server.
    """

    def __init__(self, stream: NoiseSum, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._stream, self._generator = stream, Generator(device)
        self._weights = torch.tensor(stream.relative, dtype=dtype).to(device)
        self._sums = partial(torch.zeros, dtype=dtype, device=device)
        self._normals = partial(torch.randn, dtype=dtype, device=device)
        self._size = size

    def __call__(self, rounds: Sequence[int], node: int) -> Tensor:
        sums = self._sums(len(rounds), self._size)
        for row, t in zip(sums, rounds, strict=True):
            key = seed_key(self._stream.seed, "noise of a device", str(self._stream.owners), str(t), str(node))
            generator = self._generator.manual_seed(int.from_bytes(key[:8], "big") >> 1)
            for weights in torch.split(self._weights, max(1, _DEVICE_VALUES // self._size)):
                row += weights @ self._normals(len(weights), self._size, generator=generator)
        return sums


def _amplitude(noise: Noise) -> float:
    first = noise.sources[0]
    return first.weight * float(first.std)


def _stream(noise: Noise, seed: int) -> NoiseSum:
    unit = _amplitude(noise)
    return NoiseSum(
        seed,
        tuple(source.owner for source in noise.sources),
        tuple(source.weight * float(source.std) / unit for source in noise.sources),
    )
