"""What a server optimizer is: it asks at a point, consumes what is released there, and has an output."""

from typing import Any, Protocol

import torch
from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.replicates.certain import never_above
from fedpriv.replicates.columns import Scalar


class Optimizer(Protocol):
    """A pure state machine over vectors of shape (..., d); leading axes are replicates.

    Guarantee: it sees released (noisy) vectors only, so everything it computes is post-processing.
    """

    def start(self, initial: Tensor) -> Any:
        """The state before round 1, from x_1 of shape (..., d)."""
        ...

    def query(self, state: Any) -> Tensor:
        """The point x_t at which the silos are asked next, shape (..., d)."""
        ...

    def update(self, state: Any, released: Tensor, current: Round) -> Any:
        """The state after round `current.t`, in which `released` was the noisy mean of running sums."""
        ...

    def output(self, state: Any) -> Tensor:
        """The model a run that stopped here would publish, shape (..., d)."""
        ...


def stepped(point: Tensor, step: Scalar, direction: Tensor) -> Tensor:
    """point - step · direction, vectors (..., d), in one pass over memory."""
    if isinstance(step, Tensor):
        return torch.addcmul(point, step, direction, value=-1.0)
    return torch.sub(point, direction, alpha=step)


def project_to_ball(point: Tensor, radius: Scalar) -> Tensor:
    """The nearest point of the ball ‖x‖ ≤ radius around 0, for each leading index of `point` (..., d).

    `point` is the caller's own, and may be written into.
    """
    norm = torch.linalg.vector_norm(point, dim=-1, keepdim=True)
    if never_above(norm, radius):
        return point
    return point.mul_(
        norm.reciprocal_().mul_(radius).clamp_(max=1.0)
    )  # radius / 0 is inf, clamped to 1: 0 stays 0
