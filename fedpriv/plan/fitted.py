"""Fit noise to what a cell publishes, before it is planned or sent: names and numbers take the place of "auto".

Only public numbers go in: the row's optimizer, its clips up to a factor, the participation.  A program that builds
a plan from the result, a silo's guard among them, finds numbers there, checks and certifies them, and never fits.

What a run publishes is a linear map of its released rows, read off the row's own optimizer: there is no second
formula to keep in step with it.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.loss.estimators import Round
from fedpriv.noise.fitting.adjoint import pulled_back
from fedpriv.noise.fitting.auto import fitted as fit
from fedpriv.noise.fitting.cost import Response, most_queries, noise_cost_of, rows_response, spaced
from fedpriv.noise.workload import Floats, Workload
from fedpriv.papers.base import Algorithm, NoiseSettings, Optimizer, Problem
from fedpriv.participation.orders import Participation
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import AlgorithmSection, Cell

_NO_RADIUS = 1e100
"""So large that no projection bites; finite, because the gradient of a projection on an infinite ball is nan."""

_LINEAR_FOR = 4
_ROUNDING = 1e-9


def response_of(
    optimizer: Optimizer, round_of: Callable[[int], Round], rounds: int, queries: int | None = None
) -> Response:
    """Weights in the output after `rounds` rounds, and in evenly spaced points of x_2 … x_T and the output.

    `round_of(t)` is the estimator's public record of round t.  `queries` bounds how many points are looked at;
    `most_queries` if left out.  InputError for an optimizer that is not linear in what is released.
    """
    probe = _Published(optimizer, round_of, (False, True))
    _check_linear(probe, rounds)
    points = rounds
    if rounds > 1:
        (asked, _), (_, output) = _probed(probe, 2, 1.0).tolist()
        points -= asked == output  # anytime SGD publishes x_T, which was asked at: it is one point, not two
    chosen = spaced(points, most_queries(rounds) if queries is None else queries)
    weights = np.zeros((len(chosen) + 1, rounds))
    weights[np.arange(len(chosen)), chosen] = 1.0
    weights[-1, -1] = 1.0
    outputs = (*(chosen == rounds - 1).tolist(), True)  # not the query that a further round would ask at
    pulled = pulled_back(_Published(optimizer, round_of, outputs), weights)
    return Response(pulled[:-1], pulled[-1])


class _Published:
    """An optimizer as a stream: the answer of round t is the query of round t + 1, or in some rows the output."""

    def __init__(self, optimizer: Any, round_of: Callable[[int], Round], outputs: tuple[bool, ...]) -> None:
        fields = {field.name for field in dataclasses.fields(optimizer)}
        self._optimizer = replace(optimizer, radius=_NO_RADIUS) if "radius" in fields else optimizer
        self._round_of = round_of
        self._outputs = torch.tensor(outputs).unsqueeze(-1)
        self._kind = type(self._optimizer.start(torch.ones((1, 1), dtype=torch.float64)))

    def start(self, rows: int) -> tuple[Tensor, ...]:
        # from anywhere but 0, where a norm has no gradient
        state: tuple[Tensor, ...] = self._optimizer.start(torch.ones((rows, 1), dtype=torch.float64))
        return state

    def advance(self, state: tuple[Tensor, ...], t: int, given: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        after: Any = self._optimizer.update(self._kind(*state), given, self._round_of(t))
        return after, torch.where(self._outputs, self._optimizer.output(after), self._optimizer.query(after))


@torch.no_grad()
def _probed(stream: _Published, rounds: int, factor: float) -> Floats:
    """Query and output after each of the first rounds, for inputs that are `factor` times fixed ones; (t, 2)."""
    state, answers = stream.start(2), []
    for t in range(1, rounds + 1):
        given = torch.full((2, 1), factor * (-1.0) ** t / t, dtype=torch.float64)
        state, answer = stream.advance(state, t, given)
        answers.append(answer[:, 0].numpy())
    return np.array(answers)


def _check_linear(stream: _Published, rounds: int) -> None:
    """Whether twice the input moves every point twice as far, over the first rounds."""
    still, once, twice = (_probed(stream, min(rounds, _LINEAR_FOR), factor) for factor in (0.0, 1.0, 2.0))
    if not np.allclose(twice - still, 2.0 * (once - still), rtol=_ROUNDING, atol=_ROUNDING):
        raise InputError("the row's optimizer is not linear in what is released: noise cannot be fitted to it")


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
        cost = noise_cost_of(*response_and_workload(cell.algorithm.row, settings, cell.schedule))
        best = fit(cost, settings.mechanism, settings, scalable=settings.late_clip == "same")
    found = {"mechanism": best.mechanism.name, **best.mechanism.options()}
    return Fitted(asked, found, best.name, best.vectors, time.perf_counter() - started)


def _with_numbers(cell: Cell, fit: Fitted) -> Cell:
    section = cell.algorithm
    given = {key: value for key, value in section.model_dump().items() if key not in _REPLACED}
    algorithm = AlgorithmSection.model_validate(given | dict(fit.found))
    _ = algorithm.settings
    return cell.model_copy(update={"algorithm": algorithm})
