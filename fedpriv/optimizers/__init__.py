"""Server optimizers, one file each."""

from fedpriv.optimizers.anytime_sgd import AnytimeSGD
from fedpriv.optimizers.base import Optimizer
from fedpriv.optimizers.phased import PhasedSGD

__all__ = ["AnytimeSGD", "Optimizer", "PhasedSGD"]
