"""Queries that no optimizer would ask: does what comes back, or whether anything does, tell of a record?

A server may send any finite vector.  Where a query drives the arithmetic out of its range for some records and not
for others, the reply is not finite, or none, or far too long for those: one look is enough, whatever the noise is.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedpriv.auditing.bounds import Scores, bound_at
from fedpriv.auditing.canaries import FAR, auditable, nothing, objective_for
from fedpriv.auditing.guarded import Restartable
from fedpriv.auditing.transcripts import folder_of_silos
from fedpriv.errors import RunError
from fedpriv.objectives import Objective
from fedpriv.randomness import public_generator
from fedpriv.running.plan import Plan, plan_of
from fedpriv.scenario import Cell

TRIALS = 32
KINDS = ("overflowing logits", "large weights", "denormal weights", "cancelling points")
_ROUNDS = 3
_FEATURES = 2
_TESTS = ("no finite reply to", "too long a reply to")


def hostile_cell(cell: Cell, mu: float) -> Cell | None:
    """The cell as this attack needs it; None where silos answer to a server that they trust."""
    if cell.algorithm.trust_setting.noise_at_server:
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
