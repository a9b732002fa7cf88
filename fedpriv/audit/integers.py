"""Attacks on the bits of noisy integers: do they tell more than their law?

Everything but one record is known, so that for each world (the record is there, or not) an attacker can compute
what the noise would be: z = y - (C s).  For the right world it is noise, for the wrong one something else:

* the lattice of a generator, in the manner of Mironov 2012: Box & Muller's transform takes the radius of two
  values from one integer n of few bits, r = √(-2 ln((n + ½) 2^-w)), so that k = 2^w exp(-r²/2) - ½ is close to a
  whole number, where k is small enough for its type to show it;
* residues: a discrete Gaussian is uniform modulo numbers far below its size, and a sum that is rounded after its
  noise, or noise of few digits, is not;
* the public seed: whether the noise is the one that a simulation of the scenario would draw.

"On significance of the least significant bits for differential privacy", CCS 2012, did the first to Laplace noise.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.audit.canaries import FAR, auditable, nothing, objective_for, units_of
from fedpriv.audit.hostile import Scores, bound_at
from fedpriv.audit.statistics import noise_factor
from fedpriv.audit.transcripts import broadcasts, folder_of_silos, masked_sums, replies, zeros
from fedpriv.core.random import SERVER, integers_key, public_generator
from fedpriv.noise.integers.fixed_point import Ints
from fedpriv.noise.integers.plan import ExactPlan
from fedpriv.noise.trust import TRUSTED
from fedpriv.rounds.plan import Plan, plan_of
from fedpriv.rounds.round import IntegerArithmetic
from fedpriv.scenario.schema import Cell
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo

WIDTHS = (31, 23, 15)
"""Bits of a radius that are tried."""
MODULI = (8, 16, 24, 32)
"""Powers of 2 of the residues that are tried."""
TESTS = (
    *(f"the lattice of {width}-bit radii" for width in WIDTHS),
    *(f"residues modulo 2^{bits}" for bits in MODULI),
    "noise of the public seed",
)
TRIALS = 32
_ROUNDS = 4
_FEATURES = 2**17 - 1  # and a bias: with two classes as many values as blocks of bits have, whatever their type
_SMALL = 4e4
"""k up to which float32 shows it: rounding moves k by about k r² 2^-23."""
_RESIDUES = 2**14
"""Values of a round whose residues are looked at: where they tell anything, few do."""
_ALIKE = 2.0**-12
"""Of the noise: values this near to the guess are the guess, but for the type they were sent in."""


def integers_cell(cell: Cell, mu: float) -> Cell:
    """The cell as this attack needs it: one record a batch, few rounds, a long vector."""
    return auditable(cell, mu, min(_ROUNDS, cell.schedule.rounds), min(2, cell.federation.silos), 1)


def attack(cell: Cell, seed: int) -> tuple[bool, Scores]:
    """One run with a record that is there or not: whether it is, and how much each test says so; (tests,)."""
    objective = objective_for(cell, _FEATURES)
    plan = plan_of(cell, objective, released=True)
    present = bool(public_generator(seed, "audit integers").random() < 0.5)
    idle = [nothing(plan.schedule.batches_held, _FEATURES)] * (len(plan.weights) - 1)
    records = {world: _record(cell, plan, there=world) for world in (False, True)}
    with folder_of_silos(cell, plan, [records[present], *idle]) as (folder, silos):
        if plan.trust.draws(SERVER):
            noisy = _integers(plan, plan.exact, broadcasts(plan, folder, silos, zeros(plan)))
        elif plan.masked:
            noisy = masked_sums(plan, silos, zeros(plan)).astype(np.float64)
        else:
            noisy = _integers(plan, plan.exact, replies(silos[0], zeros(plan)))
    others = []
    if plan.trust.releases(SERVER):
        others = [_sums(cell, plan, shard, number) for number, shard in enumerate(idle, start=1)]
    without, there = (
        _fits(cell, plan, plan.exact, noisy, [_sums(cell, plan, records[world], 0), *others])
        for world in (False, True)
    )
    return present, there - without


def integers_bound(present: Sequence[bool], scores: Sequence[Scores], failure: float) -> tuple[float, str]:
    """The largest lower bound on μ that the trials give, and by which test."""
    coins, found = np.array(present), (0.0, "none")
    for place, test in enumerate(TESTS):
        found = max(found, (bound_at(0.0, np.array(scores)[:, place], coins, failure / len(TESTS)), test))
    return found


def _record(cell: Cell, plan: Plan, *, there: bool) -> Shard:
    """The record that is looked for, in a world, among records of zeros."""
    shard = nothing(plan.schedule.batches_held, _FEATURES)
    if there or cell.privacy.relation == "replace-one":
        shard.images[0] = FAR / _FEATURES**0.5
    shard.labels[0] = not there
    return shard


def _integers(plan: Plan, exact: ExactPlan, releases: Sequence[torch.Tensor]) -> NDArray[np.float64]:
    """y, (T, d), as far as the type that it was sent in shows it."""
    rows = np.stack([vector.double().numpy() for vector in releases])
    records = sum(plan.batch_sizes) if plan.trust.draws(SERVER) else plan.batch_sizes[0]
    return np.asarray(np.linalg.inv(noise_factor(plan)) @ rows * (records / exact.lattice.unit))


def _sums(cell: Cell, plan: Plan, shard: Shard, number: int) -> list[Ints]:
    """A silo's integer sums of every round, by its own code: what it would send a trusted server."""
    records, sending = units_of(shard, cell), dataclasses.replace(plan, trust=TRUSTED)
    silo = Silo.of(number, sending, records, bytes(32), b"")
    state, sums = silo.start(), []
    for t, query in enumerate(zeros(plan), start=1):
        release, state = silo.answer(state, t, query)
        sums.append(release.vector.numpy())
    return sums


def _fits(
    cell: Cell, plan: Plan, exact: ExactPlan, noisy: NDArray[np.float64], sums: Sequence[Sequence[Ints]]
) -> Scores:
    """Score how well what is left of y without the sums of a world, `sums[silo][t - 1]`, fits each test."""
    strategy, passed = exact.run.factored.strategy, []
    state = strategy.start()
    for t, of_round in enumerate(zip(*sums, strict=True), start=1):
        out, state = strategy.step(state, t, _total(of_round))
        passed.append(out)
    fresh = noisy - np.array(passed)
    size = exact.claim.sigma * (exact.run.owners**0.5)
    guess = _of_the_seed(cell, plan, [own[0] for own in sums])
    alike = float((np.abs(noisy[0] - guess) <= _ALIKE * size).mean())
    few = fresh[:, :_RESIDUES]
    residues = [float(np.cos(2.0 * np.pi * np.mod(few, 2.0**bits) / 2.0**bits).sum()) for bits in MODULI]
    return np.array([*_radii(fresh / size), *residues, alike])


def _of_the_seed(cell: Cell, plan: Plan, sums: Sequence[Ints]) -> Scores:
    """y of round 1, (d,), with the noise that a simulation of the scenario draws, for everybody's sums."""
    step, query = IntegerArithmetic(plan, integers_key(cell.seed)), zeros(plan)[0]
    of_owners = {SERVER: _total(sums)} if plan.trust.draws(SERVER) else dict(enumerate(sums))
    drawn = [
        step.noisy(step.start(owner), 1, torch.from_numpy(own), owner, query)[0].numpy()
        for owner, own in of_owners.items()
    ]
    return _total(drawn).astype(np.float64)


def _total(vectors: Sequence[Ints]) -> Ints:
    total: Ints = np.sum(vectors, axis=0)
    return total


def _radii(fresh: NDArray[np.float64]) -> list[float]:
    """Σ cos 2πk of what would be the fresh vectors (T, d), for each width."""
    half = fresh.shape[1] // 2
    squares = fresh[:, :half] ** 2 + fresh[:, half:] ** 2
    fits = []
    for width in WIDTHS:
        far = squares[squares > 2.0 * (width * np.log(2.0) - np.log(_SMALL))]
        fits.append(float(np.cos(2.0 * np.pi * (2.0**width * np.exp(-far / 2.0) - 0.5)).sum()))
    return fits
