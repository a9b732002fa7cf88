"""Linear maps of streams, read off the parts that compute them, by running them backwards.

An optimizer turns released rows into queries, a mechanism turns fresh vectors into noise.  Both are affine, one
round after the other.  A row of the map, how much each round's input weighs in one number, is the gradient of
that number: one backward pass for all rows at once, a row a replicate.
"""

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedpriv.noise.mechanism import Mechanism, MechanismState
from fedpriv.noise.workload import Floats

_SEGMENT = 1000  # rounds whose graph is held at once


class Stream(Protocol):
    """A state machine over vectors of shape (rows, 1)."""

    def start(self, rows: int) -> tuple[Tensor, ...]:
        """The state before round 1."""
        ...

    def advance(self, state: tuple[Tensor, ...], t: int, given: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
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

    def advance(self, state: MechanismState, t: int, given: Tensor) -> tuple[MechanismState, Tensor]:
        noise, after = self._mechanism.noise(state, t, given)
        return after, noise


def pulled_back(stream: Stream, weights: Floats) -> Floats:
    """Weigh every round's input in Σ_t weights[r, t] · answer_t, for each row r; (rows, T) -> (rows, T).

    Memory is for some rounds at a time: states in between are computed forwards once and kept.
    """
    rows, rounds = weights.shape
    starts = range(1, rounds + 1, _SEGMENT)
    states = _states(stream, rows, starts)
    wanted = torch.from_numpy(np.ascontiguousarray(weights.T))[..., None]
    pulled = np.empty((rows, rounds))
    later: tuple[Tensor, ...] | None = None
    for start, state in zip(reversed(starts), reversed(states), strict=True):
        count = min(_SEGMENT, rounds - start + 1)
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


@torch.no_grad()
def _states(stream: Stream, rows: int, starts: range) -> list[tuple[Tensor, ...]]:
    """The state before every round of `starts`, if every input is 0."""
    still = torch.zeros((rows, 1), dtype=torch.float64)
    states = [stream.start(rows)]
    for start, following in pairwise(starts):
        state = states[-1]
        for t in range(start, following):
            state, _ = stream.advance(state, t, still)
        states.append(state)
    return states
