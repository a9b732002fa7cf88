"""The scenario that an app puts to guards: public, fixed before round 1, and the same at every silo."""

import json
from dataclasses import dataclass
from pathlib import Path

from fedpriv.algorithms.baselines import DP_SGD, SgdSettings
from fedpriv.errors import InputError
from fedpriv.privacy.trust import UNTRUSTED
from fedpriv.running.evaluation import evaluations_of
from fedpriv.scenario import Cell, load_scenario

_ELSEWHERE = {
    "momentum": "the server's strategy can have it (FedAvgM, FedAdam)",
    "radius": "no projection is done here",
    "output": "the server's strategy says which model is published",
}
"""Keys of the row that are about what a server does, and who does it here."""


@dataclass(frozen=True)
class Evaluated:
    """What an app needs to have guards evaluate: their answer is the noisy mean of bounded scores."""

    count: int
    """Evaluations of a whole run."""
    records: tuple[int, ...]
    """Test records of each silo, by the silo's number: public."""
    loss_bound: float
    classes: bool
    """Whether there is an accuracy; a regression has none."""


@dataclass(frozen=True)
class Terms:
    """What an app needs of its scenario: a release is the noisy mean of a batch's clipped gradients."""

    cell_json: str
    """The scenario as guards get it."""
    step: float
    """η of x - η · release."""
    dtype: str
    """Of queries: "float32" or "float64"."""
    rounds: int
    """Releases of a whole run."""
    batches: tuple[int, ...]
    """Records of each silo in one release, by the silo's number: public."""
    evaluation: Evaluated | None = None
    """None where the scenario has no [evaluation]."""


def read_terms(path: Path) -> Terms:
    """Read an app's scenario; InputError in one line for one whose releases are not steps of an app's own.

    Guards do not rely on any of this: what they allow is their policy's.
    """
    points = load_scenario(path).points
    if len(points) != 1:
        raise InputError(f"{path}: sweep: an app asks for one run, and this stands for {len(points)}")
    return terms_of(points[0].cell, str(path))


def terms_of(cell: Cell, source: str) -> Terms:
    """The terms of a cell; `source` names it in messages."""
    settings = cell.algorithm.settings
    if not isinstance(settings, SgdSettings):
        raise InputError(
            f"{source}: algorithm.name = {cell.algorithm.name!r}: an app's steps are those of {DP_SGD.name!r}; "
            "other rows need their own server (fedpriv run)"
        )
    for key, whose in _ELSEWHERE.items():
        if getattr(settings, key) != SgdSettings.model_fields[key].default:
            raise InputError(f"{source}: algorithm.{key} = {getattr(settings, key)!r}: leave it out; {whose}")
    if cell.algorithm.trust_setting is not UNTRUSTED:
        raise InputError(
            f"{source}: algorithm.trust = {cell.algorithm.trust!r}: a server that is not fedpriv's adds no noise; "
            f"use {UNTRUSTED.name!r}"
        )
    return Terms(
        json.dumps(cell.canonical()),
        settings.step,
        cell.run.dtype,
        cell.schedule.rounds,
        cell.batch_sizes,
        _evaluated(cell),
    )


def _evaluated(cell: Cell) -> Evaluated | None:
    if (asked := cell.evaluation) is None:
        return None
    records = asked.of_silos(cell.federation.silos)
    return Evaluated(evaluations_of(cell), records, asked.loss_bound, not cell.model.regression)
