"""Noise mechanisms: factorizations of the running-sum workload, streamed one fresh vector a round."""

from fedpriv.mechanisms.aligned_differences import AlignedDifferences
from fedpriv.mechanisms.anchored import AnchoredSquareRoot
from fedpriv.mechanisms.base import Mechanism, MechanismState, Sensitivity
from fedpriv.mechanisms.buffered_toeplitz import BufferedToeplitz, LambdaCgd
from fedpriv.mechanisms.gaussian import IndependentGaussian
from fedpriv.mechanisms.inverse_square_root import BandedInverseSquareRoot
from fedpriv.mechanisms.leaf import LeafGaussian
from fedpriv.mechanisms.paper_tree import PaperTree
from fedpriv.mechanisms.phased import PhaseEnds
from fedpriv.mechanisms.scheduled import ScheduledGaussian
from fedpriv.mechanisms.sliding_differences import SlidingDifferences
from fedpriv.mechanisms.toeplitz import BandedSquareRoot
from fedpriv.mechanisms.tree import BinaryTree
from fedpriv.mechanisms.workload import Workload
from fedpriv.participation.separated import Separated

__all__ = [
    "AlignedDifferences",
    "AnchoredSquareRoot",
    "BandedInverseSquareRoot",
    "BandedSquareRoot",
    "BinaryTree",
    "BufferedToeplitz",
    "IndependentGaussian",
    "LambdaCgd",
    "LeafGaussian",
    "Mechanism",
    "MechanismState",
    "PaperTree",
    "PhaseEnds",
    "ScheduledGaussian",
    "Sensitivity",
    "Separated",
    "SlidingDifferences",
    "Workload",
]
