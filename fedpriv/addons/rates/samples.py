"""Records that Goldstein stationarity needs: Table 1 of Kornowski, Liu & Talwar, and explicit bounds.

The Goldstein measure at a point and a radius is the smallest norm of a weighted mean of gradients at points within
that radius.  A result says how many records n suffice for a measure of at most β (`target`) at radius 2α, for
losses of d parameters with the Lipschitz constant L, whose mean can fall by at most Φ (`gap`) from the start.
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from fedpriv.accounting.gaussian import check_positive, mu_of
from fedpriv.cli.options import print_table
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_upper_epsilon
from fedpriv.papers.kornowski_bounds import NonsmoothProblem, plan_multi_pass, plan_single_pass


@dataclass(frozen=True)
class SamplesRequest:
    """Numbers of `fedpriv privacy samples`: β, 2α, every ε, every d, δ, L and Φ, in this order."""

    target: float
    radius: float
    epsilons: list[float]
    dimensions: list[int]
    delta: float
    lipschitz: float
    gap: float


def print_samples(request: SamplesRequest, as_json: bool) -> None:
    """Print how many records each result needs, for every dimension and ε.

    The results are those of the paper's Table 1, and explicit bounds with all constants.

    Args:
        request: Values of the command's options.
        as_json: Whether plain data is printed in place of a table.  An explicit bound that 10^18 records do not
            reach is null there.

    Raises:
        InputError: A number is out of its range: 1 to 10^12 for a dimension, 0 to 1 without its ends for δ, and
            10^-6 to 10^6 for the others.
    """
    public = {
        "target": [request.target],
        "radius": [request.radius],
        "lipschitz": [request.lipschitz],
        "gap": [request.gap],
        "epsilon": request.epsilons,
    }
    for name, value in ((name, value) for name, values in public.items() for value in values):
        check_positive(name, value)
        if not 1e-6 <= value <= 1e6:
            raise InputError(f"{name} = {value}: expected a number from 1e-06 to 1e+06")
    points: list[dict[str, Any]] = []
    for d, requested_epsilon in itertools.product(request.dimensions, request.epsilons):
        if not 1 <= d <= 10**12:
            raise InputError(f"dimension = {d}: expected 1 to 10^12 parameters")
        problem, mu = (
            NonsmoothProblem(d, request.lipschitz, request.gap, request.radius / 2.0),
            mu_of(requested_epsilon, request.delta),
        )
        sample_counts = {
            **printed_samples(problem, request.target, requested_epsilon),
            **certified_samples(problem, request.target, mu),
        }
        counts = {name: number if math.isfinite(number) else None for name, number in sample_counts.items()}
        points.append({"dimension": d, "epsilon": requested_epsilon, "delta": request.delta, "records": counts})
    if as_json:
        typer.echo(json.dumps({"points": points}, allow_nan=False))
        return
    heads = [
        "records for",
        *(f"d = {point['dimension']}, ε = {format_upper_epsilon(point['epsilon'])}" for point in points),
    ]
    rows = [
        [
            name,
            *(
                "more than 10^18" if (number := point["records"][name]) is None else f"{number:.2g}"
                for point in points
            ),
        ]
        for name in points[0]["records"]
    ]
    print_table([heads, *rows])


def printed_samples(problem: NonsmoothProblem, target: float, epsilon: float) -> dict[str, float]:
    """Return the numbers of records in Table 1, without the constants and logarithms of its Ω~.

    The numbers are for a Goldstein measure of at most `target` at radius 2 · `smoothing`.  The multi-pass result
    is about the mean loss of the given records.  The last entry adds the number that Section 5 requires for the
    population.

    Returns:
        Number of records by the name of the result.
    """
    d, lipschitz, gap, smoothing = problem.dimension, problem.lipschitz, problem.gap, problem.smoothing
    drift, noise = (
        gap * lipschitz**2 / (smoothing * target**3),
        gap * lipschitz / (epsilon * smoothing * target**2),
    )
    multi = math.sqrt(gap / smoothing) * lipschitz * d**0.75 / (epsilon * target**1.5)
    return {
        "Zhang, Tran & Cutkosky 2024": d * drift + d**1.5 * noise,
        "Theorem 3.1, single pass": math.sqrt(d) * drift + d * noise,
        "Theorem 4.1, multi pass": multi,
        "the same for the population": multi + d * (lipschitz / target) ** 2,
    }


def certified_samples(problem: NonsmoothProblem, target: float, mu: float) -> dict[str, float]:
    """Return the number of records for each explicit bound, by its name, or infinity beyond 10^18.

    A number suffices, and may be larger than necessary.  A multi-pass run is planned for a measure β, and its
    bound may be above β.  So the best of 12 values of β up to `target` counts.

    Returns:
        Number of records by the name of the bound.
    """
    targets = [target * 0.7**power for power in range(12)]
    return {
        "explicit bound, single pass": _find_min_records(lambda n: plan_single_pass(problem, n, mu).bound, target),
        "explicit bound, multi pass": _find_min_records(
            lambda n: min(plan_multi_pass(problem, n, beta, mu).bound for beta in targets), target
        ),
    }


def _find_min_records(bound: Callable[[int], float], target: float) -> float:
    """Return the smallest n of at least 3 for which a falling bound meets the target, or about 1 % more.

    The result is infinity if 10^18 records do not suffice.
    """
    high = 4
    while bound(high) > target:
        if high == 10**18:
            return math.inf
        high = min(2 * high, 10**18)
    low = high // 2
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if bound(middle) > target else (low, middle)
    return float(high)
