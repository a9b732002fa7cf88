"""`mechanism = "auto"`: the mechanism with the least state among those that are nearly the best for a row.

Only public numbers go in (the optimizer's coefficients, clips, the schedule), before round 1.  What comes out is a
mechanism with its numbers: they are stored and certified, never fitted again.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedpriv.errors import InputError
from fedpriv.fitting.fit import Fit, fit_lambda, fit_roots
from fedpriv.fitting.loss import PlainLoss, ScaledLoss
from fedpriv.fitting.objective import Objective
from fedpriv.fitting.sizes import fitted_sizes
from fedpriv.mechanisms import (
    BandedSquareRoot,
    BinaryTree,
    BufferedToeplitz,
    IndependentGaussian,
    LambdaCgd,
    Mechanism,
    ScheduledGaussian,
    Workload,
)
from fedpriv.mechanisms.registry import AUTO, MechanismOptions

_NEARLY = 1.01
"""How much more noise is accepted for less memory, and how much scaling must save to be worth it."""

_SAME = 1e-6
_FEW_ROUNDS = 2


@dataclass(frozen=True)
class Candidate:
    """A mechanism fitted to a row, and what it costs there."""

    mechanism: Mechanism
    vectors: int
    """Its state."""
    noise: float
    """√J."""

    @property
    def name(self) -> str:
        return self.mechanism.label

    @property
    def scaled(self) -> bool:
        return isinstance(self.mechanism, BufferedToeplitz) and bool(self.mechanism.column_scale)


def fitted(objective: Objective, name: str, options: MechanismOptions, *, scalable: bool = True) -> Candidate:
    """What a person who names "auto", "scheduled", "lambda-cgd" or "blt" without numbers gets.

    `scalable` says whether "auto" may scale noise; the last two do if `options` ask for it.
    """
    if name == AUTO:
        return auto(objective, options.max_vectors, scalable=scalable)
    if name == ScheduledGaussian.name:
        return _of(fitted_sizes(objective), objective)
    kind = LambdaCgd if name == LambdaCgd.name else BufferedToeplitz
    return named(objective, kind, options.max_vectors, scaled=options.scale)


def auto(objective: Objective, max_vectors: int = 4, *, scalable: bool = True) -> Candidate:
    """Of at most `max_vectors` vectors the candidate with the fewest within 1 % of the best √J.

    Scaled noise is taken if it is allowed (`scalable`) and saves more than 1 %.  With one or two rounds it is
    independent noise.
    """
    if max_vectors < 0:
        raise InputError(f"max_vectors = {max_vectors}: a state has 0 or more vectors")
    return choice([each for each in candidates(objective, max_vectors) if scalable or not each.scaled])


def choice(found: Sequence[Candidate]) -> Candidate:
    """The one of `found` that `auto` takes."""
    plain = _frugal([candidate for candidate in found if not candidate.scaled])
    scaled = [candidate for candidate in found if candidate.scaled]
    if not scaled or _frugal(scaled).noise * _NEARLY >= plain.noise:
        return plain
    return _frugal(scaled)


def named(objective: Objective, kind: type[BufferedToeplitz], max_vectors: int, *, scaled: bool) -> Candidate:
    """The best of one kind: λ-CGD, or buffers of at most `max_vectors` vectors; InputError if none has so few."""
    found = _scaled(objective, max_vectors) if scaled else _plain(objective, max_vectors)
    fitting = [
        candidate
        for candidate in found
        if candidate.vectors <= max_vectors and (kind is BufferedToeplitz or isinstance(candidate.mechanism, kind))
    ]
    if not fitting:
        raise InputError(
            f'mechanism = "{kind.name}": max_vectors = {max_vectors} are too few'
            + (", or noise cannot be scaled here: it takes one pass with equal clips" if scaled else "")
        )
    best = min(fitting, key=lambda candidate: candidate.noise)
    asked = best.mechanism
    assert isinstance(asked, BufferedToeplitz)
    mechanism = kind(asked.decay, asked.theta, asked.phi, asked.column_scale)
    return Candidate(mechanism, best.vectors, best.noise)


def candidates(objective: Objective, max_vectors: int) -> Iterator[Candidate]:
    """All that fit into `max_vectors`, but for those that an earlier one beats with as few vectors."""
    found: list[Candidate] = []
    for candidate in fitted_of_all_kinds(objective, max_vectors):
        beaten = any(
            other.vectors <= candidate.vectors and other.noise <= candidate.noise * (1.0 + _SAME)
            for other in found
        )
        if candidate.vectors <= max_vectors and not beaten:
            found.append(candidate)
            yield candidate


def fitted_of_all_kinds(objective: Objective, most: int) -> Iterator[Candidate]:
    """One candidate of every kind and size that a state of `most` vectors may allow, beaten ones too."""
    yield _of(IndependentGaussian(), objective)
    decay, rounds = objective.workload.decay, objective.workload.rounds
    if rounds <= _FEW_ROUNDS:
        return
    yield _of(fitted_sizes(objective), objective)
    if BinaryTree(decay).memory_vectors(objective.workload) <= most:
        yield _of(BinaryTree(decay), objective)
    if not objective.workload.schedule.single_pass:
        # with few places a C that ends before a record comes back can be best
        for bands in range(2, most + 1):
            yield _of(BandedSquareRoot(decay, bands), objective)
    yield from _plain(objective, most)
    yield from _scaled(objective, most)


def _of(mechanism: Mechanism, objective: Objective) -> Candidate:
    vectors = mechanism.memory_vectors(objective.workload)
    return Candidate(mechanism, vectors, math.sqrt(objective.value(mechanism)))


def _plain(objective: Objective, most: int) -> Iterator[Candidate]:
    if not most:
        return
    workload, loss = objective.workload, PlainLoss(objective)

    def candidate(fit: Fit) -> Candidate:
        mechanism = _with_roots(workload, fit)
        noise = mechanism.sensitivity(workload) * math.sqrt(loss.spread(fit.theta, fit.phi))
        return Candidate(mechanism, mechanism.memory_vectors(workload), noise)

    single = fit_lambda(objective)
    yield candidate(single)
    for pairs, last_free in ((2, False), (2, True), (3, True)):
        if _vectors(workload, pairs, last_free) <= most:
            yield candidate(fit_roots(loss, pairs, last_free, single.theta))


def _scaled(objective: Objective, most: int) -> Iterator[Candidate]:
    """In one pass with equal clips: there the scale follows from C."""
    workload = objective.workload
    if not workload.schedule.single_pass or not workload.equal_clips:
        return
    loss, around = ScaledLoss(objective), fit_lambda(objective).theta
    for pairs, last_free in ((1, False), (1, True), (2, True), (3, True)):
        if _vectors(workload, pairs, True) <= most:  # with a scale the last noise is kept in any case
            fit = fit_roots(loss, pairs, last_free, around)
            mechanism = _with_roots(workload, fit).lengthened(workload)
            yield Candidate(mechanism, mechanism.memory_vectors(workload), math.exp(fit.loss / 2.0))


def _with_roots(workload: Workload, fit: Fit) -> BufferedToeplitz:
    kind = LambdaCgd if len(fit.theta) == 1 and fit.phi == (0.0,) else BufferedToeplitz
    return kind(workload.decay, fit.theta, fit.phi)


def _vectors(workload: Workload, pairs: int, last_free: bool) -> int:
    return pairs + (last_free and workload.decay > 0.0)


def _frugal(found: list[Candidate]) -> Candidate:
    enough = _NEARLY * min(candidate.noise for candidate in found)
    return min((candidate for candidate in found if candidate.noise <= enough), key=lambda c: (c.vectors, c.noise))
