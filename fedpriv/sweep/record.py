"""A cell of results.json: what was asked for, measured, spent and claimed, as data."""

import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Literal

from fedpriv.accounting.gdp import epsilon_of
from fedpriv.figures import delta_figure, upper_figure
from fedpriv.privacy.claimed import figures_of
from fedpriv.privacy.elsewhere import with_other_step
from fedpriv.privacy.evaluations import evaluation_data
from fedpriv.privacy.ledger import ReleaseStream, as_data, claim_of
from fedpriv.running.outcome import Finished
from fedpriv.scenario import Cell, Point


def versions() -> dict[str, str]:
    """What computed the results."""
    packages = {name: metadata.version(name) for name in ("fedpriv", "torch", "numpy", "flwr", "cryptography")}
    return {
        "python": platform.python_version(),
        **packages,
        "platform": sys.platform,
    }


def privacy_of(
    cell: Cell, releases: Sequence[ReleaseStream], noise: Literal["simulation", "release"] = "simulation"
) -> dict[str, Any]:
    """The privacy statement of a cell as data: computed from its ledger, not from what the scenario asked for.

    A first step that the cell's budget has, and its ledger has not, is charged as one elsewhere.
    """
    releases = with_other_step(releases, cell.budget.beside)
    claim, delta = claim_of(releases), cell.privacy.delta
    figures = figures_of(claim, delta)
    named_so = cell.algorithm.row.name_of_mu == "rho"
    return {
        "trust": cell.algorithm.trust,
        "relation": cell.privacy.relation,
        "unit": cell.privacy.protected.words,
        "participation": cell.schedule.title,
        "noise": "none" if claim is None else noise,
        "delta": delta,
        "releases": [as_data(stream) for stream in releases],
        "target": _target(cell),
        **figures,
        "rho": figures["mu"] if named_so else None,
    }


def _target(cell: Cell) -> str:
    """What the noise was calibrated to, and from which key of the scenario it follows."""
    asked, target = cell.privacy, cell.privacy.target
    if target is None:
        return "none"
    if not cell.schedule.secret:
        return f"mu = {upper_figure(target, 6)}"
    given = "" if asked.epsilon is not None else f", what mu = {upper_figure(target, 6)} gives"
    epsilon = upper_figure(epsilon_of(target, asked.delta), 6)
    return f"epsilon = {epsilon} at delta = {delta_figure(asked.delta)}{given}"


def record_of(place: int, point: Point, finished: Finished, engine: str) -> dict[str, Any]:
    """Everything that results.json says of one finished cell."""
    federation, rounds = point.cell.federation, point.cell.schedule.rounds
    stated = privacy_of(point.cell, finished.releases, finished.noise)
    return {
        "cell": place,
        "point": dict(point.swept),
        "seed": point.cell.seed,
        **finished.metrics,
        **stated,
        "evaluation": evaluation_data(finished.evaluations, point.cell.algorithm.trust, stated["mu"]),
        "silos": federation.silos,
        **({} if federation.clients is None else {"clients": federation.clients}),
        "rounds": rounds,
        "records": sum(point.cell.batch_sizes) * point.cell.schedule.batches_held,
        "unread": point.cell.unread,
        "smallest_silo": min(point.cell.batch_sizes) * point.cell.schedule.batches_held,
        "batch": sum(point.cell.batch_sizes),
        "dimension": finished.model.size,
        "gradient_evaluations": finished.gradient_evaluations,
        "bytes_sent": finished.bytes_sent,
        "fraction_clipped": finished.fraction_clipped,
        "missed": {str(silo): list(rounds) for silo, rounds in finished.missed.items()},
        "wall_seconds": finished.wall_seconds,
        "engine": engine,
        "scenario": point.cell.canonical(),
    }
