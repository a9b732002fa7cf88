"""A guard whose budget is for persons groups its own records, and answers for nothing smaller."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting.budget import ApproximateGDP
from fedpriv.core.errors import InputError
from fedpriv.data.partition import UnitTable, group_by_person, secret_permutation
from fedpriv.loss.linear import LogisticRegression
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.views import PerUnit
from fedpriv.noise.trust import Unit, make_unit
from fedpriv.plan.task import group_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.admission import Charge, price_charges
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import Shard, ShardViews
from tests.engines.test_units import persons_tree
from tests.rough import rough_accounting
from tests.silo.charged import charged
from tests.silo.guarded import (
    ZERO,
    change_shard,
    find_run,
    guard_of,
    refused,
    replay,
    silo_with_key_of,
    write_silo,
)  # fmt: skip

rough = pytest.fixture(autouse=True, scope="module")(rough_accounting)

PERSONS = [f"p{number % 7}" for number in range(20)]


def silo(folder: Path, persons: list[str] | None = PERSONS, **allow: Any) -> Path:
    bounds = {"relation": "zero-out", "unit": "user", "budget": 4.0, "clip": 1.0, "slack": 1e-6, **allow}
    path = write_silo(folder, **bounds)
    if persons is not None:
        change_shard(folder, persons=np.array(persons))
    return path


def scenario(folder: Path, **privacy: Any) -> str:
    """Seven persons, each of them in every round or in a secret one; on 28 × 28 images."""
    tree = persons_tree(folder)
    tree["model"] = {"name": "softmax-regression"}
    tree["algorithm"] = {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    tree["federation"] = {"silos": 2, "rounds": 4, "epochs": 4, "batches": [7, 3]}
    tree["privacy"] = {"unit": "user", "records": 3, "relation": "zero-out", "mu": 2.0}
    for key, value in privacy.items():
        section, name = key.split("__") if "__" in key else ("privacy", key)
        tree[section] = {**tree[section], name: value}
        if value is None:
            del tree[section][name]
    return json.dumps(resolve_cell(tree, "test").canonical_data())


SECRET = {"federation__batches": [1, 1], "federation__epochs": 1, "federation__rounds": 7}


def test_a_guard_groups_its_own_records_by_person_and_answers(tmp_path: Path) -> None:
    guard = guard_of(silo(tmp_path))
    for t in range(1, 5):
        assert torch.isfinite(guard.answer("run", scenario(tmp_path), t, ZERO)).all()
    (charge,) = guard._ledger.charges()
    assert charge.mu == pytest.approx(2.0)
    labels = guard._views.records(guard._admission.admit(charge.cell).cell).labels
    assert labels.shape == (7, 3)
    assert labels[6].tolist()[2] == -1  # p6 has two records only


def test_a_run_with_random_allocation_of_persons_is_charged_with_slack(tmp_path: Path) -> None:
    guard = guard_of(silo(tmp_path))
    text = scenario(tmp_path, federation__sampling="allocation", **SECRET)
    assert torch.isfinite(guard.answer("run", text, 1, ZERO)).all()
    (charge,) = guard._ledger.charges()
    assert (charge.slack, 0.0 < charge.mu < 4.0) == (1e-8, True)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_a_restarted_guard_repeats_its_draw_of_persons_and_redraws_in_every_epoch(
    tmp_path: Path, sampling: str
) -> None:
    """Guards that end after each of 14 rounds answer as one silo with the ledger's key: whole persons."""
    path, rounds = silo(tmp_path, rounds=14), range(1, 15)
    epochs = {"federation__epochs": 2, "federation__rounds": 14}
    text = scenario(tmp_path, federation__sampling=sampling, **(SECRET | epochs))
    answers = [guard_of(path).answer("run", text, 1, ZERO)]
    drawing = silo_with_key_of(guard_of(path))
    order = torch.from_numpy(secret_permutation(drawing.key, 7))
    ordered = Records(*(column[order] for column in drawing.records))
    drawing = dataclasses.replace(drawing, records=ordered)
    answers += [guard_of(path).answer("run", text, t, ZERO) for t in rounds[1:]]
    assert find_run(guard_of(path)).key is None  # wiped when the run is over
    rows = []
    for t, (message, release, _) in enumerate(replay(drawing, [ZERO] * 14), start=1):
        assert torch.equal(message, answers[t - 1])
        selected = drawing.plan.schedule.select_rows(t, 1, 0, lambda: drawing._sampling_randomness)
        rows.append(np.asarray(selected).tolist())
        assert len(rows[-1]) == release.counts.drawn
    if sampling == "allocation":
        for epoch in (rows[:7], rows[7:]):
            assert sorted(row for of_round in epoch for row in of_round) == list(range(7))
    assert rows[:7] != rows[7:]


@pytest.mark.parametrize(
    ("allow", "persons", "privacy", "line"),
    [
        ({}, PERSONS, {"unit": "record", "records": None}, "protects by the record, allowed is by the user"),
        ({"unit": "record"}, PERSONS, {}, "protects by the user, allowed is by the record"),
        ({}, None, {}, "this silo's records do not say whose they are"),
        ({}, PERSONS, {"federation__batches": [8, 3]}, "needs 8 users of this silo, here are fewer"),
    ],
)
def test_runs_whose_unit_of_protection_differs_from_the_policy_are_refused(
    tmp_path: Path, allow: dict[str, Any], persons: list[str] | None, privacy: dict[str, Any], line: str
) -> None:
    guard = guard_of(silo(tmp_path, persons, **allow))
    refused(guard, line, scenario(tmp_path, **privacy))
    assert charged(guard) == []


def test_a_query_is_checked_on_one_person_whose_record_is_of_zeros(tmp_path: Path) -> None:
    shard, cell = read_policy(silo(tmp_path)).load_shard(), resolve_cell(json.loads(scenario(tmp_path)), "test")
    blank = ShardViews(shard).blank_record(cell)
    assert blank.labels.tolist() == [[0, -1, -1]]
    assert blank.features.shape == (1, 3, 785)
    assert not blank.features[..., :784].any()


def test_a_query_is_admitted_or_refused_before_any_record_of_a_person_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee of `Guard`: until a query is stored persons are counted, and zeros stand for their records."""
    guard, text = guard_of(silo(tmp_path)), scenario(tmp_path)
    row_counts, rows_by_unit = list[int](), Shard.rows_by_unit

    def count_rows(shard: Shard, unit: Unit) -> UnitTable | None:
        row_counts.append(len(shard.labels))
        return rows_by_unit(shard, unit)

    monkeypatch.setattr(Shard, "rows_by_unit", count_rows)
    guard.preview_admission("run", text)
    refused(guard, "values that are not finite", text, query=ZERO * float("nan"))
    assert set(row_counts) == {1}
    guard.answer("run", text, 1, ZERO)
    assert row_counts[-1] == len(PERSONS)


def test_records_of_a_silo_have_no_clients(tmp_path: Path) -> None:
    """A client is a silo of a simulation's pool, and no group of rows in a silo's file."""
    shard = read_policy(silo(tmp_path)).load_shard()
    assert [shard.unit_count(make_unit(name)) for name in ("record", "user")] == [20, 7]
    assert dataclasses.replace(shard, persons=None).person_count == 0
    with pytest.raises(InputError, match="unit = 'client': a silo's guard answers for records, or for persons"):
        shard.unit_count(make_unit("client"))


def test_a_server_fills_up_persons_to_16_records_or_to_2_to_the_26_values() -> None:
    labels = np.zeros(500, np.int64)
    wide, narrow = (
        Shard(np.zeros((500, width), np.uint8), labels, persons=np.arange(500) % count)
        for width, count in ((10_000, 500), (784, 7))
    )
    for shard, largest in ((wide, 16), (narrow, 2**26 // (7 * 784))):
        assert shard.unit_count(make_unit("user", largest)) == shard.person_count
        with pytest.raises(InputError, match=f"{shard.person_count} persons filled up to so many records"):
            shard.unit_count(make_unit("user", largest + 1))


def test_a_ledger_is_refused_after_the_assignment_of_records_to_persons_changed(tmp_path: Path) -> None:
    guard_of(path := silo(tmp_path))
    for persons, line in (
        (np.array(PERSONS[::-1]), "not the records"),
        (np.arange(3), "one whole number or text for each of 20 records"),
    ):
        change_shard(tmp_path, persons=persons)
        with pytest.raises(InputError, match=line):
            guard_of(path)


def test_runs_that_protect_records_have_no_price_under_a_policy_for_persons(tmp_path: Path) -> None:
    """Guarantee of `spent`: k·μ would be right for a known k, and a run that protects persons protects records."""
    persons, records = scenario(tmp_path), scenario(tmp_path, unit="record", records=None)
    assert price_charges([Charge(records, 0.5, 0.0)], "zero-out", "user") == [None]
    assert price_charges([Charge(persons, 0.5, 0.0)], "zero-out", "user") == [ApproximateGDP(0.5)]
    (doubled,) = price_charges([Charge(persons, 0.5, 0.0)], "zero-out", "record")  # a record less: another person
    assert doubled is not None
    assert doubled.mu == pytest.approx(1.0)
    exchanged = persons.replace("zero-out", "replace-one")
    assert price_charges([Charge(exchanged, 0.5, 0.0)], "zero-out", "record") == [ApproximateGDP(0.5)]
    for cell, mu in ((exchanged, 1.0), (persons, 2.0)):  # a record that is exchanged can change its person
        (price,) = price_charges([Charge(cell, 0.5, 0.0)], "replace-one", "record")
        assert price is not None
        assert price.mu == pytest.approx(mu)


@pytest.mark.parametrize(("relation", "clips"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_a_row_that_goes_to_another_person_costs_two_persons(tmp_path: Path, relation: str, clips: float) -> None:
    """Guarantee of `price_charges`: the name is one of a row's cells, and an exchange of it changes two persons.

    Person a has a short row and a long one, b a short one.  The long row turns a whole clip of its person.
    """
    objective = PerUnit(LogisticRegression(1, 40.0), 2)

    def total(persons: list[str], long_label: int) -> float:
        records = Records(torch.tensor([[4.0], [40.0], [4.0]]).double(), torch.tensor([1, long_label, 0]))
        batch = Batch(group_records(records, group_by_person(persons, 2)), torch.ones(2, dtype=torch.float64))
        return float(objective.increment(Query((torch.zeros(1, dtype=torch.float64),)), batch, 1.0).total)

    moved = abs(total(["a", "a", "b"], 0) - total(["a", "b", "b"], 1))
    assert moved == pytest.approx(4.0)
    charge = Charge(scenario(tmp_path, relation=relation), 0.5, 0.0)  # noise of 2 · `clips` for one person
    (price,) = price_charges([charge], "replace-one", "record")
    assert price is not None
    assert price.mu == pytest.approx(moved / (clips / charge.mu))


def test_runs_with_different_records_per_person_get_correctly_shaped_labels(tmp_path: Path) -> None:
    """Rows are kept in memory by what they are made of: how many records a person adds is part of that."""
    guard = guard_of(silo(tmp_path, budget=8.0))
    for records in (3, 2, 3):
        cell = guard._admission.admit(guard._admission.canonicalize(scenario(tmp_path, records=records))).cell
        assert guard._views.records(cell).labels.shape == (7, records)
