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

**Epochs apart.** Between rounds s before a cut and t behind it a chain has Y_st = f_s g_t, where f_s is in
proportion to what G_s shares with the last round before the cut, and g_t to what G_t shares with the first one
behind it. With a standard normal ξ, independent of G, let G_s + f_s ξ take the place of G_s and G_t - g_t ξ that
of G_t. What a unit draws, π, then has N_π = ξ (Σ f_s - Σ g_t) beside G_π, and E e^(N_π - E N_π²/2) = 1 whatever G
is: by Jensen's inequality convex functions of S, and of S and S' with -G_π and -N_π, only grow. Rounds before the
cut and rounds behind it now have covariances of f_s g_t - f_s g_t = 0, and are independent. Either side is a
chain again: seen from the cut, one whose first variance is larger. So a run of k epochs is k independent ones,
which compose. Of all f and g with the same products those are taken by which Σ f = Σ g, for which N_π is 0 on
average: only what a unit's rounds are nearer to the cut than others is given away.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.curves import Floats, as_floats

_MORE = 1.0 + 1e-9  # of every overlap: the rounding of the products, of the powers and of their scale
_DECAYS, _LONG = 24, 800  # that are tried, of a chain of fewer rounds; of a longer one a third
_LEAST_COLUMN, _LEAST_CLIP = 1e-6, 0.1  # of the longest, of the largest: shorter and smaller ones are raised
_NOTHING = 1e-290  # of an overlap: far below what 1e-12 in δ (`losses`) covers
_HALVINGS = 6  # of the median overlap: so much may be known, or as much as the least one
_PREFERRED = 0.999  # of a chain's sum: a smaller one replaces it, and a chain that overlaps have so nearly stays
_ALIKE = 1.005  # of their overlaps in sum: epochs that grow by no more share one law
_TINY = 1e-300
MOST_ROUNDS = 200
"""Of an epoch. Longer chains take too long: `overlap`'s bound stands alone."""


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

    @property
    def total(self) -> float:
        """The sum of all covariances."""
        before, found = 0.0, 0.0
        for variance, ratio in zip(self.variances, (0.0, *self._ratios), strict=True):
            before *= ratio
            found += variance + 2.0 * before
            before += variance
        return found

    @property
    def downwards(self) -> "Chain":
        """The same rounds from the end with the larger variance: a sum over rounds has no order."""
        if self.variances[0] >= self.variances[-1]:
            return self
        return Chain(self.variances[::-1], self.links[::-1])

    def above(self, other: "Chain") -> "Chain":
        """A chain with covariances of at least both, of the same length.

        Guarantee: Y_st = a_s ρ_s ρ_(s+1) … ρ_(t-1) with ρ_t = l_t / a_t rises with all of these.
        """
        ratios = np.maximum(self._ratios, other._ratios)
        variances = np.maximum(self.variances, other.variances)
        for t, ratio in enumerate(ratios):  # so that such a vector exists
            variances[t + 1] = max(variances[t + 1], ratio**2 * variances[t])
        links = ratios * variances[:-1] * _MORE
        return Chain(tuple((variances * _MORE).tolist()), tuple(links.tolist()))

    @property
    def _ratios(self) -> list[float]:
        return [link / variance for link, variance in zip(self.links, self.variances[:-1], strict=True)]

    def cut(self, rounds: int) -> tuple["Chain", "Chain"]:
        """The first `rounds` and the others, as chains that are independent.

        Guarantee: convex functions of the ratios do not fall ("Epochs apart").
        """
        variances, links = np.array(self.variances), np.array(self.links)
        shared = links[rounds - 1]
        before = np.cumprod(np.append(1.0, (links[: rounds - 1] / variances[1:rounds])[::-1]))[::-1]
        behind = np.cumprod(np.append(1.0, links[rounds:] / variances[rounds:-1]))
        before *= math.sqrt(shared * float(np.sum(behind)) / float(np.sum(before)))
        behind *= shared / max(_TINY, float(before[-1]))
        return (
            _raised(variances[:rounds], links[: rounds - 1], before),
            _raised(variances[rounds:], links[rounds:], behind),
        )


def _raised(variances: Floats, links: Floats, more: Floats) -> Chain:
    """With `more` · `more`ᵀ added, in proportion to what rounds share with the first or last one."""
    variances, links = (variances + more**2) * _MORE, (links + more[:-1] * more[1:]) * _MORE
    return Chain(tuple(variances.tolist()), tuple(links.tolist()))


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
            chain = _chain_of(diagonal, decay, clips)
            overlaps = chain.total
        found.append((overlaps if math.isfinite(overlaps) else math.inf, chain))
    return min(found, key=lambda each: each[0])[1]


def _chain_of(diagonal: Floats, decay: float, clips: Floats) -> Chain:
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
    few = _DECAYS if len(first) < _LONG else _DECAYS // 3
    places = np.unique(np.linspace(0, len(ratios) - 1, few).astype(int))
    return [ratios[place] for place in places]


@dataclass(frozen=True)
class Overlaps:
    """What a unit's rounds move alike, over the square of the clip: what is known, and chains above the rest."""

    epochs: tuple[Chain, ...]
    """Of every epoch, independent of the others'; equal ones where they are alike."""
    known: float = 0.0
    """The variance of what all rounds of the run share."""


def overlaps_of(products: Floats, clips: Floats, bins: int) -> Overlaps:
    """The chains above the inner products of columns, (n, n) for n rounds of which each epoch has `bins`.

    `clips`, (n,), have the clip's square in their unit.  Guarantee: with what is known above them all, rounded up.
    """
    moved = products * np.outer(clips, clips)
    apart = moved[np.triu_indices(len(clips), 1)]
    whole = _above(moved, clips, 0.0)
    if not np.any(apart) or float(np.sum(moved)) >= _PREFERRED * whole.total:
        return _apart(whole, bins, 0.0)[1]
    tried = {float(np.min(apart)), *(float(np.median(apart)) / 2**each for each in range(1, _HALVINGS + 1))}
    first = _apart(whole, bins, 0.0)
    others = (_apart(_above(moved, clips, common), bins, common) for common in sorted(tried))
    best = min(others, key=lambda each: each[0])
    return (best if best[0] < _PREFERRED * first[0] else first)[1]


def _above(moved: Floats, clips: Floats, common: float) -> Chain:
    """A chain above what is left of these overlaps where so much is known."""
    return dominating(np.maximum(0.0, moved - common) / np.maximum(_TINY, np.outer(clips, clips)), clips)


def _apart(rest: Chain, bins: int, common: float) -> tuple[float, Overlaps]:
    """The epochs of a chain apart; and first the mean of all that rounds share."""
    epochs, found = len(rest.variances) // bins, list[Chain]()
    for _ in range(epochs - 1):
        first, rest = rest.cut(bins)
        found.append(first.downwards)
    found.append(rest.downwards)
    known = epochs**2 * common * _MORE
    return sum(each.total for each in found) / bins**2 + known, Overlaps(_merged(found), known)


def _merged(chains: Sequence[Chain]) -> tuple[Chain, ...]:
    """Chains above these, as few different ones as are not much above."""
    groups: list[tuple[Chain, float, list[int]]] = []
    for place, chain in enumerate(chains):
        for number, (largest, sums, places) in enumerate(groups):
            both, together = largest.above(chain), sums + chain.total
            if both.total * (len(places) + 1) <= _ALIKE * together:
                groups[number] = (both, together, [*places, place])
                break
        else:
            groups.append((chain, chain.total, [place]))
    of = {place: chain for chain, _, places in groups for place in places}
    return tuple(of[place] for place in range(len(chains)))
