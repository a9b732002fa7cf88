"""Releases of a run, recomputed from its scenario and compared with those in its record.

The record of a run is its entry in results.json.

* A plan has what is known of a run before round 1, such as batch sizes, clips and noise.
* A stream is the releases of one party over the rounds, or of several silos alike.  Its owner is the name of this
  party, or of these silos.
* A first step is a run of one round, before the others and about the same records, by whose result columns of
  numbers are scaled ([data.scale]).
* An objective is a model with its loss.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch

from fedpriv.claims.claim import EXTERNAL_PARTY, add_external_first_step
from fedpriv.claims.ledger import FIRST_STEP, ReleaseStream, make_release_streams, stream_to_data
from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.figures import format_count
from fedpriv.data.layout import FeatureLayout, InputLayout
from fedpriv.loss.objective import Objective
from fedpriv.participation.orders import FreshOrder
from fedpriv.plan.calibration import batch_clips
from fedpriv.plan.evaluation import EvaluationPlan, assume_scaling, first_step_cell, make_evaluation_plan
from fedpriv.plan.plan import Plan, make_plan, make_problem, make_uncalibrated_parts
from fedpriv.plan.task import ModelInputs, make_schema_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell, ModelSection

ROUNDS_PART, EVALUATIONS_PART = "the rounds", "the evaluations"
"""Keys of `RunPlans.plans`, in addition to `FIRST_STEP`."""
_MAX_SIZE = 2**31
"""Largest accepted size in the shapes of a record."""
_TOLERANCE = 1e-9
"""Relative tolerance for two numbers that are computed in the same way on two machines."""

PlanFirstStep = Callable[[Cell], Plan]


@dataclass(frozen=True)
class RunPlans:
    """Plans of a run's rounds, and of its first step and its evaluations if the run itself had these."""

    cell: Cell
    plans: Mapping[str, Plan]

    @property
    def releases(self) -> tuple[ReleaseStream, ...]:
        """Release streams of the training records, the first step before the rounds."""
        streams = _streams(self.plans[ROUNDS_PART])
        if FIRST_STEP in self.plans:
            return (*(replace(stream, step=FIRST_STEP) for stream in _streams(self.plans[FIRST_STEP])), *streams)
        return add_external_first_step(streams, self.cell.budget.other_mu)

    @property
    def evaluations(self) -> tuple[ReleaseStream, ...]:
        """Release streams of the test records, empty if silos do not evaluate."""
        return _streams(self.plans[EVALUATIONS_PART]) if EVALUATIONS_PART in self.plans else ()

    def check(self, record: Mapping[str, Any]) -> None:
        """Compare a record's releases with those of the plans.

        Guarantee: in a record that passes, the owner, mechanism, participation, decay, clips, weights, relation,
        noise, period, unit, integers, step and increment diameter of every stream are those of the plan, floats up
        to a relative 1e-9.

        Raises:
            InputError: If the model's dimension or a field of a stream differs.
            KeyError, TypeError or AttributeError: If the record has another form.
        """
        if (size := self.plans[ROUNDS_PART].objective.dimension) != record["dimension"]:
            raise InputError(f"record.dimension is {record['dimension']!r:.40}, and its scenario gives {size}")
        for plan_streams, record_streams, field in (
            (self.releases, record["releases"], "releases"),
            (self.evaluations, (record.get("evaluation") or {}).get("releases", []), "evaluation.releases"),
        ):
            if (
                reason := describe_difference([stream_to_data(stream) for stream in plan_streams], record_streams)
            ) is not None:
                raise InputError(f"record.{field}: {reason}")


def _streams(plan: Plan) -> tuple[ReleaseStream, ...]:
    return make_release_streams(plan, plan.schedule.rounds)


def recompute_plans(
    cell: Cell, objective: Objective, releases: Sequence[Mapping[str, Any]], plan_first_step: PlanFirstStep
) -> RunPlans:
    """Plan a run again: its rounds, and its first step and its evaluations if it has these.

    Args:
        cell: Resolved scenario of the run.
        objective: Objective of the cell's model.
        releases: Releases in the run's record, which say whether the run took a first step.
        plan_first_step: Function that makes the plan of a first step from its cell.

    Raises:
        InputError: If the run cannot be planned, or a first step in `releases` does not fit the cell.
    """
    # A first step that was taken elsewhere has no plan: `RunPlans.releases` adds it.
    plans = {ROUNDS_PART: make_plan(cell, objective, for_release=True)}
    if any(release.get("step") == FIRST_STEP and release["owner"] != EXTERNAL_PARTY for release in releases):
        plans[FIRST_STEP] = plan_first_step(first_step_before(cell))
    if (evaluation := make_evaluation_plan(cell, objective, for_release=True)) is not None:
        plans[EVALUATIONS_PART] = evaluation.plan
    return RunPlans(cell, plans)


def first_step_before(cell: Cell) -> Cell:
    """Return the cell of the first step that gave a cell its means and deviations in [data.scale].

    Raises:
        InputError: If the cell has no [data.scale], no table, or is refused by `first_step_cell`.
    """
    if cell.data.scale is None:
        raise InputError("record.releases: has a first step, and its scenario has no [data.scale]")
    # A cell that has means already has no first step.
    scale = cell.data.scale.model_copy(update={"means": None, "deviations": None})
    first = first_step_cell(cell.model_copy(update={"data": cell.data.model_copy(update={"scale": scale})}))
    if first is None:
        raise InputError("record.releases: has a first step, and its scenario's data are no table")
    return first


def describe_difference(
    plan_streams: Sequence[Mapping[str, Any]], record_streams: Sequence[Mapping[str, Any]]
) -> str | None:
    """Describe the first field in which a record's streams differ from a plan's, after their owners.

    Args:
        plan_streams: Streams of the plan as plain data (`stream_to_data`).
        record_streams: Streams of the record, as they are in its file.

    Returns:
        Clause for an error message, or None if all fields are equal, floats up to a relative 1e-9.

    Raises:
        AttributeError: If a stream of the record is no dictionary.
    """
    # Tuples become lists, as in the record's file.
    plan_streams = json.loads(json.dumps(plan_streams))
    owners = [
        [record_stream.get("owner") for record_stream in streams] for streams in (record_streams, plan_streams)
    ]
    if owners[0] != owners[1]:
        record_owners, plan_owners = (", ".join(map(repr, names)) or "nobody" for names in owners)
        return f"released by {record_owners:.200}, and by its scenario by {plan_owners:.200}"
    reasons = (
        _describe_value_difference("", record_stream, plan_stream, sanitize_line(str(plan_stream["owner"]), 40))
        for record_stream, plan_stream in zip(record_streams, plan_streams, strict=True)
    )
    return next(filter(None, reasons), None)


def _describe_value_difference(name: str, record_value: Any, plan_value: Any, owner: str) -> str | None:
    """Describe how two values of a field of an owner's stream differ, or return None if they are equal.

    Of dictionaries the first difference is described, with keys in alphabetical order.  Floats may differ by a
    relative 1e-9.

    Args:
        name: Dotted name of the field, or "" for a whole stream.
        record_value: Value in the record, as plain data, or None if it is missing.
        plan_value: Value in the plan, likewise.
        owner: Name of the stream's party, for the text.
    """
    if isinstance(plan_value, dict) and isinstance(record_value, dict):
        parts = (
            (f"{name}.{key}".strip("."), record_value.get(key), plan_value.get(key))
            for key in sorted({*record_value, *plan_value})
        )
        return next(filter(None, (_describe_value_difference(*part, owner) for part in parts)), None)
    if _is_equal(record_value, plan_value):
        return None
    record_text, plan_text = (json.dumps(value)[:100] for value in (record_value, plan_value))
    return f"{sanitize_line(name, 60)} of {owner} is {record_text}, and its scenario gives {plan_text}"


def _is_equal(record_value: Any, plan_value: Any) -> bool:
    if isinstance(plan_value, list) and isinstance(record_value, list):
        return len(record_value) == len(plan_value) and all(map(_is_equal, record_value, plan_value))
    if isinstance(plan_value, float) and isinstance(record_value, float):
        return math.isclose(record_value, plan_value, rel_tol=_TOLERANCE)
    return type(record_value) is type(plan_value) and bool(record_value == plan_value)


def shapes_to_data(layout: FeatureLayout, classes: int) -> dict[str, Any]:
    """Return the public shapes of a silo's records, as the model sees them, for `make_objective`."""
    return {
        "width": layout[0],
        "inputs": [[list(features.shape), features.kind] for features in layout.inputs],
        "labels": list(layout.label_shape),
        "classes": classes,
    }


def make_objective(cell: Cell, shapes: Mapping[str, Any]) -> Objective:
    """Make the objective of a cell's model for silos' data of these shapes.

    For a table the shapes follow from its schema, and `shapes` are only checked for their ranges.

    Guarantee: no memory is allocated for a model, and no code runs that the scenario names by an import path.

    Args:
        cell: Cell with the model and the data section.
        shapes: Shapes, which may come from anybody: `width`, the number of features; `inputs`, pairs of a shape
            and a kind of values; `labels`, the shape of the labels of one row; `classes`, or 0 for labels that are
            numbers.  At most 64 sizes, each from 1 to 2^31, are accepted.

    Raises:
        InputError: If the model runs code outside fedpriv or does not take such data, or sizes of `shapes` are out
            of their range.
        KeyError, TypeError, ValueError or RuntimeError: If `shapes` have another form.
    """
    if cell.model.import_paths:
        raise InputError(f"the scenario's model runs {cell.model.import_paths[0]!r}, which no certificate may run")
    sizes = [shapes["width"], *shapes["labels"], *(size for shape, _ in shapes["inputs"] for size in shape)]
    if not all(type(size) is int and 0 < size <= _MAX_SIZE for size in sizes) or len(sizes) > 64:
        raise InputError(f"the shapes of the silos' records are none: {shapes!s:.100}")
    with torch.device("meta"):
        if (schema := cell.data.table_schema) is not None:
            return make_schema_task(cell, schema).objective
        layout = FeatureLayout(
            shapes["width"],
            tuple(InputLayout(tuple(shape), kind) for shape, kind in shapes["inputs"]),
            tuple(shapes["labels"]),
            labels_are_classes=shapes["classes"] > 0,
        )
        return ModelInputs.from_cell(cell).make_objective(layout, shapes["classes"])


def recompute_sums(cell: Cell) -> tuple[tuple[float, ...] | None, tuple[float, int | None, str] | None]:
    """Return the clips of a scenario's rounds, and a description of its running sums.

    Returns:
        A clip for each round, for a mean over one batch, and decay, period and the mechanism's name.  Either part
        is None if it differs between records of one and of two numbers, and so depends on shapes.  Both are None
        if the model runs code outside fedpriv, or takes no such records.
    """
    # Without the seed, where the participation does not depend on it, cells of several seeds share a cached value.
    seed = cell.seed if isinstance(cell.schedule, FreshOrder) else 0
    return _cached_sums(json.dumps({**cell.canonical_data(), "seed": seed}, sort_keys=True))


@lru_cache(maxsize=64)
def _cached_sums(canonical: str) -> tuple[tuple[float, ...] | None, tuple[float, int | None, str] | None]:
    try:
        cell = resolve_cell(json.loads(canonical), "record.scenario")
        # Clips and description for records of one number, and of two.
        narrow, wide = (
            (batch_clips(estimator, cell.schedule), (estimator.decay, estimator.period, mechanism.name))
            for problem in (make_problem(cell, _narrow_objective(cell, width)) for width in (1, 2))
            for estimator, mechanism, _ in (make_uncalibrated_parts(cell, problem),)
        )
    except (InputError, ValueError, RuntimeError):  # The model takes no records of one or two numbers.
        return None, None
    return narrow[0] if narrow[0] == wide[0] else None, narrow[1] if narrow[1] == wide[1] else None


def recompute_diameter(cell: Cell) -> float:
    """Return the increment diameter of a scenario's plan, in clips.

    The diameter depends on no shape of records, so a narrow model is planned.

    Raises:
        InputError: If the narrow model cannot be planned.
    """
    return make_plan(cell, _narrow_objective(cell, 1)).increment_diameter


def recompute_evaluation_diameter(cell: Cell) -> float:
    """Return the increment diameter of a scenario's evaluations by curves, in clips.

    The diameter depends on no model, so a network is planned for the scenario's table.

    Raises:
        InputError: If the evaluations cannot be planned.
    """
    objective = _narrow_objective(cell.model_copy(update={"model": ModelSection(name="mlp")}), 1)
    return cast(EvaluationPlan, make_evaluation_plan(assume_scaling(cell), objective)).plan.increment_diameter


def _narrow_objective(cell: Cell, width: int) -> Objective:
    """Return the objective over records of `width` numbers, or over the columns of a table's schema."""
    return make_objective(
        cell,
        {
            "width": width,
            "inputs": [[[width], "numbers"]],
            "labels": [],
            "classes": 0 if cell.model.is_regression else 2,
        },
    )


def strip_paths(tree: Any, name: str = "") -> Any:
    """Return a scenario for publication, in which a path in `data.name` is cut to its last part.

    `name` is the dotted key of `tree` in the scenario, or "" for the whole scenario.
    """
    if isinstance(tree, Mapping):
        return {key: strip_paths(value, f"{name}.{key}") for key, value in tree.items()}
    if isinstance(tree, str) and name.removeprefix(".") == "data.name":
        return tree.replace("\\", "/").rpartition("/")[2] or tree
    return tree


def format_silos(numbers: Sequence[int]) -> str:
    """Format silo numbers for a sentence, as in "silo 2" or "silos 0, 3", with at most eight numbers."""
    first_numbers = ", ".join(map(str, numbers[:8]))
    more = f" and {format_count(len(numbers) - 8, 'other')}" if len(numbers) > 8 else ""
    return f"{'silo' if len(numbers) == 1 else 'silos'} {first_numbers}{more}"
