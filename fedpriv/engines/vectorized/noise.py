"""The mean of the silos' noise for many replicates, drawn ahead of time on another core, or on the device.

Noise does not depend on the trajectory, so blocks of rounds are drawn in a thread (NumPy and OpenSSL release the
interpreter lock) while the current block is consumed.  Replicates that differ only in how much noise they add
share their draws, since a stream is keyed by the seed: the same vectors, scaled.

A device draws the keyed noise of `fedpriv.core.random` itself, without copies: AES-256 (FIPS 197) by its four
tables of 256 words, on tensors of 32-bit words, and the Box-Muller transform in the device's arithmetic.  Bits are
those of `KeyedNormal`, normals equal to rounding.  Only simulations draw here.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.random import seed_key, simulation_noise
from fedpriv.noise.trust import Noise, NoiseSource

_ROUNDS = 14
_BLOCK_WORDS = 4
_CHUNK_VALUES = 2**22


class DeviceNormal:
    """The noise of a simulation on a device, each vector a function of its seed, owner, round and node.

    As in `simulation_noise`: the same bits.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._tables = [torch.tensor(table, dtype=torch.int32).to(device) for table in _tables()]
        self._sbox = torch.tensor(_SBOX, dtype=torch.int32).to(device)
        self._keys = _round_keys(seed_key(seed, "noise"))

    def weighted_sums(
        self, size: int, owners: Sequence[int], weights: Tensor, rounds: Sequence[int], node: int = 0
    ) -> Tensor:
        """Σ_k weights[k] · vector(size, owners[k], t, node) for every round t: (rounds, size).

        `weights` (owners,) are on the device; sums of owners are taken in the device's order.
        """
        together = max(1, _CHUNK_VALUES // (size * len(owners)))
        of_rounds = [rounds[start : start + together] for start in range(0, len(rounds), together)]
        return torch.cat([self._summed(size, owners, weights, some, node) for some in of_rounds])

    def _summed(
        self, size: int, owners: Sequence[int], weights: Tensor, rounds: Sequence[int], node: int
    ) -> Tensor:
        total = torch.zeros(len(rounds), size, dtype=self._dtype, device=self._device)
        several = max(1, _CHUNK_VALUES // (size * len(rounds)))
        for start in range(0, len(owners), several):
            some = self._counted(owners[start : start + several])
            times = self._counted(rounds)
            shape = len(times), len(some)
            streams = some.expand(shape).reshape(-1), times.unsqueeze(-1).expand(shape).reshape(-1)
            drawn = self._normals(size, *streams, node).view(*shape, size)
            total += weights[start : start + several] @ drawn
        return total

    def _counted(self, numbers: Sequence[int]) -> Tensor:
        """Unsigned numbers as words of 32 bits; runs of them are made where they are used, not copied there."""
        runs: list[Tensor] = []
        start = 0
        for place in range(1, len(numbers) + 1):
            if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
                first = _signed(numbers[start])
                runs.append(torch.arange(first, first + place - start, dtype=torch.int32, device=self._device))
                start = place
        return torch.cat(runs)

    def _normals(self, size: int, owners: Tensor, rounds: Tensor, node: int) -> Tensor:
        """One vector for each pair of `owners` and `rounds`, equally long: (len(owners), size)."""
        words = self._words(size, owners, rounds, node)
        half = words.shape[-1] // 2
        radius, angle = words[:, :half], words[:, half:]
        width = words.element_size() * 8
        length = (radius & (2 ** (width - 1) - 1)).to(self._dtype).add_(0.5).mul_(2.0 ** (1 - width))
        length = length.log_().mul_(-2.0).sqrt_()
        turn = angle.to(self._dtype).mul_(2.0 * math.pi * 2.0**-width)
        return torch.cat([length * turn.cos(), length * turn.sin()], dim=-1)[:, :size]

    def _words(self, size: int, owners: Tensor, rounds: Tensor, node: int) -> Tensor:
        """The bits of the vectors, (owners, words of the type's size)."""
        wide = self._dtype == torch.float64
        blocks = -(-size // (2 if wide else 4))
        shape = len(owners), blocks
        block = torch.arange(blocks, dtype=torch.int32, device=self._device).expand(shape)
        nodes = torch.full(shape, _signed(node), dtype=torch.int32, device=self._device)
        counter = [rounds.unsqueeze(-1).expand(shape), owners.unsqueeze(-1).expand(shape), block, nodes]
        words = torch.stack(self._encrypted(counter), dim=-1).view(len(owners), -1)
        if not wide:
            return words
        low, high = words[:, 0::2].to(torch.int64), words[:, 1::2].to(torch.int64)
        return (low & 0xFFFF_FFFF) | (high << 32)

    def _encrypted(self, counter: Sequence[Tensor]) -> list[Tensor]:
        """AES of blocks whose four little-endian words are given."""
        state = [word ^ key for word, key in zip(counter, self._keys[0], strict=True)]
        for keys in self._keys[1:_ROUNDS]:
            state = [
                self._looked_up(self._tables[0], state[column], 0)
                ^ self._looked_up(self._tables[1], state[(column + 1) % 4], 8)
                ^ self._looked_up(self._tables[2], state[(column + 2) % 4], 16)
                ^ self._looked_up(self._tables[3], state[(column + 3) % 4], 24)
                ^ keys[column]
                for column in range(_BLOCK_WORDS)
            ]
        return [
            self._looked_up(self._sbox, state[column], 0)
            ^ (self._looked_up(self._sbox, state[(column + 1) % 4], 8) << 8)
            ^ (self._looked_up(self._sbox, state[(column + 2) % 4], 16) << 16)
            ^ (self._looked_up(self._sbox, state[(column + 3) % 4], 24) << 24)
            ^ self._keys[_ROUNDS][column]
            for column in range(_BLOCK_WORDS)
        ]

    def _looked_up(self, table: Tensor, words: Tensor, shift: int) -> Tensor:
        place = (words >> shift) & 0xFF
        return table.index_select(0, place.reshape(-1)).view(place.shape)


def _signed(number: int) -> int:
    """The 32 bits of an unsigned number, as a signed one."""
    return (number + 2**31) % 2**32 - 2**31


def _doubled(value: int) -> int:
    """Times x in AES's field of 256 elements."""
    return (value << 1) ^ (0x11B if value & 0x80 else 0)


def _sbox() -> list[int]:
    """Inverses in the field, then the affine map; the powers of 3 go through all that are not 0."""
    logs, powers, value = [0] * 256, [0] * 255, 1
    for exponent in range(255):
        powers[exponent], logs[value] = value, exponent
        value ^= _doubled(value)
    found = []
    for value in range(256):
        inverse = powers[-logs[value] % 255] if value else 0
        mapped = 0x63
        for shift in range(5):
            mapped ^= (inverse << shift | inverse >> (8 - shift)) & 0xFF
        found.append(mapped)
    return found


_SBOX = _sbox()


def _tables() -> list[list[int]]:
    """The words that a byte of each row adds to its column, rows from the lowest byte up."""
    tables = []
    for row in range(4):
        table = []
        for value in _SBOX:
            double = _doubled(value)
            column = double | value << 8 | value << 16 | (double ^ value) << 24
            turned = (column << 8 * row | column >> (32 - 8 * row)) & 0xFFFF_FFFF
            table.append(_signed(turned))
        tables.append(table)
    return tables


def _round_keys(key: bytes) -> list[list[int]]:
    """The 15 round keys of a key of 32 bytes, four little-endian words each."""
    words = [list(key[start : start + 4]) for start in range(0, 32, 4)]
    constant = 1
    while len(words) < _BLOCK_WORDS * (_ROUNDS + 1):
        last = words[-1]
        if len(words) % 8 == 0:
            last = [_SBOX[byte] for byte in (*last[1:], last[0])]
            last[0] ^= constant
            constant = _doubled(constant)
        elif len(words) % 8 == 4:
            last = [_SBOX[byte] for byte in last]
        words.append([one ^ other for one, other in zip(words[-8], last, strict=True)])
    numbers = [_signed(int.from_bytes(bytes(word), "little")) for word in words]
    return [numbers[start : start + _BLOCK_WORDS] for start in range(0, len(numbers), _BLOCK_WORDS)]


_AGGREGATE = 0xFFFF_FFFE  # an owner number of its own: never the stream of a silo or of the server
_BLOCK_VALUES = 2**21
_LONGEST_BLOCK = 256
_AHEAD = 2  # blocks; one thread draws them, since a second one would fight the first for the interpreter

_CPU = torch.device("cpu")

_Block = list[Tensor]


def aggregate(noise: Noise) -> Noise:
    """One source in place of all, equal in distribution in the mean only.

    Valid while no silo is missing and nobody looks at one silo's messages: variance Σ p_i² σ_i².
    """
    return Noise((NoiseSource(_AGGREGATE, noise.std_in_mean, 1.0),)) if noise.sources else noise


@dataclass(frozen=True)
class _Stream:
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
            _host_sums(one, size, dtype) if self._on_cpu else _device_sums(one, size, dtype, device)
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


def _host_sums(stream: _Stream, size: int, dtype: torch.dtype) -> _Sums:
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


def _device_sums(stream: _Stream, size: int, dtype: torch.dtype, device: torch.device) -> _Sums:
    source = DeviceNormal(stream.seed, dtype, device)
    weights = torch.tensor(stream.relative, dtype=dtype).to(device)
    return lambda rounds, node: source.weighted_sums(size, stream.owners, weights, rounds, node)


def _amplitude(noise: Noise) -> float:
    first = noise.sources[0]
    return first.weight * float(first.std)


def _stream(noise: Noise, seed: int) -> _Stream:
    unit = _amplitude(noise)
    return _Stream(
        seed,
        tuple(source.owner for source in noise.sources),
        tuple(source.weight * float(source.std) / unit for source in noise.sources),
    )
