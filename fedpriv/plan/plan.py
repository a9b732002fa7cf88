"""From a scenario's cell to everything that is fixed and public before round 1.

Silo, server, accountant and every engine build the same plan from the same cell; no number is sent around.  A plan
says how long its messages are and, by `survives_gaps` and
`excess_risk_bound`, what can be said of the run beforehand.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from fedpriv.accounting.gaussian import APART, Relation, epsilon_of
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, public_generator
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import Estimator, RaisedClips, Round, make_rounds
from fedpriv.loss.features import check_augmentation_allowed
from fedpriv.loss.objective import PROVED_DIAMETERS, Deterministic, Objective, is_shipped
from fedpriv.loss.ridge import RidgeStatistics
from fedpriv.loss.rows import ColumnMoments
from fedpriv.loss.views import PerUnit
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.integers.plan import ExactPlan, IntegerRound
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.registry import check_readable
from fedpriv.noise.series import Workload
from fedpriv.noise.trust import RECORD, Noise, Trust, Unit
from fedpriv.papers.base import Bound, Optimizer, Problem, ReleaseNumbers
from fedpriv.participation.orders import Participation, PublicOrder, check_dependence
from fedpriv.participation.secret import SecretOrder
from fedpriv.plan.calibration import (
    Grid,
    calibrate_float_noise,
    check_clips,
    check_noise,
    check_sums,
    make_exact_noise,
    make_exact_plan,
    make_message_grid,
    make_workload,
    max_running_sum,
)
from fedpriv.scenario.schema import Cell


def check_absences(cell: Cell, estimator: Estimator, mechanism: Mechanism) -> None:
    """InputError for a run that is to go on without a silo, and cannot: see `survives_gaps`."""
    if (key := cell.absence_key) is not None and not allows_absences(estimator, mechanism):
        raise InputError(
            f"{key}: {cell.algorithm.row.name} cannot go on without a silo: its sums restart, or are taken apart, "
            "or its silos step by themselves, or its privacy rests on how far queries move between rounds"
        )


def allows_absences(estimator: Estimator, mechanism: Mechanism) -> bool:
    """Whether a silo may skip rounds: its next increment then starts at the query that it answered last."""
    first = estimator.round(1)
    plain = estimator.period is None and first.split is None and first.local is None
    return plain and mechanism.movement is None and mechanism.draws(1) is None


def make_problem(cell: Cell, objective: Objective) -> Problem:
    """The public numbers of a cell, from which its parameters follow."""
    return Problem(
        dimension=objective.dimension,
        lipschitz=objective.lipschitz,
        smoothness=objective.smoothness,
        convex=objective.convex,
        convex_within=objective.convex_within,
        batch=sum(cell.batch_sizes),
        schedule=cell.schedule,
        epsilon=None if cell.target_mu is None else epsilon_of(cell.target_mu, cell.privacy.delta),
        delta=cell.privacy.delta,
        seed=cell.seed,
        silos=len(cell.batch_sizes),
        relation=cell.privacy.relation,
        unit=cell.privacy.protected_unit,
    )


class PlannedRound(NamedTuple):
    """Public numbers of one round, alike for silo, server and accountant."""

    step: Round
    """Coefficients, clips and decay of the estimator."""
    next_decay: Scalar
    """Decay of the running sum in the next round, or 0 after the last."""
    batch_range: range | None
    """Batches of the silo's order that are read, or None if records are drawn one by one."""
    batch_count: int
    """Expected number of batches, or 1 in a round that reads none: increments are divided by it."""
    noise_vector_count: int | None
    """Number of fresh noise vectors, or None for a single one that is not stacked."""
    message_length: int
    """Numbers of `Plan.message_dtype` in a silo's message."""
    stored_length: int
    """Numbers of `Plan.stored_dtype` that a server stores."""
    integer_round: IntegerRound | None
    """Norms, shape and noise on the lattice, or None in floating point."""


@dataclass(frozen=True)
class Plan:
    """Calibrated parts of one run, and the table of its rounds.

    `__post_init__` derives all fields below `model_length`, also after `replace`.
    """

    schedule: Participation
    batch_sizes: tuple[int, ...]
    """Records of each silo in a round, expected if sampled; means have these fixed denominators."""
    weights: tuple[float, ...]
    """p_i: the weight of each silo's mean in the server's; they sum to 1."""
    estimator: Estimator
    mechanism: Mechanism
    noise: Noise
    optimizer: Optimizer
    relation: Relation
    objective: Objective
    """Loss that silos take increments of; evaluations are of the model's own loss."""
    trust: Trust
    dtype: torch.dtype
    """Type of queries and models."""
    exact_plan: ExactPlan | None = None
    """Lattice, sums and noise of releases that are integers, or None in floating point."""
    grid: Grid | None = None
    """Grid on which masked messages in floating point are added, or None without masks."""
    unit: Unit = RECORD
    """Row of a batch: what is clipped, and what batches and weights count."""
    increment_diameter: float = APART
    """Largest distance of two increments, in clips (`apart_of`)."""
    model_length: int | None = None
    """Length of the model that an evaluation is of, or None in training."""

    query_length: int = field(init=False)
    """Length of a query: that of a release, or of the model that is evaluated."""
    masked: bool = field(init=False)
    """Whether the server gets the silos' messages in their sum alone."""
    needs_batch_layout: bool = field(init=False)
    """Whether the objective has to be told the silos and rows of a round (`Objective.at`)."""
    max_batches: int = field(init=False)
    """Most batches that a silo reads in a round."""
    integers_at_server: bool = field(init=False)
    """Whether the server adds up integers, and not released vectors."""
    sends_round_sums: bool = field(init=False)
    """Whether a silo's message has this round's sums alone, which the server adds to earlier ones."""
    message_dtype: torch.dtype = field(init=False)
    """Type of a silo's message: bytes or words if masked, sums if the server adds the noise."""
    stored_dtype: torch.dtype = field(init=False)
    """Type of what a server stores of a round: noisy integers, or its release."""
    rounds: tuple[PlannedRound, ...] = field(init=False, repr=False, compare=False)
    """Rounds 1, 2, …"""

    def __post_init__(self) -> None:
        exact, trust = self.exact_plan is not None, self.trust
        masked, at_server = trust.masked and bool(self.noise.sources), exact and trust.publishes_sums(SERVER)
        if masked:
            message_dtype = torch.uint8 if exact else torch.uint64
        elif float(self.noise.std_of(SERVER)):
            message_dtype = torch.int64 if exact else torch.float64
        else:
            message_dtype = self.dtype
        derived = {
            "query_length": self.objective.dimension if self.model_length is None else self.model_length,
            "masked": masked,
            "max_batches": max(map(self.schedule.max_batches, range(1, self.schedule.rounds + 1))),
            "needs_batch_layout": getattr(type(self.objective), "for_batch", None) is not Deterministic.for_batch,
            "integers_at_server": at_server,
            "sends_round_sums": exact and trust.adds_noise(SERVER),
            "message_dtype": message_dtype,
            "stored_dtype": torch.int64 if at_server else self.dtype,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "rounds", tuple(self._planned_rounds()))

    def _planned_rounds(self) -> Iterator[PlannedRound]:
        schedule, exact, length = self.schedule, self.exact_plan, self.objective.dimension
        steps = make_rounds(self.estimator, schedule.rounds)
        for step, next_decay in zip(steps, [*(step.decay for step in steps[1:]), 0.0], strict=True):
            t, batches = step.t, max(1, schedule.expected_batches(step.t))
            on_lattice = None if exact is None else exact.plan_round(t, batches)
            vectors = self.mechanism.draws(t)
            assert on_lattice is None or len(on_lattice.norms) == (vectors or 1)
            stored = length * (len(on_lattice.norms) if on_lattice is not None and self.integers_at_server else 1)
            yield PlannedRound(
                step,
                next_decay,
                schedule.batches(t) if isinstance(schedule, PublicOrder) else None,
                batches,
                vectors,
                stored * (exact.inputs.word_bits // 8 if exact is not None and self.masked else 1),
                stored,
                on_lattice,
            )

    @property
    def required_exact_plan(self) -> ExactPlan:
        """Lattice, sums and noise of integers.  ValueError for a plan in floating point."""
        if self.exact_plan is None:
            raise ValueError("floating point has no lattice of integers: plan_of(released=True)")
        return self.exact_plan

    @property
    def max_clip(self) -> float:
        """Largest clip of any round and part, as records meet it: not divided by the batches of a round."""
        return max(max(planned.step.clips) for planned in self.rounds)

    def check_release_noise(self) -> None:
        """ValueError for a plan whose noise protects nobody."""
        if self.noise.sources and self.exact_plan is None:
            raise ValueError("noise that is really released needs a plan made for it: plan_of(released=True)")

    def record_capacity(self, silo: int) -> int:
        """Records that a round is made to hold; if secret, as nearly none exceeds: `prices` charges for others."""
        return (
            self.schedule.capacity(self.batch_sizes[silo]).row_count
            if isinstance(self.schedule, SecretOrder)
            else self.batch_sizes[silo] * self.max_batches
        )

    @property
    def extra_values(self) -> int:
        """Values that exist at a time beside increments, of one replicate in the round that has the most."""
        rows = sum(map(self.record_capacity, range(len(self.batch_sizes))))
        return max(
            self.objective.extra_values(points, rows)
            for points in {planned.step.gradient_count for planned in self.rounds}
        )


def make_plan(cell: Cell, objective: Objective, *, for_release: bool = False) -> Plan:
    """Calibrate the noise to the cell's privacy target and derive the optimizer from it.

    With `released`, noise is there to protect somebody, and what is released are integers, as in a simulation
    with `run.arithmetic = "integers"`; InputError for what cannot be.

    Guarantee: clips, noise and sums of a plan are numbers that floating point holds (see `calibration`);
    InputError otherwise, for a silo's guard and for a simulation alike.
    """
    check_scaling_known(cell)
    row, settings, trust = cell.algorithm.row, cell.algorithm.settings, cell.algorithm.trust_setting
    schedule = cell.schedule
    batch_sizes = cell.batch_sizes
    weights = silo_weights(cell)
    problem = make_problem(cell, objective)
    estimator, mechanism, workload = make_uncalibrated_parts(cell, problem)
    check_readable(mechanism, workload, row.name)
    check_absences(cell, estimator, mechanism)
    private = cell.target_mu is not None
    check_clips(make_rounds(estimator, schedule.rounds), max(batch_sizes), private)
    relation, unit = cell.privacy.relation, cell.privacy.protected_unit
    check_augmentation_allowed(objective, seen := row.objective(settings, problem, objective), row.name)
    looked_at = _view_by_unit(seen, unit)
    if private:
        check_dependence(looked_at, schedule.allowed_dependence, f'federation.sampling = "{schedule.name}"')
    exact, grid = None, None
    apart = find_increment_diameter(looked_at, estimator, mechanism, schedule)
    if _uses_integers(cell, for_release):
        exact = make_exact_plan(cell, looked_at, estimator, mechanism, workload, apart)
        mechanism, noise = (
            exact.inputs.factorization.mechanism,
            make_exact_noise(exact, trust, batch_sizes, weights),
        )
        check_noise(noise)
    else:
        noise = calibrate_float_noise(cell, schedule, workload, mechanism, weights, apart)
        check_noise(noise)
        if noise.sources:
            check_sums(noise, max_running_sum(schedule, estimator), mechanism.fresh_std or 1.0)
            if trust.masked:
                grid = make_message_grid(cell, schedule, estimator, noise)
    return Plan(
        schedule,
        batch_sizes,
        weights,
        estimator,
        mechanism,
        noise,
        row.optimizer(settings, problem, noise.std_in_mean),
        relation,
        looked_at,
        trust,
        looked_at.initial().dtype,
        exact,
        grid,
        unit,
        apart,
    )


def make_uncalibrated_parts(cell: Cell, problem: Problem) -> tuple[Estimator, Mechanism, Workload]:
    """Estimator, mechanism and running sums of a cell's row, before any noise is calibrated."""
    row, settings, schedule = cell.algorithm.row, cell.algorithm.settings, cell.schedule
    estimator = row.estimator(settings, problem)
    workload = make_workload(estimator, schedule)
    mechanism = row.mechanism(settings, problem, workload)
    if (factors := settings.clip_factors(mechanism, workload)) is not None:
        estimator = RaisedClips(estimator, factors)
        workload = make_workload(estimator, schedule)
    return estimator, mechanism, workload


def silo_weights(cell: Cell) -> tuple[float, ...]:
    """p_i of every silo's mean, which sum to 1: by the records of a round, B_i / Σ B.

    Silos with budgets of their own are weighted by the inverse variance of their noise, (B_i μ_i)² / Σ (B μ)²: of
    all fixed weights these leave the least noise in the mean.  They are public, and fixed before round 1.
    """
    sizes, mus = cell.batch_sizes, cell.target_mus
    each = (
        [(size * mu) ** 2 for size, mu in zip(sizes, mus, strict=True)] if cell.privacy.shares and mus else sizes
    )
    total = sum(each)
    return tuple(part / total for part in each)


ROUNDING_ALLOWANCE = 2.0**-20
"""Relative, of `apart`: above every rounding of increments, on a lattice too.

Let two increments be `a` ≥ 1 clips apart, and K = ⌊clip/u⌋ the clip in units u.  On the lattice they are (K + 1) a
apart at most.  Scaling to K is a projection, up to a relative 2^-31 for its float64 norm.  Truncation towards zero
moves a difference by less than 1 a coordinate, so by √d.  A plan has 2^22 √d ≤ K, or is refused (`exact_plan_of`),
so that all of this is below (1 + √d + 2^-30 K) / K < 2^-20 of a.  In float64 alone it is below 2^-45.
"""


PROVED_DIAMETERS |= {ColumnMoments, RidgeStatistics}  # those of add-ons are added where they are defined


def find_increment_diameter(
    objective: Objective, estimator: Estimator, mechanism: Mechanism, order: Participation
) -> float:
    """The largest distance of two increments in clips, 2 unless a smaller one is proved.

    Guarantee: smaller than 2 only where all that is released is one round's sum of increments that are public
    vectors or moments, means of them, or zeros, no two of them further apart than their class's `diameter`; and
    clipping, a projection on a ball, brings none further apart.  No other class is believed.
    """
    base = objective.base if type(objective) is PerUnit else objective
    first, fresh = estimator.round(1), type(mechanism) is IndependentGaussian
    plain = first.split is None and first.local is None and tuple(first.coefficients) == (1.0,)
    if type(base) not in PROVED_DIAMETERS or not is_shipped(type(base)):
        return APART
    if not plain or not fresh or order.secret or order.rounds != 1:
        return APART
    diameter: float = cast(Any, base).diameter
    return min(APART, max(1.0, diameter / float(first.clip)) * (1.0 + ROUNDING_ALLOWANCE))


def check_scaling_known(cell: Cell) -> None:
    """InputError for a cell whose records cannot be seen yet: its first step has not been taken."""
    if cell.data.needs_first_step:
        raise InputError(
            "data.scale: means and deviations come from a first step, which `fedpriv run` takes; use it, or leave "
            "[data.scale] out"
        )


def _view_by_unit(objective: Objective, unit: Unit) -> Objective:
    """The objective over rows that are units; InputError for one that takes rows for records."""
    check_dependence(objective, unit.allowed_dependence, f'privacy.unit = "{unit.name}"')
    return objective if unit.max_records == 1 else PerUnit(objective, unit.max_records)


def _uses_integers(cell: Cell, released: bool) -> bool:
    """Whether the run's releases are integers; InputError for a simulation that asks so for none."""
    private = cell.target_mu is not None
    if cell.run.arithmetic == "integers" and not private:
        raise InputError(
            'run.arithmetic = "integers": without noise there is no lattice to release on; give a privacy target, '
            "or leave out run.arithmetic"
        )
    return private and (released or cell.run.arithmetic == "integers")


def excess_risk_bound(cell: Cell, plan: Plan) -> Bound | None:
    """What the cell's row proves for its settings; None where it proves nothing.

    Nothing is proved for losses that are not known to be convex and smooth in the run's ball, for records that are
    read more than once or in secret, for silos with budgets and weights of their own, and for releases of
    integers, whose noise is of another form.
    """
    problem = make_problem(cell, plan.objective)
    schedule = plan.schedule
    if schedule.secret or not schedule.single_pass or plan.exact_plan is not None or cell.privacy.shares:
        return None
    radius = float(getattr(cell.algorithm.settings, "radius", math.inf))
    if not (radius <= problem.convex_within and math.isfinite(radius) and math.isfinite(problem.smoothness)):
        return None
    rounds = range(1, schedule.rounds + 1)
    clips = np.array([float(plan.estimator.round(t).clip) / max(1, schedule.expected_batches(t)) for t in rounds])
    workload = Workload(schedule, plan.estimator.decay, clips, plan.estimator.period)
    released = ReleaseNumbers(
        problem.batch,
        problem.dimension,
        clips,
        plan.noise.std_in_mean * np.sqrt(plan.mechanism.variance(workload)),
    )
    return cell.algorithm.row.excess_risk(cell.algorithm.settings, problem, released)


@dataclass(frozen=True)
class Absences:
    """Silo -> the rounds, in order, in which it is away; silos that never are have none."""

    rounds: Mapping[int, tuple[int, ...]]

    def __bool__(self) -> bool:
        return bool(self.rounds)

    def absent_silos(self, t: int) -> frozenset[int]:
        """The silos that do not answer in round t."""
        return frozenset(silo for silo, rounds in self.rounds.items() if t in rounds)


NO_ABSENCES = Absences({})


def draw_absences(cell: Cell) -> Absences:
    """Draw the absences of a scenario, a function of its seed; the same for every engine."""
    federation, rounds = cell.federation, cell.schedule.rounds
    away: dict[int, set[int]] = {int(silo): set(given) for silo, given in federation.away.items()}
    if federation.drop_out:
        coins = public_generator(cell.seed, "drop-outs").random((rounds, federation.silos))
        for t, silo in zip(*(coins < federation.drop_out).nonzero(), strict=True):
            away.setdefault(int(silo), set()).add(int(t) + 1)
    return Absences({silo: tuple(sorted(given)) for silo, given in sorted(away.items()) if given})
