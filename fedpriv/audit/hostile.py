"""Hostile queries, and lower bounds on μ from scores with known worlds.

A server may send any finite vector.  Where a query drives the arithmetic out of its range for some records and not
for others, the reply is not finite, or none, or far too long for those: one look is enough, whatever the noise is.

A μ-GDP release lets no test have errors with Φ⁻¹(1 - FPR) - Φ⁻¹(FNR) > μ (Dong, Roth & Su 2022).  So upper bounds
on both error rates of any test give a lower bound on μ, with confidence (Nasr et al. 2023, "Tight auditing of
differentially private machine learning", section on Gaussian DP); and since worlds are chosen by fair coins, no
test is right with a probability above Φ(μ/2), so that a lower bound on that probability gives another.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from fedpriv.audit.canaries import FAR, auditable, nothing, objective_for
from fedpriv.audit.guards import Restartable
from fedpriv.audit.transcripts import folder_of_silos
from fedpriv.core.errors import RunError
from fedpriv.core.random import SERVER, public_generator
from fedpriv.loss.objective import Objective
from fedpriv.rounds.plan import Plan, plan_of
from fedpriv.scenario.schema import Cell

Scores = NDArray[np.float64]

QUANTILES = np.linspace(0.005, 0.995, 199)
LEARNING = 4  # one trial in so many chooses the threshold


class Errors(NamedTuple):
    """Wrong guesses of a test in both worlds, an entry a threshold, and of how many trials."""

    alarms: NDArray[np.int64]
    misses: NDArray[np.int64]
    without: int
    present: int


def mu_lower_bound(scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """A μ that the release exceeds, but for a probability of at most `failure`; 0 if nothing can be said.

    `scores` (n,) are large where the canary is `present` (n,).  The threshold with the best bound is chosen on
    the first quarter of the trials, and the bound that counts is that of the others at this one threshold.

    Guarantee: trials are independent, their coins are fair, and the others are not looked at before the threshold
    is fixed.
    """
    first = len(scores) // LEARNING
    candidates = np.quantile(scores[:first], QUANTILES)
    promised = _bounds(errors_at(candidates, scores[:first], present[:first]), failure)
    chosen = candidates[[int(np.argmax(promised))]]
    return bound_at(float(chosen[0]), scores[first:], present[first:], failure)


def bound_at(threshold: float, scores: Scores, present: NDArray[np.bool_], failure: float) -> float:
    """As above, at a threshold that was fixed without a look at these trials; for few of them."""
    return max(0.0, float(_bounds(errors_at(np.array([threshold]), scores, present), failure)[0]))


def errors_at(thresholds: Scores, scores: Scores, present: NDArray[np.bool_]) -> Errors:
    """The errors of a test that says "present" above each of `thresholds`."""
    with_canary, without = np.sort(scores[present]), np.sort(scores[~present])
    return Errors(
        len(without) - np.searchsorted(without, thresholds, "right"),
        np.searchsorted(with_canary, thresholds, "right"),
        len(without),
        len(with_canary),
    )


def _bounds(errors: Errors, failure: float) -> Scores:
    """The larger of both bounds at each threshold; half of `failure` for each."""
    highest_alarms = upper_rates(errors.alarms, errors.without, failure / 4)
    highest_misses = upper_rates(errors.misses, errors.present, failure / 4)
    by_rates = -special.ndtri(highest_alarms) - special.ndtri(highest_misses)
    wrong = upper_rates(errors.alarms + errors.misses, errors.without + errors.present, failure / 2)
    bounds: Scores = np.maximum(by_rates, -2.0 * special.ndtri(wrong))
    return bounds


def upper_rates(events: NDArray[np.int64], trials: int, failure: float) -> Scores:
    """Clopper & Pearson: rates that are exceeded with probability at most `failure`; 1 if every trial was one."""
    rates = special.betainccinv(events + 1.0, np.maximum(trials - events, 1.0), failure)
    return np.where(events >= trials, 1.0, rates)


TRIALS = 32
KINDS = ("overflowing logits", "large weights", "denormal weights", "cancelling points")
_ROUNDS = 3
_FEATURES = 2
_TESTS = ("no finite reply to", "too long a reply to")


def hostile_cell(cell: Cell, mu: float) -> Cell | None:
    """The cell as this attack needs it; None where silos answer to a server that they trust."""
    if cell.algorithm.trust_setting.draws(SERVER):
        return None
    return auditable(cell, mu, min(_ROUNDS, cell.schedule.rounds), min(2, cell.federation.silos), 1)


def attack(cell: Cell, kind: str, seed: int) -> tuple[bool, Scores]:
    """A run of one kind of query: whether its record is bright, and what came back, one number a test; (2,)."""
    objective = objective_for(cell, _FEATURES)
    plan = plan_of(cell, objective, released=True)
    bright = bool(public_generator(seed, "audit hostile", kind).random() < 0.5)
    record = nothing(plan.schedule.batches_held, _FEATURES)
    record.images[0] = FAR / _FEATURES**0.5 if bright else 0.0
    idle = [nothing(plan.schedule.batches_held, _FEATURES)] * (len(plan.weights) - 1)
    with folder_of_silos(cell, plan, [record, *idle]) as (_, silos):
        keys = b"".join(silo.public_key("run") for silo in silos) if plan.masked else b""
        queries = _queries(kind, objective, plan.schedule.rounds)
        replies = [_reply(silos[0], t, query, keys) for t, query in enumerate(queries, start=1)]
    silent = [reply is None or not torch.isfinite(reply.double()).all() for reply in replies]
    return bright, np.array([float(any(silent)), max(_length(plan, reply) for reply in replies)])


def hostile_bound(trials: Mapping[str, list[tuple[bool, Scores]]], failure: float) -> tuple[float, str]:
    """The largest lower bound on μ that the trials of all kinds give, and by which test."""
    found, share = (0.0, "none"), failure / (len(trials) * len(_TESTS))
    for kind, outcomes in trials.items():
        coins = np.array([bright for bright, _ in outcomes])
        for place, test in enumerate(_TESTS):
            scores = np.array([seen[place] for _, seen in outcomes])
            found = max(found, (bound_at(0.5, scores, coins, share), f"{test} a query with {kind}"))
    return found


def driving(plan: Plan) -> list[Tensor]:
    """One query a round, of all kinds in turn: what canaries are looked at under."""
    rounds = plan.schedule.rounds
    kinds = [_queries(kind, plan.objective, rounds) for kind in KINDS]
    return [kinds[t % len(kinds)][t] for t in range(rounds)]


def _queries(kind: str, objective: Objective, rounds: int) -> list[Tensor]:
    """One query a round."""
    pattern = torch.zeros_like(objective.initial())
    pattern.view(2, -1)[0, :-1], pattern.view(2, -1)[1, :-1] = 1.0, -1.0
    largest = torch.finfo(pattern.dtype)
    match kind:
        case "overflowing logits":
            return [largest.max / (2 * pattern.numel()) * pattern] * rounds  # sums of its values do not overflow
        case "large weights":
            return [2.0**39 * pattern] * rounds
        case "denormal weights":
            return [largest.smallest_normal * 2.0**-20 * pattern] * rounds
        case _:
            return [(-1.0) ** t * (1.0 + 1e-6 * t) * 2.0**39 * pattern for t in range(rounds)]


def _reply(silo: Restartable, t: int, query: Tensor, keys: bytes) -> Tensor | None:
    try:
        return silo.answer("run", t, query, keys)
    except RunError:
        return None


def _length(plan: Plan, reply: Tensor | None) -> float:
    """1 if a reply is longer than clipped records and six times the noise account for, else 0."""
    if reply is None or plan.masked:  # masked words have no length
        return 0.0
    rounds = range(1, plan.schedule.rounds + 1)
    accounted = sum(plan.estimator.round(t).largest for t in rounds)
    noise = float(plan.noise.std_of(0)) * float(np.sqrt(len(reply) * len(rounds)))
    return float(float(torch.linalg.vector_norm(reply.double())) > accounted + 6.0 * noise)
