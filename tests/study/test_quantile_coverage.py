"""Intervals of quantiles, and bands of the shares below each edge, cover 95 % of federations or more.

Every world has its own data, number of records, noise and edges.  A bound is 4.5 standard errors wide: an interval
that covers as often as it says fails it with probability 3e-6.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.addons.statistics.indicators import Cells, find_extent, prefix_root_matrix
from fedpriv.addons.statistics.plan import TableRequest
from fedpriv.addons.statistics.tables import read_table
from tests.parts import in_parts
from tests.study.test_statistics import SCHEMA_OF_TIMES

Floats = NDArray[np.float64]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
QUICK, FULL = 200, 1000


@dataclass(frozen=True)
class World:
    """Shape of the data, number of records, mu of the release, and number of edges."""

    shape: str
    records: int
    mu: float
    edges: int


def chances(world: World) -> Floats:
    """Probability of each ordered cell, those below and above all edges included."""
    count = world.edges + 1
    place = np.arange(count, dtype=float)
    match world.shape:
        case "even":
            weights = np.ones(count)
        case "skewed":
            weights = np.exp(-8.0 * place / count)
        case "ties":
            weights = np.isin(place, [count // 5, count // 2, 4 * count // 5]) * np.array([1.0])
        case "far apart":
            weights = np.isin(place, [1, count - 2]) * np.array([1.0])
        case _:
            weights = np.isin(place, [count // 2]) * np.array([1.0])
    return np.asarray(weights / weights.sum())


SHAPES = ("even", "skewed", "ties", "far apart", "one value")
WORLDS = [World(*keys) for keys in itertools.product(SHAPES, (12, 40, 300, 3000), (0.1, 1.0, 5.0), (11, 101))]
FAST = [
    World("one value", 12, 0.1, 101),  # of federations 61 % were covered
    World("far apart", 40, 1.0, 101),
    World("skewed", 300, 1.0, 101),  # 86 % of the shares below some edges
    World("ties", 3000, 5.0, 11),
]


def coverage(world: World, federations: int) -> tuple[dict[str, float], float, float]:
    """How often each interval covers, the least share of covered shares of any edge, and the mean width in cells.

    The width is that of the intervals for these records.
    """
    draw, edges = np.random.default_rng(5), np.arange(world.edges, dtype=float)
    upper = np.append(edges, np.inf)
    request = TableRequest(of=("time",), kind="quantiles", edges={"time": tuple(edges)}, quantiles=QUANTILES)
    column = SCHEMA_OF_TIMES.raw_columns.index("time")
    table = Cells.model_validate({"axes": [{"column": column, "edges": edges.tolist()}], "form": "prefix"})
    std, root = find_extent(table.blocks)[1] / world.mu, prefix_root_matrix(world.edges + 1)
    population = np.cumsum(chances(world))
    hits, shares, widths = dict[str, list[bool]](), list[NDArray[np.bool_]](), list[float]()
    for _ in range(federations):
        counts = draw.multinomial(world.records, chances(world)).astype(float)
        vector = np.append(root @ counts, 0.0) + std * draw.standard_normal(table.size)
        result = read_table(request, table, SCHEMA_OF_TIMES, vector, std)
        below = np.cumsum(counts)
        for estimate in result.estimates:
            share = float(estimate.of[-1].split()[1])
            reached = (
                below >= share * world.records - 1e-9
                if estimate.covers == "these records"
                else population >= share - 1e-12
            )
            wanted = upper[int(np.argmax(reached))]
            hits.setdefault(f"{estimate.covers}, {share}", []).append(estimate.low <= wanted <= estimate.high)
            if estimate.covers == "these records":
                ends = np.minimum([estimate.low, estimate.high], world.edges)
                widths.append(float(ends[1] - ends[0]))
        for curve in result.curves:
            true = below[:-1] / world.records
            shares.append((np.array(curve.low) <= true + 1e-12) & (true <= np.array(curve.high) + 1e-12))
    least_share = float(np.min(np.mean(shares, axis=0)))
    return {name: float(np.mean(hit)) for name, hit in hits.items()}, least_share, float(np.mean(widths))


@pytest.mark.parametrize("world", in_parts(WORLDS, FAST), ids=str)
def test_intervals_of_quantiles_and_shares_cover_95_percent_of_federations(
    request: pytest.FixtureRequest, world: World
) -> None:
    is_slow = request.node.get_closest_marker("slow") is not None
    federations = FULL if is_slow else QUICK
    covered, least_share, width = coverage(world, federations)
    least_quantile = min(covered.values())
    print(f"{world}: quantiles {100 * least_quantile:.1f} %, shares {100 * least_share:.1f} %, {width:.1f} wide")
    least = 0.95 - 4.5 * math.sqrt(0.05 * 0.95 / federations)
    assert {name: rate for name, rate in covered.items() if rate < least} == {}
    assert least_share >= least


@pytest.mark.parametrize(("mu", "widest"), [(1.0, 3.0), (5.0, 1.0)])
def test_intervals_of_quantiles_are_short_where_records_are_many(mu: float, widest: float) -> None:
    """Of 3,000 records over 101 edges, in cells: a sum has a deviation of about 3 records at mu = 1."""
    assert coverage(World("even", 3000, mu, 101), QUICK)[2] <= widest
