"""Flower's `PrivacyAccountant` by exact accounting, for Flower's own DP strategies.

    accountant = ExactAccountant(PrivacyConfig(1e-5, 100, NeighboringRelation.ADD_OR_REMOVE_ONE,
                                               SamplingMethod.NO_AMPLIFICATION, max_epsilon=4.0))
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 0.1, 100, accountant=accountant)

Releases without amplification are Gaussian DP together, with μ² = Σ 1/z² over their noise multipliers z.
Poisson-sampled releases are composed by their privacy loss distributions.  Flower's own accountant bounds both by
Rényi DP.
"""

import dataclasses
import json
import math
from collections import Counter
from typing import Any, cast

from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent, SamplingMethod

from fedpriv.accounting.gaussian import compose, delta_of
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.core.errors import InputError, refuse

_METHOD = "fedpriv-exact"
_ROUND_UP = 1.0 + 1e-15
"""Factor above the rounding errors of a square root and a division together."""


class ExactAccountant:
    """An accountant of client-level releases, with the methods of Flower's protocol.

    Guarantee: ε and δ are those of all composed events together, rounded up, for neighbours that differ in one
    client.  ε and δ of Poisson-sampled events hold as long as it stays secret which clients took part.
    """

    def __init__(self, config: PrivacyConfig) -> None:
        """Take Flower's configuration.

        InputError for sampling without replacement, which has no exact accounting here.
        """
        if config.sampling_method is SamplingMethod.WITHOUT_REPLACEMENT:
            raise InputError("sampling_method: without-replacement is not accounted for; take RdpAccountant")
        self._config, self._counts = config, Counter[GaussianPrivacyEvent]()

    @property
    def config(self) -> PrivacyConfig:
        """Configuration that the accountant was made with."""
        return self._config

    @property
    def num_releases(self) -> int:
        """Number of composed releases."""
        return self._counts.total()

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Add `count` releases.

        InputError for another population, and for Poisson-sampled events that are not all equal.
        """
        self._counts = self._with(event, count)

    def get_epsilon(self, delta: float) -> float:
        """Return ε of all releases at `delta`."""
        return _guarantee(self._config, self._counts).epsilon_of(delta)

    def get_delta(self, epsilon: float) -> float:
        """Return δ of all releases at `epsilon`."""
        guarantee = _guarantee(self._config, self._counts)
        return (
            delta_of(guarantee.mu, epsilon) if isinstance(guarantee, GaussianDP) else guarantee.delta_of(epsilon)
        )

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Return ε and δ of all releases, at the configuration's δ if none is given."""
        target_delta = self._config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(target_delta), target_delta, self.num_releases, _METHOD)

    def would_exceed(self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1) -> bool:
        """Whether ε would exceed `max_epsilon`, or the configuration's limit, after `count` more releases."""
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise InputError("max_epsilon: give it to PrivacyConfig or to would_exceed")
        return _guarantee(self._config, self._with(event, count)).epsilon_of(self._config.target_delta) > limit

    def state_dict(self) -> dict[str, object]:
        """Return the state as plain data, for `load_state_dict`."""
        return {
            "backend": _METHOD,
            "config": _plain(self._config),
            "events": [{**vars(event), "count": count} for event, count in self._counts.items()],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Replace the state of this accountant.

        InputError for a state that is damaged, or of another configuration.
        """
        if state.get("backend") != _METHOD or state.get("config") != _plain(self._config):
            raise InputError("load_state_dict: the state is of another accountant or configuration")
        loaded = ExactAccountant(self._config)
        try:
            for event in cast(list[dict[str, Any]], state["events"]):
                fields = dict(event)
                count = fields.pop("count")
                loaded.compose(GaussianPrivacyEvent(**fields), count)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"load_state_dict: the state is damaged ({error})") from None
        self._counts = loaded._counts

    def _with(self, event: GaussianPrivacyEvent, count: int) -> Counter[GaussianPrivacyEvent]:
        refuse(
            {
                f"population_size = {event.population_size} of an event: the accountant is of "
                f"{self._config.population_size} clients": event.population_size != self._config.population_size,
                f"count = {count!r}: expected a whole number of at least 1": type(count) is not int or count < 1,
            }
        )
        counts = self._counts + Counter({event: count})
        if self._config.sampling_method is SamplingMethod.POISSON and len(counts) > 1:
            raise InputError("Poisson-sampled events need one noise_multiplier and one sample_size")
        return counts


def _guarantee(config: PrivacyConfig, counts: Counter[GaussianPrivacyEvent]) -> GaussianDP | PoissonGaussian:
    """Return the guarantee of all events together."""
    if config.sampling_method is SamplingMethod.POISSON and counts:
        ((event, count),) = counts.items()
        rate = min(1.0, event.sample_size / event.population_size * _ROUND_UP)
        return PoissonGaussian(event.noise_multiplier, rate, count, "zero-out")
    mus = [math.sqrt(count) / event.noise_multiplier * _ROUND_UP for event, count in counts.items()]
    return GaussianDP(compose(mus))


def _plain(config: PrivacyConfig) -> dict[str, object]:
    return dict(json.loads(json.dumps(dataclasses.asdict(config))))
