"""Another look at a loss, as an algorithm or a measurement takes it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedpriv.objectives.base import Evaluation, Increment, Linear, Objective, Outer, Records, Slots
from fedpriv.replicates.columns import Scalar


@dataclass(frozen=True)
class View:
    """All of it is `base`'s, but for what a subclass says otherwise."""

    base: Objective

    @property
    def dimension(self) -> int:
        return self.base.dimension

    @property
    def lipschitz(self) -> float:
        return self.base.lipschitz

    @property
    def smoothness(self) -> float:
        return self.base.smoothness

    @property
    def convex(self) -> bool:
        return self.base.convex

    @property
    def convex_within(self) -> float:
        return self.base.convex_within

    def initial(self) -> Tensor:
        return self.base.initial()

    def at(self, slots: Slots) -> Objective:
        return self.base.at(slots)

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        return self.base.increment(points, coefficients, records, weights, clip)

    def per_record(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        places: Tensor,
        clip: float,
    ) -> Tensor:
        return self.base.per_record(points, coefficients, records, places, clip)

    @property
    def outer(self) -> Outer | None:
        return self.base.outer

    @property
    def linear(self) -> Linear | None:
        """None: another look may be at something else than the scores."""
        return None

    def gradient(self, point: Tensor, records: Records, weights: Tensor) -> Tensor:
        return self.base.gradient(point, records, weights)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self.base.losses(point, records)

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self.base.outputs(point, records)

    def evaluations(self, points: int) -> int:
        return self.base.evaluations(points)

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        return self.base.evaluate(point, records)
