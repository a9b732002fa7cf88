"""Flower's protocol of accountants by exact accounting, beside Flower's own."""

import json
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.core.errors import InputError
from fedpriv.flower import ExactAccountant
from fedpriv.flower.accountant import _guarantee
from tests.flower.apps import SILOS, grid_of, network

KNOWN, POISSON = SamplingMethod.NO_AMPLIFICATION, SamplingMethod.POISSON


def config(method: SamplingMethod = KNOWN, max_epsilon: float | None = None) -> PrivacyConfig:
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if method is SamplingMethod.WITHOUT_REPLACEMENT:
        relation = NeighboringRelation.REPLACE_ONE
    return PrivacyConfig(1e-5, 100, relation, method, max_epsilon)


def event(noise: float = 2.0, sample: int = 10, population: int = 100) -> GaussianPrivacyEvent:
    return GaussianPrivacyEvent(noise, sample, population)


def composed_of(method: SamplingMethod, composed: list[Any]) -> ExactAccountant:
    accountant = ExactAccountant(config(method))
    for one, count in composed:
        accountant.compose(one, count)
    return accountant


@pytest.mark.parametrize("method", [KNOWN, POISSON])
def test_exact_accountant_epsilon_is_at_most_thirty_percent_below_that_of_the_rdp_accountant(
    method: SamplingMethod,
) -> None:
    exact: PrivacyAccountant = ExactAccountant(config(method))
    renyi: PrivacyAccountant = RdpAccountant(config(method))
    for accountant in (exact, renyi):
        accountant.compose(event(), 20)
        accountant.compose(event())
    for delta in (1e-6, 1e-5, 1e-3):
        assert 0.7 * renyi.get_epsilon(delta) < exact.get_epsilon(delta) < renyi.get_epsilon(delta)
    epsilon = exact.get_epsilon(1e-5)
    assert exact.get_delta(epsilon) == pytest.approx(1e-5, rel=1e-3)
    spent = exact.get_privacy_spent()
    assert (spent.epsilon, spent.delta, spent.num_releases) == (epsilon, 1e-5, 21)


def test_releases_without_amplification_compose_as_gaussian_dp() -> None:
    accountant = ExactAccountant(config())
    assert accountant.get_epsilon(1e-5) == accountant.get_delta(1.0) == 0.0
    accountant.compose(event(2.0), 3)
    accountant.compose(event(4.0, sample=5))
    mu = math.sqrt(3 / 4 + 1 / 16)
    assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon_of(mu, 1e-5), rel=1e-9)
    assert accountant.get_epsilon(1e-5) >= epsilon_of(mu, 1e-5)


def test_guarantee_the_composed_mu_is_never_rounded_down() -> None:
    """A sum of floats lost 126 squares of about 2^-53 each beside a square of 1, more than the margin."""
    multipliers = [1.0, *(9.49063e7 + number for number in range(126))]
    accountant = composed_of(KNOWN, [(event(multiplier), 1) for multiplier in multipliers])
    square = sum(1 / Fraction(multiplier) ** 2 for multiplier in multipliers)
    mu = _guarantee(accountant.config, accountant._counts).mu
    assert mu is not None
    assert square <= Fraction(mu) ** 2 <= square * Fraction(1 + 1e-14)


def test_the_accountant_predicts_whether_a_release_would_exceed_the_budget() -> None:
    accountant = ExactAccountant(config(max_epsilon=3.0))
    while not accountant.would_exceed(event()):
        accountant.compose(event())
    assert accountant.get_epsilon(1e-5) <= 3.0
    assert accountant.would_exceed(event(), max_epsilon=3.0)
    assert not accountant.would_exceed(event(), max_epsilon=30.0)
    more = ExactAccountant(config())
    more.compose(event(), accountant.num_releases + 1)
    assert more.get_epsilon(1e-5) > 3.0


@pytest.mark.parametrize("method", [KNOWN, POISSON])
def test_the_accountant_state_survives_a_json_round_trip(method: SamplingMethod) -> None:
    accountant, other = ExactAccountant(config(method)), ExactAccountant(config(method))
    accountant.compose(event(), 7)
    other.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert other.get_privacy_spent() == accountant.get_privacy_spent()
    with pytest.raises(InputError, match="of another accountant or configuration"):
        ExactAccountant(config(method, 1.0)).load_state_dict(accountant.state_dict())
    with pytest.raises(InputError, match="of another accountant or configuration"):
        other.load_state_dict([accountant.state_dict()])  # type: ignore[arg-type]
    sizes = {"sample_size": 1, "population_size": 100, "count": 1}
    for events in ([{"noise_multiplier": -1.0, **sizes}], [{"noise_multiplier": 10**400, **sizes}], ["count"]):
        with pytest.raises(InputError, match="load_state_dict: the state is damaged"):
            other.load_state_dict({**accountant.state_dict(), "events": events})
    assert other.num_releases == 7


@pytest.mark.parametrize(
    ("method", "composed", "line"),
    [
        (SamplingMethod.WITHOUT_REPLACEMENT, [], "without-replacement is not accounted for"),
        (KNOWN, [(event(population=50), 1)], "population_size = 50 of an event: the accountant is of 100 clients"),
        (KNOWN, [(event(), 0)], "count = 0: expected a whole number"),
        (KNOWN, [(event(), 2**63)], r"count = 9\d+: expected a whole number from 1 to below 2\^63"),
        (POISSON, [(event(), 1), (event(3.0), 1)], "Poisson-sampled events need one noise_multiplier"),
    ],
)
def test_events_outside_the_accountant_are_refused_in_one_line(
    method: SamplingMethod, composed: list[Any], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        composed_of(method, composed)
    for limit in (None, math.nan):
        with pytest.raises(InputError, match="max_epsilon: give it"):
            ExactAccountant(config()).would_exceed(event(), limit)


def test_a_flower_dp_strategy_with_the_exact_accountant_stops_at_its_budget() -> None:
    module = network()

    def train(message: Message, context: Context) -> Message:
        moved = [values + 0.01 for values in message.content.array_records["arrays"].to_numpy_ndarrays()]
        arrays = dict(zip(module.state_dict(), map(torch.from_numpy, moved), strict=True))
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    budget = PrivacyConfig(1e-5, SILOS, NeighboringRelation.ADD_OR_REMOVE_ONE, KNOWN, max_epsilon=3.0)
    accountant = ExactAccountant(budget)
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=SILOS, min_available_nodes=SILOS)
    strategy = DifferentialPrivacyServerSideFixedClipping(inner, 4.0, 0.1, SILOS, accountant=accountant)
    with pytest.raises(Exception, match="epsilon") as raised:
        strategy.start(grid_of(train), ArrayRecord(module.state_dict()), num_rounds=20)
    assert "Budget" in type(raised.value).__name__
    assert 0 < accountant.get_epsilon(1e-5) <= 3.0
