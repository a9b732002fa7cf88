"""Noise mechanisms: factorizations of the running-sum workload, streamed one fresh vector a round."""

from fedpriv.mechanisms.base import Mechanism, MechanismState, Workload
from fedpriv.mechanisms.gaussian import IndependentGaussian

__all__ = ["IndependentGaussian", "Mechanism", "MechanismState", "Workload"]
