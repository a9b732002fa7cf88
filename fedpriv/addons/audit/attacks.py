"""Attacks on the bits of noisy integers, and by hostile queries: do they tell more than the noise's law?

On integers everything but one record is known, so that for each world (the record is there, or not) an attacker
can compute what the noise would be: z = y - (C s).  For the right world it is noise, for the wrong one something
else:

* the lattice of a generator, in the manner of Mironov 2012: Box & Muller's transform takes the radius of two
  values from one integer n of few bits, r = √(-2 ln((n + ½) 2^-w)), so that k = 2^w exp(-r²/2) - ½ is close to a
  whole number, where k is small enough for its type to show it;
* residues: a discrete Gaussian is uniform modulo numbers far below its size, and a sum that is rounded after its
  noise, or noise of few digits, is not;
* the public seed: whether the noise is the one that a simulation of the scenario would draw.

"On significance of the least significant bits for differential privacy", CCS 2012, did the first to Laplace noise.

A server may send any finite vector.  Where a query drives the arithmetic out of its range for some records and not
for others, the reply is not finite, or none, or far too long for those: one look is enough, whatever the noise is.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.addons.audit.canaries import (
    FAR_NORM,
    RestartableSilo,
    make_audit_cell,
    make_canary_objective,
    unit_records,
    zero_shard,
)
from fedpriv.addons.audit.statistics import Scores, bound_at_threshold, noise_factor
from fedpriv.addons.audit.transcripts import (
    collect_broadcasts,
    collect_masked_sums,
    collect_replies,
    open_silos,
    zero_queries,
)
from fedpriv.core.errors import RunError
from fedpriv.core.random import SERVER, integer_noise_key, public_generator
from fedpriv.loss.objective import Objective
from fedpriv.noise.integers.fixed_point import Ints
from fedpriv.noise.integers.plan import ExactPlan
from fedpriv.noise.trust import TRUSTED
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.scenario.schema import Cell
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo

TRIALS = 32
"""Of integers, and of every kind of query."""

RADIUS_BITS = (31, 23, 15)
"""Bits of a radius that are tried."""
MODULUS_BITS = (8, 16, 24, 32)
"""Powers of 2 of the residues that are tried."""
INTEGER_TESTS = (
    *(f"the lattice of {width}-bit radii" for width in RADIUS_BITS),
    *(f"residues modulo 2^{bits}" for bits in MODULUS_BITS),
    "noise of the public seed",
)
_ROUND_COUNT = 4
_FEATURE_COUNT = (
    2**17 - 1
)  # and a bias: with two classes as many values as blocks of bits have, whatever their type
_MAX_EXACT_K = 4e4
"""k up to which float32 shows it: rounding moves k by about k r² 2^-23."""
_RESIDUE_COUNT = 2**14
"""Values of a round whose residues are looked at: where they tell anything, few do."""
_SAME_VALUE_TOLERANCE = 2.0**-12
"""Of the noise: values this near to the guess are the guess, but for the type they were sent in."""


def integers_cell(cell: Cell, mu: float) -> Cell:
    """The cell as this attack needs it: one record a batch, few rounds, a long vector."""
    return make_audit_cell(cell, mu, min(_ROUND_COUNT, cell.schedule.rounds), min(2, cell.federation.silos), 1)


def attack_integers(cell: Cell, seed: int) -> tuple[bool, Scores]:
    """One run with a record that is there or not: whether it is, and how much each test says so; (tests,)."""
    plan = make_plan(cell, make_canary_objective(cell, _FEATURE_COUNT), for_release=True)
    present = bool(public_generator(seed, "audit integers").random() < 0.5)
    idle = [zero_shard(plan.schedule.batches_per_silo, _FEATURE_COUNT)] * (len(plan.weights) - 1)
    records = {world: _target_shard(cell, plan, is_present=world) for world in (False, True)}
    with open_silos(cell, plan, [records[present], *idle]) as (folder, silos):
        if plan.trust.adds_noise(SERVER):
            noisy = _noisy_integers(
                plan, plan.required_exact_plan, collect_broadcasts(plan, folder, silos, zero_queries(plan))
            )
        elif plan.masked:
            noisy = collect_masked_sums(plan, silos, zero_queries(plan)).astype(np.float64)
        else:
            noisy = _noisy_integers(plan, plan.required_exact_plan, collect_replies(silos[0], zero_queries(plan)))
    known = idle if plan.trust.publishes_sums(SERVER) else []
    others = [_silo_sums(cell, plan, shard, number) for number, shard in enumerate(known, start=1)]
    without, there = (
        _score_world(
            cell, plan, plan.required_exact_plan, noisy, [_silo_sums(cell, plan, records[world], 0), *others]
        )
        for world in (False, True)
    )
    return present, there - without


def bound_integers_attack(trials: Sequence[tuple[bool, Scores]], failure: float) -> tuple[float, str]:
    """The largest lower bound on μ that the trials give, and by which test."""
    coins, scores = (np.array(column) for column in zip(*trials, strict=True))
    bounds = (bound_at_threshold(0.0, of_test, coins, failure / len(INTEGER_TESTS)) for of_test in scores.T)
    return max([(0.0, "none"), *zip(bounds, INTEGER_TESTS, strict=True)])


def _target_shard(cell: Cell, plan: Plan, *, is_present: bool) -> Shard:
    """The record that is looked for, in a world, among records of zeros."""
    shard = zero_shard(plan.schedule.batches_per_silo, _FEATURE_COUNT)
    if is_present or cell.privacy.relation == "replace-one":
        shard.images[0] = FAR_NORM / _FEATURE_COUNT**0.5
    shard.labels[0] = not is_present
    return shard


def _noisy_integers(plan: Plan, exact: ExactPlan, releases: Sequence[torch.Tensor]) -> NDArray[np.float64]:
    """y, (T, d), as far as the type that it was sent in shows it."""
    rows = np.stack([vector.double().numpy() for vector in releases])
    records = sum(plan.batch_sizes) if plan.trust.adds_noise(SERVER) else plan.batch_sizes[0]
    return np.asarray(np.linalg.inv(noise_factor(plan)) @ rows * (records / exact.lattice.unit))


def _silo_sums(cell: Cell, plan: Plan, shard: Shard, number: int) -> list[Ints]:
    """A silo's integer sums of every round, by its own code: what it would send a trusted server."""
    records, sending = unit_records(shard, cell), dataclasses.replace(plan, trust=TRUSTED)
    silo = Silo.for_release(number, sending, records, bytes(32), b"")
    state, sums = silo.initial_state(), []
    for t, query in enumerate(zero_queries(plan), start=1):
        release, state = silo.answer(state, t, query)
        sums.append(release.vector.numpy())
    return sums


def _score_world(
    cell: Cell, plan: Plan, exact: ExactPlan, noisy: NDArray[np.float64], sums: Sequence[Sequence[Ints]]
) -> Scores:
    """Score how well what is left of y without the sums of a world, `sums[silo][t - 1]`, fits each test."""
    strategy, passed = exact.inputs.factorization.strategy, []
    state = strategy.initial_state()
    for t, of_round in enumerate(zip(*sums, strict=True), start=1):
        out, state = strategy.step(state, t, _sum_vectors(of_round))
        passed.append(out)
    fresh = noisy - np.array(passed)
    size = exact.party_claim(0).sigma * (exact.inputs.party_count**0.5)
    guess = _seeded_release(cell, plan, [own[0] for own in sums])
    alike = float((np.abs(noisy[0] - guess) <= _SAME_VALUE_TOLERANCE * size).mean())
    few = fresh[:, :_RESIDUE_COUNT]
    residues = [float(np.cos(2.0 * np.pi * np.mod(few, 2.0**bits) / 2.0**bits).sum()) for bits in MODULUS_BITS]
    return np.array([*_radius_scores(fresh / size), *residues, alike])


def _seeded_release(cell: Cell, plan: Plan, sums: Sequence[Ints]) -> Scores:
    """y of round 1, (d,), with the noise that a simulation of the scenario draws, for everybody's sums."""
    step, query = IntegerSteps(plan, integer_noise_key(cell.seed)), zero_queries(plan)[0]
    of_owners = {SERVER: _sum_vectors(sums)} if plan.trust.adds_noise(SERVER) else dict(enumerate(sums))
    drawn = [
        step.add_noise(step.initial_state(owner), 1, torch.from_numpy(own), owner, query)[0].numpy()
        for owner, own in of_owners.items()
    ]
    return _sum_vectors(drawn).astype(np.float64)


def _sum_vectors(vectors: Sequence[Ints]) -> Ints:
    return np.asarray(np.sum(vectors, axis=0))


def _radius_scores(fresh: NDArray[np.float64]) -> list[float]:
    """Σ cos 2πk of what would be the fresh vectors (T, d), for each width."""
    half = fresh.shape[1] // 2
    squares = fresh[:, :half] ** 2 + fresh[:, half:] ** 2
    far = {width: squares[squares > 2.0 * (width * np.log(2.0) - np.log(_MAX_EXACT_K))] for width in RADIUS_BITS}
    return [float(np.cos(2.0 * np.pi * (2.0**w * np.exp(-few / 2.0) - 0.5)).sum()) for w, few in far.items()]


HOSTILE_KINDS = ("overflowing logits", "large weights", "denormal weights", "cancelling points")
_HOSTILE_ROUNDS = 3
_HOSTILE_FEATURES = 2
_HOSTILE_TESTS = ("no finite reply to", "too long a reply to")


def hostile_cell(cell: Cell, mu: float) -> Cell | None:
    """The cell as this attack needs it; None where silos answer to a server that they trust."""
    if cell.algorithm.trust_setting.adds_noise(SERVER):
        return None
    return make_audit_cell(cell, mu, min(_HOSTILE_ROUNDS, cell.schedule.rounds), min(2, cell.federation.silos), 1)


def attack_with_hostile_queries(cell: Cell, kind: str, seed: int) -> tuple[bool, Scores]:
    """A run of one kind of query: whether its record is bright, and what came back, one number a test; (2,)."""
    objective = make_canary_objective(cell, _HOSTILE_FEATURES)
    plan = make_plan(cell, objective, for_release=True)
    bright = bool(public_generator(seed, "audit hostile", kind).random() < 0.5)
    record = zero_shard(plan.schedule.batches_per_silo, _HOSTILE_FEATURES)
    record.images[0] = FAR_NORM / _HOSTILE_FEATURES**0.5 if bright else 0.0
    idle = [zero_shard(plan.schedule.batches_per_silo, _HOSTILE_FEATURES)] * (len(plan.weights) - 1)
    with open_silos(cell, plan, [record, *idle]) as (_, silos):
        keys = b"".join(silo.public_key("run") for silo in silos) if plan.masked else b""
        queries = _queries_of_kind(kind, objective, plan.schedule.rounds)
        replies = [_ask_reply(silos[0], t, query, keys) for t, query in enumerate(queries, start=1)]
    silent = [reply is None or not torch.isfinite(reply.double()).all() for reply in replies]
    return bright, np.array([float(any(silent)), max(_excess_length(plan, reply) for reply in replies)])


def bound_hostile_attack(trials: Mapping[str, list[tuple[bool, Scores]]], failure: float) -> tuple[float, str]:
    """The largest lower bound on μ that the trials of all kinds give, and by which test."""
    found, share = (0.0, "none"), failure / (len(trials) * len(_HOSTILE_TESTS))
    for kind, outcomes in trials.items():
        coins, scores = (np.array(column) for column in zip(*outcomes, strict=True))
        for of_test, test in zip(scores.T, _HOSTILE_TESTS, strict=True):
            found = max(found, (bound_at_threshold(0.5, of_test, coins, share), f"{test} a query with {kind}"))
    return found


def hostile_queries(plan: Plan) -> list[Tensor]:
    """One query a round, of all kinds in turn: what canaries are looked at under."""
    rounds = plan.schedule.rounds
    kinds = [_queries_of_kind(kind, plan.objective, rounds) for kind in HOSTILE_KINDS]
    return [kinds[t % len(kinds)][t] for t in range(rounds)]


def _queries_of_kind(kind: str, objective: Objective, rounds: int) -> list[Tensor]:
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


def _ask_reply(silo: RestartableSilo, t: int, query: Tensor, keys: bytes) -> Tensor | None:
    try:
        return silo.answer("run", t, query, keys)
    except RunError:
        return None


def _excess_length(plan: Plan, reply: Tensor | None) -> float:
    """1 if a reply is longer than clipped records and six times the noise account for, else 0."""
    if reply is None or plan.masked:  # masked words have no length
        return 0.0
    rounds = range(1, plan.schedule.rounds + 1)
    accounted = sum(plan.estimator.round(t).max_contribution for t in rounds)
    noise = float(plan.noise.std_of(0)) * float(np.sqrt(len(reply) * len(rounds)))
    return float(float(torch.linalg.vector_norm(reply.double())) > accounted + 6.0 * noise)
