"""A variant of Algorithm 2's noise with trees inside each epoch; ours, not the paper's.

The paper composes the sums of the last N rounds from windows that slide over epoch boundaries.  Here the sums of
G and of Δ are prefixes of their own epoch, over the places p = 1 … N:

    Q_{q,p} = (1 - γ) (Q_{q-1,p} + prefix of Δ) + γ (prefix of G),   Q_{0,p} = prefix of G
    sum of G up to t = Q_{q,p} + Σ_{k<q} decay^{p + (q-1-k) N} Q_{k,N}

which one tree of N leaves serves: the node that ends at place p keeps a filtered noise from epoch to epoch.  A
record is in fewer nodes, the state is one ring of N vectors, and the noise is 15–23 % less.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedpriv.mechanisms.base import MechanismState
from fedpriv.mechanisms.differences import THREE_TREES, DifferenceTrees, Groups
from fedpriv.mechanisms.sensitivity import nodes
from fedpriv.mechanisms.sensitivity.windows import cover
from fedpriv.mechanisms.tree import BinaryTree
from fedpriv.mechanisms.workload import Floats, Workload

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AlignedDifferences(DifferenceTrees):
    """Fresh vectors of a round: of the r tree (if N > 1), of G, and from the second epoch on of Δ."""

    name: ClassVar[str] = "aligned-differences"
    words: ClassVar[str] = f"{THREE_TREES}, aligned with epochs"

    def squared_norms(self, workload: Workload) -> Groups:
        early, late, changed = np.zeros((3, self.rounds_per_epoch))
        for start in range(0, workload.rounds, self.rounds_per_epoch):
            clips = workload.clips[start : start + self.rounds_per_epoch]
            held = nodes.column_squared_norms(len(clips), self.decay)
            if start == 0:
                early[: len(held)] += clips**2 * held
            else:
                late[: len(held)] += clips**2 * held
                changed[: len(held)] += self.difference**2 * held
        return Groups(early, late, changed, self.residual_squared_norms(workload))

    def variance(self, workload: Workload) -> Floats:
        """By epochs: variances and covariance of the nodes' filtered noise n and of what earlier epochs left, c.

        The nodes of prefix p and those of the whole epoch overlap: there n and c are correlated.
        """
        self.check(workload)
        rounds_per_epoch, decay, stay = self.rounds_per_epoch, self.decay, 1.0 - self.mixing
        within = nodes.row_squared_norms(rounds_per_epoch, decay)
        place = np.arange(1, rounds_per_epoch + 1)
        whole = {end for _, end in cover(1, rounds_per_epoch)}
        shared = [
            sum(decay ** (2 * p + rounds_per_epoch - 2 * end) for _, end in cover(1, p) if end in whole)
            for p in range(1, rounds_per_epoch + 1)
        ]
        epochs = -(-workload.rounds // rounds_per_epoch)
        filtered, left, both = self.std_early**2, 0.0, 0.0
        rows = []
        for epoch in range(epochs):
            if epoch:
                left = decay ** (2 * rounds_per_epoch) * left + filtered + 2.0 * decay**rounds_per_epoch * both
                both = stay * (decay**rounds_per_epoch * both + filtered)
                filtered = stay**2 * (filtered + self.std_difference**2) + (self.mixing * self.std_late) ** 2
            carried = decay ** (2 * place) * within[-1] * left
            rows.append(filtered * within + carried + 2.0 * both * np.array(shared))
        total = np.concatenate(rows)[: workload.rounds]
        return total + self.std_residual**2 * nodes.row_squared_norms(workload.rounds, decay)

    def memory_vectors(self, workload: Workload) -> int:
        return max(sum(self._sizes(t)) for t in range(1, workload.rounds + 1))

    def draws(self, t: int) -> int:
        return 1 + int(self.rounds_per_epoch > 1) + int(t > self.rounds_per_epoch)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state: the r tree's stack, the filtered noise of the last N places, the epoch's stack.

        The bottom of the epoch's stack is what all earlier epochs left, decayed to the end of the last one.
        """
        stack, ring, within = self._unpacked(state, t - 1)
        vectors, residual = list(fresh), None
        if self.rounds_per_epoch > 1:
            residual, stack = BinaryTree(self.decay).noise(stack, t, self.std_residual * vectors.pop(0))
        if t <= self.rounds_per_epoch:
            own = self.std_early * vectors[0]
        else:
            changed = ring[0] + self.std_difference * vectors[1]
            own = (1.0 - self.mixing) * changed + self.mixing * (self.std_late * vectors[0])
        place = (t - 1) % self.rounds_per_epoch + 1
        length = place & -place
        kept = within[: len(within) - (length.bit_length() - 1)]
        noise = own.add(kept[-1], alpha=self.decay**length) if kept else own
        epoch = (noise,) if place == self.rounds_per_epoch else (*kept, noise)
        after = (*stack, *(*ring, own)[-self.rounds_per_epoch :], *epoch)
        return noise if residual is None else noise + residual, after

    def _sizes(self, t: int) -> tuple[int, int, int]:
        """Vectors of each part of the state after round t."""
        stack = t.bit_count() if self.rounds_per_epoch > 1 else 0
        return (
            stack,
            min(t, self.rounds_per_epoch),
            int(t >= self.rounds_per_epoch) + (t % self.rounds_per_epoch).bit_count(),
        )

    def _unpacked(self, state: MechanismState, t: int) -> tuple[MechanismState, MechanismState, MechanismState]:
        stack, ring, _ = self._sizes(t)
        return state[:stack], state[stack : stack + ring], state[stack + ring :]
