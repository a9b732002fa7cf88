"""Whose privacy it is, said once: a second unit, planted here, shows who reads it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedpriv.accounting import GaussianDP
from fedpriv.clients.guard import begin_ledger, open_guard
from fedpriv.clients.policy import read_policy
from fedpriv.errors import InputError, RunError
from fedpriv.mechanisms import IndependentGaussian
from fedpriv.participation.fixed_order import Schedule
from fedpriv.privacy.claim import PrivacyClaim
from fedpriv.privacy.ledger import ReleaseStream, as_data, claim_of, from_data
from fedpriv.privacy.trust import TRUSTED, UNTRUSTED
from fedpriv.privacy.unit import RECORD, UNITS, Unit, unit_named
from fedpriv.reports.statement import statements
from fedpriv.sweep.results import Results
from tests.clients.guarded import ZERO, cell_json, write_silo


class Shared(Unit):
    """Its records may be in two silos, so that it weighs twice as much in each."""

    def in_silo(self, batch: int) -> float:
        return 2.0 * super().in_silo(batch)

    def in_mean(self, weights: Sequence[float], batches: Sequence[int]) -> float:
        return 2.0 * super().in_mean(weights, batches)


PERSON = Shared("person", "all records of one person", "person", 8, "Nobody is in three silos.")
STREAM = ReleaseStream("silo 0", IndependentGaussian(), Schedule(4, 4), 0.0, (1.0,) * 4, 0.5, "zero-out", std=1.0)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Unit:
    monkeypatch.setitem(UNITS, PERSON.name, PERSON)
    return PERSON


def test_a_stream_keeps_its_unit_and_older_ones_are_of_records(planted: Unit) -> None:
    stream = dataclasses.replace(STREAM, unit=planted)
    assert from_data(as_data(stream)) == stream
    older = {key: value for key, value in as_data(STREAM).items() if key != "unit"}
    assert from_data(older).unit is RECORD
    with pytest.raises(InputError, match="unit = 'household': accepted are 'record', 'person'"):
        from_data({**older, "unit": "household"})


def test_a_claim_is_of_its_streams_unit_and_of_one_only(planted: Unit) -> None:
    """Guarantee of the claim: neighbours differ in one unit; records and persons cannot be compared."""
    persons = dataclasses.replace(STREAM, unit=planted)
    claim = claim_of([persons])
    assert claim is not None
    assert claim.unit is planted
    assert "unit: all records of one person" in PrivacyClaim(GaussianDP(1.0), "zero-out", planted).statement(1e-5)
    with pytest.raises(InputError, match="protects one unit, this ledger has person, record"):
        claim_of([STREAM, persons])


def test_the_noise_is_for_what_one_unit_weighs() -> None:
    """Guarantee of `Trust.noise`: mu for each unit, so that twice the weight takes twice the noise."""
    for trust in (UNTRUSTED, TRUSTED):
        record, person = (
            trust.noise(1.0, (4, 2), (0.5, 0.5), "zero-out", 1.0, unit).sources[0].std for unit in (RECORD, PERSON)
        )
        assert float(person) == pytest.approx(2.0 * float(record))
    assert (RECORD.in_silo(4), RECORD.in_mean((0.5, 0.5), (4, 2))) == (0.25, 0.25)


def test_a_guard_whose_budget_is_for_persons_refuses_runs_that_protect_records(
    tmp_path: Path, planted: Unit
) -> None:
    """Gains: k times the budget of a person with k records."""
    policy = read_policy(write_silo(tmp_path))
    begin_ledger(policy)
    persons = policy.model_copy(update={"allow": policy.allow.model_copy(update={"unit": planted.name})})
    with pytest.raises(RunError, match="the scenario protects by the record, allowed is by the person"):
        open_guard(persons).answer("run", cell_json(), 1, ZERO)


def test_a_report_speaks_of_the_unit(planted: Unit) -> None:
    data = as_data(dataclasses.replace(STREAM, unit=planted))
    cell = {"trust": "untrusted", "relation": "zero-out", "noise": "simulation", "delta": 1e-5, "mu": 1.0}
    (said,) = statements(
        Results("n", "", "vectorized", True, {}, [0], None, [{**cell, "releases": [data]}], {}, None)
    )
    assert said.unit == "all records of one person"
    assert said.hidden.startswith("whether any one person contributed")
    assert "each person" in said.mechanisms[0]
    assert said.assumptions[0] == "Nobody is in three silos."
    assert said.assumptions[1].startswith("Every person takes part")
    assert "person by person" in said.about_the_loss[0]


def test_units_that_scenarios_can_name_are_those_of_the_table() -> None:
    assert UNITS == {"record": RECORD}
    with pytest.raises(InputError, match="unit = 'user': accepted are 'record'"):
        unit_named("user")
