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

from fedpriv.core.random import SamplingRandomness, seed_key, simulation_noise
from fedpriv.loss.linear import RecordBlock
from fedpriv.loss.objective import Records
from fedpriv.noise.trust import Noise, NoiseSource
from fedpriv.participation.orders import Participation, PublicOrder, as_row_indices
from fedpriv.rounds.round import RoundBatch, record_weight

_MAX_GATHERED_VALUES = 2**20
NO_ROW_INDICES: NDArray[np.int64] = np.empty(0, np.int64)
"""Row indices where nothing is keyed by them."""


class _GatheredBlock(NamedTuple):
    """The records of the last round that filled a block: the next round reads them where it reads the same."""

    batches: list[list[int]] = []  # noqa: RUF012 - never written to
    record_indices: Tensor = torch.empty(0)
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
        with_row_indices: bool = False,
    ) -> None:
        """`shares` has each replicate's records of every silo in the silo's order; `dtype` is that of weights.

        Replicates that read the same have the same object there.  `there` says which of the records of `train`
        count, None: all.  `keyed` is for objectives that ask for row indices.
        """
        self._with_row_indices = with_row_indices
        self._schedule, self._silo_weights, self._batch_sizes = schedule, silo_weights, batch_sizes
        self._train, self._dtype, self._is_present, device = train, dtype, there, train.features.device
        orders = {  # (places, records of all silos): a row is one batch of their orders
            id(of_silos): torch.cat([share.view(schedule.batches_per_silo, -1) for share in of_silos], dim=1)
            for of_silos in shares
        }
        self._record_indices = torch.stack(list(orders.values()), dim=1).to(device)
        numbered = list(orders)
        self._orders = [numbered.index(id(of_silos)) for of_silos in shares]
        self._order_index = torch.tensor(self._orders, device=device)

    def rounds_from(self, first: int) -> Iterator[RoundBatch]:
        """The rounds from `first` on; blocks do not depend on it, so that records lie in memory as they would."""
        features, labels = self._train
        block = max(1, _MAX_GATHERED_VALUES // (self._record_indices[0].numel() * features[0].numel()))
        device = features.device
        spans = [list(self._schedule.batches(t)) for t in range(1, self._schedule.rounds + 1)]
        alike = {count: self._make_empty_batch(count) for count in set(map(len, spans))}
        columns = {count: self._order_by_silo(count).to(device) for count in alike}
        t, kept = 1, _GatheredBlock()
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
                if block > 1 or read != kept.batches:
                    index = self._record_indices[
                        torch.tensor(read, device=device)
                    ]  # (rounds, count, orders, records)
                    index = index.movedim(1, 2).flatten(2)[..., column]
                    gathered: Iterable[Records] = self._expand_replicates(Records(features[index], labels[index]))
                    if block == 1:
                        kept = _GatheredBlock(read, index, gathered := list(gathered))
                else:
                    _, index, gathered = kept
                weights = self._weights_by_round(alike[count].weights, index)
                rounds = zip(gathered, weights, read, strict=False)
                for records, weight, batches in itertools.islice(rounds, over, None):
                    yield RoundBatch(records, weight, alike[count].silo_sizes, self._row_indices(batches))

    def _weights_by_round(self, alike: Tensor, index: Tensor) -> Iterable[Tensor]:
        """Round after round, of the records of `index` (rounds, orders, records): 0 where one does not count."""
        if self._is_present is None:
            return itertools.repeat(alike)
        return (alike * self._is_present[of_round[self._order_index]] for of_round in index)

    def _expand_replicates(self, records: Records) -> Iterator[Records]:
        """(rounds, orders, ...) round after round as (replicates, ...)."""
        if records.labels.shape[1] == 1:
            yield from RecordBlock(
                Records(*(column.squeeze(1) for column in records)), len(self._orders)
            ).split_rounds()
            return
        alike = self._orders == list(range(records.labels.shape[1]))
        for columns in zip(*records, strict=True):
            yield Records(
                *(columns if alike else (column.index_select(0, self._order_index) for column in columns))
            )

    def _make_empty_batch(self, batches: int) -> RoundBatch:
        """A round that reads so many batches of every silo, still without its records."""
        silos = tuple((silo, batches * size) for silo, size in enumerate(self._batch_sizes))
        shares = zip(self._silo_weights, self._batch_sizes, strict=True)
        weights = torch.tensor([record_weight(share, size, batches) for share, size in shares], dtype=self._dtype)
        each = weights.repeat_interleave(torch.tensor([count for _, count in silos]))
        return RoundBatch(None, each.to(self._train.features.device), silos, NO_ROW_INDICES)

    def _row_indices(self, batches: Sequence[int]) -> NDArray[np.int64]:
        """Row indices of the records of these batches, silo after silo."""
        if not self._with_row_indices:
            return NO_ROW_INDICES
        first, count = batches[0], len(batches)  # batches of a round follow one another
        return np.concatenate([np.arange(first * size, (first + count) * size) for size in self._batch_sizes])

    def _order_by_silo(self, count: int) -> Tensor:
        """Where to find the records of `count` batches, one batch after another, silo after silo."""
        sizes = torch.tensor(self._batch_sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes).repeat(count).argsort(stable=True)


class SampledRound(NamedTuple):
    """A round's draw: training records and their weights, both (replicates, width)."""

    record_indices: Tensor
    weights: Tensor
    silo_sizes: tuple[tuple[int, int], ...]
    """Silos in the order of their records, (silo, records); none where silos are not kept apart."""
    row_indices: NDArray[np.int64]
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
        self._schedule, self._silo_weights, self._batch_sizes = schedule, silo_weights, batch_sizes
        distinct = list(dict.fromkeys(seeds))
        self._sampling_randomness = [
            simulation_noise(noise, "float32").sampling_randomness() for _, noise in distinct
        ]
        self._silo_rows = [shares[seed] for seed, _ in distinct]
        self._draw_index = torch.tensor([distinct.index(pair) for pair in seeds])
        silos = range(len(batch_sizes))
        self._pieces = [[silo] for silo in silos] if by_silo else [list(silos)]
        self._by_silo = by_silo

    def rounds_from(self, first: int) -> Iterator[SampledRound]:
        """Iterate over rounds from `first` on."""
        for t in range(first, self._schedule.rounds + 1):
            drawn = [self._select_rows(coins, t) for coins in self._sampling_randomness]
            sizes = torch.tensor([[len(records) for records in silos] for silos in drawn])
            widths = [int(sizes[:, piece].sum(1).max()) for piece in self._pieces]
            index = torch.zeros(len(drawn), sum(widths), dtype=torch.int64)
            weights = torch.zeros(len(drawn), sum(widths), dtype=torch.float64)
            numbers = np.zeros((len(drawn), sum(widths)), np.int64)
            starts, batches = [0, *itertools.accumulate(widths)], self._schedule.expected_batches(t)
            of_record = [
                record_weight(*each, batches) for each in zip(self._silo_weights, self._batch_sizes, strict=True)
            ]
            for place, silos in enumerate(drawn):
                for start, piece in zip(starts, self._pieces, strict=False):
                    for silo in piece:
                        stop = start + len(silos[silo])
                        index[place, start:stop] = self._silo_rows[place][silo][silos[silo]]
                        numbers[place, start:stop] = silos[silo]
                        weights[place, start:stop] = of_record[silo]
                        start = stop
            yield SampledRound(
                index[self._draw_index],
                weights[self._draw_index],
                tuple(enumerate(widths)) if self._by_silo else (),
                numbers[self._draw_index],
            )

    def _select_rows(self, coins: SamplingRandomness, t: int) -> list[NDArray[np.int64]]:
        """The rows of every silo that take part in round t."""
        return [
            as_row_indices(self._schedule.select_rows(t, size, silo, lambda: coins))
            for silo, size in enumerate(self._batch_sizes)
        ]


_AGGREGATE_PARTY = 0xFFFF_FFFE  # an owner number of its own: never the stream of a silo or of the server
_MAX_BLOCK_VALUES = 2**21
_MAX_BLOCK_ROUNDS = 256
_MAX_DEVICE_VALUES = 2**22  # normals that a device holds at a time, beside their sum
_PREFETCHED_BLOCKS = (
    2  # blocks; one thread draws them, since a second one would fight the first for the interpreter
)

_CPU = torch.device("cpu")


def aggregate_noise(noise: Noise) -> Noise:
    """One source in place of all, equal in distribution in the mean only.

    Valid while no silo is missing and nobody looks at one silo's messages: variance Σ p_i² σ_i².
    """
    return Noise((NoiseSource(_AGGREGATE_PARTY, noise.std_in_mean, 1.0),)) if noise.sources else noise


@dataclass(frozen=True)
class NoiseSum:
    """A seed and the owners whose vectors are summed with relative weights (the first has weight 1)."""

    seed: int
    parties: tuple[int, ...]
    relative_weights: tuple[float, ...]


_SumSampler = Callable[[Sequence[int], int], Tensor]
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
        unscaled: bool = False,
    ) -> None:
        if not all(noise.sources for noise in noises):
            raise ValueError("every replicate of a feed must have a noise source")
        streams = [_make_noise_sum(noise, seed) for noise, seed in zip(noises, seeds, strict=True)]
        self._noise_sums = list(dict.fromkeys(streams))
        self._sum_indices = [self._noise_sums.index(stream) for stream in streams]
        self._sum_index = torch.tensor(self._sum_indices).to(device)
        self._scale = torch.tensor([[_amplitude(noise)] for noise in noises], dtype=dtype).to(device)
        self._unscaled = unscaled and len(self._noise_sums) == 1 < len(noises)
        self._on_cpu = device.type == "cpu"
        self._samplers = [
            _make_host_sums(one, size, dtype) if self._on_cpu else DeviceSums(one, size, dtype, device)
            for one in self._noise_sums
        ]
        self._rounds, self._dimension, self._draw_count = rounds, size, draws
        most = max(draws(t) or 1 for t in range(1, rounds + 1))
        longest = min(_MAX_BLOCK_ROUNDS, _MAX_BLOCK_VALUES // (size * len(streams) * most))
        self._block_rounds = max(1, min(longest, rounds // (2 * _PREFETCHED_BLOCKS)))

    @property
    def amplitude(self) -> Tensor | None:
        """The factor of the vectors, (replicates, 1); None where replicates add them as they are."""
        return self._scale if self._unscaled else None

    def rounds_from(self, first: int) -> Iterator[Tensor]:
        """Iterate over rounds from `first` on, in the same blocks: its block is drawn from its start.

        Round 1 is a block of its own, and nothing is drawn ahead until it is over: a clock that starts then sees
        all draws of the rounds after it.
        """
        over = 0 if first == 1 else (first - 2) % self._block_rounds
        return itertools.islice(self._prefetch(first - over), over, None)

    def _prefetch(self, first: int) -> Iterator[Tensor]:
        if first == 1:
            yield from self._draw_block(range(1, 2))
            first = 2
        blocks = (
            range(start, min(start + self._block_rounds, self._rounds + 1))
            for start in range(first, self._rounds + 1, self._block_rounds)
        )
        if not self._on_cpu:  # a device queues what it is asked for, and works ahead by itself
            for block in blocks:
                yield from self._draw_block(block)
            return
        with ThreadPoolExecutor(max_workers=1) as pool:
            ahead: deque[Future[list[Tensor]]] = deque()
            for block in blocks:
                ahead.append(pool.submit(self._draw_block, block))
                if len(ahead) > _PREFETCHED_BLOCKS:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()

    def _draw_block(self, rounds: range) -> list[Tensor]:
        """For each round of a block the vectors of all replicates."""
        if self._draw_count(rounds.start) is None:
            return list(self._scale_vectors(self._draw_vectors(rounds, node=0)))
        counts = {t: self._draw_count(t) or 0 for t in rounds}
        drawn: dict[int, list[Tensor]] = {t: [] for t in rounds}
        for node in range(max(counts.values())):
            needed = [t for t in rounds if counts[t] > node]
            for t, vectors in zip(needed, self._draw_vectors(needed, node), strict=True):
                drawn[t].append(vectors)
        return [self._scale_vectors(torch.stack(nodes)) for nodes in drawn.values()]

    def _scale_vectors(self, vectors: Tensor) -> Tensor:
        """(…, streams, d) as every replicate adds it, (…, replicates, d), but for `amplitude`."""
        if self._unscaled:
            return vectors
        if self._sum_indices == list(range(len(self._noise_sums))):
            return vectors.mul_(self._scale)
        if len(self._noise_sums) == 1:
            return vectors * self._scale
        return vectors.index_select(-2, self._sum_index).mul_(self._scale)

    def _draw_vectors(self, rounds: Sequence[int], node: int) -> Tensor:
        """One vector a round and stream: (rounds, streams, d)."""
        return (
            self._samplers[0](rounds, node).unsqueeze(1)
            if len(self._samplers) == 1
            else torch.stack([sums(rounds, node) for sums in self._samplers], dim=1)
        )


def _make_host_sums(stream: NoiseSum, size: int, dtype: torch.dtype) -> _SumSampler:
    kind = np.dtype(np.float32 if dtype == torch.float32 else np.float64)
    source = simulation_noise(stream.seed, kind)

    def sums(rounds: Sequence[int], node: int) -> Tensor:
        if len(stream.parties) == 1:
            return torch.from_numpy(source.vectors(size, stream.parties * len(rounds), rounds, node))
        out = np.empty((len(rounds), size), kind)
        for row, t in zip(out, rounds, strict=True):
            source.weighted_sum(size, stream.parties, stream.relative_weights, t, node, row)
        return torch.from_numpy(out)

    return sums


class DeviceSums:
    """A stream's noise, drawn by the generator of a device.

    Each vector is a function of seed, owners, round and node, so that a run can be resumed.  The generator is
    torch's and no cipher: simulations alone draw here, and nothing that leaves a silo or a server.
    """

    def __init__(self, stream: NoiseSum, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._noise_sum, self._generator = stream, Generator(device)
        self._weights = torch.tensor(stream.relative_weights, dtype=dtype).to(device)
        self._make_zeros = partial(torch.zeros, dtype=dtype, device=device)
        self._draw_normals = partial(torch.randn, dtype=dtype, device=device)
        self._dimension = size

    def __call__(self, rounds: Sequence[int], node: int) -> Tensor:
        sums = self._make_zeros(len(rounds), self._dimension)
        for row, t in zip(sums, rounds, strict=True):
            key = seed_key(
                self._noise_sum.seed, "noise of a device", str(self._noise_sum.parties), str(t), str(node)
            )
            generator = self._generator.manual_seed(int.from_bytes(key[:8], "big") >> 1)
            for weights in torch.split(self._weights, max(1, _MAX_DEVICE_VALUES // self._dimension)):
                row += weights @ self._draw_normals(len(weights), self._dimension, generator=generator)
        return sums


def _amplitude(noise: Noise) -> float:
    first = noise.sources[0]
    return first.weight * float(first.std)


def _make_noise_sum(noise: Noise, seed: int) -> NoiseSum:
    unit = _amplitude(noise)
    return NoiseSum(
        seed,
        tuple(source.party for source in noise.sources),
        tuple(source.weight * float(source.std) / unit for source in noise.sources),
    )
