"""Records and noise vectors of the rounds of many replicates.

A replicate is one of the runs that are computed together, with the same rounds and batch sizes.  A silo is a party
that holds records, and a party that adds noise is a silo, the server, or one in place of all of them
(`aggregate_noise`).  A mechanism correlates fresh noise over rounds.

Batches: in a public order, every replicate reads equally many records in a round (`OrderedBatches`).  If the
rounds of records are drawn, rows are padded to one width with records of weight 0 (`SampledBatches`).

Noise: `NoiseFeed` draws the mean of the parties' fresh noise vectors, Σ_j p_j σ_j z_{j,t}.  Here z_{j,t}, (d,), is
the standard normal vector of party j in round t of T, σ_j the standard deviation of its noise, and p_j its weight
in the mean.  If a mechanism takes several vectors in a round, the number of a vector, from 0, is called its node.
The sum with the relative weights p_j σ_j / (p_1 σ_1) is a noise stream, which replicates can share, each with its
own amplitude p_1 σ_1.
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
"""Most feature values of a block with one batch in each round, unless a single round has more."""
NO_ROW_INDICES: NDArray[np.int64] = np.empty(0, np.int64)
"""Row indices for objectives that do not need them."""


class _GatheredBlock(NamedTuple):
    """Records of the last single-round block, reused if the next round reads the same batches."""

    batches: list[list[int]] = []  # noqa: RUF012 - never written to
    """Numbers of the batches that each round of the block reads."""
    record_indices: Tensor = torch.empty(0)
    """Indices in the training records, (rounds, orders, records)."""
    records: Sequence[Records] = ()
    """Records of each round of the block."""


class OrderedBatches:
    """Records of each round in a public order, gathered in blocks of rounds.

    Records are gathered once for each order of records, which several replicates may share.
    """

    def __init__(
        self,
        schedule: PublicOrder,
        rows_by_replicate: Sequence[Sequence[Tensor]],
        silo_weights: Sequence[float],
        batch_sizes: Sequence[int],
        train: Records,
        dtype: torch.dtype,
        presence: Tensor | None = None,
        *,
        with_row_indices: bool = False,
    ) -> None:
        """Set up the batches of replicates.

        Args:
            schedule: Public order, which gives the numbers of the batches that every silo reads in a round.
            rows_by_replicate: For each replicate the indices in `train` of each silo's records, in the order in
                which the silo reads them.  Replicates share an order if they have the same object.
            silo_weights: Weight p_i of each silo in the mean over silos.
            batch_sizes: Number of records of each silo in a batch.
            train: Training records of all silos, on the device of the batches.
            dtype: Type of the weights.
            presence: Whether each record of `train` counts, or None if all count.
            with_row_indices: Whether the objective needs row indices.
        """
        self._with_row_indices = with_row_indices
        self._schedule, self._silo_weights, self._batch_sizes = schedule, silo_weights, batch_sizes
        self._train, self._dtype, self._is_present, device = train, dtype, presence, train.features.device
        # Orders by identity, (batches, records of all silos) each: one row is one batch of each silo.
        orders = {
            id(silo_rows): torch.cat([rows.view(schedule.batches_per_silo, -1) for rows in silo_rows], dim=1)
            for silo_rows in rows_by_replicate
        }
        self._record_indices = torch.stack(list(orders.values()), dim=1).to(device)
        order_ids = list(orders)
        self._orders = [order_ids.index(id(silo_rows)) for silo_rows in rows_by_replicate]
        self._order_index = torch.tensor(self._orders, device=device)

    def rounds_from(self, first_round: int) -> Iterator[RoundBatch]:
        """Gather the records and weights of each round from `first_round` on.

        A round has B records for each replicate, (replicates, B, ...), sorted by silo.  Weights are (B,), or
        (replicates, B) with `presence`.  A round without batches has no records, and weights (0,).

        Consecutive rounds with the same number of batches are gathered in blocks, which do not depend on
        `first_round`, so that records have the same memory layout as in a run from round 1.  A block of one round
        is used again while rounds read the same batches.
        """
        features, labels = self._train
        rounds_per_block = max(1, _MAX_GATHERED_VALUES // (self._record_indices[0].numel() * features[0].numel()))
        device = features.device
        spans = [list(self._schedule.batches(t)) for t in range(1, self._schedule.rounds + 1)]
        empty_batches = {count: self._make_empty_batch(count) for count in set(map(len, spans))}
        silo_orders = {count: self._order_by_silo(count).to(device) for count in empty_batches}
        # Blocks of rounds with the same number of batches.  `t` is the first round of the next block.
        t, cached_block = 1, _GatheredBlock()
        for count, count_spans in itertools.groupby(spans, key=len):
            equal_spans, silo_order = list(count_spans), silo_orders[count]
            for start in range(0, len(equal_spans), rounds_per_block):
                block_spans = equal_spans[start : start + rounds_per_block]
                skip_count, t = max(0, first_round - t), t + len(block_spans)
                if skip_count >= len(block_spans):
                    continue
                if count == 0:
                    yield from itertools.repeat(empty_batches[0], len(block_spans) - skip_count)
                    continue
                if rounds_per_block > 1 or block_spans != cached_block.batches:
                    # (rounds, count, orders, records)
                    index = self._record_indices[torch.tensor(block_spans, device=device)]
                    index = index.movedim(1, 2).flatten(2)[..., silo_order]
                    round_records: Iterable[Records] = self._expand_replicates(
                        Records(features[index], labels[index])
                    )
                    if rounds_per_block == 1:
                        cached_block = _GatheredBlock(block_spans, index, round_records := list(round_records))
                else:
                    _, index, round_records = cached_block
                weights = self._weights_by_round(empty_batches[count].weights, index)
                # Not strict, because weights that are the same in all rounds repeat without end.
                rounds = zip(round_records, weights, block_spans, strict=False)
                for records, weight, batches in itertools.islice(rounds, skip_count, None):
                    yield RoundBatch(records, weight, empty_batches[count].silo_sizes, self._row_indices(batches))

    def _weights_by_round(self, weights: Tensor, index: Tensor) -> Iterable[Tensor]:
        """Return the weights of each round, with 0 for records that do not count.

        They are (replicates, records).  Without `presence` the same weights, (records,), are repeated without end.

        Args:
            weights: Weights of the records of a round, (records,).
            index: Indices of the records in `train`, (rounds, orders, records).
        """
        if self._is_present is None:
            return itertools.repeat(weights)
        return (weights * self._is_present[round_index[self._order_index]] for round_index in index)

    def _expand_replicates(self, records: Records) -> Iterator[Records]:
        """Yield for each round the records of the replicates, (replicates, ...), from those of their orders.

        Args:
            records: Records of each round and order, (rounds, orders, ...).
        """
        # One order: all replicates get views of the same records.
        if records.labels.shape[1] == 1:
            yield from RecordBlock(
                Records(*(column.squeeze(1) for column in records)), len(self._orders)
            ).split_rounds()
            return
        # Several orders: each replicate gets a copy of the records in its order, unless no two share one.
        is_identity = self._orders == list(range(records.labels.shape[1]))  # each replicate has its own order
        for columns in zip(*records, strict=True):
            yield Records(
                *(columns if is_identity else (column.index_select(0, self._order_index) for column in columns))
            )

    def _make_empty_batch(self, batch_count: int) -> RoundBatch:
        """Make a `RoundBatch` with weights and sizes but no records, for `batch_count` batches of every silo."""
        silos = tuple((silo, batch_count * size) for silo, size in enumerate(self._batch_sizes))
        shares = zip(self._silo_weights, self._batch_sizes, strict=True)
        weights = torch.tensor(
            [record_weight(share, size, batch_count) for share, size in shares], dtype=self._dtype
        )
        record_weights = weights.repeat_interleave(torch.tensor([count for _, count in silos]))
        return RoundBatch(None, record_weights.to(self._train.features.device), silos, NO_ROW_INDICES)

    def _row_indices(self, batches: Sequence[int]) -> NDArray[np.int64]:
        """Return the row indices of these batches, silo by silo, or none if they are not needed."""
        if not self._with_row_indices:
            return NO_ROW_INDICES
        first_batch, count = batches[0], len(batches)  # the batches of a round are consecutive
        return np.concatenate(
            [np.arange(first_batch * size, (first_batch + count) * size) for size in self._batch_sizes]
        )

    def _order_by_silo(self, batch_count: int) -> Tensor:
        """Return the permutation that sorts the records of `batch_count` consecutive batches by silo."""
        sizes = torch.tensor(self._batch_sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes).repeat(batch_count).argsort(stable=True)


class SampledRound(NamedTuple):
    """Sampled round: training records and their weights, with one row for each replicate."""

    record_indices: Tensor
    """Indices in the training records, (replicates, width), and 0 for padding."""
    weights: Tensor
    """Weight of each record in the mean over silos, (replicates, width), and 0 for padding."""
    silo_sizes: tuple[tuple[int, int], ...]
    """Silos in the order of their columns, as (silo, number of columns, padding included).

    Empty if the records are not sorted by silo.
    """
    row_indices: NDArray[np.int64]
    """Row index of each record in its silo, (replicates, width), and 0 for padding."""


class SampledBatches:
    """Training records that take part in rounds 1 … T, drawn as the simulated silos would draw them.

    Replicates with the same pair of seeds have the same records, which are drawn once.
    """

    def __init__(
        self,
        schedule: Participation,
        seeds: Sequence[tuple[int, int]],
        rows_by_seed: Mapping[int, Sequence[Tensor]],
        silo_weights: Sequence[float],
        batch_sizes: Sequence[int],
        *,
        by_silo: bool,
    ) -> None:
        """Set up the sampling.

        Args:
            schedule: Participation of the records.
            seeds: For each replicate the seed of its records and the seed of its noise and selections.
            rows_by_seed: For each seed of records the indices of each silo's training records, in the silo's
            order.
            silo_weights: Weight of each silo in the mean over silos.
            batch_sizes: Number of records of each silo in a batch, expected if sampled.
            by_silo: Whether each silo has its own columns, as local steps and absent silos need them.
        """
        self._schedule, self._silo_weights, self._batch_sizes = schedule, silo_weights, batch_sizes
        distinct = list(dict.fromkeys(seeds))
        self._sampling_randomness = [
            simulation_noise(noise, "float32").sampling_randomness() for _, noise in distinct
        ]
        self._silo_rows = [rows_by_seed[seed] for seed, _ in distinct]
        self._draw_index = torch.tensor([distinct.index(pair) for pair in seeds])
        silos = range(len(batch_sizes))
        # Groups of silos that share columns: one for each silo, or a single one.
        self._pieces = [[silo] for silo in silos] if by_silo else [list(silos)]
        self._by_silo = by_silo

    def rounds_from(self, first_round: int) -> Iterator[SampledRound]:
        """Draw the participating records and their weights in each round from `first_round` on.

        A draw is one selection of records for all replicates with the same seeds.  Each silo has columns of its
        own if `by_silo`, and otherwise all silos share the columns, as many as the largest draw needs.  Other
        draws are padded with records of weight 0.
        """
        for t in range(first_round, self._schedule.rounds + 1):
            selections = [self._select_rows(randomness, t) for randomness in self._sampling_randomness]
            sizes = torch.tensor([[len(records) for records in silo_selections] for silo_selections in selections])
            widths = [int(sizes[:, silo_group].sum(1).max()) for silo_group in self._pieces]
            # One row for each draw, and 0 for padding.
            index = torch.zeros(len(selections), sum(widths), dtype=torch.int64)
            weights = torch.zeros(len(selections), sum(widths), dtype=torch.float64)
            row_indices = np.zeros((len(selections), sum(widths)), np.int64)
            starts, batches = [0, *itertools.accumulate(widths)], self._schedule.expected_batches(t)
            weight_by_silo = [
                record_weight(*weight_and_size, batches)
                for weight_and_size in zip(self._silo_weights, self._batch_sizes, strict=True)
            ]
            for draw, silo_selections in enumerate(selections):
                # Not strict, because `starts` ends with the end of the last columns.
                for start, silo_group in zip(starts, self._pieces, strict=False):
                    for silo in silo_group:
                        stop = start + len(silo_selections[silo])
                        index[draw, start:stop] = self._silo_rows[draw][silo][silo_selections[silo]]
                        row_indices[draw, start:stop] = silo_selections[silo]
                        weights[draw, start:stop] = weight_by_silo[silo]
                        start = stop
            yield SampledRound(
                index[self._draw_index],
                weights[self._draw_index],
                tuple(enumerate(widths)) if self._by_silo else (),
                row_indices[self._draw_index],
            )

    def _select_rows(self, randomness: SamplingRandomness, t: int) -> list[NDArray[np.int64]]:
        """Draw the row indices of each silo's records that take part in round t."""
        return [
            as_row_indices(self._schedule.select_rows(t, size, silo, lambda: randomness))
            for silo, size in enumerate(self._batch_sizes)
        ]


_AGGREGATE_PARTY = 0xFFFF_FFFE  # a reserved party number, so that no silo's or server's stream is reused
_MAX_BLOCK_VALUES = 2**21
_MAX_BLOCK_ROUNDS = 256
_MAX_DEVICE_VALUES = 2**22  # most normal values that a device draws at a time, unless one vector has more
# One thread draws these blocks, since a second one would fight the first for the interpreter.
_PREFETCHED_BLOCKS = 2

_CPU = torch.device("cpu")


def aggregate_noise(noise: Noise) -> Noise:
    """Replace all noise sources by one whose noise in the mean has the same distribution.

    The variance is Σ_j p_j² σ_j² over the noise sources j.  If silos add the noise, the replacement is valid only
    while no silo is absent, and no single message is read.  Noise without sources is returned unchanged.
    """
    return Noise((NoiseSource(_AGGREGATE_PARTY, noise.std_in_mean, 1.0),)) if noise.sources else noise


@dataclass(frozen=True)
class NoiseSum:
    """Noise stream: the weighted sum of the standard normal vectors of some parties."""

    seed: int
    """Seed of the noise."""
    parties: tuple[int, ...]
    """Numbers of the parties whose vectors are summed."""
    relative_weights: tuple[float, ...]
    """Factor of each party's vector, relative to the first, whose factor is 1."""


_SumSampler = Callable[[Sequence[int], int], Tensor]
"""(rounds, number of the vector in its round) → the stream's vector of each round, (rounds, d)."""


class NoiseFeed:
    """Noise of rounds 1 … T: for each round the parties' weighted sum of fresh vectors, (replicates, d).

    If the mechanism's `draws(t)` is a number, a round has that many sums: (draws, replicates, d).  With
    `unscaled`, two or more replicates that all share one noise stream get its vectors once, (1, d) or
    (draws, 1, d), and have to multiply them by the property `amplitude`.
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
        """Set up the noise of replicates.

        Args:
            noises: Noise sources of each replicate (party, standard deviation, weight in the mean).
            seeds: Seed of each replicate's noise.
            rounds: Number of rounds T.
            size: Length d of a vector.
            dtype: Type of the vectors.
            draws: Function of t that returns the number of vectors of round t, or None in every round for a single
                vector without the axis of draws.
            device: Device of the vectors.
            unscaled: Whether the caller multiplies the vectors by `amplitude` if this property is not None.

        Raises:
            ValueError: A replicate has no noise source, or there are not as many noises as seeds.
        """
        if not all(noise.sources for noise in noises):
            raise ValueError("every replicate of a feed must have a noise source")
        # Streams without duplicates, and for each replicate the index of its stream and its amplitude.
        replicate_sums = [_make_noise_sum(noise, seed) for noise, seed in zip(noises, seeds, strict=True)]
        self._noise_sums = list(dict.fromkeys(replicate_sums))
        self._sum_indices = [self._noise_sums.index(replicate_sum) for replicate_sum in replicate_sums]
        self._sum_index = torch.tensor(self._sum_indices).to(device)
        self._scale = torch.tensor([[_amplitude(noise)] for noise in noises], dtype=dtype).to(device)
        self._unscaled = unscaled and len(self._noise_sums) == 1 < len(noises)
        self._on_cpu = device.type == "cpu"
        self._samplers = [
            _make_host_sums(noise_sum, size, dtype) if self._on_cpu else DeviceSums(noise_sum, size, dtype, device)
            for noise_sum in self._noise_sums
        ]
        self._rounds, self._dimension, self._draw_count = rounds, size, draws
        max_draws = max(draws(t) or 1 for t in range(1, rounds + 1))
        max_rounds = min(_MAX_BLOCK_ROUNDS, _MAX_BLOCK_VALUES // (size * len(replicate_sums) * max_draws))
        # Blocks have to fit into memory.  Short runs are split, too, so that one is drawn while another is used.
        self._block_rounds = max(1, min(max_rounds, rounds // (2 * _PREFETCHED_BLOCKS)))

    @property
    def amplitude(self) -> Tensor | None:
        """Factor of the vectors, (replicates, 1), or None if the vectors are scaled already."""
        return self._scale if self._unscaled else None

    def rounds_from(self, first_round: int) -> Iterator[Tensor]:
        """Yield the noise of each round from `first_round` on, in the shape that the class documents.

        Vectors are drawn in blocks of rounds, which do not depend on `first_round`.  Round 1 is its own block, and
        no later block is drawn before it is consumed, so that a timer that starts then includes all later draws.
        """
        skip_count = 0 if first_round == 1 else (first_round - 2) % self._block_rounds
        return itertools.islice(self._prefetch(first_round - skip_count), skip_count, None)

    def _prefetch(self, first_round: int) -> Iterator[Tensor]:
        """Yield the noise of each round from `first_round` on, which must be the first round of a block.

        On the CPU a thread draws blocks in advance, from round 2 on.
        """
        if first_round == 1:
            yield from self._draw_block(range(1, 2))
            first_round = 2
        blocks = (
            range(start, min(start + self._block_rounds, self._rounds + 1))
            for start in range(first_round, self._rounds + 1, self._block_rounds)
        )
        if not self._on_cpu:  # a device queues its kernels, so it runs ahead without a thread
            for block in blocks:
                yield from self._draw_block(block)
            return
        with ThreadPoolExecutor(max_workers=1) as pool:
            futures: deque[Future[list[Tensor]]] = deque()
            for block in blocks:
                futures.append(pool.submit(self._draw_block, block))
                if len(futures) > _PREFETCHED_BLOCKS:
                    yield from futures.popleft().result()
            while futures:
                yield from futures.popleft().result()

    def _draw_block(self, rounds: range) -> list[Tensor]:
        """Draw the vectors of all replicates for each round of a block, scaled unless the caller scales them.

        Returns:
            Tensor for each round, in the shape that the class documents.
        """
        if self._draw_count(rounds.start) is None:
            return list(self._scale_vectors(self._draw_vectors(rounds, node=0)))
        counts = {t: self._draw_count(t) or 0 for t in rounds}
        vectors_by_round: dict[int, list[Tensor]] = {t: [] for t in rounds}
        for node in range(max(counts.values())):
            drawing_rounds = [t for t in rounds if counts[t] > node]
            for t, vectors in zip(drawing_rounds, self._draw_vectors(drawing_rounds, node), strict=True):
                vectors_by_round[t].append(vectors)
        return [self._scale_vectors(torch.stack(round_vectors)) for round_vectors in vectors_by_round.values()]

    def _scale_vectors(self, vectors: Tensor) -> Tensor:
        """Return for each replicate the vectors of its stream times its amplitude, (…, replicates, d).

        If the caller multiplies by `amplitude`, the vectors are returned as they are.

        Args:
            vectors: Vectors of the streams, (…, streams, d), which may be overwritten.
        """
        if self._unscaled:
            return vectors
        # Each replicate has a stream of its own, all share one, or some share one.
        if self._sum_indices == list(range(len(self._noise_sums))):
            return vectors.mul_(self._scale)
        if len(self._noise_sums) == 1:
            return vectors * self._scale
        return vectors.index_select(-2, self._sum_index).mul_(self._scale)

    def _draw_vectors(self, rounds: Sequence[int], node: int) -> Tensor:
        """Draw vector number `node` of each round and stream, without amplitudes: (rounds, streams, d)."""
        return (
            self._samplers[0](rounds, node).unsqueeze(1)
            if len(self._samplers) == 1
            else torch.stack([sampler(rounds, node) for sampler in self._samplers], dim=1)
        )


def _make_host_sums(noise_sum: NoiseSum, size: int, dtype: torch.dtype) -> _SumSampler:
    """Make the function that draws a noise stream, Σ_j w_j z_{j,t}, on the CPU.

    The weights w_j are the stream's relative weights.  The function takes rounds and a node, and returns a vector
    for each round, (rounds, d).

    Args:
        noise_sum: Stream: seed, parties j and relative weights.
        size: Length d of a vector.
        dtype: torch.float32 for vectors in float32, and any other type for float64.
    """
    kind = np.dtype(np.float32 if dtype == torch.float32 else np.float64)
    source = simulation_noise(noise_sum.seed, kind)

    def sums(rounds: Sequence[int], node: int) -> Tensor:
        """Draw the weighted sum of the parties' vectors of one node for each round, (rounds, size)."""
        # A single party has the weight 1, so that all rounds are drawn in one call, with its number for each.
        if len(noise_sum.parties) == 1:
            return torch.from_numpy(source.vectors(size, noise_sum.parties * len(rounds), rounds, node))
        out = np.empty((len(rounds), size), kind)
        for row, t in zip(out, rounds, strict=True):
            source.weighted_sum(size, noise_sum.parties, noise_sum.relative_weights, t, node, row)
        return torch.from_numpy(out)

    return sums


class DeviceSums:
    """Noise of a stream, Σ_j w_j z_j with its relative weights w_j, drawn by the generator of a device.

    The generator is torch's and not cryptographic, which is enough for simulations.
    """

    def __init__(self, noise_sum: NoiseSum, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._noise_sum, self._generator = noise_sum, Generator(device)
        self._weights = torch.tensor(noise_sum.relative_weights, dtype=dtype).to(device)
        self._make_zeros = partial(torch.zeros, dtype=dtype, device=device)
        self._draw_normals = partial(torch.randn, dtype=dtype, device=device)
        self._dimension = size

    def __call__(self, rounds: Sequence[int], node: int) -> Tensor:
        """Draw the weighted sum of the parties' vectors of one node for each round, (rounds, d).

        The generator is seeded anew in each round, so that a run can be resumed.
        """
        sums = self._make_zeros(len(rounds), self._dimension)
        for row, t in zip(sums, rounds, strict=True):
            key = seed_key(
                self._noise_sum.seed, "noise of a device", str(self._noise_sum.parties), str(t), str(node)
            )
            # A seed below 2^63.
            generator = self._generator.manual_seed(int.from_bytes(key[:8], "big") >> 1)
            # Many parties are drawn in groups, to bound the memory of their vectors.
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
