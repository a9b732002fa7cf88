"""DP-SGD with Poisson sampling under either relation, replace-one too.

Sources: Abadi et al. 2016, Algorithm 1, for the mechanism; dp-accounting for the hockey stick of one round;
Doroshenko et al. 2022 ("connect the dots") for the law of its loss, which is pessimistic.

Every round each unit takes part independently with probability q = `sampling_rate`; the sum of the clipped
increments of those that do, each of norm C at most, is released with Gaussian noise of standard deviation z · C
per coordinate, z = `noise_multiplier`.  The sum is divided by a public number, never by the number of units
drawn.  One round is dominated by these pairs, both orders for zero-out; the third is its own mirror image:

    zero-out      (1 - q) N(0, z²) + q N(1, z²)   and   N(0, z²)
    replace-one   (1 - q) N(0, z²) + q N(1, z²)   and   (1 - q) N(0, z²) + q N(-1, z²)

The 2C of replace-one is in its pair: z is σ/C under both relations, never σ/(2C).  That the pair dominates any
two increments of norm C at most: turning one away from the other only raises the hockey stick, up to opposite
directions. Rényi accounting is no check here: dp-accounting's leaves the 2C out (google/differential-privacy,
issue 378).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from fedpriv.accounting.calibration import smallest_noise
from fedpriv.accounting.checks import check_epsilon, check_positive
from fedpriv.accounting.curves import (
    Curve,
    Floats,
    check_resolved,
    delta_at,
    epsilon_at,
    gaussian,
    highest,
    lowest,
)
from fedpriv.accounting.losses import LatticeLosses, Losses
from fedpriv.accounting.relation import Relation, relation_named
from fedpriv.errors import InputError

_MOST_ROUNDS = 100_000
_WIDEST, _NARROWEST = 4e-4, 1e-5  # steps of the lattice of losses
_WORTH = 6e-3  # the step times √rounds: what it adds to ε grows with the square of this
_COARSER = 10.0  # than the fine step, in a search
_MOST_PLACES = 2**22  # of the lattice


@dataclass(frozen=True)
class PoissonGaussian:
    """What `rounds` releases of the Poisson-sampled Gaussian mechanism promise together.

    Guarantee: under zero-out neighbours differ by one unit whose increments are 0 in one of them; under
    replace-one by a unit that is another one, drawn by the same coins.  Increments may depend on all earlier
    releases. Everybody may see every release; who was drawn stays secret from them.
    """

    noise_multiplier: float
    """σ/C; for correlated noise in classes σ / max_t (clip_t ‖C_t‖)."""
    sampling_rate: float
    """The probability, above 0 and at most 1, with which a unit takes part in a round (of its class)."""
    rounds: int
    """Rounds (of a unit's class) in which a coin is thrown for it."""
    relation: Relation = "zero-out"

    kind: ClassVar[str] = "poisson-gaussian"

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        relation_named(self.relation)
        if not 0.0 < self.sampling_rate <= 1.0:
            raise InputError(f"sampling_rate = {self.sampling_rate}: a probability above 0 and at most 1")
        if not 1 <= self.rounds <= _MOST_ROUNDS:
            raise InputError(f"rounds = {self.rounds}: there are 1 to {_MOST_ROUNDS:,}")

    @property
    def curve(self) -> Curve:
        """An upper bound of δ for every ε ≥ 0."""
        return _cached_curve(self)

    def epsilon_of(self, delta: float) -> float:
        """An upper bound of the smallest ε for which (ε, `delta`)-DP holds; `delta` is 1e-10 or more."""
        return epsilon_at(self.curve, delta)

    def delta_of(self, epsilon: float) -> float:
        """An upper bound of the smallest δ for which (`epsilon`, δ)-DP holds."""
        return delta_at(self.curve, epsilon)

    def statement(self, delta: float) -> str:
        """The guarantee as a person reads it."""
        return (
            f"ε = {self.epsilon_of(delta):.6g} at δ = {delta:g}, an upper bound for {self.rounds} "
            f"rounds of Poisson sampling at rate {self.sampling_rate:.6g} with noise multiplier "
            f"{self.noise_multiplier:.6g}"
        )


def _step(rounds: int) -> float:
    return max(_NARROWEST, min(_WIDEST, _WORTH / math.sqrt(rounds)))


@lru_cache(maxsize=4)  # up to tens of megabytes each
def _cached_curve(mechanism: PoissonGaussian) -> Curve:
    return _curve(mechanism, _step(mechanism.rounds))


def _curve(mechanism: PoissonGaussian, step: float) -> Curve:
    """The smaller of two bounds: the pair's, and that of coins that everybody sees come up heads."""
    known = mechanism.rounds**0.5 / mechanism.noise_multiplier * (1.0 + 1e-15)
    if mechanism.relation == "replace-one":
        return lowest([gaussian(2.0 * known), _all_rounds(mechanism, "REPLACE", step).deltas])
    return lowest([gaussian(known), highest(_directions(mechanism, step))])


def directions(mechanism: PoissonGaussian) -> tuple[Curve, Curve]:
    """The curves of a unit that is removed (P against Q) and of one that is added (Q against P), all rounds.

    Guarantee: each bounds its direction under zero-out, whatever `mechanism.relation` says.
    """
    return _directions(mechanism, _step(mechanism.rounds))


def _directions(mechanism: PoissonGaussian, step: float) -> tuple[Curve, Curve]:
    return _all_rounds(mechanism, "REMOVE", step).deltas, _all_rounds(mechanism, "ADD", step).deltas


def _all_rounds(mechanism: PoissonGaussian, order: str, step: float) -> Losses:
    """The law of the loss of all rounds, from dp-accounting's hockey stick of one."""
    from dp_accounting.pld import privacy_loss_mechanism as theirs  # slow to import: only who samples pays for it

    pair = theirs.GaussianPrivacyLoss(
        mechanism.noise_multiplier,
        sampling_prob=mechanism.sampling_rate,
        adjacency_type=theirs.AdjacencyType[order],
    )
    bounds = pair.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / step), math.ceil(bounds.epsilon_upper / step)
    if high - low > _MOST_PLACES:
        raise InputError(
            f"noise_multiplier = {mechanism.noise_multiplier}: too small for a privacy loss distribution, whose "
            f"losses would reach {bounds.epsilon_upper:.3g}"
        )
    epsilons = step * np.arange(low, high + 1)
    deltas = np.asarray(pair.get_delta_for_epsilon(epsilons), np.float64)
    return connected_dots(step, low, deltas).composed(mechanism.rounds)


def connected_dots(step: float, low: int, deltas: Floats) -> LatticeLosses:
    """The law on the multiples of `step` from `low` on whose hockey stick has the given values there.

    Between two points it is the chord in e^ε, which lies above the true, convex one.  Guarantee: its δ is at least
    that of any pair with these values, for one release or in a composition.
    """
    falling = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    falls = -np.diff(falling)
    masses = np.empty_like(falling)
    masses[0] = 1.0 - falling[0] - falls[0] / math.expm1(step)
    masses[1:-1] = (math.exp(step) * falls[:-1] - falls[1:]) / math.expm1(step)
    masses[-1] = falls[-1] / -math.expm1(-step)
    return LatticeLosses(step, low, np.maximum(masses, 0.0), float(falling[-1]))


@lru_cache(maxsize=256)
def calibrated(
    epsilon: float, delta: float, sampling_rate: float, rounds: int, relation: Relation = "zero-out"
) -> PoissonGaussian:
    """The mechanism with about the smallest noise multiplier that is (`epsilon`, `delta`)-DP.

    Guarantee: the one returned is (`epsilon`, `delta`)-DP by its own `epsilon_of`.  InputError where no multiplier
    up to a million is, and for a δ below 1e-10.
    """
    check_positive("epsilon", epsilon)
    check_resolved(delta)
    at = np.array([check_epsilon(epsilon)])

    def bound(step: float) -> Callable[[float], float]:
        def of(multiplier: float) -> float:
            return float(_curve(PoissonGaussian(multiplier, sampling_rate, rounds, relation), step)(at)[0])

        return of

    fine = _step(rounds)
    multiplier = smallest_noise(bound(_COARSER * fine), bound(fine), delta)
    return PoissonGaussian(multiplier, sampling_rate, rounds, relation)
