"""Events for dp-accounting: its own accountants give the epsilon that fedpriv claims."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.renyi import epsilon_of as renyi
from fedpriv.claims.entries import LedgerEntry, make_event_data
from fedpriv.claims.ledger import ReleaseStream
from fedpriv.core.errors import InputError
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder, Participation
from fedpriv.participation.secret import PoissonSampling, RandomAllocation

DELTA = 1e-5


def entry_of(**changed: Any) -> LedgerEntry:
    """A cell of silos that release what is described: by default fresh noise on 40 rounds of two epochs."""
    schedule: Participation = changed.pop("schedule", FixedOrder(40, 20))
    stream = ReleaseStream(
        "silos 0-2", IndependentGaussian(), schedule, 0.0, (1.0,) * schedule.rounds, 0.25, "zero-out", std=0.5
    )
    streams = (dataclasses.replace(stream, **changed),)
    return LedgerEntry(3, {"privacy.rho": 4.0}, 1, "untrusted", None, None, DELTA, streams)


def make_dp_event(event: Any) -> Any:
    """The object that an event describes, and likewise for the values of its fields."""
    if isinstance(event, list):
        return [make_dp_event(part) for part in event]
    if not isinstance(event, dict):
        return event
    fields = {name: make_dp_event(value) for name, value in event.items() if name != "class"}
    return getattr(dp_accounting, event["class"])(**fields)


def their_epsilon(exported: dict[str, Any], accountant: Callable[..., Any] = PLDAccountant) -> float:
    """The epsilon of dp-accounting for what was exported, as JSON."""
    exported = json.loads(json.dumps(exported))
    relation = dp_accounting.NeighboringRelation[exported["neighboring_relation"]]
    composed = accountant(neighboring_relation=relation).compose(make_dp_event(exported["event"]))
    return float(composed.get_epsilon(DELTA))


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    ("mechanism", "decay"),
    [(IndependentGaussian(), 0.0), (IndependentGaussian(), 1.0), (BinaryTree(1.0), 1.0),
     (BandedSquareRoot(1.0, 4), 1.0)],
)  # fmt: skip
def test_dp_accounting_gives_the_claimed_epsilon_for_a_fixed_order_event(
    mechanism: Any, decay: float, relation: str
) -> None:
    exported = make_event_data(entry_of(mechanism=mechanism, decay=decay, relation=relation, std=3.0))
    assert their_epsilon(exported) == pytest.approx(exported["epsilon"], rel=1e-3)
    assert their_epsilon(exported, RdpAccountant) == pytest.approx(renyi(exported["mu"], DELTA), rel=2e-3)


def test_rounds_with_independent_noise_become_a_self_composed_gaussian_event() -> None:
    """A record's two rounds by hand: (1/4) / (1/2) = 0.5 each, a noise multiplier of 2."""
    once = {"class": "GaussianDpEvent", "noise_multiplier": 2.0}
    assert make_event_data(entry_of())["event"] == {"class": "SelfComposedDpEvent", "event": once, "count": 2}


@pytest.mark.slow
def test_event_with_unequal_clips_composes_the_rounds_of_the_worst_record() -> None:
    exported = make_event_data(entry_of(clips=(*(1.0,) * 20, *(1.0,) * 19, 2.0)))
    assert exported["event"]["class"] == "ComposedDpEvent"
    assert [event["noise_multiplier"] for event in exported["event"]["events"]] == [2.0, 1.0]
    assert their_epsilon(exported) == pytest.approx(exported["epsilon"], rel=1e-3)


def test_correlated_noise_of_a_tree_becomes_one_gaussian_event() -> None:
    exported = make_event_data(entry_of(mechanism=BinaryTree(1.0), decay=1.0))
    assert exported["event"] == {
        "class": "GaussianDpEvent",
        "noise_multiplier": pytest.approx(1.0 / exported["mu"]),
    }


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_poisson_sampling_event_has_its_rate_rounds_and_relation(relation: str) -> None:
    exported = make_event_data(entry_of(schedule=PoissonSampling(60, 20), relation=relation))
    assert exported["event"]["count"] == 60
    assert exported["event"]["event"]["sampling_probability"] == pytest.approx(1 / 20)
    assert exported["neighboring_relation"] == (
        "REPLACE_ONE" if relation == "replace-one" else "ADD_OR_REMOVE_ONE"
    )
    assert exported["mu"] is None
    assert their_epsilon(exported) == pytest.approx(exported["epsilon"], rel=5e-3)


def test_exporting_runs_without_noise_or_with_random_allocation_is_refused() -> None:
    with pytest.raises(InputError, match="cell 3: released without noise"):
        make_event_data(entry_of(std=0.0))
    with pytest.raises(InputError, match="random allocation"):
        make_event_data(entry_of(schedule=RandomAllocation(40, 20)))


def test_guarantee_an_event_never_promises_more_than_the_claim() -> None:
    """Guarantee: composed, a Gaussian event has the claim's μ: the worst silo's, of several."""
    entry = dataclasses.replace(entry_of(), streams=(*entry_of().streams, *entry_of(std=0.25).streams))
    exported = make_event_data(entry)
    assert entry.claim is not None
    assert isinstance(entry.claim.guarantee, GaussianDP)
    assert exported["mu"] == entry.claim.guarantee.mu == pytest.approx(2**0.5)
    assert exported["event"]["event"]["noise_multiplier"] == pytest.approx(1.0)
