"""Canaries in secret rounds, and tests that know as much about their rounds as an adversary.

A *canary* is a planted unit, such as a record, which a fair coin makes present or absent (under replace-one, gives
the opposite increment), and which is one trial.  Its rounds are *secret* if only the silo knows them.  An *epoch*
is a pass over the records.  A *release* is a vector of a round with its noise, projected on the direction of a
canary.  Two families of tests are compared with the claimed curve (`statistics.ClaimedCurve`):

* Canaries: one run of the deployed path has many canaries, each in rounds that the silo draws.  The best test is
  the mean of the likelihood ratios over the rounds that are possible.  Other tests suit broken schedules, for
  example one whose coins follow from the public seed.
* Company: a silo has one canary, and all its other records pull the other way as far as they can.  An adversary
  who knows the other records must not learn the canary's round from them, nor from the divisor of the sum.

Releases are in units of one record's clipped weight.  If all rounds have the same clip and the same independent
noise, a release without other records is z · N(0, 1), plus 1 in rounds of a canary that is present, or minus 1 if
it has the opposite increment.  Rows of a silo's order are in public groups: row i is in group i mod `groups`, and
its secret rounds t (from 1) are drawn among those with t - 1 ≡ i (mod `groups`).  An epoch has `bins` such rounds.
Shapes name n canaries and T rounds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.guarantees import Sampled
from fedpriv.addons.audit.canaries import (
    FAR_NORM,
    CanaryLayout,
    make_audit_cell,
    make_canary_objective,
    unit_records,
    zero_shard,
)
from fedpriv.addons.audit.statistics import ClaimedCurve, CurveResult, evaluate_on_curve, find_noise_factor
from fedpriv.addons.audit.transcripts import (
    collect_silo_releases,
    count_passes,
    project_on_canaries,
    run_trials,
    zero_queries,
)
from fedpriv.claims.ledger import ReleaseStream, make_release_streams, make_silo_stream
from fedpriv.core.errors import InputError
from fedpriv.core.random import (
    KeyedNormal,
    SamplingRandomness,
    integer_noise_key,
    public_generator,
    simulation_noise,
    system_key,
)
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.trust import UNTRUSTED
from fedpriv.participation.secret import BalancedSubsampling, PoissonSampling, RandomAllocation, SecretOrder
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo

Floats = NDArray[np.float64]
_MAX_BINS, _MAX_EPOCHS, _MAX_SILOS = 8, 6, 3
_MAX_LOG_RATIO = 1e300
_BATCH_SIZE, _COMPANY_BATCH_SIZE = 128, 128
CANARY_COUNT = 512
"""Most canaries of one run."""
TRIALS_PER_COMPANY_RUN, COMPANY_RUNS_PER_STEP = 16, 32
"""Trials of an audit for each run of the family "company", and such runs in one step of the progress.

A step takes about as long as a run of canaries.
"""
BEST_TEST_SHARE = 0.5
"""Share of a family's failure for the test that is best against correct code."""


def small_run_size(cell: Cell) -> tuple[int, int]:
    """Return rounds and epochs of a small run with the same groups, and with at most 8 bins and 6 epochs.

    Raises:
        InputError: If no rounds are secret.
    """
    schedule = cell.schedule
    if not isinstance(schedule, SecretOrder):
        raise InputError(f'federation.sampling = "{cell.federation.sampling}": nobody\'s rounds are secret')
    epochs = min(count_passes(cell), _MAX_EPOCHS)
    return epochs * schedule.groups * min(schedule.bins, _MAX_BINS), epochs


def make_canary_cell(cell: Cell, mu: float) -> Cell:
    """Cut a cell to the size of an audit, for a run of many canaries."""
    rounds, epochs = small_run_size(cell)
    return make_audit_cell(cell, mu, rounds, min(cell.federation.silos, _MAX_SILOS), _BATCH_SIZE, epochs)


def make_company_cell(cell: Cell, mu: float) -> Cell:
    """Cut a cell to one silo of few records, and let the silo add the noise to its own sums.

    Neither the silo's schedule nor its sums before noise depend on the trust setting.
    """
    rounds, epochs = small_run_size(cell)
    company_cell = make_audit_cell(cell, mu, rounds, 1, _COMPANY_BATCH_SIZE, epochs)
    return company_cell.model_copy(
        update={"algorithm": company_cell.algorithm.model_copy(update={"trust": UNTRUSTED.name})}
    )


class CanaryTrials(NamedTuple):
    """Trials of n canaries in T secret rounds."""

    releases: Floats
    """Releases along each canary, (n, T), in units of one record's clipped weight."""
    present: NDArray[np.bool_]
    """Coins, (n,), True for a canary that is present."""
    row_indices: NDArray[np.int64]
    """Rows of the canaries in the silo's order, (n,)."""


def sampled_guarantee(plan: Plan) -> Sampled:
    """Return the claimed guarantee of the plan's releases."""
    guarantee = _claimed_stream(plan).guarantee
    assert isinstance(guarantee, Sampled)  # a cell without noise, or without secret rounds, is not audited here
    return guarantee


def _claimed_stream(plan: Plan) -> ReleaseStream:
    """Return the stream of silo 0 if the silo publishes its own sums, else the first stream of the run."""
    rounds = plan.schedule.rounds
    return (
        make_silo_stream(plan, 0, rounds)
        if plan.trust.publishes_sums(0)
        else make_release_streams(plan, rounds)[0]
    )


def _to_weight_units(plan: Plan, releases: Floats) -> Floats:
    """Convert releases to units of one record's clipped weight, and whiten correlated noise.

    A round's weight is that of one record times the round's clip.  The mechanism's `blocks` are the number of
    bands of its strategy C, which is the most rounds in which a column has entries, and the norms of the columns.
    Releases are divided by the weight if their noise is independent (one band, and no decay), or if the mechanism
    states no bands (`blocks` is None).

    Others are r = B (C s + z) along a canary: increments s (T,), independent noise z (T,), noise factor B and
    strategy C, both (T, T).  The record of round t moves C s along column c_t of C.  So the result of round t is
    its matched filter, c_tᵀ B⁻¹ r / (‖c_t‖ m), with the largest product m of a round's weight and its column's
    norm.

    Returns:
        Releases in units of one record's clipped weight, (n, T).
    """
    stream = _claimed_stream(plan)
    weights: Floats = stream.record_weight * np.array(stream.clips[: releases.shape[1]])
    blocks = stream.mechanism.blocks(stream.workload)
    if blocks is None or (blocks.bands == 1 and stream.decay == 0.0):
        return releases / weights
    noise_factor, sensitivity_factor = _factorize(stream.mechanism, stream.workload)
    whitened = np.linalg.solve(noise_factor, releases.T)
    max_sensitivity = float(np.max(weights * blocks.norms))
    return np.asarray(
        (sensitivity_factor.T @ whitened).T / (np.linalg.norm(sensitivity_factor, axis=0) * max_sensitivity),
        np.float64,
    )


def _factorize(mechanism: Mechanism, workload: Workload) -> tuple[Floats, Floats]:
    """Return B and C, both (T, T), of A = B C for a mechanism with one fresh vector a round.

    The workload A maps increments to running sums that never restart: its entries are decay^(t-k) for k ≤ t, else
    0.  So C is B⁻¹ A.
    """
    noise_factor = find_noise_factor(mechanism, workload.rounds)
    indices = np.arange(workload.rounds)
    workload_matrix = np.tril(workload.decay ** np.subtract.outer(indices, indices).clip(0))
    return noise_factor, np.linalg.solve(noise_factor, workload_matrix).astype(np.float64)


def run_canaries(small_cell: Cell, seed: int) -> CanaryTrials:
    """Run canaries of silo 0 once on the path of a deployment.

    Returns:
        Trials of `CANARY_COUNT` canaries, or of one canary a row if the silo has fewer rows.
    """
    plan = make_plan(small_cell, make_canary_objective(small_cell, CANARY_COUNT), for_release=True)
    rows = plan.schedule.batches_per_silo * plan.batch_sizes[0]
    count = min(CANARY_COUNT, rows)
    row = np.arange(count)
    trials = run_trials(small_cell, CanaryLayout(np.zeros(count, np.int64), row, rows), seed)
    return CanaryTrials(_to_weight_units(plan, trials.releases), trials.present, row)


def run_company(
    small_cell: Cell, runs: int, seed: int, steps: Callable[[float], None] = lambda _: None
) -> CanaryTrials:
    """Run one silo `runs` times, with the canary in row 0 and all other records pulling the other way.

    A present canary has label 0, and another record has label 1 and the opposite increment.  An absent canary has
    label 1, and under zero-out features of zeros.

    Args:
        small_cell: Cell from `make_company_cell`.
        runs: Number of runs, each of which is one trial.
        seed: Seed of the coins.
        steps: Function that is called with 1/32 after each run, since 32 runs count as one step of the progress.

    Returns:
        Trials, one of the canary in each run, with releases along its direction: feature 0, class 1 minus class 0,
        over √2.
    """
    plan = make_plan(small_cell, make_canary_objective(small_cell, 1), for_release=True)
    rows = plan.schedule.batches_per_silo * plan.batch_sizes[0]
    coins = public_generator(seed, "audit company").random(runs) < 0.5
    shards = []  # of the two worlds
    for is_present in (False, True):
        shard = zero_shard(rows, 1)
        shard.images[:], shard.labels[:] = FAR_NORM, 1
        shard.labels[0] = not is_present
        if not is_present and small_cell.privacy.relation == "zero-out":
            shard.images[0] = 0.0
        shards.append(unit_records(shard, small_cell))
    projections = []
    for is_present in coins:
        silo = Silo.for_release(0, plan, shards[int(is_present)], system_key(), b"")
        projections.append(project_on_canaries(collect_silo_releases(silo, zero_queries(plan))))
        steps(1.0 / COMPANY_RUNS_PER_STEP)
    return CanaryTrials(_to_weight_units(plan, np.concatenate(projections)), coins, np.zeros(runs, np.int64))


@dataclass(frozen=True)
class Evidence:
    """Log-likelihood ratios under a secret schedule, and the scores of tests that are made of them.

    Scores are (n,), and are large if the canary is present.
    """

    schedule: "AuditedSchedule"
    relation: str
    """Neighbouring relation, "zero-out" or "replace-one"."""
    multiplier: float
    """Standard deviation z of a round's noise, in units of one record's clipped weight."""

    def log_ratios(self, releases: Floats, row: NDArray[np.int64], shift: float = 1.0) -> Floats:
        """Return the log-likelihood ratio of a shift in the row's secret rounds to no shift, (n,).

        The likelihood is a mean over the sets of rounds that the schedule can draw for the row.

        Args:
            releases: (n, T), in units of one record's clipped weight.
            row: (n,), the canaries' rows in the silo's order.
            shift: Mean of a release in the canary's rounds, in the same unit.
        """
        return self._mix_ratios(self._release_ratios(releases, shift), row)

    def score_secret_rounds(self, trials: CanaryTrials) -> Floats:
        """Score the canary against its absence, or against its opposite, by the best test of correct code."""
        log_ratios = self.log_ratios(trials.releases, trials.row_indices)
        return (
            log_ratios
            if self.relation == "zero-out"
            else log_ratios - self.log_ratios(trials.releases, trials.row_indices, -1.0)
        )

    def score_known_company(self, trials: CanaryTrials) -> Floats:
        """Score the canary as if each round had 128 records, and all others pulled the other way.

        After 128 is added to every release, a round of the canary has a shift of 2 if the canary is present, and
        other rounds have none.  If the canary is absent, its round has a shift of 1 under zero-out, and of 0 under
        replace-one.
        """
        shifted_releases = trials.releases + _COMPANY_BATCH_SIZE
        log_ratios = self.log_ratios(shifted_releases, trials.row_indices, 2.0)
        return (
            log_ratios - self.log_ratios(shifted_releases, trials.row_indices, 1.0)
            if self.relation == "zero-out"
            else log_ratios
        )

    def score_fixed_round(self, trials: CanaryTrials) -> Floats:
        """Score the canary as if its row had the same secret rounds in every epoch.

        Logarithms of ratios are added over the epochs, and then mixed over the rounds of a single epoch.
        """
        ratios = self._release_ratios(trials.releases, 1.0)
        return self._mix_ratios(
            ratios.reshape(len(ratios), -1, self.schedule.rounds_per_epoch).sum(1), trials.row_indices
        )

    def score_known_rounds(
        self, trials: CanaryTrials, sampling_randomness: SamplingRandomness, batch: int
    ) -> Floats:
        """Score the canary as if `sampling_randomness` drew its rounds.

        The score is the sum of the logarithms of ratios over these rounds, 0 if there are none.

        Args:
            trials: Trials of canaries in silo 0.
            sampling_randomness: Random bits that a broken guard would draw by.
            batch: Expected number of records of a batch.
        """
        ratios, participation = self._release_ratios(trials.releases, 1.0), np.zeros_like(trials.releases)
        for t in range(1, self.schedule.rounds + 1):
            participation[
                np.isin(trials.row_indices, self.schedule.select_rows(t, batch, 0, lambda: sampling_randomness)),
                t - 1,
            ] = 1.0
        return np.asarray((participation * ratios).sum(1), np.float64)

    def _release_ratios(self, releases: Floats, shift: float) -> Floats:
        """Return the logarithm of N(shift, z²)'s density over that of N(0, z²) at each release, (n, T)."""
        return (shift * releases - shift**2 / 2.0) / self.multiplier**2

    def _mix_ratios(self, ratios: Floats, row: NDArray[np.int64]) -> Floats:
        """Mix each canary's log-likelihood ratios over its possible rounds, (n, T) -> (n,).

        The likelihood is a mean over the sets of rounds that the schedule can draw for the canary's row, weighted
        by their probability.

        Args:
            ratios: Log-likelihood ratio of each canary and round, (n, T), or (n, rounds of one epoch).
            row: Rows of the canaries in the silo's order, (n,).
        """
        scores = np.empty(len(ratios))
        for group in range(self.schedule.groups):
            members = row % self.schedule.groups == group
            if members.any():  # rounds of other groups have none of these rows
                scores[members] = _MIXTURES[type(self.schedule)](
                    self.schedule, ratios[members, group :: self.schedule.groups]
                )
        return scores


def _mix_per_epoch(schedule: SecretOrder, ratios: Floats) -> Floats:
    """Mix log-ratios (n, epochs · bins) over one secret round of the `bins` rounds of every epoch.

    The largest ratio of an epoch is taken out of the sum, so that exponentials do not overflow.

    Returns:
        Σ_e ln((1/bins) Σ_b exp(ratios[e, b])), (n,), over epochs e and their rounds b of the canaries' group.
    """
    epoch_ratios = ratios.reshape(len(ratios), -1, schedule.bins)
    largest = epoch_ratios.max(-1, keepdims=True)
    largest[~np.isfinite(largest)] = 0.0
    with np.errstate(divide="ignore", over="ignore"):  # for releases that are not finite
        log_means = np.log(np.exp(epoch_ratios - largest).mean(-1))
    return np.asarray((log_means + largest[..., 0]).sum(-1), np.float64)


def _mix_per_round(schedule: SecretOrder, ratios: Floats) -> Floats:
    """Mix log-ratios (n, rounds) over a coin of rate q = 1 / bins in each round.

    Returns:
        Σ_t ln(1 - q + q exp(ratios[t])), (n,).
    """
    rate = 1.0 / schedule.bins
    return np.asarray(np.logaddexp(np.log1p(-rate) if rate < 1.0 else -np.inf, np.log(rate) + ratios).sum(-1))


def _mix_any_rounds(schedule: SecretOrder, ratios: Floats) -> Floats:
    """Mix log-ratios (n, rounds) over all sets of `passes` = rounds / bins rounds.

    The sets have the same probability.  Rounds are those of one group, and the schedule has `bins` of them in an
    epoch.  The sum over all sets of k rounds of the product of their r_t = exp(ratios[t]) is the elementary
    symmetric polynomial e_k.  Round t updates e_k ← e_k + r_t e_(k-1) for k = passes … 1, in logarithms, and e_0
    is 1.

    Returns:
        ln(e_passes / (number of sets of `passes` rounds)), (n,).
    """
    rounds, passes = ratios.shape[1], ratios.shape[1] // schedule.bins
    log_sums = np.full((passes + 1, len(ratios)), -np.inf)
    log_sums[0] = 0.0
    for finite_ratios in np.minimum(ratios, _MAX_LOG_RATIO).T:  # e_k = 0 times infinity is no number
        log_sums[1:] = np.logaddexp(log_sums[1:], log_sums[:-1] + finite_ratios)
    return np.asarray(log_sums[-1] - math.log(math.comb(rounds, passes)), np.float64)


AuditedSchedule = RandomAllocation | PoissonSampling
"""Schedules for which the audit has tests."""
_MIXTURES: Mapping[type[AuditedSchedule], Callable[[SecretOrder, Floats], Floats]] = {
    RandomAllocation: _mix_per_epoch,
    BalancedSubsampling: _mix_any_rounds,
    PoissonSampling: _mix_per_round,
}


def make_evidence(plan: Plan) -> Evidence:
    """Make the likelihood ratios of a plan's secret schedule.

    Raises:
        InputError: If the audit has no test for the schedule.
    """
    schedule = plan.schedule
    if not isinstance(schedule, AuditedSchedule):
        raise InputError(
            f'federation.sampling = "{schedule.name}": the audit has no tests for it; accepted are '
            f"{', '.join(repr(kind.name) for kind in _MIXTURES)}"
        )
    return Evidence(schedule, plan.relation, sampled_guarantee(plan).noise_multiplier)


def evaluate_canaries(
    small_cell: Cell, plan: Plan, trials: CanaryTrials, curve: ClaimedCurve, failure: float
) -> CurveResult:
    """Return the result with the largest excess over the claim among the tests of many canaries.

    Some test refutes a true claim with probability at most `failure`.
    """
    evidence, batch = make_evidence(plan), plan.batch_sizes[0]
    integer_randomness = KeyedNormal(integer_noise_key(small_cell.seed), np.float64).sampling_randomness()
    other_tests = {
        "coins of the public seed": evidence.score_known_rounds(trials, simulated_randomness(small_cell), batch),
        "coins of the public seed's integers": evidence.score_known_rounds(trials, integer_randomness, batch),
        "one round in all epochs": evidence.score_fixed_round(trials),
        "sum of all releases": trials.releases.sum(1),
        "largest release": trials.releases.max(1),
    }
    return _find_largest_excess(
        curve, {"rounds kept secret": evidence.score_secret_rounds(trials)}, other_tests, trials.present, failure
    )


def evaluate_company(plan: Plan, trials: CanaryTrials, curve: ClaimedCurve, failure: float) -> CurveResult:
    """Return the result with the largest excess over the claim among tests in known company.

    Some test refutes a true claim with probability at most `failure`.
    """
    best_tests = {"a round that all others leave": make_evidence(plan).score_known_company(trials)}
    return _find_largest_excess(
        curve, best_tests, {"sum of all releases": trials.releases.sum(1)}, trials.present, failure
    )


def _find_largest_excess(
    curve: ClaimedCurve,
    best_tests: Mapping[str, Floats],
    other_tests: Mapping[str, Floats],
    present: NDArray[np.bool_],
    failure: float,
) -> CurveResult:
    """Return the result with the largest excess over the claimed curve.

    Scores are (n,), by name of the test.  All of `best_tests` together have the share `BEST_TEST_SHARE` of the
    failure, and `other_tests` have the rest, both in equal parts.

    Guarantee: the failures of the tests add up to `failure` (Bonferroni), whatever the dependence between tests.
    """
    shares = [
        (best_tests, failure * BEST_TEST_SHARE / len(best_tests)),
        (other_tests, failure * (1.0 - BEST_TEST_SHARE) / len(other_tests)),
    ]
    return max(
        (
            evaluate_on_curve(curve, np.nan_to_num(scores, nan=1e300).clip(-1e300, 1e300), present, share, name)
            for tests, share in shares
            for name, scores in tests.items()
        ),
        key=lambda result: result.excess,
    )


def simulated_randomness(cell: Cell) -> SamplingRandomness:
    """Return the sampling randomness of a simulation of the cell."""
    return simulation_noise(cell.seed, cell.run.dtype).sampling_randomness()
