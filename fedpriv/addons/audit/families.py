"""Families of tests of rounds in a public order, and their power.

A run is audited as a whole, in parts that canaries are planted in: its first step, which is a round of DP-SGD, and
its evaluations are cells of their own, each against its own claim, and releases of all parts together, about the
same canaries, against the composed claim.

The power of an audit says how much of the noise would have to be gone for it to be seen at the trials that there
were.
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
    bound_at_threshold,
    find_best_bound,
    find_rollback_bound,
    heaviest_round,
    log_likelihood_ratios,
    mu_lower_bound,
    separation,
    upper_rates,
)
from fedpriv.addons.audit.transcripts import Trials, public_run_size, run_rollback, run_trials
from fedpriv.claims.ledger import FIRST_STEP
from fedpriv.core.errors import FedprivError
from fedpriv.plan.evaluation import evaluation_cell, first_step_cell
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.scenario.schema import Cell

_Each = TypeVar("_Each")
ProgressCallback = Callable[[float], None]
"""Hears which share of the work is done."""


class StepCounter:
    """Counts steps that take about as long as one run of canaries."""

    def __init__(self, progress: ProgressCallback, total: float) -> None:
        self._progress, self._total, self._done = progress, total, 0.0

    def __call__(self, steps: float = 1.0) -> None:
        self._done += steps
        self._progress(min(1.0, self._done / self._total))

    def after(self, each: Iterable[_Each], steps: float = 1.0) -> Iterator[_Each]:
        """Go through `each`, and count so many steps when one is done."""
        for one in each:
            yield one
            self(steps)


POWER = 0.95
"""The probability with which an audit refutes noise of the size that it says it would see."""


def detectable_noise_share(apart: float, claimed: float, trials: int, failure: float) -> float:
    """The largest f ≤ 1 such that noise of f times its size is refuted with probability `POWER` or more; 0: none.

    `apart` is the `separation` of both worlds at the whole noise.  Of `trials` canaries the test that has half of
    `failure` guesses wrongly with probability Φ(-apart / 2f), independently, and the claim falls if wrong guesses
    are so few that `bound_at_threshold` is above `claimed`: a binomial probability, exactly.  Other tests of a
    family can see more, and none of them takes from this one.
    """
    most = _max_wrong_guesses(claimed, trials, failure * BEST_TEST_SHARE / 2.0)
    if most < 0 or apart <= 0.0:
        return 0.0
    rate = float(special.bdtri(most, trials, POWER))
    return min(1.0, apart / (-2.0 * float(special.ndtri(rate)))) if rate < 0.5 else 1.0


def _max_wrong_guesses(claimed: float, trials: int, failure: float) -> int:
    """The most wrong guesses of so many that refute a claim; -1 if none do."""
    refuting = -2.0 * special.ndtri(upper_rates(np.arange(trials), trials, failure)) > claimed
    return int(np.sum(refuting)) - 1


MAX_ROUNDS, MAX_SILOS = 12, 3
CANARY_COUNT, HEAVIEST_ROUND_COUNT = 1024, 256
"""Of one run, and of those in the round where they weigh most."""


class AuditRefutedError(FedprivError):
    """The claim does not stand: a test can tell more than it says.  Exit code 3."""

    exit_code = 3


class FamilyResult(NamedTuple):
    """Result of a family: a lower bound on μ, by which test, the claim that it is about, and its power."""

    mu: float
    test: str
    claimed_mu: float
    detectable_noise_share: float | None = None
    """Which share of the noise, see `sees`; None for a family that looks for something else."""


class AuditedPart(NamedTuple):
    """A part of a run that is audited: the cell, cut to the canaries' size, so many runs, the claim, the seed."""

    cell: Cell
    small_cell: Cell
    run_count: int
    mu: float
    seed: int
    composed_mu: float
    """To the records that it reads, by all parts that read them."""

    @staticmethod
    def from_cell(cell: Cell, mu: float, runs: int, seed: int, promised: float) -> "AuditedPart":
        """AuditRefutedError if records are not read as the claim presumes."""
        (rounds, passes), silos = public_run_size(cell, MAX_ROUNDS), min(cell.federation.silos, MAX_SILOS)
        small = make_audit_cell(cell, mu, rounds, silos, HEAVIEST_ROUND_COUNT, passes)
        if wrong := why_misread(small, rows_by_round(small)):
            raise AuditRefutedError(f"the schedule is not the one that is claimed: {wrong}")
        return AuditedPart(cell, small, runs, mu, seed, promised)

    def build_plan(self, features: int = CANARY_COUNT) -> Plan:
        return make_plan(self.small_cell, make_canary_objective(self.small_cell, features), for_release=True)

    def build_layout(self, plan: Plan) -> CanaryLayout:
        return CanaryLayout.from_rows(
            rows_by_round(self.small_cell), heaviest_round(plan), CANARY_COUNT, HEAVIEST_ROUND_COUNT
        )

    def collect_trials(
        self, plan: Plan, runs: int, queries: Sequence[Tensor] | None, steps: StepCounter
    ) -> Trials:
        """Trials of so many runs, each with its own coins and noise; other parts' runs have the same coins."""
        layout, seeds = self.build_layout(plan), (run_seed(self.seed, number) for number in range(runs))
        return _concatenate_trials(
            [run_trials(self.small_cell, layout, seed, queries) for seed in steps.after(seeds)]
        )


def run_seed(seed: int, number: int) -> int:
    """The seed of the coins of run `number` of an audit."""
    return 1_000_000 * seed + number


def make_run_parts(cell: Cell, mu: float, runs: int, seed: int) -> dict[str, AuditedPart]:
    """The rounds, the first step and the evaluations of a run whose records have the claim `mu`.

    Rounds and first step have their shares of it.  Test records are other records: their claim is `mu`, too.  A
    step that was taken elsewhere is not there to be audited.
    """
    promise, budget = cell.privacy.target_mu, cell.budget
    assert promise is not None
    assert budget.rounds_mu is not None
    parts = {"rounds": AuditedPart.from_cell(cell, mu * budget.rounds_mu / promise, runs, seed, mu)}
    if (first := first_step_cell(cell)) is not None:
        parts[FIRST_STEP] = AuditedPart.from_cell(first, mu * budget.other_mu / promise, runs, seed, mu)
    return parts | make_evaluation_parts(cell, mu, runs, seed)


def make_evaluation_parts(cell: Cell, mu: float, runs: int, seed: int) -> dict[str, AuditedPart]:
    """The evaluations as a part of a run; nothing where they have no claim."""
    if cell.evaluation is None or cell.evaluation.mu is None:
        return {}
    return {"evaluations": AuditedPart.from_cell(evaluation_cell(cell), mu, runs, seed, mu)}


def run_families(
    parts: Mapping[str, AuditedPart], failure: float, families: Collection[str], progress: ProgressCallback
) -> dict[str, FamilyResult]:
    """Run the families that are named in `families`, and return their results by name.

    Guarantee: where all claims hold, a bound exceeds its claim with probability at most `failure`: the shares of
    the families add up to 1 (Bonferroni).
    """
    chosen = {name: family for name, family in FAMILIES.items() if name in families}
    steps = StepCounter(progress, sum(family.count_steps(parts) for family in chosen.values()))
    found = dict[str, FamilyResult]()
    for family in chosen.values():
        found |= family.run(parts, failure * family.failure_share, steps)
    return found


def audit_canaries(
    parts: Mapping[str, AuditedPart], failure: float, steps: StepCounter
) -> dict[str, FamilyResult]:
    """The best bounds of canaries in the worst case, part by part, and of all parts of a run together."""
    plans = {name: part.build_plan() for name, part in parts.items()}
    trials = {name: part.collect_trials(plans[name], part.run_count, None, steps) for name, part in parts.items()}
    others = len(parts)  # all but the rounds, and the whole
    share = failure if others == 1 else failure / 2.0
    found = dict[str, FamilyResult]()
    for name, part in parts.items():
        mine = share if name == "rounds" else failure / (2.0 * others)
        count = len(trials[name].select_round(heaviest_round(plans[name])).present)
        would_see = detectable_noise_share(separation(plans[name]), part.mu, count, mine)
        bound, test = find_best_bound(plans[name], trials[name], mine)
        family, of = ("canaries", "") if name == "rounds" else (f"canaries, {name}", f" of the {name}")
        found[family] = FamilyResult(bound, test + of, part.mu, would_see)
    if others > 1:
        found["canaries, all parts"] = _audit_all_parts(parts, plans, trials, failure / (2.0 * others))
    return found


def _audit_all_parts(
    parts: Mapping[str, AuditedPart], plans: Mapping[str, Plan], trials: Mapping[str, Trials], failure: float
) -> FamilyResult:
    """Test the same canaries in all parts, which an adversary sees together, against what is promised for all."""
    coins = [trials[name].select_round(heaviest_round(plans[name])).present for name in parts]
    assert all(np.array_equal(coins[0], each) for each in coins)
    evidence = np.sum([log_likelihood_ratios(plans[name], trials[name]) for name in parts], axis=0)
    claimed = compose([parts[name].composed_mu for name in parts if name != FIRST_STEP])
    bound = max(
        bound_at_threshold(0.0, evidence, coins[0], failure / 2.0),
        mu_lower_bound(evidence, coins[0], failure / 2.0),
    )
    would_see = detectable_noise_share(
        compose([separation(plan) for plan in plans.values()]), claimed, len(coins[0]), failure
    )
    return FamilyResult(bound, f"{' and '.join(parts)} together", claimed, would_see)


def _audit_driven_canaries(part: AuditedPart, failure: float, steps: StepCounter) -> tuple[float, str]:
    """The same where queries overflow, are denormal or cancel: what canaries add there may have either sign."""
    plan = part.build_plan()
    fitting = part.build_plan(len(part.build_layout(plan).rounds))  # few rounds hold fewer canaries
    trials = part.collect_trials(plan, _reduce_run_count(part.run_count), attacks.hostile_queries(fitting), steps)
    turned = trials._replace(releases=-trials.releases)
    bound, test = max(find_best_bound(plan, either, failure / 2) for either in (trials, turned))
    return bound, f"{test}, under hostile queries"


def _reduce_run_count(runs: int) -> int:
    return -(-runs // 4)


def _audit_rollback(part: AuditedPart, failure: float, steps: StepCounter) -> tuple[float, str]:
    """A machine that is put back to before the round in which canaries weigh most, and asked another query.

    Not to before the first one, if there are others: a run that is opened again draws another key.
    """
    t = max(heaviest_round(part.build_plan()), min(2, part.small_cell.schedule.rounds))
    layout = CanaryLayout.from_rows(rows_by_round(part.small_cell), t, HEAVIEST_ROUND_COUNT, HEAVIEST_ROUND_COUNT)
    seeds = (run_seed(part.seed, number) for number in range(_rollback_count(part.run_count)))
    trials = _concatenate_trials(
        [run_rollback(part.small_cell, layout, seed, t) for seed in steps.after(seeds, 2.0)]
    )
    return find_rollback_bound(trials, failure)


def _rollback_count(runs: int) -> int:
    return max(2, _reduce_run_count(runs))


def _concatenate_trials(runs: Sequence[Trials]) -> Trials:
    return Trials(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))


def _audit_integers(part: AuditedPart, failure: float, steps: StepCounter) -> tuple[float, str]:
    small = attacks.integers_cell(part.cell, part.mu)
    seeds = (run_seed(part.seed, number) for number in range(attacks.TRIALS))
    return attacks.bound_integers_attack(
        [attacks.attack_integers(small, seed) for seed in steps.after(seeds, 0.5)], failure
    )


def _audit_hostile_queries(part: AuditedPart, failure: float, steps: StepCounter) -> tuple[float, str]:
    if (small := attacks.hostile_cell(part.cell, part.mu)) is None:
        return 0.0, "none"
    seeds = [run_seed(part.seed, number) for number in range(attacks.TRIALS)]
    outcomes = {
        kind: [attacks.attack_with_hostile_queries(small, kind, seed) for seed in seeds]
        for kind in steps.after(attacks.HOSTILE_KINDS, attacks.TRIALS / 16)
    }
    return attacks.bound_hostile_attack(outcomes, failure)


class _Family(NamedTuple):
    """A family of tests: which share of the failure it may use, its steps, and what it finds, by name."""

    failure_share: float
    count_steps: Callable[[Mapping[str, AuditedPart]], float]
    run: Callable[[Mapping[str, AuditedPart], float, StepCounter], dict[str, FamilyResult]]


def _rounds_family(
    name: str,
    share: float,
    count_steps: Callable[[int], float],
    bound: Callable[[AuditedPart, float, StepCounter], tuple[float, str]],
) -> _Family:
    """A family that looks at the rounds alone: what it tries is code that all parts have in common."""

    def found(parts: Mapping[str, AuditedPart], failure: float, done: StepCounter) -> dict[str, FamilyResult]:
        rounds = parts["rounds"]
        return {name: FamilyResult(*bound(rounds, failure, done), rounds.mu)}

    return _Family(share, lambda parts: count_steps(parts["rounds"].run_count), found)


FAMILIES = {
    "canaries": _Family(0.5, lambda parts: sum(part.run_count for part in parts.values()), audit_canaries),
    "driven canaries": _rounds_family("driven canaries", 0.05, _reduce_run_count, _audit_driven_canaries),
    "rollback": _rounds_family("rollback", 0.05, lambda runs: 2.0 * _rollback_count(runs), _audit_rollback),
    "integers": _rounds_family("integers", 0.2, lambda _: attacks.TRIALS / 2, _audit_integers),
    "hostile queries": _rounds_family(
        "hostile queries", 0.2, lambda _: len(attacks.HOSTILE_KINDS) * attacks.TRIALS / 16, _audit_hostile_queries
    ),
}
