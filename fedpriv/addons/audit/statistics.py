"""Statistics of an audit: lower bounds on μ, tests of canaries, and claims that are curves.

A *canary* is a planted unit, such as a record.  A trial is one canary in one run.  A trial has a score, and a
world that a fair coin chooses: present, or absent, which is the opposite increment under replace-one.  A *release*
is a noisy sum or mean of a round, projected on the canary's direction.  A test that is given a threshold guesses
"present" for scores above it.  Two facts on a μ-GDP release turn scores into lower bounds on μ, with confidence:

* No test has Φ⁻¹(1 - FPR) - Φ⁻¹(FNR) > μ (Dong, Roth & Su 2022).  So upper bounds on both error rates of a test
  give a lower bound on μ (Nasr et al. 2023, "Tight auditing of differentially private machine learning", section
  on Gaussian DP).
* No test guesses the world of a fair coin with a probability above Φ(μ/2).  So a lower bound on that probability
  gives another lower bound on μ.

The scores of a test, as functions of the trials, and its share of the probability that the audit may be wrong
(`failure`) are fixed before the trials.

A claim may be a curve of (ε, δ) in place of a μ, which holds for both orders of two neighbours.  Under it every
test with the rate α of false alarms has a rate β of misses with

    β ≥ f(α) = max over ε ≥ 0 of 0, 1 - δ(ε) - e^ε α  and  e^-ε (1 - δ(ε) - α)

(Wasserman & Zhou 2010; Dong, Roth & Su 2022).  A test with upper bounds α and β on both rates shows
μ = Φ⁻¹(1 - α) - Φ⁻¹(β).  At this α the claim allows Φ⁻¹(1 - α) - Φ⁻¹(f(α)).
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
from fedpriv.noise.mechanism import Mechanism
from fedpriv.plan.plan import Plan

Scores = NDArray[np.float64]

QUANTILES = np.linspace(0.005, 0.995, 199)
"""Probabilities of the quantiles of scores among which a threshold is chosen."""
THRESHOLD_FRACTION = 4  # the first of so many equal parts of the trials chooses the threshold


class ErrorCounts(NamedTuple):
    """Wrong guesses of a test at each threshold, and the number of trials, in both worlds."""

    false_alarms: NDArray[np.int64]
    """Trials without the canary in which the test guesses "present", (thresholds,)."""
    misses: NDArray[np.int64]
    """Trials with the canary in which the test guesses "absent", (thresholds,)."""
    absent_count: int
    """Number of trials without the canary."""
    present_count: int
    """Number of trials with the canary."""


def mu_lower_bound(scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """Return a lower bound on μ that is wrong with a probability of at most `failure`.

    The threshold with the best bound is chosen on the first quarter of the trials, and the other trials are
    evaluated at this threshold.

    Guarantee: the bound has this probability of failure if trials are independent and their coins are fair.  The
    threshold depends on the first quarter of the trials only.

    Args:
        scores: (n,), large if the canary is present, with n ≥ 4.
        present: (n,), the coins.
        failure: Probability in (0, 1).

    Returns:
        The bound, 0 if the trials show nothing.
    """
    pilot_count = len(scores) // THRESHOLD_FRACTION
    candidates = np.quantile(scores[:pilot_count], QUANTILES)
    pilot_bounds = _mu_bounds(count_errors(candidates, scores[:pilot_count], present[:pilot_count]), failure)
    return bound_at_threshold(
        float(candidates[[int(np.argmax(pilot_bounds))]][0]), scores[pilot_count:], present[pilot_count:], failure
    )


def bound_at_threshold(threshold: float, scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """Return a lower bound on μ at a threshold that was fixed without a look at these trials, at least 0.

    The bound is wrong with a probability of at most `failure`, if trials are independent and their coins are fair.
    """
    return max(0.0, float(_mu_bounds(count_errors(np.array([threshold]), scores, present), failure)[0]))


def count_errors(thresholds: Scores, scores: Scores, present: NDArray[np.bool_]) -> ErrorCounts:
    """Count the errors of a test that guesses "present" above a threshold, for each of `thresholds`.

    A score that equals the threshold is a guess of "absent".
    """
    with_canary, without = np.sort(scores[present]), np.sort(scores[~present])
    return ErrorCounts(
        len(without) - np.searchsorted(without, thresholds, "right"),
        np.searchsorted(with_canary, thresholds, "right"),
        len(without),
        len(with_canary),
    )


def _mu_bounds(errors: ErrorCounts, failure: float) -> Scores:
    """Return the larger of both bounds on μ at each threshold, with half of `failure` for each bound.

    The bounds are -Φ⁻¹(α) - Φ⁻¹(β) and -2 Φ⁻¹(e), with upper bounds α on the rate of false alarms, β on that of
    misses, and e on the rate of all wrong guesses.
    """
    highest_alarms = upper_rates(errors.false_alarms, errors.absent_count, failure / 4)
    highest_misses = upper_rates(errors.misses, errors.present_count, failure / 4)
    by_rates = -special.ndtri(highest_alarms) - special.ndtri(highest_misses)
    highest_errors = upper_rates(
        errors.false_alarms + errors.misses, errors.absent_count + errors.present_count, failure / 2
    )
    return np.asarray(np.maximum(by_rates, -2.0 * special.ndtri(highest_errors)))


def upper_rates(events: NDArray[np.int64], trials: int, failure: float) -> Scores:
    """Return upper bounds on the rates of `events`, each wrong with a probability of at most `failure`.

    The bounds are those of Clopper & Pearson, and 1 if all `trials` are events, also for 0 trials.
    """
    rates = special.betainccinv(events + 1.0, np.maximum(trials - events, 1.0), failure)
    return np.where(events >= trials, 1.0, rates)


BEST_TEST_SHARE = 0.5
"""Share of the failure for the best test of correct code.

The test is the matched filter on the whole transcript of canaries in the heaviest round, with the threshold
half-way between the expected scores of both worlds.
"""


def heaviest_round(plan: Plan) -> int:
    """Return the round of the first pass whose canaries the whole transcript separates best.

    The round has the largest (clip_t / batches_t)² δᵀ Σ⁺ δ, with the signal δ (T,) of a canary of round t, and the
    covariance Σ (T, T) of the noise in T releases.  Rounds in which canaries add nothing count as clip 0.
    """
    first_pass = min(plan.schedule.rounds, plan.schedule.rounds_per_epoch)
    clips = [_reached_clip(plan, t) / _batch_count(plan, t) for t in range(1, first_pass + 1)]
    squared_norms = [
        clip**2 * float(_signal(plan, t) @ matched_filter(plan, t)) for t, clip in enumerate(clips, start=1)
    ]
    return 1 + int(np.argmax(squared_norms))


def find_best_bound(plan: Plan, trials: Trials, failure: float) -> tuple[float, str]:
    """Return the largest lower bound on μ of the family of tests, and the name of the test.

    The whole transcript of the heaviest round (`heaviest_round`) has the share `BEST_TEST_SHARE` of `failure`, and
    a threshold that is fixed in advance.  All tests of all rounds' canaries, this one among them, share the rest
    equally and choose their thresholds.

    Args:
        plan: Plan of the run.
        trials: Canaries of one round or of several, those of the heaviest round among them.
        failure: Probability in (0, 1) that the bound is wrong, at most.

    Guarantee: code that keeps its claim gets a bound above the claim with a probability of at most `failure`: the
    failures of the tests add up to `failure` (Bonferroni), whatever the dependence between tests.
    """
    heaviest = heaviest_round(plan)
    groups = {t: trials.select_round(t) for t in sorted(set(trials.rounds.tolist()))}
    families = {t: _canary_scores(plan, t, group) for t, group in groups.items()}
    test_failure = failure * (1.0 - BEST_TEST_SHARE) / sum(map(len, families.values()))
    best_scores, _ = families[heaviest]["whole transcript"]
    bound = bound_at_threshold(
        _midpoint(plan, heaviest),
        _replace_nonfinite(best_scores),
        groups[heaviest].present,
        failure * BEST_TEST_SHARE,
    )
    best_result = bound, f"whole transcript, canary in round {heaviest}"
    for t, family in families.items():
        for name, (scores, runs) in family.items():
            # Composed, k runs of μ-GDP are √k·μ-GDP.
            bound = mu_lower_bound(_replace_nonfinite(scores), groups[t].present, test_failure) / math.sqrt(runs)
            best_result = max(best_result, (bound, f"{name}, canary in round {t}"))
    return best_result


def find_rollback_bound(trials: Trials, failure: float) -> tuple[float, str]:
    """Return the largest lower bound on μ, and its test, from releases before and after a rollback.

    Each round's difference of both releases is one test, with an equal part of `failure`.  If both releases keep a
    claim of μ, their difference is √2 μ-GDP, so that a test shows 1/√2 of its bound.
    """
    best_result, round_count = (0.0, "none"), trials.run_differences.shape[1]
    for index in range(round_count):
        bound = mu_lower_bound(
            _replace_nonfinite(trials.run_differences[:, index]), trials.present, failure / round_count
        ) / math.sqrt(2.0)
        best_result = max(
            best_result, (bound, f"release of repeated round {index + 1} before a rollback minus that after it")
        )
    return best_result


def log_likelihood_ratios(plan: Plan, trials: Trials) -> Scores:
    """Return the log-likelihood ratio of present to absent, (n,), for canaries of the heaviest round.

    With the score x of the matched filter, it is (x - midpoint) · D w / σ²: w is the canary's weight times its
    clip, D the distance of both worlds in units of w, and σ the standard deviation of the noise
    (`canary_weight_and_std`).
    """
    heaviest = heaviest_round(plan)
    scores = _replace_nonfinite(trials.select_round(heaviest).releases @ matched_filter(plan, heaviest))
    weight, std = canary_weight_and_std(plan, heaviest)
    return (scores - _midpoint(plan, heaviest)) * _world_distance(plan) * weight / std**2


def separation(plan: Plan) -> float:
    """Distance of both worlds in the best test of canaries that reach the clip, in units of its noise.

    A unit is a standard deviation.  The distance is D w √(δᵀ Σ⁺ δ) / σ for a canary of the heaviest round, with
    the D, w and σ of `log_likelihood_ratios`, the signal δ (T,) and noise of covariance σ² Σ (T, T).  It equals μ
    if the canary is the worst case of an exact claim.
    """
    heaviest = heaviest_round(plan)
    weight, std = canary_weight_and_std(plan, heaviest)
    squared = float(_signal(plan, heaviest) @ matched_filter(plan, heaviest))
    return _world_distance(plan) * weight * math.sqrt(squared) / std


def find_margins(plan: Plan, exact_trials: Trials) -> Scores:
    """Return the distance of each canary's score to the threshold, in units of the score's noise.

    A unit is a standard deviation.  The score is that of the best test, `log_likelihood_ratios`, and the threshold
    is 0.  The test guesses a canary wrongly with probability Φ(-margin).  If canaries reach the clip, margins are
    half of the distance of both worlds (`separation`).  Trials are without noise (`collect_exact_trials`).
    """
    signs = np.where(exact_trials.select_round(heaviest_round(plan)).present, 1.0, -1.0)
    return np.asarray(signs * log_likelihood_ratios(plan, exact_trials) / separation(plan))


def canary_weight_and_std(plan: Plan, canary_round: int) -> tuple[float, float]:
    """Return a canary's weight times its clip, and the noise's standard deviation, in the visible release.

    The visible release is the mean over all silos if the server adds the noise or messages are masked, else the
    mean of silo 0.  A mean is over the records of a round, which has one batch or several.
    """
    sees_mean = plan.masked or float(plan.noise.std_of(SERVER)) > 0.0
    weight = (plan.weights[0] if sees_mean else 1.0) / plan.batch_sizes[0]
    std = plan.noise.std_in_mean if sees_mean else float(plan.noise.std_of(0))
    return weight * float(plan.estimator.round(canary_round).clip) / _batch_count(plan, canary_round), std


def _world_distance(plan: Plan) -> int:
    """Distance of a canary's two worlds, in units of its weight times its clip."""
    return 2 if plan.relation == "replace-one" else 1


def _replace_nonfinite(scores: Scores) -> Scores:
    """Replace NaN by 1e300, and limit scores to [-1e300, 1e300], so that they can be ordered."""
    return np.asarray(np.nan_to_num(scores, nan=math.inf).clip(-1e300, 1e300))


def _midpoint(plan: Plan, canary_round: int) -> float:
    """Midpoint of the matched filter's expected scores in both worlds, for code that follows the plan."""
    if plan.relation == "replace-one":
        return 0.0  # increments of both worlds are opposite
    weight, _ = canary_weight_and_std(plan, canary_round)
    return weight * float(_signal(plan, canary_round) @ matched_filter(plan, canary_round)) / 2.0


def _canary_scores(plan: Plan, canary_round: int, trials: Trials) -> Mapping[str, tuple[Scores, int]]:
    """Return the scores (n,) of each test by name, and the number of runs that the test reads.

    Scores are large if the canary is present.  The matched filter on the whole transcript is the best test for
    correct code at queries of zeros.  Single releases, their sum from the canary's round on, and differences (of
    two rounds, of silos 0 and 1, of two runs) show noise that is repeated, missing or badly stored.

    Args:
        plan: Plan of the run.
        canary_round: Round of the canaries, from 1.
        trials: Canaries of this round.  Differences that the adversary does not see have no columns, and no tests.
    """
    releases, rounds = trials.releases, trials.releases.shape[1]
    scores = {
        "whole transcript": releases @ matched_filter(plan, canary_round),
        "sum of releases": releases[:, canary_round - 1 :].sum(1),
    }
    scores |= {f"release {t}": releases[:, t - 1] for t in range(1, rounds + 1)}
    scores |= {
        f"release {late} minus {early}": releases[:, late - 1] - releases[:, early - 1]
        for early, late in itertools.combinations(range(1, rounds + 1), 2)
    }
    scores |= {
        f"release {t} minus silo 1's": trials.silo_differences[:, t - 1]
        for t in range(1, trials.silo_differences.shape[1] + 1)
    }
    run_pair_scores = {
        f"release {t} minus that of another run": (trials.run_differences[:, t - 1], 2)
        for t in range(1, trials.run_differences.shape[1] + 1)
    }
    return {name: (values, 1) for name, values in scores.items()} | run_pair_scores


def find_noise_factor(mechanism: Mechanism, round_count: int) -> Scores:
    """Return the noise factor B, (T, T), of a mechanism with one fresh vector in each of T rounds.

    A fresh vector is independent normal noise.  The noise of release t is row t of B times the fresh vectors of
    all rounds.  So the mechanism is run once with the t-th unit vector (T,) as the fresh vector of round t, and
    its noise in round t is row t of B.

    Raises:
        InputError: If the mechanism draws several vectors a round.
    """
    if mechanism.draws(1) is not None:  # None stands for one fresh vector a round
        raise InputError("the audit knows mechanisms with one fresh vector a round; this one draws several")
    state, rows = mechanism.start(), []
    for t, impulse in enumerate(torch.eye(round_count, dtype=torch.float64), start=1):
        row, state = mechanism.noise(state, t, impulse)
        rows.append(row.numpy().copy())
    return np.array(rows)


def matched_filter(plan: Plan, canary_round: int) -> Scores:
    """Return Σ⁺ δ (T,), the best linear test of the signal δ under noise of covariance Σ = B Bᵀ."""
    factor = find_noise_factor(plan.mechanism, plan.schedule.rounds)
    return np.asarray(np.linalg.pinv(factor @ factor.T) @ _signal(plan, canary_round))


def _signal(plan: Plan, canary_round: int) -> Scores:
    """Return a canary's signal δ (T,) in each release, in units of its first increment.

    Release t has the running sum of the increments until round t, each decayed by the estimator's `decay` once a
    round.  A sum restarts from 0 after each of the estimator's periods, if it has one.  The canary takes part in
    round c = `canary_round` and in the same round of every later pass over the records.  So δ_t is the sum of
    decay^(t-k) clip_k / clip_c over these rounds k ≤ t in the period of t, where rounds whose increments are
    differences of gradients at equal queries count as clip_k = 0 (`_reached_clip`).
    """
    rounds, first_clip = plan.schedule.rounds, float(plan.estimator.round(canary_round).clip)
    signal, period = np.zeros(rounds), plan.estimator.period or rounds
    for k in range(canary_round, rounds + 1, plan.schedule.rounds_per_epoch):
        rounds_since = np.arange(1, rounds + 1) - k
        relative_clip = _reached_clip(plan, k) / first_clip
        signal += relative_clip * np.where(
            (rounds_since >= 0) & (rounds_since < period - (k - 1) % period),
            plan.estimator.decay ** np.maximum(rounds_since, 0.0),
            0.0,
        )
    return signal


def _reached_clip(plan: Plan, t: int) -> float:
    """Return the clip of round t, or 0 if increments are differences, which are 0 at equal queries."""
    step = plan.estimator.round(t)
    return float(step.clip) if sum(step.coefficients) else 0.0


def _batch_count(plan: Plan, t: int) -> int:
    """Return the number of batches that round t reads."""
    counts = getattr(plan.schedule, "batch_counts", ())
    return int(counts[t - 1]) if counts else 1


_EPSILONS = np.concatenate([np.linspace(0.0, 3.0, 301), np.linspace(3.0, 12.0, 181)[1:]])
"""Grid of ε at which a claimed curve is evaluated."""


class CurveResult(NamedTuple):
    """μ that a test shows, and μ that the claim allows at the test's rate of false alarms."""

    mu: float
    """Lower bound on μ, which may be below 0."""
    allowed_mu: float
    """μ that the claimed curve allows at `false_alarm_rate`."""
    false_alarm_rate: float
    """Upper bound on the rate of false alarms."""
    miss_rate: float
    """Upper bound on the rate of misses."""
    test: str = ""
    """Name of the test."""

    @property
    def excess(self) -> float:
        """Shown μ minus allowed μ, above 0 if the claim is refuted."""
        return self.mu - self.allowed_mu

    def epsilon(self, delta: float) -> float:
        """Return the ε that the test shows at δ, ln((1 - misses - δ) / false alarms), at least 0."""
        power = 1.0 - self.miss_rate - delta
        return float(max(0.0, np.log(power / self.false_alarm_rate))) if power > 0.0 else 0.0


class ClaimedCurve:
    """Claimed trade-off curve f: lower bound on the rate of misses for every rate of false alarms."""

    def __init__(self, guarantee: Sampled) -> None:
        self._factors = np.exp(_EPSILONS)
        self._deltas = guarantee.curve(_EPSILONS)

    def min_miss_rates(self, alarms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a lower bound on f(α), for each α of `alarms`, as the maximum runs over a grid of ε only."""
        rates = np.asarray(alarms, np.float64)[..., None]
        from_alarms = 1.0 - self._deltas - self._factors * rates
        from_misses = (1.0 - self._deltas - rates) / self._factors
        return np.asarray(np.maximum(0.0, np.maximum(from_alarms, from_misses).max(-1)))


def evaluate_on_curve(
    curve: ClaimedCurve, scores: Scores, present: NDArray[np.bool_], failure: float, test: str = ""
) -> CurveResult:
    """Evaluate a test whose `scores` (n,) are large if the canary is `present` (n,).

    The threshold whose shown μ exceeds the allowed μ most is chosen on the first quarter of the trials, and the
    other trials are evaluated at this threshold.

    Guarantee: where the claim holds, trials are independent and coins fair, `excess` is above 0 with probability
    at most `failure`.

    Args:
        curve: Claimed curve f.
        scores: (n,), one score a trial.
        present: (n,), the coins, True for a trial with the canary.
        failure: Probability in (0, 1) that the result refutes a true claim, at most.
        test: Name of the test.

    Returns:
        The shown μ, the allowed μ, and upper bounds on both error rates.
    """
    pilot_count = len(scores) // THRESHOLD_FRACTION
    candidates = np.quantile(scores[:pilot_count], QUANTILES)
    mus, allowed_mus, *_ = _curve_bounds(curve, candidates, scores[:pilot_count], present[:pilot_count], failure)
    threshold = candidates[[int(np.argmax(mus - allowed_mus))]]
    columns = _curve_bounds(curve, threshold, scores[pilot_count:], present[pilot_count:], failure)
    mu, allowed_mu, alarms, misses = (float(column[0]) for column in columns)
    return CurveResult(mu, allowed_mu, alarms, misses, test)


def _curve_bounds(
    curve: ClaimedCurve, thresholds: Scores, scores: Scores, present: NDArray[np.bool_], failure: float
) -> tuple[Scores, Scores, Scores, Scores]:
    """Return shown μ, allowed μ, and upper bounds of both error rates, at each threshold."""
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
