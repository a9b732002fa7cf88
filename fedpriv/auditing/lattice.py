"""Does the noise lie on the lattice of its generator?  An attack in the manner of Mironov 2012.

Box & Muller's transform takes the radius of two noise values from one integer n of few bits:
r = √(-2 ln((n + ½) 2^-w)).  So for the right hypothesis about the exact sum, k = 2^w exp(-r²/2) - ½ of the
remaining noise is close to a whole number, where k is small enough for its type to show it; for a wrong one k is
anything.  Σ cos 2πk over pairs tells the two apart, however small μ is.

"On significance of the least significant bits for differential privacy", CCS 2012, did this to Laplace noise.
"""

import numpy as np

from fedpriv.auditing.bounds import Scores, bound_at
from fedpriv.auditing.canaries import FAR, auditable, nothing, objective_for
from fedpriv.auditing.statistics import noise_factor
from fedpriv.auditing.transcripts import broadcasts, folder_of_silos, replies
from fedpriv.randomness import public_generator
from fedpriv.running.plan import Plan, plan_of
from fedpriv.scenario import Cell

WIDTHS = (31, 23, 15)
"""Bits of a radius that are tried."""
TRIALS = 32
_ROUNDS = 4
_FEATURES = 2**17 - 1  # and a bias: with two classes as many values as blocks of bits have, whatever their type
_SMALL = 4e4
"""k up to which float32 shows it: rounding moves k by about k r² 2^-23."""


def lattice_cell(cell: Cell, mu: float) -> Cell | None:
    """The cell as this attack needs it: one record a batch, few rounds, a long vector.

    None where what is seen has the noise of several owners, whose sum is on no such lattice.
    """
    if cell.algorithm.trust_setting.masked:
        return None
    return auditable(cell, mu, min(_ROUNDS, cell.schedule.rounds), min(2, cell.federation.silos), 1)


def attack(cell: Cell, seed: int) -> tuple[bool, Scores]:
    """One run with a record that is there or not: whether it is, and how much each width says so; (widths,)."""
    objective = objective_for(cell, _FEATURES)
    plan = plan_of(cell, objective)
    present = bool(public_generator(seed, "audit lattice").random() < 0.5)
    held = plan.schedule.batches_held
    record = nothing(held, _FEATURES)
    if present or cell.privacy.relation == "replace-one":
        record.images[0] = FAR / _FEATURES**0.5
    record.labels[0] = not present
    idle = [nothing(held, _FEATURES)] * (len(plan.weights) - 1)
    with folder_of_silos(cell, plan, [record, *idle]) as (folder, silos):
        trusted = cell.algorithm.trust_setting.noise_at_server
        seen = broadcasts(plan, objective, folder, silos) if trusted else replies(plan, objective, silos[0])
    (source, *_), backwards = plan.noise.sources, np.linalg.inv(noise_factor(plan))
    releases = np.stack([vector.double().numpy() for vector in seen])
    without, there = (
        _fits(backwards @ (releases - _exact(plan, cell, world)) / float(source.std)) for world in (False, True)
    )
    return present, there - without


def lattice_bound(present: list[bool], scores: list[Scores], failure: float) -> tuple[float, str]:
    """The largest lower bound on μ that the trials give, and by which width."""
    coins, found = np.array(present), (0.0, "none")
    for place, width in enumerate(WIDTHS):
        bound = bound_at(0.0, np.array(scores)[:, place], coins, failure / len(WIDTHS))
        found = max(found, (bound, f"the lattice of {width}-bit radii"))
    return found


def _exact(plan: Plan, cell: Cell, present: bool) -> Scores:
    """What the record adds to the exact releases in a world, (T, 2 (features + 1)); biases are left out."""
    rounds, clip = plan.schedule.rounds, float(plan.estimator.round(1).clip)
    size = min(clip, FAR / 2**0.5) * (1.0 if present else -1.0 if cell.privacy.relation == "replace-one" else 0.0)
    weight = plan.weights[0] if cell.algorithm.trust_setting.noise_at_server else 1.0
    each = weight * size / (2.0 * _FEATURES) ** 0.5
    row = np.concatenate([np.full(_FEATURES, -each), [0.0], np.full(_FEATURES, each), [0.0]])
    return np.outer(plan.estimator.decay ** np.arange(rounds), row)


def _fits(fresh: Scores) -> Scores:
    """Σ cos 2πk of what would be the fresh vectors (T, d), for each width."""
    half = fresh.shape[1] // 2
    squares = fresh[:, :half] ** 2 + fresh[:, half:] ** 2
    fits = []
    for width in WIDTHS:
        far = squares[squares > 2.0 * (width * np.log(2.0) - np.log(_SMALL))]
        fits.append(np.cos(2.0 * np.pi * (2.0**width * np.exp(-far / 2.0) - 0.5)).sum())
    return np.array(fits)
