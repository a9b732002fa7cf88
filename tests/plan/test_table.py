"""The table of a plan's rounds says what its parts say."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from fedpriv.core.random import KeyedNormal
from fedpriv.noise.trust import TRUSTED
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo

MakeCell = Callable[..., Cell]


def plan_with(cell: Cell, *, released: bool) -> Plan:
    return make_plan(cell, load_task(cell).objective, for_release=released)


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_a_silo_reads_the_rows_of_its_order(small_cell: MakeCell, epochs: int) -> None:
    """Else a record is read more often than it is charged for."""
    cell = small_cell(federation__epochs=epochs)
    plan = plan_with(cell, released=True)
    records = load_task(cell).train
    silo = Silo.for_release(0, plan, records, bytes(32))
    for planned in plan.rounds:
        t, size = planned.step.t, plan.batch_sizes[0]
        rows = plan.schedule.select_rows(t, size, 0, KeyedNormal(bytes(32)).sampling_randomness)
        assert np.array_equal(silo._read_batch(planned).row_indices, np.arange(len(records.labels))[rows])
        assert planned.batch_count == max(1, plan.schedule.expected_batches(t))


def test_a_plan_that_is_made_by_replace_derives_its_fields_again(small_cell: MakeCell) -> None:
    """A release under another trust setting, as an audit makes it, has that setting's messages."""
    plan = plan_with(small_cell(algorithm__trust="secure-aggregation"), released=True)
    trusted = dataclasses.replace(plan, trust=TRUSTED)
    assert (plan.masked, trusted.masked) == (True, False)
    assert plan.rounds[0].message_length > trusted.rounds[0].message_length
    assert dataclasses.replace(plan, model_length=5).query_length == 5
