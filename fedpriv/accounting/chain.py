"""Chains: Gaussian exponents whose overlaps fade from round to round, above those of what a unit may draw.

By `overlap` a run is dominated by exponents G of one direction with E G_s G_t = X_st, and Kahane's inequality
allows any larger numbers in place of X, on the diagonal, too. A **chain** is a Gaussian Markov vector: with
variances a_t and neighbours' covariances l_t it has

    Y_st = l_s l_(s+1) … l_(t-1) / (a_(s+1) … a_(t-1)),   s < t.

λ-CGD is one: ⟨C_s, C_t⟩ = λ^(t-s) ‖C_t‖². Above several buffers one is laid: for a decay r

    Y_st = clip_s clip_t A_t r^(t-s),   A_t = max(max_(s ≤ t) ⟨C_s, C_t⟩ r^(s-t), r² A_(t+1)),

the second so that a vector with these covariances exists; of several r the one whose overlaps are least in sum
is taken. `walk` computes with it.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.curves import Floats, as_floats

_MORE = 1.0 + 1e-9  # of every overlap: the rounding of the products, of the powers and of their scale
_DECAYS = 24  # that are tried
_LEAST_COLUMN, _LEAST_CLIP = 1e-6, 0.1  # of the longest, of the largest: shorter and smaller ones are raised
_NOTHING = 1e-290  # of an overlap: far below what 1e-12 in δ (`losses`) covers
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
