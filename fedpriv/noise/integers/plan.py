"""Lattice, norms and noise of a run, fitted to each other before round 1."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from fedpriv.accounting.gaussian import APART, Relation
from fedpriv.core.errors import InputError
from fedpriv.noise.integers.fixed_point import LIMIT
from fedpriv.noise.integers.strategies import (
    MOST_KAPPA,
    MOST_SIGMA,
    Claim,
    Group,
    Lattice,
    Load,
    claim_of,
    claim_with,
    distance_of,
    lattice_for,
    sqrt_above,
    whole_variance,
)
from fedpriv.noise.mechanism import Factored

if TYPE_CHECKING:
    pass


WORDS = {64: 24, 48: 24, 40: 15}
"""Bits of a word that sums are formed in, and the fewest bits of a clip that are accepted with them.

64 is for sums that are not masked; 48 the default where they are, and 40 on request."""


@dataclass(frozen=True)
class ExactRun:
    """Inputs from which an exact run is fitted.

    `records[t-1]` are the records that are *held* for round t by all silos whose sums are added, dummies not
    counted; `owners` is M where every silo adds a share of the noise, 1 where one owner adds all of it.
    """

    factored: Factored
    records: tuple[int, ...]
    dimension: int
    relation: Relation
    mu: float
    owners: int = 1
    word: int = 64
    apart: float = APART
    """The largest distance of two records' integers, in clips."""


class IntegerRound(NamedTuple):
    """Public numbers of one round on the lattice."""

    norms: tuple[int, ...]
    """K of every vector."""
    factor: float
    """Units of the lattice per unit of an increment."""
    shape: tuple[int, ...]
    """Shape of the sums and of y_t, (d,) or (vectors, d)."""
    scales: tuple[float, ...]
    """Noise of every vector in multiples of σ."""
    sigmas: tuple[float, ...] | None
    """Noise of every vector in units, or None if silos have budgets, and noise, of their own."""
    unit: float
    """Unit of the lattice."""


@dataclass(frozen=True)
class ExactPlan:
    """A run on its lattice."""

    run: ExactRun
    lattice: Lattice
    claim: Claim
    reach: int
    """R: what sums of C s stay within, in units."""
    claims: tuple[Claim, ...] = ()
    """Of owner 0, 1, … alone, where each has a budget of its own; `claim` has the most noise of them."""

    def claim_of(self, owner: int) -> Claim:
        """The claim of what one owner of noise releases."""
        return self.claims[owner] if self.claims else self.claim

    def with_budgets(self, mus: Sequence[float]) -> "ExactPlan":
        """The plan whose owner i adds the noise of `mus[i]`; InputError where that is too little for the lattice.

        Guarantee: none of `mus` is below the μ that the lattice was fitted to, so no word can overflow: less noise
        leaves all bounds as they are.  Each owner's claim is of its own noise alone.
        """
        if min(mus) < self.run.mu:
            raise ValueError(f"a budget of {min(mus)} on a lattice that was fitted to {self.run.mu}")
        distance, groups, draws = _distance(
            self.run.factored, self.lattice, self.run.relation, self.run.dimension, self.run.apart
        )
        claims = {
            mu: claim_of(distance, mu, groups, self.run.dimension, draws, self.run.owners) for mu in set(mus)
        }
        return replace(self, claims=tuple(claims[mu] for mu in mus))

    def norms(self, t: int) -> tuple[int, ...]:
        """K of every vector of round t."""
        return tuple(self.lattice.norm(clip) for clip in self.run.factored.part_clips(t))

    def planned_round(self, t: int, batches: int) -> IntegerRound:
        """Return the numbers of round t, whose sum is divided by so many batches."""
        factored = self.run.factored
        count, scales = factored.strategy.draws(t), factored.strategy.scales(t)
        return IntegerRound(
            self.norms(t),
            self.lattice.factor(batches) * factored.stretch(t),
            (self.run.dimension,) if count is None else (count, self.run.dimension),
            scales,
            None if self.claims else tuple(map(self.claim.sigma_of, scales)),
            self.lattice.unit,
        )


def claimed(
    factored: Factored,
    lattice: Lattice,
    relation: Relation,
    dimension: int,
    sigma: float,
    owners: int,
    apart: float = APART,
) -> Claim:
    """Claim for a run of `factored` whose owners each added noise of `sigma` units; see `claim_of`."""
    distance, groups, draws = _distance(factored, lattice, relation, dimension, apart)
    return claim_with(distance, sigma, groups, dimension, draws, owners)


def fitted(run: ExactRun) -> ExactPlan:
    """The finest lattice, at most 2^37 units a clip, on which no integer can leave its word.

    Guarantee: |(C s)_t| and every integer on the way to it stay below 2^61, sums with 16 σ of noise too, and in
    words of w < 64 bits sums with 14 σ of noise below 2^(w-1): computed in integers, for any records.
    InputError where a clip keeps too few bits, or the noise has no place between 2^16 and 2^48 units.
    """
    rounds = run.factored.workload.rounds
    if run.word not in WORDS:
        raise InputError(f"word = {run.word}: accepted are {', '.join(map(str, WORDS))} bits")
    if len(run.records) != rounds or min(run.records) < 0 or run.owners < 1 or run.dimension < 1:
        raise InputError(
            f"an exact run needs a number of records for each of {rounds} rounds, owners and a dimension"
        )
    clips = [clip for t in range(1, rounds + 1) for clip in run.factored.part_clips(t)]
    kappa = MOST_KAPPA
    while True:
        lattice = lattice_for(clips, kappa)
        smallest = lattice.norm(min(clips))
        if smallest < 1 << WORDS[run.word]:
            raise InputError(
                f"the smallest clip, {min(clips):g} of {max(clips):g}, keeps {max(smallest, 1).bit_length() - 1} "
                f"bits in words of {run.word}, and {WORDS[run.word]} are needed: clips that grow with t fit for "
                "8,191 rounds at most; choose clips that differ less, fewer records or rounds, or a longer word"
            )
        excess, plan = _on(run, lattice)
        if plan is not None:
            return plan
        kappa -= excess


def _on(run: ExactRun, lattice: Lattice) -> tuple[int, ExactPlan | None]:
    """The plan on this lattice; or by how many bits at least it has to be coarser, 1 or more."""
    factored, strategy = run.factored, run.factored.strategy
    rounds = factored.workload.rounds
    norms = [[lattice.norm(clip) for clip in factored.part_clips(t)] for t in range(1, rounds + 1)]
    loads: list[Load] = [
        tuple(held * norm for norm in of_round) for held, of_round in zip(run.records, norms, strict=True)
    ]
    reach = strategy.reach(loads)
    distance, groups, draws = _distance(factored, lattice, run.relation, run.dimension, run.apart)
    largest = max(Fraction(group.scale) for group in groups)
    whole = math.ceil(largest * Fraction(sqrt_above(whole_variance(distance, run.mu, groups))))
    share = -(-whole // math.isqrt(run.owners))
    excess = max(
        _excess(reach.inside, LIMIT),
        _excess(reach.outputs + 16 * whole, LIMIT),
        _excess(share, int(MOST_SIGMA)),
        _excess(reach.outputs + 14 * whole, 1 << (run.word - 1)),
    )
    if excess:
        return excess, None
    claim = claim_of(distance, run.mu, groups, run.dimension, draws, run.owners)
    return 0, ExactPlan(run, lattice, claim, reach.outputs)


def _distance(
    factored: Factored, lattice: Lattice, relation: Relation, dimension: int, apart: float
) -> tuple[float, tuple[Group, ...], list[int]]:
    """Δ, the groups of fresh vectors, and how many each round has."""
    strategy, rounds = factored.strategy, factored.workload.rounds
    groups = strategy.groups(rounds, factored.participations)
    distance = distance_of(factored.certified(lattice), relation, groups, dimension, factored.spread, apart)
    return distance, groups, [strategy.draws(t) or 1 for t in range(1, rounds + 1)]


def _excess(value: int, limit: int) -> int:
    """0 below `limit`, a power of 2; else 1 or more bits, never more than it takes to get there."""
    return max(1, value.bit_length() - limit.bit_length()) if value >= limit else 0
