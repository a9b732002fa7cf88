"""Audit of a cell: lower bounds on μ from the code of a deployment, compared with the claim.

A *cell* is a run with every key of its scenario resolved.  A *canary* is a planted unit, such as a record, with
two worlds, chosen by a fair coin: present or absent under zero-out, and one increment or its opposite under
replace-one.  A *guard* is the process of a silo that has its records and answers queries.  A *family* is a group
of tests that share one probability of a false refutation.

Guards with their ledgers, and a server that adds noise with its journal, run on canaries as in a deployment.  In a
public order, these families of tests try to tell the two worlds of a canary apart:

* canaries in the worst case of clip and relation, in rounds, first step and evaluations, each part alone and all
  together (`transcripts`, `statistics`),
* the same canaries under hostile queries (`attacks.hostile_queries`),
* the same canaries after a machine is restored from a backup and gets another query (`transcripts`),
* bits of the noisy integers (`attacks`),
* missing replies to hostile queries, and replies that are not finite or too long (`attacks`).

Secret rounds, in which only a silo knows which of its records take part, and releases of statistics have families
of their own (`secret`, `counts`).  The claim is refuted if a lower bound on μ, corrected for the number of tests
(Bonferroni), exceeds it.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.addons.audit import secret
from fedpriv.addons.audit.canaries import make_canary_objective, rows_by_round
from fedpriv.addons.audit.counts import CANARIES_PER_RELEASE, COUNTS, audit_counts, make_counts_cell
from fedpriv.addons.audit.families import (
    CANARY_COUNT,
    FAMILIES,
    HEAVIEST_ROUND_COUNT,
    FamilyResult,
    ProgressCallback,
    StepCounter,
    audit_canaries,
    make_evaluation_parts,
    make_run_parts,
    run_families,
    run_seed,
)
from fedpriv.addons.audit.statistics import ClaimedCurve
from fedpriv.addons.audit.transcripts import check_canary_units
from fedpriv.addons.statistics.indicators import STATISTICS
from fedpriv.core.errors import refuse
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.noise.trust import RECORD
from fedpriv.plan.plan import make_plan
from fedpriv.scenario.schema import Cell

MIN_TRIALS = 2 * CANARY_COUNT
MIN_MU, MAX_MU = 1e-3, 100.0  # outside, no feasible number of trials shows anything


@dataclass(frozen=True)
class Audit:
    """Outcome of an audit.

    `mu` is a lower bound on the privacy loss of the code, wrong with a probability of at most 1 - confidence.
    `claimed_mu` and `mu` are those of the family whose bound is the largest fraction of its claim.

    The claim of secret rounds is a curve.  Then `claimed_mu` is the μ that the curve allows at the rate `alarms`
    of false alarms, and the family is that with the largest difference of shown and allowed μ.  If only the run's
    evaluations exceed their claim, `claimed_mu` and `mu` are theirs.
    """

    claimed_mu: float
    mu: float
    epsilon: float
    """ε that the same test shows at `delta`."""
    claimed_epsilon: float
    """Claimed ε at `delta`."""
    delta: float
    statistic: str
    """Name of the test that shows `mu`."""
    families: Mapping[str, float]
    """Lower bound on μ by family, 0 if it shows nothing."""
    claims: Mapping[str, float]
    """Claimed μ by family, or the μ that a curve allows."""
    sees: Mapping[str, float]
    """Largest share of the noise that is refuted with probability 95 % or more, by family.

    Families without a computed share are left out.
    """
    confidence: float
    trials: int
    """Number of canaries of the rounds under ordinary queries, or of releases of statistics."""
    rounds: int
    """Number of rounds of the small run that was audited."""
    silos: int
    """Number of silos of the small run."""
    trust: str
    relation: str
    unit: str
    """Description of the unit of protection."""
    dtype: str
    """Floating-point type of the scenario."""
    seconds: float
    """Duration of the audit."""
    alarms: float | None = None
    """Upper bound on the rate of false alarms at which `mu` was shown, or None for a claim of a μ."""
    pool: bool = False
    """Whether units are clients, whose pool is simulated, so that only the server runs as deployed."""

    @property
    def stands(self) -> bool:
        """Whether the shown μ is at most the claimed one."""
        return self.mu <= self.claimed_mu


def audit(
    cell: Cell,
    claimed_mu: float = 1.0,
    trials: int = 16_384,
    confidence: float = 0.99,
    seed: int = 0,
    progress: ProgressCallback = lambda _: None,
    families: Collection[str] = tuple(FAMILIES),
) -> Audit:
    """Audit the code path of a cell.

    The cell is cut to a few rounds and silos, and recalibrated to `claimed_mu` by the code under audit.  Canaries
    run on it, each in one of its two worlds by a coin that follows from `seed`.  A family of tests computes a
    lower bound on μ from the releases.

    Guarantee: code that keeps its claim is refuted with probability at most 1 - confidence.  Under zero-out an
    absent canary has a gradient at the bias, which is assumed to change no refusal, and no value but the bias's.

    Args:
        cell: Cell of a scenario.
        claimed_mu: μ of the claim, from 0.001 to 100.
        trials: Number of canaries, at least 2048, rounded up to whole runs of 1024.  A run whose rounds read fewer
            than four different ranges of rows has 256 canaries for each range instead.  A run of secret rounds
            counts as 512, and has one canary a row if it has fewer rows.  For statistics there are `trials` / 16
            releases, rounded up.
        confidence: Confidence of the lower bounds, in [0.5, 1).
        seed: Seed of the coins.
        progress: Function that is called with an estimate of the finished share of the work, up to 1.
        families: Names of the families to run, one or more of `FAMILIES`, for rounds in a public order.  Secret
            rounds and statistics have families of their own, which all run.

    Raises:
        InputError: If the cell has no noise or cannot be audited by canaries, or an option is out of range.
        AuditRefutedError: If records are not read as the claim assumes.
    """
    _check_options(cell, claimed_mu, trials, confidence, seed)
    start_time = time.perf_counter()
    with limit_to_one_thread(), torch.inference_mode():
        if cell.schedule.secret:
            return _audit_secret_rounds(cell, claimed_mu, trials, confidence, seed, progress, start_time)
        if cell.model.name == STATISTICS:
            return _audit_statistics(cell, claimed_mu, trials, confidence, seed, progress, start_time)
        runs = -(-trials // CANARY_COUNT)
        parts = make_run_parts(cell, claimed_mu, runs, seed)
        results = run_families(parts, 1.0 - confidence, families, progress)
    bound, small_cell = _make_bound(_worst_result(results), cell.privacy.delta), parts["rounds"].small_cell
    # A round has `HEAVIEST_ROUND_COUNT` canaries at most, and rounds that read the same rows have the same ones.
    canary_count = min(CANARY_COUNT, HEAVIEST_ROUND_COUNT * len(set(rows_by_round(small_cell))))
    return _make_audit(cell, small_cell, bound, results, confidence, runs * canary_count, start_time)


class _Bound(NamedTuple):
    """Fields of the outcome that describe its bound and its claim."""

    claimed_mu: float
    mu: float
    """Shown μ."""
    epsilon: float
    """Shown ε."""
    claimed_epsilon: float
    statistic: str
    """Name of the test."""
    alarms: float | None = None
    """Upper bound on the test's rate of false alarms, or None for a claim of a μ."""


def _make_bound(result: FamilyResult, delta: float) -> _Bound:
    shown_epsilon, claimed_epsilon = (
        epsilon_of(result.mu, delta) if result.mu else 0.0,
        epsilon_of(result.claimed_mu, delta),
    )
    return _Bound(result.claimed_mu, result.mu, shown_epsilon, claimed_epsilon, result.test)


def _make_audit(
    cell: Cell,
    small_cell: Cell,
    bound: _Bound,
    results: Mapping[str, FamilyResult],
    confidence: float,
    trials: int,
    start_time: float,
) -> Audit:
    return Audit(
        **bound._asdict(),
        delta=cell.privacy.delta,
        families={family: result.mu for family, result in results.items()},
        claims={family: result.claimed_mu for family, result in results.items()},
        sees={
            family: result.detectable_noise_share
            for family, result in results.items()
            if result.detectable_noise_share is not None
        },
        confidence=confidence,
        trials=trials,
        rounds=small_cell.schedule.rounds,
        silos=small_cell.federation.silos,
        trust=cell.algorithm.trust,
        relation=cell.privacy.relation,
        unit=cell.privacy.protected_unit.description,
        dtype=cell.run.dtype,
        seconds=time.perf_counter() - start_time,
        pool=cell.federation.clients is not None,
    )


def _worst_result(results: Mapping[str, FamilyResult]) -> FamilyResult:
    """Return the result whose bound is the largest fraction of its claim."""
    return max(results.values(), key=lambda result: result.mu / result.claimed_mu)


def _check_options(cell: Cell, claimed_mu: float, trials: int, confidence: float, seed: int) -> None:
    """Refuse cells that the audit cannot test, and options out of range.

    Raises:
        InputError: With the first reason.
    """
    unit = cell.privacy.unit
    refuse(
        {
            'privacy.mode = "none": a run without noise claims nothing that could be audited': (
                cell.privacy.target_mu is None
            ),
            f"trials = {trials}, confidence = {confidence}, mu = {claimed_mu}: expected at least {MIN_TRIALS} "
            f"trials, a confidence in [0.5, 1) and a mu in [{MIN_MU:g}, {MAX_MU:g}]": (
                trials < MIN_TRIALS or not 0.5 <= confidence < 1.0 or not MIN_MU <= claimed_mu <= MAX_MU
            ),
            f"algorithm.name = {cell.algorithm.name!r}: canaries are gradients, and its records answer with more; "
            "audit a copy with 'dp-sgd', which has the same code of clip, noise and guards": (
                cell.algorithm.row.model is not None
            ),
            f'privacy.unit = "{unit}": canaries of statistics are records; audit a plan of records': (
                cell.model.name == STATISTICS and unit != RECORD.name
            ),
            'algorithm.trust = "curator": the audit is of what a deployment runs, and none runs this': (
                cell.algorithm.trust == "curator"
            ),
            f"seed = {seed}: expected a whole number of at least 0": seed < 0,
        }
    )
    check_canary_units(cell)
    if not cell.schedule.secret:
        rows_by_round(cell)  # refuses a public order that is not fixed


def _audit_statistics(
    cell: Cell, mu: float, trials: int, confidence: float, seed: int, progress: ProgressCallback, start_time: float
) -> Audit:
    """Audit releases of a plan's own tables, by the two records whose increments lie furthest apart."""
    release_count = -(-trials // CANARIES_PER_RELEASE)
    results = {
        COUNTS: audit_counts(cell, mu, release_count, 1.0 - confidence, seed, StepCounter(progress, release_count))
    }
    bound = _make_bound(results[COUNTS], cell.privacy.delta)
    return _make_audit(cell, make_counts_cell(cell, mu), bound, results, confidence, release_count, start_time)


def _audit_secret_rounds(
    cell: Cell, mu: float, trials: int, confidence: float, seed: int, progress: ProgressCallback, start_time: float
) -> Audit:
    """Audit secret rounds against the claimed trade-off curve, by two families of tests.

    * "canaries": many planted records in each run.  `trials` is their number, rounded up to whole runs.
    * "company": one planted record in each run, whose other records are known and pull the other way.  Runs are a
      sixteenth of `trials`, rounded down.

    The claimed curve of a family allows a test some μ, which depends on the test's rate of false alarms.  The
    excess of a family is the lower bound on μ that its best test shows, minus this μ.  The outcome is that of the
    family with the larger excess.  If only the run's evaluations, on test records, exceed their claim, the outcome
    is theirs.
    """
    canary_cell, company_cell = secret.make_canary_cell(cell, mu), secret.make_company_cell(cell, mu)
    canary_plan, company_plan = (
        make_plan(item, make_canary_objective(item, 1), for_release=True) for item in (canary_cell, company_cell)
    )
    # Number of runs with many canaries, and of runs with one canary each.
    runs, company_count = -(-trials // secret.CANARY_COUNT), trials // secret.TRIALS_PER_COMPANY_RUN
    evaluation_parts, failure = make_evaluation_parts(cell, mu, -(-trials // CANARY_COUNT), seed), 1.0 - confidence
    steps = StepCounter(
        progress,
        runs
        + company_count / secret.COMPANY_RUNS_PER_STEP
        + sum(part.run_count for part in evaluation_parts.values()),
    )
    run_trials = [
        secret.run_canaries(canary_cell, run_seed(seed, run_index)) for run_index in steps.after(range(runs))
    ]
    canary_trials = secret.CanaryTrials(*(np.concatenate(columns) for columns in zip(*run_trials, strict=True)))
    company_trials = secret.run_company(company_cell, company_count, seed, steps)
    # Bounds of the evaluations, which have a public order, and of both families of secret rounds.  If there are
    # evaluations, they have a fifth of the probability of failure and each family two fifths, else each a half.
    evaluation_results = audit_canaries(evaluation_parts, failure / 5.0, steps) if evaluation_parts else {}
    failure, curve = (
        failure * (0.4 if evaluation_parts else 0.5),
        ClaimedCurve(secret.sampled_guarantee(canary_plan)),
    )
    curve_results = {
        "canaries": secret.evaluate_canaries(canary_cell, canary_plan, canary_trials, curve, failure),
        "company": secret.evaluate_company(
            company_plan, company_trials, ClaimedCurve(secret.sampled_guarantee(company_plan)), failure
        ),
    }
    best_result, delta = max(curve_results.values(), key=lambda item: item.excess), cell.privacy.delta
    bound = _Bound(
        best_result.allowed_mu,
        max(0.0, best_result.mu),
        best_result.epsilon(delta),
        epsilon_of(mu, delta),
        best_result.test,
        best_result.false_alarm_rate,
    )
    if (
        bound.mu <= bound.claimed_mu
        and evaluation_results
        and (worst_evaluation := _worst_result(evaluation_results)).mu > worst_evaluation.claimed_mu
    ):
        bound = _make_bound(worst_evaluation, delta)
    results = {
        family: FamilyResult(max(0.0, item.mu), item.test, item.allowed_mu)
        for family, item in curve_results.items()
    }
    return _make_audit(
        cell,
        canary_cell,
        bound,
        results | evaluation_results,
        confidence,
        len(canary_trials.present) + company_count,
        start_time,
    )
