"""The binary tree with more noise than exact counting asks for: as much as a paper's theorem."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedpriv.mechanisms.base import Sensitivity
from fedpriv.mechanisms.tree import BinaryTree
from fedpriv.mechanisms.workload import Workload


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
