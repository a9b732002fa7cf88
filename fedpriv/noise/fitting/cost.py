"""Noise cost: the weight of each released row's noise in what a run publishes, its output and its queries.

With gradients fixed and no projection active, both are affine in the released rows.  The variance that a mechanism
leaves there is that of rational filters along the last axis, in sections of first order: nothing divides by small
gaps.  What a fit makes small compares it with lower bounds that hold for any mechanism:

    J = V_output / LB_output² + mean_t V_t / mean_t LB_t²

V is the variance in what is published for noise sized to sensitivity 1; both terms are 1 at best.  A row without
an output in its `Response` (theorems that ask for the mean noise of the rows) has the second term alone.

The lower bounds: a number h · (released rows) = a · (increments) with a = h A moves by Σ clip_i |a_i| if a record
moves its increments by their clips in the right directions.  A mechanism of sensitivity 1 that releases that
number alone needs at least this standard deviation.

Linear maps of streams, read off the parts that compute them, by running them backwards.

An optimizer turns released rows into queries, a mechanism turns fresh vectors into noise.  Both are affine, one
round after the other.  A row of the map, how much each round's input weighs in one number, is the gradient of
that number: one backward pass for all rows at once, a row a replicate.
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

_SEGMENT_ROUNDS = 1000  # rounds whose graph is held at once


class LinearStream(Protocol):
    """A state machine over vectors of shape (rows, 1)."""

    def start(self, rows: int) -> "tuple[Tensor, ...]":
        """The state before round 1."""
        ...

    def advance(self, state: "tuple[Tensor, ...]", t: int, given: "Tensor") -> "tuple[tuple[Tensor, ...], Tensor]":
        """The state after round t, and what the round answers, (rows, 1)."""
        ...


class NoiseStream:
    """The noise of a mechanism: fresh vectors in, rows of B z out.  It must take one fresh vector a round."""

    def __init__(self, mechanism: Mechanism) -> None:
        if mechanism.draws(1) is not None:
            raise ValueError(f"{type(mechanism).__name__} takes several fresh vectors a round")
        self._mechanism = mechanism

    def start(self, rows: int) -> MechanismState:
        return self._mechanism.start()

    def advance(self, state: MechanismState, t: int, given: "Tensor") -> "tuple[MechanismState, Tensor]":
        noise, after = self._mechanism.noise(state, t, given)
        return after, noise


def apply_adjoint(stream: LinearStream, weights: Floats) -> Floats:
    """Weigh every round's input in Σ_t weights[r, t] · answer_t, for each row r; (rows, T) -> (rows, T).

    Memory is for some rounds at a time: states in between are computed forwards once and kept.
    """
    import torch  # slow to import: only mechanisms without a series pay for it

    rows, rounds = weights.shape
    starts = range(1, rounds + 1, _SEGMENT_ROUNDS)
    states = _segment_states(stream, rows, starts)
    wanted = torch.from_numpy(np.ascontiguousarray(weights.T))[..., None]
    pulled = np.empty((rows, rounds))
    later: tuple[Tensor, ...] | None = None
    for start, state in zip(reversed(starts), reversed(states), strict=True):
        count = min(_SEGMENT_ROUNDS, rounds - start + 1)
        given = torch.zeros((count, rows, 1), dtype=torch.float64, requires_grad=True)
        held = tuple(vector.detach().clone().requires_grad_() for vector in state)
        after, answers = held, []
        for offset, vector in enumerate(given.unbind()):
            after, answer = stream.advance(after, start + offset, vector)
            answers.append(answer)
        total = torch.sum(torch.stack(answers) * wanted[start - 1 : start - 1 + count])
        if later is not None:
            total = total + sum(torch.sum(ours * theirs) for ours, theirs in zip(after, later, strict=True))
        gradients = torch.autograd.grad(total, (given, *held), allow_unused=True, materialize_grads=True)
        pulled[:, start - 1 : start - 1 + count] = gradients[0][..., 0].T.numpy()
        later = gradients[1:]
    return pulled


def _segment_states(stream: LinearStream, rows: int, starts: range) -> "list[tuple[Tensor, ...]]":
    """The state before every round of `starts`, if every input is 0."""
    import torch

    still = torch.zeros((rows, 1), dtype=torch.float64)
    states = [stream.start(rows)]
    with torch.no_grad():
        for start, following in pairwise(starts):
            state = states[-1]
            for t in range(start, following):
                state, _ = stream.advance(state, t, still)
            states.append(state)
    return states


_MANY_ROUNDS = 6000


@dataclass(frozen=True)
class NoiseResponse:
    """Weights of the released rows 1 … T in some queries, (Q, T), and in the output, (T,), if that counts."""

    queries: Floats
    output: Floats | None = None

    @property
    def rounds(self) -> int:
        return int(self.queries.shape[1])


def max_queries(rounds: int) -> int:
    """Number of queries that a fit looks at: 64, beyond 6,000 rounds 16."""
    return 64 if rounds <= _MANY_ROUNDS else 16


def rows_response(rounds: int, queries: int | None = None) -> NoiseResponse:
    """The released rows themselves: for theorems that ask for their mean noise (normalized SGD)."""
    points = spaced_indices(rounds, max_queries(rounds) if queries is None else queries)
    return NoiseResponse(np.equal.outer(points, np.arange(rounds)).astype(np.float64))


def spaced_indices(rounds: int, count: int) -> NDArray[np.int64]:
    """At most `count` of 0 … rounds - 1, the first and the last among them."""
    return np.unique(np.round(np.linspace(0, rounds - 1, min(count, rounds))).astype(np.int64))


def output_variances(mechanism: Mechanism, rows: Floats, workload: Workload) -> Floats:
    """The variance in every row of `rows`, for fresh vectors of variance 1; (n, T) -> (n,).

    Read off the mechanism's streaming where it has no series, which takes torch.
    """
    if np.all(np.count_nonzero(rows, axis=1) == 1):  # each looks at one release
        return np.asarray(np.sum(rows**2 * mechanism.variance(workload), axis=1), np.float64)
    if (series := mechanism.noise_series(workload)) is not None:
        from scipy.signal import fftconvolve  # slow to import: only fits pay for it

        backwards = fftconvolve(rows[:, ::-1], series[None], axes=1)[:, : workload.rounds]
        return np.asarray(np.sum(backwards**2, axis=1), np.float64)

    return np.asarray(np.sum(apply_adjoint(NoiseStream(mechanism), rows) ** 2, axis=1), np.float64)


def filter_rational(signal: Floats, zeros: Sequence[float], poles: Sequence[float]) -> Floats:
    """Π (1 - zero x) / Π (1 - pole x) applied to `signal` (..., T); x delays by one."""
    from scipy.signal import lfilter  # half a second to import: only fits pay for it

    for zero, pole in zip_longest(zeros, poles, fillvalue=0.0):
        if zero != pole:
            signal = lfilter([1.0, -zero], [1.0, -pole], signal, axis=-1)
    return np.asarray(signal, np.float64)


def filter_delayed(signal: Floats, pole: float) -> Floats:
    """x / (1 - pole x) applied to `signal` (..., T)."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([0.0, 1.0], [1.0, -pole], signal, axis=-1), np.float64)


def sum_products(left: Floats, right: Floats) -> float:
    """The sum of products, without the threads of a matrix library: on a busy machine they wait for each other."""
    return float(np.sum(left * right))


def increment_weights(rows: Floats, decay: float) -> Floats:
    """h A for every row h; (n, T) -> (n, T)."""
    return filter_rational(rows[:, ::-1], zeros=(), poles=(decay,))[:, ::-1]


def std_lower_bounds(rows: Floats, workload: Workload) -> Floats:
    """The least standard deviation in h · (released rows) for each row h; (n, T) -> (n,)."""
    moved = np.abs(increment_weights(rows, workload.decay)) * workload.clips
    schedule = workload.schedule
    if isinstance(schedule, Phases):
        raise InputError("noise of a phased run lies in its empty rounds: nothing is fitted to it")
    if isinstance(schedule, MinSeparation):
        return heaviest_patterns(moved, schedule)
    rounds_per_epoch = min(schedule.rounds_per_epoch, workload.rounds)
    padded = np.pad(moved, ((0, 0), (0, -workload.rounds % rounds_per_epoch)))
    return np.asarray(np.max(padded.reshape(len(rows), -1, rounds_per_epoch).sum(axis=1), axis=1), np.float64)


@dataclass(frozen=True)
class NoiseCost:
    """J of one row's response under one workload, all of it public before round 1."""

    workload: Workload
    weights: Floats
    """Responses, weighted so that J is the square of sensitivity · ‖rows B‖; (n, T)."""

    def evaluate(self, mechanism: Mechanism) -> float:
        """J, with the mechanism's certified sensitivity."""
        variances = output_variances(mechanism, self.weights, self.workload)
        return float(mechanism.sensitivity(self.workload) ** 2 * np.sum(variances))


def make_noise_cost(response: NoiseResponse, workload: Workload) -> NoiseCost:
    """InputError for sums that restart, and where the lower bounds are not known."""
    if response.rounds != workload.rounds:
        raise InputError(f"the response is for {response.rounds} rounds, the workload has {workload.rounds}")
    if workload.period is not None:
        raise InputError("noise is not fitted to sums that restart")
    least = float(np.mean(std_lower_bounds(response.queries, workload) ** 2))
    rows = response.queries / np.sqrt(len(response.queries) * least)
    if response.output is not None:
        output = response.output[None]
        rows = np.concatenate([rows, output / std_lower_bounds(output, workload)])
    return NoiseCost(workload, rows)
