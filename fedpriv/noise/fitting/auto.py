"""Choice of `mechanism = "auto"`: the least state among mechanisms that are nearly the best for a run.

The run is given by its workload of running sums, and by the weights of its releases in the published points.  A
fit takes public numbers only (the optimizer's coefficients, clips, the schedule), before round 1.  A forms running
sums of the sums s of records' contributions, a record is charged for moving C s, and the noise is A C^-1 z for
fresh normal vectors z.  λ-CGD and buffers form the noise from one or a few decaying sums of earlier vectors, and a
banded C has few diagonals.  Scaled noise is that of a `column_scale` D: the noise of increment t, a record's
clipped contribution to round t, is divided by D_t.

Mechanisms are compared by J (`NoiseCost`), the sum of their noise variances in the output and in the queries, each
relative to a lower bound.  A candidate is a mechanism with the number of vectors in its state and its noise √J.

The best sizes of scheduled noise have a closed form.  J is the squared sensitivity times the variance in the
points.  With fresh noise d_t z_t the variance is Σ_t d_t² w_t, where w_t is the sum over the points of the squared
weight of round t.  The squared sensitivity to a record that has moved the sum of round t by m_t is Σ_t m_t²/d_t².
By Cauchy and Schwarz the least product is (Σ_t m_t √w_t)², at d_t² = m_t / √w_t.
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
"""Least √w relative to the largest.

A round with little weight gets much noise, but not without limit.
"""


def fit_sizes(cost: NoiseCost) -> ScheduledGaussian:
    """Fit the sizes d_t of scheduled noise, independent noise of a different size in each round.

    d_t² = m_t / √w_t as in the module's closed form, with m_t from `max_displacements`.  w_t is smoothed over
    rounds, and √w_t is at least a thousandth of the largest.  But for that change of w_t, the sizes are the best
    ones if one record moves every sum the most, as with prefix sums and equal clips.

    Args:
        cost: Cost of noise for the run, whose `weights` (n, T) give w_t.
    """
    workload = cost.workload
    weights = np.sqrt(_neighbour_weights(np.sum(cost.weights**2, axis=0), len(cost.weights)))
    weights = np.maximum(weights, _MIN_WEIGHT * np.max(weights))
    sizes = np.sqrt(max_displacements(workload) / weights)
    return ScheduledGaussian(tuple((sizes / sizes[0]).tolist()), workload.decay)


def _neighbour_weights(weights: Floats, rows: int) -> Floats:
    """Smooth the weights of rounds between queries, (T,).

    A fit of many rounds looks at a few of the queries only.  A round between two of these may have weight in other
    queries, and noise there must not seem free.  So round t gets the smaller one of two maxima: of the weights of
    rounds t - reach … t, and of rounds t … t + reach, where `reach` is at least the distance of two such queries.
    Weights are unchanged if there are more rows than rounds, or as many and no weight is 0.

    Args:
        weights: Squared weight of each round, summed over the rows, (T,).
        rows: Number of rows of weights: the queries at which the fit looks, and perhaps the output.
    """
    reach = -(-len(weights) // max(1, rows - 2))  # one of the rows may be the output
    if len(weights) < rows or (len(weights) == rows and np.all(weights)):
        return weights
    window_maxima = np.max(np.lib.stride_tricks.sliding_window_view(np.pad(weights, reach), reach + 1), axis=1)
    return np.asarray(np.minimum(window_maxima[: len(weights)], window_maxima[reach:]))


def max_displacements(workload: Workload) -> Floats:
    """Compute the largest distance by which a record can have moved the running sum of every round, (T,).

    In a round either the record takes part, or its distance is decay times that of the round before.  A record
    that takes part in round t, and took part every `spacing` rounds before (the rounds of an epoch, or the least
    separation), has moved the sum by r_t = clip_t + decay^spacing · r_{t-spacing}.  In a single pass it took part
    in no earlier round, and in separated participations in at most `max_rounds_per_record` rounds.  For the latter
    with unequal clips the result is an approximation.

    Args:
        workload: Clips, decay and participation, for sums that never restart.

    Raises:
        InputError: The participation is secret, or has fresh permutations.
    """
    order, rounds = workload.public_order, workload.rounds
    spacing, last_round_distance = rounds, rounds
    if not order.single_pass:
        spacing = order.min_separation if isinstance(order, MinSeparation) else order.rounds_per_epoch
        last_round_distance = order.max_rounds_per_record * spacing if isinstance(order, MinSeparation) else rounds
    clips, decay = workload.clips.tolist(), workload.decay
    record_displacements, distances = list[float](), list[float]()
    for t, clip in enumerate(clips):
        record_displacements.append(
            clip + (decay**spacing * record_displacements[t - spacing] if t >= spacing else 0.0)
        )
        if t >= last_round_distance:  # beyond `max_rounds_per_record` rounds, the earliest one does not count
            record_displacements[t] -= decay**last_round_distance * clips[t - last_round_distance]
        distances.append(max(record_displacements[t], decay * distances[t - 1] if t else 0.0))
    return np.array(distances)


_NOISE_FACTOR = 1.01
"""Factor of noise that is accepted for less memory, and that scaling must save to be worth it."""

_TIE_TOLERANCE = 1e-6
"""Relative difference of noise up to which two mechanisms are tied."""
_FEW_ROUNDS = 2
"""Most rounds for which noise is independent without a fit."""


@dataclass(frozen=True)
class MechanismCandidate:
    """Mechanism fitted to a run, with its memory and the noise that it leaves in published points."""

    mechanism: Mechanism
    """Mechanism with its fitted numbers."""
    vector_count: int
    """Most vectors in the mechanism's state."""
    noise: float
    """√J, noise relative to lower bounds."""

    @property
    def name(self) -> str:
        return self.mechanism.label

    @property
    def is_scaled(self) -> bool:
        return isinstance(self.mechanism, BufferedToeplitz) and bool(self.mechanism.column_scale)


def fit_named(
    cost: NoiseCost, name: str, options: MechanismOptions, *, scalable: bool = True
) -> MechanismCandidate:
    """Fit a mechanism that a scenario names without numbers, and return it with its memory and noise.

    Args:
        cost: Cost of noise for the run.
        name: "auto", which chooses among several mechanisms, "scheduled", "lambda-cgd" or "blt".
        options: Options of the scenario: the most vectors in the state, and whether "lambda-cgd" and "blt" scale
            noise.
        scalable: Whether "auto" may scale noise.

    Raises:
        InputError: No mechanism of that name fits into the state, its noise cannot be scaled, or the participation
            is secret or has fresh permutations.
    """
    if name == AUTO:
        return fit_auto(cost, options.max_vectors, scalable=scalable)
    if name == ScheduledGaussian.name:
        return _make_candidate(fit_sizes(cost), cost)
    kind = LambdaCgd if name == LambdaCgd.name else BufferedToeplitz
    return fit_kind(cost, kind, options.max_vectors, scaled=options.scale)


def fit_auto(cost: NoiseCost, max_vectors: int = 4, *, scalable: bool = True) -> MechanismCandidate:
    """Fit candidates, and return one of little state whose √J is nearly the best (`choose_candidate`).

    Args:
        cost: Cost of noise for the run.
        max_vectors: Most vectors in the state.
        scalable: Whether noise may be scaled.

    Raises:
        InputError: `max_vectors` is negative, or the participation is secret or has fresh permutations.
    """
    if max_vectors < 0:
        raise InputError(f"max_vectors = {max_vectors}: a state has 0 or more vectors")
    return choose_candidate(
        [
            candidate
            for candidate in undominated_candidates(cost, max_vectors)
            if scalable or not candidate.is_scaled
        ]
    )


def choose_candidate(candidates: Sequence[MechanismCandidate]) -> MechanismCandidate:
    """Choose the candidate that "auto" uses.

    Of those with scaled noise and of those without, one each is chosen: the least state among those within 1 % of
    the best √J, and of these the least √J.  The scaled one is used if the other's √J is more than 1 % larger.

    Args:
        candidates: Candidates, at least one of them without scaled noise.
    """
    plain = _choose_frugal([candidate for candidate in candidates if not candidate.is_scaled])
    scaled = [candidate for candidate in candidates if candidate.is_scaled]
    if not scaled or _choose_frugal(scaled).noise * _NOISE_FACTOR >= plain.noise:
        return plain
    return _choose_frugal(scaled)


def fit_kind(
    cost: NoiseCost, kind: type[BufferedToeplitz], max_vectors: int, *, scaled: bool
) -> MechanismCandidate:
    """Return the fitted candidate of one kind with the least J, of at most `max_vectors` vectors.

    Args:
        cost: Cost of noise for the run.
        kind: `LambdaCgd`, or `BufferedToeplitz` for any number of roots.
        max_vectors: Most vectors in the state.
        scaled: Whether noise is scaled.

    Raises:
        InputError: No candidate has so few vectors, noise cannot be scaled, or the participation is secret or has
            fresh permutations.
    """
    candidates = _scaled_candidates(cost, max_vectors) if scaled else _plain_candidates(cost, max_vectors)
    candidates_in_limit = [
        candidate
        for candidate in candidates
        if candidate.vector_count <= max_vectors
        and (kind is BufferedToeplitz or isinstance(candidate.mechanism, kind))
    ]
    if not candidates_in_limit:
        raise InputError(
            f'mechanism = "{kind.name}": max_vectors = {max_vectors} are too few'
            + (", or noise cannot be scaled here: it takes one pass with equal clips" if scaled else "")
        )
    best = min(candidates_in_limit, key=lambda candidate: candidate.noise)
    fitted = best.mechanism
    assert isinstance(fitted, BufferedToeplitz)
    return MechanismCandidate(
        kind(fitted.decay, fitted.theta, fitted.phi, fitted.column_scale), best.vector_count, best.noise
    )


def undominated_candidates(cost: NoiseCost, max_vectors: int) -> Iterator[MechanismCandidate]:
    """Yield candidates of at most `max_vectors` vectors that none yielded before dominates.

    A candidate dominates another if it has at most as many vectors and at most as much noise, where noise within a
    relative 1e-6 counts as equal.

    Args:
        cost: Cost of noise for the run.
        max_vectors: Most vectors in the state.
    """
    undominated: list[MechanismCandidate] = []
    for candidate in all_candidates(cost, max_vectors):
        is_dominated = any(
            other.vector_count <= candidate.vector_count
            and other.noise <= candidate.noise * (1.0 + _TIE_TOLERANCE)
            for other in undominated
        )
        if candidate.vector_count <= max_vectors and not is_dominated:
            undominated.append(candidate)
            yield candidate


def all_candidates(cost: NoiseCost, max_vectors: int) -> Iterator[MechanismCandidate]:
    """Yield candidates of several kinds and sizes.

    The kinds are independent and scheduled noise, and as far as the state allows a tree, banded square roots if
    records take part in several rounds, λ-CGD, and buffers, in one pass with equal clips also with scaled noise.
    Runs of one or two rounds get independent noise alone.

    Args:
        cost: Cost of noise for the run.
        max_vectors: Most vectors in the state, 0 or more.
    """
    yield _make_candidate(IndependentGaussian(), cost)
    decay, rounds = cost.workload.decay, cost.workload.rounds
    if rounds <= _FEW_ROUNDS:
        return
    yield _make_candidate(fit_sizes(cost), cost)
    if BinaryTree(decay).memory_vectors(cost.workload) <= max_vectors:
        yield _make_candidate(BinaryTree(decay), cost)
    if not cost.workload.schedule.single_pass:
        # With few rounds an epoch, a C whose bands end before a record's next round can be best.
        for bands in range(2, max_vectors + 1):
            yield _make_candidate(BandedSquareRoot(decay, bands), cost)
    yield from _plain_candidates(cost, max_vectors)
    yield from _scaled_candidates(cost, max_vectors)


def _make_candidate(mechanism: Mechanism, cost: NoiseCost) -> MechanismCandidate:
    return MechanismCandidate(
        mechanism, mechanism.memory_vectors(cost.workload), math.sqrt(cost.evaluate(mechanism))
    )


def _plain_candidates(cost: NoiseCost, max_vectors: int) -> Iterator[MechanismCandidate]:
    """Yield λ-CGD, and other buffered noise as far as the state allows, without scaled noise.

    Buffers are fitted with at most two pairs of a pole θ_i and a zero φ_i of `BufferedToeplitz`, with φ_2 = 0 or
    φ_2 fitted (`last_free`), or with at most three pairs and φ_3 fitted.

    Args:
        cost: Cost of noise for the run.
        max_vectors: Most vectors in the state.
    """
    if not max_vectors:
        return
    workload, loss = cost.workload, PlainLoss(cost)

    def candidate(fit: RootFit) -> MechanismCandidate:
        mechanism = _make_buffered(workload, fit)
        # √J is the sensitivity times the norm of the noise in the points.
        noise = mechanism.sensitivity(workload) * math.sqrt(loss.noise_energy(fit.theta, fit.phi))
        return MechanismCandidate(mechanism, mechanism.memory_vectors(workload), noise)

    single = fit_lambda(cost)
    yield candidate(single)
    for pairs, last_free in ((2, False), (2, True), (3, True)):
        if _count_vectors(workload, pairs, last_free) <= max_vectors:
            yield candidate(fit_roots(loss, pairs, last_free, single.theta))


def _scaled_candidates(cost: NoiseCost, max_vectors: int) -> Iterator[MechanismCandidate]:
    """Yield buffered noise with a scale, for one pass with equal clips, and nothing for other workloads.

    Candidates are fitted with at most 1, 2 or 3 pairs of a pole θ_i and a zero φ_i of `BufferedToeplitz` as far as
    the state allows, with the last φ fitted (`last_free`), and with one pair also for φ_1 = 0.

    Args:
        cost: Cost of noise for the run.
        max_vectors: Most vectors in the state.
    """
    workload = cost.workload
    if not workload.schedule.single_pass or not workload.equal_clips:
        return
    loss, lambda_cgd_root = ScaledLoss(cost), fit_lambda(cost).theta
    for pairs, last_free in ((1, False), (1, True), (2, True), (3, True)):
        # The state of scaled noise has a vector for φ_m even if it is 0.
        if _count_vectors(workload, pairs, True) <= max_vectors:
            fit = fit_roots(loss, pairs, last_free, lambda_cgd_root)
            mechanism = _make_buffered(workload, fit).with_equal_columns(workload)
            # The loss of this fit is log J, so that exp(loss / 2) is √J.
            yield MechanismCandidate(mechanism, mechanism.memory_vectors(workload), math.exp(fit.loss / 2.0))


def _make_buffered(workload: Workload, fit: RootFit) -> BufferedToeplitz:
    kind = LambdaCgd if len(fit.theta) == 1 and fit.phi == (0.0,) else BufferedToeplitz
    return kind(workload.decay, fit.theta, fit.phi)


def _count_vectors(workload: Workload, pairs: int, last_free: bool) -> int:
    return pairs + (last_free and workload.decay > 0.0)


def _choose_frugal(candidates: list[MechanismCandidate]) -> MechanismCandidate:
    max_noise = _NOISE_FACTOR * min(candidate.noise for candidate in candidates)
    return min(
        (candidate for candidate in candidates if candidate.noise <= max_noise),
        key=lambda candidate: (candidate.vector_count, candidate.noise),
    )


@dataclass(frozen=True)
class PublishedNoise:
    """Standard deviations per coordinate in the points that a run publishes."""

    queries: float
    """Root mean square over the response's queries."""
    output: float | None
    """Standard deviation in the output, or None if the response has no output."""


@dataclass(frozen=True)
class MechanismComparison:
    """One mechanism's line in a comparison: standard deviations per coordinate for μ = 1 under zero-out."""

    sensitivity: Sensitivity
    """Sensitivity, which is also the standard deviation of fresh vectors."""
    rows_rms: float
    """Noise of the released sums, root mean square over the rounds."""
    rows_last: float
    """Noise of the released sum in the last round."""
    published_noise: PublishedNoise
    """Noise in the published queries and in the output."""
    vector_count: int
    """Most vectors in a state."""


def compare_mechanism(mechanism: Mechanism, response: NoiseResponse, workload: Workload) -> MechanismComparison:
    """Compute a mechanism's line in a comparison, for noise of μ = 1 under zero-out.

    Fresh vectors then have the sensitivity as their standard deviation.

    Args:
        mechanism: Mechanism of the line.
        response: Weights of the released rows (sums with noise of rounds 1 … T) in the published points.
        workload: Running sums.

    Raises:
        InputError: The mechanism does not factor the workload, or has no certificate for its participation.
        ValueError: The noise in the points is not known, since rounds take stacked fresh vectors.
    """
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
    """Compute a lower bound of the published noise of every mechanism, for noise of μ = 1 under zero-out.

    Args:
        response: Weights of the released rows in the published points.
        workload: Running sums that never restart, with a fixed order or separated participations.

    Raises:
        InputError: The run is phased.
    """
    query_bounds, output = std_lower_bounds(response.queries, workload).tolist(), response.output
    return PublishedNoise(
        _rms(query_bounds), None if output is None else float(std_lower_bounds(output[None], workload)[0])
    )


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))
