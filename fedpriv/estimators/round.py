"""What everyone knows about a round before the first one: its coefficients, its decay and its clip."""

from typing import NamedTuple

from fedpriv.replicates.columns import Scalar


class Split(NamedTuple):
    """How increments are taken apart at the queries that epochs start with; see `split_sum`."""

    rounds_per_epoch: int
    mixing: Scalar
    difference_clip: Scalar
    residual_clip: Scalar


class Local(NamedTuple):
    """A round in which silos go on from where their own releases brought them; see `local_steps`."""

    step: Scalar
    first: bool
    """Whether they start again from the query, which is their average."""


class Round(NamedTuple):
    """The public record of round t, read alike by silo, server and accountant.

    A silo sums its records' increments, `coefficients[k]` times the gradient at the k-th last query (0 is this
    round's), each clipped to norm `clip`, and keeps the running sum q_t = decay * q_{t-1} + mean increment.
    What is released estimates `scale` times the gradient at the query, so an optimizer that wants the gradient
    divides by `scale`.
    """

    t: int
    coefficients: tuple[float, ...]
    decay: float
    clip: Scalar
    scale: float
    split: Split | None = None
    local: Local | None = None

    @property
    def gradients(self) -> int:
        """Gradients of one record that are taken in this round."""
        if self.split is None:
            return len(self.coefficients)
        epoch, place = divmod(self.t - 1, self.split.rounds_per_epoch)
        return 1 + (2 if epoch else 0) + (2 if place else 0)

    @property
    def clips(self) -> tuple[float, ...]:
        """The norm bounds of this round's parts, one where it is taken as a whole."""
        if self.split is None:
            return (float(self.clip),)
        return float(self.clip), float(self.split.difference_clip), float(self.split.residual_clip)

    @property
    def largest(self) -> float:
        """A bound on the norm of what one record of weight 1 adds to the running sum, whatever the queries are.

        Parts build up: every epoch so far may have added its difference.
        """
        if self.split is None:
            return float(self.clip)
        epochs = (self.t - 1) // self.split.rounds_per_epoch
        return float(self.clip + epochs * self.split.difference_clip + self.split.residual_clip)
