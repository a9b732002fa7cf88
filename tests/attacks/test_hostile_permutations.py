"""A server that chooses the seed of fresh permutations, and a silo or a ledger with other permutations."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.accounting.gaussian import factor_of
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.entries import make_entry
from fedpriv.claims.ledger import make_release_streams, make_silo_stream, stream_from_data, stream_to_data
from fedpriv.claims.outcome import RunObserver
from fedpriv.claims.recomputed import recompute_sums
from fedpriv.core.errors import InputError, RunError
from fedpriv.engines.table import make_engine
from fedpriv.noise.series import Workload
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder, FreshOrder
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.study.stored import privacy_data
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.conftest import small_tree

ALGORITHM = {"name": "momentum-tree", "order": "fresh", "clip": 1.0, "alpha": 0.3, "step": 0.1}
FEDERATION = {"silos": 3, "rounds": 8, "epochs": 2}


def fresh(seed: int = 1, **algorithm: Any) -> Cell:
    tree = small_tree(
        algorithm={**ALGORITHM, "trust": "untrusted", **algorithm},
        privacy={"relation": "replace-one", "mu": 2.0},
        federation=FEDERATION,
    )
    return resolve_cell({**tree, "seed": seed}, "test")


def planned(cell: Cell) -> Plan:
    return make_plan(cell, load_task(cell).objective)


def worst_record(plan: Plan) -> float:
    """‖C u‖ of the worst record of the order that the silos read, node by node, for clips of the estimator."""
    rounds, decay = plan.schedule.rounds, plan.estimator.decay
    batches = [
        plan.schedule.select_rows(t, 1, 0, lambda: pytest.fail("public")).start for t in range(1, rounds + 1)
    ]
    squares = dict.fromkeys(batches, 0.0)
    for end in range(1, rounds + 1):
        node = range(end - (end & -end) + 1, end + 1)
        for record in squares:
            weights = [
                float(plan.estimator.round(t).clip) * decay ** (end - t) for t in node if batches[t - 1] == record
            ]
            squares[record] += sum(weights) ** 2
    return float(max(squares.values()) ** 0.5)


def test_noise_for_fresh_permutations_covers_a_record_visited_in_adjacent_rounds() -> None:
    """Gains: a record that is last in one epoch and first in the next moves one node twice, unpaid."""
    stds = {}
    for seed in range(40):
        plan = planned(fresh(seed))
        visits = plan.schedule.visits.tolist()  # type: ignore[attr-defined]
        for stream in (*make_release_streams(plan, 8), make_silo_stream(plan, 0, 8)):
            move = factor_of("replace-one") * stream.record_weight * worst_record(plan)
            assert stream.mu >= move / stream.std * (1.0 - 1e-12)
            assert stream.mu == pytest.approx(2.0, rel=1e-9)
        stds[seed] = (float(plan.noise.std_of(0)), visits[3] == visits[4])
    near = [std for std, adjacent in stds.values() if adjacent]
    far = [std for std, adjacent in stds.values() if not adjacent]
    assert near
    assert far
    assert len({round(std, 12) for std, _ in stds.values()}) > 3  # each order has its own price


def test_the_sensitivity_of_the_worst_permutation_seed_exceeds_that_of_a_fixed_order() -> None:
    """N = 5, a node across two epochs: 5 rounds, then 5; the seed with the largest energy of 300."""
    tree, clips = BinaryTree(0.9), np.ones(10)

    def sensitivity(order: Any) -> float:
        return tree.certified(Workload(order, 0.9, clips)).value

    assert max(sensitivity(FreshOrder(10, 5, seed)) for seed in range(300)) > 1.1 * sensitivity(FixedOrder(10, 5))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """The cell of results.json of a finished run."""
    cell = fresh()
    (outcome,) = make_engine("inprocess")([cell], RunObserver())
    releases = list(outcome.cell_outcome.releases)
    return json.loads(  # type: ignore[no-any-return]
        json.dumps(
            {
                **{"cell": 0, "seed": cell.seed, "point": {}, "trust": "untrusted", "silos": 3, "rounds": 8},
                "engine": "inprocess",
                **privacy_data(cell, releases),
                "scenario": cell.canonical_data(),
            }
        )
    )


def altered(record: dict[str, Any], **changes: Any) -> str | None:
    """What a reader of the record says if its orders are changed and its claim follows from the change."""
    tree = json.loads(json.dumps(record))
    for stream in tree["releases"]:
        stream["participation"] = {**stream["participation"], **changes}
        if changes.get("name") == "fixed":
            del stream["participation"]["seed"], stream["participation"]["digest"]
    claim = compute_claim(list(map(stream_from_data, tree["releases"])))
    assert claim is not None
    tree.update(claim.guarantee.figures(tree["delta"]))
    return make_entry(tree).disagreement


def test_a_recorded_permutation_seed_other_than_that_of_the_scenario_is_detected(record: dict[str, Any]) -> None:
    """Gains: permutations in the ledger that the scenario does not give, with less noise than theirs take."""
    assert altered(record) is None
    other = FreshOrder(8, 4, 2)
    difference = "participation of silos 0-2 is not that of the scenario"
    assert altered(record, seed=2, digest=other.digest) == difference
    assert altered(record, name="fixed") == difference


def test_an_altered_seed_or_digest_of_recorded_permutations_is_refused(record: dict[str, Any]) -> None:
    for change in ({"digest": "0" * 64}, {"seed": 2}):
        with pytest.raises(
            InputError, match=r"the permutations of seed \d for 8 rounds, 4 an epoch, have the digest"
        ):
            altered(record, **change)


def test_a_run_that_stops_early_is_charged_for_what_it_released() -> None:
    plan = planned(fresh())
    whole, *rest = (make_release_streams(plan, rounds)[0] for rounds in (8, 5, 4, 1))
    assert all(stream.mu <= whole.mu for stream in rest)
    for rounds, stream in zip((5, 4, 1), rest, strict=True):
        read = plan.schedule.truncate(rounds)
        assert stream.schedule == read == FreshOrder(rounds, 4, 1)
        stopped = dataclasses.replace(plan, schedule=read)
        move = factor_of("replace-one") * stream.record_weight * worst_record(stopped)
        assert stream.mu == pytest.approx(move / stream.std, rel=1e-12)
        assert stream_from_data(json.loads(json.dumps(stream_to_data(stream)))) == stream


def test_a_guard_recomputes_the_permutations_and_refuses_a_different_digest(tmp_path: Path) -> None:
    """Gains: rounds by another order than the one that is priced."""
    digest = FreshOrder(8, 4, 1).digest
    guard = guard_for(tmp_path, *random_records(), budget=4.0)
    wrong = scenario(algorithm=ALGORITHM, federation=FEDERATION).replace(
        '"order": "fresh"', f'"order": "fresh", "order_digest": "{"0" * 64}"'
    )
    with pytest.raises(RunError, match=f"order_digest: .* have the digest {digest}, not"):
        guard.answer("wrong", wrong, 1, zeros())
    right = scenario(algorithm={**ALGORITHM, "order_digest": digest}, federation=FEDERATION)
    guard.answer("right", right, 1, zeros())
    assert [row.mu for row in guard._ledger.list_runs()] == [pytest.approx(2.0)]
    with pytest.raises(RunError, match="is not the one this run was opened with"):
        guard.answer("right", right.replace('"seed": 1', '"seed": 2'), 2, zeros())


def test_a_guard_refuses_too_many_permuted_rounds_before_drawing_any(tmp_path: Path) -> None:
    guard = guard_for(tmp_path, *random_records(), budget=4.0)
    text = scenario(algorithm=ALGORITHM, federation=FEDERATION).replace('"rounds": 8', f'"rounds": {2**40}')
    with pytest.raises(RunError, match=f"fresh permutations of {2**40} rounds.*: rounds are 1 to 1,048,576"):
        guard.answer("run", text, 1, zeros())


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"mechanism": "banded"}, 'order = "fresh" needs mechanism = "tree" and late_clip = "same"'),
        ({"mechanism": "auto"}, 'order = "fresh" needs mechanism = "tree" and late_clip = "same"'),
        ({"late_clip": "column"}, 'order = "fresh" needs mechanism = "tree" and late_clip = "same"'),
        ({"order": "fixed", "order_digest": "0" * 64}, 'give order = "fresh", or leave it out'),
        ({"name": "momentum-tree-reduced", "clip": 1.0}, "the same record in the same round of every epoch"),
        ({"name": "momentum-tree-aligned", "clip": 1.0}, "the same record in the same round of every epoch"),
    ],
)
def test_settings_that_require_a_fixed_order_are_refused_with_fresh_permutations(
    algorithm: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        fresh(**algorithm)


def test_recomputed_clips_of_a_run_with_an_order_digest_use_the_seed_of_the_run() -> None:
    """Gains: clips that nobody compares, where the permutations of seed 0 have another digest."""
    demanded = fresh(order_digest=FreshOrder(8, 4, 1).digest)
    assert recompute_sums(demanded)[0] == recompute_sums(fresh())[0] == pytest.approx((0.3,) * 8)


def test_planning_refuses_fresh_permutations_with_poisson_subsampling_or_a_wrong_digest() -> None:
    with pytest.raises(InputError, match="have the digest"):
        planned(fresh(order_digest="0" * 64))
    tree = fresh().canonical_data()
    tree["federation"]["sampling"] = "poisson"
    with pytest.raises(InputError, match='reads records in an order of its own; use "fixed"'):
        planned(resolve_cell(tree, "test"))
