"""Objectives: per-record increments over flat parameters."""

from fedpriv.objectives.base import Evaluation, Increment, Objective, Records
from fedpriv.objectives.softmax_regression import SoftmaxRegression

__all__ = ["Evaluation", "Increment", "Objective", "Records", "SoftmaxRegression"]
