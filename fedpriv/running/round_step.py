"""One round, from a query to a noisy running sum, for a silo and for all silos at once in the vectorized engine.

rows and weights   participation       which records, and what one of them weighs
s_t, q_t           `RoundStep.summed`  clipped increments, added to the running sum
z_t                `fresh_vectors`     what the owner of the noise draws for the round
q_t + (B z)_t      `RoundStep.noisy`   what the round releases, or what a server with its own noise makes of it
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.estimators.gradients import Estimator
from fedpriv.estimators.round import Round
from fedpriv.estimators.running_sum import RunningSum, absorb
from fedpriv.mechanisms import Mechanism, MechanismState
from fedpriv.mechanisms.movement import check_movement
from fedpriv.objectives import Objective, Records, Slots
from fedpriv.randomness import KeyedNormal


class Read(NamedTuple):
    """What a round reads, of one silo or of all of them."""

    records: Records | None
    """(..., records, ...); None in a round without any."""
    weights: Tensor
    """Of every record, (records,) or (..., records); 0 of a row that does not count."""
    rows: tuple[tuple[int, int], ...]
    """The silos in the order of their records, as in `Slots`."""


def record_weight(share: float, batch: int, batches: int) -> float:
    """What one record weighs in a round that reads `batches` batches of `batch` records, expected if sampled.

    `share` is 1 in the silo's own mean, and the silo's weight p_i in the mean over silos.

    Guarantee: the denominator is public, however many records take part.
    """
    return share / (batch * max(1, batches))


def fresh_vectors(source: KeyedNormal, mechanism: Mechanism, size: int, owner: int, t: int) -> Tensor:
    """What `mechanism` wants of round t, with variance 1 and the source's type: (size,), or (draws, size)."""
    count = mechanism.draws(t)
    drawn = source.vector(size, owner, t) if count is None else source.nodes(size, owner, t, count)
    return torch.from_numpy(drawn)


@dataclass(frozen=True)
class RoundStep:
    """The parts of a run that meet in every round."""

    estimator: Estimator
    mechanism: Mechanism
    objective: Objective

    def check_moved(self, past: tuple[Tensor, ...], t: int, query: Tensor, where: str) -> None:
        """RunError if the query (..., d) moved farther than the mechanism's sensitivity allows for."""
        if t > 1 and (bound := self.mechanism.movement) is not None:
            check_movement(bound, past[0], query, where)

    def summed(self, state: RunningSum, current: Round, query: Tensor, read: Read) -> tuple[RunningSum, Tensor]:
        """The running sum after this round's records, and how many were clipped (...); see `absorb`."""
        objective = self.objective.at(Slots(current.t, read.rows))
        return absorb(state, current, query, objective, read.records, read.weights, self.estimator.memory)

    def noisy(
        self,
        total: Tensor,
        hidden: MechanismState,
        t: int,
        fresh: Tensor | None,
        amplitude: Tensor | None = None,
    ) -> tuple[Tensor, MechanismState]:
        """`total` (..., d) with row t of the noise that `fresh` vectors make, None where nobody adds any here.

        With an `amplitude` (..., 1) that row is multiplied by it: replicates can share unit noise, (1, d), since
        mechanisms are linear.
        """
        if fresh is None:
            return total, hidden
        row, hidden = self.mechanism.noise(hidden, t, fresh)
        return total + row if amplitude is None else torch.addcmul(total, amplitude, row), hidden
