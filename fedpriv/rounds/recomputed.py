"""Releases of a run, recomputed from its scenario: what a record says of them is compared, and never believed.

A silo plans with the shapes of its own records, as its guard did.  A reader has no records, and plans with the
shapes that silos signed.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from fedpriv.core.errors import InputError, printable
from fedpriv.core.figures import counted
from fedpriv.data.layout import Input, Layout
from fedpriv.loss.objective import Objective
from fedpriv.rounds.arithmetic import batch_clips
from fedpriv.rounds.beside import evaluation_plan_of, first_step_of, released_by
from fedpriv.rounds.claim import ELSEWHERE, with_other_step
from fedpriv.rounds.ledger import FIRST_STEP, ReleaseStream, as_data
from fedpriv.rounds.plan import Plan, plan_of, problem_of, sums_of
from fedpriv.rounds.task import ModelInputs, task_of_schema
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell

ROUNDS, TESTS = "the rounds", "the evaluations"
"""What the plans of a run are of, beside `FIRST_STEP`."""
_MOST_VALUES = 2**31
"""Of one record, and of a model: beyond what any guard computes with."""
_SAME = 1e-9
"""Relative, of two numbers that are computed in the same way on two machines."""

PlanReleases = Callable[[Cell], Plan]


@dataclass(frozen=True)
class Recomputed:
    """Plans of a run's rounds, of its first step where it released one, and of its evaluations."""

    cell: Cell
    plans: Mapping[str, Plan]

    @property
    def releases(self) -> tuple[ReleaseStream, ...]:
        """The ledger of the training records."""
        streams = _streams(self.plans[ROUNDS])
        if FIRST_STEP in self.plans:
            before = (replace(stream, step=FIRST_STEP) for stream in _streams(self.plans[FIRST_STEP]))
            return (*before, *streams)
        return with_other_step(streams, self.cell.budget.beside)

    @property
    def evaluations(self) -> tuple[ReleaseStream, ...]:
        """The ledger of the test records."""
        return _streams(self.plans[TESTS]) if TESTS in self.plans else ()

    def check(self, record: Mapping[str, Any]) -> None:
        """InputError, naming the first figure that differs, unless a record's releases are these.

        Guarantee: who releases, mechanism, participation, decay, clips, weights, relation, noise, period, unit,
        integers, step and distance of every stream are those of the plan, noise on the safe side too.
        """
        if (size := self.plans[ROUNDS].objective.dimension) != record["dimension"]:
            raise InputError(f"record.dimension is {record['dimension']!r:.40}, and its scenario gives {size}")
        tests = (record.get("evaluation") or {}).get("releases", [])
        for streams, told, what in (
            (self.releases, record["releases"], "releases"),
            (self.evaluations, tests, "evaluation.releases"),
        ):
            if (reason := difference([as_data(stream) for stream in streams], told)) is not None:
                raise InputError(f"record.{what}: {reason}")


def _streams(plan: Plan) -> tuple[ReleaseStream, ...]:
    return plan.releases(plan.schedule.rounds)


def recompute(
    cell: Cell, objective: Objective, releases: Sequence[Mapping[str, Any]], plan: PlanReleases
) -> Recomputed:
    """Plan a run again, as a deployment releases it; `objective` is the model's own.

    `plan` makes the plan of a first step, which is a run of its own, where `releases` have one that this run took.
    """
    plans = {ROUNDS: plan_of(cell, objective, released=True)}
    if any(release.get("step") == FIRST_STEP and release["owner"] != ELSEWHERE for release in releases):
        plans[FIRST_STEP] = plan(first_step_before(cell))
    if (asked := evaluation_plan_of(cell, objective, released=True)) is not None:
        assert released_by(asked)
        plans[TESTS] = asked.plan
    return Recomputed(cell, plans)


def first_step_before(cell: Cell) -> Cell:
    """The first step from which a cell has the numbers of [data.scale]; InputError for a cell without one."""
    if cell.data.scale is None:
        raise InputError("record.releases: has a first step, and its scenario has no [data.scale]")
    scale = cell.data.scale.model_copy(update={"means": None, "deviations": None})
    first = first_step_of(cell.model_copy(update={"data": cell.data.model_copy(update={"scale": scale})}))
    if first is None:
        raise InputError("record.releases: has a first step, and its scenario's data are no table")
    return first


def difference(planned: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]) -> str | None:
    """The first field in which streams, as data, are not those that were planned; None if all are the same."""
    planned = json.loads(json.dumps(planned))
    owners = [[stream.get("owner") for stream in streams] for streams in (told, planned)]
    if owners[0] != owners[1]:
        said, given = (", ".join(map(repr, each)) or "nobody" for each in owners)
        return f"released by {said:.200}, and by its scenario by {given:.200}"
    for stream, right in zip(told, planned, strict=True):
        if (reason := _difference("", stream, right, printable(str(right["owner"]), 40))) is not None:
            return reason
    return None


def _difference(name: str, told: Any, right: Any, owner: str) -> str | None:
    """The words for two values of a field of an owner's stream that differ."""
    if isinstance(right, dict) and isinstance(told, dict):
        parts = ((f"{name}.{key}".strip("."), told.get(key), right.get(key)) for key in sorted({*told, *right}))
        return next(filter(None, (_difference(*part, owner) for part in parts)), None)
    if _alike(told, right):
        return None
    said, given = (json.dumps(value)[:100] for value in (told, right))
    return f"{printable(name, 60)} of {owner} is {said}, and its scenario gives {given}"


def _alike(told: Any, right: Any) -> bool:
    if isinstance(right, list) and isinstance(told, list):
        return len(told) == len(right) and all(map(_alike, told, right))
    if isinstance(right, float) and isinstance(told, float):
        return math.isclose(told, right, rel_tol=_SAME)
    return type(told) is type(right) and bool(told == right)


def shapes_data(layout: Layout, classes: int) -> dict[str, Any]:
    """Public shapes of a silo's records as a model sees them: what a plan takes of them, and no value."""
    inputs = [[list(each.shape), each.kind] for each in layout.inputs]
    return {"width": layout[0], "inputs": inputs, "labels": list(layout.labels), "classes": classes}


def objective_of(cell: Cell, shapes: Mapping[str, Any]) -> Objective:
    """The model's loss over records of these shapes; of a table over what its description says.

    Guarantee: no memory is taken for a model, and no code is run that is none of fedpriv's.
    """
    if cell.model.code:
        raise InputError(f"the scenario's model runs {cell.model.code[0]!r}, which no certificate may run")
    sizes = [shapes["width"], *shapes["labels"], *(size for shape, _ in shapes["inputs"] for size in shape)]
    if not all(type(size) is int and 0 < size <= _MOST_VALUES for size in sizes) or len(sizes) > 64:
        raise InputError(f"the shapes of the silos' records are none: {shapes!s:.100}")
    with torch.device("meta"):
        if (schema := cell.data.table_schema) is not None:
            return task_of_schema(cell, schema).objective
        inputs = tuple(Input(tuple(shape), kind) for shape, kind in shapes["inputs"])
        layout = Layout(shapes["width"], inputs, tuple(shapes["labels"]), classes=shapes["classes"] > 0)
        return ModelInputs.of(cell).objective(layout, shapes["classes"])


def clips_of(cell: Cell) -> tuple[float, ...] | None:
    """Clips of a scenario's rounds, for a mean over one batch; None where they depend on shapes or other code."""
    return _clips_of(json.dumps({**cell.canonical(), "seed": 0}, sort_keys=True))


@lru_cache(maxsize=64)
def _clips_of(canonical: str) -> tuple[float, ...] | None:
    cell = resolve_cell(json.loads(canonical), "record.scenario")
    try:
        narrow, wide = (
            batch_clips(sums_of(cell, problem_of(cell, _narrow_objective(cell, width)))[0], cell.schedule)
            for width in (1, 2)
        )
    except (InputError, ValueError, RuntimeError):  # of a model that takes other records than these
        return None
    return narrow if narrow == wide else None


def distance_of(cell: Cell) -> float:
    """The largest distance of two increments in clips, as a scenario's plan has it: it depends on no shape."""
    return plan_of(cell, _narrow_objective(cell, 1)).apart


def _narrow_objective(cell: Cell, width: int) -> Objective:
    """Over records of so many numbers, or those that a table's description has."""
    classes = 0 if cell.model.regression else 2
    return objective_of(cell, {"width": width, "inputs": [[[width], "numbers"]], "labels": [], "classes": classes})


def without_paths(tree: Any, name: str = "") -> Any:
    """A scenario as everybody may read it: of its data's file the name, and no folder of a machine."""
    if isinstance(tree, Mapping):
        return {key: without_paths(value, f"{name}.{key}") for key, value in tree.items()}
    if isinstance(tree, str) and name.removeprefix(".") == "data.name":
        return tree.replace("\\", "/").rpartition("/")[2] or tree
    return tree


def silos_said(numbers: Sequence[int]) -> str:
    """Silos by number, the first few, in a sentence."""
    named = ", ".join(map(str, numbers[:8]))
    more = f" and {counted(len(numbers) - 8, 'other')}" if len(numbers) > 8 else ""
    return f"{'silo' if len(numbers) == 1 else 'silos'} {named}{more}"
