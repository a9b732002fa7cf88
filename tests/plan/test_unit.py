"""Whose privacy it is, said once: a second unit, planted here, shows who reads it."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.claims.claim import PrivacyClaim, compute_claim, describe_group_privacy, group_bounds, group_epsilons
from fedpriv.claims.ledger import ReleaseStream, make_release_streams, stream_from_data, stream_to_data
from fedpriv.core.errors import InputError, RunError
from fedpriv.loss.objective import Records
from fedpriv.loss.views import absent_label
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.trust import RECORD, TRUSTED, UNITS, UNTRUSTED, Unit, make_unit, unit_from_data
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import group_records, load_task, mask_absent_records
from fedpriv.show.statement import make_statements
from fedpriv.silo.guard import open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from fedpriv.study.results import Results
from tests.engines.test_units import person_cell
from tests.silo.guarded import ZERO, cell_json, write_silo


class Shared(Unit):
    """Its records may be in two silos, so that it weighs twice as much in each."""

    def weight_in_silo(self, batch: int) -> float:
        return 2.0 * super().weight_in_silo(batch)

    def weight_in_mean(self, weights: Sequence[float], batches: Sequence[int]) -> float:
        return 2.0 * super().weight_in_mean(weights, batches)


PERSON = Shared("person", "all records of one person", "person", 8, "Nobody is in three silos.")
STREAM = ReleaseStream(
    "silo 0", IndependentGaussian(), FixedOrder(4, 4), 0.0, (1.0,) * 4, 0.5, "zero-out", std=1.0
)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Unit:
    monkeypatch.setitem(UNITS, PERSON.name, PERSON)
    return PERSON


def test_a_release_stream_preserves_its_unit_of_protection_in_a_ledger_round_trip(planted: Unit) -> None:
    stream = dataclasses.replace(STREAM, unit=planted)
    assert stream_from_data(stream_to_data(stream)) == stream
    with pytest.raises(InputError, match="unit = 'household': accepted are 'record', 'user', 'client', 'person'"):
        stream_from_data({**stream_to_data(STREAM), "unit": "household"})


def test_a_claim_has_the_unit_of_its_releases_and_mixed_units_are_refused(planted: Unit) -> None:
    """Guarantee of the claim: neighbours differ in one unit; records and persons cannot be compared."""
    persons = dataclasses.replace(STREAM, unit=planted)
    claim = compute_claim([persons])
    assert claim is not None
    assert claim.unit is planted
    assert (
        PrivacyClaim(GaussianDP(1.0), "zero-out", planted)
        .format_sentence("line", 1e-5)
        .startswith("all records of one person")
    )
    with pytest.raises(InputError, match="protects one unit, this ledger has person, record"):
        compute_claim([STREAM, persons])


def test_noise_is_proportional_to_the_weight_of_one_unit_of_protection() -> None:
    """Guarantee of `Trust.calibrate_noise`: mu for each unit, so that twice the weight takes twice the noise."""
    for trust in (UNTRUSTED, TRUSTED):
        record, person = (
            trust.calibrate_noise(1.0, (4, 2), (0.5, 0.5), "zero-out", 1.0, unit).sources[0].std
            for unit in (RECORD, PERSON)
        )
        assert float(person) == pytest.approx(2.0 * float(record))
    assert (RECORD.weight_in_silo(4), RECORD.weight_in_mean((0.5, 0.5), (4, 2))) == (0.25, 0.25)


def test_a_guard_whose_budget_is_for_persons_refuses_runs_that_protect_records(
    tmp_path: Path, planted: Unit
) -> None:
    """Gains: k times the budget of a person with k records."""
    policy = read_policy(write_silo(tmp_path))
    begin_ledgers(policy)
    persons = policy.model_copy(update={"allow": policy.allow.model_copy(update={"unit": planted.name})})
    with pytest.raises(RunError, match="the scenario protects by the record, allowed is by the person"):
        open_guard(persons).answer("run", cell_json(), 1, ZERO)


def test_a_privacy_statement_names_its_unit_of_protection(planted: Unit) -> None:
    data = stream_to_data(dataclasses.replace(STREAM, unit=planted))
    cell = {
        "trust": "untrusted",
        "relation": "zero-out",
        "noise": "simulation",
        "unit": planted.name,
        "delta": 1e-5,
        "mu": 1.0,
        "epsilon": 4.4,
    }
    (said,) = make_statements(
        Results("n", "", "vectorized", True, {}, [0], None, [{**cell, "releases": [data]}], {}, None)
    )
    assert said.unit == "all records of one person"
    assert said.hidden.startswith("whether any one person contributed")
    assert "each person" in said.mechanisms[0]
    assert said.assumptions[0] == "Nobody is in three silos."
    assert said.assumptions[1].startswith("Every person takes part")
    assert "person by person" in said.loss_assumptions[0]


def test_only_registered_units_of_protection_are_accepted() -> None:
    assert list(UNITS) == ["record", "user", "client"]
    assert make_unit("record") is RECORD
    with pytest.raises(InputError, match="unit = 'household': accepted are 'record', 'user', 'client'"):
        make_unit("household")
    with pytest.raises(InputError, match="a record is one in one silo"):
        make_unit("record", 2)


@pytest.mark.parametrize(
    "unit", [RECORD, make_unit("user", 8, 3), make_unit("client", 1), make_unit("client", 60)]
)
def test_a_unit_of_protection_survives_a_ledger_round_trip(unit: Unit) -> None:
    assert unit_from_data(json.loads(json.dumps(unit.to_data()))) == unit


def test_the_description_of_a_person_unit_states_its_record_and_silo_limits() -> None:
    assert make_unit("user", 8).description == "all records of one person in one silo, at most 8 a round"
    assert "in at most 3 of the silos" in make_unit("user", 8, 3).assumptions


def test_the_claim_for_persons_in_two_silos_composes_both_silos() -> None:
    """Guarantee of `claim_of` and of `Trust.calibrate_noise` with `shared` = 2: the worst two streams compose
    to it.
    """
    unit = make_unit("user", 4, 2)
    batches, weights = (4, 2, 8), (2 / 7, 1 / 7, 4 / 7)
    noise = UNTRUSTED.calibrate_noise(1.0, batches, weights, "zero-out", 1.0, unit)
    streams = [
        dataclasses.replace(
            STREAM, party_name=f"silo {source.party}", record_weight=1 / batch, std=float(source.std), unit=unit
        )
        for source, batch in zip(noise.sources, batches, strict=True)
    ]
    claim = compute_claim(streams)
    assert claim is not None
    assert isinstance(claim.guarantee, GaussianDP)
    own = [stream.mu for stream in streams]
    assert claim.guarantee.mu == pytest.approx(math.sqrt(2.0) * own[0])
    assert 1.0 - 1e-9 < claim.guarantee.mu <= 1.0
    alike = compute_claim([dataclasses.replace(streams[0], party_name="silos 0-2")])
    assert alike is not None
    assert alike.guarantee == claim.guarantee
    assert unit.weight_in_mean(weights, batches) == pytest.approx(2 / 14)
    trusted = TRUSTED.calibrate_noise(1.0, (4, 4), (0.5, 0.5), "zero-out", 1.0, unit)
    assert float(trusted.sources[0].std) == pytest.approx(0.25)  # both means move by 1/8


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_integer_releases_meet_the_privacy_target_of_persons_in_two_silos(tmp_path: Path, trust: str) -> None:
    cell = person_cell(tmp_path, algorithm__trust=trust, privacy__shared=2)
    plan = make_plan(cell, load_task(cell).objective, for_release=True)
    claim = compute_claim(make_release_streams(plan, plan.schedule.rounds))
    assert claim is not None
    assert isinstance(claim.guarantee, GaussianDP)
    assert 1.99 < claim.guarantee.mu <= 2.0


@pytest.mark.parametrize(("trust", "slack_factor"), [("untrusted", 2.0), ("trusted", 1.0)])
def test_releases_about_a_person_in_two_silos_share_the_slack_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str, slack_factor: float
) -> None:
    """Guarantee of `make_exact_plan`: all releases about a person have a slack of at most 2^-60 together."""
    cell = person_cell(tmp_path, algorithm__trust=trust, privacy__shared=2)
    objective = load_task(cell).objective
    slack = slack_factor * make_plan(cell, objective, for_release=True).required_exact_plan.claim.slack
    monkeypatch.setattr("fedpriv.plan.calibration.MAX_SLACK", slack)
    make_plan(cell, objective, for_release=True)
    monkeypatch.setattr("fedpriv.plan.calibration.MAX_SLACK", 0.9 * slack)
    with pytest.raises(InputError, match="are too many"):
        make_plan(cell, objective, for_release=True)


def test_group_privacy_of_two_and_eight_records_matches_reference_values() -> None:
    """mu = 1: 2 records 9.9971, 8 records 65.32; with secret rounds the chain, which √k·μ would undercut."""
    exact = group_epsilons(GaussianDP(1.0), 1e-5)
    assert exact[2] == pytest.approx(9.997, abs=1e-3)
    assert exact[8] == pytest.approx(65.32, abs=1e-2)
    secret = AllocatedGaussian(0.9205, 60)
    chained = group_epsilons(secret, 1e-5)[2]
    assert chained > 2.0 * secret.epsilon_of(1e-5)
    assert secret.delta_of(chained / 2.0) * (1.0 + math.exp(chained / 2.0)) == pytest.approx(1e-5, rel=1e-3)
    assert "2 records: ε = 9.998, 8 records: ε = 65.32" in describe_group_privacy([GaussianDP(1.0)], 1e-5)
    assert group_bounds(GaussianDP(1.0), 1e-5) == {
        "2": {"mu": pytest.approx(2.0), "epsilon": pytest.approx(9.997, abs=1e-3)},
        "8": {"mu": pytest.approx(8.0), "epsilon": pytest.approx(65.32, abs=1e-2)},
    }


@pytest.mark.parametrize("units", [[[0], [1], [2]], [[2], [0]], [[0, 1], [2, 3]], [[3, -1], [0, 2]], [[1], [-1]]])
def test_grouping_gives_each_unit_its_records_in_order_and_zeros_for_absent_records(
    units: list[list[int]],
) -> None:
    """A unit of one record has no axis of records, and an absent record is zeros without a label."""
    records = Records(torch.arange(1.0, 13.0).view(4, 3), torch.tensor([2, 0, 1, 2]))
    features, labels = group_records(records, np.array(units))
    # Row -1 is the last one, which is absent.
    with_absent = (
        torch.cat([records.features, torch.zeros(1, 3)]),
        torch.cat([records.labels, torch.tensor([absent_label(records.labels)])]),
    )
    rows = torch.tensor(units).squeeze(1)
    assert torch.equal(features, with_absent[0][rows])
    assert torch.equal(labels, with_absent[1][rows])


@pytest.mark.parametrize("labels", [torch.tensor([[2, -1], [0, 1]]), torch.tensor([[2.0, math.nan], [0.0, -1.0]])])
def test_absent_records_have_label_0_and_are_masked(labels: torch.Tensor) -> None:
    records = Records(torch.ones(2, 2, 3), labels)
    masked, is_present = mask_absent_records(records)
    assert is_present.tolist() == [[True, False], [True, True]]
    assert masked.labels.tolist() == [[2, 0], labels[1].tolist()]
    assert torch.equal(masked.features, records.features)
