"""Results made in memory, with figures that are easy to check by hand."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fedpriv.claims.claim import claim_figures, compute_claim, evaluation_to_data
from fedpriv.claims.ledger import ReleaseStream, stream_to_data
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.participation.orders import FixedOrder
from fedpriv.scenario.published import PublishedValues
from fedpriv.study.results import Results

Figures = tuple[float, float] | None
"""Test loss and test accuracy (a share) of a cell; None for a cell that is not finished."""


def results_of(
    axes: Mapping[str, list[Any]],
    seeds: list[int],
    figures: Callable[[Mapping[str, Any], int], Figures],
    paper: Mapping[str, Any] | None = None,
    facts: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda point: {},
) -> Results:
    """Results of a sweep; `facts` replaces what the cells of a point say about themselves."""
    cells, place, complete = [], 0, True
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        for seed in seeds:
            if (measured := figures(point, seed)) is None:
                complete = False
            else:
                cells.append({**_cell(place, point, seed, measured), **facts(point)})
            place += 1
    published = PublishedValues.from_data(dict(paper)) if paper else None
    title, rerun = "A small run", "fedpriv run small.toml"
    return Results("small", title, "vectorized", complete, axes, seeds, published, cells, {}, rerun)


STREAM: dict[str, Any] = {
    "owner": "silos 0-99",
    "mechanism": {"name": "independent"},
    "participation": {"name": "fixed", "rounds": 600, "rounds_per_epoch": 600},
    "decay": 1.0,
    "clips": [[118.1, 600]],
    "per_record": 1.0,
    "relation": "replace-one",
    "std": 1446.4,
    "period": None,
    "unit": "record",
}
"""What 100 silos released each, in the data of the ledger: μ = 4."""


def released_at(mu: float) -> dict[str, Any]:
    """The same with the noise of another μ."""
    return {**STREAM, "std": 4.0 * STREAM["std"] / mu}


SECTIONS = {
    **{"name": "t", "federation": {}, "privacy": {}, "run": {}},
    **{"data": {"name": "d", "partition": "iid"}, "model": {"name": "m"}, "algorithm": {"name": "dp-sgd"}},
}


def _cell(place: int, point: Mapping[str, Any], seed: int, measured: tuple[float, float]) -> dict[str, Any]:
    mu = point.get("privacy.rho", 4.0)
    return {
        "cell": place,
        "point": dict(point),
        "seed": seed,
        "test_loss": measured[0],
        "test_accuracy": measured[1],
        "trust": point.get("algorithm.trust", "untrusted"),
        "relation": "replace-one",
        "unit": "one record of a silo",
        "noise": "simulation",
        "delta": 1e-5,
        "mu": mu,
        "attained": True,
        "rho": mu,
        "zcdp": mu**2 / 2,
        "epsilon": 6 * mu,
        "epsilon_paper": 7 * mu,
        "releases": [released_at(mu)],
        "silos": point.get("federation.silos", 100),
        "rounds": 600,
        "gradient_evaluations": 119_900,
        "bytes_sent": 18_840_000,
        "fraction_clipped": 0.0125,
        "wall_seconds": 1.25,
        "engine": "vectorized",
        "dimension": 7_850,
        "model": "models/0000.npy",
        "scenario": SECTIONS,
    }


PAPER = {
    "rows": "privacy.rho",
    "columns": "federation.silos",
    "test_loss": [[2.256, 2.267], [2.253, 2.250]],
    "test_accuracy": [[69.9, 69.4], [70.2, 70.0]],
    "row_values": [4.0, 8.0],
    "column_values": [1, 10],
}


def table_figures(point: Mapping[str, Any], seed: int) -> tuple[float, float]:
    """Losses 2.256, 2.266, 2.252 and 2.262, accuracies 70, 69, 74 and 73 %; std 0.001 and 1 over seeds 0, 1, 2."""
    more_noise, more_budget = point["federation.silos"] == 10, point["privacy.rho"] == 8.0
    loss = 2.256 + 0.010 * more_noise - 0.004 * more_budget
    accuracy = 0.70 - 0.01 * more_noise + 0.04 * more_budget
    return loss + 0.001 * (seed - 1), accuracy + 0.01 * (seed - 1)


@pytest.fixture
def make_results() -> Callable[..., Results]:
    return results_of


@pytest.fixture
def make_table() -> Callable[..., Results]:
    """A paper's table of rho (4, 8) × silos (1, 10); keyword arguments are those of `load_results`."""

    def make(**changes: Any) -> Results:
        axes = {"privacy.rho": [4.0, 8.0], "federation.silos": [1, 10]}
        given = {"axes": axes, "seeds": [0, 1, 2], "figures": table_figures, "paper": PAPER, **changes}
        return results_of(**given)

    return make


def results_with(of_run: float, delta: float, **facts: Any) -> Results:
    """A run of one cell that is `of_run`-GDP by its releases, evaluations too."""
    sums = ReleaseStream(
        "silos 0-2", IndependentGaussian(), FixedOrder(1, 1), 1.0, (1.2345678,), 0.1, "replace-one", 1.0
    )
    stream = dataclasses.replace(sums, std=sums.mu / of_run)
    evaluation = evaluation_to_data([stream], "untrusted", stream.mu)
    record = {
        **{"cell": 0, "point": {}, "seed": 0, "trust": "untrusted", "noise": "simulation", "delta": delta},
        **claim_figures(compute_claim([stream]), delta),
        **{
            "releases": [stream_to_data(stream)],
            "evaluation": evaluation,
            "silos": 3,
            "rounds": 1,
            "wall_seconds": 1.0,
        },
        **{
            "gradient_evaluations": 12,
            "bytes_sent": 96,
            "fraction_clipped": None,
            "engine": "vectorized",
            "test_loss": 1.0,
            "test_accuracy": 0.5,
        },
        "scenario": {"algorithm": {"name": "dp-sgd"}, "model": {"name": "m"}, "data": {"name": "d"}},
        **facts,
    }
    return Results("n", "t", "vectorized", True, {}, [0], None, [record], {}, None)
