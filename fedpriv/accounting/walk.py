"""Sums of exponentials along a chain: their laws given one round's exponent, from above in convex order.

S = Σ p_t w_t, w_t = e^(G_t - a_t/2), for a `Chain` G. Written outwards from one round, the start, it is G_0 =
√a_0 z_0 and G_t = r_t G_(t-1) + τ_t z_t, so that (G_t, the sum so far) is a Markov process of two numbers, whose
law is computed on a lattice of G and a grid of sums. An *arm* is a direction outwards from the start.

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

Of a product of two arms' sums the step of the start counts in both: m(r + q) lies between m(r) m(q) and that
times 1 + r q h²/4, by which the upper κ is larger. A τ below h is raised to it, and so is the start's √a_0, and
variances with them: Kahane allows it.

**Ends of the lattice.** A walk that leaves it stops: its later w~ count as 1, in every sum. (S - γ)+ and (S -
γS')+ fall by at most what S~ loses, since both are at most S; (1 - γS)+ is at most 1 and falls by at most the
probability that the walk leaves. That, and E[Σ p_t w~_t; the walk leaves], are at most `LEFT` each:
tilted by w~_t the walk's exponent at any round is at most its covariance higher, and a bounded step of mean 0
counts as a variance of 9h²/4 (Hoeffding).

**The grid of sums.** Sums are moved to their two neighbours with their mean kept, which only raises E F for
convex F; those above the grid come to its top, and what they lose of their mean is `excess`: F grows by at most
that.

**Rounding.** All masses are ≥ 0 and only added and multiplied, so that each has a relative error of less than
1e-16 times the number of operations on its way, below 1e-10 altogether; ten points of Gauss and
Legendre for each of B's three pieces have one of less than 1e-12 within seven standard deviations, as τ ≥ h.
`losses` raises every δ by a relative 1e-9.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.accounting.chain import Chain
from fedpriv.accounting.curves import Floats, as_floats

LEFT = 1e-13
"""The mean that walks may leave out which leave their lattice."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_THIRD, _FOURTH = 0.0081, 0.0235  # of η
_KEPT = 32  # matrices of one lattice
_BOUNDED = 2.25  # h² of it is the variance that Hoeffding's inequality gives a step


@dataclass(frozen=True)
class Arm:
    """Rounds outwards from the start."""

    ratios: Floats
    """r_t of every round of the arm."""
    stds: Floats
    """τ_t; of the start itself r and τ are 0."""
    starts: bool
    """Whether the first round is the start itself."""


def arms_of(chain: Chain, start: int | None) -> list[Arm]:
    """The arms of a chain: one from round 0 (None), or from `start` backwards and from behind it forwards."""
    variances, links = np.array(chain.variances), np.array(chain.links)
    if start is None:
        return [_arm(variances, links, True)]
    back = slice(start, None, -1)
    return [
        _arm(variances[back], links[start - 1 :: -1] if start else links[:0], True),
        _arm(variances[start:], links[start:], False),
    ]


def _arm(variances: Floats, links: Floats, starts: bool) -> Arm:
    ratios = links / variances[:-1]
    stds = np.sqrt(np.maximum(0.0, variances[1:] - ratios * links))
    return Arm(np.append(0.0, ratios), np.append(0.0, stds), True) if starts else Arm(ratios, stds, False)


class Lattice:
    """The multiples of h on which the exponents of one or two arms walk."""

    def __init__(self, first: float, arms: Sequence[Arm], spacing: float, most: int) -> None:
        """`first` is the start's variance, `spacing` h over the least τ, `most` the largest number of points."""
        self.arms, self._start = arms, first
        stds = np.concatenate([arm.stds[arm.stds > 0.0] for arm in arms] + [np.array([math.sqrt(first)])])
        self.step = spacing * float(np.min(stds))
        low, high = self._range()
        if (high - low) / self.step > most:
            self.step = (high - low) / most
            low, high = self._range()
        self._places = range(math.floor(low / self.step), math.ceil(high / self.step) + 1)
        self._kept: dict[tuple[float, float], Floats] = {}

    @property
    def size(self) -> int:
        """Number of points; steep ratios make it many more than `most`, and nothing is laid out for it yet."""
        return len(self._places)

    @cached_property
    def at(self) -> Floats:
        """The points."""
        return as_floats(self.step * np.array(self._places))

    @property
    def first(self) -> float:
        """The start's variance, raised like those of steps: a law narrower than the lattice has no place on it."""
        return max(self._start, self.step**2)

    def _range(self) -> tuple[float, float]:
        """From where to where a walk goes but for `LEFT`."""
        rough = [self._variances(arm, _BOUNDED) for arm in self.arms]
        largest, rounds = max(float(np.max(each)) for each in rough), sum(len(each) for each in rough)
        more = sum(float(np.max(each - self.variances(arm))) for arm, each in zip(self.arms, rough, strict=True))
        more += (len(self.arms) - 1) * largest
        reach = math.sqrt(2.0 * largest * (math.log(2.0 * (rounds + 1) / LEFT) + more))
        return -reach, reach + largest * len(self.arms)

    def variances(self, arm: Arm) -> Floats:
        """a_t of the arm's rounds."""
        return self._variances(arm, 0.0)

    def _variances(self, arm: Arm, of_steps: float) -> Floats:
        found, last = [], self.first + of_steps * self.step**2
        for place, (ratio, std) in enumerate(zip(arm.ratios, self.stds(arm), strict=True)):
            if place or not arm.starts:
                last = ratio**2 * last + std**2 + of_steps * self.step**2
            found.append(last)
        return as_floats(found)

    def stds(self, arm: Arm) -> Floats:
        return np.maximum(arm.stds, self.step)

    def scales(self, arm: Arm) -> Floats:
        """Π_j m(r_jt) of the arm's rounds."""
        return as_floats([np.prod(1.0 + (each * self.step) ** 2 / 8.0) for each in self._reached(arm)])

    @cached_property
    def errors(self) -> tuple[float, float]:
        """κ below and above."""
        least = sum(max(float(np.sum(self._errors(each))) for each in self._reached(arm)) for arm in self.arms)
        if len(self.arms) == 1:
            return _less_one(least), _less_one(least)
        first, second = (max(float(each[0]) for each in self._reached(arm)) for arm in self.arms)
        least += float(self._errors(np.array([first + second]))[0])
        return _less_one(least), _less_one(least + first * second * self.step**2 / 4.0)

    def _errors(self, ratios: Floats) -> Floats:
        size = ratios * self.step
        return as_floats(_THIRD * size**3 + _FOURTH * size**4 * np.exp(np.minimum(1.5 * size, 100.0)))

    def _reached(self, arm: Arm) -> list[Floats]:
        """Of every round of the arm the r_jt of all steps before it, the start's first."""
        found, each = [], np.ones(1)
        for place, ratio in enumerate(arm.ratios):
            if place or not arm.starts:
                each = np.append(each * ratio, 1.0)
            found.append(each)
        return found

    @cached_property
    def prior(self) -> Floats:
        """The law of the start's exponent."""
        return as_floats(self.moves(0.0, math.sqrt(self.first))[0])

    def moves(self, ratio: float, std: float) -> Floats:
        """The probability of going from any exponent (rows) to any other (columns)."""
        if (ratio, std) not in self._kept:
            if len(self._kept) == _KEPT:
                self._kept.clear()
            self._kept[ratio, std] = self._moves(ratio, std)
        return self._kept[ratio, std]

    def _moves(self, ratio: float, std: float) -> Floats:
        apart = self.at[None, :] - ratio * self.at[:, None]
        found = np.zeros_like(apart)
        for piece in (-1.0, 0.0, 1.0):
            for node, weight in zip(_NODES, _WEIGHTS, strict=True):
                off = piece + 0.5 * node
                share = 0.75 - off**2 if piece == 0.0 else 0.5 * (1.5 - abs(off)) ** 2
                found += (0.5 * weight * share) * np.exp(-0.5 * ((apart + off * self.step) / std) ** 2)
        return as_floats(found * (self.step / (math.sqrt(2.0 * math.pi) * std)))


def _less_one(exponent: float) -> float:
    """e^x - 1, of what is too large a large number."""
    return math.expm1(min(exponent, 100.0))


class Sums:
    """A grid of sums, closer where they are near 0."""

    def __init__(self, bottom: float, top: float, scale: float, spacing: float) -> None:
        """From `bottom` < 0 to `top` > 0, `spacing` · `scale` apart near 0 and in proportion beyond `scale`."""
        self.scale, self.spacing = scale, spacing
        self.first = math.floor(math.asinh(bottom / scale) / spacing - 1e-6)
        last = math.ceil(math.asinh(top / scale) / spacing)
        self.points = as_floats(scale * np.sinh(spacing * np.arange(self.first, last + 1)))
        self.points[0], self.points[-self.first] = bottom, 0.0
        self._widths = np.maximum(np.diff(self.points), 1e-300)  # the bottom may be a point of the grid

    def moved(self, laws: Floats, increments: Floats) -> tuple[Floats, Floats]:
        """The laws (rows) after each has grown by its increment, and the means that were above the grid.

        Guarantee: means are kept but for these, and for sums below the grid, which come up to its bottom.
        """
        size = len(self.points)
        held = np.flatnonzero(np.max(laws, axis=0) > 0.0)
        some = slice(held[0], held[-1] + 1)
        laws, aims = laws[:, some], self.points[some] + increments[:, None]
        places = np.floor(np.arcsinh(aims / self.scale) / self.spacing).astype(np.int64) - self.first
        np.clip(places, 0, size - 2, out=places)
        upper = laws * np.clip((aims - self.points[places]) / self._widths[places], 0.0, 1.0)
        beyond = np.sum(laws * np.maximum(0.0, aims - self.points[-1]), axis=1)
        places += size * np.arange(len(laws))[:, None]
        found = np.bincount(places.ravel(), (laws - upper).ravel(), size * len(laws))
        found[1:] += np.bincount(places.ravel(), upper.ravel(), size * len(laws))[:-1]
        return as_floats(found.reshape(-1, size)), as_floats(beyond)


def laws(
    lattice: Lattice, arm: Arm, sums: Sums, increments: Callable[[int, Floats], Floats]
) -> tuple[Floats, Floats]:
    """The laws of an arm's sum, given the start's exponent: shape (exponents, sums); and the means above the grid.

    `increments` gives what round t adds where its exponents are these.
    """
    found = np.zeros((len(lattice.at), len(sums.points)))
    found[:, -sums.first] = 1.0
    above, stds = np.zeros(len(lattice.at)), lattice.stds(arm)
    for t in range(len(stds) - 1, -1, -1):
        found, beyond = sums.moved(found, increments(t, lattice.at))
        above = above + beyond
        if t or not arm.starts:
            moves = lattice.moves(float(arm.ratios[t]), float(stds[t]))
            found, above = moves @ found, moves @ above
            found[:, -sums.first] += np.maximum(0.0, 1.0 - np.sum(moves, axis=1))
    return as_floats(found), as_floats(above)
