"""DP-SGD with Poisson sampling, accounted by the privacy loss distribution of dp-accounting.

Sources: Abadi et al. 2016, Algorithm 1, for the mechanism; Koskela, Jälkö & Honkela 2020 and Doroshenko et al.
2022 ("connect the dots") for the accounting, which is pessimistic: ε and δ are never below the true ones.

Every round each record takes part independently with probability `sampling_rate`; the sum of the clipped
gradients of those that do, each of norm at most C, is released with Gaussian noise of standard deviation
`noise_multiplier` · C per coordinate.  The sum is divided by the public `sampling_rate` · n, never by the
number of records drawn.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from fedpriv.accounting.bisection import smallest_safe_near
from fedpriv.accounting.checks import check_delta, check_epsilon, check_positive
from fedpriv.errors import InputError

_INTERVAL = 1e-4  # of the discretized privacy loss: a wider one is faster and more pessimistic
_COARSE = 1e-3  # to come near a noise multiplier; what is returned has been checked at the finer one
_CALIBRATION = 1e-4  # relative accuracy of a calibrated noise multiplier
_LEAST_NOISE, _MOST_NOISE = 0.1, 1e6


@dataclass(frozen=True)
class SubsampledGaussian:
    """What `rounds` releases of the Poisson-sampled Gaussian mechanism promise together.

    Guarantee: neighbours differ by one record that one of them does not have (add-remove), or whose gradient is
    0 everywhere in one of them (zero-out), which is the same as long as the denominator is public.  Not under
    replace-one.  Everybody may see every release; which records were drawn stays secret.
    """

    noise_multiplier: float
    """σ/C, where C is the clip norm."""
    sampling_rate: float
    """The probability, above 0 and at most 1, with which a record takes part in a round."""
    rounds: int

    kind: ClassVar[str] = "subsampled-gaussian"
    relations: ClassVar[tuple[str, ...]] = ("add-remove", "zero-out")

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        if not 0.0 < self.sampling_rate <= 1.0:
            raise InputError(f"sampling_rate = {self.sampling_rate}: a probability above 0 and at most 1")
        if self.rounds < 1:
            raise InputError(f"rounds = {self.rounds}: there is 1 round or more")

    def epsilon_of(self, delta: float) -> float:
        """An upper bound of the smallest ε for which (ε, `delta`)-DP holds."""
        return float(_losses(self, _INTERVAL).get_epsilon_for_delta(check_delta(delta)))

    def delta_of(self, epsilon: float) -> float:
        """An upper bound of the smallest δ for which (`epsilon`, δ)-DP holds."""
        return float(_losses(self, _INTERVAL).get_delta_for_epsilon(check_epsilon(epsilon)))

    def statement(self, delta: float) -> str:
        """The guarantee as a person reads it."""
        return (
            f"epsilon = {self.epsilon_of(delta):.6g} at delta = {delta:g}, an upper bound for {self.rounds} "
            f"rounds of Poisson sampling at rate {self.sampling_rate:.6g} with noise multiplier "
            f"{self.noise_multiplier:.6g}"
        )


@lru_cache(maxsize=16)
def _losses(mechanism: SubsampledGaussian, interval: float) -> Any:
    """The privacy loss distribution of all rounds, by dp-accounting."""
    import dp_accounting  # slow to import: only who samples pays for it
    from dp_accounting.pld import privacy_loss_distribution

    one_round = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=mechanism.noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=mechanism.sampling_rate,
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    return one_round.self_compose(mechanism.rounds)


@lru_cache(maxsize=256)  # the same for every seed of a sweep, and seconds to find
def calibrated(epsilon: float, delta: float, sampling_rate: float, rounds: int) -> SubsampledGaussian:
    """The mechanism with the smallest noise multiplier found that is (`epsilon`, `delta`)-DP.

    Guarantee: the one returned is (`epsilon`, `delta`)-DP by its own `epsilon_of`; a multiplier smaller by a
    relative 1e-4 is not, or is below 0.1.  InputError where no multiplier up to a million is.
    """
    check_positive("epsilon", epsilon)
    check_delta(delta)

    def safe(multiplier: float, interval: float) -> bool:
        if multiplier < _LEAST_NOISE:
            return False
        if multiplier > _MOST_NOISE:
            raise InputError(
                f"epsilon = {epsilon} at delta = {delta}: no noise multiplier up to {_MOST_NOISE:g} reaches it in "
                f"{rounds} rounds; take a larger epsilon or delta"
            )
        losses = _losses(SubsampledGaussian(multiplier, sampling_rate, rounds), interval)
        return float(losses.get_epsilon_for_delta(delta)) <= epsilon

    start = max(0.5, sampling_rate * math.sqrt(rounds) / max(epsilon, 1.0))
    near = smallest_safe_near(lambda value: safe(value, _COARSE), start, 2.0, 10.0 * _CALIBRATION)
    multiplier = smallest_safe_near(lambda value: safe(value, _INTERVAL), near, 1.002, _CALIBRATION)
    return SubsampledGaussian(multiplier, sampling_rate, rounds)
