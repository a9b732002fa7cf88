"""A server that names the unit, its bounds and the model of a scenario: claims hold, and nothing of its is run."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams, stream_from_data, stream_to_data
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.admission import price_charges
from fedpriv.silo.silo import Silo
from tests.attacks.guards import guard_for, random_records, scenario
from tests.engines.test_units import persons_tree
from tests.silo.guarded import ZERO, change_shard, guard_of, refused
from tests.silo.test_persons import scenario as of_persons
from tests.silo.test_persons import silo
from tests.silo.test_sampled_runs import ROUNDS, guard_at
from tests.silo.test_sampled_runs import scenario as sampled

MU = 2.0


def shared_tree(folder: Path, trust: str, relation: str) -> dict[str, Any]:
    """Two silos, and every person may have records in both of them."""
    tree = persons_tree(folder)
    banded = {"name": "dp-ftrl", "mechanism": "banded", "bands": 3, "clip": 1.0, "step": 0.1}
    tree["algorithm"] = {**banded, "trust": trust}
    tree["federation"] = {"silos": 2, "rounds": 6, "epochs": 3, "batches": [4, 3]}
    tree["privacy"] = {"unit": "user", "records": 3, "shared": 2, "relation": relation, "mu": MU}
    return tree


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize("trust", ["trusted", "secure-aggregation", "untrusted"])
def test_the_claim_covers_a_person_with_records_in_two_silos_on_integers(
    tmp_path: Path, trust: str, relation: str
) -> None:
    """Gains: with the noise for one silo's part of a person, half of what the claim says.

    What a person moves is written out here: K in every round of an order, in each of both silos.
    """
    cell = resolve_cell(shared_tree(tmp_path, trust, relation), "test")
    plan = make_plan(cell, load_task(cell).objective, for_release=True)
    exact = plan.required_exact_plan
    clip, strategy = float(exact.norms(1)[0]), exact.inputs.factorization.strategy
    assert plan.schedule == FixedOrder(6, 2)
    matrix = np.zeros((6, 6))
    for t in range(6):
        state = strategy.initial_state()
        for row in range(6):
            column, state = strategy.step(state, row + 1, np.full(1, 2**30 if row == t else 0, np.int64))
            matrix[row, t] = column[0] / 2**30
    steps = 2.0 if relation == "replace-one" else 1.0
    of_one_silo = max(float(np.linalg.norm(matrix[:, first::2].sum(axis=1))) for first in range(2)) * clip * steps
    sigma = exact.claim.sigma
    if trust == "untrusted":
        true = np.sqrt(2.0) * of_one_silo / sigma
    else:
        true = 2.0 * of_one_silo / (sigma * np.sqrt(exact.inputs.party_count))
    streams = [json.loads(json.dumps(stream_to_data(stream))) for stream in make_release_streams(plan, 6)]
    claim = compute_claim(list(map(stream_from_data, streams)))
    assert claim is not None
    assert 0.999 * MU < true <= claim.guarantee.mu <= MU


def test_a_records_per_person_bound_that_exceeds_memory_is_refused(tmp_path: Path) -> None:
    """Gains: an end of the guard, by filling seven persons up to a million records each."""
    guard = guard_of(silo(tmp_path))
    filled = of_persons(tmp_path, records=1_000_000)
    refused(guard, r"privacy\.records = 1000000: 7 persons filled up", filled)
    assert guard._ledger.charges() == []
    assert torch.isfinite(guard.answer("run", of_persons(tmp_path), 1, ZERO)).all()


@pytest.mark.parametrize("key", ["name", "backbone"])
def test_a_scenario_cannot_make_a_guard_import_an_unlisted_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Gains: code of the server's choice beside records and keys, such as what importing `antigravity` does."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom torch.nn import Linear\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model: dict[str, Any] = {"name": "planted:Linear"}
    if key == "backbone":
        digest = "sha256:" + "0" * 64
        model = {"backbone": "planted:Linear", "backbone_weights": digest, "feature_norm": 1.0}
    guard = guard_for(tmp_path, *random_records())
    refused(guard, r"runs 'planted:Linear', and allow\.models does not name it", scenario(model=model))
    assert not (tmp_path / "ran").exists()
    assert "planted" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_a_subsampled_round_computes_equally_many_records_for_every_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: str
) -> None:
    """Gains: how many records take part in a round, and of it who does, by the time of the answer."""
    seen: list[int] = []
    honest = SoftmaxRegression.per_record

    def watched(self: SoftmaxRegression, query: Any, batch: Any, *given: Any) -> Any:
        seen.append(len(batch.weights))
        return honest(self, query, batch, *given)

    monkeypatch.setattr(SoftmaxRegression, "per_record", watched)
    monkeypatch.setattr("fedpriv.noise.integers.increments.suits_rank_one", lambda *_: False)
    guard = guard_at(tmp_path)
    drawn = set[int]()
    for t in range(1, ROUNDS + 1):
        seen.clear()
        guard.answer("run", sampled(sampling), t, torch.zeros(7850))
        assert seen == [1] * 15  # of 20 records a round draws more than 15 once in a million million times
        schedule = next(iter(guard._admitted_runs.values())).plan.schedule
        if t < ROUNDS:
            rows = schedule.select_rows(t, 2, 0, lambda: guard._blank_silos["run"]._sampling_randomness)
            drawn.add(len(np.asarray(rows)))
    assert len(drawn) > 1


def test_a_run_for_persons_costs_records_twice_since_a_record_can_change_its_person(tmp_path: Path) -> None:
    """A policy for persons, and years later one for records: one row moves two persons.

    Gains: half of what a record lost in the runs for persons is not charged.  Row 0 is person 0's, with person 0's
    own second row behind it, or person 1's; of each person the first row counts.
    """
    images = np.full((20, 28, 28), 255, np.uint8)
    labels = np.array([0, 0, 1, *[0] * 17])
    persons = np.array([0, 1, 0, *range(2, 7), *[6] * 12])
    other_labels, other_persons = labels.copy(), persons.copy()
    other_labels[0], other_persons[0] = 1, 1
    query = torch.zeros(10, 785, dtype=torch.float64)
    query[:2, 784] = 100.0  # two classes of equal scores: their gradients are opposite, and longer than the clip
    text = of_persons(tmp_path, records=1, relation="replace-one", federation__rounds=1, federation__epochs=1)
    sums = []
    for number, (of_rows, whose) in enumerate([(labels, persons), (other_labels, other_persons)]):
        folder = tmp_path / str(number)
        path = silo(folder, whose.tolist(), relation="replace-one")
        change_shard(folder, images=images, labels=of_rows)
        guard = guard_of(path)
        guard.answer("run", text, 1, query.flatten())
        admitted = guard._admission.admit(guard._canonicalize(text))
        records = guard._views.records(admitted.cell)
        source = Silo.for_release(0, admitted.plan, records, bytes(32))
        batch = source._read_batch(admitted.plan.rounds[0])
        state = source.initial_state()
        total = source.steps.sum_increments(state, admitted.plan.rounds[0], query.flatten(), batch).values
        sums.append(total.numpy().astype(np.float64))
    (charge,) = guard._ledger.charges()
    lost = float(np.linalg.norm(sums[0] - sums[1])) / admitted.plan.required_exact_plan.claim.sigma
    (price,) = price_charges([charge], "replace-one", "record")
    assert price is not None
    assert 1.99 * charge.mu < lost <= price.mu
