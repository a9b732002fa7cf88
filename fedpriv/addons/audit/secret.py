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
from fedpriv.addons.audit.canaries import FAR, CanaryLayout, auditable, nothing, objective_for, units_of
from fedpriv.addons.audit.statistics import ClaimedCurve, Shown, shown
from fedpriv.addons.audit.transcripts import passes_of, run_trials
from fedpriv.claims.ledger import ReleaseStream, releases_of, stream_of
from fedpriv.core.errors import InputError
from fedpriv.core.random import (
    KeyedCoins,
    KeyedNormal,
    integers_key,
    public_generator,
    simulation_noise,
    system_key,
)
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.trust import UNTRUSTED
from fedpriv.participation.secret import Allocation, Balanced, Poisson, SecretOrder
from fedpriv.plan.plan import Plan, plan_of
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo

Floats = NDArray[np.float64]
_MOST_BINS, _MOST_EPOCHS, _MOST_SILOS = 8, 6, 3
_BATCH, _COMPANY_BATCH = 128, 128
CANARIES = 512
"""Of one run."""
COMPANIES, COMPANIES_A_STEP = 16, 32
"""So many trials ask for one run of the other family; so many of those take about as long as a run of canaries."""
ON_THE_BEST = 0.5


def small_rounds(cell: Cell) -> tuple[int, int]:
    """Rounds and epochs of a run that can be repeated, of the same groups; InputError for sums that go on."""
    schedule = cell.schedule
    if not isinstance(schedule, SecretOrder):
        raise InputError(f'federation.sampling = "{cell.federation.sampling}": nobody\'s rounds are secret')
    epochs = min(passes_of(cell), _MOST_EPOCHS)
    return epochs * schedule.groups * min(schedule.bins, _MOST_BINS), epochs


def canary_cell(cell: Cell, mu: float) -> Cell:
    """The cell as canaries among each other need it."""
    rounds, epochs = small_rounds(cell)
    return auditable(cell, mu, rounds, min(cell.federation.silos, _MOST_SILOS), _BATCH, epochs)


def company_cell(cell: Cell, mu: float) -> Cell:
    """One silo of few records, which adds the noise itself: its schedule and sums are the same in every trust."""
    rounds, epochs = small_rounds(cell)
    small = auditable(cell, mu, rounds, 1, _COMPANY_BATCH, epochs)
    return small.model_copy(update={"algorithm": small.algorithm.model_copy(update={"trust": UNTRUSTED.name})})


class Seen(NamedTuple):
    """Trials as rows: releases along each canary in units of its clipped weight (n, T), its coin, its row (n,)."""

    releases: Floats
    present: NDArray[np.bool_]
    row: NDArray[np.int64]


def guarantee_of(plan: Plan) -> Sampled:
    """Return the guarantee that is claimed of the plan's releases."""
    guarantee = _stream(plan).guarantee
    assert isinstance(guarantee, Sampled)  # a cell without noise, or without secret rounds, is not audited here
    return guarantee


def _stream(plan: Plan) -> ReleaseStream:
    rounds = plan.schedule.rounds
    return stream_of(plan, 0, rounds) if plan.trust.releases(0) else releases_of(plan, rounds)[0]


def _in_weights(plan: Plan, along: Floats) -> Floats:
    """(n, T) over what one record's increment weighs in each round.

    Correlated noise is taken apart first: of y = C s + z, which the releases B y are a function of, column t of C
    is what a record of round t moves, and its matched filter is the best test of that round.  Filters of rounds
    that lie `groups` apart look at disjoint blocks, so that their noise is independent.
    """
    stream = _stream(plan)
    weights: Floats = stream.per_record * np.array(stream.clips[: along.shape[1]])
    blocks = stream.mechanism.blocks(stream.workload)
    if blocks is None or (blocks.bands == 1 and stream.decay == 0.0):
        return along / weights
    rows, columns = _factors(stream.mechanism, stream.workload)
    noisy = np.linalg.solve(rows, along.T)
    largest = float(np.max(weights * blocks.norms))
    return np.asarray((columns.T @ noisy).T / (np.linalg.norm(columns, axis=0) * largest), np.float64)


def _factors(mechanism: Mechanism, workload: Workload) -> tuple[Floats, Floats]:
    """B and C of A = B C, (T, T), of a mechanism with one fresh vector a round: B is what it streams."""
    state, rows = mechanism.start(), np.empty((workload.rounds, workload.rounds))
    for t, fresh in enumerate(torch.eye(workload.rounds, dtype=torch.float64), start=1):
        row, state = mechanism.noise(state, t, fresh)
        rows[t - 1] = row.numpy()
    places = np.arange(workload.rounds)
    sums = np.tril(workload.decay ** np.subtract.outer(places, places).clip(0))
    return rows, np.linalg.solve(rows, sums).astype(np.float64)


def canaries(small: Cell, seed: int) -> Seen:
    """One run of canaries of silo 0, spread over all groups, on the path of a deployment."""
    plan = plan_of(small, objective_for(small, CANARIES), released=True)
    rows = plan.schedule.batches_held * plan.batch_sizes[0]
    count = min(CANARIES, rows)
    row = np.arange(count)
    trials = run_trials(small, CanaryLayout(np.zeros(count, np.int64), row, rows), seed)
    return Seen(_in_weights(plan, trials.seen), trials.present, row)


def company(small: Cell, runs: int, seed: int, steps: Callable[[float], None] = lambda _: None) -> Seen:
    """Runs of one silo in which row 0 is the canary and every other record pulls the other way."""
    plan = plan_of(small, objective_for(small, 1), released=True)
    rows = plan.schedule.batches_held * plan.batch_sizes[0]
    coins = public_generator(seed, "audit company").random(runs) < 0.5
    sides = []
    for there in (False, True):
        others = nothing(rows, 1)
        others.images[:], others.labels[:] = FAR, 1
        others.labels[0] = not there
        if not there and small.privacy.relation == "zero-out":
            others.images[0] = 0.0
        sides.append(units_of(others, small))
    query, along = torch.zeros_like(plan.objective.initial()), np.empty((runs, plan.schedule.rounds))
    for number, there in enumerate(coins):
        silo = Silo.of(0, plan, sides[int(there)], system_key(), b"")
        state = silo.start()
        for t in range(1, plan.schedule.rounds + 1):
            release, state = silo.answer(state, t, query)
            classes = release.vector.view(2, -1)[:, 0]
            along[number, t - 1] = float(classes[1] - classes[0]) / 2**0.5
        steps(1.0 / COMPANIES_A_STEP)
    return Seen(_in_weights(plan, along), coins, np.zeros(runs, np.int64))


@dataclass(frozen=True)
class Evidence:
    """Log-likelihood ratios under a secret schedule, for noise of standard deviation `multiplier` a round."""

    schedule: "Secret"
    relation: str
    multiplier: float

    def of(self, releases: Floats, row: NDArray[np.int64], shift: float = 1.0) -> Floats:
        """ln of (row takes part with `shift` in its secret rounds) over (no row does), (n,)."""
        return self._scores(self._ratios(releases, shift), row)

    def secret(self, seen: Seen) -> Floats:
        """The canary against nothing, or against its opposite: the best test of code that is right."""
        there = self.of(seen.releases, seen.row)
        return there if self.relation == "zero-out" else there - self.of(seen.releases, seen.row, -1.0)

    def beside_all_others(self, seen: Seen) -> Floats:
        """Where all others are known to fill every round but for the canary's place: 2 there, or 1, or nothing."""
        filled = seen.releases + _COMPANY_BATCH
        there = self.of(filled, seen.row, 2.0)
        return there - self.of(filled, seen.row, 1.0) if self.relation == "zero-out" else there

    def one_round_in_all_epochs(self, seen: Seen) -> Floats:
        """As if a row kept its round: the same places of all epochs together."""
        ratios = self._ratios(seen.releases, 1.0)
        return self._scores(ratios.reshape(len(ratios), -1, self.schedule.rounds_per_epoch).sum(1), seen.row)

    def told(self, seen: Seen, coins: KeyedCoins, batch: int) -> Floats:
        """As if the rounds were those that `coins` draw."""
        ratios, known = self._ratios(seen.releases, 1.0), np.zeros_like(seen.releases)
        for t in range(1, self.schedule.rounds + 1):
            known[np.isin(seen.row, self.schedule.rows(t, batch, 0, lambda: coins)), t - 1] = 1.0
        return np.asarray((known * ratios).sum(1), np.float64)

    def _ratios(self, releases: Floats, shift: float) -> Floats:
        """ln of N(shift, z²) over N(0, z²) at every release, (n, T)."""
        return (shift * releases - shift**2 / 2.0) / self.multiplier**2

    def _scores(self, ratios: Floats, row: NDArray[np.int64]) -> Floats:
        scores = np.empty(len(ratios))
        for group in range(self.schedule.groups):
            members = row % self.schedule.groups == group
            if members.any():
                own = ratios[members, group :: self.schedule.groups]
                scores[members] = _MIXED[type(self.schedule)](self.schedule, own)
        return scores


def _by_epochs(schedule: SecretOrder, ratios: Floats) -> Floats:
    """One of the `bins` rounds of every epoch: ratios (n, epochs · bins)."""
    epochs = ratios.reshape(len(ratios), -1, schedule.bins)
    largest = epochs.max(-1, keepdims=True)
    largest[~np.isfinite(largest)] = 0.0
    with np.errstate(divide="ignore", over="ignore"):  # of releases that are not finite
        means = np.log(np.exp(epochs - largest).mean(-1))
    return np.asarray((means + largest[..., 0]).sum(-1), np.float64)


def _by_rounds(schedule: SecretOrder, ratios: Floats) -> Floats:
    """Every round by a coin of rate 1 / bins."""
    rate = 1.0 / schedule.bins
    return np.asarray(np.logaddexp(np.log1p(-rate) if rate < 1.0 else -np.inf, np.log(rate) + ratios).sum(-1))


def _by_any(schedule: SecretOrder, ratios: Floats) -> Floats:
    """Any `passes` of all rounds: the mean over sets of them, by elementary symmetric polynomials."""
    rounds, passes = ratios.shape[1], ratios.shape[1] // schedule.bins
    sums = np.full((passes + 1, len(ratios)), -np.inf)
    sums[0] = 0.0
    for t in range(rounds):
        sums[1:] = np.logaddexp(sums[1:], sums[:-1] + ratios[:, t])
    return np.asarray(sums[-1] - math.log(math.comb(rounds, passes)), np.float64)


Secret = Allocation | Poisson
"""The schedules that tests are made for."""
_MIXED: Mapping[type[Secret], Callable[[SecretOrder, Floats], Floats]] = {
    Allocation: _by_epochs,
    Balanced: _by_any,
    Poisson: _by_rounds,
}


def evidence_of(plan: Plan) -> Evidence:
    """InputError for a schedule that no test is made for."""
    schedule = plan.schedule
    if not isinstance(schedule, Secret):
        raise InputError(
            f'federation.sampling = "{schedule.name}": the audit has no tests for it; accepted are '
            f"{', '.join(repr(kind.name) for kind in _MIXED)}"
        )
    return Evidence(schedule, plan.relation, guarantee_of(plan).noise_multiplier)


def canaries_shown(small: Cell, plan: Plan, seen: Seen, curve: ClaimedCurve, failure: float) -> Shown:
    """The largest excess of the tests of many canaries."""
    evidence, batch = evidence_of(plan), plan.batch_sizes[0]
    of_integers = KeyedNormal(integers_key(small.seed), np.float64).coins()
    others = {
        "coins of the public seed": evidence.told(seen, simulated(small), batch),
        "coins of the public seed's integers": evidence.told(seen, of_integers, batch),
        "one round in all epochs": evidence.one_round_in_all_epochs(seen),
        "sum of all releases": seen.releases.sum(1),
        "largest release": seen.releases.max(1),
    }
    return _largest(curve, {"rounds kept secret": evidence.secret(seen)}, others, seen.present, failure)


def company_shown(plan: Plan, seen: Seen, curve: ClaimedCurve, failure: float) -> Shown:
    """The largest excess of the tests of a canary whose company is known."""
    best = {"a round that all others leave": evidence_of(plan).beside_all_others(seen)}
    return _largest(curve, best, {"sum of all releases": seen.releases.sum(1)}, seen.present, failure)


def _largest(
    curve: ClaimedCurve,
    best: Mapping[str, Floats],
    others: Mapping[str, Floats],
    present: NDArray[np.bool_],
    failure: float,
) -> Shown:
    """Guarantee: shares of the failure add up to it (Bonferroni), whatever the dependence between tests."""
    shares = [(best, failure * ON_THE_BEST / len(best)), (others, failure * (1.0 - ON_THE_BEST) / len(others))]
    return max(
        (
            shown(curve, np.nan_to_num(scores, nan=1e300).clip(-1e300, 1e300), present, share, name)
            for tests, share in shares
            for name, scores in tests.items()
        ),
        key=lambda each: each.excess,
    )


def simulated(cell: Cell) -> KeyedCoins:
    """The coins of a simulation of the cell."""
    return simulation_noise(cell.seed, cell.run.dtype).coins()
