"""From a scenario's cell to everything that is fixed and public before round 1.

Silo, server, accountant and every engine build the same plan from the same cell; no number is sent around.  A plan
says what its owners release (`Plan.releases`), how long its messages are, and, by `survives_gaps` and
`excess_risk_bound`, what can be said of the run beforehand.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
import torch

from fedpriv.accounting.gaussian import APART, Relation, epsilon_of
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER
from fedpriv.loss.augment import check_seen_whole
from fedpriv.loss.curves import CurveScores
from fedpriv.loss.estimators import Estimator, RaisedClips, Round, rounds_of
from fedpriv.loss.indicators import Indicators
from fedpriv.loss.objective import Objective
from fedpriv.loss.ridge import RidgeStatistics
from fedpriv.loss.rows import ColumnMoments
from fedpriv.loss.views import PerUnit
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.integers.plan import ExactPlan
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.registry import check_known
from fedpriv.noise.trust import RECORD, Noise, NoiseSource, Trust, Unit
from fedpriv.noise.workload import Workload
from fedpriv.papers.base import Bound, Optimizer, Problem, ReleaseNumbers
from fedpriv.participation.dependence import check_dependence
from fedpriv.participation.orders import Participation
from fedpriv.participation.secret import SecretOrder
from fedpriv.rounds.arithmetic import (
    REALS,
    Reals,
    Wholes,
    batch_clips,
    check_clips,
    check_noise,
    check_sums,
    exact_plan_of,
    float_noise_of,
    largest_sum,
    lattice_of,
    noise_of,
    workload_of,
)
from fedpriv.rounds.ledger import ReleaseStream
from fedpriv.scenario.schema import Cell


def check_gaps(cell: Cell, estimator: Estimator, mechanism: Mechanism) -> None:
    """InputError for a run that is to go on without a silo, and cannot: see `survives_gaps`."""
    if (key := cell.without_silos) is not None and not survives_gaps(estimator, mechanism):
        raise InputError(
            f"{key}: {cell.algorithm.row.name} cannot go on without a silo: its sums restart, or are taken apart, "
            "or its silos step by themselves, or its privacy rests on how far queries move between rounds"
        )


def survives_gaps(estimator: Estimator, mechanism: Mechanism) -> bool:
    """Whether a silo may skip rounds: its next increment then starts at the query that it answered last."""
    first = estimator.round(1)
    plain = estimator.period is None and first.split is None and first.local is None
    return plain and mechanism.movement is None and mechanism.draws(1) is None


def problem_of(cell: Cell, objective: Objective) -> Problem:
    """The public numbers of a cell, from which its parameters follow."""
    return Problem(
        dimension=objective.dimension,
        lipschitz=objective.lipschitz,
        smoothness=objective.smoothness,
        convex=objective.convex,
        convex_within=objective.convex_within,
        batch=sum(cell.batch_sizes),
        schedule=cell.schedule,
        epsilon=None if cell.target is None else epsilon_of(cell.target, cell.privacy.delta),
        delta=cell.privacy.delta,
        seed=cell.seed,
        silos=len(cell.batch_sizes),
        relation=cell.privacy.relation,
        unit=cell.privacy.protected,
    )


@dataclass(frozen=True)
class Plan:
    """The parts of one run, calibrated."""

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
    """What silos take increments of; evaluations are of the model's own loss."""
    trust: Trust
    arithmetic: Reals | Wholes = REALS
    """The numbers of its sums, noise and messages."""
    unit: Unit = RECORD
    """A row of a batch: what is clipped, and what batches and weights count."""
    model_length: int | None = None
    """How many numbers the model has that an evaluation is of."""
    apart: float = APART
    """The largest distance of two increments, in clips: see `apart_of`."""

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Rounds 1, 2, … of the estimator, made once."""
        return rounds_of(self.estimator, self.schedule.rounds)

    @cached_property
    def query_length(self) -> int:
        """How many numbers a query has: as many as a release, unless a model is asked about, not trained."""
        return self.objective.dimension if self.model_length is None else self.model_length

    @cached_property
    def masked(self) -> bool:
        """Whether the server gets the silos' messages in their sum alone."""
        return self.trust.masked and bool(self.noise.sources)

    @property
    def exact(self) -> ExactPlan:
        """Lattice, sums and noise of integers; ValueError for a plan in floating point."""
        return self.arithmetic.exact

    @cached_property
    def message_dtype(self) -> torch.dtype:
        """Of a silo's message, which is one row of numbers: words where masked, sums where noise is to come."""
        if self.masked:
            return self.arithmetic.masked_dtype
        if not float(self.noise.std_of(SERVER)):
            return self._dtype
        return self.arithmetic.sums_dtype

    @cached_property
    def _dtype(self) -> torch.dtype:
        """The model's; asked for with every message, while making x_1 can take as long as a round."""
        return self.objective.initial().dtype

    @cached_property
    def at_server(self) -> Reals | Wholes:
        """The numbers of what a server adds up: real vectors where running sums leave the silos."""
        return self.arithmetic if self.trust.releases(SERVER) else REALS

    @cached_property
    def of_one_round(self) -> bool:
        """Whether a silo's message has its sums of this round alone, which the server adds to those before."""
        return self.arithmetic.adds_rounds and self.trust.draws(SERVER)

    def message_length(self, t: int) -> int:
        """How many numbers of `message_dtype` a silo's message of round t has."""
        return self.kept_length(t) * (self.arithmetic.masked_length if self.masked else 1)

    def bytes_sent(self, rounds: int) -> int:
        """By one silo in the first rounds, headers apart."""
        return sum(map(self.message_length, range(1, rounds + 1))) * self.message_dtype.itemsize

    @cached_property
    def kept_dtype(self) -> torch.dtype:
        """Of what a server keeps of a round: noisy integers, or what it released."""
        return self.at_server.sums_dtype if self.at_server.adds_rounds else self._dtype

    def kept_length(self, t: int) -> int:
        """How many numbers of `kept_dtype` that are in round t."""
        return self.objective.dimension * self.at_server.kept(t)

    @property
    def largest_clip(self) -> float:
        """Of any round and part, as records meet it: not divided by the batches of a round."""
        return max(max(current.clips) for current in rounds_of(self.estimator, self.schedule.rounds))

    def releases(self, rounds: int) -> tuple[ReleaseStream, ...]:
        """What the noise owners of this plan have released after `rounds` rounds, for the ledger.

        Read off the parts that compute, not off the target they were calibrated for.  Silos that are alike are
        one entry; a plan without noise has one entry, with standard deviation 0.  Masked messages are one entry:
        their sums, with the noise that all sources together put there.
        """
        if not self.noise.sources:
            return (self._stream("everyone", SERVER, self.unit.in_silo(min(self.batch_sizes)), 0.0, rounds),)
        if self.masked:
            owners = _owners([source.owner for source in self.noise.sources])
            std = self.noise.std_in_mean
            number = len(self.noise.sources)
            return (self._stream(f"sum of {owners}", SERVER, self._per_record_in_mean, std, rounds, number),)
        alike = itertools.groupby(self.noise.sources, key=lambda source: (self._per_record(source), source.std))
        owners_of = [(key, [source.owner for source in sources]) for key, sources in alike]
        return tuple(
            self._stream(_owners(numbers), numbers[0], per_record, float(std), rounds)
            for (per_record, std), numbers in owners_of
        )

    def gradient_evaluations(self, rounds: int, missed: Mapping[int, Sequence[int]] | None = None) -> int:
        """Gradients (or values) of single records that all silos take in the first rounds, expected if sampled.

        `missed` has the rounds in which a silo did not answer.
        """
        of_round = self._evaluations(rounds)
        without = sum(
            self.batch_sizes[silo] * sum(of_round[t - 1] for t in away) for silo, away in (missed or {}).items()
        )
        return sum(self.batch_sizes) * sum(of_round) - without

    def most_held(self, silo: int) -> int:
        """Records that a round is made to hold; if secret, as nearly none exceeds: `prices` charges for others."""
        if isinstance(self.schedule, SecretOrder):
            return self.schedule.capacity(self.batch_sizes[silo]).rows
        return self.batch_sizes[silo] * self._most_batches

    @cached_property
    def beside(self) -> int:
        """Values that exist at a time beside increments, of one replicate in the round that has the most."""
        rows = sum(map(self.most_held, range(len(self.batch_sizes))))
        asked = {current.gradients for current in rounds_of(self.estimator, self.schedule.rounds)}
        return max(self.objective.beside(points, rows) for points in asked)

    @cached_property
    def _most_batches(self) -> int:
        """Batches that a silo reads in the round in which it reads the most."""
        return max(map(self.schedule.most_batches, range(1, self.schedule.rounds + 1)))

    def _evaluations(self, rounds: int) -> list[int]:
        """Of one record of every batch, round by round."""
        read = map(self.schedule.expected_batches, range(1, rounds + 1))
        asked = (current.gradients for current in rounds_of(self.estimator, rounds))
        return [count * self.objective.evaluations(points) for count, points in zip(read, asked, strict=True)]

    def stream_of(self, silo: int, rounds: int) -> ReleaseStream:
        """What one silo itself releases; standard deviation 0 where it adds no noise."""
        std = float(self.noise.std_of(silo))
        return self._stream(f"silo {silo}", silo, self.unit.in_silo(self.batch_sizes[silo]), std, rounds)

    def _stream(
        self, title: str, owner: int, per_record: float, std: float, rounds: int, owners: int = 1
    ) -> ReleaseStream:
        """`owners` is of how many the noise is that was added, and `owner` one of them."""
        accounted = self.schedule.first(rounds)
        clips = batch_clips(self.estimator, self.schedule)[: accounted.rounds]
        return ReleaseStream(
            title,
            self.mechanism,
            accounted,
            self.arithmetic.decay(self.estimator),
            clips,
            per_record,
            self.relation,
            std,
            self.estimator.period,
            self.unit,
            self.arithmetic.told(std, owners, owner),
            apart=self.apart,
        )

    def _per_record(self, source: NoiseSource) -> float:
        """The weight of one record's increment in what this owner releases."""
        return (
            self._per_record_in_mean
            if source.owner == SERVER
            else self.unit.in_silo(self.batch_sizes[source.owner])
        )

    @property
    def _per_record_in_mean(self) -> float:
        return self.unit.in_mean(self.weights, self.batch_sizes)


def _owners(numbers: list[int]) -> str:
    if numbers == [SERVER]:
        return "server"
    return f"silo {numbers[0]}" if len(numbers) == 1 else f"silos {numbers[0]}-{numbers[-1]}"


def plan_of(cell: Cell, objective: Objective, *, released: bool = False) -> Plan:
    """Calibrate the noise to the cell's privacy target and derive the optimizer from it.

    With `released`, noise is there to protect somebody, and what is released are integers, as in a simulation
    with `run.arithmetic = "integers"`; InputError for what cannot be.

    Guarantee: clips, noise and sums of a plan are numbers that floating point holds (see `arithmetic`);
    InputError otherwise, for a silo's guard and for a simulation alike.
    """
    check_scaled(cell)
    row, settings, trust = cell.algorithm.row, cell.algorithm.settings, cell.algorithm.trust_setting
    schedule = cell.schedule
    batch_sizes = cell.batch_sizes
    weights = weights_of(cell)
    problem = problem_of(cell, objective)
    estimator, mechanism, workload = sums_of(cell, problem)
    check_known(mechanism, workload, row.name)
    check_gaps(cell, estimator, mechanism)
    private = cell.target is not None
    check_clips(rounds_of(estimator, schedule.rounds), max(batch_sizes), private)
    relation, unit = cell.privacy.relation, cell.privacy.protected
    check_seen_whole(objective, seen := row.objective(settings, problem, objective), row.name)
    looked_at = _by_units(seen, unit)
    if private:
        check_dependence(looked_at, schedule.allowed, f'federation.sampling = "{schedule.name}"')
    arithmetic: Reals | Wholes = REALS
    apart = apart_of(looked_at, estimator, mechanism, schedule)
    if _exactly(cell, released):
        exact = exact_plan_of(cell, looked_at, estimator, mechanism, workload, apart)
        arithmetic, mechanism, noise = (
            Wholes(exact),
            exact.run.factored.mechanism,
            noise_of(exact, trust, batch_sizes, weights),
        )
        check_noise(noise)
    else:
        noise = float_noise_of(cell, schedule, workload, mechanism, weights, apart)
        check_noise(noise)
        if noise.sources:
            check_sums(noise, largest_sum(schedule, estimator), mechanism.fresh_std or 1.0)
            if trust.masked:
                arithmetic = Reals(lattice_of(cell, schedule, estimator, noise))
    optimizer = row.optimizer(settings, problem, noise.std_in_mean)
    return Plan(
        schedule,
        batch_sizes,
        weights,
        estimator,
        mechanism,
        noise,
        optimizer,
        relation,
        looked_at,
        trust,
        arithmetic,
        unit,
        apart=apart,
    )


def sums_of(cell: Cell, problem: Problem) -> tuple[Estimator, Mechanism, Workload]:
    """Estimator, mechanism and running sums of a cell's row, before any noise is calibrated."""
    row, settings, schedule = cell.algorithm.row, cell.algorithm.settings, cell.schedule
    estimator = row.estimator(settings, problem)
    workload = workload_of(estimator, schedule)
    mechanism = row.mechanism(settings, problem, workload)
    if (factors := settings.clip_factors(mechanism, workload)) is not None:
        estimator = RaisedClips(estimator, factors)
        workload = workload_of(estimator, schedule)
    return estimator, mechanism, workload


def weights_of(cell: Cell) -> tuple[float, ...]:
    """p_i of every silo's mean, which sum to 1: by the records of a round, B_i / Σ B.

    Silos with budgets of their own are weighted by the inverse variance of their noise, (B_i μ_i)² / Σ (B μ)²: of
    all fixed weights these leave the least noise in the mean.  They are public, and fixed before round 1.
    """
    sizes, mus = cell.batch_sizes, cell.targets
    each = (
        [(size * mu) ** 2 for size, mu in zip(sizes, mus, strict=True)] if cell.privacy.shares and mus else sizes
    )
    total = sum(each)
    return tuple(part / total for part in each)


ALLOWANCE = 2.0**-20
"""Relative, of `apart`: above every rounding of increments, on a lattice too.

Let two increments be `a` ≥ 1 clips apart, and K = ⌊clip/u⌋ the clip in units u.  On the lattice they are (K + 1) a
apart at most.  Scaling to K is a projection, up to a relative 2^-31 for its float64 norm.  Truncation towards zero
moves a difference by less than 1 a coordinate, so by √d.  A plan has 2^22 √d ≤ K, or is refused (`exact_plan_of`),
so that all of this is below (1 + √d + 2^-30 K) / K < 2^-20 of a.  In float64 alone it is below 2^-45.
"""


_Close = Indicators | ColumnMoments | CurveScores | RidgeStatistics
"""Classes whose `diameter` is proved."""


def apart_of(objective: Objective, estimator: Estimator, mechanism: Mechanism, order: Participation) -> float:
    """The largest distance of two increments in clips, 2 unless a smaller one is proved.

    Guarantee: smaller than 2 only where all that is released is one round's sum of increments that are public
    vectors or moments, means of them, or zeros, no two of them further apart than their class's `diameter`; and
    clipping, a projection on a ball, brings none further apart.  No other class is believed.
    """
    base = objective.base if type(objective) is PerUnit else objective
    first, fresh = estimator.round(1), type(mechanism) is IndependentGaussian
    plain = first.split is None and first.local is None and tuple(first.coefficients) == (1.0,)
    if not isinstance(base, _Close) or type(base) not in get_args(_Close):
        return APART
    if not plain or not fresh or order.secret or order.rounds != 1:
        return APART
    return min(APART, max(1.0, base.diameter / float(first.clip)) * (1.0 + ALLOWANCE))


def check_scaled(cell: Cell) -> None:
    """InputError for a cell whose records cannot be seen yet: its first step has not been taken."""
    if cell.data.unscaled:
        raise InputError(
            "data.scale: means and deviations come from a first step, which `fedpriv run` takes; use it, or leave "
            "[data.scale] out"
        )


def _by_units(objective: Objective, unit: Unit) -> Objective:
    """The objective over rows that are units; InputError for one that takes rows for records."""
    check_dependence(objective, unit.allowed, f'privacy.unit = "{unit.name}"')
    return objective if unit.records == 1 else PerUnit(objective, unit.records)


def _exactly(cell: Cell, released: bool) -> bool:
    """Whether the run's releases are integers; InputError for a simulation that asks so for none."""
    private = cell.target is not None
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
    problem = problem_of(cell, plan.objective)
    schedule = plan.schedule
    if schedule.secret or not schedule.single_pass or isinstance(plan.arithmetic, Wholes) or cell.privacy.shares:
        return None
    radius = float(getattr(cell.algorithm.settings, "radius", math.inf))
    if not (radius <= problem.convex_within and math.isfinite(radius) and math.isfinite(problem.smoothness)):
        return None
    rounds = range(1, schedule.rounds + 1)
    clips = np.array([float(plan.estimator.round(t).clip) / max(1, schedule.expected_batches(t)) for t in rounds])
    workload = Workload(schedule, plan.estimator.decay, clips, plan.estimator.period)
    stds = plan.noise.std_in_mean * np.sqrt(plan.mechanism.variance(workload))
    released = ReleaseNumbers(problem.batch, problem.dimension, clips, stds)
    return cell.algorithm.row.excess_risk(cell.algorithm.settings, problem, released)
