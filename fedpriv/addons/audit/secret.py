"""Canaries whose rounds are secret: what is seen of them, and tests that know no more than an adversary does.

Two families, against the curve that is claimed (`statistics.ClaimedCurve`):

* canaries: many in one run of the deployed path, each in rounds that its guard drew.  The best test is the mean of
  the likelihood ratios of the rounds it may be in; others presume what a broken schedule would give away, such as
  coins of the public seed.
* company: one canary, and all other records of the silo pull the other way as far as they can.  An adversary that
  knows all others must not learn the canary's round from them, nor from what the sum is divided by: equal batches,
  first come first served and means over those drawn show here.

Releases are looked at in units of one record's clipped weight: z · N(0, 1), and 1 more where the canary takes
part.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
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
from fedpriv.addons.audit.statistics import ClaimedCurve, CurveResult, evaluate_on_curve
from fedpriv.addons.audit.transcripts import count_passes, run_trials
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
_BATCH_SIZE, _COMPANY_BATCH_SIZE = 128, 128
CANARY_COUNT = 512
"""Of one run."""
TRIALS_PER_COMPANY_RUN, COMPANY_RUNS_PER_STEP = 16, 32
"""So many trials ask for one run of the other family; so many of those take about as long as a run of canaries."""
BEST_TEST_SHARE = 0.5


def small_run_size(cell: Cell) -> tuple[int, int]:
    """Rounds and epochs of a run that can be repeated, of the same groups; InputError for sums that go on."""
    schedule = cell.schedule
    if not isinstance(schedule, SecretOrder):
        raise InputError(f'federation.sampling = "{cell.federation.sampling}": nobody\'s rounds are secret')
    epochs = min(count_passes(cell), _MAX_EPOCHS)
    return epochs * schedule.groups * min(schedule.bins, _MAX_BINS), epochs


def make_canary_cell(cell: Cell, mu: float) -> Cell:
    """The cell as canaries among each other need it."""
    rounds, epochs = small_run_size(cell)
    return make_audit_cell(cell, mu, rounds, min(cell.federation.silos, _MAX_SILOS), _BATCH_SIZE, epochs)


def make_company_cell(cell: Cell, mu: float) -> Cell:
    """One silo of few records, which adds the noise itself: its schedule and sums are the same in every trust."""
    rounds, epochs = small_run_size(cell)
    small = make_audit_cell(cell, mu, rounds, 1, _COMPANY_BATCH_SIZE, epochs)
    return small.model_copy(update={"algorithm": small.algorithm.model_copy(update={"trust": UNTRUSTED.name})})


class CanaryTrials(NamedTuple):
    """Trials as rows: releases along each canary in units of its clipped weight (n, T), its coin, its row (n,)."""

    releases: Floats
    present: NDArray[np.bool_]
    row_indices: NDArray[np.int64]


def sampled_guarantee(plan: Plan) -> Sampled:
    """Return the guarantee that is claimed of the plan's releases."""
    guarantee = _claimed_stream(plan).guarantee
    assert isinstance(guarantee, Sampled)  # a cell without noise, or without secret rounds, is not audited here
    return guarantee


def _claimed_stream(plan: Plan) -> ReleaseStream:
    rounds = plan.schedule.rounds
    return (
        make_silo_stream(plan, 0, rounds)
        if plan.trust.publishes_sums(0)
        else make_release_streams(plan, rounds)[0]
    )


def _to_weight_units(plan: Plan, along: Floats) -> Floats:
    """(n, T) over what one record's increment weighs in each round.

    Correlated noise is taken apart first: of y = C s + z, which the releases B y are a function of, column t of C
    is what a record of round t moves, and its matched filter is the best test of that round.  Filters of rounds
    that lie `groups` apart look at disjoint blocks, so that their noise is independent.
    """
    stream = _claimed_stream(plan)
    weights: Floats = stream.record_weight * np.array(stream.clips[: along.shape[1]])
    blocks = stream.mechanism.blocks(stream.workload)
    if blocks is None or (blocks.bands == 1 and stream.decay == 0.0):
        return along / weights
    rows, columns = _factorize(stream.mechanism, stream.workload)
    noisy = np.linalg.solve(rows, along.T)
    largest = float(np.max(weights * blocks.norms))
    return np.asarray((columns.T @ noisy).T / (np.linalg.norm(columns, axis=0) * largest), np.float64)


def _factorize(mechanism: Mechanism, workload: Workload) -> tuple[Floats, Floats]:
    """B and C of A = B C, (T, T), of a mechanism with one fresh vector a round: B is what it streams."""
    state, rows = mechanism.start(), np.empty((workload.rounds, workload.rounds))
    for t, fresh in enumerate(torch.eye(workload.rounds, dtype=torch.float64), start=1):
        row, state = mechanism.noise(state, t, fresh)
        rows[t - 1] = row.numpy()
    places = np.arange(workload.rounds)
    sums = np.tril(workload.decay ** np.subtract.outer(places, places).clip(0))
    return rows, np.linalg.solve(rows, sums).astype(np.float64)


def run_canaries(small: Cell, seed: int) -> CanaryTrials:
    """One run of canaries of silo 0, spread over all groups, on the path of a deployment."""
    plan = make_plan(small, make_canary_objective(small, CANARY_COUNT), for_release=True)
    rows = plan.schedule.batches_per_silo * plan.batch_sizes[0]
    count = min(CANARY_COUNT, rows)
    row = np.arange(count)
    trials = run_trials(small, CanaryLayout(np.zeros(count, np.int64), row, rows), seed)
    return CanaryTrials(_to_weight_units(plan, trials.releases), trials.present, row)


def run_company(
    small: Cell, runs: int, seed: int, steps: Callable[[float], None] = lambda _: None
) -> CanaryTrials:
    """Runs of one silo in which row 0 is the canary and every other record pulls the other way."""
    plan = make_plan(small, make_canary_objective(small, 1), for_release=True)
    rows = plan.schedule.batches_per_silo * plan.batch_sizes[0]
    coins = public_generator(seed, "audit company").random(runs) < 0.5
    sides = []
    for there in (False, True):
        others = zero_shard(rows, 1)
        others.images[:], others.labels[:] = FAR_NORM, 1
        others.labels[0] = not there
        if not there and small.privacy.relation == "zero-out":
            others.images[0] = 0.0
        sides.append(unit_records(others, small))
    query, along = torch.zeros_like(plan.objective.initial()), np.empty((runs, plan.schedule.rounds))
    for number, there in enumerate(coins):
        silo = Silo.for_release(0, plan, sides[int(there)], system_key(), b"")
        state = silo.initial_state()
        for t in range(1, plan.schedule.rounds + 1):
            release, state = silo.answer(state, t, query)
            classes = release.vector.view(2, -1)[:, 0]
            along[number, t - 1] = float(classes[1] - classes[0]) / 2**0.5
        steps(1.0 / COMPANY_RUNS_PER_STEP)
    return CanaryTrials(_to_weight_units(plan, along), coins, np.zeros(runs, np.int64))


@dataclass(frozen=True)
class Evidence:
    """Log-likelihood ratios under a secret schedule, for noise of standard deviation `multiplier` a round."""

    schedule: "AuditedSchedule"
    relation: str
    multiplier: float

    def log_ratios(self, releases: Floats, row: NDArray[np.int64], shift: float = 1.0) -> Floats:
        """ln of (row takes part with `shift` in its secret rounds) over (no row does), (n,)."""
        return self._mix_ratios(self._release_ratios(releases, shift), row)

    def score_secret_rounds(self, trials: CanaryTrials) -> Floats:
        """The canary against nothing, or against its opposite: the best test of code that is right."""
        there = self.log_ratios(trials.releases, trials.row_indices)
        return (
            there
            if self.relation == "zero-out"
            else there - self.log_ratios(trials.releases, trials.row_indices, -1.0)
        )

    def score_known_company(self, trials: CanaryTrials) -> Floats:
        """Where all others are known to fill every round but for the canary's place: 2 there, or 1, or nothing."""
        filled = trials.releases + _COMPANY_BATCH_SIZE
        there = self.log_ratios(filled, trials.row_indices, 2.0)
        return there - self.log_ratios(filled, trials.row_indices, 1.0) if self.relation == "zero-out" else there

    def score_fixed_round(self, trials: CanaryTrials) -> Floats:
        """As if a row kept its round: the same places of all epochs together."""
        ratios = self._release_ratios(trials.releases, 1.0)
        return self._mix_ratios(
            ratios.reshape(len(ratios), -1, self.schedule.rounds_per_epoch).sum(1), trials.row_indices
        )

    def score_known_rounds(
        self, trials: CanaryTrials, sampling_randomness: SamplingRandomness, batch: int
    ) -> Floats:
        """As if the rounds were those that `coins` draw."""
        ratios, known = self._release_ratios(trials.releases, 1.0), np.zeros_like(trials.releases)
        for t in range(1, self.schedule.rounds + 1):
            known[
                np.isin(trials.row_indices, self.schedule.select_rows(t, batch, 0, lambda: sampling_randomness)),
                t - 1,
            ] = 1.0
        return np.asarray((known * ratios).sum(1), np.float64)

    def _release_ratios(self, releases: Floats, shift: float) -> Floats:
        """ln of N(shift, z²) over N(0, z²) at every release, (n, T)."""
        return (shift * releases - shift**2 / 2.0) / self.multiplier**2

    def _mix_ratios(self, ratios: Floats, row: NDArray[np.int64]) -> Floats:
        scores = np.empty(len(ratios))
        for group in range(self.schedule.groups):
            members = row % self.schedule.groups == group
            if members.any():
                own = ratios[members, group :: self.schedule.groups]
                scores[members] = _MIXTURES[type(self.schedule)](self.schedule, own)
        return scores


def _mix_per_epoch(schedule: SecretOrder, ratios: Floats) -> Floats:
    """One of the `bins` rounds of every epoch: ratios (n, epochs · bins)."""
    epochs = ratios.reshape(len(ratios), -1, schedule.bins)
    largest = epochs.max(-1, keepdims=True)
    largest[~np.isfinite(largest)] = 0.0
    with np.errstate(divide="ignore", over="ignore"):  # of releases that are not finite
        means = np.log(np.exp(epochs - largest).mean(-1))
    return np.asarray((means + largest[..., 0]).sum(-1), np.float64)


def _mix_per_round(schedule: SecretOrder, ratios: Floats) -> Floats:
    """Every round by a coin of rate 1 / bins."""
    rate = 1.0 / schedule.bins
    return np.asarray(np.logaddexp(np.log1p(-rate) if rate < 1.0 else -np.inf, np.log(rate) + ratios).sum(-1))


def _mix_any_rounds(schedule: SecretOrder, ratios: Floats) -> Floats:
    """Any `passes` of all rounds: the mean over sets of them, by elementary symmetric polynomials."""
    rounds, passes = ratios.shape[1], ratios.shape[1] // schedule.bins
    sums = np.full((passes + 1, len(ratios)), -np.inf)
    sums[0] = 0.0
    for t in range(rounds):
        sums[1:] = np.logaddexp(sums[1:], sums[:-1] + ratios[:, t])
    return np.asarray(sums[-1] - math.log(math.comb(rounds, passes)), np.float64)


AuditedSchedule = RandomAllocation | PoissonSampling
"""The schedules that tests are made for."""
_MIXTURES: Mapping[type[AuditedSchedule], Callable[[SecretOrder, Floats], Floats]] = {
    RandomAllocation: _mix_per_epoch,
    BalancedSubsampling: _mix_any_rounds,
    PoissonSampling: _mix_per_round,
}


def make_evidence(plan: Plan) -> Evidence:
    """InputError for a schedule that no test is made for."""
    schedule = plan.schedule
    if not isinstance(schedule, AuditedSchedule):
        raise InputError(
            f'federation.sampling = "{schedule.name}": the audit has no tests for it; accepted are '
            f"{', '.join(repr(kind.name) for kind in _MIXTURES)}"
        )
    return Evidence(schedule, plan.relation, sampled_guarantee(plan).noise_multiplier)


def evaluate_canaries(
    small: Cell, plan: Plan, trials: CanaryTrials, curve: ClaimedCurve, failure: float
) -> CurveResult:
    """The largest excess of the tests of many canaries."""
    evidence, batch = make_evidence(plan), plan.batch_sizes[0]
    of_integers = KeyedNormal(integer_noise_key(small.seed), np.float64).sampling_randomness()
    others = {
        "coins of the public seed": evidence.score_known_rounds(trials, simulated_randomness(small), batch),
        "coins of the public seed's integers": evidence.score_known_rounds(trials, of_integers, batch),
        "one round in all epochs": evidence.score_fixed_round(trials),
        "sum of all releases": trials.releases.sum(1),
        "largest release": trials.releases.max(1),
    }
    return _find_largest_excess(
        curve, {"rounds kept secret": evidence.score_secret_rounds(trials)}, others, trials.present, failure
    )


def evaluate_company(plan: Plan, trials: CanaryTrials, curve: ClaimedCurve, failure: float) -> CurveResult:
    """The largest excess of the tests of a canary whose company is known."""
    best = {"a round that all others leave": make_evidence(plan).score_known_company(trials)}
    return _find_largest_excess(
        curve, best, {"sum of all releases": trials.releases.sum(1)}, trials.present, failure
    )


def _find_largest_excess(
    curve: ClaimedCurve,
    best: Mapping[str, Floats],
    others: Mapping[str, Floats],
    present: NDArray[np.bool_],
    failure: float,
) -> CurveResult:
    """Guarantee: shares of the failure add up to it (Bonferroni), whatever the dependence between tests."""
    shares = [
        (best, failure * BEST_TEST_SHARE / len(best)),
        (others, failure * (1.0 - BEST_TEST_SHARE) / len(others)),
    ]
    return max(
        (
            evaluate_on_curve(curve, np.nan_to_num(scores, nan=1e300).clip(-1e300, 1e300), present, share, name)
            for tests, share in shares
            for name, scores in tests.items()
        ),
        key=lambda each: each.excess,
    )


def simulated_randomness(cell: Cell) -> SamplingRandomness:
    """The coins of a simulation of the cell."""
    return simulation_noise(cell.seed, cell.run.dtype).sampling_randomness()
