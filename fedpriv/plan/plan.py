"""Plan of a run: everything that is public and fixed before round 1.

Silos, server and accountant each build the plan from the scenario cell and the objective of its model
(`make_plan`).  A cell is one run of a scenario with all its settings, and its row the algorithm that it names:
estimator (increments and running sums), mechanism (noise) and optimizer.  A unit of protection is a record, or a
person or client with several.  An increment is a unit's clipped contribution to a round, and a release a running
sum of increments with its noise.  Participation says which units a round reads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from fedpriv.accounting.gaussian import APART, Relation, epsilon_of
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.random import SERVER, public_generator
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import Estimator, PlainGradient, RaisedClips, Round, make_rounds, max_running_sum
from fedpriv.loss.features import check_augmentation_allowed
from fedpriv.loss.models import SHIPPED as SHIPPED_MODELS
from fedpriv.loss.objective import (
    PROVED_DIAMETERS,
    Deterministic,
    EvaluationView,
    Objective,
    find_innermost_objective,
    is_shipped,
)
from fedpriv.loss.ridge import RidgeStatistics
from fedpriv.loss.rows import ColumnMoments
from fedpriv.loss.views import PerUnit
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.integers.plan import ExactPlan, IntegerRound
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.registry import check_readable
from fedpriv.noise.series import Workload
from fedpriv.noise.trust import CURATOR, RECORD, Noise, Trust, Unit
from fedpriv.papers.base import Bound, Optimizer, Problem, ReleaseNumbers
from fedpriv.papers.table import ALGORITHMS, SHIPPED
from fedpriv.participation.orders import (
    OWN_FACTS,
    Dependence,
    Participation,
    PublicOrder,
    check_dependence,
    declared_dependence,
)
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
)
from fedpriv.scenario.schema import Cell


def check_absences(cell: Cell, estimator: Estimator, mechanism: Mechanism) -> None:
    """Check that a run which is to continue without a silo can do so (`allows_absences`).

    Raises:
        InputError: The run is to continue without a silo, and cannot.
    """
    if (key := cell.absence_key) is not None and not allows_absences(estimator, mechanism):
        raise InputError(
            f"{key}: {cell.algorithm.row.name} cannot go on without a silo: its sums restart, or its increments "
            "are clipped in parts, or its silos step by themselves, or its privacy rests on how far queries move "
            "between rounds, or a round takes several noise vectors; leave the key out, or take another algorithm"
        )


def allows_absences(estimator: Estimator, mechanism: Mechanism) -> bool:
    """Whether estimator and mechanism allow that a silo skips rounds."""
    first = estimator.round(1)
    is_plain = estimator.period is None and first.split is None and first.local is None
    return is_plain and mechanism.movement is None and mechanism.draws(1) is None


def make_problem(cell: Cell, objective: Objective) -> Problem:
    """Return the public numbers of a cell, from which a row derives its parameters."""
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
    """Public numbers of one round."""

    step: Round
    """Coefficients, clips and decay of the estimator."""
    next_decay: Scalar
    """Decay of the running sum in the next round, or 0 after the last."""
    batch_range: range | None
    """Batches of the silo's order that are read, or None if the schedule is no `PublicOrder`."""
    batch_count: int
    """Expected number of batches, by which increments are divided, or 1 in a round that reads none."""
    noise_vector_count: int | None
    """Number of fresh noise vectors, or None for a single one that is not stacked."""
    message_length: int
    """Numbers of `Plan.message_dtype` in a silo's message."""
    stored_length: int
    """Numbers of `Plan.stored_dtype` that a server stores of the round."""
    integer_round: IntegerRound | None
    """Norms, shape and noise on the lattice, or None in floating point."""


@dataclass(frozen=True)
class Plan:
    """Calibrated parts of one run, and the table of its rounds.

    `__post_init__` derives all fields below `model_length`, also after `replace`.
    """

    schedule: Participation
    """Participation: which records take part in which rounds."""
    batch_sizes: tuple[int, ...]
    """Units of each silo in one batch (records, unless `unit` is another one), expected if sampled.

    A round's mean over a silo has the fixed denominator batch size · `PlannedRound.batch_count`.
    """
    weights: tuple[float, ...]
    """Weight p_i of each silo's mean in the server's mean.  The weights sum to 1 up to rounding."""
    estimator: Estimator
    """Definition of the increments and their running sums, round by round."""
    mechanism: Mechanism
    """Correlation of the noise over the rounds, and its sensitivity."""
    noise: Noise
    """Standard deviation of every party's fresh vectors, none for a run that is not private."""
    optimizer: Optimizer
    """Map from releases to queries and to the output."""
    relation: Relation
    """Neighbouring relation of the claim."""
    objective: Objective
    """Loss whose increments silos compute."""
    trust: Trust
    """Trust setting: who adds noise, and who sees messages."""
    dtype: torch.dtype
    """Type of queries and models."""
    exact_plan: ExactPlan | None = None
    """Lattice, sums and noise of releases that are integers, or None in floating point."""
    grid: Grid | None = None
    """Grid on which masked messages in floating point are added, or None for all other messages."""
    unit: Unit = RECORD
    """Unit of protection, which fills a row of a batch, and is clipped as a whole."""
    increment_diameter: float = APART
    """Largest distance of two increments, in clips (`find_increment_diameter`)."""
    model_length: int | None = None
    """Length of the evaluated model, or None in training."""

    query_length: int = field(init=False)
    """Length of a query: that of a release, or of the model that is evaluated."""
    masked: bool = field(init=False)
    """Whether the server learns only the sum of the silos' messages."""
    needs_batch_layout: bool = field(init=False)
    """Whether the objective may need the silos and rows of a round (`Objective.for_batch`)."""
    max_batches: int = field(init=False)
    """Most batches that a silo reads in a round."""
    integers_at_server: bool = field(init=False)
    """Whether the server adds up integers, and not released vectors."""
    sends_round_sums: bool = field(init=False)
    """Whether a silo's message has the sums of its round only, which the server adds to earlier ones."""
    message_dtype: torch.dtype = field(init=False)
    """Type of the numbers of a silo's message.

    | message | integers | floating point |
    |---|---|---|
    | masked | uint8, bytes of words | uint64 |
    | sums to which the server adds noise | int64 | float64 |
    | all others | `dtype` | `dtype` |
    """
    stored_dtype: torch.dtype = field(init=False)
    """Type of the vector that a server stores of a round: noisy integers, or its release."""
    rounds: tuple[PlannedRound, ...] = field(init=False, repr=False, compare=False)
    """Rounds 1, 2, …"""

    def __post_init__(self) -> None:
        """Derive all fields below `model_length`, with the table of rounds as the last one."""
        is_exact, trust = self.exact_plan is not None, self.trust
        masked, integers_at_server = (
            trust.masked and bool(self.noise.sources),
            is_exact and trust.publishes_sums(SERVER),
        )
        if masked:
            message_dtype = torch.uint8 if is_exact else torch.uint64
        elif float(self.noise.std_of(SERVER)):
            message_dtype = torch.int64 if is_exact else torch.float64
        else:
            message_dtype = self.dtype
        derived = {
            "query_length": self.objective.dimension if self.model_length is None else self.model_length,
            "masked": masked,
            "max_batches": max(map(self.schedule.max_batches, range(1, self.schedule.rounds + 1))),
            # A class that inherits `for_batch` of `Deterministic` ignores the layout.
            "needs_batch_layout": getattr(type(self.objective), "for_batch", None) is not Deterministic.for_batch,
            "integers_at_server": integers_at_server,
            "sends_round_sums": is_exact and trust.adds_noise(SERVER),
            "message_dtype": message_dtype,
            "stored_dtype": torch.int64 if integers_at_server else self.dtype,
        }
        # The class is frozen.
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        # The table is computed from the other derived fields.
        rounds = _plan_float_rounds(
            self.schedule, self.estimator, cast(Any, self.mechanism), self.objective.dimension
        )
        object.__setattr__(self, "rounds", tuple(map(self._add_integers, rounds)) if is_exact else rounds)

    def _add_integers(self, planned_round: PlannedRound) -> PlannedRound:
        """Return a round of floating point with its lattice, and with the lengths that this implies.

        A server stores d numbers of a round, or d for each noise vector if it adds up integers.  A masked message
        of integers has bytes of words in place of numbers.
        """
        exact = self.required_exact_plan
        integer_round = exact.plan_round(planned_round.step.t, planned_round.batch_count)
        assert len(integer_round.norms) == (planned_round.noise_vector_count or 1)
        stored_length = planned_round.stored_length * (len(integer_round.norms) if self.integers_at_server else 1)
        return planned_round._replace(
            message_length=stored_length * (exact.inputs.word_bits // 8 if self.masked else 1),
            stored_length=stored_length,
            integer_round=integer_round,
        )

    @property
    def required_exact_plan(self) -> ExactPlan:
        """Lattice, sums and noise of integers.

        Raises:
            ValueError: The plan is in floating point.
        """
        if self.exact_plan is None:
            raise ValueError("floating point has no lattice of integers: make_plan(…, for_release=True)")
        return self.exact_plan

    @property
    def max_clip(self) -> float:
        """Largest clip of any round and part of an increment, for one unit and before any division."""
        return max(max(round_plan.step.clips) for round_plan in self.rounds)

    def check_release_noise(self) -> None:
        """Refuse noise in floating point, which protects no one.

        Raises:
            ValueError: The plan has noise in floating point.
        """
        if self.noise.sources and self.exact_plan is None:
            raise ValueError("noise in floating point protects no one: make_plan(…, for_release=True)")

    def record_capacity(self, silo: int) -> int:
        """Number of units (records, unless `unit` is another one) for which a silo has memory in a round.

        No round of a public participation has more.  Under secret participation a round has more with a
        probability of at most 2^-40 (`SecretOrder.capacity`).
        """
        return (
            self.schedule.capacity(self.batch_sizes[silo]).row_count
            if isinstance(self.schedule, SecretOrder)
            else self.batch_sizes[silo] * self.max_batches
        )

    @property
    def extra_values(self) -> int:
        """Most values besides increments in a round, for one replicate, such as random directions."""
        rows = sum(map(self.record_capacity, range(len(self.batch_sizes))))
        return max(
            self.objective.extra_values(points, rows)
            for points in {round_plan.step.gradient_count for round_plan in self.rounds}
        )


@lru_cache(maxsize=4)
def _plan_float_rounds(
    schedule: Participation, estimator: Estimator, mechanism: Mechanism, length: int
) -> tuple[PlannedRound, ...]:
    """Plan the rounds of a run in floating point, cached for cells that differ in their noise only.

    Args:
        schedule: Participation.
        estimator: Estimator.
        mechanism: Mechanism, which gives the number of noise vectors.
        length: Number d of a vector's values, which are all sent and stored.
    """
    steps = make_rounds(estimator, schedule.rounds)
    return tuple(
        PlannedRound(
            step,
            next_decay,
            schedule.batches(step.t) if isinstance(schedule, PublicOrder) else None,
            max(1, schedule.expected_batches(step.t)),
            mechanism.draws(step.t),
            message_length=length,
            stored_length=length,
            integer_round=None,
        )
        # No round follows the last one: decay 0.
        for step, next_decay in zip(steps, [*(step.decay for step in steps[1:]), 0.0], strict=True)
    )


def make_plan(cell: Cell, objective: Objective, *, for_release: bool = False) -> Plan:
    """Plan a run: calibrate the noise to the cell's privacy target and derive the optimizer from it.

    Guarantee: clips and noise of a plan are numbers that floating point holds (`check_clips`, `check_noise`), and
    sums in floating point do not hide their noise (`check_sums`); InputError otherwise, for a deployment and for a
    simulation alike.  Sums of a run without noise are not checked.

    Args:
        cell: Cell of a scenario, in which the scaling of a table's columns is known.
        objective: Objective of the model.
        for_release: Whether the noise protects somebody.  Releases of a private run are then integers.

    Raises:
        InputError: The run cannot be planned.
    """
    # Parts that do not depend on the noise, and their checks.
    check_scaling_known(cell)
    row, settings, trust = cell.algorithm.row, cell.algorithm.settings, cell.algorithm.trust_setting
    schedule, batch_sizes, weights = cell.schedule, cell.batch_sizes, silo_weights(cell)
    problem = make_problem(cell, objective)
    estimator, mechanism, workload = make_uncalibrated_parts(cell, problem)
    check_absences(cell, estimator, mechanism)
    check_readable(mechanism, workload, row.name)
    private, rounds = cell.target_mu is not None, make_rounds(estimator, schedule.rounds)
    check_augmentation_allowed(objective, row_objective := row.objective(settings, problem, objective), row.name)
    relation, unit = cell.privacy.relation, cell.privacy.protected_unit
    check_dependence(row_objective, unit.allowed_dependence, f'privacy.unit = "{unit.name}"')
    unit_objective = row_objective if unit.max_records == 1 else PerUnit(row_objective, unit.max_records)
    if private:
        check_dependence(unit_objective, schedule.allowed_dependence, f'federation.sampling = "{schedule.name}"')
        # Estimator, mechanism and trust settings of a user's row may not belong together.
        refuse(
            {
                f"algorithm.trust = {trust.name!r}: silos of {row.name} step from what they released, which here "
                'lacks noise that protects by itself; use "untrusted"': (
                    not trust.private_messages and any(step.local is not None for step in rounds)
                ),
                f"{row.name}: silos step from each release by itself, whose noise is independent; take another "
                f"mechanism than {mechanism.name}": (
                    type(mechanism) is not IndependentGaussian and any(step.local is not None for step in rounds)
                ),
                f"model.name = {cell.model.name!r}: x_1 has another shape than ({unit_objective.dimension},), "
                "in which noise is drawn; let `dimension` and `initial` agree": (
                    unit_objective.initial().shape != (unit_objective.dimension,)
                ),
                f"algorithm.trust = {trust.name!r}: with the noise of {row.name} only what ends a phase is "
                f"private, and every query is broadcast; use {CURATOR.name!r}": (
                    trust.broadcasts and not mechanism.protects_queries
                ),
                f"{row.name}: {mechanism.name} noise rests on how far queries move, and gradients here follow "
                "from more than record, row, silo and query; take another mechanism": (
                    mechanism.movement is not None
                    and declared_dependence(unit_objective) & ~(OWN_FACTS & ~Dependence.ROUND)
                ),
                f"{row.name}: {mechanism.name} noise is for increments that are clipped "
                f"{'in parts, to its own norms' if mechanism.clipped_parts else 'as a whole'}; take another "
                "mechanism": ({step.clips[1:] for step in rounds} != {mechanism.clipped_parts}),
                f"{row.name}: {mechanism.name} noise rests on more than clipping an increment as a whole, and "
                "is for rows of fedpriv alone; take another mechanism": (
                    bool(mechanism.assumption or mechanism.clipped_parts)
                    and row
                    not in [
                        replace(
                            ALGORITHMS[name], name=row.name, title=row.title, source=row.source, trusts=row.trusts
                        )
                        for name in SHIPPED
                    ]
                ),
            }
        )
    check_clips(rounds, max(batch_sizes), private)
    # Noise, on integers or in floating point.
    exact, grid = None, None
    # Without views, a diameter is proved for the features that fedpriv's own models and rows give the objective.
    diameter = (
        find_increment_diameter(row_objective, estimator, mechanism, schedule)
        if type(find_innermost_objective(row_objective)) not in PROVED_DIAMETERS
        or (
            cell.model.name in SHIPPED_MODELS and all(map(is_shipped, (row.objective, row.model or row.objective)))
        )
        else APART
    )
    if _uses_integers(cell, for_release):
        exact = make_exact_plan(cell, unit_objective, estimator, mechanism, workload, diameter)
        mechanism, noise = (
            exact.inputs.factorization.mechanism,
            make_exact_noise(exact, trust, batch_sizes, weights),
        )
    else:
        noise = calibrate_float_noise(cell, schedule, workload, mechanism, weights, diameter)
    check_noise(noise)
    if noise.sources and exact is None:
        # A mechanism that states no fresh part (0) is held to the standard deviation of its fresh vectors.
        check_sums(noise, max_running_sum(schedule, estimator), mechanism.fresh_std or 1.0)
        if trust.masked:
            grid = make_message_grid(cell, noise, max_running_sum(schedule, estimator))
    return Plan(
        schedule,
        batch_sizes,
        weights,
        estimator,
        mechanism,
        noise,
        row.optimizer(settings, problem, noise.std_in_mean),
        relation,
        unit_objective,
        trust,
        unit_objective.initial().dtype,
        exact,
        grid,
        unit,
        diameter,
    )


def make_uncalibrated_parts(cell: Cell, problem: Problem) -> tuple[Estimator, Mechanism, Workload]:
    """Return estimator, mechanism and running sums of a cell's row, before any noise is calibrated.

    The mechanism is made for the estimator's own clips, which settings may then multiply by factors.

    Args:
        cell: Cell of a scenario.
        problem: Public numbers of the run, such as the dimension and the constants of the loss.

    Raises:
        InputError: The row refuses these settings, or the running sums are refused.
    """
    row, settings, schedule = cell.algorithm.row, cell.algorithm.settings, cell.schedule
    estimator = row.estimator(settings, problem)
    workload = make_workload(estimator, schedule)
    mechanism = row.mechanism(settings, problem, workload)
    if (factors := settings.clip_factors(mechanism, workload)) is not None:
        estimator = RaisedClips(estimator, factors)
        workload = make_workload(estimator, schedule)
    return estimator, mechanism, workload


def silo_weights(cell: Cell) -> tuple[float, ...]:
    """Compute the weight p_i of every silo's mean, proportional to its batch size B_i: B_i / Σ B.

    Silos with budgets μ_i of their own have the weights (B_i μ_i)² / Σ_j (B_j μ_j)².  In a public order a silo's
    noise has a variance proportional to 1 / (B_i μ_i)², so that these weights leave the least noise in the mean.
    """
    sizes, mus = cell.batch_sizes, cell.target_mus
    shares = (
        [(size * mu) ** 2 for size, mu in zip(sizes, mus, strict=True)] if cell.privacy.shares and mus else sizes
    )
    return tuple(share / total for total in (sum(shares),) for share in shares)


ROUNDING_ALLOWANCE = 2.0**-20
"""Relative allowance of the increment diameter, above all rounding in float64 and on a lattice.

Two increments that are `a` ≥ 1 clips apart are at most a (1 + 2^-20) clips apart on the lattice, as a plan has
2^22 √d ≤ K for the clip K in units, or is refused (`make_exact_plan`).  In float64 alone all roundings are below
2^-45.  Proof: docs/proofs/truncation.md.
"""


PROVED_DIAMETERS |= {ColumnMoments, RidgeStatistics}


def find_increment_diameter(
    objective: Objective, estimator: Estimator, mechanism: Mechanism, order: Participation
) -> float:
    """Return the largest distance of two increments in clips, 2 unless a smaller one is proved.

    A smaller one is `objective.diameter` / clip, at least 1, times 1 + 2^-20 for roundings.  Under replace-one it
    needs less noise.

    Guarantee: the result is smaller than 2 only where all that is released is one round's sum of increments, or
    sums of plain gradients with independent noise in every round.  There, increments of a round, means of several,
    and zeros are no further apart than the objective's `diameter`.  Clipping, a projection on a ball, brings none
    further apart.  Only classes in `PROVED_DIAMETERS` that fedpriv ships are believed, and only if rounds are
    public and no client decides on them: a client may be exchanged for one that comes in other rounds, and then
    even equal increments do not cancel.  Metrics change no increment, so that the result is the same for a server
    with metrics and for guards without them, and so are lattice and noise.

    Args:
        objective: Objective of the row, by records.
        estimator: Estimator of the row.
        mechanism: Mechanism of the row.
        order: Participation of the records.
    """
    first, is_independent = estimator.round(1), type(mechanism) is IndependentGaussian
    while isinstance(objective, EvaluationView) and is_shipped(type(objective)):
        objective = objective.base
    # Plain: clipped as a whole, without local steps, and the gradient at the round's own query.
    is_plain = first.split is None and first.local is None and tuple(first.coefficients) == (1.0,)
    is_each_round_alone = order.rounds == 1 or (type(estimator) is PlainGradient and estimator.decay == 0.0)
    if (
        not (type(objective) in PROVED_DIAMETERS and is_shipped(type(objective)))
        or not (is_plain and is_independent and is_each_round_alone)
        or order.secret
        or order.client_initiated
    ):
        return APART
    return min(
        APART, max(1.0, float(cast(Any, objective).diameter) / float(first.clip)) * (1.0 + ROUNDING_ALLOWANCE)
    )


def check_scaling_known(cell: Cell) -> None:
    """Check that the scaling of a table's columns is known.

    Raises:
        InputError: The cell's first step has not been taken, so that its records have no features yet.
    """
    if cell.data.needs_first_step:
        raise InputError(
            "data.scale: means and deviations come from a first step, which `fedpriv run` takes; use it, or leave "
            "[data.scale] out"
        )


def _uses_integers(cell: Cell, for_release: bool) -> bool:
    """Whether the run's releases are integers.

    Raises:
        InputError: The cell asks for integers and has no privacy target.
    """
    private = cell.target_mu is not None
    if cell.run.arithmetic == "integers" and not private:
        raise InputError(
            'run.arithmetic = "integers": without noise there is no lattice to release on; give a privacy target, '
            "or leave out run.arithmetic"
        )
    return private and (for_release or cell.run.arithmetic == "integers")


def excess_risk_bound(cell: Cell, plan: Plan) -> Bound | None:
    """Return the bound on the excess risk that the cell's row proves for its settings, or None.

    The excess risk is the mean loss of the output above the least one in the run's ball.  A bound needs a ball, a
    loss that is convex and smooth in it, records that are read once in a public order, all silos in every round,
    no budget shares, and releases in floating point.
    """
    problem, schedule = make_problem(cell, plan.objective), plan.schedule
    if (
        not (isinstance(schedule, PublicOrder) and schedule.single_pass)
        or plan.exact_plan is not None
        or cell.privacy.shares
        or cell.absence_key is not None
    ):
        return None
    radius = float(getattr(cell.algorithm.settings, "radius", math.inf))
    if not (radius <= problem.convex_within and math.isfinite(radius) and math.isfinite(problem.smoothness)):
        return None
    workload = make_workload(plan.estimator, schedule)
    return cell.algorithm.row.excess_risk(
        cell.algorithm.settings,
        problem,
        ReleaseNumbers(
            problem.batch,
            problem.dimension,
            workload.clips,
            plan.noise.std_in_mean * np.sqrt(plan.mechanism.variance(workload)),
        ),
    )


@dataclass(frozen=True)
class Absences:
    """Rounds in which each silo is absent, in order, without silos that are never absent."""

    rounds: Mapping[int, tuple[int, ...]]
    """Rounds of absence, from 1 and in order, by silo number."""

    def __bool__(self) -> bool:
        return bool(self.rounds)

    def absent_silos(self, t: int) -> frozenset[int]:
        """Return the silos that do not reply in round t."""
        return frozenset(silo for silo, rounds in self.rounds.items() if t in rounds)


NO_ABSENCES = Absences({})
"""Absences of a run whose silos all reply in every round."""


def draw_absences(cell: Cell) -> Absences:
    """Draw the absences of a simulation, a function of the cell alone.

    A silo is absent in the rounds that `federation.away` lists for it, and in any other round with probability
    `federation.drop_out`, independently.
    """
    federation, rounds = cell.federation, cell.schedule.rounds
    rounds_by_silo: dict[int, set[int]] = {
        int(silo): set(absent_rounds) for silo, absent_rounds in federation.away.items()
    }
    if federation.drop_out:
        uniforms = public_generator(cell.seed, "drop-outs").random((rounds, federation.silos))
        for t, silo in zip(*(uniforms < federation.drop_out).nonzero(), strict=True):
            rounds_by_silo.setdefault(int(silo), set()).add(int(t) + 1)
    return Absences(
        {
            silo: tuple(sorted(absent_rounds))
            for silo, absent_rounds in sorted(rounds_by_silo.items())
            if absent_rounds
        }
    )
