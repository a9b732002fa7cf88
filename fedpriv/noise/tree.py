"""The binary tree mechanism with any decay, streamed with one fresh vector a round.

Sources: see `nodes`; the recursion over prefixes and the restart every `period` rounds are those of
Tran & Cutkosky 2022 (Algorithm 1) and Kornowski, Liu & Talwar (Algorithm 1), with their indices repaired.

The binary tree with more noise than exact counting asks for: as much as a paper's theorem.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED
from fedpriv.noise import nodes
from fedpriv.noise import sensitivity as participation
from fedpriv.noise.mechanism import Columns, Mechanism, MechanismState, Sensitivity, check_matches
from fedpriv.noise.sensitivity import tightened
from fedpriv.noise.workload import Floats, Workload
from fedpriv.participation.orders import Separated

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BinaryTree(Mechanism):
    """Noise on tree nodes; the fresh vector of round t belongs to the released node that ends at t.

    Guarantee: a record moves exactly the released nodes that hold one of its rounds.  B is square and
    invertible, so counting those nodes with their decays is the exact price of everything released.
    """

    name: ClassVar[str] = "tree"
    words: ClassVar[str] = "Gaussian noise on the nodes of a binary tree over the rounds"

    decay: float = field(default=1.0, metadata=SHARED)
    period: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay = {self.decay}: the decay of a running sum lies between 0 and 1")
        if self.period is not None and self.period < 1:
            raise InputError(f"period = {self.period}: a tree restarts after 1 or more rounds, or never (None)")

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        return cls(workload.decay, workload.period)

    def certified(self, workload: Workload) -> Sensitivity:
        check_matches(workload, self.decay, self.period)
        columns = self.columns(workload)
        if isinstance(workload.order, Separated):
            found = self._separated(workload, workload.order, columns.squared_norms)
            return found if workload.equal_clips else tightened(found, columns.inner, workload)

        def within(clips: Floats, rounds_per_epoch: int) -> Floats:
            return nodes.record_squared_norms(clips, rounds_per_epoch, self.decay)

        squared_norms = participation.record_squared_norms(workload, columns.squared_norms, within)
        return Sensitivity(math.sqrt(float(np.max(squared_norms))), True, "released nodes that hold the record")

    def columns(self, workload: Workload) -> Columns:
        inner = nodes.inner(workload.rounds, workload.block, self.decay)
        return Columns(self._over_periods(workload, nodes.column_squared_norms), inner)

    @property
    def fresh_std(self) -> float:
        """Of the node that ends at t, which every release has fresh."""
        return 1.0

    def variance(self, workload: Workload) -> Floats:
        check_matches(workload, self.decay, self.period)
        return self._over_periods(workload, nodes.row_squared_norms)

    def memory_vectors(self, workload: Workload) -> int:
        return (workload.block + 1).bit_length() - 1

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds the noise of the prefixes that end at the set bits of t, longest node first."""
        place = t if self.period is None else (t - 1) % self.period + 1
        if place == 1:
            return fresh, (fresh,)
        length = place & -place
        kept = state[: len(state) - (length.bit_length() - 1)]
        if not kept:
            return fresh, (fresh,)
        noise = fresh.add(kept[-1], alpha=self.decay**length)
        return noise, (*kept, noise)

    def _separated(self, workload: Workload, pattern: Separated, columns: Floats) -> Sensitivity:
        if pattern.single_pass:
            worst = float(np.max(workload.clips**2 * columns))
            return Sensitivity(math.sqrt(worst), True, "one participation: its nodes")
        squared_norm = nodes.separated_squared_norm(
            workload.rounds, workload.block, self.decay, pattern.most, pattern.min_separation
        )
        bound = float(np.max(workload.clips)) * math.sqrt(squared_norm)
        return Sensitivity(bound, False, "counted level by level, as if every clip were the largest")

    def _over_periods(self, workload: Workload, squared_norms: nodes.Energies) -> Floats:
        """The squared norms of every round: full periods are alike, the last may be shorter."""
        full, rest = divmod(workload.rounds, workload.block)
        of_rest = [squared_norms(rest, self.decay)] if rest else []
        return np.concatenate([np.tile(squared_norms(workload.block, self.decay), full), *of_rest])


@dataclass(frozen=True)
class PaperTree(BinaryTree):
    """A tree whose sensitivity is charged as at least `least` times the largest clip."""

    name: ClassVar[str] = "paper-tree"
    words: ClassVar[str] = (
        "Gaussian noise on the nodes of a binary tree over the rounds, sized by the paper's constants"
    )

    least: float = 0.0

    def certified(self, workload: Workload) -> Sensitivity:
        exact = super().certified(workload)
        if (charged := self.least * float(np.max(workload.clips))) <= exact.value:
            return exact
        return Sensitivity(charged, False, "the paper's count of nodes")

    def counted(self, workload: Workload) -> Sensitivity:
        return super().certified(workload)
