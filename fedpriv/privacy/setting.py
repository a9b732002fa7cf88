"""A federation with equal silos and one clip norm, as `fedpriv privacy` is asked about it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.accounting.checks import check_positive
from fedpriv.accounting.relation import relation_named
from fedpriv.errors import InputError
from fedpriv.mechanisms.base import Mechanism
from fedpriv.mechanisms.registry import CHOSEN, MechanismOptions, chosen_mechanism
from fedpriv.mechanisms.registry import unfitted as to_fit
from fedpriv.mechanisms.workload import Separated, Workload
from fedpriv.participation.fixed_order import Schedule
from fedpriv.privacy.cost import Cost, cost_of
from fedpriv.privacy.trust import Noise, Trust, trust_named


def unfitted(workload: Workload) -> dict[str, Mechanism]:
    """Every mechanism for these sums whose numbers are given and not fitted, by a name that says them."""
    found: dict[str, Mechanism] = {}
    for kind in CHOSEN:
        found |= kind.comparisons(workload, MechanismOptions())
    return found


@dataclass(frozen=True)
class Setting:
    """Who releases which running sums, and in which rounds a record takes part in them."""

    rounds: int
    decay: float = 1.0
    clip: float = 1.0
    batch: int = 1
    silos: int = 1
    trust: str = "untrusted"
    relation: str = "replace-one"
    epochs: int = 1
    """Passes in the same order every time."""
    max_participations: int | None = None
    """If given, not `epochs` but any so many rounds count, at least `min_separation` apart."""
    min_separation: int = 1

    def __post_init__(self) -> None:
        check_positive("clip", self.clip)
        if self.max_participations is not None and self.epochs != 1:
            raise InputError(
                f"epochs = {self.epochs} and max_participations = {self.max_participations}: give only one of them"
            )
        if self.max_participations is None and self.min_separation != 1:
            raise InputError(
                f"min_separation = {self.min_separation} has a meaning only together with max_participations"
            )
        if self.rounds % self.epochs:
            raise InputError(f"rounds = {self.rounds} must be a multiple of epochs = {self.epochs}")

    @cached_property
    def workload(self) -> Workload:
        participation: Schedule | Separated = Schedule(self.rounds, self.rounds // self.epochs)
        if self.max_participations is not None:
            participation = Separated(self.rounds, self.max_participations, self.min_separation)
        return Workload(participation, self.decay, np.full(self.rounds, self.clip))

    @property
    def protection(self) -> Trust:
        return trust_named(self.trust)

    def mechanism(self, name: str, options: MechanismOptions) -> Mechanism:
        """The mechanism called `name` for these sums, fitted to their mean noise where it has no numbers yet."""
        if not to_fit(name, options):
            return chosen_mechanism(name, self.workload, options)
        from fedpriv.fitting import fitted, objective_of, rows_response

        return fitted(objective_of(rows_response(self.rounds), self.workload), name, options).mechanism

    def cost(self, mechanism: Mechanism, mu: float) -> Cost:
        """The cost of `mechanism` at μ > 0."""
        return self.cost_for(mechanism, self.workload, mu)

    def cost_for(self, mechanism: Mechanism, workload: Workload, mu: float) -> Cost:
        """The same for other sums, such as those of an algorithm."""
        check_positive("mu", mu)
        return cost_of(mechanism, workload, lambda sensitivity: self._noise(sensitivity, mu))

    def mu_spent(self, mechanism: Mechanism, std: float) -> float:
        """The μ that noise of standard deviation `std` gives: noise is inversely proportional to μ."""
        check_positive("std", std)
        at_one = self._noise(mechanism.sensitivity(self.workload), 1.0)
        return float(at_one.sources[0].std) / std

    def compare(self, mu: float) -> dict[str, Cost]:
        """The cost at μ of every mechanism that needs no fit, by a name that says its parameters."""
        return {name: self.cost(mechanism, mu) for name, mechanism in unfitted(self.workload).items()}

    def _noise(self, sensitivity: float, mu: float) -> Noise:
        share = 1.0 / self.silos
        return self.protection.noise(
            sensitivity, (self.batch,) * self.silos, (share,) * self.silos, relation_named(self.relation), mu
        )
