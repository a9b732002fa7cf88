"""What a run publishes as a linear map of its released rows, read off the row's own optimizer.

There is no second formula to keep in step with it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.estimators.round import Round
from fedpriv.fitting.adjoint import pulled_back
from fedpriv.fitting.response import Response, most_queries, spaced
from fedpriv.mechanisms.workload import Floats
from fedpriv.optimizers import Optimizer

_NO_RADIUS = 1e100
"""So large that no projection bites; finite, because the gradient of a projection on an infinite ball is nan."""

_LINEAR_FOR = 4
_ROUNDING = 1e-9


def response_of(
    optimizer: Optimizer, round_of: Callable[[int], Round], rounds: int, queries: int | None = None
) -> Response:
    """Weights in the output after `rounds` rounds, and in evenly spaced points of x_2 … x_T and the output.

    `round_of(t)` is the estimator's public record of round t.  `queries` bounds how many points are looked at;
    `most_queries` if left out.  InputError for an optimizer that is not linear in what is released.
    """
    probe = _Published(optimizer, round_of, (False, True))
    _check_linear(probe, rounds)
    # anytime SGD publishes x_T, which was asked at: it is one point, not two
    points = rounds - 1 if rounds > 1 and _publishes_last_query(probe) else rounds
    chosen = spaced(points, most_queries(rounds) if queries is None else queries)
    weights = np.zeros((len(chosen) + 1, rounds))
    weights[np.arange(len(chosen)), chosen] = 1.0
    weights[-1, -1] = 1.0
    outputs = (*(chosen == rounds - 1).tolist(), True)  # not the query that a further round would ask at
    pulled = pulled_back(_Published(optimizer, round_of, outputs), weights)
    return Response(pulled[:-1], pulled[-1])


class _Published:
    """An optimizer as a stream: the answer of round t is the query of round t + 1, or in some rows the output."""

    def __init__(self, optimizer: Optimizer, round_of: Callable[[int], Round], outputs: tuple[bool, ...]) -> None:
        self._optimizer = _unbounded(optimizer)
        self._round_of = round_of
        self._outputs = torch.tensor(outputs).unsqueeze(-1)
        self._kind = type(self._optimizer.start(torch.ones((1, 1), dtype=torch.float64)))

    def start(self, rows: int) -> tuple[Tensor, ...]:
        # from anywhere but 0, where a norm has no gradient
        state: tuple[Tensor, ...] = self._optimizer.start(torch.ones((rows, 1), dtype=torch.float64))
        return state

    def advance(self, state: tuple[Tensor, ...], t: int, given: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        after: Any = self._optimizer.update(self._kind(*state), given, self._round_of(t))
        return after, torch.where(self._outputs, self._optimizer.output(after), self._optimizer.query(after))


def _unbounded(optimizer: Any) -> Any:
    if "radius" not in {field.name for field in dataclasses.fields(optimizer)}:
        return optimizer
    return dataclasses.replace(optimizer, radius=_NO_RADIUS)


@torch.no_grad()
def _probed(stream: _Published, rounds: int, factor: float) -> Floats:
    """Query and output after each of the first rounds, for inputs that are `factor` times fixed ones; (t, 2)."""
    state, answers = stream.start(2), []
    for t in range(1, rounds + 1):
        given = torch.full((2, 1), factor * (-1.0) ** t / t, dtype=torch.float64)
        state, answer = stream.advance(state, t, given)
        answers.append(answer[:, 0].numpy())
    return np.array(answers)


def _check_linear(stream: _Published, rounds: int) -> None:
    """Whether twice the input moves every point twice as far, over the first rounds."""
    still, once, twice = (_probed(stream, min(rounds, _LINEAR_FOR), factor) for factor in (0.0, 1.0, 2.0))
    if not np.allclose(twice - still, 2.0 * (once - still), rtol=_ROUNDING, atol=_ROUNDING):
        raise InputError("the row's optimizer is not linear in what is released: noise cannot be fitted to it")


def _publishes_last_query(stream: _Published) -> bool:
    (asked, _), (_, output) = _probed(stream, 2, 1.0).tolist()
    return bool(asked == output)
