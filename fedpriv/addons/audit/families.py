"""Families of tests of rounds in a public order, and their power.

A *canary* is a planted unit, such as a record.  Its two *worlds*, chosen by a fair coin, are its presence and its
absence under zero-out, and one increment and its opposite under replace-one.  A canary in one run is one *trial*.
A *cell* is a run with every key of its scenario resolved, and its *small cell* is a run with its algorithm, trust
and sampling, on a linear model, with few rounds, silos and records.  A *family* is a group of tests that share one
probability of a false refutation (`failure`).

A run is audited in parts: its rounds, its first step, which is a round of DP-SGD, and its evaluations.  A part is
a cell with a claim of its own.  The releases of all parts together are tested against the composed claim.  The
*heaviest round* of a part is the one whose canaries a test separates best.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import special
from torch import Tensor

from fedpriv.accounting.gaussian import compose
from fedpriv.addons.audit import attacks
from fedpriv.addons.audit.canaries import (
    CanaryLayout,
    make_audit_cell,
    make_canary_objective,
    rows_by_round,
    why_misread,
)
from fedpriv.addons.audit.statistics import (
    BEST_TEST_SHARE,
    Scores,
    bound_at_threshold,
    find_best_bound,
    find_margins,
    find_rollback_bound,
    heaviest_round,
    log_likelihood_ratios,
    mu_lower_bound,
    separation,
    upper_rates,
)
from fedpriv.addons.audit.transcripts import (
    Trials,
    collect_exact_trials,
    public_run_size,
    run_rollback,
    run_trials,
)
from fedpriv.claims.ledger import FIRST_STEP
from fedpriv.core.errors import FedprivError
from fedpriv.plan.evaluation import evaluation_cell, first_step_cell
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.scenario.schema import Cell

_Item = TypeVar("_Item")
ProgressCallback = Callable[[float], None]
"""Function that is called with an estimate of the finished share of the work, up to 1."""


class StepCounter:
    """Counter of steps that take about equally long, such as runs of canaries."""

    def __init__(self, progress: ProgressCallback, total: float) -> None:
        self._progress, self._total, self._finished_steps = progress, total, 0.0

    def __call__(self, steps: float = 1.0) -> None:
        self._finished_steps += steps
        self._progress(min(1.0, self._finished_steps / self._total))

    def after(self, items: Iterable[_Item], steps: float = 1.0) -> Iterator[_Item]:
        """Yield the items, and count `steps` after each item."""
        for item in items:
            yield item
            self(steps)


POWER = 0.95
"""Least probability with which an audit refutes noise of the detectable size that it reports."""


_SHARES = np.arange(1, 1001) / 1000.0
"""Shares of the noise among which the largest detectable one is found."""


def detectable_noise_share(margins: Scores, claimed_mu: float, trials: int, failure: float) -> float:
    """Return the largest share f of the noise that the best test refutes with probability `POWER` or more.

    On noise of f times its size the test guesses a canary wrongly with probability Φ(-margin / f).  The claim is
    refuted if wrong guesses, whose number is at most as dispersed as a binomial one, are so few that the bound of
    `bound_at_threshold` exceeds `claimed_mu`.  Smaller shares are refuted with this probability, too.

    Args:
        margins: Distance of each canary's expected score to the threshold, in standard deviations of the full
            noise (`find_margins`), (n,).  It is 0 or less if the test cannot tell the canary.
        claimed_mu: μ of the claim.
        trials: Number of canaries that the test reads.
        failure: Probability of failure of the family of tests, half of which the best test has.

    Returns:
        f, a multiple of 0.001 up to 1, or 0 if the smallest is not refuted.
    """
    max_wrong_guesses = _max_wrong_guesses(claimed_mu, trials, failure * BEST_TEST_SHARE / 2.0)
    if max_wrong_guesses < 0:
        return 0.0
    error_rates = special.ndtr(-margins / _SHARES[:, None]).mean(1)
    # At the rate `bdtri` so few wrong guesses, or fewer, have the probability `POWER`.
    is_refuted = error_rates <= special.bdtri(max_wrong_guesses, trials, POWER)
    return float(np.cumprod(is_refuted).sum() / len(_SHARES))


def _max_wrong_guesses(claimed_mu: float, trials: int, failure: float) -> int:
    """Return the largest number of wrong guesses that still refutes a claim, or -1 if no number does.

    `failure` is that of the bound by wrong guesses, half of that of `bound_at_threshold`.
    """
    is_refuted = -2.0 * special.ndtri(upper_rates(np.arange(trials), trials, failure)) > claimed_mu
    return int(np.sum(is_refuted)) - 1


MAX_ROUNDS, MAX_SILOS = 12, 3
"""Most rounds and silos of the small cell of a part."""
CANARY_COUNT, HEAVIEST_ROUND_COUNT = 1024, 256
"""Most canaries of a run, and of a round.  A pass of fewer than four rounds is full with fewer canaries."""


class AuditRefutedError(FedprivError):
    """Refutation of a claim, by a lower bound above the claim or by a wrong schedule.  Exit code 3."""

    exit_code = 3


class FamilyResult(NamedTuple):
    """Result of a family: the lower bound on μ of its best test, the test, the claimed μ, and the power."""

    mu: float
    """Lower bound on μ, 0 if the tests show nothing."""
    test: str
    """Name of the test that shows `mu`."""
    claimed_mu: float
    """Claimed μ, or the μ that a claimed curve allows the test."""
    detectable_noise_share: float | None = None
    """Share of the noise that is refuted with probability `POWER` or more, or None if it is not computed."""


class AuditedPart(NamedTuple):
    """Part of a run under audit: its cell, its small cell for canaries, number of runs, claim and seed."""

    cell: Cell
    small_cell: Cell
    """Cell of few rounds, silos and records, recalibrated to `mu`, on which canaries run."""
    run_count: int
    """Number of runs of the family "canaries", with new coins and noise in each."""
    mu: float
    """Claimed μ of this part alone."""
    seed: int
    """Seed of the audit."""
    composed_mu: float
    """μ of all parts together that read the same records."""

    @staticmethod
    def from_cell(cell: Cell, mu: float, runs: int, seed: int, composed_mu: float) -> "AuditedPart":
        """Cut a cell to the size of an audit.

        Raises:
            AuditRefutedError: If the small cell's schedule reads other records than the claim assumes.
            InputError: If the cell has no fixed order, or the small cell is refused.
        """
        (rounds, passes), silos = public_run_size(cell, MAX_ROUNDS), min(cell.federation.silos, MAX_SILOS)
        small_cell = make_audit_cell(cell, mu, rounds, silos, HEAVIEST_ROUND_COUNT, passes)
        if reason := why_misread(small_cell, rows_by_round(small_cell)):
            raise AuditRefutedError(f"the schedule is not the one that is claimed: {reason}")
        return AuditedPart(cell, small_cell, runs, mu, seed, composed_mu)

    def build_plan(self, features: int = CANARY_COUNT) -> Plan:
        return make_plan(self.small_cell, make_canary_objective(self.small_cell, features), for_release=True)

    def build_layout(self, plan: Plan) -> CanaryLayout:
        return CanaryLayout.from_rows(
            rows_by_round(self.small_cell), heaviest_round(plan), CANARY_COUNT, HEAVIEST_ROUND_COUNT
        )

    def collect_trials(
        self, plan: Plan, runs: int, queries: Sequence[Tensor] | None, steps: StepCounter
    ) -> Trials:
        """Run the canaries `runs` times, each with its own coins and noise.

        Args:
            plan: Plan of the part, which determines the round where canaries weigh most.
            runs: Number of runs.
            queries: Queries of all runs, or None for those of `run_trials`.
            steps: Counter, which counts one step for each run.
        """
        layout, seeds = self.build_layout(plan), (run_seed(self.seed, run_index) for run_index in range(runs))
        return _concatenate_trials(
            [run_trials(self.small_cell, layout, seed, queries) for seed in steps.after(seeds)]
        )


def run_seed(seed: int, number: int) -> int:
    """Return the seed of the coins of run `number` of an audit."""
    return 1_000_000 * seed + number


def make_run_parts(cell: Cell, mu: float, runs: int, seed: int) -> dict[str, AuditedPart]:
    """Make the parts of a run whose records have the claim `mu`: rounds, first step and evaluations.

    Rounds and first step have the parts of `mu` that they have of the cell's own target.  Evaluations have the
    whole of it, because test records are other records.

    Returns:
        Parts by name: "rounds", and if the run has them `FIRST_STEP` and "evaluations".

    Raises:
        AuditRefutedError: If the schedule reads other records than the claim assumes.
        InputError: If the cell has no fixed order, or the small cell or the first step of a part is refused.
    """
    target_mu, budget = cell.privacy.target_mu, cell.budget
    assert target_mu is not None
    assert budget.rounds_mu is not None
    parts = {"rounds": AuditedPart.from_cell(cell, mu * budget.rounds_mu / target_mu, runs, seed, mu)}
    if (step_cell := first_step_cell(cell)) is not None:
        parts[FIRST_STEP] = AuditedPart.from_cell(step_cell, mu * budget.other_mu / target_mu, runs, seed, mu)
    return parts | make_evaluation_parts(cell, mu, runs, seed)


def make_evaluation_parts(cell: Cell, mu: float, runs: int, seed: int) -> dict[str, AuditedPart]:
    """Make the evaluations a part of a run, or no part if they have no claim."""
    if cell.evaluation is None or cell.evaluation.mu is None:
        return {}
    return {"evaluations": AuditedPart.from_cell(evaluation_cell(cell), mu, runs, seed, mu)}


def run_families(
    parts: Mapping[str, AuditedPart], failure: float, families: Collection[str], progress: ProgressCallback
) -> dict[str, FamilyResult]:
    """Run the families that are named in `families`, and return their results by name.

    Args:
        parts: Parts of the run by name, the rounds among them.
        failure: Probability that some bound exceeds a claim that holds, at most.
        families: Names in `FAMILIES`.  Other names are ignored.
        progress: Function that is called with an estimate of the finished share of the work, up to 1.

    Guarantee: if all claims hold, some bound exceeds its claim with probability at most `failure`: the failure
    shares of the families add up to 1 (Bonferroni).
    """
    selected_families = {name: family for name, family in FAMILIES.items() if name in families}
    steps = StepCounter(progress, sum(family.count_steps(parts) for family in selected_families.values()))
    results = dict[str, FamilyResult]()
    for family in selected_families.values():
        results |= family.run(parts, failure * family.failure_share, steps)
    return results


def audit_canaries(
    parts: Mapping[str, AuditedPart], failure: float, steps: StepCounter
) -> dict[str, FamilyResult]:
    """Return the best lower bounds on μ from canaries, for each part, and for several parts together.

    With several parts, the rounds have half of `failure`.  The other parts, and the test of all parts together,
    share the other half equally.  A single part has all of `failure` if it is the rounds, and else half of it.

    Args:
        parts: Parts of the run by name, the rounds among them if there are several.
        failure: Probability that some bound is wrong, at most.
        steps: Counter, which counts one step for each run.

    Returns:
        Results by family: "canaries" for the rounds, "canaries, NAME" for another part, and "canaries, all parts"
        if there are several.
    """
    plans = {name: part.build_plan() for name, part in parts.items()}
    trials = {name: part.collect_trials(plans[name], part.run_count, None, steps) for name, part in parts.items()}
    # A run without noise tells how far each canary's score is from the threshold.
    exact_trials = (
        collect_exact_trials(part.small_cell, part.build_layout(plans[name]), run_seed(part.seed, 0))
        for name, part in parts.items()
    )
    margins = {name: find_margins(plans[name], trial) for name, trial in zip(parts, exact_trials, strict=True)}
    further_count = len(parts)  # with rounds among them: the other parts, and one for all parts together
    group_failure = failure if further_count == 1 else failure / 2.0
    results = dict[str, FamilyResult]()
    for name, part in parts.items():
        part_failure = group_failure if name == "rounds" else failure / (2.0 * further_count)
        count = len(trials[name].select_round(heaviest_round(plans[name])).present)
        noise_share = detectable_noise_share(margins[name], part.mu, count, part_failure)
        bound, test = find_best_bound(plans[name], trials[name], part_failure)
        family, test_suffix = ("canaries", "") if name == "rounds" else (f"canaries, {name}", f" of the {name}")
        results[family] = FamilyResult(bound, test + test_suffix, part.mu, noise_share)
    if further_count > 1:
        results["canaries, all parts"] = _audit_all_parts(
            parts, plans, trials, margins, failure / (2.0 * further_count)
        )
    return results


def _audit_all_parts(
    parts: Mapping[str, AuditedPart],
    plans: Mapping[str, Plan],
    trials: Mapping[str, Trials],
    margins: Mapping[str, Scores],
    failure: float,
) -> FamilyResult:
    """Test the same canaries in the releases of all parts against the composed claim.

    Canaries of the heaviest rounds have the same coins in all parts.  A canary's evidence is the sum, over all
    parts, of the log-likelihood ratio of its presence to its absence.  The bound is the larger one of those at
    threshold 0 and at a threshold that a quarter of the trials chooses, with half of `failure` each.
    """
    coins = [trials[name].select_round(heaviest_round(plans[name])).present for name in parts]
    assert all(np.array_equal(coins[0], part_coins) for part_coins in coins)
    evidence = np.sum([log_likelihood_ratios(plans[name], trials[name]) for name in parts], axis=0)
    # The claim of the rounds together with the first step is `composed_mu` of both, and counts once.
    claimed_mu = compose([parts[name].composed_mu for name in parts if name != FIRST_STEP])
    bound = max(
        bound_at_threshold(0.0, evidence, coins[0], failure / 2.0),
        mu_lower_bound(evidence, coins[0], failure / 2.0),
    )
    # Evidence adds up, and so do the squares of its deviations.
    separations = {name: separation(plan) for name, plan in plans.items()}
    joint_margins = np.sum([margins[name] * separations[name] for name in parts], axis=0)
    noise_share = detectable_noise_share(
        joint_margins / compose(list(separations.values())), claimed_mu, len(coins[0]), failure
    )
    return FamilyResult(bound, f"{' and '.join(parts)} together", claimed_mu, noise_share)


def _audit_driven_canaries(part: AuditedPart, failure: float, steps: StepCounter) -> tuple[float, str]:
    """Return the largest lower bound on μ from canaries under hostile queries, and the name of the test.

    Increments of canaries may change their sign under a hostile query.  So the tests run on the releases and on
    the negated releases, with half of `failure` each.  Runs are a quarter as many as for other canaries, rounded
    up.
    """
    plan = part.build_plan()
    # A query has one feature for each canary, and runs of few rounds have fewer canaries.
    canary_plan = part.build_plan(len(part.build_layout(plan).rounds))
    trials = part.collect_trials(
        plan, _reduce_run_count(part.run_count), attacks.hostile_queries(canary_plan), steps
    )
    negated_trials = trials._replace(releases=-trials.releases)
    bound, test = max(
        find_best_bound(plan, signed_trials, failure / 2) for signed_trials in (trials, negated_trials)
    )
    return bound, f"{test}, under hostile queries"


def _reduce_run_count(runs: int) -> int:
    return -(-runs // 4)


def _audit_rollback(part: AuditedPart, failure: float, steps: StepCounter) -> tuple[float, str]:
    """Return the largest lower bound on μ, and its test, from releases before and after a rollback.

    A rollback restores machines from a backup, here to the start of the round where canaries weigh most, which
    then gets another query.  Round 2, if there is one, takes the place of round 1, because a run that is opened
    again draws another key.
    """
    t = max(heaviest_round(part.build_plan()), min(2, part.small_cell.schedule.rounds))
    layout = CanaryLayout.from_rows(rows_by_round(part.small_cell), t, HEAVIEST_ROUND_COUNT, HEAVIEST_ROUND_COUNT)
    seeds = (run_seed(part.seed, run_index) for run_index in range(_rollback_count(part.run_count)))
    trials = _concatenate_trials(
        [run_rollback(part.small_cell, layout, seed, t) for seed in steps.after(seeds, 2.0)]
    )
    return find_rollback_bound(trials, failure)


def _rollback_count(runs: int) -> int:
    return max(2, _reduce_run_count(runs))


def _concatenate_trials(runs: Sequence[Trials]) -> Trials:
    """Join the canaries of several runs of the same rounds."""
    return Trials(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))


def _audit_integers(part: AuditedPart, failure: float, steps: StepCounter) -> tuple[float, str]:
    small_cell = attacks.integers_cell(part.cell, part.mu)
    seeds = (run_seed(part.seed, run_index) for run_index in range(attacks.TRIALS))
    return attacks.bound_integers_attack(
        [attacks.attack_integers(small_cell, seed) for seed in steps.after(seeds, 0.5)], failure
    )


def _audit_hostile_queries(part: AuditedPart, failure: float, steps: StepCounter) -> tuple[float, str]:
    if (small_cell := attacks.hostile_cell(part.cell, part.mu)) is None:
        return 0.0, "none"
    seeds = [run_seed(part.seed, run_index) for run_index in range(attacks.TRIALS)]
    outcomes = {
        kind: [attacks.attack_with_hostile_queries(small_cell, kind, seed) for seed in seeds]
        for kind in steps.after(attacks.HOSTILE_KINDS, attacks.TRIALS / 16)
    }
    return attacks.bound_hostile_attack(outcomes, failure)


class _Family(NamedTuple):
    """Family of tests, with its share of the failure, its number of steps, and its results by name."""

    failure_share: float
    """Share of the audit's probability of failure, where the shares of all families add up to 1."""
    count_steps: Callable[[Mapping[str, AuditedPart]], float]
    """Function from the parts by name to the number of steps of the progress."""
    run: Callable[[Mapping[str, AuditedPart], float, StepCounter], dict[str, FamilyResult]]
    """Function from the parts, the family's probability of failure and the counter to the results by name."""


def _rounds_family(
    name: str,
    failure_share: float,
    count_steps: Callable[[int], float],
    find_bound: Callable[[AuditedPart, float, StepCounter], tuple[float, str]],
) -> _Family:
    """Make a family that tests the rounds only, because the parts share the code under test."""

    def run_family(
        parts: Mapping[str, AuditedPart], failure: float, steps: StepCounter
    ) -> dict[str, FamilyResult]:
        rounds = parts["rounds"]
        return {name: FamilyResult(*find_bound(rounds, failure, steps), rounds.mu)}

    return _Family(failure_share, lambda parts: count_steps(parts["rounds"].run_count), run_family)


FAMILIES = {
    "canaries": _Family(0.5, lambda parts: sum(part.run_count for part in parts.values()), audit_canaries),
    "driven canaries": _rounds_family("driven canaries", 0.05, _reduce_run_count, _audit_driven_canaries),
    "rollback": _rounds_family("rollback", 0.05, lambda runs: 2.0 * _rollback_count(runs), _audit_rollback),
    "integers": _rounds_family("integers", 0.2, lambda _: attacks.TRIALS / 2, _audit_integers),
    "hostile queries": _rounds_family(
        "hostile queries", 0.2, lambda _: len(attacks.HOSTILE_KINDS) * attacks.TRIALS / 16, _audit_hostile_queries
    ),
}
