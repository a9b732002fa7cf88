"""Noise fitted to what a cell publishes, before it is planned or sent: names and numbers take the place of "auto".

Only public numbers go in: the row's optimizer, its clips up to a factor, the participation.  Whoever builds a plan
from the result, a silo's guard among them, finds numbers there, checks and certifies them, and never fits.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedpriv.algorithms import Algorithm, Problem
from fedpriv.algorithms.base import NoiseSettings
from fedpriv.errors import InputError
from fedpriv.fitting import Response, objective_of, rows_response
from fedpriv.fitting import fitted as fit
from fedpriv.fitting.published import response_of
from fedpriv.mechanisms import Workload
from fedpriv.participation.base import Participation
from fedpriv.scenario import Cell, Scenario
from fedpriv.scenario.schema import AlgorithmSection

_REPLACED = ("mechanism", "theta", "phi", "scale", "max_vectors", "bands", "noise_sizes")


@dataclass(frozen=True)
class Fitted:
    """What a fit found."""

    asked: str
    """Everything that the fit depends on, as text."""
    found: Mapping[str, Any]
    """The keys of [algorithm] that take the place of those asked for: `mechanism`, and its numbers."""
    label: str
    """The mechanism as a person calls it."""
    vectors: int
    """What it keeps from round to round."""
    seconds: float
    """How long the fit took."""

    def as_data(self) -> dict[str, Any]:
        """Plain data, from which `Fitted(**data)` makes it again."""
        return {**vars(self), "found": dict(self.found)}

    @property
    def line(self) -> str:
        """What was found, as a person reads it."""
        vectors = f"{self.vectors} vector{'' if self.vectors == 1 else 's'}"
        return f"noise fitted in {self.seconds:.1f} s: {self.label}, {vectors} of state"


def fitted_scenario(
    scenario: Scenario, known: Mapping[str, Fitted], told: Callable[[Fitted], None] = lambda _: None
) -> tuple[Scenario, dict[str, Fitted]]:
    """The scenario with numbers in every cell, and its fits by what they were asked for.

    Those that are `known`, from a run that is resumed, are taken as they are; the others are `told` as they come.
    """
    fits = dict[str, Fitted]()
    points = []
    for point in scenario.points:
        cell = point.cell
        if (asked := _asked(cell)) is not None:
            if asked not in fits:
                fits[asked] = known.get(asked) or _fit(asked, cell)
                if asked not in known:
                    told(fits[asked])
            cell = _with_numbers(cell, fits[asked])
        points.append(replace(point, cell=cell))
    return replace(scenario, points=points), fits


def fitted(cell: Cell) -> Cell:
    """The cell with numbers in the place of what is to be fitted; InputError where nothing can be."""
    asked = _asked(cell)
    return cell if asked is None else _with_numbers(cell, _fit(asked, cell))


def response_and_workload(
    row: Algorithm, settings: NoiseSettings, schedule: Participation
) -> tuple[Response, Workload]:
    """What a row's published points make of its released sums, and those sums, in units of its clip and steps.

    InputError for a row that nothing can be fitted to, and for rounds that nobody may know.
    """
    if row.published is None:
        raise InputError(f"algorithm.mechanism: noise cannot be fitted to what {row.name} publishes; name another")
    if schedule.secret:
        raise InputError(
            f'algorithm.mechanism: with federation.sampling = "{schedule.name}" nobody may know in which rounds a '
            "record takes part, and noise is fitted to such rounds; name another"
        )
    units = settings.in_units()
    problem = Problem(dimension=1, lipschitz=1.0, smoothness=1.0, convex=True, batch=1, schedule=schedule)
    estimator, rounds = row.estimator(units, problem), schedule.rounds
    clips = np.array([float(estimator.round(t).clip) for t in range(1, rounds + 1)])
    workload = Workload(schedule, estimator.decay, clips, estimator.period)
    if row.published == "rows":
        return rows_response(rounds), workload
    return response_of(row.optimizer(units, problem, 1.0), estimator.round, rounds), workload


def _asked(cell: Cell) -> str | None:
    settings = cell.algorithm.settings
    if not (isinstance(settings, NoiseSettings) and settings.unfitted):
        return None
    plain = settings.in_units().model_dump(mode="json", exclude_defaults=True)
    wanted = {"row": cell.algorithm.name, "mechanism": settings.mechanism, "late_clip": settings.late_clip}
    return json.dumps({**plain, **wanted, "participation": cell.schedule.as_data()}, sort_keys=True)


def _fit(asked: str, cell: Cell) -> Fitted:
    settings, started = cell.algorithm.settings, time.perf_counter()
    assert isinstance(settings, NoiseSettings)
    with torch.inference_mode(False):  # in which Flower's apps ask; a response is read off by a backward pass
        objective = objective_of(*response_and_workload(cell.algorithm.row, settings, cell.schedule))
        best = fit(objective, settings.mechanism, settings, scalable=settings.late_clip == "same")
    found = {"mechanism": best.mechanism.name, **best.mechanism.options()}
    return Fitted(asked, found, best.name, best.vectors, time.perf_counter() - started)


def _with_numbers(cell: Cell, fit: Fitted) -> Cell:
    section = cell.algorithm
    given = {key: value for key, value in section.model_dump().items() if key not in _REPLACED}
    algorithm = AlgorithmSection.model_validate(given | dict(fit.found))
    _ = algorithm.settings
    return cell.model_copy(update={"algorithm": algorithm})
