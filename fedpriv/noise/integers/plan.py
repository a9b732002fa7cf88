"""Lattice, norms and noise of a run, fitted to each other before round 1."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from fedpriv.accounting.gaussian import APART, Relation
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
    sqrt_above,
    total_variance,
)
from fedpriv.noise.mechanism import Factorization

if TYPE_CHECKING:
    pass


MIN_CLIP_BITS = {64: 24, 48: 24, 40: 15}
"""Bits of a word that sums are formed in, and the fewest bits of a clip that are accepted with them.

64 is for sums that are not masked; 48 the default where they are, and 40 on request."""


@dataclass(frozen=True)
class ExactRunInputs:
    """Inputs from which an exact run is fitted.

    `records[t-1]` are the records that are *held* for round t by all silos whose sums are added, dummies not
    counted; `owners` is M where every silo adds a share of the noise, 1 where one owner adds all of it.
    """

    factorization: Factorization
    record_counts: tuple[int, ...]
    dimension: int
    relation: Relation
    mu: float
    party_count: int = 1
    word_bits: int = 64
    increment_diameter: float = APART
    """The largest distance of two records' integers, in clips."""


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
    """Noise of every vector in units, or None if silos have budgets, and noise, of their own."""
    unit: float
    """Unit of the lattice."""


@dataclass(frozen=True)
class ExactPlan:
    """A run on its lattice."""

    inputs: ExactRunInputs
    lattice: Lattice
    claim: ExactClaim
    max_output: int
    """R: what sums of C s stay within, in units."""
    party_claims: tuple[ExactClaim, ...] = ()
    """Of owner 0, 1, … alone, where each has a budget of its own; `claim` has the most noise of them."""

    def party_claim(self, owner: int) -> ExactClaim:
        """The claim of what one owner of noise releases."""
        return self.party_claims[owner] if self.party_claims else self.claim

    def with_budgets(self, mus: Sequence[float]) -> "ExactPlan":
        """The plan whose owner i adds the noise of `mus[i]`; InputError where that is too little for the lattice.

        Guarantee: none of `mus` is below the μ that the lattice was fitted to, so no word can overflow: less noise
        leaves all bounds as they are.  Each owner's claim is of its own noise alone.
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
        """K of every vector of round t."""
        return tuple(self.lattice.norm(clip) for clip in self.inputs.factorization.part_clips(t))

    def plan_round(self, t: int, batches: int) -> IntegerRound:
        """Return the numbers of round t, whose sum is divided by so many batches."""
        factored = self.inputs.factorization
        count, scales = factored.strategy.draws(t), factored.strategy.noise_scales(t)
        return IntegerRound(
            self.norms(t),
            self.lattice.factor(batches) * factored.increment_scale(t),
            (self.inputs.dimension,) if count is None else (count, self.inputs.dimension),
            scales,
            None if self.party_claims else tuple(map(self.claim.sigma_of, scales)),
            self.lattice.unit,
        )


def claim_for_noise(
    factored: Factorization,
    lattice: Lattice,
    relation: Relation,
    dimension: int,
    sigma: float,
    owners: int,
    apart: float = APART,
) -> ExactClaim:
    """Claim for a run of `factored` whose owners each added noise of `sigma` units; see `claim_of`."""
    distance, groups, draws = _find_distance(factored, lattice, relation, dimension, apart)
    return claim_for_sigma(distance, sigma, groups, dimension, draws, owners)


def fit_lattice(run: ExactRunInputs) -> ExactPlan:
    """The finest lattice, at most 2^37 units a clip, on which no integer can leave its word.

    Guarantee: |(C s)_t| and every integer on the way to it stay below 2^61, sums with 16 σ of noise too, and in
    words of w < 64 bits sums with 14 σ of noise below 2^(w-1): computed in integers, for any records.
    InputError where a clip keeps too few bits, or the noise has no place between 2^16 and 2^48 units.
    """
    rounds = run.factorization.workload.rounds
    if run.word_bits not in MIN_CLIP_BITS:
        raise InputError(f"word = {run.word_bits}: accepted are {', '.join(map(str, MIN_CLIP_BITS))} bits")
    if len(run.record_counts) != rounds or min(run.record_counts) < 0 or run.party_count < 1 or run.dimension < 1:
        raise InputError(
            f"an exact run needs a number of records for each of {rounds} rounds, owners and a dimension"
        )
    clips = [clip for t in range(1, rounds + 1) for clip in run.factorization.part_clips(t)]
    kappa = MAX_KAPPA
    while True:
        lattice = choose_lattice(clips, kappa)
        smallest = lattice.norm(min(clips))
        if smallest < 1 << MIN_CLIP_BITS[run.word_bits]:
            raise InputError(
                f"the smallest clip, {min(clips):g} of {max(clips):g}, keeps {max(smallest, 1).bit_length() - 1} "
                f"bits in words of {run.word_bits}, and {MIN_CLIP_BITS[run.word_bits]} are needed: clips that "
                "grow with t fit for "
                "8,191 rounds at most; choose clips that differ less, fewer records or rounds, or a longer word"
            )
        excess, plan = _plan_on_lattice(run, lattice)
        if plan is not None:
            return plan
        kappa -= excess


def _plan_on_lattice(run: ExactRunInputs, lattice: Lattice) -> tuple[int, ExactPlan | None]:
    """The plan on this lattice; or by how many bits at least it has to be coarser, 1 or more."""
    factored, strategy = run.factorization, run.factorization.strategy
    rounds = factored.workload.rounds
    norms = [[lattice.norm(clip) for clip in factored.part_clips(t)] for t in range(1, rounds + 1)]
    loads: list[LoadBounds] = [
        tuple(held * norm for norm in of_round) for held, of_round in zip(run.record_counts, norms, strict=True)
    ]
    reach = strategy.bound_integers(loads)
    distance, groups, draws = _find_distance(
        factored, lattice, run.relation, run.dimension, run.increment_diameter
    )
    largest = max(Fraction(group.scale) for group in groups)
    whole = math.ceil(largest * Fraction(sqrt_above(total_variance(distance, run.mu, groups))))
    share = -(-whole // math.isqrt(run.party_count))
    excess = max(
        _excess_bits(reach.max_intermediate, MAX_SCALED),
        _excess_bits(reach.max_output + 16 * whole, MAX_SCALED),
        _excess_bits(share, int(MAX_SIGMA)),
        _excess_bits(reach.max_output + 14 * whole, 1 << (run.word_bits - 1)),
    )
    if excess:
        return excess, None
    claim = claim_for_mu(distance, run.mu, groups, run.dimension, draws, run.party_count)
    return 0, ExactPlan(run, lattice, claim, reach.max_output)


def _find_distance(
    factored: Factorization, lattice: Lattice, relation: Relation, dimension: int, apart: float
) -> tuple[float, tuple[NoiseGroup, ...], list[int]]:
    """Δ, the groups of fresh vectors, and how many each round has."""
    strategy, rounds = factored.strategy, factored.workload.rounds
    groups = strategy.noise_groups(rounds, factored.max_participations)
    distance = integer_distance(
        factored.sensitivity_in_units(lattice), relation, groups, dimension, factored.sensitivity_factor, apart
    )
    return distance, groups, [strategy.draws(t) or 1 for t in range(1, rounds + 1)]


def _excess_bits(value: int, limit: int) -> int:
    """0 below `limit`, a power of 2; else 1 or more bits, never more than it takes to get there."""
    return max(1, value.bit_length() - limit.bit_length()) if value >= limit else 0
