"""`mechanism = "auto"`: the mechanism with the least state among those that are nearly the best for a row.

Only public numbers go in (the optimizer's coefficients, clips, the schedule), before round 1.  What comes out is a
mechanism with its numbers: they are stored and certified, never fitted again.

Mechanisms are compared side by side, by the noise that each leaves in the output and in the queries; figures are
for noise sized to sensitivity 1 (μ = 1 under zero-out), and inversely proportional to μ.

The best sizes of scheduled noise have a closed form.  With fresh noise d_t z_t the J is Σ_t d_t² w_t, w_t
the squared weight of round t in all rows, and a record that has moved the sum of round t by m_t is charged Σ_t
m_t²/d_t².  By Cauchy and Schwarz the least product is (Σ_t m_t √w_t)², at d_t² = m_t / √w_t.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.diagonal import IndependentGaussian, ScheduledGaussian
from fedpriv.noise.fitting.cost import NoiseCost, NoiseResponse, output_variances, std_lower_bounds
from fedpriv.noise.fitting.fit import PlainLoss, RootFit, ScaledLoss, fit_lambda, fit_roots
from fedpriv.noise.mechanism import Mechanism, Sensitivity
from fedpriv.noise.registry import AUTO, MechanismOptions
from fedpriv.noise.series import Floats, Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import MinSeparation

_MIN_WEIGHT = 1e-3
"""Of the largest √w: a round that hardly weighs gets much noise, not any amount of it."""


def fit_sizes(cost: NoiseCost) -> ScheduledGaussian:
    """The best sizes where one record moves every sum the most: prefix sums, equal clips; elsewhere nearly so."""
    workload = cost.workload
    weights = np.sqrt(_neighbour_weights(np.sum(cost.weights**2, axis=0), len(cost.weights)))
    weights = np.maximum(weights, _MIN_WEIGHT * np.max(weights))
    sizes = np.sqrt(max_displacements(workload) / weights)
    return ScheduledGaussian(tuple((sizes / sizes[0]).tolist()), workload.decay)


def _neighbour_weights(weights: Floats, rows: int) -> Floats:
    """Of the largest `weights` (T,) before and after a round, as far as two queries lie apart, the smaller one.

    A fit of many rounds looks at `rows` of them: a round between two queries may weigh in others alone, and noise
    there must not look free.  Weights that fall or rise steadily stay what they are.
    """
    reach = max(0, -(-len(weights) // max(1, rows - 1)))  # one of the rows may be the output
    if len(weights) <= rows:
        return weights
    windows = np.max(np.lib.stride_tricks.sliding_window_view(np.pad(weights, reach), reach + 1), axis=1)
    return np.asarray(np.minimum(windows[: len(weights)], windows[reach:]))


def max_displacements(workload: Workload) -> Floats:
    """Compute the farthest that some record can have moved the sum of every round; (T,).

    The record of round t has moved it by its clips, decayed by whole epochs; any other by what it moved, decayed.
    """
    order, rounds = workload.public_order, workload.rounds
    epoch, last = rounds, rounds
    if not order.single_pass:
        epoch = order.min_separation if isinstance(order, MinSeparation) else order.rounds_per_epoch
        last = order.max_rounds_per_record * epoch if isinstance(order, MinSeparation) else rounds
    clips, decay = workload.clips.tolist(), workload.decay
    own, most = list[float](), list[float]()
    for t, clip in enumerate(clips):
        own.append(clip + (decay**epoch * own[t - epoch] if t >= epoch else 0.0))
        if t >= last:  # a record that comes back no more
            own[t] -= decay**last * clips[t - last]
        most.append(max(own[t], decay * most[t - 1] if t else 0.0))
    return np.array(most)


_NOISE_FACTOR = 1.01
"""Factor of noise that is accepted for less memory, and that scaling must save to be worth it."""

_TIE_TOLERANCE = 1e-6
_FEW_ROUNDS = 2


@dataclass(frozen=True)
class MechanismCandidate:
    """A mechanism fitted to a row, and what it costs there."""

    mechanism: Mechanism
    vector_count: int
    """Its state."""
    noise: float
    """√J."""

    @property
    def name(self) -> str:
        return self.mechanism.label

    @property
    def is_scaled(self) -> bool:
        return isinstance(self.mechanism, BufferedToeplitz) and bool(self.mechanism.column_scale)


def fit_named(
    cost: NoiseCost, name: str, options: MechanismOptions, *, scalable: bool = True
) -> MechanismCandidate:
    """The mechanism of a scenario that names "auto", "scheduled", "lambda-cgd" or "blt" without numbers.

    `scalable` says whether "auto" may scale noise; the last two do if `options` ask for it.
    """
    if name == AUTO:
        return fit_auto(cost, options.max_vectors, scalable=scalable)
    if name == ScheduledGaussian.name:
        return _make_candidate(fit_sizes(cost), cost)
    kind = LambdaCgd if name == LambdaCgd.name else BufferedToeplitz
    return fit_kind(cost, kind, options.max_vectors, scaled=options.scale)


def fit_auto(cost: NoiseCost, max_vectors: int = 4, *, scalable: bool = True) -> MechanismCandidate:
    """Of at most `max_vectors` vectors the candidate with the fewest within 1 % of the best √J.

    Scaled noise is taken if it is allowed (`scalable`) and saves more than 1 %.  With one or two rounds it is
    independent noise.
    """
    if max_vectors < 0:
        raise InputError(f"max_vectors = {max_vectors}: a state has 0 or more vectors")
    return choose_candidate(
        [each for each in undominated_candidates(cost, max_vectors) if scalable or not each.is_scaled]
    )


def choose_candidate(found: Sequence[MechanismCandidate]) -> MechanismCandidate:
    """The one of `found` that `auto` takes."""
    plain = _choose_frugal([candidate for candidate in found if not candidate.is_scaled])
    scaled = [candidate for candidate in found if candidate.is_scaled]
    if not scaled or _choose_frugal(scaled).noise * _NOISE_FACTOR >= plain.noise:
        return plain
    return _choose_frugal(scaled)


def fit_kind(
    cost: NoiseCost, kind: type[BufferedToeplitz], max_vectors: int, *, scaled: bool
) -> MechanismCandidate:
    """The best of one kind: λ-CGD, or buffers of at most `max_vectors` vectors; InputError if none has so few."""
    found = _scaled_candidates(cost, max_vectors) if scaled else _plain_candidates(cost, max_vectors)
    fitting = [
        candidate
        for candidate in found
        if candidate.vector_count <= max_vectors
        and (kind is BufferedToeplitz or isinstance(candidate.mechanism, kind))
    ]
    if not fitting:
        raise InputError(
            f'mechanism = "{kind.name}": max_vectors = {max_vectors} are too few'
            + (", or noise cannot be scaled here: it takes one pass with equal clips" if scaled else "")
        )
    best = min(fitting, key=lambda candidate: candidate.noise)
    asked = best.mechanism
    assert isinstance(asked, BufferedToeplitz)
    return MechanismCandidate(
        kind(asked.decay, asked.theta, asked.phi, asked.column_scale), best.vector_count, best.noise
    )


def undominated_candidates(cost: NoiseCost, max_vectors: int) -> Iterator[MechanismCandidate]:
    """All that fit into `max_vectors`, but for those that an earlier one beats with as few vectors."""
    found: list[MechanismCandidate] = []
    for candidate in all_candidates(cost, max_vectors):
        beaten = any(
            other.vector_count <= candidate.vector_count
            and other.noise <= candidate.noise * (1.0 + _TIE_TOLERANCE)
            for other in found
        )
        if candidate.vector_count <= max_vectors and not beaten:
            found.append(candidate)
            yield candidate


def all_candidates(cost: NoiseCost, most: int) -> Iterator[MechanismCandidate]:
    """One candidate of every kind and size that a state of `most` vectors may allow, beaten ones too."""
    yield _make_candidate(IndependentGaussian(), cost)
    decay, rounds = cost.workload.decay, cost.workload.rounds
    if rounds <= _FEW_ROUNDS:
        return
    yield _make_candidate(fit_sizes(cost), cost)
    if BinaryTree(decay).memory_vectors(cost.workload) <= most:
        yield _make_candidate(BinaryTree(decay), cost)
    if not cost.workload.schedule.single_pass:
        # with few places a C that ends before a record comes back can be best
        for bands in range(2, most + 1):
            yield _make_candidate(BandedSquareRoot(decay, bands), cost)
    yield from _plain_candidates(cost, most)
    yield from _scaled_candidates(cost, most)


def _make_candidate(mechanism: Mechanism, cost: NoiseCost) -> MechanismCandidate:
    return MechanismCandidate(
        mechanism, mechanism.memory_vectors(cost.workload), math.sqrt(cost.evaluate(mechanism))
    )


def _plain_candidates(cost: NoiseCost, most: int) -> Iterator[MechanismCandidate]:
    if not most:
        return
    workload, loss = cost.workload, PlainLoss(cost)

    def candidate(fit: RootFit) -> MechanismCandidate:
        mechanism = _make_buffered(workload, fit)
        noise = mechanism.sensitivity(workload) * math.sqrt(loss.noise_energy(fit.theta, fit.phi))
        return MechanismCandidate(mechanism, mechanism.memory_vectors(workload), noise)

    single = fit_lambda(cost)
    yield candidate(single)
    for pairs, last_free in ((2, False), (2, True), (3, True)):
        if _count_vectors(workload, pairs, last_free) <= most:
            yield candidate(fit_roots(loss, pairs, last_free, single.theta))


def _scaled_candidates(cost: NoiseCost, most: int) -> Iterator[MechanismCandidate]:
    """In one pass with equal clips: there the scale follows from C."""
    workload = cost.workload
    if not workload.schedule.single_pass or not workload.equal_clips:
        return
    loss, around = ScaledLoss(cost), fit_lambda(cost).theta
    for pairs, last_free in ((1, False), (1, True), (2, True), (3, True)):
        if _count_vectors(workload, pairs, True) <= most:  # with a scale the last noise is kept in any case
            fit = fit_roots(loss, pairs, last_free, around)
            mechanism = _make_buffered(workload, fit).with_equal_columns(workload)
            yield MechanismCandidate(mechanism, mechanism.memory_vectors(workload), math.exp(fit.loss / 2.0))


def _make_buffered(workload: Workload, fit: RootFit) -> BufferedToeplitz:
    kind = LambdaCgd if len(fit.theta) == 1 and fit.phi == (0.0,) else BufferedToeplitz
    return kind(workload.decay, fit.theta, fit.phi)


def _count_vectors(workload: Workload, pairs: int, last_free: bool) -> int:
    return pairs + (last_free and workload.decay > 0.0)


def _choose_frugal(found: list[MechanismCandidate]) -> MechanismCandidate:
    enough = _NOISE_FACTOR * min(candidate.noise for candidate in found)
    return min(
        (candidate for candidate in found if candidate.noise <= enough), key=lambda c: (c.vector_count, c.noise)
    )


@dataclass(frozen=True)
class PublishedNoise:
    """Standard deviations per coordinate in what a run publishes."""

    queries: float
    """Root mean square over the response's queries."""
    output: float | None
    """None if the response has no output."""


@dataclass(frozen=True)
class MechanismComparison:
    """One mechanism's line."""

    sensitivity: Sensitivity
    """Also the standard deviation of fresh vectors."""
    rows_rms: float
    """Noise of the released sums, root mean square over the rounds."""
    rows_last: float
    """In the last round."""
    published_noise: PublishedNoise
    vector_count: int
    """The most that a state holds."""


def compare_mechanism(mechanism: Mechanism, response: NoiseResponse, workload: Workload) -> MechanismComparison:
    sensitivity = mechanism.certified(workload)
    rows = response.queries if response.output is None else np.vstack([response.queries, response.output])
    stds = (sensitivity.value * np.sqrt(output_variances(mechanism, rows, workload))).tolist()
    variance = mechanism.variance(workload)
    count = len(response.queries)
    return MechanismComparison(
        sensitivity=sensitivity,
        rows_rms=sensitivity.value * math.sqrt(float(np.mean(variance))),
        rows_last=sensitivity.value * math.sqrt(float(variance[-1])),
        published_noise=PublishedNoise(_rms(stds[:count]), None if response.output is None else stds[-1]),
        vector_count=mechanism.memory_vectors(workload),
    )


def least_published_noise(response: NoiseResponse, workload: Workload) -> PublishedNoise:
    """Lower bound for every mechanism with these clips; no one mechanism attains that of the queries."""
    queries, output = std_lower_bounds(response.queries, workload).tolist(), response.output
    return PublishedNoise(
        _rms(queries), None if output is None else float(std_lower_bounds(output[None], workload)[0])
    )


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))
