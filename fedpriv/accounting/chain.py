"""Chains: Gaussian exponents whose overlaps fade from round to round, above those of what a unit may draw.

By `overlap` a run is dominated by exponents G of one direction with E G_s G_t = X_st, and Kahane's inequality
allows any larger numbers in place of X, on the diagonal, too. A **chain** is a Gaussian Markov vector: with
variances a_t and neighbours' covariances l_t it has

    Y_st = l_s l_(s+1) … l_(t-1) / (a_(s+1) … a_(t-1)),   s < t.

λ-CGD is one: ⟨C_s, C_t⟩ = λ^(t-s) ‖C_t‖². Above several buffers one is laid: for a decay r

    Y_st = clip_s clip_t A_t r^(t-s),   A_t = max(max_(s ≤ t) ⟨C_s, C_t⟩ r^(s-t), r² A_(t+1)),

the second so that a vector with these covariances exists; of several r the one whose overlaps are least in sum
is taken. `walk` computes with it.

**What all rounds share.** A part κ² of every overlap can count as known, as in `overlap`: with G_t = κ ξ + G'_t
of all rounds S is e^(kκξ - k²κ²/2) times the S of G', for k epochs. The chain then lies above (X - κ²)+ only.
One buffer is a chain as it is; a slow and a fast one are nearer to a constant and a chain. Of some κ² that one
is taken whose overlaps are least in sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.curves import Floats, as_floats

_MORE = 1.0 + 1e-9  # of every overlap: the rounding of the products, of the powers and of their scale
_DECAYS = 24  # that are tried
_LEAST_COLUMN, _LEAST_CLIP = 1e-6, 0.1  # of the longest, of the largest: shorter and smaller ones are raised
_NOTHING = 1e-290  # of an overlap: far below what 1e-12 in δ (`losses`) covers
_HALVINGS = 6  # of the median overlap: so much may be known, or as much as the least one
_PREFERRED = 0.999  # of the sum of what is laid above: where it falls below
_TINY = 1e-300
MOST_ROUNDS = 400
"""Longer chains take too long: `overlap`'s bound stands alone."""


@dataclass(frozen=True)
class Chain:
    """Variances and neighbours' covariances of a unit's exponents, times σ² over the square of the clip."""

    variances: tuple[float, ...]
    links: tuple[float, ...]
    """One fewer."""

    def at(self, multiplier: float) -> "Chain":
        """The exponents at this noise multiplier, rounded up."""
        share = multiplier**-2 * (1.0 + 1e-12)
        return Chain(tuple(share * each for each in self.variances), tuple(share * each for each in self.links))

    @property
    def covariances(self) -> Floats:
        """Y, shape (n, n)."""
        found = np.diag(self.variances)
        for t, link in enumerate(self.links):
            found[: t + 1, t + 1] = found[t + 1, : t + 1] = found[: t + 1, t] * (link / self.variances[t])
        return found


def dominating(products: Floats, clips: Floats) -> Chain:
    """A chain with covariances of at least `products` · `clips` · `clips`ᵀ, all ≥ 0, `products` of shape (n, n).

    Guarantee: whatever the decay, no covariance is below.
    """
    products = products + np.diag(np.maximum(0.0, _LEAST_COLUMN * np.max(products) - np.diag(products)))
    clips = np.maximum(clips, _LEAST_CLIP * np.max(clips))
    lag = np.triu(np.subtract.outer(np.arange(len(clips)), np.arange(len(clips))).T)
    upper = np.triu(np.maximum(products, products.T) * _MORE)
    with np.errstate(divide="ignore"):
        logs = np.where(upper > _NOTHING, np.log(upper), -np.inf)
    found = []
    for decay in _decays(upper):
        with np.errstate(over="ignore", invalid="ignore"):  # of a decay far too fast: infinite
            diagonal = _diagonal(logs - lag * np.log(decay), decay)
            overlaps = float(np.sum(np.triu(diagonal * decay**lag) * np.outer(clips, clips)))
        found.append((overlaps if math.isfinite(overlaps) else math.inf, decay, diagonal))
    _, decay, diagonal = min(found, key=lambda each: each[0])
    links = diagonal[1:] * decay * clips[:-1] * clips[1:]
    return Chain(tuple((diagonal * clips**2).tolist()), tuple(links.tolist()))


def _diagonal(lifted: Floats, decay: float) -> Floats:
    """A_t, from ln(⟨C_s, C_t⟩ r^(s-t))."""
    found = np.exp(np.max(lifted, axis=0))
    for t in range(len(found) - 2, -1, -1):
        found[t] = max(found[t], decay**2 * found[t + 1] * _MORE)
    return as_floats(found)


def _decays(upper: Floats) -> list[float]:
    """Decays from one overlap to another one: of neighbours, and along the first row."""
    first, diagonal = upper[0], upper.diagonal()
    pairs = [*zip(upper.diagonal(1), diagonal[1:], strict=True), *zip(first[1:], first[:-1], strict=True)]
    ratios = sorted({min(1.0, float(after / before)) for after, before in pairs if after > _NOTHING < before})
    if not ratios:
        return [1e-3]
    places = np.unique(np.linspace(0, len(ratios) - 1, _DECAYS).astype(int))
    return [ratios[place] for place in places]


@dataclass(frozen=True)
class Overlaps:
    """What a unit's rounds move alike, over the square of the clip: what is known, and chains above the rest."""

    epoch: Chain
    """Of one epoch."""
    pair: Chain
    """Of two, one after the other."""
    known: float = 0.0
    """The variance of what all rounds of the run share, and of what blocks do beside."""


def overlaps_of(products: Floats, clips: Floats, bins: int) -> Overlaps:
    """The chains above the inner products of columns, (n, n) for n rounds of which each epoch has `bins`.

    `clips`, (n,), have the clip's square in their unit.  Guarantee: with what is known above them all, rounded up.
    """
    moved = products * np.outer(clips, clips)
    apart = moved[np.triu_indices(len(clips), 1)]
    whole = _overlaps_of(moved, clips, bins, 0.0)
    if not np.any(apart):
        return whole[1]
    tried = {float(np.min(apart)), *(float(np.median(apart)) / 2**each for each in range(1, _HALVINGS + 1))}
    best = min((_overlaps_of(moved, clips, bins, common) for common in sorted(tried)), key=lambda each: each[0])
    return (best if best[0] < _PREFERRED * whole[0] else whole)[1]


def _overlaps_of(moved: Floats, clips: Floats, bins: int, common: float) -> tuple[float, Overlaps]:
    """The chains above what is left of these overlaps; and first the mean of all that epochs share."""
    epochs = len(clips) // bins
    starts = [bins * epoch for epoch in range(epochs)]
    rest = np.maximum(0.0, moved - common)

    def above(starts: Sequence[int], rounds: int) -> Chain:
        most, longest = np.zeros((rounds, rounds)), np.zeros(rounds)
        for start in starts:
            here = slice(start, start + rounds)
            size = len(clips[here])
            products = rest[here, here] / np.maximum(_TINY, np.outer(clips[here], clips[here]))
            most[:size, :size] = np.maximum(most[:size, :size], products)
            longest[:size] = np.maximum(longest[:size], clips[here])
        return dominating(most, longest)

    largest = rest.reshape(epochs, bins, epochs, bins).max(axis=(1, 3))
    blocks = np.arange(epochs) // 2
    between = float(np.sum(largest[blocks[:, None] != blocks[None, :]]))
    known = (between + epochs**2 * common) * (1.0 + 1e-9)
    found = Overlaps(above(starts, bins), above(starts[::2], 2 * bins), known)
    pairs, single = divmod(epochs, 2)
    along = pairs * np.sum(found.pair.covariances) + single * np.sum(found.epoch.covariances)
    return float(along) / bins**2 + found.known, found
