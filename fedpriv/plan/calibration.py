"""Calibration of a run before round 1: noise, lattice and grid for its privacy target.

Releases are integers on a lattice (`exact_plan_of`).  Simulations in floating point have noise of
`float_noise_of`, which protects nobody, and a `Grid` on which masked messages can be added.  A guarantee in real
numbers needs clips, noise and sums that floating point holds: the checks at the beginning refuse others.

Fit noise to what a cell publishes, before it is planned or sent: names and numbers take the place of "auto".

Only public numbers go in: the row's optimizer, its clips up to a factor, the participation.  A program that builds
a plan from the result, a silo's guard among them, finds numbers there, checks and certifies them, and never fits.

What a run publishes is a linear map of its released rows, read off the row's own optimizer: there is no second
formula to keep in step with it.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.accounting.gaussian import APART
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import SERVER
from fedpriv.loss.estimators import Estimator, Round, make_rounds
from fedpriv.loss.objective import Objective
from fedpriv.noise.fitting.auto import fit_named as fit
from fedpriv.noise.fitting.cost import (
    NoiseResponse,
    apply_adjoint,
    make_noise_cost,
    max_queries,
    rows_response,
    spaced_indices,
)
from fedpriv.noise.integers.plan import ExactPlan, ExactRunInputs
from fedpriv.noise.integers.plan import fit_lattice as fitted_lattice
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.registry import integer_form
from fedpriv.noise.series import Floats, Workload
from fedpriv.noise.trust import Noise, NoiseSource, Trust
from fedpriv.papers.base import Algorithm, NoiseSettings, Optimizer, Problem
from fedpriv.participation.orders import Participation
from fedpriv.plan.sums import RunningSums
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import AlgorithmSection, Cell

_UNBOUNDED_RADIUS = 1e100
"""So large that no projection bites; finite, because the gradient of a projection on an infinite ball is nan."""

_LINEARITY_ROUNDS = 4
_ROUNDING = 1e-9


def compute_response(
    optimizer: Optimizer, make_round: Callable[[int], Round], rounds: int, max_points: int | None = None
) -> NoiseResponse:
    """Weights in the output after `rounds` rounds, and in evenly spaced points of x_2 … x_T and the output.

    `round_of(t)` is the estimator's public record of round t.  `queries` bounds how many points are looked at;
    `most_queries` if left out.  InputError for an optimizer that is not linear in what is released.
    """
    probe = _OptimizerStream(optimizer, make_round, (False, True))
    _check_linear(probe, rounds)
    points = rounds
    if rounds > 1:
        (asked, _), (_, output) = _probe_stream(probe, 2, 1.0).tolist()
        points -= asked == output  # anytime SGD publishes x_T, which was asked at: it is one point, not two
    chosen = spaced_indices(points, max_queries(rounds) if max_points is None else max_points)
    weights = np.zeros((len(chosen) + 1, rounds))
    weights[np.arange(len(chosen)), chosen] = 1.0
    weights[-1, -1] = 1.0
    # The output stands in for the query that a further round would ask at.
    pulled = apply_adjoint(
        _OptimizerStream(optimizer, make_round, (*(chosen == rounds - 1).tolist(), True)), weights
    )
    return NoiseResponse(pulled[:-1], pulled[-1])


class _OptimizerStream:
    """An optimizer as a stream: the answer of round t is the query of round t + 1, or in some rows the output."""

    def __init__(self, optimizer: Any, round_of: Callable[[int], Round], outputs: tuple[bool, ...]) -> None:
        bounded = any(field.name == "radius" for field in dataclasses.fields(optimizer))
        self._optimizer = replace(optimizer, radius=_UNBOUNDED_RADIUS) if bounded else optimizer
        self._make_round = round_of
        self._is_output = torch.tensor(outputs).unsqueeze(-1)
        self._state_type = type(self._optimizer.start(torch.ones((1, 1), dtype=torch.float64)))

    def start(self, rows: int) -> tuple[Tensor, ...]:
        # from anywhere but 0, where a norm has no gradient
        state: tuple[Tensor, ...] = self._optimizer.start(torch.ones((rows, 1), dtype=torch.float64))
        return state

    def advance(self, state: tuple[Tensor, ...], t: int, given: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        after: Any = self._optimizer.update(self._state_type(*state), given, self._make_round(t))
        return after, torch.where(self._is_output, self._optimizer.output(after), self._optimizer.query(after))


@torch.no_grad()
def _probe_stream(stream: _OptimizerStream, rounds: int, factor: float) -> Floats:
    """Query and output after each of the first rounds, for inputs that are `factor` times fixed ones; (t, 2)."""
    state, answers = stream.start(2), []
    for t in range(1, rounds + 1):
        state, answer = stream.advance(state, t, torch.full((2, 1), factor * (-1.0) ** t / t, dtype=torch.float64))
        answers.append(answer[:, 0].numpy())
    return np.array(answers)


def _check_linear(stream: _OptimizerStream, rounds: int) -> None:
    """Whether twice the input moves every point twice as far, over the first rounds."""
    still, once, twice = (
        _probe_stream(stream, min(rounds, _LINEARITY_ROUNDS), factor) for factor in (0.0, 1.0, 2.0)
    )
    if not np.allclose(twice - still, 2.0 * (once - still), rtol=_ROUNDING, atol=_ROUNDING):
        raise InputError("the row's optimizer is not linear in what is released: noise cannot be fitted to it")


_FITTED_KEYS = ("mechanism", "theta", "phi", "scale", "max_vectors", "bands", "noise_sizes")


@dataclass(frozen=True)
class FittedNoise:
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

    def to_data(self) -> dict[str, Any]:
        """Plain data, from which `Fitted(**data)` makes it again."""
        return {**vars(self), "found": dict(self.found)}

    @property
    def summary(self) -> str:
        """What was found, as a person reads it."""
        vectors = f"{self.vectors} vector{'' if self.vectors == 1 else 's'}"
        return f"noise fitted in {self.seconds:.1f} s: {self.label}, {vectors} of state"


def fit_scenario_noise(
    scenario: Scenario,
    cached_fits: Mapping[str, FittedNoise],
    on_fit: Callable[[FittedNoise], None] = lambda _: None,
) -> tuple[Scenario, dict[str, FittedNoise]]:
    """The scenario with numbers in every cell, and its fits by what they were asked for.

    Those that are `known`, from a run that is resumed, are taken as they are; the others are `told` as they come.
    """
    fits = dict[str, FittedNoise]()
    points = []
    for point in scenario.points:
        cell = point.cell
        if (asked := _fit_request(cell)) is not None:
            if asked not in fits:
                fits[asked] = cached_fits.get(asked) or _fit_noise(asked, cell)
                if asked not in cached_fits:
                    on_fit(fits[asked])
            cell = _apply_fit(cell, fits[asked])
        points.append(replace(point, cell=cell))
    return replace(scenario, points=points), fits


def fit_cell_noise(cell: Cell) -> Cell:
    """The cell with numbers in the place of what is to be fitted; InputError where nothing can be."""
    asked = _fit_request(cell)
    return cell if asked is None else _apply_fit(cell, _fit_noise(asked, cell))


def response_and_workload(
    row: Algorithm, settings: NoiseSettings, schedule: Participation
) -> tuple[NoiseResponse, Workload]:
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
    units = settings.with_unit_scale()
    problem = Problem(dimension=1, lipschitz=1.0, smoothness=1.0, convex=True, batch=1, schedule=schedule)
    estimator, rounds = row.estimator(units, problem), schedule.rounds
    clips = np.array([float(estimator.round(t).clip) for t in range(1, rounds + 1)])
    workload = Workload(schedule, estimator.decay, clips, estimator.period)
    return (
        (rows_response(rounds), workload)
        if row.published == "rows"
        else (compute_response(row.optimizer(units, problem, 1.0), estimator.round, rounds), workload)
    )


def _fit_request(cell: Cell) -> str | None:
    settings = cell.algorithm.settings
    if not (isinstance(settings, NoiseSettings) and settings.needs_fit):
        return None
    plain = settings.with_unit_scale().model_dump(mode="json", exclude_defaults=True)
    wanted = {"row": cell.algorithm.name, "mechanism": settings.mechanism, "late_clip": settings.late_clip}
    return json.dumps({**plain, **wanted, "participation": cell.schedule.to_data()}, sort_keys=True)


def _fit_noise(asked: str, cell: Cell) -> FittedNoise:
    settings, started = cell.algorithm.settings, time.perf_counter()
    assert isinstance(settings, NoiseSettings)
    with torch.inference_mode(False):  # in which Flower's apps ask; a response is read off by a backward pass
        cost = make_noise_cost(*response_and_workload(cell.algorithm.row, settings, cell.schedule))
        best = fit(cost, settings.mechanism, settings, scalable=settings.late_clip == "same")
    return FittedNoise(
        asked,
        {"mechanism": best.mechanism.name, **best.mechanism.options()},
        best.name,
        best.vector_count,
        time.perf_counter() - started,
    )


def _apply_fit(cell: Cell, fit: FittedNoise) -> Cell:
    given = {key: value for key, value in cell.algorithm.model_dump().items() if key not in _FITTED_KEYS}
    algorithm = AlgorithmSection.model_validate(given | dict(fit.found))
    _ = algorithm.settings
    return cell.model_copy(update={"algorithm": algorithm})


MIN_CLIP, MAX_CLIP = 2.0**-40, 2.0**40
"""`fedpriv.loss.clipping` holds between these."""
_MIN_RECORD_CLIP = 2.0**-70  # of a record: float32 ends at 2^-126, and factors go down by a norm of 2^50
_MIN_STD, _MAX_STD = 2.0**-100, 2.0**100
MAX_DEVIATIONS = 2.0**30
"""The largest sum, in standard deviations of its noise: then 22 digits of float64 lie below one of them."""


def check_clips(rounds: Iterable[Round], max_batch_size: int, is_private: bool) -> None:
    """InputError for a clip that increments cannot be held to; without noise it may be any large number.

    `largest_batch` is the most records of one silo in a round.
    """
    for current in rounds:
        for clip in current.clips:
            if not MIN_CLIP <= clip <= (MAX_CLIP if is_private else sys.float_info.max):
                raise InputError(
                    f"algorithm: increments of round {current.t} would be clipped to norm {clip:.3g}; clips "
                    f"between {MIN_CLIP:.2g} and {MAX_CLIP:.2g} hold in floating point"
                )
            if clip / max_batch_size < _MIN_RECORD_CLIP:
                raise InputError(
                    f"algorithm: a clip of {clip:.3g} over a batch of {max_batch_size} records is too small for "
                    "floating point; use a larger clip or a smaller batch"
                )


def check_noise(noise: Noise) -> None:
    """InputError for noise that floating point cannot draw or add."""
    for source in noise.sources:
        std = float(source.std)
        if not _MIN_STD <= std <= _MAX_STD:
            raise InputError(
                f"privacy: noise of standard deviation {std:.3g} is nothing that floating point can add; between "
                f"{_MIN_STD:.2g} and {_MAX_STD:.2g} it can"
            )


def check_sums(noise: Noise, max_sum: float, fresh_std: float) -> None:
    """InputError for noise that would be lost in the rounding of what it is added to.

    `largest_sum` bounds the norm of that; `fresh_std` is how much of the noise is fresh in every release.
    """
    for source in noise.sources:
        fresh = float(source.std) * fresh_std
        if not max_sum <= MAX_DEVIATIONS * fresh:
            raise InputError(
                f"privacy: sums of up to {max_sum:.3g} would hide noise of standard deviation {fresh:.3g} in "
                f"their rounding; at most {MAX_DEVIATIONS:.2g} standard deviations, so ask for more privacy"
            )


MAX_SLACK = 2.0**-60
"""Of a claim, in total variation: what reports call it."""
_MIN_CLIP_UNITS = 2.0**22
"""Units in a clip for each √d at least, where records are closer than 2 clips: `plan.ALLOWANCE` rests on it."""
_MU_MARGIN = 1.0 - 2.0**-38
"""Less than what rounding to the safe side adds to μ: what is recorded stays within what was asked for."""


def make_exact_plan(
    cell: Cell,
    objective: Objective,
    estimator: Estimator,
    mechanism: Mechanism,
    workload: Workload,
    increment_diameter: float = APART,
) -> ExactPlan:
    """InputError, naming the algorithm and the reason, for a run whose releases cannot be made of integers.

    Guarantee: the recorded μ is not above the cell's target, and the slack not above 2^-60.
    """
    name, schedule, trust = cell.algorithm.row.name, cell.schedule, cell.algorithm.trust_setting
    targets = cell.target_mus
    assert targets is not None  # of a run without noise nothing is exact
    sums = RunningSums(mechanism, workload, cell.privacy.relation, exact=True)
    known = RunningSums(mechanism, replace(workload, schedule=schedule.public_order), sums.relation)
    share = 1.0 if schedule.public_order is schedule else known.sensitivity() / schedule.distance(sums)
    unit = cell.privacy.protected_unit

    def of_one_silo(target: float) -> float:
        """What a unit's records in one silo may be charged, less what rounding adds."""
        mu = schedule.calibrated_mu(sums, target, cell.privacy.delta) * share
        return (unit.mu_per_silo(mu) if trust.publishes_sums(0) else mu / unit.max_silos) * _MU_MARGIN

    sizes, rounds = cell.batch_sizes, range(1, schedule.rounds + 1)
    together = sum(sizes) if trust.publishes_sums(SERVER) else max(sizes)
    owners = trust.noise_sources_per_release(len(sizes))
    try:
        form = integer_form(mechanism, known.workload)
        if (estimator.round(1).split is not None) != form.has_parts:
            raise InputError(f"{mechanism.name} noise on increments that are clipped in parts")
        exact = fitted_lattice(
            ExactRunInputs(
                form,
                tuple(together * schedule.max_batches(t) for t in rounds),
                objective.dimension,
                cell.privacy.relation,
                of_one_silo(min(targets)),
                party_count=owners,
                word_bits=cell.run.word if owners > 1 else 64,
                increment_diameter=increment_diameter,
            )
        )
        if cell.privacy.shares:
            exact = exact.with_budgets(list(map(of_one_silo, targets)))
    except InputError as error:
        raise InputError(f"{name}: what it releases cannot be made of integers: {error}") from None
    if increment_diameter < APART and math.sqrt(objective.dimension) * _MIN_CLIP_UNITS > min(exact.norms(1)):
        raise InputError(
            f"{name}: {objective.dimension} values of {min(exact.norms(1))} units are too coarse; ask for fewer "
            "cells, or take a longer word"
        )
    if exact.claim.slack > MAX_SLACK / (2 if cell.budget.other_mu else 1):  # the other step has its own
        raise InputError(f"{name}: {schedule.rounds} rounds of {objective.dimension} values are too many")
    return exact


def make_exact_noise(
    exact: ExactPlan, trust: Trust, batch_sizes: tuple[int, ...], weights: tuple[float, ...]
) -> Noise:
    """Every owner's noise in the units of the model; that in the mean follows from it."""
    unit = exact.lattice.unit
    if trust.adds_noise(SERVER):
        return Noise((NoiseSource(SERVER, unit * exact.claim.sigma / sum(batch_sizes), 1.0),))
    return Noise(
        tuple(
            NoiseSource(silo, unit * exact.party_claim(silo).sigma / size, weight)
            for silo, (size, weight) in enumerate(zip(batch_sizes, weights, strict=True))
        )
    )


EncodedMessage = NDArray[np.uint64]

_MAX_ENCODED = 2.0**62
"""Of one encoded value, in units; beyond what plans allow and noise can reach."""
_MAX_GRID_UNITS = 2.0**48
"""The most units that records can contribute: then a silo's float64 holds digits of its noise below the grid."""


@dataclass(frozen=True)
class Grid:
    """Multiples of `unit`, a power of 2, as integers modulo 2^64.

    Sums are right as long as they lie within ±2^63 units.  A sum beyond would wrap: that would make the model
    wrong, not the noise smaller, since the residue is a function of the sum.
    """

    unit: float

    def encode(self, values: NDArray[np.float64]) -> EncodedMessage:
        """`values` (d,) rounded to the grid, (d,); RunError for values that are not finite or absurdly large."""
        scaled = np.floor(values / self.unit + 0.5)  # halves go up: rounding and whole shifts must commute
        if not np.all(np.abs(scaled) < _MAX_ENCODED):
            raise RunError("the release has values that are not finite, or outside of what can be added")
        return scaled.astype(np.int64).view(np.uint64)

    def decode_sum(self, messages: Sequence[EncodedMessage]) -> NDArray[np.float64]:
        """The sum (d,) of all silos' encoded messages, each (d,)."""
        total: EncodedMessage = np.zeros_like(messages[0])
        for message in messages:
            total += message  # unsigned: modulo 2^64
        return total.view(np.int64).astype(np.float64) * self.unit


def make_grid(silo_std: float, digits: int, max_sum: float) -> Grid:
    """The grid for messages with noise of standard deviation `share` > 0 in every silo's part of the mean.

    Half of the `digits` binary digits in which noise is drawn lie above the unit and half below it: the rounding
    adds less than 2^-24 to the variance.  `largest` bounds every coordinate of the sum of all silos' vectors
    without noise; InputError where that does not fit.
    """
    unit = 2.0 ** math.floor(math.log2(silo_std) - digits // 2)
    if max_sum > unit * _MAX_GRID_UNITS:
        raise InputError(
            f"secure aggregation: sums of up to {max_sum:.3g}, with noise of {silo_std:.3g} in each silo, do "
            'not fit on a grid; use run.dtype = "float32", fewer rounds or more noise'
        )
    return Grid(unit)


def make_message_grid(cell: Cell, schedule: Participation, estimator: Estimator, noise: Noise) -> Grid:
    """The lattice for sums of masked messages; InputError for sums that do not fit."""
    share = min(source.weight * float(source.std) for source in noise.sources)
    return make_grid(share, np.finfo(cell.run.dtype).nmant + 1, max_running_sum(schedule, estimator))


def make_workload(estimator: Estimator, schedule: Participation) -> Workload:
    """What the running sums of an estimator are made of, for a mean over one batch."""
    return Workload(schedule, estimator.decay, np.array(batch_clips(estimator, schedule)), estimator.period)


def batch_clips(estimator: Estimator, schedule: Participation) -> tuple[float, ...]:
    """The norm bound of every round's increments, for a mean over one batch: where a round reads k, 1/k of it."""
    return tuple(
        float(current.clip) / max(1, schedule.expected_batches(current.t))
        for current in make_rounds(estimator, schedule.rounds)
    )


def max_running_sum(schedule: Participation, estimator: Estimator) -> float:
    """A bound on the norm of the silos' mean running sum in every round, whatever the records are."""
    largest = total = 0.0
    for current in make_rounds(estimator, schedule.rounds):
        # a round that reads k batches divides by k
        most = schedule.max_batches(current.t) / max(1, schedule.expected_batches(current.t))
        total = float(current.decay) * total + most * current.max_contribution
        largest = max(largest, total)
    return largest


def calibrate_float_noise(
    cell: Cell,
    schedule: Participation,
    workload: Workload,
    mechanism: Mechanism,
    weights: tuple[float, ...],
    increment_diameter: float = APART,
) -> Noise:
    """The noise of every owner that reaches the cell's target; none if it has none.

    Guarantee: a public order gets its μ exactly; sampling gets the (ε, δ) of that μ at the cell's δ.  InputError
    for sampling that cannot be accounted for.
    """
    target, relation, delta = cell.target_mu, cell.privacy.relation, cell.privacy.delta
    if target is None:
        return Noise()
    sums = RunningSums(mechanism, workload, relation)
    distance = schedule.distance(sums)
    mus = None
    if cell.privacy.shares:
        mus = [schedule.calibrated_mu(sums, each, delta) for each in cell.target_mus or ()]
    return cell.algorithm.trust_setting.calibrate_noise(
        distance,
        cell.batch_sizes,
        weights,
        relation,
        schedule.calibrated_mu(sums, target, delta),
        cell.privacy.protected_unit,
        increment_diameter,
        mus,
    )
