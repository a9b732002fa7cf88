"""`fedpriv audit`: does the code leak more than it claims?

The code that a deployment runs (guards with their ledgers, the server with its journal) is asked about canaries in
the scenario's own arithmetic, and fixed families of tests try to tell the worlds apart:

* canaries in the worst case of the clip and the relation (`transcripts`, `statistics`), in the rounds, in a first
  step, in evaluations, and in all of them together,
* the same canaries where hostile queries drive the arithmetic (`attacks.hostile_queries`),
* the same where a machine is put back to before a round, and asked another query there (`transcripts`),
* the bits of the noisy integers, and of the floats that leave (`attacks`),
* whether replies to hostile queries come, and are finite (`attacks`),

and the order in which records are read is compared with the definition of a single pass.  The largest lower bound
on μ, corrected for the size of the families (Bonferroni), must stay under the claim.
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
from fedpriv.addons.audit.transcripts import check_clients
from fedpriv.addons.statistics.indicators import STATISTICS
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.noise.trust import CLIENT, RECORD
from fedpriv.plan.plan import make_plan
from fedpriv.scenario.schema import Cell

MIN_TRIALS = 2 * CANARY_COUNT
MIN_MU, MAX_MU = 1e-3, 100.0  # beyond, no number of trials that can be run says anything


@dataclass(frozen=True)
class Audit:
    """The outcome: `mu` is exceeded by what the code leaks, but for a probability of 1 - confidence.

    Both are of the family that comes nearest to its claim, or exceeds it most: `families` has the bound of each
    that was tried, `claims` what each is about (parts of a run have claims of their own).  `sees` says, by
    family, which share of the noise it would notice: noise of that share of its size, or less, is refuted with
    probability 95 % or more, and a smaller loss of noise could be missed.  Where rounds are secret it has no share
    of theirs, and the claim is a curve: `claimed_mu` is what it allows at the rate `alarms` of false alarms, where
    `mu` was shown.
    `pool` says that units are clients, whose pool is simulated only: the server alone is a deployment's.
    """

    claimed_mu: float
    mu: float
    epsilon: float
    claimed_epsilon: float
    delta: float
    statistic: str
    families: Mapping[str, float]
    claims: Mapping[str, float]
    sees: Mapping[str, float]
    confidence: float
    trials: int
    rounds: int
    silos: int
    trust: str
    relation: str
    unit: str
    dtype: str
    seconds: float
    alarms: float | None = None
    pool: bool = False

    @property
    def stands(self) -> bool:
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
    """Audit a cell's code path, recalibrated to `claimed_mu` and cut to a few rounds and silos by the same code.

    About `trials` canaries are tried, a quarter of them in the round where they weigh most.  InputError for a cell
    without noise or options out of range; AuditRefutedError if records are not read as the claim presumes.
    Coins are `seed`'s; noise is keyed by the operating system, as in every deployment.
    `families` are those to try.

    Guarantee: code that keeps its claim is refuted with probability at most 1 - confidence.
    """
    _check_options(cell, claimed_mu, trials, confidence, seed)
    started = time.perf_counter()
    with limit_to_one_thread(), torch.inference_mode():
        if cell.schedule.secret:
            return _audit_secret_rounds(cell, claimed_mu, trials, confidence, seed, progress, started)
        if cell.model.name == STATISTICS:
            return _audit_statistics(cell, claimed_mu, trials, confidence, seed, progress, started)
        runs = -(-trials // CANARY_COUNT)
        parts = make_run_parts(cell, claimed_mu, runs, seed)
        found = run_families(parts, 1.0 - confidence, families, progress)
    bound = _make_bound(_worst_result(found), cell.privacy.delta)
    return _make_audit(cell, parts["rounds"].small_cell, bound, found, confidence, runs * CANARY_COUNT, started)


class _Bound(NamedTuple):
    """The first fields of an outcome: the bound that is the largest part of its claim."""

    claimed_mu: float
    mu: float
    epsilon: float
    claimed_epsilon: float
    statistic: str
    alarms: float | None = None


def _make_bound(worst: FamilyResult, delta: float) -> _Bound:
    shown, claimed = epsilon_of(worst.mu, delta) if worst.mu else 0.0, epsilon_of(worst.claimed_mu, delta)
    return _Bound(worst.claimed_mu, worst.mu, shown, claimed, worst.test)


def _make_audit(
    cell: Cell,
    small: Cell,
    bound: _Bound,
    found: Mapping[str, FamilyResult],
    confidence: float,
    trials: int,
    started: float,
) -> Audit:
    return Audit(
        **bound._asdict(),
        delta=cell.privacy.delta,
        families={family: each.mu for family, each in found.items()},
        claims={family: each.claimed_mu for family, each in found.items()},
        sees={
            family: each.detectable_noise_share
            for family, each in found.items()
            if each.detectable_noise_share is not None
        },
        confidence=confidence,
        trials=trials,
        rounds=small.schedule.rounds,
        silos=small.federation.silos,
        trust=cell.algorithm.trust,
        relation=cell.privacy.relation,
        unit=cell.privacy.protected_unit.description,
        dtype=cell.run.dtype,
        seconds=time.perf_counter() - started,
        pool=cell.federation.clients is not None,
    )


def _worst_result(found: Mapping[str, FamilyResult]) -> FamilyResult:
    """The bound that is the largest part of its claim."""
    return max(found.values(), key=lambda each: each.mu / each.claimed_mu)


def _check_options(cell: Cell, claimed_mu: float, trials: int, confidence: float, seed: int) -> None:
    if cell.privacy.target_mu is None:
        raise InputError('privacy.mode = "none": a run without noise claims nothing that could be audited')
    if trials < MIN_TRIALS or not 0.5 <= confidence < 1.0 or not MIN_MU <= claimed_mu <= MAX_MU:
        raise InputError(
            f"trials = {trials}, confidence = {confidence}, mu = {claimed_mu}: expected at least {MIN_TRIALS} "
            f"trials, a confidence in [0.5, 1) and a mu in [{MIN_MU:g}, {MAX_MU:g}]"
        )
    if cell.algorithm.row.model is not None:
        raise InputError(
            f"algorithm.name = {cell.algorithm.name!r}: canaries are gradients, and its records answer with more; "
            "audit a copy with 'dp-sgd', whose clip, noise and guards are the same"
        )
    if cell.model.name == STATISTICS and cell.privacy.unit != RECORD.name:
        raise InputError(
            f'privacy.unit = "{cell.privacy.unit}": canaries of statistics are records; audit a plan of records'
        )
    if cell.privacy.unit == CLIENT.name:
        check_clients(cell)
    if cell.algorithm.trust == "curator":
        raise InputError('algorithm.trust = "curator": the audit is of what a deployment runs, and none runs this')
    if not cell.schedule.secret:
        rows_by_round(cell)
    if seed < 0:
        raise InputError(f"seed = {seed}: expected a whole number of at least 0")


def _audit_statistics(
    cell: Cell, mu: float, trials: int, confidence: float, seed: int, progress: ProgressCallback, started: float
) -> Audit:
    """Statistics: releases of the plan's own tables, in which the canary is in one of two cells of each."""
    releases = -(-trials // CANARIES_PER_RELEASE)
    found = {COUNTS: audit_counts(cell, mu, releases, 1.0 - confidence, seed, StepCounter(progress, releases))}
    bound = _make_bound(found[COUNTS], cell.privacy.delta)
    return _make_audit(cell, make_counts_cell(cell, mu), bound, found, confidence, releases, started)


def _audit_secret_rounds(
    cell: Cell, mu: float, trials: int, confidence: float, seed: int, progress: ProgressCallback, started: float
) -> Audit:
    """Secret rounds against the curve that is claimed for them: canaries, and a canary in known company."""
    small, few = secret.make_canary_cell(cell, mu), secret.make_company_cell(cell, mu)
    plan, alone = (make_plan(each, make_canary_objective(each, 1), for_release=True) for each in (small, few))
    runs, companies = -(-trials // secret.CANARY_COUNT), trials // secret.TRIALS_PER_COMPANY_RUN
    steps = StepCounter(progress, runs + companies / secret.COMPANY_RUNS_PER_STEP)
    gathered = [secret.run_canaries(small, run_seed(seed, number)) for number in steps.after(range(runs))]
    seen = secret.CanaryTrials(*(np.concatenate(columns) for columns in zip(*gathered, strict=True)))
    beside = secret.run_company(few, companies, seed, steps)
    tests, failure = make_evaluation_parts(cell, mu, -(-trials // CANARY_COUNT), seed), 1.0 - confidence
    of_tests = audit_canaries(tests, failure / 5.0, steps) if tests else {}
    failure, curve = failure * (0.4 if tests else 0.5), ClaimedCurve(secret.sampled_guarantee(plan))
    shown = {
        "canaries": secret.evaluate_canaries(small, plan, seen, curve, failure),
        "company": secret.evaluate_company(alone, beside, ClaimedCurve(secret.sampled_guarantee(alone)), failure),
    }
    best, delta = max(shown.values(), key=lambda each: each.excess), cell.privacy.delta
    bound = _Bound(
        best.allowed_mu,
        max(0.0, best.mu),
        best.epsilon(delta),
        epsilon_of(mu, delta),
        best.test,
        best.false_alarm_rate,
    )
    if bound.mu <= bound.claimed_mu and of_tests and (worst := _worst_result(of_tests)).mu > worst.claimed_mu:
        bound = _make_bound(worst, delta)
    found = {family: FamilyResult(max(0.0, each.mu), each.test, each.allowed_mu) for family, each in shown.items()}
    return _make_audit(cell, small, bound, found | of_tests, confidence, len(seen.present) + companies, started)
