"""What an objective is: clipped sums of per-record increments, and an evaluation."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.rounds import Scalar


class Records(NamedTuple):
    """A batch: features (..., B, features) and labels (..., B), integers of classes or floats of a regression."""

    features: Tensor
    labels: Tensor


class Increment(NamedTuple):
    """A weighted sum of clipped increments (..., d) and how many of the records were clipped (...)."""

    total: Tensor
    clipped: Tensor


class Evaluation(NamedTuple):
    """Mean loss (natural logarithm) and share of right predictions in [0, 1], each of shape (...).

    `accuracy` is None for a regression; `metrics` holds what else the objective knows, by name, each (...).
    """

    loss: Tensor
    accuracy: Tensor | None
    metrics: Mapping[str, Tensor] = MappingProxyType({})

    def share_right(self) -> Tensor:
        """The accuracy; RunError if the objective has none."""
        if self.accuracy is None:
            raise RunError("this objective is a regression: it has no accuracy to report; use a classification")
        return self.accuracy


def clip_factors(norm: Tensor, weights: Tensor, clip: Scalar) -> Tensor:
    """weights · min(1, clip / norm): what each record's increment is multiplied by, shape of `norm` (..., B)."""
    return weights * clip / norm.clamp(min=clip)


def count_clipped(norm: Tensor, weights: Tensor, clip: Scalar) -> Tensor:
    """How many increments (..., B) were above the clip or not finite; records of weight 0 are not there: (...)."""
    return (~(norm <= clip) & (weights != 0.0)).sum(-1)


class Objective(Protocol):
    """A loss with per-record gradients over flat parameters of length `dimension`."""

    @property
    def dimension(self) -> int: ...

    @property
    def lipschitz(self) -> float:
        """G: a bound on the norm of one record's gradient; inf if none is known."""
        ...

    @property
    def smoothness(self) -> float:
        """L: a bound on the Lipschitz constant of one record's gradient; inf if none is known."""
        ...

    def initial(self) -> Tensor:
        """x_1, shape (d,)."""
        ...

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        """Σ_b weights[b] · clip(Σ_k coefficients[k] ∇f(points[k]; record b), norm `clip`).

        `points[k]` has shape (..., d), `records` a batch axis B behind the same leading axes, `weights` (B,) or
        (..., B).  A record of weight 0 is not there: it does not count as clipped either.

        Guarantee: one record moves the sum by at most |weights[b]| · clip under zero-out and twice that under
        replace-one, for any points, records and loss.
        """
        ...

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        """Loss and accuracy of `point` (..., d) on records without leading axes."""
        ...
