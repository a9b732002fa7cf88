"""`fedpriv audit`: does the code leak more than it claims?

The code that a deployment runs (guards with their ledgers, the server with its journal) is asked about canaries in
the scenario's own arithmetic, and fixed families of tests try to tell the worlds apart:

* canaries in the worst case of the clip and the relation (`transcripts`, `statistics`),
* the same canaries where hostile queries drive the arithmetic (`hostile.driving`),
* the bits of the noisy integers, and of the floats that leave (`integers`),
* whether replies to hostile queries come, and are finite (`hostile`),

and the order in which records are read is compared with the definition of a single pass.  The largest lower bound
on μ, corrected for the size of the families (Bonferroni), must stay under the claim.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpriv.accounting.gdp import epsilon_of
from fedpriv.auditing import hostile, integers, secret
from fedpriv.auditing.canaries import Layout, auditable, misread, objective_for, rows_read
from fedpriv.auditing.pool import check_clients, known_rounds
from fedpriv.auditing.statistics import best_bound, heaviest_round
from fedpriv.auditing.steps import Progress, Steps, one_thread
from fedpriv.auditing.tradeoff import Curve
from fedpriv.auditing.transcripts import Trials, run_trials
from fedpriv.errors import FedprivError, InputError
from fedpriv.privacy.unit import CLIENT
from fedpriv.running.plan import Plan, plan_of
from fedpriv.scenario import Cell

MOST_ROUNDS = 12
MOST_SILOS = 3
CANARIES, IN_HEAVIEST = 1024, 256
"""Of one run, and of those in the round where they weigh most."""
LEAST_TRIALS = 2 * CANARIES
SMALLEST_MU, LARGEST_MU = 1e-3, 100.0  # beyond, no number of trials that can be run says anything


class AuditRefutedError(FedprivError):
    """The claim does not stand: somebody can tell more than it says.  Exit code 3."""

    exit_code = 3


@dataclass(frozen=True)
class Audit:
    """The outcome: `mu` is exceeded by what the code leaks, but for a probability of 1 - confidence.

    `families` has the bound of each family of tests that was tried.  Where rounds are secret the claim is a curve:
    `claimed_mu` is what it allows at the rate `alarms` of false alarms, where `mu` was shown.
    `pool` says that units are clients, whose pool is simulated only: the server alone is a deployment's.
    """

    claimed_mu: float
    mu: float
    epsilon: float
    claimed_epsilon: float
    delta: float
    statistic: str
    families: Mapping[str, float]
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


class _Asked(NamedTuple):
    """What an audit was asked: the cell, cut to the canaries' size, so many runs of them, the claim, the seed."""

    cell: Cell
    small: Cell
    runs: int
    mu: float
    seed: int

    def seed_of(self, number: int) -> int:
        return 1_000_000 * self.seed + number


def audit(
    cell: Cell,
    claimed_mu: float = 1.0,
    trials: int = 16_384,
    confidence: float = 0.99,
    seed: int = 0,
    progress: Progress = lambda _: None,
    families: Collection[str] = ("canaries", "driven canaries", "integers", "hostile queries"),
) -> Audit:
    """Audit a cell's code path, recalibrated to `claimed_mu` and cut to a few rounds and silos by the same code.

    About `trials` canaries are tried, a quarter of them in the round where they weigh most.  InputError for a cell
    without noise or options out of range; AuditRefutedError if records are not read as the claim presumes.
    Coins are `seed`'s; noise is keyed by the operating system, as in every deployment.
    `families` are those to try.

    Guarantee: code that keeps its claim is refuted with probability at most 1 - confidence.
    """
    _check(cell, claimed_mu, trials, confidence, seed)
    started = time.perf_counter()
    if cell.schedule.secret:
        with one_thread(), torch.inference_mode():
            return _secret(cell, claimed_mu, trials, confidence, seed, progress, started)
    (rounds, passes), silos = known_rounds(cell, MOST_ROUNDS), min(cell.federation.silos, MOST_SILOS)
    small = auditable(cell, claimed_mu, rounds, silos, IN_HEAVIEST, passes)
    if wrong := misread(small, rows_read(small)):
        raise AuditRefutedError(f"the schedule is not the one that is claimed: {wrong}")
    runs = -(-trials // CANARIES)
    tried = {name: _FAMILIES[name] for name in _FAMILIES if name in families}
    steps = Steps(progress, sum(family.steps(runs) for family in tried.values()))
    asked = _Asked(cell, small, runs, claimed_mu, seed)
    with one_thread(), torch.inference_mode():
        found = {
            name: family.bound(asked, (1.0 - confidence) * family.share, steps) for name, family in tried.items()
        }
    best = max(found.values())
    delta = cell.privacy.delta
    return Audit(
        claimed_mu,
        best[0],
        epsilon_of(best[0], delta) if best[0] else 0.0,
        epsilon_of(claimed_mu, delta),
        delta,
        best[1],
        {family: bound for family, (bound, _) in found.items()},
        confidence,
        runs * CANARIES,
        rounds,
        silos,
        cell.algorithm.trust,
        cell.privacy.relation,
        cell.privacy.protected.words,
        cell.run.dtype,
        time.perf_counter() - started,
        pool=cell.federation.clients is not None,
    )


def _check(cell: Cell, claimed_mu: float, trials: int, confidence: float, seed: int) -> None:
    if cell.privacy.target is None:
        raise InputError('privacy.mode = "none": a run without noise claims nothing that could be audited')
    if trials < LEAST_TRIALS or not 0.5 <= confidence < 1.0 or not SMALLEST_MU <= claimed_mu <= LARGEST_MU:
        raise InputError(
            f"trials = {trials}, confidence = {confidence}, mu = {claimed_mu}: expected at least {LEAST_TRIALS} "
            f"trials, a confidence in [0.5, 1) and a mu in [{SMALLEST_MU:g}, {LARGEST_MU:g}]"
        )
    if cell.privacy.unit == CLIENT.name:
        check_clients(cell)
    if cell.algorithm.trust == "curator":
        raise InputError('algorithm.trust = "curator": the audit is of what a deployment runs, and none runs this')
    if not cell.schedule.secret:
        rows_read(cell)
    if seed < 0:
        raise InputError(f"seed = {seed}: expected a whole number of at least 0")


def _canaries(asked: _Asked, failure: float, steps: Steps) -> tuple[float, str]:
    """The best bound of canaries in the worst case; every run has its own coins and noise."""
    plan = _canary_plan(asked)
    return best_bound(plan, _gathered(asked, plan, asked.runs, None, steps), failure)


def _driven(asked: _Asked, failure: float, steps: Steps) -> tuple[float, str]:
    """The same where queries overflow, are denormal or cancel: what canaries add there may have either sign."""
    plan = _canary_plan(asked)
    fitting = _canary_plan(asked, len(_layout(asked, plan).round))  # few rounds hold fewer canaries
    trials = _gathered(asked, plan, _driven_runs(asked.runs), hostile.driving(fitting), steps)
    turned = trials._replace(seen=-trials.seen)
    bound, test = max(best_bound(plan, either, failure / 2) for either in (trials, turned))
    return bound, f"{test}, under hostile queries"


def _driven_runs(runs: int) -> int:
    return -(-runs // 4)


def _canary_plan(asked: _Asked, canaries: int = CANARIES) -> Plan:
    return plan_of(asked.small, objective_for(asked.small, canaries), released=True)


def _layout(asked: _Asked, plan: Plan) -> Layout:
    return Layout.of(rows_read(asked.small), heaviest_round(plan), CANARIES, IN_HEAVIEST)


def _gathered(asked: _Asked, plan: Plan, runs: int, queries: Sequence[Tensor] | None, steps: Steps) -> Trials:
    layout = _layout(asked, plan)
    gathered = []
    for number in range(runs):
        gathered.append(run_trials(asked.small, layout, asked.seed_of(number), queries))
        steps()
    return Trials(*(np.concatenate(columns) for columns in zip(*gathered, strict=True)))


def _integers(asked: _Asked, failure: float, steps: Steps) -> tuple[float, str]:
    small = integers.integers_cell(asked.cell, asked.mu)
    present, scores = [], []
    for number in range(integers.TRIALS):
        coin, score = integers.attack(small, asked.seed_of(number))
        present.append(coin)
        scores.append(score)
        steps(0.5)
    return integers.integers_bound(present, scores, failure)


def _hostile(asked: _Asked, failure: float, steps: Steps) -> tuple[float, str]:
    small = hostile.hostile_cell(asked.cell, asked.mu)
    if small is None:
        return 0.0, "none"
    outcomes = {}
    for kind in hostile.KINDS:
        outcomes[kind] = [hostile.attack(small, kind, asked.seed_of(number)) for number in range(hostile.TRIALS)]
        steps(hostile.TRIALS / 16)
    return hostile.hostile_bound(outcomes, failure)


def _secret(
    cell: Cell, mu: float, trials: int, confidence: float, seed: int, progress: Progress, started: float
) -> Audit:
    """Secret rounds against the curve that is claimed for them: canaries, and a canary in known company."""
    small, few = secret.canary_cell(cell, mu), secret.company_cell(cell, mu)
    plan, alone = (plan_of(each, objective_for(each, 1), released=True) for each in (small, few))
    runs, companies = -(-trials // secret.CANARIES), trials // secret.COMPANIES
    steps = Steps(progress, runs + companies / secret.COMPANIES_A_STEP)
    asked = _Asked(cell, small, runs, mu, seed)
    gathered = []
    for number in range(runs):
        gathered.append(secret.canaries(small, asked.seed_of(number)))
        steps()
    seen = secret.Seen(*(np.concatenate(columns) for columns in zip(*gathered, strict=True)))
    beside = secret.company(few, companies, seed, steps)
    failure = (1.0 - confidence) / 2.0
    found = {
        "canaries": secret.canaries_shown(small, plan, seen, Curve(secret.guarantee_of(plan)), failure),
        "company": secret.company_shown(alone, beside, Curve(secret.guarantee_of(alone)), failure),
    }
    best, delta = max(found.values(), key=lambda each: each.excess), cell.privacy.delta
    return Audit(
        best.allowed,
        max(0.0, best.mu),
        best.epsilon(delta),
        epsilon_of(mu, delta),
        delta,
        best.test,
        {family: max(0.0, each.mu) for family, each in found.items()},
        confidence,
        len(seen.present) + companies,
        small.schedule.rounds,
        small.federation.silos,
        cell.algorithm.trust,
        cell.privacy.relation,
        cell.privacy.protected.words,
        cell.run.dtype,
        time.perf_counter() - started,
        best.alarms,
        cell.federation.clients is not None,
    )


class _Family(NamedTuple):
    """A family of tests: which share of the failure it may use, its steps for so many runs, and its bound on μ."""

    share: float
    steps: Callable[[int], float]
    bound: Callable[[_Asked, float, Steps], tuple[float, str]]


_FAMILIES = {
    "canaries": _Family(0.5, lambda runs: runs, _canaries),
    "driven canaries": _Family(0.1, _driven_runs, _driven),
    "integers": _Family(0.2, lambda _: integers.TRIALS / 2, _integers),
    "hostile queries": _Family(0.2, lambda _: len(hostile.KINDS) * hostile.TRIALS / 16, _hostile),
}
