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
from functools import cached_property
from typing import Any, ClassVar

from fedpriv.accounting.bisection import smallest_safe
from fedpriv.accounting.checks import check_delta, check_epsilon, check_positive
from fedpriv.errors import InputError

_INTERVAL = 1e-4  # of the discretized privacy loss: a wider one is faster and more pessimistic
_CALIBRATION = 1e-4  # relative accuracy of a calibrated noise multiplier
_MOST_NOISE = 1e6


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

    relations: ClassVar[tuple[str, ...]] = ("add-remove", "zero-out")

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        if not 0.0 < self.sampling_rate <= 1.0:
            raise InputError(f"sampling_rate = {self.sampling_rate}: a probability above 0 and at most 1")
        if self.rounds < 1:
            raise InputError(f"rounds = {self.rounds}: there is 1 round or more")

    def epsilon_of(self, delta: float) -> float:
        """An upper bound of the smallest ε for which (ε, `delta`)-DP holds."""
        return float(self._losses.get_epsilon_for_delta(check_delta(delta)))

    def delta_of(self, epsilon: float) -> float:
        """An upper bound of the smallest δ for which (`epsilon`, δ)-DP holds."""
        return float(self._losses.get_delta_for_epsilon(check_epsilon(epsilon)))

    @cached_property
    def _losses(self) -> Any:
        import dp_accounting  # slow to import: only who samples pays for it
        from dp_accounting.pld import privacy_loss_distribution

        one_round = privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=self.noise_multiplier,
            value_discretization_interval=_INTERVAL,
            sampling_prob=self.sampling_rate,
            neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        return one_round.self_compose(self.rounds)


def calibrated(epsilon: float, delta: float, sampling_rate: float, rounds: int) -> SubsampledGaussian:
    """The mechanism with the smallest noise multiplier found that is (`epsilon`, `delta`)-DP.

    Guarantee: the one returned is (`epsilon`, `delta`)-DP by its own `epsilon_of`; a multiplier smaller by a
    relative 1e-4 is not.  InputError where no multiplier up to a million is.
    """
    check_positive("epsilon", epsilon)
    check_delta(delta)

    def safe(multiplier: float) -> bool:
        if multiplier == 0.0:
            return False
        if multiplier > _MOST_NOISE:
            raise InputError(
                f"epsilon = {epsilon} at delta = {delta}: no noise multiplier up to {_MOST_NOISE:g} reaches it in "
                f"{rounds} rounds; take a larger epsilon or delta"
            )
        return SubsampledGaussian(multiplier, sampling_rate, rounds).epsilon_of(delta) <= epsilon

    start = max(0.5, sampling_rate * math.sqrt(rounds) / max(epsilon, 1.0))
    return SubsampledGaussian(smallest_safe(safe, start, _CALIBRATION), sampling_rate, rounds)
