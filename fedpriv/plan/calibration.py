"""Calibration of a run before round 1: noise, lattice and grid for its privacy target.

A cell is one run of a scenario with all its settings, and its row the algorithm that it names: estimator
(increments and running sums), mechanism (noise) and optimizer.  An increment is a record's clipped contribution to
a round, and a release a running sum of increments with its noise.  Privacy targets are μ of Gaussian DP.

Releases that protect somebody are integers on a lattice, the multiples of a unit (`make_exact_plan`).  Simulations
may have noise in floating point (`calibrate_float_noise`), which protects nobody.

A cell may leave its noise to be fitted: a fit then chooses the mechanism's name and numbers (`fit_cell_noise`) for
little noise in a target, from public numbers alone.  The target is points that the row's optimizer publishes, or
the released sums themselves if the row says so, or if no such point depends on a release.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
from fedpriv.noise.series import Floats, Workload, is_restart
from fedpriv.noise.trust import Noise, NoiseSource, Trust
from fedpriv.papers.base import Algorithm, NoiseSettings, Optimizer, Problem
from fedpriv.participation.orders import Participation
from fedpriv.plan.sums import RunningSums
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import AlgorithmSection, Cell

_UNBOUNDED_RADIUS = 1e100
"""Finite radius of a ball (for a gradient of radius / norm) that contains all points of the probes."""

_LINEARITY_ROUNDS = 4
"""Most rounds over which an optimizer's linearity is checked."""
_ROUNDING = 1e-9
"""Tolerance of the check that an optimizer is linear, relative and absolute."""


def compute_response(
    optimizer: Optimizer, make_round: Callable[[int], Round], rounds: int, max_points: int | None = None
) -> NoiseResponse:
    """Compute the weights of released sums in the points that an optimizer publishes.

    An optimizer here is linear in the releases, so that a point has the noise of the releases times these weights.
    The weights are the gradients of the points with respect to the releases, in one coordinate.  The points are
    the output after T rounds, and some evenly spaced ones among the queries x_2, …, x_T and the output.

    Args:
        optimizer: Optimizer of the row.
        make_round: Function of t that returns the estimator's public record of round t.
        rounds: T, the number of rounds.
        max_points: Most of the evenly spaced points, or None for `max_queries(rounds)`.

    Returns:
        Weights of the evenly spaced points, (points, T), and of the output, (T,).

    Raises:
        InputError: Over the first 4 rounds the optimizer turns out not to be linear in the releases.
    """
    probe = _OptimizerStream(optimizer, make_round, (False, True))
    _check_linear(probe, rounds)
    point_count = rounds
    if rounds > 1:
        (query, _), (_, output) = _probe_stream(probe, 2, 1.0).tolist()
        # The query of round 2, and the output after round 2.  If they are equal, as with Anytime SGD, whose output
        # x_T is also its last query, they are one point, not two.
        point_count -= query == output
    # Index i is the query of round i + 2, or the output if i = T - 1.  A row of `weights` picks one.
    point_indices = spaced_indices(point_count, max_queries(rounds) if max_points is None else max_points)
    weights = np.zeros((len(point_indices) + 1, rounds))
    weights[np.arange(len(point_indices)), point_indices] = 1.0
    weights[-1, -1] = 1.0
    # The output takes the place of the query of a further round.
    responses = apply_adjoint(
        _OptimizerStream(optimizer, make_round, (*(point_indices == rounds - 1).tolist(), True)), weights
    )
    return NoiseResponse(responses[:-1], responses[-1])


class _OptimizerStream:
    """Optimizer as a stream, from the release of a round to the next query or the output.

    A row answers round t with the output after t if its entry of `outputs` is true, and else with the query of
    round t + 1.  A projection on a ball, which is not linear, gets a radius so large that it changes nothing.
    """

    def __init__(self, optimizer: Any, make_round: Callable[[int], Round], outputs: tuple[bool, ...]) -> None:
        bounded = any(field.name == "radius" for field in dataclasses.fields(optimizer))
        self._optimizer = replace(optimizer, radius=_UNBOUNDED_RADIUS) if bounded else optimizer
        self._make_round = make_round
        self._is_output = torch.tensor(outputs).unsqueeze(-1)
        self._state_type = type(self._optimizer.start(torch.ones((1, 1), dtype=torch.float64)))

    def start(self, rows: int) -> tuple[Tensor, ...]:
        # Any start but 0 will do; at 0 a norm has no gradient.
        state: tuple[Tensor, ...] = self._optimizer.start(torch.ones((rows, 1), dtype=torch.float64))
        return state

    def advance(self, state: tuple[Tensor, ...], t: int, inputs: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        next_state: Any = self._optimizer.update(self._state_type(*state), inputs, self._make_round(t))
        return next_state, torch.where(
            self._is_output, self._optimizer.output(next_state), self._optimizer.query(next_state)
        )


@torch.no_grad()
def _probe_stream(stream: _OptimizerStream, rounds: int, factor: float) -> Floats:
    """Compute query and output after each of the first rounds, (rounds, 2).

    The release of round t is `factor` · (-1)^t / t, in one coordinate.

    Args:
        stream: Stream of two rows, the first of which answers with queries and the second with outputs.
        rounds: Number of rounds.
        factor: Factor of the releases.
    """
    state, answers = stream.start(2), []
    for t in range(1, rounds + 1):
        state, answer = stream.advance(state, t, torch.full((2, 1), factor * (-1.0) ** t / t, dtype=torch.float64))
        answers.append(answer[:, 0].numpy())
    return np.array(answers)


def _check_linear(stream: _OptimizerStream, rounds: int) -> None:
    """Check over the first 4 rounds that releases twice as large move every point twice as far.

    Raises:
        InputError: A point moves otherwise, so that the optimizer is not linear in the releases.
    """
    zero_points, unit_points, double_points = (
        _probe_stream(stream, min(rounds, _LINEARITY_ROUNDS), factor) for factor in (0.0, 1.0, 2.0)
    )
    if not np.allclose(
        double_points - zero_points, 2.0 * (unit_points - zero_points), rtol=_ROUNDING, atol=_ROUNDING
    ):
        raise InputError(
            "algorithm.mechanism: the row's optimizer is not linear in what is released, so that noise cannot be "
            "fitted to it; name a mechanism that needs no fit"
        )


_FITTED_KEYS = ("mechanism", "theta", "phi", "scale", "max_vectors", "bands", "noise_sizes")
"""Keys of [algorithm] that a fit replaces or removes."""


@dataclass(frozen=True)
class FittedNoise:
    """Result of a fit."""

    asked: str
    """Text of everything that the fit depends on."""
    found: Mapping[str, Any]
    """Keys of [algorithm] that replace the request: `mechanism`, and its numbers."""
    label: str
    """Name of the mechanism for reports."""
    vectors: int
    """Most vectors in the mechanism's state."""
    seconds: float
    """Duration of the fit, in seconds."""

    def to_data(self) -> dict[str, Any]:
        """Convert to plain data for JSON, from which `FittedNoise(**data)` rebuilds the fit."""
        return {**vars(self), "found": dict(self.found)}

    @property
    def summary(self) -> str:
        """Description of the fit for reports."""
        vectors = f"{self.vectors} vector{'' if self.vectors == 1 else 's'}"
        return f"noise fitted in {self.seconds:.1f} s: {self.label}, {vectors} of state"


def fit_scenario_noise(
    scenario: Scenario,
    cached_fits: Mapping[str, FittedNoise],
    on_fit: Callable[[FittedNoise], None] = lambda _: None,
) -> tuple[Scenario, dict[str, FittedNoise]]:
    """Fit the noise of every cell that leaves its noise to be fitted.

    Cells whose fits depend on the same numbers share one fit.  A request is the text of these numbers.

    Args:
        scenario: Scenario of the run.
        cached_fits: Fits of a run that is resumed, by request, which are not repeated.
        on_fit: Function that is called with every new fit.

    Returns:
        The scenario with fitted numbers in every cell that left its noise to be fitted, and its fits by request.

    Raises:
        InputError: No noise can be fitted to a cell.
    """
    fits, points = dict[str, FittedNoise](), []
    for point in scenario.points:
        cell = point.cell
        if (request := _fit_request(cell)) is not None:
            if request not in fits:
                fits[request] = cached_fits.get(request) or _fit_noise(request, cell)
                if request not in cached_fits:
                    on_fit(fits[request])
            cell = _apply_fit(cell, fits[request])
        points.append(replace(point, cell=cell))
    return replace(scenario, points=points), fits


def fit_cell_noise(cell: Cell) -> Cell:
    """Return the cell with fitted numbers where its noise is to be fitted.

    Raises:
        InputError: No noise can be fitted to the cell.
    """
    request = _fit_request(cell)
    return cell if request is None else _apply_fit(cell, _fit_noise(request, cell))


def response_and_workload(
    row: Algorithm, settings: NoiseSettings, schedule: Participation
) -> tuple[NoiseResponse, Workload]:
    """Return the response of a row's target to noise, and the workload of its running sums.

    The workload is the decay, the clips, the restarts and the participation of the running sums.  The response has
    the weights of the released sums in the target: in points that the row's optimizer publishes, or in some of the
    sums themselves if `published` is "rows", or if no such point depends on a release.  Both are computed in one
    dimension, for scales such as clip and step of 1 (`with_unit_scale`) and a loss with the constants 1, so that a
    fit need not be the best one for another loss.

    Args:
        row: Row of the algorithms' table.
        settings: Settings of the row.
        schedule: Participation of the records.

    Raises:
        InputError: Noise cannot be fitted to this row or participation, or the row refuses its settings.
    """
    if row.published is None:
        raise InputError(
            f"algorithm.mechanism: noise cannot be fitted to what {row.name} publishes; name a mechanism that "
            "needs no fit"
        )
    if schedule.secret:
        raise InputError(
            f'algorithm.mechanism: with federation.sampling = "{schedule.name}" nobody may know in which rounds a '
            "record takes part, and noise is fitted to such rounds; name a mechanism that needs no fit"
        )
    # A round of k batches has its whole clip here, which a run divides by k.
    units = settings.with_unit_scale()
    problem = Problem(dimension=1, lipschitz=1.0, smoothness=1.0, convex=True, batch=1, schedule=schedule)
    estimator, rounds = row.estimator(units, problem), schedule.rounds
    response = (
        rows_response(rounds)
        if row.published == "rows"
        else compute_response(row.optimizer(units, problem, 1.0), estimator.round, rounds)
    )
    clips = np.array([float(estimator.round(t).clip) for t in range(1, rounds + 1)])
    # Of a single round, an optimizer may publish x_1 alone.
    return (
        response if np.any(response.queries) else rows_response(rounds),
        Workload(schedule, estimator.decay, clips, estimator.period),
    )


def _fit_request(cell: Cell) -> str | None:
    """Return the key of the cell's fit, or None if no noise is to be fitted.

    The key is a JSON text of the row, its settings and the participation, on which the fit depends.  Scales, such
    as clip and step, stand in it as 1 (`with_unit_scale`), so that cells that differ only in them share a fit.
    """
    settings = cell.algorithm.settings
    if not (isinstance(settings, NoiseSettings) and settings.needs_fit):
        return None
    settings_data = settings.with_unit_scale().model_dump(mode="json", exclude_defaults=True)
    fit_keys = {"row": cell.algorithm.name, "mechanism": settings.mechanism, "late_clip": settings.late_clip}
    return json.dumps({**settings_data, **fit_keys, "participation": cell.schedule.to_data()}, sort_keys=True)


def _fit_noise(request: str, cell: Cell) -> FittedNoise:
    """Fit noise to the target of the cell's algorithm, and time the fit in seconds.

    Args:
        request: Key of the fit (`_fit_request`), which is stored with it.
        cell: Cell whose settings ask for a fit.

    Raises:
        InputError: No noise can be fitted to the cell.
    """
    settings, start_seconds = cell.algorithm.settings, time.perf_counter()
    assert isinstance(settings, NoiseSettings)
    with torch.inference_mode(False):  # Flower's apps run in inference mode, and a response takes a backward pass
        response, workload = response_and_workload(cell.algorithm.row, settings, cell.schedule)
        best = fit(
            make_noise_cost(response, workload),
            settings.mechanism,
            settings,
            # "auto" scales noise over the rounds only where no clip is raised: both use up what the cost of the
            # worst record leaves over for other records.
            scalable=settings.late_clip == "same",
        )
    return FittedNoise(
        request,
        {"mechanism": best.mechanism.name, **best.mechanism.options()},
        best.name,
        best.vector_count,
        time.perf_counter() - start_seconds,
    )


def _apply_fit(cell: Cell, fit: FittedNoise) -> Cell:
    other_keys = {key: value for key, value in cell.algorithm.model_dump().items() if key not in _FITTED_KEYS}
    algorithm = AlgorithmSection.model_validate(other_keys | dict(fit.found))
    _ = algorithm.settings  # the property validates the fitted keys
    return cell.model_copy(update={"algorithm": algorithm})


MIN_CLIP, MAX_CLIP = 2.0**-40, 2.0**40
"""Range of clips for which the guarantees of `fedpriv.loss.clipping` hold."""
_MIN_RECORD_CLIP = 2.0**-70
"""Smallest clip of a record, divided by the batch size.

float32 ends at 2^-126, and clipping multiplies by the clip over a norm of up to 2^50.
"""
_MIN_STD, _MAX_STD = 2.0**-100, 2.0**100
"""Range of standard deviations that floating point can draw and add."""
MAX_DEVIATIONS = 2.0**30
"""Largest sum in standard deviations of its noise, so that 22 digits of float64 lie below one of them."""


def check_clips(rounds: Iterable[Round], max_batch_size: int, is_private: bool) -> None:
    """Check that increments can be clipped to the clips of every round.

    With noise a clip has to lie between 2^-40 and 2^40, and without noise it may be any finite number of 2^-40 or
    more.  The clip divided by the batch size has to be at least 2^-70, for float32.

    Args:
        rounds: Rounds of the run, each with a clip for every part of an increment.
        max_batch_size: Most records (or other units) of one silo in a batch, 1 or more.
        is_private: Whether the run has noise.

    Raises:
        InputError: A clip is out of its range, or is not a number.
    """
    for round_record in rounds:
        for clip in round_record.clips:
            if not MIN_CLIP <= clip <= (MAX_CLIP if is_private else sys.float_info.max):
                raise InputError(
                    f"algorithm: increments of round {round_record.t} would be clipped to norm {clip:.3g}; clips "
                    f"between {MIN_CLIP:.2g} and {MAX_CLIP:.2g} hold in floating point"
                )
            if clip / max_batch_size < _MIN_RECORD_CLIP:
                raise InputError(
                    f"algorithm: a clip of {clip:.3g} over a batch of {max_batch_size} records is too small for "
                    "floating point; use a larger clip or a smaller batch"
                )


def check_noise(noise: Noise) -> None:
    """Check that floating point can draw and add the noise of every party.

    Raises:
        InputError: A standard deviation is below 2^-100, above 2^100, or not a number.
    """
    for source in noise.sources:
        std = float(source.std)
        if not _MIN_STD <= std <= _MAX_STD:
            raise InputError(
                f"privacy: noise of standard deviation {std:.3g} is nothing that floating point can add; between "
                f"{_MIN_STD:.2g} and {_MAX_STD:.2g} it can"
            )


def check_sums(noise: Noise, max_sum: float, fresh_std: float) -> None:
    """Check that the noise is not lost in the rounding of the sums to which it is added.

    Args:
        noise: Noise of every party.
        max_sum: Bound of the norm of these sums.
        fresh_std: Standard deviation that fresh vectors of standard deviation 1 add to every release, at least.

    Raises:
        InputError: `max_sum` is above 2^30 standard deviations of the fresh noise, or not a number.
    """
    for source in noise.sources:
        new_std = float(source.std) * fresh_std
        if not max_sum <= MAX_DEVIATIONS * new_std:
            raise InputError(
                f"privacy: sums of up to {max_sum:.3g} would hide noise of standard deviation {new_std:.3g} in "
                f"their rounding; at most {MAX_DEVIATIONS:.2g} standard deviations, so ask for more privacy"
            )


MAX_SLACK = 2.0**-60
"""Most slack of a claim, in total variation."""
_MIN_CLIP_UNITS = 2.0**22
"""Least units in a clip for each √d, for `plan.ROUNDING_ALLOWANCE` of an increment diameter below 2."""
_MU_MARGIN = 1.0 - 2.0**-38
"""Factor below 1 that covers the increase of the recorded μ by conservative rounding."""


def make_exact_plan(
    cell: Cell,
    objective: Objective,
    estimator: Estimator,
    mechanism: Mechanism,
    workload: Workload,
    increment_diameter: float = APART,
) -> ExactPlan:
    """Plan the lattice, sums and noise of a run whose releases are integers.

    The cell's target is converted to a μ for the units of one silo in the public order (for a secret
    participation, the order that is accounted for in its place).  For it the finest lattice and its noise are
    fitted.

    Guarantee: no μ of the result is above the target of the silos that it is for, or in secret participation above
    a μ that is calibrated to have at most the target's ε at the cell's δ.  The slacks of
    all silos that release about one unit add up to at most 2^-60, or 2^-61 if the run has another step, too.

    Args:
        cell: Cell with a privacy target.
        objective: Objective whose increments silos compute.
        estimator: Estimator of the row.
        mechanism: Mechanism of the row.
        workload: Running sums of the estimator.
        increment_diameter: Largest distance of two increments, in clips.

    Raises:
        InputError: The releases cannot be made of integers, or secret participation cannot be accounted for.
    """
    # The target in the public order.
    name, schedule, trust = cell.algorithm.row.name, cell.schedule, cell.algorithm.trust_setting
    targets = cell.target_mus
    assert targets is not None  # a run without noise has no exact plan
    sums = RunningSums(mechanism, workload, cell.privacy.relation, exact=True)
    public_sums = RunningSums(mechanism, replace(workload, schedule=schedule.public_order), sums.relation)
    # The lattice is fitted in the public order, in which the same noise has `share` times the μ.
    share = 1.0 if schedule.public_order is schedule else public_sums.sensitivity() / schedule.distance(sums)
    unit = cell.privacy.protected_unit

    def silo_mu(target: float) -> float:
        """Compute the largest μ of a unit's records in one silo, less the increase of μ by rounding."""
        mu = schedule.calibrated_mu(sums, target, cell.privacy.delta) * share
        # A unit's records in several silos: releases of each silo compose by squares, and in one sum they add up.
        return (unit.mu_per_silo(mu) if trust.publishes_sums(0) else mu / unit.max_silos) * _MU_MARGIN

    # Lattice and noise, for the largest sum that a party forms: of all silos, or of one.
    sizes, rounds = cell.batch_sizes, range(1, schedule.rounds + 1)
    batch_total = sum(sizes) if trust.publishes_sums(SERVER) else max(sizes)
    party_count = trust.noise_sources_per_release(len(sizes))
    try:
        factorization = integer_form(mechanism, public_sums.workload)
        exact = fitted_lattice(
            ExactRunInputs(
                factorization,
                tuple(batch_total * schedule.max_batches(t) for t in rounds),
                objective.dimension,
                cell.privacy.relation,
                silo_mu(min(targets)),
                party_count=party_count,
                # Only masked messages hold noise of several silos, and only their numbers have `run.word` bits.
                word_bits=cell.run.word if party_count > 1 else 64,
                increment_diameter=increment_diameter,
            )
        )
        if cell.privacy.shares:  # silos have targets of their own
            # Calibrations of nearly equal targets may come in another order than the targets.
            exact = exact.with_budgets([max(exact.inputs.mu, silo_mu(target)) for target in targets])
    except InputError as error:
        raise InputError(f"{name}: what it releases cannot be made of integers: {error}") from None
    # A diameter below 2 clips allows for the rounding of increments to units only if a clip has many units.
    if increment_diameter < APART and math.sqrt(objective.dimension) * _MIN_CLIP_UNITS > (
        min_norm := min(min(exact.norms(t)) for t in rounds)
    ):
        raise InputError(
            f"{name}: {objective.dimension} values with a clip of {min_norm} units are too coarse; ask for fewer "
            "cells, or take a longer word"
        )
    # First step and rounds have half each.  A unit in several silos is in as many releases, or in one sum of them.
    if exact.claim.slack * (unit.max_silos if trust.publishes_sums(0) else 1) > (
        MAX_SLACK / (2 if cell.budget.other_mu else 1)
    ):
        raise InputError(
            f"{name}: {schedule.rounds} rounds of {objective.dimension} values are too many; take fewer rounds, "
            "or a smaller model"
        )
    return exact


def make_exact_noise(
    exact: ExactPlan, trust: Trust, batch_sizes: tuple[int, ...], weights: tuple[float, ...]
) -> Noise:
    """Return every party's noise, converted from units of the lattice to the scale of the model.

    Args:
        exact: Exact plan of the run.
        trust: Trust setting.
        batch_sizes: Number of records (or other units of protection) in a batch of each silo.
        weights: Weight of each silo in the mean over silos.
    """
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
"""Bound of one encoded value, in units, above all that plans allow and noise can reach."""
_MAX_GRID_UNITS = 2.0**48
"""Most units that records can contribute, so that float64 holds digits of noise below the grid."""


@dataclass(frozen=True)
class Grid:
    """Multiples of `unit`, a power of 2, as integers modulo 2^64.

    A sum below 2^63 units in absolute value is decoded up to its rounding to float64.  A larger sum wraps: the
    model is wrong then, but no less private, since the residue is a function of the sum.
    """

    unit: float
    """Distance of two neighbouring grid points."""

    def encode(self, values: NDArray[np.float64]) -> EncodedMessage:
        """Round values to the grid, as numbers of units modulo 2^64, (d,).

        Args:
            values: Vector in the scale of the model, (d,).

        Raises:
            RunError: A value is not finite, or is too large to be added.
        """
        # Halves go up, so that rounding commutes with shifts by multiples of the unit.
        scaled = np.floor(values / self.unit + 0.5)
        if not np.all(np.abs(scaled) < _MAX_ENCODED):
            raise RunError("the release has values that are not finite, or outside of what can be added")
        return scaled.astype(np.int64).view(np.uint64)

    def decode_sum(self, messages: Sequence[EncodedMessage]) -> NDArray[np.float64]:
        """Sum all silos' encoded messages, each (d,), and decode the sum, (d,)."""
        total: EncodedMessage = np.zeros_like(messages[0])
        for message in messages:
            total += message  # unsigned: modulo 2^64
        return total.view(np.int64).astype(np.float64) * self.unit


def make_grid(silo_std: float, digits: int, max_sum: float) -> Grid:
    """Return the grid for masked messages.

    About half of the `digits` binary digits in which noise is drawn lie above the unit.  Rounding then
    adds less than a relative 2^-24 to the variance of a silo's noise, for 24 digits or more.

    Args:
        silo_std: Standard deviation of the noise in a silo's term of the mean, the smallest of all, above 0.
        digits: Binary digits of the noise.
        max_sum: Bound of every coordinate of the sum of all silos' vectors without noise.

    Raises:
        InputError: The sums do not fit on the grid.
    """
    unit = 2.0 ** math.floor(math.log2(silo_std) - digits // 2)
    if max_sum > unit * _MAX_GRID_UNITS:
        raise InputError(
            f"secure aggregation: sums of up to {max_sum:.3g}, with noise of {silo_std:.3g} in each silo, do "
            'not fit on a grid; use run.dtype = "float32", fewer rounds or more noise'
        )
    return Grid(unit)


def make_message_grid(cell: Cell, noise: Noise, max_sum: float) -> Grid:
    """Return the grid for sums of masked messages.

    Args:
        cell: Cell, whose `run.dtype` decides in how many digits noise is drawn.
        noise: Noise of every silo.
        max_sum: Bound of the norm of the silos' mean running sum.

    Raises:
        InputError: The sums do not fit on the grid.
    """
    silo_std = min(source.weight * float(source.std) for source in noise.sources)
    return make_grid(silo_std, np.finfo(cell.run.dtype).nmant + 1, max_sum)


def make_workload(estimator: Estimator, schedule: Participation) -> Workload:
    """Return the workload of an estimator's running sums, for a mean over one batch.

    A workload holds what the noise is calibrated by: participation, decay, clips, and restarts.

    Guarantee: from round 2 on the sums of every round decay as the workload says, by which the noise is calibrated
    and charged: by 0 in a round that restarts them, and by `estimator.decay` in all others.

    Args:
        estimator: Estimator, which gives the decay and the clip of each round.
        schedule: Participation: which records a round reads.

    Raises:
        InputError: A round of the estimator has another decay than the workload, or a number is out of range.
    """
    workload = Workload(schedule, estimator.decay, np.array(batch_clips(estimator, schedule)), estimator.period)
    for round_record in make_rounds(estimator, schedule.rounds)[1:]:
        charged_decay = 0.0 if is_restart(round_record.t, workload.period) else workload.decay
        if round_record.decay != charged_decay:
            raise InputError(
                f"{type(estimator).__name__}: the running sum of round {round_record.t} has decay = "
                f"{round_record.decay:g}, and by decay = {workload.decay:g} and period = {workload.period} of the "
                f"estimator its noise would be calibrated for {charged_decay:g}; let `round`, `decay` and "
                "`period` agree"
            )
    return workload


@lru_cache(maxsize=4)
def batch_clips(estimator: Estimator, schedule: Participation) -> tuple[float, ...]:
    """Return the norm bound of every round's increments, for a mean over one batch, (T,).

    A round that is expected to read k ≥ 1 batches has 1/k of its clip.  If increments are clipped in parts, the
    bound is that of their first part.  The result is cached for cells that differ in their noise only.
    """
    return tuple(
        float(round_record.clip) / max(1, schedule.expected_batches(round_record.t))
        for round_record in make_rounds(estimator, schedule.rounds)
    )


def calibrate_float_noise(
    cell: Cell,
    schedule: Participation,
    workload: Workload,
    mechanism: Mechanism,
    weights: tuple[float, ...],
    increment_diameter: float = APART,
) -> Noise:
    """Compute the noise in floating point with which a run reaches the cell's target.

    The participation gives the μ' to which noise has to be calibrated, larger if secret sampling amplifies
    privacy, and the trust setting turns μ' into standard deviations.  A cell without a target gets no noise.

    Guarantee: in real arithmetic, a run with public rounds has at most its μ, and one with secret rounds at most
    the ε of that μ at the cell's δ.

    Args:
        cell: Cell with its privacy target.
        schedule: Participation of the records.
        workload: Running sums of the estimator.
        mechanism: Mechanism of the row.
        weights: Weight of each silo in the mean over silos.
        increment_diameter: Largest distance of two increments, in clips.

    Raises:
        InputError: The participation cannot be accounted for with this mechanism, or no tried noise suffices.
    """
    target, relation, delta = cell.target_mu, cell.privacy.relation, cell.privacy.delta
    if target is None:
        return Noise()
    sums = RunningSums(mechanism, workload, relation)
    distance, mu, mus = schedule.distance(sums), schedule.calibrated_mu(sums, target, delta), None
    if cell.privacy.shares:  # silos have targets of their own, and `target` is the largest
        mus = [schedule.calibrated_mu(sums, silo_target, delta) for silo_target in cell.target_mus or ()]
    return cell.algorithm.trust_setting.calibrate_noise(
        distance,
        cell.batch_sizes,
        weights,
        relation,
        mu,
        cell.privacy.protected_unit,
        increment_diameter,
        mus,
    )
