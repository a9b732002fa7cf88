"""Rounds that are no multiple of a pass: rounds, samples and batch together; Tran & Cutkosky's T and N."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpriv
from fedpriv.claims.entries import read_ledger
from fedpriv.claims.ledger import make_release_streams
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from tests.conftest import small_tree

MOMENTUM: dict[str, Any] = {"name": "momentum-tree", "trust": "trusted", "clip": 1.0, "alpha": 0.4, "step": 0.1}
ALIGNED = MOMENTUM | {"name": "momentum-tree-aligned", "difference_clip": 0.3, "residual_clip": 0.2}
CUT = {"silos": 3, "rounds": 7, "samples": 20, "batch": 2}
"""Passes of 3 rounds, of which the third is cut after one; two of the samples fill no round."""

PRIVACY = {"relation": "replace-one", "mu": 2.0}


def tree(**algorithm: Any) -> dict[str, Any]:
    return small_tree(algorithm=MOMENTUM | algorithm, federation=CUT, privacy=PRIVACY)


def test_rounds_repeat_the_batches_of_a_pass_and_may_end_within_a_pass() -> None:
    cell = resolve_cell(tree(), "test")
    assert cell.schedule == FixedOrder(7, 3)
    assert cell.batch_sizes == (2, 2, 2)
    assert cell.unread_count == 2
    assert [cell.schedule.batches(t).start for t in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert cell.schedule.words == "is read 2 or 3 times"


def test_sensitivity_with_an_incomplete_pass_is_that_of_a_record_used_once_more() -> None:
    """By brute force: of the nodes of a tree, those that hold any of a record's rounds 1, 4, 7."""
    plan = make_plan(cell := resolve_cell(tree(), "test"), load_task(cell).objective)
    (stream,) = make_release_streams(plan, 7)
    nodes = [(t - (t & -t) + 1, t) for t in range(1, 8)]
    squares = [
        sum(sum(0.6 ** (end - i) for i in range(first, end + 1) if i % 3 == record) ** 2 for first, end in nodes)
        for record in (1, 2, 0)
    ]
    assert max(squares) == squares[0]
    assert stream.mechanism.sensitivity(stream.workload) == pytest.approx(0.4 * np.sqrt(squares[0]), rel=1e-12)


@pytest.mark.parametrize("algorithm", [MOMENTUM, ALIGNED], ids=lambda keys: keys["name"])
def test_engines_agree_on_runs_with_an_incomplete_pass_and_the_ledger_confirms_the_claim(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    asked = small_tree(algorithm=algorithm, federation=CUT, privacy=PRIVACY)
    losses = []
    for engine in ("vectorized", "inprocess"):
        results = fedpriv.run(asked, out=tmp_path / engine, engine=engine)
        losses.append(results.cells[0].metrics["test_loss"])
        (entry,) = read_ledger(tmp_path / engine)
        assert entry.agrees
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
