"""The keyed noise of a simulation, drawn on the device that adds it.

As `fedpriv.core.random` draws it: AES-256 (FIPS 197) of counters by its four tables of 256 words, and the
Box-Muller transform in the device's arithmetic.  Bits are those of `KeyedNormal`, normals equal to rounding.  Only
simulations draw here.

On a GPU with Triton, which comes with torch there, one kernel computes a block's words; without, and on any other
device, the same is done by torch's calls on tensors of 32-bit words, some 1,100 of them.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fedpriv.core.random import seed_key

_ROUNDS = 14
_BLOCK_WORDS = 4
_CHUNK_VALUES = 2**22


class DeviceNormal:
    """The noise of a simulation on a device, each vector a function of its seed, owner, round and node.

    As in `simulation_noise`: the same bits.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._cipher = Cipher(seed_key(seed, "noise"), device)

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
        words = self._cipher.words(-(-size // (2 if wide else 4)), owners, rounds, node)
        if not wide:
            return words
        low, high = words[:, 0::2].to(torch.int64), words[:, 1::2].to(torch.int64)
        return (low & 0xFFFF_FFFF) | (high << 32)


class Cipher:
    """AES-256 of counters (round, owner, block, node) under one key, on a device."""

    def __init__(self, key: bytes, device: torch.device) -> None:
        self._device, self._keys = device, _round_keys(key)
        self._on_first_gpu = device.type == "cuda" and not device.index  # where Triton puts its kernels
        self._tables = torch.tensor([*_tables(), _SBOX], dtype=torch.int32).to(device)
        self._keys_there = torch.tensor(self._keys, dtype=torch.int32).to(device)

    def words(self, blocks: int, owners: Tensor, rounds: Tensor, node: int) -> Tensor:
        """Blocks 0, 1, … of each pair of owner and round, (owners, 4 blocks), as words of 32 bits."""
        if self._on_first_gpu and (kernel := _kernel()) is not None:
            return kernel(blocks, owners, rounds, _signed(node), self._keys_there, self._tables)
        return self.by_calls(blocks, owners, rounds, node)

    def by_calls(self, blocks: int, owners: Tensor, rounds: Tensor, node: int) -> Tensor:
        """The same by torch's calls."""
        shape = len(owners), blocks
        block = torch.arange(blocks, dtype=torch.int32, device=self._device).expand(shape)
        nodes = torch.full(shape, _signed(node), dtype=torch.int32, device=self._device)
        counter = [rounds.unsqueeze(-1).expand(shape), owners.unsqueeze(-1).expand(shape), block, nodes]
        return torch.stack(self._encrypted(counter), dim=-1).view(len(owners), -1)

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
            self._looked_up(self._tables[4], state[column], 0)
            ^ (self._looked_up(self._tables[4], state[(column + 1) % 4], 8) << 8)
            ^ (self._looked_up(self._tables[4], state[(column + 2) % 4], 16) << 16)
            ^ (self._looked_up(self._tables[4], state[(column + 3) % 4], 24) << 24)
            ^ self._keys[_ROUNDS][column]
            for column in range(_BLOCK_WORDS)
        ]

    def _looked_up(self, table: Tensor, words: Tensor, shift: int) -> Tensor:
        place = (words >> shift) & 0xFF
        return table.index_select(0, place.reshape(-1)).view(place.shape)


def _signed(number: int) -> int:
    """The 32 bits of an unsigned number, as a signed one."""
    return (number + 2**31) % 2**32 - 2**31


@lru_cache(maxsize=1)
def _kernel() -> Callable[[int, Tensor, Tensor, int, Tensor, Tensor], Tensor] | None:
    """What computes `Cipher.words` at once, if it can be had here and gives the words that torch's calls give."""
    device = torch.device("cuda")
    try:
        from fedpriv.engines.vectorized.device_kernel import words

        cipher, some = Cipher(bytes(range(32)), device), torch.arange(3, dtype=torch.int32, device=device)
        found = words(5, some + 7, some - 1, -2, cipher._keys_there, cipher._tables)
        return words if torch.equal(found, cipher.by_calls(5, some + 7, some - 1, 2**32 - 2)) else None
    except Exception:  # without Triton, or without the compiler that it asks for
        return None


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
