"""Chains: Gaussian exponents whose overlaps fade from round to round, above those of what a unit may draw.

By the pair of fading.py a run is dominated by exponents G of one direction with E G_s G_t = X_st, and Kahane's
inequality allows any larger numbers in place of X, on the diagonal, too. A **chain** is a Gaussian Markov vector:
with variances a_t and neighbours' covariances l_t it has

    Y_st = l_s l_(s+1) … l_(t-1) / (a_(s+1) … a_(t-1)),   s < t.

λ-CGD is one: ⟨C_s, C_t⟩ = λ^(t-s) ‖C_t‖². Above several buffers one is laid: for a decay r

    Y_st = clip_s clip_t A_t r^(t-s),   A_t = max(max_(s ≤ t) ⟨C_s, C_t⟩ r^(s-t), r² A_(t+1)),

the second so that a vector with these covariances exists; of several r the one whose overlaps are least in sum
is taken. `law_of` computes with it.

**What all rounds share.** A part κ² of every overlap can count as known, as in fading.py: with G_t = κ ξ + G'_t
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

Sums of exponentials along a chain: their law, from above in convex order.

S = Σ p_t w_t, w_t = e^(G_t - a_t/2), for a `Chain` G: G_0 = √a_0 z_0 and G_t = r_t G_(t-1) + τ_t z_t, so that
(G_t, the sum so far) is a Markov process of two numbers, whose law is computed on a lattice of G and a grid of
sums.

**Rounding G.** In place of G a walk U on the multiples of h is taken, U_t = r_t U_(t-1) + τ_t z_t + e_t: given x
= r_t U_(t-1) + τ_t z_t, the step e_t goes to one of the three multiples k h nearest to x, with the probabilities
B(x/h - k) of the quadratic B-spline B. They have mean 0, variance h²/4 whatever x is, and a third moment of at
most 0.0482 h³, so that for real r, with |e| ≤ 3h/2,

    E[e^(r e) | x] = m(r) (1 ± η(r)),   m(r) = 1 + (r h)²/8,   η(r) = .0081 |r h|³ + .0235 (r h)⁴ e^(3|r h|/2).

Let z be all z_t. U_t = G_t + Σ_j r_jt e_j, with r_jt the product of ratios from j to t, hence E[e^U_t | z] =
e^G_t Π_j m(r_jt) (1 ± η(r_jt)), the steps being integrated from the last to the first. With w~_t = e^(U_t -
a_t/2) / Π_j m(r_jt) and S~ = Σ p_t w~_t, (1 - κ) S ≤ E[S~ | z] ≤ (1 + κ) S where κ = max_t Π_j (1 + η(r_jt)) -
1, and the same for S' = Σ p_t e^(-G_t - a_t/2) and its S'~. Convex functions F of one sum, and of a pair, have E
F(E[S~, S'~ | z]) ≤ E F(S~, S'~) (Jensen). So

    E (S - γ)+ ≤ E (S~/(1-κ) - γ)+,   E (1 - γS)+ ≤ E (1 - γ S~/(1+κ))+,
    E (S - γS')+ ≤ E (S~/(1-κ) - γ S'~/(1+κ))+.

A τ below h is raised to it, and so is √a_0, and variances with them: Kahane allows it.

**Ends of the lattice.** A walk that leaves it stops: its later w~ count as 1, in every sum. (S - γ)+ and (S -
γS')+ fall by at most what S~ loses, since both are at most S; (1 - γS)+ is at most 1 and falls by at most the
probability that the walk leaves. That, and E[Σ p_t w~_t; the walk leaves], are at most `LEFT` each:
tilted by w~_t the walk's exponent at any round is at most its covariance higher, and a bounded step of mean 0
counts as a variance of 9h²/4 (Hoeffding).

**The grid of sums.** Sums are moved to their two neighbours with their mean kept, which only raises E F for
convex F; those above the grid come to its top, and what they lose of their mean is `excess`: F grows by at most
that. Those below it come up to its bottom, which raises (S - γ)+ and (S - γS')+ and may lower (1 - γS)+: for that
every number of rounds k has a grid of its own, whose bottom is their least sum, -k/T, and no sum lies below.
There S is nearly 0, and large ε ask for ratios of it: points come closer to the bottom in proportion.

**Rounding.** All masses are ≥ 0 and only added and multiplied, so that each has a relative error of less than
1e-16 times the number of operations on its way, below 1e-10 altogether; ten points of Gauss and
Legendre for each of B's three pieces have one of less than 1e-12 within seven standard deviations, as τ ≥ h. A
sum's distance from the least one, e^-14 of it or more, is known to 2e-16 of it: to 3e-10 in proportion.
`losses` raises every δ by a relative 1e-9.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.curves import Floats, as_floats

_ROUND_UP = 1.0 + 1e-9  # of every overlap: the rounding of the products, of the powers and of their scale
_MAX_DECAYS, _LONG_CHAIN = 24, 800  # that are tried, of a chain of fewer rounds; of a longer one a third
_MIN_COLUMN, _MIN_CLIP = 1e-6, 0.1  # of the longest, of the largest: shorter and smaller ones are raised
_MIN_OVERLAP = 1e-290  # of an overlap: far below what 1e-12 in δ (`losses`) covers
_HALVINGS = 6  # of the median overlap: so much may be known, or as much as the least one
_PREFERENCE_FACTOR = (
    0.999  # of a chain's sum: a smaller one replaces it, and a chain that overlaps have so nearly stays
)
_MERGE_FACTOR = 1.005  # of their overlaps in sum: epochs that grow by no more share one law
_TINY = 1e-300
MAX_ROUNDS = 200
"""Of an epoch. Longer chains take too long: the bound of known overlaps stands alone."""


@dataclass(frozen=True)
class CovarianceChain:
    """Variances and neighbours' covariances of a unit's exponents, times σ² over the square of the clip."""

    variances: tuple[float, ...]
    next_covariances: tuple[float, ...]
    """One fewer."""

    def with_noise_multiplier(self, multiplier: float) -> "CovarianceChain":
        """The exponents at this noise multiplier, rounded up."""
        share = multiplier**-2 * (1.0 + 1e-12)
        return CovarianceChain(
            tuple(share * each for each in self.variances), tuple(share * each for each in self.next_covariances)
        )

    @property
    def covariances(self) -> Floats:
        """Y, shape (n, n)."""
        found = np.diag(self.variances)
        for t, link in enumerate(self.next_covariances):
            found[: t + 1, t + 1] = found[t + 1, : t + 1] = found[: t + 1, t] * (link / self.variances[t])
        return found

    @property
    def covariance_sum(self) -> float:
        """The sum of all covariances."""
        before, found = 0.0, 0.0
        for variance, ratio in zip(self.variances, (0.0, *self._ratios), strict=True):
            before *= ratio
            found += variance + 2.0 * before
            before += variance
        return found

    @property
    def largest_first(self) -> "CovarianceChain":
        """The same rounds from the end with the larger variance: a sum over rounds has no order."""
        return (
            self
            if self.variances[0] >= self.variances[-1]
            else CovarianceChain(self.variances[::-1], self.next_covariances[::-1])
        )

    def maximum_with(self, other: "CovarianceChain") -> "CovarianceChain":
        """A chain with covariances of at least both, of the same length.

        Guarantee: Y_st = a_s ρ_s ρ_(s+1) … ρ_(t-1) with ρ_t = l_t / a_t rises with all of these.
        """
        ratios = np.maximum(self._ratios, other._ratios)
        variances = np.maximum(self.variances, other.variances)
        for t, ratio in enumerate(ratios):  # so that such a vector exists
            variances[t + 1] = max(variances[t + 1], ratio**2 * variances[t])
        return CovarianceChain(
            tuple((variances * _ROUND_UP).tolist()), tuple((ratios * variances[:-1] * _ROUND_UP).tolist())
        )

    @property
    def _ratios(self) -> list[float]:
        return [link / variance for link, variance in zip(self.next_covariances, self.variances[:-1], strict=True)]

    def split_at(self, rounds: int) -> tuple["CovarianceChain", "CovarianceChain"]:
        """The first `rounds` and the others, as chains that are independent.

        Guarantee: convex functions of the ratios do not fall ("Epochs apart").
        """
        variances, links = np.array(self.variances), np.array(self.next_covariances)
        shared = links[rounds - 1]
        before = np.cumprod(np.append(1.0, (links[: rounds - 1] / variances[1:rounds])[::-1]))[::-1]
        behind = np.cumprod(np.append(1.0, links[rounds:] / variances[rounds:-1]))
        before *= math.sqrt(shared * float(np.sum(behind)) / float(np.sum(before)))
        behind *= shared / max(_TINY, float(before[-1]))
        return (
            _add_outer_square(variances[:rounds], links[: rounds - 1], before),
            _add_outer_square(variances[rounds:], links[rounds:], behind),
        )


def _add_outer_square(variances: Floats, links: Floats, more: Floats) -> CovarianceChain:
    """With `more` · `more`ᵀ added, in proportion to what rounds share with the first or last one."""
    variances, links = (variances + more**2) * _ROUND_UP, (links + more[:-1] * more[1:]) * _ROUND_UP
    return CovarianceChain(tuple(variances.tolist()), tuple(links.tolist()))


def dominating_chain(products: Floats, clips: Floats) -> CovarianceChain:
    """A chain with covariances of at least `products` · `clips` · `clips`ᵀ, all ≥ 0, `products` of shape (n, n).

    Guarantee: whatever the decay, no covariance is below.
    """
    products = products + np.diag(np.maximum(0.0, _MIN_COLUMN * np.max(products) - np.diag(products)))
    clips = np.maximum(clips, _MIN_CLIP * np.max(clips))
    lag = np.triu(np.subtract.outer(np.arange(len(clips)), np.arange(len(clips))).T)
    upper = np.triu(np.maximum(products, products.T) * _ROUND_UP)
    with np.errstate(divide="ignore"):
        logs = np.where(upper > _MIN_OVERLAP, np.log(upper), -np.inf)
    found = []
    for decay in _candidate_decays(upper):
        with np.errstate(over="ignore", invalid="ignore"):  # of a decay far too fast: infinite
            diagonal = _dominating_diagonal(logs - lag * np.log(decay), decay)
            links = diagonal[1:] * decay * clips[:-1] * clips[1:]
            chain = CovarianceChain(tuple((diagonal * clips**2).tolist()), tuple(links.tolist()))
            overlaps = chain.covariance_sum
        found.append((overlaps if math.isfinite(overlaps) else math.inf, chain))
    return min(found, key=lambda each: each[0])[1]


def _dominating_diagonal(lifted: Floats, decay: float) -> Floats:
    """A_t, from ln(⟨C_s, C_t⟩ r^(s-t))."""
    found = np.exp(np.max(lifted, axis=0))
    for t in range(len(found) - 2, -1, -1):
        found[t] = max(found[t], decay**2 * found[t + 1] * _ROUND_UP)
    return as_floats(found)


def _candidate_decays(upper: Floats) -> list[float]:
    """Decays from one overlap to another one: of neighbours, and along the first row."""
    first, diagonal = upper[0], upper.diagonal()
    pairs = [*zip(upper.diagonal(1), diagonal[1:], strict=True), *zip(first[1:], first[:-1], strict=True)]
    ratios = sorted({min(1.0, float(after / before)) for after, before in pairs if after > _MIN_OVERLAP < before})
    if not ratios:
        return [1e-3]
    few = _MAX_DECAYS if len(first) < _LONG_CHAIN else _MAX_DECAYS // 3
    return [ratios[place] for place in np.unique(np.linspace(0, len(ratios) - 1, few).astype(int))]


@dataclass(frozen=True)
class FadingOverlaps:
    """What a unit's rounds move alike, over the square of the clip: what is known, and chains above the rest."""

    epoch_chains: tuple[CovarianceChain, ...]
    """Of every epoch, independent of the others'; equal ones where they are alike."""
    shared_variance: float = 0.0
    """The variance of what all rounds of the run share."""


def find_overlaps(products: Floats, clips: Floats, bins: int) -> FadingOverlaps:
    """The chains above the inner products of columns, (n, n) for n rounds of which each epoch has `bins`.

    `clips`, (n,), have the clip's square in their unit.  Guarantee: with what is known above them all, rounded up.
    """
    moved = products * np.outer(clips, clips)
    apart = moved[np.triu_indices(len(clips), 1)]
    whole = _dominating_remainder(moved, clips, 0.0)
    if not np.any(apart) or float(np.sum(moved)) >= _PREFERENCE_FACTOR * whole.covariance_sum:
        return _split_epochs(whole, bins, 0.0)[1]
    tried = {float(np.min(apart)), *(float(np.median(apart)) / 2**each for each in range(1, _HALVINGS + 1))}
    first = _split_epochs(whole, bins, 0.0)
    others = (_split_epochs(_dominating_remainder(moved, clips, common), bins, common) for common in sorted(tried))
    best = min(others, key=lambda each: each[0])
    return (best if best[0] < _PREFERENCE_FACTOR * first[0] else first)[1]


def _dominating_remainder(moved: Floats, clips: Floats, common: float) -> CovarianceChain:
    """A chain above what is left of these overlaps where so much is known."""
    return dominating_chain(np.maximum(0.0, moved - common) / np.maximum(_TINY, np.outer(clips, clips)), clips)


def _split_epochs(rest: CovarianceChain, bins: int, common: float) -> tuple[float, FadingOverlaps]:
    """The epochs of a chain apart; and first the mean of all that rounds share."""
    epochs, found = len(rest.variances) // bins, list[CovarianceChain]()
    for _ in range(epochs - 1):
        first, rest = rest.split_at(bins)
        found.append(first.largest_first)
    found.append(rest.largest_first)
    known = epochs**2 * common * _ROUND_UP
    return sum(each.covariance_sum for each in found) / bins**2 + known, FadingOverlaps(
        _merge_chains(found), known
    )


def _merge_chains(chains: Sequence[CovarianceChain]) -> tuple[CovarianceChain, ...]:
    """Chains above these, as few different ones as are not much above."""
    groups: list[tuple[CovarianceChain, float, list[int]]] = []
    for place, chain in enumerate(chains):
        for number, (largest, sums, places) in enumerate(groups):
            both, together = largest.maximum_with(chain), sums + chain.covariance_sum
            if both.covariance_sum * (len(places) + 1) <= _MERGE_FACTOR * together:
                groups[number] = (both, together, [*places, place])
                break
        else:
            groups.append((chain, chain.covariance_sum, [place]))
    of = {place: chain for chain, _, places in groups for place in places}
    return tuple(of[place] for place in range(len(chains)))


LOST_MEAN = 1e-13
"""The mean that walks may leave out which leave their lattice."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_THIRD_ORDER, _FOURTH_ORDER = 0.0081, 0.0235  # of η
_MAX_CACHED = 32  # matrices of one lattice
_MIN_SUM_LOG, _MIN_SUM_COARSENING = (
    14.0,
    4.0,
)  # of a least sum: e^-14 of it, by steps so many times coarser than near 0
_BOUNDED_STEP_VARIANCE = 2.25  # h² of it is the variance that Hoeffding's inequality gives a step


class ExponentGrid:
    """The multiples of h on which a chain's exponents walk."""

    def __init__(self, chain: CovarianceChain, spacing: float, most: int) -> None:
        """`spacing` is h over the least standard deviation of a step, `most` the largest number of points."""
        variances, links = np.array(chain.variances), np.array(chain.next_covariances)
        self.ratios = as_floats(np.append(0.0, links / variances[:-1]))
        """r_t; of the first round 0."""
        self._stds = np.sqrt(np.maximum(0.0, variances - self.ratios * np.append(0.0, links)))
        self.step = spacing * float(np.min(self._stds[self._stds > 0.0]))
        low, high = self._range()
        if (high - low) / self.step > most:
            self.step = (high - low) / most
            low, high = self._range()
        self._indices = range(math.floor(low / self.step), math.ceil(high / self.step) + 1)
        self._cached_transitions: dict[tuple[float, float], Floats] = {}

    @property
    def size(self) -> int:
        """Number of points; steep ratios make it many more than `most`, and nothing is laid out for it yet."""
        return len(self._indices)

    @cached_property
    def points(self) -> Floats:
        """The points."""
        return as_floats(self.step * np.array(self._indices))

    def _range(self) -> tuple[float, float]:
        """Ends of the interval that walks leave with probability `LEFT` at most."""
        rough = self._variances(_BOUNDED_STEP_VARIANCE)
        largest, more = float(np.max(rough)), float(np.max(rough - self.variances))
        reach = math.sqrt(2.0 * largest * (math.log(2.0 * (len(rough) + 1) / LOST_MEAN) + more))
        return -reach, reach + largest

    @property
    def variances(self) -> Floats:
        """a_t."""
        return self._variances(0.0)

    def _variances(self, of_steps: float) -> Floats:
        found, last = [], 0.0
        for ratio, std in zip(self.ratios, self.stds, strict=True):
            last = ratio**2 * last + std**2 + of_steps * self.step**2
            found.append(last)
        return as_floats(found)

    @property
    def stds(self) -> Floats:
        """τ_t: a law narrower than the lattice has no place on it."""
        return as_floats(np.maximum(self._stds, self.step))

    @cached_property
    def scales(self) -> Floats:
        """Π_j m(r_jt)."""
        return as_floats([np.prod(1.0 + (each * self.step) ** 2 / 8.0) for each in self._cumulative_ratios])

    @cached_property
    def relative_error(self) -> float:
        """κ."""
        return math.expm1(
            min(100.0, max(float(np.sum(self._step_errors(each))) for each in self._cumulative_ratios))
        )

    def _step_errors(self, ratios: Floats) -> Floats:
        size = ratios * self.step
        return as_floats(_THIRD_ORDER * size**3 + _FOURTH_ORDER * size**4 * np.exp(np.minimum(1.5 * size, 100.0)))

    @cached_property
    def _cumulative_ratios(self) -> list[Floats]:
        """Products r_jt of the steps up to each round, in the order of rounds and, within a round, of j."""
        found, each = [np.ones(1)], np.ones(1)
        for ratio in self.ratios[1:]:
            each = np.append(each * ratio, 1.0)
            found.append(each)
        return found

    @cached_property
    def prior(self) -> Floats:
        """The law of the first round's exponent."""
        return as_floats(self._compute_transitions(0.0, float(self.stds[0]))[0])

    def transition_matrix(self, ratio: float, std: float) -> Floats:
        """The probability of going from any exponent (rows) to any other (columns)."""
        if (ratio, std) not in self._cached_transitions:
            if len(self._cached_transitions) == _MAX_CACHED:
                self._cached_transitions.clear()
            self._cached_transitions[ratio, std] = self._compute_transitions(ratio, std)
        return self._cached_transitions[ratio, std]

    def _compute_transitions(self, ratio: float, std: float) -> Floats:
        apart = self.points[None, :] - ratio * self.points[:, None]
        found = np.zeros_like(apart)
        for piece in (-1.0, 0.0, 1.0):
            for node, weight in zip(_NODES, _WEIGHTS, strict=True):
                off = piece + 0.5 * node
                share = 0.75 - off**2 if piece == 0.0 else 0.5 * (1.5 - abs(off)) ** 2
                found += (0.5 * weight * share) * np.exp(-0.5 * ((apart + off * self.step) / std) ** 2)
        return as_floats(found * (self.step / (math.sqrt(2.0 * math.pi) * std)))


class SumGrid:
    """A grid of sums, closer where they are near 0, and near the least sum where that is asked for."""

    def __init__(
        self, bottom: float, top: float, scale: float, spacing: float, *, fine_at_bottom: bool = False
    ) -> None:
        """Lay points from `bottom` < 0 to `top` > 0.

        Near 0 they are `spacing` · `scale` apart, and beyond `scale` in proportion to their size.  `least` says
        that no sum is below `bottom`: points come closer to it in proportion, down to e^-`_NEAREST`.
        """
        self.scale, self.spacing = scale, spacing
        first = math.floor(math.asinh(bottom / scale) / spacing - 1e-6)
        last = math.ceil(math.asinh(top / scale) / spacing)
        points = scale * np.sinh(spacing * np.arange(first, last + 1))
        points[0], points[-first] = bottom, 0.0
        self._steps = None if fine_at_bottom else first
        if fine_at_bottom:
            count = math.ceil(_MIN_SUM_LOG / (_MIN_SUM_COARSENING * spacing))
            near = bottom - bottom * np.exp(-_MIN_SUM_COARSENING * spacing * np.arange(count + 1))
            points = np.union1d(points, near[1:])
        self.points = as_floats(points)
        self.zero = int(np.searchsorted(self.points, 0.0))
        """The place of 0."""
        self._widths = np.maximum(np.diff(self.points), 1e-300)  # the bottom may be a point of the grid

    def _lower_indices(self, aims: Floats) -> NDArray[np.int64]:
        """The points below; the bottom and the last but one for those outside."""
        most = len(self.points) - 2
        if self._steps is None:
            return np.clip(np.searchsorted(self.points, aims, side="right") - 1, 0, most)
        nearest = np.arcsinh(aims / self.scale) / self.spacing
        nearest -= self._steps
        return np.clip(nearest, 0.0, float(most), out=nearest).astype(np.int64)  # which rounds down

    def shift_onto(self, laws: Floats, increments: Floats, onto: "SumGrid") -> tuple[Floats, Floats]:
        """The laws (rows) on another grid after each has grown by its increment, and the means that were above it.

        Guarantee: means are kept but for these, and for sums below the grid, which come up to its bottom: safe for
        functions that rise with the sum.  Where no sum is below the bottom, any convex function is.
        """
        size = len(onto.points)
        held = np.flatnonzero(np.max(laws, axis=0) > 0.0)
        some = slice(held[0], held[-1] + 1)
        laws, aims = laws[:, some], self.points[some] + increments[:, None]
        places = onto._lower_indices(aims)
        beyond, high = np.zeros(len(laws)), np.flatnonzero(aims[np.argmax(increments)] > onto.points[-1])
        if len(high):
            over = slice(high[0], None)
            beyond = np.einsum("us,us->u", laws[:, over], np.maximum(0.0, aims[:, over] - onto.points[-1]))
        aims -= onto.points[places]
        aims /= onto._widths[places]
        upper = np.clip(aims, 0.0, 1.0, out=aims)
        upper *= laws
        places += size * np.arange(len(laws))[:, None]
        found = np.bincount(places.ravel(), (laws - upper).ravel(), size * len(laws))
        found[1:] += np.bincount(places.ravel(), upper.ravel(), size * len(laws))[:-1]
        return as_floats(found.reshape(-1, size)), as_floats(beyond)


def sum_distribution(
    lattice: ExponentGrid, grids: Sequence[SumGrid], increments: Callable[[int, Floats], Floats]
) -> tuple[Floats, float]:
    """The law of the sum on the last of the `grids`, one for each number of rounds from 0; the mean above them.

    `increments` gives what round t adds where its exponents are these.
    """
    found = np.zeros((len(lattice.points), len(grids[0].points)))
    found[:, grids[0].zero] = 1.0
    above, stds = np.zeros(len(lattice.points)), lattice.stds
    for t, grid, sums in zip(range(len(stds) - 1, -1, -1), grids, grids[1:], strict=False):
        found, beyond = grid.shift_onto(found, increments(t, lattice.points), sums)
        above = above + beyond
        if t:
            moves = lattice.transition_matrix(float(lattice.ratios[t]), float(stds[t]))
            found, above = moves @ found, moves @ above
            found[:, sums.zero] += np.maximum(0.0, 1.0 - np.sum(moves, axis=1))
    return as_floats(lattice.prior @ found), float(lattice.prior @ above)
