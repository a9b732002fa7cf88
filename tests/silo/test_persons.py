"""A guard whose budget is for persons groups its own records, and answers for nothing smaller."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting.budget import ApproximateGDP
from fedpriv.core.errors import InputError, RunError
from fedpriv.data.partition import secret_permutation
from fedpriv.loss.objective import Records
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.admission import Charge, price_charges
from fedpriv.silo.guard import open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from fedpriv.silo.silo import Silo
from tests.engines.test_units import persons_tree
from tests.silo.guarded import write_silo

PERSONS = [f"p{number % 7}" for number in range(20)]
QUERY = torch.zeros(7850, dtype=torch.float64)


def silo(folder: Path, persons: list[str] | None = PERSONS, **allow: Any) -> Path:
    given = {"relation": "zero-out", "unit": "user", "budget": 4.0, "clip": 1.0, "slack": 1e-6, **allow}
    path = write_silo(folder, **given)
    if persons is not None:
        with np.load(folder / "shard-0.npz") as file:
            np.savez(folder / "shard-0.npz", **dict(file), persons=np.array(persons))
    begin_ledgers(read_policy(path))
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


def test_a_guard_answers_for_the_persons_of_its_own_file(tmp_path: Path) -> None:
    guard = open_guard(read_policy(silo(tmp_path)))
    for t in range(1, 5):
        assert torch.isfinite(guard.answer("run", scenario(tmp_path), t, QUERY)).all()
    (charge,) = guard._ledger.charges()
    assert charge.mu == pytest.approx(2.0)
    cell = guard._admission.admit(charge.cell).cell
    records = guard._views.records(cell)
    assert records.labels.shape == (7, 3)
    assert records.labels[6].tolist()[2] == -1  # p6 has two records only


def test_secret_rounds_of_persons_are_charged_too(tmp_path: Path) -> None:
    guard = open_guard(read_policy(silo(tmp_path)))
    asked = scenario(
        tmp_path,
        federation__sampling="allocation",
        federation__batches=[1, 1],
        federation__epochs=1,
        federation__rounds=7,
        relation="zero-out",
    )
    assert torch.isfinite(guard.answer("run", asked, 1, QUERY)).all()
    (charge,) = guard._ledger.charges()
    assert (charge.slack, 0.0 < charge.mu < 4.0) == (1e-8, True)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_a_guard_that_restarts_draws_the_same_persons_anew_in_every_epoch(tmp_path: Path, sampling: str) -> None:
    """Guards that end after each of 14 rounds answer as one silo with the ledger's key: whole persons."""
    policy = read_policy(silo(tmp_path, rounds=14))
    asked = scenario(
        tmp_path,
        federation__sampling=sampling,
        federation__batches=[1, 1],
        federation__epochs=2,
        federation__rounds=14,
    )
    answers = []
    for t in range(1, 15):
        guard = open_guard(policy)
        answers.append(guard.answer("run", asked, t, QUERY))
        run = guard._ledger.find_run("run")
        assert run is not None
        assert run.key is not None or t == 14  # wiped when the run is over
        if t == 1:
            key, admitted = run.key, guard._admission.admit(run.cell)
            order = torch.from_numpy(secret_permutation(run.key or b"", 7))
            records = Records(*(column[order] for column in guard._views.records(admitted.cell)))
        guard._ledger.close()
    assert isinstance(key, bytes)
    one = Silo.for_release(0, admitted.plan, records, key, admitted.scenario_digest)
    state, drawn, rows = one.initial_state(), [], []
    for t, answer in enumerate(answers, start=1):
        release, state = one.answer(state, t, QUERY)
        assert torch.equal(one.make_message(release.vector, t, b"", state.query_chain), answer)
        drawn.append(release.counts.drawn)
        rows.append(admitted.plan.schedule.select_rows(t, 1, 0, lambda: one._sampling_randomness).tolist())
    assert [len(of_round) for of_round in rows] == drawn
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
def test_other_units_are_refused(
    tmp_path: Path, allow: dict[str, Any], persons: list[str] | None, privacy: dict[str, Any], line: str
) -> None:
    guard = open_guard(read_policy(silo(tmp_path, persons, **allow)))
    with pytest.raises(RunError, match=line):
        guard.answer("run", scenario(tmp_path, **privacy), 1, QUERY)
    assert guard._ledger.charges() == []


def test_whose_records_are_is_part_of_what_the_ledger_was_begun_for(tmp_path: Path) -> None:
    path = silo(tmp_path)
    with np.load(tmp_path / "shard-0.npz") as file:
        others = {**dict(file), "persons": np.array(PERSONS[::-1])}
    np.savez(tmp_path / "shard-0.npz", **others)
    with pytest.raises(InputError, match="not the records"):
        open_guard(read_policy(path))
    np.savez(tmp_path / "shard-0.npz", **{**others, "persons": np.arange(3)})
    with pytest.raises(InputError, match="one number or text for each of 20 records"):
        open_guard(read_policy(path))


def test_runs_of_smaller_units_have_no_price_for_persons(tmp_path: Path) -> None:
    """Guarantee of `spent`: k·μ would be right for a known k, and a run that protects persons protects records."""
    persons, records = scenario(tmp_path), scenario(tmp_path, unit="record", records=None)
    assert price_charges([Charge(records, 0.5, 0.0)], "zero-out", "user") == [None]
    assert price_charges([Charge(persons, 0.5, 0.0)], "zero-out", "user") == [ApproximateGDP(0.5)]
    (doubled,) = price_charges(
        [Charge(persons, 0.5, 0.0)], "zero-out", "record"
    )  # a record less is another person
    assert doubled is not None
    assert doubled.mu == pytest.approx(1.0)
    exchanged = persons.replace("zero-out", "replace-one")
    assert price_charges([Charge(exchanged, 0.5, 0.0)], "replace-one", "record") == [ApproximateGDP(0.5)]


def test_runs_that_take_more_or_fewer_records_of_a_person_see_their_own_rows(tmp_path: Path) -> None:
    """Rows are kept in memory by what they are made of: how many records a person adds is part of that."""
    guard = open_guard(read_policy(silo(tmp_path, budget=8.0)))
    for records in (3, 2, 3):
        cell = guard._admission.admit(guard._admission.canonicalize(scenario(tmp_path, records=records))).cell
        assert guard._views.records(cell).labels.shape == (7, records)
