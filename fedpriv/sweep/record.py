"""A cell of results.json: what was asked for, measured, spent and claimed, as data."""

import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Literal

from fedpriv.accounting.gdp import epsilon_of
from fedpriv.accounting.guarantees import GaussianDP, Guarantee
from fedpriv.privacy.claim import EXACT, PrivacyClaim
from fedpriv.privacy.elsewhere import with_other_step
from fedpriv.privacy.evaluations import evaluation_data
from fedpriv.privacy.ledger import ReleaseStream, as_data, claim_of
from fedpriv.privacy.several import bounds_of_several
from fedpriv.privacy.unit import RECORD
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
    guarantee = None if claim is None else claim.guarantee
    statement: dict[str, Any] = {
        "guarantee": "none" if guarantee is None else guarantee.kind,
        "trust": cell.algorithm.trust,
        "relation": cell.privacy.relation if claim is None else claim.relation,
        "unit": (cell.privacy.protected if claim is None else claim.unit).words,
        "participation": cell.schedule.title,
        "noise": "none" if claim is None else noise,
        "holds": None if claim is None else EXACT if claim.exact else "in real arithmetic",
        "delta": delta,
        "releases": [as_data(stream) for stream in releases],
        "several_records": _several(claim, delta),
    }
    figures: dict[str, float | None] = dict.fromkeys(("mu", "rho", "zcdp", "epsilon", "epsilon_paper"))
    match guarantee:
        case GaussianDP(mu):
            pair = guarantee.epsilon_delta(delta)
            figures = {
                "mu": mu,
                "rho": mu if cell.algorithm.row.name_of_mu == "rho" else None,
                "zcdp": guarantee.zcdp,
                "epsilon": pair.exact,
                "epsilon_paper": pair.paper,
            }
        case None:
            pass
        case _:  # a target in mu was met as the (ε, δ) that it gives
            figures["epsilon"] = guarantee.epsilon_of(delta)
    return {**statement, "target": _target(cell), **figures}


def _several(claim: PrivacyClaim[Guarantee] | None, delta: float) -> dict[str, dict[str, float | None]] | None:
    """What k records of one person cost in a run that protects records; None for any other."""
    if claim is None or claim.unit.name != RECORD.name:
        return None
    return bounds_of_several(claim.guarantee, delta)


def _target(cell: Cell) -> str:
    """What the noise was calibrated to, and from which key of the scenario it follows."""
    asked, target = cell.privacy, cell.privacy.target
    if target is None:
        return "none"
    if not cell.schedule.secret:
        return f"mu = {target:.6g}"
    given = "" if asked.epsilon is not None else f", what mu = {target:.6g} gives"
    return f"epsilon = {epsilon_of(target, asked.delta):.6g} at delta = {asked.delta:g}{given}"


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
