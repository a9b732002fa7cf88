"""`fedpriv audit`: does the code leak more than it claims?

The real silo, strategy and noise are run on canaries (see `transcripts`), and a fixed family of tests tries to
tell the worlds apart: a matched filter on the whole transcript, every single release, the difference of every two
releases and, where messages are seen, that of two silos, because noise that is repeated cancels there while it
weakens the filter.  The largest lower bound on μ, corrected for the size of the family (Bonferroni), must stay
under the claim.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedpriv.accounting.gdp import epsilon_of
from fedpriv.auditing.bounds import Scores, mu_lower_bound
from fedpriv.auditing.transcripts import CANARIES, Trials, auditable, run_trials
from fedpriv.errors import FedprivError, InputError
from fedpriv.objectives import SoftmaxRegression
from fedpriv.plan import plan_of
from fedpriv.rounds import Schedule
from fedpriv.scenario import Cell

MOST_ROUNDS = 12
MOST_SILOS = 4
SMALLEST_MU, LARGEST_MU = 1e-3, 100.0  # beyond, no number of trials that can be run says anything


class AuditRefutedError(FedprivError):
    """The claim does not stand: somebody can tell more than it says.  Exit code 3."""

    exit_code = 3


@dataclass(frozen=True)
class Audit:
    """The outcome: `mu` is exceeded by what the code leaks, but for a probability of 1 - confidence."""

    claimed_mu: float
    mu: float
    epsilon: float
    claimed_epsilon: float
    delta: float
    statistic: str
    confidence: float
    trials: int
    rounds: int
    silos: int
    trust: str
    relation: str
    seconds: float

    @property
    def stands(self) -> bool:
        return self.mu <= self.claimed_mu


def audit(
    cell: Cell,
    claimed_mu: float = 1.0,
    trials: int = 10_000,
    confidence: float = 0.99,
    seed: int = 0,
    advanced: Callable[[int], None] = lambda _: None,
) -> Audit:
    """Audit a cell's code path, recalibrated to `claimed_mu` and cut to a few rounds and silos by the same code.

    `trials` canaries are tried in each round, since a bug may show in one only.  `advanced(n)` hears of n more
    canaries.  InputError for a cell without noise or options out of range.

    Guarantee: code that keeps its claim is refuted with probability at most 1 - confidence.
    """
    if cell.privacy.target is None:
        raise InputError('privacy.mode = "none": a run without noise claims nothing that could be audited')
    if trials < 10 * CANARIES or not 0.5 <= confidence < 1.0 or not SMALLEST_MU <= claimed_mu <= LARGEST_MU:
        raise InputError(
            f"trials = {trials}, confidence = {confidence}, mu = {claimed_mu}: expected at least {10 * CANARIES} "
            f"trials, a confidence in [0.5, 1) and a mu in [{SMALLEST_MU:g}, {LARGEST_MU:g}]"
        )
    if cell.federation.epochs != 1 or not isinstance(cell.schedule, Schedule):
        raise InputError(
            "the audit's canaries are made for one pass in fixed order with records in every round: "
            'epochs = 1, sampling = "fixed"'
        )
    if seed < 0:
        raise InputError(f"seed = {seed}: expected a whole number of at least 0")
    started = time.perf_counter()
    rounds, silos = min(cell.schedule.rounds, MOST_ROUNDS), min(cell.federation.silos, MOST_SILOS)
    small, objective = auditable(cell, claimed_mu, rounds, silos)
    gathered = _gather(small, objective, trials * rounds, seed, advanced)
    best, statistic = 0.0, "none"
    for t in range(1, rounds + 1):
        chosen = gathered.round == t
        seen = Trials(*(column[chosen] for column in gathered))
        family = _statistics(small, objective, t, seen)
        failure = (1.0 - confidence) / (rounds * len(family))
        for name, scores in family.items():
            bound = mu_lower_bound(scores, seen.present, failure)
            if bound > best:
                best, statistic = bound, f"{name}, canary in round {t}"
    delta = cell.privacy.delta
    return Audit(
        claimed_mu,
        best,
        epsilon_of(best, delta) if best else 0.0,
        epsilon_of(claimed_mu, delta),
        delta,
        statistic,
        confidence,
        len(gathered.present),
        rounds,
        silos,
        cell.algorithm.trust,
        cell.privacy.relation,
        time.perf_counter() - started,
    )


def _gather(
    cell: Cell, objective: SoftmaxRegression, canaries: int, seed: int, advanced: Callable[[int], None]
) -> Trials:
    """As many runs as give `canaries`; every run has coins and noise of its own."""
    gathered = []
    for number in range(-(-canaries // CANARIES)):
        gathered.append(run_trials(cell, objective, 1_000_000 * seed + number))
        advanced(CANARIES)
    return Trials(*(np.concatenate(columns) for columns in zip(*gathered, strict=True)))


def _statistics(cell: Cell, objective: SoftmaxRegression, canary_round: int, trials: Trials) -> dict[str, Scores]:
    """The fixed family of scores (n,), the same names for every round of a canary."""
    seen, rounds = trials.seen, trials.seen.shape[1]
    scores = {"whole transcript": seen @ _matched_filter(cell, objective, canary_round, rounds)}
    scores |= {f"release {t}": seen[:, t - 1] for t in range(1, rounds + 1)}
    scores |= {
        f"release {late} minus {early}": seen[:, late - 1] - seen[:, early - 1]
        for early, late in itertools.combinations(range(1, rounds + 1), 2)
    }
    apart = trials.apart
    return scores | {f"release {t} minus silo 1's": apart[:, t - 1] for t in range(1, apart.shape[1] + 1)}


def _matched_filter(cell: Cell, objective: SoftmaxRegression, canary_round: int, rounds: int) -> Scores:
    """Σ⁺ δ: the best linear test against the noise covariance Σ = B Bᵀ of the signal δ_t = keep^(t-k), t ≥ k."""
    plan = plan_of(cell, objective)
    if plan.mechanism.draws(1) is not None:
        raise InputError("the audit knows mechanisms with one fresh vector a round; this one draws several")
    state, rows = plan.mechanism.start(), []
    for t in range(1, rounds + 1):
        impulse = torch.zeros(rounds, dtype=torch.float64)
        impulse[t - 1] = 1.0
        row, state = plan.mechanism.noise(state, t, impulse)
        rows.append(row.numpy().copy())
    factor, since = np.array(rows), np.arange(1, rounds + 1) - canary_round
    signal = np.where(since >= 0, plan.estimator.keep ** np.maximum(since, 0.0), 0.0)
    weights: Scores = np.linalg.pinv(factor @ factor.T) @ signal
    return weights
