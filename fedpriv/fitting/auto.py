"""`mechanism = "auto"`: the mechanism with the least state among those that are nearly the best for a row.

Only public numbers go in (the optimizer's coefficients, clips, the schedule), before round 1.  What comes out is a
mechanism with its numbers: they are stored and certified, never fitted again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fedpriv.errors import InputError
from fedpriv.fitting.column import column_scale
from fedpriv.fitting.fit import Fit, fit_lambda, fit_roots
from fedpriv.fitting.loss import PlainLoss, ScaledLoss
from fedpriv.fitting.objective import Objective
from fedpriv.mechanisms import BandedSquareRoot, BinaryTree, IndependentGaussian, Mechanism, Workload
from fedpriv.mechanisms.buffered_toeplitz import BufferedToeplitz
from fedpriv.mechanisms.sensitivity import series

_NEARLY = 1.01
"""How much more noise is accepted for less memory, and how much scaling must save to be worth it."""

_SAME = 1e-6
_FEW_ROUNDS = 2


@dataclass(frozen=True)
class Candidate:
    """A mechanism fitted to a row, and what it costs there."""

    name: str
    mechanism: Mechanism
    vectors: int
    """Its state."""
    noise: float
    """√J."""
    scaled: bool = False


def auto(objective: Objective, max_vectors: int = 4) -> Candidate:
    """Of at most `max_vectors` vectors the candidate with the fewest within 1 % of the best √J.

    Scaled noise is taken if it saves more than 1 %.  With one or two rounds it is independent noise.
    """
    if max_vectors < 0:
        raise InputError(f"max_vectors = {max_vectors}: a state has 0 or more vectors")
    found = list(candidates(objective, max_vectors))
    plain = _frugal([candidate for candidate in found if not candidate.scaled])
    scaled = [candidate for candidate in found if candidate.scaled]
    if not scaled or _frugal(scaled).noise * _NEARLY >= plain.noise:
        return plain
    return _frugal(scaled)


def candidates(objective: Objective, max_vectors: int) -> Iterator[Candidate]:
    """All that fit into `max_vectors`, but for those that an earlier one beats with as few vectors."""
    found: list[Candidate] = []
    for candidate in _all(objective, max_vectors):
        beaten = any(
            other.vectors <= candidate.vectors and other.noise <= candidate.noise * (1.0 + _SAME)
            for other in found
        )
        if candidate.vectors <= max_vectors and not beaten:
            found.append(candidate)
            yield candidate


def _all(objective: Objective, most: int) -> Iterator[Candidate]:
    yield _named("independent", IndependentGaussian(), objective)
    decay, rounds = objective.workload.decay, objective.workload.rounds
    if rounds <= _FEW_ROUNDS:
        return
    if BinaryTree(decay).memory_vectors(objective.workload) <= most:
        yield _named("tree", BinaryTree(decay), objective)
    if not objective.workload.schedule.single_pass:
        # with few places a C that ends before a record comes back can be best
        for bands in range(2, most + 1):
            yield _named(f"banded ({bands})", BandedSquareRoot(decay, bands), objective)
    yield from _plain(objective, most)
    yield from _scaled(objective, most)


def _named(name: str, mechanism: Mechanism, objective: Objective) -> Candidate:
    vectors = mechanism.memory_vectors(objective.workload)
    return Candidate(name, mechanism, vectors, math.sqrt(objective.value(mechanism)))


def _plain(objective: Objective, most: int) -> Iterator[Candidate]:
    if not most:
        return
    workload, loss = objective.workload, PlainLoss(objective)

    def candidate(name: str, fit: Fit) -> Candidate:
        mechanism = BufferedToeplitz(workload.decay, fit.theta, fit.phi)
        noise = mechanism.sensitivity(workload) * math.sqrt(loss.spread(fit.theta, fit.phi))
        return Candidate(name, mechanism, mechanism.memory_vectors(workload), noise)

    single = fit_lambda(objective)
    yield candidate("λ-CGD", single)
    for pairs, last_free in ((2, False), (2, True), (3, True)):
        if _vectors(workload, pairs, last_free) <= most:
            fit = fit_roots(loss, pairs, last_free, single.theta)
            yield candidate(f"BLT {len(fit.theta)}", fit)


def _scaled(objective: Objective, most: int) -> Iterator[Candidate]:
    """In one pass with equal clips: there the scale follows from C."""
    workload = objective.workload
    if not workload.schedule.single_pass or np.any(workload.clips != workload.clips[0]):
        return
    loss, around = ScaledLoss(objective), fit_lambda(objective).theta
    for pairs in (1, 2, 3):
        if _vectors(workload, pairs, True) <= most:
            fit = fit_roots(loss, pairs, True, around)
            mechanism = lengthened(BufferedToeplitz(workload.decay, fit.theta, fit.phi), workload)
            name, noise = f"BLT {len(fit.theta)}, scaled", math.exp(fit.loss / 2.0)
            yield Candidate(name, mechanism, mechanism.memory_vectors(workload), noise, scaled=True)


def lengthened(mechanism: BufferedToeplitz, workload: Workload) -> BufferedToeplitz:
    """The mechanism with the `column_scale` that makes every column as long as the first."""
    squared_norms = series.column_squared_norms(mechanism.strategy(workload.rounds), workload.rounds)
    return replace(mechanism, column_scale=tuple(column_scale(squared_norms, workload).tolist()))


def _vectors(workload: Workload, pairs: int, last_free: bool) -> int:
    return pairs + (last_free and workload.decay > 0.0)


def _frugal(found: list[Candidate]) -> Candidate:
    enough = _NEARLY * min(candidate.noise for candidate in found)
    return min((candidate for candidate in found if candidate.noise <= enough), key=lambda c: (c.vectors, c.noise))
