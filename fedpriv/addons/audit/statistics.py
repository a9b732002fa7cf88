"""Statistics of an audit: bounds on μ from scores with known worlds, the tests of canaries, claims as curves.

A μ-GDP release lets no test have errors with Φ⁻¹(1 - FPR) - Φ⁻¹(FNR) > μ (Dong, Roth & Su 2022).  So upper bounds
on both error rates of any test give a lower bound on μ, with confidence (Nasr et al. 2023, "Tight auditing of
differentially private machine learning", section on Gaussian DP); and since worlds are chosen by fair coins, no
test is right with a probability above Φ(μ/2), so that a lower bound on that probability gives another.

The family of tests of canaries is fixed: it says which scores are looked at, and how much of the failure each may
use.  A matched filter on the whole transcript is the best test of code that is right; repeated, forgotten or badly
stored noise would lower its score, and shows in single releases, in differences of releases, of silos and of runs,
and in the sum of all releases.

Where a claim is a curve of (ε, δ) and not a μ, a test with false alarms α and misses β is impossible under it, for
both directions, unless

    β ≥ f(α) = max over ε of 1 - δ(ε) - e^ε α  and  e^-ε (1 - δ(ε) - α)

(Wasserman & Zhou 2010; Dong, Roth & Su 2022).  What was shown is Φ⁻¹(1 - α) - Φ⁻¹(β) at upper bounds of both
rates, and what the claim allows there is the same with f(α) for β: the μ of the Gaussian curve through that point,
which is another one at every α.
"""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from fedpriv.accounting.guarantees import Sampled
from fedpriv.addons.audit.transcripts import Trials
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER
from fedpriv.plan.plan import Plan

Scores = NDArray[np.float64]

QUANTILES = np.linspace(0.005, 0.995, 199)
THRESHOLD_FRACTION = 4  # one trial in so many chooses the threshold


class ErrorCounts(NamedTuple):
    """Wrong guesses of a test in both worlds, an entry a threshold, and of how many trials."""

    false_alarms: NDArray[np.int64]
    misses: NDArray[np.int64]
    absent_count: int
    present_count: int


def mu_lower_bound(scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """A μ that the release exceeds, but for a probability of at most `failure`; 0 if nothing can be said.

    `scores` (n,) are large where the canary is `present` (n,).  The threshold with the best bound is chosen on
    the first quarter of the trials, and the bound that counts is that of the others at this one threshold.

    Guarantee: trials are independent, their coins are fair, and the others are not looked at before the threshold
    is fixed.
    """
    first = len(scores) // THRESHOLD_FRACTION
    candidates = np.quantile(scores[:first], QUANTILES)
    promised = _mu_bounds(count_errors(candidates, scores[:first], present[:first]), failure)
    return bound_at_threshold(
        float(candidates[[int(np.argmax(promised))]][0]), scores[first:], present[first:], failure
    )


def bound_at_threshold(threshold: float, scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """As above, at a threshold that was fixed without a look at these trials; for few of them."""
    return max(0.0, float(_mu_bounds(count_errors(np.array([threshold]), scores, present), failure)[0]))


def count_errors(thresholds: Scores, scores: Scores, present: NDArray[np.bool_]) -> ErrorCounts:
    """The errors of a test that says "present" above each of `thresholds`."""
    with_canary, without = np.sort(scores[present]), np.sort(scores[~present])
    return ErrorCounts(
        len(without) - np.searchsorted(without, thresholds, "right"),
        np.searchsorted(with_canary, thresholds, "right"),
        len(without),
        len(with_canary),
    )


def _mu_bounds(errors: ErrorCounts, failure: float) -> Scores:
    """The larger of both bounds at each threshold; half of `failure` for each."""
    highest_alarms = upper_rates(errors.false_alarms, errors.absent_count, failure / 4)
    highest_misses = upper_rates(errors.misses, errors.present_count, failure / 4)
    by_rates = -special.ndtri(highest_alarms) - special.ndtri(highest_misses)
    wrong = upper_rates(
        errors.false_alarms + errors.misses, errors.absent_count + errors.present_count, failure / 2
    )
    return np.asarray(np.maximum(by_rates, -2.0 * special.ndtri(wrong)))


def upper_rates(events: NDArray[np.int64], trials: int, failure: float) -> Scores:
    """Clopper & Pearson: rates that are exceeded with probability at most `failure`; 1 if every trial was one."""
    rates = special.betainccinv(events + 1.0, np.maximum(trials - events, 1.0), failure)
    return np.where(events >= trials, 1.0, rates)


BEST_TEST_SHARE = 0.5
"""The share of the failure for the best test of code that is right: the whole transcript of canaries in the round
where they weigh most, half-way between what it expects in both worlds."""


def heaviest_round(plan: Plan) -> int:
    """The round whose canaries the whole transcript tells best."""
    first_pass = min(plan.schedule.rounds, plan.schedule.rounds_per_epoch)
    clips = [float(plan.estimator.round(t).clip) / _batch_count(plan, t) for t in range(1, first_pass + 1)]
    squared_norms = [
        clip**2 * float(_signal(plan, t) @ matched_filter(plan, t)) for t, clip in enumerate(clips, start=1)
    ]
    return 1 + int(np.argmax(squared_norms))


def find_best_bound(plan: Plan, trials: Trials, failure: float) -> tuple[float, str]:
    """The largest lower bound on μ of the family, and by which test.

    Guarantee: code that keeps its claim gets a bound above it with a probability of at most `failure`: the shares
    add up to it (Bonferroni), whatever the dependence between tests.
    """
    heaviest = heaviest_round(plan)
    groups = {t: trials.select_round(t) for t in sorted(set(trials.rounds.tolist()))}
    families = {t: _canary_scores(plan, t, group) for t, group in groups.items()}
    least = failure * (1.0 - BEST_TEST_SHARE) / sum(map(len, families.values()))
    best, _ = families[heaviest]["whole transcript"]
    bound = bound_at_threshold(
        _midpoint(plan, heaviest), _replace_nonfinite(best), groups[heaviest].present, failure * BEST_TEST_SHARE
    )
    found = bound, f"whole transcript, canary in round {heaviest}"
    for t, family in families.items():
        for name, (scores, runs) in family.items():
            # Several runs are √(their number)·μ-GDP together.
            bound = mu_lower_bound(_replace_nonfinite(scores), groups[t].present, least) / math.sqrt(runs)
            found = max(found, (bound, f"{name}, canary in round {t}"))
    return found


def find_rollback_bound(trials: Trials, failure: float) -> tuple[float, str]:
    """The largest lower bound on μ of releases before and after a machine was put back: each keeps the claim."""
    found, count = (0.0, "none"), trials.run_differences.shape[1]
    for place in range(count):
        bound = mu_lower_bound(
            _replace_nonfinite(trials.run_differences[:, place]), trials.present, failure / count
        ) / math.sqrt(2.0)
        test = "release of the round before a rollback minus that after it"
        found = max(found, (bound, test if place == 0 else f"{test}, {place} later"))
    return found


def log_likelihood_ratios(plan: Plan, trials: Trials) -> Scores:
    """ln of (the canary is present) over (it is absent), (n,), for canaries of the heaviest round.

    Ratios of independent releases of the same canaries add up: their sum is the best test of all of them.
    """
    heaviest = heaviest_round(plan)
    scores = _replace_nonfinite(trials.select_round(heaviest).releases @ matched_filter(plan, heaviest))
    weight, std = canary_weight_and_std(plan, heaviest)
    return (scores - _midpoint(plan, heaviest)) * _world_distance(plan) * weight / std**2


def separation(plan: Plan) -> float:
    """Standard deviations of the noise between both worlds in the best test: μ, if it is exact."""
    heaviest = heaviest_round(plan)
    weight, std = canary_weight_and_std(plan, heaviest)
    squared = float(_signal(plan, heaviest) @ matched_filter(plan, heaviest))
    return _world_distance(plan) * weight * math.sqrt(squared) / std


def canary_weight_and_std(plan: Plan, canary_round: int) -> tuple[float, float]:
    """Weight of a canary in what is seen, and the standard deviation of the noise there."""
    in_mean = plan.masked or float(plan.noise.std_of(SERVER)) > 0.0
    weight = (plan.weights[0] if in_mean else 1.0) / plan.batch_sizes[0]
    std = plan.noise.std_in_mean if in_mean else float(plan.noise.std_of(0))
    return weight * float(plan.estimator.round(canary_round).clip) / _batch_count(plan, canary_round), std


def _world_distance(plan: Plan) -> int:
    """Number of its weights that lie between a canary's two worlds."""
    return 2 if plan.relation == "replace-one" else 1


def _replace_nonfinite(scores: Scores) -> Scores:
    """Scores that can be ordered; what is no number counts as very large."""
    return np.asarray(np.nan_to_num(scores, nan=math.inf).clip(-1e300, 1e300))


def _midpoint(plan: Plan, canary_round: int) -> float:
    """Between the matched filter's scores of both worlds, if records are clipped and weighted as the plan says."""
    if plan.relation == "replace-one":
        return 0.0  # increments that point in opposite directions
    weight, _ = canary_weight_and_std(plan, canary_round)
    return weight * float(_signal(plan, canary_round) @ matched_filter(plan, canary_round)) / 2.0


def _canary_scores(plan: Plan, canary_round: int, trials: Trials) -> Mapping[str, tuple[Scores, int]]:
    """Scores (n,), and of how many runs; the same names for every round of a canary."""
    seen, rounds = trials.releases, trials.releases.shape[1]
    scores = {
        "whole transcript": seen @ matched_filter(plan, canary_round),
        "sum of releases": seen[:, canary_round - 1 :].sum(1),
    }
    scores |= {f"release {t}": seen[:, t - 1] for t in range(1, rounds + 1)}
    scores |= {
        f"release {late} minus {early}": seen[:, late - 1] - seen[:, early - 1]
        for early, late in itertools.combinations(range(1, rounds + 1), 2)
    }
    scores |= {
        f"release {t} minus silo 1's": trials.silo_differences[:, t - 1]
        for t in range(1, trials.silo_differences.shape[1] + 1)
    }
    twice = {
        f"release {t} minus that of another run": (trials.run_differences[:, t - 1], 2)
        for t in range(1, trials.run_differences.shape[1] + 1)
    }
    return {name: (values, 1) for name, values in scores.items()} | twice


def noise_factor(plan: Plan) -> Scores:
    """B (T, T): what a mechanism with one fresh vector a round adds to release t is row t times those vectors."""
    if plan.mechanism.draws(1) is not None:
        raise InputError("the audit knows mechanisms with one fresh vector a round; this one draws several")
    state, rows = plan.mechanism.start(), []
    for t, impulse in enumerate(torch.eye(plan.schedule.rounds, dtype=torch.float64), start=1):
        row, state = plan.mechanism.noise(state, t, impulse)
        rows.append(row.numpy().copy())
    return np.array(rows)


def matched_filter(plan: Plan, canary_round: int) -> Scores:
    """Σ⁺ δ (T,): the best linear test against the noise covariance Σ = B Bᵀ of the signal δ."""
    factor = noise_factor(plan)
    return np.asarray(np.linalg.pinv(factor @ factor.T) @ _signal(plan, canary_round))


def _signal(plan: Plan, canary_round: int) -> Scores:
    """δ_t = Σ decay^(t-k) over k ≤ t: how much of a canary is in release t, in units of its first increment; (T,).

    k are the rounds in which it takes part: `canary_round`, and for clients one pass later again.
    """
    rounds, first = plan.schedule.rounds, float(plan.estimator.round(canary_round).clip)
    signal: Scores = np.zeros(rounds)
    for k in range(canary_round, rounds + 1, plan.schedule.rounds_per_epoch):
        since = np.arange(1, rounds + 1) - k
        size = float(plan.estimator.round(k).clip) / first
        signal += size * np.where(since >= 0, plan.estimator.decay ** np.maximum(since, 0.0), 0.0)
    return signal


def _batch_count(plan: Plan, t: int) -> int:
    reads = getattr(plan.schedule, "reads", ())
    return int(reads[t - 1]) if reads else 1


_EPSILONS = np.concatenate([np.linspace(0.0, 3.0, 301), np.linspace(3.0, 12.0, 181)[1:]])


class CurveResult(NamedTuple):
    """Result of a test at its rate of false alarms, and what the claim allows there; `test` names it."""

    mu: float
    allowed_mu: float
    false_alarm_rate: float
    miss_rate: float
    test: str = ""

    @property
    def excess(self) -> float:
        """Above 0 the claim is refuted."""
        return self.mu - self.allowed_mu

    def epsilon(self, delta: float) -> float:
        """The ε that it shows at δ."""
        power = 1.0 - self.miss_rate - delta
        return float(max(0.0, np.log(power / self.false_alarm_rate))) if power > 0.0 else 0.0


class ClaimedCurve:
    """A claimed trade-off: the least rate of misses for every rate of false alarms."""

    def __init__(self, guarantee: Sampled) -> None:
        self._factors = np.exp(_EPSILONS)
        self._deltas = guarantee.curve(_EPSILONS)

    def min_miss_rates(self, alarms: NDArray[np.float64]) -> NDArray[np.float64]:
        """f(α) for every α of `alarms`, rounded down to the chords of a grid of ε."""
        given = np.asarray(alarms, np.float64)[..., None]
        power = 1.0 - self._deltas - self._factors * given
        mirrored = (1.0 - self._deltas - given) / self._factors
        return np.asarray(np.maximum(0.0, np.maximum(power, mirrored).max(-1)))


def evaluate_on_curve(
    curve: ClaimedCurve, scores: Scores, present: NDArray[np.bool_], failure: float, test: str = ""
) -> CurveResult:
    """Evaluate a test whose `scores` (n,) are large where the canary is `present` (n,).

    The threshold that exceeds the claim most is chosen on the first quarter of the trials, and what is shown is
    that of the others at this one threshold.

    Guarantee: where the claim holds, trials are independent and coins fair, `excess` is above 0 with probability
    at most `failure`.
    """
    first = len(scores) // THRESHOLD_FRACTION
    candidates = np.quantile(scores[:first], QUANTILES)
    promised = _curve_bounds(curve, candidates, scores[:first], present[:first], failure)
    chosen = candidates[[int(np.argmax(promised[0] - promised[1]))]]
    columns = _curve_bounds(curve, chosen, scores[first:], present[first:], failure)
    mu, allowed, alarms, misses = (float(column[0]) for column in columns)
    return CurveResult(mu, allowed, alarms, misses, test)


def _curve_bounds(
    curve: ClaimedCurve, thresholds: Scores, scores: Scores, present: NDArray[np.bool_], failure: float
) -> tuple[Scores, Scores, Scores, Scores]:
    """Shown μ, allowed μ, and upper bounds of both error rates, at each threshold."""
    errors = count_errors(thresholds, scores, present)
    alarms = upper_rates(errors.false_alarms, errors.absent_count, failure / 2)
    misses = upper_rates(errors.misses, errors.present_count, failure / 2)
    alarms, misses = (np.minimum(rates, 1.0 - 1e-12) for rates in (alarms, misses))
    return (
        -special.ndtri(alarms) - special.ndtri(misses),
        -special.ndtri(alarms) - special.ndtri(np.clip(curve.min_miss_rates(alarms), 1e-300, 1.0 - 1e-12)),
        alarms,
        misses,
    )
