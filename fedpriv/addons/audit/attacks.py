"""Attacks on the bits of noisy integers, and by hostile queries, beyond the distribution of the noise.

Deployed silos and servers add integer noise to integer sums, in a common unit.  A *canary* is a planted record.  A
*cell* is a run with every key of its scenario resolved, and a *plan* is all that is fixed before round 1.  The
*trust setting* says whether each silo adds noise, or the server, and whether the silos' messages are masked so
that the server reads their sum only.

The attacker on integers knows all records but one, and has two worlds: the record is present, or absent.  An
absent record has the opposite label, and under zero-out features of zeros as well, so that it moves only the bias,
which no test reads.  Releases are functions of y = C s + z: s (T, d) are the integer sums of T rounds, C (T, T) is
the matrix of the noise mechanism's strategy, and z (T, d) is the integer noise.  For each world the attacker
computes the sums s, and the noise z = y - C s that the world implies.  Three kinds of tests tell the true world
apart if the noise is defective:

* Lattice of a generator, after Mironov 2012: Box & Muller's transform takes the radius r of two normal values from
  one integer k of w bits, r = √(-2 ln((k + ½) 2^-w)).  So k = 2^w exp(-r²/2) - ½, computed from two noise values
  over their standard deviation, is close to an integer.
* Residues: a discrete Gaussian is nearly uniform modulo numbers far below its size.  A sum that is rounded after
  its noise, or noise of few digits, is not.
* Public seed: the noise of round 1 equals that of a simulation of the scenario.

A hostile query drives the arithmetic out of range for some records only.  Defective code then replies to those
records with a vector that is not finite or far too long, or does not reply.

Source: Mironov 2012, "On significance of the least significant bits for differential privacy", on Laplace noise.
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
from fedpriv.addons.audit.statistics import Scores, bound_at_threshold, find_noise_factor
from fedpriv.addons.audit.transcripts import (
    collect_broadcasts,
    collect_masked_sums,
    collect_replies,
    collect_silo_releases,
    open_silos,
    zero_queries,
)
from fedpriv.core.errors import RunError
from fedpriv.core.random import SERVER, integer_noise_key, public_generator
from fedpriv.loss.objective import Objective
from fedpriv.noise.integers.fixed_point import Ints
from fedpriv.noise.integers.plan import ExactPlan
from fedpriv.noise.trust import TRUSTED
from fedpriv.plan.calibration import make_workload
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.scenario.schema import Cell
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo

TRIALS = 32
"""Number of trials on integers, and on each kind of hostile query."""

RADIUS_BITS = (31, 23, 15)
"""Widths of a radius in bits that the lattice test tries."""
MODULUS_BITS = (8, 16, 24, 32)
"""Exponents of the powers of 2 that are moduli of the residue test."""
INTEGER_TESTS = (
    *(f"the lattice of {width}-bit radii" for width in RADIUS_BITS),
    *(f"residues modulo 2^{bits}" for bits in MODULUS_BITS),
    "noise of the public seed",
)
_ROUND_COUNT = 4
_FEATURE_COUNT = 2**17 - 1  # with a bias and two classes, 2^18 values: whole blocks of bits of every type
_MAX_EXACT_K = 4e4
"""Largest k that float32 shows exactly enough, as rounding moves k by about k r² 2^-23."""
_RESIDUE_COUNT = 2**14
"""Number of values of a round in the residue test, as few suffice to detect a defect."""
_SAME_VALUE_TOLERANCE = 2.0**-12
"""Tolerance in standard deviations of the noise, within which a value equals the guess up to rounding."""


def integers_cell(cell: Cell, mu: float) -> Cell:
    """Cut a cell to the size of the attack on integers.

    The small cell has at most 4 rounds and 2 silos, and one unit of protection a batch.
    """
    return make_audit_cell(cell, mu, min(_ROUND_COUNT, cell.schedule.rounds), min(2, cell.federation.silos), 1)


def attack_integers(cell: Cell, seed: int) -> tuple[bool, Scores]:
    """Run one trial of the attack on integers, with a target record present or absent by a fair coin.

    The cell has the size of `integers_cell`.  Silo 0 has the target record, and all other records are zeros.
    Scores are large if the noise that a world implies has traces of a defect (`_score_world`).

    Returns:
        The coin, True if the record is present, and the evidence of each of `INTEGER_TESTS` for presence,
        (tests,), which is the score of the present world minus that of the absent one.
    """
    plan = make_plan(cell, make_canary_objective(cell, _FEATURE_COUNT), for_release=True)
    present = bool(public_generator(seed, "audit integers").random() < 0.5)
    idle = [zero_shard(plan.schedule.batches_per_silo, _FEATURE_COUNT)] * (len(plan.weights) - 1)
    records = {world: _target_shard(cell, plan, is_present=world) for world in (False, True)}
    # The attacker sees noisy integers: of the server, of all silos together, or of silo 0.
    with open_silos(cell, plan, [records[present], *idle]) as (folder, silos):
        if plan.trust.adds_noise(SERVER):
            noisy = _noisy_integers(
                plan, plan.required_exact_plan, collect_broadcasts(plan, folder, silos, zero_queries(plan))
            )
        elif plan.masked:
            noisy = collect_masked_sums(plan, silos, zero_queries(plan)).astype(np.float64)
        else:
            noisy = _noisy_integers(plan, plan.required_exact_plan, collect_replies(silos[0], zero_queries(plan)))
    # A reply of silo 0 has its own sums alone.
    known_shards = idle if plan.trust.publishes_sums(SERVER) else []
    other_sums = [_silo_sums(cell, plan, shard, silo_id) for silo_id, shard in enumerate(known_shards, start=1)]
    absent_scores, present_scores = (
        _score_world(
            cell, plan, plan.required_exact_plan, noisy, [_silo_sums(cell, plan, records[world], 0), *other_sums]
        )
        for world in (False, True)
    )
    return present, present_scores - absent_scores


def bound_integers_attack(trials: Sequence[tuple[bool, Scores]], failure: float) -> tuple[float, str]:
    """Return the largest lower bound on μ from the trials, and the name of the test.

    Each test guesses "present" if its evidence is above 0.

    Args:
        trials: Coin and evidence (tests,) of each trial, from `attack_integers`.
        failure: Probability that some bound is wrong, at most.  It is divided equally among the tests.
    """
    coins, scores = (np.array(column) for column in zip(*trials, strict=True))
    bounds = (
        bound_at_threshold(0.0, test_scores, coins, failure / len(INTEGER_TESTS)) for test_scores in scores.T
    )
    return max([(0.0, "none"), *zip(bounds, INTEGER_TESTS, strict=True)])


def _target_shard(cell: Cell, plan: Plan, *, is_present: bool) -> Shard:
    """Make the shard of a world: the target record, and records of zeros."""
    shard = zero_shard(plan.schedule.batches_per_silo, _FEATURE_COUNT)
    if is_present or cell.privacy.relation == "replace-one":
        shard.images[0] = FAR_NORM / _FEATURE_COUNT**0.5
    shard.labels[0] = not is_present
    return shard


def _noisy_integers(plan: Plan, exact: ExactPlan, releases: Sequence[torch.Tensor]) -> NDArray[np.float64]:
    """Compute y, (T, d) in integer units, from T released means (d,), up to rounding in their type.

    Releases are R = F D⁻¹ y · unit / records.  F (T, T) is the noise factor, and D the diagonal matrix of the
    rounds' noise scales, which F includes.  `unit` is the size of an integer unit, and `records` the number of
    records in a batch: of all silos if the server adds the noise, else of silo 0.
    """
    rows, records = (
        np.stack([vector.double().numpy() for vector in releases]),
        sum(plan.batch_sizes) if plan.trust.adds_noise(SERVER) else plan.batch_sizes[0],
    )
    scales = np.array([exact.inputs.factorization.strategy.noise_scales(t) for t in range(1, len(rows) + 1)])
    return np.asarray(
        np.linalg.inv(find_noise_factor(plan.mechanism, len(rows)))
        @ rows
        * scales
        * (records / exact.lattice.unit)
    )


def _silo_sums(cell: Cell, plan: Plan, shard: Shard, silo_id: int) -> list[Ints]:
    """Compute a silo's integer sum of each round, (d,), without noise, for queries of zeros.

    The plan's trust setting is replaced by a trusted server, to which a silo sends its sum without noise.
    """
    records, sending_plan = unit_records(shard, cell), dataclasses.replace(plan, trust=TRUSTED)
    silo = Silo.for_release(silo_id, sending_plan, records, bytes(32), b"")
    return [vector.numpy() for vector in collect_silo_releases(silo, zero_queries(plan))]


def _score_world(
    cell: Cell, plan: Plan, exact: ExactPlan, noisy: NDArray[np.float64], sums: Sequence[Sequence[Ints]]
) -> Scores:
    """Score the traces of each defect in the noise z = y - C s that a world implies, (tests,).

    A score is large if the world is the true one and the noise has the defect.  In order of `INTEGER_TESTS`, and
    without the values of the bias:

    * for each width, Σ cos 2πk over the radii with a small k (`_radius_scores`),
    * for each b of `MODULUS_BITS`, Σ cos(2π z / 2^b) over the first `_RESIDUE_COUNT` values of each round,
    * the share of y's values in round 1 that equal those of a simulation of this world, up to rounding.

    Args:
        cell: Cell of the run.
        plan: Plan of the run.
        exact: Integers and noise of the plan.
        noisy: y, (T, d).
        sums: Integer sums s of the world, of the silos whose records are in y: [i][t - 1] is that of silo i in
            round t, (d,).
    """
    strategy, outputs = exact.inputs.factorization.strategy, []
    state = strategy.initial_state()
    # C s, one round after another.
    for t, round_sums in enumerate(zip(*sums, strict=True), start=1):
        output, state = strategy.step(state, t, _sum_vectors(round_sums))
        outputs.append(output)
    residual, scales = (
        _without_bias(noisy - np.array(outputs)),
        np.array([strategy.noise_scales(t) for t in range(1, len(noisy) + 1)]),
    )
    # Standard deviation of the noise of all parties whose noise is in y, in each round, in integer units, (T, 1).
    noise_sizes = exact.party_claim(0).sigma * (exact.inputs.party_count**0.5) * scales
    seeded_release = _seeded_release(cell, plan, [silo_sums[0] for silo_sums in sums])
    match_share = float(
        (_without_bias(np.abs(noisy[0] - seeded_release)) <= _SAME_VALUE_TOLERANCE * noise_sizes[0]).mean()
    )
    residues = [
        float(np.cos(2.0 * np.pi * np.mod(residual[:, :_RESIDUE_COUNT], 2.0**bits) / 2.0**bits).sum())
        for bits in MODULUS_BITS
    ]
    return np.array([*_radius_scores(residual / noise_sizes), *residues, match_share])


def _seeded_release(cell: Cell, plan: Plan, sums: Sequence[Ints]) -> Scores:
    """Compute y of round 1, (d,), from silos' sums (d,) and the noise that the cell's public seed draws."""
    integer_steps, query = IntegerSteps(plan, integer_noise_key(cell.seed)), zero_queries(plan)[0]
    sums_by_party = {SERVER: _sum_vectors(sums)} if plan.trust.adds_noise(SERVER) else dict(enumerate(sums))
    noisy_sums = [
        integer_steps.add_noise(integer_steps.initial_state(party), 1, torch.from_numpy(party_sum), party, query)[
            0
        ].numpy()
        for party, party_sum in sums_by_party.items()
    ]
    return _sum_vectors(noisy_sums).astype(np.float64)


def _sum_vectors(vectors: Sequence[Ints]) -> Ints:
    return np.asarray(np.sum(vectors, axis=0))


def _without_bias(vectors: Scores) -> Scores:
    """Drop the bias, the last value of each of the two classes, from vectors (…, d)."""
    return vectors.reshape(*vectors.shape[:-1], 2, -1)[..., :-1].reshape(*vectors.shape[:-1], -1)


def _radius_scores(residual: NDArray[np.float64]) -> list[float]:
    """Return Σ cos 2πk of the implied noise, for each width w of `RADIUS_BITS`.

    The values z and z' of a feature for the two classes share a radius, r² = z² + z'², and
    k = 2^w exp(-r²/2) - ½.  The sum is over the radii whose k + ½ is less than `_MAX_EXACT_K`, and is large if
    those k are integers.

    Args:
        residual: Implied noise of features in units of its standard deviation, (T, d - 2).
    """
    half_count = residual.shape[1] // 2
    squared_radii = residual[:, :half_count] ** 2 + residual[:, half_count:] ** 2
    squares_by_width = {
        width: squared_radii[squared_radii > 2.0 * (width * np.log(2.0) - np.log(_MAX_EXACT_K))]
        for width in RADIUS_BITS
    }
    return [
        float(np.cos(2.0 * np.pi * (2.0**bit_count * np.exp(-squares_of_width / 2.0) - 0.5)).sum())
        for bit_count, squares_of_width in squares_by_width.items()
    ]


HOSTILE_KINDS = ("overflowing logits", "large weights", "denormal weights", "cancelling points")
"""Kinds of hostile queries (`_queries_of_kind`)."""
_HOSTILE_ROUNDS = 3
_HOSTILE_FEATURES = 2
_HOSTILE_TESTS = ("no finite reply to", "too long a reply to")


def hostile_cell(cell: Cell, mu: float) -> Cell | None:
    """Cut a cell to the size of the attack by queries, or return None if the server adds the noise.

    The small cell has at most 3 rounds and 2 silos, and one unit of protection a batch.
    """
    if cell.algorithm.trust_setting.adds_noise(SERVER):
        return None
    return make_audit_cell(cell, mu, min(_HOSTILE_ROUNDS, cell.schedule.rounds), min(2, cell.federation.silos), 1)


def attack_with_hostile_queries(cell: Cell, kind: str, seed: int) -> tuple[bool, Scores]:
    """Send queries of one kind to silo 0, whose first record is bright or zero by a fair coin.

    The cell has the size of `hostile_cell`.  A bright record has features of norm `FAR_NORM`.  Other records are
    zeros.

    Returns:
        The coin, True for a bright record, and the outcome of each test, (2,): 1 if some reply is missing or not
        finite, but for its bias, else 0, and 1 if some reply is too long (`_excess_length`), else 0.  The second
        is always 0 for masked messages.
    """
    objective = make_canary_objective(cell, _HOSTILE_FEATURES)
    plan = make_plan(cell, objective, for_release=True)
    is_bright = bool(public_generator(seed, "audit hostile", kind).random() < 0.5)
    record = zero_shard(plan.schedule.batches_per_silo, _HOSTILE_FEATURES)
    record.images[0] = FAR_NORM / _HOSTILE_FEATURES**0.5 if is_bright else 0.0
    idle = [zero_shard(plan.schedule.batches_per_silo, _HOSTILE_FEATURES)] * (len(plan.weights) - 1)
    with open_silos(cell, plan, [record, *idle]) as (_, silos):
        keys = b"".join(silo.public_key("run") for silo in silos) if plan.masked else b""
        replies = [
            _ask_reply(silos[0], t, query, keys)
            for t, query in enumerate(_queries_of_kind(kind, objective, plan.schedule.rounds), start=1)
        ]
    return is_bright, np.array(
        [
            float(any(reply is None or not torch.isfinite(reply.double()).all() for reply in replies)),
            max(_excess_length(plan, reply) for reply in replies),
        ]
    )


def bound_hostile_attack(trials: Mapping[str, list[tuple[bool, Scores]]], failure: float) -> tuple[float, str]:
    """Return the largest lower bound on μ from the trials of all kinds, and the name of the test.

    Each test guesses a bright record if its outcome is 1.

    Args:
        trials: Coin and outcomes (2,) of each trial, from `attack_with_hostile_queries`, by kind, one kind or
            more.
        failure: Probability that some bound is wrong, at most.  It is divided equally among all tests, two for
            each kind.
    """
    best_result, share = (0.0, "none"), failure / (len(trials) * len(_HOSTILE_TESTS))
    for kind, outcomes in trials.items():
        coins, scores = (np.array(column) for column in zip(*outcomes, strict=True))
        for test_scores, test in zip(scores.T, _HOSTILE_TESTS, strict=True):
            best_result = max(
                best_result, (bound_at_threshold(0.5, test_scores, coins, share), f"{test} a query with {kind}")
            )
    return best_result


def hostile_queries(plan: Plan) -> list[Tensor]:
    """Return the hostile queries under which canaries are tested, one a round, of the kinds in turn."""
    rounds = plan.schedule.rounds
    kinds = [_queries_of_kind(kind, plan.objective, rounds) for kind in HOSTILE_KINDS]
    return [kinds[t % len(kinds)][t] for t in range(rounds)]


def _queries_of_kind(kind: str, objective: Objective, rounds: int) -> list[Tensor]:
    """Return one query of a kind, of the shape of a model of `objective`, for each round.

    A query is a multiple of weights 1 for class 0 and -1 for class 1, with biases 0.
    """
    pattern = torch.zeros_like(objective.initial())
    pattern.view(2, -1)[0, :-1], pattern.view(2, -1)[1, :-1] = 1.0, -1.0
    float_info = torch.finfo(pattern.dtype)
    match kind:
        case "overflowing logits":
            # The sum of the absolute values of the query does not overflow.
            return [float_info.max / (2 * pattern.numel()) * pattern] * rounds
        case "large weights":
            return [2.0**39 * pattern] * rounds
        case "denormal weights":
            return [float_info.smallest_normal * 2.0**-20 * pattern] * rounds
        case _:
            # "cancelling points": their signs alternate, and their size grows by 1e-6 a round, so that the sum of
            # two consecutive queries is small beside both.
            return [(-1.0) ** t * (1.0 + 1e-6 * t) * 2.0**39 * pattern for t in range(rounds)]


def _ask_reply(silo: RestartableSilo, t: int, query: Tensor, keys: bytes) -> Tensor | None:
    """Return a masked message (bytes,) or a reply without its bias (d - 2,), or None after a refusal."""
    try:
        reply = silo.answer("run", t, query, keys)
    except RunError:
        return None
    return reply if keys else torch.from_numpy(_without_bias(reply.double().numpy()))


def _excess_length(plan: Plan, reply: Tensor | None) -> float:
    """Return 1 if the norm of a reply (d - 2,) is above a limit that is generous to correct code, else 0.

    The limit is the sum of a unit's largest contributions to all T rounds, plus 6 √((d - 2) v) standard deviations
    of the silo's fresh noise vectors.  Here v is T, or the largest variance of a release if that is larger.  A
    missing reply (None) and a masked message give 0.
    """
    if reply is None or plan.masked:
        return 0.0
    rounds = range(1, plan.schedule.rounds + 1)
    expected_norm = sum(plan.estimator.round(t).max_contribution for t in rounds)
    variances = plan.mechanism.variance(make_workload(plan.estimator, plan.schedule))
    noise_norm = float(plan.noise.std_of(0)) * float(
        np.sqrt(len(reply) * max(len(rounds), float(variances.max())))
    )
    return float(float(torch.linalg.vector_norm(reply.double())) > expected_norm + 6.0 * noise_norm)
