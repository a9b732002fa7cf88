"""First steps of a scenario whose tables are scaled: each is run once, before the rounds that use its numbers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedpriv.claims.ledger import FIRST_STEP
from fedpriv.claims.outcome import Finished
from fedpriv.data.encode import scaling_from
from fedpriv.plan.evaluation import first_step_of, presumed, scaled
from fedpriv.plan.plan import plan_of
from fedpriv.plan.task import task_of_schema
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import Cell


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a scenario gave, by the cell with their numbers."""

    taken: Mapping[str, Finished]

    def with_rounds(self, cell: Cell, finished: Finished) -> Finished:
        """A cell's outcome, with what its first step released in its ledger.

        Guarantee: the claim that follows from the ledger is of both together.
        """
        if (first := self.taken.get(_name(cell))) is None:
            return finished
        before = tuple(replace(stream, step=FIRST_STEP) for stream in first.releases)
        return replace(
            finished,
            releases=(*before, *finished.releases),
            bytes_sent=finished.bytes_sent + first.bytes_sent,
            wall_seconds=finished.wall_seconds + first.wall_seconds,
        )


def scaled_scenario(
    scenario: Scenario, take: Callable[[Cell], Finished], *, released: bool = False
) -> tuple[Scenario, FirstSteps]:
    """The scenario with numbers in every cell; `take` runs a first step, once for cells that ask for the same.

    InputError, before the first one is taken, for rounds that cannot be planned; `released` as for `plan_of`.
    """
    for point in scenario.points:
        if point.cell.data.unscaled and (schema := point.cell.data.table_schema) is not None:
            cell = presumed(point.cell)  # a plan takes what is public about the table, and no record
            plan_of(cell, task_of_schema(cell, schema).objective, released=released)
    asked, points, taken = dict[str, Finished](), [], dict[str, Finished]()
    for point in scenario.points:
        cell, schema = point.cell, point.cell.data.table_schema
        if schema is not None and (first := first_step_of(cell)) is not None:
            if _name(first) not in asked:
                asked[_name(first)] = take(first)
            finished = asked[_name(first)]
            moments = np.asarray(finished.model) / schema.counted_share(tests=False)
            cell = scaled(cell, scaling_from(schema.numbers, moments))
            taken[_name(cell)] = finished
        points.append(replace(point, cell=cell))
    return replace(scenario, points=points), FirstSteps(taken)


def _name(cell: Cell) -> str:
    return json.dumps(cell.canonical(), sort_keys=True)
