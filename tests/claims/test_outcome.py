"""What an outcome says of a run's costs, and who hears of a run's events."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedpriv.claims.outcome import ObserverGroup, RunObserver, count_gradient_evaluations, make_outcome
from fedpriv.core.errors import RunError
from fedpriv.plan.calibration import FittedNoise
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.schema import Cell

MakeCell = Callable[..., Cell]
EVENTS = ("fitted", "advanced", "evaluated", "finished", "lost", "notified", "failed")


class Listener(RunObserver):
    """Writes down every event with its arguments."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in EVENTS:
            return lambda *arguments: self.events.append((name, *arguments))
        return super().__getattribute__(name)


def test_every_observer_of_a_group_receives_each_event_with_run_wide_cell_numbers(small_cell: MakeCell) -> None:
    listeners = [Listener(), Listener()]
    group = ObserverGroup([4, 7], listeners)
    outcome = make_outcome(planned(small_cell()), 1, np.zeros(1), {}, None, 0.0)
    fit, error = FittedNoise("asked", {}, "a tree", 3, 0.5), RunError("ends")
    group.fitted(fit)
    group.advanced(3)
    group.evaluated(1, 5, {"test_loss": 0.5})
    group.finished(0, outcome)
    group.lost("worker 2", [1, 0])
    group.notified("a line")
    group.failed(error)
    expected = [
        ("fitted", fit),
        ("advanced", 3),
        ("evaluated", 7, 5, {"test_loss": 0.5}),
        ("finished", 4, outcome),
        ("lost", "worker 2", [7, 4]),
        ("notified", "a line"),
        ("failed", error),
    ]
    assert [listener.events for listener in listeners] == [expected] * 2


def planned(cell: Cell) -> Plan:
    return make_plan(cell, load_task(cell).objective)


@pytest.mark.parametrize("absences", [None, {}, {1: [1, 3], 2: [8]}])
def test_gradient_evaluations_are_counted_only_in_rounds_in_which_a_silo_takes_part(
    small_cell: MakeCell, absences: dict[int, list[int]] | None
) -> None:
    """Two gradients a record in every round but the first; by hand, silo by silo and round by round."""
    plan = planned(small_cell(federation={"silos": 3, "rounds": 8, "batches": [2, 3, 5]}))
    for rounds in (8, 3) if not absences else (8,):
        expected = sum(
            size * (1 if t == 1 else 2)
            for silo, size in enumerate((2, 3, 5))
            for t in range(1, rounds + 1)
            if t not in (absences or {}).get(silo, [])
        )
        assert count_gradient_evaluations(plan, rounds, absences) == expected


def test_bytes_sent_are_counted_only_for_rounds_that_were_run(small_cell: MakeCell) -> None:
    plan = planned(small_cell())
    for rounds in (1, 5, 8):
        outcome = make_outcome(plan, rounds, np.zeros(1), {}, None, 0.0)
        assert outcome.bytes_sent == 8 * plan.objective.dimension * rounds
