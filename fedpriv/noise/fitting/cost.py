"""Cost of a mechanism's noise in the points that a run publishes: its output and its queries.

A run releases T rows, the noisy running sums of rounds 1 … T.  A query is the point at which a round's gradients
are computed, and an increment is a record's contribution to a round, of norm clip_t at most.  A mechanism's noise
is B z for fresh independent normal vectors z.  With gradients fixed and no projection active, output and queries
are affine in the released rows: a published point is a constant plus h · (released rows), and a `NoiseResponse`
has the weights h, (T,), of each point.  A fit minimizes a mechanism's variance in the points, relative to lower
bounds LB of the standard deviation that hold for any mechanism:

    J = V_output / LB_output² + mean_t V_t / mean_t LB_t²

V is the variance in a published point, and V_t that in the query of round t, if the standard deviation of fresh
vectors is the mechanism's sensitivity (μ = 1 under zero-out).  Both terms are at least 1.  A response without an
output (theorems about the mean noise of the rows) has the second term alone.

Lower bounds: a number h · (released rows) = a · (increments), with a = h A and A the matrix of running sums, moves
by Σ clip_i |a_i| over a record's rounds i if the record moves its increments by their clips in the right
directions.  Noise for μ = 1 in that number alone needs at least this standard deviation.

Variances follow from linear maps of streams.  An optimizer maps released rows to queries, and a mechanism maps
fresh vectors to noise.  Both are affine and computed one round after the other (`LinearStream`).  A row of the
map, the weight of each round's input in one number, is the gradient of that number: `apply_adjoint` computes all
rows in one pass backwards, with a replicate for each row.  Mechanisms with a noise series need no backward pass,
since their noise is a convolution.  Fits filter signals along the last axis by rational functions, in sections of
first order, so that no small gap of two roots is a divisor (`filter_rational`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.noise.mechanism import Mechanism, MechanismState
from fedpriv.noise.sensitivity import heaviest_patterns
from fedpriv.noise.series import Floats, Workload
from fedpriv.participation.orders import MinSeparation, Phases

if TYPE_CHECKING:
    from torch import Tensor

_SEGMENT_ROUNDS = 1000
"""Rounds whose graph is in memory at a time."""


class LinearStream(Protocol):
    """Affine map from inputs to answers, computed round by round, with vectors of shape (rows, 1)."""

    def start(self, rows: int) -> "tuple[Tensor, ...]":
        """Return the state before round 1."""
        ...

    def advance(
        self, state: "tuple[Tensor, ...]", t: int, inputs: "Tensor"
    ) -> "tuple[tuple[Tensor, ...], Tensor]":
        """Return the state after round t, and the round's answer, (rows, 1).

        Args:
            state: State before round t.
            t: Round, from 1.
            inputs: Input of the round for every row, (rows, 1).
        """
        ...


class NoiseStream:
    """Noise of a mechanism as a stream from fresh vectors to rows of B z.

    The mechanism must take one fresh vector a round, without an axis for the number (`Mechanism.draws`).
    """

    def __init__(self, mechanism: Mechanism) -> None:
        """Make the stream.

        Raises:
            ValueError: The mechanism takes stacked fresh vectors in round 1.
        """
        if mechanism.draws(1) is not None:
            raise ValueError(f"{type(mechanism).__name__} takes several fresh vectors a round")
        self._mechanism = mechanism

    def start(self, rows: int) -> MechanismState:
        return self._mechanism.start()

    def advance(self, state: MechanismState, t: int, inputs: "Tensor") -> "tuple[MechanismState, Tensor]":
        noise, next_state = self._mechanism.noise(state, t, inputs)
        return next_state, noise


def apply_adjoint(stream: LinearStream, weights: Floats) -> Floats:
    """Compute the weight of every round's input in Σ_t weights[r, t] · answer_t, for each row r.

    The weights are the gradient of this sum with respect to the inputs, by automatic differentiation.  Rounds are
    processed in segments, the last segment first, so that only one segment's graph is in memory.

    Args:
        stream: Affine map from the inputs of all rounds to as many answers, run with a replicate for each row.
        weights: Weights of the answers, (rows, T).

    Returns:
        Weights of the inputs, (rows, T).
    """
    import torch  # slow to import, and needed only for streams

    rows, rounds = weights.shape
    starts = range(1, rounds + 1, _SEGMENT_ROUNDS)
    states = _segment_states(stream, rows, starts)
    answer_weights = torch.from_numpy(np.ascontiguousarray(weights.T))[..., None]
    input_weights = np.empty((rows, rounds))
    next_gradients: tuple[Tensor, ...] | None = None
    for start, state in zip(reversed(starts), reversed(states), strict=True):
        count = min(_SEGMENT_ROUNDS, rounds - start + 1)
        inputs = torch.zeros((count, rows, 1), dtype=torch.float64, requires_grad=True)
        start_state = tuple(vector.detach().clone().requires_grad_() for vector in state)
        end_state, answers = start_state, []
        for offset, vector in enumerate(inputs.unbind()):
            end_state, answer = stream.advance(end_state, start + offset, vector)
            answers.append(answer)
        total = torch.sum(torch.stack(answers) * answer_weights[start - 1 : start - 1 + count])
        if next_gradients is not None:  # gradients of the later segments' sum by this segment's last state
            total = total + sum(
                torch.sum(state_vector * gradient)
                for state_vector, gradient in zip(end_state, next_gradients, strict=True)
            )
        gradients = torch.autograd.grad(total, (inputs, *start_state), allow_unused=True, materialize_grads=True)
        input_weights[:, start - 1 : start - 1 + count] = gradients[0][..., 0].T.numpy()
        next_gradients = gradients[1:]
    return input_weights


def _segment_states(stream: LinearStream, rows: int, starts: range) -> "list[tuple[Tensor, ...]]":
    """Return the stream's state before every round of `starts`, for inputs of 0, as vectors (rows, 1).

    Args:
        stream: Affine map from inputs to answers, computed round by round.
        rows: Number of replicates of the stream.
        starts: First rounds of the segments, ascending from 1.
    """
    import torch

    zero_input = torch.zeros((rows, 1), dtype=torch.float64)
    states = [stream.start(rows)]
    with torch.no_grad():
        for start, next_start in pairwise(starts):
            state = states[-1]
            for t in range(start, next_start):
                state, _ = stream.advance(state, t, zero_input)
            states.append(state)
    return states


_MANY_ROUNDS = 6000
"""Number of rounds beyond which a fit looks at fewer queries."""


@dataclass(frozen=True)
class NoiseResponse:
    """Weights of the released rows 1 … T in some queries and in the output."""

    queries: Floats
    """(Q, T)."""
    output: Floats | None = None
    """(T,), or None if the output does not count."""

    @property
    def rounds(self) -> int:
        return int(self.queries.shape[1])


def max_queries(rounds: int) -> int:
    """Most queries at which a fit looks: 64, or 16 beyond 6,000 rounds."""
    return 64 if rounds <= _MANY_ROUNDS else 16


def rows_response(rounds: int, queries: int | None = None) -> NoiseResponse:
    """Return the response of some released rows themselves, for theorems about the mean noise of all rows.

    Args:
        rounds: T.
        queries: Largest number of these rows, which are evenly spaced, or None for `max_queries(rounds)`.
    """
    points = spaced_indices(rounds, max_queries(rounds) if queries is None else queries)
    return NoiseResponse(np.equal.outer(points, np.arange(rounds)).astype(np.float64))


def spaced_indices(rounds: int, count: int) -> NDArray[np.int64]:
    """Return `count` evenly spaced indices of 0 … rounds - 1, rounded, with the first and the last.

    If `count` is above `rounds`, all indices are returned.  If there is one index, it is 0.

    Args:
        rounds: Number of rounds, 1 or more.
        count: Number of indices, 1 or more.

    Example:
        >>> spaced_indices(10, 4).tolist()
        [0, 3, 6, 9]
    """
    return np.unique(np.round(np.linspace(0, rounds - 1, min(count, rounds))).astype(np.int64))


def output_variances(mechanism: Mechanism, rows: Floats, workload: Workload) -> Floats:
    """Compute the variance ‖h B‖² of the noise in h · (released rows) for every row h, (n,).

    B z is the mechanism's noise in the T releases, for fresh vectors z of variance 1.

    Args:
        mechanism: Mechanism of the noise.
        rows: Weights h of the released rows, (n, T).
        workload: Running sums.

    Raises:
        ValueError: The mechanism has to be run as a stream, and takes stacked fresh vectors in round 1.
    """
    if np.all(np.count_nonzero(rows, axis=1) == 1):  # every row weighs one release, whose variance is known
        return np.asarray(np.sum(rows**2 * mechanism.variance(workload), axis=1), np.float64)
    if (series := mechanism.noise_series(workload)) is not None:
        from scipy.signal import fftconvolve  # slow to import, and needed only for fits

        # B is Toeplitz, so that h B is a convolution, backwards in time.
        backwards = fftconvolve(rows[:, ::-1], series[None], axes=1)[:, : workload.rounds]
        return np.asarray(np.sum(backwards**2, axis=1), np.float64)

    return np.asarray(np.sum(apply_adjoint(NoiseStream(mechanism), rows) ** 2, axis=1), np.float64)


def filter_rational(signal: Floats, zeros: Sequence[float], poles: Sequence[float]) -> Floats:
    """Apply Π (1 - zero x) / Π (1 - pole x) to a signal (..., T), where x delays by one round.

    Factors are applied pair by pair, y_t = s_t - zero s_{t-1} + pole y_{t-1}.  The shorter list is filled with 0.

    Args:
        signal: Signal (..., T), filtered along the last axis.
        zeros: Roots of the numerator.
        poles: Roots of the denominator.

    Example:
        >>> filter_rational(np.array([1.0, 0.0, 0.0]), zeros=(), poles=(0.5,)).tolist()
        [1.0, 0.5, 0.25]
    """
    from scipy.signal import lfilter  # slow to import, and needed only for fits

    for zero, pole in zip_longest(zeros, poles, fillvalue=0.0):
        if zero != pole:
            signal = lfilter([1.0, -zero], [1.0, -pole], signal, axis=-1)
    return np.asarray(signal, np.float64)


def filter_delayed(signal: Floats, pole: float) -> Floats:
    """Apply x / (1 - pole x) to a signal (..., T), where x delays by one round.

    Args:
        signal: Signal (..., T), filtered along the last axis.
        pole: Root of the denominator.
    """
    from scipy.signal import lfilter

    return np.asarray(lfilter([0.0, 1.0], [1.0, -pole], signal, axis=-1), np.float64)


def sum_products(first: Floats, second: Floats) -> float:
    """Sum the products of the entries of two arrays of one shape."""
    # Without the threads of a matrix library, which wait for each other on a busy machine.
    return float(np.sum(first * second))


def increment_weights(rows: Floats, decay: float) -> Floats:
    """Compute the weights of increments h A for every row h: (n, T) -> (n, T).

    Args:
        rows: Weights of the released rows, (n, T).
        decay: Decay of the running sums, which never restart.
    """
    return filter_rational(rows[:, ::-1], zeros=(), poles=(decay,))[:, ::-1]


def std_lower_bounds(rows: Floats, workload: Workload) -> Floats:
    """Compute lower bounds of the noise in h · (released rows) for each row h: (n, T) -> (n,).

    The bounds are standard deviations, for noise of μ = 1 under zero-out by any mechanism.  With A the matrix of
    running sums and a = h A, the bound of a row is the largest Σ clip_i |a_i| over the rounds i of one record.

    Args:
        rows: Weights of the released rows, (n, T).
        workload: Running sums that never restart, with a fixed order or separated participations.

    Raises:
        InputError: The run is phased.
    """
    displacements = np.abs(increment_weights(rows, workload.decay)) * workload.clips
    schedule = workload.schedule
    if isinstance(schedule, Phases):
        raise InputError("noise of a phased run lies in its empty rounds: nothing is fitted to it")
    if isinstance(schedule, MinSeparation):
        return heaviest_patterns(displacements, schedule)
    # (n, epochs, positions): the sum over the epochs is that of a record, and the largest record counts.
    rounds_per_epoch = min(schedule.rounds_per_epoch, workload.rounds)
    padded = np.pad(displacements, ((0, 0), (0, -workload.rounds % rounds_per_epoch)))
    return np.asarray(np.max(padded.reshape(len(rows), -1, rounds_per_epoch).sum(axis=1), axis=1), np.float64)


@dataclass(frozen=True)
class NoiseCost:
    """Cost J of a mechanism's noise in one response under one workload."""

    workload: Workload
    """Running sums, their clips and the participation."""
    weights: Floats
    """Weights R of the releases in each point, divided so that J = sensitivity² · ‖R B‖², (n, T)."""

    def evaluate(self, mechanism: Mechanism) -> float:
        """Compute J with the mechanism's certified sensitivity."""
        variances = output_variances(mechanism, self.weights, self.workload)
        return float(mechanism.sensitivity(self.workload) ** 2 * np.sum(variances))


def make_noise_cost(response: NoiseResponse, workload: Workload) -> NoiseCost:
    """Return the cost of noise for a response, with the points' weights divided by lower bounds.

    Queries are divided by √(number of queries · mean of their squared lower bounds), the output by its own bound.

    Args:
        response: Weights of the released rows in the published points, not all 0 in the queries or in the output.
        workload: Running sums, with a fixed order or separated participations.

    Raises:
        InputError: The response is for another number of rounds, or the lower bounds are not known, since the sums
            restart or the run is phased.
    """
    if response.rounds != workload.rounds:
        raise InputError(f"the response is for {response.rounds} rounds, the workload has {workload.rounds}")
    if workload.period is not None:
        raise InputError("noise is not fitted to sums that restart")
    mean_bound = float(np.mean(std_lower_bounds(response.queries, workload) ** 2))
    rows = response.queries / np.sqrt(len(response.queries) * mean_bound)
    if response.output is not None:
        output = response.output[None]
        rows = np.concatenate([rows, output / std_lower_bounds(output, workload)])
    return NoiseCost(workload, rows)
