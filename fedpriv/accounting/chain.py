"""Gaussian Markov chains that dominate a unit's rounds, and the distribution of their sums.

A unit is what neighbours differ in, such as a record.  In every epoch it takes part in one round, drawn in secret.
Noise is added to C s, for the sums s of the rounds and a lower triangular matrix C with columns C_t.  The
*overlap* of rounds s and t is X_st = clip_s clip_t ⟨C_s, C_t⟩, where clip_t is the largest norm of the unit's
contribution to round t.

A run is dominated by Gaussian exponents G_t with covariances X_st (`fading`): the likelihood ratio of an epoch is
S = Σ p_t e^(G_t - a_t/2), for the probability p_t of round t and the variance a_t of G_t.  Larger covariances give
a valid bound, too.  So the overlaps are replaced by the covariances of a chain, which are at least as large, and
for which the distribution of S can be computed.

**Chains.**  A chain is a Gaussian Markov vector.  With variances a_t and covariances l_t of neighbours it has

    Y_st = l_s l_(s+1) … l_(t-1) / (a_(s+1) … a_(t-1)),   s < t.

A chain above the overlaps is, for a decay r,

    Y_st = clip_s clip_t A_t r^(t-s),   A_t = max(max_(s ≤ t) ⟨C_s, C_t⟩ r^(s-t), r² A_(t+1)).

The second argument of the maximum makes sure that a vector with these covariances exists.  A part κ² of every
overlap can be accounted for by one Gaussian release that hides no round of the unit, and the chain then has to lie
above (X - κ²)+ only.

Proofs: docs/proofs/chains.md, and docs/proofs/chain-sums.md for the distribution of S.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.curves import Floats, as_floats

_ROUND_UP = 1.0 + 1e-9  # factor of every overlap, for the rounding of products, powers and their scale
_MAX_DECAYS, _LONG_CHAIN = 24, 800  # a third of the decays from this number of rounds on, to save time
_MIN_COLUMN, _MIN_CLIP = 1e-6, 0.1  # relative to the largest squared column norm, and to the largest clip
_MIN_OVERLAP = 1e-290  # smaller overlaps count as 0, far below what 1e-12 in δ (`losses`) covers
_HALVINGS = 6  # common overlaps to try: the median overlap over 2, 4, …, 2^6, and the smallest overlap
_PREFERENCE_FACTOR = 0.999  # another bound is taken only if its mean overlap is smaller by this factor
_MERGE_FACTOR = 1.005  # epochs share a chain if their sum of covariances grows by at most this factor
_TINY = 1e-300
MAX_ROUNDS = 200
"""Largest number of rounds of an epoch for which chains are computed, since longer ones take too long."""


@dataclass(frozen=True)
class CovarianceChain:
    """Variances of a unit's exponents G_t, and covariances of consecutive ones.

    They are in units of clip² / σ² until `with_noise_multiplier` has multiplied them by this unit, where σ / clip
    is the noise multiplier.
    """

    variances: tuple[float, ...]
    """a_t, (n,), the variance of the exponent of round t."""
    next_covariances: tuple[float, ...]
    """l_t, (n - 1,), the covariance of rounds t and t + 1."""

    def with_noise_multiplier(self, multiplier: float) -> "CovarianceChain":
        """Return the chain of the exponents at this noise multiplier, rounded up."""
        factor = multiplier**-2 * (1.0 + 1e-12)
        return CovarianceChain(
            tuple(factor * covariance for covariance in self.variances),
            tuple(factor * covariance for covariance in self.next_covariances),
        )

    @property
    def covariances(self) -> Floats:
        """Covariances Y_st, (n, n)."""
        covariances = np.diag(self.variances)
        for t, next_covariance in enumerate(self.next_covariances):
            covariances[: t + 1, t + 1] = covariances[t + 1, : t + 1] = covariances[: t + 1, t] * (
                next_covariance / self.variances[t]
            )
        return covariances

    @property
    def covariance_sum(self) -> float:
        """Sum of all n² covariances, computed along the chain in n steps."""
        earlier_sum, total = 0.0, 0.0
        for variance, ratio in zip(self.variances, (0.0, *self._ratios), strict=True):
            earlier_sum *= ratio  # now Σ of the covariances of round t with all earlier ones
            total += variance + 2.0 * earlier_sum
            earlier_sum += variance
        return total

    @property
    def largest_first(self) -> "CovarianceChain":
        """Same chain, reversed if the last variance is larger than the first.

        A sum over rounds has no order, so that its distribution is the same for both.
        """
        return (
            self
            if self.variances[0] >= self.variances[-1]
            else CovarianceChain(self.variances[::-1], self.next_covariances[::-1])
        )

    def maximum_with(self, other: "CovarianceChain") -> "CovarianceChain":
        """Return a chain of the same length whose covariances are at least those of both chains.

        Guarantee: Y_st = a_s ρ_s ρ_(s+1) … ρ_(t-1) with ρ_t = l_t / a_t rises with each a_s and each ρ_t.
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
        return [
            covariance / variance
            for covariance, variance in zip(self.next_covariances, self.variances[:-1], strict=True)
        ]

    def split_at(self, rounds: int) -> tuple["CovarianceChain", "CovarianceChain"]:
        """Return the first `rounds` rounds and the remaining ones, 1 or more each, as two independent chains.

        With a standard normal ξ, b ξ is added to the exponents of the first part and c ξ subtracted from those of
        the second.  The vectors b and c (`head_weights` and `tail_weights`) are such that b cᵀ are the covariances
        between the parts.  So these become 0, and the covariances within the parts grow by b bᵀ and c cᵀ.

        Guarantee: expectations of convex functions of the likelihood ratios do not fall (docs/proofs/chains.md).
        """
        variances, covariances = np.array(self.variances), np.array(self.next_covariances)
        # For s before the cut and t after it, Y_st = (factor of s) · (covariance at the cut) · (factor of t).
        cut_covariance = covariances[rounds - 1]
        head_weights = np.cumprod(np.append(1.0, (covariances[: rounds - 1] / variances[1:rounds])[::-1]))[::-1]
        tail_weights = np.cumprod(np.append(1.0, covariances[rounds:] / variances[rounds:-1]))
        # b and c are scaled so that the sums of their entries are equal.
        head_weights *= math.sqrt(cut_covariance * float(np.sum(tail_weights)) / float(np.sum(head_weights)))
        tail_weights *= cut_covariance / max(_TINY, float(head_weights[-1]))
        return (
            _add_outer_square(variances[:rounds], covariances[: rounds - 1], head_weights),
            _add_outer_square(variances[rounds:], covariances[rounds:], tail_weights),
        )


def _add_outer_square(variances: Floats, next_covariances: Floats, weights: Floats) -> CovarianceChain:
    """Return the chain of (variances, neighbours' covariances) + `weights` · `weights`ᵀ, rounded up.

    `weights` are proportional to the covariances of all rounds with the first or with the last one, so that the
    sum is a chain.
    """
    variances, next_covariances = (
        (variances + weights**2) * _ROUND_UP,
        (next_covariances + weights[:-1] * weights[1:]) * _ROUND_UP,
    )
    return CovarianceChain(tuple(variances.tolist()), tuple(next_covariances.tolist()))


def dominating_chain(products: Floats, clips: Floats) -> CovarianceChain:
    """Return a chain whose covariances are at least `products`_st · `clips`_s · `clips`_t.

    Candidates are the chains clip_s clip_t A_t r^(t-s), s ≤ t, of the module's docstring, for some decays r.  The
    one with the smallest sum of covariances is returned.

    Guarantee: no covariance is smaller, whatever decay is chosen, except that products of 1e-290 or less may count
    as 0.

    Args:
        products: Upper bounds of the inner products ⟨C_s, C_t⟩, (n, n), 0 or more and not all 0.
        clips: Clip of each round, (n,), 0 or more and not all 0.
    """
    # Squared norms and clips that are tiny next to the largest ones are raised, as chains divide by variances.
    products = products + np.diag(np.maximum(0.0, _MIN_COLUMN * np.max(products) - np.diag(products)))
    clips = np.maximum(clips, _MIN_CLIP * np.max(clips))
    # t - s for s ≤ t, and 0 below the diagonal.
    lag = np.triu(np.subtract.outer(np.arange(len(clips)), np.arange(len(clips))).T)
    upper = np.triu(np.maximum(products, products.T) * _ROUND_UP)
    with np.errstate(divide="ignore"):
        logs = np.where(upper > _MIN_OVERLAP, np.log(upper), -np.inf)
    chains, covariance_sums = list[CovarianceChain](), list[float]()
    for decay in _candidate_decays(upper):
        with np.errstate(over="ignore", invalid="ignore"):  # a decay far too small gives infinity
            diagonal = _dominating_diagonal(logs - lag * np.log(decay), decay)
            next_covariances = diagonal[1:] * decay * clips[:-1] * clips[1:]
            chain = CovarianceChain(tuple((diagonal * clips**2).tolist()), tuple(next_covariances.tolist()))
            covariance_sum = chain.covariance_sum
        chains.append(chain)
        covariance_sums.append(covariance_sum if math.isfinite(covariance_sum) else math.inf)
    return chains[int(np.argmin(covariance_sums))]


def _dominating_diagonal(log_overlaps: Floats, decay: float) -> Floats:
    """Return A_t of the module's docstring, rounded up, (n,).

    Args:
        log_overlaps: ln(⟨C_s, C_t⟩ r^(s-t)), or -∞ where s > t or the product counts as 0, (n, n).
        decay: Decay r.
    """
    diagonal = np.exp(np.max(log_overlaps, axis=0))
    for t in range(len(diagonal) - 2, -1, -1):
        diagonal[t] = max(diagonal[t], decay**2 * diagonal[t + 1] * _ROUND_UP)
    return as_floats(diagonal)


def _candidate_decays(upper: Floats) -> list[float]:
    """Return decays r ≤ 1 to try, ascending, where covariances of rounds t - s apart fall as r^(t-s).

    They are some of the ratios ⟨C_s, C_(s+1)⟩ / ‖C_(s+1)‖², and of each entry of the first row over the one before
    it.  A ratio above 1 counts as 1, and one of products of 1e-290 or less does not count.  If no ratio is left,
    1e-3 is the only decay.

    Args:
        upper: Products ⟨C_s, C_t⟩ for s ≤ t, and 0 below the diagonal, (n, n).
    """
    first_row, diagonal = upper[0], upper.diagonal()
    pairs = [*zip(upper.diagonal(1), diagonal[1:], strict=True), *zip(first_row[1:], first_row[:-1], strict=True)]
    ratios = sorted(
        {min(1.0, float(later / earlier)) for later, earlier in pairs if later > _MIN_OVERLAP < earlier}
    )
    if not ratios:  # neighbouring rounds do not overlap
        return [1e-3]
    max_decays = _MAX_DECAYS if len(first_row) < _LONG_CHAIN else _MAX_DECAYS // 3
    return [ratios[index] for index in np.unique(np.linspace(0, len(ratios) - 1, max_decays).astype(int))]


@dataclass(frozen=True)
class FadingOverlaps:
    """Chains of a unit's epochs, and a variance that all rounds share, in units of clip² / σ².

    Together they give an upper bound of δ for the overlaps that they were made from (`find_overlaps`).
    """

    epoch_chains: tuple[CovarianceChain, ...]
    """Chains of the epochs, independent of each other, and mostly equal where epochs are nearly alike."""
    shared_variance: float = 0.0
    """k² κ² for k epochs, the variance of the common part of a unit's k rounds (module docstring)."""


def find_overlaps(products: Floats, clips: Floats, bins: int) -> FadingOverlaps:
    """Return a bound of the overlaps of a unit's rounds.

    An overlap is X_st = `clips`_s `clips`_t `products`_st.  For a common overlap κ² a chain is put above (X - κ²)+
    and split into epochs.  κ² is 0, or the smallest overlap of two rounds, or their median overlap over 2, 4, …,
    64.  The bound with the smallest mean overlap (`_split_epochs`) is returned, where a κ² > 0 has to be better
    than 0 by more than 0.1 %.  Only κ² = 0 is tried if no two rounds overlap, or if the overlaps add up to 99.9 %
    or more of the sum of its chain's covariances.

    Guarantee: before it is split into epochs, the chain is above (X - κ²)+, as `dominating_chain` states.  The
    split lowers no expectation of a convex function of the likelihood ratios (`CovarianceChain.split_at`).

    Args:
        products: Upper bounds of the inner products of the columns of C, (n, n), symmetric, 0 or more and not all
            0, for n rounds.  None is above the geometric mean of its two entries on the diagonal.
        clips: Clips of the rounds, (n,), not all 0, in multiples of the clip in the noise multiplier σ / clip.
        bins: Rounds of each epoch, of which n is a multiple.
    """
    overlaps = products * np.outer(clips, clips)
    off_diagonal = overlaps[np.triu_indices(len(clips), 1)]
    dominating = _dominating_remainder(overlaps, clips, 0.0)
    plain_mean, plain_bound = _split_epochs(dominating, bins, 0.0)
    # No two rounds overlap, or the chain is hardly above the overlaps, so that a common overlap would gain little.
    if not np.any(off_diagonal) or float(np.sum(overlaps)) >= _PREFERENCE_FACTOR * dominating.covariance_sum:
        return plain_bound
    common_overlaps = {
        float(np.min(off_diagonal)),
        *(float(np.median(off_diagonal)) / 2**item for item in range(1, _HALVINGS + 1)),
    }
    bounds = (
        _split_epochs(_dominating_remainder(overlaps, clips, common), bins, common)
        for common in sorted(common_overlaps)
    )
    least_mean, best_bound = min(bounds, key=lambda mean_and_bound: mean_and_bound[0])
    return best_bound if least_mean < _PREFERENCE_FACTOR * plain_mean else plain_bound


def _dominating_remainder(overlaps: Floats, clips: Floats, common: float) -> CovarianceChain:
    """Return a chain above the positive part of the overlaps, (n, n), minus `common`."""
    return dominating_chain(np.maximum(0.0, overlaps - common) / np.maximum(_TINY, np.outer(clips, clips)), clips)


def _split_epochs(chain: CovarianceChain, bins: int, common: float) -> tuple[float, FadingOverlaps]:
    """Return the mean overlap of two draws of a unit, and a bound with independent chains for the epochs.

    A draw is one round of every epoch, and the overlap of two draws is the sum of the overlaps of their rounds.
    The mean is that of the bound, before chains are merged.

    Args:
        chain: Chain above the overlaps of all rounds minus `common`, whose length is a multiple of `bins`.
        bins: Rounds of each epoch.
        common: Common overlap κ², which all rounds share.
    """
    epochs, epoch_chains = len(chain.variances) // bins, list[CovarianceChain]()
    for _ in range(epochs - 1):
        first_epoch, chain = chain.split_at(bins)
        epoch_chains.append(first_epoch.largest_first)
    epoch_chains.append(chain.largest_first)
    shared_variance = epochs**2 * common * _ROUND_UP
    return sum(part.covariance_sum for part in epoch_chains) / bins**2 + shared_variance, FadingOverlaps(
        _merge_chains(epoch_chains), shared_variance
    )


def _merge_chains(chains: Sequence[CovarianceChain]) -> tuple[CovarianceChain, ...]:
    """Replace chains by chains above them, in the same order, so that similar ones become equal.

    Chains form groups, and each chain is replaced by one that is above all of its group.  A chain joins the first
    group whose sum of covariances is then at most 0.5 % above that of the group's original chains.  The losses of
    equal chains need be computed once only.
    """
    groups: list[tuple[CovarianceChain, float, list[int]]] = []
    for index, chain in enumerate(chains):
        for group_number, (upper_chain, covariance_sum, indices) in enumerate(groups):
            merged_chain, total = upper_chain.maximum_with(chain), covariance_sum + chain.covariance_sum
            if merged_chain.covariance_sum * (len(indices) + 1) <= _MERGE_FACTOR * total:
                groups[group_number] = (merged_chain, total, [*indices, index])
                break
        else:
            groups.append((chain, chain.covariance_sum, [index]))
    chains_by_index = {index: chain for chain, _, indices in groups for index in indices}
    return tuple(chains_by_index[index] for index in range(len(chains)))


LOST_MEAN = 1e-13
"""Largest mean of S, and largest probability, on walks that leave the grid of exponents."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_THIRD_ORDER, _FOURTH_ORDER = 0.0081, 0.0235  # coefficients of η
_MAX_CACHED = 32  # transition matrices of one grid
# Near the least sum, points come as close to it as e^-14 of it, in relative steps of four spacings.
_MIN_SUM_LOG, _MIN_SUM_COARSENING = 14.0, 4.0
_BOUNDED_STEP_VARIANCE = 2.25  # Hoeffding's inequality gives a step the variance 2.25 h²


class ExponentGrid:
    """Grid of multiples of h on which a chain's exponents walk."""

    def __init__(self, chain: CovarianceChain, spacing: float, max_points: int) -> None:
        """Choose the step h and the range of the grid.

        A chain with variances a_t and covariances l_t of rounds t and t + 1 starts at G_0 = τ_0 z_0 with τ_0² =
        a_0.  It takes steps G_t = r_t G_(t-1) + τ_t z_t with r_t = l_(t-1) / a_(t-1), τ_t² = a_t - r_t l_(t-1),
        and z_t independent standard normal.

        Args:
            chain: Chain of the exponents.
            spacing: h over the smallest positive τ_t.
            max_points: Number of points above which h is raised, approximately.
        """
        variances, next_covariances = np.array(chain.variances), np.array(chain.next_covariances)
        self.ratios = as_floats(np.append(0.0, next_covariances / variances[:-1]))
        """r_t, (n,), with r_0 = 0."""
        self._stds = np.sqrt(np.maximum(0.0, variances - self.ratios * np.append(0.0, next_covariances)))
        self.step = spacing * float(np.min(self._stds[self._stds > 0.0]))
        low, high = self._range()
        if (high - low) / self.step > max_points:
            self.step = (high - low) / max_points
            low, high = self._range()
        self._indices = range(math.floor(low / self.step), math.ceil(high / self.step) + 1)
        self._cached_transitions: dict[tuple[float, float], Floats] = {}

    @property
    def size(self) -> int:
        """Number of points, which steep ratios can make much larger than `max_points`."""
        return len(self._indices)

    @cached_property
    def points(self) -> Floats:
        """Points of the grid, (size,), ascending."""
        return as_floats(self.step * np.array(self._indices))

    def _range(self) -> tuple[float, float]:
        """Return the ends of an interval that walks leave with probability and mean `LOST_MEAN` at most."""
        # The largest variance of a walk, and the most that rounding adds to one.
        walk_variances = self._variances(_BOUNDED_STEP_VARIANCE)
        largest, excess = float(np.max(walk_variances)), float(np.max(walk_variances - self.variances))
        reach = math.sqrt(2.0 * largest * (math.log(2.0 * (len(walk_variances) + 1) / LOST_MEAN) + excess))
        # Weighted by e^(G_t), exponents are higher by at most their largest variance.
        return -reach, reach + largest

    @property
    def variances(self) -> Floats:
        """Variances a_t of the exponents before rounding to the grid, (n,), with every τ_t at least h."""
        return self._variances(0.0)

    def _variances(self, step_variance: float) -> Floats:
        """Return variances (n,), with `step_variance` · h² added to the variance of each step."""
        variances, variance = [], 0.0
        for ratio, std in zip(self.ratios, self.stds, strict=True):
            variance = ratio**2 * variance + std**2 + step_variance * self.step**2
            variances.append(variance)
        return as_floats(variances)

    @property
    def stds(self) -> Floats:
        """Standard deviations τ_t of the steps, (n,), each at least h.

        The grid cannot resolve narrower steps.
        """
        return as_floats(np.maximum(self._stds, self.step))

    @cached_property
    def scales(self) -> Floats:
        """Factors Π_j m(r_jt) by which rounding raises the mean of e^(G_t), (n,), with m(r) = 1 + (r h)²/8.

        Terms of higher order are left to `relative_error`.  r_jt is the product of the ratios r_(j+1), …, r_t, and
        r_tt = 1.
        """
        return as_floats([np.prod(1.0 + (ratios * self.step) ** 2 / 8.0) for ratios in self._cumulative_ratios])

    @cached_property
    def relative_error(self) -> float:
        """Bound η of the relative error of the rounded sums in the mean, given all z_t, cut at e^100 - 1."""
        return math.expm1(
            min(100.0, max(float(np.sum(self._step_errors(ratios))) for ratios in self._cumulative_ratios))
        )

    def _step_errors(self, ratios: Floats) -> Floats:
        scaled_ratios = ratios * self.step
        return as_floats(
            _THIRD_ORDER * scaled_ratios**3
            + _FOURTH_ORDER * scaled_ratios**4 * np.exp(np.minimum(1.5 * scaled_ratios, 100.0))
        )

    @cached_property
    def _cumulative_ratios(self) -> list[Floats]:
        """Products r_jt of the ratios r_(j+1), …, r_t, one array (t + 1,) for each round t, in the order of j."""
        products, round_products = [np.ones(1)], np.ones(1)
        for ratio in self.ratios[1:]:
            round_products = np.append(round_products * ratio, 1.0)
            products.append(round_products)
        return products

    @cached_property
    def prior(self) -> Floats:
        """Probability of each exponent of the first round, (size,)."""
        return as_floats(self._compute_transitions(0.0, float(self.stds[0]))[0])

    def transition_matrix(self, ratio: float, std: float) -> Floats:
        """Return the probability of each exponent (columns) after each exponent (rows), (size, size).

        Args:
            ratio: r_t, the factor of the exponent before.
            std: τ_t, the standard deviation of the step, at least the step h of the grid.
        """
        if (ratio, std) not in self._cached_transitions:
            if len(self._cached_transitions) == _MAX_CACHED:
                self._cached_transitions.clear()
            self._cached_transitions[ratio, std] = self._compute_transitions(ratio, std)
        return self._cached_transitions[ratio, std]

    def _compute_transitions(self, ratio: float, std: float) -> Floats:
        """Return the probabilities of x = `ratio` · U + `std` · z, rounded to the grid, (size, size).

        U is the exponent before, one for each row, z is standard normal, and the columns are the points to which x
        is rounded.  x is rounded to a point p with the probability that the quadratic B-spline at (x - p)/h gives,
        so that its mean is kept inside of the grid.  Each entry is an integral over x, by Gauss-Legendre
        quadrature on the three pieces of the spline.
        """
        distances = self.points[None, :] - ratio * self.points[:, None]
        densities = np.zeros_like(distances)
        for piece in (-1.0, 0.0, 1.0):
            for node, weight in zip(_NODES, _WEIGHTS, strict=True):
                offset = piece + 0.5 * node
                spline_value = 0.75 - offset**2 if piece == 0.0 else 0.5 * (1.5 - abs(offset)) ** 2
                densities += (0.5 * weight * spline_value) * np.exp(
                    -0.5 * ((distances + offset * self.step) / std) ** 2
                )
        return as_floats(densities * (self.step / (math.sqrt(2.0 * math.pi) * std)))


class SumGrid:
    """Grid of sums, finer near 0, and optionally near the least sum."""

    def __init__(
        self, bottom: float, top: float, scale: float, spacing: float, *, fine_at_bottom: bool = False
    ) -> None:
        """Choose points from `bottom` < 0 to `top` > 0 or a little above it.

        Near 0 they are about `spacing` · `scale` apart.  Far beyond `scale` their distance grows in proportion to
        their size: arcsinh(x / `scale`) has steps of `spacing`, except near the bottom.

        Args:
            bottom: Smallest point.
            top: Number up to which the grid reaches at least, but for rounding.
            scale: Size of a sum beyond which points are farther apart.
            spacing: Distance of points near 0, in multiples of `scale`.
            fine_at_bottom: Whether no sum is below `bottom`.  Then more points are added, closer and closer to it.
        """
        self.scale, self.spacing = scale, spacing
        first = math.floor(math.asinh(bottom / scale) / spacing - 1e-6)
        last = math.ceil(math.asinh(top / scale) / spacing)
        # One of the multiples is 0, at the index -first.
        points = scale * np.sinh(spacing * np.arange(first, last + 1))
        points[0], points[-first] = bottom, 0.0
        # arcsinh(x / scale) / `spacing` of the first point before it became `bottom`.  None if the points are not
        # a range of these multiples, because points near the bottom were added.
        self._steps = None if fine_at_bottom else first
        if fine_at_bottom:
            count = math.ceil(_MIN_SUM_LOG / (_MIN_SUM_COARSENING * spacing))
            near = bottom - bottom * np.exp(-_MIN_SUM_COARSENING * spacing * np.arange(count + 1))
            points = np.union1d(points, near[1:])
        self.points = as_floats(points)
        self.zero = int(np.searchsorted(self.points, 0.0))
        """Index of the point 0."""
        self._widths = np.maximum(np.diff(self.points), 1e-300)  # the bottom may be a point of the grid

    def _lower_indices(self, values: Floats) -> NDArray[np.int64]:
        """Return the index of the largest point that is not above each value, up to rounding.

        Indices are limited to 0 … that of the last point but one, so that every index has a point above it.
        """
        last_index = len(self.points) - 2
        if self._steps is None:
            return np.clip(np.searchsorted(self.points, values, side="right") - 1, 0, last_index)
        positions = np.arcsinh(values / self.scale) / self.spacing
        positions -= self._steps
        return np.clip(positions, 0.0, float(last_index), out=positions).astype(np.int64)  # which rounds down

    def shift_onto(self, distributions: Floats, increments: Floats, target: "SumGrid") -> tuple[Floats, Floats]:
        """Add an increment to the sums of each row, and move them to another grid.

        A sum between two points is split between them, with its mean kept.

        Guarantee: means are kept, except for sums above the target grid, whose lost mean is returned, and for sums
        below it, which are moved up to its bottom.  No expectation of a convex function that rises with the sum
        falls by more than the lost mean times the function's largest slope.  If no sum is below the bottom, this
        holds for any convex function.

        Args:
            distributions: Masses of the sums, (rows, points of this grid).
            increments: Increment of each row, (rows,).
            target: Grid of the new sums.

        Returns:
            Masses (rows, points of `target`), and the mean that each row loses, (rows,).
        """
        point_count = len(target.points)
        occupied = np.flatnonzero(np.max(distributions, axis=0) > 0.0)
        columns = slice(occupied[0], occupied[-1] + 1)
        distributions, sums = distributions[:, columns], self.points[columns] + increments[:, None]
        # A sum between two points leaves mass at both, at each in proportion to its distance from the other one.
        lower_indices = target._lower_indices(sums)
        # The row of the largest increment has sums above the target in every column in which any row has.
        means_above, indices_above = (
            np.zeros(len(distributions)),
            np.flatnonzero(sums[np.argmax(increments)] > target.points[-1]),
        )
        if len(indices_above):
            columns_above = slice(indices_above[0], None)
            means_above = np.einsum(
                "us,us->u",
                distributions[:, columns_above],
                np.maximum(0.0, sums[:, columns_above] - target.points[-1]),
            )
        sums -= target.points[lower_indices]
        sums /= target._widths[lower_indices]
        upper_masses = np.clip(sums, 0.0, 1.0, out=sums)
        upper_masses *= distributions
        # All rows are counted at once, with a block of `point_count` indices for each.
        lower_indices += point_count * np.arange(len(distributions))[:, None]
        shifted = np.bincount(
            lower_indices.ravel(), (distributions - upper_masses).ravel(), point_count * len(distributions)
        )
        shifted[1:] += np.bincount(lower_indices.ravel(), upper_masses.ravel(), point_count * len(distributions))[
            :-1
        ]
        return as_floats(shifted.reshape(-1, point_count)), as_floats(means_above)


def sum_distribution(
    exponent_grid: ExponentGrid, sum_grids: Sequence[SumGrid], increments: Callable[[int, Floats], Floats]
) -> tuple[Floats, float]:
    """Compute the distribution of the sum of increments along a chain of n exponents.

    An increment is the term that round t adds to the sum, a function of the exponent G_t.  The recursion goes from
    the last round to the first.  Row i of `masses` is the distribution of the sum from round t on, given that the
    exponent of round t is point i of the grid.  A walk that leaves the grid of exponents adds nothing more, and
    one whose first exponent is beyond the grid is left out.

    Args:
        exponent_grid: Grid of the chain's exponents.
        sum_grids: Grids of the sums of the last 0, 1, …, n rounds.
        increments: Function (t, exponents) -> increments of the sum in round t, counted from 0, (exponents,).

    Returns:
        Masses of the sum on the last grid, (points,), and the mean that is lost above the grids.
    """
    masses = np.zeros((len(exponent_grid.points), len(sum_grids[0].points)))
    masses[:, sum_grids[0].zero] = 1.0
    means_above, stds = np.zeros(len(exponent_grid.points)), exponent_grid.stds
    for t, source_grid, target_grid in zip(range(len(stds) - 1, -1, -1), sum_grids, sum_grids[1:], strict=False):
        masses, new_means_above = source_grid.shift_onto(masses, increments(t, exponent_grid.points), target_grid)
        means_above = means_above + new_means_above
        if t:
            transitions = exponent_grid.transition_matrix(float(exponent_grid.ratios[t]), float(stds[t]))
            masses, means_above = transitions @ masses, transitions @ means_above
            masses[:, target_grid.zero] += np.maximum(0.0, 1.0 - np.sum(transitions, axis=1))
    return as_floats(exponent_grid.prior @ masses), float(exponent_grid.prior @ means_above)
