"""Objectives: per-record increments over flat parameters."""

from fedpriv.objectives.base import Evaluation, Increment, Objective, Records, Slots
from fedpriv.objectives.phase_retrieval import PhaseRetrieval
from fedpriv.objectives.smoothed import SeededDirections, Smoothed
from fedpriv.objectives.softmax_regression import SoftmaxRegression

__all__ = [
    "Evaluation",
    "Increment",
    "Objective",
    "PhaseRetrieval",
    "Records",
    "SeededDirections",
    "Slots",
    "Smoothed",
    "SoftmaxRegression",
]
