"""Command `fedpriv privacy theorem`: numbers that theorems prescribe.

A sweep point has one value of each key that the scenario sweeps.  The problem is the public numbers from which
theorems start, such as records and dimension.  A prescription is a theorem's numbers for a run, with the
theorem's conditions.  The excess risk is the loss above the smallest loss of an admissible model, such as one in
the run's ball.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.options import Json, SweepOverrides, print_table, print_text
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_lower, format_upper, format_upper_delta, format_upper_epsilon

if TYPE_CHECKING:
    from fedpriv.papers.base import Bound, Condition, Prescription, Problem
    from fedpriv.plan.plan import Plan
    from fedpriv.scenario.load import SweepPoint
    from fedpriv.scenario.schema import Cell

_SCENARIO_BOUND = "bound at the scenario's numbers"


def theorem(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file (TOML).")],
    overrides: SweepOverrides = None,
    gap: Annotated[
        float | None,
        typer.Option(help="What the loss can fall by from the start, for theorems whose bound needs it."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Results of the scenario: the excess risk measured there, if known."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a scenario's numbers beside those of its algorithm's theorems, with the conditions.

    Each point of the sweep is printed once, by its first seed.  Noise is the standard deviation of one coordinate
    of a round's fresh noise, in the mean over silos, or of one silo in the table of silos.

    Examples:

        fedpriv privacy theorem scenarios/deployment.toml

        fedpriv privacy theorem scenarios/mnist-single-epoch.toml --set label.method=accelerated-dp-srgd --json
    """
    from fedpriv.plan.calibration import fit_scenario_noise
    from fedpriv.scenario.load import load_scenario

    loaded, _ = fit_scenario_noise(load_scenario(scenario, overrides or []), {})
    points = [compare_with_theorems(point, gap, run) for point in loaded.points[:: len(loaded.seeds)]]
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


def _print_point(comparison: dict[str, Any]) -> None:
    """Print the result of `compare_with_theorems` for a point as tables, then the theorems' conditions."""
    swept = ", ".join(f"{key} = {value}" for key, value in comparison["point"].items())
    print_text(f"{comparison['algorithm']}{f' at {swept}' if swept else ''}\n")
    print_table([(name, _format_number(name, value)) for name, value in comparison["problem"].items()])
    # Table: a line for each number, a column for the scenario and for each theorem.
    scenario_numbers, theorems, bound = comparison["scenario"], comparison["theorems"], comparison["bound"]
    columns = [
        {} if "refusal" in scenario_numbers else scenario_numbers,
        *(theorem_section["numbers"] for theorem_section in theorems),
    ]
    header = ["", "scenario", *(theorem_section["theorem"] for theorem_section in theorems)]
    if bound is not None:
        columns.append({"excess risk": bound["excess risk"]})
        header.append(_SCENARIO_BOUND)
    typer.echo()
    lines = [
        [
            name,
            *(
                _format_number(name, column.get(name), is_prescribed=index > 0)
                for index, column in enumerate(columns)
            ),
        ]
        for name in dict.fromkeys(itertools.chain(*columns))
    ]
    print_table([header, *lines])
    if comparison["silos"]:
        typer.echo()
        silo_rows = [[_format_number(name, value) for name, value in silo.items()] for silo in comparison["silos"]]
        print_table([list(comparison["silos"][0]), *silo_rows])
    # Conditions, and reasons why a run is refused.
    if "refusal" in scenario_numbers:
        print_text(f"\nthe scenario cannot be run: {scenario_numbers['refusal']}\n")
    for theorem_section in theorems:
        print_text(
            f"\n{theorem_section['theorem']}: {theorem_section['refusal'] or 'can be run with these numbers'}\n"
        )
        _print_conditions(theorem_section)
    if bound is not None:
        typer.echo(
            f"\n{_SCENARIO_BOUND}: "
            f"{'nothing is known' if bound['excess risk'] is None else 'of the mean excess risk'}"
        )
        _print_conditions(bound)


def _print_conditions(section: dict[str, Any]) -> None:
    if section["conditions"]:
        print_table(
            [
                ("  " + condition["text"], f"{condition['left']:.6g} ≤ {condition['right']:.6g}", verdict)
                for condition in section["conditions"]
                for verdict in ("holds" if condition["holds"] else "DOES NOT HOLD",)
            ]
        )
    if section["assumption"]:
        typer.echo(f"  cannot be checked: {section['assumption']}")


def _format_number(name: str, value: Any, *, is_prescribed: bool = False) -> str:
    """Format a value for a table, a float with up to six significant digits.

    An ε, a δ or a μ is rounded up, and the standard deviation of noise up or down.

    Args:
        name: Name of the value, which says whether it is an ε ("epsilon…"), "delta", "mu" or noise ("noise std").
        value: The value.
        is_prescribed: Whether a theorem prescribes the value.  Noise is then rounded up, and the noise of a run is
            rounded down.
    """
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if name.startswith("epsilon"):
        return format_upper_epsilon(value, 6)
    if name == "delta":
        return format_upper_delta(value)
    if name == "mu" or "noise std" in name:
        return format_upper(value, 6) if name == "mu" or is_prescribed else format_lower(value, 6)
    return f"{value:.6g}"


def compare_with_theorems(point: "SweepPoint", gap: float | None, run: Path | None) -> dict[str, Any]:
    """Compare the numbers of one sweep point with those of each theorem of its algorithm.

    The result has "point" (swept values), "algorithm", "problem" (public numbers that theorems start from),
    "scenario" (numbers of a run, or a "refusal", and the measured excess risk if known), "silos" (μ, ε and noise
    of each silo, if they have targets of their own), "theorems" (numbers, conditions, assumption and "refusal" of
    each) and "bound" (of the excess risk at the scenario's numbers, or None without one).  A "refusal" is the
    reason why numbers cannot be run, and None for a theorem whose numbers can.

    Args:
        point: The sweep point.
        gap: Largest decrease of the loss from the start, for theorems whose bound needs it, or None.
        run: Results folder with the measured excess risk, or None.

    Raises:
        InputError: The data or the results cannot be read, the data do not fit the scenario, or `gap` is not
            positive.
    """
    from fedpriv.accounting.gaussian import check_positive
    from fedpriv.plan.plan import excess_risk_bound, make_plan, make_problem
    from fedpriv.plan.task import load_task

    cell = point.cell
    objective = load_task(cell).objective
    problem = make_problem(cell, objective)
    if gap is not None:
        problem = dataclasses.replace(problem, gap=check_positive("gap", gap))
    try:
        plan = make_plan(cell, objective)
        numbers, bound = _scenario_numbers(cell, plan), _bound_data(excess_risk_bound(cell, plan))
        silos = _silo_numbers(cell, plan)
    except InputError as error:
        numbers, bound, silos = {"refusal": str(error)}, None, []
    return {
        "point": dict(point.swept_values),
        "algorithm": cell.algorithm.name,
        "problem": {
            "records": problem.records,
            "dimension": problem.dimension,
            "silos": problem.silos,
            "epsilon": problem.epsilon,
            "delta": problem.delta,
            "relation": cell.privacy.relation,
            "lipschitz": _finite_or_none(problem.lipschitz),
            "smoothness": _finite_or_none(problem.smoothness),
        },
        "scenario": numbers | _measured_risk(point, run),
        "silos": silos,
        "theorems": [
            _prescription_data(prescription, problem, min(cell.privacy.shares or (1.0,)))
            for prescription in cell.algorithm.row.theorems(cell.algorithm.settings, problem)
        ],
        "bound": bound,
    }


def _bound_data(bound: "Bound | None") -> dict[str, Any] | None:
    """Return the proved bound of the excess risk at the scenario's own numbers, or None without one."""
    if bound is None:
        return None
    return {
        "excess risk": _finite_or_none(bound.value),
        "conditions": _conditions_data(bound.conditions),
        "assumption": bound.assumption,
    }


def _scenario_numbers(cell: "Cell", plan: "Plan") -> dict[str, Any]:
    """Return the numbers of a run of the cell."""
    from fedpriv.noise.registry import MechanismOptions

    rounds, settings = plan.schedule.rounds, cell.algorithm.settings
    unused = MechanismOptions.model_fields.keys() - settings.model_fields_set  # defaults of other mechanisms
    return {
        "rounds": rounds,
        "batch": sum(plan.batch_sizes),
        "clip": max(float(plan.estimator.round(t).clip) for t in range(1, rounds + 1)),
        "noise std": plan.noise.std_in_mean,
        **_finite_numbers(settings.model_dump(exclude={"clip", *unused})),
        **_finite_numbers(vars(plan.optimizer)),
    }


def _silo_numbers(cell: "Cell", plan: "Plan") -> list[dict[str, Any]]:
    """Return μ, ε and fresh noise of each silo, or an empty list without `privacy.shares`.

    Source of such targets: Reshef & Levy, Theorem 5.1.
    """
    from fedpriv.accounting.gaussian import epsilon_of

    return [
        {
            "silo": silo,
            "mu": mu,
            "epsilon": epsilon_of(mu, cell.privacy.delta),
            "noise std": plan.noise.std_of(silo),
        }
        for silo, mu in enumerate((cell.target_mus or ()) if cell.privacy.shares else ())
    ]


def _measured_risk(point: "SweepPoint", run: Path | None) -> dict[str, float]:
    """Return the mean excess risk over the seeds of this point in a run's results, if they have it."""
    from fedpriv.study.results import read_results

    cells = (
        []
        if run is None
        else [cell for cell in read_results(run).cells if cell["point"] == dict(point.swept_values)]
    )
    risks = [float(cell["excess_risk"]) for cell in cells if "excess_risk" in cell]
    return {"excess risk": sum(risks) / len(risks)} if risks else {}


def _finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _prescription_data(prescription: "Prescription", problem: "Problem", min_share: float) -> dict[str, Any]:
    return prescription._asdict() | {
        "numbers": dict(prescription.numbers),
        "conditions": _conditions_data(prescription.conditions),
        "refusal": prescription.refusal or _why_refused(prescription.numbers, problem, min_share),
    }


def _conditions_data(conditions: Iterable["Condition"]) -> list[dict[str, Any]]:
    return [{**condition._asdict(), "holds": condition.holds} for condition in conditions]


def _why_refused(numbers: Mapping[str, float], problem: "Problem", min_share: float) -> str | None:
    """Explain why the silos cannot run with a theorem's numbers, or return None if they can.

    A silo needs a record in every batch and the whole privacy target, whose smallest share is `min_share`, and a
    person has records in a single silo.
    """
    batch = math.floor(numbers["batch"] * (1.0 + 1e-12))
    return (
        "these numbers are for the whole target at every silo, and privacy.shares gives some less"
        if min_share < 1.0
        else "these numbers are for persons with records in one silo, and privacy.shared = "
        f"{problem.unit.max_silos}"
        if problem.unit.max_silos > 1
        else f"a round of {batch} records is less than one of each of the {problem.silos} silos; run it with "
        f"federation.silos = {batch} or fewer"
        if batch < problem.silos
        else None
    )


def _finite_or_none(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None
