"""Flower's `PrivacyAccountant` by exact accounting, for Flower's own DP strategies.

    accountant = ExactAccountant(PrivacyConfig(1e-5, 100, NeighboringRelation.ADD_OR_REMOVE_ONE,
                                               SamplingMethod.NO_AMPLIFICATION, max_epsilon=4.0))
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 0.1, 100, accountant=accountant)

An event is Flower's record of a kind of release: its noise multiplier, and the sizes of cohort and population.
Releases without amplification compose to μ-Gaussian DP, with μ² = Σ 1/z² over their noise multipliers z.
Poisson-sampled releases are composed by their privacy loss distributions, rounded up to a grid.
"""

import json
import math
from collections import Counter
from typing import Any, Final, cast

from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent, SamplingMethod

from fedpriv.accounting.gaussian import compose, delta_of
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.core.errors import InputError, refuse

_METHOD = "fedpriv-exact"
_ROUND_UP = 1.0 + 1e-15
"""Factor above the rounding errors of a square root, a division and `compose` together."""


class ExactAccountant:
    """Accountant of client-level releases, with the methods of Flower's protocol.

    Guarantee: ε and δ are those of all composed events together, rounded up, for neighbours of which one has one
    client more than the other.  ε and δ of Poisson-sampled events hold as long as it stays secret which clients
    took part.  The guarantee is for noise multipliers of at most 1e150.

    Example:
        >>> from flwr.serverapp import NeighboringRelation
        >>> relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
        >>> accountant = ExactAccountant(PrivacyConfig(1e-5, 100, relation, sampling))
        >>> accountant.compose(GaussianPrivacyEvent(2.0, sample_size=100, population_size=100), count=4)
        >>> round(accountant.get_epsilon(1e-5), 4)
        4.3772
    """

    def __init__(self, config: PrivacyConfig) -> None:
        """Set up an accountant without releases.

        Args:
            config: Flower's configuration.

        Raises:
            InputError: The configuration has sampling without replacement, which is not accounted for here.
        """
        refuse(
            {
                "sampling_method: without-replacement is not accounted for; take RdpAccountant": (
                    config.sampling_method is SamplingMethod.WITHOUT_REPLACEMENT
                )
            }
        )
        self.config: Final = config
        self._counts = Counter[GaussianPrivacyEvent]()

    @property
    def num_releases(self) -> int:
        """Number of composed releases."""
        return self._counts.total()

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Add `count` releases like `event`.

        Raises:
            InputError: The event has another population, Poisson-sampled events are not all equal, or `count` is
                no whole number from 1 to below 2^63.
        """
        self._counts = self._add_events(event, count)

    def get_epsilon(self, delta: float) -> float:
        """Return ε of all releases at `delta`, 0 without a release.

        An ε of Poisson-sampled releases above 700 is returned as infinity.

        Raises:
            InputError: `delta` is not in (0, 1), or the noise is too small for a finite μ.  For Poisson-sampled
                releases also, there are more than 100,000, their noise multiplier is too small or above 1e100, or
                `delta` is below 1e-10.
        """
        return _guarantee(self.config, self._counts).epsilon_of(delta)

    def get_delta(self, epsilon: float) -> float:
        """Return δ of all releases at `epsilon`, 0 without a release.

        Raises:
            InputError: `epsilon` is negative or not finite, or the noise is too small for a finite μ.  For
                Poisson-sampled releases also, there are more than 100,000, or their noise multiplier is too small
                or above 1e100.
        """
        guarantee = _guarantee(self.config, self._counts)
        return (
            delta_of(guarantee.mu, epsilon) if isinstance(guarantee, GaussianDP) else guarantee.delta_of(epsilon)
        )

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Return ε and δ of all releases and their number, at the configuration's δ if none is given.

        Raises:
            InputError: As `get_epsilon`.
        """
        target_delta = self.config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(target_delta), target_delta, self.num_releases, _METHOD)

    def would_exceed(self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1) -> bool:
        """Whether ε at the configuration's δ would exceed a limit after `count` more releases.

        Args:
            event: A further release.
            max_epsilon: Limit of ε, or None for the configuration's limit.
            count: Number of releases like `event`.

        Raises:
            InputError: There is no limit, it is NaN, the event cannot be added, or `get_epsilon` would raise this
                error.
        """
        limit = self.config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None or math.isnan(limit):
            raise InputError("max_epsilon: give it, as a number, to PrivacyConfig or to would_exceed")
        return _guarantee(self.config, self._add_events(event, count)).epsilon_of(self.config.target_delta) > limit

    def state_dict(self) -> dict[str, object]:
        """Return the state as plain data, for `load_state_dict`."""
        return {
            "backend": _METHOD,
            "config": json.loads(json.dumps(vars(self.config))),
            "events": [{**vars(event), "count": count} for event, count in self._counts.items()],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Replace the releases of this accountant by stored ones.

        The stored releases are checked as `compose` does.  An error leaves this accountant unchanged.

        Args:
            state: State that `state_dict` of an accountant with this configuration returned.

        Raises:
            InputError: The state is damaged, or of another accountant or configuration.
        """
        refuse(
            {
                "load_state_dict: the state is of another accountant or configuration": (
                    not isinstance(state, dict)
                    or any(state.get(key) != self.state_dict()[key] for key in ("backend", "config"))
                )
            }
        )
        loaded = ExactAccountant(self.config)
        try:
            for event in cast(list[dict[str, Any]], state["events"]):
                fields = {name: value for name, value in event.items() if name != "count"}
                loaded.compose(GaussianPrivacyEvent(**fields), event["count"])
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"load_state_dict: the state is damaged ({error})") from None
        self._counts = loaded._counts

    def _add_events(self, event: GaussianPrivacyEvent, count: int) -> Counter[GaussianPrivacyEvent]:
        """Return the counts of events after `count` more releases, and leave the accountant unchanged.

        Raises:
            InputError: The event or `count` cannot be added.
        """
        refuse(
            {
                f"population_size = {event.population_size} of an event: the accountant is of "
                f"{self.config.population_size} clients": event.population_size != self.config.population_size,
                f"count = {count!r}: expected a whole number from 1 to below 2^63": (
                    type(count) is not int or not 1 <= count < 2**63
                ),
                "Poisson-sampled events need one noise_multiplier and one sample_size": (
                    self.config.sampling_method is SamplingMethod.POISSON and len({*self._counts, event}) > 1
                ),
            }
        )
        return self._counts + Counter({event: count})


def _guarantee(config: PrivacyConfig, counts: Counter[GaussianPrivacyEvent]) -> GaussianDP | PoissonGaussian:
    """Return the guarantee of the composition of all events, with a margin for rounding errors.

    Poisson-sampled events are all equal, and have the sampling rate sample_size / population_size.  Other events
    compose to μ² = Σ count / z² over their noise multipliers z.
    """
    if config.sampling_method is SamplingMethod.POISSON and counts:
        ((event, count),) = counts.items()
        rate = min(1.0, event.sample_size / event.population_size * _ROUND_UP)
        return PoissonGaussian(event.noise_multiplier, rate, count, "zero-out")
    return GaussianDP(
        compose([math.sqrt(count) / event.noise_multiplier * _ROUND_UP for event, count in counts.items()])
    )
