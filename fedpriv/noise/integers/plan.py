"""Lattice, norms and noise of an exact run, fitted to each other before round 1.

An exact run adds integer noise to sums of integers, in multiples of a lattice's unit.  `fit_lattice` finds the
lattice, and the noise for the run's μ (Gaussian differential privacy).

An increment is a record's clipped contribution to a round, and a word is the integer of w bits in which a sum
travels.  s are the sums of increments, and C s the sums that are released with noise.  K is the largest norm of
one record's integers in a vector of d values, in units of the lattice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from fedpriv.accounting.gaussian import APART, Relation, check_positive
from fedpriv.core.errors import InputError
from fedpriv.noise.integers.fixed_point import MAX_SCALED
from fedpriv.noise.integers.strategies import (
    MAX_KAPPA,
    MAX_SIGMA,
    ExactClaim,
    Lattice,
    LoadBounds,
    NoiseGroup,
    choose_lattice,
    claim_for_mu,
    claim_for_sigma,
    integer_distance,
    total_variance,
)
from fedpriv.noise.mechanism import Factorization

MIN_CLIP_BITS = {64: 24, 48: 24, 40: 15}
"""Fewest bits of a clip by the bits of a word in which sums are formed.

Words of 64 bits are for sums that are not masked.  Masked sums have words of 48 bits, or of 40 (run.word = 40).
"""


@dataclass(frozen=True)
class ExactRunInputs:
    """Inputs from which an exact run is fitted.

    | field | meaning |
    |---|---|
    | `factorization` | B and C, with clips in real units |
    | `record_counts` | most records that one sum of each round can add up, without dummy records, (T,) |
    | `dimension` | d, values of a vector |
    | `relation` | neighbouring relation of the claim, "zero-out" or "replace-one" |
    | `mu` | μ for which the noise is chosen, above 0 |
    | `party_count` | M if every silo adds a share of the noise, 1 if one party adds all of it |
    | `word_bits` | bits of a word in which sums are formed |
    """

    factorization: Factorization
    record_counts: tuple[int, ...]
    dimension: int
    relation: Relation
    mu: float
    party_count: int = 1
    word_bits: int = 64
    increment_diameter: float = APART
    """Largest distance of two records' integers, in clips."""


class IntegerRound(NamedTuple):
    """Public numbers of one round on the lattice."""

    norms: tuple[int, ...]
    """K of every vector."""
    factor: float
    """Units of the lattice per unit of an increment."""
    shape: tuple[int, ...]
    """Shape of the sums and of y_t, (d,) or (vectors, d)."""
    noise_scales: tuple[float, ...]
    """Noise of every vector in multiples of σ."""
    sigmas: tuple[float, ...] | None
    """σ of one party's noise in every vector, in units, or None if each party has a separate budget."""
    unit: float
    """Unit of the lattice, a real number."""


@dataclass(frozen=True)
class ExactPlan:
    """Exact run on its lattice."""

    inputs: ExactRunInputs
    """Inputs from which the plan was fitted."""
    lattice: Lattice
    """Lattice of all integers of the run."""
    claim: ExactClaim
    """Claim of the run's releases, with their noise."""
    max_output: int
    """R, bound of the absolute value of every coordinate of C s, in units."""
    party_claims: tuple[ExactClaim, ...] = ()
    """Claims of party 0, 1, … if each has a separate budget, else empty.

    `claim` then has at least as much noise as each of them.
    """

    def party_claim(self, party: int) -> ExactClaim:
        """Claim of one party's releases."""
        return self.party_claims[party] if self.party_claims else self.claim

    def with_budgets(self, mus: Sequence[float]) -> "ExactPlan":
        """Return a plan on the same lattice with noise of a separate budget `mus[i]` at each party i.

        Guarantee: none of `mus` is below the μ that the lattice was fitted to, so that the bounds of `fit_lattice`
        still hold, with as much noise or less.  With a `party_count` of 1 each party's claim is of its own noise
        alone.

        Args:
            mus: μ of each party, (parties,).

        Raises:
            InputError: A party's noise is too little for the lattice, or a budget is not finite.
            ValueError: A budget is below the μ of the lattice.
        """
        if min(mus) < self.inputs.mu:
            raise ValueError(f"a budget of {min(mus)} on a lattice that was fitted to {self.inputs.mu}")
        distance, groups, draws = _find_distance(
            self.inputs.factorization,
            self.lattice,
            self.inputs.relation,
            self.inputs.dimension,
            self.inputs.increment_diameter,
        )
        claims = {
            mu: claim_for_mu(distance, mu, groups, self.inputs.dimension, draws, self.inputs.party_count)
            for mu in set(mus)
        }
        return replace(self, party_claims=tuple(claims[mu] for mu in mus))

    def norms(self, t: int) -> tuple[int, ...]:
        """Return K of every vector of round t."""
        return tuple(self.lattice.norm(clip) for clip in self.inputs.factorization.part_clips(t))

    def plan_round(self, t: int, batches: int) -> IntegerRound:
        """Return the numbers of round t, whose sum is divided by `batches`.

        Args:
            t: Round, from 1.
            batches: Number of batches by which the round's sum is divided, 1 or more.
        """
        factorization = self.inputs.factorization
        vector_count, noise_scales = factorization.strategy.draws(t), factorization.strategy.noise_scales(t)
        return IntegerRound(
            self.norms(t),
            self.lattice.factor(batches) * factorization.increment_scale(t),
            (self.inputs.dimension,) if vector_count is None else (vector_count, self.inputs.dimension),
            noise_scales,
            None if self.party_claims else tuple(map(self.claim.sigma_of, noise_scales)),
            self.lattice.unit,
        )


def claim_for_noise(
    factorization: Factorization,
    lattice: Lattice,
    relation: Relation,
    dimension: int,
    sigma: float,
    party_count: int,
    increment_diameter: float = APART,
) -> ExactClaim:
    """Claim of a run whose parties each add noise of `sigma` units.

    Args:
        factorization: Factorization with C on integers.
        lattice: Lattice of the run.
        relation: Neighbouring relation.
        dimension: d.
        sigma: σ of one party's noise of scale 1, in units.
        party_count: Number of parties that add noise.
        increment_diameter: Largest distance of two records' integers, in clips.

    Raises:
        InputError: The noise is too little for a claim, or outside of 2^16 … 2^48 units (`claim_for_sigma`), or a
            group of vectors has no noise.
    """
    distance, groups, draws = _find_distance(factorization, lattice, relation, dimension, increment_diameter)
    return claim_for_sigma(distance, sigma, groups, dimension, draws, party_count)


def fit_lattice(run: ExactRunInputs) -> ExactPlan:
    """Fit the finest lattice, at most 2^37 units a clip, on which all integers have room in their words.

    The search starts with 2^36 to 2^37 units in the largest clip and makes the lattice coarser until the bounds
    below hold.

    Guarantee: |(C s)_t| and every integer on the way to it stay below 2^61, and so do sums with 16 σ of noise.  In
    words of w < 64 bits sums with 14 σ of noise stay below 2^(w-1).  These bounds are computed in integers, and
    hold for any records.

    Args:
        run: Inputs of the run.

    Raises:
        InputError: A clip keeps too few bits or is outside of 2^-40 … 2^40, the noise cannot lie between 2^16 and
            2^48 units, a group of vectors has no noise, or a number in `run` is out of its range.
    """
    rounds = run.factorization.workload.rounds
    if run.word_bits not in MIN_CLIP_BITS:
        raise InputError(f"word = {run.word_bits}: accepted are {', '.join(map(str, MIN_CLIP_BITS))} bits")
    if len(run.record_counts) != rounds or min(run.record_counts) < 0 or run.party_count < 1 or run.dimension < 1:
        raise InputError(
            f"an exact run needs a number of records, 0 or more, for each of {rounds} rounds, and 1 or more "
            "parties and values of a vector"
        )
    clips = [clip for t in range(1, rounds + 1) for clip in run.factorization.part_clips(t)]
    # With κ the largest clip has 2^κ to 2^(κ+1) units.
    kappa = MAX_KAPPA
    while True:
        lattice = choose_lattice(clips, kappa)
        min_norm = lattice.norm(min(clips))
        if min_norm < 1 << MIN_CLIP_BITS[run.word_bits]:
            raise InputError(
                f"the smallest clip, {min(clips):g} of {max(clips):g}, keeps {max(min_norm, 1).bit_length() - 1} "
                f"bits in words of {run.word_bits}, and {MIN_CLIP_BITS[run.word_bits]} are needed: "
                f"clips that grow with t fit for {(2 << MAX_KAPPA - MIN_CLIP_BITS[run.word_bits]) - 1:,} rounds "
                "at most; choose clips that differ less, fewer records or rounds, a larger mu, or a longer word"
            )
        excess, plan = _plan_on_lattice(run, lattice)
        if plan is not None:
            return plan
        kappa -= excess


def _plan_on_lattice(run: ExactRunInputs, lattice: Lattice) -> tuple[int, ExactPlan | None]:
    """Plan the run on this lattice, or count the bits by which the lattice is too fine.

    Limited are the integers on the way to C s (2^61), C s with 16 σ of noise (2^61), one party's share of σ
    (2^48), and C s with 14 σ of noise (a signed word).  Here σ is the standard deviation of the noise of all
    parties together, in the vector with the most noise.

    Args:
        run: Inputs of the run.
        lattice: Lattice to try.

    Returns:
        Number of bits that are certainly missing, and the plan if none is.

    Raises:
        InputError: The noise is too little for a claim, a group of vectors has no noise, or μ is not finite or not
            above 0.
    """
    factorization, strategy = run.factorization, run.factorization.strategy
    rounds = factorization.workload.rounds
    norms = [[lattice.norm(clip) for clip in factorization.part_clips(t)] for t in range(1, rounds + 1)]
    # A sum of n integer vectors of norm K has no coordinate above n K.
    loads: list[LoadBounds] = [
        tuple(record_count * norm for norm in round_norms)
        for record_count, round_norms in zip(run.record_counts, norms, strict=True)
    ]
    bounds = strategy.bound_integers(loads)
    distance, groups, draws = _find_distance(
        factorization, lattice, run.relation, run.dimension, run.increment_diameter
    )
    max_scale = max(Fraction(group.scale) for group in groups)
    max_variance = max_scale**2 * total_variance(distance, check_positive("mu", run.mu), groups)
    # Roots in integers, rounded up, which no noise is too large for.
    total_sigma, party_sigma = (
        math.isqrt(math.ceil(max_variance / share_count) - 1) + 1 for share_count in (1, run.party_count)
    )
    excess = max(
        _excess_bits(bounds.max_intermediate, MAX_SCALED),
        _excess_bits(bounds.max_output + 16 * total_sigma, MAX_SCALED),
        _excess_bits(party_sigma, int(MAX_SIGMA)),
        _excess_bits(bounds.max_output + 14 * total_sigma, 1 << (run.word_bits - 1)),
    )
    if excess:
        return excess, None
    claim = claim_for_mu(distance, run.mu, groups, run.dimension, draws, run.party_count)
    return 0, ExactPlan(run, lattice, claim, bounds.max_output)


def _find_distance(
    factorization: Factorization, lattice: Lattice, relation: Relation, dimension: int, increment_diameter: float
) -> tuple[float, tuple[NoiseGroup, ...], list[int]]:
    """Return Δ (`integer_distance`), the groups of fresh vectors, and their number in each round, (T,)."""
    strategy, rounds = factorization.strategy, factorization.workload.rounds
    groups = strategy.noise_groups(rounds, factorization.max_participations)
    distance = integer_distance(
        factorization.sensitivity_in_units(lattice),
        relation,
        groups,
        dimension,
        factorization.sensitivity_factor,
        increment_diameter,
    )
    return distance, groups, [strategy.draws(t) or 1 for t in range(1, rounds + 1)]


def _excess_bits(value: int, limit: int) -> int:
    """Bits by which a value must at least shrink to get below `limit`, a power of 2, or 0 if it is below."""
    return max(1, value.bit_length() - limit.bit_length()) if value >= limit else 0
