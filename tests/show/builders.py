"""Results made in memory, with figures that are easy to check by hand, and what a cell's releases say of it."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedpriv.claims.claim import claim_figures, compute_claim, evaluation_to_data
from fedpriv.claims.ledger import ReleaseStream, make_release_streams, stream_to_data
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.published import PublishedValues
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import Results

Figures = tuple[float, float] | None
"""Test loss and test accuracy (a share) of a cell; None for a cell that is not finished."""

STREAM: dict[str, Any] = {
    "owner": "silos 0-99", "mechanism": {"name": "independent"},
    "participation": {"name": "fixed", "rounds": 600, "rounds_per_epoch": 600}, "decay": 1.0,
    "clips": [[118.1, 600]], "per_record": 1.0, "relation": "replace-one", "std": 1446.4, "period": None,
    "unit": "record",
}  # fmt: skip
"""What 100 silos released each, in the data of the ledger: μ = 4."""

PAPER: dict[str, Any] = {
    "rows": "privacy.rho", "row_values": [4.0, 8.0], "columns": "federation.silos", "column_values": [1, 10],
    "test_loss": [[2.256, 2.267], [2.253, 2.250]], "test_accuracy": [[69.9, 69.4], [70.2, 70.0]],
}  # fmt: skip

SECTIONS: dict[str, Any] = {
    "name": "t", "federation": {}, "privacy": {}, "run": {}, "data": {"name": "d", "partition": "iid"},
    "model": {"name": "m"}, "algorithm": {"name": "dp-sgd"},
}  # fmt: skip


def results_of(
    axes: Mapping[str, list[Any]],
    seeds: Sequence[int] = (0,),
    figures: Callable[[Mapping[str, Any], int], Figures] = lambda point, seed: (2.0, 0.5),
    paper: Mapping[str, Any] | None = None,
    facts: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda point: {},
) -> Results:
    """Results of a sweep; `facts` replaces what the cells of a point say about themselves."""
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    pairs = list(enumerate(itertools.product(points, seeds)))
    cells = [
        {**_cell(index, point, seed, measured), **facts(point)}
        for index, (point, seed) in pairs
        if (measured := figures(point, seed)) is not None
    ]
    published = PublishedValues.from_data(dict(paper)) if paper else None
    complete, rerun = len(cells) == len(pairs), "fedpriv run small.toml"
    return Results("small", "A small run", "vectorized", complete, axes, list(seeds), published, cells, {}, rerun)


def _cell(index: int, point: Mapping[str, Any], seed: int, measured: tuple[float, float]) -> dict[str, Any]:
    mu = point.get("privacy.rho", 4.0)
    return {
        "cell": index, "point": dict(point), "seed": seed, "test_loss": measured[0], "test_accuracy": measured[1],
        "trust": point.get("algorithm.trust", "untrusted"), "relation": "replace-one",
        "unit": "one record of a silo", "noise": "simulation", "delta": 1e-5, "mu": mu, "attained": True,
        "rho": mu, "zcdp": mu**2 / 2, "epsilon": 6 * mu, "epsilon_paper": 7 * mu,
        "releases": [{**STREAM, "std": 4.0 * STREAM["std"] / mu}], "silos": point.get("federation.silos", 100),
        "rounds": 600, "gradient_evaluations": 119_900, "bytes_sent": 18_840_000, "fraction_clipped": 0.0125,
        "wall_seconds": 1.25, "engine": "vectorized", "dimension": 7_850, "model": "models/0000.npy",
        "scenario": SECTIONS,
    }  # fmt: skip


def table_figures(point: Mapping[str, Any], seed: int) -> tuple[float, float]:
    """Losses 2.256, 2.266, 2.252 and 2.262, accuracies 70, 69, 74 and 73 %; std 0.001 and 1 over seeds 0, 1, 2."""
    more_noise, more_budget = point["federation.silos"] == 10, point["privacy.rho"] == 8.0
    loss = 2.256 + 0.010 * more_noise - 0.004 * more_budget
    accuracy = 0.70 - 0.01 * more_noise + 0.04 * more_budget
    return loss + 0.001 * (seed - 1), accuracy + 0.01 * (seed - 1)


def table_of(**changes: Any) -> Results:
    """A paper's table of rho (4, 8) × silos (1, 10); keyword arguments are those of `results_of`."""
    axes = {"privacy.rho": [4.0, 8.0], "federation.silos": [1, 10]}
    return results_of(**{"axes": axes, "seeds": [0, 1, 2], "figures": table_figures, "paper": PAPER, **changes})


def results_with(mu: float, delta: float = 1e-5, /, **facts: Any) -> Results:
    """A run of one cell that is `mu`-GDP by its releases, evaluations too."""
    sums = ReleaseStream(
        "silos 0-2", IndependentGaussian(), FixedOrder(1, 1), 1.0, (1.2345678,), 0.1, "replace-one", 1.0
    )
    stream = dataclasses.replace(sums, std=sums.mu / mu)
    record = {
        "cell": 0, "point": {}, "seed": 0, "trust": "untrusted", "noise": "simulation", "delta": delta,
        **claim_figures(compute_claim([stream]), delta), "releases": [stream_to_data(stream)],
        "evaluation": evaluation_to_data([stream], "untrusted", stream.mu), "silos": 3, "rounds": 1,
        "wall_seconds": 1.0, "gradient_evaluations": 12, "bytes_sent": 96, "fraction_clipped": None,
        "engine": "vectorized", "test_loss": 1.0, "test_accuracy": 0.5,
        "scenario": {"algorithm": {"name": "dp-sgd"}, "model": {"name": "m"}, "data": {"name": "d"}}, **facts,
    }  # fmt: skip
    return results_of_records(record)


def results_of_records(*records: Mapping[str, Any]) -> Results:
    """A finished run of one seed, with these records of its cells."""
    return Results("n", "t", "vectorized", True, {}, [0], None, list(records), {}, None)


def streams_of(cell: Cell, *, for_release: bool = False) -> Sequence[ReleaseStream]:
    """All that a whole run of a cell releases."""
    plan = make_plan(cell, load_task(cell).objective, for_release=for_release)
    return make_release_streams(plan, cell.schedule.rounds)
