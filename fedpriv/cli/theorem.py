"""`fedpriv privacy theorem`: what a scenario runs with beside what its algorithm's theorems ask for."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.shown import print_table
from fedpriv.core.errors import InputError

if TYPE_CHECKING:
    from fedpriv.loss.objective import Objective
    from fedpriv.papers.base import Condition, Prescription, Problem
    from fedpriv.scenario.load import Point
    from fedpriv.scenario.schema import Cell


_OWN = "bound at the scenario's numbers"


def theorem(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file (TOML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key; a swept key is narrowed. Repeatable."),
    ] = None,
    gap: Annotated[
        float | None,
        typer.Option(help="What the loss can fall by from the start, for theorems whose bound needs it."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Results of the scenario: the excess risk measured there, if known."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Print what a scenario runs with beside what its algorithm's theorems ask for, and which conditions hold.

    Once for every point of the sweep; seeds share their numbers.  Noise is that of a coordinate of one fresh
    vector, in the mean over silos.

    Examples:

        fedpriv privacy theorem scenarios/deployment.toml

        fedpriv privacy theorem scenarios/mnist-single-epoch.toml --set label.method=accelerated-dp-srgd --json
    """
    from fedpriv.rounds.fitted import fitted_scenario
    from fedpriv.scenario.load import load_scenario

    loaded, _ = fitted_scenario(load_scenario(scenario, overrides or []), {})
    points = [_compared(point, gap, run) for point in _first_seeds(loaded.points)]
    if not any(point["theorems"] or point["bound"] for point in points):
        names = ", ".join(sorted({point["algorithm"] for point in points}))
        raise InputError(f"{scenario}: no theorem with explicit numbers is known for {names}")
    if as_json:
        typer.echo(json.dumps({"points": points}))
        return
    for number, point in enumerate(points):
        if number:
            typer.echo()
        _print_point(point)


def _first_seeds(points: "list[Point]") -> "list[Point]":
    """One of the points that differ in nothing but the seed."""
    first: dict[str, Point] = {}
    for point in points:
        first.setdefault(json.dumps(dict(point.swept), sort_keys=True), point)
    return list(first.values())


def _compared(point: "Point", gap: float | None, run: Path | None) -> dict[str, Any]:
    """The numbers of one point, its own and each theorem's; a theorem that cannot be run says why."""
    from fedpriv.accounting.gaussian import check_positive
    from fedpriv.rounds.plan import problem_of
    from fedpriv.rounds.task import task_of_cell

    cell = point.cell
    objective = task_of_cell(cell).objective
    problem = problem_of(cell, objective)
    if gap is not None:
        problem = dataclasses.replace(problem, gap=check_positive("gap", gap))
    return {
        "point": dict(point.swept),
        "algorithm": cell.algorithm.name,
        "problem": {
            "records": problem.records,
            "dimension": problem.dimension,
            "silos": problem.silos,
            "epsilon": problem.epsilon,
            "delta": problem.delta,
            "relation": cell.privacy.relation,
            "lipschitz": _finite(problem.lipschitz),
            "smoothness": _finite(problem.smoothness),
        },
        "scenario": _used(cell, objective) | _measured(point, run),
        "theorems": [
            _as_data(asked, problem) for asked in cell.algorithm.row.theorems(cell.algorithm.settings, problem)
        ],
        "bound": _bound(cell, objective),
    }


def _bound(cell: "Cell", objective: "Objective") -> dict[str, Any] | None:
    """What is proved of the excess risk at the scenario's own numbers; None where nothing is."""
    from fedpriv.rounds.plan import excess_risk_bound, plan_of

    try:
        found = excess_risk_bound(cell, plan_of(cell, objective))
    except InputError:
        return None  # it cannot be run, which is said elsewhere
    if found is None:
        return None
    return {
        "excess risk": _finite(found.value),
        "conditions": _conditions(found.conditions),
        "assumption": found.assumption,
    }


def _used(cell: "Cell", objective: "Objective") -> dict[str, Any]:
    """What a run of the cell computes with; only the reason where it cannot be run."""
    from fedpriv.rounds.plan import plan_of

    try:
        plan = plan_of(cell, objective)
    except InputError as error:
        return {"refusal": str(error)}
    rounds = plan.schedule.rounds
    return {
        "rounds": rounds,
        "batch": sum(plan.batch_sizes),
        "clip": max(float(plan.estimator.round(t).clip) for t in range(1, rounds + 1)),
        "noise std": plan.noise.std_in_mean,
        **_numbers(cell.algorithm.settings.model_dump(exclude={"clip"})),
        **_numbers(vars(plan.optimizer)),
    }


def _measured(point: "Point", run: Path | None) -> dict[str, float]:
    """The mean excess risk that the seeds of this point have in a run's results; nothing where none is known."""
    if run is None:
        return {}
    from fedpriv.study.results import read_results

    cells = [cell for cell in read_results(run).cells if cell["point"] == dict(point.swept)]
    found = [float(cell["excess_risk"]) for cell in cells if "excess_risk" in cell]
    return {"excess risk": sum(found) / len(found)} if found else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _as_data(asked: "Prescription", problem: "Problem") -> dict[str, Any]:
    refusal = asked.refusal or _refusal(asked.numbers, problem)
    told = {"numbers": dict(asked.numbers), "conditions": _conditions(asked.conditions), "refusal": refusal}
    return asked._asdict() | told


def _conditions(conditions: "Iterable[Condition]") -> list[dict[str, Any]]:
    return [{**condition._asdict(), "holds": condition.holds} for condition in conditions]


def _refusal(numbers: Mapping[str, float], problem: "Problem") -> str | None:
    """Why no scenario has such batches, on one line: what [federation] itself would refuse."""
    batch = math.floor(numbers["batch"] * (1.0 + 1e-12))
    if batch < problem.silos:
        return (
            f"a round of {batch} records is less than one of each of the {problem.silos} silos; run it with "
            f"federation.silos = {batch} or fewer"
        )
    return None


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _print_point(compared: dict[str, Any]) -> None:
    swept = ", ".join(f"{key} = {value}" for key, value in compared["point"].items())
    typer.echo(f"{compared['algorithm']}{f' at {swept}' if swept else ''}")
    print_table([(name, _text(value)) for name, value in compared["problem"].items()])
    used, theorems, bound = compared["scenario"], compared["theorems"], compared["bound"]
    columns = [{} if "refusal" in used else used, *(asked["numbers"] for asked in theorems)]
    header = ["", "scenario", *(asked["theorem"] for asked in theorems)]
    if bound is not None:
        columns.append({"excess risk": bound["excess risk"]})
        header.append(_OWN)
    names = dict.fromkeys(itertools.chain(*columns))
    typer.echo()
    print_table([header, *([name, *(_text(column.get(name)) for column in columns)] for name in names)])
    if "refusal" in used:
        typer.echo(f"\nthe scenario cannot be run: {used['refusal']}")
    for asked in theorems:
        refusal = asked["refusal"]
        typer.echo(f"\n{asked['theorem']}: {'can be run with these numbers' if refusal is None else refusal}")
        _print_conditions(asked)
    if bound is not None:
        known = "of the mean excess risk" if bound["excess risk"] is not None else "nothing is known"
        typer.echo(f"\n{_OWN}: {known}")
        _print_conditions(bound)


def _print_conditions(asked: dict[str, Any]) -> None:
    if asked["conditions"]:
        print_table(
            [
                ("  " + condition["text"], f"{condition['left']:.6g} ≤ {condition['right']:.6g}", verdict)
                for condition in asked["conditions"]
                for verdict in ("holds" if condition["holds"] else "DOES NOT HOLD",)
            ]
        )
    if asked["assumption"]:
        typer.echo(f"  cannot be checked: {asked['assumption']}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
