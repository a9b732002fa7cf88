"""AES-256 of counters as one kernel of Triton, which comes with torch for GPUs; device_noise.py imports it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
"""Blocks of AES that one program computes."""


@triton.jit
def _looked_up(tables, first, second, third, fourth):  # type: ignore[no-untyped-def]
    """One column after a round: a byte of each of four columns, by the table of its row."""
    return (
        tl.load(tables + (first & 255))
        ^ tl.load(tables + 256 + ((second >> 8) & 255))
        ^ tl.load(tables + 512 + ((third >> 16) & 255))
        ^ tl.load(tables + 768 + ((fourth >> 24) & 255))
    )


@triton.jit
def _substituted(sbox, first, second, third, fourth):  # type: ignore[no-untyped-def]
    """One column after the last round, which mixes no bytes."""
    return (
        tl.load(sbox + (first & 255))
        ^ (tl.load(sbox + ((second >> 8) & 255)) << 8)
        ^ (tl.load(sbox + ((third >> 16) & 255)) << 16)
        ^ (tl.load(sbox + ((fourth >> 24) & 255)) << 24)
    )


@triton.jit(do_not_specialize=["node"])  # type: ignore[untyped-decorator]
def _encrypted(out, rounds, owners, keys, tables, blocks, node, count, size: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    there = place < count
    row = place // blocks
    a = tl.load(rounds + row, there, 0) ^ tl.load(keys)
    b = tl.load(owners + row, there, 0) ^ tl.load(keys + 1)
    c = (place % blocks).to(tl.int32) ^ tl.load(keys + 2)
    d = tl.zeros([size], tl.int32) + (node ^ tl.load(keys + 3))
    for turn in range(1, 14):
        key = keys + 4 * turn
        e = _looked_up(tables, a, b, c, d) ^ tl.load(key)
        f = _looked_up(tables, b, c, d, a) ^ tl.load(key + 1)
        g = _looked_up(tables, c, d, a, b) ^ tl.load(key + 2)
        h = _looked_up(tables, d, a, b, c) ^ tl.load(key + 3)
        a, b, c, d = e, f, g, h
    sbox = tables + 1024
    tl.store(out + 4 * place, _substituted(sbox, a, b, c, d) ^ tl.load(keys + 56), there)
    tl.store(out + 4 * place + 1, _substituted(sbox, b, c, d, a) ^ tl.load(keys + 57), there)
    tl.store(out + 4 * place + 2, _substituted(sbox, c, d, a, b) ^ tl.load(keys + 58), there)
    tl.store(out + 4 * place + 3, _substituted(sbox, d, a, b, c) ^ tl.load(keys + 59), there)


def words(blocks: int, owners: Tensor, rounds: Tensor, node: int, keys: Tensor, tables: Tensor) -> Tensor:
    """Words of blocks 0, 1, … of each pair of owner and round, (owners, 4 blocks); see `Cipher.words`.

    All are words of 32 bits: `keys` (15, 4) are the round keys, `tables` (5, 256) the four tables and the S-box.
    """
    count = len(owners) * blocks
    out = torch.empty(len(owners), 4 * blocks, dtype=torch.int32, device=owners.device)
    grid = (triton.cdiv(count, _BLOCK),)
    _encrypted[grid](out, rounds.contiguous(), owners.contiguous(), keys, tables, blocks, node, count, _BLOCK)
    return out
