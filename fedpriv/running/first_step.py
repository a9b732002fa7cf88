"""The first step of a run with [data.scale]: a run of its own, of one round, whose model is moments of columns.

    first_step_of(cell) ─▶ any engine ─▶ Finished ─▶ scaled(cell, its model) ─▶ the rounds, with numbers

So silos, guards, noise, integers and ledger treat it as they treat every run of DP-SGD, and nothing of it is
written twice.  The server gets the mean over silos, as it gets a mean of gradients.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedpriv.data.scaling import Scaling, scaling_from
from fedpriv.errors import InputError
from fedpriv.models.moments import CLIP, COLUMN_MOMENTS
from fedpriv.privacy.ledger import FIRST_STEP
from fedpriv.running.outcome import Finished
from fedpriv.running.plan import plan_of
from fedpriv.running.task import task_of_schema
from fedpriv.scenario import Cell, Scenario
from fedpriv.scenario.federation import FederationSection
from fedpriv.scenario.privacy import PrivacySection
from fedpriv.scenario.run_section import RunSection
from fedpriv.scenario.schema import AlgorithmSection, ModelSection

_ALGORITHM = "dp-sgd"


def first_step_of(cell: Cell) -> Cell | None:
    """The run that is the cell's first step; None if it has none, or has taken it.

    InputError if it cannot be taken.  Every silo's records of the rounds take part, once, in its one round.

    Guarantee: it is √share · μ-GDP for each record under the cell's relation, where the run's target is μ.
    """
    schema = cell.data.table_schema
    if schema is None or not cell.data.unscaled:
        return None
    budget, held = cell.budget, cell.schedule.batches_held
    algorithm = AlgorithmSection.model_validate(
        {"name": _ALGORITHM, "trust": cell.algorithm.trust, "clip": CLIP, "step": 1.0}
    )
    if cell.algorithm.trust not in algorithm.row.trusts:
        raise InputError(
            f"data.scale: its first step cannot be taken with algorithm.trust = {cell.algorithm.trust!r}; leave "
            "[data.scale] out"
        )
    promised = {"mode": "none"} if budget.rounds is None else {"mu": budget.beside}
    return cell.derived(
        PrivacySection.model_validate(
            {"relation": cell.privacy.relation, "delta": cell.privacy.delta, **promised}
        ),
        FederationSection(
            silos=cell.federation.silos,
            rounds=1,
            epochs=1,
            batches=tuple(held * batch for batch in cell.batch_sizes),
        ),
        algorithm,
        beside=budget.rounds or 0.0,
        model=ModelSection.model_validate(
            {
                "name": COLUMN_MOMENTS,
                "columns": schema.numbers,
                **({"real": True} if schema.class_count == 0 else {}),
            }
        ),
        run=RunSection(dtype=cell.run.dtype, arithmetic=cell.run.arithmetic, word=cell.run.word),
    )


def scaled(cell: Cell, scaling: Scaling) -> Cell:
    """The cell with what its first step gave; its budget is the one that it was given with the whole run."""
    assert cell.data.scale is not None
    given = {"means": scaling.means, "deviations": scaling.deviations}
    scale = cell.data.scale.model_copy(update=given)
    return cell.model_copy(update={"data": cell.data.model_copy(update={"scale": scale})})


def presumed(cell: Cell) -> Cell:
    """The cell as its rounds will be planned, whatever its first step gives; itself if that is known, or none."""
    schema = cell.data.table_schema
    if schema is None or not cell.data.unscaled:
        return cell
    count = len(schema.numbers)
    return scaled(cell, Scaling(schema.numbers, (0.0,) * count, (1.0,) * count))


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
        if point.cell.data.unscaled:
            _check_rounds(presumed(point.cell), released=released)
    asked, points, taken = dict[str, Finished](), [], dict[str, Finished]()
    for point in scenario.points:
        cell = point.cell
        if (first := first_step_of(cell)) is not None:
            if _name(first) not in asked:
                asked[_name(first)] = take(first)
            finished = asked[_name(first)]
            cell = scaled(cell, _scaling_of(cell, finished))
            taken[_name(cell)] = finished
        points.append(replace(point, cell=cell))
    return replace(scenario, points=points), FirstSteps(taken)


def _name(cell: Cell) -> str:
    return json.dumps(cell.canonical(), sort_keys=True)


def _check_rounds(cell: Cell, *, released: bool) -> None:
    """A plan takes what is public about the table, and no record."""
    schema = cell.data.table_schema
    assert schema is not None
    plan_of(cell, task_of_schema(cell, schema).objective, released=released)


def _scaling_of(cell: Cell, finished: Finished) -> Scaling:
    schema = cell.data.table_schema
    assert schema is not None
    return scaling_from(schema.numbers, np.asarray(finished.model) / schema.counted_share(tests=False))
