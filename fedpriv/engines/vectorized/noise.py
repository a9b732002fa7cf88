"""The mean of the silos' noise for many replicates, drawn ahead of time on another core, or on the device.

Noise does not depend on the trajectory, so blocks of rounds are drawn in a thread (NumPy and OpenSSL release the
interpreter lock) while the current block is consumed.  Replicates that differ only in how much noise they add
share their draws, since a stream is keyed by the seed: the same vectors, scaled.

A device draws noise by its own generator, without copies: other numbers of the same distribution.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Generator, Tensor

from fedpriv.core.random import seed_key, simulation_noise
from fedpriv.noise.trust import Noise, NoiseSource

_AGGREGATE = 0xFFFF_FFFE  # an owner number of its own: never the stream of a silo or of the server
_BLOCK_VALUES = 2**21
_LONGEST_BLOCK = 256
_DEVICE_VALUES = 2**22  # normals that a device holds at a time, beside their sum
_AHEAD = 2  # blocks; one thread draws them, since a second one would fight the first for the interpreter

_CPU = torch.device("cpu")

_Block = list[Tensor]


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
            ahead: deque[Future[_Block]] = deque()
            for block in blocks:
                ahead.append(pool.submit(self._draw, block))
                if len(ahead) > _AHEAD:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()

    def _draw(self, rounds: range) -> _Block:
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
            purpose = "noise of a device", str(self._stream.owners), str(t), str(node)
            key = seed_key(self._stream.seed, *purpose)
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
