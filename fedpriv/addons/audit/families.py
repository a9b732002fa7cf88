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
from fedpriv.addons.audit.canaries import CanaryLayout, auditable, misread, objective_for, rows_read
from fedpriv.addons.audit.statistics import (
    ON_THE_BEST,
    best_bound,
    bound_at,
    heaviest_round,
    likelihoods,
    mu_lower_bound,
    rollback_bound,
    separation,
    upper_rates,
)
from fedpriv.addons.audit.transcripts import Trials, known_rounds, rolled_back, run_trials
from fedpriv.claims.ledger import FIRST_STEP
from fedpriv.core.errors import FedprivError
from fedpriv.plan.evaluation import evaluation_cell, first_step_of
from fedpriv.plan.plan import Plan, plan_of
from fedpriv.scenario.schema import Cell

_Each = TypeVar("_Each")
Progress = Callable[[float], None]
"""Hears which share of the work is done."""


class Steps:
    """Counts steps that take about as long as one run of canaries."""

    def __init__(self, progress: Progress, total: float) -> None:
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


def sees(apart: float, claimed: float, trials: int, failure: float) -> float:
    """The largest f ≤ 1 such that noise of f times its size is refuted with probability `POWER` or more; 0: none.

    `apart` is the `separation` of both worlds at the whole noise.  Of `trials` canaries the test that has half of
    `failure` guesses wrongly with probability Φ(-apart / 2f), independently, and the claim falls if wrong guesses
    are so few that `bound_at` is above `claimed`: a binomial probability, exactly.  Other tests of a family can
    see more, and none of them takes from this one.
    """
    most = _most_wrong(claimed, trials, failure * ON_THE_BEST / 2.0)
    if most < 0 or apart <= 0.0:
        return 0.0
    rate = float(special.bdtri(most, trials, POWER))
    return min(1.0, apart / (-2.0 * float(special.ndtri(rate)))) if rate < 0.5 else 1.0


def _most_wrong(claimed: float, trials: int, failure: float) -> int:
    """The most wrong guesses of so many that refute a claim; -1 if none do."""
    refuting = -2.0 * special.ndtri(upper_rates(np.arange(trials), trials, failure)) > claimed
    return int(np.sum(refuting)) - 1


MOST_ROUNDS, MOST_SILOS = 12, 3
CANARIES, IN_HEAVIEST = 1024, 256
"""Of one run, and of those in the round where they weigh most."""


class AuditRefutedError(FedprivError):
    """The claim does not stand: a test can tell more than it says.  Exit code 3."""

    exit_code = 3


class Found(NamedTuple):
    """Result of a family: a lower bound on μ, by which test, the claim that it is about, and its power."""

    mu: float
    test: str
    claimed: float
    sees: float | None = None
    """Which share of the noise, see `sees`; None for a family that looks for something else."""


class AuditedPart(NamedTuple):
    """A part of a run that is audited: the cell, cut to the canaries' size, so many runs, the claim, the seed."""

    cell: Cell
    small: Cell
    runs: int
    mu: float
    seed: int
    promised: float
    """To the records that it reads, by all parts that read them."""

    @staticmethod
    def of(cell: Cell, mu: float, runs: int, seed: int, promised: float) -> "AuditedPart":
        """AuditRefutedError if records are not read as the claim presumes."""
        (rounds, passes), silos = known_rounds(cell, MOST_ROUNDS), min(cell.federation.silos, MOST_SILOS)
        small = auditable(cell, mu, rounds, silos, IN_HEAVIEST, passes)
        if wrong := misread(small, rows_read(small)):
            raise AuditRefutedError(f"the schedule is not the one that is claimed: {wrong}")
        return AuditedPart(cell, small, runs, mu, seed, promised)

    def plan(self, features: int = CANARIES) -> Plan:
        return plan_of(self.small, objective_for(self.small, features), released=True)

    def layout(self, plan: Plan) -> CanaryLayout:
        return CanaryLayout.of(rows_read(self.small), heaviest_round(plan), CANARIES, IN_HEAVIEST)

    def gathered(self, plan: Plan, runs: int, queries: Sequence[Tensor] | None, steps: Steps) -> Trials:
        """Trials of so many runs, each with its own coins and noise; other parts' runs have the same coins."""
        layout, seeds = self.layout(plan), (seed_of(self.seed, number) for number in range(runs))
        return _joined([run_trials(self.small, layout, seed, queries) for seed in steps.after(seeds)])


def seed_of(seed: int, number: int) -> int:
    """The seed of the coins of run `number` of an audit."""
    return 1_000_000 * seed + number


def parts_of(cell: Cell, mu: float, runs: int, seed: int) -> dict[str, AuditedPart]:
    """The rounds, the first step and the evaluations of a run whose records have the claim `mu`.

    Rounds and first step have their shares of it.  Test records are other records: their claim is `mu`, too.  A
    step that was taken elsewhere is not there to be audited.
    """
    promise, budget = cell.privacy.target, cell.budget
    assert promise is not None
    assert budget.rounds is not None
    parts = {"rounds": AuditedPart.of(cell, mu * budget.rounds / promise, runs, seed, mu)}
    if (first := first_step_of(cell)) is not None:
        parts[FIRST_STEP] = AuditedPart.of(first, mu * budget.beside / promise, runs, seed, mu)
    return parts | evaluations_of(cell, mu, runs, seed)


def evaluations_of(cell: Cell, mu: float, runs: int, seed: int) -> dict[str, AuditedPart]:
    """The evaluations as a part of a run; nothing where they have no claim."""
    if cell.evaluation is None or cell.evaluation.mu is None:
        return {}
    return {"evaluations": AuditedPart.of(evaluation_cell(cell), mu, runs, seed, mu)}


def tried(
    parts: Mapping[str, AuditedPart], failure: float, families: Collection[str], progress: Progress
) -> dict[str, Found]:
    """Run the families that are named in `families`, and return their results by name.

    Guarantee: where all claims hold, a bound exceeds its claim with probability at most `failure`: the shares of
    the families add up to 1 (Bonferroni).
    """
    chosen = {name: family for name, family in FAMILIES.items() if name in families}
    steps = Steps(progress, sum(family.steps(parts) for family in chosen.values()))
    found = dict[str, Found]()
    for family in chosen.values():
        found |= family.found(parts, failure * family.share, steps)
    return found


def canaries(parts: Mapping[str, AuditedPart], failure: float, steps: Steps) -> dict[str, Found]:
    """The best bounds of canaries in the worst case, part by part, and of all parts of a run together."""
    plans = {name: part.plan() for name, part in parts.items()}
    trials = {name: part.gathered(plans[name], part.runs, None, steps) for name, part in parts.items()}
    others = len(parts)  # all but the rounds, and the whole
    share = failure if others == 1 else failure / 2.0
    found = dict[str, Found]()
    for name, part in parts.items():
        mine = share if name == "rounds" else failure / (2.0 * others)
        count = len(trials[name].of_round(heaviest_round(plans[name])).present)
        would_see = sees(separation(plans[name]), part.mu, count, mine)
        bound, test = best_bound(plans[name], trials[name], mine)
        family, of = ("canaries", "") if name == "rounds" else (f"canaries, {name}", f" of the {name}")
        found[family] = Found(bound, test + of, part.mu, would_see)
    if others > 1:
        found["canaries, all parts"] = _together(parts, plans, trials, failure / (2.0 * others))
    return found


def _together(
    parts: Mapping[str, AuditedPart], plans: Mapping[str, Plan], trials: Mapping[str, Trials], failure: float
) -> Found:
    """Test the same canaries in all parts, which an adversary sees together, against what is promised for all."""
    coins = [trials[name].of_round(heaviest_round(plans[name])).present for name in parts]
    assert all(np.array_equal(coins[0], each) for each in coins)
    evidence = np.sum([likelihoods(plans[name], trials[name]) for name in parts], axis=0)
    claimed = compose([parts[name].promised for name in parts if name != FIRST_STEP])
    bound = max(
        bound_at(0.0, evidence, coins[0], failure / 2.0), mu_lower_bound(evidence, coins[0], failure / 2.0)
    )
    would_see = sees(compose([separation(plan) for plan in plans.values()]), claimed, len(coins[0]), failure)
    return Found(bound, f"{' and '.join(parts)} together", claimed, would_see)


def _driven(asked: AuditedPart, failure: float, steps: Steps) -> tuple[float, str]:
    """The same where queries overflow, are denormal or cancel: what canaries add there may have either sign."""
    plan = asked.plan()
    fitting = asked.plan(len(asked.layout(plan).round))  # few rounds hold fewer canaries
    trials = asked.gathered(plan, _fewer(asked.runs), attacks.driving(fitting), steps)
    turned = trials._replace(seen=-trials.seen)
    bound, test = max(best_bound(plan, either, failure / 2) for either in (trials, turned))
    return bound, f"{test}, under hostile queries"


def _fewer(runs: int) -> int:
    return -(-runs // 4)


def _rollback(asked: AuditedPart, failure: float, steps: Steps) -> tuple[float, str]:
    """A machine that is put back to before the round in which canaries weigh most, and asked another query.

    Not to before the first one, if there are others: a run that is opened again draws another key.
    """
    t = max(heaviest_round(asked.plan()), min(2, asked.small.schedule.rounds))
    layout = CanaryLayout.of(rows_read(asked.small), t, IN_HEAVIEST, IN_HEAVIEST)
    seeds = (seed_of(asked.seed, number) for number in range(_rollbacks(asked.runs)))
    trials = _joined([rolled_back(asked.small, layout, seed, t) for seed in steps.after(seeds, 2.0)])
    return rollback_bound(trials, failure)


def _rollbacks(runs: int) -> int:
    return max(2, _fewer(runs))


def _joined(runs: Sequence[Trials]) -> Trials:
    return Trials(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))


def _integers(asked: AuditedPart, failure: float, steps: Steps) -> tuple[float, str]:
    small = attacks.integers_cell(asked.cell, asked.mu)
    seeds = (seed_of(asked.seed, number) for number in range(attacks.TRIALS))
    return attacks.integers_bound(
        [attacks.integers_attack(small, seed) for seed in steps.after(seeds, 0.5)], failure
    )


def _hostile(asked: AuditedPart, failure: float, steps: Steps) -> tuple[float, str]:
    if (small := attacks.hostile_cell(asked.cell, asked.mu)) is None:
        return 0.0, "none"
    seeds = [seed_of(asked.seed, number) for number in range(attacks.TRIALS)]
    outcomes = {
        kind: [attacks.hostile_attack(small, kind, seed) for seed in seeds]
        for kind in steps.after(attacks.KINDS, attacks.TRIALS / 16)
    }
    return attacks.hostile_bound(outcomes, failure)


class _Family(NamedTuple):
    """A family of tests: which share of the failure it may use, its steps, and what it finds, by name."""

    share: float
    steps: Callable[[Mapping[str, AuditedPart]], float]
    found: Callable[[Mapping[str, AuditedPart], float, Steps], dict[str, Found]]


def _of_rounds(
    name: str,
    share: float,
    steps: Callable[[int], float],
    bound: Callable[[AuditedPart, float, Steps], tuple[float, str]],
) -> _Family:
    """A family that looks at the rounds alone: what it tries is code that all parts have in common."""

    def found(parts: Mapping[str, AuditedPart], failure: float, done: Steps) -> dict[str, Found]:
        rounds = parts["rounds"]
        return {name: Found(*bound(rounds, failure, done), rounds.mu)}

    return _Family(share, lambda parts: steps(parts["rounds"].runs), found)


FAMILIES = {
    "canaries": _Family(0.5, lambda parts: sum(part.runs for part in parts.values()), canaries),
    "driven canaries": _of_rounds("driven canaries", 0.05, _fewer, _driven),
    "rollback": _of_rounds("rollback", 0.05, lambda runs: 2.0 * _rollbacks(runs), _rollback),
    "integers": _of_rounds("integers", 0.2, lambda _: attacks.TRIALS / 2, _integers),
    "hostile queries": _of_rounds(
        "hostile queries", 0.2, lambda _: len(attacks.KINDS) * attacks.TRIALS / 16, _hostile
    ),
}
